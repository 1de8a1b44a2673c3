"""TransFusion: permute the source's units to match the target's weights, then add the permuted task vector.

Data-free and for identical architectures. Which units may be permuted is told by `spaces`: each residual stream has
its own permutation before attention, after attention and after the MLP, tied by identity shortcuts; attention is
matched in two levels, heads by their singular values, then units inside a head (of queries and keys without rotary
positions only: those give each unit a place). Coordinate descent in random (seeded) order until nothing improves. Of
a low-rank update the factors are permuted, which is exact. A tensor of which the order of units cannot be told stays
the target's own: it is never added in the source's order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import MethodError
from ...layers import ATTENTION_ROLES, Layer
from ...pairing import Kept, LayerPair, Plan
from ...task_vectors.low_rank import Entry, LowRank, as_dense
from ...types import Signal
from ..base import LayerRecord, Method, Problem, Transfer
from ..entries import Entries, check_same_shapes, matrix_of, recorded_norm
from .spaces import SPACES, TURNED, Axes, Space, places_of


@dataclass(frozen=True)
class TransFusion(Method):
    """Weight matching by permutations; `sweeps` bounds the coordinate descent, `seed` orders it."""

    seed: int = 0
    sweeps: int = 100
    summary: str = ""

    moves_loose = True
    keeps_rank = True

    @property
    def signals(self) -> frozenset[Signal]:
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
            attends = pair.target.block is not None and pair.target.role.removeprefix("cross_") in ATTENTION_ROLES
            if attends and not pair.target.heads:
                raise MethodError(
                    f"transfusion needs the number of attention heads of {pair.target.name}; "
                    "use a model of a known family, or find_layers(heads=...)."
                )
        counts: dict[tuple[str, str, int | None], Layer] = {}
        for layer in (pair.target for pair in plan.pairs):
            space = SPACES.get(layer.role, ("", ""))[0]
            if not space.endswith("heads"):
                continue
            first = counts.setdefault((space, layer.stack, layer.block), layer)
            if first.heads != layer.heads:
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
            rows, columns = places.layers[pair.target.name]
            tau = matrix_of(pair.source, problem.task_vector[pair.source.weight])
            moved = _reordered(_reordered(_shared(pair, tau), permutations.get(rows), 0), permutations.get(columns), 1)
            entries.put(pair.target, moved)
            if pair.target.bias is not None and pair.source.bias is not None:
                bias = pair.source.vector(as_dense(problem.task_vector[pair.source.bias]))
                entries.put_bias(pair.target, _permuted(as_dense(_shared(pair, bias)), permutations.get(rows), 0))
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
            if loose.target.name in places.loose:
                order = permutations.get(places.loose[loose.target.name])
                tau = problem.task_vector[loose.source.name]
                entries.put_loose(loose.target.name, _reordered(tau, order, -1))
        return Transfer(entries.task_vector(), tuple(records), places.kept)


def match_weights(problem: Problem, *, seed: int = 0, sweeps: int = 100) -> dict[Space | None, Tensor]:
    """For every space, `p` such that unit i of the target corresponds to unit p[i] of the source.

    Maximises the inner product of the target's weights with the permuted source's, one space at a time: those of
    layers and of embedding tables.
    """
    places = places_of(problem.plan)
    tensors: list[tuple[Axes, Tensor, Tensor]] = []
    heads: dict[Space, int] = {}
    for pair in problem.plan.pairs:
        if pair.target.name not in places.layers:
            continue
        axes = places.layers[pair.target.name]
        ours = pair.source.matrix(problem.source_weights[pair.source.weight].detach()).double().cpu()
        ours = as_dense(_shared(pair, ours))
        theirs = pair.target.matrix(problem.target_weights[pair.target.weight].detach()).double().cpu()
        tensors.append((axes, ours, theirs))
        for space in axes:
            if space is not None and space[1].endswith("heads") and pair.target.heads:
                heads[space] = pair.target.heads
    for loose in problem.plan.loose:
        space = places.loose.get(loose.target.name)
        if loose.target.kind == "embedding" and space is not None:  # the tokens of a table have one order
            ours = problem.source_weights[loose.source.name].detach().double().cpu()
            theirs = problem.target_weights[loose.target.name].detach().double().cpu()
            tensors.append(((None, space), theirs.T @ ours, torch.eye(ours.shape[1], dtype=torch.float64)))
    sizes = {space: ours.shape[axis] for axes, ours, _ in tensors for axis, space in enumerate(axes) if space}
    for first, second in places.shortcuts:
        identity = torch.eye(sizes[first], dtype=torch.float64)
        tensors.append(((second, first), identity, identity))
    permutations: dict[Space | None, Tensor] = {space: torch.arange(size) for space, size in sizes.items()}
    order: dict[Space, Tensor] = {}
    for space, count in heads.items():
        if space not in order:
            same = _same_heads(space, heads)
            order |= dict.fromkeys(same, _match_heads(same, count, tensors))
    for space, matched in order.items():
        width = sizes[space] // len(matched)
        permutations[space] = (matched[:, None] * width + torch.arange(width)).flatten()
    generator = np.random.default_rng(seed)
    spaces = [space for space in sizes if space[1] != TURNED]
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


def _shared(pair: LayerPair, entry: Entry) -> Entry:
    """A layer's matrix or bias by the fixed map of outputs that both models share, such as classes in another order."""
    if pair.output_map is None:
        return entry
    if isinstance(entry, LowRank):
        return LowRank(as_dense(_shared(pair, entry.out_factor)), entry.in_factor)
    return pair.output_map.T.to(entry) @ entry


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


def _same_heads(space: Space, heads: Mapping[Space, int]) -> list[Space]:
    """The spaces of the same heads: of values, and of rotary queries and keys."""
    stack, kind, block = space
    kinds = (kind,) if kind.startswith("cross") else ("heads", TURNED)
    return [(stack, one, block) for one in kinds if (stack, one, block) in heads]


def _match_heads(spaces: Collection[Space], count: int, tensors: list[tuple[Axes, Tensor, Tensor]]) -> Tensor:
    """Source head for every target head: least distance between the singular values of their weights."""
    cost = torch.zeros(count, count, dtype=torch.float64)
    for axes, ours, theirs in tensors:
        for axis in (0, 1):
            if axes[axis] not in spaces:
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
