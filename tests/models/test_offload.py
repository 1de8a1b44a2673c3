"""Offloading: the same bits, restored modules, predicted peaks, plans without weights."""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from builders.folders import Zoo
from builders.runs import Case, measured, planned, prepare, run
from builders.toy import ToyViT, batches, finetuned, loss, plan
from tuneport.cli import app
from tuneport.config import PlanConfig
from tuneport.errors import CheckpointError, TuneportError
from tuneport.layers import find_layers
from tuneport.measure.capture import PairedBatch, Request, measure_pairs, move_batch
from tuneport.models.base import Model
from tuneport.models.offload import Placement, block_paths, placed, sizes, to_temporary_file
from tuneport.models.open import describe_module, open_model, outline_model
from tuneport.pairing import pair_layers
from tuneport.pipeline.estimate import GPU, estimate_shapes, measurement_of_shapes, teaching_of_shapes
from tuneport.pipeline.samples import SCORED
from tuneport.pipeline.transfer import Result
from tuneport.runtime.forecast import Forecast, LiveBytes
from tuneport.runtime.passes import groups_of
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Sides

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
BUDGET = 25 * 10**5  # bytes, fewer than both models take with their signals
SOME = 45 * 10**5  # bytes, for a part of the blocks
WIDTHS: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 300},
    "qwen": {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 300},
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def decoder(kind: str, **more: Any) -> nn.Module:
    torch.manual_seed(len(kind))
    options = {**WIDTHS[kind], **HEADS, "tie_word_embeddings": False, **more}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**options)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**options)).eval()


def next_token(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch).logits[:, :-1]  # with a cache of keys and values, as models are run
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")


