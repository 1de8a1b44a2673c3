"""The samplers of the paper's study: the contract of every sampler, brute force, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders.folders import Zoo
from builders.runs import prepare
from builders.samples import labelled, raises
from paper.samplers import CENTROID, FEW_CLASSES, select_by_features
from tuneport.data.dataset import Dataset
from tuneport.data.samplers import select

LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=40)


def points(data: Dataset) -> torch.Tensor:
    return torch.randn(len(data), 3, generator=torch.Generator().manual_seed(7))


def draw(data: Dataset, sampler: str, **options: Any) -> list[int]:
    found = select_by_features(data, sampler, points(data), **options) if sampler in CENTROID else None
    return list((select(data, sampler=sampler, **options) if found is None else found).tolist())


def class_counts(data: Dataset, indices: list[int]) -> list[int]:
    assert data.labels is not None
    present = np.unique(data.labels)
    return [int((data.labels[indices] == label).sum()) for label in present]


@pytest.mark.parametrize("sampler", [*CENTROID, *FEW_CLASSES])
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
@pytest.mark.parametrize("sampler", ["centroid_near", "centroid_far"])
def test_small_draws_begin_larger_ones(sampler: str, labels: list[int], seed: int, ends: st.DataObject) -> None:
    data = labelled(labels)
    many = ends.draw(st.integers(1, len(labels)))
    few = ends.draw(st.integers(1, many))
    larger = draw(data, sampler, samples=many, seed=seed)
    assert larger[:few] == draw(data, sampler, samples=few, seed=seed)
    assert len(set(larger)) == many


@given(labels=LABELS, seed=st.integers(0, 1000), ends=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("sampler", ["centroid_near", "centroid_far"])
def test_balanced_samplers_alternate_between_classes(
    sampler: str, labels: list[int], seed: int, ends: st.DataObject
) -> None:
    data = labelled(labels)
    count = ends.draw(st.integers(1, len(labels)))
    counts = class_counts(data, draw(data, sampler, samples=count, seed=seed))
    sizes = class_counts(data, list(range(len(data))))
    open_classes = [got for got, size in zip(counts, sizes, strict=True) if got < size]
    # A class with samples left is at most one sample behind the largest count.
    assert all(got >= max(counts) - 1 for got in open_classes)


@pytest.mark.parametrize(("sampler", "reverse"), [("centroid_near", False), ("centroid_far", True)])
def test_centroid_samplers_by_brute_force(sampler: str, reverse: bool) -> None:
    rng = np.random.default_rng(1)
    data = labelled(rng.integers(0, 3, 60))
    assert data.labels is not None
    space = points(data).double().numpy()
    chosen = draw(data, sampler, samples=12)
    for label in range(3):
        members = [i for i in range(60) if data.labels[i] == label]
        centre = np.mean([space[i] for i in members], axis=0)
        ranked = sorted(members, key=lambda i: float(np.linalg.norm(space[i] - centre)), reverse=reverse)
        assert [i for i in chosen if data.labels[i] == label] == ranked[:4]


@pytest.mark.parametrize(("classes", "half"), [(1, 1), (2, 1), (5, 2), (6, 3)])
def test_half_class(classes: int, half: int) -> None:
    data = labelled(np.arange(120) % classes)
    seen = set()
    for seed in range(10):
        counts = class_counts(data, draw(data, "half_class", samples=20, seed=seed))
        assert sum(count > 0 for count in counts) == half
        seen.add(tuple(count > 0 for count in counts))
    assert len(seen) > 1 or classes == 1


def test_half_class_too_small() -> None:
    with raises("asked for 5 samples, but the 1 of 3 classes drawn by half_class have 3; lower `samples`."):
        draw(labelled([0, 1, 2] * 3), "half_class", samples=5)


def test_single_class() -> None:
    data = labelled([0] * 3 + [1] * 30 + [2] * 30)
    assert data.labels is not None
    seen = {tuple(sorted(set(data.labels[draw(data, "single_class", samples=9, seed=s)].tolist()))) for s in range(12)}
    assert seen == {(1,), (2,)}
    small = {int(data.labels[draw(data, "single_class", samples=2, seed=s)][0]) for s in range(20)}
    assert small == {0, 1, 2}
    drawn = data.labels[draw(data, "single_class", samples=35)]  # no class has so many: all of one, then of the next
    counts = sorted(np.unique(drawn, return_counts=True)[1].tolist())
    assert counts in ([5, 30], [3, 2, 30], [2, 3, 30])
    assert (np.diff(drawn) != 0).sum() == len(counts) - 1


@pytest.mark.parametrize("features", [torch.zeros(2, 5), torch.zeros(3), torch.full((3, 2), torch.nan)])
def test_features_must_be_finite_and_fit_the_samples(features: torch.Tensor) -> None:
    with raises(f"features of shape {tuple(features.shape)} for 3 samples; expected (3, width), all finite."):
        select_by_features(labelled([0, 1, 1]), "centroid_near", features, samples=1)


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=20), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("sampler", ["centroid_near", "centroid_far"])
def test_shots_are_equal_and_nested(sampler: str, labels: list[int], seed: int) -> None:
    data = labelled(labels * 3)
    previous: list[int] = []
    for shots in (1, 2, 3):
        chosen = draw(data, sampler, shots=shots, seed=seed)
        assert set(class_counts(data, chosen)) == {shots}
        assert chosen[: len(previous)] == previous
        previous = chosen


def test_prepare_draws_with_them(zoo: Zoo) -> None:
    assert len(prepare(*zoo.trio("vit"), zoo.data, samples=6, sampler="single_class").samples) == 6
