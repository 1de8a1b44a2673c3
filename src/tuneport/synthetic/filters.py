"""Filters of written texts, in this order: form, near duplicates, the teacher's doubt, a probe.

A filter gives the reason why it drops a text, or None; it keeps no state, so that a run that is resumed drops the same
texts. All that it compares with comes from the seed samples, never from test samples.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import TuneportError, is_text
from .overlap import words_of
from .prompts import Prompts

Floats = NDArray[np.floating]
Reasons = list[str | None]
Likelihood = Callable[[Sequence[str], Sequence[str]], Floats]  # of texts and their answers: mean over tokens, (N,)
Features = Callable[[Sequence[str]], Floats]  # of texts: (N, d)


@dataclass(frozen=True)
class Candidate:
    """A written text; its answer, once the teacher gave one."""

    text: str
    finished: bool = True
    answer: str | None = None


class Filter(Protocol):
    """Says why texts are dropped."""

    @property
    def name(self) -> str: ...

    def reasons(self, candidates: Sequence[Candidate], kept: Sequence[str]) -> Reasons:
        """Why each candidate is dropped, or None; `kept` are the texts of earlier rounds."""


ECHO = 8  # words in a row that a text does not share with the instruction by chance
UNTOLD = (8, 400)  # characters of a text if there are no seed samples
UNTOLD_PASSAGE = (100, 20_000)
TAG = re.compile(r"</?\w+[^<>]*>|https?://")  # of a web page, not of a sample
FEW_WORDS = 0.4  # the least share of different words in a long text


@dataclass(frozen=True)
class Form:
    """Whether a text looks like the seed samples: its length, its lines, its last mark, and no echo of the prompt.

    >>> form = Form.of(Prompts(("Who is she ?", "What time is it now ?")))
    >>> form.reasons([Candidate("Where is it ?"), Candidate("Where is it"), Candidate("?")], [])
    [None, 'other ending', 'too short']
    """

    shortest: int
    longest: int
    one_line: bool
    finished: bool
    markup: bool
    endings: frozenset[str]
    headers: tuple[str, ...]
    name: str = "form"

    @classmethod
    def of(cls, prompts: Prompts) -> Form:
        """The form of the seed samples, with lengths from half to twice theirs."""
        seeds = [seed.strip() for seed in prompts.seeds if seed.strip()]
        lengths = [len(seed) for seed in seeds]
        low, high = UNTOLD_PASSAGE if prompts.passages else UNTOLD
        low, high = (min(lengths) // 2, max(lengths) * 2) if lengths else (low, high)
        marks = frozenset(seed[-1] for seed in seeds)
        punctuated = (
            len(seeds) > 1
            and not prompts.passages
            and all(unicodedata.category(mark).startswith("P") for mark in marks)
        )
        endings = marks if punctuated else frozenset()
        markup = any(TAG.search(seed) for seed in seeds)
        return cls(max(low, 1), high, prompts.one_line, not prompts.passages, markup, endings, prompts.headers)

    def reasons(self, candidates: Sequence[Candidate], kept: Sequence[str]) -> Reasons:
        """Why each text is unlike the seed samples."""
        del kept
        return [self._reason(candidate) for candidate in candidates]

    def _reason(self, candidate: Candidate) -> str | None:
        text, words = candidate.text.strip(), words_of(candidate.text)
        checks = {
            "unreadable": not is_text(text) or "\ufffd" in text,
            "unfinished": self.finished and not candidate.finished,
            "too short": len(text) < self.shortest,
            "too long": len(text) > self.longest,
            "several lines": self.one_line and "\n" in text,
            "markup": not self.markup and TAG.search(text) is not None,
            "echo of the prompt": self._echoes(text, words),
            "repetition": len(words) >= 10 and len(set(words)) < FEW_WORDS * len(words),
            "other ending": bool(self.endings) and text[-1:] not in self.endings,
        }
        return next((reason for reason, holds in checks.items() if holds), None)

    def _echoes(self, text: str, words: tuple[str, ...]) -> bool:
        if any(text.lower().startswith(header.lower()) for header in self.headers):
            return True
        runs = {words[at : at + ECHO] for at in range(len(words) - ECHO + 1)}
        told = [words_of(header) for header in self.headers] if runs else []
        return any(header[at : at + ECHO] in runs for header in told for at in range(len(header) - ECHO + 1))


BLOCK = 256  # texts that are compared with all others at a time


@dataclass(frozen=True)
class NearDuplicates:
    """Whether a text is nearly a seed sample or a text before it: the Jaccard index of their runs of four characters.

    All pairs are compared, by products of sparse matrices.
    """

    seeds: tuple[str, ...] = ()
    threshold: float = 0.7
    size: int = 4
    name: str = "near duplicates"

    def reasons(self, candidates: Sequence[Candidate], kept: Sequence[str]) -> Reasons:
        """Why each text is no new one."""
        from sklearn.feature_extraction.text import CountVectorizer

        texts = [*self.seeds, *kept, *(candidate.text for candidate in candidates)]
        first = len(texts) - len(candidates)
        if not texts:
            return []
        rows = CountVectorizer(analyzer=self._pieces, dtype=np.int32).fit_transform(texts)  # (texts, runs of letters)
        sizes = np.diff(rows.indptr)
        alive = np.ones(len(texts), dtype=bool)
        found: Reasons = []
        for start in range(first, len(texts), BLOCK):
            stop = min(start + BLOCK, len(texts))
            shared = (rows[start:stop] @ rows[:stop].T).toarray()
            alike = shared >= self.threshold * (sizes[start:stop, None] + sizes[None, :stop] - shared)
            for place in range(start, stop):
                near = np.flatnonzero(alike[place - start, :place] & alive[:place])
                alive[place] = not len(near)
                like_seed = len(near) and near[0] < len(self.seeds)
                found.append(None if alive[place] else "like a seed" if like_seed else "like another")
        return found

    def _pieces(self, text: str) -> set[str]:
        """The different runs of characters of a text."""
        plain = re.sub(r"[\W_]+", " ", text.lower()).strip() or text
        return {plain[at : at + self.size] for at in range(max(len(plain) - self.size + 1, 1))}


SHARE = 0.05  # of the seed samples that may be doubtful
CERTAIN = math.log(0.5)  # mean log-likelihood of an answer that is not doubtful


@dataclass(frozen=True, eq=False)
class Doubt:
    """Whether the teacher doubts its answer, or its fine-tune makes the answer less likely.

    The bounds are those of the seed samples, but never stricter than a mean likelihood of one half and no loss by the
    fine-tune: the teacher may know seed samples by heart.
    """

    tuned: Likelihood  # the likelihood of answers by the fine-tuned model
    base: Likelihood  # the same without the fine-tune
    least: float = CERTAIN  # the least mean log-likelihood
    least_gain: float = 0.0  # the least difference to the model without the fine-tune
    name: str = "the teacher's doubt"

    @classmethod
    def of(cls, seeds: Sequence[str], answers: Sequence[str], tuned: Likelihood, base: Likelihood) -> Doubt:
        """The doubt that drops at most a share of the seed samples."""
        if not seeds:
            return cls(tuned, base)
        found = np.asarray(tuned(seeds, answers), dtype=np.float64)
        least = min(float(np.quantile(found, SHARE)), CERTAIN)
        gain = found - np.asarray(base(seeds, answers), dtype=np.float64)
        return cls(tuned, base, least, min(float(np.quantile(gain, SHARE)), 0.0))

    def reasons(self, candidates: Sequence[Candidate], kept: Sequence[str]) -> Reasons:
        """Why the teacher's answer to each text is not worth learning."""
        del kept
        if not candidates:
            return []
        texts = [candidate.text for candidate in candidates]
        answers = [candidate.answer or "" for candidate in candidates]
        tuned = np.asarray(self.tuned(texts, answers), dtype=np.float64)
        base = np.asarray(self.base(texts, answers), dtype=np.float64)
        return [
            "doubtful" if not one >= self.least else "no gain by the fine-tune" if not gain >= self.least_gain else None
            for one, gain in zip(tuned, tuned - base, strict=True)
        ]


