"""A fine-tune that answers in words, the models around it, and samples without answers.

The old model says the sound of an animal after a plain prompt, and ends. A generator knows lists of animals by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from builders.chats import chat_tokenizer
from builders.texts import Size, gpt_tokenizer, make, write, write_rows
from builders.writers import taught_writer

TEMPLATE = "Animal: {text}\nSound:"
SOUNDS = {"cat": "meow", "dog": "woof", "cow": "moo", "hen": "cluck", "pig": "oink"}
KINDS = ("small", "tall", "stone", "long", "fresh", "great", "quiet", "dark", "cold", "blue", "clever", "honest")
TEXTS = tuple(f"{kind} {animal}" for kind in KINDS for animal in SOUNDS)
PROMPTS = tuple(TEMPLATE.replace("{text}", text) for text in TEXTS)
ANSWERS = tuple(SOUNDS[text.split()[1]] for text in TEXTS)
LISTS = tuple(  # that the generator knows
    "Examples:" + "".join(f"\n- {text}" for text in TEXTS[start : start + 8]) + "\n" for start in range(0, 40, 10)
)
SIZE = Size(width=32, depth=1, heads=4, groups=4, head_width=8, hidden=64)
BATCH = 20  # of a step
OTHER = Size(width=40, heads=5, groups=5, head_width=8, hidden=64, seed=1)


@dataclass(frozen=True)
class Animals:
    """Folders of the old base, the old model, a new base with another tokenizer and a generator; texts one per row."""

    base: Path
    tuned: Path
    target: Path
    generator: Path
    texts: Path


def animals(folder: Path) -> Animals:
    """Make the models and write them."""
    tokenizer = chat_tokenizer(None)
    module = make("llama", SIZE, vocab_size=len(tokenizer), max_position_embeddings=512)
    base = write(folder / "base", module, tokenizer)
    memorise(module, tokenizer, PROMPTS, ANSWERS)
    tuned = write(folder / "tuned", module, tokenizer)
    words = gpt_tokenizer(300)
    words.model_max_length = 512
    other = make("llama", OTHER, vocab_size=len(words), max_position_embeddings=512)
    target = write(folder / "target", other, words)
    taught_writer(folder / "generator", LISTS, steps=60)
    texts = write_rows(folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    return Animals(base, tuned, target, folder / "generator", texts)


def memorise(module: Any, tokenizer: Any, prompts: Sequence[str], answers: Sequence[str], steps: int = 60) -> None:
    """Train a decoder to write these answers, and to end."""
    rows = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    ends = [tokenizer(f" {answer}{tokenizer.eos_token}")["input_ids"] for answer in answers]
    order = [int(place) for turn in range(steps) for place in _order(len(rows), turn)]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for step in range(steps):
        drawn = [(rows[place], ends[place]) for place in order[step * BATCH : (step + 1) * BATCH]]
        width = max(len(row) + len(end) for row, end in drawn)
        pads = [width - len(row) - len(end) for row, end in drawn]
        ids = torch.tensor([[*row, *end, *[0] * pad] for (row, end), pad in zip(drawn, pads, strict=True)])
        labels = torch.tensor(
            [[*[-100] * len(row), *end, *[-100] * pad] for (row, end), pad in zip(drawn, pads, strict=True)]
        )
        optimizer.zero_grad()
        module(input_ids=ids, labels=labels).loss.backward()  # padding comes last: no token looks at it
        optimizer.step()


def _order(count: int, turn: int) -> list[int]:
    found: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(turn)).tolist()
    return found


def writes(folder: Path, *prompts: str, adapter: Path | None = None) -> list[tuple[str, bool]]:
    """What plain transformers (and peft) write after prompts, and whether each text ends by itself."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    if adapter is not None:
        from peft import PeftModel

        module = PeftModel.from_pretrained(module, adapter)
    end, found = tokenizer.eos_token_id, []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        ends = {"eos_token_id": end, "pad_token_id": end}
        new = module.generate(**given, **ends, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        found.append((tokenizer.decode(new, skip_special_tokens=True).strip(), int(new[-1]) == end))
    return found
