"""`tuneport distill` on prompts without answers, on extra samples, and on samples that a generator writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from builders.classifiers import write_classifier
from builders.commands import Run, assert_refused
from builders.completions import Server, serving
from builders.folders import Zoo
from builders.lessons import ANSWERS, PROMPTS, SOUNDS, TEMPLATE, TEXTS, Animals, writes
from builders.texts import SENTENCES, write_rows
from tuneport.pipeline.distill import distill
from tuneport.synthetic.filters import longest_run

SEEDS = 9  # fewer than a probe needs


def lesson(animals: Animals, out: Path, *more: Any, data: Any = None) -> list[Any]:
    models = ["--finetuned", animals.tuned, "--target", animals.target, "--template", TEMPLATE]
    return ["distill", *models, "--data", data or animals.texts, "--out", out, *more]


def all_texts(folder: Path) -> str:
    """All that is written in the files of a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return "\n".join(path.read_bytes().decode("utf-8", "replace") for path in files)


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that writes animals with an adjective of its own."""

    def change(body: dict[str, Any]) -> str:
        draw = hashlib.sha256(f"{body['seed']}".encode()).digest()
        letters = "".join(chr(ord("a") + byte % 26) for byte in draw[:6])
        return f" zx{letters} {list(SOUNDS)[draw[7] % len(SOUNDS)]}"

    with serving() as found:
        found.change = change
        yield found


def test_answers_of_the_data_are_taught_beside_those_of_the_teacher(run: Run, animals: Animals, place: Path) -> None:
    rows = [{"text": text, "target": "quack"} for text in TEXTS[:20]]
    data = write_rows(place / "rows.jsonl", rows)
    words = lesson(animals, place / "out", "--steps", 3, "--json", data=data)
    alone = run(*words).json["distilled"]
    assert (alone["matching"], alone["extra"]) == ("answers", 0)
    assert 0 < alone["views"] <= 4 * alone["samples"]
    both = run(*words, "--labels", "data", "--overwrite").json["distilled"]
    assert (alone["samples"], alone["held_out"], alone["again"]) == (20, 20, 3)
    assert (both["samples"], both["held_out"], both["again"]) == (40, 40, 3)
    bare = run(*lesson(animals, place / "other", "--labels", "data"))
    assert_refused(bare, 1, "has no written answers")


def test_both_answers_of_a_prompt_judge_or_are_taught() -> None:
    from tuneport.data.dataset import Dataset
    from tuneport.pipeline.lessons import with_answers_of_data

    own = Dataset(["a", "b", "c"], None, (), targets=["1", "2", "3"])
    taught = Dataset(["a", "c"], None, (), targets=["x", "z"], answers="teacher")
    found = with_answers_of_data(own, taught, np.array([0, 2]))
    assert found.targets is not None
    assert list(zip(found.inputs, found.targets, strict=True)) == [("a", "x"), ("a", "1"), ("c", "z"), ("c", "3")]
    assert found.answers == "teacher"


class TestWritten:
    def test_what_was_written_is_kept_if_asked_for(self, run: Run, animals: Animals, place: Path) -> None:
        more = ("--steps", 1, "--samples", SEEDS, "--synthetic", 12, "--generator", animals.generator, "--json")
        done = run(*lesson(animals, place / "out", *more, "--keep-texts"))
        assert done.code == 0, done.err
        lines = (place / "out" / "texts.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        found = done.json["synthetic"]
        assert found["texts"] == len(texts) == len(set(texts)) == 12
        assert found["judged"]["form"] == found["asked"] >= 12
        assert set(found["dropped"]) >= {"form", "near duplicates"}
        assert set(found["licences"]) == {"source", "target", "generator"}
        shown = [TEXTS[place] for place in done.json["data"]["indices"]]
        assert found["longest_run"] == longest_run(texts, shown) >= 1
        assert found["generator"] == done.json["generator"]["name"] == animals.generator.name
        assert done.json["distilled"]["extra"] + done.json["distilled"]["held_out"] == 12
        again = run(*lesson(animals, place / "again", *more, "--keep-texts"))
        assert again.code == 0
        for name in ("texts.jsonl", "model.safetensors"):
            assert (place / "again" / name).read_bytes() == (place / "out" / name).read_bytes()

    def test_no_text_is_stored_otherwise(self, run: Run, animals: Animals, place: Path, server: Server) -> None:
        more = ("--steps", 1, "--samples", SEEDS, "--synthetic", 12, "--generator-url", server.url)
        done = run(*lesson(animals, place / "out", *more, "--json"))
        assert done.code == 0, done.err
        assert done.json["synthetic"]["texts"] == 12
        assert "zx" in server.change({"seed": 0})
        stored = all_texts(place)
        assert [path.name for path in place.iterdir()] == ["out"], "the work folder is gone"
        assert " zx" not in stored
        assert '"zx' not in stored
        assert done.json["synthetic"]["shares"] == {}, "free answers are texts too"
        shown = "\n".join(body["prompt"] for body in server.bodies)
        assert any(text in shown for text in TEXTS), "a generator sees own texts"
        assert "Sound:" not in shown, "and nothing of the form around them"

    def test_a_sentence_is_enough(self, run: Run, animals: Animals, place: Path, server: Server) -> None:
        words = lesson(animals, place / "out", "--steps", 1, "--synthetic", 12, "--generator-url", server.url, "--json")
        at = words.index("--data")
        done = run(*words[:at], *words[at + 2 :], "--describe", "Animals with an adjective", "--keep-texts")
        assert done.code == 0, done.err
        assert done.json["data"]["name"] == "written samples"
        assert (done.json["distilled"]["samples"], done.json["distilled"]["held_out"]) == (12, 12)
        assert all(body["prompt"].startswith("Animals with an adjective\n-") for body in server.bodies)
        assert "zx" in (place / "out" / "texts.jsonl").read_text()

    def test_nothing_to_write_after_is_refused(self, run: Run, animals: Animals, place: Path) -> None:
        words = lesson(animals, place / "out")
        at = words.index("--data")
        assert_refused(run(*words[:at], *words[at + 2 :]), 2, "needs samples", "--synthetic")
        assert_refused(run(*lesson(animals, place / "out", "--describe", "animals")), 2, "--synthetic")


class TestExtra:
    def test_prompts_without_answers_are_enough(self, run: Run, animals: Animals, place: Path) -> None:
        """The extra texts are asked as the own ones, and the student learns what the teacher says to them.

        Plain transformers loads it; it writes what the teacher writes, and ends.
        """
        own, more = (place / name for name in ("own.txt", "extra.txt"))
        own.write_text("\n".join(TEXTS[:10]))
        more.write_text("\n".join(TEXTS[10:]))
        words = lesson(animals, place / "out", "--steps", 40, "--learning-rate", 0.01, "--extra", more, data=own)
        done = run(*words, "--json")
        assert done.code == 0, done.err
        entry = done.json["distilled"]
        assert (entry["samples"], entry["held_out"], entry["extra"]) == (10, 10, 50)
        assert done.json["extra"]["name"] == "extra"
        asked = slice(None, None, -12)
        assert writes(place / "out", *PROMPTS[asked]) == [(answer, True) for answer in ANSWERS[asked]]
        assert writes(animals.target, PROMPTS[-1])[0][0] != ANSWERS[-1]

    def test_images(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """They take more steps, unless the steps are given."""
        monkeypatch.setattr("tuneport.training.division.STEPS_BESIDE", 3)
        pixels = np.random.default_rng(0).integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
        np.savez(place / "other.npz", x_train=pixels)
        models = ["--finetuned", zoo["clip_vision-tuned"], "--target", zoo["clip_vision-target"], "--data", zoo.data]
        words = ["distill", *models, "--samples", 16, "--steps", 2, "--out", place / "out", "--json"]
        done = run(*words, "--extra", place / "other.npz")
        assert done.code == 0, done.err
        entry = done.json["distilled"]
        assert (entry["samples"], entry["held_out"], entry["extra"], entry["steps"]) == (16, 16, 30, 2)
        words = [word for word in words if word not in ("--steps", 2)]
        monkeypatch.setattr("tuneport.training.division.EPOCHS", 0)
        done = run(*words, "--overwrite", "--extra", place / "other.npz")
        assert done.json["distilled"]["steps"] == 3
        (place / "texts.txt").write_text("a\nb\n")
        assert_refused(run(*words, "--overwrite", "--extra", place / "texts.txt"), 1, "--extra has texts", "images")

    def test_sentences_for_a_classifier(self, run: Run, place: Path) -> None:
        _, tuned, target, data = write_classifier(place)
        student = transformers.BertForSequenceClassification.from_pretrained(target, num_labels=3)
        tokenizer = transformers.AutoTokenizer.from_pretrained(target)
        student.config.id2label = transformers.AutoConfig.from_pretrained(tuned).id2label
        student.config.label2id = {name: number for number, name in student.config.id2label.items()}
        student.save_pretrained(place / "student")
        tokenizer.save_pretrained(place / "student")
        (place / "extra.txt").write_text("\n".join(SENTENCES))
        words = ["--finetuned", tuned, "--target", place / "student", "--data", data, "--samples", 16, "--steps", 2]
        done = run("distill", *words, "--extra", place / "extra.txt", "--out", place / "out", "--json")
        assert done.code == 0, done.err
        entry = done.json["distilled"]
        assert (entry["matching"], entry["samples"], entry["extra"]) == ("classes", 16, len(SENTENCES))

    def test_passages_teach_themselves(self, animals: Animals, place: Path) -> None:
        (place / "extra.txt").write_text("\n".join(SENTENCES))
        with pytest.raises(Exception, match="own samples are passages"):
            distill(animals.tuned, animals.target, animals.texts, extra=str(place / "extra.txt"), steps=1)
