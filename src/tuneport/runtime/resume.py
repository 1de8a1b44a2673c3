"""What an unfinished run has saved, so that it can continue after it was killed.

The hidden folder `.OUT.tuneport-work`, next to the output, holds one file per stage of measuring, and in `training` the
states of what follows it. Sums are restored to the bit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..io.state import StateFile, damage_reported
from ..maps.statistics import CrossCovariance, Statistics, WeightGradient

Conditions = Mapping[str, Any]


def fingerprint(conditions: Conditions) -> str:
    """SHA-256 of plain values, independent of the order of keys.

    >>> fingerprint({"seed": 0, "samples": 8}) == fingerprint({"samples": 8, "seed": 0})
    True
    """
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Work:
    """The work folder of one output. `conditions` are the JSON values that determine the result.

    `every` is the least number of seconds between two saves; 0 saves after each batch. Use it only while the
    output is locked.
    """

    out: Path
    conditions: Conditions
    every: float = 60.0

    @property
    def folder(self) -> Path:
        return self.out.parent / f".{self.out.name}.tuneport-work"

    def exists(self) -> bool:
        """Whether an earlier run saved something here; a hidden file was left by one that was killed while saving."""
        return any(self.folder.rglob("[!.]*.safetensors"))

    def check(self) -> None:
        """Raise a CheckpointError if an earlier run measured under other conditions."""
        for file in sorted(self.folder.glob("[!.]*.safetensors")):
            StateFile(file, self.conditions).check()

    def state(self, name: str, **more: Any) -> StateFile:
        """The file of a stage of measuring, or of a part of the training; `more` are further conditions."""
        if self.folder.is_symlink():
            raise CheckpointError(f"{self.folder} is a symbolic link, and tuneport does not write to it. Remove it.")
        return StateFile(self.folder / f"{name}.safetensors", {**self.conditions, **more}, self.every)

    def remove(self) -> None:
        """Remove the folder: the output is complete, or a run starts over."""
        shutil.rmtree(self.folder, ignore_errors=True)


def save_statistics(state: StateFile, statistics: Statistics) -> None:
    """Save statistics; a shared covariance is stored once."""
    distinct = {id(covariance): covariance for covariance in statistics.covariances.values()}
    numbers = {key: number for number, key in enumerate(distinct)}
    covariances = [covariance.state() for covariance in distinct.values()]
    gradients = {layer: gradient.state() for layer, gradient in statistics.weight_gradients.items()}
    parts = {f"covariance.{number}": tensors for number, (_, tensors) in enumerate(covariances)}
    parts |= {f"gradient.{number}": tensors for number, (_, tensors) in enumerate(gradients.values())}
    tensors = {f"{prefix}.{name}": tensor for prefix, named in parts.items() for name, tensor in named.items()}
    values = {
        "covariances": [about for about, _ in covariances],
        "keys": [[*key, numbers[id(covariance)]] for key, covariance in statistics.covariances.items()],
        "gradients": {layer: samples for layer, (samples, _) in gradients.items()},
        "samples": statistics.samples,
        "passes": dict(statistics.passes),
    }
    state.save(tensors, values)


def load_statistics(state: StateFile, device: torch.device | str = "cpu") -> Statistics | None:
    """Read what `save_statistics` wrote; None if there is nothing."""
    if (found := state.load()) is None:
        return None
    tensors, values = found

    def reader(prefix: str) -> Callable[[str], Tensor]:
        return lambda name: tensors.pop(f"{prefix}.{name}").to(device)

    with damage_reported(state.path):
        covariances = [
            CrossCovariance.from_state(about, reader(f"covariance.{number}"))
            for number, about in enumerate(values["covariances"])
        ]
        gradients = {
            layer: WeightGradient.from_state(int(samples), reader(f"gradient.{number}"))
            for number, (layer, samples) in enumerate(values["gradients"].items())
        }
        keyed = {(layer, signal): covariances[number] for layer, signal, number in values["keys"]}
        return Statistics(keyed, gradients, int(values["samples"]), dict(values["passes"]))
