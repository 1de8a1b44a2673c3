"""Samples of a task that a generator writes and the old model answers, from own samples, a sentence, or both.

What all prompts of a task have in common (a system message, an instruction before the text, a word behind it) is found
in the own samples or given as a template. The generator writes only what differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import LessonsConfig
from ..data.answers import candidates_of, prompt_of, with_answers
from ..data.dataset import Dataset
from ..errors import DataError, OptionError, TuneportError
from ..io.state import StateFile
from ..measure.accuracy import answer_likelihoods, perplexity
from ..measure.answers import answered, is_choice, is_passages, written_answers
from ..measure.fitted_heads import scores_by
from ..measure.objectives import batch_for
from ..models.base import Model
from ..models.heads import Head
from ..models.weights import finetuned
from ..task_vectors.vector import TaskVector
from ..types import Chat, Events, Sides
from .collect import Goal, collect
from .filters import Filter, doubt, overlap_of, probe
from .generators import Generator, LocalGenerator
from .prompts import Prompts

MOST_SEEDS = 100  # own samples that a generator sees
TEXT_TOKENS, MOST_TEXT_TOKENS, PASSAGE_TOKENS = 48, 256, 192  # of a written text
LETTERS = 3  # of a token, roughly and at least
TRIED = 16  # seed samples that choose between generators
FEWEST_PROBED = 10  # seed samples that a probe learns from


@dataclass(frozen=True, eq=False)
class OldModel:
    """The fine-tuned source: what it answers.

    Args:
        models: source and target.
        vector: the change that makes the source the old model.
        head: the source's, if it classifies.
    """

    models: Sides[Model]
    vector: TaskVector
    head: Head | None = None

    @property
    def writes(self) -> bool:
        """Whether it answers in words."""
        return self.models.source.generates is not None and self.head is None

    @property
    def reads(self) -> bool:
        """Whether it answers texts: in words, or as a classifier."""
        return self.writes or (self.head is not None and self.models.source.inputs.reader is not None)

    def tuned(self) -> AbstractContextManager[None]:
        """A context in which the source has its fine-tune."""
        return finetuned(self.models.source, self.vector)

    def answers(self, data: Dataset, events: Events) -> tuple[Dataset, NDArray[np.int64]]:
        """Samples with its answers, and the places of those that have one; a classifier is asked while it teaches."""
        if not self.writes or is_passages(data):
            return data, np.arange(len(data))
        with self.tuned():
            return answered(self.models.source, data, events.advance)

    def answer(self, data: Dataset) -> list[str]:
        """Its answer to each sample: what it writes, or the name of a class."""
        if self.head is None:
            with self.tuned():
                return written_answers(self.models.source, data)
        places = np.asarray(scores_by(self.models.source, self.vector, self.head, data)).argmax(-1)
        return [self.head.classes[place] for place in places]


@dataclass(frozen=True)
class Frame:
    """What all prompts have in common: messages before the last one, and what stands before and behind its text.

    >>> frame = Frame.of(Dataset(["Text: good\\nLabel:", "Text: bad\\nLabel:"], None, (), answers="none"))
    >>> frame.before, frame.behind, frame.text("Text: fine\\nLabel:")
    ('Text: ', '\\nLabel:', 'fine')
    """

    before: str = ""
    behind: str = ""
    messages: tuple[Mapping[str, Any], ...] | None = None

    @classmethod
    def of(cls, data: Dataset, template: str | None = None) -> Frame:
        """The frame of a template, or of samples."""
        if template is not None:
            before, _, behind = template.partition("{text}")
            return cls(before, behind)
        if not data.has_chats:
            return cls(*_common([_plain(sample) for sample in data.inputs])) if not is_passages(data) else cls()
        chats = [prompt_of(chat) for chat in data.inputs]
        contexts = [chat[:-1] for chat in chats]
        same = all(context == contexts[0] for context in contexts)
        return cls(*_common([chat[-1]["content"] for chat in chats]), tuple(contexts[0]) if same else ())

    def text(self, sample: Any) -> str:
        """What differs in a sample."""
        whole = prompt_of(sample)[-1]["content"] if isinstance(sample, list) else _plain(sample)
        return str(whole.removeprefix(self.before).removesuffix(self.behind))

    def sample(self, text: str) -> str | Chat:
        """The sample of a text."""
        whole = f"{self.before}{text}{self.behind}"
        if self.messages is None:
            return whole
        return [*(dict(message) for message in self.messages), {"role": "user", "content": whole}]


def _plain(sample: Any) -> str:
    if not isinstance(sample, str):
        raise DataError("samples of one text each can be written, not pairs of texts or images: leave out `synthetic`.")
    return sample


def _common(texts: Sequence[str]) -> tuple[str, str]:
    """What all texts begin with, up to a line break or a colon, and what they end with, from a line break on."""
    if len(texts) < 2:
        return "", ""
    begin = _prefix(texts)
    cut = max(begin.rfind("\n") + 1, begin.rfind(": ") + 2 if ": " in begin else 0)
    end = _prefix([text[cut:][::-1] for text in texts])[::-1]
    at = end.find("\n")
    return begin[:cut], end[at:] if at >= 0 else ""


def _prefix(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)  # all others lie between them
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(letter for letter, _ in same)


@dataclass(frozen=True, eq=False)
class WrittenSamples:
    """Written samples with the old model's answers, and what the record says of them, without a text."""

    data: Dataset
    texts: tuple[str, ...]
    record: Mapping[str, Any]


