"""Claim: ported weights are a better place to start fine-tuning from than the target's own.

    python research/warm_start.py --root ../shared --out warm-start.jsonl [--cells a:a2:mnist ...] [--steps 60]
    python research/warm_start.py --out warm-start.jsonl --table

For each cell of the shared zoo the target is fine-tuned on the whole training split (AdamW, 1e-4, weight decay 0.1,
head frozen), once from its own weights and once from those that bico+ ports with --samples images, with the same
batches. Accuracy on test images is written down along the way. Needs the shared zoo; says so where it is not there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab_study import begin, keep, study_parser

from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.measure.accuracy import zero_shot
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.transfer import run
from tuneport.training.finetune import Schedule, finetune

CELLS = ["a:a2:cifar10", "a:a2:fashion", "a:a2:gtsrb", "a:a2:mnist", "a:b:cifar10", "a:b:mnist"]
STOPS = (5, 10, 20, 40, 60, 100, 200)


def run_cell(root: Path, cell: str, options: Any) -> list[dict[str, Any]]:
    source, target, task = cell.split(":")
    data = root / "data" / "images" / f"{task}.npz"
    job = prepare(
        root / "zoo" / source, root / "zoo" / f"{source}-{task}", root / "zoo" / target, data,
        signals="bico+", samples=options.samples, device=options.device,
    )  # fmt: skip
    result, head, model = run(job, "bico+"), job.heads.target, job.target
    assert head is not None
    test = align_labels(read_data(data, "test"), head.classes)
    test = test.subset(np.sort(np.random.default_rng(0).permutation(len(test))[: options.test]))
    schedule = Schedule(options.steps, options.batch_size, 1e-4, warmup_share=0.1)
    rows = []
    for start, module in (("own", model.module), ("ported", result.apply())):
        base = model.with_module(module)
        row = {"cell": cell, "samples": options.samples, "start": start, "scale": result.scale}
        rows.append({**row, "step": 0, "accuracy": zero_shot(base, head, test).accuracy})
        at = [stop for stop in STOPS if stop < options.steps]
        for step, tuned in finetune(base, head, read_data(data, "train"), schedule, at=at):
            accuracy = zero_shot(model.with_module(tuned), head, test).accuracy
            rows.append({**row, "step": step, "accuracy": accuracy})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    steps = sorted({row["step"] for row in rows})
    lines = [f"| cell | start | {' | '.join(map(str, steps))} |", "|---|---|" + "---|" * len(steps)]
    cells = sorted({row["cell"] for row in rows})
    for cell in [*cells, "mean"]:
        for start in ("own", "ported"):
            numbers = []
            for step in steps:
                found = [
                    row["accuracy"] for row in rows
                    if cell in (row["cell"], "mean") and (row["start"], row["step"]) == (start, step)
                ]  # fmt: skip
                numbers.append(f"{np.mean(found):.1f}" if found else "–")
            lines.append(f"| {cell} | {start} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--cells", nargs="+", default=CELLS, help="source:target:task")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--test", type=int, default=500, help="test images at most")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth cell, from the Ith")
    parser.add_argument("--device", default="cpu")
    options, rows = begin(parser, table)
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    for cell in options.cells[part::parts]:
        if any(row["cell"] == cell for row in rows):
            continue
        found = run_cell(options.root, cell, options)
        keep(options.out, found)
        print(*[f"{row['start']}@{row['step']} {row['accuracy']:.1f}" for row in found], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
