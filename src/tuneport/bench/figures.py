"""The paper's figures: similarity before and after alignment, outputs against the fine-tuned target, drift, cost.

A cell gives points (plot, series, x, value) of one task and seed; a figure shows their means over tasks and seeds.
The numbers come from `measure.likeness` and `runtime.cost`.
"""

from __future__ import annotations

import math
import statistics as mean_and_deviation
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..data.samplers import select
from ..data.tasks import read_data
from ..errors import DataError
from ..job import Drawn
from ..measure.likeness import average_by_block, compare_layers, compare_outputs, measure_drift
from ..measure.objectives import OBJECTIVES, forward_only
from ..measure.signals import INPUT
from ..methods import get_method
from ..models.base import Model
from ..models.heads import choose_head
from ..models.open import open_model
from ..pairing import pair_layers
from ..pipeline.scale import Scaled
from ..pipeline.statistics import measure_job, problem_of
from ..pipeline.transfer import run
from ..report.record import to_json
from ..runtime.cost import cost_of
from ..training.finetune import CHECKPOINTS, Schedule, finetune
from ..types import Sides
from .cells import prepare_task
from .charts import bar_chart, line_chart
from .recipe import Recipe
from .schema import Comparison
from .tables import RESULTS, grid, write_csv

Point = dict[str, Any]

SHOWN = 256  # test images that outputs are compared on, unless the recipe says otherwise
TIMED_STEPS = 6
AXES = {
    "similarity": ("block", "similarity"),
    "output-similarity": ("block", "cosine to the fine-tuned target"),
    "direction": ("step", "1 - cosine to the base's input"),
    "magnitude": ("step", "relative change of length"),
}


def figure_cell(
    kind: str, comparison: Comparison, models: Sequence[Model], task: str, sampler: str, seed: int
) -> list[Point]:
    """The points of one task and seed."""
    cell = {"similarity": _similarity, "output-similarity": _outputs, "drift": _drift, "cost": _cost}[kind]
    return [{"task": task, "seed": seed, **point} for point in cell(comparison, models, task, sampler, seed)]


def _similarity(comparison: Comparison, models: Sequence[Model], task: str, sampler: str, seed: int) -> Iterator[Point]:
    """CKA and cosine of layer inputs by block; the maps come from N samples, and are tried on N others."""
    source, target = models
    data = read_data(comparison.data[task], "train")
    count = comparison.budgets[-1]
    both = select(data, samples=min(2 * count, len(data)), sampler=sampler, seed=seed)
    batches, held_out = (
        Drawn(Sides(source, target), data, rows, None, comparison.batch_size, OBJECTIVES["classification"])
        for rows in (both[:count], both[count:])
    )
    found = compare_layers(
        source.module,
        target.module,
        pair_layers(source.layers, target.layers).pairs,
        batches,
        source_loss=forward_only(source),
        target_loss=forward_only(target),
        signals=(INPUT,),
        held_out=held_out if len(both) > count else (),
    )
    series = {
        "CKA": "cka",
        "cosine before": "cosine_before",
        "cosine after": "cosine_after",
        "cosine after, unseen samples": "cosine_held_out",
    }
    for name, key in series.items():
        for block, value in average_by_block(found, key).items():
            yield {"plot": "similarity", "series": name, "x": block, "value": value}


def _outputs(comparison: Comparison, models: Sequence[Model], task: str, sampler: str, seed: int) -> Iterator[Point]:
    """Cosine of layer outputs to those of the fine-tuned target, for the target and for each method's result."""
    target = models[1]
    reference = open_model(comparison.reference[task], device=target.device)
    shown = read_data(comparison.data[task], "test")
    shown = shown.subset(select(shown, samples=min(comparison.test_samples or SHOWN, len(shown)), seed=0))
    methods = {name: get_method(name) for name in comparison.methods}
    signals = frozenset().union(*(method.signals for method in methods.values()))
    count = comparison.budgets[-1]
    job = prepare_task(comparison, models, task, signals, samples=count, sampler=sampler, seed=seed)
    measured = measure_job(job, signals=signals)
    for name in ("target", *methods):
        if name == "target":
            found = compare_outputs(target, reference, shown)
        else:
            moved = methods[name].transfer(problem_of(job, measured))
            with Scaled(target.module, moved.task_vector) as scaled:
                scaled.set(1.0)
                found = compare_outputs(target.with_module(scaled.module), reference, shown)
        for block, value in average_by_block(found, "cosine_before").items():
            yield {"plot": "output-similarity", "series": name, "x": block, "value": value}


def _drift(comparison: Comparison, models: Sequence[Model], task: str, sampler: str, seed: int) -> Iterator[Point]:
    """Direction and length of layer inputs along the fine-tuning trajectory, by block."""
    base = models[0]
    folders = sorted((Path(comparison.finetuned[task]) / CHECKPOINTS).glob("step-*"))
    if not folders:
        raise DataError(f"{comparison.finetuned[task]} has no {CHECKPOINTS}: fine-tune with checkpoint_every.")
    data = read_data(comparison.data[task], "train")
    count = comparison.budgets[-1] if comparison.budgets else 100
    shown = data.subset(select(data, samples=min(count, len(data)), sampler=sampler, seed=seed))
    steps = ((int(folder.name.partition("-")[2]), open_model(folder, device=base.device).module) for folder in folders)
    found = measure_drift(base, steps, shown)
    for step in dict.fromkeys(item.step for item in found):
        here = [item for item in found if item.step == step]
        for plot in ("direction", "magnitude"):
            for block, value in average_by_block(here, plot).items():
                yield {"plot": plot, "series": f"block {block}", "x": step, "value": value}


