"""Recipes: TOML files that say what to measure, checked as a whole before anything runs.

A recipe names its models and data by paths relative to a root that the caller gives. Its `[small]` table replaces
keys for a run on small models. Unknown keys, wrong types, unknown names and wrong numbers are all reported at once.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    TypeAdapter,
    ValidationError,
    with_config,
)

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
PATTERN = "{task}"  # the key of a path with {task} in it, until the tasks are filled in


def _check(check: Callable[[str], object]) -> AfterValidator:
    """A validator that calls `check` and passes on the text of its TuneportError."""

    def validate(value: str) -> str:
        try:
            check(value)
        except TuneportError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


def _one_of(kind: str, known: Iterable[str]) -> AfterValidator:
    def validate(value: str) -> str:
        if value not in known:
            raise ValueError(unknown_name(kind, value, known))
        return value

    return AfterValidator(validate)


def _schedule(value: Any) -> Any:
    """Refuse values that pydantic converts to numbers; an empty table means no fine-tuning."""
    if isinstance(value, Mapping):
        problems = [
            f"'{key}' of finetune must be a number of 0 or more, got {item!r}"
            for key, item in value.items()
            if type(item) not in (int, float) or not 0 <= item < math.inf
        ]
        if value.get("steps") == 0:
            problems.append("'steps' of finetune must be a whole number above 0")
        if problems:
            raise ValueError("; ".join(problems))
    return None if value == {} else value


Words = tuple[StrictStr, ...]
Count = Annotated[int, Field(gt=0, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Method = Annotated[StrictStr, _check(get_method)]
Paths = Annotated[
    Mapping[StrictStr, StrictStr], BeforeValidator(lambda value: {PATTERN: value} if isinstance(value, str) else value)
]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Comparison:
    """What to compare: one pair of bases, one or several tasks, and the settings each method is tried in.

    `finetuned`, `data` and (optionally) `reference`, a fine-tuned target, are paths by task name. Budgets are
    `samples` or `shots`. `steps` are few-shot fine-tuning runs of the target on the same samples, with `full_batch`
    on all of them at each step; `warm_start` names the method whose result the same runs also start from. With
    `finetune`, fine-tuned models that do not exist are made by that schedule. `stated` holds accuracies of the
    fine-tuned target that were measured elsewhere. The annotations are those that a recipe is checked by.
    """

    source: StrictStr = ""
    target: StrictStr = ""
    finetuned: Paths = field(default_factory=dict)
    data: Paths = field(default_factory=dict)
    methods: tuple[Method, ...] = ("naive", "theseus", "bico")
    samples: tuple[Count, ...] = ()
    shots: tuple[Count, ...] = ()
    samplers: tuple[Annotated[StrictStr, _one_of("sampler", SAMPLERS)], ...] = ("random",)
    exclude: Words = ()
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)] = (0,)
    scales: tuple[Annotated[StrictStr, _check(check_scale)], ...] = ("1", "auto")
    steps: tuple[Count, ...] = ()
    warm_start: Annotated[StrictStr, _check(lambda name: name and get_method(name))] | None = None
    learning_rate: Annotated[Number, Field(gt=0)] = 1e-5
    full_batch: StrictBool = False
    batch_size: Count = 32
    heads: Paths = field(default_factory=dict)
    reference: Paths = field(default_factory=dict)
    stated: Mapping[StrictStr, Number] = field(default_factory=dict)
    protocol: Annotated[StrictStr, _one_of("protocol", PROTOCOLS)] = "zero-shot"
    source_rows: StrictBool = False
    test_samples: Count | None = None
    finetune: Annotated[Schedule | None, BeforeValidator(_schedule)] = None
    checkpoint_every: Annotated[int, Field(ge=0, strict=True)] = 0
    device: StrictStr = "auto"

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted(self.shots or self.samples))


@dataclass(frozen=True)
class _Keys(Comparison):
    """Every key that a recipe can have."""

    title: StrictStr = "comparison"
    paper: StrictStr = ""
    kind: Annotated[StrictStr, _one_of("kind", KINDS)] = "comparison"
    about: StrictStr = ""
    root: StrictStr | None = None
    tasks: Words | None = None
    pairs: tuple[dict[str, Any], ...] = ()
    printed: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)


_ADAPTER = TypeAdapter(_Keys)
_EXPECTED = {  # by the error type of pydantic
    "tuple_type": "a list",
    "too_short": "a list of at least one",
    "dict_type": "a table",
    "mapping_type": "a table",
    "dataclass_type": "a table with steps, learning_rate and so on",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}


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
        raise DataError(f"{where}: {'; '.join(text.rstrip('.') for text in dict.fromkeys(problems))}.")
    return Recipe(comparisons, keys.title, keys.paper, keys.kind, keys.about, printed, small)


def _parse(content: Mapping[str, Any]) -> tuple[_Keys, dict[str, tuple[_Keys, set[str]]], list[str]]:
    """The keys of a recipe, those of each pair with the names of its wrong ones, and all problems of single keys."""
    keys, wrong = _validated(content)
    problems = [text for _, text in wrong]
    parts: dict[str, tuple[_Keys, set[str]]] = {}
    for index, pair in enumerate(keys.pairs or ({},)):
        name = str(pair.get("name", index + 1))
        part, wrong = _validated({**content, **{key: value for key, value in pair.items() if key != "name"}})
        found = [*(text for _, text in wrong), *_wrong_name(name)]
        found += [f"another pair has the name {name!r}"] if name in parts else []
        problems += [f"pair {index + 1}: {text}" for text in found if text not in problems]
        parts[name] = part, {key for key, _ in wrong}
    return keys, parts, problems


def _validated(content: Mapping[str, Any]) -> tuple[_Keys, list[tuple[str, str]]]:
    """The keys, without wrong ones so that the checks can go on, and what is wrong by key."""
    try:
        return _ADAPTER.validate_python(content), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    rest = dict(content)
    for item in reversed(errors):  # the last item of a list first
        key, *inner = item["loc"]
        if inner and isinstance(inner[0], int) and isinstance(rest.get(str(key)), list):
            rest[str(key)] = [*rest[str(key)][: inner[0]], *rest[str(key)][inner[0] + 1 :]]
        if not inner or not isinstance(inner[0], int) or not rest.get(str(key)):
            rest.pop(str(key), None)
    return _ADAPTER.validate_python(rest), [(str(item["loc"][0]), _problem(item)) for item in errors]


def _problem(error: Any) -> str:
    """One problem that pydantic found: the key, what was given, what was expected."""
    key, *inner = error["loc"]
    if error["type"] == "unexpected_keyword_argument":
        known = [item.name for item in fields(Schedule if inner else _Keys)]
        return f"{key}: {_unknown_key(str(inner[0]), known)}" if inner else _unknown_key(key, known)
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"'{inner[-1]}' of {key} is missing"
    expected = _EXPECTED.get(error["type"]) or error["msg"].replace("Input should be ", "")
    place = f"item {inner[0] + 1} of '{key}'" if inner and isinstance(inner[0], int) else f"'{key}'"
    if inner and isinstance(inner[0], str):
        place = f"{inner[0]!r} of {place}"
    return f"{place} must be {expected}, got {error['input']!r}"


def _unknown_key(key: str, known: Iterable[str]) -> str:
    """Like unknown_name, without the long list of keys if one is near: a recipe may have many problems."""
    text = unknown_name("key", key, known)
    return text.partition(" Known:")[0] if "Did you mean" in text else text


def _wrong_name(name: str) -> Iterator[str]:
    """The problem of a name that will be a folder's, or part of it."""
    if not name.strip(" .") or not name.isprintable() or {"/", "\\"} & set(name) or len(name.encode()) > 100:
        yield f"{name!r} cannot name a folder: use up to 100 printable characters, without / and \\"


