"""Claim: labels that the fine-tuned source gives serve as well as true ones; 500 unlabelled images per cell.

    python research/lab_labels.py --root ../shared --out labels.jsonl [--part 0/18] [--seeds 0 1 2]
    python research/lab_labels.py --out labels.jsonl --table

Each cell of the shared zoo is ported with `labels="source"` and with true labels, at scale auto, on the same samples.
Accuracy on the test images. Says so where the zoo is not there.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
from lab import CELLS, Places
from lab_study import Row, begin, cells_parser, keep

from tuneport import transfer
from tuneport.data.tasks import read_data
from tuneport.measure.accuracy import zero_shot
from tuneport.models.heads import choose_head


def run_cell(places: Places, cell: tuple[str, str, str], seed: int, options: Any) -> Row:
    source, target, task = cell
    data = places.data(task)
    test = read_data(data, "test")
    test = test.subset(np.sort(np.random.default_rng(0).permutation(len(test))[: options.test]))
    row: Row = {"source": source, "target": target, "task": task, "samples": options.samples, "seed": seed}
    for labels in ("source", "data"):
        result = transfer(
            places.model(source), places.model(f"{source}-{task}"), places.model(target), data, scale="auto",
            labels=labels, samples=options.samples, seed=seed, head=task, device=options.device,
        )  # fmt: skip
        head = choose_head(result.target, task, test)
        row["before"] = zero_shot(result.target, head, test).accuracy
        row[f"labels_{labels}"] = {
            "accuracy": zero_shot(result.target.with_module(result.apply().eval()), head, test).accuracy,
            "scale": result.scale,
        }
    return row


def table(rows: list[Row]) -> str:
    """Means over draws for each cell, and over cells."""
    lines = ["| source:target:task | draws | target | labels of the source | true labels |", "|---|---|---|---|---|"]
    cells = sorted({(row["source"], row["target"], row["task"]) for row in rows})
    gains: dict[str, list[float]] = {"source": [], "data": []}
    for cell in cells:
        here = [row for row in rows if (row["source"], row["target"], row["task"]) == cell]
        for labels, found in gains.items():
            found.append(float(np.mean([row[f"labels_{labels}"]["accuracy"] - row["before"] for row in here])))
        shown = " | ".join(f"{found[-1]:+.1f}" for found in gains.values())
        lines.append(f"| {':'.join(cell)} | {len(here)} | {here[0]['before']:.1f} | {shown} |")
    lines.append("| mean | | | " + " | ".join(f"{np.mean(found):+.1f}" for found in gains.values()) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = cells_parser(__doc__)
    parser.add_argument("--samples", type=int, default=500)
    options, rows = begin(parser, table)
    cells = [tuple(cell.split(":")) for cell in options.cells] if options.cells else CELLS
    done = {(r["source"], r["target"], r["task"], r["seed"]) for r in rows}
    places = Places(options.root, None)
    part, parts = map(int, options.part.split("/"))
    for seed, cell in list(product(options.seeds, cells))[part::parts]:
        if (*cell, seed) not in done:
            row = run_cell(places, cell, seed, options)  # type: ignore[arg-type]
            keep(options.out, [row])
            print(row, flush=True)


if __name__ == "__main__":
    main()
