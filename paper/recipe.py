"""Recipes: TOML files that say what to measure, checked as a whole before anything runs.

A recipe names its models and data by paths relative to a root that the caller gives. Its `[small]` table replaces
keys for a run on small models. Unknown keys, wrong types, unknown names and wrong numbers are all reported at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

from tuneport.data.formats import suffixes
from tuneport.data.samplers import select
from tuneport.data.tasks import read_data, split_reference
from tuneport.errors import DataError, TuneportError, first_of, shortened, unknown_name
from tuneport.io.places import looks_like_hub_id, path_of

from .samplers import CENTROID, FEW_CLASSES
from .schema import KINDS, PATTERN, Comparison, Keys, PaperRows, validated

FIGURES = ("similarity", "output-similarity", "drift", "cost")
LARGEST_RECIPE = 10**6  # bytes
RECIPES = {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


@dataclass(frozen=True)
class Printed:
    """A row of a table in the paper: accuracies by task (empty if it gives the mean only), the mean as printed."""

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
        """True if the printed mean is not that of the cells; two digits of rounding are tolerated."""
        return abs(self.true_mean - self.mean) > 0.02

    @property
    def errors(self) -> list[str]:
        """What is wrong with the row."""
        wrong = (
            f"the paper prints a mean of {self.mean:.2f}; its own cells give {self.true_mean:.2f}, which is used here"
        )
        return [*([wrong] if self.wrong_mean else []), *(f"{column}: {text}" for column, text in self.marks.items())]


@dataclass(frozen=True)
class Recipe:
    """A table or figure: one comparison per pair of models, and the paper's numbers."""

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
        by_path = path.suffix == ".toml" or len(path.parts) > 1
        raise DataError(f"there is no recipe at {path}." if by_path else unknown_name("recipe", str(recipe), RECIPES))
    if path.stat().st_size > LARGEST_RECIPE:
        raise DataError(f"{path} is larger than a recipe can be ({LARGEST_RECIPE / 1e6:.0f} MB).")
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
    """Check plain values and make a Recipe; all problems are listed at once, also those of the variant not taken."""
    keys, parts, problems = _parse(content)
    tasks = keys.tasks or ()  # the columns of the paper's rows, also in the small variant
    if keys.small:
        variant, variant_parts, found = _parse({**content, **keys.small})
        fixed = ("paper", "printed", "small", "title")
        found = [f"'{key}' cannot be changed" for key in fixed if key in keys.small] + found
        problems += [f"[small] {text}" for text in found if text not in problems]
        if small:
            keys, parts = variant, variant_parts
    elif small:
        problems.append("there is no [small] variant in it")
    base = Path(root) if root is not None else Path(keys.root) if keys.root else None
    comparisons = {name: _comparison(part, base) for name, (part, _) in parts.items()}
    for name, comparison in comparisons.items():
        found = list(_conflicts(comparison, keys.kind, parts[name][1]))
        found += _disk_problems(comparison) if on_disk else ()
        problems += [f"pair {name}: {text}" if len(parts) > 1 else text for text in found]
    printed = _printed(keys.printed, tasks, problems)
    if problems:
        lost = base is None and any(text.endswith("does not exist") for text in problems)
        start = " Its paths start in the working directory: pass `root` to start them elsewhere." if lost else ""
        raise DataError(
            f"{where}: {'; '.join(shortened(text.rstrip('.'), 500) for text in dict.fromkeys(problems))}.{start}"
        )
    return Recipe(comparisons, keys.title, keys.paper, keys.kind, keys.about, printed, small)


def _parse(content: Mapping[str, Any]) -> tuple[Keys, dict[str, tuple[Keys, set[str]]], list[str]]:
    """The keys of a recipe, those of each pair with the names of its wrong ones, and all problems of single keys."""
    keys, wrong = validated(content)
    problems = [text for _, text in wrong]
    parts: dict[str, tuple[Keys, set[str]]] = {}
    for index, pair in enumerate(keys.pairs or ({},)):
        name = str(pair.get("name", index + 1))
        part, wrong = validated({**content, **{key: value for key, value in pair.items() if key != "name"}})
        found = [*(text for _, text in wrong), *_wrong_name(name)]
        found += [f"another pair has the name {name!r}"] if name in parts else []
        problems += [f"pair {index + 1}: {text}" for text in found if text not in problems]
        parts[name] = part, {key for key, _ in wrong}
    return keys, parts, problems


def _wrong_name(name: str) -> Iterator[str]:
    """The problem of a name that will be a folder's, or part of it."""
    if not name.strip(" .") or not name.isprintable() or {"/", "\\"} & set(name) or len(name.encode()) > 100:
        yield f"{name!r} cannot name a folder: use up to 100 printable characters, without / and \\"


