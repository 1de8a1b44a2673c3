"""The paper's figures: similarity before and after alignment, outputs against the fine-tuned target, drift, cost.

A cell gives points (plot, series, x, value) of one task and seed; a figure shows their means over tasks and seeds.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tuneport.config import TransferConfig
from tuneport.data.samplers import select
from tuneport.data.tasks import read_data
from tuneport.errors import DataError
from tuneport.measure.objectives import OBJECTIVES, forward_only
from tuneport.measure.samples import DatasetSamples
from tuneport.measure.signals import INPUT
from tuneport.methods import get_method
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model
from tuneport.models.weights import Scaled
from tuneport.pairing import pair_layers
from tuneport.pipeline.solve import measure, problem_of
from tuneport.pipeline.transfer import run
from tuneport.report.record import write_record
from tuneport.report.summary import number_text
from tuneport.task_vectors.vector import TaskVector
from tuneport.training.loop import Schedule
from tuneport.types import Sides

from .cells import Task, measurement_of
from .charts import bar_chart, line_chart
from .cost import count_flops, count_parameters, paper_cost
from .finetune import CHECKPOINTS, finetune
from .likeness import average_by_block, compare_layers, compare_outputs, measure_drift
from .recipe import Recipe
from .tables import RESULTS, Table, render_markdown, write_csv

Point = dict[str, Any]
Means = Mapping[str, Mapping[float, float]]  # by series and x

SHOWN = 256  # test images that outputs are compared on, unless the recipe says otherwise
TIMED_STEPS = 6
SIMILARITIES = {  # what `compare_layers` calls each series
    "CKA": "cka",
    "cosine before": "cosine_before",
    "cosine after": "cosine_after",
    "cosine after, unseen samples": "cosine_held_out",
}
AXES = {
    "similarity": ("block", "similarity"),
    "output-similarity": ("block", "cosine to the fine-tuned target"),
    "direction": ("step", "1 - cosine to the base's input"),
    "magnitude": ("step", "relative change of length"),
}


def figure_cell(kind: str, task: Task, sampler: str, seed: int) -> list[Point]:
    """The points of one task and seed."""
    cell = {"similarity": _similarity, "output-similarity": _outputs, "drift": _drift, "cost": _cost}[kind]
    return [
        {"task": task.name, "seed": seed, "plot": plot, "series": series, "x": x, "value": value}
        for plot, series, x, value in cell(task, sampler, seed)
    ]


Points = Iterator[tuple[str, str, float, float | None]]  # plot, series, x, value


def _similarity(task: Task, sampler: str, seed: int) -> Points:
    """CKA and cosine of layer inputs by block; the maps come from N samples, and are tried on N others."""
    (source, target), comparison = task.models, task.comparison
    data = read_data(comparison.data[task.name], "train")
    count = comparison.budgets[-1]
    both = select(data, samples=min(2 * count, len(data)), sampler=sampler, seed=seed)
    batches, held_out = (
        DatasetSamples(Sides(source, target), data, rows, None, comparison.batch_size, OBJECTIVES["classification"])
        for rows in (both[:count], both[count:])
    )
    found = compare_layers(
        source.module,
        target.module,
        pair_layers(source.architecture.layers, target.architecture.layers).pairs,
        batches,
        source_loss=forward_only(source),
        target_loss=forward_only(target),
        signals=(INPUT,),
        held_out=held_out if len(both) > count else (),
    )
    for name, key in SIMILARITIES.items():
        for block, value in average_by_block(found, key).items():
            yield "similarity", name, block, value


def _outputs(task: Task, sampler: str, seed: int) -> Points:
    """Cosine of layer outputs to those of the fine-tuned target, for the target and for each method's result."""
    target, comparison = task.models[1], task.comparison
    reference = open_model(comparison.reference[task.name], device=target.device)
    shown = read_data(comparison.data[task.name], "test")
    shown = shown.subset(select(shown, samples=min(comparison.test_samples or SHOWN, len(shown)), seed=0))
    methods = {name: get_method(name) for name in comparison.methods}
    setup = task.setup(sampler, seed, frozenset().union(*(method.signals for method in methods.values())))
    measurement = measurement_of(setup)
    problem = problem_of(measurement, setup.change.vector, measure(measurement))
    for name in ("target", *methods):
        change = TaskVector({}) if name == "target" else methods[name].transfer(problem).task_vector
        with Scaled(target.module, change) as scaled:
            scaled.set(1.0)
            found = compare_outputs(target.with_module(scaled.module), reference, shown)
        for block, value in average_by_block(found, "cosine_before").items():
            yield "output-similarity", name, block, value


def _drift(task: Task, sampler: str, seed: int) -> Points:
    """Direction and length of layer inputs along the fine-tuning trajectory, by block."""
    base, comparison = task.models[0], task.comparison
    tuned = Path(comparison.finetuned[task.name])
    folders = sorted((tuned / CHECKPOINTS).glob("step-*"))
    if not folders:
        raise DataError(f"{tuned} has no {CHECKPOINTS}: fine-tune with checkpoint_every.")
    data = read_data(comparison.data[task.name], "train")
    count = comparison.budgets[-1] if comparison.budgets else 100
    shown = data.subset(select(data, samples=min(count, len(data)), sampler=sampler, seed=seed))
    steps = ((int(folder.name.partition("-")[2]), open_model(folder, device=base.device).module) for folder in folders)
    found = measure_drift(base, steps, shown)
    for step in dict.fromkeys(item.step for item in found):
        here = [item for item in found if item.step == step]
        for plot in ("direction", "magnitude"):
            for block, value in average_by_block(here, plot).items():
                yield plot, f"block {block}", step, value


