"""Pairing the tokens of two models that read the same sample differently: image grids and tokenizers.

A Match takes the signals of both models at one layer, (N, T_A, d_A) and (N, T_B, d_B), and returns their paired
rows. Images pair by place: class token with class token, patch grids resized. Texts pair by character: a target
token stands beside the mean of the source tokens that cover its characters, weighted by overlap. Padding never
gets through. A TokenLimit draws some of the paired rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import CaptureError
from ..layers import TokenLayout
from ..models.tokenizer import Spans

Match = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def match_tokens(source: TokenLayout | None, target: TokenLayout | None) -> Match:
    """Pair tokens of two sequences: one by one where counts agree, else class token kept and grid resized.

    The source's patch grid is resized bilinearly (2-D) to the target's; special tokens that only one model
    has are left out. Layers that see no special token (patch embeddings) or one pooled token need no grid.
    """

    def match(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:  # (N, T_A, d_A), (N, T_B, d_B)
        _check_samples(ours, theirs)
        tokens = ours.shape[1], theirs.shape[1]
        same_grid = source is None or target is None or source == target
        if tokens[0] == tokens[1] and (same_grid or tokens[0] == 1):
            return ours.flatten(0, 1), theirs.flatten(0, 1)
        special = _special_tokens(tokens, source, target)
        if source is None or target is None or special is None:
            raise CaptureError(
                f"the source has {tokens[0]} tokens per sample and the target {tokens[1]}; give their token layouts "
                "(match_tokens(TokenLayout(...), TokenLayout(...))) or a match of your own."
            )
        common = min(special)
        grid = ours[:, special[0] :].unflatten(1, source.grid).permute(0, 3, 1, 2)
        if source.grid != target.grid:
            exact = grid.to(torch.promote_types(grid.dtype, torch.float32))
            grid = F.interpolate(exact, size=target.grid, mode="bilinear", align_corners=False).to(ours.dtype)
        ours = torch.cat([ours[:, :common], grid.flatten(2).transpose(1, 2)], dim=1)
        if special[1] > common:
            theirs = torch.cat([theirs[:, :common], theirs[:, special[1] :]], dim=1)
        return ours.flatten(0, 1), theirs.flatten(0, 1)

    return match


def match_spans(source: Spans, target: Spans) -> Match:
    """Pair tokens of the same text by their character spans, stream by stream.

    The stream of a signal is told by its token counts, so streams of one model must differ in length. A
    signal that belongs to none (a pooled vector) is paired row by row.
    """
    streams = {(ours.shape[1], theirs.shape[1]): (ours, theirs) for ours, theirs in zip(source, target, strict=True)}
    weights: dict[tuple[int, int], Tensor | None] = {}

    def match(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:  # (N, T_A, d_A), (N, T_B, d_B)
        _check_samples(ours, theirs)
        tokens = ours.shape[1], theirs.shape[1]
        if tokens not in streams:
            if tokens[0] == tokens[1]:
                return ours.flatten(0, 1), theirs.flatten(0, 1)
            known = " or ".join(f"{a} and {b}" for a, b in streams)
            raise CaptureError(f"source and target have {tokens[0]} and {tokens[1]} tokens; their texts have {known}.")
        spans = streams[tokens]
        if tokens not in weights:
            weights[tokens] = None if _equal(*spans) else overlap(*spans)
        found = weights[tokens]
        if found is None:
            real = (spans[0][..., 0] >= 0).to(ours.device)
            return ours[real], theirs[real]
        covered = (found.sum(-1) > 0).to(theirs.device)
        exact = torch.promote_types(ours.dtype, torch.float32)
        mean = torch.bmm(found.to(ours.device, exact), ours.to(exact))  # (N, T_B, d_A)
        return mean.to(ours.dtype)[covered], theirs[covered]

    return match


def overlap(source: Tensor, target: Tensor) -> Tensor:
    """How the source's tokens cover each target token: (..., T_B, T_A), from spans (..., T, 2).

    A row sums to one, or is zero where no source token covers any of the target token.

    >>> whole, halves = torch.tensor([[0.0, 4.0]]), torch.tensor([[0.0, 1.0], [1.0, 4.0]])
    >>> overlap(halves, whole).tolist(), overlap(whole, halves).tolist()
    ([[0.25, 0.75]], [[1.0], [1.0]])
    """
    ours, theirs = source.double().unsqueeze(-3), target.double().unsqueeze(-2)
    shared = torch.minimum(ours[..., 1], theirs[..., 1]) - torch.maximum(ours[..., 0], theirs[..., 0])
    shared = shared.clamp(min=0) * (ours[..., 0] >= 0) * (theirs[..., 0] >= 0)
    total = shared.sum(-1, keepdim=True)
    return torch.where(total > 0, shared / total.clamp(min=1e-300), 0.0)


@dataclass(frozen=True)
class Coverage:
    """How much of two tokenisations meets: tokens there are, and tokens with a partner, padding aside."""

    source_tokens: int = 0
    target_tokens: int = 0
    source_matched: int = 0
    target_matched: int = 0

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def share(self) -> float:
        """The share of the target's tokens that take part."""
        return self.target_matched / self.target_tokens if self.target_tokens else 0.0


