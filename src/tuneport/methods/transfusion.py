"""TransFusion: permute the source's units to match the target's weights, then add the permuted task vector.

`spaces` says which axes share a permutation; residual shortcuts tie the permutations of a stream. Heads are matched by
their singular values, then units inside a head (not those of rotary queries and keys, which have fixed places).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor

from ..errors import MethodError
from ..layers import ATTENTION_ROLES, Layer, LooseTensor
from ..pairing import Kept, LayerPair, Plan, count_blocks, keep_layers
from ..task_vectors.low_rank import Entry, LowRank, as_dense
from ..types import Signal
from .base import Entries, Method, Problem, Transfer, bias_of, check_same_shapes, matrix_of, record_of

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
    """The spaces of target tensors, None for a fixed order; tensors without one; pairs that a residual ties."""

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
            kept += keep_layers([layer], UNKNOWN)
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
            stacks = self._stacks_near(part.name) if part.kind == "embeddings" and part.block is None else []
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
        if part.kind == "norms":
            return self._norm(part.name) or UNKNOWN
        token = part.kind == "learnt tokens" and TOKENS.fullmatch(part.name.rpartition(".")[2])
        if token or part.kind in ("embeddings", "position embeddings", "class tokens"):
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


Weights = tuple[Axes, Tensor, Tensor]  # the axes of one layer, its source matrix and its target matrix


@dataclass(frozen=True)
class TransFusion(Method):
    """Weight matching by permutations; `sweeps` limits the coordinate descent, `seed` sets its order."""

    seed: int = 0
    sweeps: int = 100
    summary: str = ""

    moves_loose = True
    keeps_rank = True
    signals = frozenset[Signal]()

    def check(self, plan: Plan) -> None:
        check_same_shapes(plan, "transfusion")
        for loose in plan.loose:
            if loose.source.shape != loose.target.shape:
                raise MethodError(
                    f"transfusion needs two models of one architecture; {loose.target.name} is {loose.target.shape} "
                    f"in the target and {loose.source.shape} in the source."
                )
        heads: dict[tuple[str, str, int | None], Layer] = {}
        for layer in (pair.target for pair in plan.pairs):
            if layer.block is not None and layer.role.removeprefix("cross_") in ATTENTION_ROLES and not layer.heads:
                raise MethodError(
                    f"transfusion needs the number of attention heads of {layer.name}; "
                    "use a model of a known family, or find_layers(heads=...)."
                )
            space = SPACES.get(layer.role, ("", ""))[0]
            first = heads.setdefault((space, layer.stack, layer.block), layer)
            if space.endswith("heads") and first.heads != layer.heads:
                raise MethodError(
                    f"transfusion matches heads one by one, but {first.name} has {first.heads} of them and "
                    f"{layer.name} {layer.heads}: grouped queries share their keys. Use bico, theseus or naive."
                )

    def kept(self, plan: Plan) -> tuple[Kept, ...]:
        return places_of(plan).kept

    def transfer(self, problem: Problem) -> Transfer:
        self.check(problem.plan)
        places = places_of(problem.plan)
        permutations = match_weights(problem, seed=self.seed, sweeps=self.sweeps)
        entries = Entries()
        records = []
        for pair in problem.plan.pairs:
            if pair.target.name not in places.layers:
                continue
            rows, columns = (permutations.get(space) for space in places.layers[pair.target.name])
            tau = matrix_of(pair.source, problem.task_vector[pair.source.weight])
            moved = _permute(_permute(_map_outputs(pair, tau), rows, 0), columns, 1)
            entries.put(pair.target, moved)
            bias = bias_of(pair, problem.task_vector)
            if bias is not None:
                entries.put_bias(pair.target, as_dense(_permute(_map_outputs(pair, bias), rows, 0)))
            records.append(record_of(pair, tau, moved))
        for loose in problem.plan.loose:
            if loose.target.name in places.loose:
                order = permutations.get(places.loose[loose.target.name])
                entries.put_loose(loose.target.name, _permute(problem.task_vector[loose.source.name], order, -1))
        return Transfer(entries.task_vector(), tuple(records), places.kept)


def match_weights(problem: Problem, *, seed: int = 0, sweeps: int = 100) -> dict[Space | None, Tensor]:
    """For every space, `p` such that unit i of the target corresponds to unit p[i] of the source.

    Maximises the inner product of the target's and the permuted source's weights, one space at a time.
    """
    places = places_of(problem.plan)
    weights: list[Weights] = []
    heads: dict[Space, int] = {}
    for pair in problem.plan.pairs:
        if pair.target.name not in places.layers:
            continue
        axes = places.layers[pair.target.name]
        source = pair.source.matrix(problem.source_weights[pair.source.weight].detach()).double().cpu()
        target = pair.target.matrix(problem.target_weights[pair.target.weight].detach()).double().cpu()
        weights.append((axes, as_dense(_map_outputs(pair, source)), target))
        if pair.target.heads:
            heads |= {space: pair.target.heads for space in axes if space and space[1].endswith("heads")}
    for loose in problem.plan.loose:
        space = places.loose.get(loose.target.name)
        if loose.target.kind == "embeddings" and space is not None:  # both tables list the tokens in one order
            source = problem.source_weights[loose.source.name].detach().double().cpu()
            target = problem.target_weights[loose.target.name].detach().double().cpu()
            weights.append(((None, space), target.T @ source, torch.eye(source.shape[1], dtype=torch.float64)))
    sizes = {space: source.shape[axis] for axes, source, _ in weights for axis, space in enumerate(axes) if space}
    for first, second in places.shortcuts:
        identity = torch.eye(sizes[first], dtype=torch.float64)
        weights.append(((second, first), identity, identity))
    permutations: dict[Space | None, Tensor] = {space: torch.arange(size) for space, size in sizes.items()}
    order: dict[Space, Tensor] = {}
    for space, count in heads.items():
        if space not in order:
            same = _same_heads(space, heads)
            order |= dict.fromkeys(same, _match_heads(same, count, weights))
    for space, matched in order.items():
        width = sizes[space] // len(matched)
        permutations[space] = (matched[:, None] * width + torch.arange(width)).flatten()
    generator = np.random.default_rng(seed)
    spaces = [space for space in sizes if space[1] != TURNED]
    for _ in range(sweeps):
        improved = False
        for index in generator.permutation(len(spaces)):
            space = spaces[index]
            gain = _gain(space, weights, permutations)
            found = _assign_inside_heads(gain, order[space]) if space in order else _assign(gain)
            old, new = (float(gain[torch.arange(len(p)), p].sum()) for p in (permutations[space], found))
            if new > old + 1e-9 * max(1.0, abs(old)):
                permutations[space] = found
                improved = True
        if not improved:
            break
    return permutations


def _map_outputs(pair: LayerPair, entry: Entry) -> Entry:
    """A layer's matrix or bias after the fixed map of outputs, such as classes in another order."""
    fixed = pair.output_map
    return entry if fixed is None else _change(entry, 0, lambda part: fixed.T.to(part) @ part)


