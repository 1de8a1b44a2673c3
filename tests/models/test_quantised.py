"""Quantised bases and GGUF files: dequantised for measuring by transformers, written in bfloat16 or as an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from builders.texts import SENTENCES, Size, gpt_tokenizer, make, write
from tuneport import transfer
from tuneport.data.dataset import Dataset
from tuneport.errors import CheckpointError
from tuneport.models.families import huggingface
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
    assert {tensor.dtype for tensor in opened.weights.tensors.values()} == {torch.bfloat16}
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


def write_gguf(path: Path, module: Any) -> Path:
    """A Llama in 8 bits, by the writer of the format; queries and keys have the order of llama.cpp."""
    import gguf

    tokenizer, config = gpt_tokenizer(), module.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__))
    writer.add_token_types([1] * len(tokenizer))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in module.state_dict().items():
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        kind = gguf.GGMLQuantizationType.Q8_0 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight",)), gguf.quants.quantize(values, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_target_is_measured_dequantised(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    plain = make("llama", TARGET, **MORE, tie_word_embeddings=False)
    file = write_gguf(tmp_path / "target.Q8_0.gguf", plain)
    opened = open_model(file)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    for name, parameter in opened.module.named_parameters():
        assert torch.equal(parameter, wanted.get_parameter(name)), name
        old = plain.get_parameter(name)
        # 8 bits round a block of 32 numbers to 1/254 of its largest one
        assert bool((parameter - old).norm() <= 0.01 * old.norm()), name
    source = write(tmp_path / "source", make("llama", SOURCE, **MORE), gpt_tokenizer())
    tuned = make("llama", SOURCE, **MORE)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.02)
    result = transfer(source, tuned, file, Dataset(list(SENTENCES), None, ()), samples=12, scale=1.0)
    out = result.save(tmp_path / "out")
    again, moved = AutoModelForCausalLM.from_pretrained(out), result.apply()
    assert getattr(again.config, "quantization_config", None) is None
    for key, parameter in again.named_parameters():
        assert torch.equal(parameter.float(), moved.get_parameter(key).bfloat16().float()), key
    assert AutoTokenizer.from_pretrained(out)(SENTENCES[0])["input_ids"] == gpt_tokenizer()(SENTENCES[0])["input_ids"]
    adapter = result.save(tmp_path / "adapter", as_="adapter", energy=1.0)
    served = PeftModel.from_pretrained(wanted, adapter).merge_and_unload()
    query = served.model.layers[0].self_attn.q_proj.weight.detach()
    # the adapter is cut by an SVD in float32, and the target's tensors are kept in bfloat16
    assert torch.allclose(query, moved.model.layers[0].self_attn.q_proj.weight, rtol=1e-2, atol=1e-3)
    with pytest.raises(CheckpointError, match="is a GGUF file, and cannot be loaded block by block: convert it with"):
        outline_model(file)


def test_what_cannot_be_dequantised_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "packed", make("llama", SOURCE, **MORE), gpt_tokenizer())
    config = json.loads((folder / "config.json").read_text())
    for method in ("gptq", "awq"):
        settings = {"quant_method": method, "bits": 4, "group_size": 32}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        with pytest.raises(
            CheckpointError, match=rf"quantization_config: {method}\), which transformers cannot dequantise. Give"
        ):
            open_model(folder)
    monkeypatch.setattr(huggingface, "find_spec", lambda _: None)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r'pip install "tuneport\[gguf\]", or convert it with from_pretrained'):
        open_model(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"no config.json in it. Give one of its GGUF files \(.*model.gguf\)"):
        open_model(tmp_path)
