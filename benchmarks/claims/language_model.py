"""Claim: a fine-tune of a small Llama, trained here, is ported to a wider and deeper one, also with other tokens.

Trains three small Llamas from scratch on plain English (Brown corpus, web text): a source, a wider and deeper
target with the same tokenizer, and the same target with another tokenizer. Fine-tunes the source on Shakespeare,
ports it with about a hundred passages, and gives the perplexity per word of each on held-out Shakespeare and English.
Needs the shared corpora; says so where they are not there.

    python benchmarks/claims/language_model.py --data SHARED/data/text --out benchmarks/results/language-model.md
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tuneport.config import TransferConfig
from tuneport.data.dataset import Dataset
from tuneport.maps.statistics import Statistics
from tuneport.measure.language import perplexity
from tuneport.measure.measurement import Measurement
from tuneport.measure.objectives import OBJECTIVES, TokenLoss, batch_for
from tuneport.methods import METHODS, Method, Transfer
from tuneport.models.base import Model
from tuneport.models.open import open_model
from tuneport.models.weights import Scaled
from tuneport.outputs import ModelOutput
from tuneport.pipeline.samples import SCORED
from tuneport.pipeline.scale import Judge, choose_on_halves
from tuneport.pipeline.solve import measure, problem_of
from tuneport.pipeline.transfer import Setup, prepare
from tuneport.pipeline.transfer import run as run_setup
from tuneport.task_vectors.vector import TaskVector
from tuneport.training.distill import HELD_OUT
from tuneport.training.loop import Pace, Schedule, run_steps
from tuneport.training.student import student_of

LENGTH = 256
SHAPES = {
    "source": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8},
    "target": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 9, "num_attention_heads": 12},
}
VOCABULARIES = {"source": 4096, "target": 4096, "target, other tokens": 2500}
METHOD_NAMES = ("naive", "theseus", "bico")


def passages(path: Path, characters: int = 600) -> list[str]:
    """The text in pieces of about that many characters, cut at line ends or blanks."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        text = file.read()
    pieces, at = [], 0
    while at < len(text):
        end = min(at + characters, len(text))
        cut = max(text.rfind("\n", at + characters // 2, end), text.rfind(" ", at + characters // 2, end))
        end = cut if end < len(text) and cut > at else end
        pieces.append(text[at:end].strip())
        at = end
    return [piece for piece in pieces if len(piece) > 200]


def make_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<pad>", "<s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", model_max_length=LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def train(
    model: Any, tokens: Tensor, steps: int, rate: float, device: str, batch: int = 48, seed: int = 0
) -> list[float]:
    """Next-token training on random windows of a stream of tokens; returns the losses."""
    generator = torch.Generator().manual_seed(seed)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        share = min(1.0, (step + 1) / max(1, steps // 20)) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        starts = torch.randint(0, len(tokens) - LENGTH, (batch,), generator=generator)
        rows = torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()]).to(device)
        with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16, enabled=device != "cpu"):
            loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    return [float(loss) for loss in losses]


def stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    return torch.tensor([token for ids in tokenizer(texts)["input_ids"] for token in ids])


def texts_of(pieces: list[str], name: str) -> Dataset:
    return Dataset(inputs=pieces, labels=None, classes=(), name=name, kind="text")


