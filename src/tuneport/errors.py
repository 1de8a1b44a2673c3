"""The errors a user can meet: one base class to catch, a few children that say where to look.

Every message says what was given, what was expected and what to do about it, in one line. A parameter is named in
backquotes, as in Python: `samples`, `labels="source"`, `overwrite=True`. The command line prints it as an option.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LONGEST = 1200  # characters of a message: it may repeat what was given, which may be long


class TuneportError(Exception):
    """Base class of every error that tuneport raises on purpose. A long message is cut in the middle."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, LONGEST))


class OptionError(TuneportError):
    """An option has a value that is not allowed; the command line exits with code 2."""


class CheckpointError(TuneportError):
    """A checkpoint is missing, malformed, or does not fit its partner."""


class DataError(TuneportError):
    """Calibration or evaluation data cannot be read or do not fit the request."""


class PairingError(TuneportError):
    """The layers of source and target cannot be paired as asked."""


class CaptureError(TuneportError):
    """A model could not be measured."""


class MethodError(TuneportError):
    """A method was asked for something that it cannot do."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that `name` is unknown, guess the intended one, and list what there is.

    >>> unknown_name("method", "bicco", ["naive", "bico"])
    "unknown method 'bicco'. Did you mean 'bico'? Known: bico, naive."
    """
    names, given = sorted(known), shortened(name)
    near = difflib.get_close_matches(given, names, n=1)
    guess = f" Did you mean '{near[0]}'?" if near else ""
    return f"unknown {kind} '{given}'.{guess} Known: {', '.join(names)}."


def first_of(items: Iterable[str], limit: int = 10) -> str:
    """Join the first `limit` items, which may come from files, and count the rest.

    >>> first_of(["a", "b", "c"], limit=2)
    'a, b, ... and 1 more'
    """
    listed = [printable(shortened(item)) for item in items]
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown}, ... and {len(listed) - limit} more"


def printable(text: str) -> str:
    """A text from a file in which what is not printable is replaced, so that a message stays one line."""
    return "".join(mark if mark.isprintable() else " " if mark.isspace() else "\ufffd" for mark in text)


def is_text(name: str) -> bool:
    """True if a name from a file can be written as UTF-8: it has no lone surrogates."""
    return not any("\ud800" <= mark <= "\udfff" for mark in name)


def shortened(name: object, most: int = 200) -> str:
    """A name or value from a file, cut in the middle if it is long, so that a message stays readable."""
    text = str(name)
    return text if len(text) <= most else f"{text[: most // 2 - 1]} ... {text[-(most - most // 2 - 4) :]}"


def brief(error: BaseException) -> str:
    """What another library says went wrong: the first line of its text, or the kind of error where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__


def lacks_memory(error: BaseException) -> bool:
    """Whether an accelerator had no memory left; torch has several classes for that."""
    return isinstance(error, RuntimeError) and any(said in str(error) for said in ("out of memory", "ALLOC_FAILED"))


@contextmanager
def reraised(what: str, kind: type[TuneportError] = CheckpointError) -> Iterator[None]:
    """Context in which any error of another library becomes one line, also a panic in Rust, which is no Exception.

    A lack of memory on a device is no fault of a model, and is raised as it is.
    """
    try:
        yield
    except (TuneportError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if lacks_memory(error):
            raise
        raise kind(f"{what}: {brief(error)}.") from error
