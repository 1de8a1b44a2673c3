"""Bounds on files that others write: what may be opened, parsed and matched, and at what cost.

Rules kept here: no pipe, socket or device is opened; a small file cannot take unlimited time or memory; a library that
a damaged file can crash reads it in a process of its own.
"""

from __future__ import annotations

import json
import math
import pickletools
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from ..errors import CheckpointError, DataError, TuneportError, shortened

if sys.version_info >= (3, 11):
    from re import _constants as codes  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
else:
    import sre_constants as codes
    import sre_parse as parser

MOST_VALUES = 2 * 10**6  # of a JSON text; as objects of Python they take at most about 256 MiB

LARGEST_PICKLE = 4 * 10**6  # bytes without the tensors
MOST_OPERATIONS = 10**6  # of about 30 for a tensor
MOST_OBJECTS = 10**7  # an object counts as often as others contain it

LONGEST_NAME = 200  # characters of a name that patterns are matched with
MOST_STEPS = 10**7  # for one name and all patterns of a setting
_DIGITS = 10  # the most digits in a row that a name is assumed to have

_NO_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_BUFFERS = ("builtins bytearray", "__builtin__ bytearray", "torch Tensor")  # of a length that the pickle states

# what broken archives and pickles raise here, and where they are loaded, too
_BROKEN = (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, IndexError, TypeError)

# A process of its own must not import what lies in the working folder.
_FRAME = """
import sys
sys.path = [place for place in sys.path if place]
try:
    exec(sys.argv.pop(1))
except Exception as error:
    sys.exit(str(error) or type(error).__name__)
"""


def check_regular(path: Path, error: type[TuneportError] = CheckpointError) -> None:
    """Refuse a pipe, a socket or a device, also behind a link: opening one can block. A missing path passes."""
    try:
        kind = _NO_FILES.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):  # the reader says what is wrong with it
        return
    if kind is not None:
        raise error(f"{path} is {kind}, not a file. Give a regular file.")


def check_regular_files(folder: Path) -> None:
    """Refuse a model's folder that holds a pipe, a socket or a device: its library would open it."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        check_regular(path)


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON: a small text can hold millions of values, each of them many times larger in memory.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has too many values.
    """
    values = sum(text.count(mark) if isinstance(text, str) else text.count(mark.encode()) for mark in ",[{")
    if values > MOST_VALUES:
        raise ValueError(f"it has about {values} values, and at most {MOST_VALUES} are read")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_apart(path: Path, library: str, script: str, *arguments: str) -> bytes:
    """What a script prints whose `sys.argv[1:]` are the path and the arguments, in a process of its own.

    Raises:
        DataError: it raises, or crashes.
    """
    command = [sys.executable, "-c", _FRAME, script, str(path), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        crash = f"{library} crashed with exit code {done.returncode}"
        raise DataError(f"cannot read {path}: {shortened(said[-1] if said and done.returncode > 0 else crash)}.")
    return done.stdout


def check_pickle(path: Path) -> None:
    """Refuse a file of torch.save that unpacks to more than it may; a broken one is left to its reader.

    A pickle of a few bytes can put a tuple into a tuple again and again, or ask for a buffer of any length: loading it
    takes unlimited time and memory, also where no code of it runs. So its operations are followed first.
    """
    with suppress(*_BROKEN):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _check_archive(archive, path)
        else:
            with path.open("rb") as file:
                for _ in range(5):  # before torch 1.6: three facts, the state, the keys of its tensors
                    _check_operations(file, path)


def _check_archive(archive: zipfile.ZipFile, path: Path) -> None:
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            name = shortened(member.filename)
            raise CheckpointError(f"{path} is refused: its member {name} is compressed. Write it with torch.save.")
        if member.file_size > LARGEST_PICKLE and "/data/" not in member.filename:
            given = f"its member {shortened(member.filename)} has {member.file_size} bytes"
            raise CheckpointError(f"{path} is refused: {given}, and may have {LARGEST_PICKLE}. Save tensors only.")
        if member.filename.endswith(".pkl"):
            with suppress(*_BROKEN), archive.open(member) as file:  # a broken one does not hide the next
                _check_operations(file, path)


def _check_operations(file: IO[bytes], path: Path) -> None:
    """Follow the operations of one pickle on a stack of sizes, in objects (None is a mark), and refuse too many."""
    stack: list[int | None] = []
    memo: dict[object, int] = {}
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(file)):
            if operation.name == "GLOBAL" and argument in _BUFFERS:
                given = f"it asks for a buffer ({argument})"
                raise CheckpointError(f"{path} is refused: {given}. Save model.state_dict().")
            if operation.name.endswith(("PUT", "MEMOIZE")):
                memo[len(memo) if argument is None else argument] = stack[-1] or 0
                continue
            size = memo.get(argument, 0) if operation.name.endswith("GET") else 1
            size += sum(_taken(operation, stack))
            if size > MOST_OBJECTS or number >= MOST_OPERATIONS:
                limits = f"{MOST_OPERATIONS} operations and {MOST_OBJECTS} objects"
                raise CheckpointError(f"{path} is refused: its pickle may have {limits}. Save tensors only.")
            stack += [None if operation.name == "MARK" else size for _ in operation.stack_after]
    except MemoryError:
        raise CheckpointError(f"{path} is refused: its pickle states a length that does not fit in memory.") from None


