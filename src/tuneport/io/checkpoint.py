"""The weights of a model on disk, in one file or in shards with an index: read lazily, written as a stream.

Opening reads headers only; an index cannot point outside its folder; a pickle never runs code. A file that vanished or
changed since it was opened is an error, not a wrong tensor. Every failure is one CheckpointError.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..config.options import parse_bytes
from ..errors import CheckpointError, brief, first_of, reraised, shortened
from .output import RECORD, PathLike, sync
from .tensors import LazyTensors, Tensors, TensorSpec, describe
from .untrusted import check_pickle, check_regular, parse_json

LARGEST_JSON = 20 * 10**6  # bytes of a configuration
LARGEST_INDEX = 10**8  # bytes of an index or a run record
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # as transformers looks
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LARGEST_HEADER = 25 * 10**6  # bytes
_MOST_DIMENSIONS = 64  # of a tensor in torch

# In the order in which safetensors ranks them: its files store the last of them first.
_DTYPE_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32",
    "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip
_DTYPES: dict[str, torch.dtype] = {c: getattr(torch, name) for c, name in _DTYPE_NAMES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_RANK = {dtype: rank for rank, dtype in enumerate(_CODES)}


class Checkpoint(LazyTensors):
    """A model's weights by name, in sorted order: `checkpoint[name]` reads one, on the CPU and in its stored dtype."""

    def __init__(self, path: Path, files: Mapping[str, WeightFile], prefix: str = "") -> None:
        super().__init__(
            sorted(files), lambda name: files[name].read(prefix + name), lambda name: files[name].specs[prefix + name]
        )
        self.path = path
        self.holder = str(path)
        self._file_of = files
        self._prefix = prefix  # of the names in the files

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self)} tensors in {len(self.files)} files)"

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({file.path for file in self._file_of.values()}))

    @property
    def metadata(self) -> dict[str, str]:
        return {key: text for file in self._file_of.values() for key, text in file.metadata.items()}

    def without_prefix(self, prefix: str) -> Checkpoint:
        """The same tensors without a prefix that all names share (such as `module.` of distributed training)."""
        if not all(name.startswith(prefix) for name in self):
            return self
        files = {name.removeprefix(prefix): file for name, file in self._file_of.items()}
        return Checkpoint(self.path, files, self._prefix + prefix)


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Open a weight file or a model folder: safetensors, or pickles that hold only tensors."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. Expected a model folder or a .safetensors file.")
    weights = _weights_in(path) if path.is_dir() else path
    if weights.name.endswith(".index.json") and path.is_dir():
        return Checkpoint(path, _open_index(weights))
    file = _open_file(weights)
    return Checkpoint(path, dict.fromkeys(file.specs, file))


