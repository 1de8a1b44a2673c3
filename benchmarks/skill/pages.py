"""Tables of docs/results.md and of the README, from the committed rows; what is not there is said.

A score is the mean over three draws with its standard deviation, or over so many as are in brackets, or that of one
draw. A dash is what nobody has made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, median

from benchmarks.rows import rows_in
from benchmarks.skill.groups import GROUPS
from benchmarks.skill.rows import Row, failed, finished
from benchmarks.skill.rows import key as key_of_cell
from benchmarks.skill.table import NAMES, Table, spread

ROWS = Path(__file__).parents[1] / "results/skill.jsonl"
SHOWN = {
    "language": (
        "old",
        "target",
        "few-shot@100",
        "distill@100",
        "distill@500",
        "distill@2000",
        "synthetic@0",
        "synthetic@10",
        "synthetic@20",
        "synthetic@100",
        "upgrade@100",
        "all-data",
    ),
    "classifiers": (
        "old",
        "target@100",
        "few-shot@100",
        "port@100",
        "distill@100",
        "extra@100",
        "synthetic@20",
        "upgrade@100",
        "all-data",
    ),
    "towers": (
        "old",
        "target",
        "few-shot@100",
        "port@100",
        "distill@20",
        "extra@20",
        "distill@100",
        "extra@100",
        "upgrade@100",
        "all-data",
    ),
}
DASH = "–"


@cache
def committed() -> tuple[Row, ...]:
    """The committed rows."""
    return tuple(rows_in(ROWS))


def of_group(name: str, rows: Sequence[Row] | None = None) -> Table:
    """The rows of a group."""
    return Table(GROUPS[name], committed() if rows is None else rows)


def short(pair: str) -> str:
    return pair.replace(">", " to ")


def language_table(rows: Sequence[Row] | None = None) -> list[str]:
    """Scores of language models, cell by cell."""
    return _cells(of_group("language", rows), SHOWN["language"])


def classifiers_table(rows: Sequence[Row] | None = None) -> list[str]:
    """Accuracies of classifiers of texts, cell by cell, and the means of complete cells."""
    found = of_group("classifiers", rows)
    arms = _with_rows(found, SHOWN["classifiers"])
    compared = ("old", "few-shot@100", "distill@100", "extra@100", "upgrade@100")
    whole = [place for place in _places(found) if all(found.scores(*place, arm) for arm in compared)]
    means = [_mean(found, whole, arm) if arm in compared and whole else DASH for arm in arms]
    line = f"| mean of {len(whole)} cells | | " + " | ".join(means) + " |"
    return _cells(found, arms, line)


def towers_table(rows: Sequence[Row] | None = None) -> list[str]:
    """Accuracies of vision towers, by pair: means over tasks and draws; and shares of the gain."""
    found = of_group("towers", rows)
    arms = _with_rows(found, SHOWN["towers"])
    lines = head("accuracy, %", *arms)
    for pair, tasks in found.group.grid.items():
        places = [(pair, task) for task in tasks]
        lines.append(f"| {short(pair)} | " + " | ".join(_mean(found, places, arm) for arm in arms) + " |")
    lines.append("| mean | " + " | ".join(_mean(found, list(_places(found)), arm) for arm in arms) + " |")
    whole = [arm for arm in arms if arm != "old" and _mean(found, list(_places(found)), arm) != DASH]
    shares = [closed(found, arm) if arm in whole else [] for arm in arms]
    for words, pick in (("share of the gain, %", mean), ("its worst cell", min)):
        lines.append(f"| {words} | " + " | ".join(f"{pick(each):.0f}" if each else DASH for each in shares) + " |")
    return [*lines, "", *_made(found)]


def closed(found: Table, arm: str) -> list[float]:
    """The share of the gain of each cell with rows of an arm, means over its draws."""
    shares = (found.closed(pair, task, arm) for pair, task in _places(found))
    return [mean(each) for each in shares if each]


def seconds(name: str, arm: str) -> float:
    """The median of the seconds of an arm in a group."""
    found = of_group(name)
    return median(row["seconds"] for place in _places(found) for row in found.found(*place, arm))


def problems(rows: Sequence[Row] | None = None) -> list[str]:
    """What makes rows incomparable: draws of one arm that were made by several commits, or a small run."""
    commits: dict[str, set[str]] = defaultdict(set)
    found = []
    for row in finished(committed() if rows is None else rows).values():
        name = f"{row['pair']}, {row['task']}, {row['arm']}@{row['n']}"
        commits[name].add(row.get("commit", "unknown"))
        if row.get("small"):
            found.append(f"skill: {name} is a small run")
    mixed = {name: each for name, each in commits.items() if len(each) > 1}
    return found + [f"skill: the draws of {name} are of the commits {', '.join(sorted(mixed[name]))}" for name in mixed]


def head(*names: str) -> list[str]:
    """The first two lines of a table."""
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def _places(found: Table) -> Iterator[tuple[str, str]]:
    yield from ((pair, task) for pair, tasks in found.group.grid.items() for task in tasks)


def score(found: Table, pair: str, task: str, arm: str, digits: int) -> str:
    """The mean over the draws with its spread, and how many there are if some but not all are missing."""
    values, wanted = found.scores(pair, task, arm), len(found.cells(pair, task, arm))
    if not values:
        return DASH
    return spread(values, digits) + (f" ({len(values)})" if 1 < len(values) < wanted else "")


def _with_rows(found: Table, arms: Sequence[str]) -> list[str]:
    """The arms that have a row."""
    return [arm for arm in arms if any(found.found(*place, arm) for place in _places(found))]


def _mean(found: Table, places: Sequence[tuple[str, str]], arm: str) -> str:
    """The mean over cells of the means over draws; where cells are missing, a dash."""
    values = [found.scores(pair, task, arm) for pair, task in places]
    return f"{mean(map(mean, values)):.1f}" if all(values) else DASH


def _cells(found: Table, arms: Sequence[str], *more: str) -> list[str]:
    """A line for each cell that has rows, further lines, and what is missing."""
    arms = _with_rows(found, arms)
    lines, lost = head("task", "pair", *arms), defaultdict(list)
    for task in found.group.tasks:
        kind = found.group.scores(task)[0]
        for pair, _ in found.group.places(list(found.group.grid), [task]):
            cells = [score(found, pair, task, arm, 3 if kind == "bits" else 1) for arm in arms]
            if set(cells) == {DASH}:
                lost[task].append(f"`{short(pair)}`")
            else:
                words = task if kind == "accuracy" else f"{task}, {NAMES[kind]}"
                lines.append(f"| {words} | {short(pair)} | " + " | ".join(cells) + " |")
    whole = {task: len(found.group.places(list(found.group.grid), [task])) for task in lost}
    same = defaultdict(list)  # the tasks that the same pairs miss
    for task, each in lost.items():
        same[() if len(each) == whole[task] else tuple(each)].append(f"`{task}`")
    named = [", ".join(tasks) + (f" of {', '.join(each)}" if each else "") for each, tasks in same.items()]
    return [*lines, *more, "", *_made(found), *([f"Missing: {'; '.join(named)}."] if named else [])]


def _made(found: Table) -> list[str]:
    """What the rows of a table are: how many, of which commits and machines, and why cells failed."""
    keys = {(pair, task, arm) for pair, task in _places(found) for arm in found.group.arms}
    rows = [row for key in keys for row in found.found(*key)]
    cells = {key_of_cell(cell, False) for key in keys for cell in found.cells(*key)}
    commits = ", ".join(sorted({f"`{row['commit']}`" for row in rows})) or "none"
    machines = ", ".join(sorted({f"`{row['machine']['device']}`" for row in rows})) or "none"
    reasons = Counter(reason.partition(":")[0] for key, reason in failed(found.rows).items() if key in cells)
    words = "".join(f"; `{count}` failed with `{reason}`" for reason, count in sorted(reasons.items()))
    bare = [arm for arm in found.group.arms if arm not in _with_rows(found, found.group.arms)]
    none = f" Not run: {', '.join(f'`{arm}`' for arm in bare)}." if bare else ""
    return [f"Rows: `{len(rows)}` of `{len(cells)}`{words}; commits: {commits}; machines: {machines}.{none}"]
