"""Tiny models that write texts: random ones, and ones that know a few lines by heart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from builders.chats import chat_tokenizer
from builders.texts import SMALL, VOCABULARY, Size, make, t5_tokenizer, write
from tuneport.models.base import Model
from tuneport.models.open import open_model

LONGEST = 512


def writer(folder: Path, family: str = "llama", template: str | None = None, size: Size = SMALL, **more: Any) -> Model:
    """A random model with its tokenizer, opened from its folder."""
    return open_model(write(folder, *_parts(family, template, size, more)))


def taught_writer(folder: Path, lines: Sequence[str], steps: int = 100, template: str | None = None) -> Model:
    """A decoder that knows these lines, each with a line break at its end."""
    size = Size(width=32, depth=1, heads=4, groups=4, head_width=8, hidden=64)
    module, tokenizer = _parts("llama", template, size, {})
    rows = [tokenizer(line)["input_ids"] for line in lines]
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill(mask == 0, -100)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        module(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    return open_model(write(folder, module, tokenizer))


def _parts(family: str, template: str | None, size: Size, more: dict[str, Any]) -> tuple[Any, Any]:
    if family.startswith("t5"):
        return make(family, size, vocab_size=VOCABULARY, **more), t5_tokenizer()
    tokenizer = chat_tokenizer(template, longest=LONGEST)
    tokenizer.pad_token = "<pad>"
    length = "n_positions" if family == "gpt2" else "max_position_embeddings"
    return make(family, size, **{"vocab_size": len(tokenizer), length: LONGEST}, **more), tokenizer
