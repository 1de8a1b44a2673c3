"""The statistics of an unfinished run, saved so that the run can continue after it was killed.

The hidden folder `.OUT.tuneport-work`, next to the output, holds one safetensors file per stage of measuring, with the
conditions of the run and a checksum in its metadata. Sums are restored to the bit; a file that was changed is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, first_of
from ..io.checkpoint import open_checkpoint, write_safetensors
from ..io.fingerprint import digest_of
from ..io.output import new_file
from ..io.tensors import describe
from ..maps.statistics import CrossCovariance, Statistics, WeightGradient

FORMAT = "tuneport-statistics"
VERSION = "3"
SAVE_EVERY = 60.0  # seconds
_SHARE = 10  # saving takes at most one tenth of the time

Conditions = Mapping[str, Any]


def fingerprint(conditions: Conditions) -> str:
    """SHA-256 of plain values, independent of the order of keys.

    >>> fingerprint({"seed": 0, "samples": 8}) == fingerprint({"samples": 8, "seed": 0})
    True
    """
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Work:
    """The work folder of one output. `conditions` are the JSON values that determine the statistics.

    `every` is the least number of seconds between two saves; 0 saves after each batch. Use it only while the
    output is locked.
    """

    out: Path
    conditions: Conditions
    every: float = SAVE_EVERY

    @property
    def folder(self) -> Path:
        return self.out.parent / f".{self.out.name}.tuneport-work"

    @property
    def training_state(self) -> Path:
        """Where the state of a training that follows the measuring is saved."""
        return self.folder / "training" / "state.safetensors"

    def exists(self) -> bool:
        """Whether an earlier run saved something here."""
        return bool(self._saved()) or self.training_state.is_file()

    def check(self) -> None:
        """Raise a CheckpointError if an earlier run measured under other conditions."""
        for file in self._saved():
            if changes := list(_changes(_content(file)["conditions"], self.conditions)):
                raise CheckpointError(
                    f"{self.out} cannot be resumed: {first_of(changes, 3)}. Give the same inputs and options, or start "
                    "over without `resume`."
                )

    def load(self, stage: str, device: torch.device) -> Statistics | None:
        """The saved statistics of a stage; None if there are none."""
        file = self._file(stage)
        return load_statistics(file, device) if file.is_file() else None

    def keeper(self, stage: str) -> Callable[[Statistics], None]:
        """A callback for the statistics after each batch, which saves them at most every `every` seconds."""
        saved, pause = time.monotonic(), self.every

        def keep(statistics: Statistics) -> None:
            nonlocal saved, pause
            started = time.monotonic()
            if started - saved < pause:
                return
            self.make_folder()
            save_statistics(self._file(stage), statistics, self.conditions)
            saved = time.monotonic()
            pause = self.every and max(self.every, _SHARE * (saved - started))

        return keep

    def make_folder(self) -> None:
        """Make the folder, which must not be a symbolic link."""
        if self.folder.is_symlink():
            raise CheckpointError(f"{self.folder} is a symbolic link, and tuneport does not write to it. Remove it.")
        self.folder.mkdir(exist_ok=True)

    def remove(self) -> None:
        """Remove the folder: the output is complete, or a run starts over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _saved(self) -> list[Path]:
        """The complete files; a hidden file was left by a run that was killed while saving."""
        return sorted(self.folder.glob("[!.]*.safetensors"))

    def _file(self, stage: str) -> Path:
        return self.folder / f"{stage}.safetensors"


def save_statistics(path: Path, statistics: Statistics, conditions: Conditions) -> None:
    """Write statistics to one safetensors file, replacing it whole; a shared covariance is stored once."""
    distinct = {id(covariance): covariance for covariance in statistics.covariances.values()}
    numbers = {key: number for number, key in enumerate(distinct)}
    covariances = [covariance.state() for covariance in distinct.values()]
    gradients = {layer: gradient.state() for layer, gradient in statistics.weight_gradients.items()}
    parts = {f"covariance.{number}": tensors for number, (_, tensors) in enumerate(covariances)}
    parts |= {f"gradient.{number}": tensors for number, (_, tensors) in enumerate(gradients.values())}
    tensors = {f"{prefix}.{name}": tensor for prefix, named in parts.items() for name, tensor in named.items()}
    content = {
        "conditions": conditions,
        "covariances": [values for values, _ in covariances],
        "keys": [[*key, numbers[id(covariance)]] for key, covariance in statistics.covariances.items()],
        "gradients": {layer: samples for layer, (samples, _) in gradients.items()},
        "samples": statistics.samples,
        "passes": dict(statistics.passes),
    }
    specs = {name: describe(tensors, name) for name in tensors}
    text = json.dumps(content)
    stated = {"format": FORMAT, "version": VERSION, "content": text, "sha256": digest_of(text, tensors)}
    with new_file(path, overwrite=True) as temporary:
        write_safetensors(temporary, tensors, specs, stated)


def load_statistics(path: Path, device: torch.device | str = "cpu") -> Statistics:
    """Read what `save_statistics` wrote."""
    content, stored = _content(path), open_checkpoint(path)

    def reader(prefix: str) -> Callable[[str], Tensor]:
        return lambda name: stored[f"{prefix}.{name}"].to(device)

    with _damage_reported(path):
        covariances = [
            CrossCovariance.from_state(values, reader(f"covariance.{number}"))
            for number, values in enumerate(content["covariances"])
        ]
        gradients = {
            layer: WeightGradient.from_state(int(samples), reader(f"gradient.{number}"))
            for number, (layer, samples) in enumerate(content["gradients"].items())
        }
        keyed = {(layer, signal): covariances[number] for layer, signal, number in content["keys"]}
        return Statistics(keyed, gradients, int(content["samples"]), dict(content["passes"]))


def _content(path: Path) -> dict[str, Any]:
    stored = open_checkpoint(path)
    metadata = stored.metadata
    if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} does not hold statistics of this version of tuneport. Start over without `resume`."
        )
    with _damage_reported(path):
        if digest_of(metadata["content"], stored) != metadata["sha256"]:
            raise ValueError
        content: dict[str, Any] = json.loads(metadata["content"])
        if not isinstance(content["conditions"], dict):
            raise TypeError
        return content


@contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged. Start over without `resume`.") from error


def _changes(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """The paths at which two nests of plain values differ, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _changes(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif (was := json.dumps(old)) != (now := json.dumps(new)):
        brief = (t if len(t) <= 60 else f"{t[:40]} ... ({len(t)} characters)" for t in (was, now))
        yield "{} was {} and is {}".format(where, *brief)
