"""Run recipes: everything is checked before any work, and cells are kept in a hidden file until the run is complete.

One capture of each (task, sampler, seed) serves every method, and every method gets the same samples, the same scale
rules and the same test split. Nothing is chosen by looking at test data.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tuneport.config import TransferConfig
from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.errors import CheckpointError, DataError, TuneportError, first_of
from tuneport.io.checkpoint import LARGEST_INDEX, read_json
from tuneport.io.output import check_new, claimed, new_folder
from tuneport.io.places import path_of
from tuneport.methods import get_method
from tuneport.models.base import Model
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model, pick_device
from tuneport.pipeline.transfer import prepare
from tuneport.report.provenance import package_version
from tuneport.report.record import to_json
from tuneport.runtime.resume import fingerprint
from tuneport.types import Events, Progress

from .cells import Task, run_cell
from .figures import figure_cell, write_figure
from .finetune import prepare_training, run_training
from .recipe import FIGURES, RECIPES, Recipe, model_exists, read_recipe
from .schema import Comparison
from .tables import RESULTS, Comparing, Row, write_tables

PASSES = ("captures", "forward", "backward")
Stage = Callable[[str, int, int], None]  # gets the name of a stage, the steps done and all its steps


def count_steps(stage: Stage | None, name: str, total: int) -> Progress:
    """A Progress that adds up the steps of a stage and reports them."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if stage is not None:
            stage(name, done, total)

    return advance


def told(events: Events) -> Stage:
    """A callback that tells the stages of a run as its steps."""
    name, done = "", 0

    def stage(now: str, count: int, total: int) -> None:
        nonlocal name, done
        if now != name or count < done:
            events.step(now, count=total)
            name, done = now, 0
        events.advance(count - done)
        done = count

    return stage


@dataclass(frozen=True)
class Cells:
    """The finished cells of a run that is not complete, in a hidden file next to its output: one JSON line each.

    The first line has the fingerprint of the recipe; nothing is used that was measured under other settings.
    """

    out: Path
    conditions: str

    @property
    def path(self) -> Path:
        return self.out.parent / f".{self.out.name}.tuneport-cells"

    def load(self) -> dict[str, dict[str, Any]]:
        """Finished cells by name; a line that is incomplete, changed or not a cell is left out."""
        found: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(self._whole_lines().splitlines()):
            try:
                content = json.loads(line)
                if not number and content["fingerprint"] != self.conditions:
                    raise CheckpointError(
                        f"{self.out} cannot be resumed: its cells were measured with other settings or versions. Give "
                        "the same recipe again, or start over without `resume=True`."
                    )
                if number and content.pop("sha256") == fingerprint(content):
                    found[content.pop("cell")] = content
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                if not number:  # the following cells may be of other settings
                    raise CheckpointError(f"{self.path} is damaged. Start over without `resume=True`.") from error
        return found

    def add(self, name: str, content: Mapping[str, Any]) -> None:
        """Append a finished cell, replacing an incomplete last line; it is on disk when this returns."""
        whole = self._whole_lines()
        fresh = [] if whole else [{"fingerprint": self.conditions}]
        cell = {"cell": name, **content}
        with self.path.open("ab") as file:
            file.truncate(len(whole))
            file.writelines(
                json.dumps(line).encode() + b"\n" for line in (*fresh, {**cell, "sha256": fingerprint(cell)})
            )
            file.flush()
            os.fsync(file.fileno())

    def _whole_lines(self) -> bytes:
        """The content up to the last complete line."""
        if self.path.is_symlink():
            raise CheckpointError(f"{self.path} is a link and is not written to. Remove it.")
        content = self.path.read_bytes() if self.path.is_file() else b""
        return content[: content.rfind(b"\n") + 1]


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
    note: Callable[[str], None] | None = None,
) -> Path:
    """Run a recipe and write its tables or figure to `out`; fine-tuned models that it makes go to `cache`.

    Everything is checked before any work. With `resume`, cells that an unfinished run has finished are not
    run again. The default cache is a folder next to the output, which is removed at the end. An output
    that holds what the recipe reads is refused, also with `overwrite`.
    """
    out, say = Path(out), note or (lambda _: None)
    read = [] if isinstance(recipe, Recipe) or str(recipe) in RECIPES else [recipe]
    check_new(out, overwrite or resume, inputs=read, marks=())
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(recipe, small=small, root=root)
    several = recipe.kind not in FIGURES and len(recipe.comparisons) > 1  # then each pair has a sub-folder
    marks = [f"{name}/{RESULTS}" for name in recipe.comparisons] if several else [RESULTS]
    if device is not None:
        parts = {name: replace(part, device=device) for name, part in recipe.comparisons.items()}
        recipe = replace(recipe, comparisons=parts)
    kept = Path(cache) if cache is not None else out.parent / f".{out.name}.tuneport-models"
    cells = Cells(out, _fingerprint(recipe))
    with claimed(out):
        if resume and _is_complete(out, marks, cells.conditions):
            say(f"{out} was complete already")
        else:
            check_new(out, overwrite, inputs=[*read, kept, *_inputs(recipe)], marks=marks)
            for line in plan_lines(recipe, kept):
                say(line)
            check_models(recipe)
            if not resume:
                cells.path.unlink(missing_ok=True)
            done = cells.load()
            if resume:
                say(f"{len(done)} finished cells are taken over" if done else "nothing to resume: starting over")
            made = make_finetunes(recipe, kept, stage=stage)
            results = {name: run_pair(made, name, cells, done, stage) for name in made.comparisons}
            with new_folder(out, overwrite=overwrite, marks=marks) as folder:
                _write(recipe, results, folder, cells.conditions, several=several)
        cells.path.unlink(missing_ok=True)
        if cache is None:
            shutil.rmtree(kept, ignore_errors=True)
    return out


