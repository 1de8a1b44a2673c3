"""Claim: a LoRA of a real language model is ported to a larger one, or to one of another family.

A LoRA (rank 16, all linear layers) is trained on the source with all data of a task, and ported with N samples. Rows:
the target alone, methods, few-shot fine-tuning on the same samples (rate and steps chosen on validation data), and
fine-tuning on all data. Each part appends its rows to ROWS, so that parts can run one after the other or on other
machines; `--table` writes the table of all rows. Needs transformers folders (get_models.py) and the shared texts.

    python -m benchmarks.claims.language_models --models MODELS --data SHARED/data/text --rows ROWS.jsonl \
        --pairs smollm2-135m:gemma3-270m qwen-coder-0.5b:qwen-coder-1.5b --tasks trec6 shakespeare --draws 3
    python -m benchmarks.claims.language_models --models MODELS --data SHARED/data/text --rows TRIAL.jsonl \
        --tasks shakespeare --steps 33 --batch 4 --parts source target bico@1 bico@default bico@safe why --draws 1
    python -m benchmarks.claims.language_models --rows ROWS.jsonl --table benchmarks/results/language-models.md
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import commit
from tuneport import transfer
from tuneport.data.dataset import Dataset
from tuneport.errors import TuneportError
from tuneport.measure.accuracy import Evaluation
from tuneport.measure.language import likelihood, perplexity
from tuneport.measure.objectives import batch_for, choose_objective
from tuneport.models.base import Model
from tuneport.models.open import open_model, pick_dtype
from tuneport.pipeline.result import Result
from tuneport.task_vectors.vector import TaskVector

TRANSFERS = ("naive@1", "theseus@1", "bico@1", "bico@auto", "bico@safe", "bico+@auto", "bico+@safe")
PARTS = ("source", "target", *TRANSFERS, "bico+@auto,distill", "few-shot", "all-data")
ALL_DATA = {"steps": 300, "rate": 2e-4, "batch": 8}
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
        data = Dataset([passage for passage in passages if len(passage) > 200], None, (), name=name)
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


def score(model: Model, data: Dataset) -> dict[str, Any]:
    found: Evaluation = perplexity(model, data) if data.labels is None else likelihood(model, data)
    return {
        "accuracy": None if data.labels is None else found.accuracy,
        "bits": found.bits_per_character,
        "perplexity": found.perplexity,
    }


def train_lora(
    model: Model, data: Dataset, *, steps: int, rate: float, batch: int, seed: int = 0, out: Path | None = None
) -> Any:
    """A LoRA on all linear layers, trained on the answers; returns the module with it, merged, in evaluation mode."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    dtype, kind = next(model.module.parameters()).dtype, type(model.module)
    base = kind.from_pretrained(model.folder, dtype=dtype).to(model.device)  # type: ignore[operator]
    task = "CAUSAL_LM" if model.generates == "causal" else "SEQ_2_SEQ_LM"
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)
    module = get_peft_model(base, config).train()
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


