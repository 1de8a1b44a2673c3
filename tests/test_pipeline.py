"""Transfers from end to end: on folders of every family, on live modules, and everything that is written."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import toy
from folders import CLASSES, FAMILIES, Zoo, edit_json, edit_weights, images, load, perturb, write_data, write_head
from tuneport import TuneportError
from tuneport.data import Dataset, align_labels
from tuneport.errors import CheckpointError, DataError, MethodError, PairingError
from tuneport.families import choose_head, open_model
from tuneport.formats import read_data
from tuneport.methods import METHODS, Method, Problem, Transfer, get_method
from tuneport.outlook import expected
from tuneport.pairing import LayerPair
from tuneport.pipeline import Job, Result, apply, extract, pick_device, prepare, transfer
from tuneport.task_vector import TaskVector, load_task_vector, save_task_vector

SAMPLES = 24
CROSSINGS = [
    *((family, family) for family in FAMILIES),
    ("vit", "dinov2"),
    ("dinov2", "vit"),
    ("clip", "clip_vision"),
    ("clip_vision", "siglip_vision"),
    ("vit", "clip_vision"),
]


def cross(zoo: Zoo, source: str, target: str, part: str = "target", **options: Any) -> Result:
    options = {"samples": SAMPLES, **options}
    return transfer(zoo[f"{source}-base"], zoo[f"{source}-tuned"], zoo[f"{target}-{part}"], zoo.data, **options)


def outputs(module: nn.Module, model: Any) -> Tensor:
    """What a user computes with the model: logits where it has them, else features."""
    pixels = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        forward = model.logits or model.features
        return forward(module, {"pixel_values": pixels})


def same(one: TaskVector, other: TaskVector) -> bool:
    return set(one) == set(other) and all(torch.equal(one.dense(name), other.dense(name)) for name in one)


@pytest.mark.parametrize(("source", "target"), CROSSINGS)
class TestEveryCrossing:
    @pytest.fixture
    def result(self, zoo: Zoo, source: str, target: str) -> Result:
        return cross(zoo, source, target)

    def test_moves_layers_and_accounts_for_every_tensor(
        self, zoo: Zoo, source: str, target: str, result: Result
    ) -> None:
        assert result.record["source"]["name"] == f"{source}-base"
        names = result.target.file_names
        moved = {names[name] for name in result.task_vector}
        kept = [item.tensor for item in result.not_transported]
        stored = load_file(zoo[f"{target}-target"] / "model.safetensors")
        assert moved
        assert not moved & set(kept)
        assert len(kept) == len(set(kept))
        assert moved | set(kept) == set(stored)
        assert all(item.reason and item.reason != "not a parameter" for item in result.not_transported)
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


@pytest.mark.parametrize("family", ["clip_vision", "vit", "siglip"])
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
        result = transfer(zoo["vit-base"], zoo["vit-tuned"], folder, zoo.data, samples=SAMPLES, method=method)
        bias = load(zoo["vit-tuned"]).classifier.bias - load(zoo["vit-base"]).classifier.bias  # cat, dog, owl
        torch.testing.assert_close(result.task_vector.dense("classifier.bias"), bias.detach()[[2, 0, 1]])
        record = next(record for record in result.records if record.target == "classifier.weight")
        assert (record.rank_out, record.residual_out) == (None, None)
        assert record.rank_in is not None
        assert result.task_vector.shape("classifier.weight") == (3, 48), "DINOv2 classifies two tokens side by side"


def test_other_labels_are_aligned_like_any_space(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo["vit-target"], tmp_path / "more"))
    edit_json(folder / "config.json", id2label={str(i): c for i, c in enumerate((*CLASSES, "emu"))}, label2id=None)

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors["classifier.weight"] = torch.cat([tensors["classifier.weight"], torch.ones(1, 24)])
        tensors["classifier.bias"] = torch.cat([tensors["classifier.bias"], torch.ones(1)])

    edit_weights(folder, widen)
    result = transfer(zoo["vit-base"], zoo["vit-tuned"], folder, zoo.data, samples=SAMPLES)
    assert result.task_vector.shape("classifier.weight") == (4, 24)
    record = next(record for record in result.records if record.target == "classifier.weight")
    assert record.rank_out is not None


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
        with pytest.raises(DataError, match="method bico needs calibration data"):
            transfer(*zoo.trio("clip_vision"))

    def test_theseus_needs_neither_labels_nor_head(self, zoo: Zoo, tmp_path: Path) -> None:
        trio = [Path(shutil.copytree(path, tmp_path / path.name)) for path in zoo.trio("clip_vision")]
        for folder in trio:
            shutil.rmtree(folder / "heads")
        pixels, _ = images(30, 1)
        np.savez(tmp_path / "unlabelled.npz", x=pixels)
        result = transfer(*trio, tmp_path / "unlabelled.npz", method="theseus", samples=SAMPLES)
        assert result.record["passes"] == {"forward": 1, "backward": 0}
        assert all(record.rank_in and record.rank_out for record in result.records if "patch" not in record.target)
        with pytest.raises(DataError, match="has no labels"):
            transfer(*trio, tmp_path / "unlabelled.npz", samples=SAMPLES)

    @pytest.mark.parametrize("method", [name for name, m in METHODS.items() if name not in ("gradfix", "transfusion")])
    def test_every_method_across_shapes(self, zoo: Zoo, method: str) -> None:
        result = cross(zoo, "vit", "vit", method=method)
        assert result.record["method"] == method
        assert len(result.task_vector) >= 20

    @pytest.mark.parametrize("method", sorted(METHODS))
    def test_every_method_between_twins(self, zoo: Zoo, method: str) -> None:
        base, tuned = zoo["clip_vision-base"], zoo["clip_vision-tuned"]
        result = transfer(base, tuned, base, zoo.data, method=method, samples=SAMPLES)
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
                return Transfer((2 * moved.task_vector).materialise(), moved.records, moved.kept)

        plain = cross(zoo, "clip_vision", "clip_vision")
        doubled = cross(zoo, "clip_vision", "clip_vision", method=Doubled(get_method("bico")))
        assert doubled.record["method"] == "Doubled"
        assert same(doubled.task_vector, (2 * plain.task_vector).materialise())
        doubled.save(tmp_path / "out")
        assert "Doubled" in (tmp_path / "out" / "README.md").read_text()

    def test_an_unknown_method(self, zoo: Zoo) -> None:
        with pytest.raises(MethodError, match=r"unknown method 'bicco'\. Did you mean 'bico'\?"):
            transfer(*zoo.trio("clip_vision"), zoo.data, method="bicco")

    def test_the_source_itself_gets_its_task_vector_back_where_determined(self, zoo: Zoo) -> None:
        base, tuned = zoo["clip_vision-base"], zoo["clip_vision-tuned"]
        result = transfer(base, tuned, base, zoo.data, samples=60)
        moved, tau = result.task_vector, extract(base, tuned)
        determined = 0
        for record in result.records:
            source, delta = tau.dense(record.target), moved.dense(record.target)
            full_in = record.rank_in in (None, source.flatten(1).shape[1])
            if full_in and record.rank_out == len(source):
                determined += 1
                torch.testing.assert_close(delta, source, atol=1e-5, rtol=1e-4)
        assert determined >= 4
        part = transfer(base, tuned, base, zoo.data, samples=60, completion="none").task_vector
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
        assert job.samples == 12
        for sampler in ("class_balanced", "centroid_near", "single_class"):
            assert prepare(*zoo.trio("vit"), zoo.data, samples=6, sampler=sampler).samples == 6

    def test_labels_follow_the_names_not_the_numbers(self, zoo: Zoo) -> None:
        train = read_data(zoo.data, "train")
        order = [2, 0, 1]
        names = tuple(train.classes[i] for i in order)
        assert train.labels is not None
        renumbered = np.argsort(order)[train.labels]
        reordered = Dataset(train.inputs, renumbered, names, name="animals", kind="image", split="train")
        one = transfer(*zoo.trio("clip_vision"), train, samples=SAMPLES)
        two = transfer(*zoo.trio("clip_vision"), reordered, samples=SAMPLES)
        assert same(one.task_vector, two.task_vector)
        wrong = Dataset(train.inputs, train.labels, names, name="animals", kind="image", split="train")
        assert not same(one.task_vector, transfer(*zoo.trio("clip_vision"), wrong, samples=SAMPLES).task_vector)

    def test_gradients_are_those_of_the_aligned_labels(self, zoo: Zoo) -> None:
        job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=6)
        batch = next(iter(job.batches))
        inputs, labels = batch.source
        model = open_model(zoo["clip_vision-base"])
        head = choose_head(model, None, "animals", CLASSES)
        train = align_labels(read_data(zoo.data, "train"), head.classes)
        assert labels.tolist() == train.subset(job.record["data"]["indices"]).labels.tolist()  # type: ignore[union-attr]
        scores = head.scores(model, model.module, inputs)
        by_hand = -torch.log_softmax(scores, -1)[torch.arange(6), labels].sum()
        assert job.source_loss is not None
        torch.testing.assert_close(job.source_loss(job.source.module, batch.source), by_hand)


@pytest.fixture(scope="module")
def laden(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with more beside the weights than a transfer should carry over."""
    root = tmp_path_factory.mktemp("trio")
    trio = [Path(shutil.copytree(path, root / path.name)) for path in zoo.trio("clip")]
    target = trio[2]
    write_head(target / "heads" / "plants.safetensors", 20)
    for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.onnx", "training_args.bin"):
        (target / name).write_bytes(b"weights of another format")
    (target / "README.md").write_text("the old card")
    (target / ".hidden").write_text("")
    (target / "LICENSE").write_text("a licence")
    return trio


