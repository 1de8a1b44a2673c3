"""Claim: two ports of one skill, from two old models, are better together than either: the mean of both changes.

    python research/lab_sources.py --root ../shared --out sources.jsonl [--samples 100] [--seeds 0 1]
    python research/lab_sources.py --out sources.jsonl --table

Sources a and c of the shared zoo, fine-tuned on the same task, are ported to a2 and b with `bico` and a scale that
each chooses by `auto`; then half of each change is added. Accuracy on test images. Says so where the zoo is not there.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from lab import Places
from lab_study import begin, keep, study_parser

import tuneport
from tuneport.data.dataset import Dataset
from tuneport.data.tasks import read_data
from tuneport.measure.accuracy import zero_shot
from tuneport.models.base import Model
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model
from tuneport.task_vectors.low_rank import as_dense

SOURCES, CELLS = ("a", "c"), [(target, task) for target in ("a2", "b") for task in ("cifar10", "mnist")]


def accuracy(target: Model, head: Head, test: Dataset, change: Any) -> float:
    """Of the target with a change of its weights, for a while."""
    weights = dict(target.module.named_parameters())
    old = {name: weights[name].detach().clone() for name in change if name in weights}
    with torch.no_grad():
        for name in old:
            weights[name].add_(as_dense(change[name]).to(weights[name]))
        found = zero_shot(target, head, test).accuracy
        for name, tensor in old.items():
            weights[name].copy_(tensor)
    return found


def run_cell(places: Places, target: str, task: str, samples: int, seed: int, device: str) -> dict[str, Any]:
    model, data = open_model(places.model(target), device=torch.device(device)), places.data(task)
    test = read_data(data, "test")
    head = choose_head(model, None, test)
    options: dict[str, Any] = {"samples": samples, "seed": seed, "scale": "auto", "device": device}
    changes = {}
    for source in SOURCES:
        models = (places.model(source), places.model(f"{source}-{task}"), places.model(target))
        result = tuneport.transfer(*models, data, **options)
        changes[source] = result.scale * result.task_vector
    changes["both"] = 0.5 * (changes["a"] + changes["c"])
    found = {"target": accuracy(model, head, test, {})}
    found |= {name: accuracy(model, head, test, change) for name, change in changes.items()}
    return {"target": target, "task": task, "samples": samples, "seed": seed, "accuracy": found}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| target, task | N | draws | target | from a | from c | half of each |", "|---|---|---|---|---|---|---|"]
    for key in sorted({(r["target"], r["task"], r["samples"]) for r in rows}):
        here = [r["accuracy"] for r in rows if (r["target"], r["task"], r["samples"]) == key]
        own = np.mean([r["target"] for r in here])
        gains = " | ".join(f"{np.mean([r[name] for r in here]) - own:+.1f}" for name in ("a", "c", "both"))
        lines.append(f"| {key[0]}, {key[1]} | {key[2]} | {len(here)} | {own:.1f} | {gains} |")
    return "\n".join(lines)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--device", default="cpu")
    options, rows = begin(parser, table)
    places, done = Places(options.root, None), {(r["target"], r["task"], r["samples"], r["seed"]) for r in rows}
    for seed in options.seeds:
        for target, task in CELLS:
            if (target, task, options.samples, seed) not in done:
                row = run_cell(places, target, task, options.samples, seed, options.device)
                keep(options.out, [row])
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
