"""Scores of written answers, without any model."""

from __future__ import annotations

import json
from collections.abc import Sequence


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
