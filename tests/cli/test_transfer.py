"""`tuneport transfer`: what it writes and prints, and how it is resumed."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builders.commands import Run, assert_refused, npz, options, run_apart
from builders.folders import Zoo, images
from tuneport.io.output import claimed
from tuneport.measure import capture


class TestTransfer:
    def test_json_in_a_process_of_its_own(self, zoo: Zoo, place: Path) -> None:
        done = run_apart("transfer", "--scale=1", *options(zoo), "--out", str(place / "out"), "--json")
        assert done.code == 0, done.err
        record = done.json
        assert "Traceback" not in done.err
        assert [file.name for file in place.iterdir()] == ["out"]
        assert record == json.loads((place / "out" / "tuneport.json").read_text())

    def test_the_json_of_the_contract(self, run: Run, zoo: Zoo, place: Path) -> None:
        out = place / "out"
        done = run("transfer", *options(zoo, "vit", scale=0.5, seed=2), "--out", out, "--json")
        assert done.code == 0, done.err
        record = done.json
        assert {"out", "method", "scale", "samples", "seconds", "layers", "not_transported"} <= set(record)
        assert (record["out"], record["method"], record["scale"]) == (str(out), "bico", 0.5)
        assert record["samples"] == 24
        fields = {"target", "source", "rank_in", "rank_out", "residual_in", "residual_out", "norm_source"}
        assert all(fields | {"norm_target"} <= set(layer) for layer in record["layers"])
        assert all(set(item) == {"tensor", "reason"} for item in record["not_transported"])
        assert {"config.json", "model.safetensors", "README.md", "tuneport.json", "report.html"} <= {
            file.name for file in out.iterdir()
        }

    def test_the_words_for_people(self, run: Run, zoo: Zoo, place: Path) -> None:
        out = place / "a [bold]name[dim] with markup"
        done = run("transfer", "--scale=1", *options(zoo, head="animals"), "--out", out)
        assert done.code == 0
        first, *_ = done.out.splitlines()
        assert first.startswith(f"written to {out}: a model; ")
        assert f"report: {out}/report.html\n" in done.out
        assert f"next: tuneport evaluate {shlex.quote(str(out))} --data {zoo.data} --head animals\n" in done.out
        more = run("transfer", "--scale=1", *options(zoo, head="animals"), "--out", out, "--overwrite", "--verbose")
        for words in ("20 layers changed", "residual", "  kept "):
            assert words not in done.out
            assert words in more.out
        assert len(done.out.splitlines()) <= 9

    def test_every_option_reaches_the_record(self, run: Run, zoo: Zoo, place: Path) -> None:
        more = ["--exclude", "visual_projection.*", "--exclude", "*.bias", "--batch-size", "7", "--device", "cpu"]
        given = options(zoo, samples=None, shots=3, sampler="class_balanced", seed=4, method="theseus")
        done = run("transfer", "--scale=1", *given, *more, "--out", place / "out", "--json")
        assert done.code == 0, done.err
        recorded = done.json["options"]
        assert recorded["exclude"] == ["visual_projection.*", "*.bias"]
        assert (recorded["samples"], recorded["shots"], recorded["sampler"]) == (None, 3, "class_balanced")
        assert (recorded["seed"], recorded["scale"], recorded["batch_size"]) == (4, 1.0, 7)
        assert (recorded["device"], done.json["resolved"]["device"], done.json["samples"]) == ("cpu", "cpu", 9)
        assert done.json["method"] == "theseus"

    @pytest.mark.usefixtures("no_forward")
    def test_evaluate_looks_for_labels_first(self, run: Run, zoo: Zoo, place: Path) -> None:
        bare = npz(place / "bare.npz", x=images(30, 1)[0])
        words = options(zoo, data=bare, head="animals", labels="source")
        done = run("transfer", "--scale=1", *words, "--evaluate", "--out", place / "out")
        assert_refused(done, 1, "bare.npz has no labels")
        done = run("transfer", *options(zoo, data=None, method="naive"), "--evaluate", "--out", place / "out")
        assert_refused(done, 1, "an accuracy needs labelled data and a head for it: pass --data.")

    def test_labels_of_the_source(self, run: Run, zoo: Zoo, place: Path) -> None:
        np.savez(place / zoo.data.name, x=np.load(zoo.data)["x_train"])
        source, tuned, target = zoo.trio("clip_vision")
        done = run(
            "transfer", "--source", source, "--finetuned", tuned, "--target", target, "--data", place / zoo.data.name,
            "--samples", 12, "--labels", "source", "--verbose", "--out", place / "out",
        )  # fmt: skip
        assert done.code == 0, done.err
        assert "12, labelled by the fine-tuned source" in done.out
        assert "12 samples labelled by the fine-tuned source" in done.err
        planned = run("plan", *options(zoo, data=place / zoo.data.name, labels="source", samples=12))
        assert planned.code == 0, planned.err
        naive = options(zoo, data=None, samples=None, labels="source", method="naive")
        unused = run("transfer", *naive, "--out", place / "naive")
        assert unused.code == 0, unused.err
        assert "labelled" not in unused.err
        assert "--labels source" in (place / "out" / "report.html").read_text(encoding="utf-8")

    def test_overwrite(self, run: Run, zoo: Zoo, place: Path) -> None:
        (place / "out").mkdir()
        for name in ("old", "tuneport.json"):
            (place / "out" / name).write_text("")
        done = run("transfer", "--scale=1", *options(zoo, method="naive"), "--out", place / "out", "--overwrite")
        assert done.code == 0, done.err
        assert [file.name for file in place.iterdir()] == ["out"]
        assert not (place / "out" / "old").exists()

    def test_naive_without_data(self, run: Run, zoo: Zoo, place: Path) -> None:
        done = run("transfer", *options(zoo, data=None, samples=None, method="naive"), "--out", place / "out", "--json")
        assert done.code == 0, done.err
        assert done.json["samples"] == 0

    def test_as_a_task_vector_and_again(self, run: Run, zoo: Zoo, place: Path) -> None:
        tau = place / "tau.safetensors"
        common = [*options(zoo, "vit"), "--head-fit", "none"]  # a task vector cannot hold a fitted head
        assert run("transfer", "--scale=1", *common, "--out", place / "model").code == 0
        assert run("transfer", "--scale=1", *common, "--as", "task-vector", "--out", tau).code == 0
        again = run("transfer", "--scale=1", *common, "--as", "task-vector", "--out", tau, "--overwrite", "--json")
        assert again.code == 0, again.err
        assert again.json["out"] == str(tau)
        assert run("apply", tau, zoo["vit-target"], "-o", place / "applied").code == 0
        first, second = (load_file(place / name / "model.safetensors") for name in ("model", "applied"))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert sorted(file.name for file in place.iterdir()) == ["applied", "model", "tau.safetensors"]

    def test_a_task_vector_file_as_the_fine_tune(self, run: Run, zoo: Zoo, place: Path) -> None:
        tau, whole = place / "tau.safetensors", ("--head-fit", "none")  # a fitted head differs in rounding
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
        assert (
            run("transfer", "--scale=1", *options(zoo, "vit", finetuned=tau), *whole, "--out", place / "one").code == 0
        )
        assert run("transfer", "--scale=1", *options(zoo, "vit"), *whole, "--out", place / "two").code == 0
        one, two = ((place / name / "model.safetensors").read_bytes() for name in ("one", "two"))
        assert one == two


def test_the_next_line_can_be_pasted(run: Run, zoo: Zoo, place: Path) -> None:
    data = Path(shutil.copy(zoo.data, place / "x; touch INJECTED #$(touch TOO).npz"))
    done = run("transfer", "--scale=1", *options(zoo, data=data), "--out", place / "it's out")
    assert done.code == 0, done.err
    line = done.out.splitlines()[-1].removeprefix("next: ")
    assert shlex.split(line) == ["tuneport", "evaluate", str(place / "it's out"), "--data", str(data)]
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True, cwd=place
    )
    assert words.stdout.splitlines() == shlex.split(line)
    assert not list(place.glob("*INJECTED")) + list(place.glob("TOO"))


class TestSpace:
    """Too little space on the disk is noticed before anything is measured."""

    @pytest.mark.parametrize(
        ("more", "least"),
        [
            (["--as", "model"], 31_000),
            (["--as", "adapter", "--rank", "2"], 2**20),
            (["--as", "task-vector"], 10_000),
        ],
    )
    @pytest.mark.usefixtures("no_forward")
    def test_of_a_transfer(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], least: int
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=least))
        out = place / ("tau.safetensors" if "task-vector" in more else "out")
        assert_refused(
            run("transfer", "--scale=1", *options(zoo), *more, "--out", out), 1, "needs about", "are free in"
        )
        assert list(place.iterdir()) == []

    def test_of_companions(self, run: Run, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        target = shutil.copytree(zoo["clip_vision-target"], tmp_path / "target")
        with (target / "big.txt").open("wb") as file:
            file.truncate(50 * 2**20)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=40 * 2**20))
        done = run("transfer", "--scale=1", *options(zoo, target=target), "--out", tmp_path / "out")
        assert_refused(done, 1, "needs about 51.", "but only 40.00 MiB are free")

    def test_of_extract(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        done = run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", place / "tau.safetensors")
        assert_refused(done, 1, "needs about", "are free in")
        assert list(place.iterdir()) == []


@pytest.mark.usefixtures("no_forward")
def test_a_companion_that_links_elsewhere_is_refused_first(run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
    target = shutil.copytree(zoo["clip_vision-target"], tmp_path / "target")
    (tmp_path / "secret").write_text("private")
    (target / "notes.txt").symlink_to(tmp_path / "secret")
    assert_refused(
        run("transfer", "--scale=1", *options(zoo, target=target), "--out", place / "out"), 1, "outside its folder"
    )
    assert list(place.iterdir()) == []


class TestResume:
    def test_a_killed_run_is_resumed(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An interrupt after some batches stands for the kill; tests/test_resume.py kills for real."""
        command = [
            "transfer",
            "--scale",
            "1",
            *options(zoo),
            "--batch-size",
            "4",
            "--save-every",
            "0",
            "--out",
            place / "out",
        ]
        assert run(*command[:-1], place / "whole").code == 0
        finish, batches = capture._Accumulator.finish, []

        def interrupted(self: Any, index: int) -> None:
            batches.append(index)
            if len(batches) == 4:
                raise KeyboardInterrupt
            finish(self, index)

        with monkeypatch.context() as patched:
            patched.setattr(capture._Accumulator, "finish", interrupted)
            done = run(*command)
        assert done.code == 130
        assert "note: what was measured is kept; the same call with --resume continues from it" in done.err
        assert not (place / "out").exists()
        assert_refused(run(*command, "--seed", "5", "--resume"), 1, "cannot be resumed: options.seed was 0 and is 5")
        done = run(*command, "--resume", "--json")
        assert done.code == 0, done.err
        assert done.warnings == "note: continuing what an earlier run has saved\n"
        assert done.json["passes"]["forward"] == 6
        assert sorted(file.name for file in place.iterdir()) == ["out", "whole"]
        first, second = ((place / name / "model.safetensors").read_bytes() for name in ("out", "whole"))
        assert first == second
        again = run(*command, "--resume", "--json")
        assert again.json == done.json
        assert again.err == f"note: {place / 'out'} was complete already\n"

    def test_two_runs_into_one_output(self, run: Run, zoo: Zoo, place: Path) -> None:
        found: list[str] = []

        def elsewhere() -> None:
            with claimed(place / "out"):
                found.append("claimed")
                started.set()
                ready.wait()

        started, ready = threading.Event(), threading.Event()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        try:
            assert started.wait(600)
            done = run("transfer", "--scale=1", *options(zoo), "--out", place / "out", "--overwrite")
        finally:
            ready.set()
            thread.join()
        assert_refused(done, 1, "is writing", "Wait until it ends, or choose another name.")
        assert list(place.iterdir()) == []


