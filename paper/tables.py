"""Tables and plots of a comparison, next to the paper's numbers.

The paper's means are recomputed from its own cells; the table says where a printed one differs. Between different
models and tasks only gains and the order of methods can be compared; it says so too.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from jinja2 import Environment, PackageLoader

from tuneport.pipeline.scale import RULES
from tuneport.report.record import write_record
from tuneport.report.summary import number_text

from .charts import bar_chart, line_chart
from .recipe import Recipe
from .schema import Comparison

RESULTS = "results.json"  # every single number of a comparison
Table = list[list[str]]  # the names of the columns, then the rows
NO_RECIPE = Recipe({})


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
    """The rows of one method, scale rule, budget and sampler: means over seeds, by task and over all tasks.

    The mean is NaN if a task is missing. The label names the sampler if there are several.
    """

    method: str
    label: str
    rule: str
    budget: int
    by_task: Mapping[str, float]
    mean: float = math.nan
    deviation: float = math.nan
    stated: bool = False

    @property
    def name(self) -> str:
        """The label, with a scale rule other than 1."""
        return self.label if self.rule in ("-", "1") else f"{self.label}, {self.rule}"


def lines_of(result: Comparing) -> list[Line]:
    """The lines of the table, in the order of the budgets."""
    tasks, several = result.comparison.data, len(result.comparison.samplers) > 1
    grouped: dict[tuple[str, str, int, str], list[Row]] = defaultdict(list)
    for row in sorted(result.rows, key=lambda row: row.budget):
        grouped[row.method, row.scale_rule, row.budget, row.sampler].append(row)
    lines = []
    for (method, rule, budget, sampler), rows in grouped.items():
        label = f"{method}, {sampler}" if several and budget else method
        measured = {row.task for row in rows}
        by_task = {task: mean(row.accuracy for row in rows if row.task == task) for task in tasks if task in measured}
        seeds = sorted({row.seed for row in rows}) if len(by_task) == len(tasks) else ()
        averages = [mean(row.accuracy for row in rows if row.seed == seed) for seed in seeds]
        overall = mean(averages) if averages else math.nan
        deviation = stdev(averages) if len(averages) > 1 else math.nan
        stated = any(row.stated for row in rows)
        lines.append(Line(method, label, rule, budget, by_task, overall, deviation, stated))
    return lines


def base_of(lines: Sequence[Line], budget: int) -> float:
    """The mean of the unchanged target, at this budget if it depends on the budget; NaN if it was not measured."""
    return next(
        (line.mean for line in reversed(lines) if line.method == "target" and line.budget in (0, budget)), math.nan
    )


def table_rows(result: Comparing) -> Table:
    """A row per method, scale rule and budget: means over seeds by task and over all, deviation over seeds, gain."""
    tasks, lines = list(result.comparison.data), lines_of(result)
    budget = "shots" if result.comparison.shots else "samples"
    table = [["method", "scale", budget, *tasks, "mean", "± seeds", "gain"]]
    for line in lines:
        form = "[{:.1f}]" if line.stated else "{:.1f}"
        values = (*(line.by_task.get(task, math.nan) for task in tasks), line.mean)
        cells = ["–" if math.isnan(value) else form.format(value) for value in values]
        gain = line.mean - base_of(lines, line.budget)
        tail = [number_text(line.deviation, ".1f"), number_text(gain, "+.1f")]
        table.append([line.label, line.rule, str(line.budget or "–"), *cells, *tail])
    return table


def compare_with_paper(result: Comparing, recipe: Recipe) -> list[dict[str, Any]]:
    """Means and gains at scale 1, those of the paper's own cells, and the difference; by task if models are the same.

    NaN is a missing number. A method that reads no data has one number at every budget.
    """
    lines = [line for line in lines_of(result) if line.rule in ("-", "1")]
    printed = {(row.method, row.budget): row for row in recipe.printed}
    table = []
    for row in recipe.printed:
        named = [line for line in lines if row.method in (line.method, line.label)]
        line = next((line for line in named if row.budget in (0, line.budget)), Line("", "", "", 0, {}))
        base = printed.get(("target", row.budget)) or printed.get(("target", 0))
        gain = line.mean - base_of(lines, row.budget)
        paper_gain = row.true_mean - (base.true_mean if base else math.nan)
        known = {} if recipe.small else line.by_task
        shared = [task for task in row.values if task in known]
        table.append(
            {
                "method": row.method,
                "budget": row.budget,
                "measured": line.mean,
                "paper": row.true_mean,
                "gain": gain,
                "paper_gain": paper_gain,
                "difference": gain - paper_gain,
                "deviation": line.deviation,
                "paper_deviation": row.deviations.get("mean", math.nan),
                "tasks": {task: {"measured": known[task], "paper": row.values[task]} for task in shared},
                "marks": row.errors,
            }
        )
    return table


def orders(table: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The methods of `compare_with_paper` from best to worst at each budget; without the base models."""
    known = [row for row in table if not math.isnan(row["measured"]) and row["method"] not in ("source", "target")]
    found = []
    for budget in dict.fromkeys(row["budget"] for row in known if row["budget"]):
        rows = [row for row in known if row["budget"] == budget]
        measured, paper = (
            [row["method"] for row in sorted(rows, key=lambda row: -row[key])] for key in ("measured", "paper")
        )
        if len(rows) > 1:
            found.append({"budget": budget, "measured": measured, "paper": paper, "same": measured == paper})
    return found


