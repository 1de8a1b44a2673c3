"""Claim: what models that run in bfloat16 cost a transfer in accuracy, and which rank cut suits their signals.

    python benchmarks/claims/dtype.py --root ../shared --out dtype.jsonl [--samples 100] [--seeds 0] [--cells C ...]
    python benchmarks/claims/dtype.py --root ../shared --out cuts.jsonl --cuts 1e-3 1e-4 1e-5 1e-6
    python benchmarks/claims/dtype.py --out dtype.jsonl --table
    python benchmarks/claims/dtype.py --root ../shared --out planted.jsonl --planted --cuts 1e-3 1e-4 1e-5 1e-6

Each cell (source, target, task) of the shared zoo is ported with bico at scale 1, both models in float32 and in
bfloat16, from the same samples. The target with the transferred change is scored in float32 in both cases, as a user
of the result would score it. `held-out` is the loss of each half of the calibration samples under the maps of the
other: by it, not by test accuracy, one may choose. `agreement` is the cosine between the transferred change and that of
float32.
--cuts tries other rank cuts on the bfloat16 signals than the library's own. --planted ports to a twin
of the source instead (stream and hidden units permuted, heads permuted and turned), where the exact answer is known.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from tuneport.config import TransferConfig
from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.maps.statistics import CrossCovariance, Statistics
from tuneport.measure.accuracy import encode_batch
from tuneport.measure.samples import Measurement
from tuneport.methods import METHODS, Transfer
from tuneport.models.open import open_model
from tuneport.models.weights import Scaled
from tuneport.pipeline.solve import measure, problem_of
from tuneport.pipeline.transfer import Setup, prepare
from tuneport.task_vectors.vector import TaskVector

CELLS = ("a:b:cifar10", "a:b:gtsrb", "a:c:mnist", "a:c:fashion", "c:b:cifar10", "a:a2:cifar10")
Row = dict[str, Any]

TEXTS = {
    "trec6": "trec6.jsonl.gz",
    "subj": "subj.jsonl.gz",
    "sst2": "sst2_stsa.jsonl.gz",
    "agnews": "agnews_test.jsonl.gz",
}


@contextmanager
def rank_cut_of(value: float | None) -> Iterator[None]:
    """Another rank cut than the library's own."""
    own = CrossCovariance.cut
    if value is not None:
        CrossCovariance.cut = lambda *_: value  # type: ignore[method-assign]
    try:
        yield
    finally:
        CrossCovariance.cut = own  # type: ignore[method-assign]


class Places:
    """Where models and data are."""

    def __init__(self, root: Path, encoders: Path | None) -> None:
        self.root, self.encoders = root, encoders

    def model(self, name: str) -> Path:
        found = [folder / name for folder in (self.root / "zoo", self.encoders) if folder and (folder / name).is_dir()]
        if not found:
            sys.exit(f"there is no model {name} in {self.root / 'zoo'} or {self.encoders}; see --root and --encoders.")
        return found[0]

    def data(self, task: str) -> str:
        if task in TEXTS:
            return f"{task}:{self.root / 'data' / 'text' / TEXTS[task]}"
        return str(self.root / "data" / "images" / f"{task}.npz")


def measurement_of(setup: Setup) -> Measurement:
    return Measurement(setup.models, setup.plan, setup.calibration)


def solved(setup: Setup, found: Statistics) -> Transfer:
    return METHODS["bico"].transfer(problem_of(measurement_of(setup), setup.change.vector, found))


def accuracy(setup: Setup, vector: TaskVector, test: list[Any]) -> float:
    """On test samples, in float32, at scale 1."""
    target, heads = setup.models.target, setup.calibration.heads
    assert heads is not None
    with Scaled(target.module, vector) as scaled, torch.inference_mode():
        scaled.set(1.0)
        right = sum(
            int((heads.target.scores(target, scaled.module, batch).argmax(-1) == labels).sum())
            for batch, labels in test
        )
    return 100 * right / sum(len(labels) for _, labels in test)


def held_out(sides: tuple[Measurement, Measurement], vectors: list[TaskVector]) -> float:
    """The mean loss of each half of the samples, in float32, with what the other half has transferred."""
    total, count = 0.0, 0
    for judge, vector in zip(reversed(sides), vectors, strict=True):
        heads = judge.calibration.heads
        assert heads is not None
        with Scaled(judge.target.module, vector) as scaled, torch.inference_mode():
            scaled.set(1.0)
            for batch in judge.samples:
                scores = heads.target.scores(judge.target, scaled.module, batch.target[0])
                total += float(F.cross_entropy(scores, batch.target[1], reduction="sum"))
                count += len(scores)
    return total / count


def likeness(one: TaskVector, other: TaskVector) -> float:
    """Cosine between two task vectors."""
    dot = lengths = squares = 0.0
    for name in one:
        first, second = one.dense(name).double(), other.dense(name).double()
        dot += float((first * second).sum())
        lengths += float(first.square().sum())
        squares += float(second.square().sum())
    return dot / (lengths * squares) ** 0.5


