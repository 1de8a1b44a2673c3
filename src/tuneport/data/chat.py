"""Chats in the layouts of language-model data, as lists of messages with a role and a content.

A layout is known by its columns: `messages` (OpenAI, Hugging Face), `conversations` (ShareGPT), `instruction`, `input`
and `output` (Alpaca), `prompt` and `completion`, or a bare `prompt`. A column `system` adds a system
message to any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, shortened
from ..types import Chat
from .dataset import LazySequence

CHAT_COLUMNS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))
PROMPTS_ONLY = ("prompt",)
MORE_COLUMNS = ("input", "system")  # of a chat, if the table has them
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}


def read_chats(
    columns: Mapping[str, Sequence[Any]], keys: Sequence[str], rows: NDArray[np.int64], path: Path, answered: bool
) -> LazySequence:
    """The chats of some rows, by the columns `keys` of one layout; if `answered`, each must hold an answer."""
    names = [name for name in (*keys, *MORE_COLUMNS) if name in columns]

    def read(row: int) -> Chat:
        try:
            return _chat(tuple(keys), {name: columns[name][row] for name in names}, answered)
        except ValueError as error:
            raise DataError(f"row {row + 1} of {path}: {error}.") from error

    for row in rows:
        read(int(row))
    return LazySequence(rows, read)


def _chat(keys: tuple[str, ...], cells: Mapping[str, Any], answered: bool) -> Chat:
    chat: Chat = []
    if cells.get("system"):
        chat += _messages(cells["system"], "system", "system")
    if keys == ("instruction", "output"):
        asked = "\n\n".join(str(cells[name]) for name in ("instruction", "input") if cells.get(name))
        chat += [*_messages(asked, "user", "instruction"), *_messages(cells["output"], "assistant", "output")]
    elif keys == ("prompt", "completion"):
        chat += _messages(cells["prompt"], "user", "prompt")
        chat += _messages(cells["completion"], "assistant", "completion")
    elif keys == PROMPTS_ONLY:
        chat += _messages(cells["prompt"], "user", "prompt")
    elif isinstance(cells[keys[0]], str):
        raise ValueError(f"{keys[0]} is a text; expected a list of messages")
    else:
        chat += _messages(cells[keys[0]], "", keys[0])
    if not any(message["content"].strip() for message in chat):
        raise ValueError("no message has a text")
    if answered and not any(message["role"] == "assistant" and message["content"].strip() for message in chat):
        raise ValueError("no message of the assistant has a text, so there is nothing to predict")
    return chat


def _messages(cell: Any, role: str, name: str) -> Chat:
    """A text as one message of the role, or a list of messages as they are."""
    if isinstance(cell, str):
        return [{"role": role, "content": cell}]
    if not isinstance(cell, (list, tuple)) or not all(isinstance(item, Mapping) for item in cell):
        raise ValueError(f"{name} is {type(cell).__name__}; expected a text or a list of messages")
    return [_message(item) for item in cell]


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if key not in ("from", "value") and value is not None}
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if str(role).lower() not in ROLES:
        raise ValueError(f"a message has the role {shortened(repr(role))}; expected one of {', '.join(ROLES)}")
    if isinstance(content, (list, tuple)):  # the parts of OpenAI's messages
        content = "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of a message is {type(content).__name__}; expected text")
    return {**message, "role": ROLES[str(role).lower()], "content": content or ""}


def last_answer(chat: Chat) -> tuple[Chat, str]:
    """A chat without its last answer of the assistant and what follows it, and that answer.

    >>> last_answer([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])
    ([{'role': 'user', 'content': '2 + 2?'}], '4')
    """
    place = max(index for index, message in enumerate(chat) if message["role"] == "assistant")
    return chat[:place], chat[place]["content"]


def prompt_of(chat: Chat) -> Chat:
    """A chat up to where the assistant has to answer: all of it, or all before its last answer.

    >>> prompt_of([{"role": "user", "content": "2 + 2?"}])
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    answered = chat[-1]["role"] != "user" and any(message["role"] == "assistant" for message in chat)
    return last_answer(chat)[0] if answered else chat
