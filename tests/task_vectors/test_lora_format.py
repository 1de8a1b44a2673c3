"""Adapters from end to end: which are opened, what a transfer makes of them, and the command line."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tuneport
from builders import toy
from builders.folders import Zoo
from builders.loras import (
    TARGETS,
    adapted,
    assert_same,
    clip,
    clip_loss,
    gpt2,
    images,
    llama,
    merged_change,
    outputs,
    read,
    saved,
    t5,
)
from tuneport import cli
from tuneport.errors import CheckpointError, TuneportError
from tuneport.methods import METHODS
from tuneport.methods.base import check_method
from tuneport.models.families.huggingface import HuggingFace
from tuneport.pipeline import arithmetic
from tuneport.task_vectors.lora_format import is_adapter, open_adapter
from tuneport.task_vectors.low_rank import LowRank, as_dense
from tuneport.task_vectors.vector import TaskVector, load_task_vector

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def test_pickled_and_live_adapters_read_the_same(tmp_path: Path) -> None:
    base = clip()
    model = adapted(base, target_modules=TARGETS["clip"], modules_to_save=["visual_projection"])
    folder = saved(model, tmp_path / "lora")
    expected = TaskVector(dict(read(folder, base)))
    model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    assert (tmp_path / "pickled" / "adapter_model.bin").is_file()
    for other in (read(tmp_path / "pickled", base), read(model, base)):
        assert set(other) == set(expected)
        assert all(torch.equal(other.dense(name), expected.dense(name)) for name in expected)
    assert is_adapter(folder)
    assert is_adapter(model)
    assert not is_adapter(base)
    assert not is_adapter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"is an adapter of type IA3, not a LoRA"),
        ({"peft_type": "ADALORA"}, r"is an adapter of type ADALORA, not a LoRA"),
        ({"peft_type": "LOHA"}, r"is an adapter of type LOHA, not a LoRA"),
        ({"alora_invocation_tokens": [1]}, r"uses aLoRA, which applies only to some tokens"),
        (
            {"target_parameters": ["w"], "use_qalora": True},
            r"uses LoRA on bare parameters \(target_parameters\), QALoRA",
        ),
        ({"init_lora_weights": "pissa_niter_4"}, r"initialised by pissa_niter_4, which changes the base weights"),
        ({"r": 4}, r"6 parts of the adapter .* \(factors \(3, 16\) and \(32, 3\), but its configuration has rank 4\)"),
    ],
)
def test_unsupported_adapters_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = clip()
    folder = saved(adapted(base, target_modules=TARGETS["clip"]), tmp_path / "lora")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        read(folder, base)


def tokens(count: int = 12, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 30, (count // 4, 4, 7), generator=generator)
    return [{"input_ids": part, "labels": part.flip(1)} for part in ids]


def text_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(**batch).loss


CASES: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "clip": (clip, images, clip_loss, ["q_proj", "out_proj", "fc2", "patch_embedding", "visual_projection"]),
    "llama": (llama, tokens, text_loss, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
    "t5": (t5, tokens, text_loss, ["q", "v", "o", "wi", "wo"]),
    "gpt2": (gpt2, tokens, text_loss, ["c_attn", "c_proj", "c_fc"]),
}


# Each family once and each method once: methods see tensors, and families know no method.
@pytest.mark.parametrize(
    ("family", "method"), [("clip", "theseus"), ("llama", "naive"), ("t5", "bico"), ("gpt2", "bico")]
)
def test_lora_is_transferred_as_a_lora(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data, loss, modules = CASES[family]
    source, target = make(), make(width=24, depth=3, seed=1)
    model = adapted(source, target_modules=modules, rank_pattern={modules[0]: 2}, bias="lora_only")
    folder = saved(model, tmp_path / "lora")
    options = {"loss": loss, "method": method, "scale": 0.7}
    with monkeypatch.context() as patch:
        patch.setattr(LowRank, "dense", forbidden)
        result = tuneport.transfer(source, folder, target, data(), **options)
        out = result.save(tmp_path / "out", as_="adapter")
    ranks = {record.target: record.rank for record in result.records}
    assert set(ranks.values()) == {2, 3}
    for name in result.task_vector:
        entry = result.task_vector[name]
        assert isinstance(entry, LowRank) == (entry.ndim > 1 if isinstance(entry, Tensor) else True), name
    written = read(out, target)
    assert {written.spec(name).rank for name in written if written.spec(name).rank is not None} == {2, 3}
    # the same transfer with a dense task vector is the oracle
    dense = TaskVector({name: as_dense(entry) for name, entry in read(folder, source).items()})
    oracle = tuneport.transfer(source, dense, target, data(), **options)
    for name in oracle.task_vector:
        found = result.task_vector.dense(name)
        torch.testing.assert_close(found, oracle.task_vector.dense(name), atol=1e-5, rtol=1e-4)
    for batch in data(8, seed=9):
        expected = outputs(oracle.apply(), batch)
        assert not torch.allclose(expected, outputs(target, batch), atol=1e-3)
        torch.testing.assert_close(outputs(result.apply(), batch), expected, atol=1e-5, rtol=1e-5)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(target), out).eval()
        torch.testing.assert_close(outputs(loaded, batch), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(outputs(loaded.merge_and_unload(), batch), expected, atol=1e-5, rtol=1e-5)


def forbidden(*_: Any) -> Any:
    raise AssertionError("a dense update was made")


def test_live_adapter_as_finetuned(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    model = adapted(source, target_modules=["q_proj", "fc1"])
    folder = saved(model, tmp_path / "lora")
    stored, live = (tuneport.transfer(source, given, target, images(), loss=clip_loss) for given in (folder, model))
    assert all(torch.equal(stored.task_vector.dense(n), live.task_vector.dense(n)) for n in stored.task_vector)
    assert stored.record["finetuned"]["adapter"]["rank"] == 3
    assert set(stored.record["finetuned"]["sha256"]) == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(TuneportError, match=r"still carries an adapter\. Pass the bare base"):
        tuneport.transfer(model.get_base_model(), folder, target, images(), loss=clip_loss)


def test_the_active_adapter_of_a_live_model_is_read() -> None:
    """PeftModel.active_adapter names one also where several are active."""
    base = clip()
    model = adapted(base, target_modules=["q_proj"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["fc1"]))
    for name, module in (("default", "q_proj"), ("other", "fc1"), ("default", "q_proj")):
        model.set_adapter(name)
        assert all(module in tensor for tensor in read(model, base))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(TuneportError, match="has 2 active adapters; set one with set_adapter"):
        read(model, base)


def test_blocks_without_an_adapter_do_not_change(tmp_path: Path) -> None:
    """The depth rule counts all blocks of the source, not only those that the adapter reaches."""
    source, target = clip(depth=4), clip(24, 4, 1)
    model = adapted(source, target_modules=["q_proj"], layers_to_transform=[1])
    result = tuneport.transfer(source, saved(model, tmp_path / "lora"), target, images(), loss=clip_loss)
    assert [(record.target, record.source) for record in result.records] == [
        ("vision_model.encoder.layers.1.self_attn.q_proj.weight",) * 2
    ]
    reasons = {kept.tensor: kept.reason for kept in result.not_transported}
    assert reasons["vision_model.encoder.layers.2.self_attn.q_proj.weight"] == (
        "source block 2 has no change in the role q"
    )
    assert reasons["vision_model.encoder.layers.1.self_attn.q_proj.bias"] == "the fine-tune did not change this bias"
    assert reasons["vision_model.encoder.layers.1.mlp.fc1.weight"] == "the fine-tune changed no layer with the role fc1"


@pytest.mark.parametrize("fused", [(False, True), (True, False), (True, True)])
def test_fused_weights_stay_exact(fused: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = toy.ToyViT(fused=fused[0], seed=1), toy.ToyViT(width=16, depth=3, fused=fused[1], seed=2)
    modules = ["qkv", "fc1"] if fused[0] else ["q_proj", "v_proj", "fc1"]
    folder = saved(adapted(source, target_modules=modules, r=2, bias="lora_only"), tmp_path / "lora")
    with monkeypatch.context() as patch:
        patch.setattr(LowRank, "dense", forbidden)
        result = tuneport.transfer(source, folder, target, toy.batches(64), loss=toy.loss)
        out = result.save(tmp_path / "out", as_="adapter")
    name = "blocks.0.attn.qkv.weight" if fused[1] else "blocks.0.attn.q_proj.weight"
    # separate layers with factors of their own add up; layers that share the input factor go on sharing it
    assert result.task_vector[name].rank == (4 if fused == (False, True) else 2)
    dense = TaskVector({name: as_dense(entry) for name, entry in read(folder, source).items()})
    oracle = tuneport.transfer(source, dense, target, toy.batches(64), loss=toy.loss)
    for name in oracle.task_vector:
        torch.testing.assert_close(result.task_vector.dense(name), oracle.task_vector.dense(name), atol=1e-5, rtol=1e-4)
    batch = toy.batches(8)[0][0]
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(target), out)
    torch.testing.assert_close(loaded(batch), oracle.apply()(batch), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loaded.merge_and_unload()(batch), oracle.apply()(batch), atol=1e-5, rtol=1e-4)


def low_rank(vector: TaskVector, rank: int = 2) -> dict[str, Any]:
    """A task vector whose matrices (kernels too) are random factors."""
    generator = torch.Generator().manual_seed(4)
    entries: dict[str, Any] = {}
    for name in vector:
        shape = vector.shape(name)
        entries[name] = vector[name]
        if len(shape) > 1:
            out, in_ = (
                torch.randn(shape[0], rank, generator=generator),
                torch.randn(rank, *shape[1:], generator=generator),
            )
            entries[name] = LowRank(out, in_)
    return entries


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shapes", [{}, {"width": 16, "depth": 3, "fused": True}])
def test_every_method_transfers_factors_like_dense_matrices(method: str, shapes: dict[str, Any]) -> None:
    if shapes and method in ("gradfix", "gradfix_mean", "transfusion"):
        pytest.skip("for one architecture only")
    source, target = toy.ToyViT(seed=1), toy.ToyViT(**shapes, seed=2)
    given = toy.problem(source, toy.finetuned(source), target, METHODS[method].signals, count=64)
    factors = low_rank(given.task_vector)
    dense = {name: as_dense(entry) for name, entry in factors.items()}
    moved = check_method(METHODS[method], replace(given, task_vector=factors))
    expected = METHODS[method].transfer(replace(given, task_vector=dense))
    assert METHODS[method].keeps_rank == ("gradfix" not in method)
    for name in expected.task_vector:
        torch.testing.assert_close(
            moved.task_vector.dense(name), expected.task_vector.dense(name), atol=1e-5, rtol=1e-4
        )
    weights = {pair.target.weight for pair in given.plan.pairs}
    assert all(isinstance(moved.task_vector[name], LowRank) == METHODS[method].keeps_rank for name in weights)
    assert all((record.rank == 2) == METHODS[method].keeps_rank for record in moved.records)


def test_low_rank_results_apply_like_dense_results(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    folder = saved(adapted(source, target_modules=["q_proj", "patch_embedding"]), tmp_path / "lora")
    batches = images(16)
    result = tuneport.transfer(source, folder, target, batches, loss=clip_loss, scale="auto")
    assert result.scale == result.record["scale"]
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), clip(24, 3, 1).parameters(), strict=True))
    result = tuneport.transfer(source, folder, target, batches, loss=clip_loss)
    result.save(tmp_path / "tau.safetensors", as_="task-vector")
    vector = load_task_vector(tmp_path / "tau.safetensors")
    assert isinstance(vector["vision_model.embeddings.patch_embedding.weight"], LowRank)
    tensors = result.tensors()
    for name, tensor in vector.apply_to(result.target.weights.tensors).items():
        assert torch.equal(tensor, tensors[name])
    module = result.apply()
    out = result.save(tmp_path / "model")
    loaded = transformers.CLIPVisionModelWithProjection.from_pretrained(out)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), loaded.parameters(), strict=True))


# The command line


def run(*words: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tuneport", *map(str, words)])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def lora(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    return saved(
        adapted(base, target_modules=["q_proj", "fc1", "patch_embedding"]), tmp_path_factory.mktemp("l") / "lora"
    )


def inputs(zoo: Zoo, finetuned: Path) -> list[str | Path]:
    source, target = zoo["clip_vision-base"], zoo["clip_vision-target"]
    return ["--source", source, "--finetuned", finetuned, "--target", target, "--data", zoo.data, "--samples", "20"]


def test_transfer_as_adapter(zoo: Zoo, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ported"
    assert run("transfer", *inputs(zoo, lora), "--out", out, "--as", "adapter", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "tuneport.json").read_text())
    assert {layer["rank"] for layer in record["layers"]} == {3}
    assert record["adapter"]["rank"] == 3
    assert all(item["lost_energy"] == 0 for item in record["adapter"]["modules"])
    target = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-target"])
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(zoo["clip_vision-target"])
    assert run("transfer", *inputs(zoo, lora), "--out", tmp_path / "whole") == 0
    whole = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "whole").eval()
    loaded = peft.PeftModel.from_pretrained(target, out).eval()
    batch = {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))}
    torch.testing.assert_close(outputs(loaded, batch), outputs(whole, batch), atol=1e-5, rtol=1e-4)
    assert "| adapter | 7 modules, rank 3, nothing cut off |" in (out / "README.md").read_text()
    text = (tmp_path / "whole" / "report.html").read_text()
    assert "<th scope=col>rank</th>" in text


@pytest.mark.usefixtures("no_forward")
def test_errors_come_before_any_work(zoo: Zoo, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", tmp_path / "out"]
    for words, message in (
        (["--rank", "3"], "--rank, --energy, --uniform-rank and --adapter-dtype shape an adapter; they go with --as"),
        (
            ["--uniform-rank"],
            "--rank, --energy, --uniform-rank and --adapter-dtype shape an adapter; they go with --as",
        ),
        (
            ["--as", "adapter", "--adapter-dtype", "int8"],
            "unknown adapter_dtype 'int8'. Known: bfloat16, float16, float32.",
        ),
        (["--as", "adapter", "--rank", "3", "--energy", "0.9"], "either --rank or --energy"),
        (["--as", "adapter", "--energy", "1.5"], "--energy must be at most 1, got 1.5"),
    ):
        assert run("transfer", *inputs(zoo, lora), *out, *words) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    tuned = zoo["clip_vision-tuned"]
    assert run("transfer", *inputs(zoo, tuned), *out, "--as", "adapter") == 1
    assert "updates are not low-rank" in capsys.readouterr().err
    same = ["--source", zoo["clip_vision-base"], "--finetuned", lora, "--target", zoo["clip_vision-base"]]
    data = ["--data", zoo.data, "--samples", "20"]
    assert run("transfer", *same, *data, *out, "--as", "adapter", "--method", "gradfix") == 1
    assert "method gradfix makes dense updates: pass --rank R" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_extract_and_apply_an_adapter(zoo: Zoo, lora: Path, tmp_path: Path) -> None:
    base = zoo["clip_vision-base"]
    tau = tmp_path / "tau.safetensors"
    assert run("extract", base, lora, "-o", tau) == 0
    vector = load_task_vector(tau)
    assert all(isinstance(vector[name], LowRank) for name in vector)
    assert run("apply", tau, base, "-o", tmp_path / "whole") == 0
    whole = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "whole")
    model = transformers.CLIPVisionModelWithProjection.from_pretrained(base)
    merged = peft.PeftModel.from_pretrained(model, lora).merge_and_unload()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(dict(whole.named_parameters())[name], parameter, atol=1e-6, rtol=1e-5)


def test_plan_and_transfer_from_a_saved_task_vector(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    lora = saved(adapted(base, target_modules=["q_proj"], bias="all"), tmp_path / "lora")
    assert run("plan", *inputs(zoo, lora), "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert any(row["target"].endswith("fc1.weight") for row in plan["layers"])  # its bias changed
    tau = tmp_path / "tau.safetensors"
    assert run("extract", zoo["clip_vision-base"], lora, "-o", tau) == 0
    for given, out in ((lora, "direct"), (tau, "through")):
        assert run("transfer", *inputs(zoo, given), "--out", tmp_path / out, "--as", "adapter") == 0
    direct, through = (open_adapter(tmp_path / out).tensors for out in ("direct", "through"))
    assert set(direct) == set(through)
    assert all(torch.equal(direct[name], through[name]) for name in direct)
    assert open_adapter(tmp_path / "direct").config["bias"] == "all"


def test_extract_where_live_names_differ_from_file_names(zoo: Zoo, tmp_path: Path) -> None:
    base = zoo["vit-base"]
    model = transformers.ViTForImageClassification.from_pretrained(base)
    tuned = adapted(model, target_modules=["q_proj"], modules_to_save=["classifier"])
    folder = saved(tuned, tmp_path / "lora")
    vector = arithmetic.extract(base, folder)
    names = HuggingFace().describe(model).weights.file_names
    assert set(vector) <= set(names.values())
    assert_same(
        vector.rename({stored: live for live, stored in names.items() if stored in vector}),
        merged_change(tuned, model),
        2e-6,
    )
    again = arithmetic.extract(base, folder, exclude=["classifier*"])
    assert set(vector) - set(again) == {"classifier.weight", "classifier.bias"}


def test_another_base_name_is_a_note(zoo: Zoo, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    copied = Path(shutil.copytree(lora, tmp_path / "lora"))
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "someone/other"}))
    assert run("transfer", *inputs(zoo, copied), "--method", "naive", "--out", tmp_path / "out", "--as", "adapter") == 0
    assert "note: the adapter names someone/other as its base" in " ".join(capsys.readouterr().err.split())
