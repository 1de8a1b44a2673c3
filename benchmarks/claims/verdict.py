"""Does the pre-flight verdict predict the gain? Every pair and task of the zoo, BiCo at --scale, N = 100.

    python -m benchmarks.claims.verdict --shared ../shared --runs runs-verdict
    python -m benchmarks.claims.verdict --runs runs-verdict --write benchmarks/results/verdict.md

The first command runs `paper.preflight.compare` for each cell on the calibration samples that transfers of
zoo-n100.json drew (the same seed), and keeps a file per cell. The second holds them against the real gains of
zoo-n100.json: rank correlations of every candidate feature, the verdicts, and thresholds chosen again with each pair
and each task left out.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from benchmarks.claims.zoo import CELLS
from benchmarks.common import commit, part_of
from paper.likeness import COMPARED
from paper.preflight import (
    LIKELY,
    UNCERTAIN,
    UNLIKELY,
    Trial,
    compare,
    judge,
    summary,
    try_transfer,
)
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.transfer import check_scale

RESULTS = Path(__file__).resolve().parents[1] / "results"
HARM = 0.5  # points: less than that is neither a gain nor a loss
Cell = dict[str, Any]


def run(options: argparse.Namespace) -> None:
    """One comparison per cell; what a cell's file holds already is not done again."""
    options.runs.mkdir(parents=True, exist_ok=True)
    zoo, images = options.shared / "zoo", options.shared / "data" / "images"
    for seed, (source, target, task) in part_of(product(options.seeds, CELLS), options.part):
        file = options.runs / f"{source}-{target}-{task}-{seed}.json"
        cell: Cell = json.loads(file.read_text()) if file.exists() else {}
        wanted = {"trial"} if options.trial_only else {"trial", "similarity"}
        if wanted <= set(cell):
            continue
        started = time.perf_counter()
        tuned, data = zoo / f"{source}-{task}", images / f"{task}.npz"
        given = {"head": task, "samples": 100, "seed": seed}
        job = prepare(zoo / source, tuned, zoo / target, data, signals=COMPARED, **given)
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        cell |= {"pair": f"{source}-{target}", "task": task, "seed": seed, "machine": machine}
        if "trial" not in cell:
            cell["trial"] = asdict(try_transfer(job, scale=check_scale(options.scale)))
        if "similarity" in wanted:
            cell["similarity"] = summary(compare(job, trial=False).similarity)
        cell["seconds"] = round(cell.get("seconds", 0.0) + time.perf_counter() - started, 1)
        file.write_text(json.dumps(cell) + "\n")
        print(file.name, cell["seconds"], "s", flush=True)


def load(options: argparse.Namespace) -> list[Cell]:
    """The cells with their real gains at the same seed, and averaged over the seeds of zoo-n100.json."""
    rows = json.loads((RESULTS / "zoo-n100.json").read_text())
    targets = {(row["pair"], row["task"]): row["accuracy"] for row in rows if row["method"] == "target"}
    gains: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        if row["method"] == "bico" and row["scale_rule"] == options.scale:
            key = (row["pair"], row["task"])
            gains.setdefault(key, {})[row["seed"]] = row["accuracy"] - targets[key]
    cells = [json.loads(file.read_text()) for file in sorted(options.runs.glob("*.json"))]
    for cell in cells:
        of_cell = gains[cell["pair"], cell["task"]]
        cell["gain"] = of_cell[cell["seed"]]
        cell["mean_gain"] = sum(of_cell.values()) / len(of_cell)
        cell["trial"] = Trial(**cell["trial"])
    return cells


FEATURES: dict[str, Callable[[Cell], float]] = {
    "trial: change of accuracy": lambda cell: cell["trial"].gain,
    "trial: turned right against wrong (lean)": lambda cell: lean(cell["trial"]),
    "trial: share of samples whose loss falls": lambda cell: cell["trial"].loss_falls,
    "trial: change of mean loss": lambda cell: cell["trial"].loss_before - cell["trial"].loss_after,
    "room: errors of the target on the samples": lambda cell: 100 - cell["trial"].accuracy_before,
}
for _signal in ("input", "output", "output_gradient"):
    for _name in ("cka", "cka_debiased", "cosine_after", "cosine_held_out"):
        FEATURES[f"{_signal.replace('_', ' ')}: {_name.replace('_', ' ')}"] = lambda cell, s=_signal, n=_name: (
            cell.get("similarity", {}).get(s, {}).get(n, math.nan)
        )


