"""Targets without a head: the row that scores them with a fitted one, against a head that NumPy fits from the files.

The rule is that of the docs: a ridge regression with a free intercept, from what the head reads of all calibration
samples to the scores of the old model, centred over the classes; the penalty has the least squared leave-one-out error.
Here each sample is really left out, one after the other. All runs in float64, so that rounding decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import load_file

from builders.classifiers import CLASSES, WIDER, bert, write_classifier
from builders.folders import CLASSES as ANIMALS
from builders.folders import Zoo, images, write_processor
from builders.texts import SENTENCES

if TYPE_CHECKING:
    from builders.commands import Run

Rows = NDArray[np.float64]
FACTORS = np.logspace(-10, 3, 27)  # of the mean squared singular value of the centred inputs
TRAIN, TEST = 36, 40


def scores_of(kind: str, folder: Path, inputs: Sequence[Mapping[str, Any]], pick: Callable[[Any], Any]) -> Rows:
    """What plain transformers gives in float64, sample by sample."""
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return np.stack([pick(model(**each))[0].numpy() for each in inputs])


def fit(X: Rows, Y: Rows, penalty: float) -> tuple[Rows, Rows]:
    """Minimise |Y - X W^T - b|^2 + penalty |W|^2 by the normal equations."""
    x, y = X - X.mean(0), Y - Y.mean(0)
    W = np.linalg.solve(x.T @ x + penalty * np.eye(X.shape[1]), x.T @ y).T
    return W, Y.mean(0) - W @ X.mean(0)


def fit_head(X: Rows, scores: Rows) -> tuple[Rows, Rows, float]:
    """The head of the docs, and the condition of its equations."""
    Y = scores - scores.mean(1, keepdims=True)
    energy = np.linalg.svd(X - X.mean(0), compute_uv=False) ** 2
    typical = energy.mean()
    others = [np.delete(np.arange(len(X)), row) for row in range(len(X))]

    def error(penalty: float) -> float:
        heads = [fit(X[rows], Y[rows], penalty) for rows in others]
        return sum(float(np.sum((y - W @ x - b) ** 2)) for (W, b), x, y in zip(heads, X, Y, strict=True))

    penalty = typical * min(FACTORS, key=lambda factor: error(typical * factor))
    return *fit(X, Y, penalty), 1 + energy.max() / penalty


@dataclass
class Cell:
    """The folders, and what plain transformers says of the samples: old scores, and what a head of the target reads."""

    models: dict[str, Path]
    old: Rows
    read: Rows
    write: Callable[[Sequence[int]], Path]  # data whose test samples have these labels


def images_cell(zoo: Zoo, folder: Path) -> Cell:
    module = transformers.ViTModel.from_pretrained(zoo["vit-target"])
    module.save_pretrained(bare := folder / "bare")
    write_processor(bare, module.config.image_size)
    pixels = np.concatenate([images(TRAIN, 1)[0], images(TEST, 2)[0]])

    def inputs(home: Path) -> list[Mapping[str, Any]]:
        processor = transformers.AutoImageProcessor.from_pretrained(home)
        found = [processor(Image.fromarray(each), return_tensors="pt")["pixel_values"] for each in pixels]
        return [{"pixel_values": each.double()} for each in found]

    def write(labels: Sequence[int]) -> Path:
        arrays = {"x_train": pixels[:TRAIN], "y_train": np.arange(TRAIN) % 3, "x_test": pixels[TRAIN:]}
        np.savez(folder / "data.npz", **arrays, y_test=np.array(labels), classes=np.array(ANIMALS))
        return folder / "data.npz"

    source, tuned, _ = zoo.trio("vit")
    old = scores_of("ViTForImageClassification", tuned, inputs(tuned), lambda found: found.logits)
    read = scores_of("ViTModel", bare, inputs(bare), lambda found: found.last_hidden_state[:, 0])
    return Cell({"source": source, "finetuned": tuned, "target": bare}, old, read, write)


def texts_cell(_: Zoo, folder: Path) -> Cell:
    target = bert("BertForSequenceClassification", WIDER).bert  # with a pooler, so that nothing of it is drawn
    source, tuned, bare, _ = write_classifier(folder, target)
    texts = list(dict.fromkeys(f"{one}, {two}" for one in SENTENCES for two in SENTENCES))[: TRAIN + TEST]
    assert len(texts) == TRAIN + TEST

    def inputs(home: Path) -> list[Mapping[str, Any]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(home)
        return [tokenizer(text, truncation=True, return_tensors="pt") for text in texts]

    def logits() -> Rows:
        return scores_of("BertForSequenceClassification", tuned, inputs(tuned), lambda found: found.logits)

    def write(labels: Sequence[int]) -> Path:
        names = [CLASSES[number] for number in (*(np.arange(TRAIN) % 3), *labels)]
        rows = [{"text": text, "label": name} for text, name in zip(texts, names, strict=True)]
        lines = [{**row, "split": "train" if at < TRAIN else "test"} for at, row in enumerate(rows)]
        (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder / "data.jsonl"

    model = transformers.BertForSequenceClassification.from_pretrained(tuned)
    model.classifier.bias.data -= torch.as_tensor(logits().mean(0)).float()  # so that no class has all texts
    model.save_pretrained(tuned)
    old = logits()
    read = scores_of("BertModel", bare, inputs(bare), lambda found: found.pooler_output)
    return Cell({"source": source, "finetuned": tuned, "target": bare}, old, read, write)


@pytest.mark.parametrize("make", [images_cell, texts_cell])
def test_the_head_and_its_row(run: Run, zoo: Zoo, tmp_path: Path, make: Callable[[Zoo, Path], Cell]) -> None:
    """The row has three of four right by the labels that this head gives; at scale 0 it is the head that is written."""
    cell = make(zoo, tmp_path)
    weight, bias, condition = fit_head(cell.read[:TRAIN], cell.old[:TRAIN])
    # one rounding to float32, and those of a solution in float64
    bound = (np.finfo(np.float32).eps + 100 * np.finfo(np.float64).eps * condition) * np.abs(weight).max()
    scores = cell.read[TRAIN:] @ weight.T + bias
    best = np.sort(scores, 1)
    assert (best[:, -1] - best[:, -2]).min() > 1e-6 * np.abs(scores).max(), "a tie: rounding decides"
    found = scores.argmax(1)
    assert len(set(found)) > 1
    data = cell.write(np.where(np.arange(TEST) % 4, found, (found + 1) % 3).tolist())
    given = [word for name, path in cell.models.items() for word in (f"--{name}", path)]
    given += ["--data", data, "--samples", TRAIN, "--dtype", "float64", "--accept-unlikely", "--evaluate", "--json"]
    for scale in (1, 0):
        out = tmp_path / f"at-{scale}"
        done = run("transfer", *given, "--scale", scale, "--out", out)
        assert done.code == 0, done.err
        record = json.loads((out / "tuneport.json").read_text(encoding="utf-8"))
        rows = {row["role"]: row for row in record["accuracies"]}
        assert (rows["target"]["value"], rows["target"]["head"]) == (75.0, "fitted")
        assert record["evaluation"]["before"] == done.json["evaluation"]["before"] == 75.0
        stored = load_file(out / "model.safetensors")
        near = np.abs(stored["classifier.weight"] - weight).max() < bound
        assert near == (scale == 0)
    assert rows["port"]["value"] == 75.0
    assert np.abs(stored["classifier.bias"] - bias).max() < bound * (1 + np.abs(cell.read).sum(1).max())
