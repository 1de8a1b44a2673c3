"""Every route beside what one would do instead, on real models: make rows, print their table.

    python -m benchmarks.skill make --models MODELS --shared SHARED --work WORK --rows rows.jsonl --device cuda --jobs 4
    python -m benchmarks.skill make --group towers --models SHARED/zoo ...
    python -m benchmarks.skill table --rows rows.jsonl

`make` appends one JSON row for each finished cell, and skips cells that have one; without options, all pairs, tasks,
arms and three draws of language models, or of another `--group`. MODELS holds transformers folders, SHARED the data
(see benchmarks/README.md). Old models are made or scored once for each source and task, and kept in WORK with all that
is written. `--small` runs every step on a few samples, to see that it works; its numbers say nothing.

On a GPU for a limited time: `--cells` has a file of single cells; the longest begin first, by the committed rows. With
`--memory` they begin in this order as far as they fit, and with `--until` none begins that would end too late.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.rows import add_row, rows_in
from benchmarks.skill.arms import failed_row, make_old, make_row
from benchmarks.skill.cells import Cell, cells_of
from benchmarks.skill.groups import GROUPS
from benchmarks.skill.pages import committed
from benchmarks.skill.place import Place, begin_process
from benchmarks.skill.rows import to_do
from benchmarks.skill.table import Table

RESERVED, CONTEXT = 1.3, 2.0  # what a process takes of a GPU, by its tensors, and GiB beside them
CROWDED = ("out of memory", "was killed")  # words of the errors of cells that are tried again alone
NOT_THERE = """not there:
  {}
