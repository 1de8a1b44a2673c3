"""Mixtures of experts: attention and shared experts move, the other experts and their routers stay, with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from builders.runs import prepare
from builders.samples import jsonl
from builders.texts import FAMILIES, LARGE, SENTENCES, SMALL, Size, gpt_tokenizer, make, scatter, write
from tuneport import transfer
from tuneport.errors import CheckpointError
from tuneport.models.base import MIXTURE
from tuneport.models.open import open_model

MIXTURES = {
    "mixtral": ("Mixtral", "num_local_experts"),
    "qwen2_moe": ("Qwen2Moe", "num_experts"),
    "qwen3_moe": ("Qwen3Moe", "num_experts"),
    "olmoe": ("Olmoe", "num_experts"),
}


def mixture(name: str, size: Size = SMALL) -> Any:
    kind, number = MIXTURES[name]
    more = {number: 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
    arguments = {**FAMILIES["llama"].arguments(size), **more, "vocab_size": 320, "max_position_embeddings": 64}
    with torch.random.fork_rng():
        torch.manual_seed(size.seed)
        module = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**arguments))
        scatter(module)
    return module.eval()


def tuned(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return module


def folders(place: Path, source: Any, finetuned: Any, target: Any) -> list[Path]:
    names = ("source", "finetuned", "target")
    modules = (source, finetuned, target)
    return [write(place / name, module, gpt_tokenizer()) for name, module in zip(names, modules, strict=True)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in SENTENCES])


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_stay_and_the_rest_moves(name: str, tmp_path: Path, data: Path) -> None:
    paths = folders(tmp_path, mixture(name), tuned(mixture(name)), mixture(name, LARGE))
    result = transfer(*paths, data, samples=12, scale=1.0)
    moved = {layer.target.split(".")[-2] for layer in result.records}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= moved
    assert ("gate_proj" in moved) == (name == "qwen2_moe"), "the shared expert"
    before, out = load_file(paths[2] / "model.safetensors"), result.save(tmp_path / "out")
    after = load_file(out / "model.safetensors")
    experts = [key for key in before if ".experts." in key or key.endswith(".gate.weight")]
    assert len(experts) == 3 * (3 * 4 + 1)
    assert all(torch.equal(before[key], after[key]) for key in experts)
    assert not torch.equal(
        before["model.layers.0.self_attn.q_proj.weight"], after["model.layers.0.self_attn.q_proj.weight"]
    )
    for entries, blocks in ((result.record["not_transported"], 3), (result.record["left_behind"], 2)):
        listed = {entry["tensor"] for entry in entries if entry["reason"] == MIXTURE}
        assert listed == {key for key in experts if int(key.split(".")[2]) < blocks}
    assert getattr(transformers, f"{MIXTURES[name][0]}ForCausalLM").from_pretrained(out)


def test_a_dense_source_gives_its_attention(tmp_path: Path, data: Path) -> None:
    """The layers of the dense source that no layer of the mixture takes are listed."""
    dense = {"vocab_size": 320, "max_position_embeddings": 64}
    paths = folders(tmp_path, make("llama", SMALL, **dense), tuned(make("llama", SMALL, **dense)), mixture("mixtral"))
    result = transfer(*paths, data, samples=12, scale=1.0)
    assert {layer.target.split(".")[-2] for layer in result.records} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    reasons = {entry["reason"] for entry in result.record["left_behind"] if ".mlp." in entry["tensor"]}
    assert reasons == {f"the target has no layer with the role {role}" for role in ("gate", "up", "down")}


def test_a_mixture_is_not_read_block_by_block(tmp_path: Path, data: Path) -> None:
    paths = folders(tmp_path, mixture("mixtral"), tuned(mixture("mixtral")), mixture("mixtral", LARGE))
    with pytest.raises(CheckpointError, match="holds the experts of a mixture one by one"):
        prepare(*paths, data, samples=12, memory_budget=100_000)
    assert open_model(paths[0]).architecture.outside
