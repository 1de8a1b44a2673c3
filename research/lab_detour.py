"""Claim: a detour over a third base model carries about as much as the direct way, and their mean no more than it.

    python research/lab_detour.py --root ../shared --out detour.jsonl [--cells a:c:b:cifar10 ...]
    python research/lab_detour.py --out detour.jsonl --table

A cell is source:over:target:task. The fine-tune of the source is ported to the target at once, and to the model between
and on from there; both changes and their mean are scored on test images at every scale. Models run in bfloat16. Says so
where the zoo is not there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from lab import Places, tested
from lab_study import Row, begin, keep, study_parser
from torch import Tensor

import tuneport
from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.measure.accuracy import encode_batches
from tuneport.task_vectors.low_rank import as_dense
from tuneport.task_vectors.vector import TaskVector

CELLS = [f"a:c:b:{task}" for task in ("cifar10", "mnist", "fashion")]


def dense(vector: TaskVector) -> dict[str, Tensor]:
    return {name: as_dense(vector[name]).float() for name in vector}


def run_cell(places: Places, cell: str, options: Any) -> Row:
    source, over, target, task = cell.split(":")
    data, tuned = places.data(task), places.model(f"{source}-{task}")
    wanted: dict[str, Any] = {"samples": options.samples, "seed": options.seed, "device": "cpu", "dtype": "bfloat16"}
    direct = tuneport.transfer(places.model(source), tuned, places.model(target), data, **wanted)
    between = tuneport.transfer(places.model(source), tuned, places.model(over), data, **wanted)
    carried = between.task_vector.rename({name: between.target.file_names[name] for name in between.task_vector})
    detour = tuneport.transfer(places.model(over), carried, places.model(target), data, **wanted)
    job = tuneport.prepare(places.model(source), tuned, places.model(target), data, samples=10, device="cpu")
    assert job.heads is not None
    test = align_labels(read_data(data, "test"), job.heads.target.classes)
    some = np.sort(np.random.default_rng(0).permutation(len(test))[: options.test])
    batches = list(encode_batches(job.target, test.subset(some), 100))
    ways = {"direct": dense(direct.task_vector), "detour": dense(detour.task_vector)}
    ways["mean"] = {name: (ways["direct"][name] + ways["detour"][name]) / 2 for name in ways["direct"]}
    one, two = (torch.cat([way[name].flatten() for name in way]) for way in (ways["direct"], ways["detour"]))
    row: Row = {"cell": cell, "samples": options.samples, "seed": options.seed, "cosine": float(one @ two)}
    row["cosine"] = round(row["cosine"] / float(one.norm() * two.norm()), 3)
    for name, change in ways.items():
        found = tested(job, change, batches, torch.bfloat16)
        row[name] = {str(scale): round(value - found[0.0], 1) for scale, value in found.items()}
    return row


def table(rows: list[Row]) -> str:
    lines = ["| cell | N | cosine | direct | detour | mean |", "|---|---|---|---|---|---|"]
    for row in rows:
        best = " | ".join(f"{max(row[name].values()):+.1f}" for name in ("direct", "detour", "mean"))
        lines.append(f"| {row['cell']} | {row['samples']} | {row['cosine']:.2f} | {best} |")
    return "\n".join([*lines, "", "Gains at the best scale on test images."])


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--cells", nargs="+", default=CELLS, help="source:over:target:task")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, default=1000, help="test images at most")
    options, rows = begin(parser, table)
    for cell in options.cells:
        if not any((row["cell"], row["samples"], row["seed"]) == (cell, options.samples, options.seed) for row in rows):
            keep(options.out, [run_cell(Places(options.root, None), cell, options)])


if __name__ == "__main__":
    main()