Models come from get_models.py, get_encoders.py and zoo/ of the shared folder, or from the Hugging Face hub under these
names; the data are in the shared folder, which is private. See benchmarks/README.md."""


def make(options: argparse.Namespace) -> None:
    """Make the rows that are asked for and not there."""
    group = GROUPS[options.group]
    wanted = cells_of(group.places(options.pairs, options.tasks), options.arms, options.draws)
    if options.cells is not None:
        lines = [line.split() for line in options.cells.read_text(encoding="utf-8").splitlines()]
        wanted = [cell for pair, task, arm, draw in lines for cell in cells_of([(pair, task)], [arm], [int(draw)])]
        group.check(*([getattr(cell, name) for cell in wanted] for name in ("pair", "task", "label")))
    cells = to_do(wanted, rows_in(options.rows), options.small)
    if options.cells is not None:
        cells.sort(key=lambda cell: -cost(cell)[0])
    if not cells:
        return
    if lost := group.lacking(options.models, options.shared, cells):
        raise SystemExit(NOT_THERE.format("\n  ".join(lost)))
    fields = ("models", "shared", "work", "device", "dtype", "autocast", "small")
    place = Place(**{name: getattr(options, name) for name in fields})
    end = time.monotonic() + options.until
    crowded = run(place, options, cells, min(options.jobs, len(cells)), end)
    if crowded:
        run(place, options, crowded, 1, end)


def run(place: Place, options: argparse.Namespace, cells: Sequence[Cell], jobs: int, end: float) -> list[Cell]:
    """Append the rows of the cells; return those that had no memory beside the others, which have no row yet.

    No cell begins that would end after the time `end`.
    """
    workers, crowded, room = Workers(jobs), [], Room(options.memory)
    with workers.threads as threads:
        olds = {
            old: threads.submit(workers.call, make_old, place, options.group, *old)
            for old in dict.fromkeys((cell.source, cell.task) for cell in cells)
        }

        def row_of(cell: Cell) -> dict[str, Any] | None:
            wait([olds[cell.source, cell.task]])  # if it failed, its cells try again, and say why
            seconds, gib = cost(cell)
            with room.of(gib):
                if time.monotonic() + seconds > end:
                    return None
                try:
                    return workers.call(make_row, place, options.group, cell)
                except BrokenProcessPool:
                    return failed_row(place, options.group, cell, "the process was killed")

        made = {threads.submit(row_of, cell): cell for cell in cells}
        for done in as_completed(made):
            row = done.result()
            if row is None:
                continue
            if jobs > 1 and any(words in row.get("error", "") for words in CROWDED):
                crowded.append(made[done])
            else:
                add_row(options.rows, row)
    return crowded


def cost(cell: Cell) -> tuple[float, float]:
    """The most seconds and GiB of the committed rows that are nearest to a cell: those of its arm, task and target."""
    keys = ("arm", "n", "task", "target")
    rows = [{**row, "target": row["pair"].partition(">")[2]} for row in committed() if row.get("peak_gib")]

    def near(row: dict[str, Any]) -> int:
        return sum(row[key] == getattr(cell, key) for key in keys)

    most = max(map(near, rows))
    found = [row for row in rows if near(row) == most]
    return max(row["seconds"] for row in found), RESERVED * max(row["peak_gib"] for row in found) + CONTEXT


class Room:
    """The memory of a GPU, in GiB, for cells that need some of it at a time: none overtakes one that waits."""

    def __init__(self, size: float) -> None:
        self.size = self.free = size
        self.line, self.changed = deque[object](), threading.Condition()

    @contextmanager
    def of(self, need: float) -> Iterator[None]:
        """Context that has its part; a cell that needs more than all has all."""
        need, place = min(need, self.size), object()
        with self.changed:
            self.line.append(place)
            self.changed.wait_for(lambda: self.line[0] is place and need <= self.free)
            self.line.popleft()
            self.free -= need
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.free += need
                self.changed.notify_all()


class Workers:
    """Threads that each keep a process of their own: one that is killed takes only its cell with it."""

    def __init__(self, jobs: int) -> None:
        self.jobs, self.threads, self.own = jobs, ThreadPoolExecutor(jobs), threading.local()

    def call(self, work: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
        """Return what `work` returns in the process of this thread; raise a BrokenProcessPool if that is killed."""
        if not hasattr(self.own, "process"):
            spawn = get_context("spawn")
            self.own.process = ProcessPoolExecutor(1, spawn, initializer=begin_process, initargs=(self.jobs,))
        try:
            found: dict[str, Any] = self.own.process.submit(work, *arguments).result()
        except BrokenProcessPool:
            del self.own.process
            raise
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, and make rows or print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.skill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making, printing = commands.add_parser("make", help="make rows"), commands.add_parser("table", help="print a table")
    for each in (making, printing):
        each.add_argument("--rows", type=Path, required=True, help="a file with one JSON row a line")
        each.add_argument("--group", default="language", choices=GROUPS, help="of models (default: language)")
        each.add_argument("--pairs", nargs="+", metavar="SOURCE>TARGET", help="(default: all of the group)")
        each.add_argument("--tasks", nargs="+", metavar="TASK", help="(default: all of the group)")
        each.add_argument("--arms", nargs="+", metavar="ARM", help="such as distill@100 (default: all of the group)")
        each.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2])
        each.add_argument("--small", action="store_true", help="a few samples and steps, to see that it works")
    making.add_argument("--models", type=Path, required=True, help="folder of transformers folders")
    making.add_argument("--shared", type=Path, required=True, help="folder of the data")
    making.add_argument("--work", type=Path, required=True, help="where what is made is kept")
    making.add_argument("--device", default="cpu", help="cpu, or cuda")
    making.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the models")
    making.add_argument("--autocast", action="store_true", help="train in bfloat16 where that is safe")
    making.add_argument("--jobs", type=int, default=1, help="cells at a time")
    making.add_argument("--cells", type=Path, help="a file of PAIR TASK ARM DRAW, one cell a line, in place of these")
    making.add_argument("--memory", type=float, default=math.inf, help="GiB of the GPU that cells share")
    making.add_argument("--until", type=float, default=math.inf, help="seconds after which no cell shall end")
    options = parser.parse_args(arguments)
    group = GROUPS[options.group]
    options.pairs = options.pairs or list(group.grid)
    options.tasks = options.tasks or group.tasks
    options.arms = options.arms or group.arms
    group.check(options.pairs, options.tasks, options.arms)
    if options.command == "make":
        make(options)
    else:
        rows = Table(group, rows_in(options.rows), options.draws, options.small)
        print(rows.page(options.pairs, options.tasks, options.arms))


if __name__ == "__main__":
    main()
