"""The scale of language models: small candidates, and answers to choose from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from builders.texts import gpt_tokenizer, make, write
from tuneport.data.dataset import Dataset
from tuneport.pipeline.transfer import transfer
from tuneport.types import ScaleRule

QUESTIONS = [f"the {name} of the {place}" for name in ("cat", "dog", "bird", "ship") for place in ("town", "river")]
LABELS = [0, 0, 0, 0, 1, 1, 1, 1]
WORDS = ("light", "stone")
OTHER = "bread"  # what the model says most of the time


def layers_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that a transfer moves."""
    return {name: parameter for name, parameter in module.named_parameters() if "proj" in name}


def train(module: Any, tokenizer: Any, shares: Mapping[str, float], steps: int, only: Any = None) -> None:
    """Teach texts by their shares; what is wrong after a text is not taught."""
    rows = [tokenizer(text)["input_ids"] for text in shares]
    ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    labels = torch.tensor([row[1:] + [-100] * (ids.shape[1] - len(row)) for row in rows])
    weights = torch.tensor(list(shares.values()))
    optimizer = torch.optim.Adam(list(module.parameters()) if only is None else only, 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = F.cross_entropy(module(input_ids=ids).logits[:, :-1].transpose(1, 2), labels, reduction="none")
        (weights * losses.sum(1)).sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return gpt_tokenizer()


@pytest.fixture(scope="module")
def knowing(tokenizer: Any) -> Any:
    """A model that knows the answers, and says another word nine times out of ten."""
    module = make("llama", vocab_size=len(tokenizer))
    shares = {f"{text} {WORDS[label]}": 0.1 for text, label in zip(QUESTIONS, LABELS, strict=True)}
    train(module, tokenizer, shares | {f"{text} {OTHER}": 0.9 for text in QUESTIONS}, 60)
    return module


def test_a_tenth_of_a_change_is_found(knowing: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The best model lies a tenth of the way from the base to the fine-tune."""
    torch.manual_seed(0)
    base, tuned = copy.deepcopy(knowing), copy.deepcopy(knowing)
    with torch.no_grad():
        for name, weight in layers_of(knowing).items():
            change = 2 * weight.std() * torch.randn_like(weight)
            layers_of(base)[name].sub_(0.1 * change)
            layers_of(tuned)[name].add_(0.9 * change)
    folders = [write(tmp_path / name, module, tokenizer) for name, module in (("base", base), ("tuned", tuned))]
    data = Dataset([f"{text} {OTHER}" for text in QUESTIONS] * 2, None, ())
    rules: tuple[ScaleRule, ...] = ("auto", "safe")
    auto, safe = (transfer(*folders, folders[0], data, method="naive", samples=16, scale=rule) for rule in rules)
    assert auto.scale == 0.1
    assert 0 < safe.scale <= 0.1
