"""Questions with answers to choose from: choices of their own, or the words for their classes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, first_of
from .chat import prompt_of
from .dataset import Dataset, LazySequence

WAYS = 3  # to name the right choice: its place, its letter, its text
GIVEN = 3  # samples that have an answer, if it is one of a kind that many share
SHARED = 0.5  # the least share of samples with such an answer if the answers are labels


def read_choices(
    column: Sequence[Any], labels: Sequence[Any] | None, rows: NDArray[np.int64], path: Path
) -> tuple[Sequence[list[str]], NDArray[np.int64]]:
    """The choices of some rows and the place of the right one; without labels, of none.

    Choices are a list of texts, and all labels of the column are their places from 0, their letters or their texts: the
    first of these that fits every row. Or, as in ARC, choices are {"text": [...], "label": [...]} with one of its own
    labels.
    """
    way, seen = set(range(WAYS)), -1
    for row in range(len(column) if labels is not None else 0):
        assert labels is not None
        fitting = {number for number, names in enumerate(_ways(column[row])) if str(labels[row]) in names}
        if not fitting:
            continue
        if not way & fitting:
            raise DataError(
                f"label of {path} is {labels[seen]!r:.50} in row {seen + 1} and {labels[row]!r:.50} in row {row + 1}; "
                "expected all places from 0, all letters or all texts of the choices."
            )
        if not way <= fitting:
            way, seen = way & fitting, row
    right = []
    for row in rows:
        cell, names = column[row], _ways(column[row])
        if not names:
            raise DataError(
                f"choices of row {row + 1} of {path} is {cell!r:.50}; expected a list of two texts or more."
            )
        if labels is None:
            continue
        label = str(labels[row])
        if not any(label in each for each in names):
            known = " or ".join(first_of(map(str, each)) for each in (names if names[0] is not names[1] else names[:1]))
            raise DataError(f"label of row {row + 1} of {path} is {labels[row]!r:.80}; expected {known}.")
        right.append(names[min(way)].index(label))
    return LazySequence(rows, partial(_choices, column)), np.array(right, dtype=np.int64)


def _ways(cell: Any) -> list[list[Any]]:
    """What names the choices of a cell: places, letters and texts, or its own labels each time; [] if it has none."""
    texts, own = (cell.get("text"), cell.get("label")) if isinstance(cell, Mapping) else (cell, None)
    if not isinstance(texts, (list, tuple)) or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        return []
    if isinstance(own, list) and own:
        return [own] * WAYS
    return [list(map(str, range(len(texts)))), list(ascii_uppercase[: len(texts)]), list(texts)]


def _choices(column: Sequence[Any], row: int) -> Any:
    cell = column[row]
    return cell.get("text") if isinstance(cell, Mapping) else cell


def candidates_of(data: Dataset) -> list[Sequence[str]]:
    """The answers that each sample may have: its choices, or the words for the classes."""
    if data.choices is not None:
        return list(data.choices)
    if data.labels is None:
        raise DataError(f"{data} has no answers to choose from; expected a column label, or choices and label.")
    return [data.label_texts or data.classes] * len(data)


def fewer_choices(data: Dataset, most: int) -> Dataset:
    """The samples with at most `most` answers each: the right one, and others in a fixed draw; `choices` has them."""
    assert data.labels is not None
    generator = np.random.default_rng(0)
    choices, right = [], []
    for answers, label in zip(candidates_of(data), data.labels.tolist(), strict=True):
        others = generator.permutation(np.delete(np.arange(len(answers)), label))[: most - 1]
        kept = sorted([label, *others.tolist()])
        choices.append([answers[place] for place in kept])
        right.append(kept.index(label))
    return replace(data, choices=choices, labels=np.array(right, dtype=np.int64))


def without_labels(data: Dataset, most: int) -> Dataset:
    """The samples with at most `most` answers each as `choices`, in a fixed draw; nothing says which one is right."""
    generator = np.random.default_rng(0)
    drawn = [(answers, np.sort(generator.permutation(len(answers))[:most])) for answers in candidates_of(data)]
    choices = [[answers[place] for place in kept] for answers, kept in drawn]
    return replace(with_answers(data, [each[0] for each in choices]), choices=choices)


def shared_answers(given: Sequence[str]) -> tuple[str, ...]:
    """The answers that several samples share, most frequent first, if most samples have one of them; else none.

    >>> shared_answers(["yes", "no", "yes", "no", "yes", "no", "maybe"]), shared_answers(["a", "b", "c"])
    (('yes', 'no'), ())
    """
    counts = Counter(given)
    labels = tuple(label for label, count in counts.most_common() if count >= GIVEN)
    return labels if sum(counts[label] for label in labels) >= SHARED * counts.total() else ()


def each_answer(data: Dataset) -> tuple[Dataset, list[int]]:
    """Every sample once with each of its answers to predict, and the number of answers of each sample."""
    answers = candidates_of(data)
    counts = list(map(len, answers))
    repeated = data.subset(np.repeat(np.arange(len(data)), counts))
    return with_answers(repeated, [word for words in answers for word in words]), counts


def with_answers(data: Dataset, answers: Sequence[str]) -> Dataset:
    """The samples with these answers to predict; the last answer of a chat is replaced."""
    kept = replace(data, labels=None, choices=None, answers="data" if data.answers == "none" else data.answers)
    if not data.has_chats:
        return replace(kept, targets=answers)
    chats = [
        [*prompt_of(chat), {"role": "assistant", "content": answer}]
        for chat, answer in zip(data.inputs, answers, strict=True)
    ]
    return replace(kept, inputs=chats)
