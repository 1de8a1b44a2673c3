"""Tiny models of many families, LoRAs that the real peft makes of them, and what peft says that they change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builders.folders import Size, clip_vision
from tuneport.task_vectors.lora_format import open_adapter
from tuneport.task_vectors.lora_read import task_vector_of, transposed_weights
from tuneport.task_vectors.vector import TaskVector

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model in which every parameter is random, biases and norms too."""
    model = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.2 * noise)
    return model.eval()


def clip(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    size = Size(width=width, depth=depth, heads=2, image=16, seed=seed)
    return seeded(lambda: clip_vision(size, projection_dim=8), seed)


def llama(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        intermediate_size=2 * width,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=30,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    return seeded(lambda: transformers.LlamaForCausalLM(config), seed)


def t5(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.T5Config(
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=depth,
        num_heads=2,
        vocab_size=30,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return seeded(lambda: transformers.T5ForConditionalGeneration(config), seed)


def gpt2(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=width, n_layer=depth, n_head=2, vocab_size=30, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    return seeded(lambda: transformers.GPT2LMHeadModel(config), seed)


def vit(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        intermediate_size=2 * width,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return seeded(lambda: transformers.ViTModel(config), seed)


class WithAttention(nn.Module):
    """A module around torch's own attention, whose projections are bare parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


MODELS = {"clip": clip, "llama": llama, "t5": t5, "gpt2": gpt2, "vit": vit}
TARGETS = {
    "clip": ["q_proj", "v_proj", "fc1"],
    "llama": ["q_proj", "k_proj", "down_proj"],
    "t5": ["q", "v", "wo"],
    "gpt2": ["c_attn", "c_proj"],
    "vit": ["q_proj", "fc1"],
}


def adapted(base: nn.Module, seed: int = 5, **options: Any) -> Any:
    """A PeftModel on a copy of the base, with every number that training could have changed changed."""
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**{"r": 3, "lora_alpha": 5, **options}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise if ".lora_A" in name or "_embedding_A" in name else parameter + noise)
    return model.eval()


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def written(model: Any, folder: Path, as_: str, tokenizer: Any) -> Path:
    """An adapted model as an adapter, or merged as a model."""
    if as_ == "adapter":
        return saved(model, folder)
    tokenizer.save_pretrained(folder)
    return saved(copy.deepcopy(model).merge_and_unload(), folder)


def merged_change(model: Any, base: nn.Module) -> dict[str, Tensor]:
    """Every parameter of the model that peft merges, minus the base."""
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    return {name: merged[name].detach() - parameter.detach() for name, parameter in base.named_parameters()}


def read(folder: Path, base: nn.Module) -> TaskVector:
    return task_vector_of(open_adapter(folder), dict(base.named_parameters()), transposed=transposed_weights(base))


def assert_same(vector: TaskVector, change: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, expected in change.items():
        found = vector.dense(name) if name in vector else torch.zeros_like(expected)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert set(vector) <= set(change)


def images(count: int = 12, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(4, 3, 16, 16, generator=generator)} for _ in range(count // 4)]


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model(**batch)
    for name in ("logits", "image_embeds", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)
    raise AssertionError(found)


def clip_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    embeds = F.normalize(module(**batch).image_embeds, dim=-1)
    return F.cross_entropy(10 * embeds, torch.arange(len(embeds)), reduction="sum")
