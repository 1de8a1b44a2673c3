"""Claim: bico+ recovers more of what fine-tuning gains than bico, with few samples and with many, and does not harm.

    python research/lab.py --root ../shared --out lab.jsonl [--samples 20 100] [--seeds 0 1 2] [--cells C ...]
    python research/lab.py --root ../shared --encoders ENCODERS --cells minilm-l6:minilm-l3:trec6 --out lab.jsonl
    python research/lab.py --out lab.jsonl --table

Each cell (source, target, task) is ported with bico and bico+ from calibration samples of the training split, on which
the scale is chosen. On test samples every candidate scale is scored. Rows are appended to --out, and what is there is
not run again; with --losses they hold the held-out loss of every sample at every scale too. --part I/N runs every Nth
cell from the Ith, so that several processes share the work. The table gives the gain over the target's own accuracy
and the share of the fine-tuning gain that it is, averaged over cells, with a paired bootstrap interval against bico at
scale 1 over cells. "plain" is a rule without the fit of the head's sharpness. Needs the shared zoo; text cells need the
shared encoders too, with fine-tunes of the source next to them (minilm-l6-trec6, made with `tuneport finetune`). Says
so where they are not there.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lab_study import Row, begin, cells_parser, keep
from torch import Tensor
from torch.nn import functional as F

from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.job import Job
from tuneport.measure.accuracy import encode_batches
from tuneport.methods import METHODS
from tuneport.pipeline import scale
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.scale import RULES, SCALES, Scaled, Score, choose_on_halves, choose_scale
from tuneport.pipeline.statistics import measure_job, problem_of
from tuneport.types import ScaleRule

IMAGES = ("cifar10", "fashion", "gtsrb", "mnist")
TEXTS = {
    "trec6": "trec6.jsonl.gz",
    "subj": "subj.jsonl.gz",
    "sst2": "sst2_stsa.jsonl.gz",
    "agnews": "agnews_test.jsonl.gz",
}
CELLS = [("a", target, task) for target in ("a2", "b", "c") for task in IMAGES]
CELLS += [("c", target, task) for target in ("a", "a2", "b") for task in ("cifar10", "mnist")]
FULL = {  # accuracy of the fine-tuned targets, as the zoo states it; c was not fine-tuned on fashion and gtsrb: b's
    ("a", "cifar10"): 72.8, ("a", "fashion"): 87.1, ("a", "gtsrb"): 91.4, ("a", "mnist"): 97.6,
    ("a2", "cifar10"): 73.0, ("a2", "fashion"): 86.8, ("a2", "gtsrb"): 90.9, ("a2", "mnist"): 97.9,
    ("b", "cifar10"): 74.1, ("b", "fashion"): 87.7, ("b", "gtsrb"): 92.1, ("b", "mnist"): 98.2,
    ("c", "cifar10"): 74.4, ("c", "fashion"): 87.7, ("c", "gtsrb"): 92.1, ("c", "mnist"): 98.5,
    ("minilm-l3", "trec6"): 90.0, ("minilm-l3", "subj"): 92.2,  # results/text.md
    ("gte-small", "trec6"): 97.4, ("gte-small", "subj"): 95.2, ("mpnet", "trec6"): 97.2, ("mpnet", "subj"): 95.6,
}  # fmt: skip


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


def tested(job: Job, entries: Any, test: list[Any], dtype: torch.dtype) -> dict[float, float]:
    """Accuracy on test samples at each scale."""
    head, found = job.heads.target, {}
    assert head is not None

    def as_wanted(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    with Scaled(job.target.module, entries) as scaled, torch.inference_mode():
        for size in SCALES:
            scaled.set(size)
            module = copy.deepcopy(job.target.module).to(dtype)
            right = 0
            for batch, labels in test:
                scores = head.scores(job.target, module, {key: as_wanted(value) for key, value in batch.items()})
                right += int((scores.argmax(-1).cpu() == labels.cpu()).sum())
            found[size] = 100 * right / sum(len(labels) for _, labels in test)
    return found


def run_cell(places: Places, cell: tuple[str, str, str], samples: int, seed: int, options: Any) -> list[Row]:
    source, target, task = cell
    data, rows, test = places.data(task), [], None
    for name in ("bico", "bico+"):
        method = METHODS[name]
        job = prepare(
            places.model(source), places.model(f"{source}-{task}"), places.model(target), data,
            signals=name, samples=samples, seed=seed, device=options.device, batch_size=options.batch,
            sampler="class_balanced" if task in TEXTS else "random",
        )  # fmt: skip
        assert job.heads is not None
        if test is None:
            drawn = align_labels(read_data(data, "test"), job.heads.target.classes)
            some = np.sort(np.random.default_rng(0).permutation(len(drawn))[: options.test])
            test = list(encode_batches(job.target, drawn.subset(some), 100))
        started = time.process_time()
        sides = job.halves()
        parts = tuple(measure_job(side, views=method.rehearses) for side in sides)
        solved: dict[int, Any] = {}

        def solve(found: Any, job: Any = job, method: Any = method, solved: dict[int, Any] = solved) -> Any:
            if id(found) not in solved:
                solved[id(found)] = method.transfer(problem_of(job, found))
            return solved[id(found)]

        with both_losses() as plain:
            choice = choose_on_halves(sides, map(solve, parts))
        moved = solve(parts[0] + parts[1])
        seconds = time.process_time() - started
        dtype = torch.bfloat16 if options.bfloat16 else torch.float32
        accuracy = tested(job, moved.task_vector, test, dtype)
        rows.append(
            {
                "source": source,
                "target": target,
                "task": task,
                "samples": samples,
                "seed": seed,
                "method": name,
                "chosen": {rule: chosen(choice.scores, rule, samples) for rule in RULES}
                | {f"{rule} plain": chosen(dict(zip(SCALES, plain, strict=True)), rule, samples) for rule in RULES},
                "accuracy": {str(scale): value for scale, value in accuracy.items()},
                "held_out": [[s, round(f.loss, 5), f.accuracy, f.sharpness] for s, f in choice.scores.items()],
                "cpu_seconds": round(seconds, 1),
                "bfloat16": options.bfloat16,
            }
        )
        if options.losses:
            kept = {str(s): f.losses for s, f in choice.scores.items() if f.losses is not None}
            rows[-1]["losses"] = {s: [round(float(x), 4) for x in values] for s, values in kept.items()}
    return rows


@contextmanager
def both_losses() -> Iterator[list[Score]]:
    """The scores of the scales, in their order, at the sharpness of the head itself."""
    plain: list[Score] = []
    judged = scale.score_of_classes

    def score(scores: Tensor, labels: Tensor) -> Score:
        losses = F.cross_entropy(scores.double(), labels, reduction="none")
        plain.append(Score(float(losses.mean()), losses=losses))
        return judged(scores, labels)

    scale.score_of_classes = score
    try:
        yield plain
    finally:
        scale.score_of_classes = judged


def chosen(scores: Mapping[float, Score], rule: ScaleRule, samples: int) -> float:
    return choose_scale(scores.__getitem__, samples=samples, held_out=True, candidates=tuple(scores), rule=rule).scale


def rechosen(row: Row) -> Row:
    """The row with the scales that today's rules choose, where it has the losses of every sample; without those."""
    if "losses" not in row:
        return row
    held = {float(scale): torch.tensor(values, dtype=torch.float64) for scale, values in row["losses"].items()}
    scores = {scale: Score(float(losses.mean()), losses=losses) for scale, losses in held.items()}
    picked = {rule: chosen(scores, rule, row["samples"]) for rule in RULES}
    return {**{key: value for key, value in row.items() if key != "losses"}, "chosen": picked}


