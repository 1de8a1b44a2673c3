"""What moved and what was left behind, against squared norms of differences of weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tuneport
from builders.loras import clip, clip_loss, images
from builders.toy import ToyViT, batches, loss
from tuneport.report.summary import moved_words


def tuned(base: nn.Module, *unchanged: str) -> nn.Module:
    """A copy with every parameter changed but those whose names contain one of the words."""
    module, generator = copy.deepcopy(base), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if not any(word in name for word in unchanged):
                parameter.add_(0.01 * noise)
    return module


def squares(base: nn.Module, finetuned: nn.Module) -> dict[str, float]:
    """The squared norm of the change of each parameter."""
    new = dict(finetuned.named_parameters())
    return {name: float((new[name] - old).detach().double().square().sum()) for name, old in base.named_parameters()}


def test_shares_are_those_of_squared_norms() -> None:
    source = clip()
    finetuned = tuned(source, "layer_norm1", "class_embedding")
    result = tuneport.transfer(source, finetuned, clip(24, 3, 1), images(), loss=clip_loss)
    changes = squares(source, finetuned)
    total = sum(changes.values())
    left = {item["tensor"]: item for item in result.record["left_behind"]}
    assert left
    assert all(changes[name] > 0 for name in left), "a change of zero is not listed"
    # float32 differences, summed in float64 on both sides
    assert all(item["share"] == pytest.approx(changes[name] / total, rel=1e-5) for name, item in left.items())
    layers = {name for name in changes if name not in left and changes[name] > 0}
    assert result.record["moved_share"] == pytest.approx(sum(changes[name] for name in layers) / total, rel=1e-5)
    assert {item["kind"] for item in left.values()} == {"norms", "position embeddings"}
    norms = sum(item["share"] for item in left.values() if item["kind"] == "norms")
    moved, text = result.record["moved_share"], moved_words(result.record)
    assert text.startswith(
        f"{100 * moved:.1f} % of the change (squared norm); left behind: norms {100 * norms:.2g} %, "
    )
    assert text.endswith(f", position embeddings {100 * (1 - moved - norms):.2g} %")


def test_all_of_a_change_that_layers_hold() -> None:
    source = ToyViT(seed=1)
    finetuned = tuned(source, "class_embedding", "position", "bias", "proj", "classifier")
    result = tuneport.transfer(source, finetuned, ToyViT(seed=2), batches(16), loss=loss)
    assert result.record["left_behind"] == []
    assert moved_words(result.record) == "100 % of the change (squared norm)"


def test_source_blocks_that_no_target_block_takes(tmp_path: Path) -> None:
    source = ToyViT(depth=4, seed=1)
    finetuned = tuned(source, "class_embedding", "position", "bias", "proj", "classifier")
    result = tuneport.transfer(source, finetuned, ToyViT(depth=2, seed=2), batches(16), loss=loss)
    changes = squares(source, finetuned)
    skipped = sum(value for name, value in changes.items() if name.startswith(("blocks.1.", "blocks.2.")))
    assert skipped > 0
    assert 1 - result.record["moved_share"] == pytest.approx(skipped / sum(changes.values()), rel=1e-5)
    assert {item["reason"] for item in result.record["left_behind"]} == {"no target block takes this source block"}
    assert "left behind: layers " in moved_words(result.record)
    out = result.save(tmp_path / "out")
    assert f"| moved | {moved_words(result.record)} |" in (out / "README.md").read_text().replace("\\", "")


def test_fused_layers_are_counted_by_their_rows() -> None:
    source = ToyViT(fused=True, seed=1)
    finetuned = copy.deepcopy(source)
    with torch.no_grad():
        finetuned.class_embedding.add_(0.01)
        for block in finetuned.blocks:
            block.attn.qkv.weight.add_(0.01)
            block.attn.qkv.bias.add_(0.01)
    result = tuneport.transfer(source, finetuned, ToyViT(fused=False, seed=2), batches(16), loss=loss)
    changes = squares(source, finetuned)
    share = changes["class_embedding"] / sum(changes.values())
    assert 1 - result.record["moved_share"] == pytest.approx(share, rel=1e-5)


def test_what_an_adapter_cannot_hold_is_left_behind(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    source = clip()
    finetuned = tuned(source)
    result = tuneport.transfer(source, finetuned, clip(24, 3, 1), method="naive")
    assert result.record["moved_share"] == pytest.approx(1.0)
    out = result.save(tmp_path / "out", as_="adapter", rank=2)
    record: dict[str, Any] = json.loads((out / "tuneport.json").read_text())
    changes = squares(source, finetuned)
    held = [name for name in changes if not any(word in name for word in ("norm", "layrnorm", "class"))]
    assert record["moved_share"] == pytest.approx(sum(changes[n] for n in held) / sum(changes.values()), rel=1e-5)
    reasons = {item["tensor"]: item["reason"] for item in record["left_behind"]}
    assert reasons["vision_model.post_layernorm.weight"] == "a LoRA cannot hold a parameter of LayerNorm"
