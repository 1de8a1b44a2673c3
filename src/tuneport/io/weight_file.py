"""One file of weights: a safetensors file or a pickled state dict, read tensor by tensor, written as a stream.

A pickle never runs code. A file that vanished or changed since it was opened is an error, not a wrong tensor.
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, brief, first_of, reraised, shortened
from .tensors import Tensors, TensorSpec, describe
from .untrusted import check_pickle, check_regular, parse_json

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
_LARGEST_HEADER = 25 * 10**6  # bytes
_MOST_DIMENSIONS = 64  # of a tensor in torch
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_weights(path: Path) -> WeightFile:
    """Open a weight file by its suffix: safetensors or a pickle."""
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
        """Read one tensor from disk."""
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
        if len(entry["shape"]) > _MOST_DIMENSIONS:
            given = f"{shortened(name)} has {len(entry['shape'])} dimensions"
            raise CheckpointError(f"{self.path} is refused: {given}; expected at most {_MOST_DIMENSIONS}.")
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{self.path} stores {shortened(name)} as {entry['dtype']}; known are {', '.join(_DTYPES)}."
            )
        return TensorSpec(tuple(entry["shape"]), _DTYPES[entry["dtype"]])

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
        without = [name for name, tensor in self._state.items() if not _is_plain(tensor)]
        if without:
            raise CheckpointError(
                f"{path} is refused: {len(without)} of its {len(state)} tensors are nested, sparse, quantised or hold "
                f"no numbers: {first_of(without)}. Save plain tensors."
            )
        self.specs = {name: describe(self._state, name) for name in self._state}
        size = path.stat().st_size
        lying = [f"{name} {spec.shape}" for name, spec in self.specs.items() if spec.nbytes > size]
        if lying:
            raise CheckpointError(
                f"{path} is refused: {len(lying)} of its tensors claim more than its {size} bytes: {first_of(lying)}."
            )

    def read(self, name: str) -> torch.Tensor:
        """Copy one tensor out of the mapped file."""
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
        except pickle.UnpicklingError as error:
            # torch's own message advises loading the file with its code, so it is not passed on.
            if "GLOBAL" in str(error):
                raise CheckpointError(
                    f"{self.path} is refused: this pickle holds more than tensors and could run code. "
                    "Save the model as safetensors where it was made, and use that."
                ) from error
            raise CheckpointError(f"{self.path} was not written by torch.save. Download or save it again.") from error
        except Exception as error:  # a malformed pickle makes the loader raise nearly anything
            raise CheckpointError(
                f"{self.path} cannot be read as a state dict ({brief(error)}). Download or save it again."
            ) from error
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


def write_safetensors(
    path: Path, tensors: Tensors, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
) -> None:
    """Write the tensors that `specs` names to one safetensors file, holding one of them at a time.

    The file is byte-identical to that of `safetensors.torch.save_file`, which needs all tensors at once: header length
    (8 bytes, little-endian), header (JSON, padded with spaces to 8 bytes), then the raw data, the widest
    dtypes first so that every tensor is aligned. Tensors may share memory and need not be contiguous.
    """
    unknown = [f"{name} ({spec.dtype})" for name, spec in specs.items() if spec.dtype not in _CODES]
    if unknown:
        raise CheckpointError(f"{path} cannot hold {first_of(unknown)}: safetensors has no such dtype. Cast them.")
    order = sorted(specs, key=lambda name: (-_RANK[specs[name].dtype], name))
    with path.open("wb") as file:
        file.write(_header(order, specs, metadata))
        for name in order:
            tensor = tensors[name].detach().to("cpu").contiguous()
            found, expected = TensorSpec(tuple(tensor.shape), tensor.dtype), specs[name]
            if found != expected:
                what = f"{expected.shape} {expected.dtype}"
                raise CheckpointError(f"tensor {name} is {found.shape} {found.dtype}, expected {what}.")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
        file.flush()
        os.fsync(file.fileno())


def _header(order: Sequence[str], specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file, up to the data of the tensors in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        end = offset + specs[name].nbytes
        shape = list(specs[name].shape)
        header[name] = {"dtype": _CODES[specs[name].dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded
