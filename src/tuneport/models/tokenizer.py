"""Tokenize texts: token ids, labels to predict, and the span of characters of each token.

Spans are measured in characters of the sample, so that tokens of two tokenizers can be compared. A blank counts little,
since tokenizers disagree about which token it belongs to. The special tokens before, between and after the texts get
spans of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import CheckpointError, DataError, reraised
from ..types import Chat
from .chat import Place, Rendered, gap_between, marks_answers, prompt_text, render_chat

IGNORED = -100  # label of a token that is not predicted
BLANK = 0.01  # of a character
PADDING = -1.0  # begin and end of a padding token
Text = str | tuple[str, str]
Parts = Sequence[int | None]  # which piece of a sample each token belongs to; None for special tokens
MAX_LENGTH = 512  # tokens of a text, unless asked for more
Spans = Sequence[Tensor]  # for each stream of tokens (encoder, decoder): begin and end of each token, (N, T, 2)


@dataclass(frozen=True, eq=False)
class Encoded:
    """A batch of texts: the module's inputs, the labels of its tokens if any, and the spans of each stream.

    Of each sample, `cut` says whether its text was longer than the limit, and `characters` is the length of the text
    that its labels spell, without the marks of a chat template. `inside` (N, T) are the tokens of its text, or of the
    target that a decoder writes, without special tokens, the marks of a template and padding. With `counts`, a sample
    has as many rows: one for each answer that it may have.
    """

    inputs: dict[str, Tensor]
    labels: Tensor | None
    spans: tuple[Tensor, ...]
    cut: tuple[bool, ...] = ()
    characters: tuple[int, ...] = ()
    inside: Tensor | None = None
    counts: tuple[int, ...] = ()

    def part(self, start: int, stop: int) -> Encoded:
        """The samples from `start` to `stop`, one row each."""
        rows = slice(start, stop)
        inputs = {name: values[rows] for name, values in self.inputs.items()}
        labels = self.labels[rows] if self.labels is not None else None
        inside = self.inside[rows] if self.inside is not None else None
        spans = tuple(values[rows] for values in self.spans)
        return Encoded(inputs, labels, spans, self.cut[rows], self.characters[rows], inside)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Tokenized texts: the module's inputs, the texts as it read them, where each token is, and what was cut."""

    found: dict[str, Tensor]
    texts: Sequence[str]
    places: Sequence[Sequence[Place]]  # begin and end of each token
    parts: Sequence[Parts]
    cut: tuple[bool, ...]

    def labels(self, answers: Sequence[Sequence[Place]] | None) -> Tensor:
        """The tokens to predict: those that touch an answer, or all."""
        labels = self.found["input_ids"].masked_fill(self.found["attention_mask"] == 0, IGNORED)
        if answers is None:
            return labels
        inside, (begins, ends) = np.zeros(labels.shape, dtype=bool), np.moveaxis(np.array(self.places), -1, 0)
        for row, places in enumerate(answers):
            for begin, end in places:
                inside[row] |= (ends[row] > begin) & (begins[row] < end)
        return labels.masked_fill(~torch.from_numpy(inside), IGNORED)

    def characters(self, labels: Tensor, contents: Sequence[Sequence[Place]]) -> tuple[int, ...]:
        """The length of the contents that the labels spell, of each sample; the first token is never predicted."""
        counts, all_places, known = [], np.array(self.places), labels.numpy() != IGNORED
        for row, places in enumerate(contents):
            wanted, count = all_places[row, 1:][known[row, 1:]], 0
            for begin, end in places:
                inside = wanted[(wanted[:, 1] > begin) & (wanted[:, 0] < end)]
                if len(inside):
                    covered = self.texts[row][max(begin, int(inside[:, 0].min())) : min(end, int(inside[:, 1].max()))]
                    count += len(covered.strip())  # tokenizers disagree about the blanks around a text
            counts.append(count)
        return tuple(counts)


