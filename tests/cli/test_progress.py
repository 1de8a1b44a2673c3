"""Progress: the share of the whole and the time that is left, true to the end."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders.folders import SAMPLES, Zoo
from builders.runs import prepare
from tuneport.cli import terminal
from tuneport.cli.terminal import Bar
from tuneport.data.formats import read_plain
from tuneport.methods import METHODS
from tuneport.pipeline.run import write_run
from tuneport.training.exam import Mark


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(terminal, "time", found)
    return found


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    found = io.StringIO()
    monkeypatch.setattr(terminal, "err_console", Console(file=found, force_terminal=False))
    return found


def test_lines_say_the_step_the_share_of_the_whole_and_the_time_left(clock: Clock, said: io.StringIO) -> None:
    """Each unit takes a second: what is said at any time is then exact."""
    with Bar("porting") as bar:
        clock.now += 20  # what is before the plan does not count
        bar.plan(400)
        bar.step("measuring", 200, 10)
        for _ in range(10):
            clock.now += 20
            bar.advance(1)
        bar.step("solving 8 layers", 100)
        clock.now += 100
        bar.step("scoring", 100, 4)
        for _ in range(4):
            clock.now += 25
            bar.advance(1)
    assert said.getvalue().splitlines() == [
        "measuring: 5 % done, 6 min left",  # 40 seconds after the start
        "measuring: 15 % done, 6 min left",
        "measuring: 25 % done, 5 min left",
        "measuring: 35 % done, 4 min left",
        "measuring: 45 % done, 4 min left",
        "scoring: 75 % done, 2 min left",
        "scoring: 88 % done, 50 s left",
        "scoring: 100 % done",
    ]


def test_a_step_is_worth_its_units_however_many_samples_it_takes(clock: Clock, said: io.StringIO) -> None:
    with Bar("porting") as bar:
        bar.plan(100)
        for name, samples in (("fewer", 2), ("more", 9)):
            bar.step(name, 40, 5)
            bar.advance(samples)
        bar.step("teaching", 20, 99)
        bar.plan(10)  # a training counts its own steps
        bar.mark(Mark(5, 1.0, 3.0, 0.5, 0.0))  # other words for the same step
        clock.now += 30
        bar.advance(5)
    assert said.getvalue() == "distilling, loss 3, agreement 50 %: 90 % done, 3 s left\n"


def test_a_plan_after_a_step_without_units_is_that_of_the_whole(clock: Clock, said: io.StringIO) -> None:
    with Bar("upgrading") as bar:
        bar.step("measuring", 1000, 10)
        bar.advance(10)
        bar.step("route distill: teaching")
        bar.plan(10)
        clock.now += 30
        bar.advance(5)
    assert said.getvalue() == "route distill: teaching: 50 % done, 30 s left\n"


def test_without_units_the_plan_counts_samples(clock: Clock, said: io.StringIO) -> None:
    with Bar("evaluating") as bar:
        bar.plan(10)
        bar.step("asking one")
        clock.now += 60
        bar.advance(5)
        bar.step("asking another")
        clock.now += 60
        bar.advance(5)
    assert said.getvalue() == "asking one: 50 % done, 60 s left\nasking another: 100 % done\n"


def test_a_step_that_was_not_planned_makes_the_run_longer(clock: Clock, said: io.StringIO) -> None:
    with Bar("porting") as bar:
        bar.plan(100)
        bar.step("measuring", 100, 2)
        clock.now += 50
        bar.advance(1)
        bar.extend(100)
        clock.now += 50
        bar.advance(1)
    assert said.getvalue().splitlines() == ["measuring: 50 % done, 50 s left", "measuring: 50 % done, 2 min left"]


@pytest.mark.parametrize("more", [{"scale": 1.0}, {"scale": "auto"}, {"scale": "safe", "distill": 2}])
def test_the_steps_of_a_transfer_add_up_to_its_plan(zoo: Zoo, tmp_path: Path, more: dict[str, Any]) -> None:
    planned: list[float] = []
    steps: list[float] = []

    class Listener(Bar):
        def plan(self, total: float) -> None:
            planned.append(total)

        def step(self, name: str, units: float = 0.0, count: int = 0) -> None:
            del name, count
            steps.append(units)

    job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES, signals=METHODS["bico"].signals, **more)
    write_run(job.setup, tmp_path / "out", job.config, Listener(""), test=read_plain(zoo.data, "test"))
    assert planned[0] > 0
    assert sum(steps) == pytest.approx(planned[0], rel=1e-9)


@pytest.mark.parametrize("terminal_there", [True, False])
def test_sentences_are_wrapped_between_words_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, terminal_there: bool
) -> None:
    words = "there are no samples, and nothing says what to write: pass ten samples or more, or one sentence about them"
    found = {}
    for name in ("out_console", "err_console"):
        found[name] = io.StringIO()
        shown = Console(file=found[name], force_terminal=terminal_there, width=80, no_color=True)
        monkeypatch.setattr(terminal, name, shown)
    terminal.say(words, prose=True)
    terminal.say(f"next: {words}")
    with pytest.raises(SystemExit):
        terminal.fail("OptionError", words)
    prose, command = found["out_console"].getvalue().split("next: ")
    assert command == f"{words}\n", "a command is copied in one piece"
    for text, whole in ((prose, words), (found["err_console"].getvalue(), f"OptionError: {words}")):
        lines = text.splitlines()
        assert " ".join(line.strip() for line in lines) == whole
        assert len(lines) == (2 if terminal_there else 1)
        assert not terminal_there or max(map(len, lines)) <= 80
