"""Which axes of a model's tensors share one order of units: their spaces.

A residual stream has a space before attention, after it, after cross-attention and after the MLP; each block has
spaces of its heads and hidden units. Spaces follow from the roles, kinds, names and widths in a plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from ...layers import Layer, LooseTensor
from ...pairing import Kept, Plan, count_blocks
from ..entries import keep_layer

Space = tuple[str, str, int]  # stack, kind, block
Axes = tuple[Space | None, Space | None]

TURNED = "turned heads"  # rotary queries and keys: units keep their order inside a head
# role -> (space of the output axis, space of the input axis); "next" is the stream of the next block, "mixed" the
# input of the MLP, "memory" the end of the other stack, "second" the input of the second norm.
SPACES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("q", "k", "v"), ("heads", "stream")),
    "out": ("middle", "heads"),
    "cross_q": ("cross heads", "middle"),
    **dict.fromkeys(("cross_k", "cross_v"), ("cross heads", "memory")),
    "cross_out": ("crossed", "cross heads"),
    **dict.fromkeys(("fc1", "gate", "up"), ("hidden", "mixed")),
    **dict.fromkeys(("fc2", "down"), ("next", "hidden")),
}
# Loose tensors in a block, by their names in the libraries: the space of their last axis.
LOOSE_SPACES: Mapping[str, str] = {
    **dict.fromkeys(("norm1", "attn_norm", "layer.0.layer_norm"), "stream"),
    "norm2": "second",
    **dict.fromkeys(("mlp_norm", "pre_feedforward_layernorm"), "mixed"),
    **dict.fromkeys(("attention.output.LayerNorm", "attention.LayerNorm", "sa_layer_norm"), "middle"),
    **dict.fromkeys(("layer.1.layer_norm", "scale1", "ls_1.gamma"), "middle"),
    "layer.2.layer_norm": "crossed",
    **dict.fromkeys(("output.LayerNorm", "output_layer_norm", "post_feedforward_layernorm"), "next"),
    **dict.fromkeys(("scale2", "ls_2.gamma"), "next"),
}
HEADS = frozenset({"pooler", "pre-classifier", "projection"})  # layers whose output a classifier reads
IN_HEADS = re.compile(r"\b[qk]_norm$")
TOKENS = re.compile(r"(mask|reg|register|dist)_tokens?")
AT_START = re.compile(r"pre|first|emb")
AT_END = re.compile(r"post|final|ln_f$|^(fc_)?norm$|^layer_?norm$")

UNKNOWN = "its name and shape do not determine the order of its units"
UNMATCHED = "no layer that the fine-tune changed determines the order of its units"
BY_DISTANCE = "relative position bias: one order of its heads would have to fit every block"


@dataclass(frozen=True)
class Places:
    """The spaces of a plan's target tensors by name, None for an axis whose units keep their order.

    `kept` are the tensors without a space, `shortcuts` the pairs of spaces that a residual connection ties.
    """

    layers: Mapping[str, Axes]
    loose: Mapping[str, Space | None]
    kept: tuple[Kept, ...]
    shortcuts: tuple[tuple[Space, Space], ...]


def places_of(plan: Plan) -> Places:
    """Find the spaces of every target tensor that a plan pairs, or the reason why there are none."""
    model = _Model(plan)
    layers, sizes, kept = dict[str, Axes](), dict[Space, int](), list[Kept]()
    for layer in sorted((pair.target for pair in plan.pairs), key=lambda layer: layer.block is None):
        axes = model.axes_of(layer)
        widths = (layer.out_features, layer.in_features)
        # layers outside the blocks come last: they must fit the widths of the blocks
        if axes is None or any(space and sizes.get(space, n) != n for space, n in zip(axes, widths, strict=True)):
            kept += keep_layer(layer, UNKNOWN)
            continue
        layers[layer.name] = axes
        sizes |= {space: n for space, n in zip(axes, widths, strict=True) if space is not None}
    loose: dict[str, Space | None] = {}
    for part in (pair.target for pair in plan.loose):
        found = model.space_of(part)
        if isinstance(found, str):
            kept.append(Kept(part.name, found))
        elif found is not None and sizes.get(found) != part.shape[-1]:
            kept.append(Kept(part.name, UNKNOWN if found in sizes else UNMATCHED))
        else:
            loose[part.name] = found
    shortcuts = tuple(pair for pair in model.shortcuts() if pair[0] in sizes and pair[1] in sizes)
    return Places(layers, loose, tuple(dict.fromkeys(kept)), shortcuts)


class _Model:
    """The structure of the target."""

    def __init__(self, plan: Plan) -> None:
        layers = plan.target_layers or [pair.target for pair in plan.pairs]
        self.blocks = plan.target_blocks or count_blocks(layers)
        self.reading = {layer.stack for layer in layers if layer.role.startswith("cross_")}  # with cross-attention
        self.ends = {layer.role for layer in layers if layer.block is None} - {"patch"}  # after the blocks
        self.queries = {(layer.stack, layer.block): layer for layer in layers if layer.rotary and layer.role == "q"}
        self.same: dict[Space, Space] = {}  # from a space to the one whose order it shares
        for part in (pair.target for pair in plan.loose):
            stacks = self._stacks_near(part.name) if part.kind == "embedding" and part.block is None else []
            if stacks and (len(stacks) == 1 or self.reading):  # one order for all stacks that read it, and a tied head
                first, *others = [(stack, "stream", 0) for stack in stacks]
                last = self._last() if part.tied else None
                self.same |= {space: first for space in (*others, last) if space is not None}

    def axes_of(self, layer: Layer) -> Axes | None:
        """The spaces of the output and the input axis; None where they are unknown."""
        if layer.block is not None:
            if layer.role not in SPACES:
                return None
            kinds = (TURNED, SPACES[layer.role][1]) if layer.rotary else SPACES[layer.role]
            rows, columns = (self._inner(kind, layer.stack, layer.block) for kind in kinds)
            return (rows, columns) if rows is not None and columns is not None else None
        if layer.role == "patch":
            first = self._first(layer.weight)
            return (first, None) if first is not None else None
        last, before = self._last(), self.ends - {"classifier"}
        if last is None or not before <= HEADS or len(before) > 1:  # other layers may come between
            return None
        pooled = ("", "pooled", 0) if "classifier" in self.ends and before else None
        return (None, pooled or last) if layer.role == "classifier" else (pooled, last)

    def space_of(self, part: LooseTensor) -> Space | str | None:
        """The space of the last axis, None where units have no order to change, or why it is unknown."""
        if prod(part.shape) == 1 or (part.kind == "vocabulary head" and len(part.shape) == 1):
            return None
        if "relative_attention_bias" in part.name:
            return BY_DISTANCE
        if part.block is not None:
            role = part.role.removesuffix(".bias")
            if IN_HEADS.search(role):
                queries = self.queries.get((part.stack, part.block))
                if queries is None or not queries.heads:
                    return UNKNOWN
                if part.shape[-1] * queries.heads == queries.out_features:  # per head: RoPE fixes the order
                    return None
                return self._inner(TURNED, part.stack, part.block) or UNKNOWN
            kind = LOOSE_SPACES.get(role)
            return (self._inner(kind, part.stack, part.block) if kind else None) or UNKNOWN
        if part.kind == "vocabulary head":
            return self._last() or UNKNOWN
        if part.kind == "normalisation":
            return self._norm(part.name) or UNKNOWN
        token = part.kind == "learnt token" and TOKENS.fullmatch(part.name.rpartition(".")[2])
        if token or part.kind in ("embedding", "position embedding", "class token"):
            return self._first(part.name) or UNKNOWN
        return UNKNOWN

    def shortcuts(self) -> Iterator[tuple[Space, Space]]:
        """Yield the stream before and after each attention and each MLP, which a residual connection ties."""
        for stack, depth in self.blocks.items():
            kinds = ("stream", "middle", "crossed", "next") if stack in self.reading else ("stream", "middle", "next")
            for block in range(depth):
                chain = [self._inner(kind, stack, block) for kind in kinds]
                yield from ((one, other) for one, other in pairwise(chain) if one and other)

    def _inner(self, kind: str, stack: str, block: int) -> Space | None:
        if kind == "memory":
            return self._stream([other for other in self.blocks if other != stack], end=True)
        if kind == "second" and stack in self.reading:
            return None
        if kind in ("mixed", "second"):
            kind = "crossed" if stack in self.reading else "middle"
        space = (stack, "stream", block + 1) if kind == "next" else (stack, kind, block)
        return self.same.get(space, space)

    def _stream(self, stacks: Collection[str], *, end: bool = False) -> Space | None:
        """The space at the start or the end of these stacks; None if they do not share one."""
        spaces = {self._inner("stream", stack, self.blocks[stack] if end else 0) for stack in stacks}
        return spaces.pop() if len(spaces) == 1 else None

    def _first(self, name: str) -> Space | None:
        """The start of the stream that a tensor outside the blocks is added to."""
        return self._stream(self._stacks_near(name))

    def _last(self) -> Space | None:
        """The end of the stream that heads read: of the only stack, or of the one with cross-attention."""
        return self._stream(self.blocks if len(self.blocks) == 1 else self.reading, end=True)

    def _norm(self, name: str) -> Space | None:
        """A norm next to a stack: its name says at which end. A norm among embeddings: at the start."""
        parent, _, own = name.rpartition(".")[0].rpartition(".")
        stacks = self._stacks_in(parent)
        if not stacks and "emb" in parent.lower():
            return self._first(name)
        at_start = AT_START.search(own.lower()) is not None
        return self._stream(stacks, end=not at_start) if at_start or AT_END.search(own.lower()) else None

    def _stacks_near(self, name: str) -> list[str]:
        """The stacks in the smallest module that contains the tensor and a stack."""
        stacks: list[str] = []
        while name and not stacks:
            name = name.rpartition(".")[0]
            stacks = self._stacks_in(name)
        return stacks

    def _stacks_in(self, module: str) -> list[str]:
        return [stack for stack in self.blocks if not module or stack.startswith(f"{module}.")]