def rank_correlation(cells: list[Cell], feature: Callable[[Cell], float], gain: str) -> tuple[float, int]:
    """Spearman's rho and the number of cells that have the feature."""
    known = [(feature(cell), cell[gain]) for cell in cells if math.isfinite(feature(cell))]
    if len(known) < 3:
        return math.nan, len(known)
    return float(spearmanr(*zip(*known, strict=True)).statistic), len(known)


def within_tasks(cells: list[Cell], feature: Callable[[Cell], float]) -> float:
    """Spearman's rho after taking each task's mean away from both sides: does it tell pairs apart at all?"""
    known = [cell for cell in cells if math.isfinite(feature(cell))]
    sides: list[tuple[float, float]] = []
    for task in {cell["task"] for cell in known}:
        group = [(feature(cell), cell["gain"]) for cell in known if cell["task"] == task]
        means = [sum(side) / len(group) for side in zip(*group, strict=True)]
        sides += [(x - means[0], y - means[1]) for x, y in group]
    return float(spearmanr(*zip(*sides, strict=True)).statistic) if len(sides) >= 3 else math.nan


def lean(trial: Trial) -> float:
    """The samples that turn right minus those that turn wrong, over the standard deviation by chance."""
    assert trial.turned_right is not None
    assert trial.turned_wrong is not None
    return (trial.turned_right - trial.turned_wrong) / math.sqrt(max(trial.turned_right + trial.turned_wrong, 1))


def says(trial: Trial, falls: float, wrong: float) -> str:
    """A rule of thresholds, for comparison with that of paper.preflight.judge."""
    assert trial.gain is not None
    if lean(trial) <= wrong or trial.loss_falls < 0.5:
        return UNLIKELY
    return LIKELY if trial.gain > 0 and trial.loss_falls >= falls else UNCERTAIN


def right(word: str, gain: float) -> int:
    """1 for a true word, -1 for a false one, 0 for "uncertain"."""
    if word == UNCERTAIN:
        return 0
    return 1 if (gain > HARM if word == LIKELY else gain < HARM) else -1


def left_out(cells: list[Cell], by: str) -> Counter[str]:
    """Verdicts on each group with thresholds chosen on all others: true, false and uncertain ones."""
    counts: Counter[str] = Counter()
    grid = [(falls, wrong) for falls in (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9) for wrong in (-0.25, -0.5, -1, -1.5, -2)]
    for group in sorted({cell[by] for cell in cells}):
        others = [cell for cell in cells if cell[by] != group]
        best = max(grid, key=lambda pair: sum(right(says(cell["trial"], *pair), cell["gain"]) for cell in others))
        for cell in cells:
            if cell[by] == group:
                word = {1: "true", -1: "false", 0: "uncertain"}[right(says(cell["trial"], *best), cell["gain"])]
                counts[word] += 1
    return counts