def _weights_in(folder: Path) -> Path:
    """The weight file or index of a model folder, as from_pretrained would choose it."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.safetensors"))
    if (folder / "adapter_config.json").is_file():
        wrong = "is an adapter, not a model. Give a model folder, or merge it first."
    elif len(found) == 1:
        return found[0]
    elif found:
        names = first_of(file.name for file in found)
        wrong = (
            f"holds {len(found)} safetensors files and no {_INDEX}: {names}. Give one of the files, or add the index."
        )
    elif (folder / "config.json").is_file():
        wrong = f"has a config.json but no weights: expected one of {', '.join(_WEIGHTS)}. Download or save it again."
    else:
        wrong = (
            "is not a model: no config.json or safetensors in it. "
            "Give the folder that save_pretrained wrote, or a .safetensors file."
        )
    raise CheckpointError(f"{folder} {wrong}")


def _open_index(index: Path) -> dict[str, WeightFile]:
    """Open every shard that an index names, and check that each shard holds its tensors."""
    content = read_json(index, "an index", limit=LARGEST_INDEX)
    try:
        shard_of = {str(name): str(shard) for name, shard in content["weight_map"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        expected = "expected JSON with a weight_map of tensor to file names. Download or save the model again."
        raise CheckpointError(f"{index} is not an index: {expected}") from error
    names, folder = sorted(set(shard_of.values())), index.parent
    if outside := [repr(name) for name in names if name in ("", ".", "..") or re.search(r"[/\\:\0]", name)]:
        raise CheckpointError(
            f"{index} is refused: its entries must be names of files in the same folder, "
            f"but it has {first_of(outside)}. Use a copy from a source that you trust."
        )
    if missing := [name for name in names if not os.path.isfile(folder / name)]:
        lost = f"{len(missing)} of {len(names)} weight files of {folder} are missing: {first_of(missing)}"
        raise CheckpointError(f"{lost}. Download or copy them again.")
    shards = {name: _open_file(folder / name) for name in names}
    if absent := [f"{name} ({shard})" for name, shard in shard_of.items() if name not in shards[shard].specs]:
        raise CheckpointError(
            f"{len(absent)} of {len(shard_of)} tensors that {index} lists are not in their files: "
            f"{first_of(absent)}. Download or save the model again."
        )
    return {name: shards[shard] for name, shard in shard_of.items()}


def _open_file(path: Path) -> WeightFile:
    check_regular(path)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in _PICKLES:
        return PickleFile(path)
    raise CheckpointError(
        f"{path} is not a weight file: its name ends in {path.suffix or 'nothing'}, "
        f"expected .safetensors or one of {', '.join(_PICKLES)}."
    )


class SafetensorsFile:
    """One safetensors file: its header in memory, its tensors on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp(path)
        with self._readable(), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            content = file.read(min(length, _LARGEST_HEADER + 1))
            if len(content) > _LARGEST_HEADER:
                raise CheckpointError(
                    f"{path} is refused: a file of weights may have {_LARGEST_HEADER} bytes of header."
                )
            safe_open(str(path), framework="pt")  # checks the header
            with reraised(f"{path} is refused: its header cannot be read"):
                header: dict[str, Any] = parse_json(content)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.specs = {name: self._spec(name, entry) for name, entry in header.items()}
        self._offsets = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}

    def read(self, name: str) -> torch.Tensor:
        # Plain reads: the pages of a memory map would count as memory in addition to the tensor.
        _stamp(self.path, self._stamp)
        spec = self.specs[name]
        content = torch.empty(spec.nbytes, dtype=torch.uint8)
        left = content.numpy().data
        with self._readable(), self.path.open("rb", buffering=0) as file:
            file.seek(self._offsets[name])
            while left:  # one call reads at most 2 GiB
                count = file.readinto(left)
                if not count:
                    raise OSError(f"{name} is cut off")
                left = left[count:]
        return content.view(spec.dtype).reshape(spec.shape)

    def _spec(self, name: str, entry: Mapping[str, Any]) -> TensorSpec:
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if len(shape) > _MOST_DIMENSIONS:
            given = f"{shortened(name)} has {len(shape)} dimensions"
            raise CheckpointError(f"{self.path} is refused: {given}; expected at most {_MOST_DIMENSIONS}.")
        if dtype not in _DTYPES:
            raise CheckpointError(f"{self.path} stores {shortened(name)} as {dtype}; known are {', '.join(_DTYPES)}.")
        return TensorSpec(shape, _DTYPES[dtype])

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            reason = f"cannot be read as safetensors ({brief(error)}). Download or save it again."
            if isinstance(error, SafetensorError):
                with self.path.open("rb") as file:
                    if file.read(23) == b"version https://git-lfs":
                        reason = "is a Git LFS pointer, not the weights. Fetch them with git lfs pull."
            raise CheckpointError(f"{self.path} {reason}") from error


