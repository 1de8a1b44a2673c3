"""Tables of benchmarks/results/ablations.md: what one thing brings, from rows with it and without it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.rows import rows_in
from benchmarks.skill.cells import PAIRS
from benchmarks.skill.pages import DASH, committed, head, of_group, score, short
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
    "tokens": ((("language", QWEN, "snips"),), ("distill@500", "distill-by-text@500")),
    "closed": (
        (*(("language", pair, "trec6") for pair in PAIRS), ("language", GEMMA, "shakespeare")),
        ("target", "cross-lora", "theseus@100", "bico@100", "port@100"),
    ),
}


def table(name: str, rows: Sequence[Row] | None = None) -> list[str]:
    """The scores of an ablation beside those of the plain arm."""
    places, arms = STUDIES[name]
    lines = head("task", "pair", *arms, *(["the port is worth"] if name == "start" else []))
    for group, pair, task in places:
        found = of_group(group, rows)
        kind = found.group.scores(task)[0]
        cells = [score(found, pair, task, arm, 3 if kind == "bits" else 1) for arm in arms]
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


RESULTS = Path(__file__).parents[1] / "results"
RULES, REPEATS = RESULTS / "rules.jsonl", RESULTS / "repeats.jsonl"


def repeats() -> list[str]:
    """The scores of rows that the same commands have made again on another machine."""
    lines = head("task", "pair", "arm", "row", "made again")
    for row in rows_in(REPEATS):
        arm = row["arm"] if row["n"] is None else f"{row['arm']}@{row['n']}"
        found = of_group("language").found(row["pair"], row["task"], arm)
        kind = next(iter(row["scores"]))
        first = next(each["scores"][kind] for each in found if each["draw"] == row["draw"])
        words = row["task"] if kind == "accuracy" else f"{row['task']}, {NAMES[kind]}"
        digits = 3 if kind == "bits" else 1
        lines.append(
            f"| {words} | {short(row['pair'])} | {arm} | {first:.{digits}f} | {row['scores'][kind]:.{digits}f} |"
        )
    return lines


def scale_rules(rows: Sequence[Row] | None = None) -> list[str]:
    """The gain of ports over the target, at scale 1 and at the scale that a rule takes among some candidates."""
    ports = [row for row in (rows_in(RULES) if rows is None else rows) if "taken" in row]
    lines = head("samples", "rule, candidates", "mean gain", "worst cell", "worse than the target", "scales taken")
    for count in sorted({row["n"] for row in ports}, reverse=True):
        here = [row for row in ports if row["n"] == count]
        for rule in ("1", *here[0]["taken"]):
            taken = [(1.0, row["one"]) if rule == "1" else row["taken"][rule] for row in here]
            gains = [value - row["target"] for (_, value), row in zip(taken, here, strict=True)]
            worse, scales = sum(gain < 0 for gain in gains), sorted({f"{at:g}" for at, _ in taken}, key=float)
            numbers = f"{mean(gains):+.1f} | {min(gains):+.1f} | {worse} of {len(gains)}"
            lines.append(f"| {count} | {rule} | {numbers} | {', '.join(scales)} |")
    return lines


def rules(rows: Sequence[Row] | None = None, known: Sequence[Row] | None = None) -> list[str]:
    """How often other rules are right: refusals, and the verdicts on routes."""
    rows = [row for row in (committed() if rows is None else rows) if "error" not in row]
    bases = [row for row in (rows_in(RULES) if known is None else known) if "left" in row]
    upgrades = [_routes(row) for row in rows if row["arm"] == "upgrade"]
    routes = [route for found in upgrades for route in found]
    old = {(row["pair"].partition(">")[0], row["task"]): _main(row) for row in rows if row["arm"] == "old"}
    agreeing = [(route, old[route["cell"]]) for route in routes if "agreement" in route and route["cell"] in old]
    decided = {
        "less than half of the base is left: refused as another base": [
            (row["left"] < 0.5) == (row["base"] != row["of"]) for row in bases
        ],
        "the route that agrees most, of equals the last: the best on the test": [_taken(each) for each in upgrades],
        "of equals the first": [_taken(each[::-1]) for each in upgrades],
        "the last route, whatever agrees": [each[-1]["best"] for each in upgrades],
        "below 50 % agreement far from the old model: under two thirds of its score": [
            (route["agreement"] < 50) == (route["test"] < 2 / 3 * score) for route, score in agreeing
        ],
        "surely above 90 % agreement, so that no other route is tried: the best": [
            route["best"] for route in routes if route.get("interval", [0])[0] >= 90
        ],
        "5 % more loss on neutral text: not the best route": [not route["best"] for route in routes if route["note"]],
    }
    return head("rule", "right", "of") + [
        f"| {each} | {sum(right)} | {len(right)} |" for each, right in decided.items()
    ]


def _main(row: Row, scores: Any = None) -> float:
    """The main score of a task, larger where it is better."""
    scores = scores or row["scores"]
    return -scores["bits"] if "bits" in scores else float(scores.get("f1", scores.get("accuracy")))


def _routes(row: Row) -> list[dict[str, Any]]:
    """The routes of an upgrade that wrote something, with their scores on the test, and which of these is the best."""
    tests = {name: _main(row, scores) for name, scores in row["by_route"].items()}
    cell, best = (row["pair"].partition(">")[0], row["task"]), max(tests.values())
    routes = [route for route in row["about"]["routes"] if route["name"] in tests]
    return [{**each, "test": (test := tests[each["name"]]), "best": test == best, "cell": cell} for each in routes]


def _taken(routes: Sequence[Any]) -> bool:
    """Whether the route that agrees most, of equals the last, is the best of those that forget nothing."""
    sound = [route for route in reversed(routes) if not route["note"]]
    return bool(max(sound, key=lambda route: route.get("agreement", -route.get("score", 0)))["best"])
