"""The options of every command, each declared once: default, help, group and bounds.

The command line, the checks, the run record, the command that repeats a run and the reference page are made from these
fields. `Inputs` of a command say what it works on; its `Config` says how. Nothing here needs a heavy library.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from types import UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import Self, dataclass_transform

from .errors import OptionError, TuneportError, unknown_name
from .types import OutputFormat, ScaleRule

INPUTS = "Options"
USUAL = "Usual options"
SAMPLES = "Samples"
TASK = "Task and layers"
MACHINE = "Machine"
OUTPUT = "Output"
WRITTEN = "Written samples"

Function = Callable[..., Any]
KEY = "option"  # of the metadata of a field


@dataclass(frozen=True)
class Text:
    """How a value is written on the command line: `parse` reads it, `words` writes it, one word per value."""

    parse: Callable[[Any], Any]
    words: Callable[[Any], list[str]]
    repeated: bool = False


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name, type and default."""

    help: str  # one sentence
    group: str = USUAL  # the panel of the help
    least: float | None = None  # the lower bound of a number
    most: float | None = None  # the upper bound
    choices: tuple[str, ...] = ()  # the allowed words; unless given, those of a Literal type
    flags: tuple[str, ...] = ()  # names on the command line, if they are not made from the name of the field
    metavar: str | None = None  # what stands for the value in the help
    text: Text | None = None  # how the value is written, unless its type says it
    argument: bool = False  # given by its place, without a flag
    listed: bool = True  # shown by --help; the reference page has all options
    python: bool = False  # holds Python objects, which no command line can name
    control: bool = False  # says how to run; another value does not keep a run from being resumed
    recorded: bool = True  # part of the run record and of the command that repeats a run


def option(default: Any = MISSING, *, help: str, **about: Any) -> Any:
    """Declare a field of a config; without a default it is required."""
    return field(default=default, metadata={KEY: Option(help, **about)})


def parse_bytes(size: int | str, what: str = "`memory_budget`") -> int:
    """Parse a number of bytes, in decimal (5GB) or binary (8GiB) units; an error names the size as `what`.

    >>> parse_bytes("8GiB")
    8589934592
    """
    units = {"": 1, "B": 1} | {f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}
    units |= {f"{k}IB": 1024**i for i, k in enumerate("KMGT", 1)}
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    count = int(float(found[1]) * units.get(found[2].upper(), 0)) if found else 0
    if count < 1:
        raise OptionError(f"{what} must be a size such as 8GiB or 500MB, got {size!r}.")
    return count


def parse_columns(given: str) -> dict[str, str]:
    """Parse the columns of a table by tuneport's names.

    >>> parse_columns("text=sentence,label=y")
    {'text': 'sentence', 'label': 'y'}
    """
    pairs = [part.partition("=") for part in str(given).split(",")]
    if not all(name and own for name, _, own in pairs):
        raise OptionError(f"`columns` is {given!r}; expected NAME=COLUMN, such as text=sentence,label=y.")
    return {name.strip(): own.strip() for name, _, own in pairs}


def parse_roles(given: Sequence[str]) -> dict[str, str | None]:
    """Parse SOURCE=TARGET pairs of roles; `none` leaves a role out.

    >>> parse_roles(["up=fc1", "gate=none"])
    {'up': 'fc1', 'gate': None}
    """
    pairs = [text.partition("=") for text in given]
    if wrong := [role for role, mark, _ in pairs if not mark]:
        raise OptionError(f"`roles` takes SOURCE=TARGET, such as up=fc1, got {wrong[0]!r}.")
    return {role: None if other == "none" else other for role, _, other in pairs}


def parse_scale(scale: float | str) -> float | ScaleRule:
    """Parse a finite number, or the name of a rule that chooses one."""
    if scale in get_args(ScaleRule):
        return cast(ScaleRule, scale)
    try:
        number = float(scale)
    except ValueError:
        raise OptionError(f"`scale` must be a number, auto or safe, got {scale!r}.") from None
    if not math.isfinite(number):
        raise OptionError(f"`scale` must be a finite number, auto or safe, got {scale}.")
    return number


