"""Tokens and losses of chats, against transformers alone, on the templates of eight families of models.

One oracle is the mask that transformers makes of a template with a generation block. The other takes the tokenizer's
`apply_chat_template` and a letter that stands nowhere else, in place of the answer. Neither shares code with tuneport.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from builders.templates import FAMILIES, family_tokenizer
from tuneport.models.chat import render_chat
from tuneport.models.tokenizer import IGNORED, Reader

Chat = list[dict[str, str]]
QUESTION = "of d, e and the end of the turn, which is first?"
COLLIDING = [
    *("d", "end", "im", "e", "of", "turn", "|", ">", "<", "s", "\n", "assistant", "model", "user", "INST", "]", "id"),
    *(
        "<|im_end|>",
        "<end_of_turn>",
        "</s>",
        "<|end|>",
        "<think>",
        "<think>\n",
        "▁of▁",
        "<｜",
        "first",
        "yes  ",
        "\n\nno",
    ),
    *(QUESTION, QUESTION[:9], QUESTION[-7:]),
]
BLANKS = ["", " ", "\n\n"]
THOUGHTS = ["<think>\nwhy\n</think>\n\nyes", "<think>d</think>d", "</think>d", "a</think>b</think>\nno"]


@cache
def tokenizer_of(name: str, marked: bool = False) -> PreTrainedTokenizerFast:
    return family_tokenizer(name, marked)


def chat_of(*contents: str, system: str = "") -> Chat:
    """Questions and answers in turn."""
    begin = [{"role": "system", "content": system}] if system else []
    return begin + [
        {"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)
    ]


def found_by_us(name: str, chat: Chat, marked: bool = False) -> tuple[list[int], list[int]]:
    """The tokens, and those that carry loss."""
    found = Reader(tokenizer_of(name, marked), 4096, max_length=4096).continuations([chat], None)
    assert found.labels is not None
    return found.inputs["input_ids"][0].tolist(), found.labels[0].tolist()


def found_by_transformers(name: str, chat: Chat) -> tuple[list[int], list[int]]:
    options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer_of(name, True).apply_chat_template(chat, **options)
    masks = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return found["input_ids"], [token if one else IGNORED for token, one in masks]


def found_by_a_letter(name: str, chat: Chat) -> tuple[list[int], list[int]]:
    """The tokens from the last answer on: from the generation prompt, or else from what stands before the answer."""
    tokenizer, letter = tokenizer_of(name), "\ue000"
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    asked = tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True)
    before = tokenizer.apply_chat_template([*chat[:-1], {**chat[-1], "content": letter}], tokenize=False)
    begin = len(asked) if before.startswith(asked) else before.index(letter)
    assert before[:begin] == text[:begin]
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    places = zip(tokens["input_ids"], tokens["offset_mapping"], strict=True)
    return tokens["input_ids"], [token if end > begin else IGNORED for token, (_, end) in places]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_losses_are_those_of_the_template(name: str, marked: bool) -> None:
    chats = [
        chat_of("why do stars shine?", "no light around them"),
        chat_of("why do stars shine?", "no light around them", "and in cities?", "the light of the town"),
        chat_of("\n which?", " blanks  around\n", "and now?", "\n\nno", "the last?", "yes\n"),
    ]
    if FAMILIES[name].system:
        chats += [chat_of(*(message["content"] for message in chat), system="Be brief.") for chat in chats]
    for chat in chats:
        assert found_by_us(name, chat, marked) == found_by_transformers(name, chat)


def losses_of(name: str, chat: Chat) -> list[str]:
    """The tokens that carry loss, as texts."""
    _, labels = found_by_us(name, chat)
    return [tokenizer_of(name).decode([label]) for label in labels if label != IGNORED]


@pytest.mark.parametrize(("name", "close"), [("chatml", ["<|im_end|>", "\n"]), ("gemma", ["<end_of_turn>", "\n"])])
@pytest.mark.parametrize("answer", ["a", "b", "c", "d", "e", "end", "im", "of", "turn"])
def test_an_answer_keeps_the_end_of_its_turn(name: str, close: list[str], answer: str) -> None:
    """Also if its text stands in the mark that ends the turn, so that all answers to a question end alike."""
    found = losses_of(name, chat_of("a|b|c|d?", answer))
    assert ("".join(found[:-2]), found[-2:]) == (answer, close)


@pytest.mark.parametrize("answer", ["paris", "<", "<think>", "<｜User｜>is it"])
def test_a_question_that_holds_the_answer_carries_no_loss(answer: str) -> None:
    """The generation prompt is no prefix of the chat: it opens a thought."""
    found = losses_of("deepseek-r1", chat_of("is it paris < or <think> or rome?", answer))
    assert ("".join(found[:-1]), found[-1]) == (answer, "<｜end▁of▁sentence｜>")


def test_an_old_thought_is_left_out_and_the_last_one_is_learned() -> None:
    chat = chat_of("one?", "<think>\nwhy\n</think>\n\nyes", "two?", "<think>\nhow\n</think>\n\nno")
    rendered = render_chat(tokenizer_of("qwen-3"), chat)
    assert [rendered.text[slice(*place)] for place in rendered.answers] == [
        "yes<|im_end|>\n",
        "<think>\nhow\n</think>\n\nno<|im_end|>\n",
    ]
    assert rendered.text[slice(*rendered.contents[1])] == "yes"
    r1 = render_chat(tokenizer_of("deepseek-r1"), chat)
    assert [r1.text[slice(*place)] for place in r1.answers] == [
        f"\n\n{word}<｜end▁of▁sentence｜>" for word in ("yes", "no")
    ]


def test_the_rest_of_an_answer_meets_the_same_words_of_the_whole_one() -> None:
    """A template that leaves out thoughts or the system message does not shift the tokens that two models share."""
    chat = chat_of("is it one?", "<think>\nwhy\n</think>\n\nthe river", system="Be brief.")
    found = []
    for name in ("mistral", "deepseek-r1", "chatml"):
        encoded = Reader(tokenizer_of(name), 4096).texts([chat])
        assert encoded.inside is not None
        tokens = tokenizer_of(name).convert_ids_to_tokens(encoded.inputs["input_ids"][0].tolist())
        rows = zip(tokens, encoded.spans[0][0].tolist(), encoded.inside[0].tolist(), strict=True)
        found.append({(token, *span) for token, span, inside in rows if inside and token.isalpha()})
    assert found[0] - found[2] == set()  # no system message
    assert found[1] - found[2] == set()  # no thought
    assert len(found[1]) > 5


SAID = st.sampled_from(COLLIDING)
ANY = SAID | st.sampled_from(BLANKS) | st.lists(SAID, max_size=3).map("".join) | st.text(max_size=5)
MANY = settings(max_examples=60, deadline=None, derandomize=True)


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(
    turns=st.lists(st.tuples(ANY, ANY), max_size=2),
    question=SAID | ANY,
    answer=SAID | ANY | st.sampled_from(THOUGHTS),
    system=st.just("") | SAID.filter(str.strip),
)
def test_answers_that_collide_with_marks(
    name: str, turns: list[tuple[str, str]], question: str, answer: str, system: str
) -> None:
    """Wherever else the text of an answer stands, its own tokens and the end of its turn carry the loss."""
    contents = [text for turn in (*turns, (question, answer)) for text in turn]
    chat = chat_of(*contents, system=system if FAMILIES[name].system else "")
    assert found_by_us(name, chat) == found_by_transformers(name, chat)


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(question=SAID | ANY, answer=SAID | ANY | st.sampled_from(THOUGHTS))
def test_answers_stand_where_another_text_would_stand(name: str, question: str, answer: str) -> None:
    chat = chat_of(question, answer)
    assert found_by_us(name, chat) == found_by_a_letter(name, chat)


@pytest.mark.parametrize("name", FAMILIES)
@MANY
@given(contents=st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3), system=st.just("") | SAID.filter(str.strip))
def test_contents_stand_where_another_text_would_stand(name: str, contents: list[tuple[str, str]], system: str) -> None:
    """The places at which the tokens of two models are paired."""
    said = [text for turn in contents for text in turn]
    chat, letter = chat_of(*said, system=system if FAMILIES[name].system else ""), "\ue000"
    tokenizer = tokenizer_of(name)
    rendered = render_chat(tokenizer, chat)
    for index, message in enumerate(chat):
        core = message["content"].strip()
        if not core:
            continue
        begin, end = rendered.contents[index]
        other = [*chat[:index], {**message, "content": message["content"].replace(core, letter)}, *chat[index + 1 :]]
        text = tokenizer.apply_chat_template(other, tokenize=False)
        if letter in text:
            assert (begin, rendered.text[begin:end]) == (text.index(letter), core)
        else:
            assert begin == end
