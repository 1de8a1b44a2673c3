"""Samples of a task that a generator writes and the teacher answers, from own samples, a sentence, or both.

What all prompts of a task have in common (a system message, an instruction before the text, a word behind it) is found
in the own samples or given as a template. The generator writes only what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.answers import candidates_of, prompt_of, with_answers
from ..data.dataset import Dataset
from ..errors import DataError, TuneportError
from ..measure.accuracy import answer_likelihoods, perplexity
from ..measure.answers import is_choice, is_passages, written_answers
from ..measure.objectives import batch_for
from ..models.base import Model
from ..types import Chat, Events
from .collect import Collected, Goal, collect
from .filters import Doubt, Filter, Form, NearDuplicates, Probe
from .generators import Generator, LocalGenerator
from .overlap import overlap_of
from .prompts import Prompts
from .state import TextState

MOST_SEEDS = 100  # own samples that a generator sees
TEXT_TOKENS, MOST_TEXT_TOKENS, PASSAGE_TOKENS = 48, 256, 192  # of a written text
LETTERS = 3  # of a token, roughly and at least
TRIED = 16  # seed samples that choose between generators


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
    rest = [text[cut:] for text in texts]
    end = _prefix([text[::-1] for text in rest])[::-1]
    at = end.find("\n")
    return begin[:cut], end[at:] if at >= 0 else ""


def _prefix(texts: Sequence[str]) -> str:
    """What all texts begin with."""
    first, last = min(texts), max(texts)  # all others lie between them
    pairs = zip(first, last, strict=False)
    return first[: next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(last)))]


@dataclass(frozen=True, eq=False)
class Teacher:
    """The old model."""

    model: Model  # its base
    tuned: Callable[[], AbstractContextManager[None]]  # gives a context in which it has its fine-tune
    names: Sequence[str] = ()  # the classes of a classifier
    classify: Any = None  # gives the number of the class of each text


@dataclass(frozen=True, eq=False)
class Task:
    """What is known of the samples to write."""

    own: Dataset | None = None  # own samples without answers; None if there are none
    describe: str = ""  # one sentence about them
    template: str | None = None  # the plain prompt of a text, with {text}
    count: int = 2000  # samples to write
    seed: int = 0  # of everything


@dataclass(frozen=True, eq=False)
class WrittenSamples:
    """Written samples with the teacher's answers, and what the record says of them."""

    data: Dataset
    texts: tuple[str, ...]
    collected: Collected
    overlap: Mapping[str, float | None]
    generator: str

    def record(self) -> dict[str, Any]:
        """Counts, and the share of each answer to choose from, without a text that was written."""
        free: dict[str, Any] = {"shares": {}} if self.data.answers == "teacher" else {}
        return {"generator": self.generator, **self.collected.record(), **self.overlap, **free}


