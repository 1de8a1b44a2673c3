"""The list of a fleet: one JSON line per fine-tune, whose keys are the options of `upgrade`.

What a line does not say, the options of the command say. All wrong lines are named before any work, and no heavy
library is needed for that.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_origin

from ..checks import check_command
from ..config import TransferInputs, UpgradeConfig, UpgradeInputs
from ..config.options import Declared, Option
from ..errors import DataError, OptionError, TuneportError, printable, shortened, unknown_name
from ..io.places import nearest_path, path_of
from ..io.untrusted import check_regular, parse_json

LARGEST = 10**7  # bytes of a list
MOST_LINES = 10_000
MOST_WRONG = 100  # lines that are named
MOST_KEYS = 10  # of a line that are named
PLAIN = {
    int: (("int",), "a whole number"),
    float: (("int", "float"), "a number"),
    bool: (("bool",), "true or false"),
    str: (("str",), "a text"),
}


class ListError(OptionError):
    """Lines of a list that are wrong; the message names a hundred of them."""

    def __init__(self, place: str | Path, wrong: Mapping[int, str]) -> None:
        by_reason: dict[str, list[str]] = {}
        for number, reason in sorted(wrong.items())[:MOST_WRONG]:
            by_reason.setdefault(shortened(printable(reason.rstrip(".")), 400), []).append(str(number))
        named = {reason: f"line{'s' if len(at) > 1 else ''} {', '.join(at)}" for reason, at in by_reason.items()}
        said = "; ".join(f"{lines}: {reason}" for reason, lines in named.items())
        said += "; other lines may be wrong too" if len(wrong) >= MOST_WRONG else ""
        Exception.__init__(self, f"{place}: {said}{'' if said.endswith('?') else '.'}")


@dataclass(frozen=True)
class Line:
    """One upgrade of a fleet: the number of its line, what it reads and writes, and its options."""

    number: int
    inputs: TransferInputs
    config: UpgradeConfig

    @property
    def out(self) -> Path:
        return Path(self.inputs.out)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what the line asks for, and of the sizes and times of the files that it reads."""
        given, config = self.inputs, self.config
        read = (given.source, *given.finetuned, given.target, given.data, config.head, config.extra, config.generator)
        states = [_state(place) for place in read if place is not None]
        asked = json.dumps([given.to_json(), config.to_json(), states], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()


def _state(place: str) -> list[tuple[str, int, int]]:
    """The path, the size and the time of change of each file at a place; a name on the hub has none."""
    path = path_of(place)
    found = [(str(file), file.stat()) for file in sorted([path, *path.rglob("*")]) if file.is_file()]
    return [(name, about.st_size, about.st_mtime_ns) for name, about in found]


def read_lines(inputs: UpgradeInputs, config: UpgradeConfig) -> tuple[Line, ...]:
    """Read and check the list of a fleet; `inputs` and `config` are the defaults of its lines.

    A line without `out` is written into the folder `inputs.out`, under the name of its fine-tune.
    """
    place, wrong, found = Path(inputs.list_ or ""), dict[int, str](), dict[Path, Line]()
    for number, text in _texts(place):
        if len(wrong) == MOST_WRONG:
            break
        try:
            line = _line(number, _parsed(text), inputs, config)
            check_command(line.inputs, line.config)
            where = Path(os.path.realpath(line.out))
            if where in found:
                raise OptionError(_taken(line, found[where]))
            found[where] = line
        except TuneportError as error:
            wrong[number] = str(error)
    wrong |= _collisions(found, Path(os.path.realpath(inputs.out)))
    if wrong:
        raise ListError(place, wrong)
    if not found:
        raise DataError(f"{place} has no line. Give a JSON object for each fine-tune.")
    return tuple(found.values())


def _texts(place: Path) -> list[tuple[int, str]]:
    """The lines that are not empty, with their numbers."""
    check_regular(place, DataError)
    try:
        if (size := place.stat().st_size) > LARGEST:
            raise DataError(f"the list {place} has {size} bytes, and at most {LARGEST} are read. Divide it.")
        text = place.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(f"the list {place} cannot be read: {reason}.{nearest_path(place)}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if len(lines) > MOST_LINES:
        raise DataError(f"the list {place} has {len(lines)} lines, and at most {MOST_LINES} are read. Divide it.")
    return lines


def _parsed(text: str) -> dict[str, Any]:
    try:
        given = parse_json(text)
    except ValueError as error:
        raise OptionError(f"it is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise OptionError("it is no JSON object, such as {...}")
    return given


def _line(number: int, given: Mapping[str, Any], inputs: UpgradeInputs, config: UpgradeConfig) -> Line:
    """Make a line from what it says and the defaults."""
    parts: dict[type[Declared], dict[str, Any]] = {TransferInputs: {}, UpgradeConfig: {}}
    known = {item.name.rstrip("_"): (cls, item, about) for cls in parts for item, about in cls.options()}
    wrong: list[str] = []
    for key, value in given.items():
        name = key.replace("-", "_")
        if len(wrong) == MOST_KEYS:
            break
        if name not in known:
            said = unknown_name("key", key, known)
            wrong.append(said.partition(" Known: ")[0] if "Did you mean" in said else said)
            continue
        cls, item, about = known[name]
        try:
            parts[cls][item.name] = _value(cls.value_types()[item.name], about, name, value, empty=item.default is None)
        except OptionError as error:
            wrong.append(str(error))
    if wrong:
        raise OptionError(" ".join(wrong))
    asked = replace(inputs, **{"out": "", **parts[TransferInputs]})
    if not asked.out and asked.finetuned:
        asked = replace(asked, out=str(Path(inputs.out, Path(asked.finetuned[0]).name)))
    # a second start continues what the first has begun
    return Line(number, asked.one(), UpgradeConfig.of(**{**config.values(), **parts[UpgradeConfig], "resume": True}))


def _value(kind: Any, about: Option, name: str, value: Any, *, empty: bool) -> Any:
    """The value of an option from a JSON value."""
    origin = get_origin(kind)
    if (value is None and empty) or (isinstance(value, str) and (about.parse is not None or origin is Literal)):
        return value
    if origin in (tuple, Sequence):
        many = [value] if isinstance(value, str) else value
        if isinstance(many, list) and many and all(isinstance(each, str) for each in many):
            return tuple(many)
        wanted = "a text, or a list of them"
    elif origin is Mapping:
        if isinstance(value, dict) and all(isinstance(each, str) for each in value.values()):
            return value
        wanted = "an object of texts"
    else:
        names, wanted = PLAIN.get(kind, PLAIN[str])
        if type(value).__name__ in names:
            return value
    raise OptionError(f"`{name}` must be {wanted}, got {shortened(json.dumps(value), 60)}.")


def _collisions(lines: Mapping[Path, Line], home: Path) -> dict[int, str]:
    """The lines whose output holds the summary, or lies in the output of another line."""
    wrong, above = dict[int, str](), {home, *home.parents}
    for place, line in lines.items():
        other = next((lines[path] for path in place.parents if path in lines and path not in above), None)
        if place in above:
            wrong[line.number] = f"`out` is {line.out}, where the summary goes: give it another name"
        elif other is not None:
            wrong[line.number] = _taken(line, other)
    return wrong


def _taken(line: Line, other: Line) -> str:
    return f"`out` is {line.out}, as in line {other.number} or inside of it: give it another name"
