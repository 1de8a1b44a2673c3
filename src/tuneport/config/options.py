"""How an option is declared, checked, and written: on the command line, in the run record, in the repeat command."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from operator import ge, gt, le
from types import UnionType
from typing import Any, ClassVar, Literal, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import Self, dataclass_transform

from ..errors import OptionError, TuneportError, unknown_name
from ..types import ScaleRule

INPUTS = "Options"
USUAL = "Usual options"
SAMPLES = "Samples"
TASK = "Task and layers"
MACHINE = "Machine"
OUTPUT = "Output"
WRITTEN = "Written samples"

KEY = "option"  # of the metadata of a field
NO_COMMAND = "`{}` is a Python object, which no command line can name."


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name, type and default."""

    help: str  # one sentence
    group: str = USUAL  # the panel of the help
    above: float | None = None  # what a number must be larger than
    least: float | None = None  # the lower bound of a number
    most: float | None = None  # the upper bound
    flags: tuple[str, ...] = ()  # names on the command line, if they are not made from the name of the field
    choices: Collection[str] = ()  # of a text; looked at when a value is checked
    metavar: str | None = None  # what stands for the value in the help
    parse: Callable[[Any], Any] | None = None  # reads the text of a value whose type does not say how
    repeated: bool = False  # the text is a list of words, each given by itself
    argument: bool = False  # given by its place, without a flag
    listed: bool = True  # shown by --help; the reference page has all options
    python: bool = False  # holds Python objects, which no command line can name
    control: bool = False  # says how to run; another value does not keep a run from being resumed
    recorded: bool = True  # part of the run record and of the command that repeats a run


def option(default: Any = MISSING, help: str = "", group: str = USUAL, **about: Any) -> Any:
    """Declare a field of a config; without a default it is required."""
    return field(default=default, metadata={KEY: Option(help, group, **about)})


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
    """The columns of a table by tuneport's names: text=sentence,label=y."""
    pairs = [part.partition("=") for part in str(given).split(",")]
    if not all(name and own for name, _, own in pairs):
        raise OptionError(f"`columns` is {given!r}; expected NAME=COLUMN, such as text=sentence,label=y.")
    return {name.strip(): own.strip() for name, _, own in pairs}


def parse_roles(given: Sequence[str]) -> dict[str, str | None]:
    """SOURCE=TARGET pairs of roles; `none` leaves a role out."""
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
    try:
        return tuple(float(word) for word in str(given).split(","))
    except ValueError:
        raise OptionError(f"`weights` must be numbers separated by commas, got {given!r}.") from None


def parse_seconds(given: str | int) -> int:
    """A time in seconds (90, 90s), minutes (10m) or hours (2h)."""
    found = re.fullmatch(r"(\d+)([smh]?)", str(given).strip())
    if found is None or not int(found[1]):
        raise OptionError(f"`time` must be a time such as 90s, 10m or 2h, got {given!r}.")
    return int(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def parse_words(given: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(filter(None, map(str.strip, given.split(","))))


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
            if about.recorded and not about.python and _is_plain(value):
                values[item.name.rstrip("_")] = list(value) if isinstance(value, tuple) else value
            elif about.recorded and value is not item.default:
                own.append(item.name)
        return {**values, "python": own}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make an object from what `to_json` has written; entries of other classes are ignored."""
        known = {item.name.rstrip("_"): item.name for item, _ in cls.options()}
        if lost := [name for name in values.get("python", ()) if name in known]:
            raise TuneportError(NO_COMMAND.format(lost[0]))
        found = {known[name]: value for name, value in values.items() if name in known}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in found.items()})

    def to_args(self) -> list[str]:
        """The words of a command line that asks for these values; defaults are left out."""
        words: list[str] = []
        for item, about in self.options():
            value = getattr(self, item.name)
            if value == item.default or (value is None and item.default is MISSING):
                continue
            if about.python or not _is_plain(value):
                raise TuneportError(NO_COMMAND.format(item.name))
            words += _words(item, about, value)
        return words

    def check(self) -> None:
        """Check each value against its bounds and choices."""
        types, wrong = self.value_types(), []
        for item, about in self.options():
            value, kind = getattr(self, item.name), types[item.name]
            choices = get_args(kind) if get_origin(kind) is Literal else about.choices
            if isinstance(value, str) and choices and value not in choices:
                wrong.append(unknown_name(item.name.rstrip("_"), value, choices))
            bounds = (("above", about.above, gt), ("at least", about.least, ge), ("at most", about.most, le))
            for words, bound, holds in bounds if isinstance(value, (int, float)) else ():
                if bound is not None and not holds(value, bound):
                    wrong.append(f"`{item.name}` must be {words} {bound:g}, got {value}.")
        if wrong:
            raise OptionError(" ".join(wrong))

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Make a checked object; values that have a text form may be given as text."""
        known = {item.name: about for item, about in cls.options()}
        for name in given:
            if name not in known:
                raise TuneportError(unknown_name("option", name, known))
        read, wrong = dict(given), []
        for name, value in given.items():
            parse, is_list = known[name].parse, known[name].repeated and isinstance(value, (list, tuple))
            try:
                if parse is not None and (is_list or isinstance(value, (str, int, float))):
                    read[name] = parse(value)
            except OptionError as error:
                wrong.append(str(error))
        made = cls(**read)
        try:
            made.check()
        except OptionError as error:
            wrong.append(str(error))
        if wrong:
            raise OptionError(" ".join(wrong))
        return made


class Config(Declared):
    """How a command works. Every command has one, and every public function takes its fields as keywords."""

    command: ClassVar[str] = ""  # by the name of the class

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.command = cls.__name__.removesuffix("Config").lower()


def flags_of(item: Field[Any], about: Option) -> tuple[str, ...]:
    """The names of an option on the command line, the long one first."""
    return about.flags or (f"--{item.name.rstrip('_').replace('_', '-')}",)


def repeat_command(command: str, *parts: Declared) -> str:
    """The command line that asks for these inputs and options."""
    return shlex.join(["tuneport", command, *(word for part in parts for word in part.to_args())])


def _words(item: Field[Any], about: Option, value: Any) -> list[str]:
    flag = flags_of(item, about)[0]
    if isinstance(value, bool):
        on, _, off = flag.partition("/")
        return [on if value else off] if value or off else []
    if isinstance(value, Mapping):
        value = [f"{name}={other or 'none'}" for name, other in value.items()]
    texts = list(map(str, value)) if isinstance(value, (list, tuple)) else [str(value)]
    if about.parse is not None and not about.repeated:
        texts = [",".join(texts)]
    return texts if about.argument else [word for text in texts for word in (flag, text)]


def _without_none(kind: Any) -> Any:
    if get_origin(kind) not in (Union, UnionType):
        return kind
    left = tuple(part for part in get_args(kind) if part is not type(None))
    return left[0] if len(left) == 1 else Union[left]  # noqa: UP007


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold a value."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else (value,)
    return all(part is None or isinstance(part, (str, int, float)) for part in parts)