def write_samples(
    old: OldModel,
    generator: Generator,
    own: Dataset | None,
    config: LessonsConfig,
    *,
    test: Sequence[str] = (),
    state: StateFile | None = None,
    events: Events | None = None,
) -> WrittenSamples:
    """Let a generator write samples of a task, and the old model answer them; passages it writes itself.

    `test` are texts of a test split, which are compared with what was written, and nothing else. `state` keeps the
    state of the run, and gives back that of a killed one.

    Raises:
        DataError: what is known of the task cannot bring it.
    """
    model, describe, template = old.models.source, config.describe or "", config.template
    if not old.reads:
        raise OptionError("samples can be written for language models and for classifiers of texts alone.")
    passages = not describe if own is None else old.writes and template is None and is_passages(own)
    if passages:
        generator = LocalGenerator(model, old.tuned)
    frame = Frame() if passages else Frame.of(own or Dataset([], None, ()), template)
    seeds = [] if own is None else [frame.text(sample) for sample in own.inputs[:MOST_SEEDS]]
    choices = _choices(own) if old.head is None else tuple(old.head.classes)
    prompts = Prompts(tuple(seeds), describe, (), passages, seed=config.seed, choices=choices)

    def asked(texts: Sequence[str]) -> Dataset:
        samples = [frame.sample(text) for text in texts]
        if choices and old.writes:
            return Dataset(samples, None, (), choices=[list(choices)] * len(samples))
        return Dataset(samples, None, (), answers="none" if old.writes else "data")

    def likelihood(texts: Sequence[str], given: Sequence[str]) -> NDArray[np.floating]:
        return answer_likelihoods(model, with_answers(asked(texts), [one or " ." for one in given]))

    def tuned(texts: Sequence[str], given: Sequence[str]) -> NDArray[np.floating]:
        with old.tuned():
            return likelihood(texts, given)

    if seeds and not passages:
        prompts = replace(prompts, answers=tuple(old.answer(asked(seeds))))
    judges: list[Filter] = []
    if not passages and old.writes:
        known = [(seed, answer) for seed, answer in zip(seeds, prompts.answers, strict=True) if answer]
        judges.append(doubt([seed for seed, _ in known], [answer for _, answer in known], tuned, likelihood))
    if len(seeds) >= FEWEST_PROBED and model.architecture.layers and not passages:
        judges.append(probe(_features(model, seeds), lambda texts: _features(model, texts), config.seed))
    longest = max(map(len, seeds), default=0)
    most = min(max(TEXT_TOKENS, 2 * longest // LETTERS), MOST_TEXT_TOKENS)
    if passages:  # they need not end, and are no longer than the own ones
        most = min(longest // LETTERS, PASSAGE_TOKENS) or PASSAGE_TOKENS
    goal = Goal(config.synthetic or 0, max_new_tokens=most, seed=config.seed)
    answer = None if passages else lambda texts: old.answer(asked(texts))
    found = collect(generator, prompts, goal, answer=answer, judges=judges, state=state, events=events)
    data = Dataset(list(found.texts), None, ()) if passages else asked(found.texts)
    if not passages and old.writes and not choices:
        data = replace(with_answers(data, list(found.answers)), answers="teacher")
    name = generator.name if "://" in generator.name else Path(generator.name).name  # without folders; or an address
    record = {"generator": name, **found.record(), **overlap_of(found.texts, seeds, test)}
    if data.answers == "teacher":  # each is a text
        record["shares"] = {}
    return WrittenSamples(data, found.texts, record)


def _choices(own: Dataset | None) -> tuple[str, ...]:
    """The answers that all samples may have; none if they have none, or each its own."""
    if own is None or not is_choice(own) or not len(own):
        return ()
    each = [tuple(answers) for answers in candidates_of(own)]
    return each[0] if all(answers == each[0] for answers in each) else ()


def _features(model: Model, texts: Sequence[str]) -> NDArray[np.floating]:
    """The mean hidden state of each text: what the last layer reads (N, d)."""
    owner = model.module.get_submodule(model.architecture.layers[-1].weight.removesuffix(".weight"))
    rows: list[NDArray[np.floating]] = []

    def take(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        states = inputs[0]
        if states.ndim == 3:  # the head of a classifier reads one state of each text
            mask = batch["attention_mask"][..., None].to(states)
            states = (states * mask).sum(1) / mask.sum(1)
        rows.append(states.double().cpu().numpy())

    with owner.register_forward_pre_hook(take), torch.inference_mode():
        for start in range(0, len(texts), 64):
            batch = batch_for(model, model.reader.texts(list(texts[start : start + 64])))[0]
            model.module(**batch)
    return np.concatenate(rows)


def better_generator(first: Model, second: Model, own: Dataset | None, config: LessonsConfig) -> Model:
    """The model that finds seed samples likelier after others, per character; the first if there are few of them."""
    if own is None or len(own) < 4:
        return first
    frame = Frame.of(own, config.template)
    texts = [frame.text(sample) for sample in own.inputs[: 2 * TRIED]]
    shown, asked = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    prompt = Prompts(tuple(shown), config.describe or "").requests(0, 1)[0]
    data = Dataset([prompt] * len(asked), None, (), targets=asked)

    def surprise(model: Model) -> float:
        try:
            found = perplexity(model, data).bits_per_character
        except TuneportError:
            found = None
        return math.inf if found is None else found

    return second if surprise(second) < surprise(first) else first
