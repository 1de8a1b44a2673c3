"""A distillation between two language models of the 8B class with a LoRA, with random weights made on the device.

    python benchmarks/speed/distill.py --shapes 8b --device cuda --lora 16 --steps 100 --out OUT

The teacher has Llama-3-8B's shapes and the student Qwen3-8B's, both with the teacher's vocabulary and one tokenizer, in
bfloat16. Peak memory is that of the device, both models included.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from llama import SHAPES, make
from record import now, peak_memory, publish, table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tokenizer_of(words: list[str], length: int) -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<unk>": 1, **{word: number + 2 for number, word in enumerate(words)}}
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=length, **names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--length", type=int, default=256, help="tokens per text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lora", type=int, metavar="R", help="a LoRA of this rank; all linear layers unless given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from tuneport import DistillConfig, TaskVector
    from tuneport.data.dataset import Dataset
    from tuneport.measure.objectives import OBJECTIVES
    from tuneport.measure.samples import DatasetSamples
    from tuneport.models.open import describe_module
    from tuneport.models.tokenizer import Reader
    from tuneport.training.distill import teach
    from tuneport.types import Sides

    device = torch.device(options.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    shapes = [{**shape, "vocab_size": SHAPES[options.shapes][0]["vocab_size"]} for shape in SHAPES[options.shapes]]
    words = [f"w{number}" for number in range(min(500, shapes[0]["vocab_size"] - 2))]
    reader = Reader(tokenizer_of(words, options.length), options.length)
    made = [
        describe_module(make(kind, shape, device, dtype)) for kind, shape in zip(("llama", "qwen"), shapes, strict=True)
    ]
    both = Sides(*(replace(model, inputs=replace(model.inputs, reader=reader)) for model in made))
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, options.length)) for _ in range(options.samples)]
    data = Dataset(inputs=texts, labels=None, classes=())
    samples = DatasetSamples(both, data, np.arange(len(data)), None, 4, OBJECTIVES["causal"])
    with peak_memory(device) as peak:
        started = now(device)
        config = DistillConfig(steps=options.steps, lora=options.lora)
        entry = teach(samples, TaskVector({}), TaskVector({}), config).entry
        seconds = now(device) - started
    head = ["trained", "steps", "seconds", "peak, GiB", "of that both models"]
    kind = f"LoRA of rank {options.lora}" if options.lora else "all linear layers"
    row = [kind, options.steps, seconds, (peak.before + peak.bytes) / 2**30, peak.before / 2**30]
    title = f"{options.shapes}: N = {options.samples} x {options.length} tokens, matching {entry['matching']}\n\n"
    about = {"options": {key: str(value) for key, value in vars(options).items()}, "seconds": seconds}
    about |= {"peak_bytes": peak.before + peak.bytes, "held_before_bytes": peak.before}
    publish(f"distill-{options.shapes}-{device.type}", options.out, title + table(head, [row]), about, device)


if __name__ == "__main__":
    main()
