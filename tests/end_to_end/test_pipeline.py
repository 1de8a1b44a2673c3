"""Transfers from end to end: on folders of every family and on live modules."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from builders import toy
from builders.folders import (
    CLASSES,
    FAMILIES,
    SAMPLES,
    Zoo,
    cross,
    edit_json,
    edit_weights,
    images,
    load,
    perturb,
    same,
)
from builders.runs import prepare
from builders.samples import empty_dataset
from tuneport import TuneportError
from tuneport.data.dataset import Dataset, Origin, align_labels
from tuneport.data.formats import read_plain
from tuneport.errors import DataError, MethodError, PairingError
from tuneport.methods import METHODS, Method, Problem, Transfer, get_method
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model
from tuneport.pairing import LayerPair
from tuneport.pipeline.arithmetic import extract
from tuneport.pipeline.plan import NO_PARAMETER
from tuneport.pipeline.transfer import Result, transfer
from tuneport.task_vectors.vector import TaskVector

ONE_ARCHITECTURE = {"gradfix", "gradfix_mean", "transfusion"}  # the methods that serve no other pair
CROSSINGS = [
    *((family, family) for family in FAMILIES),
    ("vit", "dinov2"),
    ("dinov2", "vit"),
    ("clip", "clip_vision"),
    ("clip_vision", "siglip_vision"),
    ("vit", "clip_vision"),
]


def outputs(module: nn.Module, model: Any) -> Tensor:
    """What a user computes with the model: logits where it has them, else features."""
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        forward = model.outputs.logits or model.outputs.features
        return forward(module, {"pixel_values": pixels})


@pytest.mark.parametrize(("source", "target"), CROSSINGS, scope="class")
class TestEveryCrossing:
    @pytest.fixture(scope="class")
    def result(self, zoo: Zoo, source: str, target: str) -> Result:
        return cross(zoo, source, target, head_fit="none")

    def test_moves_layers_and_accounts_for_every_tensor(
        self, zoo: Zoo, source: str, target: str, result: Result
    ) -> None:
        assert result.record["source"]["name"] == f"{source}-base"
        names = result.target.weights.file_names
        moved = {names[name] for name in result.task_vector}
        kept = [item.tensor for item in result.not_transported]
        stored = load_file(zoo[f"{target}-target"] / "model.safetensors")
        assert moved
        assert not moved & set(kept)
        assert len(kept) == len(set(kept))
        assert moved | set(kept) == set(stored)
        assert all(item.reason and item.reason != NO_PARAMETER for item in result.not_transported)
        for name in result.task_vector:
            assert tuple(result.task_vector.shape(name)) == tuple(stored[names[name]].shape)
            assert bool(result.task_vector.dense(name).isfinite().all())

    def test_apply_is_what_the_saved_folder_loads(
        self, zoo: Zoo, source: str, target: str, result: Result, tmp_path: Path
    ) -> None:
        result.save(tmp_path / "out")
        applied, loaded = result.apply(), load(tmp_path / "out")
        for (name, one), (_, other) in zip(applied.named_parameters(), loaded.named_parameters(), strict=True):
            assert torch.equal(one, other), name
        assert torch.equal(outputs(applied, result.target), outputs(loaded, result.target))
        before = outputs(load(zoo[f"{target}-target"]), result.target)
        assert not torch.equal(outputs(applied, result.target), before), f"{source} changed nothing"
        assert torch.equal(outputs(result.target.module, result.target), before), "the target itself is untouched"


@pytest.mark.parametrize("family", ["vit", "siglip"])
def test_a_float16_target_stays_float16_and_apply_is_exact(zoo: Zoo, tmp_path: Path, family: str) -> None:
    result = cross(zoo, family, family, "target16")
    result.save(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    applied, loaded = result.apply(), load(tmp_path / "out")
    assert torch.equal(outputs(applied, result.target), outputs(loaded, result.target))


def test_the_same_roles_are_paired_by_the_depth_rule(zoo: Zoo) -> None:
    result = cross(zoo, "clip_vision", "clip_vision")
    by_target = {record.target: record.source for record in result.records}
    start = "vision_model.encoder.layers"
    assert [by_target[f"{start}.{j}.mlp.fc1.weight"] for j in range(3)] == [
        f"{start}.{i}.mlp.fc1.weight"
        for i in (0, 1, 1)  # floor(j / 2 + 1/2)
    ]
    assert by_target["visual_projection.weight"] == "visual_projection.weight"
    for record in result.records:
        assert record.norm_source > 0
        assert 0 < record.norm_target <= record.norm_source * (1 + 1e-6), "an orthogonal map never lengthens"


def test_class_logits_of_one_label_set_are_not_aligned(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo["dinov2-target"], tmp_path / "reordered"))
    edit_json(folder / "config.json", id2label={"0": "owl", "1": "cat", "2": "dog"}, label2id=None)
    for method in ("bico", "theseus"):
        trio = zoo["vit-base"], zoo["vit-tuned"], folder
        result = transfer(*trio, zoo.data, scale=1, samples=SAMPLES, method=method, head_fit="none")
        bias = load(zoo["vit-tuned"]).classifier.bias - load(zoo["vit-base"]).classifier.bias  # cat, dog, owl
        torch.testing.assert_close(result.task_vector.dense("classifier.bias"), bias.detach()[[2, 0, 1]])
        record = next(record for record in result.records if record.target == "classifier.weight")
        assert (record.rank_out, record.residual_out) == (None, None)
        assert record.rank_in is not None
        assert result.task_vector.shape("classifier.weight") == (3, 48), "DINOv2 classifies two tokens side by side"


@pytest.mark.parametrize(("method", "head_fit"), [("bico", "auto"), ("theseus", "none")])
def test_a_head_for_other_classes_is_never_moved(zoo: Zoo, tmp_path: Path, method: str, head_fit: str) -> None:
    folder = Path(shutil.copytree(zoo["vit-target"], tmp_path / "more"))
    edit_json(folder / "config.json", id2label={str(i): c for i, c in enumerate((*CLASSES, "emu"))}, label2id=None)

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors["classifier.weight"] = torch.cat([tensors["classifier.weight"], torch.ones(1, 24)])
        tensors["classifier.bias"] = torch.cat([tensors["classifier.bias"], torch.ones(1)])

    edit_weights(folder, widen)
    trio = zoo["vit-base"], zoo["vit-tuned"], folder
    result = transfer(*trio, zoo.data, scale=1, samples=SAMPLES, method=method, head_fit=head_fit)
    assert not {"classifier.weight", "classifier.bias"} & set(result.task_vector)
    module = result.apply()
    own = load_file(folder / "model.safetensors")["classifier.weight"]
    if head_fit == "none":
        assert torch.equal(module.classifier.weight, own)
    else:
        assert module.classifier.weight.shape == (3, 24), "those of the fine-tune"


class TestMethods:
    def test_naive_needs_no_data(self, zoo: Zoo) -> None:
        trio = zoo.trio("clip_vision")
        result = transfer(*trio, method="naive")
        assert result.record["samples"] == 0
        base, tuned = (load_file(folder / "model.safetensors") for folder in trio[:2])
        name = "vision_model.encoder.layers.0.mlp.fc1.weight"
        padded = F.pad(tuned[name] - base[name], (0, 8, 0, 16))
        torch.testing.assert_close(result.task_vector.dense(name), padded)
        assert all(record.rank_in is None and record.rank_out is None for record in result.records)

    def test_bico_without_data_says_so(self, zoo: Zoo) -> None:
        with pytest.raises(DataError, match="the method measures input and output_gradient and needs calibration data"):
            transfer(*zoo.trio("clip_vision"))

    def test_theseus_needs_neither_labels_nor_head(self, zoo: Zoo, tmp_path: Path) -> None:
        trio = [Path(shutil.copytree(path, tmp_path / path.name)) for path in zoo.trio("clip_vision")]
        for folder in trio:
            shutil.rmtree(folder / "heads")
        pixels, _ = images(30, 1)
        np.savez(tmp_path / "unlabelled.npz", x=pixels)
        result = transfer(*trio, tmp_path / "unlabelled.npz", method="theseus", scale=1, samples=SAMPLES)
        assert result.record["passes"] == {"forward": 1, "backward": 0}
        assert all(record.rank_in and record.rank_out for record in result.records if "patch" not in record.target)
        with pytest.raises(DataError, match="has no labels"):
            transfer(*trio, tmp_path / "unlabelled.npz", scale=1, samples=SAMPLES)

    @pytest.mark.parametrize("method", sorted(METHODS.keys() - ONE_ARCHITECTURE))
    def test_every_method_across_shapes(self, zoo: Zoo, method: str) -> None:
        result = cross(zoo, "vit", "vit", method=method)
        assert result.record["method"] == method
        assert len(result.task_vector) >= 20
        assert result.records
        assert result.task_vector.norm() > 0

    @pytest.mark.parametrize("method", sorted(ONE_ARCHITECTURE))
    def test_the_other_methods_between_twins(self, zoo: Zoo, method: str) -> None:
        base, tuned = zoo["clip_vision-base"], zoo["clip_vision-tuned"]
        result = transfer(base, tuned, base, zoo.data, method=method, scale=1, samples=SAMPLES)
        assert result.record["method"] == method
        assert result.records
        assert result.task_vector.norm() > 0

    def test_a_method_from_outside(self, zoo: Zoo, tmp_path: Path) -> None:
        @dataclass(frozen=True)
        class Doubled(Method):
            inner: Method

            @property
            def signals(self) -> frozenset[str]:
                return self.inner.signals

            def transfer(self, problem: Problem) -> Transfer:
                moved = self.inner.transfer(problem)
                return Transfer(TaskVector(dict(2 * moved.task_vector)), moved.records, moved.kept)

        plain = cross(zoo, "clip_vision", "clip_vision")
        doubled = cross(zoo, "clip_vision", "clip_vision", method=Doubled(get_method("bico")))
        assert doubled.record["method"] == "Doubled"
        assert same(doubled.task_vector, 2 * plain.task_vector)
        doubled.save(tmp_path / "out")
        assert "Doubled" in (tmp_path / "out" / "README.md").read_text()

    def test_an_unknown_method(self, zoo: Zoo) -> None:
        with pytest.raises(MethodError, match=r"unknown method 'bicco'\. Did you mean 'bico'\?"):
            transfer(*zoo.trio("clip_vision"), zoo.data, method="bicco")

    def test_the_source_itself_gets_its_task_vector_back_where_determined(self, zoo: Zoo) -> None:
        base, tuned = zoo["clip_vision-base"], zoo["clip_vision-tuned"]
        result = transfer(base, tuned, base, zoo.data, scale=1, samples=60)
        moved, tau = result.task_vector, extract(base, tuned)
        determined = 0
        for record in result.records:
            source, delta = tau.dense(record.target), moved.dense(record.target)
            full_in = record.rank_in in (None, source.flatten(1).shape[1])
            if full_in and record.rank_out == len(source):
                determined += 1
                torch.testing.assert_close(delta, source, atol=1e-5, rtol=1e-4)
        assert determined >= 4
        part = transfer(
            base, tuned, base, zoo.data, scale=1, samples=60, method=replace(get_method("bico"), completion="none")
        ).task_vector
        for name in part:
            assert part.norm(name) <= tau.norm(name) * (1 + 1e-5)


class TestDraws:
    def test_the_same_seed_writes_the_same_bytes(self, zoo: Zoo, tmp_path: Path) -> None:
        for run in ("one", "two"):
            cross(zoo, "vit", "vit", seed=5).save(tmp_path / run)
        weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("one", "two")]
        assert weights[0] == weights[1]
        records = [json.loads((tmp_path / run / "tuneport.json").read_text()) for run in ("one", "two")]
        for record in records:
            for volatile in ("seconds", "seconds_by_stage", "out"):
                record.pop(volatile)
        assert records[0] == records[1]

    def test_another_seed_draws_other_samples(self, zoo: Zoo) -> None:
        one, two = (cross(zoo, "vit", "vit", seed=seed) for seed in (0, 1))
        assert one.record["data"]["indices"] != two.record["data"]["indices"]
        assert not same(one.task_vector, two.task_vector)

    def test_the_size_of_the_batches_does_not_matter(self, zoo: Zoo) -> None:
        one, two = (cross(zoo, "vit", "vit", batch_size=size) for size in (5, 24))
        assert one.record["passes"]["forward"] == 5
        assert two.record["passes"]["forward"] == 1
        reading = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "fc1.weight", "classifier.weight")
        for name in one.task_vector:  # gradients at layers that write to the stream have no mean: not determined
            if name.endswith(reading):
                torch.testing.assert_close(one.task_vector.dense(name), two.task_vector.dense(name), atol=2e-3, rtol=0)

    def test_shots_and_samplers(self, zoo: Zoo) -> None:
        job = prepare(*zoo.trio("vit"), zoo.data, shots=4)
        assert len(job.samples) == 12
        assert len(prepare(*zoo.trio("vit"), zoo.data, samples=6, sampler="class_balanced").samples) == 6

    def test_labels_follow_the_names_not_the_numbers(self, zoo: Zoo) -> None:
        train = read_plain(zoo.data, "train")
        order = [2, 0, 1]
        names = tuple(train.classes[i] for i in order)
        assert train.labels is not None
        renumbered = np.argsort(order)[train.labels]
        reordered = Dataset(train.inputs, renumbered, names, name="animals", kind="image", origin=Origin("train"))
        one = transfer(*zoo.trio("clip_vision"), train, scale=1, samples=SAMPLES)
        two = transfer(*zoo.trio("clip_vision"), reordered, scale=1, samples=SAMPLES)
        assert same(one.task_vector, two.task_vector)
        wrong = Dataset(train.inputs, train.labels, names, name="animals", kind="image", origin=Origin("train"))
        assert not same(
            one.task_vector, transfer(*zoo.trio("clip_vision"), wrong, scale=1, samples=SAMPLES).task_vector
        )

    def test_gradients_are_those_of_the_aligned_labels(self, zoo: Zoo) -> None:
        job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=6)
        batch = next(iter(job.samples))
        inputs, labels = batch.source
        model = open_model(zoo["clip_vision-base"])
        head = choose_head(model, None, empty_dataset("animals", CLASSES))
        train = align_labels(read_plain(zoo.data, "train"), head.classes)
        assert labels.tolist() == train.subset(job.record["data"]["indices"]).labels.tolist()  # type: ignore[union-attr]
        scores = head.scores(model, model.module, inputs)
        by_hand = -torch.log_softmax(scores, -1)[torch.arange(6), labels].sum()
        assert job.losses is not None
        torch.testing.assert_close(job.losses.source(job.source.module, batch.source), by_hand)


class TestLiveModules:
    @pytest.fixture
    def toys(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        source = toy.ToyViT()
        return source, toy.finetuned(source), toy.ToyViT(width=16, depth=3, hidden=24, seed=1)

    def test_any_module_with_batches_and_a_loss(self, toys: tuple[nn.Module, ...]) -> None:
        before = [{name: tensor.clone() for name, tensor in module.state_dict().items()} for module in toys]
        result = transfer(*toys, toy.batches(64), loss=toy.loss)
        assert result.record["samples"] == 64
        assert result.record["target"] == {"name": "ToyViT"}
        assert len(result.records) == 1 + 3 * 6 + 1
        moved = set(result.task_vector)
        kept = {item.tensor for item in result.not_transported}
        assert moved | kept == set(toys[2].state_dict())
        assert not moved & kept
        applied = result.apply()
        with torch.no_grad():
            assert not torch.equal(applied(toy.batches(4)[0][0]), toys[2](toy.batches(4)[0][0]))
        for module, state in zip(toys, before, strict=True):
            assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
            assert all(parameter.requires_grad for parameter in module.parameters())
            assert module.training

    def test_one_loss_for_each_model(self, toys: tuple[nn.Module, ...]) -> None:
        seen: list[nn.Module] = []

        def of(expected_module: nn.Module) -> Any:
            def loss(module: nn.Module, batch: Any) -> Tensor:
                assert module is expected_module
                seen.append(module)
                return toy.loss(module, batch)

            return loss

        pair = transfer(*toys, toy.batches(64), loss=(of(toys[0]), of(toys[2])))
        assert {id(module) for module in seen} == {id(toys[0]), id(toys[2])}
        assert same(pair.task_vector, transfer(*toys, toy.batches(64), loss=toy.loss).task_vector)

    def test_batches_may_be_a_generator(self, toys: tuple[nn.Module, ...]) -> None:
        def stream() -> Iterator[Any]:
            yield from toy.batches(64, batch=32)

        result = transfer(*toys, stream(), loss=toy.loss)
        assert same(result.task_vector, transfer(*toys, toy.batches(64, batch=32), loss=toy.loss).task_vector)

    def test_no_loss_for_an_unknown_module(self, toys: tuple[nn.Module, ...]) -> None:
        for method in ("bico", "theseus"):
            with pytest.raises(TuneportError, match="ToyViT is a module tuneport does not know: pass loss="):
                transfer(*toys, toy.batches(8), method=method)

    def test_no_batches(self, toys: tuple[nn.Module, ...]) -> None:
        with pytest.raises(TuneportError, match="no calibration batches"):
            transfer(*toys, [], loss=toy.loss)

    def test_a_path_for_a_module_that_reads_no_images(self, toys: tuple[nn.Module, ...], zoo: Zoo) -> None:
        with pytest.raises(TuneportError, match="ToyViT cannot read raw samples"):
            transfer(*toys, zoo.data, loss=toy.loss, scale=1, samples=SAMPLES)

    def test_live_transformers_modules_with_their_own_batches(self, zoo: Zoo) -> None:
        source, tuned = load(zoo["vit-base"]), load(zoo["vit-tuned"])
        pixels = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(12) % 3
        target = load(perturb_target(zoo))

        def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(module(batch[0]).logits, batch[1], reduction="sum")

        result = transfer(source, tuned, target, [(pixels, labels)], loss=loss)
        assert len(result.records) == 14
        assert result.record["samples"] == 12

    def test_a_live_result_saves_with_its_configuration(self, zoo: Zoo, tmp_path: Path) -> None:
        trio = [load(path) for path in zoo.trio("vit")]
        result = transfer(*trio, method="naive")
        result.save(tmp_path / "out")
        loaded = load(tmp_path / "out")
        assert torch.equal(outputs(result.apply(), result.target), outputs(loaded, result.target))

    def test_pairs_given_by_hand(self, toys: tuple[nn.Module, ...]) -> None:
        plan = toy.plan(toys[0], toys[2])  # type: ignore[arg-type]
        wanted = [pair for pair in plan.pairs if pair.target.role == "fc1"]
        swapped = [LayerPair(wanted[0].source, pair.target) for pair in wanted]
        result = transfer(*toys, toy.batches(64), loss=toy.loss, pairs=swapped)
        assert [(record.source, record.target) for record in result.records] == [
            ("blocks.0.fc1.weight", f"blocks.{i}.fc1.weight") for i in range(3)
        ]
        reasons = {item.tensor: item.reason for item in result.not_transported}
        assert reasons["blocks.0.fc2.weight"] == "not in the pairs that were given"
        assert set(reasons) | set(result.task_vector) == set(toys[2].state_dict())

    def test_pairs_that_make_no_sense(self, toys: tuple[nn.Module, ...]) -> None:
        pair = toy.plan(toys[0], toys[2]).pairs[1]  # type: ignore[arg-type]
        with pytest.raises(PairingError, match="is paired twice"):
            transfer(*toys, toy.batches(8), loss=toy.loss, pairs=[pair, pair])
        with pytest.raises(PairingError, match="pairs is empty"):
            transfer(*toys, toy.batches(8), loss=toy.loss, pairs=[])
        with pytest.raises(PairingError, match=f"the task vector has no {pair.source.weight}"):
            transfer(*toys, toy.batches(8), loss=toy.loss, pairs=[pair], exclude=[pair.source.weight])

    def test_roles_and_depth_rule(self, toys: tuple[nn.Module, ...]) -> None:
        last = transfer(*toys, toy.batches(64), loss=toy.loss, depth_rule=lambda *_: 0, roles={"fc1": None})
        assert {record.source for record in last.records if "q_proj" in record.target} == {
            "blocks.0.attn.q_proj.weight"
        }
        assert not any("fc1" in record.target for record in last.records)


def perturb_target(zoo: Zoo) -> Path:
    """A second base of the source's shape."""
    folder = zoo.root / "vit-sibling"
    return folder if folder.exists() else perturb(zoo["vit-base"], folder, amount=0.3, seed=77)