def coverage(source: Spans, target: Spans) -> Coverage:
    """The coverage of one batch."""
    total = Coverage()
    for ours, theirs in zip(source, target, strict=True):
        real = [int((spans[..., 0] >= 0).sum()) for spans in (ours, theirs)]
        if _equal(ours, theirs):
            total += Coverage(real[0], real[1], real[0], real[1])
            continue
        found = overlap(ours, theirs)
        total += Coverage(real[0], real[1], int((found.sum(-2) > 0).sum()), int((found.sum(-1) > 0).sum()))
    return total


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.equal(ours, theirs)


def _check_samples(ours: Tensor, theirs: Tensor) -> None:
    if len(ours) != len(theirs):
        raise CaptureError(f"source and target saw {len(ours)} and {len(theirs)} samples in one batch.")


def _special_tokens(
    tokens: tuple[int, int], source: TokenLayout | None, target: TokenLayout | None
) -> tuple[int, int] | None:
    counts = []
    for count, layout in zip(tokens, (source, target), strict=True):
        special = count - math.prod(layout.grid) if layout is not None else -1
        if layout is None or special not in (0, layout.prefix):
            return None
        counts.append(special)
    return counts[0], counts[1]


@dataclass(frozen=True)
class TokenLimit:
    """How many tokens of all samples together are looked at: a share of each sample's, drawn by seed.

    The same tokens serve both models and every signal, and the draw depends on the sample's place, not on the
    batches. With `first`, a sample's first token (the class token of a vision model, in which alone its last
    gradients live) is always among its share.
    """

    tokens: int
    samples: int
    seed: int = 0
    first: bool = False
    offset: int = 0  # samples that other processes have before ours

    def rows(self, start: int, size: int, count: int) -> Tensor | None:
        """Which of the `count` rows of a batch of `size` samples, `start` samples in, are used; None for all."""
        start += self.offset
        shares = [self._share(start + sample) for sample in range(size)]
        if count <= sum(shares):
            return None
        if count % size:
            return _draw(count, sum(shares), (self.seed, start, count), False)
        each = count // size
        drawn = [
            sample * each + _draw(each, share, (self.seed, start + sample, each), self.first)
            for sample, share in enumerate(shares)
        ]
        return torch.cat(drawn)

    def _share(self, sample: int) -> int:
        return self.tokens * (sample + 1) // self.samples - self.tokens * sample // self.samples


def _draw(count: int, share: int, seed: tuple[int, ...], first: bool) -> Tensor:
    """`share` of `count` indices in order, the first of them included where asked."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    kept = int(first and share > 0)
    order = torch.randperm(count - kept, generator=generator)[: max(share - kept, 0)] + kept
    return torch.cat([torch.arange(kept), order]).sort().values
