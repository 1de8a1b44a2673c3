"""Excluded tensors, and the reasons that a transfer gives for what stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from builders.folders import SAMPLES, Zoo, cross, edit_weights
from tuneport.errors import CheckpointError
from tuneport.pipeline.transfer import transfer


class TestExclude:
    def test_layers_stay_behind_with_the_reason(self, zoo: Zoo) -> None:
        result = cross(zoo, "vit", "vit", exclude=["classifier.*", "*.attention.query.weight"])
        reasons = {item.tensor: item.reason for item in result.not_transported}
        assert reasons["classifier.weight"] == reasons["classifier.bias"] == "excluded"
        assert reasons["vit.encoder.layer.2.attention.attention.query.weight"] == "excluded"
        assert not {"classifier.weight", "classifier.bias"} & set(result.task_vector)
        assert not any("q_proj" in record.target for record in result.records)

    def test_biases_alone(self, zoo: Zoo) -> None:
        result = cross(zoo, "vit", "vit", exclude=["*.bias"])
        assert len(result.records) == 20
        assert not any(name.endswith(".bias") for name in result.task_vector)
        reasons = {item.tensor: item.reason for item in result.not_transported}
        assert reasons["classifier.bias"] == "excluded"
        whole = cross(zoo, "vit", "vit")
        for name in result.task_vector:
            assert torch.equal(result.task_vector.dense(name), whole.task_vector.dense(name))

    def test_a_new_head_on_the_fine_tune(self, zoo: Zoo, tmp_path: Path) -> None:
        tuned = Path(shutil.copytree(zoo["vit-tuned"], tmp_path / "tuned"))
        edit_weights(
            tuned, lambda t: t.update({"classifier.weight": torch.ones(5, 16), "classifier.bias": torch.ones(5)})
        )
        with pytest.raises(CheckpointError, match=r"classifier.weight \(5, 16\) vs \(3, 16\).*`exclude=\[\"classifier"):
            transfer(zoo["vit-base"], tuned, zoo["vit-target"], zoo.data, samples=SAMPLES)
        result = transfer(
            zoo["vit-base"], tuned, zoo["vit-target"], zoo.data, samples=SAMPLES, exclude=["classifier.*"]
        )
        assert len(result.records) == 19