def _cost(task: Task, sampler: str, seed: int) -> Points:
    """Cost of a transfer and of fine-tuning: FLOP by the paper's rule and as counted, and seconds on this machine."""
    target, comparison = task.models[1], task.comparison
    method = comparison.methods[0]
    setup = task.setup(sampler, seed, get_method(method).signals)
    measurement, change = measurement_of(setup), setup.change.vector
    seconds = run(setup, TransferConfig.of(method=method, scale=1.0)).record["seconds_by_stage"]
    steps = comparison.steps[0] if comparison.steps else 2000
    train = read_data(comparison.data[task.name], "train")
    head = choose_head(target, comparison.heads.get(task.name), train)
    few = train.subset(range(min(128, len(train))))
    list(finetune(target, head, few, Schedule(1)))  # to warm up
    started = time.perf_counter()
    list(finetune(target, head, few, Schedule(TIMED_STEPS)))
    one = (time.perf_counter() - started) / TIMED_STEPS
    sides = zip(("source", "target"), setup.models, strict=True)
    rows: dict[str, float] = {f"parameters of the {side}": count_parameters(model) for side, model in sides}
    rows |= {f"the paper's estimate, FLOP: {name}": flops for name, flops in paper_cost(measurement).items()}
    rows |= {
        f"counted by torch, FLOP: {name}": flops for name, flops in count_flops(measurement, change, method).items()
    }
    rows |= {
        "seconds of measuring": seconds["measure"],
        "seconds of alignment and transport": seconds["transport"],
        f"seconds of {steps} fine-tuning steps of {len(few)} samples, from {TIMED_STEPS}": one * steps,
    }
    for name, value in rows.items():
        yield "cost", name, comparison.budgets[-1], float(value)


def write_figure(
    recipe: Recipe, points: Mapping[str, Sequence[Point]], folder: Path, machine: str, fingerprint: str
) -> None:
    """points.csv, results.json, table.md and an SVG per plot; `points` are by pair."""
    rows = [{"pair": pair, **point} for pair, found in points.items() for point in found]
    write_csv(folder / "points.csv", [list(rows[0]), *([str(value) for value in row.values()] for row in rows)])
    values: dict[str, dict[str, dict[float, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        series = values[row["plot"]][f"{row['pair']}: {row['series']}" if len(points) > 1 else row["series"]]
        if row["value"] is not None:
            series[row["x"]].append(row["value"])
    means = {
        plot: {name: {x: mean(found) for x, found in sorted(line.items())} for name, line in series.items()}
        for plot, series in values.items()
    }
    made = {"machine": machine, "date": time.strftime("%Y-%m-%d")}
    tables = {plot: _table(plot, lines) for plot, lines in means.items()}
    text = render_markdown(recipe, tables, made, headed=True, tasks=dict.fromkeys(row["task"] for row in rows))
    (folder / "table.md").write_text(text, encoding="utf-8")
    about = {"title": recipe.title, "where": recipe.where, "kind": recipe.kind, "small": recipe.small}
    record = {"recipe": about, "machine": machine, "fingerprint": fingerprint, "means": means, "points": rows}
    draw(recipe.title, means, folder)
    write_record(folder / RESULTS, record)


def _table(plot: str, lines: Means) -> Table:
    if plot == "cost":
        rows = [[name, f"{value:.4g}"] for name, values in lines.items() for value in values.values()]
        return [["", "value"], *rows]
    ticks = sorted({tick for values in lines.values() for tick in values})
    rows = [[f"{tick:g}", *(number_text(values.get(tick), ".3f") for values in lines.values())] for tick in ticks]
    return [[AXES[plot][0], *lines], *rows]


def draw(title: str, means: Mapping[str, Means], folder: Path) -> None:
    """An SVG per plot, from the means that results.json keeps."""
    for plot, lines in means.items():
        if plot == "cost":
            seconds = {name: value for name, values in lines.items() for value in values.values() if "seconds" in name}
            named = {name.removeprefix("seconds of "): value for name, value in seconds.items()}
            drawn = bar_chart(named, title=title, x_label="seconds on this machine")
        else:
            first = next(iter(lines)).partition(": ")[0]
            twins = {name: f"{first}: {name.partition(': ')[2]}" for name in lines if ": " in name}
            variants = {name: twin for name, twin in twins.items() if twin != name and twin in lines}
            x_label, y_label = AXES[plot]
            drawn = line_chart(lines, title=title, x_label=x_label, y_label=y_label, variants=variants)
        name = "plot.svg" if len(means) == 1 else f"plot-{plot}.svg"
        (folder / name).write_text(drawn, encoding="utf-8")
