"""What a model has to answer: chats in the layouts of language-model data, and questions with answers to choose from.

A layout of chats is known by its columns: `messages` (OpenAI, Hugging Face), `conversations` (ShareGPT), `instruction`,
`input` and `output` (Alpaca), `prompt` and `completion`, or a bare `prompt`. A column `system` adds a system message to
any of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, first_of, shortened
from ..types import Chat
from .dataset import Dataset, LazySequence

CHAT_COLUMNS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))
PROMPTS_ONLY = ("prompt",)
MORE_COLUMNS = ("input", "system")  # of a chat, if the table has them
ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
WAYS = 3  # to name the right choice: its place, its letter, its text
GIVEN = 3  # samples that have an answer, if it is one of a kind that many share
SHARED = 0.5  # the least share of samples with such an answer if the answers are labels


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
    chat = _messages(cells["system"], "system", "system") if cells.get("system") else []
    if keys == ("instruction", "output"):
        asked = "\n\n".join(str(cells[name]) for name in ("instruction", "input") if cells.get(name))
        chat += [*_messages(asked, "user", "instruction"), *_messages(cells["output"], "assistant", "output")]
    elif keys[0] == "prompt":
        chat += _messages(cells["prompt"], "user", "prompt")
        chat += _messages(cells["completion"], "assistant", "completion") if "completion" in keys else []
    elif isinstance(cells[keys[0]], str):
        raise ValueError(f"{keys[0]} is a text; expected a list of messages")
    else:
        chat += _messages(cells[keys[0]], "", keys[0])
    said = [message["role"] for message in chat if message["content"].strip()]
    if not said:
        raise ValueError("no message has a text")
    if answered and "assistant" not in said:
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


def read_choices(
    column: Sequence[Any], labels: Sequence[Any] | None, rows: NDArray[np.int64], path: Path
) -> tuple[Sequence[list[str]], NDArray[np.int64]]:
    """The choices of some rows and the place of the right one; without labels, of none.

    Choices are a list of texts, and all labels of the column are their places from 0, their letters or their texts: the
    first of these that fits every row. Or, as in ARC, choices are {"text": [...], "label": [...]} with one of its own
    labels.
    """
    way, seen = set(range(WAYS)), -1
    for row, label in enumerate(labels or ()):
        fitting = {number for number, names in enumerate(_ways(column[row])) if str(label) in names}
        if fitting and not way & fitting:
            assert labels is not None
            raise DataError(
                f"label of {path} is {labels[seen]!r:.50} in row {seen + 1} and {label!r:.50} in row {row + 1}; "
                "expected all places from 0, all letters or all texts of the choices."
            )
        if fitting and not way <= fitting:
            way, seen = way & fitting, row
    right = []
    for row in rows:
        cell, names = column[row], _ways(column[row])
        if not names:
            given = f"choices of row {row + 1} of {path} is {cell!r:.50}"
            raise DataError(f"{given}; expected a list of two texts or more.")
        if labels is None:
            continue
        if not any(str(labels[row]) in each for each in names):
            known = " or ".join(first_of(map(str, each)) for each in (names if names[0] is not names[1] else names[:1]))
            raise DataError(f"label of row {row + 1} of {path} is {labels[row]!r:.80}; expected {known}.")
        right.append(names[min(way)].index(str(labels[row])))
    return LazySequence(rows, partial(_choices, column)), np.array(right, dtype=np.int64)


def _ways(cell: Any) -> list[list[Any]]:
    """What names the choices of a cell: places, letters and texts, or its own labels each time; [] if it has none."""
    texts, own = (cell.get("text"), cell.get("label")) if isinstance(cell, Mapping) else (cell, None)
    if not isinstance(texts, (list, tuple)) or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        return []
    if isinstance(own, list) and own:
        return [own] * WAYS
    return [list(map(str, range(len(texts)))), list(ascii_uppercase[: len(texts)]), list(texts)]


def _choices(column: Sequence[Any], row: int) -> Any:
    cell = column[row]
    return cell.get("text") if isinstance(cell, Mapping) else cell


def candidates_of(data: Dataset) -> list[Sequence[str]]:
    """The answers that each sample may have: its choices, or the words for the classes."""
    if data.choices is not None:
        return list(data.choices)
    if data.labels is None:
        raise DataError(f"{data} has no answers to choose from; expected a column label, or choices and label.")
    return [data.words] * len(data)


def fewer_choices(data: Dataset, most: int) -> Dataset:
    """The samples with at most `most` answers each: the right one, and others in a fixed draw; `choices` has them."""
    assert data.labels is not None
    generator = np.random.default_rng(0)
    choices, right = [], []
    for answers, label in zip(candidates_of(data), data.labels.tolist(), strict=True):
        others = generator.permutation(np.delete(np.arange(len(answers)), label))[: most - 1]
        kept = sorted([label, *others.tolist()])
        choices.append([answers[place] for place in kept])
        right.append(kept.index(label))
    return replace(data, choices=choices, labels=np.array(right, dtype=np.int64))


def without_labels(data: Dataset, most: int) -> Dataset:
    """The samples with at most `most` answers each as `choices`, in a fixed draw; nothing says which one is right."""
    generator = np.random.default_rng(0)
    drawn = [(answers, np.sort(generator.permutation(len(answers))[:most])) for answers in candidates_of(data)]
    choices = [[answers[place] for place in kept] for answers, kept in drawn]
    return replace(with_answers(data, [each[0] for each in choices]), choices=choices)


def shared_answers(given: Sequence[str]) -> tuple[str, ...]:
    """The answers that several samples share, most frequent first, if most samples have one of them; else none.

    >>> shared_answers(["yes", "no", "yes", "no", "yes", "no", "maybe"]), shared_answers(["a", "b", "c"])
    (('yes', 'no'), ())
    """
    counts = Counter(given)
    labels = tuple(label for label, count in counts.most_common() if count >= GIVEN)
    return labels if sum(counts[label] for label in labels) >= SHARED * counts.total() else ()


def each_answer(data: Dataset) -> tuple[Dataset, list[int]]:
    """Every sample once with each of its answers to predict, and the number of answers of each sample."""
    answers = candidates_of(data)
    counts = list(map(len, answers))
    repeated = data.subset(np.repeat(np.arange(len(data)), counts))
    return with_answers(repeated, [word for words in answers for word in words]), counts


def with_answers(data: Dataset, answers: Sequence[str]) -> Dataset:
    """The samples with these answers to predict; the last answer of a chat is replaced."""
    kept = replace(data, labels=None, choices=None, answers="data" if data.answers == "none" else data.answers)
    if not data.has_chats:
        return replace(kept, targets=answers)
    said = [{"role": "assistant", "content": answer} for answer in answers]
    return replace(kept, inputs=[[*prompt_of(chat), last] for chat, last in zip(data.inputs, said, strict=True)])
