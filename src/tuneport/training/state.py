"""The state of an unfinished training run in one file, so that the run continues with the same bits after a kill.

The file is replaced whole, and has the conditions of the run and a SHA-256 of all that it holds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..io.checkpoint import open_checkpoint, write_safetensors
from ..io.fingerprint import digest_of
from ..io.output import new_file
from ..io.tensors import describe
from ..processes import by_first, ranks

FORMAT = "tuneport-training"
SHARE = 10  # saving takes at most one tenth of the time


@dataclass
class StateFile:
    """A state at `path`, saved at most every `every` seconds; 0 saves after each step.

    `conditions` is a fingerprint of all that determines the run: the state of another run is refused.
    """

    path: Path
    conditions: str
    every: float = 60.0
    _last: float = field(default_factory=time.monotonic)
    _pause: float = 0.0

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The saved tensors and values, for all processes; None if there are none."""
        return by_first(self._load)

    def _load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.is_file():
            return None
        stored = open_checkpoint(self.path)
        try:
            if stored.metadata["format"] != FORMAT:
                raise ValueError
            text, digest = stored.metadata["content"], stored.metadata["sha256"]
            content: dict[str, Any] = json.loads(text)
            conditions = content.pop("conditions")
        except (KeyError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path} is not the state of a training run. Start without `resume`.") from error
        if conditions != self.conditions:
            raise CheckpointError(
                f"{self.path} is the state of a training run with other inputs or options. Give the same ones, or "
                "start without `resume`."
            )
        tensors = {name: stored[name] for name in stored}
        if digest_of(text, tensors) != digest:
            raise CheckpointError(f"{self.path} is damaged: its checksum does not fit. Start without `resume`.")
        return tensors, content

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last save."""
        return time.monotonic() - self._last >= max(self.every, self._pause)

    def save(self, tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> None:
        """Replace the file, in the first process."""
        if not ranks().first:
            return
        started = time.monotonic()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        specs = {name: describe(tensors, name) for name in tensors}
        text = json.dumps({**content, "conditions": self.conditions})
        stated = {"format": FORMAT, "content": text, "sha256": digest_of(text, tensors)}
        with new_file(self.path, overwrite=True) as temporary:
            write_safetensors(temporary, tensors, specs, stated)
        self._last = time.monotonic()
        self._pause = SHARE * (self._last - started) if self.every else 0.0
