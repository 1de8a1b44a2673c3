"""Every pair and task of the shared zoo, every bilinear method: accuracy of the ported target at N = 100.

    python -m benchmarks.claims.zoo --shared ../shared --seeds 0 1 2 --runs runs/zoo
    python -m benchmarks.claims.zoo --write runs/zoo-n100.md --runs runs/zoo

The first command compares the methods on one pair and task after another (one capture each serves all methods) and
leaves a folder per run; the second puts the runs into tables, and into zoo-n100.json, which is committed. Calibration
samples come from the training split, accuracy from the test split; nothing is chosen by looking at accuracies. The BiCo
cells are what `tuneport transfer` followed by `tuneport evaluate` gives: `--commands` prints those two commands for
every pair and task.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.common import load, part_of, run_comparison, save
from benchmarks.rows import commit
from benchmarks.skill.towers import FINE_TUNED, GRID
from paper.schema import Comparison
from paper.tables import Comparing

PAIRS = {(pair.split(">")[0], pair.split(">")[1]): tasks for pair, tasks in GRID.items()}
CELLS = [(source, target, task) for (source, target), tasks in PAIRS.items() for task in tasks]
METHODS = ("naive", "input_only", "output_only", "gradient_only", "theseus", "bico")


def run(options: argparse.Namespace) -> None:
    """Compare on every pair and task whose models and data are there; skip runs that are done."""
    zoo, images = options.shared / "zoo", options.shared / "data/images"
    if not zoo.is_dir():
        sys.exit(f"{options.shared} has no zoo/: this benchmark needs the shared models and data")
    options.runs.mkdir(parents=True, exist_ok=True)
    for source, target, task in part_of(CELLS, options.part):
        out = options.runs / f"{source}-{target}-{task}"
        tuned, data = zoo / f"{source}-{task}", images / f"{task}.npz"
        missing = [str(path) for path in (zoo / source, zoo / target, tuned, data) if not path.exists()]
        if out.exists() or missing:
            print(f"skipped {out.name}: {'done' if out.exists() else 'no ' + ', '.join(missing)}", flush=True)
            continue
        comparison = Comparison(
            source=str(zoo / source),
            target=str(zoo / target),
            finetuned={task: str(tuned)},
            data={task: str(data)},
            heads={task: task},
            methods=METHODS,
            samples=tuple(options.samples),
            seeds=tuple(options.seeds),
            scales=tuple(options.scales),
            test_samples=options.test,
            reference={task: str(path)} if (path := zoo / f"{target}-{task}").exists() else {},
        )
        result = run_comparison(comparison)
        save(result, out)
        print(out.name, result.about["seconds"], "s", flush=True)


def write(options: argparse.Namespace) -> None:
    """Tables of all runs: a block per pair, tasks as columns, means over seeds at scale 1 and scale auto."""
    runs = {path.name: load(path) for path in sorted(options.runs.iterdir())}
    first = next(iter(runs.values()))
    text = ["# The zoo: every pair, every task", ""]
    for budget in first.comparison.samples:
        for pair, tasks in PAIRS.items():
            found = {task: runs[name] for task in tasks if (name := f"{pair[0]}-{pair[1]}-{task}") in runs}
            text += _block(pair, found, budget) if found else []
    seeds = " ".join(map(str, first.comparison.seeds))
    text += [
        f"- command: python -m benchmarks.claims.zoo --shared ../shared --seeds {seeds} --samples "
        + " ".join(map(str, first.comparison.samples)),
        f"- machine: {'; '.join(dict.fromkeys(run.about['machine'] for run in runs.values()))}",
        f"- commit: {commit()}",
        f"- date: {first.about['date']}",
        "- fine-tuned targets in brackets are the figures of the zoo's README (4,000 test images)",
    ]
    options.write.parent.mkdir(parents=True, exist_ok=True)
    options.write.write_text("\n".join(text) + "\n")
    rows = [{"pair": name.rsplit("-", 1)[0], **asdict(row)} for name, run in runs.items() for row in run.rows]
    options.write.with_suffix(".json").write_text(json.dumps(rows) + "\n")
    print(options.write.read_text())


def _block(pair: tuple[str, str], runs: dict[str, Comparing], budget: int) -> list[str]:
    def cell(task: str, method: str, rule: str) -> float | None:
        rows = runs[task].rows
        if method in ("target", "fine-tuned target"):
            values = [row.accuracy for row in rows if row.method == method]
        else:
            wanted = (method, rule, budget)
            values = [row.accuracy for row in rows if (row.method, row.scale_rule, row.budget) == wanted]
        return statistics.mean(values) if values else None

    lines = [f"## {pair[0]} to {pair[1]}, N = {budget}", "", "| | scale | " + " | ".join(runs) + " | mean | gain |"]
    lines.append("|---|---|" + "---|" * (len(runs) + 2))
    base = statistics.mean(cell(task, "target", "-") or 0.0 for task in runs)
    shown = [("target", "-"), *((name, rule) for rule in ("1", "auto") for name in METHODS), ("fine-tuned target", "-")]
    for method, rule in shown:
        values = {task: cell(task, method, rule) for task in runs}
        if method in METHODS and None in values.values():
            continue
        texts = [f"{value:.1f}" if value is not None else _stated(pair[1], task) for task, value in values.items()]
        known = [value for value in values.values() if value is not None]
        mean = statistics.mean(known) if len(known) == len(values) else None
        tail = f"{mean:.1f} | {mean - base:+.1f}" if mean is not None else "– | –"
        lines.append(f"| {method} | {rule} | " + " | ".join(texts) + f" | {tail} |")
    return [*lines, ""]


def _stated(target: str, task: str) -> str:
    value = FINE_TUNED.get(target, {}).get(task)
    return "–" if value is None else f"[{value:.1f}]"


def commands() -> None:
    """The two commands of every BiCo cell."""
    for (source, target), tasks in PAIRS.items():
        for task in tasks:
            out = f"ported/{source}-{target}-{task}"
            data = f"--data ../shared/data/images/{task}.npz --head {task}"
            models = f"--source ../shared/zoo/{source} --finetuned ../shared/zoo/{source}-{task}"
            print(f"tuneport transfer {models} --target ../shared/zoo/{target} {data} --out {out}")
            print(f"tuneport evaluate {out} {data}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with zoo/ and data/images/")
    parser.add_argument("--samples", type=int, nargs="+", default=[100])
    parser.add_argument("--test", type=int, help="test samples at most")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--scales", nargs="+", default=["1", "auto"])
    parser.add_argument("--part", default="0/1", help="I/N: every Nth pair and task, from the Ith")
    parser.add_argument("--runs", type=Path, help="where each run's folder is, or goes")
    parser.add_argument("--write", type=Path, help="write the tables of the runs to this file")
    parser.add_argument("--commands", action="store_true", help="print the commands of the BiCo cells")
    options = parser.parse_args()
    if options.commands:
        commands()
    elif options.runs is None or (options.shared is None and options.write is None):
        parser.error("give --runs with --shared (to run) or --write (to put runs into tables)")
    elif options.write is not None:
        write(options)
    else:
        run(options)


if __name__ == "__main__":
    main()
