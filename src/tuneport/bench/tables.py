"""Tables and plots of a comparison, next to the paper's numbers.

Cells are means over seeds. The paper's means are recomputed from its own cells; if a printed one differs, the
table says so. Between different models and tasks only gains and the order of methods can be compared; it says so too.
"""

from __future__ import annotations

import csv
import io
import math
import statistics as mean_and_deviation
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..pipeline.scale import RULES
from ..report.record import to_json
from ..report.summary import number_text
from .charts import bar_chart, line_chart
from .recipe import Printed, Recipe
from .schema import Comparison

RESULTS = "results.json"  # every single number of a comparison


@dataclass(frozen=True)
class Row:
    """One measured accuracy. `scale` is the scale used; `budget` is N, or K shots per class.

    A `stated` accuracy was measured elsewhere and comes from the recipe.
    """

    task: str
    method: str
    scale_rule: str
    budget: int
    seed: int
    accuracy: float
    scale: float | None = None
    held_out_before: float | None = None
    held_out_after: float | None = None
    sampler: str = "random"
    stated: bool = False


@dataclass(frozen=True)
class Comparing:
    """The result of a comparison: every measured accuracy and how it was made."""

    comparison: Comparison
    rows: tuple[Row, ...]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """The rows of one method, scale rule, budget and sampler: means over seeds by task, and over tasks."""

    method: str
    rule: str
    budget: int
    sampler: str
    by_task: Mapping[str, float]
    spread: Mapping[str, float]
    mean: float | None
    deviation: float | None
    stated: bool


def lines_of(result: Comparing) -> list[Line]:
    """The lines of the table, in the order of the budgets."""
    tasks = list(result.comparison.data)
    grouped: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in result.rows:
        grouped.setdefault((row.method, row.scale_rule, row.budget, row.sampler), []).append(row)
    lines = []
    for (method, rule, budget, sampler), found in sorted(grouped.items(), key=lambda item: item[0][2]):
        by_task = {task: [row.accuracy for row in found if row.task == task] for task in tasks}
        given = {task: values for task, values in by_task.items() if values}
        seeds = sorted({row.seed for row in found})
        whole = len(given) == len(tasks)
        averages = [mean_and_deviation.mean(row.accuracy for row in found if row.seed == seed) for seed in seeds]
        lines.append(
            Line(
                method,
                rule,
                budget,
                sampler,
                {task: mean_and_deviation.mean(values) for task, values in given.items()},
                {task: mean_and_deviation.stdev(values) for task, values in given.items() if len(values) > 1},
                mean_and_deviation.mean(averages) if whole else None,
                mean_and_deviation.stdev(averages) if whole and len(averages) > 1 else None,
                any(row.stated for row in found),
            )
        )
    return lines


def base_of(lines: Sequence[Line], budget: int) -> float | None:
    """The mean of the unchanged target, at this budget if it depends on the budget."""
    found = [line for line in lines if line.method == "target" and line.budget in (0, budget)]
    return found[-1].mean if found else None


