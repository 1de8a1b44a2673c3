"""TransFusion: permute the source's units to match the target's weights, then add the permuted task vector.

Data-free and for identical architectures. Which units may be permuted follows from the roles of the layers
(SPACES, as data): each residual stream has its own permutation before attention, after attention and after
the MLP, tied by identity shortcuts; attention is matched in two levels, heads by their singular values, then
units inside a head. Coordinate descent in random (seeded) order until nothing improves. Of a low-rank update
the factors are permuted, which is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import MethodError
from ..layers import Layer, LooseTensor
from ..low_rank import Entry, LowRank, as_dense
from ..pairing import Plan
from .base import Entries, LayerRecord, Method, Problem, Transfer, check_same_shapes, matrix_of, recorded_norm

# role -> (space of the output axis, space of the input axis); "next" is the stream of the following block.
SPACES: Mapping[str, tuple[str | None, str | None]] = {
    "q": ("heads", "stream"),
    "k": ("heads", "stream"),
    "v": ("heads", "stream"),
    "out": ("middle", "heads"),
    "fc1": ("hidden", "middle"),
    "gate": ("hidden", "middle"),
    "up": ("hidden", "middle"),
    "fc2": ("next", "hidden"),
    "down": ("next", "hidden"),
}
# Outside the blocks: the first and the last stream.
OUTER_SPACES: Mapping[str, tuple[str | None, str | None]] = {
    "patch": ("first", None),
    "projection": (None, "last"),
    "classifier": (None, "last"),
}
# Loose tensors: the space of their last axis.
LOOSE_SPACES: Mapping[str, str] = {
    "norm1": "stream",
    "norm2": "middle",
    "scale1": "middle",
    "scale2": "next",
    "attention.output.LayerNorm": "middle",
    "output.LayerNorm": "next",
    "class token": "first",
    "position embedding": "first",
    "first norm": "first",
    "final norm": "last",
}

Space = tuple[str, str, int]  # stack, kind, block
Axes = tuple[Space | None, Space | None]


@dataclass(frozen=True)
class TransFusion(Method):
    """Weight matching by permutations; `sweeps` bounds the coordinate descent, `seed` orders it."""

    seed: int = 0
    sweeps: int = 100
    summary: str = ""

    @property
    def moves_loose(self) -> bool:
        return True

    @property
    def keeps_rank(self) -> bool:
        return True

    @property
    def signals(self) -> frozenset[str]:
        return frozenset()

    def check(self, plan: Plan) -> None:
        check_same_shapes(plan, "transfusion")
        for loose in plan.loose:
            if loose.source.shape != loose.target.shape:
                raise MethodError(
                    f"transfusion needs two models of one architecture; {loose.target.name} is {loose.target.shape} "
                    f"in the target and {loose.source.shape} in the source."
                )
        for pair in plan.pairs:
            if pair.target.block is not None and pair.target.role in ("q", "k", "v", "out") and not pair.target.heads:
                raise MethodError(
                    f"transfusion needs the number of attention heads of {pair.target.name}; "
                    "use a model of a known family, or find_layers(heads=...)."
                )
        counts: dict[tuple[str, int | None], Layer] = {}
        for layer in (pair.target for pair in plan.pairs if SPACES.get(pair.target.role, ("", ""))[0] == "heads"):
            first = counts.setdefault((layer.stack, layer.block), layer)
            if first.heads != layer.heads:
                raise MethodError(
                    f"transfusion matches heads one by one, but {first.name} has {first.heads} of them and "
                    f"{layer.name} {layer.heads}: grouped queries share their keys. Use bico, theseus or naive."
                )

    def transfer(self, problem: Problem) -> Transfer:
        self.check(problem.plan)
        permutations = match_weights(problem, seed=self.seed, sweeps=self.sweeps)
        entries = Entries()
        records = []
        for pair in problem.plan.pairs:
            rows, columns = layer_spaces(pair.target, problem.plan)
            tau = matrix_of(pair.source, problem.task_vector[pair.source.weight])
            moved = _reordered(_reordered(tau, permutations.get(rows), 0), permutations.get(columns), 1)
            entries.put(pair.target, moved)
            if pair.target.bias is not None and pair.source.bias is not None:
                bias = pair.source.vector(as_dense(problem.task_vector[pair.source.bias]))
                entries.put_bias(pair.target, _permuted(bias, permutations.get(rows), 0))
            records.append(
                LayerRecord(
                    target=pair.target.name,
                    source=pair.source.name,
                    norm_source=recorded_norm(tau),
                    norm_target=recorded_norm(moved),
                    rank=moved.rank if isinstance(moved, LowRank) else None,
                )
            )
        for loose in problem.plan.loose:
            space = loose_space(loose.target, problem.plan)
            tau = problem.task_vector[loose.source.name]
            entries.put_loose(loose.target.name, _reordered(tau, permutations.get(space), -1))
        return Transfer(entries.task_vector(), tuple(records))


def match_weights(problem: Problem, *, seed: int = 0, sweeps: int = 100) -> dict[Space | None, Tensor]:
    """For every space, `p` such that unit i of the target corresponds to unit p[i] of the source.

    Maximises the inner product of the target's weights with the permuted source's, one space at a time.
    """
    tensors: list[tuple[Axes, Tensor, Tensor]] = []
    heads: dict[Space, int] = {}
    for pair in problem.plan.pairs:
        axes = layer_spaces(pair.target, problem.plan)
        ours = pair.source.matrix(problem.source_weights[pair.source.weight].detach()).double().cpu()
        theirs = pair.target.matrix(problem.target_weights[pair.target.weight].detach()).double().cpu()
        tensors.append((axes, ours, theirs))
        for space in axes:
            if space is not None and space[1] == "heads" and pair.target.heads:
                heads[space] = pair.target.heads
    sizes = {space: ours.shape[axis] for axes, ours, _ in tensors for axis, space in enumerate(axes) if space}
    for first, second in _shortcuts(sizes):
        identity = torch.eye(sizes[first], dtype=torch.float64)
        tensors.append(((second, first), identity, identity))
    permutations: dict[Space | None, Tensor] = {space: torch.arange(size) for space, size in sizes.items()}
    order = {space: _match_heads(space, count, tensors) for space, count in heads.items()}
    for space, matched in order.items():
        width = sizes[space] // len(matched)
        permutations[space] = (matched[:, None] * width + torch.arange(width)).flatten()
    generator = np.random.default_rng(seed)
    spaces = list(sizes)
    for _ in range(sweeps):
        improved = False
        for index in generator.permutation(len(spaces)):
            space = spaces[index]
            gain = _gain(space, tensors, permutations)
            found = _inside_heads(gain, order[space]) if space in order else _assign(gain)
            old, new = (float(gain[torch.arange(len(p)), p].sum()) for p in (permutations[space], found))
            if new > old + 1e-9 * max(1.0, abs(old)):
                permutations[space] = found
                improved = True
        if not improved:
            break
    return permutations


def layer_spaces(layer: Layer, plan: Plan) -> Axes:
    """The permutable spaces of a target layer's output and input axes; None where units keep their order."""
    table = OUTER_SPACES if layer.block is None else SPACES
    rows, columns = table.get(layer.role, (None, None))
    return _space(rows, layer.stack, layer.block, plan), _space(columns, layer.stack, layer.block, plan)


