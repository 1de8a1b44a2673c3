"""A teacher answers: by choice, by writing to the end of its turn, and without a look at the answers of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from builders.lessons import ANSWERS, PROMPTS, SOUNDS, TEMPLATE, TEXTS, Animals, writes
from builders.samples import jsonl
from tuneport.data.dataset import Dataset, as_prompts
from tuneport.data.formats import read_plain
from tuneport.errors import DataError
from tuneport.measure import answers
from tuneport.measure.answers import answered, is_choice, is_passages, written_answers
from tuneport.models.base import Model
from tuneport.models.generation import Written
from tuneport.models.open import open_model

COUNT = 10
PLAIN = Dataset(list(PROMPTS[:COUNT]), None, (), answers="none")


@pytest.fixture(scope="module")
def teacher(animals: Animals) -> Model:
    return open_model(animals.tuned)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a teacher write these texts; gives the list of what it is asked."""

    def say(*written: Written) -> list[Any]:
        prompts: list[Any] = []

        def write(_: Model, given: Sequence[Any], *__: Any, **___: Any) -> list[Written]:
            prompts.extend(given)
            return [written[place % len(written)] for place in range(len(given))]

        monkeypatch.setattr(answers, "generate_texts", write)
        return prompts

    return say


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


class TestChoices:
    DATA = replace(PLAIN, choices=[list(SOUNDS.values())] * COUNT)

    def test_labels_are_not_needed(self, teacher: Model) -> None:
        found, kept = answered(teacher, self.DATA)
        assert found.labels is not None
        assert found.choices is not None
        given = [each[label] for each, label in zip(found.choices, found.labels, strict=True)]
        assert given == list(ANSWERS[:COUNT])
        assert kept.tolist() == list(range(COUNT))

    def test_labels_are_not_looked_at(self, teacher: Model) -> None:
        wanted = written_answers(teacher, self.DATA)
        for labels in (np.zeros(COUNT, dtype=np.int64), np.arange(COUNT) % len(SOUNDS)):
            assert written_answers(teacher, replace(self.DATA, labels=labels)) == wanted
            named = Dataset(PLAIN.inputs, labels, tuple(SOUNDS.values()))
            assert written_answers(teacher, named) == wanted, "words for classes are choices"


class TestPrompts:
    def test_a_text_ends_where_the_turn_ends(self, teacher: Model) -> None:
        found, _ = answered(teacher, PLAIN)
        assert found.targets == list(ANSWERS[:COUNT])
        assert found.answers == "teacher"
        assert list(found.inputs) == list(PLAIN.inputs)
        assert answered(teacher, found)[0].targets == found.targets

    def test_an_unsure_teacher_takes_the_likeliest_tokens(
        self, animals: Animals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As plain transformers does; a random model never ends, and its first lines are taken."""
        monkeypatch.setattr(answers, "MOST_TOKENS", 12)
        monkeypatch.setattr(answers, "FIRST", 3)
        plain = writes(animals.base, *PROMPTS[:6])
        assert not any(ended for _, ended in plain)
        found = written_answers(open_model(animals.base), replace(PLAIN, inputs=list(PROMPTS[:6])))
        assert found == [text.partition("\n")[0].strip() for text, _ in plain]

    def test_a_model_that_reads_little_leaves_half_of_it_to_prompts(self, teacher: Model) -> None:
        longest = max(len(row) for row in teacher.reader.tokenizer(list(PLAIN.inputs))["input_ids"])
        small = replace(teacher, inputs=replace(teacher.inputs, reader=replace(teacher.reader, limit=2 * longest)))
        assert 2 * longest < answers.MOST_TOKENS
        assert written_answers(small, PLAIN) == list(ANSWERS[:COUNT])

    def test_answers_of_the_data_are_not_looked_at(self, teacher: Model) -> None:
        wrong = replace(PLAIN, targets=list(ANSWERS[1 : COUNT + 1]), answers="data")
        assert answered(teacher, wrong)[0].targets == answered(teacher, PLAIN)[0].targets

    def test_a_template_makes_prompts_of_texts(self, teacher: Model) -> None:
        texts = as_prompts(Dataset(list(TEXTS[:COUNT]), None, ()), TEMPLATE)
        assert texts.answers == "none"
        assert list(texts.inputs) == list(PROMPTS[:COUNT])
        assert written_answers(teacher, texts) == list(ANSWERS[:COUNT])

    def test_chats_are_asked_up_to_the_last_answer(self, asked: Any, teacher: Model) -> None:
        prompts = asked(Written(" yes "))
        open_ended, closed, longer = chat("who?"), chat("who?", "me"), chat("who?", "me", "why?")
        found, _ = answered(teacher, Dataset([open_ended, closed, longer], None, (), answers="none"))
        assert prompts == [chat("who?"), chat("who?"), longer]
        assert list(found.inputs) == [chat("who?", "yes"), chat("who?", "yes"), chat("who?", "me", "why?", "yes")]
        assert found.answers == "teacher"

    @pytest.mark.parametrize(
        ("row", "prompt"),
        [
            ({"messages": chat("who?")}, chat("who?")),
            ({"prompt": "who?"}, chat("who?")),
            ({"prompt": "who?", "system": "be kind"}, [{"role": "system", "content": "be kind"}, *chat("who?")]),
        ],
    )
    def test_tables_of_prompts(self, asked: Any, teacher: Model, tmp_path: Any, row: Any, prompt: Any) -> None:
        data = read_plain(jsonl(tmp_path / "rows.jsonl", [row] * 3), "train", labelled=False)
        assert data.answers == "none"
        assert not is_passages(data)
        assert not is_choice(data)
        prompts = asked(Written("me"))
        assert written_answers(teacher, data) == ["me"] * 3
        assert prompts == [prompt] * 3


class TestEnds:
    def test_answers_that_do_not_end_are_left_out(self, asked: Any, teacher: Model) -> None:
        asked(Written(" meow"), Written(" moo moo moo", finished=False))
        found, kept = answered(teacher, PLAIN)
        assert kept.tolist() == [0, 2, 4, 6, 8]
        assert found.targets == ["meow"] * 5
        assert list(found.inputs) == [PROMPTS[place] for place in kept]

    def test_empty_answers_are_left_out(self, asked: Any, teacher: Model) -> None:
        asked(Written(" meow"), Written(" \n"))
        assert answered(teacher, PLAIN)[1].tolist() == [0, 2, 4, 6, 8]

    def test_a_teacher_that_never_ends_gives_first_lines(self, asked: Any, teacher: Model) -> None:
        asked(Written("\n meow \nAnimal: a dog", finished=False))
        assert answered(teacher, PLAIN)[0].targets == ["meow"] * COUNT

    def test_no_answer_at_all_is_an_error(self, asked: Any, teacher: Model) -> None:
        asked(Written(""))
        with pytest.raises(DataError, match="gives no answer that ends within 256 tokens to any of 10 prompts"):
            answered(teacher, PLAIN)


def test_passages_are_their_own_answers(asked: Any, teacher: Model) -> None:
    prompts = asked(Written("me"))
    data = Dataset(list(TEXTS[:3]), None, ())
    found, kept = answered(teacher, data)
    assert found is data
    assert kept.tolist() == [0, 1, 2]
    assert prompts == []