def parse_weights(given: float | str) -> tuple[float, ...]:
    """Parse numbers separated by commas."""
    try:
        return tuple(float(word) for word in str(given).split(","))
    except ValueError:
        raise OptionError(f"`weights` must be numbers separated by commas, got {given!r}.") from None


def parse_seconds(given: str | int) -> int:
    """Parse a time, in seconds (90, 90s), minutes (10m) or hours (2h).

    >>> parse_seconds("10m")
    600
    """
    found = re.fullmatch(r"(\d+)([smh]?)", str(given).strip())
    if found is None or not int(found[1]):
        raise OptionError(f"`time` must be a time such as 90s, 10m or 2h, got {given!r}.")
    return int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_words(given: str) -> tuple[str, ...]:
    """Parse words separated by commas."""
    return tuple(word.strip() for word in given.split(",") if word.strip())


BYTES = Text(parse_bytes, lambda size: [str(size)])
COLUMNS = Text(parse_columns, lambda named: [",".join(f"{name}={own}" for name, own in named.items())])
ROLES = Text(parse_roles, lambda roles: [f"{role}={other or 'none'}" for role, other in roles.items()], repeated=True)
SCALE = Text(parse_scale, lambda scale: [scale if isinstance(scale, str) else f"{scale!r}"])
SECONDS = Text(parse_seconds, lambda seconds: [str(seconds)])
WORDS = Text(parse_words, lambda words: [",".join(words)])
WEIGHTS = Text(parse_weights, lambda numbers: [",".join(map(repr, numbers))])


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True, repr=False)
class Declared:
    """Fields with options: what `Inputs` and `Config` share. Every subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True, repr=False)(cls)

    def __repr__(self) -> str:
        given = {item.name: "..." if about.python else repr(getattr(self, item.name)) for item, about in self.options()}
        other = (item.name for item, _ in self.options() if getattr(self, item.name) != item.default)
        return f"{type(self).__name__}({', '.join(f'{name}={given[name]}' for name in other)})"

    @classmethod
    def options(cls) -> Iterator[tuple[Field[Any], Option]]:
        """The fields, each with its option."""
        return ((item, item.metadata[KEY]) for item in fields(cls))

    @classmethod
    @cache
    def value_types(cls) -> dict[str, Any]:
        """The type of each field, without None."""
        return {name: _without_none(kind) for name, kind in get_type_hints(cls).items()}

    def values(self) -> dict[str, Any]:
        """The values by field, as keywords of a public function."""
        return {item.name: getattr(self, item.name) for item, _ in self.options()}

    def to_json(self) -> dict[str, Any]:
        """The values as the run record has them; `python` names the Python objects that were given."""
        values: dict[str, Any] = {}
        own = []
        for item, about in self.options():
            value = getattr(self, item.name)
            if not about.recorded:
                continue
            if not about.python and _is_plain(value):
                values[item.name.rstrip("_")] = _plain(value)
            elif value is not item.default:
                own.append(item.name)
        return {**values, "python": own}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make an object from what `to_json` has written; entries of other classes are ignored.

        Raises:
            TuneportError: if a value was a Python object.
        """
        known = {item.name.rstrip("_"): item.name for item, _ in cls.options()}
        if lost := [name for name in values.get("python", ()) if name in known]:
            raise TuneportError(f"`{lost[0]}` is a Python object, which no command line can name.")
        found = {known[name]: value for name, value in values.items() if name in known}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})

    def to_args(self) -> list[str]:
        """The words of a command line that asks for these values; defaults are left out.

        Raises:
            TuneportError: if a value is a Python object.
        """
        words: list[str] = []
        for item, about in self.options():
            value = getattr(self, item.name)
            if value == item.default or (value is None and item.default is MISSING):
                continue
            if about.python or not _is_plain(value):
                raise TuneportError(f"`{item.name}` is a Python object, which no command line can name.")
            words += _words(item, about, value)
        return words

    def check(self) -> None:
        """Check each value against its bounds and choices.

        Raises:
            OptionError: for all values that are not allowed.
        """
        types, wrong = self.value_types(), []
        for item, about in self.options():
            value = getattr(self, item.name)
            if value is None or about.python:
                continue
            choices = about.choices or (get_args(types[item.name]) if get_origin(types[item.name]) is Literal else ())
            if choices and isinstance(value, str) and value not in choices:
                wrong.append(unknown_name(item.name.rstrip("_"), value, choices))
            if about.least is not None and isinstance(value, (int, float)) and value < about.least:
                wrong.append(f"`{item.name}` must be at least {about.least:g}, got {value}.")
            if about.most is not None and isinstance(value, (int, float)) and value > about.most:
                wrong.append(f"`{item.name}` must be at most {about.most:g}, got {value}.")
        if wrong:
            raise OptionError(" ".join(wrong))


