"""How large the content of a pickle gets, found without loading it.

A pickle of a few bytes can put a tuple into a tuple again and again, or ask for a buffer of any length: loading it
takes unlimited time and memory, also where no code of it runs. So its operations are followed first.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from ..errors import CheckpointError, shortened

LARGEST_PICKLE = 4 * 10**6  # bytes without the tensors
MOST_OPERATIONS = 10**6  # of about 30 for a tensor
MOST_OBJECTS = 10**7  # an object counts as often as others contain it
_BUFFERS = ("builtins bytearray", "__builtin__ bytearray", "torch Tensor")  # of a length that the pickle states

# what broken archives and pickles raise here, and where they are loaded, too
_BROKEN = (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, EOFError, IndexError, TypeError)


def check_pickle(path: Path) -> None:
    """Refuse a file of torch.save that unpacks to more than it may; a file that is broken is left to its reader."""
    with suppress(*_BROKEN):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                _check_members(archive, path)
        else:
            with path.open("rb") as file:
                for _ in range(5):  # before torch 1.6: three facts, the state, the keys of its tensors
                    _check(file, path)


def _check_members(archive: zipfile.ZipFile, path: Path) -> None:
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED:
            name = shortened(member.filename)
            raise CheckpointError(f"{path} is refused: its member {name} is compressed. Write it with torch.save.")
        if member.file_size > LARGEST_PICKLE and "/data/" not in member.filename:
            given = f"its member {shortened(member.filename)} has {member.file_size} bytes"
            raise CheckpointError(f"{path} is refused: {given}, and may have {LARGEST_PICKLE}. Save tensors only.")
        if member.filename.endswith(".pkl"):
            with suppress(*_BROKEN), archive.open(member) as file:  # a broken one does not hide the next
                _check(file, path)


def _check(file: IO[bytes], path: Path) -> None:
    """Refuse a pickle that has too many operations or objects, or states a length for which there is no memory."""
    try:
        _follow(file, path)
    except MemoryError:
        raise CheckpointError(f"{path} is refused: its pickle states a length that does not fit in memory.") from None


def _follow(file: IO[bytes], path: Path) -> None:
    """Follow the operations of one pickle on a stack of sizes, in objects; None is a mark."""
    stack: list[int | None] = []
    memo: dict[object, int] = {}
    for number, (operation, argument, _) in enumerate(pickletools.genops(file)):
        if operation.name == "GLOBAL" and argument in _BUFFERS:
            raise CheckpointError(f"{path} is refused: it asks for a buffer ({argument}). Save model.state_dict().")
        if operation.name.endswith(("PUT", "MEMOIZE")):
            memo[len(memo) if argument is None else argument] = stack[-1] or 0
            continue
        size = memo.get(argument, 0) if operation.name.endswith("GET") else 1
        size += sum(_taken(operation, stack))
        if size > MOST_OBJECTS or number >= MOST_OPERATIONS:
            limits = f"{MOST_OPERATIONS} operations and {MOST_OBJECTS} objects"
            raise CheckpointError(f"{path} is refused: its pickle may have {limits}. Save tensors only.")
        stack += [None if operation.name == "MARK" else size for _ in operation.stack_after]


def _taken(operation: pickletools.OpcodeInfo, stack: list[int | None]) -> Iterator[int]:
    """Take from the stack what an operation does: some objects, after all down to a mark where it says so."""
    count = len(operation.stack_before)
    if pickletools.markobject in operation.stack_before:
        while (top := stack.pop()) is not None:
            yield top
        count = operation.stack_before.index(pickletools.markobject)
    for _ in range(count):
        yield stack.pop() or 0
