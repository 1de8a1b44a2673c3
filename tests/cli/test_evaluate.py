"""`tuneport evaluate`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders.commands import Run, assert_refused
from builders.folders import Zoo, write_data
from tuneport.measure.accuracy import Evaluation


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
        ends = r"95 % interval \d+\.\d to \d+\.\d"
        assert re.fullmatch(rf"\d+\.\d\d % of 30 samples right \(zero-shot; {ends}\)\n", done.out)

    def test_several_models_and_by_class(self, run: Run, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tuneport.cli.terminal.out_console", Console(width=300))
        models = [zoo["vit-base"], zoo["vit-tuned"]]
        alone = [run("evaluate", model, "--data", zoo.data, "--json").json for model in models]
        both = run("evaluate", *models, "--data", zoo.data, "--json").json
        assert both == {"data": str(zoo.data), "models": alone}
        found = alone[0]
        assert sum(row["samples"] for row in found["by_class"]) == 30
        right = sum(row["samples"] * row["accuracy"] for row in found["by_class"])
        assert right / 30 == pytest.approx(found["accuracy"])  # a mean of three shares, weighted
        assert found["low"] <= found["accuracy"] <= found["high"]
        shown = run("evaluate", *models, "--data", zoo.data, "--by-class").out
        for each in alone:
            ends = f"{each['low']:.1f} to {each['high']:.1f}"
            assert re.search(rf"{each['accuracy']:.2f} %\W+{ends}\W+30\W+zero-shot", shown)
        for row in found["by_class"]:
            assert re.search(rf"{row['class']}\W+{row['accuracy']:.1f} %", shown)

    def test_numbers_that_json_has_no_word_for(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endless = Evaluation(0.0, 30, "perplexity", float("inf"), 60)
        monkeypatch.setattr("tuneport.pipeline.evaluate.zero_shot", lambda *_, **__: endless)
        done = run("evaluate", zoo["vit-base"], "--data", zoo.data, "--json")
        assert (done.code, done.json["perplexity"], done.json["tokens"]) == (0, None, 60)
        monkeypatch.setattr("tuneport.pipeline.arithmetic.save_task_vector", lambda *_, **__: float("nan"))
        done = run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", place / "tau.safetensors", "--json")
        assert (done.code, done.json["norm"]) == (0, None)

    def test_linear_probe(self, run: Run, zoo: Zoo) -> None:
        common = ["evaluate", zoo["clip_vision-base"], "--data", zoo.data, "--protocol", "linear-probe", "--json"]
        done = run(*common)
        assert done.code == 0
        assert done.json["protocol"] == "linear-probe"
        assert done.json["accuracy"] > 60, "the classes differ in colour"
        assert run(*common, "--samples", "12", "--seed", "1").json["samples"] == 30

    def test_bad_input(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        model, data = zoo["clip_vision-base"], zoo.data
        (tmp_path / "texts.csv").write_text("text,label\nhello,cat\nbye,dog\n")
        write_data(tmp_path / "animals.npz", ("cat", "dog", "gnu"))
        expected: list[tuple[Sequence[Any], tuple[str, ...]]] = [
            ((model, "--data", data, "--head", "plants"), ("has no head 'plants': it has animals",)),
            ((model, "--data", data, "--device", "cuda:99"), ("device 'cuda:99' is not available",)),
            ((model, "--data", tmp_path / "texts.csv"), ("holds texts, but", "reads images")),
            ((model, "--data", tmp_path / "animals.npz"), ("unknown to the head: gnu",)),
            ((model, "--data", tmp_path / "nothing"), ("no data at",)),
            ((tmp_path / "nothing", "--data", data), ("there is no model at",)),
            ((model, "--data", data, "--protocol", "linear-probe", "--samples", "99"), ("lower --samples",)),
        ]
        for arguments, words in expected:
            assert_refused(run("evaluate", *arguments), 1, *words)
        none = run("evaluate", model, "--data", data, "--protocol", "linear-probe", "--samples", "0")
        assert_refused(none, 2, "--samples must be at least 1, got 0")
        unknown = run("evaluate", model, "--data", data, "--protocol", "zeroshot")
        assert_refused(unknown, 2, "unknown protocol 'zeroshot'", "Did you mean")


def test_accuracy_needs_data(run: Run, zoo: Zoo, place: Path) -> None:
    given = ("--source", zoo["vit-base"], "--finetuned", zoo["vit-tuned"], "--target", zoo["vit-target"])
    done = run("transfer", "--scale=1", *given, "--method", "naive", "--out", place / "out", "--evaluate")
    assert_refused(done, 1, "--data")
