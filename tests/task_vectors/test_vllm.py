"""What vLLM makes of a written adapter, against the rules in its source, case by case."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tuneport
from builders import texts
from builders.loras import adapted, saved
from tuneport.report.summary import summary_rows
from tuneport.task_vectors.lora_format import Adapter, open_adapter
from tuneport.task_vectors.lora_write import vllm_rank, vllm_refusals


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A LoRA whose ranks differ, moved to a wider decoder."""
    source, target = texts.make("llama", texts.SMALL), texts.make("llama", texts.LARGE)
    options = {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}, "task_type": "CAUSAL_LM"}
    folder = saved(adapted(source, **options), tmp_path_factory.mktemp("servers") / "lora")
    return tuneport.transfer(source, folder, target, method="naive")


def test_the_summary_says_what_vllm_makes_of_an_adapter(result: Any, tmp_path: Path) -> None:
    words = []
    for name, uniform in (("several", False), ("one", True)):
        out = result.save(tmp_path / name, as_="adapter", uniform_rank=uniform)
        record = json.loads((out / "tuneport.json").read_text())
        words.append(dict(summary_rows(record))["server"])
        assert (not record["adapter"]["vllm"]["refused"]) == uniform
        assert words[-1].split("`")[0].strip(": ") in (out / "README.md").read_text().replace("\\", "")
    assert words[0] == "vLLM refuses layers of several ranks: pass `uniform_rank=True`"
    assert words[1] == "vLLM loads it with --max-lora-rank 8"
    assert not list(vllm_refusals(open_adapter(tmp_path / "one")))


PLAIN = Adapter(
    "plain",
    {"peft_type": "LORA", "r": 4, "bias": "none", "modules_to_save": None, "rank_pattern": {}},
    {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"},
)


@pytest.mark.parametrize(
    ("config", "key", "reason"),
    [
        ({}, "", None),
        ({"r": 512}, "", None),
        ({"r": 513}, "", "rank 513, and 512 is the largest"),
        ({"rank_pattern": {"q_proj": 2}}, "", "layers of several ranks"),
        ({"use_dora": True}, "", "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "", r"modules that are stored whole \(lm_head\)"),
        ({"bias": "lora_only"}, "", "biases"),
        ({}, "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", r"it does not adapt \(c_attn\)"),
        ({}, "base_model.model.model.embed_tokens.lora_embedding_A", r"it does not adapt \(embed_tokens\)"),
    ],
)
def test_each_rule(config: dict[str, Any], key: str, reason: str | None) -> None:
    more = {key: torch.zeros(4, 4)} if key else {}
    adapter = replace(PLAIN, config={**PLAIN.config, **config}, tensors={**PLAIN.tensors, **more})
    found = list(vllm_refusals(adapter))
    assert len(found) == (reason is not None)
    assert all(re.search(str(reason), text) for text in found)


def test_the_rank_that_vllm_must_be_started_with() -> None:
    ranks = {rank: vllm_rank(replace(PLAIN, config={"r": rank})) for rank in (1, 2, 8, 16, 17, 300, 512, 513)}
    assert ranks == {1: 1, 2: 8, 8: 8, 16: 16, 17: 32, 300: 320, 512: 512, 513: None}