@dataclass(frozen=True, eq=False)
class Reader:
    """A tokenizer with the limits of its model; texts are cut at `max_length` tokens, or at the model's `limit`.

    `ends` are the tokens that end a text that the model writes.
    """

    tokenizer: Any
    limit: int
    names: tuple[str, ...] = ("input_ids", "attention_mask")
    vocabulary: int | None = None
    max_length: int = MAX_LENGTH
    ends: frozenset[int] = frozenset()

    @property
    def longest(self) -> int:
        return min(self.limit, self.max_length)

    def same_tokens(self, other: Reader) -> bool:
        """True if both vocabularies give every token the same id."""
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab())

    def encode(self, texts: Sequence[Text | Chat]) -> dict[str, Tensor]:
        """The module's inputs for texts, pairs of texts or chats."""
        chats = bool(texts) and isinstance(texts[0], list)
        return self.texts(texts).inputs if chats else self._tokenize(cast(Sequence[Text], texts)).found

    def texts(self, texts: Sequence[Text | Chat]) -> Encoded:
        """Encode texts, pairs of texts as one sequence, or chats, padded on the right and cut at `longest`."""
        if texts and isinstance(texts[0], list):
            return self._chats(cast(Sequence[Chat], texts))
        plain = cast(Sequence[Text], texts)
        return self._encoded(self._tokenize(plain), plain)

    def pairs(self, pairs: Sequence[Text]) -> Encoded:
        """Encode pairs as two sequences each: rows 2i and 2i+1 belong to sample i."""
        if any(isinstance(pair, str) for pair in pairs):
            raise DataError("pairs of texts are needed: columns text and text_pair, or text1 and text2.")
        return self.texts([text for pair in pairs for text in pair])

    def continuations(
        self, texts: Sequence[Text | Chat], targets: Sequence[str] | None, *, taught: bool = False, last: bool = False
    ) -> Encoded:
        """Encode for a causal model, which predicts each whole text, the target, or a chat's answers or its `last` one.

        If a teacher has `taught` the answers, it predicts the last answer of a chat alone, and after an answer the end
        of a text, as the teacher has written it.
        """
        if texts and isinstance(texts[0], list):
            chats = cast(Sequence[Chat], texts)
            if self.tokenizer.chat_template or not taught:
                return self._chats(chats, last=last or taught)
            texts = [prompt_text(self.tokenizer, chat[:-1]) for chat in chats]
            targets = [chat[-1]["content"] for chat in chats]
        whole = starts = [joined_text(cast(Text, text)) for text in texts]
        if targets is not None:
            _check_targets(starts, targets)
            whole = [text + gap_between(text, end, " ") + end for text, end in zip(starts, targets, strict=True)]
        mark = (self.tokenizer.eos_token or "") if taught else ""
        tokens = self._tokenize([text + mark for text in whole])
        begins = [0 if targets is None else len(text) for text in starts]
        answers = [[(begin, len(text + mark))] for begin, text in zip(begins, whole, strict=True)]
        labels = tokens.labels(None if targets is None else answers)
        if targets is not None:
            self._check_answers(whole, labels)
        parts = [
            [None if mark and begin >= len(text) else part for (begin, _), part in zip(*row, strict=True)]
            for text, *row in zip(whole, tokens.places, tokens.parts, strict=True)
        ]
        found = self._encoded(replace(tokens, parts=parts), whole)
        places = [[(begin, len(text))] for begin, text in zip(begins, whole, strict=True)]
        return replace(found, labels=labels, characters=tokens.characters(labels, places))

    def _chats(self, chats: Sequence[Chat], *, last: bool = False) -> Encoded:
        """Encode chats by the tokenizer's template; a causal model predicts what the assistant writes, or its `last`.

        A template with a generation block says itself what that is.
        """
        rendered = [render_chat(self.tokenizer, chat) for chat in chats]
        if last:
            rendered = [replace(chat, answers=chat.answers[-1:]) for chat in rendered]
        texts = [chat.text for chat in rendered]
        tokens = self._tokenize(texts, special=not self.tokenizer.chat_template)
        marked = marks_answers(self.tokenizer)
        labels = tokens.labels([chat.answers for chat in rendered] if last or not marked else None)
        if marked:
            options = {"return_dict": True, "return_assistant_tokens_mask": True}
            found = self.tokenizer.apply_chat_template(chats, truncation=True, max_length=self.longest, **options)
            for row, mask in enumerate(found["assistant_masks"]):
                labels[row, : len(mask)].masked_fill_(torch.tensor(mask) == 0, IGNORED)
        self._check_answers(texts, labels)
        inside = [_inside(offsets, chat) for offsets, chat in zip(tokens.places, rendered, strict=True)]
        written = replace(tokens, places=[places for places, _ in inside], parts=[parts for _, parts in inside])
        encoded = self._encoded(written, [chat.said for chat in rendered])
        characters = tokens.characters(labels, [chat.contents for chat in rendered])
        return replace(encoded, labels=labels, characters=characters)

    def _check_answers(self, texts: Sequence[str], labels: Tensor) -> None:
        empty = (labels[:, 1:] == IGNORED).all(1).tolist()
        if any(empty):
            raise DataError(
                f"no token of the target of a sample is left to predict: its text is longer than {self.longest} "
                f"tokens: {texts[empty.index(True)][:60]!r}. Raise `max_length`, or shorten or drop it."
            )

    def answers(self, texts: Sequence[Text], targets: Sequence[str]) -> Encoded:
        """Encode for an encoder-decoder model, which predicts the target from the text."""
        _check_targets([joined_text(text) for text in texts], targets)
        found, wanted = self.texts(texts), self.texts(targets)
        labels = wanted.inputs["input_ids"].masked_fill(wanted.inputs["attention_mask"] == 0, IGNORED)
        spans, inside = wanted.spans[0], wanted.inside
        assert inside is not None
        if labels.shape[1] == found.inputs["input_ids"].shape[1]:  # streams must differ in length to be distinguished
            labels, inside = pad(labels, (0, 1), value=IGNORED), pad(inside, (0, 1), value=False)
            spans = pad(spans, (0, 0, 0, 1), value=PADDING)
        characters = tuple(len(target.strip()) for target in targets)
        cut = tuple(map(max, found.cut, wanted.cut))
        return Encoded(found.inputs, labels, (*found.spans, spans), cut, characters, inside)

    def _tokenize(self, texts: Sequence[Text], special: bool = True) -> _Tokens:
        sides = [[text if isinstance(text, str) else text[0] for text in texts]]
        if not all(isinstance(text, str) for text in texts):
            sides.append([text[1] for text in texts])
        with reraised("the tokenizer cannot read the texts"):
            found = self.tokenizer(
                *sides,
                add_special_tokens=special,
                padding=True,
                padding_side="right",
                truncation=True,
                max_length=self.longest,
                return_attention_mask=True,
                return_offsets_mapping=True,
            )
            places = found.pop("offset_mapping")
            tensors = {name: torch.from_numpy(np.array(found[name])) for name in self.names if name in found}
        parts = [found.sequence_ids(row) for row in range(len(texts))]
        counts = tensors["attention_mask"].sum(1).tolist()
        if 0 in counts:
            bare = counts.index(0)
            raise DataError(f"the tokenizer finds no token in {texts[bare]!r}, text {bare + 1} of {len(texts)}.")
        highest = int(tensors["input_ids"].max())
        if self.vocabulary is not None and highest >= self.vocabulary:
            raise CheckpointError(
                f"the tokenizer gives token {highest}, but the model has embeddings for {self.vocabulary}: they do not "
                "belong together. Copy the tokenizer's files from the original model."
            )

        def lacks_end(row: int, number: int) -> bool:  # blanks at the end of a text may have no token
            ends = (end for (_, end), part in zip(places[row], parts[row], strict=True) if part == number)
            return max(ends, default=0) < len(sides[number][row].rstrip())

        cut = (
            count >= self.longest and any(lacks_end(row, number) for number in range(len(sides)))
            for row, count in enumerate(counts)
        )
        return _Tokens(tensors, sides[0], places, parts, tuple(cut))

    def _encoded(self, tokens: _Tokens, pieces: Sequence[str | tuple[str, ...]]) -> Encoded:
        """The inputs and spans of tokenized texts, by the pieces of each and the place of each token in a piece."""
        masks = tokens.found["attention_mask"].tolist()
        rows = [_spans(*row) for row in zip(pieces, tokens.places, tokens.parts, masks, strict=True)]
        text = torch.tensor([[part is not None for part in parts] for parts in tokens.parts])
        return Encoded(tokens.found, None, (torch.from_numpy(np.array(rows)),), tokens.cut, inside=text)


