"""Image classifiers: what is said of the old model, the target and the output, against plain transformers and peft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import plain
from builders.folders import CLASSES, Zoo, images, load
from builders.loras import adapted, saved

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft
KIND = "AutoModelForImageClassification"


def write_data(path: Path, old: Path, base: Path | None) -> Path:
    """Images; the old model has three of four test labels right."""
    (x_train, y_train), x_test = images(24, 1), images(24, 2)[0]
    model = plain.load(KIND, old, base)
    found = plain.logits(model, plain.pixels_of(model, x_test)).argmax(1)
    y_test = np.where(np.arange(len(x_test)) % 4, found, (found + 1) % 3)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=np.array(CLASSES))
    return path


def score(data: Path, folder: Path, base: Path | None) -> dict[str, float]:
    model, arrays = plain.load(KIND, folder, base), np.load(data)
    labels = [str(arrays["classes"][number]) for number in arrays["y_test"]]
    found = plain.logits(model, plain.pixels_of(model, arrays["x_test"]))
    return {"accuracy": plain.accuracy(found, model.classes, labels), "samples": len(labels)}


@pytest.mark.parametrize("as_", ["model", "adapter"])
def test_accuracy(agree: Callable[..., Any], zoo: Zoo, tmp_path: Path, as_: str) -> None:
    source, finetuned, target = zoo.trio("vit")
    if as_ == "adapter":
        finetuned = saved(adapted(load(source), target_modules=["q_proj", "fc1"]), tmp_path / "lora")
    data = write_data(tmp_path / "animals.npz", finetuned, source if as_ == "adapter" else None)
    models = {"source": source, "finetuned": finetuned, "target": target, "data": data}
    found = agree(models, tmp_path / "out", as_, lambda *folders: score(data, *folders))
    assert found["source"]["accuracy"] == 75.0
    assert len({each["accuracy"] for each in found.values()}) == 3
