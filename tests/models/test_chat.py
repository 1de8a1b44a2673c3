"""Chats by the template of each model: the tokens that carry loss, and the places that two models share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builders.chats import CHATS, LAYOUTS, TEMPLATES, chat_file, chat_tokenizer
from builders.samples import raises
from tuneport.data.formats import read_plain
from tuneport.measure.tokens import coverage, overlap
from tuneport.models.chat import render_chat
from tuneport.models.tokenizer import IGNORED, Reader


def chats_in(tmp_path: Path, name: str) -> Any:
    return read_plain(chat_file(tmp_path / "chats.jsonl", name), "train")


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_exactly_the_tokens_of_the_assistant_carry_loss(name: str, template: str, marked: bool, tmp_path: Path) -> None:
    """transformers' own mask is that of the template with a generation block; a plain template has to give the same."""
    data = chats_in(tmp_path, name)
    asked: list[Any] = list(data.inputs)
    oracle = chat_tokenizer(template, marked=True)
    wanted = oracle.apply_chat_template(asked, return_dict=True, return_assistant_tokens_mask=True)
    found = Reader(chat_tokenizer(template, marked), 512).continuations(asked, None)
    assert found.labels is not None
    for row, (ids, mask) in enumerate(zip(wanted["input_ids"], wanted["assistant_masks"], strict=True)):
        assert found.inputs["input_ids"][row, : len(ids)].tolist() == ids
        expected = [token if one else IGNORED for token, one in zip(ids, mask, strict=True)]
        assert found.labels[row, : len(ids)].tolist() == expected
        assert (found.labels[row, len(ids) :] == IGNORED).all()
        answers = [m["content"] for m in asked[row] if m["role"] == "assistant"]
        text = oracle.decode([token for token in expected if token != IGNORED], skip_special_tokens=True)
        assert text.split("\n")[:-1] == answers
        assert found.characters[row] == sum(map(len, answers))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_give_the_same_chat(name: str, tmp_path: Path) -> None:
    data = chats_in(tmp_path, name)
    whole = name in ("messages", "conversations")
    assert list(data.inputs) == (CHATS if whole else [chat[-2:] for chat in CHATS])
    assert data.has_chats
    assert data.labels is None
    again = read_plain(chat_file(tmp_path / "chats.json", name), "train")
    assert list(again.inputs) == list(data.inputs)


def test_tokens_of_two_templates_meet_in_the_contents() -> None:
    """The contents are the same words for both models, so that each of their tokens meets a token of the same words."""
    readers = [Reader(chat_tokenizer(name), 512) for name in ("chatml", "gemma")]
    source, target = (reader.texts(CHATS) for reader in readers)
    found = coverage(source.spans, target.spans)
    assert found["target_matched"] == found["target_tokens"] > 0
    shares = overlap(source.spans[0], target.spans[0])
    for row in range(len(CHATS)):
        texts = [
            reader.tokenizer.convert_ids_to_tokens(side.inputs["input_ids"][row].tolist())
            for reader, side in zip(readers, (source, target), strict=True)
        ]
        inside = [place for place, share in enumerate(shares[row]) if share.max() == 1.0]
        same = [(texts[1][place], texts[0][int(shares[row, place].argmax())]) for place in inside]
        words = [(one, other) for one, other in same if one == other and one.startswith("Ġ")]
        assert len(words) > 5


def test_a_model_without_a_template_reads_the_contents() -> None:
    rendered = render_chat(chat_tokenizer(None), CHATS[1])
    assert rendered.text == CHATS[1][0]["content"] + "\n" + CHATS[1][1]["content"]
    found = Reader(chat_tokenizer(None), 512).continuations([CHATS[1]], None)
    assert found.labels is not None
    answer = chat_tokenizer(None).decode(found.labels[0][found.labels[0] != IGNORED])
    assert answer.strip() == "it leaves at seven"


def test_a_template_that_changes_old_turns_still_shows_the_answers() -> None:
    """Qwen3's template writes an empty thought into the last turn only: no rendering is a prefix of the next."""
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] + '<|im_end|>\\n' }}{% else %}".replace("\\n", "\n"),
        "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% else %}",
    )
    assert "<think>" in tokenizer.chat_template
    rendered = render_chat(tokenizer, CHATS[0])
    assert [rendered.text[slice(*place)] for place in rendered.answers] == [
        "no light around them<|im_end|>\n",
        "<think>\n\n</think>\n\nmodel<|im_end|>\n",
    ]
    assert [rendered.text[slice(*place)] for place in rendered.contents] == [m["content"] for m in CHATS[0]]


def test_long_chats_are_cut_and_counted() -> None:
    short = Reader(chat_tokenizer("chatml"), 512, max_length=80).continuations(CHATS, None)
    assert short.inputs["input_ids"].shape[1] == 80
    assert short.cut == (True, False)
    assert Reader(chat_tokenizer("chatml"), 512).texts(CHATS).cut == (False, False)
    with raises("no token of the target of a sample is left to predict", "longer than 12 tokens", "Raise `max_length`"):
        Reader(chat_tokenizer("chatml"), 512, max_length=12).continuations(CHATS, None)


def test_the_limit_of_the_model_is_the_last_word() -> None:
    assert [Reader(None, 100, max_length=wanted).longest for wanted in (50, 100, 2000)] == [50, 100, 100]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"messages": "hello"}, ["row 1 of", "messages is a text; expected a list of messages."]),
        ({"messages": [{"role": "user", "content": "hello"}]}, ["no message of the assistant has a text"]),
        ({"conversations": [{"from": "alien", "value": "hello"}]}, ["has the role 'alien'; expected one of system"]),
        (
            {"messages": [{"role": "x" * 3000, "content": "hello"}]},
            ["has the role 'xxx", "xx ... xx", "xxx'; expected"],
        ),
        ({"messages": [{"role": "user", "content": 3}]}, ["the content of a message is int; expected text."]),
        ({"prompt": 3, "completion": "4"}, ["prompt is int; expected a text or a list of messages."]),
        ({"instruction": "say it", "output": None}, ["output is NoneType; expected a text"]),
    ],
)
def test_what_is_no_chat(row: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    with raises(*parts):
        read_plain(tmp_path / "t.jsonl", "train")


def test_parts_of_contents_and_lists_as_prompts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "completion": [{"role": "assistant", "content": "4"}]}
    (tmp_path / "t.jsonl").write_text(json.dumps({**row, "system": "Be brief."}))
    (chat,) = read_plain(tmp_path / "t.jsonl", "train").inputs
    said = {"system": "Be brief.", "user": "2 + 2?", "assistant": "4"}
    assert chat == [{"role": role, "content": content} for role, content in said.items()]


def test_a_template_that_refuses_is_one_line() -> None:
    tokenizer = chat_tokenizer("chatml")
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with raises("the chat template of", "refuses a chat: System role not supported."):
        Reader(tokenizer, 512).texts(CHATS)