class TestPlaces:
    def test_missing_folders_above_an_output_are_made_and_go_with_a_refusal(
        self, run: Run, zoo: Zoo, place: Path
    ) -> None:
        out = place / "missing" / "too" / "out"
        refused = run("transfer", *options(zoo, samples=1000), "--out", out)
        assert_refused(refused, 1, "has 60; lower --samples")
        assert list(place.iterdir()) == []
        assert run("transfer", "--scale=1", *options(zoo, method="naive"), "--out", out).code == 0
        assert (out / "tuneport.json").is_file()
        below = run("transfer", "--scale=1", *options(zoo), "--out", out / "tuneport.json" / "out")
        assert_refused(below, 1, "cannot be written", "tuneport.json is not a folder")

    def test_a_file_that_the_user_added_survives_overwrite(self, run: Run, zoo: Zoo, place: Path) -> None:
        words = ("transfer", "--scale=1", *options(zoo, method="naive"), "--out", place / "out", "--overwrite")
        assert run(*words).code == 0
        assert run(*words).code == 0, "what a run wrote is replaced"
        (place / "out" / "notes").mkdir()
        (place / "out" / "notes" / "mine.txt").write_text("mine")
        assert_refused(run(*words), 1, "notes/mine.txt in it was not written by this command. Move it away")
        assert (place / "out" / "notes" / "mine.txt").read_text() == "mine"
