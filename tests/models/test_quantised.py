"""Quantised bases: dequantised for measuring by transformers, written in bfloat16 or as an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from builders.texts import SENTENCES, Size, gpt_tokenizer, make, write
from tuneport import transfer
from tuneport.data.dataset import Dataset
from tuneport.errors import CheckpointError
from tuneport.models.open import open_model, outline_model

SOURCE = Size(width=32, depth=2, heads=4, groups=4, head_width=8, hidden=64)
TARGET = Size(width=64, depth=2, heads=4, groups=4, head_width=16, hidden=128, seed=1)
MORE: dict[str, Any] = {"vocab_size": 320, "max_position_embeddings": 64}
FORMATS: dict[str, dict[str, Any]] = {
    "four": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "eight": {"load_in_8bit": True},
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_target_is_measured_dequantised(name: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    plain = write(tmp_path / "plain", make("llama", TARGET, **MORE), gpt_tokenizer())
    module = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=BitsAndBytesConfig(**FORMATS[name]), dtype=torch.float32
    )
    packed = write(tmp_path / "packed", module, gpt_tokenizer())
    wanted = module.dequantize(torch.float32).model.layers[1].mlp.up_proj.weight
    opened = open_model(packed)
    assert torch.equal(opened.module.model.layers[1].mlp.up_proj.weight, wanted)
    assert {tensor.dtype for tensor in opened.tensors.values()} == {torch.bfloat16}
    source = write(tmp_path / "source", make("llama", SOURCE, **MORE), gpt_tokenizer())
    tuned = make("llama", SOURCE, **MORE)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.02)
    result = transfer(source, tuned, packed, Dataset(list(SENTENCES), None, ()), samples=12, scale=1.0)
    again = AutoModelForCausalLM.from_pretrained(result.save(tmp_path / "out"))
    assert getattr(again.config, "quantization_config", None) is None
    for key, parameter in again.named_parameters():
        moved = result.apply().get_parameter(key)
        assert torch.equal(parameter.float(), moved.bfloat16().float()), key
    with pytest.raises(CheckpointError, match="and cannot be loaded block by block"):
        outline_model(packed)
