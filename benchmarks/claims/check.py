"""Compare every number of README.md and of two pages of docs with the committed results.

    python -m benchmarks.claims.check           # fails where a number differs
    python -m benchmarks.claims.check --write   # puts the numbers of the results into the texts

A table stands between `<!-- results: NAME -->` and `<!-- end -->`, and a function of TABLES makes its lines. A measured
number in a sentence is followed by its origin in a comment: `76<!-- distill.n100 -->` is a value of `values()`, and
`0.79<!-- verdict: change of accuracy -->` stands on a line with these words of verdict.md under benchmarks/results.
All other numbers are in backquotes, in a block of code, or part of a phrase of SETTINGS.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.claims import distill, language_tables, readme
from benchmarks.claims.zoo import METHODS, PAIRS, STATED
from benchmarks.rows import rows_in

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "paper/recipes"
RESULTS = ROOT / "benchmarks/results"
PAGES = ("README.md", "docs/results.md")
NUMBER = r"[-+−]?\d[\d,]*(?:\.\d+)?"
MARKED = re.compile(rf"({NUMBER})( ?%?)<!-- ([^>]+?) -->")
TABLE = re.compile(r"(<!-- results: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SETTINGS = (  # phrases whose numbers are no measurements
    r"20 or 60 steps at 2e-5 or 1e-4", r"N = \d+", r"K = \d+", r"seeds? \d+(, \d+)*", r"\d+ steps", r"\d+ x \d+",
    r"\d+ (calibration )?samples", r"\d+ layers", r"scales? [01]", r"Python \d\.\d+", r"MiniLM-L\d", r"ViT-L/\d+",
    r"\d+ (labelled )?sentences", r"TREC-6", r"SST-2", r"Apache-2\.0", r"GPT-2", r"Phi-3",
)  # fmt: skip


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


SKILL_ARMS = (("target", None), ("few-shot", 100), ("distill", 100), ("distill", 2000), ("synthetic", 100))
ZOO_ROWS = [*((name, "1") for name in METHODS), ("theseus", "auto"), ("bico", "auto")]


def zoo_gains() -> dict[tuple[str, str], dict[str, float]]:
    """By pair: the target's accuracy, and each method's gain over it by scale; means over tasks and seeds."""
    rows = json.loads((RESULTS / "zoo-n100.json").read_text())
    found = {}
    for pair, tasks in PAIRS.items():
        here = [row for row in rows if row["pair"] == "-".join(pair)]

        def accuracy(method: str, rule: str, here: list[Any] = here, tasks: Any = tasks) -> float:
            by_task = [
                [r["accuracy"] for r in here if (r["task"], r["method"], r["scale_rule"]) == (task, method, rule)]
                for task in tasks
            ]
            return mean(map(mean, by_task))

        base = accuracy("target", "-")
        found[pair] = {"target": base} | {f"{name} | {rule}": accuracy(name, rule) - base for name, rule in ZOO_ROWS}
    return found


def zoo_table() -> list[str]:
    gains = zoo_gains()
    lines = ["| | scale | " + " | ".join(f"{a} to {b}" for a, b in gains) + " |", "|---" * (len(gains) + 2) + "|"]
    lines.append("| tasks | | " + " | ".join(str(len(tasks)) for tasks in PAIRS.values()) + " |")
    lines.append("| target, % | | " + " | ".join(f"{found['target']:.1f}" for found in gains.values()) + " |")
    for row in (f"{name} | {rule}" for name, rule in ZOO_ROWS):
        lines.append(f"| {row} | " + " | ".join(f"{found[row]:+.1f}" for found in gains.values()) + " |")
    return lines


def zoo_share(rule: str) -> float:
    """The share of the gain of full fine-tuning that BiCo recovers at a scale, where it is known."""
    rows = json.loads((RESULTS / "zoo-n100.json").read_text())
    gains, whole = [], []
    for (source, target), tasks in PAIRS.items():
        for task in tasks:
            here = [row for row in rows if (row["pair"], row["task"]) == (f"{source}-{target}", task)]
            base = mean(row["accuracy"] for row in here if row["method"] == "target")
            ported = mean(r["accuracy"] for r in here if (r["method"], r["scale_rule"]) == ("bico", rule))
            if task in STATED[target]:
                gains.append(ported - base)
                whole.append(STATED[target][task] - base)
    return 100 * sum(gains) / sum(whole)


def text_shares() -> list[float]:
    """The share that the port recovers by default, for each text encoder of the README."""
    found = [case.scores for case in readme.cases() if case.title.startswith("MiniLM")]
    return [100 * (case["port"] - case["before"]) / (case["full"] - case["before"]) for case in found]


def distilled(samples: int) -> dict[str, float]:
    """Distillation for 300 steps: shares of the gain in %, means over cells, the worst of them, and leads of the port.

    `port` is the share before a step, `share` after all, `bare` that from the bare target, and `labels` that of
    few-shot fine-tuning.
    """
    rows = rows_in(RESULTS / "distill.jsonl")
    begun = distill.shares([row | {"share": row["share_begun"]} for row in rows], samples, "port")
    taught, bare = (distill.shares(rows, samples, start) for start in ("port", "target"))
    leads = distill.leads(rows, samples)
    return {
        "port": mean(begun.values()),
        "share": mean(taught.values()),
        "worst": min(taught.values()),
        "bare": mean(bare.values()),
        "bare_worst": min(bare.values()),
        "labels": mean(distill.shares(rows, samples, "target", "labels").values()),
        "lead": mean(leads),
        "lead_least": min(leads),
        "lead_most": max(leads),
        "ahead": sum(lead > 0 for lead in leads),
        "cells": len(leads),
    }


def distill_table() -> list[str]:
    names = {
        "port": "port",
        "share": "port and distillation",
        "worst": "its worst cell",
        "bare": "distillation of the bare target",
        "bare_worst": "its worst cell",
        "labels": "fine-tuning of the bare target with labels, one draw",
    }
    few, many = distilled(100), distilled(500)
    lines = ["| | N = 100 | N = 500 |", "|---|---|---|"]
    return lines + [f"| {name} | {few[key]:.0f} | {many[key]:.0f} |" for key, name in names.items()]


def text_distilled() -> dict[str, float]:
    """Distillation of text encoders with 500 sentences: the mean share of the cells, their number and the least."""
    found = distill.shares(rows_in(RESULTS / "distill-text.jsonl"), 500, "port")
    return {"share": mean(found.values()), "least": min(found.values()), "cells": len(found)}


def rivals_table() -> list[str]:
    """Gains over the target by method, scale and shots, means over tasks and seeds."""
    record = json.loads((RESULTS / "rivals/results.json").read_text())
    rows = record["rows"]
    tasks, shots = list(record["comparison"]["data"]), record["comparison"]["shots"]

    def accuracy(**wanted: Any) -> float:
        found = [[r["accuracy"] for r in rows if r["task"] == task and wanted.items() <= r.items()] for task in tasks]
        return mean(map(mean, found))

    base = accuracy(method="target")
    known = list(dict.fromkeys((row["method"], row["scale_rule"]) for row in rows if row["method"] != "target"))
    shown = [kind for kind in known if kind[0] not in ("naive", "transfusion") or kind[1] == "1"]
    shown = [kind for kind in shown if not re.search(r"\b(1|50) steps", kind[0])]
    lines = ["| method | scale | K = 1 | " + " | ".join(map(str, shots[1:])) + " |", "|---" * (len(shots) + 2) + "|"]
    for method, rule in shown:
        gains = [accuracy(method=method, scale_rule=rule, budget=count) - base for count in shots]
        lines.append(f"| {method} | {rule.replace('-', '–')} | " + " | ".join(f"{gain:+.1f}" for gain in gains) + " |")
    return lines


def classifiers_table() -> list[str]:
    """Accuracies of ported classifiers and their rivals: means over tasks and draws, by target and fine-tune."""
    rows = rows_in(RESULTS / "classifiers.jsonl")
    names = {"source": "source", "port": "port", "port_auto": "auto", "distilled": "distilled"}
    names |= {"probe": "(a)", "head": "(b)", "few": "(c)", "target_tuned": "(d)"}
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[f"{row['target']}, {row['kind']}"].append(row)
    lines = ["| target, fine-tune | " + " | ".join(names.values()) + " |", "|---" * (len(names) + 1) + "|"]
    for group, found in [*sorted(groups.items()), ("mean", rows)]:
        lines.append(f"| {group} | " + " | ".join(f"{mean(row[name] for row in found):.1f}" for name in names) + " |")
    return lines


def classifiers_values() -> dict[str, float]:
    """The lead of the ported and of the distilled classifier over each rival, and the number of rows."""
    rows = rows_in(RESULTS / "classifiers.jsonl")
    leads = product(("port", "distilled"), ("probe", "head", "few", "target_tuned"))
    return {"classifiers.rows": len(rows)} | {
        f"classifiers.{name}.{rival}": mean(row[name] - row[rival] for row in rows) for name, rival in leads
    }


def language_table() -> list[str]:
    lines = language_tables.summary(*(rows_in(RESULTS / f"language-models{part}.jsonl") for part in ("-trial", "")))
    return [line for line in lines if not line.startswith("| trec6, bits")]


def skill_table() -> list[str]:
    """Arms of upgrades on language models, those that have rows: mean and spread over the draws."""
    rows = rows_in(RESULTS / "skill.jsonl")
    lines = ["| task | pair | arm | accuracy, % | neutral text, % | draws |", "|---|---|---|---|---|---|"]
    for task, pair in dict.fromkeys((row["task"], row["pair"]) for row in rows):
        for arm, count in SKILL_ARMS:
            wanted = {"task": task, "pair": pair, "arm": arm, "n": count}
            found = [row for row in rows if wanted.items() <= row.items() and "accuracy" in row.get("scores", {})]
            if not found:
                continue
            scores = [row["scores"]["accuracy"] for row in found]
            spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
            neutral = statistics.mean(100 * (row["neutral"] / row["neutral_base"] - 1) for row in found)
            words = f"{arm}, N = {count}" if count else arm
            name = pair.replace(">", " to ")
            cells = f"{statistics.mean(scores):.1f}{spread} | {neutral:+.1f}"
            lines.append(f"| {task} | {name} | {words} | {cells} | {len(found)} |")
    return lines


TABLES: dict[str, Callable[[], list[str]]] = {
    "skill": skill_table,
    "readme": readme.table,
    "zoo": zoo_table,
    "distill": distill_table,
    "rivals": rivals_table,
    "language_models": language_table,
    "classifiers": classifiers_table,
}


def values() -> dict[str, float]:
    """Numbers of sentences that are computed from results, by key."""
    text = text_shares()
    found = {"text.least": min(text), "text.most": max(text), **rivals_values(), **classifiers_values()}
    found |= {"zoo.share": zoo_share("1"), "zoo.share.auto": zoo_share("auto")}
    for samples in (100, 500):
        found |= {f"distill.n{samples}.{key}": value for key, value in distilled(samples).items()}
    found |= {f"distill.text.{key}": value for key, value in text_distilled().items()}
    for key, recipe, method in (
        ("zero_shot", "depth-and-width", "target"),
        ("theseus", "cross-distribution-depth", "theseus"),
    ):
        printed = tomllib.loads((RECIPES / f"{recipe}.toml").read_text())["printed"]["rows"]
        row = next(row for row in printed if row[0] == method)
        found |= {f"paper.{key}": mean(row[2:-1]), f"paper.{key}_printed": row[-1]}
    return found


def rivals_values() -> dict[str, float]:
    """How often scale auto lowered the accuracy on its own samples, and helped or hurt BiCo on test data."""
    rows = json.loads((RESULTS / "rivals/results.json").read_text())["rows"]
    base = {row["task"]: row["accuracy"] for row in rows if row["method"] == "target"}
    auto = [row for row in rows if row["scale_rule"] == "auto"]
    bico = [row for row in auto if row["method"] == "bico"]
    gains = [row["accuracy"] - base[row["task"]] for row in bico]
    return {
        "rivals.target": mean(base.values()),
        "rivals.auto_cells": len(auto),
        "rivals.auto_lower": sum(
            row["held_out_after"] < row["held_out_before"] for row in auto if row["held_out_after"] is not None
        ),
        "rivals.bico_cells": len(bico),
        "rivals.bico_helped": sum(gain > 0 for gain in gains),
        "rivals.bico_hurt": sum(gain < 0 for gain in gains),
    }


def shown_as(text: str, value: float) -> str:
    """The value in the form of a printed number: its decimals and its sign."""
    decimals = len(text.partition(".")[2])
    return f"{value:{'+' if text[0] == '+' else ''}.{decimals}f}"


def corrected(page: str, known: dict[str, float], problems: list[str], name: str = "page") -> str:
    """The page with the numbers of the results; what differs, and what cannot be checked, is added to `problems`."""

    def table(found: re.Match[str]) -> str:
        wanted = "\n".join(TABLES[found[2]]()) + "\n" if found[2] in TABLES else found[3]
        if found[2] not in TABLES:
            problems.append(f"{name}: no table is called {found[2]}; known: {', '.join(TABLES)}")
        if wanted != found[3]:
            problems.append(f"{name}: the table {found[2]} differs from the results")
        return f"{found[1]}{wanted}{found[4]}"

    def number(found: re.Match[str]) -> str:
        text, after, origin = found.groups()
        file, _, words = origin.partition(": ")
        if words:
            path = RESULTS / file / "README.md" if (RESULTS / file).is_dir() else RESULTS / f"{file}.md"
            lines = [line for line in path.read_text().splitlines() if words in line] if path.exists() else []
            if not any(re.search(rf"(?<![\d.]){re.escape(text)}(?![\d]|\.\d)", line) for line in lines):
                problems.append(f"{name}: {text} is on no line with {words!r} of {file}")
            return found[0]
        if origin not in known:
            problems.append(f"{name}: {text} has the origin {origin!r}; known: {', '.join(known)}, or a file")
            return found[0]
        right = shown_as(text, known[origin])
        if right != text:
            problems.append(f"{name}: {text} is {right} in the results ({origin})")
        return f"{right}{after}<!-- {origin} -->"

    page = MARKED.sub(number, TABLE.sub(table, page))
    for line in plain_lines(page):
        if (bare := re.search(rf"(?<![\w.-]){NUMBER}(?![\w])", line)) is not None:
            problems.append(f"{name}: {bare[0]} has no origin: {line.strip()[:90]}")
    return page


def plain_lines(page: str) -> list[str]:
    """The sentences of a page, without tables of results, marked numbers, code, links and the phrases of SETTINGS."""
    page = MARKED.sub("", TABLE.sub("", page))
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)|https?://\S+", "", page, flags=re.DOTALL)
    page = re.sub(r"(?<!\n)\n(?![\n|#-])", " ", page)  # a phrase may be wrapped
    for phrase in SETTINGS:
        page = re.sub(rf"\b{phrase}\b", "", page)
    return page.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the numbers of the results into the texts")
    options = parser.parse_args()
    known, problems = values(), list[str]()
    for name in PAGES:
        path = ROOT / name
        page = corrected(path.read_text(), known, problems, name)
        if options.write:
            path.write_text(page)
    print("\n".join(problems) or "every number is that of the results")
    sys.exit(bool(problems) and not options.write)


if __name__ == "__main__":
    main()
