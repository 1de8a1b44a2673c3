"""Data that say too little: a transfer that moves nothing is an error, and poor samples give a note."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from builders.commands import Run, assert_refused, npz, options
from builders.folders import CLASSES, Zoo, images
from tuneport import transfer
from tuneport.errors import MethodError
from tuneport.models.open import open_model


def with_head(zoo: Zoo, name: str, place: Path) -> Path:
    """A copy of a model with a head whose classes have one embedding."""
    folder = Path(shutil.copytree(zoo[name], place / name))
    width = open_model(folder).module.config.projection_dim
    head = {"class_embeds": torch.ones(len(CLASSES), width), "logit_scale": torch.tensor(1.0)}
    (folder / "heads").mkdir(exist_ok=True)
    save_file(head, folder / "heads" / "same.safetensors", {"classes": json.dumps(CLASSES)})
    return folder


PARTS = {"source": "base", "target": "target"}


class TestNothingMoved:
    def test_identical_class_embeddings(self, run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
        models = {key: with_head(zoo, f"clip_vision-{part}", tmp_path) for key, part in PARTS.items()}
        done = run("transfer", "--scale=1", *options(zoo, **models, head="same"), "--out", place / "out")
        assert_refused(done, 1, f"DataError: all {len(CLASSES)} classes of the head same of", "have one embedding")
        assert list(place.iterdir()) == []

    def test_a_scale_of_zero_is_a_choice(self, zoo: Zoo) -> None:
        assert transfer(*zoo.trio("clip_vision"), zoo.data, samples=8, scale=0).scale == 0

    def test_a_loss_without_gradient(self, zoo: Zoo) -> None:
        def constant(module: torch.nn.Module, batch: Any) -> torch.Tensor:
            return 0 * module(pixel_values=batch[0]["pixel_values"])[0].sum()

        with pytest.raises(MethodError, match="nothing was moved: the output gradient at this layer is zero"):
            transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=8, loss=constant)


class TestPoorSamples:
    @pytest.mark.parametrize(
        ("kind", "samples", "words"),
        [
            ("white", 24, "every image of the 24 samples has one colour"),
            ("plain", 24, "every image of the 24 samples has one colour"),
            ("identical", 24, "all 24 samples are identical"),
            ("noise", 1, "there is one sample"),
            ("two", 24, None),
        ],
    )
    def test_images(
        self, run: Run, zoo: Zoo, tmp_path: Path, place: Path, kind: str, samples: int, words: str | None
    ) -> None:
        x, y = images(24, seed=1)
        given = {
            "white": np.full_like(x, 255),
            "plain": np.broadcast_to(np.arange(24, dtype=np.uint8)[:, None, None, None], x.shape),
            "identical": np.broadcast_to(x[:1], x.shape),
            "noise": x,
            "two": np.where(np.arange(24)[:, None, None, None] == 7, x[1], x[0]),
        }[kind]
        data = npz(tmp_path / "x.npz", x_train=given, y_train=y, x_test=given, y_test=y, classes=np.array(CLASSES))
        given_options = options(zoo, data=data, samples=samples, out=place / "out", scale=1)
        done = run("transfer", *given_options, "--no-evaluate", "--json")
        assert done.code == 0, done.err
        if words is None:
            assert "notes" not in done.json
            assert done.warnings == ""
            return
        (note,) = done.json["notes"]
        assert note.startswith(words)
        assert done.warnings == f"note: {note}\n"
        assert f"Note: {note}" in (place / "out" / "README.md").read_text()
        assert f"Note: {note}" in (place / "out" / "report.html").read_text()

    def test_one_token(self, zoo: Zoo) -> None:
        result = transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=8, max_tokens=1)
        (note,) = result.record["notes"]
        assert note.startswith("there is one token to measure")
        assert "notes" not in transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=8, max_tokens=2).record
