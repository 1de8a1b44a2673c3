"""What the commands say: results on stdout, progress, notes and errors on stderr.

Texts are printed unchanged, except that control characters are replaced: paths are not read as markup. Sentences are
wrapped between words on a terminal, and nowhere else.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from ..errors import printable
from ..types import Events

out_console = Console()
err_console = Console(stderr=True)


def emit_json(content: Any) -> None:
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


def say(text: str, *, prose: bool = False) -> None:
    """One line on stdout; prose is wrapped between words on a terminal, and a command to copy is not."""
    _print(out_console, _plain(text), wrap=prose)


def tell(text: str) -> None:
    """One line on stderr, wrapped between words on a terminal."""
    _print(err_console, _plain(text), wrap=True)


def _print(console: Console, text: Text, *, wrap: bool) -> None:
    console.print(text, soft_wrap=not (wrap and console.is_terminal))


def note(text: str) -> None:
    """One line on stderr that is no error, with options for parameters."""
    tell(f"note: {as_options(text)}")


def fail(kind: str, text: str, code: int = 1) -> None:
    """One line on stderr that says what went wrong, with options for parameters; then exit."""
    _print(err_console, _plain(f"{kind}: ", "red").append(_plain(as_options(text))), wrap=True)
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


def _plain(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def time_left(spent: float, share: float) -> str:
    """The time that the rest of a run takes if it goes on as before; nothing is known before a hundredth is done.

    >>> time_left(60, 0.25), time_left(600, 0.05), time_left(3, 0.001), time_left(3, 1)
    ('3 min left', '3.2 h left', '', '')
    """
    if not 0.01 <= share < 1:
        return ""
    seconds = spent * (1 - share) / share
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


EVERY = 30.0  # seconds between two lines of progress where stderr is no terminal


class Bar(Events):
    """A context that shows the share of a run that is done: a bar on a terminal, elsewhere a line now and then.

    A step that has units of the plan is worth them whether it takes fewer samples than it said or more. A step with
    samples and no units is measured on its own.
    """

    def __init__(self, words: str) -> None:
        text = TextColumn("{task.description:24}", markup=False)
        columns = (text, BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Progress(*columns, console=err_console, transient=True, disable=not err_console.is_terminal)
        self._task = self._bar.add_task(words, total=None, left="")
        self._told = self._begun = time.monotonic()
        self._before = 0.0  # units of the plan before this step
        self._units, self._count, self._done = 0.0, 0, 0  # of this step: its units, samples, and samples done

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        note(text)

    def step(self, name: str, units: float = 0.0, count: int = 0) -> None:
        self._before += self._units
        self._units, self._count, self._done = units, count, 0
        if count and not units:
            self.plan(count)
        self._show(description=name)

    def plan(self, total: float) -> None:
        if self._units:
            self._count, self._done = int(total), 0
            return
        self._before, self._begun = 0.0, time.monotonic()
        self._show(total=total or None)

    def extend(self, units: float) -> None:
        if total := self._bar.tasks[0].total:
            self._show(total=total + units)

    def advance(self, count: int) -> None:
        if self._units:
            self._done += count
        else:
            self._before += count
        self._show()

    def mark(self, mark: Any) -> None:
        agreement = f"agreement {100 * mark.agreement:.0f} %"
        self._show(description=f"distilling, loss {mark.held_out_loss:.3g}, {agreement}")

    def _show(self, **changes: Any) -> None:
        done = min(self._done / self._count, 1.0) if self._count else 0.0
        self._bar.update(self._task, completed=self._before + self._units * done, **changes)
        found, now = self._bar.tasks[0], time.monotonic()
        share = min(found.completed / found.total, 1.0) if found.total else 0.0
        left = time_left(now - self._begun, share)
        self._bar.update(self._task, left=left)
        if self._bar.disable and now - self._told >= EVERY:
            percent = f": {100 * share:.0f} % done" if found.total else ""
            tell(f"{found.description}{percent}{left and f', {left}'}")
            self._told = now
