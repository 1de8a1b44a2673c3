"""Choosing calibration samples: the contract of every sampler, seeds, shots, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.samples import labelled, raises
from tuneport.data.dataset import Dataset, Origin
from tuneport.data.samplers import select

LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=40)


def draw(data: Dataset, sampler: str, **options: Any) -> list[int]:
    return list(select(data, sampler=sampler, **options).tolist())


def class_counts(data: Dataset, indices: list[int]) -> list[int]:
    assert data.labels is not None
    present = np.unique(data.labels)
    return [int((data.labels[indices] == label).sum()) for label in present]


@pytest.mark.parametrize("sampler", ["random", "class_balanced"])
def test_sampler_contract(sampler: str) -> None:
    data = labelled(np.arange(200) % 4)
    state = torch.get_rng_state()
    first = draw(data, sampler, samples=20, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert draw(data, sampler, samples=20, seed=3) == first
    assert len(set(first)) == 20
    assert draw(data, sampler, samples=40, seed=3)[:20] == first
    assert any(draw(data, sampler, samples=20, seed=seed) != first for seed in (4, 5, 6))


@given(labels=LABELS, seed=st.integers(0, 1000), ends=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("sampler", ["random", "class_balanced"])
def test_small_draws_begin_larger_ones(sampler: str, labels: list[int], seed: int, ends: st.DataObject) -> None:
    data = labelled(labels)
    many = ends.draw(st.integers(1, len(labels)))
    few = ends.draw(st.integers(1, many))
    larger = draw(data, sampler, samples=many, seed=seed)
    assert larger[:few] == draw(data, sampler, samples=few, seed=seed)
    assert len(set(larger)) == many


@given(labels=LABELS, seed=st.integers(0, 1000), ends=st.data())
@settings(max_examples=60, deadline=None)
def test_balanced_draws_alternate_between_classes(labels: list[int], seed: int, ends: st.DataObject) -> None:
    data = labelled(labels)
    count = ends.draw(st.integers(1, len(labels)))
    counts = class_counts(data, draw(data, "class_balanced", samples=count, seed=seed))
    sizes = class_counts(data, list(range(len(data))))
    open_classes = [got for got, size in zip(counts, sizes, strict=True) if got < size]
    # A class with samples left is at most one sample behind the largest count.
    assert all(got >= max(counts) - 1 for got in open_classes)


def test_random_covers_all_samples_evenly() -> None:
    data = labelled([0] * 5 + [1] * 5)
    hits = np.bincount([i for seed in range(500) for i in draw(data, "random", samples=2, seed=seed)], minlength=10)
    assert hits.min() > 60  # 100 expected, standard deviation 9
    assert hits.max() < 140


def test_select_takes_100_samples_by_default_or_all() -> None:
    assert len(select(labelled(np.arange(150) % 3))) == 100
    assert sorted(select(labelled(np.arange(12) % 3))) == list(range(12))


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=20), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("sampler", ["random", "class_balanced"])
def test_shots_are_equal_and_nested(sampler: str, labels: list[int], seed: int) -> None:
    data = labelled(labels * 3)
    previous: list[int] = []
    for shots in (1, 2, 3):
        chosen = draw(data, sampler, shots=shots, seed=seed)
        assert set(class_counts(data, chosen)) == {shots}
        assert chosen[: len(previous)] == previous
        previous = chosen


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"samples": 5000}, ["asked for 5000 samples but train split of pets has 6; lower `samples`."]),
        ({"samples": 0}, ["asked for 0 samples; expected at least 1 in `samples`."]),
        ({"samples": -1}, ["asked for -1 samples"]),
        (
            {"shots": 2},
            ["asked for 2 shots but 1 of 3 classes of train split of pets have fewer: class2 (1); lower"],
        ),
        ({"sampler": "randon"}, ["unknown sampler 'randon'. Did you mean 'random'? Known: "]),
    ],
)
def test_select_errors(options: dict[str, Any], parts: list[str]) -> None:
    data = labelled([0, 0, 0, 1, 1, 2], name="pets", origin=Origin("train"))
    with raises(*parts):
        select(data, **options)


def test_select_from_unlabelled_data() -> None:
    data = Dataset(list("abc"), None, (), name="raw")
    assert sorted(select(data, samples=3).tolist()) == [0, 1, 2]
    with raises("raw has no labels; expected a label per sample for sampler 'class_balanced'. Use `samples`"):
        select(data, samples=2, sampler="class_balanced")
    with raises("raw has no labels; expected a label per sample for `shots`."):
        select(data, shots=1)
