"""The weights of a model on disk, in one file or in shards with an index: read lazily, written as a stream.

Opening reads headers only; an index cannot point outside its folder. Every failure is one CheckpointError.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..config import parse_bytes
from ..errors import CheckpointError, brief, first_of
from .output import RECORD, PathLike, sync
from .tensors import LazyTensors, Tensors, describe
from .untrusted import check_regular, parse_json
from .weight_file import WeightFile, open_weights, write_safetensors

LARGEST_JSON = 20 * 10**6  # bytes of a configuration
SETTLED = 2 * 10**9  # nanoseconds after its last change, from which on a file shows a further one
LARGEST_INDEX = 10**8  # bytes of an index or a run record
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # as transformers looks


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
        """Paths of the weight files, sorted."""
        return tuple(sorted({file.path for file in self._file_of.values()}))

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the weight files, merged."""
        return {key: text for file in self._file_of.values() for key, text in file.metadata.items()}

    def without_prefix(self, prefix: str) -> Checkpoint:
        """The same tensors without a prefix that all names share (such as `module.` of distributed training)."""
        if not all(name.startswith(prefix) for name in self):
            return self
        files = {name.removeprefix(prefix): file for name, file in self._file_of.items()}
        return Checkpoint(self.path, files, self._prefix + prefix)


def open_checkpoint(path: PathLike) -> Checkpoint:
    """Open a weight file or a model folder, reading headers only: safetensors, or pickles that hold only tensors."""
    path = Path(path)
    if path.is_dir():
        weights = _weights_in(path)
        if weights.name.endswith(".index.json"):
            return Checkpoint(path, _open_index(weights))
    elif path.exists():
        weights = path
    else:
        raise CheckpointError(f"{path} does not exist. Expected a model folder or a .safetensors file.")
    file = open_weights(weights)
    return Checkpoint(path, dict.fromkeys(file.specs, file))


def _weights_in(folder: Path) -> Path:
    """Choose the weight file or index of a model folder, as from_pretrained would."""
    for name in _WEIGHTS:
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
            f"{folder} holds {len(found)} safetensors files and no {_INDEX}: {names}. "
            "Give one of the files, or add the index."
        )
    if (folder / "config.json").is_file():
        expected = f"expected one of {', '.join(_WEIGHTS)}"
        raise CheckpointError(f"{folder} has a config.json but no weights: {expected}. Download or save it again.")
    raise CheckpointError(
        f"{folder} is not a model: no config.json or safetensors in it. "
        "Give the folder that save_pretrained wrote, or a .safetensors file."
    )


def read_json(path: Path, what: str, limit: int = LARGEST_JSON) -> Any:
    """Read a JSON file of at most `limit` bytes, or raise a CheckpointError that says `what` was expected."""
    check_regular(path)
    try:
        size = path.stat().st_size
        if size > limit:
            raise CheckpointError(f"{path} is refused: {size / 1e6:.0f} MB are too many for {what}.")
        return parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not {what}: {brief(error)}. Download or save it again.") from error


def read_object(path: Path, what: str, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """The JSON object in a file, or a CheckpointError that says `what` was expected."""
    content = read_json(path, what, limit)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not {what}: expected a JSON object.")
    return content


def read_record(folder: Path) -> Any:
    """The run record of an output."""
    return read_json(folder / RECORD, "a run record", limit=LARGEST_INDEX)


def _open_index(index: Path) -> dict[str, WeightFile]:
    """Open every shard that an index names, and check that each shard holds its tensors."""
    content = read_json(index, "an index", limit=LARGEST_INDEX)
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
            f"{index} is refused: its entries must be names of files in the same folder, "
            f"but it has {first_of(outside)}. Use a copy from a source that you trust."
        )
    missing = [name for name in names if not os.path.isfile(index.parent / name)]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(names)} weight files of {index.parent} are missing: "
            f"{first_of(missing)}. Download or copy them again."
        )
    shards = {name: open_weights(index.parent / name) for name in names}
    absent = [f"{name} ({shard})" for name, shard in shard_of.items() if name not in shards[shard].specs]
    if absent:
        raise CheckpointError(
            f"{len(absent)} of {len(shard_of)} tensors that {index} lists are not in their files: "
            f"{first_of(absent)}. Download or save the model again."
        )
    return {name: shards[shard] for name, shard in shard_of.items()}


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


def file_digests(paths: Iterable[PathLike]) -> dict[str, str]:
    """Return the SHA-256 of each file, under its path as given; a file that has not changed is read once."""
    digests = {}
    for path in paths:
        try:
            found = os.stat(path)
            state = (found.st_size, found.st_mtime_ns, found.st_ino)
            settled = time.time_ns() - found.st_mtime_ns > SETTLED  # else it may change again at the same time
            digest = _digest if settled else _digest.__wrapped__
            digests[os.fspath(path)] = digest(os.path.abspath(path), *state)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    return digests


@lru_cache(maxsize=4096)
def _digest(path: str, *_: int) -> str:
    """The SHA-256 of a file in a state: its size, when it was changed, and its number on the disk."""
    from huggingface_hub.utils.sha import sha_fileobj

    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


def digest_of(text: str, tensors: Tensors) -> str:
    """SHA-256 of a text and of tensors with their names, shapes and dtypes, read one at a time."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
