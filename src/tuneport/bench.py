"""Many transfers and evaluations on equal terms: methods, budgets and seeds, side by side.

A comparison measures each (task, seed) once: nested samples are added up budget by budget, one capture serves
every method, and every method gets the same samples, the same scale rule and the same test split. Nothing is
chosen by looking at test data.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import statistics as mean_and_deviation
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .alignment import Statistics
from .data import Dataset, align_labels
from .errors import DataError, MethodError, TuneportError, first_of, unknown_name
from .families import Head, Model, choose_head, open_model
from .finetuning import Schedule, finetune, prepared
from .hub import looks_like_hub_id
from .methods import METHODS, Transfer, get_method
from .output import check_new_folder, new_folder
from .pipeline import check_scale, measure_job, problem_of, transfer_auto
from .preparation import Job, PairedBatches, pick_device, prepare
from .report import chart, to_json
from .scaling import Scaled, fitting_samples
from .task_vector import TaskVector
from .tasks import read_data

Stage = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Comparison:
    """What to compare: one pair of bases, one or several tasks, and the settings each method is tried in.

    `finetuned`, `data` and (optionally) `reference`, a fine-tuned target, are paths by task name. Budgets are
    `samples` or `shots`. `steps` are few-shot fine-tuning runs of the target on the same samples; `warm_start`
    names the method whose result the same runs also start from.
    """

    source: str
    target: str
    finetuned: Mapping[str, str]
    data: Mapping[str, str]
    methods: Sequence[str] = ("naive", "theseus", "bico")
    samples: Sequence[int] = ()
    shots: Sequence[int] = ()
    sampler: str = "random"
    seeds: Sequence[int] = (0,)
    scales: Sequence[str] = ("1", "auto")
    steps: Sequence[int] = ()
    warm_start: str | None = None
    learning_rate: float = 1e-5
    batch_size: int = 32
    heads: Mapping[str, str] = field(default_factory=dict)
    reference: Mapping[str, str] = field(default_factory=dict)
    device: str = "auto"


@dataclass(frozen=True)
class Row:
    """One measured accuracy. `scale` is the strength used; `budget` is N, or K shots per class."""

    task: str
    method: str
    scale_rule: str
    budget: int
    seed: int
    accuracy: float
    scale: float | None = None
    held_out_before: float | None = None
    held_out_after: float | None = None


@dataclass(frozen=True)
class Comparing:
    """The result of a comparison: every measured accuracy and how it was made."""

    comparison: Comparison
    rows: tuple[Row, ...]
    about: Mapping[str, Any]


def read_recipe(path: str | Path) -> Comparison:
    """A comparison from a TOML file; an unknown key is an error that names the nearest known one."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    path = Path(path)
    if not path.is_file():
        raise DataError(f"there is no recipe at {path}.")
    if path.stat().st_size > 1_000_000:
        raise DataError(f"{path} is larger than a recipe can be (1 MB).")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise DataError(f"{path} is not a recipe: its values are nested too deeply.") from None
    except ValueError as error:  # of the parser, or of text that is not UTF-8
        raise DataError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error
    return make_comparison(content, str(path))


def make_comparison(content: Mapping[str, Any], where: str = "the comparison") -> Comparison:
    """A checked Comparison from plain values; all problems are listed at once."""
    known = {item.name: item for item in fields(Comparison)}
    problems = [unknown_name("key", key, known) for key in content if key not in known]
    problems += [f"'{key}' is missing" for key in ("source", "target", "finetuned", "data") if key not in content]
    if not problems:
        problems += _wrong_types(content)
    if problems:
        raise DataError(f"{where}: {'; '.join(problems)}")
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    comparison = Comparison(**plain)
    check(comparison, where)
    return comparison


def _wrong_types(content: Mapping[str, Any]) -> Iterator[str]:
    lists = {"methods": str, "samples": int, "shots": int, "seeds": int, "scales": str, "steps": int}
    for key, value in content.items():
        if key in lists and not (isinstance(value, (list, tuple)) and all(type(item) is lists[key] for item in value)):
            yield f"'{key}' must be a list of {lists[key].__name__}, got {value!r}"
        elif key in ("finetuned", "data", "heads", "reference") and not (
            isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values())
        ):
            yield f"'{key}' must be a table of paths by task, got {value!r}"
        elif key in ("source", "target", "sampler", "device", "warm_start") and not isinstance(value, str):
            yield f"'{key}' must be text, got {value!r}"
        elif key == "batch_size" and not (type(value) is int and value > 0):
            yield f"'{key}' must be a whole number above 0, got {value!r}"
        elif key == "learning_rate" and not (type(value) in (int, float) and 0 < value < float("inf")):
            yield f"'{key}' must be a number above 0, got {value!r}"


