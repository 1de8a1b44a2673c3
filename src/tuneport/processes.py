"""Several processes that share one job, as `torchrun` and `accelerate launch` start them.

All processes run the same program on the same inputs. They divide passes through models and give each other what they
found, in an order that does not depend on their number. The first process reads and writes what is shared: the output,
what a killed run has saved, the clock. An error of one process is raised in all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from .errors import TuneportError, lacks_memory

A = TypeVar("A")
B = TypeVar("B")
PATIENCE = timedelta(hours=12)  # for a process that works alone; one that has ended is noticed at once


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0


_here = Ranks()
_divides = True


@contextmanager
def processes(device: str = "auto") -> Iterator[Ranks]:
    """Join the processes that were started together (gloo on the CPU, nccl on GPUs); otherwise there is one.

    Work is divided within this context only: a program with a process group of its own may call tuneport in one of its
    processes.
    """
    size, joined = int(os.environ.get("WORLD_SIZE", "1")), dist.is_available() and dist.is_initialized()
    if size == 1 and not joined:
        yield ranks()
        return
    if not joined:
        on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with lost_reported():
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        with _as(Ranks(dist.get_rank(), dist.get_world_size())) as here:
            yield here
    finally:
        if not joined:
            dist.destroy_process_group()


def ranks() -> Ranks:
    """The rank of this process now; a process that works on its part of the work counts as the only one."""
    return _here


@contextmanager
def _as(here: Ranks) -> Iterator[Ranks]:
    global _here
    before, _here = _here, here
    try:
        yield here
    finally:
        _here = before


def turns() -> Ranks:
    """The place of this process among those that divide the work; every process does all of it in `undivided`."""
    return _here if _divides else Ranks()


@contextmanager
def undivided() -> Iterator[None]:
    """Context in which all processes do the same work in step: each has a part of the models."""
    global _divides
    before, _divides = _divides, False
    try:
        yield
    finally:
        _divides = before


@contextmanager
def lost_reported() -> Iterator[None]:
    """Turn the failure of an exchange between processes into one line."""
    try:
        yield
    except RuntimeError as error:
        if lacks_memory(error):
            raise
        raise TuneportError(
            "another process of this run has ended, and this one ends too. Start all of them again; `resume=True` "
            "continues what was saved."
        ) from error


def from_all(value: A) -> list[A]:
    """The values of all processes, by rank; values are pickled, and tensors in them are on the CPU."""
    if _here.size == 1:
        return [value]
    everyone: list[Any] = [None] * _here.size
    with lost_reported():
        dist.all_gather_object(everyone, value)
    return everyone


def summed(values: Tensor) -> Tensor:
    """The sum of a tensor over all processes, which is the same in all of them; the tensor may be overwritten."""
    if _here.size > 1:
        with lost_reported():
            dist.all_reduce(values)
    return values


def _alone(work: Callable[[], A]) -> tuple[A | None, TuneportError | None]:
    """What `work` makes in this process, which works alone, or its error."""
    try:
        with _as(Ranks()):
            return work(), None
    except TuneportError as error:
        return None, error


def agreed(work: Callable[[], A]) -> A:
    """What `work` makes in this process, which works alone; if it fails in one process, all raise that error."""
    if _here.size == 1:
        return work()
    found, failed = _alone(work)
    _raise_first(from_all(failed))
    return found  # type: ignore[return-value]


def by_first(work: Callable[[], A]) -> A:
    """What `work` makes in the first process, for all of them: its error too."""
    if _here.size == 1:
        return work()
    shared: list[Any] = [*_alone(work)] if _here.first else [None, None]
    with lost_reported():
        dist.broadcast_object_list(shared, 0)
    _raise_first(shared[1:])
    return shared[0]  # type: ignore[no-any-return]


def divided(items: Sequence[A], work: Callable[[A], B]) -> list[B]:
    """What `work` makes of each item, in order; each process takes every n-th item.

    >>> divided([1, 2, 3], lambda number: number * number)
    [1, 4, 9]
    """
    rank, size = turns().rank, turns().size
    if size == 1:
        return [work(item) for item in items]
    parts = from_all(agreed(lambda: [work(item) for item in items[rank::size]]))
    return [parts[place % size][place // size] for place in range(len(items))]


def _raise_first(errors: Sequence[TuneportError | None]) -> None:
    for error in errors:
        if error is not None:
            raise error