def gain(row: Row, rule: str) -> float:
    """Points over the target's own accuracy."""
    by_scale = row["accuracy"]
    return float(by_scale[str(row["chosen"].get(rule, rule))] - by_scale["0.0"])


SHOWN = [("bico", rule) for rule in ("1.0", "auto", "auto plain", "safe", "safe plain")]
SHOWN += [("bico+", rule) for rule in ("0.25", "1.0", "auto", "auto plain", "safe", "safe plain")]


def table(rows: list[Row]) -> str:
    """Means over cells of seed means; the interval resamples cells, 10,000 times."""
    lines = [
        "| N | method | scale | share of the gain | points | against bico at 1 (95 %) | worst cell | worst draw |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for samples in sorted({row["samples"] for row in rows}):
        here = [row for row in rows if row["samples"] == samples]
        cells = sorted({(row["source"], row["target"], row["task"]) for row in here})
        draws = np.random.default_rng(0).integers(0, len(cells), (10_000, len(cells)))

        def of(method: str, rule: str, here: list[Row] = here, cells: Any = cells) -> list[list[float]]:
            return [
                [gain(r, rule) for r in here if (r["source"], r["target"], r["task"], r["method"]) == (*cell, method)]
                for cell in cells
            ]

        own = [
            np.mean([r["accuracy"]["0.0"] for r in here if (r["source"], r["target"], r["task"]) == cell])
            for cell in cells
        ]
        room = np.array([FULL.get(cell[1:], np.nan) for cell in cells]) - np.array(own)
        base = np.array([np.mean(values) for values in of("bico", "1.0")])
        for method, rule in SHOWN:
            single = of(method, rule)
            mean = np.array([np.mean(values) for values in single])
            low, high = np.percentile((mean - base)[draws].mean(1), [2.5, 97.5])
            against = f"{np.mean(mean - base):+.2f} ({low:+.2f} to {high:+.2f})" if (method, rule) != SHOWN[0] else "–"
            lines.append(
                f"| {samples} | {method} | {rule} | {100 * np.nanmean(mean / room):.1f} % | {mean.mean():+.2f} "
                f"| {against} | {mean.min():+.1f} | {min(map(min, single)):+.1f} |"
            )
        lines += _sharpness(samples, of, draws)
        seeds = sorted({row["seed"] for row in here})
        count = sum(row["method"] == "bico+" for row in here)
        lines.append(f"| | {len(cells)} cells, {count} draws of seeds {seeds} | | | | | | |")
    return "\n".join(lines)


def _sharpness(samples: int, of: Any, draws: Any) -> list[str]:
    """What the fit of the sharpness gains: each rule with it against the rule without."""
    lines = []
    for method, rule in product(("bico", "bico+"), RULES):
        apart = np.array(
            [np.mean(a) - np.mean(b) for a, b in zip(of(method, rule), of(method, f"{rule} plain"), strict=True)]
        )
        low, high = np.percentile(apart[draws].mean(1), [2.5, 97.5])
        about = f"{apart.mean():+.2f} ({low:+.2f} to {high:+.2f})"
        lines.append(f"| {samples} | {method} | {rule} against {rule} plain | | {about} | | {apart.min():+.1f} | |")
    return lines


def main() -> None:
    parser = cells_parser(__doc__)
    parser.add_argument("--encoders", type=Path, help="the folder with text encoders")
    parser.add_argument("--samples", type=int, nargs="+", default=[20, 100])
    parser.add_argument("--bfloat16", action="store_true", help="score test samples in bfloat16: faster on some CPUs")
    parser.add_argument("--batch", type=int, default=32, help="samples per pass")
    parser.add_argument("--losses", action="store_true", help="keep the held-out losses of every sample")
    options, rows = begin(parser, lambda rows: table([rechosen(row) for row in rows]))
    torch.set_num_threads(1)
    cells = [tuple(cell.split(":")) for cell in options.cells] if options.cells else CELLS
    done = {(r["source"], r["target"], r["task"], r["samples"], r["seed"]) for r in rows}
    places = Places(options.root, options.encoders)
    part, parts = map(int, options.part.split("/"))
    for seed, cell, samples in list(product(options.seeds, cells, options.samples))[part::parts]:
        if (*cell, samples, seed) in done:
            continue
        found = run_cell(places, cell, samples, seed, options)  # type: ignore[arg-type]
        keep(options.out, found)
        words = [
            f"{r['method']}@1 {gain(r, '1.0'):+.1f} auto {gain(r, 'auto'):+.1f} safe {gain(r, 'safe'):+.1f}"
            for r in found
        ]
        print(*cell, samples, seed, *words, flush=True)


if __name__ == "__main__":
    main()
