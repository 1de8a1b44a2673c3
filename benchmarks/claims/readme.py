"""The table of the README and docs/routes.svg, from the rows of benchmarks/skill.

`python -m benchmarks.claims.check --write` writes both again. An arm that has no row is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.claims.drawing import STYLE, line, text
from benchmarks.skill.cells import TASKS
from benchmarks.skill.pages import of_group, short
from benchmarks.skill.rows import Row

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "routes.svg"
DRAWS = 3
COLUMNS = {  # group, pair and task, all of them TREC-6; the first is in the picture
    "SmolLM2-135M to Gemma-3-270M": ("language", "smollm2-135m>gemma3-270m", "trec6"),
    "SmolLM2-135M to TinyLlama-1.1B": ("language", "smollm2-135m>tinyllama-1.1b", "trec6"),
    "Qwen2.5-Coder 0.5B to 1.5B": ("language", "qwen-coder-0.5b>qwen-coder-1.5b", "trec6"),
    "MiniLM-L6 to MPNet": ("classifiers", "minilm-l6>mpnet", "trec6-full"),
}
ARMS = {  # in the order of the picture
    "old": "your old fine-tuned model",
    "target": "the new base as it is",
    "copy@100": "the old change, copied",
    "port@100": "the old change, ported",
    "distill@100": "the old model teaches: 100 samples, no labels",
    "synthetic@10": "the same, 10 samples; a model writes more",
    "synthetic@0": "the same, one sentence; a model writes all",
    "upgrade@100": "tuneport upgrade: the best of these",
    "few-shot@100": "instead: trained on the 100 with labels",
    "all-data": "instead: trained on all labelled data",
}
TAUGHT = (("upgrade@100",), ("distill@100", "extra@100"))  # with 100 own samples, without labels
OURS = ("copy@100", "port@100", "distill@100", "synthetic@10", "synthetic@0", "upgrade@100")


def arms(group: str, pair: str, task: str, rows: Sequence[Row] | None = None) -> dict[str, list[float]]:
    """The scores of each arm that a cell has; a classifier as it is has a fitted head."""
    found = of_group(group, rows)
    names = {arm: "target@100" if (group, arm) == ("classifiers", "target") else arm for arm in ARMS}
    scores = {arm: found.scores(pair, task, name) for arm, name in names.items()}
    return {arm: each for arm, each in scores.items() if each}


def table(rows: Sequence[Row] | None = None) -> list[str]:
    """The lines of the README's table: the arms that every column has."""
    found = [arms(*cell, rows) for cell in COLUMNS.values()]
    lines = ["| accuracy, % | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for arm, words in ARMS.items():
        if all(arm in each for each in found):
            cells = " | ".join(_cell(each[arm], arm) for each in found)
            lines.append(f"| {f'**{words}**' if arm in OURS else words} | {cells} |")
    return lines


def behind(rows: Sequence[Row] | None = None) -> list[str]:
    """A line with the cells of language models and classifiers where few labels beat an upgrade.

    Where an upgrade has no row, the best of the old model's lessons is in its place.
    """
    found = []
    for group in ("language", "classifiers"):
        table = of_group(group, rows)
        for pair, tasks in table.group.grid.items():
            for task in tasks:
                labelled = table.scores(pair, task, "few-shot@100")
                taught = [[mean(each) for arm in names if (each := table.scores(pair, task, arm))] for names in TAUGHT]
                ours = next(filter(None, taught), None)
                lower = group == "language" and TASKS[task].lower_is_better
                if ours and labelled and (max(ours) < mean(labelled) if not lower else min(ours) > mean(labelled)):
                    found.append(f"`{task} {short(pair)}`")
    return [f"Training on the 100 with labels was better than an upgrade in: {', '.join(found) or 'no cell'}."]


def _cell(scores: Sequence[float], arm: str) -> str:
    """Mean and standard deviation over the draws; how many there are, if some are missing."""
    spread = f" ± {stdev(scores):.1f}" if len(scores) > 1 else ""
    drawn = "@" in arm or len(scores) > 1
    return f"{mean(scores):.1f}{spread}{f' ({len(scores)})' if drawn and len(scores) < DRAWS else ''}"


def picture(rows: Sequence[Row] | None = None) -> str:
    """A bar for each arm of the first column, with a mark for each draw, as an SVG in light and dark."""
    title, cell = next(iter(COLUMNS.items()))
    found = arms(*cell, rows)
    left, right, top, step = 360, 740, 40, 34
    bottom = top + step * len(found)
    marks = """
.bar{fill:#8c959f}.ours{fill:#1a9f4a}.draw{stroke:#1b1f24;stroke-width:2}
@media (prefers-color-scheme:dark){.draw{stroke:#e6edf3}}
"""
    about = f"Kinds of questions (TREC-6), accuracy in %: a LoRA from {title}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {bottom + 34}" role="img" aria-label="{about}">',
        f"<style>{STYLE}{marks}</style>",
        text("strong", 12, 22, about),
    ]

    def place(value: float) -> float:
        return round(left + (right - left) * value / 100, 1)

    for tick in range(0, 101, 20):
        parts.append(line("rule", (place(tick), top - 6), (place(tick), bottom)))
        parts.append(text("soft middle", place(tick), bottom + 18, f"{tick} %" if tick == 100 else str(tick)))
    for number, (arm, scores) in enumerate(found.items()):
        y, width = top + step * number, place(mean(scores)) - left
        kind = "ours" if arm in OURS else "bar"
        parts.append(text("end", left - 12, y + 17, ARMS[arm]))
        parts.append(f'<rect class="{kind}" x="{left}" y="{y + 2}" width="{width:.1f}" height="20"/>')
        parts += [line("draw", (place(score), y), (place(score), y + 24)) for score in scores if len(scores) > 1]
        parts.append(text("strong", place(max(scores)) + 8, y + 17, f"{mean(scores):.1f}"))
    return "\n".join([*parts, "</svg>", ""])
