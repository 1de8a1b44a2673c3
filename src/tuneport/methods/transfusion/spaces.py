"""Where the axes of a model's tensors live: which of them one order of units goes through.

A residual stream has a space before attention, one after it, one after attention to another stack where there is
such, and one after the MLP; heads and hidden units have spaces in each block; so has what a pooler gives to a
classifier. All is told from the roles, kinds, names and widths in a plan. A tensor whose place cannot be told with
certainty gets a reason instead of a place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from ...layers import Layer, LooseTensor
from ...pairing import Kept, Plan, count_blocks

Space = tuple[str, str, int]  # stack, kind, block
Axes = tuple[Space | None, Space | None]

TURNED = "turned heads"  # positions are turned into their units, which keep their order in a head
# role -> (space of the output axis, space of the input axis); "next" is the stream of the following block, "mixed"
# what the MLP reads, "memory" the end of the stack that is attended to, "second" what the second of two norms reads.
SPACES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("q", "k", "v"), ("heads", "stream")),
    "out": ("middle", "heads"),
    "cross_q": ("cross heads", "middle"),
    **dict.fromkeys(("cross_k", "cross_v"), ("cross heads", "memory")),
    "cross_out": ("crossed", "cross heads"),
    **dict.fromkeys(("fc1", "gate", "up"), ("hidden", "mixed")),
    **dict.fromkeys(("fc2", "down"), ("next", "hidden")),
}
# Loose tensors in a block, by the words that libraries have for them: the space of their last axis.
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
HEADS = frozenset({"pooler", "pre-classifier", "projection"})  # a classifier reads what such a layer gives
IN_HEADS = re.compile(r"\b[qk]_norm$")
TOKENS = re.compile(r"(mask|reg|register|dist)_tokens?")
AT_START = re.compile(r"pre|first|emb")
AT_END = re.compile(r"post|final|ln_f$|^(fc_)?norm$|^layer_?norm$")

UNTOLD = "its name and shape do not tell in which order its units stand"
UNMATCHED = "no layer that the fine-tune changed tells in which order its units stand"
BY_DISTANCE = "bias by distance: its heads would have to stand in the order of every block at once"


@dataclass(frozen=True)
class Places:
    """The spaces of a plan's target tensors by name, None for an axis whose units keep their order; and the rest.

    `shortcuts` are the pairs of spaces that a residual connection ties.
    """

    layers: Mapping[str, Axes]
    loose: Mapping[str, Space | None]
    kept: tuple[Kept, ...]
    shortcuts: tuple[tuple[Space, Space], ...]


def places_of(plan: Plan) -> Places:
    """Find the place of every target tensor that a plan pairs, or say why it has none."""
    model = _Model.of(plan)
    layers, sizes, kept = dict[str, Axes](), dict[Space, int](), list[Kept]()
    for layer in sorted((pair.target for pair in plan.pairs), key=lambda layer: layer.block is None):
        axes = model.layer(layer)
        widths = (layer.out_features, layer.in_features)
        # the blocks come first: what stands outside has to fit to them
        if axes is None or any(space and sizes.get(space, n) != n for space, n in zip(axes, widths, strict=True)):
            kept += [Kept(name, UNTOLD) for name in (layer.name, layer.bias) if name is not None]
            continue
        layers[layer.name] = axes
        sizes |= {space: n for space, n in zip(axes, widths, strict=True) if space is not None}
    loose: dict[str, Space | None] = {}
    for part in (pair.target for pair in plan.loose):
        found = model.loose(part)
        if isinstance(found, str):
            kept.append(Kept(part.name, found))
        elif found is not None and sizes.get(found) != part.shape[-1]:
            kept.append(Kept(part.name, UNTOLD if found in sizes else UNMATCHED))
        else:
            loose[part.name] = found
    shortcuts = tuple(pair for pair in model.shortcuts() if pair[0] in sizes and pair[1] in sizes)
    return Places(layers, loose, tuple(dict.fromkeys(kept)), shortcuts)


@dataclass(frozen=True)
class _Model:
    """What is known of the target as a whole.

    `reading` are the stacks that attend to another one; `ends` the roles of the layers after the blocks; `turned`
    the rotary queries by stack and block; `same` leads from a space to the one whose order it shares.
    """

    blocks: Mapping[str, int]
    reading: frozenset[str]
    ends: frozenset[str]
    turned: Mapping[tuple[str, int | None], Layer]
    same: Mapping[Space, Space] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> _Model:
        layers = plan.target_layers or [pair.target for pair in plan.pairs]
        reading = frozenset(layer.stack for layer in layers if layer.role.startswith("cross_"))
        ends = frozenset(layer.role for layer in layers if layer.block is None) - {"patch"}
        turned = {(layer.stack, layer.block): layer for layer in layers if layer.rotary and layer.role == "q"}
        model = cls(plan.target_blocks or count_blocks(layers), reading, ends, turned)
        return replace(model, same=model._joined(pair.target for pair in plan.loose))

    def layer(self, layer: Layer) -> Axes | None:
        """The spaces of the output and the input axis; None where they cannot be told."""
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
        if last is None or not before <= HEADS or len(before) > 1:  # what stands between may be anything
            return None
        pooled = ("", "pooled", 0) if "classifier" in self.ends and before else None
        return (None, pooled or last) if layer.role == "classifier" else (pooled, last)

    def loose(self, part: LooseTensor) -> Space | str | None:
        """The space of the last axis, None where units have no order to change, or why it cannot be told."""
        if prod(part.shape) == 1 or (part.kind == "vocabulary head" and len(part.shape) == 1):
            return None
        if "relative_attention_bias" in part.name:
            return BY_DISTANCE
        if part.block is not None and IN_HEADS.search(part.role.removesuffix(".bias")):
            return self._norm_of_heads(part, part.block)
        if part.block is not None:
            kind = LOOSE_SPACES.get(part.role.removesuffix(".bias"))
            return (self._inner(kind, part.stack, part.block) if kind else None) or UNTOLD
        if part.kind == "vocabulary head":
            return self._last() or UNTOLD
        if part.kind == "normalisation":
            return self._norm(part.name) or UNTOLD
        token = part.kind == "learnt token" and TOKENS.fullmatch(part.name.rpartition(".")[2])
        if token or part.kind in ("embedding", "position embedding", "class token"):
            return self._first(part.name) or UNTOLD
        return UNTOLD

    def _norm_of_heads(self, part: LooseTensor, block: int) -> Space | str | None:
        """Of queries or keys: of one head, whose units keep their order where positions are rotary, or across all."""
        queries = self.turned.get((part.stack, block))
        if queries is None or not queries.heads:
            return UNTOLD
        if part.shape[-1] * queries.heads == queries.out_features:
            return None
        return self._inner(TURNED, part.stack, block) or UNTOLD

    def shortcuts(self) -> Iterator[tuple[Space, Space]]:
        """Residual connections: the stream before and after each attention and each MLP."""
        for stack, depth in self.blocks.items():
            kinds = ("stream", "middle", "crossed", "next") if stack in self.reading else ("stream", "middle", "next")
            for block in range(depth):
                chain = [self._inner(kind, stack, block) for kind in kinds]
                yield from ((one, other) for one, other in pairwise(chain) if one and other)

    def _joined(self, parts: Iterable[LooseTensor]) -> dict[Space, Space]:
        """An embedding that several stacks read, or that is the head as well, has one order in all its places."""
        same: dict[Space, Space] = {}
        for part in parts:
            stacks = self._beneath(part.name) if part.kind == "embedding" and part.block is None else []
            if not stacks or (len(stacks) > 1 and not self.reading):
                continue
            first, *others = [(stack, "stream", 0) for stack in stacks]
            last = self._last() if part.tied else None
            same |= {place: first for place in (*others, last) if place is not None}
        return same

    def _inner(self, kind: str, stack: str, block: int) -> Space | None:
        if kind == "memory":
            others = [other for other in self.blocks if other != stack]
            return self._one((others[0], "stream", self.blocks[others[0]])) if len(others) == 1 else None
        if kind == "second" and stack in self.reading:
            return None
        if kind in ("mixed", "second"):
            kind = "crossed" if stack in self.reading else "middle"
        return self._one((stack, "stream", block + 1) if kind == "next" else (stack, kind, block))

    def _first(self, name: str) -> Space | None:
        """The start of the stream that a tensor outside the blocks feeds."""
        starts = {self._one((stack, "stream", 0)) for stack in self._beneath(name)}
        return starts.pop() if len(starts) == 1 else None

    def _last(self) -> Space | None:
        """The end of the stream that heads read: of the only stack, or of the one that attends to the other."""
        ends = list(self.blocks) if len(self.blocks) == 1 else list(self.reading)
        return self._one((ends[0], "stream", self.blocks[ends[0]])) if len(ends) == 1 else None

    def _norm(self, name: str) -> Space | None:
        """A norm beside a stack stands at the end that its name says; one among embeddings at the start."""
        room, _, own = name.rpartition(".")[0].rpartition(".")
        stacks = [stack for stack in self.blocks if _holds(room, stack)]
        if not stacks and "emb" in room.lower():
            return self._first(name)
        if len(stacks) != 1:
            return None
        if AT_START.search(own.lower()):
            return self._one((stacks[0], "stream", 0))
        return self._one((stacks[0], "stream", self.blocks[stacks[0]])) if AT_END.search(own.lower()) else None

    def _beneath(self, name: str) -> list[str]:
        """The stacks in the nearest part of the model that holds the tensor and a stack."""
        room = name
        while room:
            room = room.rpartition(".")[0]
            stacks = [stack for stack in self.blocks if _holds(room, stack)]
            if stacks:
                return stacks
        return []

    def _one(self, space: Space) -> Space:
        return self.same.get(space, space)


def _holds(room: str, stack: str) -> bool:
    return not room or stack.startswith(f"{room}.")
