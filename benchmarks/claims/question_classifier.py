"""Port a question classifier (TREC-6) from all-MiniLM-L6-v2 to gte-small and to MPNet, with 20 sentences.

The classifier is MiniLM, fine-tuned on the training questions with a frozen head: embeddings of a description of each
class. gte-small is the easy case, because it is related to MiniLM (same tokenizer, related initialisation). MPNet was
pre-trained independently, is twice as wide and deep, and uses other ids for the same word pieces. The script also
fine-tunes the target on the same 20 sentences, with a learning rate and steps chosen on validation data.

    python -m benchmarks.claims.question_classifier --encoders ENCODERS --data trec6.jsonl.gz --out OUT.md
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tuneport
from paper.finetune import finetune
from tuneport.data.dataset import Dataset
from tuneport.data.samplers import select
from tuneport.data.tasks import TASKS
from tuneport.measure.accuracy import zero_shot
from tuneport.models.base import Model
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model
from tuneport.training.loop import Schedule


def head_of(model: Model, data: Dataset) -> Head:
    return choose_head(model, None, data)


def tune(model: Model, head: Head, data: Dataset, schedule: Schedule) -> nn.Module:
    *_, (_, module) = finetune(model, head, data, schedule)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", type=Path, required=True, help="folder with minilm-l6, gte-small and mpnet")
    parser.add_argument("--data", type=Path, required=True, help="TREC-6: a table with split, text and label")
    parser.add_argument("--out", type=Path, default=Path("question-classifier.md"))
    parser.add_argument("--targets", default="gte-small,mpnet")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="steps of the source's fine-tuning")
    parser.add_argument("--test", type=int, default=500, help="maximum number of test questions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    targets = options.targets.split(",")
    missing = [name for name in ("minilm-l6", *targets) if not (options.encoders / name).is_dir()]
    if missing:
        raise SystemExit(f"not in {options.encoders}: {', '.join(missing)}. Fetch the encoders first.")
    train, validation, test = (TASKS["trec6"].read(options.data, split) for split in ("train", "validation", "test"))
    validation = validation.subset(np.random.default_rng(0).permutation(len(validation))[:100])
    test = test.subset(range(min(options.test, len(test))))
    source = open_model(options.encoders / "minilm-l6", device=options.device)
    head, rows = head_of(source, train), []
    tuned = tune(source, head, train, Schedule(options.steps, batch_size=32, learning_rate=5e-5, weight_decay=0.01))
    for words, module in (("as it is", source.module), ("fine-tuned", tuned)):
        rows.append(("minilm-l6", words, zero_shot(source.with_module(module), head, test).accuracy))
    for name in targets:
        target = open_model(options.encoders / name, device=options.device)
        head = head_of(target, train)

        def accuracy(module: nn.Module, data: Dataset = test) -> float:
            return zero_shot(target.with_module(module), head, data).accuracy  # noqa: B023

        rows.append((name, "as it is", accuracy(target.module)))
        few = train.subset(select(train, samples=options.samples, sampler="class_balanced", seed=99))
        tries = {
            (rate, steps): accuracy(module, validation)
            for rate in (2e-5, 1e-4)
            for steps, module in finetune(target, head, few, Schedule(30, learning_rate=rate), at=(10,))
        }
        rate, steps = max(tries, key=lambda key: tries[key])
        for seed in range(options.seeds):
            for method in ("naive", "theseus", "bico"):
                result = tuneport.transfer(
                    source,
                    tuned,
                    target,
                    train,
                    method=method,
                    samples=options.samples,
                    sampler="class_balanced",
                    seed=seed,
                )
                rows.append((name, method, accuracy(result.apply())))
                print(*rows[-1], flush=True)
            few = train.subset(select(train, samples=options.samples, sampler="class_balanced", seed=seed))
            schedule = Schedule(30, learning_rate=rate, seed=seed)
            modules = (module for step, module in finetune(target, head, few, schedule, at=(10,)) if step == steps)
            rows.append((name, f"few-shot fine-tuning ({steps} steps at {rate:g})", accuracy(next(modules))))
            print(*rows[-1], flush=True)
    options.out.write_text(table(rows, options))
    print(options.out.read_text())


def table(rows: list[tuple[str, str, float]], options: argparse.Namespace) -> str:
    lines = [
        f"Accuracy on {options.test} test questions; {options.samples} calibration sentences, {options.seeds} draws.",
        "",
    ]
    lines += ["| model | method | accuracy |", "|---|---|---|"]
    for name, method in dict.fromkeys(row[:2] for row in rows):
        values = [row[2] for row in rows if row[:2] == (name, method)]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        lines.append(f"| {name} | {method} | {statistics.mean(values):.1f}{spread} |")
    command = (
        f"python -m benchmarks.claims.question_classifier --samples {options.samples} --seeds {options.seeds} "
        f"--steps {options.steps} --test {options.test}"
    )
    lines += ["", f"`{command}`, {time.strftime('%Y-%m-%d')}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
