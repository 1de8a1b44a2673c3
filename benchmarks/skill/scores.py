"""Scores of written answers, without any model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path


def exact(got: Sequence[str], wanted: Sequence[str]) -> list[bool]:
    """Of each answer, whether it is the wanted one; blanks around it do not count."""
    return [one.strip() == other.strip() for one, other in zip(got, wanted, strict=True)]


def slots(text: str) -> set[tuple[str, str]]:
    """The fields of a JSON object; none if the text is not one.

    >>> sorted(slots('{"intent": "PlayMusic", "year": 1999}'))
    [('intent', 'PlayMusic'), ('year', '1999')]
    """
    try:
        found = json.loads(text)
    except ValueError:
        return set()
    return {(key, str(value)) for key, value in found.items()} if isinstance(found, dict) else set()


def slot_f1(got: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 in percent over the fields of all answers; a field counts if its name and its value are right."""
    pairs = [(slots(one), slots(other)) for one, other in zip(got, wanted, strict=True)]
    hits = sum(len(one & other) for one, other in pairs)
    total = sum(len(one) + len(other) for one, other in pairs)
    return 200.0 * hits / total if total else 0.0


def flips(before: Sequence[bool], now: Sequence[bool]) -> int:
    """Samples that were right before and are wrong now."""
    return sum(old and not new for old, new in zip(before, now, strict=True))


def percent(right: Sequence[bool]) -> float:
    """The share of right answers."""
    return 100.0 * sum(right) / len(right)


def overlap(texts: Sequence[str], tests: Sequence[str], run: int = 13) -> float:
    """The share of texts, in %, that have so many words in a row of a test sample.

    >>> overlap(["Who was it?", "a b c d"], ["x b c d y"], run=3)
    50.0
    """

    def runs(text: str) -> set[tuple[str, ...]]:
        words = re.findall(r"\w+", text.lower())
        return {tuple(words[at : at + run]) for at in range(len(words) - run + 1)}

    known = set[tuple[str, ...]]().union(*map(runs, tests))
    return 100 * sum(not known.isdisjoint(runs(text)) for text in texts) / max(len(texts), 1)


def overlap_of_written(folder: Path, tests: Sequence[str]) -> dict[str, float]:
    """The same of the texts that models wrote for what is in a folder; nothing if none were written, or kept."""
    path = folder / "texts.jsonl"
    if not path.exists():
        return {}
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    return {"overlap": round(overlap(texts, tests), 3)}
