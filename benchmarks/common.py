"""Comparisons without a recipe file: run one, save it, load it, merge the runs of several tasks or seeds.

Scripts that use this module run as modules from the repository root: `python -m benchmarks.claims.zoo`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from paper.recipe import Recipe
from paper.run import Stage, check_models, run_pair
from paper.schema import Comparison
from paper.tables import RESULTS, Comparing, Row, write_tables
from tuneport.errors import DataError, first_of
from tuneport.io.output import new_folder
from tuneport.training.loop import Schedule

T = TypeVar("T")


def part_of(items: Iterable[T], part: str) -> list[T]:
    """Every Nth item from the Ith, for a part "I/N" of the work."""
    index, count = map(int, part.split("/"))
    return list(items)[index::count]


def run_comparison(comparison: Comparison, *, stage: Stage | None = None) -> Comparing:
    """Run a comparison: every task, sampler, seed, budget and method."""
    recipe = Recipe({"1": comparison})
    check_models(recipe)
    result = run_pair(recipe, "1", None, {}, stage)
    assert isinstance(result, Comparing)
    return result


def save(result: Comparing, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write table.csv, results.json, table.md and plot.svg into a new folder."""
    with new_folder(out, overwrite=overwrite, marks=[RESULTS]) as folder:
        write_tables(result, folder)
    return Path(out)


def load(folder: str | Path) -> Comparing:
    """Load a saved comparison from its results.json."""
    path = Path(folder) / RESULTS
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings: dict[str, Any] = {
            key: tuple(item) if isinstance(item, list) else item for key, item in record["comparison"].items()
        }
        if "sampler" in settings:  # the key of older results
            settings["samplers"] = (settings.pop("sampler"),)
        if settings.get("finetune"):
            settings["finetune"] = Schedule(**settings["finetune"])
        return Comparing(Comparison(**settings), tuple(Row(**row) for row in record["rows"]), record["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a saved comparison: {type(error).__name__}: {error}") from error


def merge(parts: Sequence[Comparing]) -> Comparing:
    """Merge the runs of one comparison that were made task by task, or seed by seed.

    The bases and all settings must agree, and no run may be counted twice. Times and passes add up.
    """
    if not parts:
        raise DataError("there is nothing to merge; give at least one saved comparison.")
    first = parts[0].comparison
    by_task = ("finetuned", "data", "heads", "reference", "stated")
    tables: dict[str, dict[str, Any]] = {key: {} for key in by_task}
    done: set[tuple[str, int]] = set()
    for part in parts:
        here = part.comparison
        settings = [item.name for item in fields(Comparison) if item.name not in (*by_task, "seeds")]
        if differing := [name for name in settings if getattr(here, name) != getattr(first, name)]:
            raise DataError(f"comparisons with different {first_of(differing)} cannot be merged.")
        cells = {(task, seed) for task in here.data for seed in here.seeds}
        if twice := sorted(cells & done):
            raise DataError(f"task {twice[0][0]} with seed {twice[0][1]} is in two of the comparisons.")
        done |= cells
        for key in by_task:
            tables[key] |= getattr(here, key)
    seeds = tuple(sorted({seed for _, seed in done}))
    tasks = list(tables["data"])
    if missing := [f"{task} with seed {seed}" for task in tasks for seed in seeds if (task, seed) not in done]:
        raise DataError(f"some runs are missing: {first_of(missing)}.")
    rows = [row for part in parts for row in part.rows]
    rows.sort(key=lambda row: (tasks.index(row.task), row.seed))  # the order inside a run stays
    about = dict(parts[0].about)
    for key, value in about.items():
        values = [part.about.get(key) for part in parts]
        if isinstance(value, (int, float)):
            about[key] = round(sum(item for item in values if isinstance(item, (int, float))), 1)
        else:
            about[key] = "; ".join(dict.fromkeys(str(item) for item in values))
    about["runs"] = len(parts)
    whole = replace(
        first,
        finetuned=tables["finetuned"],
        data=tables["data"],
        heads=tables["heads"],
        reference=tables["reference"],
        stated=tables["stated"],
        seeds=seeds,
    )
    return Comparing(whole, tuple(rows), about)
