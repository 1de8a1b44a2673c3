"""Regular expressions in the configuration of an adapter: matched as peft does, unless matching could take too long.

A pattern comes from a file of a stranger, and Python's matcher tries alternatives one after the other: nested
repetitions take time exponential in the length of a name. So the steps that a pattern can take are bounded first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import permutations
from typing import Any

from ..errors import CheckpointError, shortened

if sys.version_info >= (3, 11):
    from re import _constants as codes  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as codes
    import sre_parse as parser

LONGEST_NAME = 200  # characters of a module's name
MOST_STEPS = 10**7  # for one name and all patterns of a setting
DIGITS = 10  # the most digits in a row that a name is assumed to have
WHOLE = ("target_modules", "exclude_modules")  # one pattern of a whole name, or a list of plain names
ENDS = ("rank_pattern", "alpha_pattern", "layers_pattern", "modules_to_save")  # patterns after any prefix of a name


def check_patterns(config: Mapping[str, Any], name: str) -> None:
    """Refuse an adapter with patterns that could take too long to match."""
    for key in (*WHOLE, *ENDS):
        value = config.get(key)
        values = value if isinstance(value, (dict, list, tuple)) and key in ENDS else [value]
        patterns = [item for item in values if isinstance(item, str)]
        total = sum(map(steps, patterns)) * (LONGEST_NAME if key in ENDS else 1)
        if total > MOST_STEPS:
            worst = shortened(repr(max(patterns, key=steps)))
            raise CheckpointError(
                f"{key} of the adapter {name} is refused: matching {worst} could take too long. Write it without "
                "nested or adjacent repetitions, or as plain names of modules."
            )


def patterned(config: Mapping[str, Any], patterns: str, default: str, path: str, otherwise: int) -> Any:
    """A setting of one module: that of the first pattern that matches the end of its path, as in peft."""
    table = config.get(patterns) or {}
    if table and len(path) > LONGEST_NAME:
        raise CheckpointError(f"its name has {len(path)} characters, more than {LONGEST_NAME}")
    key = next((key for key in table if re.match(rf"(.*\.)?({key})$", path)), None)
    return config.get(default, otherwise) if key is None else table[key]


@lru_cache(maxsize=4096)
def steps(pattern: str) -> float:
    """An upper bound of the ways in which a pattern can be tried at one place of a name.

    >>> steps("q_proj"), steps(r"layers\\.\\d+\\.mlp"), steps("(([a-z]+)+)+!")
    (1.0, 10.0, inf)
    """
    try:
        return _ways(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError, ValueError):  # no regular expression: the reader refuses it
        return 1.0


def _ways(parsed: Any) -> float:
    """The ways to try a sequence of parts: the product of those of its parts."""
    product = 1.0
    for code, argument in parsed:
        product *= _ways_of(code, argument)
    return product


def _ways_of(code: Any, argument: Any) -> float:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, getattr(codes, "POSSESSIVE_REPEAT", None)):
        least, most, part = argument
        most = min(int(most), LONGEST_NAME)
        inner = _ways(part)
        if most <= 1:
            return inner + float(least == 0)
        if inner == 1 and not _can_be_empty(part):
            return float(max(min(most, DIGITS if _is_digit(part) else most) - least, 0) + 1)
        return float("inf")
    if code is codes.BRANCH:
        each = [_ways(part) for part in argument[1]]
        return max(each) if _exclude_each_other(argument[1]) else sum(each)
    if code is codes.SUBPATTERN:
        return _ways(argument[-1])
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return _ways(argument[1])
    if code is getattr(codes, "ATOMIC_GROUP", None):
        return _ways(argument)
    if code is codes.GROUPREF_EXISTS:
        return sum(_ways(part) for part in argument[1:] if part is not None)
    return 1.0


def _can_be_empty(part: Any) -> bool:
    return bool(part.getwidth()[0] == 0)


def _is_digit(part: Any) -> bool:
    return len(part) == 1 and part[0] in (
        (codes.IN, [(codes.CATEGORY, codes.CATEGORY_DIGIT)]),
        (codes.IN, [(codes.RANGE, (ord("0"), ord("9")))]),
    )


def _exclude_each_other(parts: Sequence[Any]) -> bool:
    """True if the literal beginnings of alternatives differ, so that at most one of them can match at a place."""
    if len(parts) > 1000:
        return False
    starts = [_start(part) for part in parts]
    return not any(one.startswith(other) for one, other in permutations(starts, 2))


def _start(part: Any) -> str:
    found = []
    for code, argument in part:
        if code is not codes.LITERAL:
            break
        found.append(chr(argument))
    return "".join(found)
