"""The text tasks of the paper, and the small tasks of the examples: label texts, prompts, and their usual layouts.

Prompts and label texts of pairs are those that T5 was trained with. For single sentences the label texts describe the
class, so that a sentence encoder can classify by their embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from ..dataset import TABLE_SUFFIXES, Dataset
from ..tables import read_columns
from .base import Layout, Task

# Test labels of these datasets are not public: the validation or dev split is evaluated.
SCORED = ("validation_matched", "validation", "dev_matched", "dev", "val", "test")
MATCHED = ("validation_matched", "dev_matched")  # MNLI has two validation splits; this one has the training genres
NLI = ("entailment", "neutral", "contradiction")
ENTAILMENT = ("entailment", "not_entailment")


def _read_pairs(columns: Mapping[str, str], place: Path, split: Literal["train", "test"]) -> Dataset | None:
    """A saved HF dataset, one table with a column split, or a folder with a table for each split."""
    for labels in ({}, {"gold_label": "label"}, {"is_duplicate": "label"}):
        for file in _places(place, split):
            found = read_columns(file, split, {**columns, **labels}, MATCHED if split == "test" else ())
            if found is not None and found.labels is not None:
                return found if file == place else replace(found, split=split)  # a file of one split is all of it
    return None


def _places(place: Path, split: Literal["train", "test"]) -> list[Path]:
    if not place.is_dir():
        return [place]
    names = ("train",) if split == "train" else SCORED
    tables = {file.name.lower(): file for file in sorted(place.iterdir()) if file.name.lower().endswith(TABLE_SUFFIXES)}
    by_split = [file for name in names for key, file in tables.items() if key.partition(".")[0].split("-")[0] == name]
    return [place, *by_split]


def _pairs(name: str, title: str, classes: tuple[str, ...], prompt: str, first: str, second: str) -> Task:
    columns = {first: "text", second: "text_pair"}
    words = f"a saved HF data set or a table (or one for each split) with columns {first}, {second} and label"
    layout = Layout(words, partial(_read_pairs, columns))
    return Task(name, title, "text", classes, (prompt,), classes, layouts=(layout,))


MNLI = _pairs("mnli", "MNLI", NLI, "mnli hypothesis: {text_pair} premise: {text}", "premise", "hypothesis")
SNLI = _pairs("snli", "SNLI", NLI, "snli hypothesis: {text_pair} premise: {text}", "premise", "hypothesis")
QNLI = _pairs("qnli", "QNLI", ENTAILMENT, "qnli question: {text} sentence: {text_pair}", "question", "sentence")
RTE = _pairs("rte", "RTE", ENTAILMENT, "rte sentence1: {text} sentence2: {text_pair}", "sentence1", "sentence2")
QQP = _pairs(
    "qqp",
    "QQP",
    ("not_duplicate", "duplicate"),
    "qqp question1: {text} question2: {text_pair}",
    "question1",
    "question2",
)

TREC6 = Task(
    "trec6",
    "TREC-6",
    "text",
    ("description", "entity", "abbreviation", "human", "location", "number"),
    label_texts=(
        "What is the definition of it? Why did it happen? How does it work?",
        "What is the name of the thing? What kind of animal, food, product or game?",
        "What does this abbreviation mean? What is the acronym for it?",
        "Who did it? What person? Which company?",
        "Where is it? What city? What country? What state?",
        "When did it happen? How many? How long? What year? How much does it cost?",
    ),
)
AGNEWS = Task(
    "agnews",
    "AG News",
    "text",
    ("World", "Sports", "Business", "Sci/Tech"),
    label_texts=(
        "world news: politics, governments, wars and conflicts",
        "sports news: games, teams, players and championships",
        "business news: companies, markets, the economy and oil prices",
        "science and technology news: computers, software, the internet and space",
    ),
    aliases=("agnews_test.jsonl.gz",),
)
SST2 = Task(
    "sst2",
    "SST-2",
    "text",
    ("negative", "positive"),
    label_texts=("a bad film: dull, clumsy and disappointing", "a good film: moving, funny and delightful"),
    aliases=("sst2_stsa.jsonl.gz",),
)
SUBJ = Task(
    "subj",
    "Subj",
    "text",
    ("subjective", "objective"),
    label_texts=(
        "a critic's opinion of a film and how it feels to watch it",
        "the plot of a story: what happens to its characters",
    ),
)
CUSTREV = Task(
    "custrev",
    "Customer reviews",
    "text",
    ("negative", "positive"),
    label_texts=(
        "a complaint: the product is bad and does not work",
        "praise: the product is great and works well",
    ),
)
