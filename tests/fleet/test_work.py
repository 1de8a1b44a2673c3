"""Lines are given to workers: each once, again if its worker dies, and a failure is one row."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tuneport.config import TransferInputs, UpgradeConfig
from tuneport.errors import CheckpointError, DataError
from tuneport.fleet import run as working
from tuneport.fleet.lines import Line
from tuneport.fleet.run import Desk, _work
from tuneport.fleet.summary import Row

RECORD = {"routes": [{"name": "old", "score": 90.0}], "chosen": None, "decision": "keep the old model"}


def line(number: int, folder: Path) -> Line:
    inputs = TransferInputs(source="s", finetuned=("f",), target="t", out=str(folder / f"a{number}"))
    return Line(number, inputs, UpgradeConfig.of(describe="x"))


class FakeWorker:
    """Answers at once, and dies of some lines."""

    def __init__(self, deadly: Callable[[int], bool], tries: int = 2) -> None:
        self.deadly, self.tries = deadly, tries
        self.given: list[int] = []
        self.restarts = self.closed = 0

    def submit(self, line: Line) -> Future[Row]:
        assert not self.closed
        self.given.append(line.number)
        future: Future[Row] = Future()
        if self.deadly(line.number):
            future.set_exception(OSError("killed"))
        else:
            future.set_result(working.row_of(line, RECORD))
        return future

    def restart(self) -> None:
        self.restarts += 1

    def close(self) -> None:
        self.closed += 1


def test_each_line_is_done_once(tmp_path: Path) -> None:
    rows: list[Row] = []
    two = [FakeWorker(lambda _: False), FakeWorker(lambda _: False)]
    _work([line(number, tmp_path) for number in range(7)], two, rows.append)
    assert sorted(two[0].given + two[1].given) == sorted(row.line for row in rows) == list(range(7))
    assert [worker.closed for worker in two] == [1, 1]


def test_a_line_whose_worker_died_is_done_by_a_new_one(tmp_path: Path) -> None:
    rows: list[Row] = []
    died: list[int] = []
    worker = FakeWorker(lambda number: number == 1 and not died and not died.append(number))
    _work([line(number, tmp_path) for number in range(3)], [worker], rows.append)
    assert worker.given == [0, 1, 2, 1]
    assert worker.restarts == 1
    assert {row.status for row in rows} == {"kept"}


@pytest.mark.parametrize("tries", [1, 2])
def test_a_line_that_kills_its_workers_is_one_row(tmp_path: Path, tries: int) -> None:
    rows: list[Row] = []
    left = tmp_path / ".a1.tmp-0123abcd"
    left.mkdir()
    worker = FakeWorker(lambda number: number == 1, tries)
    _work([line(number, tmp_path) for number in range(3)], [worker], rows.append)
    assert worker.given.count(1) == worker.restarts == tries
    by_line = {row.line: row for row in rows}
    assert [by_line[number].status for number in range(3)] == ["kept", "failed", "kept"]
    assert "its worker died" in by_line[1].note
    assert not left.exists()


def test_an_interrupt_ends_all_workers(tmp_path: Path) -> None:
    def stop(_: Row) -> None:
        raise KeyboardInterrupt

    two = [FakeWorker(lambda _: False), FakeWorker(lambda _: False)]
    with pytest.raises(KeyboardInterrupt):
        _work([line(number, tmp_path) for number in range(7)], two, stop)
    assert all(worker.closed for worker in two)


class TestDesk:
    @pytest.fixture
    def opened(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """What is opened, in order; a model is a new object."""
        found: list[Any] = []

        def fake(source: Any, target: Any, _: Any) -> Any:
            found.extend(item for item in (source, target) if isinstance(item, str))
            made = [object() if isinstance(item, str) else item for item in (source, target)]
            return working.Sides(*made)

        monkeypatch.setattr(working, "open_models", fake)
        return found

    @pytest.mark.parametrize(
        ("error", "words", "opened_again"),
        [
            (DataError("no data at x."), "no data at x.", False),
            (MemoryError(), "too little memory", True),
            (RuntimeError("CUDA out of memory"), "too little memory", True),
            (ZeroDivisionError("division by zero\nmore"), "ZeroDivisionError: division by zero", True),
        ],
    )
    def test_an_error_is_a_row(
        self,
        monkeypatch: pytest.MonkeyPatch,
        opened: list[Any],
        tmp_path: Path,
        error: Exception,
        words: str,
        opened_again: bool,
    ) -> None:
        def fails(*_: Any, **__: Any) -> Any:
            raise error

        desk = Desk()
        monkeypatch.setattr(working, "upgrade_to_folder", fails)
        row = desk.upgrade(line(0, tmp_path))
        assert row.status == "failed"
        assert words in row.note
        assert "\n" not in row.note
        monkeypatch.setattr(working, "upgrade_to_folder", lambda *_, **__: RECORD)
        assert desk.upgrade(line(1, tmp_path)).status == "kept"
        assert opened == ["s", "t"] * (2 if opened_again else 1)

    def test_what_cannot_be_resumed_starts_over(
        self, monkeypatch: pytest.MonkeyPatch, opened: list[Any], tmp_path: Path
    ) -> None:
        del opened
        work = tmp_path / ".a0.tuneport-work"
        calls: list[bool] = []

        def upgrade(*_: Any, **__: Any) -> Any:
            calls.append(work.exists())
            if work.exists():
                raise CheckpointError("a0 cannot be resumed")
            return RECORD

        monkeypatch.setattr(working, "upgrade_to_folder", upgrade)
        work.mkdir()
        assert Desk().upgrade(line(0, tmp_path)).status == "kept"
        assert calls == [True, False]

    def test_an_interrupt_is_no_row(self, monkeypatch: pytest.MonkeyPatch, opened: list[Any], tmp_path: Path) -> None:
        del opened

        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(working, "upgrade_to_folder", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Desk().upgrade(line(0, tmp_path))