def _inside(offsets: Sequence[Place], chat: Rendered) -> tuple[Sequence[Place], Parts]:
    """Tokens of a rendered chat by the contents that they stand in; a token of the template stands in none."""
    found: list[Place] = []
    parts: list[int | None] = []
    for begin, end in offsets:
        inside = [part for part, (start, stop) in enumerate(chat.contents) if begin < stop and end > start]
        part = inside[0] if inside else None
        start, stop = (begin, end) if part is None else chat.contents[part]
        zero = begin if part is None else stop - len(chat.said[part])  # the end of a cut content stands in the text
        parts.append(part)
        found.append((max(begin, start) - zero, min(end, stop) - zero))
    return found, parts


def _check_targets(texts: Sequence[str], targets: Sequence[str]) -> None:
    for text, target in zip(texts, targets, strict=False):
        if not target.strip():
            raise DataError(f"the target of {text[:60]!r} is empty: there is nothing to predict. Fill or drop it.")


def joined_text(text: Text) -> str:
    """A text, or a pair of texts as two lines."""
    return text if isinstance(text, str) else "\n".join(text)


def _spans(
    text: str | tuple[str, ...], offsets: Sequence[Place], parts: Parts, mask: Sequence[int]
) -> list[list[float]]:
    """Begin and end of each token of one sample. Special tokens share one unit before, between or after the texts."""
    starts: list[float] = []
    measures: list[list[float]] = []
    gaps = [0.0]
    for piece in [text] if isinstance(text, str) else text:
        starts.append(gaps[-1] + 1.0)
        measures.append([0.0, *accumulate([BLANK if letter.isspace() else 1.0 for letter in piece])])
        gaps.append(starts[-1] + measures[-1][-1])
    spans = [[PADDING, PADDING] for _ in offsets]
    groups: dict[int, list[int]] = {}
    real = [index for index, one in enumerate(mask) if one]
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
