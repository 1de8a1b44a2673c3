"""The state of an unfinished collection of texts, in one file, so that it continues with the same bytes after a kill.

The file holds written texts; whoever finishes the collection removes it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..io.output import new_file
from ..io.untrusted import parse_json

FORMAT = "tuneport-texts"


@dataclass
class Rounds:
    """All that a round needs to know of the rounds before it. A text stands with its answer, which may be None."""

    temperature: float
    round: int = 0
    asked: int = 0
    extra: int = 0  # rounds since there are enough texts
    kept: list[tuple[str, str | None]] = field(default_factory=list)
    spare: list[tuple[str, str | None]] = field(default_factory=list)  # had no place beside the thin answers
    judged: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def good(self) -> int:
        """The number of texts that passed all filters."""
        return len(self.kept) + len(self.spare)

    def count(self, name: str, reasons: Sequence[str | None]) -> None:
        """Count the texts that a filter saw and dropped."""
        self.judged[name] = self.judged.get(name, 0) + len(reasons)
        counts = Counter(self.dropped.get(name, {})) + Counter(why for why in reasons if why is not None)
        self.dropped[name] = dict(sorted(counts.items()))


@dataclass(frozen=True)
class TextState:
    """The file with the state of an unfinished collection, replaced whole after each round.

    `conditions` are plain values that determine the texts beside the arguments of `collect`, such as the fingerprints
    of the models: the state of another run is refused.
    """

    path: Path
    conditions: Mapping[str, Any] = field(default_factory=dict)

    def load(self, conditions: Mapping[str, Any]) -> Rounds | None:
        """The saved state; None if there is none."""
        if not self.path.is_file():
            return None
        try:
            stored = parse_json(self.path.read_bytes())
            text, digest = stored["content"], stored["sha256"]
            if stored["format"] != FORMAT or hashlib.sha256(text.encode()).hexdigest() != digest:
                raise ValueError
            content: dict[str, Any] = parse_json(text)
            other = content.pop("conditions") != self._all(conditions)
            found = Rounds(**content)
            found.kept, found.spare = ([(text, given) for text, given in rows] for rows in (found.kept, found.spare))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} is damaged. Start without `resume`.") from error
        if other:
            raise CheckpointError(
                f"{self.path} holds texts that were written with other inputs or options. Give the same ones, or start "
                "without `resume`."
            )
        return found

    def save(self, conditions: Mapping[str, Any], rounds: Rounds) -> None:
        """Replace the file."""
        text = json.dumps({**asdict(rounds), "conditions": self._all(conditions)})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"format": FORMAT, "content": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
        with new_file(self.path, overwrite=True) as temporary:
            temporary.write_text(json.dumps(stored), encoding="utf-8")

    def _all(self, conditions: Mapping[str, Any]) -> str:
        text = json.dumps([conditions, self.conditions], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()
