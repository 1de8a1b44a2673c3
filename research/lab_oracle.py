"""Claim: orthogonal maps could carry nearly all of a fine-tune; what BiCo loses, it loses in finding them.

    python research/lab_oracle.py --root ../shared --out oracle.jsonl [--samples 100] [--seed 0]
    python research/lab_oracle.py --out oracle.jsonl --table

Where the zoo has the target's own fine-tune (a and c on cifar10 and mnist), the truth is known: its task vector, in the
tensors that a transfer moves. Compared with BiCo: the truth itself; the best that orthogonal maps can do, which is the
truth with the source's singular values in place of its own (U_B S_A V_B^T, up to padding); and BiCo with the truth in
one kind of layer, or in one third of the blocks, to see where it loses the most. At scale 1, and at the scale that is
best on test images: a study of limits. Says so where the zoo is not there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab import Places, tested
from lab_study import begin, keep, study_parser
from torch import Tensor

from tuneport import TaskVector
from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.measure.accuracy import encode_batches
from tuneport.models.open import open_model
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.transfer import run
from tuneport.task_vectors.low_rank import as_dense

CELLS = [(a, b, task) for a, b in (("a", "c"), ("c", "a")) for task in ("cifar10", "mnist")]
ROLES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def truth_of(target: Any, tuned: Path) -> dict[str, Tensor]:
    """The target's own task vector."""
    after = dict(open_model(tuned).module.named_parameters())
    return {name: (after[name].cpu() - base.cpu()).detach() for name, base in target.module.named_parameters()}


def with_values_of(source: Tensor, truth: Tensor) -> Tensor:
    """The truth with the singular values of the source's change: the nearest that two orthogonal maps can bring it."""
    if truth.ndim < 2:
        return truth * (source.norm() / truth.norm().clamp_min(1e-30))
    U, S, Vh = torch.linalg.svd(truth.flatten(1).double(), full_matrices=False)
    values = torch.linalg.svdvals(source.flatten(1).double())
    kept = torch.zeros_like(S)
    count = min(len(S), len(values))
    kept[:count] = values[:count]
    return ((U * kept) @ Vh).reshape(truth.shape).float()


def run_cell(
    places: Places, cell: tuple[str, str, str], samples: int, seed: int, count: int, device: str
) -> dict[str, Any]:
    source, target, task = cell
    models = (places.model(source), places.model(f"{source}-{task}"), places.model(target))
    job = prepare(*models, places.data(task), samples=samples, seed=seed, device=device)
    assert job.heads is not None
    moved = run(job, scale=1.0).task_vector
    bico = {name: as_dense(moved[name]).float().cpu() for name in moved}
    truth = truth_of(job.target, places.model(f"{target}-{task}"))
    linear = {name: truth[name] for name in bico}
    partner = {pair.target.weight: pair.source.weight for pair in job.plan.pairs}
    partner |= {p.target.bias: p.source.bias for p in job.plan.pairs if p.target.bias and p.source.bias}
    blocks = 1 + max(int(found[1]) for name in bico if (found := re.search(r"layers\.(\d+)\.", name)))
    test = align_labels(read_data(places.data(task), "test"), job.heads.target.classes)
    some = np.sort(np.random.default_rng(0).permutation(len(test))[:count])
    batches = list(encode_batches(job.target, test.subset(some), 100))

    def where(inside: Callable[[str], bool]) -> dict[str, Tensor]:
        return {name: linear[name] if inside(name) else bico[name] for name in bico}

    def third(name: str) -> int:
        found = re.search(r"layers\.(\d+)\.", name)
        return -1 if found is None else 3 * int(found[1]) // blocks

    tried = {
        "bico": bico,
        "the truth, all tensors": truth,
        "the truth, in what a transfer moves": linear,
        "the truth with the source's singular values": {
            name: with_values_of(as_dense(job.task_vector[partner[name]]).cpu(), linear[name]) for name in bico
        },
        **{f"bico, the truth in {role}": where(lambda name, role=role: f".{role}." in name) for role in ROLES},
        "bico, the truth in the patch embedding": where(lambda name: "patch_embedding" in name),
        **{
            f"bico, the truth in the {word} third of the blocks": where(lambda name, i=i: third(name) == i)
            for i, word in enumerate(("first", "middle", "last"))
        },
    }  # fmt: skip
    cosines = {
        role: [float(torch.cosine_similarity(bico[n].flatten(), linear[n].flatten(), dim=0))
               for n in bico if f".{role}.weight" in n]
        for role in ROLES
    }  # fmt: skip
    rows = {}
    for name, entries in tried.items():
        found = tested(job, TaskVector(entries), batches, torch.float32)
        rows[name] = {"1": found[1.0] - found[0.0], "best": max(found.values()) - found[0.0]}
        print(*cell, name, rows[name], file=sys.stderr, flush=True)
    mean = {role: float(np.mean(values)) for role, values in cosines.items()}
    return {"cell": ":".join(cell), "samples": samples, "seed": seed, "gains": rows, "cosines": mean}


def table(rows: list[dict[str, Any]]) -> str:
    rows = sorted(rows, key=lambda row: row["cell"])
    lines = ["| | " + " | ".join(row["cell"] for row in rows) + " |", "|---|" + "---|" * len(rows)]
    for name in rows[0]["gains"]:
        values = [row["gains"][name] for row in rows]
        lines.append(f"| {name} | " + " | ".join(f"{v['1']:+.1f} / {v['best']:+.1f}" for v in values) + " |")
    for role in ROLES:
        lines.append(f"| cosine of bico and the truth, {role} | "
                     + " | ".join(f"{row['cosines'][role]:.3f}" for row in rows) + " |")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = study_parser(__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", type=int, default=500, help="test images at most")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth cell, from the Ith")
    parser.add_argument("--device", default="cpu")
    options, rows = begin(parser, table)
    done = {row["cell"] for row in rows}
    part, parts = map(int, options.part.split("/"))
    for cell in CELLS[part::parts]:
        if ":".join(cell) not in done:
            row = run_cell(
                Places(options.root, None), cell, options.samples, options.seed, options.test, options.device
            )
            keep(options.out, [row])


if __name__ == "__main__":
    main()