@pytest.fixture(scope="module")
def saved(laden: list[Path], zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "out"
    transfer(*laden, zoo.data, samples=SAMPLES, seed=3, scale=0.5).save(out)
    return out


class TestSaved:
    def test_companions_come_along_and_other_weights_do_not(self, laden: list[Path], saved: Path) -> None:
        ours = {"README.md", "tuneport.json", "report.html", "model.safetensors"}
        companions = {
            "config.json",
            "preprocessor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "LICENSE",
            "heads/plants.safetensors",
        }
        found = {str(file.relative_to(saved)) for file in saved.rglob("*") if file.is_file()}
        assert found == ours | companions
        for name in companions:
            assert (saved / name).read_bytes() == (laden[2] / name).read_bytes()

    def test_the_record_holds_what_the_contract_says(self, zoo: Zoo, laden: list[Path], saved: Path) -> None:
        record = json.loads((saved / "tuneport.json").read_text())
        assert record["out"] == str(saved)
        assert (record["method"], record["scale"], record["samples"]) == ("bico", 0.5, SAMPLES)
        assert record["seconds"] > 0
        assert record["options"]["seed"] == 3
        assert record["options"]["samples"] == SAMPLES
        assert {"shots", "sampler", "head", "completion", "batch_size", "exclude", "device"} <= set(record["options"])
        assert {"torch", "transformers", "safetensors", "numpy", "python"} <= set(record["versions"])
        fields = {"target", "source", "rank_in", "rank_out", "residual_in", "residual_out", "norm_source"}
        assert record["layers"]
        for layer in record["layers"]:
            assert fields | {"norm_target"} <= set(layer)
        assert record["not_transported"]
        assert all(set(item) == {"tensor", "reason"} for item in record["not_transported"])
        for role, folder in zip(("source", "finetuned", "target"), laden, strict=True):
            assert record[role]["name"] == folder.name
            digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            assert record[role]["sha256"]["model.safetensors"] == digest
            assert {"config.json", "preprocessor_config.json"} <= set(record[role]["sha256"])
        digest = hashlib.sha256(zoo.data.read_bytes()).hexdigest()
        assert record["data"]["sha256"] == {zoo.data.name: digest}
        assert record["data"]["split"] == "train"
        assert len(record["data"]["indices"]) == SAMPLES

    def test_the_card_names_base_and_method(self, laden: list[Path], saved: Path) -> None:
        card = (saved / "README.md").read_text()
        assert card.startswith(f'---\nbase_model:\n- "{laden[2].name}"\n')
        assert '- "bico"\n' in card
        assert f"`{laden[0].name}`" in card
        assert f"`{laden[1].name}`" in card
        assert "scale 0.5" in card
        assert "old card" not in card

    def test_the_page_is_well_formed_and_shows_every_layer(self, saved: Path) -> None:
        page = Page()
        page.feed((saved / "report.html").read_text())
        page.close()
        assert page.open == []
        assert not page.outside, "it opens offline"
        record = json.loads((saved / "tuneport.json").read_text())
        for layer in record["layers"]:
            assert layer["target"] in page.cells
        for item in record["not_transported"]:
            assert item["tensor"] in page.cells
            assert item["reason"] in page.cells

    def test_text_and_images_still_work_together(self, saved: Path) -> None:
        head = choose_head(open_model(saved), None, "animals", CLASSES)
        assert head.name == "text"

    def test_the_result_can_be_ported_on(self, zoo: Zoo, laden: list[Path], saved: Path) -> None:
        result = transfer(laden[2], saved, zoo["clip-base"], zoo.data, samples=SAMPLES)
        assert result.task_vector.norm() > 0

    def test_an_existing_folder_is_kept_unless_told_otherwise(self, zoo: Zoo, tmp_path: Path) -> None:
        result = cross(zoo, "vit", "vit", method="naive")
        out = tmp_path / "out"
        out.mkdir()
        (out / "precious").write_text("")
        with pytest.raises(CheckpointError, match="exists already"):
            result.save(out)
        assert [file.name for file in tmp_path.rglob("*")] == ["out", "precious"]
        result.save(out, overwrite=True)
        assert not (out / "precious").exists()
        assert (out / "model.safetensors").is_file()

    def test_an_unknown_kind(self, zoo: Zoo, tmp_path: Path) -> None:
        with pytest.raises(TuneportError, match="model, adapter or task-vector, not as 'zip'"):
            cross(zoo, "vit", "vit", method="naive").save(tmp_path / "out", kind="zip")

    @pytest.mark.parametrize("file", ["config.json", "heads/animals.safetensors"])
    def test_a_disk_that_fills_up_while_companions_are_copied(
        self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        copy = shutil.copy

        def full(source: Path, place: Path) -> Any:
            if str(source).endswith(file):  # as shutil reports it: the file that it read comes first
                raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(place))
            return copy(source, place)

        result = cross(zoo, "clip_vision", "clip_vision", method="naive")
        monkeypatch.setattr(shutil, "copy", full)
        with pytest.raises(CheckpointError, match="cannot be written: the disk is full"):
            result.save(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


class Page(HTMLParser):
    """Checks that tags close in order, and collects the text of table cells."""

    VOID = frozenset({"meta", "br", "hr", "img", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: set[str] = set()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [
            value or "" for name, value in attrs if name in ("src", "href") and not f"{value}".startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.add(data)


class TestTaskVectors:
    def test_saved_as_a_task_vector_it_applies_to_the_same_model(self, zoo: Zoo, tmp_path: Path) -> None:
        result = cross(zoo, "vit", "vit")
        result.save(tmp_path / "model")
        result.save(tmp_path / "tau.safetensors", kind="task-vector")
        apply(load_task_vector(tmp_path / "tau.safetensors"), zoo["vit-target"], tmp_path / "applied")
        ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "applied"))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_extract_and_apply_give_the_fine_tune_back(self, zoo: Zoo, tmp_path: Path, family: str) -> None:
        base, tuned = zoo[f"{family}-base"], zoo[f"{family}-tuned"]
        save_task_vector(tmp_path / "tau.safetensors", extract(base, tuned))
        apply(load_task_vector(tmp_path / "tau.safetensors"), base, tmp_path / "again")
        ours, theirs = load_file(tmp_path / "again" / "model.safetensors"), load_file(tuned / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for name in theirs:
            # (b - a) + a is b up to one rounding of the difference
            torch.testing.assert_close(ours[name], theirs[name], atol=1e-7, rtol=2e-7)
        assert (tmp_path / "again" / "preprocessor_config.json").is_file()
        torch.testing.assert_close(
            outputs_at(load(tmp_path / "again"), 16), outputs_at(load(tuned), 16), atol=1e-5, rtol=1e-5
        )

    def test_a_fine_tune_on_a_coarse_grid_comes_back_bit_by_bit(self, zoo: Zoo, tmp_path: Path) -> None:
        """Where the difference itself is exact in float32, so is the round trip."""
        folders = [Path(shutil.copytree(path, tmp_path / path.name)) for path in zoo.trio("vit")[:2]]
        for folder in folders:
            edit_weights(folder, lambda t: t.update({name: (x * 1024).round() / 1024 for name, x in t.items()}))
        apply(extract(*folders), folders[0], tmp_path / "again")
        ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "again", folders[1]))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    @pytest.mark.parametrize("form", ["file", "vector", "module", "model"])
    def test_the_fine_tune_may_come_in_any_form(self, zoo: Zoo, tmp_path: Path, form: str) -> None:
        base, tuned, target = zoo.trio("vit")
        expected_result = transfer(base, tuned, target, zoo.data, samples=SAMPLES)
        given: Any = {
            "vector": lambda: extract(base, tuned),
            "module": lambda: load(tuned),
            "model": lambda: open_model(tuned),
            "file": lambda: tmp_path / "tau.safetensors",
        }[form]()
        if form == "file":
            save_task_vector(given, extract(base, tuned))
        assert same(transfer(base, given, target, zoo.data, samples=SAMPLES).task_vector, expected_result.task_vector)

    def test_a_live_model_and_its_folder_give_the_same_task_vector(self, zoo: Zoo) -> None:
        base, tuned, target = zoo.trio("vit")
        job = prepare(base, tuned, target, zoo.data, samples=SAMPLES)
        live = prepare(load(base), load(tuned), load(target), method="naive")
        assert same(job.task_vector, live.task_vector)
        naive = transfer(base, tuned, target, method="naive")
        alive = transfer(load(base), load(tuned), load(target), method="naive")
        assert same(naive.task_vector, alive.task_vector)
        assert naive.not_transported == alive.not_transported

    def test_scale(self, zoo: Zoo) -> None:
        result = cross(zoo, "vit", "vit", scale=0.5)
        base = load(zoo["vit-target"])
        name = "vit.layers.0.mlp.fc1.weight"
        tau = result.task_vector.dense(name)
        for module, scale in ((result.apply(), 0.5), (result.apply(2.0), 2.0), (result.apply(0.0), 0.0)):
            torch.testing.assert_close(module.get_parameter(name), base.get_parameter(name) + scale * tau)
        for scale in (float("nan"), float("inf")):
            with pytest.raises(TuneportError, match="finite number"):
                cross(zoo, "vit", "vit", scale=scale)


def outputs_at(module: Any, size: int) -> Tensor:
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))
    for part in ("vision_model", "vit", "dinov2"):
        module = getattr(module, part, module)
    with torch.no_grad():
        return module(pixels).last_hidden_state


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
            transfer(*toys, zoo.data, loss=toy.loss, samples=SAMPLES)

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
        with pytest.raises(CheckpointError, match=r"classifier.weight \(5, 16\) vs \(3, 16\).*--exclude \"classifier"):
            transfer(zoo["vit-base"], tuned, zoo["vit-target"], zoo.data, samples=SAMPLES)
        result = transfer(
            zoo["vit-base"], tuned, zoo["vit-target"], zoo.data, samples=SAMPLES, exclude=["classifier.*"]
        )
        assert len(result.records) == 19


