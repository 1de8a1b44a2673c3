"""Filters of written texts, in this order: form, near duplicates, the teacher's doubt, a probe.

A filter keeps no state, so that a run that is resumed drops the same texts. All that it compares with comes from the
seed samples; test samples are only compared with what was kept, at the end.
"""

from __future__ import annotations

import math
import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import TuneportError, is_text
from .prompts import Prompts

Floats = NDArray[np.floating]
Likelihood = Callable[[Sequence[str], Sequence[str]], Floats]  # of texts and their answers: mean over tokens, (N,)
Features = Callable[[Sequence[str]], Floats]  # of texts: (N, d)

WORD = re.compile(r"\w+")
RUN = 13  # words in a row that two texts do not share by chance
ECHO = 8  # words in a row that a text does not share with the instruction by chance
UNTOLD = (8, 400)  # characters of a text if there are no seed samples
UNTOLD_PASSAGE = (100, 20_000)
TAG = re.compile(r"</?\w+[^<>]*>|https?://")  # of a web page, not of a sample
FEW_WORDS = 0.4  # the least share of different words in a long text
BLOCK = 256  # texts that are compared with all others at a time
ALIKE = 0.7  # the Jaccard index of near duplicates
PIECE = 4  # characters
SHARE = 0.05  # of the seed samples that may be doubtful
CERTAIN = math.log(0.5)  # mean log-likelihood of an answer that is not doubtful
FEWEST = 10  # own samples that a probe can learn from
FOLDS = 5
FAR = 3.0  # standard deviations of own samples
STRENGTH = 1e-3  # a stronger probe tells few samples apart by chance
DUPLICATES, PROBE = "near duplicates", "probe"


@dataclass(frozen=True)
class Candidate:
    """A written text; its answer, once the teacher gave one."""

    text: str
    finished: bool = True
    answer: str | None = None


@dataclass(frozen=True)
class Filter:
    """Says why texts are dropped: `reasons` has None for each candidate that stays.

    It gets the candidates and the texts of earlier rounds.
    """

    name: str
    reasons: Callable[[Sequence[Candidate], Sequence[str]], list[str | None]]


