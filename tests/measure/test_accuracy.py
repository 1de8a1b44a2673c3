"""Accuracies against direct computations, and data that cannot be scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

from builders import toy
from builders.folders import CLASSES, HEAD_CLASSES, Zoo, load
from tuneport.data.dataset import Dataset
from tuneport.data.formats import read_plain
from tuneport.errors import DataError, TuneportError
from tuneport.measure.accuracy import compute_features, each_batch, linear_probe, perplexity, zero_shot
from tuneport.models.base import Generation, Inputs, Model, Outputs, Weights, describe_any
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model


def pixels(data: Dataset) -> torch.Tensor:
    """The images as inputs of the small models of the zoo, without their processor."""
    images = torch.tensor(np.stack([np.asarray(image) for image in data.inputs])).permute(0, 3, 1, 2) / 255
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.5, 0.25])
    return (images - mean[:, None, None]) / std[:, None, None]


def points_model(width: int = 2) -> Model:
    """A model that reads points: its features are the sample itself."""
    module = nn.Linear(width, width)
    nn.init.eye_(module.weight)
    nn.init.zeros_(module.bias)
    return Model(
        name="points",
        module=module,
        weights=Weights({}),
        inputs=Inputs("image", lambda samples: {"input": torch.tensor(np.stack(samples), dtype=torch.float32)}),
        outputs=Outputs(lambda m, batch: m(**batch)),
    )


def points(count: int, classes: int, seed: int, names: tuple[str, ...] | None = None) -> Dataset:
    """Classes that are separated along the first axis."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    inputs = random.normal(size=(count, 2)) * 0.1 + np.stack([labels, np.zeros(count)], 1)
    return Dataset(list(inputs), labels, names or tuple(map(str, range(classes))), name="points", kind="image")


class TestZeroShot:
    def test_against_a_direct_computation(self, zoo: Zoo) -> None:
        model, test = open_model(zoo["clip_vision-base"]), read_plain(zoo.data, "test")
        head = choose_head(model, None, test)
        with torch.no_grad():
            embeds = load(zoo["clip_vision-base"])(pixels(test)).image_embeds
        scores = F.normalize(embeds, dim=-1) @ F.normalize(head.class_embeds, dim=-1).T  # type: ignore[arg-type]
        guesses = [HEAD_CLASSES[i] for i in scores.argmax(-1)]
        assert test.labels is not None
        right = sum(guess == CLASSES[label] for guess, label in zip(guesses, test.labels, strict=True))
        result = zero_shot(model, head, test)
        assert result.accuracy == pytest.approx(100 * right / 30)
        assert 0 < right < 30, "head and data order the classes differently, so that a mix-up would show"
        assert (result.samples, result.protocol) == (30, "zero-shot")

    def test_classifier_of_the_model(self, zoo: Zoo) -> None:
        model, test = open_model(zoo["vit-base"]), read_plain(zoo.data, "test")
        with torch.no_grad():
            guesses = load(zoo["vit-base"])(pixels(test)).logits.argmax(-1).numpy()
        result = zero_shot(model, choose_head(model, None, test), test)
        assert result.accuracy == pytest.approx(100 * float((guesses == test.labels).mean()))

    def test_any_batch_size_and_its_progress(self, zoo: Zoo) -> None:
        model, test = open_model(zoo["clip_vision-base"]), read_plain(zoo.data, "test")
        head = choose_head(model, None, test)
        done: list[int] = []
        result = zero_shot(model, head, test, batch_size=7, progress=done.append)
        assert result == zero_shot(model, head, test)
        assert done == [7, 7, 7, 7, 2]

    def test_all_right_and_all_wrong(self) -> None:
        data = points(40, 2, seed=0)
        embeds = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
        shifted = Dataset([x - [0.5, 0] for x in data.inputs], data.labels, data.classes, kind="image")
        assert zero_shot(points_model(), Head("h", ("0", "1"), embeds), shifted).accuracy == 100.0
        assert zero_shot(points_model(), Head("h", ("1", "0"), embeds), shifted).accuracy == 0.0

    def test_classes_that_the_head_lacks_are_refused(self) -> None:
        data = points(6, 2, seed=0, names=("cat", "gnu"))
        with pytest.raises(DataError, match="1 of 2 classes of points are unknown to the head: gnu"):
            zero_shot(points_model(), Head("h", ("cat", "dog"), torch.eye(2)), data)

    def test_data_without_labels_are_refused(self) -> None:
        data = Dataset([np.zeros(2)], None, (), name="points", kind="image")
        with pytest.raises(DataError, match="points has no labels"):
            zero_shot(points_model(), Head("h", ("cat", "dog"), torch.eye(2)), data)


