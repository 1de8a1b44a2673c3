"""Small models whose truth is known: a vision transformer with free inner widths, and rotated twins of it.

The toy normalises with a weightless RMS norm, so its residual stream can be rotated by any orthogonal matrix
without changing the function; hidden MLP units can be permuted, and attention coordinates rotated per head.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tuneport.layers import TokenLayout, find_layers, find_loose
from tuneport.measure.capture import PairedBatch, Request, measure_pairs
from tuneport.measure.tokens import match_tokens
from tuneport.methods import Problem
from tuneport.pairing import Plan, pair_layers
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Sides


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, head_width: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused, inner = heads, fused, heads * head_width
        if fused:
            self.qkv = nn.Linear(width, 3 * inner)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner) for _ in range(3))
        self.out_proj = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        # a fixed temperature: padding a head with inert coordinates must not change the function
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, head_width: int, hidden: int, fused: bool) -> None:
        super().__init__()
        self.attn = Attention(width, heads, head_width, fused)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(F.rms_norm(x, x.shape[-1:]))
        return x + self.fc2(F.gelu(self.fc1(F.rms_norm(x, x.shape[-1:]))))


class ToyViT(nn.Module):
    """Images (N, 3, size, size) -> logits (N, classes), pooled on the class token, plus a bare projection."""

    def __init__(
        self,
        width: int = 12,
        depth: int = 2,
        heads: int = 2,
        head_width: int = 4,
        hidden: int = 20,
        classes: int = 30,
        size: int = 8,
        patch: int = 4,
        fused: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.size, self.patch_size = size, patch
        tokens = (size // patch) ** 2 + 1
        self.patch_embedding = nn.Conv2d(3, width, patch, patch)
        self.class_embedding = nn.Parameter(torch.zeros(width))
        self.position_embedding = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, head_width, hidden, fused) for _ in range(depth))
        self.proj = nn.Parameter(torch.zeros(width, width))
        self.classifier = nn.Linear(width, classes)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], dim=1) + self.position_embedding
        for block in self.blocks:
            x = block(x)
        return self.classifier(F.rms_norm(x[:, 0], x.shape[-1:]) @ self.proj)


MATRICES = ("proj",)


def plan(source: ToyViT, target: ToyViT) -> Plan:
    """The plan between two toys; they read the same label set, so the classifier's outputs are shared."""
    first, second = (
        find_layers(model, matrices=MATRICES, heads=model.blocks[0].attn.heads) for model in (source, target)
    )
    shared = {"classifier": torch.eye(source.classifier.out_features, dtype=torch.float64)}
    loose = Sides(find_loose(source, first), find_loose(target, second))
    return pair_layers(first, second, loose=loose, output_maps=shared)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum")


def batches(count: int = 256, size: int = 8, classes: int = 30, batch: int = 64, seed: int = 7) -> list:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, size, size, generator=generator)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return list(zip(images.split(batch), labels.split(batch), strict=True))


def finetuned(model: nn.Module, seed: int = 11, amount: float = 0.1) -> nn.Module:
    """A copy whose linear layers (and only those) have moved, as after fine-tuning with frozen loose tensors."""
    generator = torch.Generator().manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if "embedding" in name and "patch" not in name:
                continue
            parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)
    return copied


def problem(
    source: ToyViT,
    moved: nn.Module,
    target: ToyViT,
    signals: frozenset[str],
    *,
    count: int = 256,
) -> Problem:
    """Measure two toys and pose the problem of moving `moved - source` to the target.

    Toys of other image sizes read the same images, resized.
    """
    between = plan(source, target)
    first, second = (TokenLayout(1, (model.size // model.patch_size,) * 2) for model in (source, target))
    data = [
        PairedBatch((resized(images, source.size), labels), (resized(images, target.size), labels))
        for images, labels in batches(count, classes=source.classifier.out_features)
    ]
    request = Request(signals, match_tokens(first, second))
    statistics = measure_pairs(Sides(source, target), between.pairs, data, Sides(loss, loss), request)
    changes = TaskVector.between(source.state_dict(), moved.state_dict())
    return Problem(between, changes, statistics, source.state_dict(), target.state_dict())


def resized(images: Tensor, size: int) -> Tensor:
    return images if images.shape[-1] == size else F.interpolate(images, size=(size, size), mode="bilinear")


def changed(model: nn.Module, task_vector: TaskVector) -> nn.Module:
    """A copy of the model with a task vector added."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(dict(task_vector.apply_to(model.state_dict())))
    return copied


def rotation(width: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q


def twin(model: ToyViT, *, heads: int, head_width: int, hidden: int, seed: int = 3) -> ToyViT:
    """The same function in other coordinates, with `heads`, `head_width` and `hidden` at least the model's own.

    Residual stream rotated, hidden units permuted, each head's q/k and v rotated, heads reordered; what a wider
    twin has more is inert (zero weights).
    """
    generator = torch.Generator().manual_seed(seed)
    width = model.class_embedding.shape[0]
    attention = model.blocks[0].attn
    own_heads, own_head_width = attention.heads, attention.out_proj.in_features // attention.heads
    own_hidden = model.blocks[0].fc1.out_features
    classes = model.classifier.out_features
    other = ToyViT(width, len(model.blocks), heads, head_width, hidden, classes, model.size, model.patch_size)
    Q = rotation(width, generator)
    P = rotation(width, generator)  # coordinates after the bare projection

    def inner(rotations: list[Tensor], order: Tensor) -> Tensor:  # (own inner, new inner)
        out = torch.zeros(own_heads * own_head_width, heads * head_width, dtype=torch.float64)
        for h in range(own_heads):
            rows = slice(h * own_head_width, (h + 1) * own_head_width)
            start = int(order[h]) * head_width
            out[rows, start : start + own_head_width] = rotations[h]
        return out

    def put(layer: nn.Linear, second: nn.Linear, R_out: Tensor, R_in: Tensor) -> None:
        second.weight.copy_(R_out.T @ layer.weight.double() @ R_in)
        second.bias.copy_(R_out.T @ layer.bias.double())

    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
        other.patch_embedding.weight.copy_(torch.einsum("oi,ochw->ichw", Q, model.patch_embedding.weight.double()))
        other.patch_embedding.bias.copy_(Q.T @ model.patch_embedding.bias.double())
        other.class_embedding.copy_(model.class_embedding.double() @ Q)
        other.position_embedding.copy_(model.position_embedding.double() @ Q)
        for first, second in zip(model.blocks, other.blocks, strict=True):
            order = torch.randperm(heads, generator=generator)[:own_heads]
            qk = inner([rotation(own_head_width, generator) for _ in range(own_heads)], order)
            v = inner([rotation(own_head_width, generator) for _ in range(own_heads)], order)
            units = torch.zeros(own_hidden, hidden, dtype=torch.float64)
            units[torch.arange(own_hidden), torch.randperm(hidden, generator=generator)[:own_hidden]] = 1
            put(first.attn.q_proj, second.attn.q_proj, qk, Q)
            put(first.attn.k_proj, second.attn.k_proj, qk, Q)
            put(first.attn.v_proj, second.attn.v_proj, v, Q)
            put(first.attn.out_proj, second.attn.out_proj, Q, v)
            put(first.fc1, second.fc1, units, Q)
            put(first.fc2, second.fc2, Q, units)
        other.proj.copy_(Q.T @ model.proj.double() @ P)
        other.classifier.weight.copy_(model.classifier.weight.double() @ P)
        other.classifier.bias.copy_(model.classifier.bias)
    return other
