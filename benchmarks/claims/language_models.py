"""Claim: a LoRA of a real language model is ported to a larger one, or to one of another family.

A LoRA (rank 16, all linear layers) is trained on the source with all data of a task, and ported with N samples. Rows:
the target alone, methods, few-shot fine-tuning on the same samples (rate and steps chosen on validation data), and
fine-tuning on all data. Each row is appended to ROWS as soon as it is measured, and a row that is there is not made
again. Several processes may share WORK, where LoRAs and ported changes are kept: one makes them, the others wait.
`--table` writes a page with all rows, and says which of the parts, draws and pairs are missing. Needs transformers
folders (get_models.py) and the shared texts.

    python -m benchmarks.claims.language_models --models MODELS --data SHARED/data/text --rows ROWS.jsonl \
        --pairs smollm2-135m:gemma3-270m qwen-coder-0.5b:qwen-coder-1.5b --tasks trec6 shakespeare --draws 0 1 2
    python -m benchmarks.claims.language_models --rows benchmarks/results/language-models.jsonl \
        --table benchmarks/results/language-models.md --pairs smollm2-135m:tinyllama-1.1b

`--parts trial --draws 0` has the parts of a first trial, which did harm:

    python -m benchmarks.claims.language_models --models MODELS --data SHARED/data/text --rows TRIAL.jsonl \
        --tasks shakespeare --steps 33 --batch 4 --test 100 --parts trial --draws 0
    python -m benchmarks.claims.language_models --rows benchmarks/results/language-models-trial.jsonl \
        --table benchmarks/results/language-models-trial.md --parts trial --draws 0
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.claims.language_tables import CELL, ONCE, PARTS, TRIAL, page
from benchmarks.claims.language_tasks import ALL_DATA, INSTRUCTIONS, fast_products, read_task, score, train_lora
from benchmarks.rows import add_row, commit, rows_in
from tuneport.config import TransferConfig
from tuneport.data.samplers import select
from tuneport.errors import TuneportError
from tuneport.methods import LayerRecord, get_method
from tuneport.models.base import Model
from tuneport.models.open import open_model, pick_dtype
from tuneport.outputs import ModelOutput, Update
from tuneport.pairing import blocks_of
from tuneport.pipeline.result import Result
from tuneport.pipeline.scale import RULES, Judge, ScaleChoice, choose_scale
from tuneport.pipeline.solve import solve
from tuneport.pipeline.transfer import Setup, choose_rule, prepare
from tuneport.runtime.passes import Passes
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import ScaleRule

FEW_SHOT = [(steps, rate) for steps in (10, 40) for rate in (1e-4, 5e-4)]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context that one process at a time enters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def opened(folder: Path, device: str, dtype: str, longest: int) -> Model:
    return open_model(folder, device=device, dtype=pick_dtype(dtype)).cut_at(longest)


@dataclass(frozen=True)
class Ported:
    """A ported change, the scales that the rules choose, the candidates' loss and accuracy, and the seconds it took."""

    vector: TaskVector
    records: tuple[LayerRecord, ...]
    scales: dict[str, float]
    losses: dict[str, float]
    right: dict[str, float | None]
    seconds: float

    def scale(self, rule: str) -> float:
        return self.scales[rule] if rule in self.scales else float(rule)


