"""The text sets by name: columns as the hub has them, label words, prompts, and rows without a label."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import paper.layouts  # noqa: F401 - the layouts join the tasks
from builders.texts import write_rows
from tuneport.data.dataset import with_prompts
from tuneport.data.tasks import TASKS, read_data, read_tasks
from tuneport.errors import DataError

COLUMNS = {
    "mnli": ("premise", "hypothesis"),
    "snli": ("premise", "hypothesis"),
    "qnli": ("question", "sentence"),
    "rte": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"),
}


def rows_of(task: str, count: int = 30) -> list[dict[str, object]]:
    first, second = COLUMNS[task]
    classes = len(TASKS[task].classes)
    return [{first: f"one {i}", second: f"two {i}", "label": i % classes} for i in range(count)]


@pytest.mark.parametrize("task", COLUMNS)
def test_folder_with_a_table_per_split(task: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", rows_of(task))
    write_rows(tmp_path / "validation.jsonl", rows_of(task, 12))
    train, test = (read_data(f"{task}:{tmp_path}", split) for split in ("train", "test"))
    assert (train.classes, train.origin.label_texts) == (TASKS[task].classes, TASKS[task].classes)
    assert len(test) == 12
    assert test.inputs[1] == ("one 1", "two 1")
    assert test.labels is not None
    assert test.labels.tolist()[:3] == [0, 1, 2 % len(test.classes)]
    asked = with_prompts(test).inputs[1]
    assert "one 1" in asked
    assert "two 1" in asked
    assert asked.startswith(f"{task} ")


@pytest.mark.parametrize("task", ["snli", "rte"])
def test_saved_dataset(task: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    names = list(TASKS[task].classes)
    rows = [*rows_of(task), {**rows_of(task, 1)[0], "label": -1}]  # SNLI has rows without a gold label
    features = datasets.Features(
        {key: datasets.Value("string") for key in COLUMNS[task]} | {"label": datasets.ClassLabel(names=names)}
    )
    parts = {split: datasets.Dataset.from_list(rows, features=features) for split in ("train", "validation")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    test = read_data(f"{task}:{tmp_path / 'saved'}", "test")
    assert (len(test), test.classes) == (30, TASKS[task].classes)


@pytest.mark.parametrize("saved", [True, False])
def test_mnli_has_two_validation_splits(saved: bool, tmp_path: Path) -> None:
    counts = {"train": 30, "validation_mismatched": 9, "validation_matched": 12}
    rows = {split: rows_of("mnli", count) for split, count in counts.items()}
    if saved:
        datasets = pytest.importorskip("datasets")
        hidden = [{**row, "label": -1} for row in rows_of("mnli", 6)]  # GLUE hides those of its test splits
        parts = {split: datasets.Dataset.from_list(part) for split, part in {**rows, "test_matched": hidden}.items()}
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "mnli"))
        place = tmp_path / "mnli"
    else:
        place = tmp_path / "mnli.jsonl"
        write_rows(place, [{**row, "split": split} for split, part in rows.items() for row in part])
    train, test = (read_data(f"mnli:{place}", split) for split in ("train", "test"))
    assert (len(train), len(test), test.origin.split) == (
        27,
        12,
        "validation_matched",
    )  # a tenth is kept for validation


def test_gold_labels_in_words_and_dashes(tmp_path: Path) -> None:
    rows = [
        {
            "premise": f"one {i}",
            "hypothesis": "two",
            "gold_label": ["contradiction", "entailment", "neutral", "-"][i % 4],
        }
        for i in range(40)
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "dev_matched.jsonl", rows)
    test = read_data(f"mnli:{tmp_path}", "test")
    assert len(test) == 30
    assert test.labels is not None
    assert [test.classes[label] for label in test.labels[:3]] == ["contradiction", "entailment", "neutral"]


def test_descriptions_of_numbered_classes(tmp_path: Path) -> None:
    place = write_rows(tmp_path / "trec.jsonl", [{"text": f"who {i}", "label": i % 6} for i in range(60)])
    data = read_data(f"trec6:{place}", "train")
    assert data.classes == TASKS["trec6"].classes
    assert data.origin.label_texts == TASKS["trec6"].label_texts
    assert with_prompts(data) is data  # no prompt


def test_other_columns_are_named(tmp_path: Path) -> None:
    place = write_rows(tmp_path / "t.jsonl", [{"left": "a", "right": "b", "label": 0}])
    with pytest.raises(DataError, match="premise, hypothesis and label"):
        read_data(f"mnli:{place}", "train")


def test_new_task_of_the_docs(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "text.md"
    block = re.search(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    rows = [{"question": f"one {i}", "passage": f"two {i}", "label": i % 2} for i in range(40)]
    task = read_tasks(block[1])["boolq"]
    columns = {"text": "question", "text_pair": "passage"}
    data = task.read(write_rows(tmp_path / "t.jsonl", rows), "test", columns=columns)
    assert data.inputs[0][0].replace("one", "two") == data.inputs[0][1]
    assert (data.classes, data.origin.label_texts, data.origin.prompts) == (
        task.classes,
        task.label_texts,
        task.prompts,
    )
