"""What an unfinished run has done, in one file, so that it continues with the same bits after a kill.

The file is replaced whole, and has the conditions of the run and a SHA-256 of all that it holds.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..processes import by_first
from .checkpoint import open_checkpoint, write_safetensors
from .fingerprint import digest_of
from .output import new_file
from .tensors import describe

FORMAT = "tuneport-state"
VALUES = "values"  # the tensor that holds JSON
SHARE = 10  # saving takes at most one tenth of the time


@dataclass
class StateFile:
    """A state at `path`, which is due at most every `every` seconds; 0 after each step.

    `conditions` are JSON values that determine the run: the state of another run is refused.
    """

    path: Path
    conditions: Any
    every: float = 60.0
    _last: float = field(default_factory=time.monotonic)
    _pause: float = 0.0

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last save."""
        return time.monotonic() - self._last >= max(self.every, self._pause)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The saved tensors and values, for all processes; None if there are none."""
        return by_first(self._load)

    def _load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.is_file():
            return None
        stored = open_checkpoint(self.path)
        stated, conditions = stored.metadata, self._hashed()
        if stated.get("format") != FORMAT or VALUES not in stored:
            raise CheckpointError(f"{self.path} is not the state of a run. Start without `resume`.")
        if stated.get("conditions") != conditions:
            raise CheckpointError(
                f"{self.path} is the state of a run with other inputs or options. Give the same ones, or start without "
                "`resume`."
            )
        tensors = {name: stored[name] for name in stored}
        if digest_of(conditions, tensors) != stated.get("sha256"):
            raise CheckpointError(f"{self.path} is damaged: its checksum does not fit. Start without `resume`.")
        return tensors, json.loads(tensors.pop(VALUES).numpy().tobytes())

    def save(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replace the file, in the first process."""
        started = time.monotonic()
        text = bytearray(json.dumps(values).encode())
        by_first(lambda: self._save({**tensors, VALUES: torch.frombuffer(text, dtype=torch.uint8)}))
        self._last = time.monotonic()
        self._pause = SHARE * (self._last - started) if self.every else 0.0

    def _save(self, tensors: Mapping[str, Tensor]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        specs, conditions = {name: describe(tensors, name) for name in tensors}, self._hashed()
        stated = {"format": FORMAT, "conditions": conditions, "sha256": digest_of(conditions, tensors)}
        with new_file(self.path, overwrite=True) as temporary:
            write_safetensors(temporary, tensors, specs, stated)

    def _hashed(self) -> str:
        return hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()
