"""What the commands say: results on stdout, progress, notes and errors on stderr.

Texts are printed unchanged, except that control characters are replaced: paths are neither wrapped nor read as markup.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..types import Events

out_console = Console()
err_console = Console(stderr=True)


def emit_json(content: Any) -> None:
    """One JSON object on stdout."""
    from ..report.record import to_json

    sys.stdout.write(to_json(content) + "\n")


def show(rows: Iterable[Sequence[str]], *columns: str, title: str | None = None, fold: bool = False) -> None:
    """A table on stdout; cells that are too long are cut, or folded with `fold`."""
    table = Table(title=None if title is None else _plain(title, "table.title"))
    for column in columns:
        table.add_column(_plain(column), overflow="fold" if fold else "ellipsis")
    for row in rows:
        table.add_row(*map(_plain, row))
    out_console.print(table)


def show_list(rows: Iterable[tuple[str, str]], style: str) -> None:
    """Labels in a style, each with its text, on stdout."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for label, text in rows:
        table.add_row(_plain(label, style), _plain(text))
    out_console.print(table)


def say(text: str) -> None:
    """One line on stdout."""
    out_console.print(_harmless(text), markup=False, highlight=False, soft_wrap=True)


def tell(text: str) -> None:
    """One line on stderr."""
    err_console.print(_harmless(text), markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line on stderr that is no error, with options for parameters."""
    tell(f"note: {as_options(text)}")


def fail(kind: str, text: str, code: int = 1) -> None:
    """One line on stderr that says what went wrong, with options for parameters; then exit."""
    err_console.print(f"[red]{kind}:[/red] ", end="")
    tell(as_options(text))
    sys.exit(code)


def as_options(text: str) -> str:
    """Replace the parameters that a library message names in backquotes by options of the command line.

    A parameter that no command has keeps its Python spelling, without the quotes.

    >>> as_options('lower `samples`, or pass `overwrite=True` or `exclude=["*.bias", "head"]`.')
    "lower --samples, or pass --overwrite or --exclude '*.bias' --exclude head."
    """
    from . import parameter_names

    known = parameter_names()

    def spelled(found: re.Match[str]) -> str:
        name, value = found[1].rstrip("_"), found[2]
        if name not in known:
            return found[0].strip("`")
        flag = f"--{name.replace('_', '-')}"
        return flag if value is None else " ".join(f"{flag} {word}".rstrip() for word in _words(value))

    return re.sub(r"`([a-z_]+)(?:=([^`]*))?`", spelled, text)


def _words(value: str) -> list[str]:
    """The words that a Python value is on the command line; a placeholder such as FILE stays."""
    try:
        found = ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return [value]
    if found is True:
        return [""]
    if isinstance(found, dict):
        found = [f"{key}={value or 'none'}" for key, value in found.items()]
    each = found if isinstance(found, (list, tuple)) else [found]
    return [shlex.quote(str(word)) for word in each]


def _harmless(text: str) -> str:
    """One line without control characters."""
    return "".join(
        mark if mark.isprintable() else " " if mark.isspace() else "\N{REPLACEMENT CHARACTER}" for mark in text
    )


def _plain(text: str, style: str = "") -> Text:
    """Text for a table, without control characters."""
    return Text(_harmless(text), style)


EVERY = 30.0  # seconds between two lines of progress where stderr is no terminal


class _Bars:
    """Bars on a terminal; elsewhere a line on stderr now and then."""

    def __init__(self, transient: bool) -> None:
        words = TextColumn("{task.description:24}", markup=False)
        columns = (words, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=err_console, transient=transient, disable=not err_console.is_terminal)
        self._told = time.monotonic()

    def __enter__(self) -> _Bars:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def add(self, words: str, total: int | None) -> TaskID:
        return self._bar.add_task(words, total=total)

    def update(self, task: TaskID, **changes: Any) -> None:
        """As that of rich; `advance` counts steps, `description` replaces the words."""
        self._bar.update(task, **changes)
        if self._bar.disable and time.monotonic() - self._told >= EVERY:
            found = self._bar.tasks[task]
            of = "" if found.total is None else f" of {found.total:.0f}"
            tell(f"{found.description}: {found.completed:.0f}{of}")
            self._told = time.monotonic()


class Bar(Events):
    """A bar on stderr that follows a run; a context."""

    def __init__(self, words: str) -> None:
        self._bars = _Bars(transient=True)
        self._task = self._bars.add(words, None)

    def __enter__(self) -> Bar:
        self._bars.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.__exit__(*error)

    def note(self, text: str) -> None:
        note(text)

    def step(self, name: str) -> None:
        self._bars.update(self._task, description=name)

    def plan(self, total: int) -> None:
        self._bars.update(self._task, total=total or None, completed=0)

    def advance(self, count: int) -> None:
        self._bars.update(self._task, advance=count)

    def mark(self, mark: Any) -> None:
        agreement = f"agreement {100 * mark.agreement:.0f} %"
        self.step(f"distilling, loss {mark.held_out_loss:.3g}, {agreement}")


def listening(words: str, first: bool) -> AbstractContextManager[Events]:
    """A bar for the first of several processes; the others say nothing."""
    return Bar(words) if first else nullcontext(Events())


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per named stage; the callback says (stage, done, total)."""
    with _Bars(transient=False) as bar:
        tasks: dict[str, TaskID] = {}

        def stage(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add(name, total)
            bar.update(tasks[name], completed=done, total=total)

        yield stage
