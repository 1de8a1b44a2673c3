"""Exit codes, interrupts and unexpected errors."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from builders.commands import Run, assert_refused, options, run_apart
from builders.folders import Zoo
from builders.processes import Done, run_program
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
            ("transfer", "--source", "a", "--finetuned", "b", "--target", "c", "--out", "d", "--head-fit", "all"),
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
        assert_refused(done, 2)
        assert "Usage" in done.err or done.err.startswith("OptionError: ")
        assert list(tmp_path.iterdir()) == []

    def test_an_error_in_a_process_of_its_own(self, zoo: Zoo, tmp_path: Path) -> None:
        missing = str(tmp_path / ("nowhere" * 20))
        done = run_apart(
            "transfer", "--scale=1", *options(zoo, source=missing), "--out", str(tmp_path / "out"), "--json"
        )
        assert (done.code, done.out) == (1, "")
        assert done.err == (
            f"CheckpointError: there is no model at {missing}: no such folder. Give a model folder (transformers, "
            "open_clip, timm), open_clip's NAME:TAG or NAME:FILE, or timm:NAME[:FILE].\n"
        )

    def test_debug_shows_the_traceback(self, tmp_path: Path) -> None:
        done = run_apart("--debug", "apply", str(tmp_path / "tau"), "base", "-o", str(tmp_path / "out"))
        assert done.code == 1
        assert "Traceback (most recent call last)" in done.err
        assert done.err.rstrip().splitlines()[-1].startswith("tuneport.errors.CheckpointError: ")

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

        monkeypatch.setattr("tuneport.pipeline.run.prepare", broken)
        done = run("transfer", "--scale=1", *options(zoo), "--out", place / "out")
        assert done.code == 1
        assert done.err.count("\n") == 1
        assert done.err.startswith("ZeroDivisionError: division by zero")
        assert "--debug" in done.err
        assert "Traceback" not in done.err
        assert list(place.iterdir()) == []

    def test_a_device_without_memory(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The error comes out of a model, which is not to blame."""
        short = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has 9.00 GiB of which 1.00 MiB is free"
        text = f"{short}. Including non-PyTorch memory, this process has 26.28 GiB memory in use."

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError(text)

        monkeypatch.setattr("torch.nn.functional.linear", full)
        done = run("transfer", "--scale=1", *options(zoo), "--out", place / "out")
        assert done.code == 1
        assert done.err.splitlines()[-1] == (
            f"OutOfMemoryError: {short}. Pass a --memory-budget, a smaller --batch-size or --max-tokens, or --dtype "
            "bfloat16, if the command has them."
        )
        assert "Traceback" not in done.err
        assert list(place.iterdir()) == []

    def test_an_interrupt(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("tuneport.pipeline.solve.measure_pairs", interrupted)
        done = run("transfer", "--scale=1", *options(zoo), "--out", place / "out")
        assert (done.code, done.warnings) == (130, "interrupted; no partial output remains\n")
        assert list(place.iterdir()) == []

    @pytest.mark.parametrize(
        ("moment", "number"),
        [("measuring", signal.SIGINT), ("writing", signal.SIGTERM), ("measuring", signal.SIGHUP)],
    )
    def test_signals(self, zoo: Zoo, place: Path, moment: str, number: signal.Signals) -> None:
        """A real signal to a real process, in the middle of its work: each signal once, and each moment."""
        words = ["transfer", "--scale=1", *options(zoo, samples=12), "--batch-size", "4", "--save-every", "0"]
        done = self.signalled(moment, [number], *words, "--out", str(place / "out"))
        kept = "note: what was measured is kept; the same call with --resume continues from it\n"
        assert done.warnings == kept + "interrupted; no partial output remains\n"
        assert done.code == 128 + number
        assert [file.name for file in place.iterdir()] == [".out.tuneport-work"]

    def test_further_signals_do_not_disturb_the_removal_of_files(self, zoo: Zoo, place: Path) -> None:
        words = ["transfer", "--scale=1", *options(zoo), "--out", str(place / "out")]
        done = self.signalled("writing", [signal.SIGTERM, signal.SIGHUP, signal.SIGTERM], *words)
        assert (done.code, done.warnings) == (128 + signal.SIGTERM, "interrupted; no partial output remains\n")
        assert list(place.iterdir()) == []

    def test_nohup(self, zoo: Zoo, place: Path) -> None:
        words = ["transfer", "--scale=1", *options(zoo), "--out", str(place / "out")]
        done = self.signalled("nohup", [signal.SIGHUP], *words)
        assert (done.code, done.warnings) == (0, "")
        assert [file.name for file in place.iterdir()] == ["out"]

    def signalled(self, moment: str, numbers: list[int], *words: str) -> Done:
        """Run a command that sends itself signals at a moment; the further ones while it removes its files."""
        program = """
import os, shutil, signal, sys
from tuneport import cli
from tuneport.measure import capture
from tuneport.outputs import base
moment, *numbers = sys.argv.pop(1).split(",")
signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests run in the background have not
signal.signal(signal.SIGHUP, signal.SIG_IGN if moment == "nohup" else signal.SIG_DFL)  # not as the tests were started
seen, remove = [], shutil.rmtree
def signalled(work, call):
    def done(*given):
        seen.append(None)
        if len(seen) == call:
            os.kill(os.getpid(), int(numbers.pop(0)))
        return work(*given)
    return done
def removed(*given, **options):
    while numbers:
        os.kill(os.getpid(), int(numbers.pop(0)))
    return remove(*given, **options)
shutil.rmtree = removed
if moment == "measuring":
    capture._Accumulator.finish = signalled(capture._Accumulator.finish, 3)
if moment in ("writing", "nohup"):
    base.report_page = signalled(base.report_page, 1)
cli.main()
"""
        return run_program(program, ",".join([moment, *map(str, map(int, numbers))]), *words)
