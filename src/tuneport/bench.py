"""Running recipes: many transfers and evaluations on equal terms, methods, budgets and seeds side by side.

A comparison measures each (task, sampler, seed) once: nested samples are added up budget by budget, one capture
serves every method, and every method gets the same samples, the same scale rule and the same test split. Nothing
is chosen by looking at test data. Finished cells are kept beside the output until the run is complete.

Also a command that needs neither typer nor rich: `python -m tuneport.bench RECIPE.toml --out DIR --small --root DIR`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .alignment import Statistics
from .data import Dataset, align_labels
from .errors import CheckpointError, DataError, TuneportError, first_of
from .evaluation import linear_probe
from .families import Head, Model, choose_head, open_model
from .figures import FIGURES, figure_cell, write_figure
from .finetuning import Schedule, batch_reader, finetune
from .methods import METHODS, Transfer, get_method
from .output import check_new_folder, claimed, new_folder
from .pipeline import measure_job, problem_of, transfer_auto
from .preparation import Job, PairedBatches, package_version, pick_device, prepare
from .recipe import Comparison, Recipe, make_comparison, make_recipe, read_recipe, there
from .report import to_json
from .resume import fingerprint
from .scaling import Scaled, fitting_samples
from .tables import Comparing, Row, auto_scale_summary, load, markdown, merge, save, table_rows, write_tables
from .task_vector import TaskVector
from .tasks import read_data
from .training import prepare_training, run_training

__all__ = [
    "Comparing",
    "Comparison",
    "Recipe",
    "Row",
    "auto_scale_summary",
    "compare",
    "load",
    "make_comparison",
    "make_recipe",
    "markdown",
    "merge",
    "plan_lines",
    "read_recipe",
    "run_recipe",
    "save",
    "table_rows",
]

Stage = Callable[[str, int, int], None]
Note = Callable[[str], None]
Score = Callable[[nn.Module], float]


@dataclass(frozen=True)
class Cells:
    """The finished cells of a run that is not complete, in a hidden file beside its output: one JSON line each.

    The first line has the fingerprint of the recipe; nothing is used that was measured under other settings.
    """

    out: Path
    conditions: str

    @property
    def path(self) -> Path:
        return self.out.parent / f".{self.out.name}.tuneport-cells"

    def load(self) -> dict[str, dict[str, Any]]:
        """Finished cells by name; a line that was cut off by a kill is left out."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return {}
        found: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(lines):
            try:
                content = json.loads(line)
                if number == 0 and content["fingerprint"] != self.conditions:
                    raise CheckpointError(
                        f"{self.out} cannot be resumed: its cells were measured with other settings or versions. Give "
                        "the same recipe again, or start over without --resume."
                    )
                if number:
                    found[content["cell"]] = content
            except (ValueError, KeyError, TypeError):
                continue
        return found

    def add(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep a finished cell; it is on disk when this returns."""
        fresh = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if fresh:
                file.write(json.dumps({"fingerprint": self.conditions}) + "\n")
            file.write(json.dumps({"cell": name, **content}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def run_recipe(
    recipe: Recipe | str | Path,
    out: str | Path,
    *,
    small: bool = False,
    root: str | Path | None = None,
    cache: str | Path | None = None,
    device: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    stage: Stage | None = None,
    note: Note | None = None,
) -> Path:
    """Run a recipe and write its tables or figure to `out`; fine-tuned models that it makes go to `cache`.

    Everything is checked before any work. With `resume`, cells that an unfinished run has finished are not
    run again. The cache is a folder beside the output unless given, and is then left alone at the end.
    """
    out, say = Path(out), note or (lambda _: None)
    check_new_folder(out, overwrite)
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(recipe, small=small, root=root)
    if device is not None:
        parts = {name: replace(part, device=device) for name, part in recipe.comparisons.items()}
        recipe = replace(recipe, comparisons=parts)
    kept = Path(cache) if cache is not None else out.parent / f".{out.name}.tuneport-models"
    for line in plan_lines(recipe, kept):
        say(line)
    _check_models(recipe)
    cells = Cells(out, fingerprint(json.loads(to_json(_conditions(recipe)))))
    with claimed(out):
        if not resume:
            cells.remove()
        done = cells.load()
        if resume:
            say(f"{len(done)} finished cells are taken over" if done else "nothing to resume: starting anew")
        made = make_finetunes(recipe, kept, stage=stage)
        results = {name: _run_pair(made, name, cells, done, stage) for name in made.comparisons}
        with new_folder(out, overwrite=overwrite) as folder:
            _write(recipe, results, folder)
        cells.remove()
        if cache is None:
            shutil.rmtree(kept, ignore_errors=True)
    return out


def _conditions(recipe: Recipe) -> dict[str, Any]:
    plain = {name: asdict(part) for name, part in recipe.comparisons.items()}
    for part in plain.values():
        part.pop("device")
    return {"kind": recipe.kind, "pairs": plain, "versions": [package_version("tuneport"), torch.__version__]}


def _write(recipe: Recipe, results: Mapping[str, Comparing | list[dict[str, Any]]], folder: Path) -> None:
    """The files of a recipe: one set, or a sub-folder per pair of a table."""
    tables = {name: result for name, result in results.items() if isinstance(result, Comparing)}
    for name, result in tables.items():
        place = folder if len(tables) == 1 else folder / name
        place.mkdir(exist_ok=True)
        write_tables(result, place, recipe)
    if not tables:
        points = {name: result for name, result in results.items() if not isinstance(result, Comparing)}
        write_figure(recipe, points, folder, _machine(pick_device(recipe.comparison.device)))


def plan_lines(recipe: Recipe, cache: Path) -> Iterator[str]:
    """What a recipe will do, in a few lines."""
    size = "small variant" if recipe.small else "as in the paper"
    yield f"{recipe.title}{f' ({recipe.where})' if recipe.where else ''}: {recipe.kind}, {size}"
    for name, part in recipe.comparisons.items():
        pair = f"{part.source} to {part.target}" if part.target else part.source
        yield f"  {name if len(recipe.comparisons) > 1 else 'pair'}: {pair}; tasks {first_of(part.data)}"
        budgets = (
            f"{'shots' if part.shots else 'samples'} {', '.join(map(str, part.budgets))}; " if part.budgets else ""
        )
        yield f"  {budgets}seeds {', '.join(map(str, part.seeds))}; {len(cell_names(recipe.kind, part))} cells"
        for path, place, _ in wanted_finetunes(recipe.kind, part, cache):
            yield f"  {'found' if place.exists() else 'to be fine-tuned'}: {path}, kept as {place}"


def cell_names(kind: str, comparison: Comparison) -> list[tuple[str, str, int]]:
    """Task, sampler and seed of each cell."""
    seeds = comparison.seeds[:1] if kind == "drift" else comparison.seeds
    return [(task, sampler, seed) for task in comparison.data for sampler in comparison.samplers for seed in seeds]


def _run_pair(
    recipe: Recipe, name: str, cells: Cells | None, done: Mapping[str, Mapping[str, Any]], stage: Stage | None
) -> Comparing | list[dict[str, Any]]:
    """All cells of one pair: rows of a table, or points of a figure."""
    comparison = recipe.comparisons[name]
    started = time.time()
    device = pick_device(comparison.device)
    opened: list[Model] = []
    judges: dict[str, Any] = {}
    found: list[dict[str, Any]] = []
    counts = {"captures": 0, "forward": 0, "backward": 0}
    names = cell_names(recipe.kind, comparison)
    seconds = 0.0
    for index, (task, sampler, seed) in enumerate(names):
        if stage is not None:
            stage("comparing", index, len(names))
        label = "/".join((name, task, sampler, str(seed)))
        content = done.get(label)
        if content is None:
            began = time.time()
            if not opened:
                opened = [open_model(path, device=device) for path in (comparison.source, comparison.target) if path]
            passes = dict.fromkeys(counts, 0)
            if recipe.kind in FIGURES:
                rows = figure_cell(recipe.kind, comparison, opened, task, sampler, seed)
            else:
                rows = [asdict(row) for row in _run_cell(comparison, opened, task, sampler, seed, passes, judges)]
            content = {"rows": rows, "passes": passes, "seconds": round(time.time() - began, 2)}
            if cells is not None:
                cells.add(label, json.loads(to_json(content)))
        found += content["rows"]
        counts = {key: counts[key] + content["passes"][key] for key in counts}
        seconds += content["seconds"]
    if stage is not None:
        stage("comparing", len(names), len(names))
    if recipe.kind in FIGURES:
        return found
    about = {
        "machine": _machine(device),
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(max(time.time() - started, seconds), 1),
        **counts,
    }
    return Comparing(comparison, tuple(Row(**row) for row in found), about)


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, {device}, torch {torch.__version__}"


def compare(comparison: Comparison, *, stage: Stage | None = None) -> Comparing:
    """Run a comparison: every task, sampler, seed, budget and method."""
    recipe = Recipe({"1": comparison})
    _check_models(recipe)
    result = _run_pair(recipe, "1", None, {}, stage)
    assert isinstance(result, Comparing)
    return result


def _check_models(recipe: Recipe) -> None:
    """Open what is there and pair the layers, so that a pair that cannot be served is told before any work."""
    problems: list[str] = []
    for part in recipe.comparisons.values():
        if recipe.kind in FIGURES:
            continue
        try:
            models = [open_model(path, device=pick_device(part.device)) for path in (part.source, part.target)]
        except TuneportError as error:
            problems.append(str(error))
            continue
        for task, path in part.finetuned.items():
            if not there(path):
                continue
            try:
                job = prepare(models[0], path, models[1], part.data[task], method="naive", device=part.device)
                for name in part.methods:
                    get_method(name).check(job.plan)
                test = read_data(part.data[task], "test")
                if part.protocol == "zero-shot":
                    for model in models:
                        about = (test.name, test.classes, test.prompts)
                        align_labels(test, choose_head(model, part.heads.get(task), *about).classes)
            except TuneportError as error:
                problems.append(f"{task}: {error}")
    if problems:
        raise DataError("; ".join(text.rstrip(".") for text in dict.fromkeys(problems)) + ".")


def wanted_finetunes(
    kind: str, comparison: Comparison, cache: Path
) -> Iterator[tuple[str, Path, tuple[str, str, str]]]:
    """Fine-tuned models that are not where the recipe says: that place, where it will be made, and how."""
    if comparison.finetune is None:
        return
    roles = [("finetuned", comparison.source, comparison.finetuned)]
    roles += [("reference", comparison.target, comparison.reference)]
    if kind == "drift":
        roles = [("finetuned", comparison.source, dict.fromkeys(comparison.data, ""))]
    for role, base, paths in roles:
        for task, path in paths.items():
            if path and there(path):
                continue
            schedule = asdict(comparison.finetune)
            identity = [base, comparison.data[task], comparison.heads.get(task), schedule, comparison.checkpoint_every]
            digest = fingerprint({"identity": identity})[:8]
            yield (
                path or f"{Path(base).name} on {task}",
                cache / f"{Path(base).name}-{task}-{digest}",
                (role, base, task),
            )


def make_finetunes(recipe: Recipe, cache: Path, *, only: str | None = None, stage: Stage | None = None) -> Recipe:
    """Fine-tune what is wanted and not in the cache yet (or `only` one of it); the recipe with the places of all."""
    parts = {}
    for name, part in recipe.comparisons.items():
        places: dict[str, dict[str, str]] = {"finetuned": dict(part.finetuned), "reference": dict(part.reference)}
        for _, place, (role, base, task) in wanted_finetunes(recipe.kind, part, cache):
            assert part.finetune is not None
            places[role][task] = str(place)
            if place.exists() or only not in (None, place.name):
                continue
            cache.mkdir(parents=True, exist_ok=True)
            training = prepare_training(
                base, part.data[task], part.finetune, head=part.heads.get(task), device=part.device
            )
            done = 0

            def progress(count: int, label: str = place.name, total: int = part.finetune.steps) -> None:
                nonlocal done
                done += count
                if stage is not None:
                    stage(f"fine-tuning {label}", done, total)

            run_training(training, place, checkpoint_every=part.checkpoint_every, progress=progress)
        parts[name] = replace(part, finetuned=places["finetuned"], reference=places["reference"])
    return replace(recipe, comparisons=parts)


@dataclass(frozen=True, eq=False)
class Judge:
    """A task's test split, ready to be scored with one model's head; small sets are prepared once."""

    model: Model
    head: Head
    labels: Tensor
    batch_of: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]

    def accuracy(self, module: nn.Module) -> float:
        right = 0
        with torch.inference_mode():
            for rows in torch.arange(len(self.labels)).split(256):
                batch, labels = self.batch_of(rows)
                right += int((self.head.scores(self.model, module, batch).argmax(-1) == labels).sum())
        return 100.0 * right / len(self.labels)


def _judge(comparison: Comparison, model: Model, task: str) -> Judge:
    test = _test_split(comparison, task)
    head = choose_head(model, comparison.heads.get(task), test.name, test.classes, test.prompts)
    aligned = align_labels(test, head.classes)
    return Judge(model, head, torch.as_tensor(aligned.labels), batch_reader(model, aligned))


def _test_split(comparison: Comparison, task: str) -> Dataset:
    """The test split, or a seeded part of it where the recipe asks for fewer samples."""
    test = read_data(comparison.data[task], "test")
    if comparison.test_samples is None or comparison.test_samples >= len(test):
        return test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    return test.subset(order[: comparison.test_samples].numpy())


def _run_cell(
    comparison: Comparison,
    models: Sequence[Model],
    task: str,
    sampler: str,
    seed: int,
    captures: dict[str, int],
    judges: dict[str, Any],
) -> Iterator[Row]:
    """All rows of one (task, sampler, seed), from one pass over the largest set of samples."""
    source, target = models
    methods = {name: get_method(name) for name in comparison.methods}
    signals = frozenset().union(*(method.signals for method in methods.values()))
    job, budgets = _largest_job(comparison, source, target, task, sampler, seed, signals)
    blank = Row(task, "", "-", 0, seed, 0.0)
    probing = comparison.protocol == "linear-probe"
    head: Head | None = None
    if probing:
        if judges.get("task") != task:
            judges.update(task=task, test=_test_split(comparison, task))
    else:
        if judges.get("task") != task:  # one task at a time is kept
            judges.clear()
            judges.update(task=task, judge=_judge(comparison, target, task))
        head = judges["judge"].head
        yield from _fixed_rows(comparison, source, judges, blank)
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
        score = _probe(chosen, target, judges["test"]) if probing else judges["judge"].accuracy
        blank = replace(blank, budget=budget, sampler=sampler)
        if probing:
            own = _probe(chosen, source, judges["test"])
            yield replace(blank, method="source", accuracy=own(source.module))
            yield replace(blank, method="target", accuracy=score(target.module))
        warm: TaskVector | None = None
        for name in methods:
            for row, vector in _method_rows(comparison, chosen, solver(name), prefix, score):
                yield replace(row, task=task, method=name, budget=budget, seed=seed, sampler=sampler)
                if name == comparison.warm_start and row.scale_rule == comparison.scales[0]:
                    warm = (row.scale or 0.0) * vector
        if head is not None:
            yield from _finetuning_rows(comparison, chosen, head, blank, warm, score)


def _fixed_rows(comparison: Comparison, source: Model, judges: dict[str, Any], blank: Row) -> Iterator[Row]:
    """The target as it is, and the fine-tuned models; measured once per task."""
    task, judge = blank.task, judges["judge"]
    if "fixed" not in judges:
        rows = [replace(blank, method="target", accuracy=judge.accuracy(judge.model.module))]
        if task in comparison.reference:
            tuned = open_model(comparison.reference[task], device=judge.model.device)
            rows.append(replace(blank, method="fine-tuned target", accuracy=judge.accuracy(tuned.module)))
        elif task in comparison.stated:
            rows.append(
                replace(blank, method="fine-tuned target", accuracy=float(comparison.stated[task]), stated=True)
            )
        if comparison.source_rows:
            own = _judge(comparison, source, task)
            tuned = open_model(comparison.finetuned[task], device=source.device)
            rows.append(replace(blank, method="fine-tuned source", accuracy=own.accuracy(tuned.module)))
        judges["fixed"] = rows
    yield from (replace(row, seed=blank.seed) for row in judges["fixed"])


def _probe(job: Job, model: Model, test: Dataset) -> Score:
    """Accuracy of a linear probe that is trained on the samples that made the maps, and no others."""
    assert isinstance(job.batches, PairedBatches)
    train = job.batches.dataset.subset(job.batches.indices)
    return lambda module: linear_probe(model.with_module(module), train, test).accuracy


def _largest_job(
    comparison: Comparison,
    source: Model,
    target: Model,
    task: str,
    sampler: str,
    seed: int,
    signals: frozenset[str],
) -> tuple[Job, dict[int, int]]:
    """A job over the largest budget, and how many of its (nested) samples each budget takes."""
    shots = bool(comparison.shots)
    budgets = comparison.budgets
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
        sampler=sampler,
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
    accuracy: Score,
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
    blank: Row,
    warm: TaskVector | None,
    accuracy: Score,
) -> Iterator[Row]:
    """Few-shot fine-tuning of the target on the same samples, from its own weights and from the ported ones."""
    assert isinstance(job.batches, PairedBatches)
    samples: Dataset = job.batches.dataset.subset(job.batches.indices)
    for steps in comparison.steps:
        schedule = Schedule(steps, learning_rate=comparison.learning_rate, seed=blank.seed)
        for words, vector in (("fine-tuning", None), (f"fine-tuning from {comparison.warm_start}", warm)):
            if words != "fine-tuning" and vector is None:
                continue
            with Scaled(job.target.module, vector if vector is not None else TaskVector({})) as start:
                start.set(1.0)
                *_, (_, module) = finetune(job.target, head, samples, schedule)
            yield replace(blank, method=f"{words}, {steps} steps", accuracy=accuracy(module))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without typer and rich: 0 done, 1 something is wrong with the input."""
    parser = argparse.ArgumentParser(prog="python -m tuneport.bench", description="Run a recipe.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--device")
    for flag in ("small", "resume", "overwrite"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = vars(parser.parse_args(arguments))

    def tell(*words: object) -> None:
        print(*words, file=sys.stderr, flush=True)

    try:
        out = run_recipe(options.pop("recipe"), options.pop("out"), stage=tell, note=tell, **options)
    except TuneportError as error:
        tell(f"{type(error).__name__}: {error}")
        return 1
    print((out / "table.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
