"""Tasks as chats whose last answer is a label word, and the training of a LoRA on one.

python -m benchmarks.claims.language_tasks --model MODEL --data SHARED/data/text --task trec6 --out LORA
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tuneport.data.dataset import Dataset
from tuneport.measure.objectives import batch_for, choose_objective
from tuneport.models.base import Model
from tuneport.models.open import open_model

VALIDATION = 100
ALL_DATA: dict[str, Any] = {"steps": 300, "rate": 2e-4, "batch": 8}
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
    """Training, validation and test samples: chats with a label word."""
    instruction, words, file_name = INSTRUCTIONS[name]
    with gzip.open(folder / file_name, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    labels = np.array([int(row["label"]) for row in rows])
    chats = [[{"role": "user", "content": f"{instruction}\n\n{row['text']}"}] for row in rows]
    said = [[*chat, {"role": "assistant", "content": words[label]}] for chat, label in zip(chats, labels, strict=True)]
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
        module.save_pretrained(str(out))
    return module.merge_and_unload()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a transformers folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--task", default="trec6", choices=tuple(INSTRUCTIONS))
    parser.add_argument("--out", type=Path, required=True, help="the LoRA")
    parser.add_argument("--steps", type=int, default=ALL_DATA["steps"])
    parser.add_argument("--test", type=int, default=300, help="test samples, which are not trained on")
    options = parser.parse_args()
    data = read_task(options.task, options.data, options.test)["train"]
    train_lora(open_model(options.model), data, **{**ALL_DATA, "steps": options.steps}, out=options.out)


if __name__ == "__main__":
    main()
