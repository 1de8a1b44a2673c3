"""Excluded tensors, and the reasons that a transfer gives for what stays."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from builders.folders import SAMPLES, Zoo, cross, edit_weights
from builders.runs import prepare
from tuneport.errors import CheckpointError, MethodError, PairingError
from tuneport.pipeline.estimate import check_same_shapes
from tuneport.pipeline.transfer import transfer
from tuneport.types import Sides


class TestExclude:
    def test_layers_stay_behind_with_the_reason(self, zoo: Zoo) -> None:
        result = cross(zoo, "vit", "vit", exclude=["classifier.*", "*.attention.query.weight"])
        reasons = {item.tensor: item.reason for item in result.not_transported}
        assert reasons["classifier.weight"] == reasons["classifier.bias"] == "excluded"
        assert reasons["vit.encoder.layer.2.attention.attention.query.weight"] == "excluded"
        assert not {"classifier.weight", "classifier.bias"} & set(result.task_vector)
        assert not any("q_proj" in record.target for record in result.records)

    def test_biases_alone(self, zoo: Zoo) -> None:
        result = cross(zoo, "vit", "vit", exclude=["*.bias"], head_fit="none")
        assert len(result.records) == 20
        assert not any(name.endswith(".bias") for name in result.task_vector)
        reasons = {item.tensor: item.reason for item in result.not_transported}
        assert reasons["classifier.bias"] == "excluded"
        whole = cross(zoo, "vit", "vit", head_fit="none")
        for name in result.task_vector:
            assert torch.equal(result.task_vector.dense(name), whole.task_vector.dense(name))

    def test_a_new_head_on_the_fine_tune(self, zoo: Zoo, tmp_path: Path) -> None:
        tuned = Path(shutil.copytree(zoo["vit-tuned"], tmp_path / "tuned"))
        edit_weights(
            tuned, lambda t: t.update({"classifier.weight": torch.ones(5, 16), "classifier.bias": torch.ones(5)})
        )
        with pytest.raises(CheckpointError, match=r"classifier.weight \(5, 16\) vs \(3, 16\).*`exclude=\[\"classifier"):
            transfer(zoo["vit-base"], tuned, zoo["vit-target"], zoo.data, scale=1, samples=SAMPLES)
        result = transfer(
            zoo["vit-base"], tuned, zoo["vit-target"], zoo.data, samples=SAMPLES, exclude=["classifier.*"]
        )
        assert len(result.records) == 19


class TestUnlike:
    def test_sequences_of_another_depth_are_not_paired_by_number(self) -> None:
        """A head of 3 classes at place 2 is not a hidden layer of 48 units at place 2."""

        def network(*widths: int) -> nn.Module:
            layers = ((nn.Linear(one, two), nn.ReLU()) for one, two in pairwise(widths))
            return nn.Sequential(*(part for layer in layers for part in layer))

        source, target = network(8, 16, 3), network(8, 48, 48, 3)
        tuned = copy.deepcopy(source)
        with torch.no_grad():
            for parameter in tuned.parameters():
                parameter.add_(1.0)
        with pytest.raises(PairingError, match="no layer of the target has a partner"):
            prepare(source, tuned, target, signals="naive")
        whole = nn.ModuleDict({"proj": nn.Linear(4, 8), "net": source})
        moved, other = copy.deepcopy(whole), nn.ModuleDict({"proj": nn.Linear(4, 8), "net": target})
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.add_(1.0)
        plan = prepare(whole, moved, other, signals="naive").plan
        assert [pair.target.weight for pair in plan.pairs] == ["proj.weight"]
        reasons = {item.tensor: item.reason for item in plan.kept}
        assert "Sequential of another depth" in reasons["net.2.weight"]

    def test_a_classifier_of_another_size_is_not_paired(self) -> None:
        def network(classes: int) -> nn.Module:
            return nn.ModuleDict({"proj": nn.Linear(4, 8), "classifier": nn.Linear(8, classes)})

        source, tuned, target = network(6), network(6), network(3)
        for method in ("naive", "theseus"):
            plan = prepare(source, tuned, target, [], signals=method, loss=lambda *_: torch.zeros(())).plan
            assert [pair.target.weight for pair in plan.pairs] == ["proj.weight"]


def test_tensors_that_cannot_be_copied_are_counted_by_their_reason(zoo: Zoo) -> None:
    """Into a shallower model: whole blocks are missing, which is no matter of shape."""
    setup = prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES).setup
    target = setup.models.target
    shallow = copy.deepcopy(target.module)
    del shallow.vit.layers[1:]  # type: ignore[attr-defined]
    models = Sides(setup.models.source, replace(target, module=shallow))
    names = [name for name in setup.change.vector if name not in dict(shallow.named_parameters())]
    assert 0 < len(names) < len(setup.change.vector)
    words = rf"^of {len(setup.change.vector)} changed tensors, {len(names)} are of layers .* \({names[0]}, .*"
    words += rf"and {len(setup.change.vector) - len(names)} have another shape there \("
    with pytest.raises(MethodError, match=words):
        check_same_shapes(replace(setup, models=models))
