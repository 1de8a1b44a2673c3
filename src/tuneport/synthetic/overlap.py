"""How much written texts share with others: with own samples, which they may repeat, and with test samples."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence

WORD = re.compile(r"\w+")
RUN = 13  # words in a row that two texts do not share by chance


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, in lower case and without punctuation."""
    return tuple(WORD.findall(text.lower()))


def overlap_of(texts: Sequence[str], own: Sequence[str], test: Sequence[str] = ()) -> dict[str, float | None]:
    """The longest run of words shared with own samples, and the share of texts with a run of 13 of a test sample.

    Without test samples nobody knows that share.
    """
    shared = share_with_run(texts, test) if test else None
    return {"longest_run": longest_run(texts, own), "test_overlap": shared}


def longest_run(texts: Iterable[str], others: Iterable[str]) -> int:
    """The most words in a row that one of the texts shares with one of the others.

    >>> longest_run(["Who wrote the Iliad?"], ["who wrote the first opera", "the Iliad"])
    3
    """
    first, second = [words_of(text) for text in texts], [words_of(text) for text in others]
    most = min(max(map(len, first), default=0), max(map(len, second), default=0))

    def absent(length: int) -> bool:  # a shared run holds all shorter ones
        return _runs(first, length).isdisjoint(_runs(second, length))

    return bisect_left(range(1, most + 1), True, key=absent)


def share_with_run(texts: Sequence[str], others: Iterable[str], length: int = RUN) -> float:
    """The share of texts that have `length` words in a row in common with one of the others."""
    known = _runs([words_of(text) for text in others], length)
    hits = sum(not known.isdisjoint(_runs([words_of(text)], length)) for text in texts)
    return hits / len(texts) if texts else 0.0


def shares(answers: Sequence[str]) -> dict[str, float]:
    """The share of each answer, the most frequent first.

    >>> shares(["place", "number", "place", "place"])
    {'place': 0.75, 'number': 0.25}
    """
    counts = Counter(answers)
    return {answer: counts[answer] / len(answers) for answer in sorted(counts, key=lambda a: (-counts[a], a))}


def _runs(texts: Iterable[Sequence[str]], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + length]) for words in texts for at in range(len(words) - length + 1)}