def loose_space(part: LooseTensor, plan: Plan) -> Space | None:
    """The permutable space of a loose tensor's last axis."""
    return _space(LOOSE_SPACES.get(part.role.removesuffix(".bias")), part.stack, part.block, plan)


def _space(kind: str | None, stack: str, block: int | None, plan: Plan) -> Space | None:
    if kind is None:
        return None
    if block is None:
        if len(plan.target_blocks) != 1:
            return None
        stack, depth = next(iter(plan.target_blocks.items()))
        return stack, "stream", 0 if kind == "first" else depth
    return (stack, "stream", block + 1) if kind == "next" else (stack, kind, block)


def _shortcuts(sizes: Mapping[Space, int]) -> Iterator[tuple[Space, Space]]:
    """Residual connections: the stream before and after each attention and each MLP."""
    for stack, kind, block in sizes:
        before, after = (stack, "stream", block), (stack, "stream", block + 1)
        if kind == "middle":
            middle = (stack, kind, block)
            yield from (pair for pair in ((before, middle), (middle, after)) if pair[0] in sizes and pair[1] in sizes)


def _gain(
    space: Space, tensors: list[tuple[Axes, Tensor, Tensor]], permutations: Mapping[Space | None, Tensor]
) -> Tensor:
    """gain[i, j]: what matching target unit i with source unit j adds to the inner product of the weights."""
    total: Tensor | None = None
    for axes, ours, theirs in tensors:
        for axis in (0, 1):
            if axes[axis] != space:
                continue
            other = _permuted(ours, permutations.get(axes[1 - axis]), 1 - axis)
            a, b = (other, theirs) if axis == 0 else (other.T, theirs.T)
            total = b @ a.T if total is None else total + b @ a.T
    assert total is not None
    return total


def _match_heads(space: Space, count: int, tensors: list[tuple[Axes, Tensor, Tensor]]) -> Tensor:
    """Source head for every target head: least distance between the singular values of their weights."""
    cost = torch.zeros(count, count, dtype=torch.float64)
    for axes, ours, theirs in tensors:
        for axis in (0, 1):
            if axes[axis] != space:
                continue
            a, b = (torch.linalg.svdvals((w if axis == 0 else w.T).unflatten(0, (count, -1))) for w in (ours, theirs))
            cost += torch.cdist(b, a)
    return _assign(-cost)


def _inside_heads(gain: Tensor, order: Tensor) -> Tensor:
    """Unit permutation that respects a head matching: an assignment inside every matched pair of heads."""
    size = len(gain) // len(order)
    parts = []
    for head, other in enumerate(order.tolist()):
        block = gain[head * size : (head + 1) * size, other * size : (other + 1) * size]
        parts.append(other * size + _assign(block))
    return torch.cat(parts)


def _assign(gain: Tensor) -> Tensor:
    """The assignment of columns to rows with the largest total gain."""
    from scipy.optimize import linear_sum_assignment

    return torch.as_tensor(linear_sum_assignment(gain.numpy(), maximize=True)[1])


def _permuted(tensor: Tensor, permutation: Tensor | None, axis: int) -> Tensor:
    return tensor if permutation is None else tensor.index_select(axis, permutation.to(tensor.device))


def _reordered(entry: Entry, permutation: Tensor | None, axis: int) -> Entry:
    """One axis in another order; of factors, that of the factor which holds the axis."""
    if not isinstance(entry, LowRank):
        return _permuted(entry, permutation, axis)
    if axis == 0:
        return LowRank(_permuted(entry.out_factor, permutation, 0), entry.in_factor)
    return LowRank(entry.out_factor, _permuted(entry.in_factor, permutation, axis))