def run_cell(root: Path, cell: str, options: Any, seed: int) -> list[Row]:
    source, target, task = cell.split(":")
    places = Places(root, options.encoders)
    data, rows, exact = places.data(task), [], None
    models = [places.model(name) for name in (source, f"{source}-{task}", target)]
    sampler = "class_balanced" if task in TEXTS else "random"
    common = {"samples": options.samples, "seed": seed, "device": "cpu", "scale": 1.0, "sampler": sampler}
    setups = {
        dtype: prepare(*models, data, TransferConfig.of(dtype=dtype, **common)) for dtype in ("float32", "bfloat16")
    }
    judge = setups["float32"]
    assert judge.calibration.heads is not None
    drawn = align_labels(read_data(data, "test"), judge.calibration.heads.target.classes)
    some = np.sort(np.random.default_rng(0).permutation(len(drawn))[: options.test])
    parts = [drawn.subset(some[at : at + 100]) for at in range(0, len(some), 100)]
    test = [(encode_batch(judge.models.target, part), torch.as_tensor(part.labels)) for part in parts]
    about = {"cell": cell, "samples": options.samples, "seed": seed, "test": len(some)}
    rows.append({**about, "dtype": "own", "accuracy": accuracy(judge, TaskVector({}), test)})
    for dtype, setup in setups.items():
        started = time.perf_counter()
        parts = [measure(side) for side in measurement_of(setup).halves()]
        measured = time.perf_counter() - started
        for cut in [None, *options.cuts] if dtype == "bfloat16" else [None]:
            started = time.perf_counter()
            with rank_cut_of(cut):
                moved = [
                    solved(setup, found) for found in (*parts, parts[0] + parts[1])
                ]  # the sums of both halves are solved again for each cut
            whole = moved[-1]
            exact = exact or whole.task_vector
            ranks = [
                np.mean([getattr(r, side) or 0 for r in whole.records if getattr(r, side) is not None])
                for side in ("rank_in", "rank_out")
            ]
            rows.append(
                {
                    **about,
                    "dtype": dtype,
                    "cut": cut,
                    "accuracy": accuracy(judge, whole.task_vector, test),
                    "held_out": held_out(measurement_of(judge).halves(), [one.task_vector for one in moved[:2]]),
                    "agreement": likeness(whole.task_vector, exact),
                    "rank_in": float(ranks[0]),
                    "rank_out": float(ranks[1]),
                    "measure_seconds": round(measured, 2),
                    "solve_seconds": round((time.perf_counter() - started) / 3, 2),
                }
            )
    return rows


