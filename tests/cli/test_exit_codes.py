"""Exit codes, interrupts and unexpected errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.commands import Run, assert_refused, options, subprocess_run
from builders.folders import Zoo
from tuneport import cli


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
