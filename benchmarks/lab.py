"""Claim: bico+ recovers more of what fine-tuning gains than bico, with few samples and with many, and does not harm.

    python benchmarks/lab.py --root ../shared --out lab.jsonl [--samples 20 100] [--seeds 0 1 2] [--cells C ...]
    python benchmarks/lab.py --out lab.jsonl --table

Each cell (source, target, task) of the shared zoo is ported with bico and bico+, at scale 1 and with the scale chosen
on the calibration samples, which come from the training split. Rows are appended to --out, and what is there is not
run again. The table gives the share of the fine-tuning gain that each recovers, averaged over cells, with a paired
bootstrap interval against bico at scale 1 over cells. Needs the shared zoo; says so where it is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tuneport.data import align_labels
from tuneport.evaluation import zero_shot
from tuneport.methods import METHODS
from tuneport.pipeline import halves, measure_job, problem_of, transfer_auto
from tuneport.preparation import prepare
from tuneport.scaling import Scaled
from tuneport.tasks import read_data

TASKS = ("cifar10", "fashion", "gtsrb", "mnist")
CELLS = [("a", target, task) for target in ("a2", "b", "c") for task in TASKS]
CELLS += [("c", target, task) for target in ("a", "a2", "b") for task in ("cifar10", "mnist")]
FULL = {  # accuracy of the fine-tuned targets, as the zoo states it; c was not fine-tuned on fashion and gtsrb: b's
    ("a", "cifar10"): 72.8, ("a", "mnist"): 97.6,
    ("a2", "cifar10"): 73.0, ("a2", "fashion"): 86.8, ("a2", "gtsrb"): 90.9, ("a2", "mnist"): 97.9,
    ("b", "cifar10"): 74.1, ("b", "fashion"): 87.7, ("b", "gtsrb"): 92.1, ("b", "mnist"): 98.2,
    ("c", "cifar10"): 74.4, ("c", "fashion"): 87.7, ("c", "gtsrb"): 92.1, ("c", "mnist"): 98.5,
}  # fmt: skip


def run_cell(
    root: Path, cell: tuple[str, str, str], samples: int, seed: int, test_samples: int
) -> list[dict[str, Any]]:
    source, target, task = cell
    data = root / "data" / "images" / f"{task}.npz"
    rows = []
    for name in ("bico", "bico+"):
        method = METHODS[name]
        job = prepare(
            root / "zoo" / source, root / "zoo" / f"{source}-{task}", root / "zoo" / target, data,
            method=method, samples=samples, seed=seed, scored=True,
        )  # fmt: skip
        assert job.target_head is not None
        test = align_labels(read_data(data, "test"), job.target_head.classes)
        test = test.subset(np.sort(np.random.default_rng(0).permutation(len(test))[:test_samples]))
        started = time.process_time()
        sides = halves(job)
        parts = (measure_job(sides[0]), measure_job(sides[1]))
        solved = {}

        def solve(found: Any, job: Any = job, method: Any = method, solved: dict[int, Any] = solved) -> Any:
            if id(found) not in solved:
                solved[id(found)] = method.transfer(problem_of(job, found))
            return solved[id(found)]

        moved, choice = transfer_auto(sides, solve, parts, parts[0] + parts[1])
        seconds = time.process_time() - started
        known: dict[float, float] = {}
        with Scaled(job.target.module, moved.task_vector) as scaled:
            for rule, scale in (("zero", 0.0), ("1", 1.0), ("auto", choice.scale)):
                if scale not in known:
                    scaled.set(scale)
                    known[scale] = zero_shot(job.target, job.target_head, test).accuracy
                if rule != "zero":
                    row = {"source": source, "target": target, "task": task, "samples": samples, "seed": seed}
                    row |= {
                        "method": name,
                        "rule": rule,
                        "scale": scale,
                        "zero": known[0.0],
                        "full": FULL[target, task],
                    }
                    seen = [[value, score.loss, score.accuracy] for value, score in choice.scores.items()]
                    rows.append(row | {"accuracy": known[scale], "cpu_seconds": round(seconds, 1), "held_out": seen})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Means over cells of seed means; the interval resamples cells, 10,000 times."""
    lines = [
        "| N | method | scale | share of the gain | points | against bico at 1, points (95 %) | worst cell, points |",
        "|---|---|---|---|---|---|---|",
    ]
    random = np.random.default_rng(0)
    for samples in sorted({row["samples"] for row in rows}):
        here = [row for row in rows if row["samples"] == samples]
        cells = sorted({(row["source"], row["target"], row["task"]) for row in here})

        def of(method: str, rule: str, value: Any, here: Any = here, cells: Any = cells) -> np.ndarray[Any, Any]:
            found = [[value(r) for r in here if (r["source"], r["target"], r["task"]) == cell
                      and (r["method"], r["rule"]) == (method, rule)] for cell in cells]  # fmt: skip
            return np.array([np.mean(values) for values in found])

        base = of("bico", "1", lambda r: r["accuracy"] - r["zero"])
        draws = random.integers(0, len(cells), (10_000, len(cells)))
        for method, rule in (("bico", "1"), ("bico", "auto"), ("bico+", "1"), ("bico+", "auto")):
            gain = of(method, rule, lambda r: r["accuracy"] - r["zero"])
            share = of(method, rule, lambda r: (r["accuracy"] - r["zero"]) / (r["full"] - r["zero"]))
            low, high = np.percentile((gain - base)[draws].mean(1), [2.5, 97.5])
            against = (
                f"{np.mean(gain - base):+.2f} ({low:+.2f} to {high:+.2f})" if (method, rule) != ("bico", "1") else "–"
            )
            lines.append(
                f"| {samples} | {method} | {rule} | {100 * share.mean():.1f} % | {gain.mean():+.2f} | {against} "
                f"| {gain.min():+.1f} |"
            )
        seeds = len({row["seed"] for row in here})
        lines.append(f"| | {len(cells)} cells, {seeds} seeds | | | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the folder with zoo/ and data/images/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cells", nargs="+", help="source:target:task")
    parser.add_argument("--test", type=int, default=2000, help="test images at most")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if options.table:
        print(table(rows))
        return
    if options.root is None or not (options.root / "zoo").is_dir():
        sys.exit(f"there is no zoo in {options.root}; give the shared folder with --root.")
    torch.set_num_threads(1)
    cells = [tuple(cell.split(":")) for cell in options.cells] if options.cells else CELLS
    done = {(r["source"], r["target"], r["task"], r["samples"], r["seed"]) for r in rows}
    for seed in options.seeds:
        for samples in options.samples:
            for cell in cells:
                if (*cell, samples, seed) in done:
                    continue
                found = run_cell(options.root, cell, samples, seed, options.test)  # type: ignore[arg-type]
                with options.out.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
                words = [f"{r['method']}@{r['rule']} {r['scale']:g} {r['accuracy'] - r['zero']:+.1f}" for r in found]
                print(*cell, samples, seed, *words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
