"""Claim: a transfer between trained towers is what the plain float64 reference computes from the same files.

    python -m benchmarks.claims.reference --shared ../shared --out runs/reference.jsonl [--part 0/3]
    python -m benchmarks.claims.reference --out runs/reference.jsonl --write benchmarks/results/reference.md

A row is a pair, a task and a method, with N samples that numpy draws: relative distances of the target's task vector
between `tuneport.transfer` and `benchmarks/reference.py`, the largest over tensors, and over all tensors together.
"determined" compares what the samples determine, `completion="none"` against the SVD without zero singular values.
"float32" has models in float32, whose signals determine fewer directions; "same_ranks" compares them with the reference
in as many directions of each map. "plain" compares the default with the plain SVD on all layers: below full rank the
two fill their maps differently.
Rows that --out holds are not made again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import reference
from benchmarks.common import part_of
from benchmarks.rows import add_row, commit, rows_in
from tuneport import get_method, transfer

CELLS = (("a", "a2", "cifar10"), ("a", "c", "gtsrb"), ("c", "a", "mnist"))
KEY = ("source", "target", "task", "samples", "method")
METHODS = [name for name in reference.METHODS if name != "naive"]  # which needs no signals


def distances(found: dict[str, NDArray[np.float64]], wanted: dict[str, NDArray[np.float64]]) -> tuple[float, float]:
    """The largest over tensors, and that of all tensors."""
    apart = {name: float(np.linalg.norm(found[name] - value)) for name, value in wanted.items()}
    norms = {name: float(np.linalg.norm(value)) for name, value in wanted.items()}
    whole = float(np.linalg.norm(list(apart.values())) / np.linalg.norm(list(norms.values())))
    return max(apart[name] / norms[name] for name in wanted), whole


def measure(options: argparse.Namespace) -> None:
    """Make the rows that are not there yet."""
    done = {tuple(row[key] for key in KEY) for row in rows_in(options.out)}
    wanted = part_of(product(options.cells, METHODS), options.part)
    for cell in dict.fromkeys(cell for cell, _ in wanted):
        source, target, task = cell
        methods = [name for found, name in wanted if found == cell and (*cell, options.samples, name) not in done]
        if not methods:
            continue
        zoo = options.shared / "zoo"
        folders = zoo / source, zoo / f"{source}-{task}", zoo / target
        stored = np.load(options.shared / "data/images" / f"{task}.npz")
        drawn = np.random.default_rng(0).permutation(len(stored["x_train"]))[: options.samples]
        samples = stored["x_train"][drawn], stored["y_train"][drawn], [str(name) for name in stored["classes"]]
        signals = reference.measure(folders[0], folders[2], samples, task)
        with tempfile.TemporaryDirectory() as place:
            data = Path(place) / f"{task}.npz"
            np.savez(data, x_train=samples[0], y_train=samples[1], classes=stored["classes"])
            for method in methods:
                add_row(options.out, row_of(folders, data, task, signals, method, options))


def row_of(folders: Any, data: Path, task: str, signals: Any, method: str, options: argparse.Namespace) -> Any:
    plain = reference.move(folders, signals, method)
    determined = reference.move(folders, signals, method, complete=False)

    def ported(dtype: str, completion: Any) -> tuple[dict[str, NDArray[np.float64]], Any]:
        result = transfer(
            *folders, data, scale=1.0, samples=options.samples, head=task,
            method=replace(get_method(method), completion=completion), dtype=dtype, device=options.device,
        )  # fmt: skip
        dense = {name: result.task_vector.dense(name).double().cpu().numpy() for name in result.task_vector}
        return dense, {r.target.removesuffix(".weight"): (r.rank_in, r.rank_out) for r in result.records}

    (fine, _), (coarse, ranks), (filled, _) = (
        ported(*kind) for kind in (("float64", "none"), ("float32", "none"), ("float64", "svd"))
    )
    shorter = reference.move(folders, signals, method, complete=False, ranks=ranks)
    full = {name: value for name, value in plain.deltas.items() if name.rpartition(".")[0] in plain.full}
    return {
        "source": folders[0].name,
        "target": folders[2].name,
        "task": task,
        "samples": options.samples,
        "method": method,
        "layers": len({name.rpartition(".")[0] for name in plain.deltas}),
        "full_rank": len(plain.full),
        "full": distances(filled, full)[0] if full else None,
        "determined": distances(fine, determined.deltas),
        "float32": distances(coarse, determined.deltas),
        "same_ranks": distances(coarse, shorter.deltas),
        "plain": distances(filled, plain.deltas)[1],
        "filled_share": float(
            1
            - sum((value**2).sum() for value in determined.deltas.values())
            / sum((value**2).sum() for value in plain.deltas.values())
        ),
        "commit": commit(),
    }


def write(options: argparse.Namespace) -> None:
    lines = [
        "# Transfers of the zoo against the plain reference",
        "",
        "Relative distances between the task vectors of `tuneport.transfer` and `benchmarks/reference.py` (float64,",
        "own reading of heads, own loss, own hooks, SVD of numpy): the largest over tensors, or over all together",
        "where it says so. Models of tuneport run in float64, except in the columns float32: signals of float32",
        "determine fewer directions, and with as many in the reference the two agree again (ranks of float32).",
        "",
        "| pair | task | N | method | layers of full rank | these, default | determined part | the same, float32 "
        "| all together, float32 | the same, ranks of float32 | all, default against plain SVD "
        "| share that the plain SVD fills |",
        "|" + "---|" * 12,
    ]
    for row in sorted(rows_in(options.out), key=lambda row: [str(row[key]) for key in KEY]):
        full = "–" if row["full"] is None else f"{row['full']:.0e}"
        lines.append(
            f"| {row['source']} to {row['target']} | {row['task']} | {row['samples']} | {row['method']} "
            f"| {row['full_rank']} of {row['layers']} | {full} | {row['determined'][0]:.0e} | {row['float32'][0]:.0e} "
            f"| {row['float32'][1]:.0e} | {row['same_ranks'][1]:.0e} | {row['plain']:.2f} "
            f"| {100 * row['filled_share']:.0f} % |"
        )
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows_in(options.out)))
    lines += ["", "- command: python -m benchmarks.claims.reference --shared ../shared", f"- commit: {commits}"]
    options.write.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with zoo/ and data/images/")
    parser.add_argument(
        "--cells", nargs="+", default=CELLS, type=lambda text: tuple(text.split(":")), help="a:a2:mnist"
    )
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth row, from the Ith")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="rows, one JSON object a line")
    parser.add_argument("--write", type=Path, help="write the table of the rows to this file")
    options = parser.parse_args()
    if options.write is not None:
        write(options)
        return
    if options.shared is None or not (options.shared / "zoo").is_dir():
        sys.exit(f"{options.shared} has no zoo/: this benchmark needs the shared models and data")
    measure(options)


if __name__ == "__main__":
    main()
