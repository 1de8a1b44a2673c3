"""`tuneport plan`: what it prints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders.commands import Run, assert_refused, options
from builders.folders import Zoo, edit_weights
from builders.texts import SENTENCES, Size, gpt_tokenizer, make, t5_tokenizer, write, write_rows
from builders.twins import finetuned
from tuneport.io.sizes import format_bytes
from tuneport.models.open import describe_module
from tuneport.runtime import passes

SEVERAL = "runs over the calibration data: all statistics at once would take too much of the free memory"


class TestPlan:
    @pytest.mark.usefixtures("no_forward")
    def test_what_is_told_and_printed(self, run: Run, zoo: Zoo) -> None:
        """Names are short where they are clear, so that a row fits into a line of 80 columns and none is cut."""
        done, shown = run("plan", *options(zoo), "--json"), run("plan", *options(zoo))
        assert (done.code, shown.code) == (0, 0), shown.err
        assert len(done.json["layers"]) == 20
        assert done.json["samples"] == 24
        assert {"layers", "not_transported", "expected"} <= set(done.json)
        size = format_bytes(done.json["expected"]["statistics_bytes"])
        assert f"expected: {size} of statistics;" in shown.out, "sizes are shown as everywhere"
        assert SEVERAL not in shown.out
        assert "groups" not in done.json["expected"]
        assert "…" not in shown.out
        names = [line.split("│")[1].strip() for line in shown.out.splitlines() if line.count("│") > 5]
        assert names[0] == "patch_embedding"
        assert names[-1] == "visual_projection"
        assert set(names[1:-1]) == {"layers"}
        self.check_routes(done.json["routes"], " ".join(shown.out.split()))

    @staticmethod
    def check_routes(found: dict[str, Any], shown: str) -> None:
        """Half a hundred samples or few: what upgrade would try, and what it would not."""
        assert list(found) == ["copy", "port", "distill", "synthetic"]
        assert "have another shape there (" in found["copy"]["why_not"]
        assert "generator" in found["synthetic"]["why_not"]
        assert "it needs --generator or --extra" in shown
        taught = found["distill"]["samples"]
        assert found["port"]["samples"] == min(taught, 200)
        assert found["distill"]["steps"] == 300
        assert taught < 50
        assert found["distill"]["students"] == 3
        assert f"distill on {taught} samples in 300 steps, for up to 3 students" in shown

    def test_names_of_fused_layers_are_shown_whole(self, run: Run, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tuneport.cli.terminal.out_console", Console(width=300))
        done = run("plan", *options(zoo, "siglip_vision"), "--layers")
        assert done.code == 0
        assert "head.attention.in_proj_weight[q]" in done.out
        assert "kept" in done.out
        assert "expected:" in done.out

    def test_a_block_stands_for_all(self, run: Run, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
        """Roles of one shape share a line, with the ranges of their blocks: three blocks from two."""
        monkeypatch.setattr("tuneport.cli.terminal.out_console", Console(width=300))
        done = run("plan", *options(zoo))
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.out.splitlines() if "│" in line]
        shapes = {"".join(sorted(row[1].split(", "))): row[2:] for row in rows}
        assert shapes["koutqv"] == ["0-2", "24 x 24", "0-1", "16 x 16"]
        assert shapes["fc1"] == ["0-2", "48 x 24", "0-1", "32 x 16"]
        assert len(rows) <= 6, "20 layers"
        assert len(run("plan", *options(zoo), "--layers").out.splitlines()) > 20

    @pytest.mark.usefixtures("no_forward")
    @pytest.mark.parametrize(("name", "same"), [("target", True), ("other", False)])
    def test_tokenizers(self, run: Run, tmp_path: Path, name: str, same: bool) -> None:
        base = make("llama", vocab_size=len(gpt_tokenizer()))
        write(tmp_path / "base", base, gpt_tokenizer())
        write(tmp_path / "tuned", finetuned(describe_module(base)), gpt_tokenizer())
        words = gpt_tokenizer() if same else t5_tokenizer()
        write(tmp_path / name, make("llama", Size(seed=1), vocab_size=len(words)), words)
        data = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in SENTENCES])
        models = {"source": tmp_path / "base", "finetuned": tmp_path / "tuned", "target": tmp_path / name}
        given = [word for key, path in models.items() for word in (f"--{key}", path)]
        command = ("plan", *given, "--data", data, "--samples", 8)
        done = run(*command, "--json")
        assert done.code == 0, done.err
        outlook = done.json
        assert outlook["same_tokenizer"] is same
        found = outlook["tokens"]
        assert 0 < found["target_matched"] <= found["target_tokens"]
        printed = run(*command).out
        start = "the models have one tokenizer" if same else "the tokenizers differ"
        counts = f"{found['target_matched']} of the {found['target_tokens']} tokens of the target have a partner"
        assert f"{start}: {counts} in the source ({100 * found['share']:.0f} %)" in printed.replace("\n", " ")

    def test_a_fine_tune_of_another_base_is_refused(self, run: Run, zoo: Zoo, place: Path) -> None:
        """As by `transfer`: its weights have nothing in common with those of the source."""
        source, tuned, target = zoo.trio("clip_vision")
        other = Path(shutil.copytree(tuned, place / "other"))
        edit_weights(other, lambda tensors: [tensor.neg_() for tensor in tensors.values()])
        words = ("--data", zoo.data, "--samples", 16, "--finetuned", other)
        plan = ("plan", "--source", source, "--target", target, *words)
        assert_refused(run(*plan), 1, "it has most likely another base. Check --source and --finetuned")
        assert run(*plan, "--accept-unlikely").code == 0

    def test_shapes_need_a_memory_budget_and_the_help_says_so(self, run: Run, zoo: Zoo) -> None:
        text = " ".join(run("plan", "--help").out.replace("│", " ").split())
        assert "Read config.json only; needs --memory-budget." in text
        done = run("plan", "--source", zoo["vit-base"], "--target", zoo["vit-target"], "--shapes-only")
        assert_refused(done, 2, "needs --memory-budget")


def test_statistics_that_do_not_fit_are_measured_in_several_runs(
    run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ("plan", *options(zoo))
    monkeypatch.setattr(passes, "free_memory", lambda: 0)
    assert SEVERAL in run(*plan).out
    assert len(run(*plan, "--json").json["expected"]["groups"]) > 1
    done = run("transfer", *options(zoo, scale=1, out=place / "out"), "--no-evaluate")
    assert done.code == 0
    assert SEVERAL in done.err
