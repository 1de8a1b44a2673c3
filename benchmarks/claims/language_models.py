"""Claim: a LoRA of a real language model is ported to a larger one, or to one of another family.

A LoRA (rank 16, all linear layers) is trained on the source with all data of a task, and ported with N samples. Rows:
the target alone, methods, few-shot fine-tuning on the same samples (rate and steps chosen on validation data), and
fine-tuning on all data. Each row is appended to ROWS as soon as it is measured, and a row that is there is not made
again. Several processes may share WORK, where LoRAs and ported changes are kept: one makes them, the others wait.
`--table` writes the table of all rows. Needs transformers folders (get_models.py) and the shared texts.

    python -m benchmarks.claims.language_models --models MODELS --data SHARED/data/text --rows ROWS.jsonl \
        --pairs smollm2-135m:gemma3-270m qwen-coder-0.5b:qwen-coder-1.5b --tasks trec6 shakespeare --draws 0 1 2
    python -m benchmarks.claims.language_models --models MODELS --data SHARED/data/text --rows TRIAL.jsonl \
        --tasks shakespeare --steps 33 --batch 4 --parts source target bico@1 bico@default bico@safe why --draws 0
    python -m benchmarks.claims.language_models --rows ROWS.jsonl --table benchmarks/results/language-models.md
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import gzip
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import add_row, commit, rows_in
from tuneport.data.dataset import Dataset
from tuneport.data.samplers import select
from tuneport.errors import TuneportError
from tuneport.job import Job
from tuneport.measure.accuracy import Evaluation
from tuneport.measure.language import likelihood, perplexity
from tuneport.measure.objectives import batch_for, choose_objective
from tuneport.methods import LayerRecord, get_method
from tuneport.models.base import Model
from tuneport.models.open import open_model, pick_dtype
from tuneport.pairing import blocks_of
from tuneport.pipeline.move import move
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.result import Result
from tuneport.pipeline.scale import choose_scale
from tuneport.pipeline.transfer import scale_for
from tuneport.runtime.passes import Passes
from tuneport.task_vectors.vector import TaskVector

TRANSFERS = ("naive@1", "theseus@1", "bico@1", "bico@auto", "bico@safe", "bico+@auto", "bico+@safe")
PARTS = ("source", "fine-tuned source", "target", *TRANSFERS, "bico+@auto,distill", "few-shot", "all-data")
ALL_DATA = {"steps": 300, "rate": 2e-4, "batch": 8}
ONCE = ("source", "fine-tuned source", "target", "why", "all-data")  # parts without a draw
FEW_SHOT = [(steps, rate) for steps in (10, 40) for rate in (1e-4, 5e-4)]
VALIDATION = 100
INSTRUCTIONS = {
    "trec6": (
        "What kind of answer does this question ask for? Reply with one word: description, entity, abbreviation, "
        "person, place or number.",
        ("description", "entity", "abbreviation", "person", "place", "number"),
        "trec6.jsonl.gz",
    ),
    "sst2": (
        "Is this review positive or negative? Reply with one word.",
        ("negative", "positive"),
        "sst2_stsa.jsonl.gz",
    ),
    "agnews": (
        "What is this news about? Reply with one word: world, sports, business or science.",
        ("world", "sports", "business", "science"),
        "agnews_test.jsonl.gz",
    ),
}


def read_task(name: str, folder: Path, tested: int) -> dict[str, Dataset]:
    """Training, validation and test samples: chats with a label word, or passages of Shakespeare."""
    if name == "shakespeare":
        with gzip.open(folder / "tinyshakespeare.txt.gz", "rt", encoding="utf-8") as file:
            text = file.read()
        pieces = [piece.strip() for piece in text.split("\n\n")]
        passages = ["\n\n".join(pieces[at : at + 4]) for at in range(0, len(pieces), 4)]
        data = Dataset([passage for passage in passages if 200 < len(passage) < 800], None, (), name=name)
    else:
        instruction, words, file_name = INSTRUCTIONS[name]
        with gzip.open(folder / file_name, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        labels = np.array([int(row["label"]) for row in rows])
        chats = [[{"role": "user", "content": f"{instruction}\n\n{row['text']}"}] for row in rows]
        said = [
            [*chat, {"role": "assistant", "content": words[label]}] for chat, label in zip(chats, labels, strict=True)
        ]
        data = Dataset(said, labels, words, name=name)
        test = np.array([row.get("split") == "test" for row in rows])
        if test.any() and not test.all():
            order = np.random.default_rng(0).permutation(np.flatnonzero(~test))
            taken = np.random.default_rng(0).permutation(np.flatnonzero(test))[:tested]
            parts = {"validation": order[:VALIDATION], "train": order[VALIDATION:], "test": taken}
            return {part: data.subset(rows) for part, rows in parts.items()}
    order = np.random.default_rng(0).permutation(len(data))
    held = tested + VALIDATION
    parts = {"test": order[:tested], "validation": order[tested:held], "train": order[held:]}
    return {part: data.subset(rows) for part, rows in parts.items()}


@contextmanager
def fast_products() -> Iterator[None]:
    """Context in which a GPU multiplies in TF32: for training and scoring, not for what is aligned."""
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


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


@fast_products()
def score(model: Model, data: Dataset) -> dict[str, Any]:
    found: Evaluation = perplexity(model, data) if data.labels is None else likelihood(model, data)
    return {
        "accuracy": None if data.labels is None else found.accuracy,
        "bits": found.bits_per_character,
        "perplexity": found.perplexity,
    }


@fast_products()
def train_lora(
    model: Model, data: Dataset, *, steps: int, rate: float, batch: int, seed: int = 0, out: Path | None = None
) -> Any:
    """A LoRA on all linear layers, trained on the answers; returns the module with it, merged, in evaluation mode."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    task = "CAUSAL_LM" if model.generates == "causal" else "SEQ_2_SEQ_LM"
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)
    module = get_peft_model(copy.deepcopy(model.module), config).train()
    objective = choose_objective(data, [model])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    generator = np.random.default_rng(seed)
    for step in range(steps):
        share = min(1.0, (step + 1) / max(1, steps // 10)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        rows = generator.choice(len(data), size=min(batch, len(data)), replace=False)
        inputs, labels = batch_for(model, objective.encode(model, data.subset(rows)))
        loss = module(**inputs, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    module.eval()
    if out is not None:
        module.save_pretrained(out)
    return module.merge_and_unload()


@dataclass(frozen=True)
class Ported:
    """A ported change, the scales that the rules choose, the losses of the candidates, and the seconds it took."""

    vector: TaskVector
    records: tuple[LayerRecord, ...]
    scales: dict[str, float]
    losses: dict[str, float]
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
        self.job = cache(self._job)
        self.scores: dict[Any, dict[str, Any]] = {}

    def open(self, name: str) -> Model:
        given = self.options
        return opened(given.models / name, given.device, given.dtype, given.max_length)

    def known(self, row: str, draw: int | None) -> bool:
        wanted = (self.pair, self.task, "why: whole" if row == "why" else row, draw)
        return wanted in [(row["pair"], row["task"], row["row"], row.get("draw")) for row in rows_in(self.options.rows)]

    def add(self, row: str, scores: dict[str, Any], seconds: float, **more: Any) -> None:
        about = {"seconds": round(seconds, 1), "commit": commit(), "device": self.options.device}
        about |= {"samples": self.options.samples, "test": len(self.data["test"])}
        add_row(self.options.rows, {"pair": self.pair, "task": self.task, "row": row, **scores, **more, **about})

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
        more: dict[str, Any] = {"draw": draw, "scale": found.scale(rule), "losses": found.losses}
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
        job = self.job(draw)
        return Result(job.target, found.vector, found.records, (), scale, job.record, job)

    def _job(self, draw: int) -> Job:
        """The job of a draw, for all methods."""
        return prepare(
            self.open(self.source),
            self.adapter(),
            self.open(self.target),
            self.data["train"],
            signals=("input", "output", "output_gradient"),
            scored=True,
            samples=self.options.samples,
            seed=draw,
            batch_size=self.options.batch_size,
            max_tokens=self.options.max_tokens,
            max_length=self.options.max_length,
            device=self.options.device,
            dtype=self.options.dtype,
        )

    def ported(self, method: str, draw: int) -> Ported:
        """What a method ports, made once for all scales; without views of the samples, `bico+` is `bico`."""
        job = self.job(draw)
        if method == "bico+" and job.samples.views(draw) is None:
            method = "bico"
        return self._ported(method, draw)

    @cache  # noqa: B019
    def _ported(self, method: str, draw: int) -> Ported:
        job, given, chosen = self.job(draw), self.options, get_method(method)
        name = f"{self.source}-{self.target}-{self.task}-{method}-{draw}-{given.samples}-{given.max_tokens}"
        path: Path = given.work / f"{name}-{self.schedule['steps']}.pt"
        with locked(given.work / "ported.lock"):  # the sums of two jobs at once may not fit on one GPU
            if not path.exists():
                started = time.time()
                rule = "auto" if method.startswith("bico") else 1.0
                moved = move(job.for_(chosen), chosen, rule, passes=in_groups(job, given.groups))
                scales, losses = {}, {}
                if (choice := moved.choice) is not None:
                    about = {"samples": choice.samples, "held_out": choice.held_out}
                    scales = {
                        rule: choose_scale(choice.scores.__getitem__, rule=rule, **about).scale
                        for rule in ("auto", "safe")
                    }
                    scales["default"] = scales[str(scale_for(job, None))]
                    losses = {str(scale): found.loss for scale, found in choice.scores.items()}
                vector = TaskVector({name: moved.transfer.task_vector[name] for name in moved.transfer.task_vector})
                found = Ported(vector, moved.transfer.records, scales, losses, time.time() - started)
                torch.save(vars(found) | {"vector": dict(vector)}, path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)
        kept = torch.load(path, weights_only=False)
        return Ported(**kept | {"vector": TaskVector(kept["vector"])})

    def explain(self) -> None:
        """Where the loss at scale 1 comes from: parts of the change, other sizes of it, and random changes."""
        result = self.result(self.ported("bico", 0), 1.0, 0)
        for name, vector in variants(result):
            module = replace(result, task_vector=vector).apply()
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


def in_groups(job: Job, count: int) -> Passes | None:
    """Passes that each measure a part of the blocks: with fewer sums at a time, more jobs fit on a GPU."""
    blocks = blocks_of(job.plan.pairs)
    size = -(-len(blocks) // count)
    groups = [sum(map(tuple, blocks[at : at + size]), ()) for at in range(0, len(blocks), size)]
    return Passes(tuple(groups), 0, ()) if count > 1 else None


def relative_norms(vector: TaskVector, model: Model) -> dict[str, float]:
    """The norm of each change over the norm of its weight."""
    weights = model.stored_parameters()
    return {name: vector.norm(name) / float(weights[name].float().norm()) for name in vector}


def variants(result: Result) -> Iterator[tuple[str, TaskVector]]:
    """The ported change at scale 1, its halves, smaller sizes of it, and random changes of the same size."""
    job, vector = result.job, result.task_vector
    assert job is not None
    yield "whole", vector
    for part, words in {"attention": ("attn", "attention"), "MLP": ("mlp",)}.items():
        yield f"{part} alone", vector.subset(name for name in vector if any(word in name for word in words))
    source, target = relative_norms(job.task_vector, job.source), relative_norms(vector, job.target)
    partner = {pair.target.weight: pair.source.weight for pair in job.plan.pairs}
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


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each pair and task: means and deviations over the draws."""
    yield "# Real language models: a LoRA ported to a larger model, or to another family"
    for pair, task in dict.fromkeys((row["pair"], row["task"]) for row in rows):
        here = [row for row in rows if (row["pair"], row["task"]) == (pair, task)]
        yield f"\n## {task}: {pair.replace(':', ' to ')}, N = {here[-1]['samples']}\n"
        yield "| row | draws | accuracy | bits per character | perplexity | scale | seconds |"
        yield "|---|---|---|---|---|---|---|"
        for name in dict.fromkeys(row["row"] for row in here):
            found = list({row.get("draw", 0): row for row in here if row["row"] == name}.values())  # the last of each
            forms = {"accuracy": ".1f", "bits": ".4f", "perplexity": ".4g"}
            cells = [spread([row[key] for row in found], form) for key, form in forms.items()]
            scales = ", ".join(f"{row['scale']:g}" for row in found if "scale" in row)
            seconds = statistics.fmean(row["seconds"] for row in found)
            yield f"| {name} | {len(found)} | {' | '.join(cells)} | {scales} | {seconds:.0f} |"
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    devices = ", ".join(sorted({row["device"] for row in rows}))
    yield f"\nTest: {rows[-1]['test']} samples; validation: {VALIDATION}. Commits: {commits}. Devices: {devices}."
    yield f"Table: {platform.machine()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}.\n"


def spread(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.fmean(known):{form}}" + (f" ± {statistics.stdev(known):{form}}" if len(known) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSONL file that rows are appended to")
    parser.add_argument("--table", type=Path, help="write the table of all rows, and do nothing else")
    parser.add_argument("--models", type=Path, help="folder of transformers folders")
    parser.add_argument("--data", type=Path, help="folder of the shared texts")
    parser.add_argument("--work", type=Path, default=Path("language-models"), help="where the LoRAs are kept")
    parser.add_argument("--pairs", nargs="+", default=["smollm2-135m:gemma3-270m"], help="SOURCE:TARGET")
    parser.add_argument("--tasks", nargs="+", default=["trec6"], choices=(*INSTRUCTIONS, "shakespeare"))
    parser.add_argument("--parts", nargs="+", default=PARTS, help=f"some of {', '.join(PARTS)}, why, or METHOD@SCALE")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--draws", type=int, nargs="+", default=[0, 1, 2], help="seeds of the samples")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1, help="in which the blocks are measured, to save memory")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--distill", type=int, default=300, help="steps of distillation")
    parser.add_argument("--steps", type=int, help="of the source's LoRA")
    parser.add_argument("--rate", type=float, help="of the source's LoRA")
    parser.add_argument("--batch", type=int, help="of the source's LoRA")
    parser.add_argument("--test", type=int, default=300, help="test samples")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    if options.table is not None:
        rows = rows_in(options.rows)
        options.table.write_text("\n".join(table(rows)))
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
                    print(f"{cell.pair} {cell.task} {part}: {error}", flush=True)
                gc.collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