def check(comparison: Comparison, where: str = "the comparison") -> None:
    """Find everything that would stop a comparison later, and say it all at once."""
    problems = []
    if bool(comparison.samples) == bool(comparison.shots):
        problems.append("give budgets as samples or as shots, one of the two")
    if not comparison.seeds:
        problems.append("give at least one seed")
    for name in (*comparison.methods, *([comparison.warm_start] if comparison.warm_start else [])):
        try:
            get_method(name)
        except MethodError as error:
            problems.append(str(error))
    for rule in comparison.scales:
        try:
            check_scale(rule)
        except TuneportError as error:
            problems.append(str(error))
    if set(comparison.finetuned) != set(comparison.data):
        problems.append(
            f"finetuned names the tasks {first_of(comparison.finetuned)} and data {first_of(comparison.data)}"
        )
    paths = [comparison.source, comparison.target]
    for table in (comparison.finetuned, comparison.data, comparison.reference):
        paths += list(table.values())
    problems += [
        f"{path} does not exist"
        for path in dict.fromkeys(paths)
        if not (os.path.exists(path) or looks_like_hub_id(path) or ":" in path)  # NAME:TAG is its library's to find
    ]
    if problems:
        raise DataError(f"{where}: {'; '.join(problems)}.")


def compare(comparison: Comparison, *, stage: Stage | None = None) -> Comparing:
    """Run a comparison: every task, seed, budget and method."""
    check(comparison)
    started = time.time()
    device = pick_device(comparison.device)
    source, target = (open_model(path, device=device) for path in (comparison.source, comparison.target))
    rows: list[Row] = []
    captures = {"captures": 0, "forward": 0, "backward": 0}
    cells = [(task, seed) for task in comparison.data for seed in comparison.seeds]
    for index, (task, seed) in enumerate(cells):
        if stage is not None:
            stage("comparing", index, len(cells))
        rows += _run_cell(comparison, source, target, task, seed, captures)
    if stage is not None:
        stage("comparing", len(cells), len(cells))
    about = {
        "machine": f"{platform.machine()}, {device}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.time() - started, 1),
        **captures,
    }
    return Comparing(comparison, tuple(rows), about)


def _run_cell(
    comparison: Comparison, source: Model, target: Model, task: str, seed: int, captures: dict[str, int]
) -> Iterator[Row]:
    """All rows of one (task, seed), from one pass over the largest set of samples."""
    test = read_data(comparison.data[task], "test")
    methods = {name: get_method(name) for name in comparison.methods}
    signals = frozenset().union(*(method.signals for method in methods.values()))
    job, budgets = _largest_job(comparison, source, target, task, seed, signals)
    head = choose_head(target, comparison.heads.get(task), test.name, test.classes, test.prompts)
    inputs, labels = prepared(target, align_labels(test, head.classes))

    def accuracy(module: nn.Module) -> float:
        right = 0
        with torch.inference_mode():
            for start in range(0, len(labels), 256):
                batch = {key: value[start : start + 256] for key, value in inputs.items()}
                right += int((head.scores(target, module, batch).argmax(-1) == labels[start : start + 256]).sum())
        return 100.0 * right / len(labels)

    yield Row(task, "target", "-", 0, seed, accuracy(target.module))
    if task in comparison.reference:
        tuned = open_model(comparison.reference[task], device=target.device)
        yield Row(task, "fine-tuned target", "-", 0, seed, accuracy(tuned.module))
    assert isinstance(job.batches, PairedBatches)
    cuts = sorted({cut for count in budgets.values() for cut in (fitting_samples(count), count)})
    prefix = {0: Statistics()}
    for before, cut in zip([0, *cuts], cuts, strict=False):
        part = replace(job, batches=replace(job.batches, indices=job.batches.indices[before:cut]))
        found = measure_job(part, signals=signals) if signals else Statistics()
        prefix[cut] = prefix[before] + found
    captures["captures"] += 1 if signals else 0
    for name in ("forward", "backward"):
        captures[name] += prefix[cuts[-1]].passes.get(name, 0)
    solved: dict[tuple[str, int], Transfer] = {}

    def solver(name: str) -> Callable[[Statistics], Transfer]:
        """A method on this cell; what it has solved once (everything, if it reads no data) is not solved again."""

        def solve(found: Statistics) -> Transfer:
            key = (name, id(found) if methods[name].signals else 0)
            if key not in solved:
                solved[key] = methods[name].transfer(problem_of(job, found))
            return solved[key]

        return solve

    for budget, count in budgets.items():
        chosen = replace(job, batches=replace(job.batches, indices=job.batches.indices[:count]), samples=count)
        warm: TaskVector | None = None
        for name in methods:
            for row, vector in _method_rows(comparison, chosen, solver(name), prefix, accuracy):
                yield replace(row, task=task, method=name, budget=budget, seed=seed)
                if name == comparison.warm_start and row.scale_rule == comparison.scales[0]:
                    warm = (row.scale or 0.0) * vector
        yield from _finetuning_rows(comparison, chosen, head, task, budget, seed, warm, accuracy)


