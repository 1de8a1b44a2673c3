"""Claim: the fine-tuned source teaches the ported target most of its skill, without labels.

    python -m benchmarks.claims.distill --shared ../shared --out runs/distill.jsonl --device cuda
    python -m benchmarks.claims.distill --shared ../shared --encoders ENCODERS --pairs text --out runs/text.jsonl
    python -m benchmarks.claims.distill --write benchmarks/results/distill.md --out benchmarks/results/distill.jsonl \
        --text benchmarks/results/distill-text.jsonl

A row is one pair, task, number of samples, draw, start (the port or the bare target), teacher (the fine-tuned source,
or the true labels) and number of steps: test accuracy of the target, of the start and of what is written, and the
share of the fine-tuning gain. Rows that --out holds are not made again, and --part 0/4 makes a quarter of them, so that
several processes can share the work. Labelled few-shot fine-tuning gets the same samples, steps and augmentation; its
learning rate is chosen among three by accuracy on the tenth of the samples that distillation holds out, too.
Nothing is chosen on test data.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.claims.text import SOURCE, TARGETS, read_splits, tune
from benchmarks.claims.zoo import PAIRS, STATED
from benchmarks.rows import add_row, rows_in
from tuneport.config import TransferConfig
from tuneport.data.dataset import align_labels
from tuneport.data.tasks import read_data
from tuneport.measure.accuracy import zero_shot
from tuneport.measure.objectives import batch_for
from tuneport.measure.samples import DatasetSamples
from tuneport.models.base import Model
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model
from tuneport.pipeline.result import Result
from tuneport.pipeline.transfer import Setup, prepare, run
from tuneport.training.augment import Reader
from tuneport.training.distill import divide
from tuneport.training.loop import Schedule, run_steps

MORE_STATED = {"c": {"fashion": 87.7, "gtsrb": 92.1}}  # measured with the trial of the shared lab
RATES = (3e-5, 1e-4, 3e-4)  # of labelled fine-tuning
TEXT_TASKS = ("trec6", "sst2", "subj", "agnews")
KEY = ("pair", "task", "samples", "draw", "start", "teacher", "steps", "batch_size", "set")


class Cell:
    """One pair and task: a port for each number of samples and draw, and the accuracy of a module on the test split."""

    def __init__(self, pair: str, task: str, options: argparse.Namespace) -> None:
        self.pair, self.task, self.options = pair, task, options
        self.source, self.target = pair.split(":")
        self._setups: dict[tuple[int, int], tuple[Setup, Result, float]] = {}
        self.open()

    def open(self) -> None:
        zoo, self.data = self.options.shared / "zoo", self.options.shared / "data/images" / f"{self.task}.npz"
        self.places: tuple[Any, Any, Any] = (zoo / self.source, zoo / f"{self.source}-{self.task}", zoo / self.target)
        self.model = open_model(self.places[2], device=self.options.device)
        self.train, self.test = (read_data(self.data, split) for split in ("train", "test"))
        self.head = choose_head(self.model, self.task, self.test)
        self.full = {**STATED[self.target], **MORE_STATED.get(self.target, {})}[self.task]
        self.head_name: str | None = self.task

    def accuracy(self, module: nn.Module) -> float:
        test = self.test.subset(np.arange(min(len(self.test), self.options.test)))
        return zero_shot(self.model.with_module(module.eval()), self.head, test, batch_size=250).accuracy

    def ported(self, samples: int, draw: int) -> tuple[Setup, Result, float]:
        if (samples, draw) not in self._setups:
            started = time.perf_counter()
            config = TransferConfig.of(
                method=self.options.method,
                samples=samples,
                seed=draw,
                head=self.head_name,
                labels="source",
                scale="auto",
                batch_size=100,
                device=self.options.device,
            )
            setup = prepare(*self.places, self.data, config)
            result = run(setup, config)
            self._setups[samples, draw] = setup, result, time.perf_counter() - started
        return self._setups[samples, draw]


class TextCell(Cell):
    """A text encoder; the source and, for the reference, the target are fine-tuned here, or read from the cache."""

    def open(self) -> None:
        most = self.options.test
        splits = read_splits(self.task, self.options.shared / "data/text", most, validation=most)
        self.train, self.validation, self.test = (splits[name] for name in ("train", "validation", "test"))
        source, self.model = (
            open_model(self.options.encoders / name, device=self.options.device) for name in (self.source, self.target)
        )
        self.data = self.train
        self.head, self.head_name = choose_head(self.model, None, self.train), None
        self.places = (source, self._tuned(source, self.source), self.model)
        self.full = self.accuracy(self._tuned(self.model, self.target))

    def on_validation(self, begun: nn.Module, written: nn.Module) -> dict[str, float]:
        """Accuracies on the validation split, on which rules are chosen."""
        source, teacher, _ = self.places
        scored = {"teacher": (source, choose_head(source, None, self.train), teacher)}
        modules = {"target": self.model.module, "begun": begun, "written": written}
        scored |= {name: (self.model, self.head, module) for name, module in modules.items()}
        return {
            name: round(zero_shot(model.with_module(module.eval()), head, self.validation, batch_size=250).accuracy, 2)
            for name, (model, head, module) in scored.items()
        }

    def _tuned(self, model: Model, name: str) -> nn.Module:
        place = self.options.out.parent / f"{name}-{self.task}.pt"
        if not place.exists():
            head = choose_head(model, None, self.train)
            torch.save(tune(model, head, self.train, self.options.tune_steps).state_dict(), place)
        module = open_model(self.options.encoders / name, device=self.options.device).module
        module.load_state_dict(torch.load(place, map_location=self.options.device))
        return module


def row_of(cell: Cell, samples: int, draw: int, start: str, teacher: str, steps: int) -> dict[str, Any]:
    setup, result, port_seconds = cell.ported(samples, draw)
    drawn = setup.calibration.samples
    assert isinstance(drawn, DatasetSamples)
    if start == "target":
        result = replace(result, update=replace(result.update, scale=0.0))
    begun = result.apply()
    base, at_start = cell.accuracy(cell.model.module), cell.accuracy(begun)
    started = time.perf_counter()
    row: dict[str, Any] = {"rate": None}
    if teacher == "source":
        options = cell.options
        found = result.distill(steps, learning_rate=options.learning_rate, batch_size=options.batch_size)
        module = found.apply()
        entry = found.record["distilled"]
        row = {"best": entry["best"], "rate": entry["learning_rate"]}
        row |= {"agreement": entry["curve"][-1]["agreement"], "agreement_begun": entry["curve"][0]["agreement"]}
    else:
        chosen = align_labels(cell.train.subset(setup.about["data"]["indices"]), cell.head.classes)
        labels = torch.as_tensor(chosen.labels, device=cell.model.device)
        module, row["rate"] = labelled(cell, drawn, begun, labels, steps, draw)
    seconds = time.perf_counter() - started
    accuracy = cell.accuracy(module)
    gain = cell.full - base
    if isinstance(cell, TextCell):
        row["validation"] = cell.on_validation(begun, module)
    return {
        "pair": cell.pair,
        "task": cell.task,
        "samples": samples,
        "draw": draw,
        "start": start,
        "teacher": teacher,
        "steps": steps,
        "batch_size": cell.options.batch_size,
        "set": " ".join(cell.options.set),
        "target": round(base, 2),
        "begun": round(at_start, 2),
        "written": round(accuracy, 2),
        "finetuned": cell.full,
        "share_begun": round(100 * (at_start - base) / gain, 1),
        "share": round(100 * (accuracy - base) / gain, 1),
        "scale": result.scale,
        "port_seconds": round(port_seconds, 1),
        "seconds": round(seconds, 1),
        **row,
    }


def labelled(
    cell: Cell, samples: DatasetSamples, begun: nn.Module, labels: Tensor, steps: int, seed: int
) -> tuple[Any, float]:
    """Few-shot fine-tuning on augmented samples, at the learning rate that suits held-out samples best."""
    held_out, taught = divide(samples)

    def trained(part: DatasetSamples, rate: float) -> nn.Module:
        module, reader, wanted = copy.deepcopy(begun).eval(), Reader(part, steps, seed), labels[: len(part)]
        schedule = Schedule(steps, learning_rate=rate, weight_decay=0.0, seed=seed, warmup=min(10, steps // 3))

        def loss(step: int, rows: Tensor) -> Tensor:
            batch, _ = batch_for(cell.model, reader.view(rows.numpy(), step).target)
            return F.cross_entropy(cell.head.scores(cell.model, module, batch), wanted[rows])

        for _ in run_steps("few-shot", module, schedule.optimizer(module), schedule, len(part), loss):
            pass
        return module

    def right(module: nn.Module) -> float:
        batch, _ = batch_for(cell.model, Reader(held_out, 1, seed).plain(np.arange(len(held_out))).target)
        with torch.no_grad():
            found = cell.head.scores(cell.model, module, batch).argmax(-1)
        return float((found == labels[len(taught) :]).float().mean())

    scores = {rate: right(trained(taught, rate)) for rate in RATES}
    best = max(scores, key=lambda rate: scores[rate])
    return trained(samples, best), best


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    if options.pairs[:1] == ["text"]:
        pairs = options.pairs[1:] or [f"{SOURCE}:{target}" for target in TARGETS]
        yield from product(pairs, options.tasks or TEXT_TASKS)
        return
    for (source, target), tasks in PAIRS.items():
        if not options.pairs or f"{source}:{target}" in options.pairs:
            yield from ((f"{source}:{target}", task) for task in tasks if not options.tasks or task in options.tasks)


def measure(options: argparse.Namespace) -> None:
    """Make the rows that are not there yet."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {tuple(row.get(key) for key in KEY) for row in rows_in(options.out)}  # old rows have no batch size
    part, parts = map(int, options.part.split("/"))
    for setting in options.set:  # a constant of the library, for trials on development cells
        name, value = setting.split("=")
        place, constant = name.rsplit(".", 1)
        setattr(importlib.import_module(f"tuneport.{place}"), constant, json.loads(value))
    kinds = list(product(options.starts, options.teachers, options.steps))
    wanted = [
        (pair, task, samples, draw, *kind)
        for (pair, task), samples, draw in product(cells(options), options.samples, options.draws)
        for kind in kinds
    ]
    if not wanted:
        sys.exit(f"no cell has the pairs {' '.join(options.pairs)} and the tasks {' '.join(options.tasks)}")
    chunk = len(kinds)  # all rows of one port together
    mine = [row for number, row in enumerate(wanted) if number // chunk % parts == part]
    cell = None
    for pair, task, *rest in mine:
        if (pair, task, *rest, options.batch_size, " ".join(options.set)) in done:
            continue
        if cell is None or (cell.pair, cell.task) != (pair, task):
            cell = (TextCell if pair.startswith(SOURCE) else Cell)(pair, task, options)
        row = row_of(cell, *rest)
        add_row(options.out, row)


def write(options: argparse.Namespace) -> None:
    """Tables of the rows: shares of the fine-tuning gain, means over cells and draws, and the worst cell."""
    groups: dict[tuple[Any, ...], dict[tuple[str, str], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows_in(options.out):
        batch = row.get("batch_size") or "usual"
        kind = (row["samples"], row["steps"], batch, row["teacher"], row["start"], row["set"])
        groups[kind][row["pair"], row["task"]].append(row)
    lines = [
        "# Distillation: shares of the fine-tuning gain",
        "",
        "| samples | steps | batch | teacher | start | set | cells | start, % | written, % | worst cell, % "
        "| largest loss, points | seconds |",
        "|" + "---|" * 12,
    ]
    for kind, found in sorted(groups.items(), key=str):
        shares = {cell: statistics.mean(row["share"] for row in rows) for cell, rows in found.items()}
        rows = [row for each in found.values() for row in each]
        begun = statistics.mean(row["share_begun"] for row in rows)
        worst = min(shares, key=lambda cell: shares[cell])
        lost = max(0.0, *(row["begun"] - row["written"] for row in rows))
        seconds = statistics.median(row["seconds"] for row in rows)
        lines.append(
            f"| {' | '.join(map(str, kind))} | {len(found)} | {begun:.1f} | {statistics.mean(shares.values()):.1f} | "
            f"{shares[worst]:.1f} ({' '.join(worst)}) | {lost:.1f} | {seconds:.1f} |"
        )
    lines += ["", *cell_table(rows_in(options.out)), "", *(lead_words(rows_in(options.out), n) for n in (100, 500))]
    lines.append("- fine-tuned targets of the zoo are the figures of its README (4,000 test images)")
    if text := rows_in(options.text) if options.text is not None else []:
        lines += ["", "Text encoders, from the port, accuracies and shares in %:", "", *text_table(text)]
    if options.write is not None:
        # what was written by hand after the tables stays
        old = options.write.read_text() if options.write.exists() else ""
        lines += ["", f"## {notes}"] if (notes := old.partition("\n## ")[2].rstrip()) else []
        options.write.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def shares(rows: list[dict[str, Any]], samples: int, start: str, teacher: str = "source") -> dict[Any, float]:
    """The share of each cell after 300 steps, the mean of its draws."""
    found = defaultdict(list)
    for row in rows:
        kind = (row["samples"], row["start"], row["teacher"], row["steps"], row.get("batch_size"), row["set"])
        if kind == (samples, start, teacher, 300, None, ""):
            found[row["pair"].replace(":", " to "), row["task"]].append(row["share"])
    return {cell: statistics.mean(each) for cell, each in sorted(found.items())}


def leads(rows: list[dict[str, Any]], samples: int) -> list[float]:
    """By how much a cell's share is larger from the port than from the bare target."""
    port, target = (shares(rows, samples, start) for start in ("port", "target"))
    return [port[cell] - target[cell] for cell in port if cell in target]


def lead_words(rows: list[dict[str, Any]], samples: int) -> str:
    found = leads(rows, samples)
    ahead = sum(lead > 0 for lead in found)
    return (
        f"- lead of the port over the bare target after the same steps, N = {samples}: "
        f"{statistics.mean(found):.1f} % of the gain, with a standard deviation of {statistics.stdev(found):.1f} over "
        f"{len(found)} cells, from {min(found):.1f} to {max(found):.1f}; ahead in {ahead} cells"
    )


def cell_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The share of each cell by its start, with the source as the teacher: means over three draws."""
    counts = (100, 500)
    columns = [
        column
        for count in counts
        for column in (
            shares([row | {"share": row["share_begun"]} for row in rows], count, "port"),
            shares(rows, count, "port"),
            shares(rows, count, "target"),
        )
    ]
    names = (f"{kind}, N = {n}" for n in counts for kind in ("port", "distilled", "distilled from the target"))
    yield "| pair | task | " + " | ".join(names) + " |"
    yield "|---" * (2 + len(columns)) + "|"
    for cell in columns[0]:
        yield f"| {' | '.join(cell)} | {' | '.join(f'{column[cell]:.1f}' for column in columns)} |"


def text_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Accuracies and shares of each pair of text encoders and task: means over the draws."""
    keys = ("target", "begun", "written", "finetuned", "share_begun", "share")
    cells = defaultdict(list)
    for row in rows:
        cells[row["pair"].replace(":", " to "), row["task"], str(row["samples"])].append(row)
    means = {cell: [statistics.mean(row[key] for row in found) for key in keys] for cell, found in cells.items()}
    yield "| pair | task | N | target | port | distilled | fine-tuned target | share of the port | share | draws |"
    yield "|---" * 10 + "|"
    for cell, found in sorted(means.items()):
        yield f"| {' | '.join(cell)} | {' | '.join(f'{value:.1f}' for value in found)} | {len(cells[cell])} |"
    ends = (f"{statistics.mean(values):.1f}" for values in zip(*means.values(), strict=True))
    yield f"| mean of {len(means)} cells | | | {' | '.join(ends)} | {len(rows)} rows |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with zoo/ and data/")
    parser.add_argument("--encoders", type=Path, help="folder with the text encoders")
    parser.add_argument(
        "--pairs", nargs="+", default=[], help="such as a:a2, or 'text minilm-l6:mpnet'; all of the zoo"
    )
    parser.add_argument("--tasks", nargs="+", default=[])
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=[300])
    parser.add_argument("--starts", nargs="+", default=["port"], choices=["port", "target"])
    parser.add_argument("--teachers", nargs="+", default=["source"], choices=["source", "labels"])
    parser.add_argument("--method", default="bico")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--batch-size", type=int, help="samples of an update")
    parser.add_argument("--set", nargs="+", default=[], help="constants, such as training.distill.MIXED=0")
    parser.add_argument("--test", type=int, default=2000, help="test samples at most")
    parser.add_argument("--tune-steps", type=int, default=400, help="of the full fine-tunes of text encoders")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth port, from the Ith")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True, help="rows, one JSON object a line")
    parser.add_argument("--write", type=Path, help="write the tables of the rows to this file")
    parser.add_argument("--text", type=Path, help="rows of text encoders, for the tables")
    options = parser.parse_args()
    if options.shared is None:
        write(options)
        return
    if not (options.shared / "data").is_dir():
        sys.exit(f"{options.shared} has no data/: this benchmark needs the shared models and data")
    measure(options)


if __name__ == "__main__":
    main()
