"""Let a model write texts after prompts, in batches of similar length, each with the likelihood of what it wrote.

Every prompt has a stream of chance of its own, seeded by its tokens, and batches are made of all prompts in one fixed
order. So the texts depend neither on the order of the prompts nor on the number of processes that divide the batches.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import CaptureError, DataError, TuneportError, reraised
from ..processes import divided
from ..types import Chat, Progress, ignore
from .base import Model
from .chat import apply_template, prompt_text
from .tokenizer import Reader

Prompt = str | Chat
ROWS = {"cpu": 32}  # of a batch, by device
MOST_ROWS = 256
BITS = 31  # of a probability and of a chance: their product is exact in 64 bits
HEAD, GROWTH = 1024, 16  # likely tokens that are sorted first, and how many times as many where they are too few


@dataclass(frozen=True)
class Sampling:
    """How texts are written."""

    max_new_tokens: int = 64  # the most of a text
    temperature: float = 1.0  # of the scores; 0 takes the likeliest token
    top_p: float = 1.0  # the likeliest tokens that have this probability together are drawn from
    stops: tuple[str, ...] = ()  # strings that end a text, such as a line break; the end of the turn always does
    seed: int = 0  # of the draws


@dataclass(frozen=True)
class Written:
    """A text that a model wrote, without its prompt.

    `log_likelihood` is the mean over its tokens, by the model itself at temperature 1; None if nobody says. `finished`
    is False for a text that was cut at the most tokens.
    """

    text: str
    log_likelihood: float | None = None
    finished: bool = True


def generate_texts(
    model: Model,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    batch_size: int | None = None,
    advance: Progress = ignore,
) -> list[Written]:
    """Write one text after each prompt, in the order of the prompts. A prompt given twice gets two texts.

    Several processes divide the batches, and write what one would write. Without a `batch_size`, one fits the device.
    """
    if model.generation is None:
        raise TuneportError(f"{model.name} does not write texts; give a causal or an encoder-decoder model.")
    reader = model.reader
    model.require_in_memory("writing texts", "raise it, or give a smaller model")
    rows = _encode(model, prompts, sampling.max_new_tokens)
    seen: Counter[tuple[int, ...]] = Counter()
    chances = []
    for row in rows:
        chances.append(_stream(sampling, row, seen[tuple(row)]))
        seen[tuple(row)] += 1
    order = sorted(range(len(rows)), key=lambda index: (len(rows[index]), rows[index], index))
    size = batch_size or ROWS.get(model.device.type, MOST_ROWS)
    batches = [order[at : at + size] for at in range(0, len(order), size)]
    ends = _ends(reader)

    def write(batch: list[int]) -> list[Written]:
        texts = _write(model, [rows[index] for index in batch], [chances[index] for index in batch], sampling, ends)
        advance(len(batch))
        return texts

    texts = dict(zip(order, chain(*divided(batches, write)), strict=True))
    return [texts[index] for index in range(len(prompts))]


def _encode(model: Model, prompts: Sequence[Prompt], new: int) -> list[list[int]]:
    """The tokens of each prompt, without padding; a decoder's end with the prompt, not with the end of a text."""
    reader = model.reader
    causal = model.generates == "causal"
    rows: list[list[int]] = []
    with reraised("the tokenizer cannot read a prompt", DataError):
        for prompt in prompts:
            special = isinstance(prompt, str) or not reader.tokenizer.chat_template
            text = prompt if isinstance(prompt, str) else prompt_text(reader.tokenizer, prompt)
            row = list(reader.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
            while causal and special and row and row[-1] in reader.ends:
                row.pop()
            first = (reader.tokenizer.bos_token_id, reader.tokenizer.eos_token_id, *sorted(reader.ends), 0)
            rows.append(row or [int(token) for token in first if token is not None][:1])
    longest = max(map(len, rows), default=0)
    if longest > reader.limit - new * causal:
        most = f"{model.name} reads at most {reader.limit}" + causal * f" with {new} new ones"
        raise DataError(f"a prompt has {longest} tokens, and {most}. Shorten it.")
    return rows


def _ends(reader: Reader) -> frozenset[int]:
    """The tokens that end a text: those of the configuration, and the one that ends a turn of the chat template."""
    tokenizer = reader.tokenizer
    if not tokenizer.chat_template:
        return reader.ends
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    close = apply_template(tokenizer, turns).rpartition("answer")[2]
    tokens = list(tokenizer(close, add_special_tokens=False)["input_ids"])[:1]
    marks = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return reader.ends | (marks & set(tokens))


def _stream(sampling: Sampling, row: Sequence[int], number: int) -> Tensor:
    """The chances (T,) of a prompt's text: whole numbers below 2^BITS, the same wherever the prompt stands."""
    digest = hashlib.sha256(f"{sampling.seed} {number} {row}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randint(2**BITS, (sampling.max_new_tokens,), generator=generator)


def _write(
    model: Model, rows: Sequence[list[int]], chances: Sequence[Tensor], sampling: Sampling, ends: frozenset[int]
) -> list[Written]:
    """The texts of one batch, padded on the left."""
    reader, device = model.reader, model.device
    assert model.generation is not None
    padding = int(reader.tokenizer.pad_token_id or 0)
    width = max(map(len, rows))
    ids = torch.tensor([[padding] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    writer = _Writer(sampling, torch.stack(list(chances)).to(device), ends, reader.tokenizer, padding)
    batch = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    with torch.no_grad():
        model.generation.generate(model.module, batch, sampling.max_new_tokens, writer.choose)
    means = (writer.total / writer.counts).tolist()
    if not all(map(math.isfinite, means)):
        raise CaptureError(f"{model.name} gives scores that are not finite numbers; give its dtype as float32.")
    found = []
    tokens = torch.stack(writer.tokens, 1).tolist()
    for place, (count, finished) in enumerate(zip(writer.counts.tolist(), writer.done.tolist(), strict=True)):
        new = [token for token in tokens[place][:count] if token not in ends]
        text = _decoded(reader, rows[place] if model.generates == "causal" else [], new)
        cuts = [text.index(stop) for stop in sampling.stops if stop in text]
        found.append(Written(text[: min(cuts, default=None)], means[place], finished))
    return found


def _decoded(reader: Reader, before: list[int], new: list[int]) -> str:
    """The new tokens as text, with the blank between them and the prompt if there is one."""

    def decode(tokens: list[int]) -> str:
        return str(reader.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    start, whole = decode(before), decode(before + new)
    return whole[len(start) :] if whole.startswith(start) else decode(new)


class _Writer:
    """Choose the next tokens of a batch, step by step, and note them with their likelihood.

    The chances (N, T) are one number for each token, and `ends` are the tokens that end a text.
    """

    def __init__(self, sampling: Sampling, chances: Tensor, ends: frozenset[int], tokenizer: Any, padding: int) -> None:
        self.sampling, self.chances, self.tokenizer, self.padding = sampling, chances, tokenizer, padding
        self.ends = torch.tensor(sorted(ends), dtype=torch.long, device=chances.device)
        self.tokens: list[Tensor] = []
        self.total = torch.zeros(len(chances), device=chances.device)
        self.counts = torch.zeros(len(chances), dtype=torch.long, device=chances.device)
        self.done = torch.zeros(len(chances), dtype=torch.bool, device=chances.device)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Take the scores of the next tokens (N, V); return the chosen ones (N,) and which texts are finished (N,)."""
        logs = scores.float().log_softmax(-1)
        if self.sampling.temperature == 0:
            chosen = logs.argmax(-1)
        else:
            chance = self.chances[:, min(len(self.tokens), self.chances.shape[1] - 1)]
            chosen = draw((logs / self.sampling.temperature).softmax(-1), chance, self.sampling.top_p)
        self.total += logs.gather(1, chosen[:, None])[:, 0].masked_fill(self.done, 0.0)
        self.counts += ~self.done
        chosen = chosen.masked_fill(self.done, self.padding)
        self.tokens.append(chosen)
        self.done = self.done | torch.isin(chosen, self.ends) | self._stopped()
        return chosen, self.done

    def _stopped(self) -> Tensor:
        """Whether the last tokens of each text hold a string that ends it."""
        stops = self.sampling.stops
        if not stops:
            return self.done
        most = max(len(stop.encode()) for stop in stops)  # a token has one byte or more
        last = torch.stack(self.tokens[-most:], 1).tolist()
        texts = self.tokenizer.batch_decode(last, clean_up_tokenization_spaces=False)
        return torch.tensor([any(stop in text for stop in stops) for text in texts], device=self.done.device)


def draw(probabilities: Tensor, chance: Tensor, top_p: float = 1.0) -> Tensor:
    """Draw one of V by probabilities (N, V), from the likeliest that have `top_p` together; the chances decide.

    Sums of whole numbers have one value in whatever order a device adds them.

    >>> draw(torch.tensor([[0.5, 0.25, 0.25]] * 3), torch.tensor([0, 2**30, 2**31 - 1])).tolist()
    [0, 1, 2]
    """
    weights, order = (_whole(probabilities), None) if top_p == 1 else _nucleus(probabilities, top_p)
    sums = weights.cumsum(1)
    wanted = (chance * sums[:, -1]) >> BITS
    place = torch.searchsorted(sums, wanted[:, None], right=True).clamp(max=sums.shape[1] - 1)  # of NaN, the last
    found = place if order is None else order.gather(1, place)
    return found[:, 0]


def _nucleus(probabilities: Tensor, top_p: float, most: int = HEAD) -> tuple[Tensor, Tensor]:
    """The weights of the likeliest tokens that have `top_p` together, zero for others, and which tokens they are.

    To sort all is slow: first `most` are, and more only in the rows where these are too few.
    """
    bound, vocabulary = math.ceil(top_p * 2**BITS), probabilities.shape[1]
    likely, order = probabilities.topk(min(most, vocabulary))
    weights = _whole(likely)
    sums = weights.cumsum(1)
    weights, short = weights.masked_fill(sums - weights >= bound, 0), sums[:, -1] < bound
    if most < vocabulary and bool(short.any()):
        more = _nucleus(probabilities[short], top_p, most * GROWTH)
        weights, order = (pad(part, (0, more[0].shape[1] - most)) for part in (weights, order))
        weights[short], order[short] = more
    return weights, order


def _whole(probabilities: Tensor) -> Tensor:
    """Probabilities as whole numbers that sum to about 2^BITS."""
    return torch.round(probabilities * 2**BITS).long()
