"""Everything that can be wrong with the input is found before the first forward pass."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from builders.folders import SAMPLES, Zoo, edit_weights, write_data
from tuneport.config import TransferConfig
from tuneport.data import tasks
from tuneport.data.formats import read_plain
from tuneport.errors import CheckpointError, DataError
from tuneport.pipeline.transfer import prepare, transfer


@pytest.mark.usefixtures("no_forward")
class TestRefusals:
    def test_nothing_changed(self, zoo: Zoo) -> None:
        base = zoo["vit-base"]
        with pytest.raises(CheckpointError, match="equals its base in every tensor: there is nothing to transfer"):
            transfer(base, base, zoo["vit-target"], zoo.data, scale=1, samples=SAMPLES)

    @pytest.mark.parametrize("part", ["base", "tuned", "target"])
    def test_nan_weights(self, zoo: Zoo, tmp_path: Path, part: str) -> None:
        folders = {name: zoo[f"vit-{name}"] for name in ("base", "tuned", "target")}
        folders[part] = Path(shutil.copytree(folders[part], tmp_path / part))
        edit_weights(folders[part], lambda t: t["vit.layernorm.weight"].fill_(torch.nan))
        with pytest.raises(CheckpointError, match=r"hold NaN or infinite values: vit\.layernorm\.weight") as caught:
            transfer(*folders.values(), zoo.data, scale=1, samples=SAMPLES)
        assert str(folders[part]) in str(caught.value)

    def test_classes_that_the_head_does_not_know(self, zoo: Zoo, tmp_path: Path) -> None:
        data = write_data(tmp_path / "animals.npz", ("cat", "dog", "owl", "gnu"))
        with pytest.raises(DataError, match="1 of 4 classes of animals are unknown to the head: gnu"):
            transfer(*zoo.trio("vit"), data, scale=1, samples=SAMPLES)

    def test_text_for_an_image_model(self, zoo: Zoo, tmp_path: Path) -> None:
        (tmp_path / "texts.jsonl").write_text('{"text": "a", "label": "cat"}\n{"text": "b", "label": "dog"}\n')
        with pytest.raises(DataError, match=r"texts holds texts, but .*vit-base reads images"):
            transfer(*zoo.trio("vit"), tmp_path / "texts.jsonl", scale=1, samples=2)

    def test_more_samples_than_there_are(self, zoo: Zoo) -> None:
        with pytest.raises(DataError, match="asked for 61 samples but train split of animals has 60"):
            transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=61)

    def test_the_fine_tune_of_another_model(self, zoo: Zoo) -> None:
        with pytest.raises(CheckpointError, match=r"Check that .* was fine-tuned from"):
            transfer(zoo["vit-base"], zoo["dinov2-tuned"], zoo["vit-target"], zoo.data, scale=1, samples=SAMPLES)


def test_the_training_split_is_read_once(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where samples cannot be scored, and the objective is chosen a second time without a loss."""
    data = write_data(tmp_path / "animals.npz", ("cat", "dog", "owl", "gnu"))  # the heads do not know them all
    reads: list[str] = []

    def counted(place: Path, split: Any, **options: Any) -> Any:
        reads.append(split)
        return read_plain(place, split, **options)

    monkeypatch.setattr(tasks, "read_plain", counted)
    setup = prepare(*zoo.trio("vit"), data, TransferConfig(method="theseus", samples=SAMPLES, head_fit="none"))
    assert setup.calibration.loss_name is None
    assert reads == ["train"]
