"""Model weights on disk: read lazily, written as a stream.

Rules kept here: opening reads headers only and a tensor is read when asked for; a pickle is never allowed
to run code; an index cannot point outside its folder; writing holds one tensor at a time. Whatever goes
wrong is one CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from tuneport.errors import CheckpointError, first_of
from tuneport.output import PathLike as PathLike
from tuneport.output import check_new_file as check_new_file
from tuneport.output import check_new_folder as check_new_folder
from tuneport.output import new_file as new_file
from tuneport.output import new_folder as new_folder
from tuneport.output import sync

# In the order in which safetensors itself ranks them: its files hold the last ones first.
_DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _DTYPE_NAMES.items() if hasattr(torch, name)
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_PIECE = 2**22  # numbers that are worked on at a time


class UnknownTensorError(CheckpointError, KeyError):
    """A name that a checkpoint or task vector does not hold; a KeyError too, as a Mapping promises."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor: enough to plan a file without having the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe(tensors: Mapping[str, torch.Tensor], name: str) -> TensorSpec:
    """Return the TensorSpec of one tensor, unread where the mapping has `shape(name)` and `dtype(name)`.

    >>> describe({"weight": torch.zeros(2, 3)}, "weight")
    TensorSpec(shape=(2, 3), dtype=torch.float32)
    """
    shape, dtype = getattr(tensors, "shape", None), getattr(tensors, "dtype", None)
    if callable(shape) and callable(dtype):
        return TensorSpec(tuple(shape(name)), dtype(name))
    tensor = tensors[name]
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


class Checkpoint(Mapping[str, torch.Tensor]):
    """A model's weights as a lazy Mapping, sorted by name; made by `open_checkpoint`.

    `checkpoint[name]` reads one tensor, on the CPU and in its stored dtype, and keeps nothing: asking twice
    reads twice. A file that vanished or changed since the opening is an error, not a wrong tensor.
    """

    def __init__(self, path: Path, files: Mapping[str, _SafetensorsFile | _PickleFile], prefix: str = "") -> None:
        self.path = path
        self._file_of = dict(sorted(files.items()))
        self._prefix = prefix  # of the names in the files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file(name).read(self._prefix + name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors in {len(self.files)} files)"

    @property
    def files(self) -> tuple[Path, ...]:
        """Paths of the weight files, sorted."""
        return tuple(sorted({file.path for file in self._file_of.values()}))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the weight files, merged."""
        return {key: text for file in self._file_of.values() for key, text in file.metadata.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return self._file(name).specs[self._prefix + name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor, without reading it."""
        return self._file(name).specs[self._prefix + name].dtype

    def without_prefix(self, prefix: str) -> Checkpoint:
        """The same tensors under shorter names, where all names begin so, as distributed training leaves them."""
        if not all(name.startswith(prefix) for name in self):
            return self
        files = {name.removeprefix(prefix): file for name, file in self._file_of.items()}
        return Checkpoint(self.path, files, self._prefix + prefix)

    def _file(self, name: str) -> _SafetensorsFile | _PickleFile:
        if name not in self._file_of:
            raise UnknownTensorError(f"{self.path} holds no tensor {name!r}; it holds {first_of(self, 5)}.")
        return self._file_of[name]


