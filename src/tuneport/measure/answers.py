"""What a teacher answers: the likeliest of the answers to choose from, or the text that it writes after a prompt.

A text ends where the teacher ends its turn. Texts that do not end are left out; if most do not, the teacher ends no
turn at all, and its answers are the first lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..data.answers import candidates_of, prompt_of, with_answers
from ..data.dataset import Dataset
from ..errors import DataError
from ..models.base import Model
from ..models.generation import Sampling, generate_texts
from ..models.tokenizer import joined_text
from ..types import Progress, ignore
from .accuracy import likelihood

MOST_TOKENS = 256  # of an answer, which takes no more than half of what a model reads
FIRST = 32  # prompts whose answers show how long answers are
WRITTEN = 0.5  # the least share of answers that end


def is_choice(data: Dataset) -> bool:
    """Whether the samples have answers to choose from: choices of their own, or words for their classes."""
    return data.choices is not None or data.labels is not None


def is_passages(data: Dataset) -> bool:
    """Whether the samples are texts that nobody asks for: they are their own answers."""
    return not is_choice(data) and not data.has_chats and data.targets is None and data.answers != "none"


def answered(teacher: Model, data: Dataset, progress: Progress = ignore) -> tuple[Dataset, NDArray[np.int64]]:
    """The samples that a language model answers, with labels or written texts, and their places; passages stay."""
    if is_passages(data):
        return data, np.arange(len(data))
    texts = written_answers(teacher, data, progress)
    if is_choice(data):
        choices = candidates_of(data)
        labels = np.array([list(each).index(text) for each, text in zip(choices, texts, strict=True)], dtype=np.int64)
        return replace(data, choices=choices, labels=labels), np.arange(len(data))
    kept = np.array([at for at, text in enumerate(texts) if text], dtype=np.int64)
    if not len(kept):
        raise DataError(
            f"{teacher.name} gives no answer that ends within {_most(teacher)} tokens to any of {len(data)} prompts."
        )
    given = with_answers(data.subset(kept), [texts[at] for at in kept])
    return replace(given, answers="teacher"), kept


def written_answers(teacher: Model, data: Dataset, progress: Progress = ignore) -> list[str]:
    """The teacher's answer to each sample, which is no passage; "" for an answer that does not end."""
    if is_choice(data):
        blank = replace(data, labels=np.zeros(len(data), dtype=np.int64))
        predicted = likelihood(teacher, blank, progress=progress).by_sample.predicted
        assert predicted is not None
        return [each[place] for each, place in zip(candidates_of(data), predicted.tolist(), strict=True)]
    prompts = [prompt_of(sample) if isinstance(sample, list) else joined_text(sample) for sample in data.inputs]
    found = generate_texts(teacher, prompts[:FIRST], Sampling(_most(teacher), temperature=0.0), advance=progress)
    most = _longest(teacher, [one.text for one in found if one.finished])
    found += generate_texts(teacher, prompts[FIRST:], Sampling(most, temperature=0.0), advance=progress)
    lines = np.mean([one.finished for one in found]) < WRITTEN
    texts = [one.text.strip().partition("\n")[0] if lines else one.text if one.finished else "" for one in found]
    return [text.strip() for text in texts]


def _longest(teacher: Model, answers: Sequence[str]) -> int:
    """The most tokens that further answers may have: four times those of the longest so far."""
    sizes = (len(teacher.reader.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in answers)
    return min(4 * (max(sizes, default=MOST_TOKENS) + 2), _most(teacher))


def _most(teacher: Model) -> int:
    return min(MOST_TOKENS, teacher.reader.limit // 2)
