"""Question: what should fill the directions of a map that the samples leave open, for which method?

    python research/lab_completion.py --root ../shared --out completion.jsonl [--part 0/16] [--seeds 0 1 2]
    python research/lab_completion.py --root ../shared --encoders ENCODERS --cells text --out completion.jsonl
    python research/lab_completion.py --out completion.jsonl --table

With C = U S V^T of rank r, every completion is U_r V_r^T + N_A W N_B^T, with bases N_A, N_B of the two null spaces and
an isometry W between them. The data say nothing about W. The kinds are

- none: W = 0, the determined part alone.
- identity: the W nearest to the identity, N_A^T E N_B made orthogonal (tuneport's default). It is right where both
  models share coordinates, as two fine-tunes of one model do, and a draw like any other where they do not.
- plain: the rest of the SVD, as LAPACK returns it for exact or rounded zeros. It depends on the library.
- random K: a uniformly random W, of seed K.
- tail: none, but with the rank of float64. The singular values of C are squares of amplitudes: below the cut of float32
  signals (amplitude 3e-5) C still holds directions, and a plain SVD takes them as determined.

So plain can differ from identity for two reasons: another W, which random measures, and the tail. A row has the
accuracy on test samples at scale 1 and 0.5, the share of the squared norm of the ported change that W moves, and the
rank. The choice is made on the development cells of the zoo and of text (CELLS of lab.py, TEXT_CELLS), never on fresh
ones.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
import torch
from lab import CELLS, TEXTS, Places
from lab_study import Row, begin, cells_parser, keep
from torch import Tensor

from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.job import Job
from tuneport.maps.covariance import rank_cut
from tuneport.maps.statistics import Key, Statistics
from tuneport.measure.accuracy import encode_batches
from tuneport.methods import METHODS, Entries
from tuneport.methods.entries import bias_of, matrix_of
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.scale import Scaled
from tuneport.pipeline.statistics import measure_job
from tuneport.task_vectors.low_rank import as_dense

KINDS = ("none", "identity", "plain", "tail", "random 0", "random 1", "random 2")
TEXT_CELLS = [
    ("minilm-l6", target, task) for target in ("minilm-l3", "gte-small", "mpnet") for task in ("trec6", "subj")
]
SCALES = (0.5, 1.0)


class Maps:
    """The completions of the maps of a measured job; each SVD is made once, on the CPU."""

    def __init__(self, statistics: Statistics, device: torch.device) -> None:
        self.statistics, self.device = statistics, device
        self._parts: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._maps: dict[int, tuple[str, Tensor, int]] = {}  # the last kind of each: both methods need it

    def of(self, key: Key, kind: str) -> tuple[Tensor, int]:
        """The map (d_A, d_B), and its rank by the cut of float32 signals."""
        found = self.statistics.covariances[key]
        if self._maps.get(id(found), ("",))[0] != kind:
            self._maps[id(found)] = (kind, *self._solve(found, kind))
        return self._maps[id(found)][1:]

    def _solve(self, found: Any, kind: str) -> tuple[Tensor, int]:
        if id(found) not in self._parts:
            U, S, Vh = torch.linalg.svd(found.matrix.cpu())  # both bases whole
            self._parts[id(found)] = U.to(self.device), S, Vh.to(self.device)
        U, S, Vh = self._parts[id(found)]
        d_A, d_B = found.shape
        rank = int((rank_cut(torch.float32, torch.float64, max(d_A, d_B)) * S[0] < S).sum())
        fine = int((max(d_A, d_B) * torch.finfo(S.dtype).eps * S[0] < S).sum())
        kept = {"tail": fine, "plain": len(S)}.get(kind, rank)
        R = U[:, :kept] @ Vh[:kept]
        N_A, N_B = U[:, kept:], Vh[kept:]  # (d_A, a), (b, d_B)
        if kind in ("none", "tail", "plain") or not min(N_A.shape[1], len(N_B)):
            return R, rank
        if kind == "identity":
            # Not divide and conquer, as torch does it: that may fail on so many equal singular values.
            found = scipy.linalg.svd((N_A[:d_B].T @ N_B[:, :d_A].T).cpu(), full_matrices=False, lapack_driver="gesvd")
            left, right = torch.from_numpy(found[0]), torch.from_numpy(found[2])
            W = left @ right
        else:
            W = random_isometry(N_A.shape[1], len(N_B), int(kind.split()[1]))
        return R + N_A @ W.to(R) @ N_B, rank


def random_isometry(rows: int, columns: int, seed: int) -> Tensor:
    """Uniformly random: the Q of a Gaussian matrix, with the signs that make R's diagonal positive."""
    if rows < columns:
        return random_isometry(columns, rows, seed).T
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    Q, R = torch.linalg.qr(drawn)
    return Q * R.diagonal().sign()


def moved(job: Job, method: str, kind: str, maps: Maps) -> tuple[Any, float, int]:
    """The target's task vector, its squared norm and the sum of the ranks of its maps."""
    settings: Any = METHODS[method]
    entries, square, ranks = Entries(), 0.0, 0
    for pair in job.plan.pairs:
        sides = ((settings.in_signal, pair.input_map), (settings.out_signal, pair.output_map))
        solved = []
        for signal, fixed in sides:
            key = (pair.target.name, signal)
            if fixed is None and key not in maps.statistics.covariances:
                break
            R, rank = (fixed.double().to(maps.device), 0) if fixed is not None else maps.of(key, kind)
            solved.append(R)
            ranks += rank
        if len(solved) < 2:
            continue  # nothing flows through it: the pooler of an encoder that is pooled by means
        R_in, R_out = solved
        tau = as_dense(matrix_of(pair.source, job.task_vector[pair.source.weight])).double().to(maps.device)
        matrix = R_out.T @ tau @ R_in
        square += float(matrix.square().sum())
        entries.put(pair.target, matrix.float())
        bias = bias_of(pair, job.task_vector)
        if bias is not None:
            entries.put_bias(pair.target, (bias.double().to(maps.device) @ R_out).float())
    return entries.task_vector(), square, ranks


