"""Every route beside what one would do instead, on real models: make rows, print their table.

    python -m benchmarks.skill make --models MODELS --shared SHARED --work WORK --rows rows.jsonl --device cuda --jobs 4
    python -m benchmarks.skill make --group towers --models SHARED/zoo ...
    python -m benchmarks.skill table --rows rows.jsonl

`make` appends one JSON row for each finished cell, and skips cells that have one; without options, all pairs, tasks,
arms and three draws of language models, or of another `--group`. MODELS holds transformers folders, SHARED the data
(see benchmarks/README.md). Old models are made or scored once for each source and task, and kept in WORK with all that
is written. `--small` runs every step on a few samples, to see that it works; its numbers say nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from benchmarks.rows import add_row, rows_in
from benchmarks.skill.arms import make_old, make_row
from benchmarks.skill.cells import cells_of
from benchmarks.skill.groups import GROUPS
from benchmarks.skill.place import Place, begin_process
from benchmarks.skill.rows import to_do
from benchmarks.skill.table import Table

NOT_THERE = """not there:
  {}
Models come from get_models.py, get_encoders.py and zoo/ of the shared folder, or from the Hugging Face hub under these
names; the data are in the shared folder, which is private. See benchmarks/README.md."""


def make(options: argparse.Namespace) -> None:
    """Make the rows that are asked for and not there."""
    group = GROUPS[options.group]
    wanted = cells_of(group.places(options.pairs, options.tasks), options.arms, options.draws)
    cells = to_do(wanted, rows_in(options.rows), options.small)
    if not cells:
        return
    pairs, tasks = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("pair", "task"))
    if lost := group.missing(options.models, options.shared, pairs, tasks):
        raise SystemExit(NOT_THERE.format("\n  ".join(lost)))
    fields = ("models", "shared", "work", "device", "dtype", "autocast", "small")
    place = Place(**{name: getattr(options, name) for name in fields})
    olds = list(dict.fromkeys((cell.source, cell.task) for cell in cells))
    jobs = min(options.jobs, len(cells))
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=begin_process, initargs=(jobs,))
    with pool:
        first = {pool.submit(make_old, place, options.group, *old): old for old in olds}
        for done in as_completed(first):
            if (error := done.exception()) is not None:  # its cells try again, and say why they fail
                print("old model", *first[done], error, file=sys.stderr)
        for done in as_completed([pool.submit(make_row, place, options.group, cell) for cell in cells]):
            add_row(options.rows, done.result())


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