class _SafetensorsFile:
    """One safetensors file: its header in memory, its tensors on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp(path)
        with self._readable():
            handle: Any = safe_open(str(path), framework="pt")
            self.metadata: dict[str, str] = dict(handle.metadata() or {})
            self.specs = {name: self._spec(name, handle.get_slice(name)) for name in handle.keys()}  # noqa: SIM118
            self._offsets = _offsets(path)

    def read(self, name: str) -> torch.Tensor:
        # Plain reads: the pages of a memory map would count as memory beside the tensor itself.
        _check_unchanged(self.path, self._stamp)
        shape, dtype = self.specs[name]
        content = torch.empty(self.specs[name].nbytes, dtype=torch.uint8)
        with self._readable(), self.path.open("rb") as file:
            file.seek(self._offsets[name])
            if file.readinto(content.numpy().data) != len(content):
                raise OSError(f"{name} is cut off")
        return content.view(dtype).reshape(shape)

    def _spec(self, name: str, header: Any) -> TensorSpec:
        code = str(header.get_dtype())
        if code not in _DTYPES:
            raise CheckpointError(f"{self.path} stores {name} as {code}; known are {', '.join(_DTYPES)}.")
        return TensorSpec(tuple(header.get_shape()), _DTYPES[code])

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            if isinstance(error, SafetensorError) and _is_pointer(self.path):
                reason = "is a Git LFS pointer, not the weights. Fetch them with git lfs pull."
            else:
                reason = f"cannot be read as safetensors ({error}). Download or save it again."
            raise CheckpointError(f"{self.path} {reason}") from error


class _PickleFile:
    """One pickled state dict, memory-mapped and loaded without running any code that it may hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp(path)
        self.metadata: dict[str, str] = {}
        state = self._load()
        odd = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
        if odd or not state:
            found = f"{len(odd)} entries that are no tensors: {first_of(odd)}" if odd else "nothing"
            raise CheckpointError(f"{path} is not a state dict: it holds {found}. Save model.state_dict().")
        self._state: dict[str, torch.Tensor] = {str(name): tensor for name, tensor in state.items()}
        self.specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in self._state.items()}
        size = path.stat().st_size
        lying = [f"{name} {spec.shape}" for name, spec in self.specs.items() if spec.nbytes > size]
        if lying:
            raise CheckpointError(
                f"{path} is refused: {len(lying)} of its tensors claim more than its {size} bytes: {first_of(lying)}."
            )

    def read(self, name: str) -> torch.Tensor:
        _check_unchanged(self.path, self._stamp)
        return self._state[name].detach().clone(memory_format=torch.contiguous_format)

    def _load(self) -> dict[Any, Any]:
        try:
            # Files from before torch 1.6 are not zip files and cannot be mapped.
            mapped = zipfile.is_zipfile(self.path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            # torch's own text advises to load the file with its code, so it is not passed on.
            if "GLOBAL" in str(error):
                raise CheckpointError(
                    f"{self.path} is refused: this pickle holds more than tensors and could run code. "
                    "Save the model as safetensors where it was made, and use that."
                ) from error
            raise CheckpointError(f"{self.path} is not a file of torch.save. Download or save it again.") from error
        except Exception as error:  # a malformed pickle makes the loader raise nearly anything
            reason = str(error).split("\n", 1)[0] or type(error).__name__
            raise CheckpointError(
                f"{self.path} cannot be read as a state dict ({reason}). Download or save it again."
            ) from error
        for key in ("state_dict", "model"):  # a training checkpoint: the weights among other things
            if isinstance(state, dict) and isinstance(state.get(key), dict):
                state = state[key]
                break
        if not isinstance(state, dict):
            raise CheckpointError(
                f"{self.path} is not a state dict but a {type(state).__name__}. Save model.state_dict()."
            )
        return state


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor of a safetensors file begins; the file has been checked by the library itself."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _check_unchanged(path: Path, stamp: tuple[int, int, int]) -> None:
    if _stamp(path) != stamp:
        raise CheckpointError(f"{path} has changed since it was opened. Open it again.")


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(23) == b"version https://git-lfs"


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} is gone or cannot be read ({error.strerror}). Restore it.") from error
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Open a weight file or a model folder, reading headers only.

    Takes a `.safetensors` file, a folder with `model.safetensors` or its sharded index, and pickled state
    dicts (`.bin`, `.pt`, `pytorch_model.bin` and its index) as long as they hold nothing but tensors.
    """
    path = Path(path)
    if path.is_dir():
        weights = _weights_in(path)
        if weights.name.endswith(".index.json"):
            return Checkpoint(path, _open_index(weights))
    elif path.exists():
        weights = path
    else:
        raise CheckpointError(f"{path} does not exist. Expected a model folder or a .safetensors file.")
    file = _open_file(weights)
    return Checkpoint(path, dict.fromkeys(file.specs, file))


def _open_file(path: Path) -> _SafetensorsFile | _PickleFile:
    if path.suffix == ".safetensors":
        return _SafetensorsFile(path)
    if path.suffix in _PICKLES:
        return _PickleFile(path)
    raise CheckpointError(
        f"{path} is not a weight file: its name ends in {path.suffix or 'nothing'}, "
        f"expected .safetensors or one of {', '.join(_PICKLES)}."
    )


def _weights_in(folder: Path) -> Path:
    """Choose the weight file or index of a model folder, as from_pretrained would."""
    for name in (*_WEIGHTS, *_PICKLED_WEIGHTS):
        if (folder / name).is_file():
            return folder / name
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"{folder} is an adapter, not a model. Give a model folder, or merge it first.")
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        names = first_of(file.name for file in found)
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files and no {_WEIGHTS[1]}: {names}. "
            "Give one of the files, or add the index."
        )
    if (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} has a config.json but no weights: expected one of "
            f"{', '.join((*_WEIGHTS, *_PICKLED_WEIGHTS))}. Download or save it again."
        )
    raise CheckpointError(
        f"{folder} is not a model: no config.json or safetensors in it. "
        "Give the folder that save_pretrained wrote, or a .safetensors file."
    )


def read_json(path: Path, what: str, limit: int = 20 * 10**6) -> Any:
    """Read a JSON file, or raise a CheckpointError that says `what` it was to be; larger than `limit` is refused."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path} is refused: {size / 1e6:.0f} MB are too many for {what}.")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{path} is not {what}: {reason}. Download or save it again.") from error


