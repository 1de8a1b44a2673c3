"""Chats as a model reads them: rendered by its tokenizer's chat template, with the places of contents and answers.

No place is found by a search for a text, which may also stand in a question or in a mark of the template. The chat is
rendered once more with a character of its own before and behind each content: they show where the template writes it.
Contents are places that two models share, so that their tokens can be paired; everything else is the template's own.
A model without a template reads the contents one after the other.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Any

from ..errors import DataError, reraised
from ..types import Chat

Place = tuple[int, int]  # begin and end, in characters of the rendered text
PRIVATE = range(0xF0000, 0x110000)  # characters that Unicode gives no meaning


@dataclass(frozen=True)
class Rendered:
    """A chat as text, what its messages say, the place of that, and the places that the assistant writes.

    Blanks around a content are no part of it. If the template leaves out the begin of a content, such as an old
    thought, the place is that of the rest; if it leaves out all, the place is empty. An answer is all that the model
    has to generate: from the end of the generation prompt over the content to the end of the turn.
    """

    text: str
    said: tuple[str, ...]
    contents: tuple[Place, ...]
    answers: tuple[Place, ...]


def render_chat(tokenizer: Any, chat: Chat) -> Rendered:
    """Render a chat with the tokenizer's template."""
    if not tokenizer.chat_template:
        return _plain(chat)
    text = apply_template(tokenizer, chat)
    marked = _mark(tokenizer, chat, text)
    contents: list[Place] = []
    answers: list[Place] = []
    for index, message in enumerate(chat):
        place = marked.content(index)
        contents.append((0, 0) if place is None else _core(text, *marked.bare(place)))
        said, ours = message["content"].strip(), message["role"] == "assistant"
        if ours and said and place is None:
            raise DataError(f"the chat template of {tokenizer.name_or_path} leaves out an answer: {said[:60]!r}.")
        answer = marked.answer(index) if ours else None
        answers += [] if answer is None else [marked.bare(answer)]
    return Rendered(text, tuple(message["content"].strip() for message in chat), tuple(contents), tuple(answers))


def marks_answers(tokenizer: Any) -> bool:
    """Whether the chat template itself marks what the assistant writes, with a generation block."""
    return "endgeneration" in str(tokenizer.chat_template)


def apply_template(tokenizer: Any, chat: Chat, **options: Any) -> str:
    """The chat as text."""
    with reraised(f"the chat template of {tokenizer.name_or_path} refuses a chat", DataError):
        rendered: str = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    return rendered


def prompt_text(tokenizer: Any, chat: Chat) -> str:
    """A chat up to where the model's turn begins: by the template, or line by line without one."""
    if tokenizer.chat_template:
        return apply_template(tokenizer, chat, add_generation_prompt=True)
    text = _plain(chat).text
    return text if not text or text[-1].isspace() else text + "\n"


def gap_between(text: str, more: str, blank: str) -> str:
    """The blank to write between two texts; none where one of them has a blank there, or is empty."""
    return blank if text and more and not (text[-1].isspace() or more[0].isspace()) else ""


