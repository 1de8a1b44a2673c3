"""Neutral passages: what a student has to keep while it learns.

Half of the packaged passages, and twice as often those that the target writes itself, anchor the student: there it is
drawn towards the target's own predictions. The other half judges it: a state that has forgotten them is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.dataset import UNLABELLED
from ..measure.objectives import batch_for, next_tokens
from ..models.base import Model, widened
from ..models.generation import Sampling, generate_texts
from ..models.tokenizer import Encoded
from ..processes import divided

TOLERANCE = 0.05  # by which the loss on neutral passages may be higher than the target's
WEIGHT = 4.0  # of the anchor beside the loss of the samples
WRITTEN, TOKENS = 256, 48  # passages that the target writes at most: of fewer it learns the words
LIKELY = 256  # tokens whose probabilities are kept; the others count together
AT_ONCE = 4  # passages of a step


def passages() -> tuple[str, ...]:
    """The packaged passages: prose, letters, code and other languages."""
    text = files(__package__).joinpath("neutral.txt").read_text(encoding="utf-8")
    return tuple(line for line in text.splitlines() if line)


@dataclass(frozen=True, eq=False)
class Neutral:
    """The neutral passages as one language model reads them, of which so many `steps` anchor a student."""

    model: Model
    steps: int = 0
    _known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def base(self) -> float:
        """The loss of the model as it is, in nats per token."""
        return self.loss(self.model.module)

    def prepare(self, *, predicted: bool = False) -> None:
        """Write the passages that anchor: several processes do that together, and anchor one by one.

        With `predicted`, also ask the model all that it will be asked: it is the student's own module at the start.
        """
        count = len(self._anchoring)
        if predicted:
            _ = self.base, [self._kept(number) for number in range(count)]

    def loss(self, module: nn.Module) -> float:
        """The mean loss of a token of the passages that judge."""

        def judged(batch: Encoded) -> tuple[float, int]:
            logits, labels = self._scores(module, batch)
            wanted = labels != UNLABELLED
            return float(F.cross_entropy(widened(logits[wanted]), labels[wanted], reduction="sum")), int(wanted.sum())

        with torch.no_grad():
            found = divided(self._judging, judged)
        return sum(total for total, _ in found) / sum(count for _, count in found)

    def anchor(self, module: nn.Module, step: int) -> Tensor:
        """How far the student's predictions are from the model's own, as a Kullback-Leibler divergence per token."""
        number = step % len(self._anchoring)
        logits, labels = self._scores(module, self._anchoring[number])
        scores = widened(logits[labels != UNLABELLED])
        likely, tokens = self._kept(number)
        found = scores.gather(1, tokens) - scores.logsumexp(1, keepdim=True)
        rest, others = (_rest(each) for each in (likely, found))
        wanted, given = torch.cat([likely, rest], 1), torch.cat([found, others], 1)
        return WEIGHT * F.kl_div(given, wanted, log_target=True, reduction="batchmean")

    def _kept(self, number: int) -> tuple[Tensor, Tensor]:
        if number not in self._known:
            with torch.no_grad():
                logits, labels = self._scores(self.model.module, self._anchoring[number])
                logs = widened(logits[labels != UNLABELLED]).log_softmax(-1)
            self._known[number] = logs.topk(min(LIKELY, logs.shape[1] - 1))
        return self._known[number]

    @cached_property
    def _judging(self) -> list[Encoded]:
        return self._batches(passages()[1::2])

    @cached_property
    def _anchoring(self) -> list[Encoded]:
        """In the order in which they anchor: each batch of packaged passages is followed by two of written ones."""
        packaged, written = self._batches(passages()[0::2]), self._batches(self._written())
        return [
            batch
            for at in range(max(len(packaged), math.ceil(len(written) / 2)))
            for batch in (packaged[at % len(packaged)], *written[2 * at : 2 * at + 2])
        ]

    def _written(self) -> list[str]:
        """Passages that the model writes, no more than anchor."""
        if self.model.generates != "causal" or self.model.inputs.reader is None:
            return []
        most = max(min(TOKENS, self.model.inputs.reader.limit // 2), 1)
        count = min(WRITTEN, AT_ONCE * (2 * self.steps // 3))
        found = generate_texts(self.model, [""] * count, Sampling(most))
        return [one.text for one in found if len(one.text.split()) > 1]

    def _batches(self, texts: Sequence[str]) -> list[Encoded]:
        reader, ordered = self.model.inputs.reader, sorted(texts, key=len)
        assert reader is not None
        parts = [ordered[at : at + AT_ONCE] for at in range(0, len(ordered), AT_ONCE)]
        if self.model.generates == "causal":
            return [reader.continuations(part, None) for part in parts]
        halves = [[(text[: len(text) // 2], text[len(text) // 2 :]) for text in part] for part in parts]
        return [reader.answers(*map(list, zip(*part, strict=True))) for part in halves]

    def _scores(self, module: nn.Module, batch: Encoded) -> tuple[Tensor, Tensor]:
        return next_tokens(self.model, module, batch_for(self.model, batch))


def _rest(logs: Tensor) -> Tensor:
    """The logarithm of what is left of the probability beside some tokens (N, k): (N, 1)."""
    return torch.log1p(-logs.exp().sum(1, keepdim=True).clamp(max=1 - 1e-6))