def _open_index(index: Path) -> dict[str, _SafetensorsFile | _PickleFile]:
    """Open every shard that an index names, and check that each tensor is where the index says."""
    content = read_json(index, "an index", limit=10**8)
    try:
        shard_of = {str(name): str(shard) for name, shard in content["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index: expected JSON with a weight_map of tensor to file names. "
            "Download or save the model again."
        ) from error
    names = sorted(set(shard_of.values()))
    outside = [repr(name) for name in names if name in ("", ".", "..") or re.search(r"[/\\:\0]", name)]
    if outside:
        raise CheckpointError(
            f"{index} is refused: its entries must be names of files beside it, "
            f"but it has {first_of(outside)}. Use a copy from a source that you trust."
        )
    missing = [name for name in names if not os.path.isfile(index.parent / name)]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} weight files of {index.parent} are missing: "
            f"{first_of(missing)}. Download or copy them again."
        )
    shards = {name: _open_file(index.parent / name) for name in names}
    absent = [f"{name} ({shard})" for name, shard in shard_of.items() if name not in shards[shard].specs]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of {len(shard_of)} tensors that {index} lists are not in their files: "
            f"{first_of(absent)}. Download or save the model again."
        )
    return {name: shards[shard] for name, shard in shard_of.items()}


def check_finite(tensors: Mapping[str, torch.Tensor], names: Iterable[str] | None = None) -> None:
    """Raise a CheckpointError that names the tensors holding NaN or infinity, reading one at a time."""
    chosen = list(tensors if names is None else names)
    bad = []
    for name in chosen:
        if not _is_weight(describe(tensors, name)):
            continue
        if not all_finite(tensors[name]):
            bad.append(name)
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(chosen)} tensors of {_name_of(tensors, 'the model')} hold NaN or infinite "
            f"values: {first_of(bad)}. Use a checkpoint from before training diverged."
        )


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity; one-byte floats are widened first."""
    return all(
        bool(torch.isfinite(piece.float() if piece.dtype.itemsize == 1 else piece).all()) for piece in pieces(tensor)
    )


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that together are the tensor, each of a few million numbers: working on them needs little memory.

    >>> [tuple(piece.shape) for piece in pieces(torch.zeros(3, 2**22))]
    [(1, 4194304), (1, 4194304), (1, 4194304)]
    """
    if tensor.ndim == 0 or tensor.numel() <= _PIECE:
        yield tensor
        return
    rows = max(1, _PIECE * len(tensor) // tensor.numel())
    yield from tensor.split(rows)


def same_structure(
    base: Mapping[str, torch.Tensor], finetuned: Mapping[str, torch.Tensor], exclude: Sequence[str] = ()
) -> None:
    """Raise one CheckpointError with every tensor that is missing on a side or differs in shape.

    `exclude` holds glob patterns of names to leave out. Integer tensors (position ids, counters) are no
    part of a fine-tune and are left out too.
    """
    specs = [
        {name: describe(side, name) for name in side if not any(fnmatchcase(name, glob) for glob in exclude)}
        for side in (finetuned, base)
    ]
    here, there = ({name: spec for name, spec in side.items() if _is_weight(spec)} for side in specs)
    one, other = _name_of(finetuned, "the fine-tuned model"), _name_of(base, "the base")
    total = len({**here, **there})
    differing = {
        name: f"{name} {here[name].shape} vs {there[name].shape}"
        for name in here
        if name in there and here[name].shape != there[name].shape
    }
    extra = {name: name for name in here if name not in base}
    missing = {name: name for name in there if name not in finetuned}
    findings = [
        f"{len(found)} of {total} tensors of {holder} {are} {other_holder}: {first_of(found.values())}."
        for found, holder, are, other_holder in (
            (differing, one, "differ in shape from", other),
            (extra, one, "are not in", other),
            (missing, other, "are not in", one),
        )
        if found
    ]
    if findings:
        lengths = {_vocabularies(here[name], there[name]) for name in differing}
        if len(lengths) == 1 and (found := lengths.pop()) is not None:
            findings.append(
                f"If these are vocabularies of {found[0]} and {found[1]} entries, one of them padded, give both the "
                "same length with resize_token_embeddings."
            )
        raise CheckpointError(
            " ".join([*findings, _exclusion_of([*differing, *extra, *missing], {**here, **there}, one, other)])
        )


def _vocabularies(one: TensorSpec, other: TensorSpec) -> tuple[int, int] | None:
    """The lengths of two tables with equal rows, and many of them, as vocabularies have; else None."""
    alike = len(one.shape) == 2 and one.shape[1:] == other.shape[1:] and min(one.shape[0], other.shape[0]) >= 256
    return (one.shape[0], other.shape[0]) if alike else None


def _is_weight(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _exclusion_of(names: Sequence[str], among: Collection[str], one: str, other: str) -> str:
    """What to pass to leave these names out: their modules, or, where those are many, what holds nothing else."""
    patterns = sorted({f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names})
    if len(patterns) > 3 and 2 * len(names) < len(among):
        others = set(among) - set(names)
        patterns = sorted({_widest(name, others) for name in names})
    if len(patterns) > 3:
        return f"Check that {one} was fine-tuned from {other}."
    return "Exclude them with " + " ".join(f'--exclude "{pattern}"' for pattern in patterns) + "."


def _widest(name: str, others: Collection[str]) -> str:
    """The shortest beginning of a name that none of the others shares, as a pattern."""
    parts = name.split(".")
    beginnings = (".".join(parts[:length]) + "." for length in range(1, len(parts)))
    return next((f"{start}*" for start in beginnings if not any(o.startswith(start) for o in others)), name)


def _name_of(tensors: object, default: str) -> str:
    path = getattr(tensors, "path", None)
    return default if path is None else f"{path}{'/' if Path(path).is_dir() else ''}"


def parse_size(size: int | str) -> int:
    """Return a size in bytes, from a number or from text such as "5GB" (decimal) or "8GiB" (binary).

    >>> parse_size("20KB"), parse_size("1.5 GiB"), parse_size(7)
    (20000, 1610612736, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(I?)B)?\s*", str(size).upper())
    if match is None or float(match[1]) == 0:
        raise CheckpointError(f"size {size!r} is not a number of bytes. Expected something like 5GB or 8GiB.")
    power = "KMGT".find(match[2]) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def write_checkpoint(
    folder: PathLike,
    tensors: Mapping[str, torch.Tensor],
    *,
    describe: Callable[[str], TensorSpec] | None = None,
    max_shard_size: int | str = "5GB",
    metadata: Mapping[str, str] | None = None,
    stem: str = "model",
) -> list[Path]:
    """Write tensors as from_pretrained expects them, one at a time, and return the files written.

    One `model.safetensors` where it fits, else shards and their index. The files are planned from shapes and
    dtypes: `describe(name)`, else the mapping's own `shape` and `dtype`, else from reading each tensor once
    more. Metadata is {"format": "pt"} unless given. Use it inside `new_folder`: by itself it is not atomic.
    """
    folder, limit = Path(folder), parse_size(max_shard_size)
    specs = {name: (describe or _describer(tensors))(name) for name in tensors}
    shards: list[dict[str, TensorSpec]] = [{}]
    room = limit
    for name, spec in specs.items():
        if spec.nbytes > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = spec
        room -= spec.nbytes
    numbered = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    files = [f"{stem}.safetensors"] if len(shards) == 1 else numbered
    metadata = {"format": "pt"} if metadata is None else metadata
    for file, shard in zip(files, shards, strict=True):
        write_safetensors(folder / file, tensors, shard, metadata)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        files.append(f"{stem}.safetensors.index.json")
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / files[-1]).write_text(text, encoding="utf-8")
        sync(folder / files[-1])
    return [folder / file for file in files]


def write_safetensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    specs: Mapping[str, TensorSpec],
    metadata: Mapping[str, str],
) -> None:
    """Write the tensors that `specs` names to one safetensors file, holding one of them at a time.

    The bytes are those of `safetensors.torch.save_file`, which needs all tensors at once: header length
    (8 bytes, little-endian), header (JSON, padded with spaces to 8 bytes), then the raw data, the widest
    dtypes first so that every tensor is aligned. Tensors may share memory and need not be contiguous.
    """
    unknown = [f"{name} ({spec.dtype})" for name, spec in specs.items() if spec.dtype not in _CODES]
    if unknown:
        raise CheckpointError(f"{path} cannot hold {first_of(unknown)}: safetensors has no such dtype. Cast them.")
    order = sorted(specs, key=lambda name: (-_RANK[specs[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        end = offset + specs[name].nbytes
        shape = list(specs[name].shape)
        header[name] = {"dtype": _CODES[specs[name].dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in order:
            tensor = tensors[name].detach().to("cpu").contiguous()
            found = TensorSpec(tuple(tensor.shape), tensor.dtype)
            if found != specs[name]:
                raise CheckpointError(
                    f"tensor {name} came as {found.shape} {found.dtype}, "
                    f"but was announced as {specs[name].shape} {specs[name].dtype}."
                )
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
        file.flush()
        os.fsync(file.fileno())


def _describer(tensors: Mapping[str, torch.Tensor]) -> Callable[[str], TensorSpec]:
    return lambda name: describe(tensors, name)


def file_digests(paths: Iterable[PathLike]) -> dict[str, str]:
    """Return the SHA-256 of each file, read in pieces, under its path as given."""
    digests = {}
    for path in paths:
        digest = hashlib.sha256()
        try:
            with Path(path).open("rb") as file:
                while piece := file.read(2**20):
                    digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
        digests[os.fspath(path)] = digest.hexdigest()
    return digests
