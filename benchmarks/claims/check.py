"""Compare every number and picture of the pages of results with the committed rows.

    python -m benchmarks.claims.check           # fails where a number differs
    python -m benchmarks.claims.check --write   # puts the numbers of the results into the texts

A table stands between `<!-- results: NAME -->` and `<!-- end -->`, and a function of TABLES makes its lines. A measured
number in a sentence is followed by its origin in a comment: `17<!-- zoo.share -->` is a value of `values()`, and
`0.79<!-- fuzz: cases -->` stands on a line with these words of fuzz.md under benchmarks/results. Draws of one cell must
be of one commit. All other numbers are in backquotes, in a block of code, or part of a phrase of SETTINGS.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claims import before_after, readme
from benchmarks.claims.zoo import METHODS, PAIRS
from benchmarks.rows import rows_in
from benchmarks.skill import pages, studies
from benchmarks.skill.groups import GROUPS
from benchmarks.skill.towers import FINE_TUNED

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "paper/recipes"
RESULTS = ROOT / "benchmarks/results"
PAGES = ("README.md", "docs/results.md", "paper/results.md", "benchmarks/results/ablations.md")
PICTURES = {before_after.PICTURE: before_after.picture, readme.PICTURE: readme.picture}
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
    """The share of the gain of full fine-tuning that BiCo recovers at a scale."""
    rows = json.loads((RESULTS / "zoo-n100.json").read_text())
    gains, whole = [], []
    for (source, target), tasks in PAIRS.items():
        for task in tasks:
            here = [row for row in rows if (row["pair"], row["task"]) == (f"{source}-{target}", task)]
            base = mean(row["accuracy"] for row in here if row["method"] == "target")
            ported = mean(r["accuracy"] for r in here if (r["method"], r["scale_rule"]) == ("bico", rule))
            gains.append(ported - base)
            whole.append(FINE_TUNED[target][task] - base)
    return 100 * sum(gains) / sum(whole)


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


def encoders_table() -> list[str]:
    """Zero-shot accuracies of sentence encoders with 100 sentences: means over tasks and draws, by target."""
    text = json.loads((RESULTS / "text.json").read_text())
    rows, targets = text["rows"], list(dict.fromkeys(row["target"] for row in text["rows"]))
    known = {
        "target": "the new encoder as it is",
        "naive": "the old change, copied",
        "bico, scale auto": "port",
        "bico": "port, scale 1",
        "few-shot fine-tuning": "trained on the same sentences with labels",
        "fine-tuned target": "trained on all data",
    }
    lines = ["| accuracy, % | " + " | ".join(f"minilm-l6 to {name}" for name in targets) + " |"]
    lines.append("|---" * (len(targets) + 1) + "|")
    old = [mean(note["fine-tuned source"] for note in text["notes"] if note["target"] == name) for name in targets]
    lines.append("| the old model | " + " | ".join(f"{value:.1f}" for value in old) + " |")
    for method, words in known.items():
        found = [
            mean(r["zero-shot"] for r in rows if (r["target"], r["method"]) == (name, method) and r["N"] != 20)
            for name in targets
        ]
        lines.append(f"| {words} | " + " | ".join(f"{value:.1f}" for value in found) + " |")
    return lines


def ports_table() -> list[str]:
    """Closed forms between language models: accuracy, or bits per character where nothing is chosen."""
    arms = ("target", "theseus@1", "bico@1", "bico@auto", "fine-tuned source")
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows_in(RESULTS / "language-ports.jsonl"):
        found = cells.setdefault((row["task"], row["pair"]), {arm: [] for arm in arms})
        found[row["row"]].append(row["bits"] if row["accuracy"] is None else row["accuracy"])
    lines = ["| task | pair | " + " | ".join(arms) + " |", "|---" * (len(arms) + 2) + "|"]
    for (task, pair), found in sorted(cells.items(), reverse=True):
        words, digits = (f"{task}, %", 1) if task == "trec6" else (f"{task}, bits", 2)
        scores = [f"{mean(found[arm]):.{digits}f}" for arm in arms]
        lines.append(f"| {words} | {pair.replace(':', ' to ')} | " + " | ".join(scores) + " |")
    return lines


def recipes_table() -> list[str]:
    """Gains of the paper's methods over the target in the recipes' small variants, and the paper's own gains."""
    names = ("bico", "theseus")
    lines = [
        "| recipe | in the paper | samples | BiCo, scale 1 | auto | THESEUS, scale 1 | auto | paper: BiCo | THESEUS |"
    ]
    lines.append("|---" * 9 + "|")
    for path in sorted((RESULTS / "recipes").glob("*/results.json")):
        rows = json.loads(path.read_text()).get("rows", [])
        recipe = tomllib.loads((RECIPES / f"{path.parent.name}.toml").read_text())
        printed = {(row[0], row[1]): mean(row[2:-1] or row[2:]) for row in recipe.get("printed", {}).get("rows", [])}
        budgets = sorted({row["budget"] for row in rows if row.get("method") == "bico" and row["sampler"] == "random"})
        for budget in dict.fromkeys([*budgets[:1], *budgets[-1:]]):
            cells = [_gain(rows, name, rule, budget) for name in names for rule in ("1", "auto")]
            base = printed.get(("target", 0))
            for name in names:
                known = printed.get((name, budget))
                cells.append("–" if base is None or known is None else f"{known - base:+.1f}")
            lines.append(f"| {path.parent.name} | {recipe['paper']} | {budget} | " + " | ".join(cells) + " |")
    return lines


