"""Outputs that appear whole or not at all: checked before any work, written to a temporary sibling, then renamed.

Rules kept here: an output gets its final name only when it is complete and on disk; an existing output is replaced
only on request and survives a failure; a folder that is not an output is never replaced; links are not followed;
one run at a time writes an output, and removes what a killed run left; disk errors become one CheckpointError.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, first_of
from .sizes import format_bytes

PathLike = str | os.PathLike[str]
RECORD = "tuneport.json"  # the run record, which marks a folder as an output

_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full. Free some space or choose another place",
    errno.EDQUOT: "the disk quota is used up. Free some space or choose another place",
    errno.EROFS: "the file system is read-only. Choose another place",
    errno.EACCES: "permission denied. Choose a place that you may write to",
    errno.EPERM: "permission denied. Choose a place that you may write to",
}


def check_new(
    out: PathLike,
    overwrite: bool = False,
    *,
    suffix: str = "",
    needed_bytes: int = 0,
    inputs: Iterable[PathLike] = (),
    marks: Sequence[str] = (RECORD,),
) -> None:
    """Raise a CheckpointError unless `out` can be written: a file if it has a `suffix`, else a folder.

    Call it before any work. `out` must not exist; with `overwrite` it may be a file, or a real folder that is empty or
    holds all `marks`, the files that mark an output of the command, and nothing that no run wrote. Missing parents are
    made later; the nearest folder must be writable and have `needed_bytes` free. `out` must neither contain one of the
    `inputs` nor lie in one, and a file must not be the one that a link in an input leads to.
    """
    out, inputs = Path(out), [*inputs]
    _check_path(out, overwrite, folder=not suffix)
    if suffix and os.path.lexists(out):
        inputs += [file for given in inputs for file in Path(given).rglob("*")]
    _check_inputs_survive(out, inputs)
    if not suffix:
        _check_marks(out, marks)
    check_space(out, needed_bytes)
    if suffix and out.suffix != suffix:  # under another name it could not be read again
        raise CheckpointError(f"{out} must end in {suffix}, as every weight file that tuneport reads. Add it.")


def check_space(out: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(_nearest(out)).free
    if needed_bytes > free:
        raise CheckpointError(
            f"{out} needs about {format_bytes(needed_bytes)}, but only {format_bytes(free)} are free in {out.parent}. "
            "Free some space or choose another place."
        )


def _check_inputs_survive(out: Path, inputs: Iterable[PathLike]) -> None:
    place = Path(os.path.realpath(out))
    for given in inputs:
        real = Path(os.path.realpath(given))
        if place in (real, *real.parents):
            raise CheckpointError(f"{out} cannot be overwritten: it holds the input {given}. Choose another name.")
        if real in place.parents:
            raise CheckpointError(f"{out} cannot be written: it is inside the input {given}. Choose another place.")


def _check_marks(out: Path, marks: Sequence[str]) -> None:
    """Raise a CheckpointError if `out` is a folder with files that are not an output with all marks, or in none."""
    missing = [mark for mark in marks if not (out / mark).is_file()]
    if missing and out.is_dir() and any(out.iterdir()):
        raise CheckpointError(
            f"{out} is not overwritten: it is not empty, and not an output of this command (no {missing[0]} in it). "
            "Remove it by hand or choose another name."
        )
    for record in (out / mark for mark in marks):
        try:
            known = set(map(str, json.loads(record.read_text(encoding="utf-8"))["files"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # it has no list
        folder = record.parent  # a recipe of several pairs has a record in each of their folders
        found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
        if own := sorted(name for name in found if name not in known):
            raise CheckpointError(
                f"{out} is not overwritten: {first_of(own, 3)} in it was not written by this command. Move it away or "
                "choose another name."
            )


def _nearest(out: Path) -> Path:
    """The nearest folder above `out` that exists."""
    return next(folder for folder in Path(os.path.abspath(out)).parents if os.path.lexists(folder))


def _check_path(out: Path, overwrite: bool, *, folder: bool) -> None:
    kind = "folder" if folder else "file"
    if out.name in ("", ".."):
        raise CheckpointError(f"{str(out)!r} does not name a new {kind}. Give its name, as in out/{kind}.")
    try:
        str(out).encode()
    except UnicodeEncodeError:
        name = os.fsencode(out).decode(errors="backslashreplace")
        raise CheckpointError(
            f"{name} has a byte that is not UTF-8, as a run record needs. Choose another name."
        ) from None
    if os.path.lexists(out):
        if not overwrite:
            raise CheckpointError(f"{out} exists already. Choose another name or pass `overwrite=True`.")
        if out.is_symlink():
            raise CheckpointError(f"{out} is a symbolic link and is not overwritten. Give the {kind} itself.")
        if not (out.is_dir() if folder else out.is_file()):
            raise CheckpointError(f"{out} is not a {kind} and is not overwritten by one. Choose another name.")
    place = _nearest(out)
    if not place.is_dir():
        raise CheckpointError(f"{out} cannot be written: {place} is not a folder. Choose another place.")
    probe = _sibling(place / out.name, "try")
    with _disk_errors(out, every=True):
        probe.mkdir()
        with suppress(FileNotFoundError):  # the holder of the lock has removed it
            probe.rmdir()


@contextmanager
def new_folder(
    out: PathLike, *, overwrite: bool = False, marks: Sequence[str] = (RECORD,), folder: bool = True
) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `out` at the end of the block, and removed on an error.

    With `overwrite`, the old folder stays until the rename; `marks` as in `check_new`. A full or read-only disk
    becomes a CheckpointError. `folder` is False for a file, as in `new_file`.
    """
    out = Path(out)
    with claimed(out):
        _check_path(out, overwrite, folder=folder)
        _check_marks(out, marks)
        place = Path(os.path.abspath(out))
        temporary = _sibling(place)
        try:
            with _disk_errors(out):
                if folder:
                    temporary.mkdir()
                yield temporary
                for path in [*sorted(temporary.rglob("*")), temporary]:
                    sync(path)
                if os.path.lexists(place) and not overwrite:
                    raise CheckpointError(f"{out} was created by another program and is kept. Choose another name.")
                _swap(temporary, place)
        except BaseException:
            _remove(temporary)
            raise


