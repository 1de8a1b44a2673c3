"""Claim: on real text encoders, BiCo carries a classifier further than a naive copy and THESEUS.

Fine-tunes all-MiniLM-L6-v2 on each task with its zero-shot head frozen, ports it to the other encoders, and scores
the target with the zero-shot head (label descriptions) and with a linear probe on the same calibration samples.
Few-shot fine-tuning gets the same samples; its learning rate and number of steps are chosen on validation data.
Needs the shared encoders and texts; says so where they are not there.

    python -m benchmarks.claims.text --encoders ENCODERS --data SHARED/data/text --out text.md
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.rows import commit
from paper.finetune import finetune
from tuneport.config import TransferConfig
from tuneport.data.dataset import Dataset
from tuneport.data.tasks import TASKS
from tuneport.maps.statistics import Statistics
from tuneport.measure.accuracy import compute_features
from tuneport.measure.samples import Measurement
from tuneport.methods import METHODS, Method, Transfer
from tuneport.models.base import Model
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model
from tuneport.models.weights import Scaled
from tuneport.outputs import ModelOutput
from tuneport.pipeline import scale
from tuneport.pipeline.samples import SCORED
from tuneport.pipeline.solve import measure, problem_of
from tuneport.pipeline.transfer import Setup, prepare
from tuneport.training.loop import Schedule

FILES = {
    "trec6": "trec6.jsonl.gz",
    "sst2": "sst2_stsa.jsonl.gz",
    "subj": "subj.jsonl.gz",
    "agnews": "agnews_test.jsonl.gz",
    "custrev": "custrev.jsonl.gz",
}
SOURCE = "minilm-l6"
TARGETS = ("minilm-l3", "gte-small", "mpnet")
METHOD_NAMES = ("naive", "theseus", "bico")
RATES = (2e-5, 1e-4)
STEPS = (20, 60)


def read_splits(task: str, folder: Path, most: int, validation: int = 300) -> dict[str, Dataset]:
    """Training, validation and test samples; a file with one split only is parted by the task's own rule."""
    known, place = TASKS[task], folder / FILES[task]
    if task == "agnews":
        with gzip.open(place, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        place = Path(tempfile.mkdtemp()) / "agnews.jsonl"
        place.write_text("".join(json.dumps({"text": r["text"], "label": r["label"]}) + "\n" for r in rows))
    found = {split: known.read(place, split) for split in ("train", "validation", "test")}
    random = np.random.default_rng(0)
    limits = {"train": len(found["train"]), "validation": validation, "test": most}
    return {name: data.subset(np.sort(random.permutation(len(data))[: limits[name]])) for name, data in found.items()}


class Judge:
    """Scores a module on the test split: zero-shot with the frozen head, and by a linear probe."""

    def __init__(self, model: Model, head: Head, test: Dataset) -> None:
        self.model, self.head, self.test = model, head, test

    def zero_shot(self, module: nn.Module, data: Dataset | None = None) -> float:
        return self._zero_shot(self._features(module, data or self.test), data or self.test)

    def both(self, module: nn.Module, samples: Dataset) -> tuple[float, float]:
        """Zero-shot accuracy, and that of a probe trained on `samples`."""
        found = self._features(module, self.test)
        return self._zero_shot(found, self.test), self._probe(self._features(module, samples), samples, found)

    def _features(self, module: nn.Module, data: Dataset) -> Tensor:
        return compute_features(self.model.with_module(module), data, batch_size=256)

    def _zero_shot(self, found: Tensor, data: Dataset) -> float:
        assert self.head.class_embeds is not None
        scores = F.normalize(found, dim=-1) @ F.normalize(self.head.class_embeds, dim=-1).T
        return 100.0 * float((scores.argmax(-1).numpy() == data.labels).mean())

    def _probe(self, seen: Tensor, samples: Dataset, unseen: Tensor) -> float:
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        scaler = StandardScaler().fit(seen.double().numpy())
        probe = LogisticRegression(max_iter=2000).fit(scaler.transform(seen.double().numpy()), samples.labels)
        return 100.0 * float((probe.predict(scaler.transform(unseen.double().numpy())) == self.test.labels).mean())


def tune(model: Model, head: Head, data: Dataset, steps: int) -> nn.Module:
    *_, (_, module) = finetune(model, head, data, Schedule(steps, batch_size=32, learning_rate=5e-5, weight_decay=0.01))
    return module


def best_schedule(
    model: Model, judge: Judge, samples: Dataset, validation: Dataset, limit: int
) -> tuple[Schedule, dict[str, float]]:
    """The few-shot schedule with the best validation accuracy."""
    seen: dict[tuple[float, int], float] = {}
    for rate in RATES:
        for most in sorted({min(most, limit) for most in STEPS}):
            schedule = Schedule(most, batch_size=32, learning_rate=rate)
            *_, (_, module) = finetune(model, judge.head, samples, schedule)
            seen[rate, most] = judge.zero_shot(module, validation)
    rate, steps = max(seen, key=lambda key: seen[key])
    return Schedule(steps, batch_size=32, learning_rate=rate), {f"{r:g} x {s}": a for (r, s), a in seen.items()}


def row_of(method: str, budget: int, found: tuple[float, float]) -> dict[str, Any]:
    return {"method": method, "zero-shot": found[0], "probe": found[1], "N": budget}


def solved(method: Method, setup: Setup, found: Statistics) -> Transfer:
    measurement = Measurement(setup.models, setup.plan, setup.calibration)
    return method.transfer(problem_of(measurement, setup.change.vector, found))


def run_cell(
    source: Model, tuned: nn.Module, target: Model, judge: Judge, splits: dict[str, Dataset], schedule: Schedule,
    seed: int, budgets: list[int],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """All rows of one task, target and seed; smaller budgets are the beginning of the largest."""
    signals = frozenset().union(*(METHODS[name].signals for name in METHOD_NAMES))
    for budget in budgets:
        config = TransferConfig.of(
            samples=budget,
            sampler="class_balanced",
            seed=seed,
            batch_size=budget,
            device=str(target.device),
            scale=1.0,
        )
        setup = prepare(source, tuned, target, splits["train"], config, signals=signals | SCORED)
        sides = Measurement(setup.models, setup.plan, setup.calibration).halves()
        parts = tuple(measure(side, signals=signals) for side in sides)
        whole = parts[0] if sides[0] is sides[1] else parts[0] + parts[1]
        indices = setup.about["data"]["indices"]
        samples = splits["train"].subset(indices)
        yield row_of("target", budget, judge.both(target.module, samples))
        for name in METHOD_NAMES:
            method = METHODS[name]
            moved = solved(method, setup, whole)
            with Scaled(target.module, moved.task_vector) as scaled:
                scaled.set(1.0)
                yield row_of(name, budget, judge.both(scaled.module, samples))
            if name != "bico":
                continue
            scored = scale.Judge(setup.models.target, setup.calibration, ModelOutput())
            choice = scale.choose_on_halves(scored, sides, (solved(method, setup, part) for part in parts))
            chosen = solved(method, setup, whole)
            with Scaled(target.module, chosen.task_vector) as scaled:
                scaled.set(choice.scale)
                found = judge.both(scaled.module, samples)
            yield row_of("bico, scale auto", budget, found) | {"scale": choice.scale}
        *_, (_, module) = finetune(target, judge.head, samples, replace(schedule, seed=seed))
        yield row_of("few-shot fine-tuning", budget, judge.both(module, samples))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", default="trec6,sst2,subj,agnews")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--samples", default="20,100")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of the full fine-tunes, and the most of the others")
    parser.add_argument("--test", type=int, default=500, help="test samples at most")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--merge", type=Path, nargs="+", default=[], help="JSON files of runs to put together instead")
    options = parser.parse_args()
    tasks, targets = options.tasks.split(","), options.targets.split(",")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.merge:
        parts = [json.loads(path.read_text()) for path in options.merge]
        rows, notes = ([item for part in parts for item in part[key]] for key in ("rows", "notes"))
        seconds = sum(part.get("seconds", 0.0) for part in parts)
        options.out.with_suffix(".json").write_text(json.dumps({"rows": rows, "notes": notes}, indent=1))
        options.out.write_text(markdown(rows, notes, tasks, targets, options, seconds))
        return
    needed = [options.encoders / name for name in (SOURCE, *targets)] + [options.data / FILES[task] for task in tasks]
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        raise SystemExit(f"not there: {', '.join(missing)}. Fetch the encoders and texts first.")
    started, rows, notes = time.time(), [], []
    source = open_model(options.encoders / SOURCE, device=options.device)
    for task in tasks:
        splits = read_splits(task, options.data, options.test)
        head = choose_head(source, None, splits["train"])
        tuned = tune(source, head, splits["train"], options.steps)
        judged = Judge(source, head, splits["test"])
        fixed = {"source": judged.zero_shot(source.module), "fine-tuned source": judged.zero_shot(tuned)}
        for name in targets:
            target = open_model(options.encoders / name, device=options.device)
            judge = Judge(target, choose_head(target, None, splits["train"]), splits["test"])
            full = tune(target, judge.head, splits["train"], options.steps)
            best = judge.zero_shot(full)
            few = splits["train"].subset(np.random.default_rng(99).permutation(len(splits["train"]))[:100])
            schedule, tried = best_schedule(target, judge, few, splits["validation"], options.steps)
            notes.append({"task": task, "target": name, "few-shot validation": tried, **fixed})
            for seed in range(options.seeds):
                for row in run_cell(source, tuned, target, judge, splits, schedule, seed,
                                    [int(n) for n in options.samples.split(",")]):  # fmt: skip
                    rows.append({"task": task, "target": name, "seed": seed, **row})
                    print(json.dumps(rows[-1]), f"{time.time() - started:.0f}s", file=sys.stderr, flush=True)
            rows.append(
                {"task": task, "target": name, "seed": 0, "N": 0, "method": "fine-tuned target", "zero-shot": best}
            )
            options.out.with_suffix(".json").write_text(
                json.dumps({"rows": rows, "notes": notes, "seconds": time.time() - started}, indent=1)
            )
            del target, judge, full
    options.out.write_text(markdown(rows, notes, tasks, targets, options, time.time() - started))
    print(options.out.read_text())


def markdown(
    rows: list[dict[str, Any]], notes: list[dict[str, Any]], tasks: list[str], targets: list[str],
    options: argparse.Namespace, seconds: float,
) -> str:  # fmt: skip
    lines = [
        "# Text encoders",
        "",
        f"all-MiniLM-L6-v2 fine-tuned on each task, ported; {options.seeds} calibration seeds",
    ]
    lines += [f"(mean ± deviation), class-balanced samples, at most {options.test} test samples.", ""]
    for protocol in ("zero-shot", "probe"):
        for name in targets:
            words = "zero-shot head" if protocol == "zero-shot" else "linear probe on the same samples"
            lines += [f"## {SOURCE} to {name}, {words}", ""]
            lines += [f"| method | N | {' | '.join(tasks)} | mean |", "|" + "---|" * (len(tasks) + 3)]
            found = [row for row in rows if row["target"] == name and protocol in row]
            for method, count in dict.fromkeys((row["method"], row["N"]) for row in found):
                cells = []
                for task in tasks:
                    values = [r[protocol] for r in found if (r["method"], r["N"], r["task"]) == (method, count, task)]
                    cells.append(values)
                means = [statistics.mean(values) for values in cells]
                texts = [
                    f"{mean:.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
                    for mean, values in zip(means, cells, strict=True)
                ]
                lines.append(f"| {method} | {count or 'all'} | {' | '.join(texts)} | {statistics.mean(means):.1f} |")
            lines.append("")
    lines += [
        "## Details",
        "",
        "| task | source, zero-shot | fine-tuned source | target | few-shot: validation accuracy by rate x steps |",
        "|---|---|---|---|---|",
    ]
    for note in notes:
        tried = ", ".join(f"{key}: {value:.1f}" for key, value in note["few-shot validation"].items())
        lines.append(
            f"| {note['task']} | {note['source']:.1f} | {note['fine-tuned source']:.1f} | {note['target']} | {tried} |"
        )
    lines += [
        "",
        f"- command: `python -m benchmarks.claims.text --encoders ENCODERS --data TEXTS --tasks {options.tasks} "
        f"--targets {options.targets} --samples {options.samples} --seeds {options.seeds} --steps {options.steps}`",
        f"- machine: {platform.machine()}, {options.device}, torch {torch.__version__}; {seconds:.0f} s",
        f"- commit: {commit()}; date: {time.strftime('%Y-%m-%d')}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