class Config(Declared):
    """How a command works. Every command has one, and every public function takes its fields as keywords."""

    command: ClassVar[str] = ""

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Make a checked config; values that have a text form may be given as text, and their numbers are read so too.

        Raises:
            TuneportError: for an unknown name or a value that is not allowed.
        """
        known = {item.name: about for item, about in cls.options()}
        for name in given:
            if name not in known:
                raise TuneportError(unknown_name("option", name, known))
        read, wrong = {}, []
        for name, value in given.items():
            form = known[name].text
            words = form is not None and form.repeated and isinstance(value, (list, tuple))
            try:
                is_text = form is not None and (words or isinstance(value, (str, int, float)))
                read[name] = form.parse(value) if form is not None and is_text else value
            except OptionError as error:
                wrong.append(str(error))
        config = cls(**read)
        try:
            config.check()
        except OptionError as error:
            wrong.append(str(error))
        if wrong:
            raise OptionError(" ".join(wrong))
        return config


def flags_of(item: Field[Any], about: Option) -> tuple[str, ...]:
    """The names of an option on the command line, the long one first."""
    return about.flags or (f"--{item.name.rstrip('_').replace('_', '-')}",)


def repeat_command(command: str, *parts: Declared) -> str:
    """The command line that asks for these inputs and options.

    Raises:
        TuneportError: if a value is a Python object.
    """
    return shlex.join(["tuneport", command, *(word for part in parts for word in part.to_args())])


def _words(item: Field[Any], about: Option, value: Any) -> list[str]:
    """The words that give an option this value."""
    flag = flags_of(item, about)[0]
    if isinstance(value, bool):
        on, _, off = flag.partition("/")
        return [on if value else off] if value or off else []
    if about.text is not None:
        texts = about.text.words(value)
    elif isinstance(value, (list, tuple)):
        texts = [str(each) for each in value]
    else:
        texts = [str(value)]
    return texts if about.argument else [word for text in texts for word in (flag, text)]


def _without_none(kind: Any) -> Any:
    """The type without None."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    left = tuple(part for part in get_args(kind) if part is not type(None))
    return left[0] if len(left) == 1 else Union[left]  # noqa: UP007


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (list, tuple)) else value


# Options that several commands share