def table_rows(result: Comparing) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of text: a row per method, scale rule and budget; a column per task; mean and deviation.

    Cells are means over seeds; the deviation is that of the task average over seeds. Stated ones are in brackets.
    """
    tasks = list(result.comparison.data)
    lines = lines_of(result)
    word = "shots" if result.comparison.shots else "samples"
    columns = ["method", "scale", word, *tasks, "mean", "± seeds", "gain"]
    rows = []
    for line in lines:
        form = "[{:.1f}]" if line.stated else "{:.1f}"
        cells = [form.format(line.by_task[task]) if task in line.by_task else "–" for task in tasks]
        base = base_of(lines, line.budget)
        tail = ["–", "–", "–"]
        if line.mean is not None:
            spread = "–" if line.deviation is None else f"{line.deviation:.1f}"
            tail = [form.format(line.mean), spread, "–" if base is None else f"{line.mean - base:+.1f}"]
        rows.append([_label(result, line), line.rule, str(line.budget or "–"), *cells, *tail])
    return columns, rows


def _label(result: Comparing, line: Line) -> str:
    several = len(result.comparison.samplers) > 1 and line.budget
    return f"{line.method}, {line.sampler}" if several else line.method


def compare_with_paper(result: Comparing, recipe: Recipe) -> list[dict[str, Any]]:
    """Means and gains at scale 1, the paper's, and the difference; by task if the models are the same.

    The paper's means are those of its own cells. A method that reads no data has one number at every budget.
    """
    lines = [line for line in lines_of(result) if line.rule in ("-", "1")]
    printed = {(row.method, row.budget): row for row in recipe.printed}
    table = []
    for row in recipe.printed:
        base = printed.get(("target", row.budget)) or printed.get(("target", 0))
        found = [
            line
            for line in lines
            if row.method in (line.method, _label(result, line)) and (row.budget in (0, line.budget))
        ]
        line = found[0] if found else None
        own = base_of(lines, row.budget)
        gain = None if line is None or line.mean is None or own is None else line.mean - own
        paper_gain = None if base is None else row.true_mean - base.true_mean
        known = {} if line is None or recipe.small else line.by_task
        shared = {task: known[task] for task in row.values if task in known}
        table.append(
            {
                "method": row.method,
                "budget": row.budget,
                "measured": None if line is None else line.mean,
                "paper": row.true_mean,
                "gain": gain,
                "paper_gain": paper_gain,
                "difference": None if gain is None or paper_gain is None else gain - paper_gain,
                "deviation": None if line is None else line.deviation,
                "paper_deviation": row.deviations.get("mean"),
                "tasks": {task: {"measured": value, "paper": row.values[task]} for task, value in shared.items()},
                "marks": list(_marks(row)),
            }
        )
    return table


def _marks(row: Printed) -> Iterator[str]:
    if row.wrong_mean:
        yield f"the paper prints a mean of {row.mean:.2f}; its own cells give {row.true_mean:.2f}, which is used here"
    yield from (f"{column}: {words}" for column, words in row.marks.items())


def orders(result: Comparing, recipe: Recipe) -> list[dict[str, Any]]:
    """The methods from best to worst at each budget, measured and in the paper, at scale 1; without the base models."""
    table = [row for row in compare_with_paper(result, recipe) if row["measured"] is not None and row["budget"]]
    table = [row for row in table if row["method"] not in ("source", "target")]
    found = []
    for budget in dict.fromkeys(row["budget"] for row in table):
        rows = [row for row in table if row["budget"] == budget]
        if len(rows) < 2:
            continue
        order = {
            key: [row["method"] for row in sorted(rows, key=lambda row: -row[key])] for key in ("measured", "paper")
        }
        found.append({"budget": budget, **order, "same": order["measured"] == order["paper"]})
    return found


def markdown(result: Comparing, recipe: Recipe | None = None) -> str:
    """The comparison as Markdown: the table, the paper's numbers, the results of auto, and how it was made."""
    columns, lines = table_rows(result)
    text = [] if recipe is None or not recipe.where else [f"# {recipe.title}", "", *_opening(recipe), ""]
    text += grid(columns, lines)
    if recipe is not None and recipe.printed:
        text += _paper_part(result, recipe)
    summary = auto_scale_summary(result)
    if summary:
        names = list(summary[0])
        text += ["", "Chosen scales against the target itself, on test data (cells = task x budget x seed):", ""]
        text += grid(names, [[str(item[name]) for name in names] for item in summary])
    if any(row.stated for row in result.rows):
        text += ["", "Numbers in brackets were measured elsewhere, as the recipe states."]
    text += ["", *(f"- {key}: {value}" for key, value in result.about.items())]
    return "\n".join(text) + "\n"


def _opening(recipe: Recipe) -> list[str]:
    pairs = [f"{Path(part.source).name} to {Path(part.target).name}" for part in recipe.comparisons.values()]
    size = "Small variant" if recipe.small else "Models and tasks of the paper"
    return [f"{recipe.where} of the paper. {size}: {', '.join(pairs)}.", *([recipe.about] if recipe.about else [])]


