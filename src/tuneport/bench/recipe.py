"""Recipes: what to measure, as a TOML file that is checked whole before anything runs.

A recipe names its models and data by paths under a root that the reader of the file gives, so that nothing in it
belongs to one machine. Its `[small]` table replaces keys by others for a run on small models. Unknown keys,
wrong types, unknown names and wrong numbers are all told at once.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..data.dataset import Dataset
from ..data.samplers import SAMPLERS, select
from ..data.tasks import read_data, split_reference
from ..errors import DataError, TuneportError, first_of, unknown_name
from ..io.hub import looks_like_hub_id
from ..measure.accuracy import PROTOCOLS
from ..methods import get_method
from ..models.open import path_of
from ..pipeline.transfer import check_scale
from ..training.finetune import Schedule

KINDS: dict[str, tuple[str, ...]] = {  # what a recipe makes, and the keys that it needs for that
    "comparison": ("source", "target", "finetuned", "data"),
    "similarity": ("source", "target", "data"),
    "output-similarity": ("source", "target", "finetuned", "reference", "data"),
    "drift": ("source", "data", "finetune"),
    "cost": ("source", "target", "finetuned", "data"),
}
FIGURES = ("similarity", "output-similarity", "drift", "cost")
RECIPES = {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


@dataclass(frozen=True)
class Comparison:
    """What to compare: one pair of bases, one or several tasks, and the settings each method is tried in.

    `finetuned`, `data` and (optionally) `reference`, a fine-tuned target, are paths by task name. Budgets are
    `samples` or `shots`. `steps` are few-shot fine-tuning runs of the target on the same samples, with `full_batch`
    on all of them at each step; `warm_start` names the method whose result the same runs also start from. With
    `finetune`, fine-tuned models that do not exist are made by that schedule. `stated` holds accuracies of the
    fine-tuned target that were measured elsewhere.
    """

    source: str
    target: str = ""
    finetuned: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    methods: Sequence[str] = ("naive", "theseus", "bico")
    samples: Sequence[int] = ()
    shots: Sequence[int] = ()
    samplers: Sequence[str] = ("random",)
    exclude: Sequence[str] = ()
    seeds: Sequence[int] = (0,)
    scales: Sequence[str] = ("1", "auto")
    steps: Sequence[int] = ()
    warm_start: str | None = None
    learning_rate: float = 1e-5
    full_batch: bool = False
    batch_size: int = 32
    heads: Mapping[str, str] = field(default_factory=dict)
    reference: Mapping[str, str] = field(default_factory=dict)
    stated: Mapping[str, float] = field(default_factory=dict)
    protocol: str = "zero-shot"
    source_rows: bool = False
    test_samples: int | None = None
    finetune: Schedule | None = None
    checkpoint_every: int = 0
    device: str = "auto"

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted(self.shots or self.samples))


@dataclass(frozen=True)
class Printed:
    """A row of a table in the paper: accuracies by task (none where it gives the mean only), the mean as printed."""

    method: str
    budget: int
    values: Mapping[str, float]
    mean: float
    deviations: Mapping[str, float] = field(default_factory=dict)
    marks: Mapping[str, str] = field(default_factory=dict)

    @property
    def true_mean(self) -> float:
        """The mean of the row's own cells."""
        return sum(self.values.values()) / len(self.values) if self.values else self.mean

    @property
    def wrong_mean(self) -> bool:
        """Whether the printed mean is not that of the cells; two digits of rounding are let through."""
        return abs(self.true_mean - self.mean) > 0.02


@dataclass(frozen=True)
class Recipe:
    """A table or figure: one comparison per pair of models, and what the paper found."""

    comparisons: Mapping[str, Comparison]
    title: str = "comparison"
    where: str = ""
    kind: str = "comparison"
    about: str = ""
    printed: tuple[Printed, ...] = ()
    small: bool = False

    @property
    def comparison(self) -> Comparison:
        """The only comparison, or the first."""
        return next(iter(self.comparisons.values()))


_LISTS: dict[str, type] = {
    "methods": str,
    "samples": int,
    "shots": int,
    "samplers": str,
    "exclude": str,
    "seeds": int,
    "scales": str,
    "steps": int,
    "tasks": str,
}
_PATHS = ("finetuned", "data", "heads", "reference")
_TEXTS = ("source", "target", "device", "warm_start", "protocol", "title", "paper", "kind", "about", "root")
_NUMBERS = ("batch_size", "test_samples", "checkpoint_every")
_OWN = ("title", "paper", "kind", "about", "root", "tasks", "pairs", "printed", "small")
_KNOWN = (*(item.name for item in fields(Comparison)), *_OWN)