def _comparison(keys: Keys, root: Path | None) -> Comparison:
    """A comparison with its task patterns filled in and its paths under the root."""
    plain = {item.name: getattr(keys, item.name) for item in fields(Comparison)}
    for key in ("finetuned", "data", "heads", "reference"):
        table = plain[key]
        if PATTERN in table:
            table = {task: table[PATTERN].replace("{task}", task) for task in keys.tasks or ()}
        elif keys.tasks is not None:
            table = {task: table[task] for task in keys.tasks if task in table}
        if key != "heads":
            table = {task: under_root(path, root, data=key == "data") for task, path in table.items()}
        plain[key] = table
    for key in ("source", "target"):
        plain[key] = plain[key] and under_root(plain[key], root)
    return Comparison(**plain)


def under_root(reference: str, root: Path | None, *, data: bool = False) -> str:
    """A reference under the root: a path, `TASK:PATH`, or `NAME:FILE`; names that a library knows stay as they are."""
    if root is None or Path(reference).is_absolute():
        return reference
    name, mark, place = reference.partition(":") if data else reference.rpartition(":")
    if not mark:
        return str(root / reference)
    return f"{name}:{root / place}" if data or (root / place).exists() else reference


def _conflicts(comparison: Comparison, kind: str, wrong: set[str]) -> Iterator[str]:
    """Missing keys, and keys that do not fit each other; keys that are `wrong` by themselves are left out."""
    yield from (f"'{key}' is missing" for key in KINDS[kind] if key not in wrong and not getattr(comparison, key))
    if kind != "drift" and not wrong & {"samples", "shots"} and bool(comparison.samples) == bool(comparison.shots):
        yield "give budgets as samples or as shots, one of the two"
    if comparison.shots and (found := FEW_CLASSES.keys() & {*comparison.samplers}):
        yield f"shots are of every class, and {first_of(sorted(found))} takes samples of some"
    if wrong & {"tasks", "data", "finetuned"}:
        return
    if not comparison.data:
        yield "there is no task: name them in 'tasks', or give 'data' as a table"
    if comparison.finetune is not None:  # fine-tuned models are stored under the name of their task
        yield from (f"task {text}" for task in comparison.data for text in _wrong_name(task))
    if kind in ("comparison", "output-similarity", "cost") and set(comparison.finetuned) != set(comparison.data):
        yield f"finetuned names the tasks {first_of(comparison.finetuned)} and data {first_of(comparison.data)}"


def _disk_problems(comparison: Comparison) -> Iterator[str]:
    """Missing models and data, and data that cannot be read or have too few samples."""
    tuned = (*comparison.finetuned.values(), *comparison.reference.values()) if comparison.finetune is None else ()
    for path in dict.fromkeys((comparison.source, comparison.target, *tuned)):
        if path and not model_exists(path):
            yield f"{path} does not exist"
    for task, reference in comparison.data.items():
        try:
            place = split_reference(reference)[1] if ":" in reference else Path(reference)
            if not (os.path.exists(place) or looks_like_hub_id(reference, suffixes=suffixes())):
                raise DataError(f"{reference} does not exist")
            data = read_data(reference, "train")
            read_data(reference, "test")
        except TuneportError as error:
            yield f"{task}: {str(error).replace('`', '')}"
            continue
        for sampler, seed in product(comparison.samplers, comparison.seeds) if comparison.budgets else ():
            blind = "class_balanced" if sampler in CENTROID else sampler  # features are not known yet
            try:
                select(data, sampler=blind, seed=seed, **comparison.largest)
            except TuneportError as error:
                yield f"{task}: {str(error).replace('`', '')}"


def model_exists(path: str, *, made: bool = False) -> bool:
    """True if a model exists, or if its name is a hub id or NAME:TAG, which its library looks up.

    With `made`, a missing model is made by fine-tuning, so only an existing path counts.
    """
    return (not made and (looks_like_hub_id(path) or ":" in path)) or os.path.exists(path_of(path))


def _printed(content: PaperRows, tasks: Sequence[str], problems: list[str]) -> tuple[Printed, ...]:
    """The checked rows of the paper; `tasks` names their columns if the content does not."""
    columns = [*(content.tasks or tasks), "mean"]
    found: dict[tuple[str, int], dict[str, float]] = {}
    spread: dict[tuple[str, int], dict[str, float]] = {}
    marks: dict[tuple[str, int], dict[str, str]] = {}
    for table, rows in ((found, content.rows), (spread, content.deviations)):
        for row in rows:
            match row:
                case [str(method), int(budget), *values] if len(values) in (1, len(columns)) and all(
                    type(value) in (int, float) for value in values
                ):
                    table[method, budget] = dict(zip(columns[-len(values) :], values, strict=True))
                case _:
                    form = f"[method, budget, {len(columns) - 1} values and their mean]"
                    problems.append(f"printed: a row is {form}, got {row!r}")
    for mark in content.marks:
        match mark:
            case [str(method), int(budget), str(column), str(text)] if (method, budget) in found:
                marks.setdefault((method, budget), {})[column] = text
            case _:
                problems.append(f"printed: a mark is [method, budget, column, text] of an existing row, got {mark!r}")
    return tuple(
        Printed(*key, mean=row.pop("mean"), values=row, deviations=spread.get(key, {}), marks=marks.get(key, {}))
        for key, row in found.items()
    )