DATA = partial(option, None, help="Samples: folder, table, .npz, TASK:PATH.", group=INPUTS)
OUT = partial(option, help="Where the result goes.", group=INPUTS)
COUNT = partial(option, None, help="Number of samples (default: 100).", metavar="N", least=1)
SAMPLER = partial(option, "random", help="random or class_balanced.", group=SAMPLES, metavar="NAME")
SEED = partial(option, 0, help="Seed of the draw.", group=SAMPLES, least=0, most=2**63 - 1)
NAMED = partial(
    option, None, help="Other column names: text=sentence,label=y.", group=SAMPLES, text=COLUMNS, metavar="LIST"
)
MAX_LENGTH = partial(option, None, help="Maximum tokens per text (default: 512).", group=SAMPLES, least=2)
CLASSES = partial(
    option, None, help="Names of the classes, in the head's order: red,green.", group=TASK, text=WORDS, metavar="LIST"
)
HEAD = partial(option, None, help="Zero-shot head: a name in heads/, or a file.", group=TASK, metavar="NAME")
EXCLUDE = partial(option, (), help="Name pattern of tensors to leave alone; repeatable.", group=TASK, metavar="GLOB")
AS = {"help": "model, adapter or task-vector.", "metavar": "FORMAT"}
RANK = partial(option, None, help="Adapter: cut updates to this rank.", least=1)
ENERGY = partial(option, None, help="Adapter: keep this share of each |tau|².", group=OUTPUT, listed=False)
UNIFORM_RANK = partial(option, False, help="Adapter: pad all layers to one rank.", group=OUTPUT, listed=False)
ADAPTER_DTYPE = partial(
    option,
    "float32",
    help="Adapter: stored as float32, bfloat16 or float16.",
    group=OUTPUT,
    listed=False,
    choices=("float32", "bfloat16", "float16"),
)
OVERWRITE = partial(option, False, help="Replace an existing output.", control=True, recorded=False)
RESUME = partial(
    option, False, help="Continue a killed run of the same command.", group=MACHINE, control=True, recorded=False
)
SAVE_EVERY = partial(
    option,
    60.0,
    help="Seconds between two saves, for --resume.",
    group=MACHINE,
    least=0,
    listed=False,
    control=True,
    recorded=False,
)
ANSWERS = partial(
    option, "teacher", help="Whose answers are taught: teacher, or data beside it.", group=SAMPLES, metavar="NAME"
)
TEMPLATE = partial(option, None, help="Plain prompt of a text: 'Text: {text} Label:'.", group=SAMPLES, metavar="TEXT")
EXTRA = partial(option, None, help="Unlabelled samples of anything, taught too.", group=SAMPLES, metavar="PATH")
DESCRIBE = partial(option, None, help="The samples in a sentence, for a generator.", group=WRITTEN, metavar="TEXT")
GENERATOR = partial(option, None, help="A model that writes samples.", group=WRITTEN, metavar="MODEL")
GENERATOR_URL = partial(option, None, help="A server that writes samples.", group=WRITTEN, metavar="URL")
KEEP_TEXTS = partial(option, False, help="Store what was written: texts.jsonl.", group=WRITTEN)
DEVICE = partial(option, "auto", help="cpu, cuda, cuda:1, ...", group=MACHINE, metavar="NAME")
DTYPE = partial(
    option,
    "float32",
    help="What models run in: bfloat16, ...",
    group=MACHINE,
    metavar="NAME",
    choices=("float32", "float64", "bfloat16", "float16"),
)
REMOTE_CODE = partial(option, False, help="Allow custom code from the checkpoint.", group=MACHINE, control=True)


# The commands


class TransferInputs(Declared):
    """What a transfer reads and writes."""

    source: str = option(help="The old base model.", group=INPUTS)
    finetuned: tuple[str, ...] = option(help="Fine-tuned source, or adapter.", group=INPUTS)
    target: str = option(help="The new base model.", group=INPUTS)
    data: str | None = DATA()
    out: str = OUT()


class PlanInputs(Declared):
    """What a plan reads."""

    source: str = option(help="The old base model.", group=INPUTS)
    target: str = option(help="The new base model.", group=INPUTS)
    finetuned: tuple[str, ...] = option((), help="Fine-tuned source, or adapter.", group=INPUTS)
    data: str | None = DATA()


