"""Places for outputs: checked before any work, filled beside their name, put in place whole or not at all.

Rules kept here: an output appears under its final name only when it is complete and on disk; an existing one
is replaced only on request, only where it is an output too, and survives a failure; a link is never followed;
one run at a time writes an output, and removes what a killed run left next to it; disk errors become one
CheckpointError.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from ..errors import CheckpointError
from .sizes import format_bytes

PathLike = str | os.PathLike[str]
RECORD = "tuneport.json"  # the run record, by which an output folder is known

_WAYS_OUT = {
    errno.ENOSPC: "the disk is full. Free some space or choose another place",
    errno.EDQUOT: "the disk quota is used up. Free some space or choose another place",
    errno.EROFS: "the file system is read-only. Choose another place",
    errno.EACCES: "permission denied. Choose a place that you may write to",
    errno.EPERM: "permission denied. Choose a place that you may write to",
}


def check_new_folder(
    out: PathLike,
    overwrite: bool = False,
    *,
    needed_bytes: int = 0,
    inputs: Iterable[PathLike] = (),
    marks: Sequence[str] = (RECORD,),
) -> None:
    """Raise a CheckpointError unless the folder `out` can be written: to be called before any work.

    It must not exist (with `overwrite`: or be a real folder that is empty or holds all `marks`, the files by which a
    command knows its own outputs), its parent must be there, be writable and have `needed_bytes` free. An overwrite
    must spare the `inputs`: `out` may neither hold one nor be a part of one.
    """
    out = Path(out)
    _check_place(out, overwrite, folder=True)
    _check_spares(out, inputs)
    _check_ours(out, marks)
    free = shutil.disk_usage(Path(os.path.realpath(out)).parent).free
    if needed_bytes > free:
        raise CheckpointError(
            f"{out} needs about {format_bytes(needed_bytes)}, but only {format_bytes(free)} are free in {out.parent}. "
            "Free some space or choose another place."
        )


def check_new_file(out: PathLike, overwrite: bool = False, *, inputs: Iterable[PathLike] = ()) -> None:
    """Raise a CheckpointError unless the file `out` can be written: `check_new_folder` for one file of weights.

    It must be known by its name, and not replace any of the `inputs`, nor a file inside one that is a folder.
    """
    _check_place(Path(out), overwrite, folder=False)
    if os.path.lexists(out):
        _check_spares(Path(out), [file for given in inputs for file in (given, *_files_in(given))])
    check_file_name(out)


def check_file_name(out: PathLike) -> None:
    """Raise a CheckpointError unless a file has the name of a weight file: it could be written, but not read again."""
    if Path(out).suffix != ".safetensors":
        raise CheckpointError(f"{out} does not end in .safetensors, by which tuneport knows a file of weights. Add it.")


def _files_in(path: PathLike) -> list[Path]:
    return [file for file in Path(path).rglob("*") if file.is_file()] if Path(path).is_dir() else []


def _check_spares(out: Path, inputs: Iterable[PathLike]) -> None:
    """Raise a CheckpointError if writing `out` would destroy an input, or what there is of one."""
    place = Path(os.path.realpath(out))
    for given in inputs:
        there = Path(os.path.realpath(given))
        if place in (there, *there.parents):
            raise CheckpointError(f"{out} cannot be overwritten: it holds the input {given}. Choose another name.")
        if there in place.parents and os.path.lexists(out):
            raise CheckpointError(f"{out} cannot be overwritten: it is part of the input {given}. Choose another name.")


def _check_ours(out: Path, marks: Sequence[str]) -> None:
    """Raise a CheckpointError if there is a folder with files in it that the command at hand has not written."""
    missing = [mark for mark in marks if not (out / mark).is_file()]
    if missing and out.is_dir() and any(out.iterdir()):
        raise CheckpointError(
            f"{out} is not overwritten: it is not empty, and no output of this command (no {missing[0]} in it). "
            "Remove it by hand or choose another name."
        )


def _check_place(out: Path, overwrite: bool, *, folder: bool) -> None:
    kind = "folder" if folder else "file"
    if out.name in ("", ".."):
        raise CheckpointError(f"{str(out)!r} does not name a new {kind}. Give its name, as in out/{kind}.")
    if os.path.lexists(out):
        if not overwrite:
            raise CheckpointError(f"{out} exists already. Choose another name or pass --overwrite.")
        if out.is_symlink():
            raise CheckpointError(f"{out} is a symbolic link and is not overwritten. Give the {kind} itself.")
        if not (out.is_dir() if folder else out.is_file()):
            raise CheckpointError(f"{out} is not a {kind} and is not overwritten by one. Choose another name.")
    if not out.parent.is_dir():
        raise CheckpointError(f"{out} cannot be written: there is no folder {out.parent}. Create it first.")
    probe = _beside(out, "try")
    with _writing(out, every=True):
        probe.mkdir()
        probe.rmdir()


@contextmanager
def new_folder(out: PathLike, *, overwrite: bool = False, marks: Sequence[str] = (RECORD,)) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out` when the block ends well, and vanishes when it does not.

    The temporary folder is a hidden sibling, so that the last step is a rename. With `overwrite`, the old
    folder stays in place until then; `marks` as of `check_new_folder`. A full or read-only disk becomes a
    CheckpointError.
    """
    with _in_place_of(Path(out), overwrite, marks, folder=True) as temporary:
        yield temporary