def accuracies(job: Job, vector: Any, test: list[Any], scales: tuple[float, ...] = SCALES) -> dict[str, float]:
    assert job.heads is not None
    head, found = job.heads.target, {}
    with Scaled(job.target.module, vector) as scaled, torch.inference_mode():
        for scale in scales:
            scaled.set(scale)
            right = [
                head.scores(job.target, job.target.module, batch).argmax(-1).cpu() == labels.cpu()
                for batch, labels in test
            ]
            found[str(scale)] = round(100 * float(torch.cat(right).double().mean()), 3)
    return found


def run_cell(places: Places, cell: tuple[str, str, str], samples: int, seed: int, options: Any) -> list[Row]:
    source, target, task = cell
    job = prepare(
        places.model(source), places.model(f"{source}-{task}"), places.model(target), places.data(task),
        signals={"input", "output", "output_gradient"}, samples=samples, seed=seed, device=options.device,
        sampler="class_balanced" if task in TEXTS else "random",
    )  # fmt: skip
    assert job.heads is not None
    drawn = align_labels(read_data(places.data(task), "test"), job.heads.target.classes)
    some = np.sort(np.random.default_rng(0).permutation(len(drawn))[: options.test])
    test = list(encode_batches(job.target, drawn.subset(some), 500))
    maps, rows = Maps(measure_job(job), job.target.device), []
    base, least = accuracies(job, {}, test, (0.0,)), {}
    for kind, method in product(KINDS, ("theseus", "bico")):
        started = time.perf_counter()
        vector, square, ranks = moved(job, method, kind, maps)
        least.setdefault(method, square)  # none comes first
        rows.append(
            {
                "source": source,
                "target": target,
                "task": task,
                "samples": samples,
                "seed": seed,
                "method": method,
                "kind": kind,
                "accuracy": base | accuracies(job, vector, test),
                "filled": round(1 - least[method] / square, 4),
                "ranks": ranks,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    return rows


def table(rows: list[Row]) -> str:
    """Means over cells of seed means, with an interval against `identity` that resamples cells, 10,000 times."""
    lines = [
        "| cells | N | method | completion | scale 1 | against identity (95 %) | worst cell | scale 0.5 | filled |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups = {"zoo": [row for row in rows if row["task"] not in TEXTS], "text": [r for r in rows if r["task"] in TEXTS]}
    for (words, group), method in product(groups.items(), ("theseus", "bico")):
        for samples in sorted({row["samples"] for row in group}):
            here = [row for row in group if (row["samples"], row["method"]) == (samples, method)]
            cells = sorted({(row["source"], row["target"], row["task"]) for row in here})

            def gains(kind: str, scale: str, here: list[Row] = here, cells: Any = cells) -> Any:
                def one(row: Row) -> float:
                    return float(row["accuracy"][scale] - row["accuracy"]["0.0"])

                mine = [row for row in here if row["kind"].startswith(kind)]
                by_cell = [[one(r) for r in mine if (r["source"], r["target"], r["task"]) == cell] for cell in cells]
                return np.array([np.mean(values) for values in by_cell])

            draws = np.random.default_rng(0).integers(0, len(cells), (10_000, len(cells)))
            for kind in ("none", "identity", "plain", "tail", "random"):
                apart = gains(kind, "1.0") - gains("identity", "1.0")
                low, high = np.percentile(apart[draws].mean(1), [2.5, 97.5])
                filled = np.mean([row["filled"] for row in here if row["kind"].startswith(kind)])
                against = "–" if kind == "identity" else f"{apart.mean():+.2f} ({low:+.2f} to {high:+.2f})"
                lines.append(
                    f"| {len(cells)} of {words} | {samples} | {method} | {kind} | {gains(kind, '1.0').mean():+.2f} "
                    f"| {against} | {apart.min():+.1f} | {gains(kind, '0.5').mean():+.2f} | {100 * filled:.0f} % |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = cells_parser(__doc__)
    parser.add_argument("--encoders", type=Path, help="the folder with text encoders and the fine-tunes of the source")
    parser.add_argument("--samples", type=int, nargs="+", default=[20, 100])
    options, rows = begin(parser, table)
    if options.cells == ["text"] and options.encoders is None:
        sys.exit("the cells of text need --encoders.")
    named = TEXT_CELLS if options.cells == ["text"] else [tuple(cell.split(":")) for cell in options.cells or ()]
    done = {(r["source"], r["target"], r["task"], r["samples"], r["seed"]) for r in rows}
    places = Places(options.root, options.encoders)
    part, parts = map(int, options.part.split("/"))
    for seed, cell, samples in list(product(options.seeds, named or CELLS, options.samples))[part::parts]:
        if (*cell, samples, seed) not in done:
            found = run_cell(places, cell, samples, seed, options)  # type: ignore[arg-type]
            keep(options.out, found)
            words = [f"{r['method']} {r['kind']} {r['accuracy']['1.0'] - r['accuracy']['0.0']:+.1f}" for r in found]
            print(*cell, samples, seed, ", ".join(words), flush=True)


if __name__ == "__main__":
    main()