def _is_complete(out: Path, marks: Iterable[str], conditions: str) -> bool:
    """True if `out` is the output of a run under these conditions."""
    try:
        found = [read_json(out / mark, "results of a recipe", limit=LARGEST_INDEX) for mark in marks]
    except CheckpointError:
        return False
    return all(content.get("fingerprint") == conditions for content in found)


def _write(recipe: Recipe, results: Mapping[str, Any], folder: Path, conditions: str, *, several: bool) -> None:
    """The files of a recipe, with the fingerprint of its conditions."""
    if recipe.kind in FIGURES:
        write_figure(recipe, results, folder, _machine(pick_device(recipe.comparison.device)), conditions)
        return
    for name, result in results.items():
        place = folder / name if several else folder
        place.mkdir(exist_ok=True)
        write_tables(result, place, recipe, conditions)


def _inputs(recipe: Recipe) -> Iterator[Path]:
    """Paths of the models, data and head files of a recipe; a head given by name is in a model's folder."""
    for part in recipe.comparisons.values():
        given = (part.source, part.target, *part.finetuned.values(), *part.reference.values(), *part.data.values())
        yield from (path_of(path) for path in given if path)
        yield from (Path(head) for head in part.heads.values() if Path(head).is_file())


def _fingerprint(recipe: Recipe) -> str:
    """Of all that the numbers depend on; they are the same on every device."""
    pairs = {name: {**asdict(part), "device": None} for name, part in recipe.comparisons.items()}
    versions = [package_version("tuneport"), torch.__version__]
    return fingerprint(json.loads(to_json({"kind": recipe.kind, "pairs": pairs, "versions": versions})))


def plan_lines(recipe: Recipe, cache: Path) -> Iterator[str]:
    """The plan of a recipe, in a few lines."""
    where = f" ({recipe.where})" if recipe.where else ""
    size = ", small variant" if recipe.small else ", as in the paper" if recipe.where else ""
    yield f"{recipe.title}{where}: {recipe.kind}{size}"
    for name, part in recipe.comparisons.items():
        label = name if len(recipe.comparisons) > 1 else "pair"
        yield f"  {label}: {' to '.join(filter(None, (part.source, part.target)))}; tasks {first_of(part.data)}"
        budgets = f"{'shots' if part.shots else 'samples'} {', '.join(map(str, part.budgets))}; "
        seeds = ", ".join(map(str, part.seeds))
        yield f"  {budgets if part.budgets else ''}seeds {seeds}; {len(cell_names(recipe.kind, part))} cells"
        for path, place, _ in wanted_finetunes(recipe.kind, part, cache):
            yield f"  {'found' if place.exists() else 'to be fine-tuned'}: {path}, kept as {place}"


def cell_names(kind: str, comparison: Comparison) -> list[tuple[str, str, int]]:
    """Task, sampler and seed of each cell."""
    seeds = comparison.seeds[:1] if kind == "drift" else comparison.seeds
    return [(task, sampler, seed) for task in comparison.data for sampler in comparison.samplers for seed in seeds]


