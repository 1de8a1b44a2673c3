"""Chats as a model reads them: rendered by its tokenizer's chat template, with the places of contents and answers.

Contents are places that two models share, so that their tokens can be paired; everything else is the template's own.
A model without a template reads the contents one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import DataError, reraised
from ..types import Chat

Place = tuple[int, int]  # begin and end, in characters of the rendered text


@dataclass(frozen=True)
class Rendered:
    """A chat as text, the place of each message's content, and the places that the assistant writes.

    An answer is all that the model has to generate: the content and the end of the turn.
    """

    text: str
    contents: tuple[Place, ...]
    answers: tuple[Place, ...]


def render_chat(tokenizer: Any, chat: Chat) -> Rendered:
    """Render a chat with the tokenizer's template.

    What a template writes before an answer is found by rendering the messages before it with the generation prompt;
    what it writes after the content, by rendering the messages up to the answer.
    """
    if not tokenizer.chat_template:
        return _plain(chat)
    text = apply_template(tokenizer, chat)
    contents: list[Place] = []
    answers: list[Place] = []
    waiting: list[str] = []  # contents since the last answer
    end = 0
    for index, message in enumerate(chat):
        content = message["content"].strip()
        if message["role"] != "assistant":
            waiting.append(content)
            continue
        before = apply_template(tokenizer, chat[:index], add_generation_prompt=True)
        begin = len(before) if text.startswith(before) else end
        place = text.find(content, begin)
        if place < 0:
            raise DataError(f"the chat template of {tokenizer.name_or_path} leaves out an answer: {content[:60]!r}.")
        begin = begin if text.startswith(before) else place
        contents += [*_places(text, waiting, end, begin), (place, place + len(content))]
        after = apply_template(tokenizer, chat[: index + 1])
        close = after[after.rfind(content) + len(content) :]
        end = place + len(content)
        end += len(close) if text.startswith(close, end) else 0
        answers.append((begin, end))
        waiting = []
    return Rendered(text, (*contents, *_places(text, waiting, end, len(text))), tuple(answers))


def marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template itself marks what the assistant writes, with a generation block."""
    return "endgeneration" in str(tokenizer.chat_template)


def apply_template(tokenizer: Any, chat: Chat, **options: Any) -> str:
    """The chat as text."""
    with reraised(f"the chat template of {tokenizer.name_or_path} refuses a chat", DataError):
        rendered: str = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    return rendered


def _places(text: str, contents: list[str], begin: int, end: int) -> list[Place]:
    """The places of contents in order, searched from the end: a role's name stands before the content."""
    found: list[Place] = []
    for content in reversed(contents):
        place = text.rfind(content, begin, end)
        if place < 0:  # the template leaves it out
            place, content = end, ""
        found.insert(0, (place, place + len(content)))
        end = place
    return found


def gap_between(text: str, more: str, blank: str) -> str:
    """The blank to write between two texts; none where one of them has a blank there, or is empty."""
    return blank if text and more and not (text[-1].isspace() or more[0].isspace()) else ""


def _plain(chat: Chat) -> Rendered:
    text, contents, answers = "", [], []
    for message in chat:
        text += gap_between(text, message["content"], "\n")
        contents.append((len(text), len(text) + len(message["content"])))
        text += message["content"]
        if message["role"] == "assistant":
            answers.append(contents[-1])
    return Rendered(text, tuple(contents), tuple(answers))
