"""What is taught and what judges are apart, and where a student begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builders.texts import write_rows
from tuneport.config import DistillConfig, UpgradeConfig
from tuneport.data.answers import prompt_of
from tuneport.data.dataset import Dataset, as_prompts
from tuneport.errors import DataError
from tuneport.pipeline.lessons import HELD_OUT, divide, views_each, views_of
from tuneport.types import Events


def _answers(data: Dataset, _: Events) -> tuple[Dataset, Any]:
    return data, np.arange(len(data))


@pytest.mark.parametrize("count", [16, 80, 2000])
def test_samples_that_judge_are_not_taught(count: int) -> None:
    drawn = Dataset([f"text {place}" for place in range(count)], None, (), answers="none")
    old: Any = SimpleNamespace(writes=False, reads=False, answers=_answers)
    found = divide(old, None, drawn, UpgradeConfig.of(routes="distill"), None, Events())
    judging, taught = set(found.held_out.inputs), set(found.own.inputs)
    assert not judging & taught
    assert judging | taught == set(drawn.inputs)
    assert len(judging) == min(round(HELD_OUT * count), 400)
    assert found.of("distill").own is found.own
    assert list(found.raw_held_out.inputs) == list(found.held_out.inputs)


def _writer() -> Any:
    def answers(data: Dataset, _: Events) -> tuple[Dataset, Any]:
        kept = np.arange(1, len(data))  # the first one gets no answer
        texts = [str(len(str(data.inputs[place]))) for place in kept]
        return replace(data.subset(kept), targets=texts, answers="teacher"), kept

    return SimpleNamespace(writes=True, answers=answers)


FRAME = "Message: {text}\nIntent:"
LONG = [f"where is the card number {place} that I ordered two weeks ago" for place in range(100)]


def test_views_of_prompts_are_answered_by_the_old_model() -> None:
    own = as_prompts(Dataset(LONG, None, ()), FRAME)
    found = views_of(_writer(), own, DistillConfig(template=FRAME), Events())
    assert found is not None
    assert found.data.targets is not None
    assert found.views_of is not None
    assert 300 < len(found.data) == len(found.views_of) < 400  # four of each; one with all words is none
    for text, answer, place in zip(found.data.inputs, found.data.targets, found.views_of, strict=True):
        assert text.startswith("Message: ")
        assert text.endswith("\nIntent:")
        assert text not in own.inputs
        left = iter(own.inputs[place].split())
        assert all(word in left for word in text.split())  # in their order
        assert answer == str(len(text))


def test_views_of_questions_keep_their_choices() -> None:
    choices = [[f"{place} a", f"{place} b"] for place in range(100)]
    chats = [[{"role": "user", "content": text}] for text in LONG]
    own = Dataset(chats, None, (), choices=choices)
    found = views_of(_writer(), own, DistillConfig(), Events())
    assert found is not None
    assert found.data.choices is not None
    assert found.views_of is not None
    for chat, pair, place in zip(found.data.inputs, found.data.choices, found.views_of, strict=True):
        assert pair == choices[place]
        assert set(chat[0]["content"].split()) < set(LONG[place].split())


@pytest.mark.parametrize(
    "own",
    [
        Dataset(LONG * 21, None, (), answers="none"),
        Dataset(LONG, None, ()),
        Dataset([(text, text) for text in LONG], None, (), answers="none"),
        Dataset([f"{text}\n{text}" for text in LONG], None, (), answers="none"),
        Dataset(["word"] * 20, None, (), answers="none"),
    ],
    ids=["many", "passages", "pairs", "lines", "single words"],
)
def test_no_views(own: Dataset) -> None:
    assert views_of(_writer(), own, DistillConfig(), Events()) is None
    assert views_of(_writer(), own.subset(np.arange(1)), DistillConfig(labels="data"), Events()) is None
    assert views_of(SimpleNamespace(writes=False), own, DistillConfig(), Events()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "each"), [(0, 0), (1, 4), (100, 4), (101, 3), (200, 2), (400, 1), (2000, 1), (2001, 0)]
)
def test_many_prompts_have_fewer_views(count: int, each: int) -> None:
    assert views_each(count) == each
    assert count * each <= max(400, count)


@pytest.mark.parametrize("chats", [False, True])
def test_repeated_samples_do_not_judge_what_they_teach(chats: bool) -> None:
    """40 texts, four times each, two with another answer: ten judge, once each."""
    texts: list[Any] = [f"text {place % 40}" for place in range(160)]
    if chats:
        said = [f"answer {place // 80}" for place in range(160)]
        texts = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": one}]
            for text, one in zip(texts, said, strict=True)
        ]
    old: Any = SimpleNamespace(writes=False, reads=False, answers=_answers)
    given: Any = (UpgradeConfig.of(routes="distill"), None, Events())
    found = divide(old, None, Dataset(texts, None, ()), *given)
    judging, taught = ([str(prompt_of(one) if chats else one) for one in d.inputs] for d in (found.held_out, found.own))
    assert len(set(judging)) == len(judging) == 10
    assert len(taught) == 120
    assert not set(judging) & set(taught)
    with pytest.raises(DataError, match=r"at least 16 own samples that differ, and there are 15: give more `data`\."):
        divide(old, None, Dataset([f"text {place % 15}" for place in range(160)], None, ()), *given)


def test_extra_samples_are_no_own_ones(tmp_path: Path) -> None:
    """A pool that holds the own samples teaches the others alone: own ones judge."""
    own, more = ([f"text {place}" for place in places] for places in (range(80), range(80, 100)))
    pool = write_rows(tmp_path / "pool.jsonl", [{"text": text} for text in (*own, *more)])
    old: Any = SimpleNamespace(writes=False, reads=False, answers=_answers)
    given: Any = (UpgradeConfig.of(routes="synthetic", extra=str(pool)), None, Events())
    found = divide(old, None, Dataset(own, None, ()), *given).of("synthetic")
    assert found.extra is not None
    assert list(found.extra.data.inputs) == more
    with pytest.raises(DataError, match="has only own samples"):
        divide(old, None, Dataset([*own, *more], None, ()), *given).of("synthetic")