def twin_of(module: Any, seed: int = 5) -> Any:
    """The same tower in other coordinates, float64: every answer stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(module).double()
    config, tower = other.config, other.vision_model
    heads, width = config.num_attention_heads, config.hidden_size
    stream = torch.randperm(width, generator=generator)

    def turned(order: torch.Tensor) -> torch.Tensor:
        size = width // heads
        turns = [
            torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q for _ in range(heads)
        ]
        return torch.block_diag(*turns).unflatten(0, (heads, -1))[order].flatten(0, 1)

    with torch.no_grad():
        embeddings = tower.embeddings
        embeddings.class_embedding.copy_(embeddings.class_embedding[stream])
        embeddings.patch_embedding.weight.copy_(embeddings.patch_embedding.weight[stream])
        embeddings.position_embedding.weight.copy_(embeddings.position_embedding.weight[:, stream])
        for norm in (part for part in tower.modules() if isinstance(part, torch.nn.LayerNorm)):
            norm.weight.copy_(norm.weight[stream])
            norm.bias.copy_(norm.bias[stream])
        for block in tower.encoder.layers:
            attention, order = block.self_attn, torch.randperm(heads, generator=generator)
            qk, v = turned(order), turned(order)
            for layer, turn in ((attention.q_proj, qk), (attention.k_proj, qk), (attention.v_proj, v)):
                layer.weight.copy_(turn @ layer.weight[:, stream])
                layer.bias.copy_(turn @ layer.bias)
            attention.out_proj.weight.copy_((attention.out_proj.weight @ v.T)[stream])
            attention.out_proj.bias.copy_(attention.out_proj.bias[stream])
            units = torch.randperm(config.intermediate_size, generator=generator)
            block.mlp.fc1.weight.copy_(block.mlp.fc1.weight[units][:, stream])
            block.mlp.fc1.bias.copy_(block.mlp.fc1.bias[units])
            block.mlp.fc2.weight.copy_(block.mlp.fc2.weight[stream][:, units])
            block.mlp.fc2.bias.copy_(block.mlp.fc2.bias[stream])
        other.visual_projection.weight.copy_(other.visual_projection.weight[:, stream])
    return other


def run_planted(root: Path, cell: str, options: Any, seed: int) -> list[Row]:
    """How far the change that a twin gets is from the exact one."""
    source, _, task = cell.split(":")
    zoo, rows = root / "zoo", []
    base, tuned = (open_model(zoo / name).module for name in (source, f"{source}-{task}"))
    there, moved = twin_of(base), twin_of(tuned)
    exact = TaskVector.between(there.state_dict(), moved.state_dict())
    for dtype in ("float32", "bfloat16"):
        kind = getattr(torch, dtype)
        target = open_model(zoo / source, dtype=kind).with_module(copy.deepcopy(there).to(kind))
        config = TransferConfig.of(samples=options.samples, seed=seed, device="cpu", dtype=dtype, scale=1.0)
        data = str(root / "data" / "images" / f"{task}.npz")
        setup = prepare(zoo / source, zoo / f"{source}-{task}", target, data, config)
        found = measure(measurement_of(setup))
        for cut in [None, *options.cuts] if dtype == "bfloat16" else [None]:
            with rank_cut_of(cut):
                answer = solved(setup, found)
            wrong = size = 0.0
            for name in answer.task_vector:
                wrong += float((answer.task_vector.dense(name).double() - exact[name]).square().sum())
                size += float(exact[name].square().sum())
            rows.append(
                {
                    "cell": f"{source}:twin:{task}",
                    "samples": options.samples,
                    "seed": seed,
                    "dtype": dtype,
                    "cut": cut,
                    "error": (wrong / size) ** 0.5,
                    "agreement": likeness(answer.task_vector, exact),
                    "rank_in": float(np.mean([r.rank_in or 0 for r in answer.records])),
                    "rank_out": float(np.mean([r.rank_out or 0 for r in answer.records])),
                }
            )
    return rows


def planted_table(rows: list[Row]) -> str:
    lines = [
        "| cell | seed | models in | cut | error | agreement with the truth | rank in | rank out |",
        "|" + "---|" * 8,
    ]
    for row in rows:
        cut = f"{row['cut']:.0e}" if row["cut"] else ""
        lines.append(
            f"| {row['cell']} | {row['seed']} | {row['dtype']} | {cut} | {row['error']:.3f} | {row['agreement']:.3f} "
            f"| {row['rank_in']:.0f} | {row['rank_out']:.0f} |"
        )
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    head = ["cell", "seed", "models in", "cut", "test accuracy", "held-out loss", "agreement", "rank in", "rank out"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row["cell"], row["seed"], row["dtype"]]
        if row["dtype"] == "own":
            cells[2] = "no transfer"
            cells += ["", f"{row['accuracy']:.1f}", "", "", "", ""]
        else:
            cells += [f"{row['cut']:.0e}" if row["cut"] else "", f"{row['accuracy']:.1f}", f"{row['held_out']:.3f}"]
            cells += [f"{row['agreement']:.3f}", f"{row['rank_in']:.0f}", f"{row['rank_out']:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "", *means(rows)])


def means(rows: list[Row]) -> Iterator[str]:
    """The mean over cells and seeds of each way, and its difference from float32 with a standard error."""
    places = sorted({(row["cell"], row["seed"]) for row in rows})
    ways = sorted({(row["dtype"], row.get("cut") or 0.0) for row in rows if row["dtype"] != "own"}, reverse=True)

    def of(way: tuple[str, float], what: str) -> Any:
        found = {(r["cell"], r["seed"]): r[what] for r in rows if (r["dtype"], r.get("cut") or 0.0) == way}
        return np.array([found[place] for place in places])

    yield "| models in | cut | mean accuracy | against float32 | mean held-out loss | against float32 | agreement |"
    yield "|---|---|---|---|---|---|---|"
    for way in ways:
        words = [way[0], f"{way[1]:.0e}" if way[1] else "own"]
        for what in ("accuracy", "held_out"):
            values = of(way, what)
            change = values - of(("float32", 0.0), what)
            error = change.std(ddof=1) / len(change) ** 0.5 if len(change) > 1 else float("nan")
            words += [f"{values.mean():.3f}", f"{change.mean():+.3f} ± {error:.3f}"]
        yield "| " + " | ".join([*words, f"{of(way, 'agreement').mean():.3f}"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the folder with zoo/ and data/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cells", nargs="+", default=list(CELLS), help="source:target:task")
    parser.add_argument("--cuts", type=float, nargs="+", default=[])
    parser.add_argument("--test", type=int, default=1000, help="test samples at most")
    parser.add_argument("--encoders", type=Path, help="the folder with text encoders, for text cells")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--planted", action="store_true", help="port to twins of the source")
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    if not options.table:
        if options.root is None or not (options.root / "zoo").is_dir():
            sys.exit(f"there is no zoo in {options.root}; pass --root.")
        for cell in options.cells:
            for seed in options.seeds:
                found = (run_planted if options.planted else run_cell)(options.root, cell, options, seed)
                rows += found
                with options.out.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
                print(f"{cell} {seed} is done", file=sys.stderr)
    print((planted_table if options.planted else table)(rows))


if __name__ == "__main__":
    main()
