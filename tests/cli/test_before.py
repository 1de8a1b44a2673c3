"""What a port of a classifier is compared with: every row equals a script of plain transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

from builders.commands import Run, options
from builders.folders import CLASSES, Zoo, images, write_processor


def plain(folder: Path, data: Path) -> tuple[list[str], float]:
    """The classes that transformers alone finds on the test split, and the accuracy in percent."""
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    stored = np.load(data)
    pixels = processor([Image.fromarray(image) for image in stored["x_test"]], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        found = model(pixel_values=pixels).logits.argmax(-1).tolist()
    names = [model.config.id2label[index] for index in found]
    wanted = [str(stored["classes"][label]) for label in stored["y_test"]]
    return names, 100 * sum(one == two for one, two in zip(names, wanted, strict=True)) / len(names)


def write_images(path: Path, labels: NDArray[np.int64] | None = None, test: int = 60) -> Path:
    """Images for training and test, with other labels of the test split if they are given."""
    x_train, y_train = images(30, 1, 3)
    x_test, y_test = images(test, 2, 3)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test if labels is None else labels}
    np.savez(path, **arrays, classes=np.array(CLASSES))
    return path


@pytest.mark.parametrize("shift", [0, 1])
def test_the_target_is_scored_with_its_own_head(run: Run, zoo: Zoo, tmp_path: Path, shift: int) -> None:
    """By labels that its own head has always right, or always wrong."""
    target, out = zoo["vit-target"], tmp_path / "out"
    names, _ = plain(target, write_images(tmp_path / "drawn.npz"))
    data = write_images(tmp_path / "known.npz", (np.array([CLASSES.index(name) for name in names]) + shift) % 3)
    wanted = 0.0 if shift else 100.0
    assert plain(target, data)[1] == wanted
    given = options(zoo, "vit", data=data, scale=1, samples=30, out=out)
    done = run("transfer", *given, "--accept-unlikely", "--evaluate", "--fail-on-harm", "--json")
    assert done.code == (0 if shift else 3), done.err
    assert shift or done.json["outcome"] == "harm"
    assert done.json["evaluation"]["before"] == wanted
    assert run("evaluate", target, "--data", data, "--json").json["accuracy"] == wanted
    rows = {row["role"]: row for row in done.json["accuracies"]}
    assert (rows["target"]["words"], rows["target"]["head"]) == ("the target as it was", "own")
    assert rows["port"]["head"] == "fitted"
    for role, folder in {"finetuned": zoo["vit-tuned"], "port": out}.items():
        assert rows[role]["value"] == pytest.approx(plain(folder, data)[1], abs=1e-9)


def test_a_bare_target_gets_a_head_as_the_port_does(run: Run, zoo: Zoo, tmp_path: Path) -> None:
    """At scale 0 the output is the target with its head alone: the head's gain is not the port's."""
    module = transformers.ViTModel.from_pretrained(zoo["vit-target"])  # with a pooler, which a classifier has not
    module.save_pretrained(bare := tmp_path / "bare")
    write_processor(bare, module.config.image_size)
    data, found = write_images(tmp_path / "data.npz", test=400), {}
    for scale in (0, 2):
        out = tmp_path / f"at-{scale}"
        given = options(zoo, "vit", target=bare, data=data, scale=scale, samples=30, out=out)
        done = run("transfer", *given, "--accept-unlikely", "--evaluate", "--json")
        assert done.code == 0, done.err
        found[scale] = done.json
        assert done.json["evaluation"]["after"] == pytest.approx(plain(out, data)[1], abs=1e-9)
    for record in found.values():
        assert record["evaluation"]["before"] == found[0]["evaluation"]["after"]
        row = record["accuracies"][1]
        assert (row["words"], row["head"]) == ("the target with a head fitted as the port's", "fitted")
    assert found[0]["outcome"] == "no clear change"
    assert found[2]["evaluation"]["after"] != found[2]["evaluation"]["before"]