class TestRefusals:
    """Everything that can be wrong is found before the first forward pass."""

    @pytest.fixture(autouse=True)
    def _no_measuring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tuneport.measuring.measure", lambda *_, **__: pytest.fail("work has begun"))

    def test_nothing_changed(self, zoo: Zoo) -> None:
        base = zoo["vit-base"]
        with pytest.raises(CheckpointError, match="equals its base in every tensor: there is nothing to transfer"):
            transfer(base, base, zoo["vit-target"], zoo.data, samples=SAMPLES)

    @pytest.mark.parametrize("part", ["base", "tuned", "target"])
    def test_nan_weights(self, zoo: Zoo, tmp_path: Path, part: str) -> None:
        folders = {name: zoo[f"vit-{name}"] for name in ("base", "tuned", "target")}
        folders[part] = Path(shutil.copytree(folders[part], tmp_path / part))
        edit_weights(folders[part], lambda t: t["vit.layernorm.weight"].fill_(torch.nan))
        with pytest.raises(CheckpointError, match=r"hold NaN or infinite values: vit\.layernorm\.weight") as caught:
            transfer(*folders.values(), zoo.data, samples=SAMPLES)
        assert str(folders[part]) in str(caught.value)

    def test_classes_that_the_head_does_not_know(self, zoo: Zoo, tmp_path: Path) -> None:
        data = write_data(tmp_path / "animals.npz", ("cat", "dog", "owl", "gnu"))
        with pytest.raises(DataError, match="1 of 4 classes of animals are unknown to the head: gnu"):
            transfer(*zoo.trio("vit"), data, samples=SAMPLES)

    def test_text_for_an_image_model(self, zoo: Zoo, tmp_path: Path) -> None:
        (tmp_path / "texts.jsonl").write_text('{"text": "a", "label": "cat"}\n{"text": "b", "label": "dog"}\n')
        with pytest.raises(DataError, match=r"texts holds texts, but .*vit-base reads images"):
            transfer(*zoo.trio("vit"), tmp_path / "texts.jsonl", samples=2)

    def test_more_samples_than_there_are(self, zoo: Zoo) -> None:
        with pytest.raises(DataError, match="asked for 61 samples but train split of animals has 60"):
            transfer(*zoo.trio("vit"), zoo.data, samples=61)

    @pytest.mark.parametrize("name", ["nosuch", "meta", "cuda:99", "hpu", "mps", ""])
    def test_devices(self, name: str) -> None:
        if name == "mps" and torch.backends.mps.is_available():
            pytest.skip("this machine has it")
        with pytest.raises(TuneportError, match=f"device '{name}' is not available") as caught:
            pick_device(name)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400

    def test_the_fine_tune_of_another_model(self, zoo: Zoo) -> None:
        with pytest.raises(CheckpointError, match=r"Check that .* was fine-tuned from"):
            transfer(zoo["vit-base"], zoo["dinov2-tuned"], zoo["vit-target"], zoo.data, samples=SAMPLES)


