"""Refuse pipes, sockets and devices where a file is expected: opening one can wait for ever or never end."""

from __future__ import annotations

import stat
from pathlib import Path

from ..errors import CheckpointError, TuneportError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: Path, error: type[TuneportError] = CheckpointError) -> None:
    """Raise `error` if a path, or what it links to, is a pipe, a socket or a device; a missing path passes."""
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):  # the reader says what is wrong with it
        return
    if kind is not None:
        raise error(f"{path} is {kind}, not a file. Give a regular file.")


def check_regular_files(folder: Path) -> None:
    """Raise a CheckpointError if a model's folder holds a pipe, a socket or a device: its library would open it."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        check_regular(path)
