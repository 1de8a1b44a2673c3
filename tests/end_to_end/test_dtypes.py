"""Image models that run in half precision: the same job, coarser signals, and files that do not notice."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from builders.clip_twins import clip_twin, random_clip
from builders.folders import FAMILIES, WITH_TEXT, Zoo, edit_weights
from builders.half import live_transfer
from builders.processes import run_program
from builders.runs import prepare
from builders.samples import empty_dataset
from builders.toy import batches
from tuneport.cli import app
from tuneport.data.tasks import read_data
from tuneport.layers import find_layers
from tuneport.measure.accuracy import compute_features
from tuneport.models import open as opening
from tuneport.models.heads import choose_head
from tuneport.models.open import DTYPES, UNITS, has_units, open_model
from tuneport.models.weights import Scaled
from tuneport.pipeline.transfer import transfer
from tuneport.task_vectors.vector import TaskVector

BF16 = torch.bfloat16


def cosine(one: TaskVector, other: TaskVector) -> float:
    first, second = (torch.cat([v.dense(name).double().flatten() for name in sorted(one)]) for v in (one, other))
    return float(F.cosine_similarity(first, second, dim=0))


@pytest.mark.usefixtures("half_units")
@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_runs_in_bfloat16_and_reads_its_files_as_they_are(self, zoo: Zoo, family: str) -> None:
        model, exact = (open_model(zoo[f"{family}-target"], dtype=dtype) for dtype in (BF16, torch.float32))
        assert {parameter.dtype for parameter in model.module.parameters()} == {BF16}
        assert {model.weights.tensors[name].dtype for name in model.weights.tensors} == {torch.float32}
        data = read_data(zoo.data, "test")
        images = model.place(model.inputs.encode(list(data.inputs[:2])))
        assert images["pixel_values"].dtype == BF16
        first, second = compute_features(model, data), compute_features(exact, data)
        assert float((first - second).norm() / second.norm()) < 0.1
        head = choose_head(model, None, empty_dataset("animals", data.classes))
        with torch.no_grad():
            assert head.scores(model, model.module, images).dtype == torch.float32
        assert model.outputs.logit_scale == exact.outputs.logit_scale
        if family in WITH_TEXT:
            close = choose_head(exact, None, empty_dataset("animals", data.classes))
            assert head.class_embeds.dtype == torch.float32
            assert float((head.class_embeds - close.class_embeds).abs().max()) < 0.05

    def test_writes_what_float32_would_but_for_coarser_maps(self, zoo: Zoo, tmp_path: Path, family: str) -> None:
        trio = zoo.trio(family)
        options = {"scale": 1, "samples": 24, "accept_unlikely": True}  # random changes may lose what a base knows
        coarse, exact = (transfer(*trio, zoo.data, **options, dtype=name) for name in ("bfloat16", "float32"))
        assert set(coarse.task_vector) == set(exact.task_vector)
        assert cosine(coarse.task_vector, exact.task_vector) > 0.5
        assert coarse.record["resolved"]["dtype"] == "bfloat16"
        before = load_file(trio[2] / "model.safetensors")
        after = load_file(coarse.save(tmp_path / "out") / "model.safetensors")
        names = {coarse.target.weights.file_names[name]: name for name in coarse.task_vector}
        head = {coarse.target.weights.file_names[name] for name in coarse.target.head}  # fitted, and written whole
        for file, tensor in after.items():
            assert tensor.dtype == torch.float32
            if file in head:
                continue
            if file not in names:
                assert torch.equal(tensor, before[file]), file
                continue
            wanted = before[file] + coarse.task_vector.dense(names[file])
            assert torch.equal(tensor, wanted), file
            assert not torch.equal(tensor, tensor.to(BF16).float()), "nothing was rounded on the way"


@pytest.mark.usefixtures("half_units")
def test_a_float16_target_is_written_in_float16(zoo: Zoo, tmp_path: Path) -> None:
    trio = zoo.trio("clip_vision", "target16")
    out = transfer(*trio, zoo.data, scale=1, samples=24, dtype="bfloat16").save(tmp_path / "out")
    stored, before = (load_file(folder / "model.safetensors") for folder in (out, trio[2]))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert torch.equal(
        stored["vision_model.embeddings.class_embedding"], before["vision_model.embeddings.class_embedding"]
    )


@pytest.mark.usefixtures("half_units")
def test_the_same_seed_gives_the_same_bits(zoo: Zoo) -> None:
    one, two = (
        transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=24, dtype="bfloat16").task_vector for _ in range(2)
    )
    assert set(one) == set(two) != set()
    assert all(torch.equal(one.dense(name), two.dense(name)) for name in one)


@pytest.mark.usefixtures("half_units")
def test_within_a_memory_budget_the_bits_are_the_same(zoo: Zoo) -> None:
    trio = zoo.trio("clip_vision")
    options: dict[str, Any] = {"samples": 24, "dtype": "bfloat16", "batch_size": 8, "device": "cpu"}
    free = transfer(*trio, zoo.data, **options)
    job = prepare(*trio, zoo.data, memory_budget=390_000, **options)
    tight = transfer(*trio, zoo.data, memory_budget=390_000, **options)
    assert {parameter.dtype for parameter in job.target.module.parameters()} == {BF16}
    assert free.record["passes"]["forward"] < tight.record["passes"]["forward"]
    assert all(torch.equal(free.task_vector.dense(n), tight.task_vector.dense(n)) for n in free.task_vector)


def test_a_planted_twin_gets_the_fine_tune_to_the_accuracy_of_its_signals() -> None:
    source = random_clip(seed=0)
    target, embedding = clip_twin(source)
    moved = copy.deepcopy(source)
    generator = torch.Generator().manual_seed(8)
    parameters = dict(moved.named_parameters())
    with torch.no_grad():
        for layer in find_layers(source):
            parameters[layer.weight].add_(torch.randn(layer.weight_shape, generator=generator) * 0.05)
    classes = torch.randn(30, 12, generator=generator)

    def logits(model: nn.Module, images: Tensor, head: Tensor) -> Tensor:
        return 5 * F.normalize(model(images).image_embeds.float(), dim=-1) @ F.normalize(head, dim=-1).T

    images, heads = batches(64, seed=99)[0][0], (classes, classes @ embedding.T)
    coarse = [copy.deepcopy(model).bfloat16() for model in (source, target)]

    def loss_with(head: Tensor) -> Any:
        return lambda model, batch: F.cross_entropy(logits(model, batch[0].to(BF16), head), batch[1], reduction="sum")

    vector = TaskVector.between(source.state_dict(), moved.state_dict())
    result = transfer(coarse[0], vector, coarse[1], batches(256), loss=tuple(map(loss_with, heads)))
    with torch.no_grad():
        before, wanted = logits(source, images, classes), logits(moved, images, classes)
        with Scaled(target, result.task_vector) as scaled:
            scaled.set(1.0)
            found = logits(target, images, heads[1])
    assert float((found - wanted).norm() / (before - wanted).norm()) < 0.2


def test_a_scale_is_tried_on_weights_that_were_not_rounded() -> None:
    module = nn.Linear(64, 64, bias=False)
    exact = {"weight": module.weight.detach().clone()}
    module = module.to(BF16)
    own = module.weight.detach().clone()
    delta = TaskVector({"weight": exact["weight"] * 2**-12})  # far below the last digit of bfloat16
    with Scaled(module, delta) as scaled:
        scaled.set(1.0)
        assert torch.equal(module.weight, own)
    with Scaled(module, delta, exact) as scaled:
        scaled.set(0.0)
        assert torch.equal(module.weight, own)
        scaled.set(1.0)
        change = (module.weight.float() - own.float()).detach()
        share = float((change * delta.dense("weight")).sum() / delta.dense("weight").square().sum())
        assert 0.5 < share < 1.5
    assert torch.equal(module.weight, own)


def test_the_temperature_of_a_head_is_read_from_the_files(zoo: Zoo, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(zoo["clip-target"], tmp_path / "clip"))
    edit_weights(folder, lambda state: state.update(logit_scale=torch.tensor(4.6052)))
    assert open_model(folder, dtype=BF16).outputs.logit_scale == pytest.approx(100.0, rel=1e-4)


@pytest.mark.usefixtures("half_units")
def test_from_the_command_line(zoo: Zoo, tmp_path: Path) -> None:
    source, tuned, target = map(str, zoo.trio("clip_vision"))
    words = ["transfer", "--source", source, "--finetuned", tuned, "--target", target, "--data", str(zoo.data)]
    words += ["--out", str(tmp_path / "out"), "--samples", "24", "--dtype", "bfloat16"]
    found = CliRunner().invoke(app, [*words, "--scale", "auto", "--evaluate", "--json"])
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert record["resolved"]["dtype"] == "bfloat16"
    assert record["scale_choice"]["samples"] == 24
    assert 0 <= record["evaluation"]["after"] <= 100
    planned = CliRunner().invoke(app, ["plan", *words[1:9], *words[11:], "--json"])
    assert planned.exit_code == 0, planned.output
    refused = CliRunner().invoke(app, [*words, "--dtype", "int8", "--overwrite"])
    assert str(refused.exception) == "unknown dtype 'int8'. Known: bfloat16, float16, float32, float64."


class TestACPUWithoutUnits:
    @pytest.fixture
    def without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(opening, "has_units", lambda dtype: dtype not in UNITS)

    @pytest.mark.usefixtures("without")
    @pytest.mark.parametrize("name", ["bfloat16", "float16"])
    def test_runs_in_float32_and_says_so(self, zoo: Zoo, name: str) -> None:
        asked, exact = (
            transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=24, dtype=d, device="cpu") for d in (name, "float32")
        )
        assert asked.record["notes"] == [f"this CPU has no {name} units that torch can use: running in float32."]
        assert asked.record["resolved"]["dtype"] == "float32"
        assert {p.dtype for p in asked.target.module.parameters()} == {torch.float32}
        assert all(torch.equal(asked.task_vector.dense(n), exact.task_vector.dense(n)) for n in exact.task_vector)
        assert "notes" not in exact.record

    @pytest.mark.usefixtures("without")
    def test_says_so_once_on_stderr(self, zoo: Zoo, tmp_path: Path) -> None:
        source, tuned, target = map(str, zoo.trio("vit"))
        words = ["--source", source, "--finetuned", tuned, "--target", target, "--data", str(zoo.data)]
        words += ["--samples", "24", "--dtype", "bfloat16", "--device", "cpu", "--json"]
        line = "note: this CPU has no bfloat16 units that torch can use: running in float32."
        for command in (["transfer", "--scale=1", *words, "--out", str(tmp_path / "out")], ["plan", *words]):
            found = CliRunner().invoke(app, command)
            assert found.exit_code == 0, found.output
            assert found.stderr.count(line) == 1
            assert "units" not in found.stdout.replace(line[6:], "", 1)

    @pytest.mark.usefixtures("without")
    def test_live_modules_run_as_they_are(self) -> None:
        record = live_transfer().record
        assert "notes" not in record
        assert record["resolved"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("name", "probe"), [("bfloat16", "_is_mkldnn_bf16_supported"), ("float16", "_is_mkldnn_fp16_supported")]
)
def test_torch_says_whether_there_are_units(name: str, probe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_units(torch.float32)
    for answer in (True, False):
        monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**{probe: lambda answer=answer: answer}))
        assert has_units(DTYPES[name]) is answer
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())  # torch without oneDNN
    assert not has_units(DTYPES[name])


def test_this_cpu_runs_what_it_can_and_torch_prints_no_stack(zoo: Zoo, capfd: pytest.CaptureFixture[str]) -> None:
    result = transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=24, dtype="bfloat16", device="cpu")
    runs = "bfloat16" if has_units(BF16) else "float32"
    assert result.record["resolved"]["dtype"] == runs
    assert {p.dtype for p in result.target.module.parameters()} == {DTYPES[runs]}
    assert ("notes" in result.record) == (runs == "float32")
    assert capfd.readouterr().err == ""


def test_live_bfloat16_modules_print_no_stack() -> None:
    """In a process of its own: torch gives that warning once in each."""
    done = run_program("from builders.half import live_transfer; live_transfer()")
    assert (done.code, done.err) == (0, "")
