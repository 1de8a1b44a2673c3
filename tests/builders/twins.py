"""Planted truth for text models: twins in other coordinates, and fine-tunes that a transfer must find again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from builders.toy import rotation
from tuneport.layers import Layer
from tuneport.models.base import Model


class Twin:
    """A model in other coordinates: x_B = x_A M at every layer, so that it computes the same function.

    The residual stream is permuted, or rotated where `turn` says so, which needs RMS norms with equal weights;
    heads are reordered within their groups and groups among each other; values, and queries and keys where
    positions are not turned into them, are rotated inside their heads; hidden units are permuted.
    """

    def __init__(self, model: Model, rotary: bool, turn: bool, seed: int = 5) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.model, self.rotary, self.turn = model, rotary, turn
        config: Any = model.module.config
        self.heads = int(getattr(config, "num_attention_heads", 0) or config.num_heads)
        self.groups = int(getattr(config, "num_key_value_heads", None) or self.heads)
        width = int(config.hidden_size)
        self.stream = rotation(width, self.generator) if turn else self.shuffle(width)
        self.head = self.shuffle(width)  # after a pooler or a first layer of a classifier
        self.maps: dict[tuple[Any, ...], Tensor] = {}
        # one bias by distance for all blocks of a stack: their heads are in one order
        self.shared_order = any("relative_attention_bias" in part.name for part in model.architecture.loose)

    def shuffle(self, width: int) -> Tensor:
        return torch.eye(width, dtype=torch.float64)[torch.randperm(width, generator=self.generator)]

    def once(self, key: tuple[Any, ...], build: Callable[[], Tensor]) -> Tensor:
        if key not in self.maps:
            self.maps[key] = build()
        return self.maps[key]

    def order(self, stack: str, block: int | None, cross: bool) -> Tensor:
        """(groups, heads per group): where each head of the source goes."""
        key = (stack, None if self.shared_order and not cross else block, cross, "order")

        def build() -> Tensor:
            per = self.heads // self.groups
            groups = torch.randperm(self.groups, generator=self.generator)
            inner = torch.stack([torch.randperm(per, generator=self.generator) for _ in range(self.groups)])
            return groups.unsqueeze(1) * per + inner

        return self.once(key, build)

    def attention(self, layer: Layer, part: str, width: int) -> Tensor:
        """The map of queries, keys, values or of what attention gives: blocks of heads."""
        cross = layer.role.startswith("cross_")
        key, order = (layer.stack, layer.block, cross), self.order(layer.stack, layer.block, cross)
        many = part in ("q", "mixed")
        head_width = width // (self.heads if many else self.groups)
        mixed = "v" if part in ("v", "mixed") else "qk"
        plain = mixed == "qk" and self.rotary
        turns = self.once(
            (*key, mixed),
            lambda: torch.stack(
                [
                    torch.eye(head_width, dtype=torch.float64) if plain else rotation(head_width, self.generator)
                    for _ in range(self.groups)
                ]
            ),
        )
        out = torch.zeros(width, width, dtype=torch.float64)
        per = self.heads // self.groups
        for group in range(self.groups):
            places = order[group].tolist() if many else [int(order[group][0]) // per]
            for index, place in enumerate(places):
                start = (group * len(places) + index) * head_width
                out[start : start + head_width, place * head_width : (place + 1) * head_width] = turns[group]
        return out

    def around(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """The maps of a layer's inputs and outputs."""
        role = layer.role.removeprefix("cross_")
        if role in ("q", "k", "v"):
            return self.stream, self.attention(layer, role, layer.out_features)
        if role == "out":
            return self.attention(layer, "mixed", layer.in_features), self.stream
        if role in ("fc1", "gate", "up"):
            return self.stream, self.units(layer, layer.out_features)
        if role in ("fc2", "down"):
            return self.units(layer, layer.in_features), self.stream
        if role in ("pooler", "pre-classifier"):
            return self.stream, self.head
        if role == "patch":  # pixels stay as they are
            return torch.eye(layer.in_features, dtype=torch.float64), self.stream
        assert role == "classifier", layer
        deep = any(other.role in ("pooler", "pre-classifier") for other in self.model.architecture.layers)
        return self.head if deep else self.stream, torch.eye(layer.out_features, dtype=torch.float64)

    def units(self, layer: Layer, width: int) -> Tensor:
        return self.once((layer.stack, layer.block, "units"), lambda: self.shuffle(width))

    def build(self) -> nn.Module:
        other = copy.deepcopy(self.model.module)
        old, new = dict(self.model.module.named_parameters()), dict(other.named_parameters())
        with torch.no_grad():
            for layer in self.model.architecture.layers:
                into, out = self.around(layer)
                matrix = out.T @ layer.matrix(old[layer.weight]).double() @ into
                layer.store(matrix.float(), new[layer.weight])
                if layer.bias is not None:
                    layer.store((layer.vector(old[layer.bias]).double() @ out).float(), new[layer.bias])
            for part in self.model.architecture.loose:
                new[part.name].copy_(self.loose(part.name, part.kind, part.stack, old[part.name].double()))
            for name in self.model.architecture.outside:  # a head over the vocabulary, not tied
                if name.endswith("weight"):
                    new[name].copy_(old[name].double() @ self.stream)
        return other

    def loose(self, name: str, kind: str, stack: str, tensor: Tensor) -> Tensor:
        if "relative_attention_bias" in name:
            stacks = [layer.stack for layer in self.model.architecture.layers if layer.block is not None]
            known = stack or next(iter(stacks))
            return tensor[:, self.order(known, None, False).flatten().argsort()]
        if name.startswith("head."):  # ModernBERT's norm between its two last layers
            return tensor @ self.head
        if kind == "norms" and (self.turn or tensor.shape[-1] != len(self.stream)):
            return tensor  # equal weights, or inside a head
        return tensor @ self.stream


def finetuned(model: Model, amount: float = 0.02, seed: int = 8) -> nn.Module:
    """All linear layers moved a little, and nothing else."""
    moved = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(moved.named_parameters())
    with torch.no_grad():
        for name in dict.fromkeys(
            name for layer in model.architecture.layers for name in (layer.weight, layer.bias) if name
        ):
            parameters[name].add_(torch.randn(parameters[name].shape, generator=generator) * amount)
    return moved


def moved(module: nn.Module, seed: int = 21) -> Any:
    """A fine-tune in which every tensor has moved."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return other
