"""The keys of a recipe and their checks, by pydantic: every problem is found, and named in one clause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
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

from tuneport.config.options import parse_scale
from tuneport.data.samplers import SAMPLERS
from tuneport.errors import TuneportError, unknown_name
from tuneport.methods import get_method
from tuneport.training.loop import Schedule

from .samplers import CENTROID

KINDS: dict[str, tuple[str, ...]] = {  # what a recipe makes, and the keys that it needs for that
    "comparison": ("source", "target", "finetuned", "data"),
    "similarity": ("source", "target", "data"),
    "output-similarity": ("source", "target", "finetuned", "reference", "data"),
    "drift": ("source", "data", "finetune"),
    "cost": ("source", "target", "finetuned", "data"),
}
PATTERN = "{task}"  # the key of a path with {task} in it, until the tasks are filled in


def _check(check: Callable[[str], object]) -> AfterValidator:
    """A validator that passes on the text of a TuneportError of `check`."""

    def validate(value: str) -> str:
        try:
            check(value)
        except TuneportError as error:
            raise ValueError(str(error).replace("`", "")) from None
        return value

    return AfterValidator(validate)


def _one_of(kind: str, known: Iterable[str]) -> AfterValidator:
    def validate(value: str) -> str:
        if value not in known:
            raise ValueError(unknown_name(kind, value, known))
        return value

    return AfterValidator(validate)


Words = tuple[StrictStr, ...]
Count = Annotated[int, Field(gt=0, strict=True)]
Index = Annotated[int, Field(ge=0, strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Share = Annotated[Number, Field(ge=0)]
Method = Annotated[StrictStr, _check(get_method)]
Paths = Annotated[
    Mapping[StrictStr, StrictStr], BeforeValidator(lambda value: {PATTERN: value} if isinstance(value, str) else value)
]


@dataclass(frozen=True)
class Tuning(Schedule):
    """A schedule whose keys are checked."""

    steps: Count
    batch_size: Count = Schedule.batch_size
    learning_rate: Share = Schedule.learning_rate
    weight_decay: Share = Schedule.weight_decay
    warmup_share: Share = Schedule.warmup_share
    seed: Index = Schedule.seed
    warmup: Index | None = Schedule.warmup
    clip: Annotated[Number, Field(gt=0)] | None = Schedule.clip


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
    samplers: tuple[Annotated[StrictStr, _one_of("sampler", (*SAMPLERS, *CENTROID))], ...] = ("random",)
    exclude: Words = ()
    seeds: Annotated[tuple[Index, ...], Field(min_length=1)] = (0,)
    scales: tuple[Annotated[StrictStr, _check(parse_scale)], ...] = ("1", "auto")
    steps: tuple[Count, ...] = ()
    warm_start: Annotated[StrictStr, _check(lambda name: name and get_method(name))] | None = None
    learning_rate: Annotated[Number, Field(gt=0)] = 1e-5
    full_batch: StrictBool = False
    batch_size: Count = 32
    heads: Paths = field(default_factory=dict)
    reference: Paths = field(default_factory=dict)
    stated: Mapping[StrictStr, Number] = field(default_factory=dict)
    protocol: Annotated[StrictStr, _one_of("protocol", ("zero-shot", "linear-probe"))] = "zero-shot"
    source_rows: StrictBool = False
    test_samples: Count | None = None
    finetune: Annotated[Tuning | None, BeforeValidator(lambda value: None if value == {} else value)] = None
    checkpoint_every: Index = 0
    device: StrictStr = "auto"

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted(self.shots or self.samples))

    @property
    def largest(self) -> dict[str, Any]:
        """The largest budget, as an argument of `select` and `prepare`."""
        return {"shots" if self.shots else "samples": self.budgets[-1]}

    @property
    def pair(self) -> str:
        """The names of the models."""
        return " to ".join(Path(path).name for path in (self.source, self.target) if path)


@dataclass(frozen=True)
class PaperRows:
    """The paper's rows: [method, budget, a value per task, mean], or [method, budget, mean].

    `tasks` names the columns if they are not the recipe's own, `deviations` has rows of the same form with
    standard deviations, `marks` has [method, budget, column, what is wrong with it].
    """

    tasks: Words | None = None
    rows: tuple[Any, ...] = ()
    deviations: tuple[Any, ...] = ()
    marks: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Keys(Comparison):
    """Every key that a recipe can have."""

    title: StrictStr = "comparison"
    paper: StrictStr = ""
    kind: Annotated[StrictStr, _one_of("kind", KINDS)] = "comparison"
    about: StrictStr = ""
    root: StrictStr | None = None
    tasks: Words | None = None
    pairs: tuple[dict[str, Any], ...] = ()
    printed: PaperRows = PaperRows()
    small: dict[str, Any] = field(default_factory=dict)


_ADAPTER = TypeAdapter(Keys)
_EXPECTED = {  # by the error type of pydantic
    "tuple_type": "a list",
    "too_short": "a list of at least one",
    "dict_type": "a table",
    "mapping_type": "a table",
    "dataclass_type": "a table",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}


def validated(content: Mapping[str, Any]) -> tuple[Keys, list[tuple[str, str]]]:
    """The keys, without wrong ones so that the checks can go on, and what is wrong by key."""
    try:
        return _ADAPTER.validate_python(content), []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    rest = dict(content)
    for key, *inner in (item["loc"] for item in reversed(errors)):  # the last item of a list first
        if inner and isinstance(inner[0], int) and len(rest.get(str(key), ())) > 1:
            rest[str(key)] = [item for index, item in enumerate(rest[str(key)]) if index != inner[0]]
        else:
            rest.pop(str(key), None)
    return _ADAPTER.validate_python(rest), [(str(item["loc"][0]), _problem(item)) for item in errors]


def _problem(error: Any) -> str:
    """One problem that pydantic found: the key, what was given, what was expected."""
    key, *inner = error["loc"]
    if error["type"] == "unexpected_keyword_argument":
        known = fields({"finetune": Tuning, "printed": PaperRows}[key] if inner else Keys)
        text = unknown_name("key", error["loc"][-1], [item.name for item in known])
        if "Did you mean" in text:  # a recipe may have many problems: leave out the long list of keys
            text = text.partition(" Known:")[0]
        return "".join(f"{outer}: " for outer in error["loc"][:-1]) + text
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "missing":
        return f"'{inner[-1]}' of {key} is missing"
    expected = _EXPECTED.get(error["type"]) or error["msg"].replace("Input should be ", "")
    place = f"'{key}'"
    if inner:
        place = f"item {inner[0] + 1} of '{key}'" if isinstance(inner[0], int) else f"{inner[0]!r} of '{key}'"
    return f"{place} must be {expected}, got {error['input']!r}"
