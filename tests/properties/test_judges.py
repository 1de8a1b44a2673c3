"""What judges has no part in what it judges: test samples, held-out samples, the other half, and labels not asked for.

Each is checked by changing it: what it must not touch keeps its bits, and what it judges changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from builders.folders import CLASSES, images
from builders.redrawn import image_case, moved, redrawn, same
from builders.runs import Case, Listener, port, run
from tuneport.config import DistillConfig
from tuneport.data.dataset import Dataset
from tuneport.data.formats import read_plain
from tuneport.measure.samples import DatasetSamples, first_half
from tuneport.pipeline import scale as scales
from tuneport.pipeline.transfer import Result
from tuneport.training.exam import Mark

COUNT = 8
HELD_OUT = 4  # of the first student of a distillation: the last of the draw; the others are of the second
OPTIONS: dict[str, Any] = {"samples": COUNT, "scale": 1.0, "accept_unlikely": True}
quick = settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # an example takes 0.2 s
)
PIXELS, LABELS = images(COUNT, 1)
any_labels = st.lists(st.integers(0, 2), min_size=COUNT, max_size=COUNT).map(np.array)


def dataset(pixels: Any = PIXELS, labels: Any = LABELS) -> Dataset:
    return Dataset([Image.fromarray(each) for each in pixels], np.asarray(labels), CLASSES, kind="image")


def repainted(place: int, seed: int) -> Any:
    """The images with another one at this place."""
    found = PIXELS.copy()
    found[place] = np.random.default_rng(seed).integers(0, 256, found[place].shape)
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Classifiers, whose head is fitted; the scale is chosen among two."""
    return image_case(tmp_path_factory.mktemp("case"), "vit", dataset(), **OPTIONS)


@pytest.fixture(scope="module", autouse=True)
def _two_scales() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scales, "SCALES", (0.0, 1.0))
        yield


@pytest.fixture(scope="module")
def by_source(case: Case) -> dict[str, Tensor]:
    return moved(redrawn(case, dataset(), labels="source"))


@quick
@given(labels=any_labels)
def test_labels_do_not_count_where_the_source_labels(case: Case, by_source: dict[str, Tensor], labels: Any) -> None:
    assert same(by_source, moved(redrawn(case, dataset(labels=labels), labels="source")))


SCORES = ("evaluation", "accuracies", "by_class", "turned", "outcome", "headline", "recommendation")
OTHERS = (*SCORES, "seconds", "seconds_by_stage", "files")


def written(case: Case, place: Path, seed: int) -> tuple[bytes, str]:
    """The weights and the record, without scores and times, of a transfer with any test split."""
    random, data, out = np.random.default_rng(seed), place / "data.npz", place / "out"
    x_test, y_test = random.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8), random.integers(0, 3, 6)
    arrays = {"x_train": PIXELS, "y_train": LABELS, "x_test": x_test, "y_test": y_test}
    np.savez(data, **arrays, classes=np.array(CLASSES))
    record = port(redrawn(case, data, overwrite=True, scale="auto"), out, test=read_plain(data, "test"))
    assert record["evaluation"]["samples"] == 6
    told = json.dumps({key: record[key] for key in record if key not in OTHERS}, sort_keys=True)
    return (out / "model.safetensors").read_bytes(), told


@pytest.fixture(scope="module")
def first(case: Case, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[bytes, str]]:
    place = tmp_path_factory.mktemp("written")
    return place, written(case, place, 0)


@quick
@given(seed=st.integers(1, 10**6))
def test_test_samples_change_the_scores_only(case: Case, first: tuple[Path, tuple[bytes, str]], seed: int) -> None:
    place, wanted = first
    assert written(case, place, seed) == wanted


class JudgedError(Exception):
    """Ends a transfer after both halves have judged."""


def judged(case: Case, data: Dataset) -> list[Tensor]:
    """The class scores of each half by the maps of the other: at scale 0 and 1 of the second, then of the first."""
    seen, score = [], scales.Judge.score_batches

    def listen(judge: scales.Judge, module: Any, batches: Any) -> list[scales.Scores]:
        found = score(judge, module, batches)
        seen.append(torch.cat([values for values, _ in found]))
        if len(seen) == 4:
            raise JudgedError
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scales.Judge, "score_batches", listen)
        changed = redrawn(case, data, scale="auto")
        with pytest.raises(JudgedError):
            run(changed)
    return seen


@pytest.fixture(scope="module")
def unchanged(case: Case) -> list[Tensor]:
    return judged(case, dataset())


@quick
@given(drawn=st.integers(0, COUNT - 1), seed=st.integers(0, 10**6), label=st.integers(0, 2))
def test_a_half_judges_what_it_has_no_part_in(
    case: Case, unchanged: list[Tensor], drawn: int, seed: int, label: int
) -> None:
    assert isinstance(case.samples, DatasetSamples)
    place, half = int(case.samples.indices[drawn]), first_half(COUNT)
    labels = LABELS.copy()
    labels[place] = label
    found = judged(case, dataset(repainted(place, seed), labels))
    own, other = ((2, 3), (0, 1)) if drawn < half else ((0, 1), (2, 3))
    rest = [row for row in range(half) if row != drawn % half]
    for call in own:  # only the sample itself has other scores
        assert torch.equal(found[call][rest], unchanged[call][rest])
        assert not torch.equal(found[call][drawn % half], unchanged[call][drawn % half])
    assert not torch.equal(found[other[1]], unchanged[other[1]])  # its maps are others


@pytest.fixture(scope="module")
def ported(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(image_case(tmp_path_factory.mktemp("ported"), "clip_vision", dataset(), **OPTIONS))


def taught(ported: Result, pixels: Any) -> list[Mark]:
    """The curves of both students of a distillation, one after the other."""
    marks: list[Mark] = []
    samples = replace(ported.setup.calibration.samples, dataset=dataset(pixels))
    ported.taught(DistillConfig(steps=3), samples, events=Listener(mark=marks.append))
    return marks


@pytest.fixture(scope="module")
def curve(ported: Result) -> list[Mark]:
    return taught(ported, PIXELS)


@quick
@given(drawn=st.integers(0, COUNT - 1), seed=st.integers(0, 10**6))
def test_held_out_samples_teach_nothing(ported: Result, curve: list[Mark], drawn: int, seed: int) -> None:
    samples = ported.setup.calibration.samples
    assert isinstance(samples, DatasetSamples)
    found = taught(ported, repainted(int(samples.indices[drawn]), seed))
    assert len(found) == len(curve) == 8
    for student, marks in enumerate((slice(4), slice(4, None))):
        losses, wanted = ([mark.loss for mark in each[marks]] for each in (found, curve))
        starts = found[marks][0].held_out_loss, curve[marks][0].held_out_loss
        if (drawn >= COUNT - HELD_OUT) == (student == 0):
            assert losses == wanted
            assert starts[0] != starts[1]
        else:
            assert losses != wanted
            assert starts[0] == starts[1]