def _gain(rows: list[dict[str, Any]], method: str, rule: str, budget: int) -> str:
    """The gain over the target in points, the mean over tasks and seeds."""

    def accuracies(name: str, *more: tuple[str, Any]) -> list[float]:
        wanted = {"method": name, "sampler": "random", **dict(more)}
        here = [row for row in rows if wanted.items() <= row.items()]
        return [mean(row["accuracy"] for row in here if row["task"] == task) for task in {row["task"] for row in here}]

    found = accuracies(method, ("scale_rule", rule), ("budget", budget))
    base = accuracies("target", ("budget", budget)) or accuracies("target")
    return f"{mean(found) - mean(base):+.1f}" if found and base else "–"


TABLES: dict[str, Callable[[], list[str]]] = {
    "readme": readme.table,
    "behind": readme.behind,
    "language": pages.language_table,
    "classifiers": pages.classifiers_table,
    "towers": pages.towers_table,
    "encoders": encoders_table,
    "zoo": zoo_table,
    "rivals": rivals_table,
    "recipes": recipes_table,
    "ports": ports_table,
    **{name: partial(studies.table, name) for name in studies.STUDIES},
    "extra": studies.extra,
    "repeats": studies.repeats,
    "scale_rules": studies.scale_rules,
    "rules": studies.rules,
}


def values() -> dict[str, float]:
    """Numbers of sentences that are computed from results, by key."""
    found = {**rivals_values(), "zoo.share": zoo_share("1"), "zoo.share.auto": zoo_share("auto")}
    found |= {f"seconds.{name}": pages.seconds(name, "distill@100") for name in GROUPS}
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
            page = RESULTS / f"{file}.md"
            path = page if page.exists() else RESULTS / file / "README.md"
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
    known, problems = values(), pages.problems()
    for name in PAGES:
        path = ROOT / name
        page = corrected(path.read_text(), known, problems, name)
        if options.write:
            path.write_text(page)
    for path, picture in PICTURES.items():
        if not path.exists() or path.read_text(encoding="utf-8") != picture():
            problems.append(f"{path.name} differs from the results")
        if options.write:
            path.write_text(picture(), encoding="utf-8")
    print("\n".join(problems) or "every number is that of the results")
    sys.exit(bool(problems) and not options.write)


if __name__ == "__main__":
    main()