def new_file(out: PathLike, *, overwrite: bool = False) -> AbstractContextManager[Path]:
    """Yield a temporary path, with the suffix of `out`, that is renamed to `out` at the end of the block."""
    return new_folder(out, overwrite=overwrite, marks=(), folder=False)


@contextmanager
def claimed(out: PathLike) -> Iterator[None]:
    """Hold the lock of an output while the block lasts; other runs get a CheckpointError.

    The operating system releases the lock, a hidden file next to the output, when its holder dies; the next holder
    removes what the dead run left. One thread may claim an output several times. Missing folders above the output are
    made, and removed at the end if they are empty. There is no lock where it is impossible (read-only, some network
    disks).
    """
    from filelock import FileLock, Timeout

    place = Path(os.path.realpath(Path(out).parent)) / Path(out).name
    file = place.parent / f".{place.name}.tuneport-lock"
    # A singleton is reentrant in its thread. It waits a moment, in case the last holder is just removing the file.
    lock = FileLock(file, timeout=0.2, is_singleton=True, fallback_to_soft=False)
    nested = lock.is_locked
    with ExitStack() as held:
        for folder in reversed([folder for folder in place.parents if not os.path.lexists(folder)]):
            with suppress(OSError):  # the check of the path says why
                folder.mkdir()
                held.callback(_remove, folder, empty=True)
        try:
            with _uninterrupted():
                if place.parent.is_dir():  # filelock would create it
                    held.enter_context(lock)
                if lock.is_locked and not nested:
                    held.callback(_remove_lock, file)
        except Timeout:
            raise CheckpointError(
                f"another run{_holder(file)} is writing {out}. Wait until it ends, or choose another name."
            ) from None
        except OSError:
            pass
        if lock.is_locked and not nested:
            with _disk_errors(Path(out)):
                file.write_text(str(os.getpid()), encoding="ascii")
            _clear(place)
        yield


@contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Context with a handler of the signals that end a command; those that are ignored (`nohup`) stay so."""
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before.setdefault(number, signal.signal(number, handler))
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Postpone the signals that end a command to the end of a short block, so that it is done or not begun."""
    waiting: list[int] = []
    try:
        with handled(lambda number, _: waiting.append(number)):
            yield
    finally:
        for number in waiting:
            signal.raise_signal(number)


def _remove_lock(file: Path) -> None:
    with _uninterrupted():
        file.unlink(missing_ok=True)


def _holder(lock: Path) -> str:
    try:
        return f" (process {int(lock.read_text(encoding='ascii')[:20])})"
    except (OSError, ValueError):  # on Windows a locked file cannot be read
        return ""


def _clear(place: Path) -> None:
    """Remove the temporary siblings of a killed run; an old output that it was replacing is renamed back."""
    for kind in ("old", "tmp", "try"):
        shape = re.compile(re.escape(f".{place.stem}.{kind}-") + "[0-9a-f]{8}" + re.escape(place.suffix))
        for left in sorted(path for path in place.parent.iterdir() if shape.fullmatch(path.name)):
            if kind == "old" and not os.path.lexists(place):
                os.rename(left, place)
            else:
                _remove(left)


def _remove(path: Path, *, empty: bool = False) -> None:
    """Remove a file or a folder if it exists, only an `empty` folder on request; ignore errors."""
    with suppress(OSError):
        if empty:
            path.rmdir()
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _swap(temporary: Path, place: Path) -> None:
    """Rename `temporary` to `place`; an old folder is renamed first, renamed back on failure, and then removed."""
    if not place.is_dir():
        os.replace(temporary, place)
        sync(place.parent)
        return
    old = _sibling(place, "old")
    try:
        os.rename(place, old)
        os.rename(temporary, place)
        sync(place.parent)
        shutil.rmtree(old)
    except BaseException as error:
        if not os.path.lexists(place):
            os.rename(old, place)
        elif os.path.lexists(temporary) or not isinstance(error, OSError):
            _remove(old)
        else:
            raise CheckpointError(
                f"{place} is written, but the folder that it replaced could not be removed ({error}). Remove {old}."
            ) from error
        raise


def _sibling(path: Path, kind: str = "tmp") -> Path:
    """A new hidden path in the same folder, hence on the same disk."""
    return path.parent / f".{path.stem}.{kind}-{secrets.token_hex(4)}{path.suffix}"


@contextmanager
def _disk_errors(out: Path, *, every: bool = False) -> Iterator[None]:
    """Turn disk errors about `out` into a CheckpointError; with `every`, all OSErrors."""
    try:
        yield
    except OSError as error:
        # a failed copy names the file that it read as `filename`, the written one as `filename2`
        files = [file for file in (error.filename, error.filename2) if isinstance(file, str)]
        parent = Path(os.path.abspath(out)).parent
        about_out = not files or any(parent in Path(os.path.abspath(file)).parents for file in files)
        if every or (about_out and error.errno in _DISK_ERRORS):
            reason = _DISK_ERRORS.get(error.errno or 0, f"{error}. Choose another place")
            raise CheckpointError(f"{out} cannot be written: {reason}.") from error
        raise


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk; links are skipped."""
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