def run_pair(
    recipe: Recipe, name: str, cells: Cells | None, done: Mapping[str, Mapping[str, Any]], stage: Stage | None
) -> Any:
    """All cells of one pair: the Comparing of a table, or the points of a figure."""
    comparison = recipe.comparisons[name]
    device = pick_device(comparison.device)
    started, seconds, counts = time.time(), 0.0, dict.fromkeys(PASSES, 0)
    found: list[dict[str, Any]] = []

    @functools.cache
    def models() -> list[Model]:
        return [open_model(path, device=device) for path in (comparison.source, comparison.target) if path]

    @functools.lru_cache(maxsize=1)
    def task_of(task: str) -> Task:
        return Task(comparison, models(), task)

    names = cell_names(recipe.kind, comparison)
    progress = count_steps(stage, "comparing", len(names))
    progress(0)
    for task, sampler, seed in names:
        label = "/".join((name, task, sampler, str(seed)))
        content = done.get(label)
        if content is None:
            began = time.time()
            if recipe.kind in FIGURES:
                rows, passes = figure_cell(recipe.kind, task_of(task), sampler, seed), dict.fromkeys(PASSES, 0)
            else:
                measured, passes = run_cell(task_of(task), sampler, seed)
                rows = list(map(asdict, measured))
            spent = round(time.time() - began, 2)
            content = json.loads(to_json({"rows": rows, "passes": passes, "seconds": spent}))
            if cells is not None:
                cells.add(label, content)
        found += content["rows"]
        counts = {key: counts[key] + content["passes"][key] for key in counts}
        seconds += content["seconds"]
        progress(1)
    if recipe.kind in FIGURES:
        return found
    spent = round(max(time.time() - started, seconds), 1)
    about = {"machine": _machine(device), "date": time.strftime("%Y-%m-%d"), "seconds": spent, **counts}
    return Comparing(comparison, tuple(Row(**row) for row in found), about)


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{name}, {device}, torch {torch.__version__}"


def check_models(recipe: Recipe) -> None:
    """Open the existing models and pair their layers, so that an unsuitable pair is refused before any work."""
    problems: list[str] = []
    for part in recipe.comparisons.values() if recipe.kind not in FIGURES else ():
        try:
            models = [open_model(path, device=pick_device(part.device)) for path in (part.source, part.target)]
        except TuneportError as error:
            problems.append(str(error))
            continue
        made = part.finetune is not None
        for task, path in ((task, path) for task, path in part.finetuned.items() if model_exists(path, made=made)):
            try:
                config = TransferConfig.of(device=part.device, scale=1.0)
                setup = prepare(models[0], path, models[1], part.data[task], config, signals=frozenset())
                for name in part.methods:
                    get_method(name).check(setup.plan)
                test = read_data(part.data[task], "test")
                if part.protocol == "zero-shot":
                    for model in models:
                        align_labels(test, choose_head(model, part.heads.get(task), test).classes)
            except TuneportError as error:
                problems.append(f"{task}: {error}")
    if problems:
        raise DataError("; ".join(text.rstrip(".") for text in dict.fromkeys(problems)) + ".")


def wanted_finetunes(
    kind: str, comparison: Comparison, cache: Path
) -> Iterator[tuple[str, Path, tuple[str, str, str]]]:
    """Missing fine-tuned models: the path in the recipe, the path in the cache, and (role, base, task)."""
    if comparison.finetune is None:
        return
    settings = [asdict(comparison.finetune), comparison.checkpoint_every]
    finetuned = dict.fromkeys(comparison.data, "") if kind == "drift" else comparison.finetuned
    wanted = [("finetuned", comparison.source, *item) for item in finetuned.items()]
    if kind != "drift":
        wanted += [("reference", comparison.target, *item) for item in comparison.reference.items()]
    for role, base, task, path in wanted:
        if not path or not model_exists(path, made=True):
            identity = [base, comparison.data[task], comparison.heads.get(task), *settings]
            name, digest = Path(base).name, fingerprint({"identity": identity})[:8]
            yield path or f"{name} on {task}", cache / f"{name}-{task}-{digest}", (role, base, task)


def make_finetunes(recipe: Recipe, cache: Path, *, only: str | None = None, stage: Stage | None = None) -> Recipe:
    """Fine-tune the missing models (or `only` one of them) into the cache; returns the recipe with their paths."""
    parts = {}
    for name, part in recipe.comparisons.items():
        places = {"finetuned": dict(part.finetuned), "reference": dict(part.reference)}
        for _, place, (role, base, task) in wanted_finetunes(recipe.kind, part, cache):
            places[role][task] = str(place)
            if part.finetune is None or place.exists() or only not in (None, place.name):
                continue
            cache.mkdir(parents=True, exist_ok=True)
            head = part.heads.get(task)
            training = prepare_training(base, part.data[task], part.finetune, head=head, device=part.device)
            progress = count_steps(stage, f"fine-tuning {place.name}", part.finetune.steps)
            run_training(training, place, checkpoint_every=part.checkpoint_every, progress=progress)
        parts[name] = replace(part, finetuned=places["finetuned"], reference=places["reference"])
    return replace(recipe, comparisons=parts)
