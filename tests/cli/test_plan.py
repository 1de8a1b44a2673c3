"""`tuneport plan` and `tuneport compare`: what they print, and that they write nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from builders.commands import Run, assert_refused, options
from builders.folders import Zoo
from tuneport.io.sizes import format_bytes


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
