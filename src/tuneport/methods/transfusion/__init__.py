"""TransFusion: permute the source's units to match the target's weights, then add the permuted task vector.

`spaces` says which axes share a permutation; residual shortcuts tie the permutations of a stream. Heads are matched by
their singular values, then units inside a head (not those of rotary queries and keys, which have fixed places).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import MethodError
from ...layers import ATTENTION_ROLES, Layer
from ...pairing import Kept, LayerPair, Plan
from ...task_vectors.low_rank import Entry, LowRank, as_dense
from ...types import Signal
from ..base import Method, Problem, Transfer
from ..entries import Entries, bias_of, check_same_shapes, matrix_of, record_of
from .spaces import SPACES, TURNED, Axes, Space, places_of

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
        if loose.target.kind == "embedding" and space is not None:  # both tables list the tokens in one order
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
