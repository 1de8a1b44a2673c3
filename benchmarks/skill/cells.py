"""The cells of the table, and what those of language models are made of: pairs, tasks, arms.

A task knows its samples, how a prompt reads, one sentence about its prompts, and how it is scored. Test parts are
fixed: neither a draw nor an option changes them, except `--small`, whose rows say so.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["choices", "answer", "slots", "reference", "passages"]

PAIRS = (
    "smollm2-135m>gemma3-270m",
    "smollm2-135m>qwen-coder-0.5b",
    "qwen-coder-0.5b>qwen-coder-1.5b",
    "smollm2-135m>tinyllama-1.1b",
)
ARMS = (
    "old",
    "target",
    "all-data",
    "cross-lora",
    "few-shot@100",
    "copy@100",
    "theseus@100",
    "bico@100",
    "port@100",
    "distill@100",
    "distill@500",
    "distill@2000",
    "synthetic@0",
    "synthetic@10",
    "synthetic@20",
    "synthetic@100",
    "upgrade@100",
)
VALIDATION = 100
NEUTRAL = 50  # passages of ordinary text, on which a model should be as good as before
SMALL = 4  # samples of the validation and of the test part, with --small


@dataclass(frozen=True)
class Schedule:
    """Of the training of a LoRA."""

    steps: int
    rate: float
    batch: int


FEW_SHOT = tuple(Schedule(steps, rate, 8) for steps, rate in ((60, 2e-4), (150, 2e-4), (150, 5e-4), (60, 1e-3)))


@dataclass(frozen=True)
class Sample:
    """A prompt as the model reads it and the text that should follow; a passage has no prompt."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Parts:
    """The samples of a task."""

    train: Sequence[Sample]
    validation: Sequence[Sample]
    test: Sequence[Sample]

    def draw(self, number: int, count: int) -> list[Sample]:
        """The first samples of a fixed order of the training samples: a smaller draw is part of a larger one."""
        return random.Random(number).sample(self.train, len(self.train))[:count]

    def small(self) -> Parts:
        """A few samples of each part."""
        return Parts(self.train[: 6 * SMALL], self.validation[:SMALL], self.test[:SMALL])


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        name: of the task.
        file: its samples, below the shared folder.
        kind: how an answer is scored: the likeliest of `words`; the text that is written (`answer`, `slots` of JSON);
            the bits per character of a `reference`, or of `passages`.
        form: a prompt, with {} for the text of a sample.
        describe: one sentence about the texts.
        tests: samples that are tested.
        schedule: of a LoRA on all training samples.
        words: the answers to choose from.
        longest: the most tokens of an answer that is written.
    """

    name: str
    file: str
    kind: Kind
    form: str
    describe: str
    tests: int
    schedule: Schedule
    words: tuple[str, ...] = ()
    longest: int = 0

    @property
    def lower_is_better(self) -> bool:
        return self.kind in ("reference", "passages")

    def read(self, shared: Path) -> Parts:
        """Read the samples."""
        path = shared / self.file
        parts = self._passages(path) if self.kind == "passages" else self._rows(path)
        if min(len(parts.train), len(parts.test)) == 0:
            raise SystemExit(f"{path} has no training or no test samples.")
        return parts

    def _rows(self, path: Path) -> Parts:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            rows = [json.loads(line) for line in file]
        train, test = ([self._sample(row) for row in rows if row["split"] == split] for split in ("train", "test"))
        random.Random(0).shuffle(train)
        tested = test if len(test) <= self.tests else random.Random(0).sample(test, self.tests)
        return Parts(train[VALIDATION:], train[:VALIDATION], tested)

    def _sample(self, row: dict[str, Any]) -> Sample:
        text, answer = (row["text"], self.words[row["label"]]) if self.words else (row["prompt"], row["answer"])
        return Sample(self.form.format(text), f" {answer}")

    def _passages(self, path: Path) -> Parts:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            pieces = [piece.strip() for piece in file.read().split("\n\n")]
        joined = ["\n\n".join(pieces[at : at + 4]) for at in range(0, len(pieces), 4)]
        passages = [Sample("", passage) for passage in joined if 200 < len(passage) < 800]
        random.Random(0).shuffle(passages)
        known = self.tests + VALIDATION
        return Parts(passages[known:], passages[self.tests : known], passages[: self.tests])

    def row(self, sample: Sample) -> dict[str, Any]:
        """The sample as tuneport reads it; nothing says which answer is right."""
        if self.kind == "passages":
            return {"text": sample.answer}
        before, behind = self.form.split("{}")
        text = {"text": sample.prompt.removeprefix(before).removesuffix(behind)}
        return {**text, "choices": list(self.words)} if self.kind == "choices" else text


_TREC = ("description", "entity", "abbreviation", "person", "place", "number")
TASKS = {
    task.name: task
    for task in (
        Task(
            "trec6",
            "data/text/trec6.jsonl.gz",
            "choices",
            "What kind of answer does this question ask for? Reply with one word: description, entity, abbreviation, "
            "person, place or number.\n\n{}\nAnswer:",
            "Short trivia questions that people ask, on any topic.",
            500,
            Schedule(300, 2e-4, 16),
            words=_TREC,
        ),
        Task(
            "banking77",
            "data/chat/banking77.jsonl.gz",
            "answer",
            "Customer message: {}\nIntent:",
            "Short messages that customers write to the support chat of a mobile bank, about cards, payments, "
            "transfers, top-ups, cash, exchange rates, identity checks, fees and refunds.",
            500,
            Schedule(600, 5e-4, 16),
            longest=16,
        ),
        Task(
            "snips",
            "data/chat/snips.jsonl.gz",
            "slots",
            "Request: {}\nJSON:",
            "Requests in lower case that people say to a voice assistant: play music, add a song to a playlist, book "
            "a restaurant, get the weather, find a film or its showing times, rate a book.",
            500,
            Schedule(600, 5e-4, 16),
            longest=96,
        ),
        Task(
            "e2e",
            "data/chat/e2e.jsonl.gz",
            "reference",
            "Restaurant: {}\nDescription:",
            "Lists of the properties of a restaurant, such as name[The Eagle], food[French], area[riverside].",
            500,
            Schedule(300, 2e-4, 16),
        ),
        Task(
            "shakespeare",
            "data/text/tinyshakespeare.txt.gz",
            "passages",
            "",
            "Passages of plays by Shakespeare, with the speakers' names.",
            300,
            Schedule(300, 2e-4, 8),
        ),
    )
}
NEUTRAL_FILE = "data/text/brown.txt.gz"


def neutral_passages(shared: Path, count: int = NEUTRAL) -> list[Sample]:
    """Fixed passages of ordinary English."""
    with gzip.open(shared / NEUTRAL_FILE, "rt", encoding="utf-8") as file:
        pieces = [" ".join(piece.split()) for piece in file.read().split("\n\n")]
    found = [piece for piece in pieces if 300 < len(piece) < 800]
    return [Sample("", piece) for piece in random.Random(0).sample(found, min(count, len(found)))]


@dataclass(frozen=True)
class Cell:
    """One number of the table: an arm with its number of samples, on a pair and a task, in one draw."""

    pair: str
    task: str
    arm: str
    n: int | None
    draw: int | None

    @property
    def source(self) -> str:
        return self.pair.split(">")[0]

    @property
    def target(self) -> str:
        return self.pair.split(">")[1]

    @property
    def label(self) -> str:
        """The arm as it is asked for."""
        return self.arm if self.n is None else f"{self.arm}@{self.n}"

    @property
    def name(self) -> str:
        """A name for files."""
        draw = "" if self.draw is None else f"-{self.draw}"
        return f"{self.pair.replace('>', '-to-')}-{self.task}-{self.label.replace('@', '-')}{draw}"


def cells_of(places: Sequence[tuple[str, str]], arms: Sequence[str], draws: Sequence[int]) -> list[Cell]:
    """All cells of pairs and tasks, draw by draw, so that the first draw is complete first; others have none."""
    made = []
    for draw in draws:
        for pair, task in places:
            for label in arms:
                arm, _, count = label.partition("@")
                made.append(Cell(pair, task, arm, int(count), draw) if count else Cell(pair, task, arm, None, None))
    return list(dict.fromkeys(made))
