"""Upgrades of language models and text classifiers, whose old model answers what it is asked."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.classifiers import write_classifier
from builders.commands import Run, assert_refused
from builders.completions import Server, serving
from builders.lessons import ANSWERS, LISTS, PROMPTS, SOUNDS, TEMPLATE, TEXTS, Animals, writes
from builders.processes import run_program
from builders.runs import Listener
from builders.texts import LARGE, SENTENCES, gpt_tokenizer, make, write, write_rows
from tuneport import plan, upgrade
from tuneport.config import TransferInputs, UpgradeConfig
from tuneport.data.dataset import Dataset
from tuneport.data.samplers import select
from tuneport.errors import OptionError, TuneportError
from tuneport.pipeline.upgrade import Upgrade, upgrade_to_folder
from tuneport.runtime.resume import Work

STEPS = 24


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


def rows(found: Upgrade) -> dict[str, Any]:
    return {row.name: row for row in found.routes}


def words(animals: Animals, out: Path, *more: Any, data: Any = None) -> list[Any]:
    models = ["--source", animals.base, "--finetuned", animals.tuned, "--target", animals.target]
    given = ["--data", data or animals.texts] if data is not False else []
    return ["upgrade", *models, *given, "--template", TEMPLATE, "--out", out, *more]


class TestLanguageModels:
    def test_prompts_without_answers(self, run: Run, animals: Animals, place: Path) -> None:
        """The adapter, on the new base in plain peft, agrees with the old model as often as the table says."""
        done = run(*words(animals, place / "out", "--routes", "distill", "--steps", 40, "--json"))
        assert done.code == 0, done.err
        old, target, distilled = done.json["routes"]
        assert done.json["chosen"] == "distill"
        assert (old["agreement"], target["agreement"]) == (100.0, 0.0)
        assert distilled["agreement"] > 50
        judging = done.json["data"]["indices"][:15]  # a quarter of 60
        found = writes(animals.target, *(PROMPTS[index] for index in judging), adapter=place / "out")
        wrong = [index for index, one in zip(judging, found, strict=True) if one != (ANSWERS[index], True)]
        assert distilled["agreement"] == pytest.approx(100 * (1 - len(wrong) / 15), abs=1e-3)
        lines = (place / "out" / "disagreements.jsonl").read_text().splitlines()
        shown = sorted((one["text"], one["old"]) for one in map(json.loads, lines))
        assert shown == sorted((PROMPTS[index], ANSWERS[index]) for index in wrong)

    def test_a_lora_that_cannot_be_trained_is_refused_at_once(
        self, animals: Animals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuneport.training.student.find_spec", lambda _: None)
        monkeypatch.setattr("tuneport.pipeline.upgrade._prepare", lambda *_: pytest.fail("it began"))
        with pytest.raises(TuneportError, match="training a LoRA needs peft"):
            upgrade(animals.base, animals.tuned, animals.target, animals.texts, template=TEMPLATE)

    def test_answers_of_the_data_are_a_score(self, animals: Animals, tmp_path: Path) -> None:
        """The old model is right on all but those whose answers are wrong in the data; routes do not see them."""
        table = [
            {"text": text, "target": "quack" if place % 3 == 0 else answer}
            for place, (text, answer) in enumerate(zip(TEXTS[:24], ANSWERS, strict=False))
        ]
        answered = write_rows(tmp_path / "answered.jsonl", table)
        bare = write_rows(tmp_path / "bare.jsonl", [{"text": row["text"]} for row in table])
        options = {"template": TEMPLATE, "routes": "distill", "steps": 2}
        found, plain = (
            upgrade(animals.base, animals.tuned, animals.target, data, **options) for data in (answered, bare)
        )
        judging = select(Dataset(list(TEXTS[:24]), None, ()), samples=24, seed=0)[:6]  # a quarter
        assert rows(found)["old"].score == pytest.approx(100 * sum(place % 3 != 0 for place in judging) / 6)
        assert rows(found)["old"].score < 100
        assert rows(plain)["old"].score is None
        assert rows(found)["distill"].agreement == rows(plain)["distill"].agreement

    def test_choices_without_labels(self, animals: Animals, tmp_path: Path) -> None:
        sounds = list(SOUNDS.values())
        table = [{"text": text, "choices": sounds} for text in TEXTS]
        data = write_rows(tmp_path / "rows.jsonl", table)
        options = {"template": TEMPLATE, "routes": "distill", "steps": STEPS}
        found = upgrade(animals.base, animals.tuned, animals.target, data, **options)
        assert found.chosen == "distill"
        assert rows(found)["old"].score is None
        assert rows(found)["distill"].agreement > rows(found)["target"].agreement + 30
        for one in found.disagreements:
            assert one["old"] == SOUNDS[one["text"].split()[2]]
            assert one["new"] in sounds
            assert "label" not in one

    def test_passages(self, animals: Animals, tmp_path: Path) -> None:
        """The old model knows lists by heart and writes such lists itself."""
        table = [{"text": "\n".join(text.splitlines()[:lines])} for text in LISTS for lines in range(4, 9)]
        data = write_rows(tmp_path / "rows.jsonl", table)
        options = {"routes": ("distill", "synthetic"), "steps": 5, "synthetic": 8}
        found = upgrade(animals.base, animals.generator, animals.target, data, **options)
        scores = {name: row.score for name, row in rows(found).items()}
        assert scores["old"] < scores["target"]
        assert scores["distill"] < scores["target"]
        assert rows(found)["old"].agreement is None
        assert "bits per character" in found.decision
        many = write_rows(tmp_path / "many.jsonl", [{"text": f"{number} {LISTS[0]}"} for number in range(800)])
        planned = plan(animals.base, animals.generator, animals.target, many)["routes"]
        assert {name: planned[name]["samples"] for name in ("distill", "synthetic")} == {
            "distill": 600,
            "synthetic": 600,
        }
        assert {planned[name]["steps"] for name in ("distill", "synthetic")} == {300}, "passages are read once"

    def test_pairs_that_cannot_be_paired_are_distilled(self, animals: Animals, tmp_path: Path) -> None:
        """The layers of a Llama and of a GPT-2 have other roles."""
        tokenizer = gpt_tokenizer(300)
        tokenizer.model_max_length = 512
        target = write(tmp_path / "gpt2", make("gpt2", LARGE, vocab_size=300, n_positions=512), tokenizer)
        options = {"template": TEMPLATE, "routes": ("copy", "port", "distill"), "steps": STEPS, "samples": 40}
        found = upgrade(animals.base, animals.tuned, target, animals.texts, **options)
        for name in ("copy", "port"):
            assert "have roles q, k, v" in rows(found)[name].note
            assert rows(found)[name].agreement is None
        assert found.chosen == "distill"
        assert found.result is not None
        found.save(tmp_path / "out")
        assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


class TestWritten:
    def test_few_own_samples_are_judged_on_written_ones(
        self, run: Run, animals: Animals, place: Path, server: Server
    ) -> None:
        data = write_rows(place / "own.jsonl", [{"text": text} for text in TEXTS[:9]])
        more = ("--routes", "synthetic", "--steps", STEPS, "--synthetic", 24, "--generator-url", server.url)
        done = run(*words(animals, place / "out", *more, "--json", data=data))
        assert done.code == 0, done.err
        assert done.json["chosen"] == "synthetic"
        assert done.json["synthetic"]["texts"] == 24
        entry = done.json["distilled"]
        assert entry["samples"] == 9, "own samples are all taught"
        assert entry["extra"] + entry["held_out"] == 24 - 6, "a quarter of those written judges the routes"
        stored = [path for path in place.rglob("*") if path.is_file()]
        assert not any(b'"zx' in path.read_bytes() or b" zx" in path.read_bytes() for path in stored)
        assert (place / "out" / "disagreements.jsonl").read_text() == ""
        assert not list(place.glob(".*tuneport-work"))

    def test_own_samples_judge_if_nothing_can_be_written(
        self, run: Run, animals: Animals, place: Path, server: Server
    ) -> None:
        """The other routes go on, and the row of synthetic says why it did not."""
        server.change = lambda _: " zx"
        data = write_rows(place / "own.jsonl", [{"text": text} for text in TEXTS[:40]])
        more = ("--routes", "distill,synthetic", "--steps", STEPS, "--synthetic", 8, "--generator-url", server.url)
        done = run(*words(animals, place / "out", *more, "--json", data=data))
        assert done.code == 0, done.err
        found = {row["name"]: row for row in done.json["routes"]}
        assert done.json["chosen"] == "distill"
        entry = done.json["distilled"]
        assert entry["again"]
        assert entry["samples"] == 30, "a quarter of the own ones judges the routes"
        assert "written texts can be used" in found["synthetic"]["note"]
        assert "another `generator`.</p>" in (place / "out" / "report.html").read_text()
        few = write_rows(place / "few.jsonl", [{"text": text} for text in TEXTS[:12]])
        refused = run(*words(animals, place / "other", *more, data=few))
        assert_refused(refused, 1, "written texts can be used")
        assert not list(place.glob(".*tuneport-work")), "nothing is left of a run that is refused"

    def test_a_sentence_and_no_sample(self, run: Run, animals: Animals, place: Path, server: Server) -> None:
        more = ("--synthetic", 24, "--generator-url", server.url, "--describe", "Animals with an adjective")
        done = run(*words(animals, place / "out", *more, "--steps", STEPS, "--keep-texts", "--json", data=False))
        assert done.code == 0, done.err
        assert done.json["chosen"] in ("port", "synthetic")
        notes = {row["name"]: row["note"] for row in done.json["routes"]}
        assert "too few own samples" in notes["distill"]
        assert len((place / "out" / "texts.jsonl").read_text().splitlines()) == 24

    def test_texts_are_gone_also_where_nothing_is_written(
        self, run: Run, animals: Animals, place: Path, server: Server
    ) -> None:
        """The old model is the base itself, which never ends: nothing is learnt in a step."""
        more = ("--routes", "synthetic", "--synthetic", 12, "--generator-url", server.url, "--steps", 1)
        data = write_rows(place / "own.jsonl", [{"text": text} for text in TEXTS[:9]])
        options = words(animals, place / "out", *more, "--describe", "Animals", "--json", data=data)
        options[options.index("--finetuned") + 1] = animals.tuned
        options[options.index("--target") + 1] = animals.tuned
        done = run(*options)
        assert done.code == 0, done.err
        assert done.json["chosen"] is None
        assert sorted(path.name for path in place.iterdir()) == ["own.jsonl"]

    def test_nothing_says_what_to_write(self, run: Run, animals: Animals, place: Path) -> None:
        refused = run(*words(animals, place / "out", data=False))
        advice = "--describe 'Questions that customers ask their bank'", "--routes synthetic"
        assert_refused(refused, 2, "ten samples or more (no labels)", "--template", *advice)
        elsewhere = replace(animals, target=place / "none")
        for option in advice:  # each goes on to the models
            known = run(*words(elsewhere, place / "out", *shlex.split(option), data=False))
            assert_refused(known, 1, "none")
        with pytest.raises(OptionError, match="there are no samples, and nothing says what to write"):
            upgrade(animals.base, animals.tuned, animals.target)

    def test_sentences_for_a_text_classifier(self, tmp_path: Path) -> None:
        source, tuned, target, data = write_classifier(tmp_path)
        pairs = [f"{one}, {two}" for one in SENTENCES for two in SENTENCES[4:]]
        with serving() as found:
            found.change = lambda body: f" {pairs[int(body['seed']) % len(pairs)]}"
            options = {"routes": "synthetic", "steps": 2, "samples": 32, "synthetic": 12, "generator_url": found.url}
            result = upgrade(source, tuned, target, data, **options)
        table = rows(result)
        assert table["synthetic"].found is not None, table["synthetic"].note
        assert table["synthetic"].found.samples == 3, "written ones judge"
        assert table["old"].agreement == 100.0
        assert max(body["prompt"].count("\n- ") for body in found.bodies) == 8

    def test_a_classifier_without_a_generator_says_so(self, tmp_path: Path) -> None:
        source, tuned, target, data = write_classifier(tmp_path)
        found = upgrade(source, tuned, target, data, routes="synthetic", synthetic=8)
        assert "a classifier writes no samples" in rows(found)["synthetic"].note


class KillError(Exception):
    """Stands for a kill."""


class TestResume:
    """A run that was killed ends in the same weights; texts and two trainings are on the way.

    The first training is killed for real.
    """

    def inputs(self, animals: Animals, data: Path, out: Path) -> TransferInputs:
        names = {"source": animals.base, "target": animals.target, "data": data, "out": out}
        return TransferInputs(finetuned=(str(animals.tuned),), **{name: str(path) for name, path in names.items()})

    @pytest.fixture
    def own(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """So few samples that written ones judge, and too few for a probe."""
        return write_rows(tmp_path_factory.mktemp("own") / "own.jsonl", [{"text": text} for text in TEXTS[:9]])

    def config(self, server: Server, **more: Any) -> UpgradeConfig:
        given = {"template": TEMPLATE, "steps": 4, "synthetic": 12, "routes": ("distill", "synthetic")}
        return UpgradeConfig.of(**given, generator_url=server.url, save_every=0, **more)

    def test_killed_at_several_moments(self, animals: Animals, own: Path, place: Path, server: Server) -> None:
        config = self.config(server)
        moments: list[int] = []
        record = upgrade_to_folder(
            self.inputs(animals, own, place / "whole"), config, Listener(progress=moments.append)
        )
        assert record["chosen"] is not None
        name = "adapter_model.safetensors"
        whole = (place / "whole" / name).read_bytes()
        for moment in (2, len(moments) - 3):
            left = moment

            def stop(_: int) -> None:
                nonlocal left
                left -= 1
                if not left:
                    raise KillError

            out = place / f"out{moment}"
            with pytest.raises(KillError):
                upgrade_to_folder(self.inputs(animals, own, out), config, Listener(progress=stop))
            assert not out.exists()
            again = upgrade_to_folder(self.inputs(animals, own, out), self.config(server, resume=True))
            assert again["chosen"] == record["chosen"]
            assert (out / name).read_bytes() == whole
        assert not list(place.glob(".*tuneport-work"))

    def test_a_real_kill(self, animals: Animals, run: Run, place: Path) -> None:
        program = """