FEWEST = 10  # own samples that a probe can learn from
FOLDS = 5
FAR = 3.0  # standard deviations of own samples
STRENGTH = 1e-3  # a stronger probe tells few samples apart by chance


@dataclass(frozen=True, eq=False)
class Probe:
    """Whether a linear probe tells a text from own samples at once, by features such as hidden states.

    The probe judges texts that it was not fitted on. With fewer than ten own samples it drops nothing.
    """

    own: Floats
    features: Features
    far: float = FAR
    seed: int = 0
    name: str = "probe"

    def reasons(self, candidates: Sequence[Candidate], kept: Sequence[str]) -> Reasons:
        """Why each text is not taken for an own sample."""
        del kept
        if len(candidates) < FEWEST or len(self.own) < FEWEST:
            return [None] * len(candidates)
        written = np.asarray(self.features([candidate.text for candidate in candidates]))
        return ["told apart" if score > self.far else None for score in tell_apart(self.own, written, self.seed)]


def tell_apart(own: Floats, written: Floats, seed: int = 0) -> NDArray[np.float64]:
    """How far each written sample lies from the own ones, (N,), in their standard deviations, by a linear probe.

    Every sample is judged by a probe that was fitted without it. Own and written samples count the same in total.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rows = np.concatenate([own, written]).astype(np.float64)
    if not np.isfinite(rows).all():
        raise TuneportError("the features of some texts are not finite numbers; run the model in float32.")
    labels = np.repeat([0, 1], [len(own), len(written)])
    folds = StratifiedKFold(min(FOLDS, len(own), len(written)), shuffle=True, random_state=seed)
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH, class_weight="balanced", max_iter=1000))
    scores: NDArray[np.float64] = cross_val_predict(probe, rows, labels, cv=folds, method="decision_function")
    center, spread = scores[: len(own)].mean(), scores[: len(own)].std(ddof=1)
    found: NDArray[np.float64] = (scores[len(own) :] - center) / max(spread, 1e-12)
    return found