@dataclass(frozen=True)
class _Marked:
    """A chat with marks before and behind its contents, as far as the template writes them as they are."""

    tokenizer: Any
    chat: Chat
    marks: Sequence[tuple[str, str]]  # of each message; characters that stand nowhere else

    @cached_property
    def text(self) -> str:
        return apply_template(self.tokenizer, self.chat)

    @cached_property
    def all_marks(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(self.marks))

    def bare(self, place: Place) -> Place:
        """A place of the text as one of the text without marks."""
        begin, end = (len(self.without_marks(self.text[:stop])) for stop in place)
        return begin, end

    def without_marks(self, text: str) -> str:
        return re.sub(f"[{''.join(sorted(self.all_marks))}]", "", text)

    def content(self, index: int) -> Place | None:
        """The place between the marks of a message; None if they are not there."""
        begin, end = map(self.text.find, self.marks[index])
        return None if begin < 0 or end < 0 else (begin + 1, end)

    def answer(self, index: int) -> Place | None:
        """The place of an answer: from the end of the generation prompt to the end of the turn.

        It begins with its content if the template writes no such prompt before it. It ends as in a chat that ends
        there, as far as the tokens are the same.
        """
        asked = apply_template(self.tokenizer, self.chat[:index], add_generation_prompt=True)
        ended = apply_template(self.tokenizer, self.chat[: index + 1])
        content, begin, end = self.content(index), self._reach(asked), self._reach(ended)
        if content is not None:
            begin = content[0] if begin is None else begin
            end = self._shared(ended) if end is None else end
        return None if begin is None or end is None else (begin, end)

    def _reach(self, text: str) -> int | None:
        """Where this text has written all that another one writes behind its last mark; None if it writes another."""
        rest, start = self._behind(text)
        return start + len(rest) if self.text.startswith(rest, start) else None

    def _shared(self, text: str) -> int:
        """Up to where this text writes the same tokens as another one behind its last mark."""
        rest, start = self._behind(text)
        here = "".join(takewhile(lambda letter: letter not in self.all_marks, self.text[start:]))
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        one, other = (self.tokenizer(part, **options) for part in (rest, here))
        tokens = zip(one["input_ids"], other["input_ids"], other["offset_mapping"], strict=False)
        return start + max((end for _, _, (_, end) in takewhile(lambda pair: pair[0] == pair[1], tokens)), default=0)

    def _behind(self, text: str) -> tuple[str, int]:
        """What another text writes behind its last mark, and the place behind the same mark here."""
        last = max(map(text.rfind, self.all_marks))
        return text[last + 1 :], 0 if last < 0 else self.text.find(text[last]) + 1


def _mark(tokenizer: Any, chat: Chat, text: str) -> _Marked:
    """Put marks around what the template keeps of each content: all, all but blanks, or its end.

    Marks are where they belong if the text without them is the text of the chat, and what stands between them is the
    content. A content that the template leaves out or changes has none.
    """
    contents = [message["content"] for message in chat]
    used = text + "".join(contents)
    free = (chr(code) for code in PRIVATE if chr(code) not in used)
    marks = [(next(free), next(free)) for _ in chat]

    def put(cuts: Mapping[int, Place]) -> tuple[_Marked, bool]:
        said = list(contents)
        for index, (begin, end) in cuts.items():
            one, two = marks[index]
            said[index] = said[index][:begin] + one + said[index][begin:end] + two + said[index][end:]
        written = [{**message, "content": content} for message, content in zip(chat, said, strict=True)]
        found = _Marked(tokenizer, written, marks)
        places = [(found.content(index), contents[index][slice(*cut)]) for index, cut in cuts.items()]
        same = all(place is not None and found.text[slice(*place)] == content for place, content in places)
        return found, same and found.without_marks(found.text) == text

    def search(index: int) -> Place | None:
        _, end = _core(contents[index])
        begin = bisect_left(range(end), True, key=lambda begin: put({index: (begin, end)})[1])
        return (begin, end) if put({index: (begin, end)})[1] else None

    for kept in (lambda content: (0, len(content)), _core):
        found, fits = put({index: kept(content) for index, content in enumerate(contents)})
        if fits:
            return found
    return put({index: cut for index in range(len(chat)) if (cut := search(index)) is not None})[0]


def _core(text: str, begin: int = 0, end: int | None = None) -> Place:
    """A place in a text, or all of it, without the blanks around it."""
    part = text[begin:end]
    begin += len(part) - len(part.lstrip())
    return begin, begin + len(part.strip())


def _plain(chat: Chat) -> Rendered:
    text, contents, answers = "", [], []
    for message in chat:
        text += gap_between(text, message["content"], "\n")
        place = len(text), len(text) + len(message["content"])
        text += message["content"]
        contents.append(_core(text, *place))
        if message["role"] == "assistant":
            answers.append(place)
    return Rendered(text, tuple(message["content"].strip() for message in chat), tuple(contents), tuple(answers))