def read_recipe(
    recipe: str | Path, *, small: bool = False, root: str | Path | None = None, on_disk: bool = True
) -> Recipe:
    """Read a recipe by the name of a built-in one, or from a TOML file.

    `small` takes its small variant; relative paths in it start at `root`. With `on_disk`, models and data must
    exist, and the data must have enough samples.
    """
    return make_recipe(read_toml(recipe), str(recipe), small=small, root=root, on_disk=on_disk)


def read_toml(recipe: str | Path) -> dict[str, Any]:
    """The unchecked content of a recipe, given by name or by path."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    path = RECIPES.get(str(recipe), Path(recipe))
    if not path.is_file():
        if path.suffix == ".toml" or len(path.parts) > 1:
            raise DataError(f"there is no recipe at {path}.")
        raise DataError(unknown_name("recipe", str(recipe), RECIPES))
    if path.stat().st_size > 1_000_000:
        raise DataError(f"{path} is larger than a recipe can be (1 MB).")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise DataError(f"{path} is not a recipe: its values are nested too deeply.") from None
    except ValueError as error:  # of the parser, or of text that is not UTF-8
        raise DataError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).") from error


def make_recipe(
    content: Mapping[str, Any],
    where: str = "the recipe",
    *,
    small: bool = False,
    root: str | Path | None = None,
    on_disk: bool = True,
) -> Recipe:
    """A checked Recipe from plain values; all problems are listed at once, also those of the variant not taken."""
    problems = list(_shape_problems(content, ""))
    variant = content.get("small")
    if isinstance(variant, Mapping):
        problems += [f"[small] {text}" for text in _shape_problems(variant, "small")]
    elif small:
        problems.append("there is no [small] variant in it")
    merged = _sound(content) | (_sound(variant) if small and isinstance(variant, Mapping) else {})
    kind = merged.get("kind", "comparison")
    kind = kind if kind in KINDS else "comparison"
    base = Path(root) if root is not None else Path(merged["root"]) if "root" in merged else None
    comparisons: dict[str, Comparison] = {}
    pairs = [_sound(pair) for pair in merged.get("pairs", ()) if isinstance(pair, Mapping)] or [{}]
    for index, changes in enumerate(pairs):
        name = str(changes.get("name", index + 1))
        settings = merged | changes
        found = [f"'{key}' is missing" for key in KINDS[kind] if not settings.get(key)]
        comparisons[name] = comparison = _comparison(settings, base)
        found += _value_problems(comparison, kind)
        found += _disk_problems(comparison) if on_disk else ()
        problems += [f"pair {name}: {text}" if len(pairs) > 1 else text for text in found]
    printed = _printed(merged.get("printed", {}), _as_list(content.get("tasks")), problems)
    if problems:
        told = [text.rstrip(".") for text in dict.fromkeys(problems)]
        raise DataError(f"{where}: {'; '.join(told)}.")
    words = {key: merged[key] for key in ("title", "kind", "about") if key in merged}
    return Recipe(comparisons, where=merged.get("paper", ""), printed=printed, small=small, **words)


def _sound(content: Mapping[str, Any]) -> dict[str, Any]:
    """The known keys with values of the right type, so that the check can go on after a first problem."""
    return {
        key: value
        for key, value in content.items()
        if key in (*_KNOWN, "name") and key != "small" and not list(_wrong_type(key, value))
    }


def make_comparison(content: Mapping[str, Any], where: str = "the comparison") -> Comparison:
    """A checked Comparison from plain values; all problems are listed at once."""
    return make_recipe(content, where).comparison


def _comparison(settings: Mapping[str, Any], root: Path | None) -> Comparison:
    known = {item.name for item in fields(Comparison)}
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items() if key in known
    }
    tasks = settings.get("tasks")
    for key in _PATHS:
        value = plain.get(key)
        if isinstance(value, str):
            plain[key] = {task: value.replace("{task}", task) for task in tasks or ()}
        elif value is not None and tasks is not None:
            plain[key] = {task: value[task] for task in tasks if task in value}
    for key in ("source", "target"):
        if key in plain:
            plain[key] = under_root(plain[key], root)
    for key in ("finetuned", "reference", "data"):
        if key in plain:
            plain[key] = {task: under_root(path, root, data=key == "data") for task, path in plain[key].items()}
    plain.setdefault("source", "")
    plain["finetune"] = Schedule(**plain["finetune"]) if plain.get("finetune") else None
    return Comparison(**plain)


def under_root(reference: str, root: Path | None, *, data: bool = False) -> str:
    """A reference under the root: a path, `TASK:PATH`, or `NAME:FILE`; names that a library knows stay as they are."""
    if root is None or Path(reference).is_absolute():
        return reference
    name, mark, place = reference.partition(":") if data else reference.rpartition(":")
    if not mark:
        return str(root / reference)
    return f"{name}:{root / place}" if data or (root / place).exists() else reference


def _shape_problems(content: Mapping[str, Any], variant: str) -> Iterator[str]:
    """Unknown keys, values of the wrong type, and names of pairs that cannot be those of folders."""
    known = [key for key in _KNOWN if not (variant and key in ("small", "paper", "title", "printed"))]
    for key in content:
        if key not in known:
            yield _unknown_key(key, known)
    for key, value in content.items():
        yield from _wrong_type(key, value)
    names = [*known, "name"]
    taken: set[str] = set()
    for index, pair in enumerate(_as_list(content.get("pairs"))):
        if not isinstance(pair, Mapping):
            yield f"'pairs' must be a list of tables, got {pair!r}"
            continue
        yield from (f"pair {index + 1}: {_unknown_key(key, names)}" for key in pair if key not in names)
        for key, value in pair.items():
            yield from _wrong_type(key, value)
        name = str(pair.get("name", index + 1))
        yield from (f"pair {index + 1}: {text}" for text in _wrong_name(name))
        if name in taken:
            yield f"pair {index + 1}: another pair is called {name!r} too"
        taken.add(name)
    kind = content.get("kind")
    if isinstance(kind, str) and kind not in KINDS:
        yield unknown_name("kind", kind, KINDS)


def _unknown_key(key: str, known: Iterable[str]) -> str:
    """Like unknown_name, but without the long list of keys where one is near: a recipe may have many problems."""
    text = unknown_name("key", key, known)
    return text.partition(" Known:")[0] if "Did you mean" in text else text


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _wrong_type(key: str, value: Any) -> Iterator[str]:
    if key in _LISTS and not (isinstance(value, (list, tuple)) and all(type(item) is _LISTS[key] for item in value)):
        yield f"'{key}' must be a list of {_LISTS[key].__name__}, got {value!r}"
    elif key in _PATHS and not (
        isinstance(value, str) or (isinstance(value, Mapping) and all(isinstance(item, str) for item in value.values()))
    ):
        yield f"'{key}' must be a table of paths by task, or a path with {{task}} in it, got {value!r}"
    elif key in _TEXTS and not isinstance(value, str):
        yield f"'{key}' must be text, got {value!r}"
    elif key in _NUMBERS and not (type(value) is int and value > 0):
        yield f"'{key}' must be a whole number above 0, got {value!r}"
    elif key == "learning_rate" and not (type(value) in (int, float) and 0 < value < math.inf):
        yield f"'{key}' must be a number above 0, got {value!r}"
    elif key in ("source_rows", "full_batch") and not isinstance(value, bool):
        yield f"'{key}' must be true or false, got {value!r}"
    elif key in ("small", "printed") and not isinstance(value, Mapping):
        yield f"'{key}' must be a table, got {value!r}"
    elif key == "pairs" and not isinstance(value, (list, tuple)):
        yield f"'pairs' must be a list of tables, got {value!r}"
    elif key == "stated" and not (
        isinstance(value, Mapping) and all(type(item) in (int, float) for item in value.values())
    ):
        yield f"'stated' must be a table of accuracies by task, got {value!r}"
    elif key == "finetune":
        yield from _wrong_schedule(value)


def _wrong_name(name: str) -> Iterator[str]:
    """What speaks against a name that will be that of a folder, or part of it."""
    if not name.strip(" .") or not name.isprintable() or {"/", "\\"} & set(name) or len(name.encode()) > 100:
        yield f"{name!r} cannot name a folder: take up to 100 plain characters, without / and \\"


def _wrong_schedule(value: Any) -> Iterator[str]:
    known = {item.name: item for item in fields(Schedule)}
    if value == {}:  # in a small variant: no fine-tuning after all
        return
    if not isinstance(value, Mapping):
        yield f"'finetune' must be a table with steps, learning_rate and so on, got {value!r}"
        return
    for key, item in value.items():
        if key not in known:
            yield f"finetune: {_unknown_key(key, known)}"
        elif type(item) not in (int, float) or not 0 <= item < math.inf:
            yield f"'{key}' of finetune must be a number of 0 or more, got {item!r}"
    if type(value.get("steps")) is not int or value["steps"] < 1:
        yield "'steps' of finetune must be a whole number above 0"


def _value_problems(comparison: Comparison, kind: str) -> Iterator[str]:
    """Everything that can be told without looking at the disk."""
    if kind != "drift" and bool(comparison.samples) == bool(comparison.shots):
        yield "give budgets as samples or as shots, one of the two"
    if any(budget < 1 for budget in comparison.budgets):
        yield "budgets must be above 0"
    if not comparison.seeds:
        yield "give at least one seed"
    if any(seed < 0 for seed in comparison.seeds):
        yield "seeds must not be below 0"
    if any(count < 1 for count in comparison.steps):
        yield "fine-tuning runs need at least one step"
    if not comparison.data:
        yield "there is no task: name them in 'tasks', or give 'data' as a table"
    if comparison.finetune is not None:  # what is made is kept under the name of its task
        yield from (f"task {text}" for task in comparison.data for text in _wrong_name(task))
    for name in (*comparison.methods, *([comparison.warm_start] if comparison.warm_start else [])):
        yield from _told(get_method, name)
    for rule in comparison.scales:
        yield from _told(check_scale, rule)
    yield from (unknown_name("sampler", name, SAMPLERS) for name in comparison.samplers if name not in SAMPLERS)
    if comparison.protocol not in PROTOCOLS:
        yield unknown_name("protocol", comparison.protocol, PROTOCOLS)
    if kind in ("comparison", "output-similarity", "cost") and set(comparison.finetuned) != set(comparison.data):
        yield f"finetuned names the tasks {first_of(comparison.finetuned)} and data {first_of(comparison.data)}"


def _disk_problems(comparison: Comparison) -> Iterator[str]:
    """What is not there, and data that cannot be read or have too few samples for what is asked of them."""
    made = comparison.finetune is not None
    tuned = () if made else (*comparison.finetuned.values(), *comparison.reference.values())
    for path in dict.fromkeys((comparison.source, comparison.target, *tuned)):
        if path and not there(path):
            yield f"{path} does not exist"
    for task, reference in comparison.data.items():
        try:
            place = split_reference(reference)[1] if ":" in reference else Path(reference)
            if not (os.path.exists(place) or looks_like_hub_id(reference)):
                yield f"{reference} does not exist"
                continue
            data = read_data(reference, "train")
            read_data(reference, "test")
        except TuneportError as error:
            yield f"{task}: {error}"
            continue
        yield from (f"{task}: {text}" for text in _too_few(comparison, data))


def there(path: str, *, made: bool = False) -> bool:
    """Whether a model can be looked for: it exists, is a hub id, or NAME:TAG, which is its library's to find.

    A model that is `made` where it is missing must exist: its path may look like a hub id.
    """
    return (not made and (looks_like_hub_id(path) or ":" in path)) or os.path.exists(path_of(path))


def _too_few(comparison: Comparison, data: Dataset) -> Iterator[str]:
    if not comparison.budgets:
        return
    most = comparison.budgets[-1]
    samples, shots = (None, most) if comparison.shots else (most, None)
    for sampler in comparison.samplers:
        if sampler not in SAMPLERS:
            continue
        blind = "class_balanced" if SAMPLERS[sampler].needs_features else sampler  # features come later
        for seed in comparison.seeds:
            try:
                select(data, samples=samples, shots=shots, sampler=blind, seed=seed)
            except TuneportError as error:
                yield str(error).replace("--", "")  # a recipe has keys, not options
                break


def _told(check: Any, value: str) -> Iterator[str]:
    try:
        check(value)
    except TuneportError as error:
        yield str(error)


def _printed(content: Mapping[str, Any], tasks: Sequence[str], problems: list[str]) -> tuple[Printed, ...]:
    """The paper's rows: [method, budget, a value per task, mean], or [method, budget, mean].

    `tasks` names the columns where they are not the recipe's own, `deviations` has rows of the same form with
    standard deviations, `marks` has [method, budget, column, what is wrong with it].
    """
    known = ("tasks", "rows", "deviations", "marks")
    problems += [f"printed: {_unknown_key(key, known)}" for key in content if key not in known]
    columns = content.get("tasks", list(tasks))
    found: dict[tuple[str, int], Printed] = {}
    spread: dict[tuple[str, int], dict[str, float]] = {}
    for name in ("deviations", "rows"):
        for row in content.get(name, ()):
            good = isinstance(row, list) and len(row) >= 3 and isinstance(row[0], str) and type(row[1]) is int
            numbers = row[2:] if good else []
            if (
                not good
                or not all(type(n) in (int, float) for n in numbers)
                or len(numbers) not in (1, len(columns) + 1)
            ):
                problems.append(
                    f"printed: a row is [method, budget, {len(columns)} values and their mean], got {row!r}"
                )
                continue
            key, values = (row[0], row[1]), dict(zip(columns, numbers[:-1], strict=False))
            if name == "deviations":
                spread[key] = {**values, "mean": numbers[-1]}
            else:
                found[key] = Printed(*key, values, numbers[-1], spread.get(key, {}))
    for mark in content.get("marks", ()):
        if not (isinstance(mark, list) and len(mark) == 4 and (mark[0], mark[1]) in found):
            problems.append(f"printed: a mark is [method, budget, column, words] of a row that is there, got {mark!r}")
            continue
        row = found[mark[0], mark[1]]
        marks = {**row.marks, mark[2]: mark[3]}
        found[mark[0], mark[1]] = Printed(row.method, row.budget, row.values, row.mean, row.deviations, marks)
    return tuple(found.values())
