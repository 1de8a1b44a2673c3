"""Data sets: lazy views, and labels matched to the classes of a head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from builders.samples import raises
from tuneport.data.dataset import Dataset, LazySequence, Origin, align_labels


def test_subset_is_a_lazy_view_of_a_view() -> None:
    loaded: list[int] = []
    inputs = LazySequence(np.arange(10), lambda index: loaded.append(index) or index * 10)  # type: ignore[func-returns-value]
    data = Dataset(inputs, np.arange(10), tuple("abcdefghij"), targets=list("ABCDEFGHIJ"))
    part = data.subset([9, 3, 5]).subset(torch.tensor([2, 0]))
    assert loaded == []
    assert list(part.inputs) == [50, 90]
    assert loaded == [5, 9]
    assert part.labels is not None
    assert part.targets is not None
    assert part.labels.tolist() == [5, 9]
    assert list(part.targets) == ["F", "J"]
    assert list(data.inputs[2:4]) == [20, 30]
    assert data.inputs[-1] == 90
    assert len(data.subset([])) == 0
    assert len(data.subset(np.arange(10) > 6)) == 3
    with pytest.raises(IndexError):
        data.subset([10])


def named(*classes: str) -> Dataset:
    return Dataset(list(classes), np.arange(len(classes)), classes, name="pets", origin=Origin("test"))


@pytest.mark.parametrize(
    ("classes", "head", "expected"),
    [
        (("a", "b"), ("a", "b"), [0, 1]),
        (("a", "b", "c"), ("c", "a", "b"), [1, 2, 0]),
        (("a", "b"), ("z", "b", "y", "a"), [3, 1]),
        (("0", "1", "2"), ("cat", "dog", "eel", "fox"), [0, 1, 2]),
        (("0", "1", "10", "2"), tuple("abcdefghijk"), [0, 1, 10, 2]),
        (("00", "02"), ("cat", "dog", "eel"), [0, 2]),
        (("0", "1"), ("1", "0"), [1, 0]),
        (("0", "1"), ("LABEL_0", "LABEL_1"), [0, 1]),
    ],
)
def test_align_labels(classes: tuple[str, ...], head: tuple[str, ...], expected: list[int]) -> None:
    data = align_labels(named(*classes), list(head))
    assert data.labels is not None
    assert data.labels.tolist() == expected
    assert data.classes == head
    assert data.labels.dtype == np.int64


@pytest.mark.parametrize(
    ("classes", "head", "parts"),
    [
        (
            ("a", "x", "y"),
            ("a", "b"),
            ["2 of 3 classes of pets are unknown to the head: x, y. The head has 2: a, b."],
        ),
        (("x", "y"), ("0", "1"), ["of an adapter without names, pass them as `classes`."]),
        (("0", "1", "2"), ("a", "b"), ["3 of 3 classes of pets are unknown to the head: 0, 1, 2."]),
        (("0", "00"), ("a", "b"), ["unknown to the head: 0, 00."]),
        (("crane", "b"), ("crane", "b", "crane"), ["more than one class is called crane"]),
    ],
)
def test_align_errors(classes: tuple[str, ...], head: tuple[str, ...], parts: list[str]) -> None:
    with raises(*parts):
        align_labels(named(*classes), head)


def test_align_needs_labels() -> None:
    with raises("test split of pets has no labels; expected labels among the head's 2 classes."):
        align_labels(Dataset(["a"], None, (), name="pets", origin=Origin("test")), ["a", "b"])
