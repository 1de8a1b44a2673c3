"""docs/before-after.svg: new base models before and after an upgrade, from committed results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.claims.drawing import STYLE, line, text
from benchmarks.skill.pages import of_group
from benchmarks.skill.towers import FINE_TUNED

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PICTURE = ROOT / "benchmarks" / "results", ROOT / "docs" / "before-after.svg"
TEXT = {
    "mpnet": ("MiniLM-L6 to MPNet", "unrelated, wider, deeper"),
    "gte-small": ("MiniLM-L6 to gte-small", "related, deeper"),
    "minilm-l3": ("MiniLM-L6 to MiniLM-L3", "related, shallower"),
}
LANGUAGE = ("SmolLM2 135M to Gemma 3 270M", "language models, other tokenizer; TREC-6")
TOWERS = ("vision towers a to b", "small, unrelated")


@dataclass(frozen=True)
class Case:
    """A pair of models: mean accuracies over tasks and draws, with 100 samples, by what was done."""

    title: str
    note: str
    scores: dict[str, float]


def cases() -> list[Case]:
    """A pair of language models, three of text encoders and one of vision towers."""
    found = json.loads((RESULTS / "text.json").read_text(encoding="utf-8"))
    return [_language_case(), *(_text_case(found, target) for target in TEXT), _tower_case()]


def _language_case() -> Case:
    rows, place = of_group("language"), ("smollm2-135m>gemma3-270m", "trec6")
    arms = {"old": "old", "before": "target", "taught": "distill@100", "few": "few-shot@100", "full": "all-data"}
    return Case(*LANGUAGE, {key: mean(rows.scores(*place, arm)) for key, arm in arms.items()})


def _text_case(found: dict[str, Any], target: str) -> Case:
    methods = {
        "before": "target",
        "naive": "naive",
        "port": "bico, scale auto",
        "full scale": "bico",
        "few": "few-shot fine-tuning",
        "full": "fine-tuned target",
    }
    rows = [row for row in found["rows"] if row["target"] == target and row["N"] != 20]
    scores = {key: mean(row["zero-shot"] for row in rows if row["method"] == name) for key, name in methods.items()}
    scores["old"] = mean(note["fine-tuned source"] for note in found["notes"] if note["target"] == target)
    return Case(*TEXT[target], scores)


def _tower_case() -> Case:
    rows, pair = of_group("towers"), "a>b"
    arms = {"old": "old", "before": "target", "taught": "distill@100"}
    tasks = rows.group.grid[pair]
    scores = {key: mean(mean(rows.scores(pair, task, arm)) for task in tasks) for key, arm in arms.items()}
    scores["full"] = mean(FINE_TUNED["b"][task] for task in tasks)
    zoo = json.loads((RESULTS / "zoo-n100.json").read_text(encoding="utf-8"))
    for key, method, rule in (("naive", "naive", "1"), ("full scale", "bico", "1"), ("port", "bico", "auto")):
        found = [row for row in zoo if (row["pair"], row["method"], row["scale_rule"]) == ("a-b", method, rule)]
        scores[key] = mean(row["accuracy"] for row in found)
    return Case(*TOWERS, scores)


MARKS = """
.before{fill:#fff;stroke:#59636e;stroke-width:2}.full{stroke:#59636e;stroke-width:3}.after{fill:#1a9f4a}
.gain{stroke:#1a9f4a;stroke-width:5;opacity:.45}
@media (prefers-color-scheme:dark){.before{fill:#0d1117;stroke:#9198a1}.full{stroke:#9198a1}}
"""


def picture() -> str:
    """Dumbbells from the new base to what was taught, or else ported, with a mark at all data; in light and dark."""
    found, low, high, left, right, top, step = cases(), 30, 100, 270, 740, 56, 52
    bottom = top + step * len(found) - 20
    label = "Accuracy of new base models before and after an upgrade"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {bottom + 36}" role="img" aria-label="{label}">',
        f"<style>{STYLE}{MARKS}</style>",
        _dot("before", left, 18) + text("", left + 14, 23, "new base"),
        _dot("after", left + 110, 18) + text("", left + 124, 23, "ported, or taught by the old model"),
        line("full", (left + 395, 10), (left + 395, 26)) + text("", left + 405, 23, "all data"),
    ]

    def place(value: float) -> float:
        return round(left + (right - left) * (value - low) / (high - low), 1)

    for tick in range(low, high + 1, 10):
        parts.append(line("rule", (place(tick), 40), (place(tick), bottom)))
        parts.append(text("soft middle", place(tick), bottom + 20, f"{tick} %" if tick == high else str(tick)))
    for number, case in enumerate(found):
        y, scores = top + step * number + 14, case.scores
        before, after, full = scores["before"], scores.get("taught") or scores["port"], scores["full"]
        parts += [
            text("end", left - 16, y - 4, case.title) + text("end soft", left - 16, y + 13, case.note),
            line("gain", (place(before), y), (place(after), y)),
            line("full", (place(full), y - 10), (place(full), y + 10)),
            _dot("before", place(before), y) + _dot("after", place(after), y),
            text("middle strong", place((before + after) / 2), y - 11, f"{after - before:+.1f}"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _dot(style: str, x: float, y: float) -> str:
    return f'<circle class="{style}" cx="{x}" cy="{y}" r="6.5"/>'
