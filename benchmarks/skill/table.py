"""The table of rows, in Markdown: mean and standard deviation over the draws; what is not there is said."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.skill.cells import ONCE, TASKS, Cell
from benchmarks.skill.rows import Row, failed, finished, key

HEAD = "| pair | arm | {} | gap closed, % | flips | neutral, % | seconds | GiB | draws |"
NAMES = {"accuracy": "accuracy, %", "f1": "F1, %", "bits": "bits per character"}
SCORES = {
    "choices": ("accuracy",),
    "answer": ("accuracy",),
    "slots": ("f1", "accuracy"),
    "reference": ("bits",),
    "passages": ("bits",),
}
NOTE = (
    "Mean ± standard deviation over the draws. Gap closed: (score - target) / (all-data - target). Flips: test samples "
    "that the old model has right and this one wrong. Neutral: change of the bits per character of ordinary text."
)


def table(
    rows: Sequence[Row],
    pairs: Sequence[str],
    tasks: Sequence[str],
    arms: Sequence[str],
    draws: Sequence[int],
    small: bool = False,
) -> str:
    """Return the page of these cells."""
    done, lost = finished(rows), failed(rows)
    lines, notes = [NOTE, ""], list[str]()
    for task in tasks:
        kinds = SCORES[TASKS[task].kind]
        lines += [f"## {task}", "", HEAD.format(" | ".join(NAMES[kind] for kind in kinds))]
        lines += ["|" + "---|" * (8 + len(kinds))]
        for pair in pairs:
            for label in arms:
                arm, _, count = label.partition("@")
                wanted = [None] if arm in ONCE else list(draws)
                cells = [Cell(pair, task, arm, int(count) if count else None, draw) for draw in wanted]
                found = [done[key(cell, small)] for cell in cells if key(cell, small) in done]
                reasons = {lost[key(cell, small)] for cell in cells if key(cell, small) in lost}
                notes += [f"- {pair}, {task}, {label}: {reason}" for reason in sorted(reasons)]
                ends = [_once(done, pair, task, end, kinds[0], small) for end in ("target", "all-data")]
                lines.append(_line(pair, label, found, kinds, len(wanted), *ends))
        lines.append("")
    if notes:
        lines += ["Failed:", "", *notes, ""]
    return "\n".join(lines)


def _once(done: dict[Any, Row], pair: str, task: str, arm: str, kind: str, small: bool) -> float | None:
    row = done.get(key(Cell(pair, task, arm, None, None), small))
    return None if row is None else float(row["scores"][kind])


def _line(
    pair: str,
    label: str,
    found: Sequence[Row],
    kinds: Sequence[str],
    wanted: int,
    target: float | None,
    bound: float | None,
) -> str:
    if not found:
        return f"| {pair} | {label} | " + " | ".join(["missing"] * len(kinds)) + f" | | | | | | 0 of {wanted} |"
    values = {kind: [float(row["scores"][kind]) for row in found] for kind in kinds}
    scores = [_spread(values[kind], 3 if kind == "bits" else 1) for kind in kinds]
    closed = ""
    if target is not None and bound is not None and bound != target and label != "old":
        closed = _spread([100 * (value - target) / (bound - target) for value in values[kinds[0]]], 0)
    flipped = [row["flips"] for row in found if row.get("flips") is not None]
    neutral = [100 * (row["neutral"] / row["neutral_base"] - 1) for row in found]
    cells = [
        *scores,
        closed,
        _spread(flipped, 0) if flipped else "",
        f"{statistics.mean(neutral):+.1f}",
        f"{statistics.mean(row['seconds'] for row in found):.0f}",
        f"{max(row['peak_gib'] for row in found):.1f}",
        f"{len(found)} of {wanted}" + ", the rest missing" * (len(found) < wanted),
    ]
    return f"| {pair} | {label} | " + " | ".join(cells) + " |"


def _spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation; one value alone has none."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{digits}f}"