class MeasureConfig(Config):
    """Options that decide what a transfer moves: those of `transfer` and `plan`."""

    method: str | Any = option("bico", help="See 'tuneport methods'.", metavar="NAME")
    samples: int | None = COUNT()
    scale: float | ScaleRule | None = option(None, help="Strength: a number, auto or safe.", text=SCALE, metavar="X")
    shots: int | None = option(None, help="Per class, instead of --samples.", group=SAMPLES, least=1)
    sampler: str = SAMPLER()
    seed: int = SEED()
    columns: Mapping[str, str] | None = NAMED()
    labels: Literal["data", "source"] | None = option(
        None, help="Whose labels: data or source.", group=SAMPLES, metavar="NAME"
    )
    max_length: int | None = MAX_LENGTH()
    max_tokens: int | None = option(
        None, help="Maximum tokens that the maps are made from.", group=SAMPLES, least=1, listed=False
    )
    head: str | None = HEAD()
    classes: tuple[str, ...] | None = CLASSES()
    head_fit: Literal["auto", "none"] = option(
        "auto", help="auto (fit a head on the target) or none.", group=TASK, metavar="NAME"
    )
    loss: str | Function | tuple[Function, Function] | None = option(
        None, help="classification, contrastive, causal, seq2seq, MODULE:FUNCTION.", group=TASK, metavar="NAME"
    )
    exclude: Sequence[str] = EXCLUDE()
    roles: Mapping[str, str | None] | None = option(
        None,
        help="SOURCE=TARGET of roles whose names differ; repeatable.",
        group=TASK,
        text=ROLES,
        metavar="A=B",
        listed=False,
    )
    device: str = DEVICE()
    dtype: str = DTYPE()
    batch_size: int = option(32, help="Samples per pass through the models.", group=MACHINE, least=1)
    memory_budget: int | None = option(
        None, help="Memory of the device to use, such as 8GiB.", group=MACHINE, text=BYTES, least=1, metavar="SIZE"
    )
    trust_remote_code: bool = REMOTE_CODE()
    accept_unlikely: bool = option(
        False, help="Continue if the fine-tune does not seem to match.", group=MACHINE, listed=False
    )
    match: Any = option(None, help="Pairs the tokens of own batches.", group=TASK, python=True)
    pairs: Any = option(None, help="The pairing, in place of roles and depth.", group=TASK, python=True)
    depth_rule: Any = option(None, help="Which source block a target block takes.", group=TASK, python=True)

    def check(self) -> None:
        super().check()
        if self.samples is not None and self.shots is not None:
            raise OptionError(
                f"asked for {self.samples} samples and for {self.shots} shots; pass `samples` or `shots`, not both."
            )
        if self.labels == "source" and (self.shots is not None or self.sampler == "class_balanced"):
            need = "`shots` needs" if self.shots is not None else f"sampler '{self.sampler}' needs"
            raise OptionError(f'with `labels="source"` the labels of the data are not used, but {need} them.')


class TransferConfig(MeasureConfig):
    """Options of a transfer. Command line, run record and docs are made from these fields."""

    command: ClassVar[str] = "transfer"

    as_: OutputFormat = option("model", **AS)
    rank: int | None = RANK()
    energy: float | None = ENERGY()
    uniform_rank: bool = UNIFORM_RANK()
    adapter_dtype: str = ADAPTER_DTYPE()
    evaluate: bool | None = option(
        None,
        help="Score the test split (default: 500).",
        group=SAMPLES,
        flags=("--evaluate/--no-evaluate",),
        control=True,
    )
    distill: int | None = option(
        None, help="Then train this many steps: the source teaches.", least=1, listed=False, metavar="STEPS"
    )
    overwrite: bool = OVERWRITE()
    resume: bool = RESUME()
    save_every: float = SAVE_EVERY()
    verbose: bool = option(False, help="Also print how it was made.", group=OUTPUT, control=True, recorded=False)
    fail_on_harm: bool = option(
        False, help="Exit with code 3 if the test split shows harm.", group=MACHINE, control=True, listed=False
    )

    def check(self) -> None:
        super().check()
        check_adapter_options(self)
        if self.distill is not None and self.as_ == "adapter" and self.rank is None:
            raise OptionError("a distilled adapter is a LoRA of one rank: pass `rank=R`.")


class PlanConfig(MeasureConfig):
    """Options of a plan: those that decide what a transfer moves, and what to show."""

    command: ClassVar[str] = "plan"

    layers: bool = option(False, help="Show every layer.", control=True)
    shapes_only: bool = option(False, help="Read config.json only; needs --memory-budget.", control=True)
    length: int = option(256, help="With --shapes-only: tokens per text.", least=1, listed=False)

    def check(self) -> None:
        super().check()
        if self.shapes_only and self.memory_budget is None:
            raise OptionError("a plan for devices needs `memory_budget`, the memory of one device.")


