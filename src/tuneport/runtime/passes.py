"""Groups of layers, each measured in one run over the calibration data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..io.sizes import free_memory
from ..maps.statistics import CrossCovariance
from ..measure.samples import Measurement
from ..models.offload import Placement
from ..pairing import LayerPair, blocks_of
from ..processes import from_all
from ..types import Sides


@dataclass(frozen=True, eq=False)
class Passes:
    """Groups of pairs, one run over the calibration data each, and their memory."""

    groups: tuple[tuple[LayerPair, ...], ...]
    fixed_bytes: int  # of models and result, on the device all the time
    group_bytes: tuple[int, ...]  # what each group needs in addition
    placements: Sides[Placement] | None = None  # if the models are not on the device they run on
    home_bytes: int = 0  # what then stays off the device
    fetched_bytes: int = 0  # what is fetched in all runs together
    result_in_files: bool = False  # the result is written to temporary files, block by block

    @property
    def peak_bytes(self) -> int:
        return self.fixed_bytes + max(self.group_bytes, default=0)


def groups_of(measurement: Measurement, passes: Passes | None) -> list[Measurement]:
    """A measurement for each group."""
    if passes is None:
        return [measurement]
    limits = replace(measurement.limits, placements=passes.placements)
    return _parts(replace(measurement, limits=limits), passes.groups)


def by_block(measurement: Measurement) -> list[Measurement]:
    """A measurement for each block of the target."""
    return _parts(measurement, blocks_of(measurement.plan.pairs))


def _parts(measurement: Measurement, groups: Sequence[Sequence[LayerPair]]) -> list[Measurement]:
    """A measurement for each group of pairs; tensors outside layers are part of the first."""
    plan = measurement.plan
    parts = (replace(plan, pairs=tuple(pairs), loose=() if i else plan.loose) for i, pairs in enumerate(groups))
    return [replace(measurement, plan=part) for part in parts]


def passes_that_fit(measurement: Measurement, copies: int) -> Passes | None:
    """The groups of layers that a measurement without a memory budget is measured in; None for one group.

    `copies` is the number of sums that are held of each signal.
    """
    found = groups_that_fit(measurement, measurement.signals, sum_bytes(measurement, copies))
    if len(found) == 1:
        return None
    return Passes(tuple(each.plan.pairs for each in found), 0, ())


def groups_that_fit(
    measurement: Measurement, signals: Iterable[str], size: Callable[[LayerPair, str], int]
) -> list[Measurement]:
    """Groups of consecutive layers whose sums, of `size` bytes, take at most half of the memory that is left.

    The other half is for signals, maps and the work on them. The limit is a power of two: a run that continues after
    a kill divides the layers as before, unless the free memory has crossed it. Then it measures anew.
    """
    wanted = frozenset(signals)

    def total(pairs: Iterable[LayerPair]) -> int:
        return sum(size(pair, signal) for pair in pairs for signal in pair.wanted(wanted))

    device, left = measurement.runs_on, free_memory()
    if measurement.limits.memory_budget is not None:
        left = measurement.limits.memory_budget - sum(
            part.nbytes for model in measurement.models for part in model.module.parameters()
        )
    elif device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left = torch.cuda.mem_get_info(device)[0] + cached
    left = min(from_all(left))  # all processes divide the layers in the same way
    if total(measurement.plan.pairs) <= left / 4:
        return [measurement]
    most = 2 ** int(math.log2(left / 2)) if left > 2 else 0
    groups = grouped(measurement.plan.pairs, total, most)
    return _parts(measurement, groups) if len(groups) > 1 else [measurement]


def sum_bytes(measurement: Measurement, copies: int) -> Callable[[LayerPair, str], int]:
    """The bytes of so many sums of a signal at a pair: matrices, or the few tokens of a limit, which they share."""

    def size(pair: LayerPair, signal: str) -> int:
        n, m = pair.widths(signal)
        if measurement.limits.max_tokens is not None:
            tokens = 4 * measurement.limits.max_tokens * (n + m)
            if CrossCovariance.keeps_tokens(tokens, (n, m)):
                return tokens
        return copies * 8 * n * m

    return size


def grouped(
    pairs: Iterable[LayerPair], size: Callable[[Sequence[LayerPair]], int], most: float
) -> list[list[LayerPair]]:
    """Pairs in groups of at most this size: as many blocks as fit, or weights of a block that does not fit."""
    groups: list[list[LayerPair]] = []
    for block in blocks_of(pairs):
        for unit in [block] if size(block) <= most else by_weight(block):
            if groups and size([*groups[-1], *unit]) <= most:
                groups[-1].extend(unit)
            else:
                groups.append(unit)
    return groups


def by_weight(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """Pairs by target weight, the smallest possible groups: the parts of a fused weight stay together."""
    found: dict[str, list[LayerPair]] = {}
    for pair in pairs:
        found.setdefault(pair.target.weight, []).append(pair)
    return list(found.values())
