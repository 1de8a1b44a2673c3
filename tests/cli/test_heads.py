"""`tuneport transfer` of fine-tuned classifiers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from builders.classifiers import CLASSES, write_classifier
from builders.commands import Run, assert_refused
from builders.texts import SENTENCES, write_rows


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    names = ("source", "finetuned", "target", "data")
    pairs = zip(names, write_classifier(tmp_path), strict=True)
    return [*(word for name, path in pairs for word in (f"--{name}", str(path))), "--samples", "16"]


def test_an_unlabelled_classifier(run: Run, given: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("transfer", "--scale=1", *given, "--verbose", "--out", out)
    assert done.code == 0, done.err
    assert "3 classes, fitted to the scores of the fine-tuned source" in done.out
    assert "next: tuneport evaluate" not in done.out, "the data have no labels"
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert set(config["id2label"].values()) == set(CLASSES.values())
    assert "fitted to the scores of the fine-tuned source" in (out / "README.md").read_text()


@pytest.mark.parametrize("output", [[], ["--as", "adapter", "--rank", "2"]], ids=["model", "adapter"])
def test_evaluation_of_what_is_written(run: Run, given: list[str], tmp_path: Path, output: list[str]) -> None:
    rows = [
        {"text": f"{text}{end}", "label": CLASSES[place % 3], "split": split}
        for split, end in (("train", ""), ("test", " again"))
        for place, text in enumerate(SENTENCES)
    ]
    data = write_rows(tmp_path / "labelled.jsonl", rows)
    given[given.index("--data") + 1] = str(data)
    out = tmp_path / "out"
    done = run("transfer", "--scale=1", *given, *output, "--labels", "data", "--evaluate", "--out", out, "--json")
    assert done.code == 0, done.err
    again = run("evaluate", out, "--data", data, "--json")
    assert again.code == 0, again.err
    assert again.json["accuracy"] == done.json["evaluation"]["after"]
    assert done.json["head"]["classes"] == list(CLASSES.values())
    assert done.json["options"]["labels"] == "data"


@pytest.mark.usefixtures("no_forward")
def test_a_plan_runs_no_model(run: Run, given: list[str]) -> None:
    rows = [{"text": text, "label": CLASSES[place % 3]} for place, text in enumerate(SENTENCES)]
    data = write_rows(Path(given[1]).parent / "labelled.jsonl", rows)
    given[given.index("--data") + 1] = str(data)
    done = run("plan", *given)
    assert done.code == 0, done.err
    assert "fitted to the scores of the fine-tuned source" in done.out


def test_refusals(run: Run, given: list[str], tmp_path: Path) -> None:
    words = ("cannot hold a fitted head", "--head-fit none")
    done = run("transfer", "--scale=1", *given, "--as", "task-vector", "--out", tmp_path / "out.safetensors")
    assert_refused(done, 1, *words)
    assert_refused(run("transfer", "--scale=1", *given, "--head-fit", "some", "--out", tmp_path / "out"), 2, "head_fit")


@pytest.mark.parametrize("kind", ["token", "number"])
def test_tokens_and_numbers_arrive_and_their_accuracy_is_refused(
    run: Run, given: list[str], tmp_path: Path, kind: str
) -> None:
    labels = CLASSES if kind == "token" else {0: "LABEL_0"}
    name = "BertForTokenClassification" if kind == "token" else "BertForSequenceClassification"
    tuned = getattr(transformers, name).from_pretrained(
        tmp_path / "tuned", id2label=labels, ignore_mismatched_sizes=True
    )
    tuned.save_pretrained(tmp_path / "tuned")
    out, words = tmp_path / "out", "labels tokens" if kind == "token" else "gives numbers"
    refused = run("transfer", *given, "--evaluate", "--out", out)
    assert (refused.code, out.exists()) == (1, False)
    assert f"{words}, of which tuneport measures no accuracy" in refused.err.splitlines()[-1]
    done = run("transfer", "--scale=1", *given, "--verbose", "--out", out)
    assert done.code == 0, done.err
    assert f"{'3 classes' if kind == 'token' else '1 output'}, fitted to the scores" in done.out
    assert "next: tuneport evaluate" not in done.out
    assert json.loads((out / "config.json").read_text())["architectures"] == [name]
    assert_refused(run("evaluate", out, "--data", tmp_path / "rows.jsonl"), 1, words, "measures no accuracy")