def table(cells: list[Cell]) -> list[str]:
    """A row for each cell, with its verdict."""
    lines = [
        "| pair | task | seed | real gain | mean of 3 seeds | trial, points | right / wrong | loss falls | verdict | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(cells, key=lambda item: (item["pair"], item["task"], item["seed"])):
        trial = cell["trial"]
        word = judge(trial).verdict
        lines.append(
            f"| {cell['pair'].replace('-', ' to ')} | {cell['task']} | {cell['seed']} | {cell['gain']:+.1f} "
            f"| {cell['mean_gain']:+.1f} | {trial.gain:+.1f} | {trial.turned_right} / {trial.turned_wrong} "
            f"| {100 * trial.loss_falls:.0f} % | {word} | {'' if right(word, cell['gain']) >= 0 else '**false**'} |"
        )
    return lines


def verdicts(cells: list[Cell]) -> list[str]:
    """How many cells got which verdict, and how often it was true."""
    words = [(judge(cell["trial"]).verdict, cell["gain"]) for cell in cells]
    counts = Counter((word, right(word, gain)) for word, gain in words)
    lines = ["| verdict | cells | true | false |", "|---|---|---|---|"]
    for word in (LIKELY, UNCERTAIN, UNLIKELY):
        total = sum(count for (name, _), count in counts.items() if name == word)
        shown = ("–", "–") if word == UNCERTAIN else (counts[word, 1], counts[word, -1])
        lines.append(f"| {word} | {total} | {shown[0]} | {shown[1]} |")
    return lines


def write(options: argparse.Namespace) -> None:
    measured = load(options)
    cells = [cell for cell in measured if cell["seed"] == 0]
    fresh = [cell for cell in measured if cell["seed"] != 0]
    lines = ["# Does the pre-flight verdict predict the gain?", ""]
    lines += [
        f"{len(cells)} cells of the zoo, BiCo at scale {options.scale}, N = 100. Gain: test accuracy of the ported "
        "target minus that of the target, in points, with the same seed. Trial: calibration samples only, "
        "by cross-fitting.",
        "",
        *table(cells),
    ]
    lines += ["", "## Verdicts", "", *verdicts(cells)]
    lines += ["", f"A gain above {HARM} points counts as help, one below it as none."]
    lines += ["", "Thresholds chosen without the cells they are tried on:", ""]
    lines += ["| left out | true | false | uncertain |", "|---|---|---|---|"]
    for by in ("pair", "task"):
        found = left_out(cells, by)
        lines.append(f"| one {by} at a time | {found['true']} | {found['false']} | {found['uncertain']} |")
    helped = sum(cell["gain"] > HARM for cell in cells)
    lines += ["", f'Saying "likely" to everything would be true in {helped} of {len(cells)} cells.']
    lines += [
        "",
        "## Rank correlation with the real gain (Spearman)",
        "",
        "Within tasks: each task's mean is taken away first, so that only differences between pairs (and seeds) count.",
        "",
        "| feature | cells | same seed | mean of 3 seeds | within tasks |",
        "|---|---|---|---|---|",
    ]
    for name, feature in FEATURES.items():
        rho, count = rank_correlation(cells, feature, "gain")
        lines.append(
            f"| {name} | {count} | {rho:+.2f} | {rank_correlation(cells, feature, 'mean_gain')[0]:+.2f} "
            f"| {within_tasks(cells, feature):+.2f} |"
        )
    if fresh:
        lines += ["", "## Other draws", "", *verdicts(fresh), "", *table(fresh)]
    lines += [
        "",
        "- commands: those at the head of `benchmarks/claims/verdict.py`",
        f"- machine: {', '.join(dict.fromkeys(cell['machine'] for cell in measured))}, torch {torch.__version__}",
        f"- commit: {commit()}",
        f"- date: {datetime.now(timezone.utc).date()}",
        *([f"- note: {options.note}"] if options.note else []),
    ]
    options.write.write_text("\n".join(lines) + "\n")
    rows = [{**cell, "trial": asdict(cell["trial"])} for cell in measured]
    options.write.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print(options.write.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with zoo/ and data/images/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, required=True, help="where the file of each cell is, or goes")
    parser.add_argument(
        "--scale", default="auto", help="of the trials and the gains: 1 or auto, the default of N = 100"
    )
    parser.add_argument("--part", default="0/1", help="I/N: every Nth cell, from the Ith")
    parser.add_argument("--trial-only", action="store_true", help="leave the layer-by-layer likeness out")
    parser.add_argument("--write", type=Path, help="write the tables of the runs to this file")
    parser.add_argument("--note", help="a line to end the tables with")
    options = parser.parse_args()
    if options.write is not None:
        write(options)
    elif options.shared is None:
        parser.error("give --shared to run, or --write to put runs into tables")
    else:
        run(options)


if __name__ == "__main__":
    main()