class UpgradeInputs(Declared):
    """What an upgrade reads and writes: one fine-tune, or a list of them, for which the others are defaults."""

    source: str | None = option(None, help="The old base model.", group=INPUTS)
    finetuned: tuple[str, ...] = option((), help="Fine-tuned source, or adapter.", group=INPUTS)
    target: str | None = option(None, help="The new base model.", group=INPUTS)
    data: str | None = DATA()
    out: str = OUT()
    list_: str | None = option(None, help="Many: a JSON line each, with options as keys.", group=INPUTS)
    workers: int | None = option(
        None, help="With --list: processes (default: 1; Ray: one per GPU).", group=MACHINE, least=1, listed=False
    )
    ray: str | None = option(
        None, help="With --list: address of a Ray cluster, or local.", group=MACHINE, metavar="ADDRESS", listed=False
    )

    def check(self) -> None:
        super().check()
        if self.list_ is None and (self.workers is not None or self.ray is not None):
            raise OptionError("`workers` and `ray` go with `list`.")

    def one(self) -> TransferInputs:
        """What the upgrade of one fine-tune reads and writes.

        Raises:
            OptionError: if something is not given.
        """
        given = {name: getattr(self, name) for name in ("source", "finetuned", "target", "data", "out")}
        if missing := [f"`{name}`" for name in ("source", "finetuned", "target", "out") if not given[name]]:
            raise OptionError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing.")
        return TransferInputs(**given)


ROUTES = ("copy", "port", "distill", "synthetic")  # cheap to dear
NOTHING = (
    "there are no samples, and nothing says what to write. Pass `data` with ten samples or more (no labels), or one "
    "sentence about them, such as `describe='Questions that customers ask their bank'`, with `template` if the model "
    "reads them in a fixed form. For a model that writes passages of its own, pass `routes=('synthetic',)`."
)


class LessonsConfig(Config):
    """Options of what an old model teaches: whose answers, and which samples beside the own ones."""

    synthetic: int | None = option(None, help="Samples to write beside own ones.", group=WRITTEN, least=8, metavar="N")
    describe: str | None = DESCRIBE()
    generator: str | None = GENERATOR()
    generator_url: str | None = GENERATOR_URL()
    keep_texts: bool = KEEP_TEXTS()
    extra: str | None = EXTRA()
    template: str | None = TEMPLATE()
    labels: Literal["teacher", "data"] = ANSWERS()
    seed: int = SEED()
    columns: Mapping[str, str] | None = NAMED()
    max_length: int | None = MAX_LENGTH()
    head: str | None = HEAD()
    device: str = DEVICE()
    dtype: str = DTYPE()
    resume: bool = RESUME()
    save_every: float = SAVE_EVERY()
    trust_remote_code: bool = REMOTE_CODE()

    def check(self) -> None:
        super().check()
        if self.generator is not None and self.generator_url is not None:
            raise OptionError("`generator` and `generator_url` both say who writes samples: pass one of them.")
        if self.template is not None and "{text}" not in self.template:
            raise OptionError(f"`template` is {self.template!r:.80}; expected {{text}} in it, where a text stands.")


class UpgradeConfig(LessonsConfig):
    """Options of an upgrade."""

    command: ClassVar[str] = "upgrade"

    samples: int | None = option(None, help="Own samples at most (default: 2,000).", metavar="N", least=1)
    routes: tuple[str, ...] = option(
        ROUTES, help="Of copy, port, distill, synthetic; separated by commas.", text=WORDS, metavar="LIST"
    )
    time: int | None = option(
        None, help="Start no further route after this time, such as 10m.", text=SECONDS, metavar="TIME"
    )
    as_: OutputFormat | None = option(None, **AS)
    rank: int | None = option(None, help="Rank of a LoRA (default: 16).", least=1)
    steps: int | None = option(None, help="Steps of distillation (default: by the samples).", least=1)
    overwrite: bool = OVERWRITE()
    synthetic: int | None = option(2000, help="Samples to write.", group=WRITTEN, least=8, metavar="N")
    classes: tuple[str, ...] | None = CLASSES()
    exclude: Sequence[str] = EXCLUDE()
    batch_size: int = option(32, help="Samples per pass through the models.", group=MACHINE, least=1)
    accept_unlikely: bool = option(
        False, help="Continue if the fine-tune does not seem to match.", group=MACHINE, listed=False
    )

    def check(self) -> None:
        super().check()
        for name in self.routes:
            if name not in ROUTES:
                raise OptionError(unknown_name("route", name, ROUTES))
        if self.as_ == "task-vector" and {"distill", "synthetic"} & set(self.routes):
            raise OptionError('a distilled model is no task vector of a port: pass `as_="model"` or "adapter".')

    def check_known(self, data: object) -> None:
        """Refuse an upgrade for which there are no samples, and nothing to write them from."""
        if data is None and not self.describe and self.routes != ("synthetic",):
            raise OptionError(NOTHING)


