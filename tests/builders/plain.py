"""A second opinion on scores: scripts of transformers, peft and numpy that share no code with tuneport.

A model is a folder, or an adapter's folder with that of its base. Samples run one by one, without padding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image

CLEAR = 2e-6  # the least lead of a best score of size 1 that rounding cannot turn: about 30 roundings of 6e-8
Rows = NDArray[np.float64]


@dataclass(frozen=True)
class Plain:
    """A model as transformers and peft load it, and the folder of its processor or tokenizer."""

    module: Any
    home: Path

    @cached_property
    def tokenizer(self) -> Any:
        return transformers.AutoTokenizer.from_pretrained(self.home)

    @property
    def classes(self) -> list[str]:
        names: Mapping[int, str] = self.module.config.id2label
        return [names[number] for number in range(len(names))]


def load(kind: str, folder: Path, base: Path | None = None, **more: Any) -> Plain:
    """Load a model, or a base with an adapter; `more` are settings of the base's configuration."""
    found = getattr(transformers, kind).from_pretrained(base or folder, dtype=torch.float32, **more)
    if base is not None:
        import peft

        found = peft.PeftModel.from_pretrained(found, folder)
    return Plain(found.eval(), base or folder)


def read_rows(path: Path, split: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["split"] == split]


def _each(model: Plain, inputs: Iterable[Mapping[str, Any]], output: str) -> list[Rows]:
    with torch.no_grad():
        return [model.module(**each)[output][0].double().numpy() for each in inputs]


# --- inputs


def pixels_of(model: Plain, images: Sequence[Any]) -> list[Mapping[str, Any]]:
    processor = transformers.AutoImageProcessor.from_pretrained(model.home)
    return [processor(Image.fromarray(image), return_tensors="pt") for image in images]


def tokens_of(model: Plain, texts: Sequence[Any]) -> list[Mapping[str, Any]]:
    options = {"truncation": True, "return_tensors": "pt"}
    return [model.tokenizer(*([text] if isinstance(text, str) else text), **options) for text in texts]


# --- classes


def accuracy(scores: Rows, classes: Sequence[str], labels: Sequence[str]) -> float:
    """Percent of samples whose best score (N, classes) is that of their label, by name."""
    order = np.sort(scores, axis=1)
    assert (order[:, -1] - order[:, -2]).min() > CLEAR * np.abs(scores).max(), "a tie: rounding decides"
    return 100.0 * float(np.mean(np.array(classes)[scores.argmax(1)] == np.array(labels)))


def logits(model: Plain, inputs: Iterable[Mapping[str, Any]]) -> Rows:
    return np.stack(_each(model, inputs, "logits"))


def cosines(features: Rows, others: Rows) -> Rows:
    """The cosine of each row with each of the others."""
    one, two = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (features, others))
    return one @ two.T


# --- texts that a model writes


@dataclass(frozen=True)
class Losses:
    """Of one text: nats of its tokens, of those that spell characters, their count, how many are right, characters."""

    nats: float
    own: float
    tokens: int
    right: int
    characters: int


def _losses(scores: Any, ids: Sequence[int], spells: Sequence[bool], characters: int) -> Losses:
    """Losses of tokens by the scores (T, vocabulary) that predict them."""
    shares = scores.double().log_softmax(-1).numpy()
    nats = -shares[np.arange(len(ids)), ids]
    right = int((shares.argmax(-1) == np.array(ids)).sum())
    return Losses(float(nats.sum()), float(nats[list(spells)].sum()), len(ids), right, characters)


def continued(model: Plain, text: str, start: str = "") -> Losses:
    """Of a causal model: the loss of a text, or of what follows its start after a blank."""
    tokenizer = model.tokenizer
    whole = f"{start} {text}" if start else text
    found = tokenizer(whole, return_offsets_mapping=True)
    ids, places = found["input_ids"], found["offset_mapping"]
    with torch.no_grad():
        scores = model.module(input_ids=torch.tensor([ids])).logits[0]
    wanted = [at for at in range(1, len(ids)) if not start or places[at][1] > len(start)]
    spells = [places[at][1] > places[at][0] for at in wanted]
    begin = min(places[at][0] for at, inside in zip(wanted, spells, strict=True) if inside)
    characters = len(whole[max(begin, len(start)) :].strip())
    return _losses(scores[[at - 1 for at in wanted]], [ids[at] for at in wanted], spells, characters)


def answered(model: Plain, text: str, start: str) -> Losses:
    """Of an encoder-decoder model: the loss of a text that it writes after it has read the start."""
    tokenizer = model.tokenizer
    read, ids = tokenizer(start, truncation=True, return_tensors="pt"), tokenizer(text)["input_ids"]
    with torch.no_grad():
        scores = model.module(**read, labels=torch.tensor([ids])).logits[0]
    spells = [number not in tokenizer.all_special_ids for number in ids]
    return _losses(scores, ids, spells, len(text.strip()))


def rates(losses: Sequence[Losses]) -> dict[str, float]:
    """What `evaluate --json` says of texts."""
    nats, own, tokens, right, characters = (sum(getattr(each, name) for each in losses) for name in vars(losses[0]))
    return {
        "accuracy": 100.0 * right / tokens,
        "perplexity": math.exp(nats / tokens),
        "tokens": tokens,
        "bits_per_character": own / math.log(2) / characters,
        "cut": 0,
        "samples": len(losses),
    }


def chosen(choices: Sequence[Sequence[Losses]], labels: Sequence[int]) -> dict[str, float]:
    """What `evaluate --json` says of questions with answers to choose from: the likeliest answer counts."""
    nats = [[each.nats for each in answers] for answers in choices]
    assert min(np.diff(np.sort(each)[:2])[0] for each in nats) > CLEAR * np.max(list(map(max, nats))), (
        "a tie: rounding decides"
    )
    right = [int(np.argmin(each)) == label for each, label in zip(nats, labels, strict=True)]
    found = rates([answers[label] for answers, label in zip(choices, labels, strict=True)])
    return {**found, "accuracy": 100.0 * float(np.mean(right))}


# --- sentences


def sentences(model: Plain, texts: Sequence[Any]) -> Rows:
    """The mean of the last states of each text."""
    return np.stack([states.mean(0) for states in _each(model, tokens_of(model, texts), "last_hidden_state")])


def fidelity(features: Rows, reference: Rows) -> float:
    """The correlation of the cosines of all pairs with those of a reference."""
    pairs = np.triu_indices(len(features), 1)
    return float(np.corrcoef(cosines(features, features)[pairs], cosines(reference, reference)[pairs])[0, 1])