def _gain(space: Space, weights: list[Weights], permutations: Mapping[Space | None, Tensor]) -> Tensor:
    """gain[i, j]: what matching target unit i with source unit j adds to the inner product of the weights."""
    total = torch.zeros((), dtype=torch.float64)
    for axes, source, target in weights:
        for axis in (0, 1):
            if axes[axis] == space:
                other = as_dense(_permute(source, permutations.get(axes[1 - axis]), 1 - axis))
                total = total + (target @ other.T if axis == 0 else target.T @ other)
    return total


def _same_heads(space: Space, heads: Mapping[Space, int]) -> list[Space]:
    """The spaces of the same heads: values, and rotary queries and keys."""
    stack, kind, block = space
    kinds = (kind,) if kind.startswith("cross") else ("heads", TURNED)
    return [(stack, one, block) for one in kinds if (stack, one, block) in heads]


def _match_heads(spaces: Collection[Space], count: int, weights: list[Weights]) -> Tensor:
    """The source head for every target head: least distance between the singular values of their weights."""
    cost = torch.zeros(count, count, dtype=torch.float64)
    for axes, source, target in weights:
        for axis in (0, 1):
            if axes[axis] in spaces:
                sides = (side if axis == 0 else side.T for side in (source, target))
                a, b = (torch.linalg.svdvals(side.unflatten(0, (count, -1))) for side in sides)
                cost += torch.cdist(b, a)
    return _assign(-cost)


def _assign_inside_heads(gain: Tensor, order: Tensor) -> Tensor:
    """The permutation of units that keeps a head matching: one assignment inside each matched pair of heads."""
    size = len(gain) // len(order)
    blocks = gain.unflatten(0, (-1, size)).unflatten(2, (-1, size))  # (head, unit, head, unit)
    return torch.cat([other * size + _assign(blocks[head, :, other]) for head, other in enumerate(order.tolist())])


def _assign(gain: Tensor) -> Tensor:
    """The assignment of columns to rows with the largest total gain."""
    from scipy.optimize import linear_sum_assignment

    return torch.as_tensor(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def _permute(entry: Entry, permutation: Tensor | None, axis: int) -> Entry:
    if permutation is None:
        return entry
    return _change(entry, axis, lambda part: part.index_select(axis, permutation.to(part.device)))


def _change(entry: Entry, axis: int, change: Callable[[Tensor], Tensor]) -> Entry:
    """Change one axis of an entry: of a low-rank entry, the factor which has the axis."""
    if not isinstance(entry, LowRank):
        return change(entry)
    if axis == 0:
        return LowRank(change(entry.out_factor), entry.in_factor)
    return LowRank(entry.out_factor, change(entry.in_factor))
