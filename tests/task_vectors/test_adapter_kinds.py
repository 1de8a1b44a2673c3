"""The table of adapter kinds in docs/adapters.md: each is read, converted or refused, with peft's own classes."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from builders import texts
from builders.loras import assert_same, merged_change, saved
from tuneport.errors import CheckpointError
from tuneport.models.change import change_of, opened
from tuneport.models.open import describe_module

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers

ON = {"target_modules": ["query", "value"]}
KINDS: dict[str, tuple[str, Any]] = {
    "LoRA": ("read", lambda: peft.LoraConfig(r=3, **ON)),
    "rsLoRA": ("read", lambda: peft.LoraConfig(r=3, use_rslora=True, **ON)),
    "DoRA": ("read", lambda: peft.LoraConfig(r=3, use_dora=True, **ON)),
    "lora_bias": ("read", lambda: peft.LoraConfig(r=3, lora_bias=True, **ON)),
    "embeddings": ("read", lambda: peft.LoraConfig(r=3, target_modules=["query", "word_embeddings"])),
    "modules_to_save": ("read", lambda: peft.LoraConfig(r=3, modules_to_save=["pooler"], **ON)),
    "rank patterns": (
        "read",
        lambda: peft.LoraConfig(r=3, rank_pattern={"value": 5}, alpha_pattern={"query": 2}, **ON),
    ),
    "PiSSA": ("refused", lambda: peft.LoraConfig(r=3, init_lora_weights="pissa", **ON)),
    "AdaLoRA": ("refused", lambda: peft.AdaLoraConfig(total_step=10, init_r=3, target_r=3, **ON)),
    "IA3": ("refused", lambda: peft.IA3Config(target_modules=["key", "value"], feedforward_modules=[])),
    "LoHa": ("converted", lambda: peft.LoHaConfig(r=2, **ON)),
    "LoKr": ("converted", lambda: peft.LoKrConfig(r=2, **ON)),
    "VeRA": ("converted", lambda: peft.VeraConfig(r=4, **ON)),
    "prefix": ("refused", lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")),
    "prompt": ("refused", lambda: peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")),
}
MERGE = r"Merge it into its base with merge_and_unload\(\) of peft, and give the merged model as `finetuned`\."
REFUSALS = {
    "PiSSA": r"was initialised by pissa, which changes the base weights\. Save it again with path_initial_model",
    "AdaLoRA": rf"is an adapter of type ADALORA, not a LoRA: peft cannot convert it to LoRA\. {MERGE}$",
    "IA3": rf"is an adapter of type IA3, not a LoRA: peft cannot convert it to LoRA\. {MERGE}$",
    "prefix": r"of type PREFIX_TUNING: it adds trained tokens and changes no weight, so that nothing can be ported\.",
    "prompt": r"of type PROMPT_TUNING: it adds trained tokens and changes no weight, so that nothing can be ported\.",
}


def made(base: nn.Module, config: Any) -> Any:
    """A PeftModel with random numbers in everything that training changes."""
    model = peft.get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_kind(kind: str, tmp_path: Path) -> None:
    verdict, config = KINDS[kind]
    base = texts.make("bert")
    model = made(base, config())
    for given in (saved(model, tmp_path / "adapter"), model):
        if verdict == "refused":
            with pytest.raises(CheckpointError, match=REFUSALS[kind]) as failure:
                change_of(describe_module(base), opened(given))
            assert "\n" not in str(failure.value)
            continue
        vector = change_of(describe_module(base), opened(given))
        change = merged_change(model, base)
        if verdict == "converted":  # leaves out 2^-21 = 8 * 2^-24 of the squared norm, summed over 4 or more in float32
            for name in vector:
                error = torch.linalg.vector_norm(vector.dense(name) - change[name])
                assert error <= (16 * 2**-24) ** 0.5 * torch.linalg.vector_norm(change[name])
            assert set(vector) == {name for name in change if change[name].any()}
        else:
            assert_same(vector, change, 5e-6)
        dense = [name for name in vector if vector.spec(name).rank is None and vector[name].ndim > 1]
        assert bool(dense) == (kind in ("DoRA", "modules_to_save")), dense
    if kind == "LoHa":  # a product of two matrices of rank 2, entry by entry
        assert {vector.spec(name).rank for name in vector} == {4}


def test_a_converted_adapter_of_a_wrapped_base(tmp_path: Path) -> None:
    headed = texts.make("bert")
    config = peft.LoHaConfig(r=2, **ON)
    model = made(headed, config)
    folder, bare = saved(model, tmp_path / "adapter"), headed.bert
    vector = change_of(describe_module(bare), opened(folder))
    expected = {name.removeprefix("bert."): change for name, change in merged_change(model, headed).items()}
    assert_same(vector, {name: expected[name] for name, _ in bare.named_parameters()}, 5e-6)
    assert {vector.spec(name).rank for name in vector} == {4}


def test_the_table_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+?) \| (read|converted|refused)\b", text, re.MULTILINE))
    assert rows == {kind: verdict for kind, (verdict, _) in KINDS.items()}
