"""What became of each fine-tune of a fleet: one row each, in `summary.json` and `summary.html`.

Rows are sorted by what needs a look. A later start reads them, and so knows the lines for which the old model stays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from .. import __version__
from ..errors import CheckpointError
from ..io.checkpoint import read_json
from ..io.output import new_file
from ..report.page import render
from ..report.record import to_json
from ..report.summary import table_of
from .lines import Line

FORMAT = "tuneport-fleet"
TABLE, PAGE = "summary.json", "summary.html"
LARGEST = 10**8  # bytes of a table
Status = Literal["failed", "kept", "written"]
COLUMNS = {
    "adapter": ("name", ""),
    "old score": ("old", ".4g"),
    "new score": ("new", ".4g"),
    "route": ("route", ""),
    "flips": ("flips", "d"),
    "seconds": ("seconds", ".1f"),
    "decision or error": ("note", ""),
}
ORDER: tuple[Status, ...] = ("failed", "kept", "written")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one fine-tune."""

    status: Status  # written, kept (the old model stays), or failed
    old: float | None = None  # score of the old model, as in the table of routes
    new: float | None = None  # that of the new model
    route: str | None = None  # the route that was taken
    flips: int | None = None  # held-out samples that the old model has right and the new one wrong
    seconds: float | None = None  # of the upgrade, with what its worker opened for it
    note: str = ""  # the decision, or the error
    line: int  # where it is in the list
    finetuned: str  # what it reads
    out: str  # where it is written
    fingerprint: str  # of what its line asks for and reads
    earlier: bool = False  # whether an earlier start did it


def row_of(line: Line, record: Mapping[str, Any], **more: Any) -> Row:
    """The row of an upgrade that was done."""
    by_name = {row["name"]: row for row in record["routes"]}
    chosen = by_name.get(record["chosen"], {})
    found = {"route": record["chosen"], "old": by_name["old"]["score"], "note": record["decision"]}
    found |= {"new": chosen.get("score"), "flips": chosen.get("flips")}
    return Row(status="written" if chosen else "kept", **_about(line), **found, **more)


def failed(line: Line, reason: str, **more: Any) -> Row:
    """The row of an upgrade that failed."""
    return Row(status="failed", note=" ".join(reason.split()), **_about(line), **more)


def _about(line: Line) -> dict[str, Any]:
    inputs = line.inputs
    about = {"line": line.number, "finetuned": " + ".join(inputs.finetuned), "out": inputs.out}
    return {**about, "fingerprint": line.fingerprint}


@dataclass(frozen=True)
class Fleet:
    """The rows of all fine-tunes of a list, sorted by what needs a look, and the folder of the summary."""

    folder: Path
    rows: tuple[Row, ...]
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Fleet({self.folder}: {self.headline})"

    def name(self, row: Row) -> str:
        """A short name of a fine-tune: that of its output, in the folder of the fleet if it is there."""
        inside = os.path.relpath(row.out, self.folder)
        return row.out if inside.startswith(os.pardir) else inside

    def count(self, status: Status) -> int:
        """How many fine-tunes have this status."""
        return sum(row.status == status for row in self.rows)

    @property
    def headline(self) -> str:
        """What became of them all."""
        words = {"written": "written", "kept": "stay with the old model", "failed": "failed"}
        found = [f"{self.count(status)} {words[status]}" for status in reversed(ORDER) if self.count(status)]
        earlier = sum(row.earlier for row in self.rows)
        return ", ".join(found) + (f"; {earlier} of them by an earlier start" if earlier else "")

    def to_json(self) -> dict[str, Any]:
        """The table as plain values."""
        counts: dict[str, Any] = {status: self.count(status) for status in ORDER}
        rows = [{"name": self.name(row), **asdict(row)} for row in self.rows]
        about = {"format": FORMAT, "tuneport": __version__, "headline": self.headline, "seconds": self.seconds}
        return {**about, **counts, "rows": rows}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The heads and the rows of the table; the last column has the decision or the error."""
        rows = [{**asdict(row), "name": self.name(row), "route": row.route or row.status} for row in self.rows]
        return table_of(rows, COLUMNS)

    def page(self) -> str:
        """The table as a page."""
        heads, rows = self.table()
        return render("fleet.html.jinja", summary=self.to_json(), heads=heads, rows=rows)

    def write(self) -> None:
        """Write the table and the page."""
        for name, text in (
            (TABLE, to_json(self.to_json()) + "\n"),
            (PAGE, self.page()),
        ):
            with new_file(self.folder / name, overwrite=True) as file:
                file.write_text(text, encoding="utf-8")


def fleet_of(folder: Path, rows: Iterable[Row], seconds: float = 0.0) -> Fleet:
    """Sort rows by what needs a look: failures, old models that stay, then the most flips."""
    ordered = sorted(rows, key=lambda row: (ORDER.index(row.status), -(row.flips or 0), row.line))
    return Fleet(folder, tuple(ordered), round(seconds, 3))


def earlier_rows(folder: Path) -> Sequence[Row]:
    """The rows that an earlier start has written, if any; files of something else are refused."""
    table = folder / TABLE
    if not os.path.lexists(table) and not os.path.lexists(folder / PAGE):
        return ()
    known = get_type_hints(Row)
    known["status"] = str
    try:
        found = read_json(table, "the summary of a fleet", limit=LARGEST)
        if found["format"] != FORMAT:
            raise ValueError
        rows = [Row(**{key: row[key] for key in known if key in row}) for row in found["rows"]]
        for row in rows:
            if row.status not in ORDER or not all(isinstance(getattr(row, name), kind) for name, kind in known.items()):
                raise ValueError
        return rows
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds a {TABLE} or {PAGE} that is not the summary of a fleet. Choose another `out`."
        ) from error
