"""How a transfer is divided into runs over the calibration data, and what its parts take.

What sums, kept signals, maps and results take follows from shapes and from the tokens of one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby

from ..errors import TuneportError
from ..io.sizes import format_bytes
from ..job import Job
from ..models.offload import Placement
from ..pairing import LayerPair


@dataclass(frozen=True, eq=False)
class Passes:
    """Groups of pairs, one run over the calibration data for each, and the bytes that they take.

    `fixed_bytes` are the models and the result, as far as they are in this memory; `group_bytes` what each group takes
    besides; the peak is the largest of these sums. `placements` say where both models are while they run, where
    that is not where they were given; `home_bytes` is what stays at home, `fetched_bytes` what comes from there
    in all runs together, and `shelved` whether the result goes to a file of its own, block by block.
    """

    groups: tuple[tuple[LayerPair, ...], ...]
    fixed_bytes: int
    group_bytes: tuple[int, ...]
    placements: tuple[Placement, Placement] | None = None
    home_bytes: int = 0
    fetched_bytes: int = 0
    shelved: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.fixed_bytes + max(self.group_bytes, default=0)


def in_blocks(job: Job) -> list[Job]:
    """A job for each block of the target; tensors outside layers go with the first."""
    blocks = blocks_of(job.plan.pairs)
    plans = [
        replace(job.plan, pairs=tuple(pairs), loose=job.plan.loose if pairs is blocks[0] else ()) for pairs in blocks
    ]
    return [replace(job, plan=plan) for plan in plans]


def check_by_layer(job: Job, needed: int) -> None:
    if not job.method.by_layer:
        raise TuneportError(
            f"method {job.record.get('method')} moves all layers at once: give it {format_bytes(needed)}, or use "
            "a method that moves them one by one, such as bico."
        )


def grouped(pairs: Iterable[LayerPair], fits: Callable[[list[LayerPair]], bool]) -> list[list[LayerPair]]:
    """Pairs in groups that fit, as long as they can be: whole blocks, or weights where a block does not fit."""
    groups: list[list[LayerPair]] = []
    for block in blocks_of(pairs):
        for unit in [block] if fits(block) else _by_weight(block):
            if groups and fits([*groups[-1], *unit]):
                groups[-1].extend(unit)
            else:
                groups.append(unit)
    return groups


def units(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The smallest groups that there are."""
    return [unit for block in blocks_of(pairs) for unit in _by_weight(block)]


def blocks_of(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The pairs of each block of the target, in their order."""
    return [list(group) for _, group in groupby(pairs, key=lambda p: (p.target.stack, p.target.block))]


def in_groups(job: Job, passes: Passes | None) -> list[Job]:
    """A job for each group; tensors outside layers go with the first."""
    if passes is None:
        return [job]
    job = replace(job, placements=passes.placements)
    if len(passes.groups) < 2:
        return [job]
    plans = [
        replace(job.plan, pairs=pairs, loose=job.plan.loose if pairs is passes.groups[0] else ())
        for pairs in passes.groups
    ]
    return [replace(job, plan=plan) for plan in plans]


def _by_weight(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The parts of a fused weight stay together."""
    units: dict[str, list[LayerPair]] = {}
    for pair in pairs:
        units.setdefault(pair.target.weight, []).append(pair)
    return list(units.values())
