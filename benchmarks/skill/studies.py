"""Tables of benchmarks/results/ablations.md: what one thing brings, from rows with it and without it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from benchmarks.skill.pages import DASH, head, of_group, score, short
from benchmarks.skill.rows import Row
from benchmarks.skill.table import NAMES

Place = tuple[str, str, str]  # group, pair, task
GEMMA, QWEN, CLASSIFIER = "smollm2-135m>gemma3-270m", "qwen-coder-0.5b>qwen-coder-1.5b", "minilm-l6>{}"
STUDIES: dict[str, tuple[tuple[Place, ...], tuple[str, ...]]] = {
    "start": (
        (
            ("language", GEMMA, "trec6"),
            ("language", QWEN, "trec6"),
            ("classifiers", CLASSIFIER.format("gte-small"), "trec6-full"),
            *(("towers", pair, task) for pair in ("a>a2", "a>c") for task in ("cifar10", "mnist")),
        ),
        ("distill-unported@100", "distill-ported@100"),
    ),
    "filters": (
        (("language", GEMMA, "banking77"),),
        ("synthetic@100", "synthetic-unjudged@100", "synthetic-unfiltered@100"),
    ),
    "texts": (
        (("language", GEMMA, "banking77"),),
        ("synthetic-500@100", "synthetic-1000@100", "synthetic@100", "synthetic-4000@100"),
    ),
    "generators": (
        (("language", GEMMA, "banking77"),),
        (
            *(f"synthetic-by-{name}@100" for name in ("smollm2-135m", "qwen-coder-0.5b", "qwen-coder-1.5b")),
            "synthetic@100",
        ),
    ),
    "tokens": ((("language", QWEN, "banking77"),), ("distill@500", "distill-by-text@500")),
}


def table(name: str, rows: Sequence[Row] | None = None) -> list[str]:
    """The scores of an ablation beside those of the plain arm."""
    places, arms = STUDIES[name]
    lines = head("task", "pair", *arms, *(["the port is worth"] if name == "start" else []))
    for group, pair, task in places:
        found = of_group(group, rows)
        kind = found.group.scores(task)[0]
        cells = [score(found, pair, task, arm, 1) for arm in arms]
        if name == "start":
            cells.append(worth(*(found.found(pair, task, arm) for arm in arms)))
        if set(cells) != {DASH}:
            words = task if kind == "accuracy" else f"{task}, {NAMES[kind]}"
            lines.append(f"| {words} | {short(pair)} | " + " | ".join(cells) + " |")
    return lines


def worth(target: Sequence[Row], port: Sequence[Row]) -> str:
    """After how many of its steps a student that began at the target is as near as one that begins at the port."""
    if not target or not port:
        return DASH
    curve, start = target[0]["about"]["distilled"]["curve"], port[0]["about"]["distilled"]["curve"][0]
    near = [mark["step"] for mark in curve if mark["held_out_loss"] <= start["held_out_loss"]]
    steps = curve[-1]["step"]
    return f"more than {steps} steps" if not near else f"{'at most ' if near[0] else ''}{near[0]} of {steps} steps"


def extra(rows: Sequence[Row] | None = None) -> list[str]:
    """The share of the gain of towers, and the mean accuracy of classifiers, with other samples and without."""
    lines = head("", "own samples", "alone", "with others", "cells")
    for group, words, counts in (("towers", "towers", (20, 100)), ("classifiers", "classifiers", (100,))):
        found = of_group(group, rows)
        places = [(pair, task) for pair, tasks in found.group.grid.items() for task in tasks]
        for count in counts:
            pairs = [[found.scores(*place, f"{arm}@{count}") for arm in ("distill", "extra")] for place in places]
            both = [[mean(each) for each in pair] for pair in pairs if all(pair)]
            if both:
                means = " | ".join(f"{mean(column):.1f}" for column in zip(*both, strict=True))
                lines.append(f"| {words}, accuracy, % | {count} | {means} | {len(both)} |")
    return lines