def _comparison(keys: _Keys, root: Path | None) -> Comparison:
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
    made = comparison.finetune is not None
    tuned = () if made else (*comparison.finetuned.values(), *comparison.reference.values())
    for path in dict.fromkeys((comparison.source, comparison.target, *tuned)):
        if path and not model_exists(path):
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


def model_exists(path: str, *, made: bool = False) -> bool:
    """True if a model exists, or if its name is a hub id or NAME:TAG, which its library looks up.

    With `made`, a missing model is made by fine-tuning, so only an existing path counts.
    """
    return (not made and (looks_like_hub_id(path) or ":" in path)) or os.path.exists(path_of(path))


def _too_few(comparison: Comparison, data: Dataset) -> Iterator[str]:
    if not comparison.budgets:
        return
    most = comparison.budgets[-1]
    samples, shots = (None, most) if comparison.shots else (most, None)
    for sampler in comparison.samplers:
        blind = "class_balanced" if SAMPLERS[sampler].needs_features else sampler  # features are not known yet
        for seed in comparison.seeds:
            try:
                select(data, samples=samples, shots=shots, sampler=blind, seed=seed)
            except TuneportError as error:
                yield str(error)
                break


def _printed(content: Mapping[str, Any], tasks: Sequence[str], problems: list[str]) -> tuple[Printed, ...]:
    """The paper's rows: [method, budget, a value per task, mean], or [method, budget, mean].

    `tasks` names the columns if they are not the recipe's own, `deviations` has rows of the same form with
    standard deviations, `marks` has [method, budget, column, what is wrong with it].
    """
    known = ("tasks", "rows", "deviations", "marks")
    problems += [f"printed: {_unknown_key(key, known)}" for key in content if key not in known]
    columns = content.get("tasks", list(tasks))
    found: dict[tuple[str, int], Printed] = {}
    spread: dict[tuple[str, int], dict[str, float]] = {}
    for name in ("deviations", "rows"):
        for row in content.get(name, ()):
            match row:
                case [str(method), int(budget), *values, int() | float() as mean] if len(values) in (
                    0,
                    len(columns),
                ) and all(type(value) in (int, float) for value in values):
                    cells = dict(zip(columns, values, strict=False))
                    if name == "deviations":
                        spread[method, budget] = {**cells, "mean": mean}
                    else:
                        found[method, budget] = Printed(method, budget, cells, mean, spread.get((method, budget), {}))
                case _:
                    form = f"[method, budget, {len(columns)} values and their mean]"
                    problems.append(f"printed: a row is {form}, got {row!r}")
    for mark in content.get("marks", ()):
        match mark:
            case [str(method), int(budget), str(column), str(text)] if (method, budget) in found:
                row = found[method, budget]
                found[method, budget] = replace(row, marks={**row.marks, column: text})
            case _:
                problems.append(f"printed: a mark is [method, budget, column, text] of an existing row, got {mark!r}")
    return tuple(found.values())
