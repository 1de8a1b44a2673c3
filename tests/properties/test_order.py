"""The order of samples, classes, files and processes, batch size and threads change nothing beyond rounding.

The models run in float64: a sum of some hundred products is off by 1e-14, and a map divides by the smallest singular
value that it keeps, here 1e-9 of the largest.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from builders.folders import CLASSES, HEAD_CLASSES, images, write_head
from builders.ranks import Together
from builders.redrawn import distance, image_case, moved, redrawn, same, text_case
from builders.runs import Case
from builders.texts import SENTENCES
from tuneport.data.dataset import Dataset

BOUND = 1e-5
COUNT = 8
OPTIONS: dict[str, Any] = {"samples": COUNT, "scale": 1.0, "dtype": "float64", "accept_unlikely": True}
quick = settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])  # an example takes 0.2 s
Known = tuple[Case, Any, dict[str, Tensor]]  # a transfer, its data and what it moves


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Texts of different lengths: a batch pads them."""
    words = [text[: 10 + number] for number, text in enumerate(SENTENCES * 2)][:COUNT]
    data = Dataset(words, np.arange(COUNT) % 3, ("place", "person", "number"))
    case = text_case(tmp_path_factory.mktemp("texts"), data, **OPTIONS)
    return case, data, moved(case)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Known:
    """A folder of images by class, and models with heads in files."""
    place = tmp_path_factory.mktemp("pictures")
    data = write_folder(place / "data", list(range(COUNT)))
    case = image_case(place, "clip_vision", data, **OPTIONS)
    return case, data, moved(case)


@pytest.fixture
def threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def write_folder(folder: Path, names: list[int]) -> Path:
    """Images in folders of their classes, under these names."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, pixels, label in zip(names, *images(COUNT, 1), strict=True):
        path = folder / CLASSES[label] / f"{name:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder


@pytest.mark.usefixtures("threads")
@quick
@given(order=st.permutations(range(COUNT)), size=st.integers(1, COUNT + 1), count=st.integers(1, 2))
def test_samples_batches_and_threads(texts: Known, order: list[int], size: int, count: int) -> None:
    case, data, wanted = texts
    torch.set_num_threads(count)
    assert distance(wanted, moved(redrawn(case, data.subset(np.array(order)), batch_size=size))) < BOUND


@quick
@given(names=st.permutations(range(COUNT)), order=st.permutations(range(len(HEAD_CLASSES))))
def test_files_and_the_classes_of_a_head(pictures: Known, names: list[int], order: list[int]) -> None:
    case, data, wanted = pictures
    for model, width, seed in ((case.source, 4, 0), (case.target, 8, 1)):
        assert model.weights.folder is not None
        rows = torch.randn(len(HEAD_CLASSES), width, generator=torch.Generator().manual_seed(seed))
        known = tuple(HEAD_CLASSES[place] for place in order)
        write_head(model.weights.folder / "heads" / "animals.safetensors", width, known, embeds=rows[list(order)])
    assert distance(wanted, moved(redrawn(case, write_folder(data, names)))) < BOUND


@quick
@given(labels=st.lists(st.integers(0, 2), min_size=COUNT, max_size=COUNT), order=st.permutations(range(3)))
def test_classes_of_the_data(texts: Known, labels: list[int], order: list[int]) -> None:
    """Names, not numbers, say which class is meant."""
    case, data, _ = texts
    classes = tuple(data.classes[place] for place in order)
    one = Dataset(data.inputs, np.array(labels), data.classes)
    other = Dataset(data.inputs, np.argsort(order)[labels], classes)
    assert same(moved(redrawn(case, one)), moved(redrawn(case, other)))


@pytest.fixture(scope="module")
def ranked(texts: Known, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """The transfer of texts, with models of its own for each of three processes."""
    return [text_case(tmp_path_factory.mktemp(f"rank-{rank}"), texts[1], **OPTIONS) for rank in range(3)]


@quick
@given(order=st.integers(2, 3).flatmap(lambda size: st.permutations(range(size))), size=st.integers(3, COUNT))
def test_processes_and_their_order(texts: Known, ranked: list[Case], order: list[int], size: int) -> None:
    """Two or three processes share the batches, in any order in which they run and add their sums.

    A device is a process here, as `torchrun` starts one per GPU: on this machine, without GPUs, processes are threads
    that take turns in the given order. Dividing, exchanging and adding is the code of the product.
    """
    _, data, wanted = texts
    together = Together(order)
    found = together.run(lambda rank: moved(redrawn(ranked[rank], data, batch_size=size)))
    assert together.used["sum"]
    assert together.used["gather"]
    assert len(found) == len(order)
    assert all(distance(wanted, each) < BOUND for each in found)
    assert all(same(found[0], each) for each in found)