class DistillInputs(Declared):
    """What a distillation reads and writes."""

    finetuned: str = option(help="The teacher: a model, or an adapter with --source.", group=INPUTS)
    target: str = option(help="The student: any model that reads the same samples.", group=INPUTS)
    data: str | None = option(None, help="Samples; labels are not used.", group=INPUTS)
    out: str = OUT()
    source: str | None = option(None, help="The base of an adapter or a task vector.", group=INPUTS)


class DistillConfig(LessonsConfig):
    """Options of a distillation."""

    command: ClassVar[str] = "distill"

    samples: int | None = COUNT()
    steps: int | None = option(None, help="Updates of the student (default: by the samples).", least=1)
    lora: int | None = option(None, help="Train a LoRA of this rank; write an adapter.", least=1, metavar="RANK")
    learning_rate: float | None = option(None, help="Highest rate (default: by the student's width).")
    batch_size: int | None = option(None, help="Samples of an update.", least=2)
    shard: bool = option(False, help="Divide both models over the processes (FSDP).", group=MACHINE)
    overwrite: bool = OVERWRITE()
    sampler: str = SAMPLER()

    def check(self) -> None:
        super().check()
        if self.shard and (self.lora is None or self.trust_remote_code):
            raise OptionError(
                "`shard` trains a LoRA of models without own code: pass `lora`, and no `trust_remote_code`."
            )
        if self.shard and self.synthetic is not None and self.generator is None and self.generator_url is None:
            raise OptionError("sharded models write no samples: with `shard`, name a `generator` or a `generator_url`.")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1e37:  # beyond, an update is no float32
            raise OptionError(f"`learning_rate` must be a number above 0 and below 1e37, got {self.learning_rate}.")
        if self.synthetic is None and (self.describe or self.generator or self.generator_url or self.keep_texts):
            raise OptionError("`describe`, `generator`, `generator_url` and `keep_texts` go with `synthetic`.")


class EvaluateInputs(Declared):
    """What an evaluation reads."""

    model: tuple[str, ...] = option(help="A model, or an adapter or task vector of one; or several.", argument=True)
    data: str | None = option(None, help="Labelled data; the test split is scored.", group=INPUTS)
    ask: str | None = option(None, help="A prompt that old, target and new answer.", group=INPUTS, metavar="TEXT")
    base: str | None = option(None, help="The base of an adapter (default: the one it names).", group=INPUTS)


class EvaluateConfig(Config):
    """Options of an evaluation."""

    command: ClassVar[str] = "evaluate"

    protocol: Literal["zero-shot", "linear-probe", "perplexity", "likelihood"] | None = option(
        None, help="How to score (default: by model and data).", metavar="NAME"
    )
    by_class: bool = option(False, help="Also show the accuracy of each class.", control=True)
    head: str | None = HEAD()
    classes: tuple[str, ...] | None = CLASSES()
    samples: int | None = option(None, help="Linear probe: training samples (default: all).", group=SAMPLES, least=1)
    seed: int = SEED()
    columns: Mapping[str, str] | None = NAMED()
    max_length: int | None = MAX_LENGTH()
    batch_size: int | None = option(None, help="Samples per pass (default: 128; texts 16).", group=MACHINE, least=1)
    device: str = DEVICE()
    trust_remote_code: bool = REMOTE_CODE()

    def check(self) -> None:
        super().check()
        if self.samples is not None and self.protocol != "linear-probe":
            words = f"{self.protocol} scores" if self.protocol else "the others score"
            raise OptionError(f'`samples` goes with `protocol="linear-probe"`; {words} the whole test split.')