def _largest_job(
    comparison: Comparison, source: Model, target: Model, task: str, seed: int, signals: frozenset[str]
) -> tuple[Job, dict[int, int]]:
    """A job over the largest budget, and how many of its (nested) samples each budget takes."""
    shots = bool(comparison.shots)
    budgets = sorted(comparison.shots or comparison.samples)
    job = prepare(
        source,
        comparison.finetuned[task],
        target,
        comparison.data[task],
        method=METHODS["naive"],
        extra_signals=signals,
        scored=True,
        samples=None if shots else budgets[-1],
        shots=budgets[-1] if shots else None,
        sampler=comparison.sampler,
        seed=seed,
        head=comparison.heads.get(task),
        batch_size=comparison.batch_size,
    )
    for name in comparison.methods:
        get_method(name).check(job.plan)
    per_budget = job.samples // budgets[-1] if shots else 1
    return job, {budget: budget * per_budget for budget in budgets}


def _method_rows(
    comparison: Comparison,
    job: Job,
    solve: Callable[[Statistics], Transfer],
    prefix: Mapping[int, Statistics],
    accuracy: Callable[[nn.Module], float],
) -> Iterator[tuple[Row, TaskVector]]:
    """A method at every scale rule."""
    assert isinstance(job.batches, PairedBatches)
    indices = job.batches.indices
    count, fit = len(indices), fitting_samples(len(indices))
    for rule in comparison.scales:
        before = after = None
        if rule == "auto":
            held_out = indices[fit:] if fit < count else indices
            rest = replace(job, batches=replace(job.batches, indices=held_out), samples=len(held_out))
            moved, choice = transfer_auto(rest, solve, prefix[fit], prefix[count], held_out=fit < count)
            scale = choice.scale
            before, after = choice.scores[0.0].accuracy, choice.scores[scale].accuracy
        else:
            moved, scale = solve(prefix[count]), float(rule)
        with Scaled(job.target.module, moved.task_vector) as scaled:
            scaled.set(scale)
            found = accuracy(scaled.module)
        yield Row("", "", rule, 0, 0, found, scale, before, after), moved.task_vector


def _finetuning_rows(
    comparison: Comparison,
    job: Job,
    head: Head,
    task: str,
    budget: int,
    seed: int,
    warm: TaskVector | None,
    accuracy: Callable[[nn.Module], float],
) -> Iterator[Row]:
    """Few-shot fine-tuning of the target on the same samples, from its own weights and from the ported ones."""
    assert isinstance(job.batches, PairedBatches)
    samples: Dataset = job.batches.dataset.subset(job.batches.indices)
    for steps in comparison.steps:
        schedule = Schedule(steps, learning_rate=comparison.learning_rate, seed=seed)
        for words, vector in (("fine-tuning", None), (f"fine-tuning from {comparison.warm_start}", warm)):
            if words != "fine-tuning" and vector is None:
                continue
            with Scaled(job.target.module, vector if vector is not None else TaskVector({})) as start:
                start.set(1.0)
                *_, (_, module) = finetune(job.target, head, samples, schedule)
            yield Row(task, f"{words}, {steps} steps", "-", budget, seed, accuracy(module))