def paper_rows(table: Sequence[Mapping[str, Any]]) -> Table:
    """The text of `compare_with_paper`; an asterisk marks errors of the paper."""
    tasks = list(dict.fromkeys(task for row in table for task in row["tasks"]))
    forms = {"gain": "+.1f", "paper_gain": "+.1f", "difference": "+.1f"}
    columns = ["method", "budget", *tasks, "mean", "paper", "gain", "paper's gain", "difference"]
    if not all(math.isnan(row["paper_deviation"]) for row in table):
        forms |= {"deviation": ".1f", "paper_deviation": ".1f"}
        columns += ["± seeds", "paper's ±"]
    rows = [columns]
    for row in table:
        shown = {
            task: f"{pair['measured']:.1f} ({pair['paper']:.1f}, {pair['measured'] - pair['paper']:+.1f})"
            for task, pair in row["tasks"].items()
        }
        cells = [shown.get(task, "–") for task in tasks]
        means = [number_text(row["measured"], ".1f"), number_text(row["paper"], ".1f") + ("*" if row["marks"] else "")]
        numbers = [number_text(row[key], form) for key, form in forms.items()]
        rows.append([row["method"], str(row["budget"] or "–"), *cells, *means, *numbers])
    return rows


def markdown(result: Comparing, recipe: Recipe = NO_RECIPE) -> str:
    """The comparison as Markdown: the table, the paper's numbers, the results of auto, and how it was made."""
    return render_markdown(
        recipe,
        {"": table_rows(result)},
        result.about,
        headed=bool(recipe.where),
        paper=compare_with_paper(result, recipe),
        summary=auto_scale_summary(result),
        stated=any(row.stated for row in result.rows),
    )


def render_markdown(recipe: Recipe, tables: Mapping[str, Table], about: Mapping[str, Any], **parts: Any) -> str:
    """The text of table.md; `parts` are the optional ones of its template."""
    environment = Environment(loader=PackageLoader(__package__, ""), trim_blocks=True, keep_trailing_newline=True)
    environment.globals |= {"paper_rows": paper_rows, "orders": orders}
    return environment.get_template("table.md.jinja").render(recipe=recipe, tables=tables, about=about, **parts)


def write_tables(result: Comparing, folder: Path, recipe: Recipe = NO_RECIPE, fingerprint: str | None = None) -> None:
    """The files of one comparison; results.json gets the fingerprint of its conditions, if it is known."""
    record: dict[str, Any] = {"comparison": asdict(result.comparison), "about": result.about}
    record |= {"rows": list(map(asdict, result.rows)), "auto": auto_scale_summary(result)}
    if fingerprint is not None:
        record["fingerprint"] = fingerprint
    if recipe.printed:
        table = compare_with_paper(result, recipe)
        record["paper"] = {"where": recipe.where, "small": recipe.small, "rows": table, "orders": orders(table)}
        write_csv(folder / "paper.csv", paper_rows(table))
    write_csv(folder / "table.csv", table_rows(result))
    (folder / "table.md").write_text(markdown(result, recipe), encoding="utf-8")
    (folder / "plot.svg").write_text(plot(result, recipe), encoding="utf-8")
    write_record(folder / RESULTS, record)


def write_csv(path: Path, table: Table) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(table)


def plot(result: Comparing, recipe: Recipe = NO_RECIPE) -> str:
    """Mean accuracy against the budget, a line per method and scale rule; bars where there is one budget.

    Only means over all tasks are drawn. Fine-tuned models are far above the rest: the legend gives their numbers.
    """
    comparison = result.comparison
    title = f"{recipe.title}: {comparison.pair}" if recipe.where else comparison.pair
    found = [line for line in lines_of(result) if not math.isnan(line.mean)]
    variants = {line.name: line.label for line in found if line.rule not in ("-", "1", comparison.scales[0])}
    if len(comparison.budgets) < 2:
        means = {line.name: line.mean for line in found}
        around = {line.name: line.deviation for line in found if line.deviation > 0}
        shown: dict[str, Any] = {"spread": around, "line": means.get("target"), "variants": variants, "form": ".1f"}
        return bar_chart(means, title=title, x_label="accuracy, %", **shown)
    lines: dict[str, dict[float, float]] = defaultdict(dict)
    spread: dict[str, dict[float, float]] = defaultdict(dict)
    fixed = [line for line in found if line.budget == 0 and line.method.startswith("fine-tuned ")]
    for line in (line for line in found if line not in fixed):
        for budget in (line.budget,) if line.budget else comparison.budgets:
            lines[line.name][budget], spread[line.name][budget] = line.mean, line.deviation
    return line_chart(
        lines,
        title=title,
        x_label="shots per class" if comparison.shots else "calibration samples",
        y_label="accuracy, %",
        spread=spread,
        variants=variants,
        notes=[f"{line.name}: {line.mean:.1f}" for line in fixed],
    )


def auto_scale_summary(result: Comparing) -> list[dict[str, Any]]:
    """Test accuracy at a chosen scale against scale 0, by method and rule; and the hold-out."""
    base = {(row.task, row.seed, row.budget): row.accuracy for row in result.rows if row.method == "target"}
    grouped: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in (row for row in result.rows if row.scale_rule in RULES):
        grouped[row.method, row.scale_rule].append(row)
    summary = []
    for (method, rule), rows in grouped.items():
        before = [  # a probed target depends on the budget
            base.get((row.task, row.seed, row.budget), base.get((row.task, row.seed, 0), math.nan)) for row in rows
        ]
        gains = [row.accuracy - found for row, found in zip(rows, before, strict=True)]
        summary.append(
            {
                "method": method,
                "rule": rule,
                "cells": len(rows),
                "picked_zero": sum(row.scale == 0 for row in rows),
                "helped": sum(gain > 0 for gain in gains),
                "hurt": sum(gain < 0 for gain in gains),
                "mean_gain": round(mean(gains), 2),
                "worst": round(min(gains), 2),
                "lowered_hold_out": sum((row.held_out_after or 0) < (row.held_out_before or 0) for row in rows),
            }
        )
    return summary
