"""Moves that leave a vision transformer's answers as they are: the parts of a planted truth."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from builders.toy import rotation
from tuneport.models.base import Model


def scatter(module: nn.Module, seed: int) -> Any:
    """Random weights of ordinary size everywhere, norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name == "logit_scale":
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name or "ln_" in name
            parameter.copy_(noise * 0.3 + (norm and name.endswith("weight")))
    return module.eval()


def tuned(module: nn.Module, names: list[str], seed: int = 8, amount: float = 0.05) -> Any:
    """A fine-tune: the named parameters moved a little."""
    moved = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(moved.named_parameters())
    with torch.no_grad():
        for name in names:
            parameters[name].add_(torch.randn(parameters[name].shape, generator=generator) * amount)
    return moved


def linear_names(model: Model) -> list[str]:
    """The weights and biases of a model's layers."""
    return sorted(
        {name for layer in model.architecture.layers for name in (layer.weight, layer.bias) if name is not None}
    )


class Permuted:
    """The moves of one twin: residual stream permuted, heads permuted and rotated, hidden units permuted."""

    def __init__(self, width: int, heads: int, seed: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.width, self.heads = width, heads
        self.stream = torch.randperm(width, generator=self.generator)

    def per_head(self, order: Tensor) -> Tensor:
        turns = (rotation(self.width // self.heads, self.generator) for _ in range(self.heads))
        return torch.block_diag(*turns).double().unflatten(0, (self.heads, -1))[order].flatten(0, 1)

    def attention(self, weight: Tensor, bias: Tensor, out: nn.Linear) -> None:
        """A fused q, k, v projection (3 width, width) and the layer after it."""
        order = torch.randperm(self.heads, generator=self.generator)
        qk, v = self.per_head(order), self.per_head(order)
        turn = torch.block_diag(qk, qk, v)
        weight.copy_(turn @ weight[:, self.stream])
        bias.copy_(turn @ bias)
        out.weight.copy_((out.weight @ v.T)[self.stream])
        out.bias.copy_(out.bias[self.stream])

    def hidden(self, first: nn.Linear, second: nn.Linear) -> None:
        units = torch.randperm(first.out_features, generator=self.generator)
        first.weight.copy_(first.weight[units][:, self.stream])
        first.bias.copy_(first.bias[units])
        second.weight.copy_(second.weight[self.stream][:, units])
        second.bias.copy_(second.bias[self.stream])

    def last(self, *tensors: Tensor) -> None:
        """Tensors whose last dimension is the stream."""
        for tensor in tensors:
            tensor.copy_(tensor[..., self.stream])

    def norms(self, module: nn.Module) -> None:
        for part in module.modules():
            if isinstance(part, nn.LayerNorm):
                self.last(part.weight, part.bias)


def twin(module: nn.Module, move: Callable[[Any], None]) -> Any:
    """A copy with `move` applied in double precision."""
    other = copy.deepcopy(module).double()
    with torch.no_grad():
        move(other)
    return other.float()
