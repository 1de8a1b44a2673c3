"""Rows of tokens that a fine-tune added, against tables that are planted: permuted and scaled."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from builders.runs import expected, prepare
from builders.texts import SENTENCES, Size, gpt_tokenizer, make, write
from tuneport import transfer
from tuneport.data.dataset import Dataset
from tuneport.report.summary import moved_words

SIZE = Size(width=16, depth=1, heads=2, groups=2, head_width=8, hidden=24)
ROWS = 320  # of the base
FACTOR = 3.0
ORDER = torch.randperm(16, generator=torch.Generator().manual_seed(3))
DATA = Dataset(list(SENTENCES), None, ())


def model(tied: bool, seed: int, rows: int) -> Any:
    size = Size(**{**SIZE.__dict__, "seed": seed})
    return make("llama", size, vocab_size=rows, max_position_embeddings=64, tie_word_embeddings=tied)


def folders(base: Path, tied: bool, adapter: bool) -> dict[str, Any]:
    """A source, a fine-tune that adds <|call|> and <|plan|>, and a target with a token <|call|> in another place."""
    source = model(tied, 0, ROWS)
    tables = [source.model.embed_tokens] if tied else [source.model.embed_tokens, source.lm_head]
    target = model(tied, 1, ROWS + 2)
    others = [target.model.embed_tokens] if tied else [target.model.embed_tokens, target.lm_head]
    with torch.no_grad():
        for own, other in zip(tables, others, strict=True):
            other.weight[:ROWS] = FACTOR * own.weight[:, ORDER]
    longer, elsewhere = gpt_tokenizer(ROWS), gpt_tokenizer(ROWS)
    longer.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|plan|>"]})
    elsewhere.add_special_tokens({"additional_special_tokens": ["<|else|>", "<|call|>"]})
    found: dict[str, Any] = {"source": write(base / "source", source, gpt_tokenizer(ROWS))}
    found["target"] = write(base / "target", target, elsewhere)
    tuned = copy.deepcopy(source)
    tuned.resize_token_embeddings(ROWS + 2)
    if adapter:
        import peft

        saved = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
        tuned = peft.get_peft_model(tuned, config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    tuned.save_pretrained(base / "tuned")
    longer.save_pretrained(base / "tuned")
    found["tuned"] = base / "tuned"
    rows = tuned.base_model.model if adapter else tuned
    new = [rows.get_input_embeddings()] if tied else [rows.get_input_embeddings(), rows.get_output_embeddings()]
    weights = [getattr(each, "modules_to_save", {"default": each})["default"].weight for each in new]
    found["rows"] = [weight.detach()[ROWS:] for weight in weights]
    return found


@pytest.mark.parametrize(("tied", "adapter"), [(False, False), (True, False), (False, True)])
def test_rows_of_added_tokens_move_by_their_text(tied: bool, adapter: bool, tmp_path: Path) -> None:
    found = folders(tmp_path, tied, adapter)
    job = prepare(found["source"], found["tuned"], found["target"], DATA, samples=4)
    result = transfer(found["source"], found["tuned"], found["target"], DATA, samples=4, scale=1.0)
    module, before = result.apply(), result.target.module
    for rows, side in zip(found["rows"], ("get_input_embeddings", "get_output_embeddings"), strict=False):
        old, new = (getattr(part, side)().weight for part in (before, module))
        # float64 maps of float32 tables, written in float32
        assert torch.allclose(new[ROWS + 1], FACTOR * rows[0][ORDER], rtol=1e-5, atol=1e-6)
        changed = (old != new).any(1)
        assert changed.nonzero().flatten().tolist() == [ROWS + 1], "only the row of the token changes"
    lacking = [item for item in result.record["left_behind"] if "<|plan|>" in item["reason"]]
    assert len(lacking) == len(found["rows"])
    assert {item["reason"] for item in lacking} == {"the target's tokenizer has no token <|plan|>"}
    assert "rows of tokens that the target lacks" in moved_words(result.record)
    assert expected(job)["left_behind"] == result.record["left_behind"]
    if not adapter:
        tensors = [load_file(found[name] / "model.safetensors") for name in ("source", "tuned")]
        changes = [tensors[1][name][: len(old)] - old for name, old in tensors[0].items()]
        total = sum(float(part.double().square().sum()) for part in (*changes, *found["rows"]))
        for item, rows in zip(lacking, found["rows"], strict=True):
            # sums of squares of float32 differences
            assert item["share"] == pytest.approx(float(rows[1].double().square().sum()) / total, rel=1e-5)