def _taken(operation: pickletools.OpcodeInfo, stack: list[int | None]) -> Iterator[int]:
    """Take from the stack what an operation does: some objects, after all down to a mark where it says so."""
    count = len(operation.stack_before)
    if pickletools.markobject in operation.stack_before:
        while (top := stack.pop()) is not None:
            yield top
        count = operation.stack_before.index(pickletools.markobject)
    for _ in range(count):
        yield stack.pop() or 0


@lru_cache(maxsize=4096)
def pattern_steps(pattern: str) -> float:
    """Bound the ways in which a regular expression can be tried at one place of a name.

    Python's matcher tries alternatives one after the other: nested repetitions take time exponential in the length of
    a name.

    >>> pattern_steps("q_proj"), pattern_steps(r"layers\\.\\d+\\.mlp"), pattern_steps("(([a-z]+)+)+!")
    (1.0, 10.0, inf)
    """
    try:
        return _ways(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError, ValueError):  # no regular expression: the reader refuses it
        return 1.0


def _ways(parsed: Any) -> float:
    """The ways to try a sequence of parts."""
    return math.prod((_ways_of(code, argument) for code, argument in parsed), start=1.0)


def _ways_of(code: Any, argument: Any) -> float:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, getattr(codes, "POSSESSIVE_REPEAT", None)):
        least, most, part = argument
        most = min(int(most), LONGEST_NAME)
        inner = _ways(part)
        if most <= 1:
            return inner + float(least == 0)
        if inner == 1 and part.getwidth()[0] > 0:
            return float(max(min(most, _DIGITS if _is_digit(part) else most) - least, 0) + 1)
        return float("inf")
    if code is codes.BRANCH:
        each = [_ways(part) for part in argument[1]]
        first = {part[0] for part in argument[1] if len(part) and part[0][0] is codes.LITERAL}
        return max(each) if len(first) == len(each) else sum(each)  # of other first letters, one can match at a place
    parts = argument if isinstance(argument, tuple) else (argument,)  # of groups and conditions
    return sum(_ways(part) for part in parts if isinstance(part, parser.SubPattern)) or 1.0


def _is_digit(part: Any) -> bool:
    return len(part) == 1 and part[0] in (
        (codes.IN, [(codes.CATEGORY, codes.CATEGORY_DIGIT)]),
        (codes.IN, [(codes.RANGE, (ord("0"), ord("9")))]),
    )