@contextmanager
def new_file(out: PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path, with the suffix of `out`, that becomes `out` when the block ends well."""
    with _in_place_of(Path(out), overwrite, (), folder=False) as temporary:
        yield temporary


@contextmanager
def _in_place_of(out: Path, overwrite: bool, marks: Sequence[str], *, folder: bool) -> Iterator[Path]:
    with claimed(out):
        _check_place(out, overwrite, folder=folder)
        _check_ours(out, marks)
        place = Path(os.path.abspath(out))
        temporary = _beside(place)
        try:
            with _writing(out):
                if folder:
                    temporary.mkdir()
                yield temporary
                for path in [*sorted(temporary.rglob("*")), temporary]:
                    sync(path)
                if os.path.lexists(place) and not overwrite:
                    raise CheckpointError(f"{out} has appeared meanwhile and is kept. Choose another name.")
                _swap(temporary, place)
        except BaseException:
            _remove(temporary)
            raise


@contextmanager
def claimed(out: PathLike) -> Iterator[None]:
    """Hold the lock of an output while the block lasts; other runs get a CheckpointError.

    The lock is held on a hidden file next to the output, which is removed at the end. The operating system releases it
    when its holder dies, and the next holder removes what the dead run left. One thread may claim an output several
    times. Nothing happens where a lock is impossible (no such folder, read-only, some network disks).
    """
    place = Path(os.path.realpath(Path(out).parent)) / Path(out).name
    file = place.parent / f".{place.name}.tuneport-lock"
    # A singleton is reentrant in its thread. It waits a moment, in case the last holder is just removing the file.
    lock = FileLock(file, timeout=0.2, is_singleton=True, fallback_to_soft=False)
    nested = lock.is_locked
    with ExitStack() as held:
        try:
            if place.parent.is_dir():  # filelock would create it
                held.enter_context(lock)
        except Timeout:
            raise CheckpointError(
                f"another run{_holder(file)} is writing {out}. Wait until it ends, or choose another name."
            ) from None
        except OSError:
            pass
        if lock.is_locked and not nested:
            held.callback(file.unlink, missing_ok=True)
            file.write_text(str(os.getpid()), encoding="ascii")
            _clear(place)
        yield


def _holder(lock: Path) -> str:
    try:
        return f" (process {int(lock.read_text(encoding='ascii')[:20])})"
    except (OSError, ValueError):  # on Windows a locked file cannot be read
        return ""


def _clear(place: Path) -> None:
    """Remove what a killed run left beside an output; one that it was about to replace is put back."""
    for kind in ("old", "tmp"):
        shape = re.compile(re.escape(f".{place.stem}.{kind}-") + "[0-9a-f]{8}" + re.escape(place.suffix))
        for left in sorted(path for path in place.parent.iterdir() if shape.fullmatch(path.name)):
            if kind == "old" and not os.path.lexists(place):
                os.rename(left, place)
            else:
                _remove(left)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; what cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _swap(temporary: Path, place: Path) -> None:
    """Rename `temporary` to `place`; an old folder is moved aside first, and back again on failure."""
    if not place.is_dir():
        os.replace(temporary, place)
        sync(place.parent)
        return
    aside = _beside(place, "old")
    os.rename(place, aside)
    try:
        os.rename(temporary, place)
    except BaseException:
        os.rename(aside, place)
        raise
    sync(place.parent)
    try:
        shutil.rmtree(aside)
    except OSError as error:
        raise CheckpointError(
            f"{place} is written, but what it replaced could not be removed ({error}). Remove {aside}."
        ) from error


def _beside(path: Path, kind: str = "tmp") -> Path:
    """Return a fresh hidden path in the same folder, hence on the same disk."""
    return path.parent / f".{path.stem}.{kind}-{secrets.token_hex(4)}{path.suffix}"


@contextmanager
def _writing(out: Path, *, every: bool = False) -> Iterator[None]:
    """Turn what the disk says against writing `out` into a CheckpointError; `every`: any OSError at all."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors reports the disk's errors as text.
        match = re.search(r"os error (\d+)", str(error))
        code = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
        # a copy that fails names the file that it read first
        files = [f for f in (getattr(error, "filename", None), getattr(error, "filename2", None)) if isinstance(f, str)]
        parent = Path(os.path.abspath(out)).parent
        here = not files or any(parent in Path(os.path.abspath(file)).parents for file in files)
        if every or (here and code in _WAYS_OUT):
            way_out = _WAYS_OUT.get(code or 0, f"{error}. Choose another place")
            raise CheckpointError(f"{out} cannot be written: {way_out}.") from error
        raise


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk; links are left alone."""
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