class PickleFile:
    """One pickled state dict, memory-mapped and loaded without running code from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp(path)
        self.metadata: dict[str, str] = {}
        state = self._load()
        odd = [str(name) for name, value in state.items() if not isinstance(value, torch.Tensor)]
        if odd or not state:
            found = f"{len(odd)} entries that are not tensors: {first_of(odd)}" if odd else "nothing"
            raise CheckpointError(f"{path} is not a state dict: it holds {found}. Save model.state_dict().")
        self._state: dict[str, torch.Tensor] = {str(name): tensor for name, tensor in state.items()}
        if special := [name for name, tensor in self._state.items() if not _is_plain(tensor)]:
            raise CheckpointError(
                f"{path} is refused: {len(special)} of its {len(state)} tensors are nested, sparse, quantised or hold "
                f"no numbers: {first_of(special)}. Save plain tensors."
            )
        self.specs = {name: describe(self._state, name) for name in self._state}
        size = path.stat().st_size
        if lying := [f"{name} {spec.shape}" for name, spec in self.specs.items() if spec.nbytes > size]:
            given = f"{len(lying)} of its tensors claim more than its {size} bytes: {first_of(lying)}"
            raise CheckpointError(f"{path} is refused: {given}.")

    def read(self, name: str) -> torch.Tensor:
        _stamp(self.path, self._stamp)
        return self._state[name].detach().clone(memory_format=torch.contiguous_format)

    def _load(self) -> dict[Any, Any]:
        check_pickle(self.path)
        try:
            # Files from before torch 1.6 are not zip files and cannot be mapped.
            mapped = zipfile.is_zipfile(self.path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        except Exception as error:  # a malformed pickle makes the loader raise nearly anything
            reason = f"cannot be read as a state dict ({brief(error)}). Download or save it again."
            if isinstance(error, pickle.UnpicklingError):  # its text advises loading the file with its code
                reason = "was not written by torch.save. Download or save it again."
                if "GLOBAL" in str(error):
                    reason = (
                        "is refused: this pickle holds more than tensors and could run code. "
                        "Save the model as safetensors where it was made, and use that."
                    )
            raise CheckpointError(f"{self.path} {reason}") from error
        if not isinstance(state, dict):
            kind = type(state).__name__
            raise CheckpointError(f"{self.path} is not a state dict but a {kind}. Save model.state_dict().")
        parts = (state.get(key) for key in ("state_dict", "model"))  # of a training checkpoint
        return next((part for part in parts if isinstance(part, dict)), state)


def _is_plain(tensor: torch.Tensor) -> bool:
    special = tensor.is_nested or tensor.is_meta or tensor.is_quantized
    return not special and tensor.layout is torch.strided and tensor.ndim <= _MOST_DIMENSIONS


WeightFile = SafetensorsFile | PickleFile


def _stamp(path: Path, before: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """What identifies the content of a file; raise if it is not as `before`."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} is gone or cannot be read ({error.strerror}). Restore it.") from error
    now = (status.st_ino, status.st_size, status.st_mtime_ns)
    if before not in (None, now):
        raise CheckpointError(f"{path} has changed since it was opened. Open it again.")
    return now


def write_checkpoint(
    folder: PathLike, tensors: Tensors, *, max_shard_size: int | str = "5GB", stem: str = "model"
) -> list[Path]:
    """Write tensors as from_pretrained expects them, one at a time, and return the files written.

    One `model.safetensors` where it fits, else shards and their index; `stem` names the files. A tensor larger than
    `max_shard_size` gets its own file. It is not atomic: use it inside `new_folder`.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    folder = Path(folder)
    specs = {name: describe(tensors, name) for name in tensors}
    shards = split_state_dict_into_shards_factory(
        specs,
        get_storage_size=lambda each: each.nbytes,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=parse_bytes(max_shard_size, "max_shard_size"),
    )
    files = [folder / name for name in shards.filename_to_tensors]
    for file in files:
        chosen = {name: specs[name] for name in shards.filename_to_tensors[file.name]}
        write_safetensors(file, tensors, chosen, {"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        files.append(folder / f"{stem}.safetensors.index.json")
        files[-1].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        sync(files[-1])
    return files


def write_safetensors(
    path: Path, tensors: Tensors, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> None:
    """Write the tensors that `specs` names to one safetensors file, holding one of them at a time.

    The file is byte-identical to that of `safetensors.torch.save_file`, which needs all tensors at once: header length
    (8 bytes, little-endian), header (JSON, padded with spaces to 8 bytes), then the raw data, the widest
    dtypes first so that every tensor is aligned. Tensors may share memory and need not be contiguous.
    """
    if unknown := [f"{name} ({spec.dtype})" for name, spec in specs.items() if spec.dtype not in _CODES]:
        raise CheckpointError(f"{path} cannot hold {first_of(unknown)}: safetensors has no such dtype. Cast them.")
    order = sorted(specs, key=lambda name: (-_RANK[specs[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in order:
        shape, dtype, _ = spec = specs[name]
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, start + spec.nbytes]}
        start += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in order:
            tensor = tensors[name].detach().to("cpu").contiguous()
            if (tuple(tensor.shape), tensor.dtype) != (specs[name].shape, specs[name].dtype):
                expected = f"{specs[name].shape} {specs[name].dtype}"
                raise CheckpointError(f"tensor {name} is {tuple(tensor.shape)} {tensor.dtype}, expected {expected}.")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path, what: str, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes, or a CheckpointError that says `what` was expected."""
    check_regular(path)
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path} is refused: {size / 1e6:.0f} MB are too many for {what}.")
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not {what}: {brief(error)}. Download or save it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not {what}: expected a JSON object.")
    return content


def read_record(folder: Path) -> dict[str, Any]:
    return read_json(folder / RECORD, "a run record", limit=LARGEST_INDEX)