def form(prompts: Prompts) -> Filter:
    """Whether a text looks like the seed samples: its length, its lines, its last mark, and no echo of the prompt.

    >>> looks = form(Prompts(("Who is she ?", "What time is it now ?")))
    >>> looks.reasons([Candidate("Where is it ?"), Candidate("Where is it"), Candidate("?")], [])
    [None, 'other ending', 'too short']
    """
    seeds = [seed.strip() for seed in prompts.seeds if seed.strip()]
    lengths, marks = [len(seed) for seed in seeds], {seed[-1] for seed in seeds}
    low, high = UNTOLD_PASSAGE if prompts.passages else UNTOLD
    low, high = (max(min(lengths) // 2, 1), max(lengths) * 2) if lengths else (low, high)
    markup = any(TAG.search(seed) for seed in seeds)
    punctuated = all(unicodedata.category(mark).startswith("P") for mark in marks)
    ends = marks if len(seeds) > 1 and punctuated and not prompts.passages else None
    told = _runs(map(words_of, prompts.headers), ECHO)

    def reason(candidate: Candidate) -> str | None:
        text, words = candidate.text.strip(), words_of(candidate.text)
        echo = any(text.lower().startswith(header.lower()) for header in prompts.headers)
        checks = {
            "unreadable": not is_text(text) or "\ufffd" in text,
            "unfinished": not prompts.passages and not candidate.finished,
            "too short": len(text) < low,
            "too long": len(text) > high,
            "several lines": prompts.one_line and "\n" in text,
            "markup": not markup and TAG.search(text) is not None,
            "echo of the prompt": echo or not told.isdisjoint(_runs([words], ECHO)),
            "repetition": len(words) >= 10 and len(set(words)) < FEW_WORDS * len(words),
            "other ending": ends is not None and text[-1:] not in ends,
        }
        return next((why for why, holds in checks.items() if holds), None)

    return Filter("form", lambda candidates, _: [reason(each) for each in candidates])


def near_duplicates(seeds: Sequence[str]) -> Filter:
    """Whether a text is nearly a seed sample or a text before it: the Jaccard index of their runs of four characters.

    All pairs are compared, by products of sparse matrices.
    """

    def reasons(candidates: Sequence[Candidate], kept: Sequence[str]) -> list[str | None]:
        from sklearn.feature_extraction.text import CountVectorizer

        texts = [*seeds, *kept, *(candidate.text for candidate in candidates)]
        if not texts:
            return []
        rows = CountVectorizer(analyzer=_pieces, dtype=np.int32).fit_transform(texts)  # (texts, runs of letters)
        sizes, alive = np.diff(rows.indptr), np.ones(len(texts), dtype=bool)
        found: list[str | None] = []
        for start in range(len(texts) - len(candidates), len(texts), BLOCK):
            stop = min(start + BLOCK, len(texts))
            shared = (rows[start:stop] @ rows[:stop].T).toarray()
            alike = shared >= ALIKE * (sizes[start:stop, None] + sizes[None, :stop] - shared)
            for place in range(start, stop):
                near = np.flatnonzero(alike[place - start, :place] & alive[:place])
                alive[place] = not len(near)
                found.append(None if alive[place] else "like a seed" if near[0] < len(seeds) else "like another")
        return found

    return Filter(DUPLICATES, reasons)


def _pieces(text: str) -> set[str]:
    """The different runs of characters of a text."""
    plain = re.sub(r"[\W_]+", " ", text.lower()).strip() or text
    return {plain[at : at + PIECE] for at in range(max(len(plain) - PIECE + 1, 1))}


def doubt(seeds: Sequence[str], answers: Sequence[str], tuned: Likelihood, base: Likelihood) -> Filter:
    """Whether the teacher doubts its answer, or its fine-tune makes the answer less likely.

    The bounds drop at most a share of the seed samples, but are never stricter than a mean likelihood of one half and
    no loss by the fine-tune: the teacher may know seed samples by heart. `base` measures without the fine-tune.
    """

    def measured(texts: Sequence[str], answers: Sequence[str]) -> tuple[Floats, Floats]:
        found = np.asarray(tuned(texts, answers), dtype=np.float64)
        return found, found - np.asarray(base(texts, answers), dtype=np.float64)

    least, least_gain = CERTAIN, 0.0
    if seeds:
        sure, gains = measured(seeds, answers)
        least, least_gain = min(float(np.quantile(sure, SHARE)), least), min(float(np.quantile(gains, SHARE)), 0.0)

    def reasons(candidates: Sequence[Candidate], _: Sequence[str]) -> list[str | None]:
        if not candidates:
            return []
        found = measured([each.text for each in candidates], [each.answer or "" for each in candidates])
        return [
            "doubtful" if not one >= least else "no gain by the fine-tune" if not gain >= least_gain else None
            for one, gain in zip(*found, strict=True)
        ]

    return Filter("the teacher's doubt", reasons)


def probe(own: Floats, features: Features, seed: int = 0) -> Filter:
    """Whether a linear probe tells a text from own samples at once, by features such as hidden states.

    The probe judges texts that it was not fitted on. With fewer than ten own samples it drops nothing.
    """

    def reasons(candidates: Sequence[Candidate], _: Sequence[str]) -> list[str | None]:
        if len(candidates) < FEWEST or len(own) < FEWEST:
            return [None] * len(candidates)
        written = np.asarray(features([candidate.text for candidate in candidates]))
        return ["told apart" if score > FAR else None for score in tell_apart(own, written, seed)]

    return Filter(PROBE, reasons)


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
    fitted = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH, class_weight="balanced", max_iter=1000))
    scores: NDArray[np.float64] = cross_val_predict(fitted, rows, labels, cv=folds, method="decision_function")
    center, spread = scores[: len(own)].mean(), scores[: len(own)].std(ddof=1)
    found: NDArray[np.float64] = (scores[len(own) :] - center) / max(spread, 1e-12)
    return found


def overlap_of(texts: Sequence[str], own: Sequence[str], test: Sequence[str] = ()) -> dict[str, float | None]:
    """The longest run of words shared with own samples, and the share of texts with a run of 13 of a test sample.

    Without test samples nobody knows that share.
    """
    known = _runs(map(words_of, test), RUN)
    hits = [not known.isdisjoint(_runs([words_of(text)], RUN)) for text in texts]
    shared = None if not test else sum(hits) / len(texts) if texts else 0.0
    return {"longest_run": longest_run(texts, own), "test_overlap": shared}


def longest_run(texts: Iterable[str], others: Iterable[str]) -> int:
    """The most words in a row that one of the texts shares with one of the others.

    >>> longest_run(["Who wrote the Iliad?"], ["who wrote the first opera", "the Iliad"])
    3
    """
    first, second = [words_of(text) for text in texts], [words_of(text) for text in others]
    most = min(max(map(len, first), default=0), max(map(len, second), default=0))

    def absent(length: int) -> bool:  # a shared run holds all shorter ones
        return _runs(first, length).isdisjoint(_runs(second, length))

    return bisect_left(range(1, most + 1), True, key=absent)


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, in lower case and without punctuation."""
    return tuple(WORD.findall(text.lower()))


def shares(answers: Sequence[str]) -> dict[str, float]:
    """The share of each answer, the most frequent first.

    >>> shares(["place", "number", "place", "place"])
    {'place': 0.75, 'number': 0.25}
    """
    counts = Counter(answers)
    return {answer: counts[answer] / len(answers) for answer in sorted(counts, key=lambda a: (-counts[a], a))}


def _runs(texts: Iterable[Sequence[str]], length: int) -> set[tuple[str, ...]]:
    return {tuple(words[at : at + length]) for words in texts for at in range(len(words) - length + 1)}