class Cell:
    """One pair of models, one task: makes the rows that are not in the file yet."""

    def __init__(self, options: Any, pair: str, task: str) -> None:
        self.options, self.task = options, task
        self.pair, (self.source, self.target) = pair, pair.split(":")
        self.data = read_task(task, options.data, options.test)
        self.schedule = {key: getattr(options, key) or value for key, value in ALL_DATA.items()}  # of the source's LoRA
        self.setup = cache(self._setup)
        self.scores: dict[Any, dict[str, Any]] = {}

    def open(self, name: str) -> Model:
        given = self.options
        return opened(given.models / name, given.device, given.dtype, given.max_length)

    def known(self, row: str, draw: int | None) -> bool:
        wanted = self.about() | {"row": "why: whole" if row == "why" else row, "draw": draw}
        rows = [row for row in rows_in(self.options.rows) if "error" not in row]  # these are tried again
        return any(all(row.get(key) == wanted.get(key) for key in (*CELL, "row", "draw")) for row in rows)

    def about(self) -> dict[str, Any]:
        """What a row says of its cell and of the machine."""
        given = self.options
        on_gpu = given.device.startswith("cuda")
        about = {"pair": self.pair, "task": self.task, "samples": given.samples, "test": len(self.data["test"])}
        about |= {"lora": "{steps} steps of {batch}".format(**self.schedule), "max_tokens": given.max_tokens}
        about |= {"commit": commit(), "torch": torch.__version__}
        return about | {"device": torch.cuda.get_device_name() if on_gpu else platform.machine()}

    def add(self, row: str, scores: dict[str, Any], seconds: float, **more: Any) -> None:
        if torch.cuda.is_available():  # since the last row
            more["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            torch.cuda.reset_peak_memory_stats()
        add_row(self.options.rows, self.about() | {"row": row, **scores, **more, "seconds": round(seconds, 1)})

    def adapter(self) -> Path:
        """The LoRA of the source, trained if it is not there."""
        steps, batch = self.schedule["steps"], self.schedule["batch"]
        out: Path = self.options.work / f"{self.source}-{self.task}-{steps}x{batch}"
        with locked(out.with_suffix(".lock")):
            if not out.exists():
                new = out.with_suffix(".new")
                train_lora(self.open(self.source), self.data["train"], out=new, **self.schedule)
                new.rename(out)
        return out

    def run(self, part: str, draw: int) -> None:
        if part in ("target", "source"):
            name = self.target if part == "target" else self.source
            self.add(part, score(self.open(name), self.data["test"]), 0.0)
        elif part == "fine-tuned source":
            from peft import PeftModel

            model, started = self.open(self.source), time.time()
            tuned = PeftModel.from_pretrained(copy.deepcopy(model.module), self.adapter()).merge_and_unload()
            seconds = time.time() - started
            self.add(part, score(model.with_module(tuned.eval()), self.data["test"]), seconds)
        elif part == "all-data":
            model, started = self.open(self.target), time.time()
            tuned = train_lora(model, self.data["train"], **ALL_DATA)
            seconds = time.time() - started
            self.add(part, score(model.with_module(tuned), self.data["test"]), seconds)
        elif part == "why":
            self.explain()
        else:
            (self.few_shot if part == "few-shot" else self.port)(part, draw)

    def port(self, part: str, draw: int) -> None:
        method, _, rest = part.partition("@")
        rule, _, distilled = rest.partition(",")
        found = self.ported(method, draw)
        more: dict[str, Any] = {"draw": draw, "scale": found.scale(rule), "losses": found.losses, "right": found.right}
        result, seconds, key = self.result(found, more["scale"], draw), found.seconds, (id(found), more["scale"])
        if distilled:
            started = time.time()
            with fast_products():
                result = result.distill(steps=self.options.distill)
            seconds, key = seconds + time.time() - started, (id(found), "distilled")
            more["curve"] = [(mark["step"], mark["held_out_loss"]) for mark in result.record["distilled"]["curve"]]
        if key not in self.scores:
            self.scores[key] = score(result.target.with_module(result.apply()), self.data["test"])
        self.add(part, self.scores[key], seconds, **more)

    def result(self, found: Ported, scale: float, draw: int) -> Result:
        setup = self.setup(draw)
        update = Update(setup.models.target, found.vector, scale)
        return Result(update, found.records, (), self.config(draw), setup.about, setup)

    def config(self, draw: int) -> TransferConfig:
        return TransferConfig.of(
            scale="auto",
            samples=self.options.samples,
            seed=draw,
            batch_size=self.options.batch_size,
            max_tokens=self.options.max_tokens,
            max_length=self.options.max_length,
            device=self.options.device,
            dtype=self.options.dtype,
        )

    def _setup(self, draw: int) -> Setup:
        """The transfer of a draw, for all methods."""
        models = (self.open(self.source), self.adapter(), self.open(self.target))
        signals = frozenset({"input", "output", "output_gradient"})
        return prepare(*models, self.data["train"], self.config(draw), signals=signals)

    def ported(self, method: str, draw: int) -> Ported:
        """What a method ports, made once for all scales; without views of the samples, `bico+` is `bico`."""
        if method == "bico+" and self.setup(draw).calibration.samples.views(draw) is None:
            method = "bico"
        return self._ported(method, draw)

    @cache  # noqa: B019
    def _ported(self, method: str, draw: int) -> Ported:
        setup, given, chosen = self.setup(draw), self.options, get_method(method)
        name = f"{self.source}-{self.target}-{self.task}-{method}-{draw}-{given.samples}-{given.max_tokens}"
        path: Path = given.work / f"{name}-{self.schedule['steps']}.pt"
        with locked(given.work / "ported.lock"):  # the sums of two transfers at once may not fit on one GPU
            if not path.exists():
                started = time.time()
                rule: float | ScaleRule = "auto" if method.startswith("bico") else 1.0
                measurement = setup.measurement(self.config(draw), chosen)
                judge = Judge(setup.models.target, setup.calibration, ModelOutput())
                passes = in_groups(setup, given.groups)
                moved = solve(measurement, setup.change, chosen, rule, judge, passes=passes)
                scales: dict[str, float] = {}
                losses: dict[str, float] = {}
                right: dict[str, float | None] = {}
                if (choice := moved.choice) is not None:
                    scales |= {name: chosen_by(name, choice) for name in RULES}
                    scales["default"] = scales[str(choose_rule(setup, None))]
                    losses = {str(scale): found.loss for scale, found in choice.scores.items()}
                    right = {str(scale): found.accuracy for scale, found in choice.scores.items()}
                vector = TaskVector({name: moved.transfer.task_vector[name] for name in moved.transfer.task_vector})
                found = Ported(vector, moved.transfer.records, scales, losses, right, time.time() - started)
                torch.save(vars(found) | {"vector": dict(vector)}, path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
        kept = torch.load(path, weights_only=False)
        return Ported(**kept | {"vector": TaskVector(kept["vector"])})

    def explain(self) -> None:
        """Where the loss at scale 1 comes from: parts of the change, other sizes of it, and random changes."""
        result = self.result(self.ported("bico", 0), 1.0, 0)
        for name, vector in variants(result):
            module = replace(result, update=replace(result.update, vector=vector)).apply()
            ratio = statistics.median(relative_norms(vector, result.target).values())
            scores = score(result.target.with_module(module), self.data["test"])
            self.add(f"why: {name}", scores, 0.0, relative=ratio)

    def few_shot(self, part: str, draw: int) -> None:
        """Rate and steps are the best of four on validation data, for each draw."""
        started, model, train = time.time(), self.open(self.target), self.data["train"]
        few = train.subset(select(train, samples=self.options.samples, seed=draw))  # as in the transfer
        validation = replace(self.data["validation"], labels=None)  # the loss of the right answers is enough
        best: tuple[float, Any, Any] | None = None
        for steps, rate in FEW_SHOT:
            module = train_lora(model, few, steps=steps, rate=rate, batch=8, seed=draw)
            bits = score(model.with_module(module), validation)["bits"]
            if best is None or bits < best[0]:
                best = bits, module, (steps, rate)
        assert best is not None
        seconds = time.time() - started
        self.add(part, score(model.with_module(best[1]), self.data["test"]), seconds, draw=draw, schedule=best[2])


def chosen_by(rule: ScaleRule, choice: ScaleChoice) -> float:
    """The scale that a rule chooses from the scores of a choice."""
    return choose_scale(
        choice.scores.__getitem__,
        samples=choice.samples,
        held_out=choice.held_out,
        candidates=tuple(choice.scores),
        rule=rule,
    ).scale


def in_groups(setup: Setup, count: int) -> Passes | None:
    """Passes that each measure a part of the blocks: with fewer sums at a time, more transfers fit on a GPU."""
    blocks = blocks_of(setup.plan.pairs)
    size = -(-len(blocks) // count)
    groups = [sum(map(tuple, blocks[at : at + size]), ()) for at in range(0, len(blocks), size)]
    return Passes(tuple(groups), 0, ()) if count > 1 else None


def relative_norms(vector: TaskVector, model: Model) -> dict[str, float]:
    """The norm of each change over the norm of its weight."""
    weights = model.stored_parameters()
    return {name: vector.norm(name) / float(weights[name].float().norm()) for name in vector}


def variants(result: Result) -> Iterator[tuple[str, TaskVector]]:
    """The ported change at scale 1, its halves, smaller sizes of it, and random changes of the same size."""
    setup, vector = result.setup, result.task_vector
    assert setup is not None
    yield "whole", vector
    for part, words in {"attention": ("attn", "attention"), "MLP": ("mlp",)}.items():
        yield f"{part} alone", vector.subset(name for name in vector if any(word in name for word in words))
    source, target = relative_norms(setup.change.vector, setup.models.source), relative_norms(vector, result.target)
    partner = {pair.target.weight: pair.source.weight for pair in setup.plan.pairs}
    factors = {name: source[partner[name]] / max(target[name], 1e-30) for name in vector}
    yield "relative norms of the source", TaskVector({name: vector[name] * factors[name] for name in vector})
    yield "a quarter", vector * 0.25
    yield "reversed", vector * -1.0
    generator = torch.Generator().manual_seed(0)
    drawn = {}
    for name in vector:
        noise = torch.randn(vector.shape(name), generator=generator)
        drawn[name] = noise * (vector.norm(name) / float(noise.norm()))
    yield "random, of the same norms", TaskVector(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file that rows are appended to")
    parser.add_argument("--table", type=Path, help="write the page of all rows, and do nothing else")
    parser.add_argument("--models", type=Path, help="folder of transformers folders")
    parser.add_argument("--data", type=Path, help="folder of the shared texts")
    parser.add_argument("--work", type=Path, default=Path("language-models"), help="where the LoRAs are kept")
    parser.add_argument("--pairs", nargs="+", default=["smollm2-135m:gemma3-270m"], help="SOURCE:TARGET")
    parser.add_argument("--tasks", nargs="+", default=["trec6"], choices=(*INSTRUCTIONS, "shakespeare"))
    parser.add_argument(
        "--parts", nargs="+", default=PARTS, help=f"some of {', '.join(PARTS)}, why, METHOD@SCALE; or trial"
    )
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2], help="seeds of the samples")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1, help="in which the blocks are measured, to save memory")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--distill", type=int, default=100, help="steps of distillation")
    parser.add_argument("--steps", type=int, help="of the source's LoRA")
    parser.add_argument("--rate", type=float, help="of the source's LoRA")
    parser.add_argument("--batch", type=int, help="of the source's LoRA")
    parser.add_argument("--test", type=int, default=300, help="test samples")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    options.parts = TRIAL if options.parts == ["trial"] else options.parts
    if options.table is not None:
        lines = page(rows_in(options.rows), options.parts, options.draws, options.pairs)
        options.table.write_text("\n".join(lines) + "\n")
        return
    if options.models is None or options.data is None:
        parser.error("--models and --data are needed, unless --table is given")

    cells = [Cell(options, pair, task) for pair in options.pairs for task in options.tasks]
    for draw in options.draws:
        for cell in cells:
            for part in options.parts:
                if cell.known(part, None if part in ONCE else draw):
                    continue
                try:
                    cell.run(part, draw)
                except TuneportError as error:  # naive between other shapes, for example: the rest goes on
                    add_row(options.rows, cell.about() | {"row": part, "draw": draw, "error": str(error)})
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
