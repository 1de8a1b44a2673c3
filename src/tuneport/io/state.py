"""What an unfinished run has done, in one file, so that it continues with the same bits after a kill.

The file is replaced whole. It holds tensors, JSON values, the conditions of the run, and a SHA-256 of all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, first_of
from ..processes import by_first
from .checkpoint import open_checkpoint, write_safetensors
from .fingerprint import digest_of
from .output import new_file
from .tensors import describe

FORMAT = "tuneport-state-3"  # those of an older version are refused
CONTENT = "content"  # the tensor that holds JSON
SHARE = 10  # saving takes at most one tenth of the time


@contextmanager
def damage_reported(path: Path) -> Iterator[None]:
    """Turn what goes wrong with content that only another program can have written into one line."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged. Start over without `resume`.") from error


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
        values = self.check()
        stored = open_checkpoint(self.path)
        return {name: stored[name] for name in stored if name != CONTENT}, values

    def check(self) -> dict[str, Any]:
        """The values in the file; a CheckpointError if it is damaged, or of a run under other conditions."""
        stored = open_checkpoint(self.path)
        if stored.metadata.get("format") != FORMAT or CONTENT not in stored:
            raise CheckpointError(f"{self.path} is not the state of a run. Start over without `resume`.")
        with damage_reported(self.path):
            if digest_of(FORMAT, stored) != stored.metadata["sha256"]:
                raise ValueError
            content = json.loads(stored[CONTENT].numpy().tobytes())
            changes = list(_changes(content["conditions"], self.conditions))
            values: dict[str, Any] = content["values"]
        if changes:
            raise CheckpointError(
                f"{self.path} cannot be resumed: {first_of(changes, 3)}. Give the same inputs and options, or start "
                "over without `resume`."
            )
        return values

    def save(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replace the file, in the first process."""
        started = time.monotonic()
        text = bytearray(json.dumps({"conditions": self.conditions, "values": values}).encode())
        by_first(lambda: self._save({**tensors, CONTENT: torch.frombuffer(text, dtype=torch.uint8)}))
        self._last = time.monotonic()
        self._pause = SHARE * (self._last - started) if self.every else 0.0

    def _save(self, tensors: Mapping[str, Tensor]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        specs = {name: describe(tensors, name) for name in tensors}
        with new_file(self.path, overwrite=True) as temporary:
            write_safetensors(temporary, tensors, specs, {"format": FORMAT, "sha256": digest_of(FORMAT, tensors)})


def _changes(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """The paths at which two nests of plain values differ, with both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in dict.fromkeys((*old, *new)):
            yield from _changes(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
    elif (was := json.dumps(old)) != (now := json.dumps(new)):
        brief = (t if len(t) <= 60 else f"{t[:40]} ... ({len(t)} characters)" for t in (was, now))
        yield "{} was {} and is {}".format(where, *brief)
