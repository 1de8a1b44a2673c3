"""The synthetic route of an upgrade between two language models of the 8B class, stage by stage, beside the floor.

    python benchmarks/speed/upgrade.py --shapes 8b --device cuda --out OUT
    python benchmarks/speed/upgrade.py --shapes tiny --texts 32 --steps 10

The teacher has Llama-3-8B's shapes and the student Qwen3-8B's, with random weights made on the device and a tokenizer
of words each, in bfloat16 on a GPU. The student writes so many texts, each after eight others; the teacher answers
them, and says with and without a fine-tune how likely its answers are; the student learns them with a LoRA, in as many
steps as the rule gives. Texts and answers have fixed lengths, since random weights end no line.

The floor counts the FLOP of the passes at the speed of one large product on this device, and for each token that is
written at least one read of all weights at the speed of a copy. `tiny` is a trial for the CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from distill import tokenizer_of
from llama import SHAPES, make
from record import now, peak_memory, publish, table
from torch import nn

SHARP = 6.0  # times the random scores, which then are about as far apart as those of a trained model
SEEDS = 8  # texts before the one that is written


def rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP of a large product and bytes read by a copy, in a second."""
    size = 8192 if device.type == "cuda" else 512
    X = torch.randn(size, size, device=device, dtype=dtype)
    Y = torch.empty_like(X.repeat(8, 1))
    spent = {}
    for name, work in {"product": lambda: X @ X, "copy": Y.clone}.items():
        work()
        times = []
        for _ in range(5):
            begun = now(device)
            work()
            times.append(now(device) - begun)
        spent[name] = max(min(times), 1e-9)
    return 2 * size**3 / spent["product"], 2 * Y.numel() * Y.element_size() / spent["copy"]


def body_of(module: nn.Module) -> int:
    """The weights that every token passes: all but the embedding."""
    return sum(weight.numel() for name, weight in module.named_parameters() if "embed_tokens" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--length", type=int, default=32, help="tokens of a text")
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--steps", type=int, help="of the training; those of the rule unless given")
    parser.add_argument("--lora", type=int, default=16, metavar="R", help="the rank of the LoRA")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from tuneport import DistillConfig, TaskVector
    from tuneport.data.dataset import Dataset
    from tuneport.measure.accuracy import answer_likelihoods
    from tuneport.models.generation import Sampling, generate_texts
    from tuneport.models.open import describe_module
    from tuneport.models.tokenizer import Reader
    from tuneport.pipeline.lessons import samples_of
    from tuneport.training.distill import teach
    from tuneport.types import Sides

    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    made = []
    for kind, shape in zip(("llama", "qwen"), SHAPES[options.shapes], strict=True):
        words = [f"w{number}" for number in range(shape["vocab_size"] - 2)]
        reader = Reader(tokenizer_of(words, 2048), 2048)
        model = describe_module(make(kind, shape, device, dtype))
        with torch.no_grad():
            model.module.get_output_embeddings().weight.mul_(SHARP)
        made.append(replace(model, inputs=replace(model.inputs, reader=reader)))
    source, target = made
    random = np.random.default_rng(0)
    flop, copy = rates(device, dtype)
    seconds: dict[str, float] = {}
    floor: dict[str, float] = {}
    peaks: dict[str, float] = {}

    def stage(name: str, work, least: float):
        with peak_memory(device) as peak:
            begun = now(device)
            found = work()
            seconds[name], floor[name] = now(device) - begun, least
        peaks[name] = (peak.before + peak.bytes) / 2**30
        print(f"{name}: {seconds[name]:.1f} s, floor {least:.1f}, peak {peaks[name]:.1f} GiB", flush=True)
        return found

    def written(model: nn.Module, prompt: int, new: int) -> float:
        """The floor of writing: prompts are read at the speed of products, new tokens at that of either."""
        size, count = body_of(model), options.texts
        each = max(2 * size * count * new / flop, -(-count // 256) * new * size * dtype.itemsize / copy)
        return 2 * size * count * prompt / flop + each

    def some(count: int) -> str:
        return " ".join(words[place] for place in random.integers(len(words), size=count))

    prompts = ["\n".join(some(options.length - 4) for _ in range(SEEDS)) for _ in range(options.texts)]
    sampling = Sampling(options.length, top_p=0.95, stops=("\n",))
    texts = stage(
        "write",
        lambda: generate_texts(target, prompts, sampling),
        written(target.module, SEEDS * (options.length - 4), options.length),
    )
    asked = [one.text for one in texts]
    known = [f"w{number}" for number in range(SHAPES[options.shapes][0]["vocab_size"] - 2)]
    asked = [text if text.strip() else known[0] for text in asked]
    given = stage(
        "answer",
        lambda: generate_texts(source, asked, Sampling(options.answer, temperature=0.0)),
        written(source.module, options.length, options.answer),
    )
    answers = [one.text.strip() or known[0] for one in given]
    data = Dataset(asked, None, (), targets=answers, answers="teacher")
    tokens = options.texts * (options.length + options.answer)
    stage(
        "judge",
        lambda: [answer_likelihoods(source, data) for _ in range(2)],
        2 * 2 * body_of(source.module) * tokens / flop,
    )
    config = DistillConfig(steps=options.steps, lora=options.lora)
    vector = TaskVector({})
    entry: dict = {}
    samples = samples_of(Sides(source, target), data, None)

    def learn() -> None:
        entry.update(teach(samples, vector, vector, config).entry)

    stage("train", learn, 0.0)
    taught = entry["steps"] * entry["batch_size"] * (options.length + options.answer)
    floor["train"] = 4 * body_of(target.module) * taught / flop
    rows = [[name, seconds[name], floor[name], seconds[name] / max(floor[name], 1e-9), peaks[name]] for name in seconds]
    total, least = sum(seconds.values()), sum(floor.values())
    rows.append(["all", total, least, total / least, max(peaks.values())])
    title = (
        f"{options.shapes}: {options.texts} texts of {options.length} tokens after {SEEDS} others, answers of "
        f"{options.answer}, {entry['steps']} steps of {entry['batch_size']}, matching {entry['matching']}. One product "
        f"runs at {flop / 1e12:.0f} TFLOP/s, a copy at {copy / 1e12:.2f} TB/s.\n\n"
    )
    head = ["stage", "seconds", "floor", "times the floor", "peak, GiB"]
    kept = {"options": {key: str(value) for key, value in vars(options).items()}, "rows": rows, "steps": entry["steps"]}
    publish(f"upgrade-{options.shapes}-{device.type}", options.out, title + table(head, rows), kept, device)


if __name__ == "__main__":
    main()
