"""Groups of layers, each measured in one run over the calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ..errors import TuneportError
from ..io.sizes import format_bytes
from ..job import Job
from ..methods import Method, name_of
from ..models.offload import Placement
from ..pairing import LayerPair, blocks_of
from ..types import Sides


@dataclass(frozen=True, eq=False)
class Passes:
    """Groups of pairs, one run over the calibration data each, and their memory.

    `fixed_bytes` is the part of models and result that is on the device all the time, `group_bytes` what each group
    needs in addition. `placements` is set if the models are not on the device they run on; then `home_bytes` is what
    stays off the device, `fetched_bytes` what is fetched in all runs together. With `result_in_files` the result is
    written to temporary files, block by block.
    """

    groups: tuple[tuple[LayerPair, ...], ...]
    fixed_bytes: int
    group_bytes: tuple[int, ...]
    placements: Sides[Placement] | None = None
    home_bytes: int = 0
    fetched_bytes: int = 0
    result_in_files: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.fixed_bytes + max(self.group_bytes, default=0)


def jobs_of(job: Job, passes: Passes | None) -> list[Job]:
    """A job for each group."""
    if passes is None:
        return [job]
    job = replace(job, placements=passes.placements)
    return [job] if len(passes.groups) < 2 else _jobs(job, passes.groups)


def jobs_by_block(job: Job) -> list[Job]:
    """A job for each block of the target."""
    return _jobs(job, job.plan.blocks())


def _jobs(job: Job, groups: Sequence[Sequence[LayerPair]]) -> list[Job]:
    """A job for each group of pairs; tensors outside layers are part of the first."""
    plans = [
        replace(job.plan, pairs=tuple(pairs), loose=() if index else job.plan.loose)
        for index, pairs in enumerate(groups)
    ]
    return [replace(job, plan=plan) for plan in plans]


def check_by_layer(method: Method, needed: int) -> None:
    """Refuse to divide a method that moves all layers at once."""
    if not method.by_layer:
        raise TuneportError(
            f"method {name_of(method)} moves all layers at once: give a `memory_budget` of "
            f"{format_bytes(needed)}, or use a method that moves layers one by one, such as bico."
        )


def grouped(pairs: Iterable[LayerPair], fits: Callable[[list[LayerPair]], bool]) -> list[list[LayerPair]]:
    """Pairs in groups that fit, as large as possible: whole blocks, or single weights if a block does not fit."""
    groups: list[list[LayerPair]] = []
    for block in blocks_of(pairs):
        for unit in [block] if fits(block) else _by_weight(block):
            if groups and fits([*groups[-1], *unit]):
                groups[-1].extend(unit)
            else:
                groups.append(unit)
    return groups


def units(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The smallest possible groups."""
    return [unit for block in blocks_of(pairs) for unit in _by_weight(block)]


def _by_weight(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """Pairs by target weight: the parts of a fused weight stay together."""
    found: dict[str, list[LayerPair]] = {}
    for pair in pairs:
        found.setdefault(pair.target.weight, []).append(pair)
    return list(found.values())
