"""Models that compute linear maps in every way that is known to be recognised, each with a batch for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from tuneport.layers import Layer, find_layers


def squares(model: nn.Module, batch: Any) -> Tensor:
    """A loss that is a sum over samples and has a gradient everywhere."""
    out = model(batch)
    return (out * torch.linspace(0.5, 1.5, out.shape[-1], dtype=out.dtype)).pow(2).sum()


class Called(nn.Module):
    """A module whose forward is a given function of its parts."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))
        self.call = forward

    def forward(self, x: Any) -> Tensor:
        return self.call(self, x)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out_proj = nn.Linear(6, 18), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v))


def attention(cross: bool = False, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        module = nn.MultiheadAttention(6, 2, **options)
        batch_first = options.get("batch_first", False)

        def memory(x: Tensor, width: int) -> Tensor:  # another length and another width than the query
            longer = torch.cat([x, x.flip(0 if not batch_first else 1) * 0.5], dim=1 if batch_first else 0)
            return F.pad(longer, (0, width - 6)) if width > 6 else longer[..., :width]

        def forward(self: nn.Module, x: Tensor) -> Tensor:
            x = x if batch_first else x.transpose(0, 1)
            if not cross:
                out = self.attn(x, x, x, need_weights=False)[0]
            elif module.kdim == module.vdim:
                both = memory(x, module.kdim)
                out = self.attn(x, both, both, need_weights=False)[0]
            else:
                out = self.attn(x, memory(x, module.kdim), memory(x, module.vdim), need_weights=True)[0]
            return out if batch_first else out.transpose(0, 1)

        return Called(forward, attn=module), torch.randn(3, 5, 6)

    return make


def three_keys() -> tuple[nn.Module, Any]:
    """Cross attention whose keys and values are different tensors of the query's width."""
    forward = lambda self, x: self.attn(x, x * 2 + 1, x.flip(1), need_weights=False)[0]  # noqa: E731
    return Called(forward, attn=nn.MultiheadAttention(6, 2, batch_first=True)), torch.randn(3, 5, 6)


def siglip() -> tuple[nn.Module, Any]:
    config = transformers.SiglipVisionConfig(
        hidden_size=12, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return Called(lambda self, x: self.m(x).pooler_output, m=transformers.SiglipVisionModel(config)), torch.randn(
        3, 3, 8, 8
    )


def gpt2() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=12, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2Model(config)
    return Called(lambda self, x: self.m(x).last_hidden_state, m=model), torch.randint(0, 20, (3, 5))


def simple(forward: Callable[..., Tensor], *shape: int, **parts: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (Called(forward, **copy.deepcopy(parts)), torch.randn(*shape))


CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "linear": simple(lambda m, x: torch.tanh(m.fc(x)), 3, 5, 4, fc=nn.Linear(4, 7)),
    "linear on vectors": simple(lambda m, x: m.fc(x).tanh(), 3, 4, fc=nn.Linear(4, 7, bias=False)),
    "two linears": simple(lambda m, x: m.b(m.a(x).tanh()), 3, 5, 4, a=nn.Linear(4, 7), b=nn.Linear(7, 2)),
    "linear on flattened tokens": simple(lambda m, x: m.fc(x.flatten(0, 1)), 3, 5, 4, fc=nn.Linear(4, 7)),
    "called twice": simple(lambda m, x: m.fc(m.fc(x).sin()), 3, 5, 4, fc=nn.Linear(4, 4)),
    "fused": lambda: (Fused(), torch.randn(3, 5, 6)),
    "patches": simple(lambda m, x: m.conv(x).flatten(2), 3, 2, 8, 12, conv=nn.Conv2d(2, 5, (4, 3), (4, 3))),
    "patches with a rim": simple(lambda m, x: m.conv(x).flatten(2), 3, 2, 9, 9, conv=nn.Conv2d(2, 5, 4, 4)),
    "self-attention, batch first": attention(batch_first=True),
    "self-attention, sequence first": attention(),
    "self-attention without bias": attention(bias=False, batch_first=True),
    "cross attention": attention(cross=True, batch_first=True),
    "cross attention, sequence first": attention(cross=True),
    "cross attention, three inputs": three_keys,
    "torch's encoder layer": simple(
        lambda m, x: m.layer(x), 3, 5, 6, layer=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
    ),
    "separate projections": attention(cross=True, kdim=5, vdim=4, batch_first=True),
    "separate projections, sequence first": attention(cross=True, kdim=8, vdim=3),
    "bare x @ P": simple(lambda m, x: x @ m.P, 3, 5, 4, P=torch.randn(4, 7)),
    "bare torch.matmul": simple(lambda m, x: torch.matmul(x, m.P), 3, 5, 4, P=torch.randn(4, 4)),
    "bare F.linear(x, P.T)": simple(lambda m, x: F.linear(x, m.P.T), 3, 5, 4, P=torch.randn(4, 4)),
    "x @ W.T of a Linear": simple(lambda m, x: x @ m.fc.weight.T, 3, 5, 4, fc=nn.Linear(4, 4, bias=False)),
    "Conv1D": simple(lambda m, x: m.fc(x).tanh(), 3, 5, 4, fc=Conv1D(7, 4)),
    "GPT-2": gpt2,
    "SigLIP with its pooling head": siglip,
    "relu in place": simple(
        lambda m, x: m.b(m.act(m.a(x))), 3, 5, 4, a=nn.Linear(4, 7), act=nn.ReLU(inplace=True), b=nn.Linear(7, 2)
    ),
}


def layers_of(model: nn.Module) -> tuple[Layer, ...]:
    return find_layers(model, matrices=[name for name, _ in model.named_parameters() if name == "P"])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
