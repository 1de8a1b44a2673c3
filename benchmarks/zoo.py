"""Every pair and task of the shared zoo, every bilinear method: accuracy of the ported target.

    python benchmarks/zoo.py --shared ../shared --samples 100 --seeds 0 --out benchmarks/results/zoo-n100

One capture per (pair, task, seed) serves all methods. Calibration samples come from the training split, accuracy
from the test split; nothing is chosen by looking at accuracies. Writes OUT.json and OUT.md. `--check-cli` repeats
the BiCo cell of every pair and task with `tuneport transfer` and `tuneport evaluate`, one command each.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from tuneport.data import read_data
from tuneport.evaluation import zero_shot
from tuneport.families import choose_head, open_model
from tuneport.methods import METHODS, Problem
from tuneport.pipeline import Result, measure_job, prepare

PAIRS = {
    "a -> a2": ("a", "a2", ("cifar10", "fashion", "gtsrb", "mnist")),
    "a -> b": ("a", "b", ("cifar10", "fashion", "gtsrb", "mnist")),
    "a -> c": ("a", "c", ("cifar10", "fashion", "gtsrb", "mnist")),
    "c -> a": ("c", "a", ("cifar10", "mnist")),
    "c -> a2": ("c", "a2", ("cifar10", "mnist")),
    "c -> b": ("c", "b", ("cifar10", "mnist")),
}
# Fine-tuned targets: measured here where the folder is in the zoo, else the figure its README gives (4,000 images).
STATED = {
    "a2": {"cifar10": 73.0, "fashion": 86.8, "gtsrb": 90.9, "mnist": 97.9},
    "b": {"cifar10": 74.1, "fashion": 87.7, "gtsrb": 92.1, "mnist": 98.2},
}
ROWS = ("naive", "input_only", "output_only", "gradient_only", "theseus", "bico")


def run_cell(shared: Path, pair: str, task: str, samples: int, seed: int) -> dict[str, float | None]:
    """Accuracies of one (pair, task, seed): zero-shot, every method, fine-tuned target where known."""
    source, target, _ = PAIRS[pair]
    zoo, data = shared / "zoo", shared / "data/images" / f"{task}.npz"
    test = read_data(data, "test")
    signals = frozenset().union(*(METHODS[name].signals for name in ROWS))
    job = prepare(
        zoo / source,
        zoo / f"{source}-{task}",
        zoo / target,
        data,
        method="bico",
        head=task,
        samples=samples,
        seed=seed,
        extra_signals=signals,
    )
    head = choose_head(job.target, task, task, test.classes)
    cell: dict[str, float | None] = {"zero-shot": zero_shot(job.target, head, test).accuracy}
    measured = measure_job(job, signals=signals)
    for name in ROWS:
        moved = METHODS[name].transfer(Problem(job.plan, job.task_vector, measured, job.completion))
        result = Result(job.target, moved.task_vector, moved.records, (), 1.0, {})
        cell[name] = zero_shot(job.target.with_module(result.apply()), head, test).accuracy
    tuned = zoo / f"{target}-{task}"
    if tuned.is_dir():
        cell["fine-tuned"] = zero_shot(replace(open_model(tuned)), head, test).accuracy
    else:
        cell["fine-tuned"] = STATED.get(target, {}).get(task)
    return cell


def check_cli(shared: Path, pair: str, task: str, samples: int, seed: int) -> float:
    """The BiCo cell again, by the two commands a user would type."""
    source, target, _ = PAIRS[pair]
    zoo, data = shared / "zoo", str(shared / "data/images" / f"{task}.npz")
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "ported")
        models = [
            "--source",
            str(zoo / source),
            "--finetuned",
            str(zoo / f"{source}-{task}"),
            "--target",
            str(zoo / target),
        ]
        chosen = ["--data", data, "--head", task, "--samples", str(samples), "--seed", str(seed)]
        command = [sys.executable, "-m", "tuneport"]
        subprocess.run([*command, "transfer", *models, *chosen, "--out", out], check=True, stdout=subprocess.DEVNULL)
        scored = subprocess.run(
            [*command, "evaluate", out, "--data", data, "--head", task, "--json"],
            check=True,
            capture_output=True,
            text=True,
        )
    return float(json.loads(scored.stdout)["accuracy"])


def table(cells: list[dict], samples: int, seeds: list[int]) -> str:
    """Markdown: one block per pair, tasks as columns, means over seeds, gain over zero-shot."""
    lines = []
    for pair in dict.fromkeys(cell["pair"] for cell in cells):
        tasks = list(dict.fromkeys(cell["task"] for cell in cells if cell["pair"] == pair))
        lines += [f"\n**{pair}** (N = {samples}, seeds {', '.join(map(str, seeds))}, scale 1)\n"]
        lines += ["| | " + " | ".join(tasks) + " | mean | gain |", "|---|" + "---|" * (len(tasks) + 2)]
        base = None
        for row in ("zero-shot", *ROWS, "fine-tuned"):
            values = [
                [cell["accuracy"][row] for cell in cells if cell["pair"] == pair and cell["task"] == task]
                for task in tasks
            ]
            means = [statistics.mean(v) if None not in v else None for v in values]
            texts = ["–" if m is None else f"{m:.1f}" for m in means]
            mean = statistics.mean(means) if None not in means else None
            base = mean if base is None else base
            gain = "–" if mean is None else f"{mean - base:+.1f}"
            lines.append(f"| {row} | " + " | ".join(texts) + f" | {'–' if mean is None else f'{mean:.1f}'} | {gain} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with zoo/ and data/images/")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--pairs", nargs="+", default=list(PAIRS))
    parser.add_argument("--out", type=Path, required=True, help="OUT.json and OUT.md are written")
    parser.add_argument("--check-cli", action="store_true")
    options = parser.parse_args()
    if not (options.shared / "zoo").is_dir():
        sys.exit(f"{options.shared} has no zoo/: this benchmark needs the shared models and data")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    cells: list[dict] = []
    started = time.time()
    for pair in options.pairs:
        for task in PAIRS[pair][2]:
            for seed in options.seeds:
                cell = {"pair": pair, "task": task, "seed": seed}
                cell["accuracy"] = run_cell(options.shared, pair, task, options.samples, seed)
                if options.check_cli and seed == options.seeds[0]:
                    cell["cli"] = check_cli(options.shared, pair, task, options.samples, seed)
                cells.append(cell)
                print(json.dumps(cell), f"{time.time() - started:.0f} s", flush=True)
                about = {
                    "command": "python benchmarks/zoo.py " + " ".join(sys.argv[1:]),
                    "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
                    "commit": commit,
                    "date": time.strftime("%Y-%m-%d"),
                }
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.with_suffix(".json").write_text(json.dumps({**about, "cells": cells}, indent=1) + "\n")
                text = (
                    table(cells, options.samples, options.seeds)
                    + "\n"
                    + "".join(f"- {k}: {v}\n" for k, v in about.items())
                )
                options.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
