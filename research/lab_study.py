"""What the studies of the lab share: rows kept in --out, one JSON object a line; their table; the shared folder.

A study goes on where it was stopped: it reads what is in --out and runs what is missing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def study_parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the folder with zoo/ and data/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    return parser


def cells_parser(about: str | None) -> argparse.ArgumentParser:
    """The options of a study of cells: which of them, with which draws, on what."""
    parser = study_parser(about)
    parser.add_argument("--cells", nargs="+", help="source:target:task; all of the zoo without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--test", type=int, default=2000, help="test samples at most")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth cell, from the Ith")
    parser.add_argument("--device", default="cpu")
    return parser


def begin(parser: argparse.ArgumentParser, table: Callable[[list[Row]], str]) -> tuple[argparse.Namespace, list[Row]]:
    """The options and the rows that are there; ends here with --table, or where there is no zoo."""
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(rows))
        sys.exit()
    if options.root is None or not (options.root / "zoo").is_dir():
        sys.exit(f"there is no zoo in {options.root}; give the shared folder with --root.")
    return options, rows


def keep(out: Path, rows: Iterable[Row]) -> None:
    with out.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several processes may share the file
        file.writelines(json.dumps(row) + "\n" for row in rows)