class Cell:
    """One pair of models, one task: opens models when they are needed and writes rows."""

    def __init__(self, options: Any, pair: str, task: str, write: Callable[[dict[str, Any]], None]) -> None:
        self.options, self.task = options, task
        self.pair, (self.source, self.target) = pair, pair.split(":")
        self.data = read_task(task, options.data, options.test)
        self._write = write

    def open(self, name: str) -> Model:
        dtype = pick_dtype(self.options.dtype)
        opened = open_model(self.options.models / name, device=self.options.device, dtype=dtype)
        return opened.cut_at(self.options.max_length)

    def add(self, row: str, model: Model, started: float, **more: Any) -> None:
        found = {"pair": self.pair, "task": self.task, "row": row, **score(model, self.data["test"])}
        about = {"seconds": round(time.time() - started, 1), "commit": commit(), "device": self.options.device}
        self._write({**found, **more, **about, "samples": self.options.samples, "test": len(self.data["test"])})
        gc.collect()

    def adapter(self) -> Path:
        """The LoRA of the source, trained if it is not there."""
        out: Path = self.options.work / f"{self.source}-{self.task}"
        if not out.exists():
            schedule = {**ALL_DATA, **{key: value for key in ALL_DATA if (value := getattr(self.options, key))}}
            train_lora(self.open(self.source), self.data["train"], out=out, **schedule)
        return out

    def run(self, part: str) -> None:
        started = time.time()
        if part == "source":
            model = self.open(self.source)
            self.add("source", model, started)
            from peft import PeftModel

            tuned = PeftModel.from_pretrained(model.module, self.adapter()).merge_and_unload()
            self.add("fine-tuned source", model.with_module(tuned.eval()), started)
        elif part == "target":
            self.add("target", self.open(self.target), started)
        elif part == "why":
            self.explain()
        elif part == "all-data":
            model = self.open(self.target)
            tuned = train_lora(model, self.data["train"], **ALL_DATA)
            self.add("fine-tuned on all data", model.with_module(tuned), started)
        else:
            for draw in range(self.options.draws):
                (self.few_shot if part == "few-shot" else self.port)(part, draw)

    def port(self, part: str, draw: int) -> None:
        started = time.time()
        method, _, rest = part.partition("@")
        scale, _, distilled = rest.partition(",")
        target = self.open(self.target)
        result = self.ported(target, method, scale, draw)
        seconds = time.time() - started
        if distilled:
            result = result.distill(steps=self.options.distill)
        more = {"draw": draw, "scale": result.scale, "ported_seconds": round(seconds, 1)}
        if "scale_choice" in result.record:
            more["losses"] = {str(c["scale"]): c["loss"] for c in result.record["scale_choice"]["candidates"]}
        self.add(part, target.with_module(result.apply()), started, **more)

    def ported(self, target: Model, method: str, scale: str, draw: int) -> Result:
        return transfer(
            self.open(self.source),
            self.adapter(),
            target,
            self.data["train"],
            method=method,
            scale=None if scale == "default" else scale,
            samples=self.options.samples,
            seed=draw,
            batch_size=self.options.batch_size,
            max_tokens=self.options.max_tokens,
            max_length=self.options.max_length,
            device=self.options.device,
            dtype=self.options.dtype,
        )

    def explain(self) -> None:
        """Where the loss at scale 1 comes from: parts of the change, other sizes of it, and random changes."""
        target = self.open(self.target)
        result = self.ported(target, "bico", "1", 0)
        for name, vector in variants(result):
            started = time.time()
            module = replace(result, task_vector=vector).apply()
            ratio = statistics.median(relative_norms(vector, target).values())
            self.add(f"why: {name}", target.with_module(module), started, relative=ratio)

    def few_shot(self, part: str, draw: int) -> None:
        """Rate and steps are the best of four on validation data, for each draw."""
        started = time.time()
        model = self.open(self.target)
        rows = np.random.default_rng(draw).choice(len(self.data["train"]), self.options.samples, replace=False)
        few = self.data["train"].subset(rows)
        best: tuple[float, Any, Any] | None = None
        for steps, rate in FEW_SHOT:
            module = train_lora(model, few, steps=steps, rate=rate, batch=8, seed=draw)
            bits = score(model.with_module(module), self.data["validation"])["bits"]
            if best is None or bits < best[0]:
                best = bits, module, (steps, rate)
        assert best is not None
        self.add(part, model.with_module(best[1]), started, draw=draw, schedule=best[2])


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
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
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
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
        options.table.write_text("\n".join(table(rows)))
        return
    if options.models is None or options.data is None:
        parser.error("--models and --data are needed, unless --table is given")

    def write(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")

    for pair in options.pairs:
        for task in options.tasks:
            cell = Cell(options, pair, task, write)
            for part in options.parts:
                try:
                    cell.run(part)
                except TuneportError as error:  # naive between other shapes, for example: the rest goes on
                    print(f"{pair} {task} {part}: {error}", flush=True)


if __name__ == "__main__":
    main()