class TestLinearProbe:
    @pytest.mark.parametrize("classes", [2, 3])
    def test_separable_classes_reach_100_percent(self, classes: int) -> None:
        result = linear_probe(points_model(), points(60, classes, seed=0), points(30, classes, seed=1))
        assert (result.accuracy, result.samples, result.protocol) == (100.0, 30, "linear-probe")

    def test_labels_follow_the_names(self) -> None:
        test = points(30, 2, seed=1, names=("b", "a"))
        train = points(60, 2, seed=0, names=("a", "b"))
        assert linear_probe(points_model(), train, test).accuracy == 0.0

    def test_against_scikit_learn(self, zoo: Zoo) -> None:
        model = open_model(zoo["siglip_vision-base"])
        train, test = read_plain(zoo.data, "train"), read_plain(zoo.data, "test")
        module = load(zoo["siglip_vision-base"])
        with torch.no_grad():
            seen, unseen = (module(pixels(data)).pooler_output.double().numpy() for data in (train, test))
        mean, std = seen.mean(0), seen.std(0)
        probe = LogisticRegression(max_iter=2000, tol=1e-6).fit((seen - mean) / std, train.labels)
        expected = 100 * float((probe.predict((unseen - mean) / std) == test.labels).mean())
        done: list[int] = []
        assert linear_probe(model, train, test, progress=done.append).accuracy == pytest.approx(expected)
        assert sum(done) == 90

    def test_a_single_class_is_refused(self) -> None:
        train = points(10, 2, seed=0).subset([0, 2, 4])
        with pytest.raises(DataError, match="at least two classes; points shows one"):
            linear_probe(points_model(), train, points(4, 2, seed=1))

    @pytest.mark.parametrize("side", ["train", "test"])
    def test_data_without_labels_are_refused(self, side: str) -> None:
        data: dict[str, Any] = {"train": points(10, 2, seed=0), "test": points(10, 2, seed=1)}
        data[side] = Dataset(data[side].inputs, None, (), name="bare", kind="image")
        with pytest.raises(DataError, match="a linear probe needs labels: bare has none"):
            linear_probe(points_model(), data["train"], data["test"])


def test_features_keep_the_order_of_the_samples(zoo: Zoo) -> None:
    model, test = open_model(zoo["vit-base"]), read_plain(zoo.data, "test")
    with torch.no_grad():
        expected = load(zoo["vit-base"]).vit(pixels(test)).last_hidden_state[:, 0]
    found = compute_features(model, test, batch_size=8)
    assert found.shape == (30, 16)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_batches_are_encoded_in_order() -> None:
    data = points(5, 2, seed=0)
    found = each_batch(lambda batch: batch["input"], points_model(), data, 2)
    assert list(map(len, found)) == [2, 2, 1]
    assert torch.equal(torch.cat(found), torch.tensor(np.stack(data.inputs)).float())


def test_an_image_model_refuses_texts(zoo: Zoo, tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a", "label": "cat"}\n{"text": "b", "label": "dog"}\n')
    data = read_plain(path, "test")
    model = open_model(zoo["vit-base"])
    head = choose_head(model, None, data)
    for attempt in (lambda: zero_shot(model, head, data), lambda: linear_probe(model, data, data)):
        with pytest.raises(DataError, match=r"texts holds texts, but .*vit-base reads images"):
            attempt()


def test_empty_data_are_refused() -> None:
    model, some = points_model(), points(6, 2, 0)
    writes = Generation("causal", lambda *_: None, lambda m, b, *_: m(**b))
    none = some.subset([])
    head = Head("points", some.classes, torch.eye(2), 1.0)
    for score in (
        lambda: zero_shot(model, head, none),
        lambda: linear_probe(model, some, none),
        lambda: perplexity(replace(model, generation=writes), none),
    ):
        with pytest.raises(DataError, match=r"points has no samples: give data with some\."):
            score()


def test_a_module_of_no_known_family_is_refused() -> None:
    model = describe_any(toy.ToyViT())
    with pytest.raises(TuneportError, match="ToyViT gives no features"):
        compute_features(model, points(4, 2, seed=0))
    with pytest.raises(TuneportError, match="ToyViT cannot read raw samples"):
        zero_shot(model, Head("h", ("0", "1"), torch.eye(2)), points(4, 2, seed=0))
