"""The table of rows, in Markdown: mean and standard deviation over the draws; what is not there is said."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.skill.cells import Cell, cells_of
from benchmarks.skill.groups import Group
from benchmarks.skill.rows import Row, failed, finished, key

HEAD = "| pair | arm | {} | gap closed, % | flips | neutral, % | seconds | GiB | draws |"
NAMES = {"accuracy": "accuracy, %", "f1": "F1, %", "bits": "bits per character"}
NOTE = (
    "Mean ± standard deviation over the draws. Gap closed: (score - target) / (all data - target). Flips: test samples "
    "that the old model has right and this one wrong. Neutral: change of the bits per character of ordinary text."
)


@dataclass(frozen=True)
class Table:
    """Rows of the cells of a group."""

    group: Group
    rows: Sequence[Row]
    draws: Sequence[int] = (0, 1, 2)
    small: bool = False

    @cached_property
    def _done(self) -> dict[tuple[object, ...], Row]:
        return finished(self.rows)

    def cells(self, pair: str, task: str, label: str) -> list[Cell]:
        """The cells of an arm: one for each draw, or one."""
        return cells_of([(pair, task)], [label], self.draws)

    def found(self, pair: str, task: str, label: str) -> list[Row]:
        """The rows of an arm that are there."""
        wanted = (key(cell, self.small) for cell in self.cells(pair, task, label))
        return [self._done[each] for each in wanted if each in self._done]

    def scores(self, pair: str, task: str, label: str, kind: str | None = None) -> list[float]:
        """A score of each draw, the main one of the task unless it is named."""
        kind = kind or self.group.scores(task)[0]
        return [float(row["scores"][kind]) for row in self.found(pair, task, label)]

    def closed(self, pair: str, task: str, label: str) -> list[float]:
        """The share of the gap between the target and the one that is fine-tuned on all data, in %, of each draw."""
        named = next(arm for arm in self.group.arms if arm.partition("@")[0] == "target")
        target, bound = self.scores(pair, task, named), self.group.whole(Cell(pair, task, "", None, None))
        whole = self.scores(pair, task, "all-data") if bound is None else [bound]
        if not target or not whole or statistics.mean(target) == statistics.mean(whole):
            return []
        base = statistics.mean(target)
        return [100 * (each - base) / (statistics.mean(whole) - base) for each in self.scores(pair, task, label)]

    def page(self, pairs: Sequence[str], tasks: Sequence[str], arms: Sequence[str]) -> str:
        """Return the page of these cells."""
        lost = failed(self.rows)
        lines, notes = [NOTE, ""], list[str]()
        for task in tasks:
            kinds = self.group.scores(task)
            lines += [f"## {task}", "", HEAD.format(" | ".join(NAMES[kind] for kind in kinds))]
            lines += ["|" + "---|" * (8 + len(kinds))]
            for pair, _ in self.group.places(pairs, [task]):
                for label in arms:
                    keys = [key(cell, self.small) for cell in self.cells(pair, task, label)]
                    reasons = sorted({lost[each] for each in keys if each in lost})
                    notes += [f"- {pair}, {task}, {label}: {reason}" for reason in reasons]
                    lines.append(self._line(pair, task, label))
            lines.append("")
        if notes:
            lines += ["Failed:", "", *notes, ""]
        return "\n".join(lines)

    def _line(self, pair: str, task: str, label: str) -> str:
        found, kinds, wanted = self.found(pair, task, label), self.group.scores(task), self.cells(pair, task, label)
        if not found:
            lost = " | ".join(["missing"] * len(kinds))
            return f"| {pair} | {label} | {lost} | | | | | | 0 of {len(wanted)} |"
        scores = [spread(self.scores(pair, task, label, kind), 3 if kind == "bits" else 1) for kind in kinds]
        closed = [] if label == "old" else self.closed(pair, task, label)
        flipped = [row["flips"] for row in found if row.get("flips") is not None]
        neutral = [100 * (row["neutral"] / row["neutral_base"] - 1) for row in found if "neutral" in row]
        cells = [
            *scores,
            spread(closed, 0) if closed else "",
            spread(flipped, 0) if flipped else "",
            f"{statistics.mean(neutral):+.1f}" if neutral else "",
            f"{statistics.mean(row['seconds'] for row in found):.0f}",
            f"{max(row['peak_gib'] for row in found):.1f}",
            f"{len(found)} of {len(wanted)}" + ", the rest missing" * (len(found) < len(wanted)),
        ]
        return f"| {pair} | {label} | " + " | ".join(cells) + " |"


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation; one value alone has none."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