def write_samples(
    teacher: Teacher,
    generator: Generator,
    task: Task,
    *,
    test: Sequence[str] = (),
    state: TextState | None = None,
    events: Events | None = None,
) -> WrittenSamples:
    """Let a generator write samples of a task, and the teacher answer them; passages the teacher writes itself.

    `test` are texts of a test split, which are compared with what was written, and nothing else. `state` keeps the
    state of the run, and gives back that of a killed one.

    Raises:
        DataError: what is known of the task cannot bring it.
    """
    own, events = task.own, events or Events()
    passages = own is not None and is_passages(own) and teacher.classify is None and task.template is None
    passages = passages or (own is None and not task.describe)
    if passages:
        generator = LocalGenerator(teacher.model, tuned=teacher.tuned)
    frame = Frame() if passages else Frame.of(own or Dataset([], None, ()), task.template)
    seeds = [] if own is None else [frame.text(sample) for sample in own.inputs[:MOST_SEEDS]]
    choices = _choices(own) if teacher.classify is None else tuple(teacher.names)
    prompts = Prompts(tuple(seeds), task.describe, (), passages, seed=task.seed, choices=choices)

    def asked(texts: Sequence[str]) -> Dataset:
        samples = [frame.sample(text) for text in texts]
        if choices and teacher.classify is None:
            return Dataset(samples, None, (), choices=[list(choices)] * len(samples))
        return Dataset(samples, None, (), answers="data" if teacher.classify is not None else "none")

    def answer(texts: Sequence[str]) -> list[str]:
        with teacher.tuned():
            if teacher.classify is not None:
                return [teacher.names[place] for place in teacher.classify(asked(texts))]
            return written_answers(teacher.model, asked(texts))

    if seeds and not passages:
        prompts = replace(prompts, answers=tuple(answer(seeds)))
    filters: list[Filter] = [Form.of(prompts), NearDuplicates(tuple(seeds))]
    judges: list[Filter] = []
    if not passages and teacher.classify is None:
        judges.append(_doubt(teacher, asked, seeds, prompts.answers))
    if len(seeds) >= 10 and teacher.model.architecture.layers and not passages:
        probed = _features(teacher.model, seeds)
        judges.append(Probe(probed, lambda texts: _features(teacher.model, texts), seed=task.seed))
    longest = max(map(len, seeds), default=0)
    most = min(max(TEXT_TOKENS, 2 * longest // LETTERS), MOST_TEXT_TOKENS)
    if passages:  # they need not end, and are no longer than the own ones
        most = min(longest // LETTERS, PASSAGE_TOKENS) or PASSAGE_TOKENS
    goal = Goal(task.count, max_new_tokens=most, seed=task.seed)
    found = collect(
        generator,
        prompts,
        goal,
        answer=None if passages else answer,
        filters=filters,
        judges=judges,
        state=state,
        events=events,
    )
    data = asked(found.texts) if not passages else Dataset(list(found.texts), None, ())
    if not passages and teacher.classify is None and not choices:
        data = replace(with_answers(data, list(found.answers or ())), answers="teacher")
    name = generator.name if "://" in generator.name else Path(generator.name).name  # without folders; or an address
    return WrittenSamples(data, found.texts, found, overlap_of(found.texts, seeds, test), name)


def _choices(own: Dataset | None) -> tuple[str, ...]:
    """The answers that all samples may have; none if they have none, or each its own."""
    if own is None or not is_choice(own) or not len(own):
        return ()
    each = [tuple(answers) for answers in candidates_of(own)]
    return each[0] if all(answers == each[0] for answers in each) else ()


def _doubt(teacher: Teacher, asked: Any, seeds: Sequence[str], answers: Sequence[str]) -> Doubt:
    """The filter of answers that the teacher doubts."""

    def likelihood(texts: Sequence[str], given: Sequence[str]) -> NDArray[np.floating]:
        return answer_likelihoods(teacher.model, with_answers(asked(texts), [one or " ." for one in given]))

    def tuned(texts: Sequence[str], given: Sequence[str]) -> NDArray[np.floating]:
        with teacher.tuned():
            return likelihood(texts, given)

    known = [(seed, answer) for seed, answer in zip(seeds, answers, strict=True) if answer]
    return Doubt.of([seed for seed, _ in known], [answer for _, answer in known], tuned, likelihood)


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


def better_generator(first: Model, second: Model, task: Task) -> Model:
    """The model that finds seed samples likelier after others, per character; the first if there are few of them."""
    own = task.own
    if own is None or len(own) < 4:
        return first
    frame = Frame.of(own, task.template)
    texts = [frame.text(sample) for sample in own.inputs[: 2 * TRIED]]
    shown, asked = texts[: len(texts) // 2], texts[len(texts) // 2 :]
    prompts = Prompts(tuple(shown), task.describe)
    data = Dataset([prompts.requests(0, 1)[0].prompt] * len(asked), None, (), targets=asked)
    scores = []
    for model in (first, second):
        try:
            scores.append(perplexity(model, data).bits_per_character)
        except TuneportError:
            scores.append(None)
    if scores[0] is None or scores[1] is None:
        return second if scores[1] is not None else first
    return second if scores[1] < scores[0] else first
