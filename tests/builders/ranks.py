"""Processes that share a job, as threads of one process that run one after the other, in a given order."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from tuneport import processes
from tuneport.processes import Ranks


class Together:
    """Ranks that take turns: each runs until it exchanges something, and sums are added in the order of the turns."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.now, self.used = list(order), order[0], Counter[str]()
        self._turn = threading.Condition()
        self._given: dict[int, Any] = {}
        self._found: dict[int, Any] = {}
        self._wrong: list[BaseException] = []

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` makes in each rank."""
        found: dict[int, Any] = {}

        def be(rank: int) -> None:
            try:
                self._wait(rank)
                processes._here = Ranks(rank, len(self.order))
                found[rank] = work(rank)
            except BaseException as error:
                self._wrong.append(error)
            finally:
                self._next()

        with self._exchanges():
            threads = [threading.Thread(target=be, args=(rank,)) for rank in range(len(self.order))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._wrong:
            raise self._wrong[0]
        return [found[rank] for rank in sorted(found)]

    @contextmanager
    def _exchanges(self) -> Iterator[None]:
        """Context in which torch exchanges tensors and objects between the threads."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather_object", "all_reduce", "reduce", "broadcast", "broadcast_object_list"):
                patch.setattr(dist, name, getattr(self, name))
            patch.setattr(dist, "get_backend", lambda: "gloo")
            patch.setattr(processes, "_here", Ranks())
            yield

    def _wait(self, rank: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self.now == rank or self._wrong)
        if self._wrong:
            raise RuntimeError("another rank failed")

    def _next(self) -> None:
        with self._turn:
            self.now = self.order[(self.order.index(self.now) + 1) % len(self.order)]
            self._turn.notify_all()

    def _exchange(self, name: str, value: Any) -> dict[int, Any]:
        """The values of all ranks, by rank, in the order of the turns."""
        rank, state = self.now, (processes._here, processes._divides)
        self.used[name] += 1
        self._given[rank] = copy.deepcopy(value)
        if len(self._given) == len(self.order):
            self._found, self._given = {each: self._given[each] for each in self.order}, {}
        self._next()
        self._wait(rank)
        processes._here, processes._divides = state
        return self._found

    def all_gather_object(self, everyone: list[Any], value: Any) -> None:
        found = self._exchange("gather", value)
        everyone[:] = [copy.deepcopy(found[rank]) for rank in sorted(found)]

    def all_reduce(self, values: Tensor) -> None:
        values.copy_(self._sum(values))

    def reduce(self, values: Tensor, dst: int) -> None:
        rank, total = self.now, self._sum(values)
        if rank == dst:
            values.copy_(total)

    def _sum(self, values: Tensor) -> Tensor:
        total = torch.zeros_like(values)
        for each in self._exchange("sum", values.detach()).values():
            total += each
        return total

    def broadcast(self, values: Tensor, src: int) -> None:
        values.copy_(self._exchange("broadcast", values.detach())[src])

    def broadcast_object_list(self, values: list[Any], src: int) -> None:
        values[:] = copy.deepcopy(self._exchange("broadcast", values)[src])