class ExtractInputs(Declared):
    """What an extraction reads and writes."""

    base: str = option(help="The base model: folder or weight file.", argument=True)
    finetuned: str = option(help="The fine-tuned model or adapter.", argument=True)
    out: str = option(help="The task-vector file to write (.safetensors).", group=INPUTS, flags=("--out", "-o"))


class ExtractConfig(Config):
    """Options of an extraction."""

    command: ClassVar[str] = "extract"

    exclude: Sequence[str] = EXCLUDE(group=USUAL)
    overwrite: bool = OVERWRITE()


class ApplyInputs(Declared):
    """What `apply` reads and writes."""

    vector: str = option(help="A task-vector file.", argument=True, metavar="TAU")
    base: str = option(help="The model it belongs to.", argument=True)
    out: str = option(help="The folder to write.", group=INPUTS, flags=("--out", "-o"))


class ApplyConfig(Config):
    """Options of `apply`."""

    command: ClassVar[str] = "apply"

    scale: float = option(1.0, help="Strength of the change.")
    overwrite: bool = OVERWRITE()

    def check(self) -> None:
        super().check()
        if not math.isfinite(self.scale):
            raise OptionError(f"`scale` must be a finite number, got {self.scale}.")


class MergeInputs(Declared):
    """What a merge reads and writes."""

    finetuned: tuple[str, ...] = option(help="Task vectors, adapters or fine-tuned models of one base.", argument=True)
    out: str = option(help="The file or folder to write.", group=INPUTS, flags=("--out", "-o"))
    base: str | None = option(None, help="Their base (default: the one that they name).", group=INPUTS)


class MergeConfig(Config):
    """Options of a merge."""

    command: ClassVar[str] = "merge"

    weights: Sequence[float] | None = option(
        None, help="A factor for each, separated by commas (default: 1).", text=WEIGHTS, metavar="NUMBERS"
    )
    rule: Literal["sum", "ties", "dare", "dare-ties"] = option("sum", help="How changes are combined.", metavar="RULE")
    density: float = option(0.2, help="Share of entries that ties and dare keep.")
    seed: int = option(0, help="Seed of the entries that dare keeps.", least=0, most=2**31 - 1)
    exclude: Sequence[str] = EXCLUDE(group=OUTPUT)
    as_: OutputFormat = option("task-vector", **AS)
    rank: int | None = RANK()
    energy: float | None = ENERGY()
    uniform_rank: bool = UNIFORM_RANK()
    adapter_dtype: str = ADAPTER_DTYPE()
    accept_unlikely: bool = option(
        False, help="Merge also what looks like fine-tunes of different bases.", group=MACHINE, listed=False
    )
    overwrite: bool = OVERWRITE()

    def check(self) -> None:
        super().check()
        check_adapter_options(self)
        if not 0 < self.density <= 1:
            raise OptionError(f"`density` must be above 0 and at most 1, got {self.density:g}.")


class DemoInputs(Declared):
    """What the demo writes."""

    out: str = option("tuneport-demo", help="The folder to write.", group=INPUTS)


class DemoConfig(Config):
    """Options of the demo."""

    command: ClassVar[str] = "demo"

    seed: int = SEED(group=USUAL)
    overwrite: bool = OVERWRITE()


def check_adapter_options(config: TransferConfig | MergeConfig) -> None:
    """Refuse options of an adapter where none is written."""
    shape = (config.rank, config.energy, config.uniform_rank, config.adapter_dtype)
    if config.as_ != "adapter" and shape != (None, None, False, "float32"):
        raise OptionError(
            '`rank`, `energy`, `uniform_rank` and `adapter_dtype` shape an adapter; they go with `as_="adapter"`.'
        )
    if config.rank is not None and config.energy is not None:
        raise OptionError("pass either `rank` or `energy` for an adapter, not both.")
    if config.energy is not None and not 0 < config.energy <= 1:
        raise OptionError(f"`energy` must be above 0 and at most 1, got {config.energy:g}.")
