"""Augmented batches: the same views for teacher and student, the same ones again for a seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from builders.folders import Zoo
from builders.runs import prepare
from builders.texts import SENTENCES, bert_tokenizer, make, write
from tuneport.data.dataset import Dataset
from tuneport.measure.objectives import OBJECTIVES
from tuneport.measure.samples import DatasetSamples
from tuneport.models.open import open_model
from tuneport.models.tokenizer import Encoded
from tuneport.training import augment
from tuneport.training.augment import PIXELS, Reader, blend, turn
from tuneport.types import Sides


@pytest.fixture(scope="module")
def drawn(zoo: Zoo) -> DatasetSamples:
    job = prepare(*zoo.trio("clip"), zoo.data, samples=8)
    assert isinstance(job.samples, DatasetSamples)
    return job.samples


def both(pixels: Tensor) -> Sides[Encoded]:
    return Sides(*(Encoded({PIXELS: pixels}, None, ()) for _ in range(2)))


def test_images_are_encoded_once_and_as_without_a_cache(drawn: DatasetSamples, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.array([5, 0, 5, 3])
    found = Reader(drawn, 1, 0).plain(rows)
    wanted = next(replace(drawn.take(rows), size=4).encoded())
    for side, other in zip(found, wanted, strict=True):
        assert torch.equal(side.inputs[PIXELS], other.inputs[PIXELS])
    monkeypatch.setattr(augment, "MOST_BYTES", 1)
    again = Reader(drawn, 1, 0).plain(rows)
    assert torch.equal(again.target.inputs[PIXELS], found.target.inputs[PIXELS])


def test_both_models_see_the_same_view() -> None:
    """The source's image is the target's, enlarged: so are their views, up to the interpolation of a smooth image."""
    ramp = torch.linspace(-1, 1, 64)
    large = (torch.outer(ramp, ramp) + ramp).expand(6, 3, 64, 64)
    small = torch.nn.functional.avg_pool2d(large, 2)
    torch.manual_seed(0)
    found = turn(Sides(Encoded({PIXELS: large}, None, ()), Encoded({PIXELS: small}, None, ())))
    one, two = torch.nn.functional.avg_pool2d(found.source.inputs[PIXELS], 2), found.target.inputs[PIXELS]
    assert not torch.allclose(two, small, atol=0.1)
    # bilinear interpolation of a smooth image: off by less than its change over one small pixel (2/31 in each factor);
    # at the reflected border by two of them
    assert float((one - two).abs().max()) < 4 * 2 / 31


def test_a_view_is_a_rotation_about_the_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without shift, zoom and flip, the distance of a bright spot from the centre stays, and not its place."""
    monkeypatch.setattr(augment, "SHIFT", 0.0)
    monkeypatch.setattr(augment, "ZOOM", 1.0)
    monkeypatch.setattr(augment, "FLIPPED", 0.0)
    spot = torch.zeros(8, 3, 33, 33)
    spot[..., 16, 26] = 1.0  # ten pixels right of the centre
    torch.manual_seed(1)
    found = turn(both(spot)).source.inputs[PIXELS][:, 0]
    places = torch.arange(33.0) - 16
    mass = found.sum((1, 2))
    down, across = (found * places[:, None]).sum((1, 2)) / mass, (found * places).sum((1, 2)) / mass
    # the centre of mass of a bilinear spot is within half a pixel of its place
    assert float(((down**2 + across**2).sqrt() - 10).abs().max()) < 0.5
    assert float(down.abs().max()) > 0.5
    assert float(down.abs().max()) < 10 * np.sin(augment.TURN) + 0.5


def test_blends_are_the_same_for_both_and_between_their_parts() -> None:
    pixels = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 2, 2)
    torch.manual_seed(0)
    found = blend(both(pixels), torch.zeros(len(pixels)))
    assert torch.equal(found.source.inputs[PIXELS], found.target.inputs[PIXELS])
    assert float(found.source.inputs[PIXELS].min()) >= 0
    assert float(found.source.inputs[PIXELS].max()) <= 3
    assert not torch.equal(found.source.inputs[PIXELS], pixels)


def test_images_are_blended_with_others_of_their_kind() -> None:
    pixels = torch.tensor([0.0, 1.0, 10.0, 11.0] * 8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    kinds = pixels[:, 0, 0, 0] >= 10
    torch.manual_seed(0)
    found = blend(both(pixels), kinds).source.inputs[PIXELS]
    assert not torch.equal(found, pixels)
    assert torch.equal(found[:, 0, 0, 0] >= 10, kinds)
    assert float(found[~kinds].max()) <= 1


def test_views_follow_from_the_seed(drawn: DatasetSamples) -> None:
    def view(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return Reader(drawn, 2, 0).view(np.arange(4), 1, torch.zeros(4)).target.inputs[PIXELS]

    assert torch.equal(view(3), view(3))
    assert not torch.equal(view(3), view(4))


def test_each_copy_of_a_text_is_another_view(tmp_path: Path) -> None:
    folder = write(tmp_path / "bert", make("bert"), bert_tokenizer())
    models = Sides(open_model(folder), open_model(folder))
    data = Dataset(inputs=list(SENTENCES[:4]), labels=None, classes=())
    samples = DatasetSamples(models, data, np.arange(4), None, 4, OBJECTIVES["classification"])
    reader = Reader(samples, 3, 0)
    views = [reader.view(np.array([0, 1]), copy).target.inputs["input_ids"].tolist() for copy in range(3)]
    assert views == [reader.view(np.array([0, 1]), copy).source.inputs["input_ids"].tolist() for copy in range(3)]
    assert not any(one == two for one, two in combinations(views, 2))