class TestPlan:
    def test_the_plan_is_what_the_transfer_does(self, zoo: Zoo) -> None:
        for source, target in (("vit", "vit"), ("clip", "clip_vision"), ("siglip_vision", "siglip_vision")):
            job: Job = prepare(
                zoo[f"{source}-base"], zoo[f"{source}-tuned"], zoo[f"{target}-target"], zoo.data, samples=SAMPLES
            )
            outlook, result = expected(job), cross(zoo, source, target)
            assert outlook["samples"] == SAMPLES
            assert [(row["target"], row["source"]) for row in outlook["layers"]] == [
                (record.target, record.source) for record in result.records
            ]
            assert outlook["not_transported"] == result.record["not_transported"]
            assert outlook["expected"]["flops"] > 0
            assert outlook["expected"]["statistics_bytes"] > 0

    def test_the_cost_by_hand(self, zoo: Zoo) -> None:
        layers = expected(prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES))
        paper = layers["expected"]["cost"]["paper"]
        weights = {part: sum(p.numel() for p in load(zoo[f"vit-{part}"]).parameters()) for part in ("base", "target")}
        assert paper["passes"] == 6 * SAMPLES * (5 * weights["base"] + 10 * weights["target"]), "patches, class token"
        assert 0 < layers["expected"]["flops"] < paper["passes"], "frozen weights need no gradients of their own"
        naive = expected(prepare(*zoo.trio("vit"), method="naive"))
        assert naive["expected"]["flops"] == naive["expected"]["statistics_bytes"] == 0