def grid(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    rule = "|" + "---|" * len(columns)
    return ["| " + " | ".join(columns) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]


def _paper_part(result: Comparing, recipe: Recipe) -> list[str]:
    table = compare_with_paper(result, recipe)
    text = ["", "## Comparison with the paper", ""]
    if recipe.small:
        text += ["Other models and other tasks: gains and the order of methods can be compared, accuracies cannot.", ""]
    columns, rows = paper_rows(table)
    text += grid(columns, rows)
    for found in orders(result, recipe):
        words = "the same order" if found["same"] else "another order"
        measured, paper = (" > ".join(found[key]) for key in ("measured", "paper"))
        text += ["", f"At {found['budget']}: {words}. Measured: {measured}. The paper: {paper}."]
    marks = [f"- {row['method']}, {row['budget'] or '–'}: {mark}" for row in table for mark in row["marks"]]
    return [*text, *(["", "Errors in the paper's table:", "", *marks] if marks else [])]


def paper_rows(table: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of text of `compare_with_paper`; an asterisk marks errors of the paper."""
    tasks = list(dict.fromkeys(task for row in table for task in row["tasks"]))
    spread = any(row["paper_deviation"] is not None for row in table)
    columns = ["method", "budget", *tasks, "mean", "paper", "gain", "paper's gain", "difference"]
    columns += ["± seeds", "paper's ±"] if spread else []
    rows = []
    for row in table:
        cells = [
            f"{pair['measured']:.1f} ({pair['paper']:.1f}, {pair['measured'] - pair['paper']:+.1f})"
            if (pair := row["tasks"].get(task))
            else "–"
            for task in tasks
        ]
        star = "*" if row["marks"] else ""
        numbers = [number_text(row["measured"], ".1f"), number_text(row["paper"], ".1f") + star]
        numbers += [number_text(row[key], "+.1f") for key in ("gain", "paper_gain", "difference")]
        numbers += [number_text(row[key], ".1f") for key in ("deviation", "paper_deviation")] if spread else []
        rows.append([row["method"], str(row["budget"] or "–"), *cells, *numbers])
    return columns, rows


def write_tables(result: Comparing, folder: Path, recipe: Recipe | None = None) -> None:
    """The files of one comparison."""
    write_csv(folder / "table.csv", *table_rows(result))
    rows = [asdict(row) for row in result.rows]
    record: dict[str, Any] = {"comparison": asdict(result.comparison), "about": result.about, "rows": rows}
    record["auto"] = auto_scale_summary(result)
    if recipe is not None and recipe.printed:
        table = compare_with_paper(result, recipe)
        record["paper"] = {"where": recipe.where, "small": recipe.small, "rows": table}
        record["paper"]["orders"] = orders(result, recipe)
        write_csv(folder / "paper.csv", *paper_rows(table))
    (folder / RESULTS).write_text(to_json(record) + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(result, recipe), encoding="utf-8")
    (folder / "plot.svg").write_text(plot(result, recipe), encoding="utf-8")


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    content = io.StringIO()
    csv.writer(content).writerows([columns, *rows])
    path.write_text(content.getvalue(), encoding="utf-8")


def plot(result: Comparing, recipe: Recipe | None = None) -> str:
    """Mean accuracy against the budget, a line per method and scale rule; bars where there is one budget.

    Only means over all tasks are drawn. Fine-tuned models are far above the rest: the legend gives their numbers.
    """
    budgets = sorted(result.comparison.budgets)
    found = [(line, line.mean) for line in lines_of(result) if line.mean is not None]
    names = [_label(result, line) + ("" if line.rule in ("-", "1") else f", {line.rule}") for line, _ in found]
    variants = {
        name: _label(result, line)
        for name, (line, _) in zip(names, found, strict=True)
        if line.rule not in ("-", "1", result.comparison.scales[0])
    }
    title = _plot_title(result, recipe)
    if len(budgets) < 2:
        means = {name: mean for name, (_, mean) in zip(names, found, strict=True)}
        spread = {name: line.deviation for name, (line, _) in zip(names, found, strict=True) if line.deviation}
        base = means.get("target")
        words: dict[str, Any] = {"title": title, "x_label": "accuracy, %", "form": ".1f"}
        return bar_chart(means, spread=spread, line=base, variants=variants, **words)
    lines: dict[str, list[float]] = {}
    spreads: dict[str, list[float]] = {}
    notes = {}
    for name, (line, mean) in zip(names, found, strict=True):
        if line.budget == 0 and line.method.startswith("fine-tuned "):
            notes[name] = f"{name}: {mean:.1f}"
            continue
        points = lines.setdefault(name, [math.nan] * len(budgets))
        around = spreads.setdefault(name, [math.nan] * len(budgets))
        for index, budget in enumerate(budgets):
            if line.budget in (0, budget):
                points[index] = mean
                around[index] = math.nan if line.deviation is None else line.deviation
    word = "shots per class" if result.comparison.shots else "calibration samples"
    above = list(notes.values())
    return line_chart(
        lines,
        budgets,
        title=title,
        x_label=word,
        y_label="accuracy, %",
        spread=spreads,
        variants=variants,
        notes=above,
    )


def _plot_title(result: Comparing, recipe: Recipe | None) -> str:
    pair = f"{Path(result.comparison.source).name} to {Path(result.comparison.target).name}"
    return pair if recipe is None or not recipe.where else f"{recipe.title}: {pair}"


def auto_scale_summary(result: Comparing) -> list[dict[str, Any]]:
    """Test accuracy at a chosen scale against scale 0, by method and rule; and the hold-out."""
    base = {(row.task, row.seed, row.budget): row.accuracy for row in result.rows if row.method == "target"}
    summary = []
    for method, rule in dict.fromkeys((row.method, row.scale_rule) for row in result.rows if row.scale_rule in RULES):
        rows = [row for row in result.rows if (row.method, row.scale_rule) == (method, rule)]
        gains = []
        for row in rows:
            before = base.get((row.task, row.seed, row.budget))  # a probed target depends on the budget
            gains.append(row.accuracy - (base[row.task, row.seed, 0] if before is None else before))
        summary.append(
            {
                "method": method,
                "rule": rule,
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