def per_word(model: Model, data: Dataset) -> float:
    """Perplexity per word, which does not depend on the tokenizer: exp of the whole loss by the number of words."""
    found = perplexity(model, data)
    assert found.perplexity is not None
    assert found.tokens is not None
    words = sum(len(text.split()) for text in data.inputs)
    return math.exp(math.log(found.perplexity) * found.tokens / words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("language-models"), help="where the models are kept")
    parser.add_argument("--steps", type=int, default=1500, help="of pre-training")
    parser.add_argument("--tune", type=int, default=200, help="steps of fine-tuning")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--distill", type=int, default=300, help="steps of distillation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    needed = [options.data / f"{name}.txt.gz" for name in ("brown", "webtext", "tinyshakespeare")]
    if missing := [str(path) for path in needed if not path.exists()]:
        raise SystemExit(f"not there: {', '.join(missing)}. Fetch the shared corpora first.")
    started = time.time()
    english = passages(needed[0]) + passages(needed[1])
    np.random.default_rng(0).shuffle(english)
    plays = passages(needed[2])
    np.random.default_rng(0).shuffle(plays)
    held = {"Shakespeare": texts_of(plays[:100], "plays"), "English": texts_of(english[:100], "english")}
    english, plays = english[100:], plays[100:]
    opened: dict[str, Model] = {}
    for name, size in VOCABULARIES.items():
        folder = options.work / name.replace(", ", "-").replace(" ", "-")
        if not folder.exists():
            tokenizer = make_tokenizer(english, size)
            torch.manual_seed(len(name))
            shape = SHAPES["target" if name.startswith("target") else name]
            config = AutoConfig.for_model(
                "llama", **shape, vocab_size=len(tokenizer), num_key_value_heads=4, max_position_embeddings=LENGTH,
                tie_word_embeddings=True, bos_token_id=1, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            model = AutoModelForCausalLM.from_config(config).to(options.device)
            losses = train(model, stream(tokenizer, english), options.steps, 1e-3, options.device)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            print(name, f"loss {losses[0]:.2f} to {statistics.mean(losses[-20:]):.2f}, {time.time() - started:.0f} s")
        opened[name] = open_model(folder, device=options.device)
    tuned = {}
    for name, model in opened.items():
        assert model.reader is not None
        assert model.weights.folder is not None
        module = AutoModelForCausalLM.from_pretrained(model.weights.folder).to(options.device)
        train(module, stream(model.reader.tokenizer, plays), options.tune, 2e-4, options.device)
        tuned[name] = module
    rows = run(options, opened, tuned, plays, held)
    options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1))
    options.out.write_text(markdown(rows, options, time.time() - started))
    print(options.out.read_text())


def tuned_lora(target: Model, chosen: Dataset, seed: int) -> Model:
    """A LoRA of rank 16 trained on the texts: of three rates, that with the least loss on the tenth held out."""
    objective = OBJECTIVES["causal"]
    count = max(round(HELD_OUT * len(chosen)), 2)
    held_out, taught = (chosen.subset(np.arange(len(chosen))[part]) for part in (slice(-count, None), slice(-count)))
    best: tuple[float, Model | None] = (math.inf, None)
    for rate in (2e-4, 5e-4, 1e-3):
        student = student_of(target, TaskVector({}), 16, seed).module
        loss = TokenLoss(target)

        def mean_loss(_: int, rows: Tensor, student: Any = student, loss: TokenLoss = loss) -> Tensor:
            batch = batch_for(target, objective.encode(target, taught.subset(rows.numpy())))
            return loss(student, batch) / (batch[1] != -100).sum()

        schedule = Schedule(100, 16, rate, weight_decay=0.0, seed=seed, warmup=10)
        marks = (25, 50, 100)
        pace, optimizer = Pace(stops=marks), schedule.optimizer(student)
        steps = run_steps("a LoRA", student, optimizer, schedule, len(taught), mean_loss, pace)
        for step, _ in steps:
            if step in marks:
                found = perplexity(target.with_module(student), held_out).perplexity or math.inf
                if found < best[0]:
                    best = found, target.with_module(copy.deepcopy(student))
    assert best[1] is not None
    return best[1]


def solved(method: Method, setup: Setup, found: Statistics) -> Transfer:
    measurement = Measurement(setup.models, setup.plan, setup.calibration)
    return method.transfer(problem_of(measurement, setup.change.vector, found))