def texts(count: int = 4, size: int = 2, length: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return list(torch.randint(0, 300, (count, length), generator=generator).split(size))


def change_of(model: nn.Module) -> TaskVector:
    generator = torch.Generator().manual_seed(3)
    parts = {name: p for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2}
    return TaskVector({name: 0.01 * torch.randn(p.shape, generator=generator) for name, p in parts.items()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for kind in WIDTHS:
        decoder(kind).save_pretrained(root / kind)
    return {kind: root / kind for kind in WIDTHS}


def away(layers: Any, stay: int = 0) -> Placement:
    paths = block_paths(layers)
    return Placement(CPU, paths, frozenset(paths[stay:]))


@pytest.mark.parametrize(
    "signals", [("input", "output_gradient"), ("input", "output"), ("input_gradient", "output_gradient")], ids=str
)
@pytest.mark.parametrize("only", [None, 1], ids=["all", "one-block"])
def test_offloaded_blocks_give_the_same_bits(signals: tuple[str, ...], only: int | None) -> None:
    source, target = ToyViT(), ToyViT(width=40, depth=3, fused=True)
    pairs = [pair for pair in plan(source, target).pairs if only is None or pair.target.block == only]
    options = Sides(loss, loss), Request(signals)
    data = batches(count=24, batch=8)
    expected = measure_pairs(Sides(source, target), pairs, data, *options)
    held = {name: p.data_ptr() for name, p in target.named_parameters()}
    with placed(source, away(find_layers(source))), placed(target, away(find_layers(target), stay=1)):
        found = measure_pairs(Sides(source, target), pairs, data, *options)
    assert set(found.covariances) == set(expected.covariances)
    for key, covariance in expected.covariances.items():
        assert torch.equal(found.covariances[key].matrix, covariance.matrix)
        assert found.covariances[key].tokens == covariance.tokens
    distinct = [len({id(c) for c in s.covariances.values()}) for s in (found, expected)]
    assert distinct[0] == distinct[1]  # what was shared is shared
    assert held == {name: p.data_ptr() for name, p in target.named_parameters()}
    assert not any("forward" in part.__dict__ for part in target.modules())


def test_recomputed_blocks_use_no_cache_and_keep_autocast() -> None:
    source, target = decoder("llama"), decoder("qwen")
    first, second = describe_module(source), describe_module(target)
    pairs = pair_layers(first.architecture.layers, second.architecture.layers).pairs

    def cast(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token(model, batch)

    data = texts(2, length=12)  # bfloat16 takes long on a CPU without units for it
    for each in (next_token, cast):
        options = Sides(each, each), Request(("input", "output_gradient"))
        expected = measure_pairs(Sides(source, target), pairs, data, *options)
        with placed(source, away(first.architecture.layers)), placed(target, away(second.architecture.layers)):
            found = measure_pairs(Sides(source, target), pairs, data, *options)
        for key, covariance in expected.covariances.items():
            assert torch.equal(found.covariances[key].matrix, covariance.matrix), key
    assert source.config.use_cache


def test_a_module_is_restored_after_an_error() -> None:
    model = ToyViT()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    with pytest.raises(ZeroDivisionError), placed(model, away(find_layers(model))):
        raise ZeroDivisionError
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert not any("forward" in part.__dict__ for part in model.modules())


def test_sizes_add_up_and_shared_weights_belong_to_no_block() -> None:
    model = ToyViT(depth=3)
    paths = block_paths(find_layers(model))
    assert paths == ("blocks.0", "blocks.1", "blocks.2")
    rest, blocks = sizes(model, paths)
    assert rest + sum(blocks.values()) == sum(4 * p.numel() for p in model.parameters())
    model.blocks[1].fc1 = model.blocks[0].fc1
    shared = 4 * sum(p.numel() for p in model.blocks[0].fc1.parameters())
    assert sizes(model, paths)[0] == rest + shared
    images = batches(count=4)[0][0]
    expected = model(images)
    with placed(model, Placement(CPU, paths, frozenset(paths))), torch.no_grad():
        assert torch.equal(model(images), expected)


def storage_bytes(model: Model) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.module.parameters())


def test_an_outline_has_no_storage_and_reads_weights_when_it_runs(folders: dict[str, Path]) -> None:
    model, whole = outline_model(folders["qwen"]), open_model(folders["qwen"])
    assert model.weights.offloaded
    assert not whole.weights.offloaded
    assert storage_bytes(model) < 1000
    assert [layer.name for layer in model.architecture.layers] == [layer.name for layer in whole.architecture.layers]
    assert model.weights.file_names == whole.weights.file_names
    paths = block_paths(model.architecture.layers)
    batch = texts(4)[0]
    with placed(model.module, Placement(CPU, paths, frozenset(paths), model.parameters())), torch.no_grad():
        assert torch.equal(model.module(batch).logits, whole.module(batch).logits)
    assert storage_bytes(model) < 1000


@pytest.fixture(scope="module")
def offloaded(folders: dict[str, Path]) -> tuple[Case, Forecast]:
    """A job whose models stay in files, and one forecast for all that is planned of it."""
    models = folders["llama"], change_of(decoder("llama")), folders["qwen"]
    job = prepare(*models, texts(), memory_budget=10**6, loss=next_token, max_tokens=16, device="cpu")
    return job, Forecast.of(job.measurement)


Ran = tuple[Result, Any, LiveBytes]


@pytest.fixture(scope="module")
def whole(folders: dict[str, Path]) -> Ran:
    return result(folders)


@pytest.fixture(scope="module")
def within(folders: dict[str, Path]) -> Ran:
    return result(folders, BUDGET)


def result(folders: dict[str, Path], budget: int | None = None, **options: Any) -> Ran:
    change = change_of(LlamaForCausalLM.from_pretrained(folders["llama"]))
    job = prepare(
        folders["llama"],
        change,
        folders["qwen"],
        texts(),
        loss=next_token,
        max_tokens=16,
        memory_budget=budget,
        device="cpu",
        **options,
    )
    passes = planned(job, budget) if budget is not None else None
    live = LiveBytes()
    with live:
        found = run(job, scale=1.0, passes=passes)
    return found, passes, live


def test_blocks_and_groups_give_the_same_bits_and_the_expected_peak(whole: Ran, within: Ran) -> None:
    (free, _, roomy), (found, passes, live) = whole, within
    models = sum(4 * p.numel() for kind in WIDTHS for p in decoder(kind).parameters())
    assert len(passes.groups) > 1
    assert passes.result_in_files
    assert all(placement.fetched for placement in passes.placements)
    assert passes.home_bytes >= models
    assert passes.fetched_bytes > models
    assert list(found.task_vector) == list(free.task_vector)
    for name in free.task_vector:
        assert torch.equal(found.task_vector.dense(name), free.task_vector.dense(name))
    assert passes.peak_bytes <= BUDGET
    assert abs(live.peak / passes.peak_bytes - 1) < 0.1
    assert roomy.peak + models > 2.4 * BUDGET
    with pytest.raises(TuneportError, match=r"apply\(\) needs whole models in memory, .*: use save\(\) instead"):
        found.apply()


def test_an_outline_is_saved_like_a_model_in_memory(whole: Ran, within: Ran, tmp_path: Path) -> None:
    whole[0].save(tmp_path / "whole")
    within[0].save(tmp_path / "found")
    written = [Qwen3ForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("whole", "found")]
    assert written[0].keys() == written[1].keys() != set()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())


def test_tied_embeddings_within_a_budget(tmp_path: Path) -> None:
    """A tied head has no tensor of its own in the files, and is no missing one."""
    kinds = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen": (Qwen3ForCausalLM, Qwen3Config)}
    for kind, (model, config) in kinds.items():
        torch.manual_seed(len(kind))
        few = {**WIDTHS[kind], "num_hidden_layers": 2}
        model(config(**few, **HEADS, tie_word_embeddings=True)).save_pretrained(tmp_path / kind)
    outline = outline_model(tmp_path / "llama").module
    assert outline.lm_head.weight is outline.model.embed_tokens.weight
    folders = {kind: tmp_path / kind for kind in kinds}
    whole, found = result(folders)[0], result(folders, 4 * 10**6)[0]
    assert found.target.weights.offloaded
    for name in whole.task_vector:
        assert torch.equal(found.task_vector.dense(name), whole.task_vector.dense(name))


def test_operations_on_whole_models_are_refused_within_a_budget(
    folders: dict[str, Path], offloaded: tuple[Case, Forecast]
) -> None:
    job, forecast = offloaded
    with pytest.raises(
        TuneportError, match=r"the tensors outside the blocks take .*, and the largest layer .* Give at least"
    ):
        planned(job, 300_000, forecast=forecast)
    with pytest.raises(TuneportError, match=r"a scale is chosen on whole models"):
        run(job, scale="auto", passes=planned(job, 8 * 10**6, forecast=forecast))

    with pytest.raises(TuneportError, match=r"measuring without a plan needs whole models in memory, and .*llama "):
        measured(job)

    def curious(model: nn.Module, batch: Tensor) -> Tensor:
        return next_token(model, batch) / float(next(model.parameters()).abs().max())

    odd = prepare(
        folders["llama"],
        change_of(decoder("llama")),
        folders["qwen"],
        texts(),
        memory_budget=10**6,
        loss=curious,
        device="cpu",
    )
    with pytest.raises(TuneportError, match=r"cannot be planned on the meta device: they or their loss read values"):
        planned(odd, 10**6)


def test_a_larger_budget_keeps_more_blocks_on_the_device(offloaded: tuple[Case, Forecast]) -> None:
    job, forecast = offloaded
    assert all(model.weights.offloaded for model in (job.source, job.target))
    least = planned(job, BUDGET, forecast=forecast)
    some = planned(job, SOME, forecast=forecast)
    every = planned(job, 10**9, forecast=forecast)
    assert len(least.groups) > len(some.groups) == len(every.groups) == 1
    assert any(placement.fetched != frozenset(placement.blocks) for placement in some.placements or ())
    assert all(not placement.blocks for placement in every.placements or ())
    assert least.fetched_bytes > some.fetched_bytes > every.fetched_bytes
    assert [len(group.plan.pairs) for group in groups_of(job.measurement, some)] == [len(job.plan.pairs)]


def test_methods_without_statistics_leave_large_models_offloaded(folders: dict[str, Path]) -> None:
    change = change_of(decoder("llama"))
    small = prepare(folders["llama"], change, folders["qwen"], signals="naive", memory_budget=2 * 10**6, device="cpu")
    assert small.target.weights.offloaded
    found = run(small, "naive")
    whole = run(prepare(folders["llama"], change, folders["qwen"], signals="naive", device="cpu"), "naive")
    for name in whole.task_vector:
        assert torch.equal(found.task_vector.dense(name), whole.task_vector.dense(name))


def test_live_bytes_count_shared_storage_once() -> None:
    live = LiveBytes()
    with live:
        one = torch.zeros(1000)
        view = one[:10]
        two = one + 1
        del one
        assert live.now == 8000  # the view holds it
        del view
        assert live.now == 4000
        two.add_(1)
        kept = to_temporary_file(two)
    assert live.peak < 13_000
    assert torch.equal(kept, two)


def test_a_full_disk_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(TuneportError, match=r"no space for 3.91 KiB of the result.*TMPDIR"):
        to_temporary_file(torch.zeros(1000))


def test_nested_batches_move_to_a_device() -> None:
    batch = PairedBatch({"x": torch.zeros(2)}, (torch.zeros(3), [torch.zeros(1)]), size=2)
    moved = move_batch(batch, torch.device("meta"))
    assert moved.source["x"].is_meta
    assert moved.target[1][0].is_meta
    assert moved.size == 2


def config_folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    config = LlamaConfig(**{**WIDTHS["llama"], **HEADS, "architectures": ["LlamaForCausalLM"], **changes})
    config.save_pretrained(path)
    return path


def test_a_plan_needs_no_weights(tmp_path: Path, folders: dict[str, Path], offloaded: tuple[Case, Forecast]) -> None:
    source = config_folder(tmp_path / "old")
    asked: dict[str, Any] = {"samples": 16, "length": 64, "batch_size": 4, "max_tokens": 16, "shapes_only": True}
    with pytest.raises(TuneportError, match=r"needs `memory_budget`, the memory of one device"):
        PlanConfig.of(**asked)
    options = PlanConfig.of(**asked, memory_budget=12 * 10**6)
    found = estimate_shapes(source, folders["qwen"], options)
    assert found["layers"] == 4 * 7
    one, two = found["plans"][:2]
    assert (one["devices"], two["devices"]) == (1, 2)
    assert one["runs"] == two["runs"] == 1
    assert (one["samples"], two["samples"]) == (16, 8)
    assert one["peak_bytes"] <= 12 * 10**6
    real, _ = offloaded
    shapes = measurement_of_shapes(source, folders["qwen"], options)
    nbytes = [Forecast.of(each).statistics_bytes(each.plan.pairs) for each in (shapes, real.measurement)]
    assert nbytes[0] == nbytes[1]  # as with weights and data
    with pytest.raises(CheckpointError, match=r"old has no weights, so model\.norm\.weight cannot be read"):
        shapes.models.source.weights.tensors["model.norm.weight"]
    small = estimate_shapes(source, source, PlanConfig.of(memory_budget=1000))
    assert "is too small" in small["plans"][0]["error"]
    assert [line.keys() for line in small["teaching"]["plans"]] == [{"devices", "peak_bytes"}] * 4


def test_a_plan_of_teaching_is_scaled_from_the_measured_one(tmp_path: Path) -> None:
    """At the shapes of the measured run it gives what was measured; models twice as large are divided."""
    stored = json.loads((ROOT / "benchmarks/results/speed/distill-8b-cuda.json").read_text())
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    wide = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    Qwen3Config(
        **heads, **wide | {"intermediate_size": 12288, "num_hidden_layers": 36}, architectures=["Qwen3ForCausalLM"]
    ).save_pretrained(tmp_path / "new")
    source, target = config_folder(tmp_path / "old", **heads, **wide), tmp_path / "new"
    models = Sides(*(outline_model(path, dtype=torch.bfloat16, weights=False) for path in (source, target)))
    assert stored["machine"].startswith(GPU)
    steps, held = int(stored["options"]["steps"]), stored["held_before_bytes"]
    options = PlanConfig.of(memory_budget=stored["peak_bytes"] + 2**20, dtype="bfloat16")
    found = teaching_of_shapes(models, options)
    assert found["steps"] == 1250  # ten epochs of 2,000 texts in batches of 16
    one, two, *_ = found["plans"]
    assert one["peak_bytes"] == pytest.approx(stored["peak_bytes"], rel=1e-5)
    assert one["hours"] == pytest.approx(stored["seconds"] / 3600 * 1250 / steps, rel=1e-4)
    assert (two["hours"], two["hours_of_1000"]) == pytest.approx((one["hours"] / 2, 1000 * one["hours"] / 2))
    divided = teaching_of_shapes(models, replace(options, memory_budget=options.memory_budget - 2**21))
    assert divided["in_parts"]
    one, two, four, _ = divided["plans"]
    assert "hours" not in one
    assert (two["hours"], two["hours_of_1000"]) == pytest.approx((found["plans"][0]["hours"], 1000 * two["hours"]))
    assert four["hours_of_1000"] == pytest.approx(two["hours_of_1000"] / 2)
    assert two["peak_bytes"] - four["peak_bytes"] == pytest.approx(held / 4, rel=1e-5)


def test_impossible_configurations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model that can be planned has num_hidden_layers = 1e\+06"):
        outline_model(config_folder(tmp_path / "deep", num_hidden_layers=10**6), weights=False)
    with pytest.raises(CheckpointError, match=r"there is no model at"):
        outline_model(tmp_path / "nowhere", weights=False)


def test_the_command_plans_from_shapes(tmp_path: Path) -> None:
    source = config_folder(tmp_path / "old")
    words = ["plan", "--shapes-only", "--source", str(source), "--target", str(source), "--batch-size", "4"]
    words += ["--length", "32", "--samples", "8", "--memory-budget", "1GB", "--dtype", "bfloat16", "--json"]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert [line["devices"] for line in found["plans"]] == [1, 2, 4, 8]
    assert found["options"]["dtype"] == "bfloat16"
    answer = CliRunner().invoke(app, words[:-1])
    assert answer.exit_code == 0, answer.output
    assert "21 layers, 8 texts of 32 tokens" in answer.stdout
    answer = CliRunner().invoke(app, [*words, "--length", str(10**12)])
    assert isinstance(answer.exception, TuneportError)
    assert "8 texts of 1000000000000 tokens in batches of 4: plan for one text" in str(answer.exception)
    answer = CliRunner().invoke(app, [*words, "--samples", str(10**12)])
    assert isinstance(answer.exception, TuneportError)


@pytest.mark.usefixtures("half_units")
def test_live_modules_and_adapters_of_other_dtypes(folders: dict[str, Path]) -> None:
    model = open_model(folders["llama"], dtype=torch.bfloat16)
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    job = prepare(
        folders["llama"],
        change_of(decoder("llama")),
        finetuned(decoder("qwen")),
        texts(4),
        loss=next_token,
        dtype="bfloat16",
        device="cpu",
    )
    assert next(job.source.module.parameters()).dtype == torch.bfloat16
    with pytest.raises(TuneportError, match=r"unknown dtype 'int8'"):
        prepare(folders["llama"], change_of(decoder("llama")), folders["qwen"], texts(4), dtype="int8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_models_in_ram_run_on_a_gpu_within_a_budget() -> None:
    device = torch.device("cuda")
    source, target = decoder("llama", num_hidden_layers=4), decoder("qwen", num_hidden_layers=5)
    data, change = texts(8, 4), change_of(source)
    options = {"loss": next_token, "max_tokens": 16, "device": "cuda"}
    there = [batch.to(device) for batch in data]
    whole = run(prepare(copy.deepcopy(source).to(device), change, copy.deepcopy(target).to(device), there, **options))
    budget = 9 * 10**6
    job = prepare(source, change, target, data, memory_budget=budget, **options)
    passes = planned(job, budget)
    assert passes.placements is not None
    assert any(placement.fetched for placement in passes.placements)
    found = run(job, scale=1.0, passes=passes)
    assert all(parameter.device.type == "cpu" for parameter in target.parameters())
    for name in whole.task_vector:
        expected = whole.task_vector.dense(name).cpu()
        assert float((found.task_vector.dense(name).cpu() - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_an_offloaded_tower_has_the_logit_scale_of_its_files(zoo: Zoo, family: str, tmp_path: Path) -> None:
    whole = open_model(zoo[f"{family}-base"])
    with torch.no_grad():
        whole.module.logit_scale.fill_(2.3)
    whole.module.save_pretrained(tmp_path / "warm")
    for file in zoo[f"{family}-base"].iterdir():
        if not (tmp_path / "warm" / file.name).exists():
            shutil.copy(file, tmp_path / "warm" / file.name)
    outline = outline_model(tmp_path / "warm")
    assert outline.weights.offloaded
    assert outline.outputs.logit_scale == pytest.approx(open_model(tmp_path / "warm").outputs.logit_scale)
    assert outline.outputs.logit_scale == pytest.approx(math.exp(2.3), rel=1e-6)


@pytest.mark.parametrize(("family", "budget"), [("clip", 380_000), ("siglip", 650_000)])
def test_towers_with_text_give_the_same_bits_within_a_budget(zoo: Zoo, family: str, budget: int) -> None:
    trio, options = zoo.trio(family), {"samples": 8, "device": "cpu"}
    tight = prepare(*trio, zoo.data, memory_budget=budget, **options)
    assert tight.target.weights.offloaded
    plain = prepare(*trio, zoo.data, signals=SCORED, memory_budget=budget, **options)
    with pytest.raises(TuneportError, match="a scale is chosen on whole models"):
        run(plain, "naive", scale="auto")
    found, wanted = run(tight), run(prepare(*trio, zoo.data, **options), scale=1.0)
    assert all(
        torch.equal(found.task_vector.dense(name), wanted.task_vector.dense(name)) for name in wanted.task_vector
    )
