"""Answers of a teacher as a decoder reads them: the last one of a chat alone, and the end of the text after it."""

from __future__ import annotations

import pytest

from builders.chats import CHATS, TEMPLATES, chat_tokenizer
from builders.lessons import ANSWERS, PROMPTS
from builders.texts import gpt_tokenizer
from tuneport.models.chat import prompt_text
from tuneport.models.tokenizer import IGNORED, Encoded, Reader


def rows(found: Encoded) -> list[tuple[list[int], list[int]]]:
    """The tokens and the labels of each row, without padding."""
    assert found.labels is not None
    lengths = found.inputs["attention_mask"].sum(1).tolist()
    assert all((row[length:] == IGNORED).all() for row, length in zip(found.labels, lengths, strict=True))
    pairs = zip(found.inputs["input_ids"].tolist(), found.labels.tolist(), lengths, strict=True)
    return [(ids[:length], labels[:length]) for ids, labels, length in pairs]


def test_the_end_of_the_text_is_predicted_after_the_answer() -> None:
    tokenizer = gpt_tokenizer()
    tokenizer.pad_token = "<pad>"
    prompts, answers = PROMPTS[:3], ANSWERS[:3]
    found = Reader(tokenizer, 512).continuations(prompts, answers, taught=True)
    for (ids, labels), prompt, answer in zip(rows(found), prompts, answers, strict=True):
        start, end = tokenizer(prompt)["input_ids"], tokenizer(f" {answer}")["input_ids"]
        assert ids == [*start, *end, tokenizer.eos_token_id]
        assert labels == [IGNORED] * len(start) + [*end, tokenizer.eos_token_id]
    assert found.characters == tuple(map(len, answers)), "the end is no character"
    assert found.inside is not None
    plain = Reader(tokenizer, 512).continuations(prompts, answers)
    assert plain.inside is not None
    assert found.inside.sum(1).tolist() == plain.inside.sum(1).tolist(), "nor is it of the text"


def test_without_a_teacher_no_end_is_predicted() -> None:
    tokenizer = gpt_tokenizer()
    tokenizer.pad_token = "<pad>"
    for ids, labels in rows(Reader(tokenizer, 512).continuations(PROMPTS[:3], ANSWERS[:3])):
        assert tokenizer.eos_token_id not in ids
        assert labels[-1] == ids[-1]


def test_a_long_answer_is_cut_without_an_end() -> None:
    tokenizer = gpt_tokenizer()
    tokenizer.pad_token = "<pad>"
    whole = tokenizer(f"{PROMPTS[0]} {ANSWERS[0]}")["input_ids"]
    (ids, labels), *_ = rows(Reader(tokenizer, len(whole) - 1).continuations(PROMPTS[:1], ANSWERS[:1], taught=True))
    assert ids == whole[:-1]
    assert labels[-1] == ids[-1]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
def test_only_the_last_answer_of_a_chat_carries_loss(template: str, marked: bool) -> None:
    """What the template writes after it, which ends the turn, is predicted too."""
    tokenizer = chat_tokenizer(template, marked)
    reader = Reader(tokenizer, 512)
    found = reader.continuations(CHATS, None, taught=True)
    every = rows(reader.continuations(CHATS, None))
    for (ids, labels), (whole, all_labels), chat in zip(rows(found), every, CHATS, strict=True):
        assert ids == whole == tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        start = len(tokenizer(prompt_text(tokenizer, chat[:-1]), add_special_tokens=False)["input_ids"])
        assert labels == [IGNORED] * start + all_labels[start:]
        written = tokenizer.decode([token for token in labels if token != IGNORED])
        mark = "<|im_end|>" if template == "chatml" else "<end_of_turn>"
        assert written.strip() == chat[-1]["content"] + mark
    assert found.characters == tuple(len(chat[-1]["content"]) for chat in CHATS)


def test_a_chat_without_a_template_ends_as_a_plain_text() -> None:
    tokenizer = chat_tokenizer(None)
    ((ids, labels),) = rows(Reader(tokenizer, 512).continuations(CHATS[:1], None, taught=True))
    start = tokenizer(prompt_text(tokenizer, CHATS[0][:-1]))["input_ids"]
    assert ids == [*start, *tokenizer("model")["input_ids"], tokenizer.eos_token_id]
    assert labels == [IGNORED] * len(start) + ids[len(start) :]