def run(
    options: Any, opened: dict[str, Model], tuned: dict[str, Any], plays: list[str], held: dict[str, Dataset]
) -> list[Any]:
    rows: list[dict[str, Any]] = []

    def add(pair: str, method: str, model: Model, **more: Any) -> None:
        scores = {name: per_word(model, data) for name, data in held.items()}
        rows.append({"pair": pair, "method": method, **scores, **more})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)

    source = opened["source"]
    add("source", "source", source)
    add("source", "fine-tuned source", source.with_module(tuned["source"]))
    data = texts_of(plays, "plays")
    signals = frozenset().union(*(METHODS[name].signals for name in METHOD_NAMES))
    for name in ("target", "target, other tokens"):
        target = opened[name]
        add(name, "target", target)
        add(name, "fine-tuned target", target.with_module(tuned[name]))
        for seed in range(options.seeds):
            config = TransferConfig.of(
                samples=options.samples, seed=seed, batch_size=20, device=options.device, scale="auto"
            )
            setup = prepare(source, tuned["source"], target, data, config, signals=signals | SCORED)
            judge = Judge(setup.models.target, setup.calibration, ModelOutput())
            share = setup.about["tokens"]["share"]
            sides = Measurement(setup.models, setup.plan, setup.calibration).halves()
            parts = tuple(measure(side, signals=signals) for side in sides)
            whole = parts[0] + parts[1]
            for method in METHOD_NAMES:
                solve = partial(solved, METHODS[method], setup)
                moved = solve(whole)
                with Scaled(target.module, moved.task_vector) as scaled:
                    scaled.set(1.0)
                    add(name, method, target, seed=seed, coverage=share)
                choice = choose_on_halves(judge, sides, map(solve, parts))
                chosen = solve(whole)
                with Scaled(target.module, chosen.task_vector) as scaled:
                    scaled.set(choice.scale)
                    add(name, f"{method}, scale auto", target, seed=seed, scale=choice.scale)
            ported = run_setup(setup, config)
            bare = replace(ported, update=replace(ported.update, scale=0.0))
            for start, result in (("bico", ported), ("the target", bare)):
                found = result.distill(options.distill)
                words = f"{options.distill} steps of distillation from {start}"
                add(name, words, target.with_module(found.apply()), seed=seed, best=found.record["distilled"]["best"])
            drawn = data.subset(setup.about["data"]["indices"])
            add(name, "LoRA fine-tuning on the same passages", tuned_lora(target, drawn, seed), seed=seed)
            assert target.reader is not None
            assert target.weights.folder is not None
            module = AutoModelForCausalLM.from_pretrained(target.weights.folder).to(options.device)
            seen = [data.inputs[index] for index in setup.about["data"]["indices"]]
            train(module, stream(target.reader.tokenizer, seen), 50, 2e-4, options.device, batch=32, seed=seed)
            add(name, "fine-tuning on the same passages, 50 steps", target.with_module(module), seed=seed)
    return rows


def markdown(rows: list[dict[str, Any]], options: Any, seconds: float) -> str:
    about = f"{options.samples} passages, {options.seeds} seeds, mean ± deviation."
    lines = ["# Language models", "", f"Perplexity per word on held-out passages; lower is better. {about}", ""]
    lines += ["| target | method | Shakespeare | English | scale | tokens matched |", "|---|---|---|---|---|---|"]
    for pair, method in dict.fromkeys((row["pair"], row["method"]) for row in rows):
        found = [row for row in rows if (row["pair"], row["method"]) == (pair, method)]
        cells = []
        for name in ("Shakespeare", "English"):
            values = [row[name] for row in found]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.1f}{spread}")
        scales = ", ".join(f"{row['scale']:g}" for row in found if "scale" in row)
        shares = {f"{100 * row['coverage']:.1f} %" for row in found if "coverage" in row}
        lines.append(f"| {pair} | {method} | {' | '.join(cells)} | {scales} | {', '.join(sorted(shares))} |")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines += [
        "",
        f"Source: {SHAPES['source']}, targets: {SHAPES['target']}, 4 key-value heads; vocabularies {VOCABULARIES}.",
        "",
        f"- command: `python benchmarks/claims/language_model.py --data TEXTS --steps {options.steps} "
        f"--tune {options.tune} --samples {options.samples} --seeds {options.seeds}`",
        f"- machine: {platform.machine()}, {options.device}, torch {torch.__version__}; {seconds:.0f} s",
        f"- commit: {commit or 'not known'}; date: {time.strftime('%Y-%m-%d')}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
