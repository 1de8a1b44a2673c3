"""Tokenize texts: token ids, labels to predict, and the span of characters of each token.

Spans are measured in characters of the sample, so that tokens of two tokenizers can be compared. A blank counts little,
since tokenizers disagree about which token it belongs to. The special tokens before, between and after the texts get
spans of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, DataError, reraised

IGNORED = -100  # label of a token that is not predicted
BLANK = 0.01  # of a character
PADDING = -1.0  # begin and end of a padding token
Text = str | tuple[str, str]
Spans = Sequence[Tensor]  # for each stream of tokens (encoder, decoder): begin and end of each token, (N, T, 2)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A batch of texts: the module's inputs, the labels of its tokens if any, and the spans of each stream."""

    inputs: dict[str, Tensor]
    labels: Tensor | None
    spans: tuple[Tensor, ...]

    def part(self, start: int, stop: int) -> Encoded:
        """The samples from `start` to `stop`, one row each."""
        inputs = {name: rows[start:stop] for name, rows in self.inputs.items()}
        labels = self.labels[start:stop] if self.labels is not None else None
        return Encoded(inputs, labels, tuple(rows[start:stop] for rows in self.spans))


@dataclass(frozen=True, eq=False)
class Reader:
    """A tokenizer with the limits of its model."""

    tokenizer: Any
    longest: int
    names: tuple[str, ...] = ("input_ids", "attention_mask")
    vocabulary: int | None = None

    def same_tokens(self, other: Reader) -> bool:
        """True if both vocabularies give every token the same id."""
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab())

    def texts(self, texts: Sequence[Text]) -> Encoded:
        """Encode texts, or pairs of texts as one sequence, padded on the right and truncated to `longest`."""
        return self._encode(texts)[0]

    def pairs(self, pairs: Sequence[Text]) -> Encoded:
        """Encode pairs as two sequences each: rows 2i and 2i+1 belong to sample i."""
        if any(isinstance(pair, str) for pair in pairs):
            raise DataError("pairs of texts are needed: columns text and text_pair, or text1 and text2.")
        return self.texts([text for pair in pairs for text in pair])

    def continuations(self, texts: Sequence[Text], targets: Sequence[str] | None) -> Encoded:
        """Encode for a causal model, which predicts each whole text, or only the target appended to it."""
        starts = [_joined(text) for text in texts]
        _check_targets(starts, targets or ())
        ends = [""] * len(starts) if targets is None else targets
        whole = [
            f"{start} {end}" if end and start and not start[-1].isspace() else start + end
            for start, end in zip(starts, ends, strict=True)
        ]
        found, token_ends = self._encode(whole)
        labels = found.inputs["input_ids"].masked_fill(found.inputs["attention_mask"] == 0, IGNORED)
        if targets is not None:
            labels = labels.masked_fill(token_ends <= torch.tensor([[len(start)] for start in starts]), IGNORED)
            lost = next((text for text, row in zip(whole, labels, strict=True) if (row[1:] == IGNORED).all()), None)
            if lost is not None:
                raise DataError(
                    f"no token of the target of a sample is left to predict: its text is longer than {self.longest} "
                    f"tokens: {lost[:60]!r}. Shorten or drop it."
                )
        return replace(found, labels=labels)

    def answers(self, texts: Sequence[Text], targets: Sequence[str]) -> Encoded:
        """Encode for an encoder-decoder model, which predicts the target from the text."""
        _check_targets([_joined(text) for text in texts], targets)
        found, wanted = self.texts(texts), self.texts(targets)
        ids, mask, spans = wanted.inputs["input_ids"], wanted.inputs["attention_mask"], wanted.spans[0]
        labels = ids.masked_fill(mask == 0, IGNORED)
        if labels.shape[1] == found.inputs["input_ids"].shape[1]:  # streams must differ in length to be distinguished
            labels = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)
            spans = torch.nn.functional.pad(spans, (0, 0, 0, 1), value=PADDING)
        return Encoded(found.inputs, labels, (*found.spans, spans))

    def _encode(self, texts: Sequence[Text]) -> tuple[Encoded, Tensor]:
        """The encoded texts, and the end of each token in characters."""
        firsts = [text if isinstance(text, str) else text[0] for text in texts]
        seconds = None if all(isinstance(text, str) for text in texts) else [text[1] for text in texts]
        with reraised("the tokenizer cannot read the texts"):
            found = self.tokenizer(
                firsts,
                seconds,
                padding=True,
                padding_side="right",
                truncation=True,
                max_length=self.longest,
                return_attention_mask=True,
                return_offsets_mapping=True,
                return_tensors="pt",
            )
        bare = [row for row, count in enumerate(found["attention_mask"].sum(1).tolist()) if count == 0]
        if bare:
            raise DataError(f"the tokenizer finds no token in {texts[bare[0]]!r}, text {bare[0] + 1} of {len(texts)}.")
        highest = int(found["input_ids"].max())
        if self.vocabulary is not None and highest >= self.vocabulary:
            raise CheckpointError(
                f"the tokenizer gives token {highest}, but the model has embeddings for {self.vocabulary}: they do not "
                "belong together. Copy the tokenizer's files from the original model."
            )
        inputs = {name: found[name] for name in self.names if name in found}
        rows = [
            _spans(text, found["offset_mapping"][row].tolist(), found.sequence_ids(row), found["attention_mask"][row])
            for row, text in enumerate(texts)
        ]
        return Encoded(inputs, None, (torch.tensor(rows, dtype=torch.float64),)), found["offset_mapping"][..., 1]


def _check_targets(texts: Sequence[str], targets: Sequence[str]) -> None:
    for text, target in zip(texts, targets, strict=False):
        if not target.strip():
            raise DataError(f"the target of {text[:60]!r} is empty: there is nothing to predict. Fill or drop it.")


def _joined(text: Text) -> str:
    return text if isinstance(text, str) else "\n".join(text)


def _spans(text: Text, offsets: list[list[int]], parts: Sequence[int | None], mask: Tensor) -> list[list[float]]:
    """Begin and end of each token of one sample. Special tokens share one unit before, between or after the texts."""
    starts: list[float] = []
    measures: list[list[float]] = []
    gaps = [0.0]
    for piece in [text] if isinstance(text, str) else text:
        starts.append(gaps[-1] + 1.0)
        measures.append([0.0, *accumulate(BLANK if letter.isspace() else 1.0 for letter in piece)])
        gaps.append(starts[-1] + measures[-1][-1])
    spans = [[PADDING, PADDING] for _ in offsets]
    groups: dict[int, list[int]] = {}
    real = [index for index, one in enumerate(mask.tolist()) if one]
    bare = all(parts[index] is None for index in real)
    gap = len(gaps) - 1
    for index in reversed(real):
        part = parts[index]
        if part is not None:
            begin, end = offsets[index]
            spans[index] = [starts[part] + measures[part][begin], starts[part] + measures[part][end]]
            gap = part
        else:
            groups.setdefault(0 if bare and index == 0 else gap, []).insert(0, index)
    for gap, indices in groups.items():
        for place, index in enumerate(indices):
            spans[index] = [gaps[gap] + place / len(indices), gaps[gap] + (place + 1) / len(indices)]
    return spans
