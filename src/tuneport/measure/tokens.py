"""Pairing the tokens of two models that read the same sample differently: image grids and tokenizers.

A Match takes the signals of both models at one layer, (N, T_A, d_A) and (N, T_B, d_B), and returns their paired rows.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..errors import CaptureError
from ..layers import TokenLayout
from ..models.tokenizer import Spans

Match = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def match_tokens(source_layout: TokenLayout | None, target_layout: TokenLayout | None) -> Match:
    """Pair tokens by position; if counts or grids differ, the source's grid is resized bilinearly to the target's.

    Special tokens that only one model has are left out. Layers without special tokens (patch embeddings) or with one
    pooled token need no grid.
    """
    layouts = source_layout, target_layout

    def match(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # (N, T_A, d_A), (N, T_B, d_B)
        tokens = _counts(source, target)
        same_grid = None in layouts or source_layout == target_layout
        if tokens[0] == tokens[1] and (same_grid or tokens[0] == 1):
            return source.flatten(0, 1), target.flatten(0, 1)
        special = [
            count - math.prod(layout.grid)
            for count, layout in zip(tokens, layouts, strict=True)
            if layout is not None and count - math.prod(layout.grid) in (0, layout.prefix)
        ]
        if source_layout is None or target_layout is None or len(special) < 2:
            raise CaptureError(
                f"the source has {tokens[0]} tokens per sample and the target {tokens[1]}; give their token layouts "
                "(match_tokens(TokenLayout(...), TokenLayout(...))) or a match of your own."
            )
        common = min(special)
        grid = source[:, special[0] :].unflatten(1, source_layout.grid).permute(0, 3, 1, 2)
        if source_layout.grid != target_layout.grid:
            exact = grid.to(torch.promote_types(grid.dtype, torch.float32))
            grid = F.interpolate(exact, size=target_layout.grid, mode="bilinear", align_corners=False).to(source.dtype)
        source = torch.cat([source[:, :common], grid.flatten(2).transpose(1, 2)], dim=1)
        if special[1] > common:
            target = torch.cat([target[:, :common], target[:, special[1] :]], dim=1)
        return source.flatten(0, 1), target.flatten(0, 1)

    return match


def match_spans(source_spans: Spans, target_spans: Spans) -> Match:
    """Pair tokens of the same text by their character spans; padding is dropped.

    A target token pairs with the mean of the source tokens that cover it, weighted by overlap. The token counts of a
    signal identify its stream, which must differ. A signal of no stream (a pooled vector) is paired row by row.
    """
    streams = {(a.shape[1], b.shape[1]): (a, b) for a, b in zip(source_spans, target_spans, strict=True)}
    weights: dict[tuple[int, int], Tensor | None] = {}

    def match(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:  # (N, T_A, d_A), (N, T_B, d_B)
        tokens = _counts(source, target)
        if tokens not in streams:
            if tokens[0] == tokens[1]:
                return source.flatten(0, 1), target.flatten(0, 1)
            known = " or ".join(f"{a} and {b}" for a, b in streams)
            raise CaptureError(f"source and target have {tokens[0]} and {tokens[1]} tokens; their texts have {known}.")
        spans = streams[tokens]
        if tokens not in weights:
            weights[tokens] = None if torch.equal(*spans) else overlap(*spans)
        found = weights[tokens]
        if found is None:
            real = (spans[0][..., 0] >= 0).to(source.device)
            return source[real], target[real]
        covered = (found.sum(-1) > 0).to(target.device)
        exact = torch.promote_types(source.dtype, torch.float32)
        mean = torch.bmm(found.to(source.device, exact), source.to(exact))  # (N, T_B, d_A)
        return mean.to(source.dtype)[covered], target[covered]

    return match


def overlap(source: Tensor, target: Tensor) -> Tensor:
    """The share of each source token in each target token, (..., T_B, T_A), from spans (..., T, 2).

    A row sums to one, or is zero if no source token covers any of the target token.

    >>> whole, halves = torch.tensor([[0.0, 4.0]]), torch.tensor([[0.0, 1.0], [1.0, 4.0]])
    >>> overlap(halves, whole).tolist(), overlap(whole, halves).tolist()
    ([[0.25, 0.75]], [[1.0], [1.0]])
    """
    source, target = source.double().unsqueeze(-3), target.double().unsqueeze(-2)
    shared = torch.minimum(source[..., 1], target[..., 1]) - torch.maximum(source[..., 0], target[..., 0])
    shared = shared.clamp(min=0) * (source[..., 0] >= 0) * (target[..., 0] >= 0)
    total = shared.sum(-1, keepdim=True)
    return torch.where(total > 0, shared / total.clamp(min=1e-300), 0.0)


def scores_on(scores: NDArray[Any], spans: Tensor) -> Tensor:
    """The scores (N, T, classes) of tokens by their spans (N, T, 2): means of what other tokens of the texts have.

    `scores` holds the spans and the scores of those tokens for each text, NaN for special tokens. Where the spans are
    the same, so are the scores. A token that no score covers, such as padding, has NaN.

    >>> import numpy as np
    >>> known = np.empty(1, dtype=object)
    >>> known[0] = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.5, -0.5]])
    >>> scores_on(known, torch.tensor([[[0.0, 1.0], [1.0, 2.0]]])).tolist()
    [[[nan, nan], [0.5, -0.5]]]
    """
    found = []
    for (places, values), wanted in zip(scores, spans, strict=True):
        if torch.equal(places, wanted[wanted[:, 0] >= 0]):  # without padding, which is on the right
            found.append(F.pad(values.double(), (0, 0, 0, len(wanted) - len(places)), value=torch.nan))
            continue
        known = ~values.isnan().any(-1)
        weights = overlap(places[known], wanted)
        found.append(torch.where(weights.sum(-1, keepdim=True) > 0, weights @ values[known].double(), torch.nan))
    return torch.stack(found)


def coverage(source: Spans, target: Spans) -> Counter[str]:
    """The tokens of a batch in both tokenisations, and those of them with a partner, without padding."""
    total = Counter[str]()
    for spans in zip(source, target, strict=True):
        tokens = [int((side[..., 0] >= 0).sum()) for side in spans]
        matched = tokens
        if not torch.equal(*spans):  # equal tokens match, also empty ones
            matched = [int((overlap(*spans).sum(axis) > 0).sum()) for axis in (-2, -1)]
        total.update(source_tokens=tokens[0], target_tokens=tokens[1])
        total.update(source_matched=matched[0], target_matched=matched[1])
    return total


def _counts(source: Tensor, target: Tensor) -> tuple[int, int]:
    """The tokens of a sample in both signals."""
    if len(source) != len(target):
        raise CaptureError(f"source and target saw {len(source)} and {len(target)} samples in one batch.")
    return source.shape[1], target.shape[1]


@dataclass(frozen=True)
class TokenLimit:
    """Caps the tokens of all samples together: a share of each sample's, drawn by seed and sample, not by batch.

    `first` keeps a sample's first token: in the last block of a vision model, only the class token has a gradient.
    """

    tokens: int
    samples: int
    seed: int = 0
    first: bool = False
    offset: int = 0  # the samples of the processes before this one

    def rows(self, start: int, size: int, count: int) -> Tensor | None:
        """The drawn rows among the `count` of a batch with the samples `start` to `start + size`; None for all."""
        start += self.offset
        ends = [self.tokens * sample // self.samples for sample in range(start, start + size + 1)]
        shares = [end - begin for begin, end in pairwise(ends)]
        if count <= sum(shares):
            return None
        if count % size:
            return _draw(count, sum(shares), (self.seed, start, count), False)
        each = count // size
        drawn = [_draw(each, share, (self.seed, start + i, each), self.first) for i, share in enumerate(shares)]
        return torch.cat([i * each + rows for i, rows in enumerate(drawn)])


def _draw(count: int, share: int, seed: tuple[int, ...], first: bool) -> Tensor:
    """`share` of `count` indices in order; with `first`, index 0 is one of them."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    kept = int(first and share > 0)
    order = torch.randperm(count - kept, generator=generator)[: max(share - kept, 0)] + kept
    return torch.cat([torch.arange(kept), order]).sort().values