import os, runpy, signal
from builders.exams import shorten_exams
from tuneport.training.distill import _Run
shorten_exams()
save = _Run.save
def killed(self, step, *more):
    save(self, step, *more)
    if step == 2:
        os.kill(os.getpid(), signal.SIGKILL)
_Run.save = killed
runpy.run_module("tuneport", run_name="__main__", alter_sys=True)
"""
        more = ("--routes", "distill", "--samples", 24, "--steps", 4)
        given = words(animals, place / "out", *more, "--save-every", 0)
        done = run_program(program, *map(str, given))
        assert done.code == -9, done.err
        assert not (place / "out").exists()
        assert (place / ".out.tuneport-work").is_dir()
        other = run(*given, "--seed", 3, "--resume")
        assert_refused(other, 1, "cannot be resumed: options.seed was 0 and is 3")
        assert run(*given, "--resume").code == 0
        at = given.index("--out") + 1
        assert run(*given[:at], place / "whole", *given[at + 1 :]).code == 0
        name = "adapter_model.safetensors"
        assert (place / "out" / name).read_bytes() == (place / "whole" / name).read_bytes()
        assert_refused(run(*given), 1, "exists already", "--overwrite")
        assert_refused(run(*given, "--seed", 3, "--resume"), 1, "exists already", "--overwrite")

    def test_killed_after_the_output_was_complete(
        self, animals: Animals, own: Path, place: Path, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Running again removes what the run has kept, written texts too, and changes no file."""
        remove = Work.remove

        def killed(work: Work) -> None:
            if (place / "out").exists():
                raise KillError
            remove(work)

        config, inputs = self.config(server, keep_texts=True), self.inputs(animals, own, place / "out")
        with monkeypatch.context() as patch:
            patch.setattr(Work, "remove", killed)
            with pytest.raises(KillError):
                upgrade_to_folder(inputs, config)
        assert list(place.glob(".*tuneport-work"))
        before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (place / "out").iterdir()}
        record = upgrade_to_folder(inputs, self.config(server, keep_texts=True, resume=True))
        assert record["chosen"] is not None
        assert not list(place.glob(".*tuneport-work"))
        assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (place / "out").iterdir()}