def table_rows(result: Comparing) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of text: a row per method, scale rule and budget; a column per task; mean and deviation.

    Cells are means over seeds; the deviation is that of the task average over seeds.
    """
    tasks = list(result.comparison.data)
    keys = dict.fromkeys((row.method, row.scale_rule, row.budget) for row in result.rows)
    word = "shots" if result.comparison.shots else "samples"
    columns = ["method", "scale", word, *tasks, "mean", "± seeds", "gain"]
    lines, base = [], None
    for method, rule, budget in sorted(keys, key=lambda key: (key[2], 0)):
        found = [row for row in result.rows if (row.method, row.scale_rule, row.budget) == (method, rule, budget)]
        by_task = [[row.accuracy for row in found if row.task == task] for task in tasks]
        cells = [f"{mean_and_deviation.mean(values):.1f}" if values else "–" for values in by_task]
        if not all(by_task):
            lines.append([method, rule, str(budget or "–"), *cells, "–", "–", "–"])
            continue
        seeds = sorted({row.seed for row in found})
        averages = [mean_and_deviation.mean(row.accuracy for row in found if row.seed == seed) for seed in seeds]
        mean = mean_and_deviation.mean(averages)
        base = mean if base is None else base
        spread = f"{mean_and_deviation.stdev(averages):.1f}" if len(averages) > 1 else "–"
        lines.append([method, rule, str(budget or "–"), *cells, f"{mean:.1f}", spread, f"{mean - base:+.1f}"])
    return columns, lines


def auto_scale_summary(result: Comparing) -> list[dict[str, Any]]:
    """How `auto` did on test data against doing nothing, per method: helped, hurt, picked zero; and the hold-out."""
    base = {(row.task, row.seed): row.accuracy for row in result.rows if row.method == "target"}
    summary = []
    for method in dict.fromkeys(row.method for row in result.rows if row.scale_rule == "auto"):
        rows = [row for row in result.rows if row.method == method and row.scale_rule == "auto"]
        gains = [row.accuracy - base[row.task, row.seed] for row in rows]
        summary.append(
            {
                "method": method,
                "cells": len(rows),
                "picked_zero": sum(row.scale == 0 for row in rows),
                "helped": sum(gain > 0 for gain in gains),
                "hurt": sum(gain < 0 for gain in gains),
                "mean_gain": round(mean_and_deviation.mean(gains), 2),
                "worst": round(min(gains), 2),
                "lowered_hold_out": sum((row.held_out_after or 0) < (row.held_out_before or 0) for row in rows),
            }
        )
    return summary


def markdown(result: Comparing) -> str:
    """The comparison as Markdown: the table, what auto did, and how it was made."""
    columns, lines = table_rows(result)
    text = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    text += ["| " + " | ".join(line) + " |" for line in lines]
    summary = auto_scale_summary(result)
    if summary:
        names = list(summary[0])
        text += ["", "Scale `auto` against the target itself, on test data (cells = task x budget x seed):", ""]
        text += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
        text += ["| " + " | ".join(str(item[name]) for name in names) + " |" for item in summary]
    text += ["", *(f"- {key}: {value}" for key, value in result.about.items())]
    return "\n".join(text) + "\n"


def save(result: Comparing, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write table.csv, results.json, table.md and plot.svg into a new folder."""
    columns, lines = table_rows(result)
    with new_folder(out, overwrite=overwrite) as folder:
        content = io.StringIO()
        csv.writer(content).writerows([columns, *lines])
        (folder / "table.csv").write_text(content.getvalue(), encoding="utf-8")
        rows = [asdict(row) for row in result.rows]
        record = {"comparison": asdict(result.comparison), "about": result.about, "rows": rows}
        record["auto"] = auto_scale_summary(result)
        (folder / "results.json").write_text(to_json(record) + "\n", encoding="utf-8")
        (folder / "table.md").write_text(markdown(result), encoding="utf-8")
        (folder / "plot.svg").write_text(_plot(result), encoding="utf-8")
    return Path(out)


def _plot(result: Comparing) -> str:
    """Mean accuracy over tasks and seeds against the budget, a line per method and scale rule."""
    budgets = sorted(result.comparison.shots or result.comparison.samples)
    lines: dict[str, list[float]] = {}
    for method, rule in dict.fromkeys((row.method, row.scale_rule) for row in result.rows):
        points = []
        for budget in budgets:
            found = [
                row.accuracy
                for row in result.rows
                if (row.method, row.scale_rule) == (method, rule) and row.budget in (0, budget)
            ]
            points.append(mean_and_deviation.mean(found) if found else float("nan"))
        lines[method if rule in ("-", "1") else f"{method}, {rule}"] = points
    word = "shots per class" if result.comparison.shots else "calibration samples"
    return chart(lines, budgets, x_label=word, y_label="accuracy, %")


def load(folder: str | Path) -> Comparing:
    """A saved comparison, from its results.json."""
    path = Path(folder) / "results.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings: dict[str, Any] = {
            key: tuple(item) if isinstance(item, list) else item for key, item in record["comparison"].items()
        }
        return Comparing(Comparison(**settings), tuple(Row(**row) for row in record["rows"]), record["about"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a saved comparison: {type(error).__name__}: {error}") from error


def merge(parts: Sequence[Comparing]) -> Comparing:
    """Runs of one comparison that were made task by task, or seed by seed, as a whole.

    The bases and all settings must agree, and no run may be counted twice. Times and passes add up.
    """
    if not parts:
        raise DataError("there is nothing to merge; give at least one saved comparison.")
    first = parts[0].comparison
    by_task = ("finetuned", "data", "heads", "reference")
    tables: dict[str, dict[str, str]] = {key: {} for key in by_task}
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
        seeds=seeds,
    )
    return Comparing(whole, tuple(rows), about)


def check_output(out: str | Path, overwrite: bool) -> None:
    """Refuse an output folder that cannot be written, before any work."""
    check_new_folder(out, overwrite)
