"""`python -m paper NAME`: run a recipe, given by name or as a TOML file, and print its tables."""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tuneport.cli.terminal import Bar, show, tell
from tuneport.errors import TuneportError
from tuneport.io.output import check_new

from .recipe import RECIPES, read_recipe, read_toml
from .run import run_recipe, told
from .toy import shorten, write_toys


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m paper", description="Make a table or a figure of the paper.")
    parser.add_argument("name", nargs="?", help="a recipe by name, or a TOML file; without it, all names are listed")
    parser.add_argument("--out", help="the folder for tables, JSON and plots; results/NAME if not given")
    parser.add_argument("--root", help="the folder of models and data: the recipe's paths begin there")
    parser.add_argument("--small", action="store_true", help="take the recipe's small variant")
    parser.add_argument(
        "--toy", action="store_true", help="run a short form of the small variant on random models, made on the spot"
    )
    parser.add_argument("--cache", help="the folder of the models that the recipe fine-tunes; kept for the next run")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--resume", action="store_true", help="go on from the cells that a stopped run has finished")
    parser.add_argument("--overwrite", action="store_true", help="replace the output of an earlier run")
    given = parser.parse_args(arguments)
    if given.name is None:
        rows = [[name, found["paper"], found["title"]] for name, found in ((name, read_toml(name)) for name in RECIPES)]
        show(rows, "recipe", "paper", "title")
        return
    if given.toy and given.root:
        parser.error("--toy makes its own models and data: leave out --root")
    out = Path(given.out or Path("results") / Path(given.name).stem)
    with tempfile.TemporaryDirectory() as made, Bar("preparing") as events:
        try:
            check_new(out, given.overwrite or given.resume, marks=())
            toy = shorten(read_recipe(given.name, small=True, root=write_toys(Path(made)))) if given.toy else None
            run_recipe(
                toy or given.name,
                out,
                small=given.small,
                root=given.root,
                cache=given.cache,
                device=given.device,
                resume=given.resume,
                overwrite=given.overwrite,
                stage=told(events),
                note=tell,
            )
        except TuneportError as error:
            sys.exit(f"{type(error).__name__}: {error}")
    for path in sorted(out.rglob("table.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            columns, *lines = csv.reader(file)
        show(lines, *columns, title=path.parent.name if path.parent != out else None, fold=True)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    print(f"written to {out}: {', '.join(files)}")


if __name__ == "__main__":
    main()
