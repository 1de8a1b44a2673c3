"""The command line as a contract: what goes to stdout, the exit codes, and one clear line for every bad input."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from builders.folders import Zoo, edit_weights, images, write_data, write_head
from tuneport import __version__, cli
from tuneport.cli import terminal
from tuneport.io.output import claimed
from tuneport.io.sizes import format_bytes
from tuneport.measure import capture
from tuneport.measure.accuracy import Evaluation
from tuneport.methods import METHODS

COMMANDS = ("transfer", "plan", "compare", "extract", "apply", "evaluate", "methods", "samplers", "demo", "bench")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        content = json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert isinstance(content, dict)
        return content


Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the program's entry point in this process."""

    def call(*arguments: Any) -> Done:
        monkeypatch.setattr(sys, "argv", ["tuneport", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return Done(int(left.value.code or 0), out, err)

    return call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for outputs, to see what is left in it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def options(zoo: Zoo, family: str = "clip_vision", **changes: Any) -> list[str]:
    """The options of transfer and plan, with changes; None drops one."""
    source, finetuned, target = zoo.trio(family)
    given = {"source": source, "finetuned": finetuned, "target": target, "data": zoo.data, "samples": 24, **changes}
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]


def subprocess_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuneport", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


class TestHelp:
    def test_help_waits_for_no_heavy_library(self) -> None:
        program = f"""
import sys
from tuneport.cli import main
for words in ([], *([name] for name in {COMMANDS!r})):
    sys.argv = ["tuneport", *words, "--help"]
    try:
        main()
    except SystemExit as done:
        assert done.code == 0, words
heavy = {{"torch", "transformers", "numpy", "sklearn", "safetensors", "PIL"}} & set(sys.modules)
assert not heavy, heavy
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        for name in COMMANDS:
            assert f"tuneport {name}" in done.stdout

    def test_the_overview_lists_every_command(self, run: Run) -> None:
        done = run("--help")
        assert done.code == 0
        for name in COMMANDS:
            assert re.search(rf"\b{name}\b", done.out)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_each_command_explains_itself(self, run: Run, name: str) -> None:
        done = run(name, "-h")
        assert (done.code, done.err) == (0, "")
        assert "Usage" in done.out
        if name not in ("methods", "samplers"):
            assert "Example: tuneport" in " ".join(done.out.split())

    def test_version(self, run: Run) -> None:
        done = run("--version")
        assert (done.code, done.out, done.err) == (0, f"tuneport {__version__}\n", "")


class TestTransfer:
    def test_json_in_a_process_of_its_own(self, zoo: Zoo, place: Path) -> None:
        done = subprocess_run("transfer", *options(zoo), "--out", str(place / "out"), "--json")
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert "Traceback" not in done.stderr
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
        done = run("transfer", *options(zoo, head="animals"), "--out", out)
        assert done.code == 0
        assert f"written to {out}, report in report.html\n" in done.out
        assert f"next: tuneport evaluate {out} --data {zoo.data} --head animals\n" in done.out
        assert "20 layers" in done.out
        assert "kept" in done.out

    def test_every_option_reaches_the_record(self, run: Run, zoo: Zoo, place: Path) -> None:
        more = ["--exclude", "visual_projection.*", "--exclude", "*.bias", "--batch-size", "7", "--device", "cpu"]
        given = options(zoo, samples=None, shots=3, sampler="class_balanced", seed=4, method="theseus")
        done = run("transfer", *given, *more, "--completion", "none", "--out", place / "out", "--json")
        assert done.code == 0, done.err
        recorded = done.json["options"]
        assert recorded["exclude"] == ["visual_projection.*", "*.bias"]
        assert (recorded["samples"], recorded["shots"], recorded["sampler"]) == (9, 3, "class_balanced")
        assert (recorded["seed"], recorded["completion"], recorded["batch_size"]) == (4, "none", 7)
        assert recorded["device"] == "cpu"
        assert done.json["method"] == "theseus"

    @pytest.mark.usefixtures("no_forward")
    def test_evaluate_looks_for_labels_first(self, run: Run, zoo: Zoo, place: Path) -> None:
        bare = npz(place / "bare.npz", x=images(30, 1)[0])
        words = options(zoo, data=bare, head="animals", labels="source")
        done = run("transfer", *words, "--evaluate", "--out", place / "out")
        assert_refused(done, 1, "bare.npz has no labels")
        done = run("transfer", *options(zoo, data=None, method="naive"), "--evaluate", "--out", place / "out")
        assert_refused(done, 1, "an accuracy needs labelled data and a head for it: pass --data.")

    def test_labels_of_the_source(self, run: Run, zoo: Zoo, place: Path) -> None:
        np.savez(place / zoo.data.name, x=np.load(zoo.data)["x_train"])
        source, tuned, target = zoo.trio("clip_vision")
        done = run(
            "transfer", "--source", source, "--finetuned", tuned, "--target", target, "--data", place / zoo.data.name,
            "--samples", 12, "--labels", "source", "--out", place / "out",
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
        done = run("transfer", *options(zoo, method="naive"), "--out", place / "out", "--overwrite")
        assert done.code == 0, done.err
        assert [file.name for file in place.iterdir()] == ["out"]
        assert not (place / "out" / "old").exists()

    def test_naive_without_data(self, run: Run, zoo: Zoo, place: Path) -> None:
        done = run("transfer", *options(zoo, data=None, samples=None, method="naive"), "--out", place / "out", "--json")
        assert done.code == 0, done.err
        assert done.json["samples"] == 0

    def test_as_a_task_vector_and_again(self, run: Run, zoo: Zoo, place: Path) -> None:
        tau = place / "tau.safetensors"
        common = options(zoo, "vit")
        assert run("transfer", *common, "--out", place / "model").code == 0
        assert run("transfer", *common, "--as", "task-vector", "--out", tau).code == 0
        again = run("transfer", *common, "--as", "task-vector", "--out", tau, "--overwrite", "--json")
        assert again.code == 0, again.err
        assert again.json["out"] == str(tau)
        assert run("apply", tau, zoo["vit-target"], "-o", place / "applied").code == 0
        first, second = (load_file(place / name / "model.safetensors") for name in ("model", "applied"))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert sorted(file.name for file in place.iterdir()) == ["applied", "model", "tau.safetensors"]

    def test_a_task_vector_file_as_the_fine_tune(self, run: Run, zoo: Zoo, place: Path) -> None:
        tau = place / "tau.safetensors"
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
        assert run("transfer", *options(zoo, "vit", finetuned=tau), "--out", place / "one").code == 0
        assert run("transfer", *options(zoo, "vit"), "--out", place / "two").code == 0
        one, two = ((place / name / "model.safetensors").read_bytes() for name in ("one", "two"))
        assert one == two


class TestPlan:
    @pytest.mark.usefixtures("no_forward")
    def test_json(self, run: Run, zoo: Zoo) -> None:
        done = run("plan", *options(zoo), "--json")
        assert done.code == 0
        assert len(done.json["layers"]) == 20
        assert done.json["samples"] == 24
        assert {"layers", "not_transported", "expected"} <= set(done.json)

    def test_names_of_fused_layers_are_shown_whole(self, run: Run, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tuneport.cli.terminal.out_console", Console(width=300))
        done = run("plan", *options(zoo, "siglip_vision"))
        assert done.code == 0
        assert "head.attention.in_proj_weight[q]" in done.out
        assert "kept" in done.out
        assert "expected:" in done.out

    def test_names_are_not_cut_in_a_narrow_window(self, run: Run, zoo: Zoo) -> None:
        done = run("plan", *options(zoo))
        assert "…" not in done.out

    def test_sizes_are_shown_as_everywhere(self, run: Run, zoo: Zoo) -> None:
        size = run("plan", *options(zoo), "--json").json["expected"]["statistics_bytes"]
        assert f"expected: {format_bytes(size)} of statistics," in run("plan", *options(zoo)).out


class TestCompare:
    def test_json(self, run: Run, zoo: Zoo, place: Path) -> None:
        source, tuned, target = zoo.trio("clip_vision")
        done = run("compare", source, target, "--data", zoo.data, "--finetuned", tuned, "--samples", 24, "--json")
        found = done.json
        assert found["samples"] == 24
        assert found["verdict"]["verdict"] in ("likely to help", "uncertain", "unlikely to help")
        assert found["verdict"]["trial"]["samples"] == 24
        assert {item["signal"] for item in found["similarity"]} == set(found["summary"])
        assert not list(place.iterdir()), "nothing is written"

    def test_words(self, run: Run, zoo: Zoo) -> None:
        source, _, target = zoo.trio("clip_vision")
        done = run("compare", source, target, "--data", zoo.data, "--samples", 16)
        assert done.code == 0
        assert "verdict: uncertain" in done.out
        assert "no fine-tune was given" in done.out

    def test_a_transfer_with_verdict_and_accuracy(self, run: Run, zoo: Zoo, place: Path) -> None:
        out = place / "checked"
        record = run("transfer", *options(zoo, out=out), "--compare", "--evaluate", "--json").json
        after = run("evaluate", out, "--data", zoo.data, "--json").json
        before = run("evaluate", zoo["clip_vision-target"], "--data", zoo.data, "--json").json
        found = record["evaluation"]
        assert (found["before"], found["after"]) == (before["accuracy"], after["accuracy"])
        assert record["verdict"]["verdict"] in (out / "report.html").read_text()

    def test_too_few_samples(self, run: Run, zoo: Zoo) -> None:
        source, _, target = zoo.trio("clip_vision")
        done = run("compare", source, target, "--data", zoo.data, "--samples", 3)
        assert_refused(done, 1, "at least 8 samples")

    def test_accuracy_needs_data(self, run: Run, zoo: Zoo, place: Path) -> None:
        given = ("--source", zoo["vit-base"], "--finetuned", zoo["vit-tuned"], "--target", zoo["vit-target"])
        done = run("transfer", *given, "--method", "naive", "--out", place / "out", "--evaluate")
        assert_refused(done, 1, "--data")


class TestExtractAndApply:
    def test_a_round_trip(self, run: Run, zoo: Zoo, place: Path) -> None:
        base, tuned, tau = zoo["vit-base"], zoo["vit-tuned"], place / "tau.safetensors"
        done = run("extract", base, tuned, "-o", tau, "--json")
        assert done.code == 0
        assert done.json["out"] == str(tau)
        assert done.json["tensors"] == 40
        assert done.json["norm"] > 0
        done = run("apply", tau, base, "-o", place / "again", "--json")
        assert done.code == 0
        assert done.json == {"out": str(place / "again"), "tensors": 40, "scale": 1.0}
        first, second = load_file(place / "again" / "model.safetensors"), load_file(tuned / "model.safetensors")
        for name in second:
            torch.testing.assert_close(first[name], second[name], atol=1e-7, rtol=2e-7)
        assert run("apply", tau, base, "-o", place / "none", "--scale", "0").code == 0
        untouched = load_file(place / "none" / "model.safetensors")
        assert all(
            torch.equal(tensor, untouched[name]) for name, tensor in load_file(base / "model.safetensors").items()
        )

    def test_the_words_for_people(self, run: Run, zoo: Zoo, place: Path) -> None:
        tau = place / "[red]tau.safetensors"
        done = run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau, "--exclude", "classifier.*")
        assert done.code == 0
        assert re.fullmatch(rf"38 tensors, norm [\d.]+, written to {re.escape(str(tau))}\n", done.out)

    def test_nothing_to_extract(self, run: Run, zoo: Zoo, place: Path) -> None:
        base, tuned, tau = zoo["vit-base"], zoo["vit-tuned"], place / "tau.safetensors"
        assert_refused(run("extract", base, base, "-o", tau), 1, "equals its base", "there is nothing to extract")
        done = run("extract", base, tuned, "-o", tau, "--exclude", "*")
        assert_refused(done, 1, '--exclude "*" leaves no tensor', "there is nothing to extract. Exclude less")
        assert list(place.iterdir()) == []

    def test_patterns_that_match_nothing_are_told(self, run: Run, zoo: Zoo, place: Path) -> None:
        base, tuned, tau = zoo["vit-base"], zoo["vit-tuned"], place / "tau.safetensors"
        words = ("--exclude", "classifier.*", "--exclude", "clasifier.*")
        line = "no tensor has a name like 'clasifier.*' of `exclude`"
        printed = "note: no tensor has a name like 'clasifier.*' of --exclude\n"
        done = run("extract", base, tuned, "-o", tau, *words)
        assert (done.code, done.err) == (0, printed)
        done = run("plan", *options(zoo, "vit"), *words)
        assert (done.code, done.err) == (0, printed)
        done = run("transfer", *options(zoo, "vit"), *words, "--out", place / "out", "--json")
        assert done.json["notes"] == [line]
        done = run("plan", *options(zoo, "vit", finetuned=tau), "--exclude", "classifier.*")
        assert (done.code, done.err) == (0, "")
        for finetuned in (tuned, tau):
            done = run("plan", *options(zoo, "vit", finetuned=finetuned), "--exclude", "*")
            assert_refused(done, 1, '--exclude "*" leaves no tensor', "there is nothing to transfer")

    def test_extract_does_not_replace_an_input(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        base = Path(shutil.copytree(zoo["vit-base"], tmp_path / "base"))
        before = (base / "model.safetensors").read_bytes()
        for target in (base / "model.safetensors", tmp_path / "base" / "config.json"):
            done = run("extract", base, zoo["vit-tuned"], "-o", target, "--overwrite")
            assert_refused(done, 1, "cannot be overwritten: it is part of the input")
        assert (base / "model.safetensors").read_bytes() == before

    def test_apply_does_not_replace_an_input(self, run: Run, zoo: Zoo, place: Path) -> None:
        (place / "out").mkdir()
        tau = place / "out" / "tau.safetensors"
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
        done = run("apply", tau, zoo["vit-base"], "-o", place / "out", "--overwrite")
        assert_refused(done, 1, "cannot be overwritten: it holds the input", str(tau))
        assert tau.is_file()

    @pytest.mark.parametrize("scale", ["nan", "inf"])
    def test_a_scale_that_is_no_number(self, run: Run, zoo: Zoo, place: Path, scale: str) -> None:
        tau = place / "tau.safetensors"
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
        assert_refused(run("apply", tau, zoo["vit-base"], "-o", place / "out", "--scale", scale), 1, "finite number")
        assert [file.name for file in place.iterdir()] == ["tau.safetensors"]

    def test_bad_input(self, run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
        base, tuned, out = zoo["vit-base"], zoo["vit-tuned"], place / "out.safetensors"
        assert_refused(run("extract", base, zoo["dinov2-tuned"], "-o", out), 1, "Check that", "was fine-tuned from")
        assert_refused(run("extract", base, tmp_path / "nowhere", "-o", out), 1, "nowhere does not exist")
        assert_refused(run("apply", base, base, "-o", out), 1, "is a folder, not a task vector")
        file = tuned / "model.safetensors"
        assert_refused(run("apply", file, base, "-o", out), 1, "is not a task vector", "tuneport extract")
        nan = Path(shutil.copytree(tuned, tmp_path / "nan"))
        edit_weights(nan, lambda t: t["classifier.bias"].fill_(torch.nan))
        assert_refused(run("extract", base, nan, "-o", out), 1, "hold NaN or infinite values: classifier.bias")
        tau = tmp_path / "tau.safetensors"
        assert run("extract", base, tuned, "-o", tau).code == 0
        assert_refused(run("apply", tau, zoo["vit-target"], "-o", out), 1, "do not fit the base")
        assert_refused(run("apply", tau, base, "-o", base, "--overwrite"), 1, "it holds the input")
        assert_refused(run("extract", base, tuned, "-o", tau), 1, "exists already", "--overwrite")
        assert list(place.iterdir()) == []

    @pytest.mark.parametrize("name", ["tau", "tau.tv", "tau.safetensors.bak"])
    def test_a_name_by_which_the_file_would_not_be_known(self, run: Run, zoo: Zoo, place: Path, name: str) -> None:
        line = f"{place / name} must end in .safetensors"
        assert_refused(run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", place / name), 1, line)
        assert_refused(run("transfer", *options(zoo), "--as", "task-vector", "--out", place / name), 1, line)
        assert list(place.iterdir()) == []


class TestEvaluate:
    def test_zero_shot_json(self, run: Run, zoo: Zoo) -> None:
        done = run("evaluate", zoo["clip_vision-base"], "--data", zoo.data, "--head", "animals", "--json")
        assert done.code == 0
        assert {"accuracy", "samples", "protocol"} <= set(done.json)
        assert 0 <= done.json["accuracy"] <= 100
        assert (done.json["samples"], done.json["protocol"]) == (30, "zero-shot")

    @pytest.mark.parametrize("family", ["vit", "clip", "siglip"])
    def test_classifiers_and_text_towers(self, run: Run, zoo: Zoo, family: str) -> None:
        done = run("evaluate", zoo[f"{family}-base"], "--data", zoo.data)
        assert done.code == 0
        assert re.fullmatch(r"\d+\.\d\d % of 30 samples right \(zero-shot\)\n", done.out)

    def test_numbers_that_json_has_no_word_for(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endless = Evaluation(0.0, 30, "perplexity", float("inf"), 60)
        monkeypatch.setattr("tuneport.measure.accuracy.zero_shot", lambda *_, **__: endless)
        done = run("evaluate", zoo["vit-base"], "--data", zoo.data, "--json")
        assert (done.code, done.json["perplexity"], done.json["tokens"]) == (0, None, 60)
        monkeypatch.setattr("tuneport.task_vectors.vector.save_task_vector", lambda *_, **__: float("nan"))
        done = run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", place / "tau.safetensors", "--json")
        assert (done.code, done.json["norm"]) == (0, None)

    def test_linear_probe(self, run: Run, zoo: Zoo) -> None:
        common = ["evaluate", zoo["clip_vision-base"], "--data", zoo.data, "--protocol", "linear-probe", "--json"]
        done = run(*common)
        assert done.code == 0
        assert done.json["protocol"] == "linear-probe"
        assert done.json["accuracy"] > 60, "the classes differ in colour"
        assert run(*common, "--samples", "12", "--seed", "1").json["samples"] == 30

    def test_a_transferred_model(self, run: Run, zoo: Zoo, place: Path) -> None:
        assert run("transfer", *options(zoo), "--out", place / "out").code == 0
        assert run("evaluate", place / "out", "--data", zoo.data, "--json").code == 0

    def test_bad_input(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        model, data = zoo["clip_vision-base"], zoo.data
        (tmp_path / "texts.csv").write_text("text,label\nhello,cat\nbye,dog\n")
        write_data(tmp_path / "animals.npz", ("cat", "dog", "gnu"))
        expected: list[tuple[Sequence[Any], tuple[str, ...]]] = [
            ((model, "--data", data, "--protocol", "zeroshot"), ("unknown protocol 'zeroshot'", "Did you mean")),
            ((model, "--data", data, "--head", "plants"), ("has no head 'plants': it has animals",)),
            ((model, "--data", data, "--device", "cuda:99"), ("device 'cuda:99' is not available",)),
            ((model, "--data", tmp_path / "texts.csv"), ("holds texts, but", "reads images")),
            ((model, "--data", tmp_path / "animals.npz"), ("unknown to the head: gnu",)),
            ((model, "--data", tmp_path / "nothing"), ("no data at",)),
            ((tmp_path / "nothing", "--data", data), ("there is no model at",)),
            ((model, "--data", data, "--protocol", "linear-probe", "--samples", "0"), ("at least 1 in --samples",)),
            ((model, "--data", data, "--protocol", "linear-probe", "--samples", "99"), ("lower --samples",)),
        ]
        for arguments, words in expected:
            assert_refused(run("evaluate", *arguments), 1, *words)


class TestLists:
    def test_methods(self, run: Run) -> None:
        assert run("methods", "--json").json == {name: method.summary for name, method in METHODS.items()}
        done = run("methods")
        assert all(re.search(rf"^{name} ", done.out, re.MULTILINE) for name in METHODS)

    def test_samplers(self, run: Run) -> None:
        names = {"random", "class_balanced", "centroid_near", "centroid_far", "half_class", "single_class"}
        assert set(run("samplers", "--json").json) == names
        assert all(name in run("samplers").out for name in names)


def assert_refused(done: Done, code: int, *words: str) -> None:
    """One clear line on stderr, nothing on stdout."""
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    if code == 1:
        assert done.err.endswith("\n")
        assert done.err.count("\n") == 1, done.err
        assert "unexpected" not in done.err
        assert re.match(r"\w*Error: \S", done.err)
    for word in words:
        assert word in done.err, done.err


def nan_folder(zoo: Zoo, tmp_path: Path, part: str) -> Path:
    folder = Path(shutil.copytree(zoo[f"clip_vision-{part}"], tmp_path / f"nan-{part}"))
    return edit_weights(folder, lambda t: t["visual_projection.weight"].fill_(torch.nan))


def other_shapes(zoo: Zoo, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(zoo["clip_vision-tuned"], tmp_path / "other"))
    return edit_weights(folder, lambda t: t.update({"visual_projection.weight": torch.ones(5, 16)}))


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def text_file(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Scene:
    zoo: Zoo
    tmp: Path


Change = Callable[[Scene], dict[str, Any]]
BAD: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no source": (lambda s: {"source": s.tmp / "nowhere"}, ("there is no model at", "no such folder")),
    "no fine-tune": (lambda s: {"finetuned": s.tmp / "nowhere"}, ("nowhere does not exist",)),
    "no target": (lambda s: {"target": s.tmp / "nowhere"}, ("there is no model at", "no such folder")),
    "no data": (lambda s: {"data": s.tmp / "nowhere"}, ("no data at", "no such file or folder")),
    "data not given": (lambda _: {"data": None}, ("method bico needs calibration data", "--data")),
    "not a model": (
        lambda s: {"target": text_file(s.tmp / "folder" / "x.txt", "").parent},
        ("is not a model: no config.json in it",),
    ),
    "an adapter as target": (
        lambda s: {"target": text_file(s.tmp / "lora" / "adapter_config.json", "{}").parent},
        ("is a LoRA adapter, not a model", "give it as --finetuned, with its base as --source", "tuneport apply"),
    ),
    "not a fine-tune": (
        lambda s: {"finetuned": text_file(s.tmp / "folder" / "x.txt", "").parent},
        ("is not a model",),
    ),
    "a file as source": (lambda s: {"source": text_file(s.tmp / "x.txt", "")}, ("is not a model",)),
    "other shapes": (
        lambda s: {"finetuned": other_shapes(s.zoo, s.tmp)},
        ("visual_projection.weight (5, 16) vs (12, 16)", '--exclude "visual_projection.*"'),
    ),
    "another family": (lambda s: {"finetuned": s.zoo["vit-tuned"]}, ("Check that", "was fine-tuned from")),
    "nothing changed": (lambda s: {"finetuned": s.zoo["clip_vision-base"]}, ("equals its base in every tensor",)),
    "nan base": (
        lambda s: {"source": nan_folder(s.zoo, s.tmp, "base")},
        ("NaN or infinite", "visual_projection.weight"),
    ),
    "nan fine-tune": (
        lambda s: {"finetuned": nan_folder(s.zoo, s.tmp, "tuned")},
        ("NaN or infinite", "visual_projection.weight"),
    ),
    "nan target": (lambda s: {"target": nan_folder(s.zoo, s.tmp, "target")}, ("NaN or infinite", "visual_projection")),
    "empty npz": (
        lambda s: {"data": npz(s.tmp / "empty.npz", x=np.zeros((0, 4, 4, 3), np.uint8), y=np.zeros(0, int))},
        ("is empty",),
    ),
    "empty folder": (lambda s: {"data": text_file(s.tmp / "images" / "x.txt", "").parent}, ("has no images",)),
    "empty table": (lambda s: {"data": text_file(s.tmp / "data.jsonl", "")}, ("is empty: it has no rows",)),
    "unlabelled": (lambda s: {"data": npz(s.tmp / "bare.npz", x=images(30, 1)[0])}, ("has no labels",)),
    "unknown classes": (
        lambda s: {"data": write_data(s.tmp / "animals.npz", ("cat", "dog", "owl", "wolf", "gnu"))},
        ("1 of 5 classes of animals are unknown to the head: gnu",),
    ),
    "more classes than the head, by number": (
        lambda s: {"data": npz(s.tmp / "n.npz", x=images(30, 1, 5)[0], y=images(30, 1, 5)[1])},
        ("5 of 5 classes of n are unknown to the head: 0, 1, 2, 3, 4",),
    ),
    "too many samples": (lambda _: {"samples": 61}, ("asked for 61 samples but", "has 60; lower --samples")),
    "no samples": (lambda _: {"samples": 0}, ("asked for 0 samples; expected at least 1",)),
    "negative samples": (lambda _: {"samples": -3}, ("asked for -3 samples; expected at least 1",)),
    "samples and shots": (lambda _: {"shots": 2}, ("--samples or --shots, not both",)),
    "too many shots": (lambda _: {"samples": None, "shots": 21}, ("asked for 21 shots but", "lower --shots")),
    "unknown method": (lambda _: {"method": "bicco"}, ("unknown method 'bicco'. Did you mean 'bico'? Known:",)),
    "unknown sampler": (lambda _: {"sampler": "randon"}, ("unknown sampler 'randon'. Did you mean 'random'?",)),
    "unknown head": (lambda _: {"head": "plants"}, ("has no head 'plants': it has animals",)),
    "a head of another width": (
        lambda s: {"head": write_head(s.tmp / "mine.safetensors", 7)},
        ("embeddings of width 7, but", "gives features of width 12"),
    ),
    "unknown device": (lambda _: {"device": "gpu"}, ("device 'gpu' is not available",)),
    "missing device": (lambda _: {"device": "cuda:99"}, ("device 'cuda:99' is not available",)),
    "text for an image model": (
        lambda s: {"data": text_file(s.tmp / "texts.csv", "text,label\na,cat\nb,dog\n"), "samples": 2},
        ("texts holds texts, but", "reads images"),
    ),
    "odd data": (lambda s: {"data": text_file(s.tmp / "data.xyz", "")}, ("the format of", ".npz")),
    "scale nan": (lambda _: {"scale": "nan"}, ("the scale must be a finite number",)),
    "scale inf": (lambda _: {"scale": "inf"}, ("the scale must be a finite number",)),
    "scale word": (lambda _: {"scale": "strong"}, ("the scale must be a number",)),
}


@pytest.mark.usefixtures("no_forward")
class TestBadInput:
    @pytest.mark.parametrize("case", BAD)
    def test_is_refused_in_one_line_before_any_work(
        self, run: Run, zoo: Zoo, tmp_path: Path, place: Path, case: str
    ) -> None:
        change, words = BAD[case]
        done = run("transfer", *options(zoo, **change(Scene(zoo, tmp_path))), "--out", place / "out")
        assert_refused(done, 1, *words)
        assert list(place.iterdir()) == []

    @pytest.mark.parametrize("case", ["no source", "other shapes", "unknown head", "too many samples", "no data"])
    def test_a_plan_says_the_same(self, run: Run, zoo: Zoo, tmp_path: Path, case: str) -> None:
        change, words = BAD[case]
        assert_refused(run("plan", *options(zoo, **change(Scene(zoo, tmp_path))), "--json"), 1, *words)

    def test_an_existing_output(self, run: Run, zoo: Zoo, place: Path) -> None:
        (place / "out").mkdir()
        (place / "out" / "precious").write_text("mine")
        done = run("transfer", *options(zoo), "--out", place / "out")
        assert_refused(done, 1, "out exists already", "--overwrite")
        assert (place / "out" / "precious").read_text() == "mine"
        assert [file.name for file in place.iterdir()] == ["out"]

    def test_an_output_in_a_missing_folder(self, run: Run, zoo: Zoo, place: Path) -> None:
        done = run("transfer", *options(zoo), "--out", place / "missing" / "out")
        assert_refused(done, 1, "cannot be written: there is no folder", "Create it first")
        assert list(place.iterdir()) == []

    @pytest.mark.parametrize("role", ["source", "finetuned", "target", "data"])
    def test_an_output_that_is_an_input(self, run: Run, zoo: Zoo, tmp_path: Path, role: str) -> None:
        data = tmp_path / "animals"
        for name in ("cat", "dog"):
            text_file(data / "x", "")
            (data / name).mkdir()
        given = {part: Path(shutil.copytree(zoo[f"clip_vision-{part}"], tmp_path / part)) for part in ("base", "tuned")}
        target = Path(shutil.copytree(zoo["clip_vision-target"], tmp_path / "target"))
        paths = {"source": given["base"], "finetuned": given["tuned"], "target": target, "data": data}
        before = sorted(str(file) for file in tmp_path.rglob("*"))
        done = run("transfer", *options(zoo, **paths), "--out", paths[role], "--overwrite")
        assert_refused(done, 1, "cannot be overwritten: it holds the input", str(paths[role]))
        assert sorted(str(file) for file in tmp_path.rglob("*")) == before

    def test_an_output_that_holds_an_input(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        shutil.copytree(zoo["clip_vision-target"], tmp_path / "models" / "target")
        paths = options(zoo, target=tmp_path / "models" / "target")
        done = run("transfer", *paths, "--out", tmp_path / "models", "--overwrite")
        assert_refused(done, 1, "cannot be overwritten: it holds the input")
        assert (tmp_path / "models" / "target" / "model.safetensors").is_file()

    @pytest.mark.parametrize("command", ["transfer", "finetune"])
    def test_an_output_that_is_part_of_an_input(self, run: Run, zoo: Zoo, tmp_path: Path, command: str) -> None:
        data = tmp_path / "animals"
        (data / "train" / "cat").mkdir(parents=True)
        text_file(data / "train" / "cat" / "x.png", "")
        given = options(zoo, data=data) if command == "transfer" else [zoo["clip_vision-base"], "--data", data]
        done = run(command, *given, "--out", data / "train", "--overwrite")
        assert_refused(done, 1, "cannot be overwritten: it is part of the input")
        assert (data / "train" / "cat" / "x.png").is_file()

    def test_a_folder_that_is_no_output(self, run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
        """--overwrite replaces what the command has written, not what else lies there."""
        base, out = zoo["vit-base"], place / "out"
        tau = tmp_path / "tau.safetensors"
        assert run("extract", base, zoo["vit-tuned"], "-o", tau).code == 0
        text_file(out / "thesis.txt", "mine")
        pair = ("--source", base, "--target", zoo["vit-target"], "--samples", "8")
        task = ("--finetuned", f"pets={zoo['vit-tuned']}", "--data", f"pets={zoo.data}")
        commands: dict[tuple[Any, ...], str] = {
            ("transfer", *options(zoo)): "tuneport.json",
            ("apply", tau, base): "tuneport.json",
            ("finetune", base, "--data", zoo.data): "tuneport.json",
            ("demo",): "demo.json",
            ("bench", *pair, *task): "results.json",
        }
        for words, mark in commands.items():
            done = run(*words, "--out", out, "--overwrite")
            assert_refused(done, 1, f"no output of this command (no {mark} in it). Remove it by hand")
            assert [file.name for file in place.rglob("*")] == ["out", "thesis.txt"]

    @pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
    def test_a_place_that_cannot_be_written(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        mkdir = Path.mkdir

        def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
            if place in self.parents:
                raise OSError(code, "no", str(self))
            mkdir(self, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", refuse)
        done = run("transfer", *options(zoo), "--out", place / "out")
        assert_refused(done, 1, "out cannot be written", "Choose a")

    def test_long_lines_and_markup_come_through(self, run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
        name = "[bold]" + "long name " * 15 + "[/nonsense]"
        done = run("transfer", *options(zoo, source=tmp_path / name), "--out", place / "out")
        assert_refused(done, 1, f"there is no model at {tmp_path / name}: no such folder")


class TestFullDisk:
    @pytest.mark.parametrize("file", ["model.safetensors", "README.md", "report.html", "tuneport.json"])
    def test_nothing_half_written_is_left(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        fill_disk(monkeypatch, place, file)
        done = run("transfer", *options(zoo), "--out", place / "out")
        assert_refused(done, 1, "out cannot be written: the disk is full. Free some space")
        assert list(place.iterdir()) == []

    def test_the_old_output_survives(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "out").mkdir()
        for name in ("precious", "tuneport.json"):
            (place / "out" / name).write_text("mine")
        fill_disk(monkeypatch, place, "model.safetensors")
        done = run("transfer", *options(zoo, method="naive"), "--out", place / "out", "--overwrite")
        assert_refused(done, 1, "the disk is full")
        assert (place / "out" / "precious").read_text() == "mine"
        assert [file.name for file in place.iterdir()] == ["out"]

    def test_extract(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fill_disk(monkeypatch, place, "")
        done = run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", place / "tau.safetensors")
        assert_refused(done, 1, "the disk is full")
        assert list(place.iterdir()) == []


class TestResume:
    def test_a_killed_run_is_resumed(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An interrupt after some batches stands for the kill; tests/test_resume.py kills for real."""
        command = ["transfer", *options(zoo), "--batch-size", "4", "--save-every", "0", "--out", place / "out"]
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
        assert done.err == "note: continuing from saved statistics\n"
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
            done = run("transfer", *options(zoo), "--out", place / "out", "--overwrite")
        finally:
            ready.set()
            thread.join()
        assert_refused(done, 1, "is writing", "Wait until it ends, or choose another name.")
        assert list(place.iterdir()) == []


class TestVanishedInput:
    def test_the_targets_weights_go_while_it_is_measured(
        self, run: Run, zoo: Zoo, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = Path(shutil.copytree(zoo["clip_vision-target"], tmp_path / "target"))
        finish = capture._Accumulator.finish

        def vanish(self: Any, index: int) -> None:
            (target / "model.safetensors").unlink(missing_ok=True)
            finish(self, index)

        monkeypatch.setattr(capture._Accumulator, "finish", vanish)
        done = run("transfer", *options(zoo, target=target), "--out", place / "out")
        assert_refused(done, 1, "model.safetensors is gone or cannot be read")
        assert list(place.iterdir()) == []

    def test_control_characters_do_not_reach_the_terminal(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        done = run("extract", tmp_path / "a\x1b[2Jb\x07", zoo["vit-tuned"], "-o", tmp_path / "tau.safetensors")
        assert_refused(done, 1, "does not exist")
        assert "\x1b" not in done.err
        assert "\x07" not in done.err

    def test_nor_through_tables(self, run: Run, zoo: Zoo, place: Path) -> None:
        data = shutil.copy(zoo.data, place / "a\x1b[2Jb\x07.npz")
        done = run("transfer", *options(zoo, data=data), "--evaluate", "--out", place / "out")
        assert "after (a\ufffd[2Jb\ufffd, test)" in " ".join(done.out.split())
        places = {"finetuned": zoo["vit-tuned"], "data": zoo.data}
        bases = ("--source", zoo["vit-base"], "--target", zoo["vit-target"])
        tasks = [word for key, path in places.items() for word in (f"--{key}", f"a\x1b[2J[b]:car:={path}")]
        small = ("--methods", "naive", "--samples", 4, "--scales", 1)
        table = run("bench", *bases, *tasks, *small, "--out", place / "table")
        assert "a\ufffd[2J[b]:car:" in table.out
        assert "\x1b" not in done.out + table.out
        assert "\x07" not in done.out + table.out

    def test_no_part_of_a_table_steers_the_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        terminal.show([["\x1b[2Jcell", "[red]"]], "\x1b[2Jcolumn", "\x9b2J", title="\x1b]0;title\x07")
        terminal.show_list([("\x1b[2Jlabel", "\rtext")], "bold")
        found = capsys.readouterr().out
        assert not {"\x1b", "\x07", "\x9b", "\r"} & set(found)
        for words in ("[2Jcell", "[red]", "[2Jcolumn", "\ufffd2J", "\ufffd]0;title\ufffd", "[2Jlabel", " text"):
            assert words in found


def fill_disk(monkeypatch: pytest.MonkeyPatch, place: Path, name: str) -> None:
    """Writing to files under `place` whose name ends in `name` fails after some bytes."""
    opened = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, content: Any) -> None:
            self.file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    def limited(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = opened(self, mode, *args, **kwargs)
        return Full(file) if "w" in mode and place in self.parents and self.name.endswith(name) else file

    monkeypatch.setattr(Path, "open", limited)


class TestExitCodes:
    @pytest.mark.parametrize(
        "words",
        [
            ("transfer",),
            ("transfer", "--source", "a", "--finetuned", "b", "--target", "c"),
            ("transfer", "--nonsense"),
            ("nonsense",),
            ("transfer", "--source", "a", "--finetuned", "b", "--target", "c", "--out", "d", "--as", "zip"),
            ("transfer", "--source", "a", "--finetuned", "b", "--target", "c", "--out", "d", "--completion", "all"),
            ("transfer", "--source", "a", "--finetuned", "b", "--target", "c", "--out", "d", "--samples", "many"),
            ("transfer", "--source", "a", "--finetuned", "b", "--target", "c", "--out", "d", "--batch-size", "0"),
            ("evaluate",),
            ("extract", "a"),
            ("apply", "a", "b", "-o", "c", "--scale", "strong"),
        ],
    )
    def test_wrong_usage_is_2(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
        monkeypatch.chdir(tmp_path)
        done = run(*words)
        assert_refused(done, 2, "Usage")
        assert list(tmp_path.iterdir()) == []

    def test_an_error_in_a_process_of_its_own(self, zoo: Zoo, tmp_path: Path) -> None:
        missing = str(tmp_path / ("nowhere" * 20))
        done = subprocess_run("transfer", *options(zoo, source=missing), "--out", str(tmp_path / "out"), "--json")
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr == (
            f"CheckpointError: there is no model at {missing}: no such folder. Give a model folder (transformers, "
            "open_clip, timm), open_clip's NAME:TAG or NAME:FILE, or timm:NAME[:FILE].\n"
        )

    def test_debug_shows_the_traceback(self, tmp_path: Path) -> None:
        done = subprocess_run("--debug", "apply", str(tmp_path / "tau"), "base", "-o", str(tmp_path / "out"))
        assert done.returncode == 1
        assert "Traceback (most recent call last)" in done.stderr
        assert done.stderr.rstrip().splitlines()[-1].startswith("tuneport.errors.CheckpointError: ")

    def test_debug_raises_and_is_forgotten(self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        words = ["apply", str(tmp_path / "tau"), "base", "-o", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["tuneport", "--debug", *words])
        with pytest.raises(Exception, match="does not exist"):
            cli.main()
        assert_refused(run(*words), 1, "does not exist")

    def test_what_nobody_expected_is_one_line_too(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("division\nby zero")

        monkeypatch.setattr("tuneport.pipeline.prepare.prepare", broken)
        done = run("transfer", *options(zoo), "--out", place / "out")
        assert done.code == 1
        assert done.err.count("\n") == 1
        assert done.err.startswith("ZeroDivisionError: division by zero")
        assert "--debug" in done.err
        assert "Traceback" not in done.err
        assert list(place.iterdir()) == []

    def test_an_interrupt(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("tuneport.pipeline.statistics.measure_pairs", interrupted)
        done = run("transfer", *options(zoo), "--out", place / "out")
        assert (done.code, done.err) == (130, "interrupted; no output was written\n")
        assert list(place.iterdir()) == []

    @pytest.mark.parametrize("command", ["transfer", "finetune"])
    def test_ctrl_c(self, zoo: Zoo, place: Path, command: str) -> None:
        """A real signal to a real process, which waits for it in the middle of its work."""
        words = {
            "transfer": [*options(zoo), "--batch-size", "4", "--save-every", "0"],
            "finetune": [str(zoo["vit-base"]), "--data", str(zoo.data), "--steps", "3", "--batch-size", "4"],
        }[command]
        program = """
import signal, sys, time
from tuneport import cli
from tuneport.measure import capture
from tuneport.training import finetune
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests run in the background have not
seen = []
def waiting(work):
    def done(*given):
        seen.append(None)
        if len(seen) == 3:
            print("ready", flush=True)
            while True:
                time.sleep(0.1)  # a signal that arrives just before one sleep ends the next
        return work(*given)
    return done
capture._Accumulator.finish = waiting(capture._Accumulator.finish)
finetune.rows_of = waiting(finetune.rows_of)
cli.main()
"""
        call = [sys.executable, "-c", program, command, *words, "--out", str(place / "out")]
        with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline() == "ready\n"
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=600)
            finally:
                process.kill()
        kept = "note: what was measured is kept; the same call with --resume continues from it\n"
        assert err == (kept if command == "transfer" else "") + "interrupted; no output was written\n"
        assert process.returncode == 130
        assert [file.name for file in place.iterdir()] == ([".out.tuneport-work"] if command == "transfer" else [])