def _cost(comparison: Comparison, models: Sequence[Model], task: str, sampler: str, seed: int) -> Iterator[Point]:
    """Cost of a transfer and of fine-tuning: FLOP by the paper's rule and as counted, and seconds on this machine."""
    target = models[1]
    count = comparison.budgets[-1]
    job = prepare_task(comparison, models, task, comparison.methods[0], samples=count, sampler=sampler, seed=seed)
    cost, seconds = cost_of(job), run(job, comparison.methods[0]).record["seconds_by_stage"]
    steps = comparison.steps[0] if comparison.steps else 2000
    train = read_data(comparison.data[task], "train")
    head = choose_head(target, comparison.heads.get(task), train)
    few = train.subset(range(min(128, len(train))))
    list(finetune(target, head, few, Schedule(1)))  # to warm up
    started = time.perf_counter()
    list(finetune(target, head, few, Schedule(TIMED_STEPS)))
    one = (time.perf_counter() - started) / TIMED_STEPS
    rows: dict[str, Any] = {f"parameters of the {side}": count for side, count in cost["parameters"].items()}
    rows |= {f"the paper's estimate, FLOP: {name.replace('_', ' ')}": flops for name, flops in cost["paper"].items()}
    rows |= {f"counted for this plan, FLOP: {name}": flops for name, flops in (cost["counted"] or {}).items()}
    rows |= {
        "seconds of measuring": seconds["measure"],
        "seconds of alignment and transport": seconds["transport"],
        f"seconds of {steps} fine-tuning steps of {len(few)} samples, from {TIMED_STEPS}": one * steps,
    }
    for name, value in rows.items():
        yield {"plot": "cost", "series": name, "x": comparison.budgets[-1], "value": float(value)}


def write_figure(recipe: Recipe, points: Mapping[str, Sequence[Point]], folder: Path, machine: str) -> None:
    """points.csv, results.json, table.md and an SVG per plot."""
    several = len(points) > 1
    rows = [{"pair": pair, **point} for pair, found in points.items() for point in found]
    columns = ["pair", "task", "seed", "plot", "series", "x", "value"]
    write_csv(folder / "points.csv", columns, [[str(row[column]) for column in columns] for row in rows])
    text = [f"# {recipe.title}", ""]
    size = "Small variant." if recipe.small else "Models and tasks of the paper."
    text += [" ".join(filter(None, (f"{recipe.where} of the paper." if recipe.where else "", size, recipe.about))), ""]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    text += [f"Means over tasks ({', '.join(tasks)}) and seeds.", ""]
    plots = list(dict.fromkeys(row["plot"] for row in rows))
    means: dict[str, dict[str, dict[float, float]]] = {}
    for plot in plots:
        found = [row for row in rows if row["plot"] == plot]
        lines = {(f"{row['pair']}: {row['series']}" if several else row["series"]): row for row in found}
        ticks = sorted({row["x"] for row in found})
        means[plot] = {
            name: {tick: _mean(found, first, tick) for tick in ticks if not math.isnan(_mean(found, first, tick))}
            for name, first in lines.items()
        }
        text += ([f"## {plot}", ""] if len(plots) > 1 else []) + _table(plot, means[plot], ticks) + [""]
    draw(recipe.title, means, folder)
    text += [f"- machine: {machine}", f"- date: {time.strftime('%Y-%m-%d')}"]
    (folder / "table.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    about = {"title": recipe.title, "where": recipe.where, "kind": recipe.kind, "small": recipe.small}
    record = {"recipe": about, "machine": machine, "means": means, "points": rows}
    (folder / RESULTS).write_text(to_json(record) + "\n", encoding="utf-8")


def _mean(points: Sequence[Point], like: Point, tick: float) -> float:
    keys = ("pair", "series")
    values = [
        row["value"]
        for row in points
        if row["x"] == tick and all(row[key] == like[key] for key in keys) and row["value"] is not None
    ]
    return mean_and_deviation.mean(values) if values else math.nan


def _table(plot: str, means: Mapping[str, Mapping[float, float]], ticks: Sequence[float]) -> list[str]:
    if plot == "cost":
        return grid(["", "value"], [[name, f"{next(iter(values.values())):.4g}"] for name, values in means.items()])
    label = AXES[plot][0]
    rows = [
        [f"{tick:g}", *(f"{values[tick]:.3f}" if tick in values else "–" for values in means.values())]
        for tick in ticks
    ]
    return grid([label, *means], rows)


def draw(title: str, means: Mapping[str, Mapping[str, Mapping[float, float]]], folder: Path) -> None:
    """An SVG per plot, from the means that results.json keeps."""
    for plot, series in means.items():
        name = "plot.svg" if len(means) == 1 else f"plot-{plot}.svg"
        (folder / name).write_text(_drawn(title, plot, series), encoding="utf-8")


def _drawn(title: str, plot: str, means: Mapping[str, Mapping[float, float]]) -> str:
    if plot == "cost":
        seconds = {name: next(iter(values.values())) for name, values in means.items() if "seconds" in name}
        named = {name.removeprefix("seconds of "): value for name, value in seconds.items()}
        return bar_chart(named, title=title, x_label="seconds on this machine")
    x_label, y_label = AXES[plot]
    ticks = sorted({tick for values in means.values() for tick in values})
    lines = {name: [values.get(tick, math.nan) for tick in ticks] for name, values in means.items()}
    first = next(iter(lines)).partition(": ")[0]
    twins = {name: f"{first}: {name.partition(': ')[2]}" for name in lines if ": " in name}
    variants = {name: twin for name, twin in twins.items() if twin != name and twin in lines}
    return line_chart(lines, ticks, title=title, x_label=x_label, y_label=y_label, variants=variants)
