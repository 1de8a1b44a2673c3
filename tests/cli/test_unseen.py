"""Scores are made on samples that calibration does not use; else none is claimed. A complete output is scored too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from builders import texts
from builders.commands import Run, loud, options
from builders.folders import Zoo, images, known_by
from tuneport.data.formats import read_plain
from tuneport.measure.accuracy import zero_shot
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model

CLASSES = np.array(("cat", "dog", "owl"))


def accuracy(model: Path, data: Path, indices: Any, split: Any = "test") -> float:
    opened, test = open_model(model), read_plain(data, split).subset(indices)
    return zero_shot(opened, choose_head(opened, None, test), test).accuracy


def test_data_without_splits_are_scored_on_what_calibration_leaves(run: Run, zoo: Zoo, place: Path) -> None:
    pixels, labels = images(60, 1, 3)
    np.savez(data := place / "whole.npz", x=pixels, y=labels, classes=CLASSES)
    done = run(*loud(zoo, data, place / "out"), "--samples", 24, "--evaluate", "--json")
    assert done.code == 0, done.err
    left = np.setdiff1d(np.arange(60), done.json["data"]["indices"])
    found = done.json["evaluation"]
    assert (found["samples"], found["shared"], found["held_out"]) == (36, 24, True)
    assert found["before"] == pytest.approx(accuracy(zoo["vit-target"], data, left))
    assert found["after"] == pytest.approx(accuracy(place / "out", data, left))
    assert done.json["headline"].startswith("accuracy on held-out samples of whole: ")
    assert "note: whole has no test split: 36 samples that calibration does not use are scored\n" in done.err
    for name in ("README.md", "report.html"):
        assert "36 samples of whole that calibration does not use" in (place / "out" / name).read_text()
    again = run(*loud(zoo, data, place / "more"), "--samples", 24, "--seed", 1, "--evaluate", "--json")
    assert set(again.json["data"]["indices"]) != set(done.json["data"]["indices"])
    few = run(*loud(zoo, data, place / "few"), "--samples", 50, "--evaluate")
    assert few.code == 0, few.err
    reason = "calibration uses all but 10 of the 60 samples of whole, and a score needs 20 others"
    assert few.out.splitlines()[1].startswith(f"the gain was not measured: {reason}")
    assert "test samples" not in few.out
    assert f"note: there will be no scores: {reason}" in few.err, "before anything is measured"
    record = json.loads((place / "few" / "tuneport.json").read_text())
    assert "accuracies" not in record
    assert "--evaluate" in (place / "out" / "report.html").read_text(), "the command that repeats it"


def stored(kind: str, place: Path, **parts: tuple[Any, Any]) -> Path:
    """Labelled images by split, in arrays or in files."""
    if kind == "arrays":
        named = {
            f"{key}_{split}": value for split, part in parts.items() for key, value in zip("xy", part, strict=True)
        }
        np.savez(place / "animals.npz", **named, classes=CLASSES)
        return place / "animals.npz"
    for split, (pixels, labels) in parts.items():
        for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            folder = place / "animals" / split / str(CLASSES[label])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{split}{index:03d}.png")
    return place / "animals"


@pytest.mark.parametrize("kind", ["arrays", "files"])
def test_test_samples_that_are_calibration_samples_are_not_scored(run: Run, zoo: Zoo, place: Path, kind: str) -> None:
    seen, more = images(48, 1, 3), images(30, 2, 3)
    both = tuple(np.concatenate([first[:12], second]) for first, second in zip(seen, more, strict=True))
    data = stored(kind, place, train=seen, test=both)
    done = run(*loud(zoo, data, place / "out"), "--samples", 48, "--evaluate", "--json")
    assert done.code == 0, done.err
    found = done.json["evaluation"]
    assert (found["samples"], found["shared"], found["held_out"]) == (30, 12, False)
    assert "note: 12 test samples are also calibration samples: they are not scored\n" in done.err
    assert "30 test samples of animals, without 12 that are calibration samples" in (
        (place / "out" / "README.md").read_text()
    )
    if kind == "arrays":
        assert found["after"] == pytest.approx(accuracy(place / "out", data, np.arange(12, 42)))


def test_no_gain_is_claimed_on_the_training_split(run: Run, zoo: Zoo, place: Path) -> None:
    seen = images(40, 1, 3)
    data = stored("arrays", place, train=seen, test=seen)
    done = run("transfer", *options(zoo, "vit", data=data, scale=0, samples=40), "--out", place / "out", "--json")
    assert done.code == 0, done.err
    assert (done.json["outcome"], "evaluation" in done.json) == ("not measured", False)
    assert "calibration uses all but 0 of the 40 samples of test split of animals" in done.json["headline"]


def bare(place: Path, rows: list[dict[str, Any]], **given: Any) -> list[Any]:
    """A transfer between encoders without classes."""
    names = [place / "old", place / "tuned", place / "new"]
    for name, size in zip(names, (texts.SMALL, texts.SMALL, texts.LARGE), strict=True):
        model = texts.make("bert", size).bert
        if name.name == "tuned":
            for weight in model.parameters():
                weight.data.mul_(1.05)
        texts.write(name, model, texts.bert_tokenizer())
    data = texts.write_rows(place / "rows.jsonl", rows)
    models = dict(zip(("source", "finetuned", "target"), names, strict=True))
    named = {**models, "data": data, "out": place / "out", "scale": 1, "samples": 12, **given}
    return ["transfer", *(word for name, value in named.items() for word in (f"--{name}", value))]


@pytest.mark.parametrize("count", [2, 3])
def test_few_pairs_do_not_cost_the_run(run: Run, place: Path, count: int) -> None:
    pairs = list(zip(texts.SENTENCES, texts.SENTENCES[1:], strict=False))
    rows = [
        {"text": one, "text_pair": two, "split": "test" if number < count else "train"}
        for number, (one, two) in enumerate(pairs)
    ]
    done = run(*bare(place, rows), "--evaluate", "--json")
    assert done.code == 0, done.err
    assert (place / "out" / "model.safetensors").is_file()
    if count < 3:
        assert done.json["outcome"] == "not measured"
        assert f"a fidelity needs 3 test samples, and test split of rows has {count}" in done.json["headline"]
        assert "there will be no scores" in done.err
    else:
        assert (done.json["evaluation"]["metric"], done.json["evaluation"]["samples"]) == ("fidelity", 3)


def test_encoders_without_classes_are_scored_on_plain_texts(run: Run, place: Path) -> None:
    rows = [{"text": text, "split": "train"} for text in texts.SENTENCES]
    rows += [{"text": f"{text} again", "split": "test"} for text in texts.SENTENCES]
    done = run(*bare(place, rows, method="theseus"), "--evaluate", "--json")
    assert done.code == 0, done.err
    assert done.json["evaluation"]["metric"] == "fidelity"
    assert -1 <= done.json["evaluation"]["after"] <= 1


def test_a_test_split_that_cannot_be_scored_does_not_cost_the_run(run: Run, place: Path) -> None:
    """Texts that are all the same have one cosine, and no correlation."""
    rows = [{"text": text, "split": "train"} for text in texts.SENTENCES]
    rows += [{"text": "one and the same", "split": "test"}] * 4
    done = run(*bare(place, rows, method="theseus"), "--evaluate", "--json")
    assert done.code == 0, done.err
    assert done.json["outcome"] == "not measured"
    assert "shows no fidelity" in done.json["headline"]


OUTPUTS = {"model": [], "adapter": ["--as", "adapter", "--rank", "2"], "task-vector": ["--as", "task-vector"]}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_complete_output_is_scored_when_it_is_asked_for(run: Run, zoo: Zoo, place: Path, kind: str) -> None:
    data = known_by(zoo["vit-target"], place / "known.npz")
    out = place / ("out.safetensors" if kind == "task-vector" else "out")
    given = [*loud(zoo, data, out), *OUTPUTS[kind], "--json"]
    first = run(*given, "--no-evaluate")
    assert (first.code, first.json["outcome"]) == (0, "not measured")
    weights = {"model": out / "model.safetensors", "adapter": out / "adapter_model.safetensors"}.get(kind)
    before = None if weights is None else weights.read_bytes()
    done = run(*given, "--resume", "--evaluate", "--fail-on-harm")
    assert done.out, done.err
    assert (done.code, done.json["outcome"]) == (3, "harm"), done.err
    assert weights is None or weights.read_bytes() == before
    whole = run(*loud(zoo, data, place / f"again{out.suffix}"), *OUTPUTS[kind], "--evaluate", "--json").json
    assert done.json["evaluation"] == whole["evaluation"]
    assert done.json["accuracies"] == whole["accuracies"]
    again = run(*given, "--resume", "--fail-on-harm")
    assert (again.code, again.json) == (3, done.json)
    if kind != "task-vector":
        assert "did harm" in (out / "report.html").read_text()
        assert "did harm" in (out / "README.md").read_text()
        assert sorted(file.name for file in out.iterdir() if file.is_file()) == sorted(
            name for name in done.json["files"] if "/" not in name
        )


def test_a_test_split_that_changed_is_scored_again(run: Run, zoo: Zoo, place: Path) -> None:
    data, out = place / "data", place / "out"

    def write(split: str, count: int, seed: int, moved: int = 0) -> None:
        for number, (pixels, label) in enumerate(zip(*images(count, seed, 3), strict=True)):
            folder = data / split / str(CLASSES[(label + moved) % 3])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number}.png")

    write("train", 24, 1)
    write("test", 30, 2)
    given = [*loud(zoo, data, out), "--accept-unlikely", "--evaluate", "--json"]
    first = run(*given)
    assert first.code == 0, first.err
    shutil.rmtree(data / "test")
    write("test", 30, 2, moved=1)  # as many samples, of other classes
    again = run(*given, "--resume").json["evaluation"]
    assert again["samples"] == first.json["evaluation"]["samples"]
    assert again["before"] == pytest.approx(accuracy(zoo["vit-target"], data, range(30)))
    assert again["before"] != first.json["evaluation"]["before"]
