"""What a later start does, what the command prints, and what the summary shows; the worker is this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.commands import Run, assert_refused
from builders.fleets import break_adapter, common, write_fleet, write_list
from builders.folders import Zoo
from tuneport import upgrade_all
from tuneport.errors import CheckpointError
from tuneport.fleet import run as running
from tuneport.fleet.lines import Line, ListError
from tuneport.fleet.run import Desk
from tuneport.fleet.summary import Row, earlier_rows, fleet_of


class Here:
    """A worker in this process; it counts its lines."""

    tries = 1

    def __init__(self) -> None:
        self.desk, self.lines = Desk(), list[int]()

    def submit(self, line: Line) -> Future[Row]:
        self.lines.append(line.number)
        future: Future[Row] = Future()
        future.set_result(self.desk.upgrade(line))
        return future

    def restart(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    worker = Here()

    @contextmanager
    def opened(*_: Any) -> Iterator[list[Here]]:
        yield [worker]

    monkeypatch.setattr(running, "open_workers", opened)
    return worker


@pytest.fixture(scope="module")
def made(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters and their samples; read only."""
    return write_fleet(zoo, tmp_path_factory.mktemp("made") / "fleet", 2).parent


@pytest.fixture
def listed(made: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(made, tmp_path / "fleet"))
    return write_list(folder / "list.jsonl", [{"finetuned": str(folder / f"a{number}")} for number in range(2)])


def as_words(options: dict[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def test_models_are_opened_once(
    zoo: Zoo, here: Here, tmp_path: Path, listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    really = running.open_models

    def count(source: Any, target: Any, config: Any) -> Any:
        opened.extend(item for item in (source, target) if isinstance(item, str))
        return really(source, target, config)

    monkeypatch.setattr(running, "open_models", count)
    base = common(zoo, listed)["source"]
    small = str(zoo["vit-target"])
    tuned = [str(listed.parent / "a0"), str(listed.parent / "a1")]
    lines = [
        {"finetuned": tuned[n % 2], "target": small if n % 2 else base, "out": str(tmp_path / f"o{n}")}
        for n in range(4)
    ]
    write_list(listed, lines)
    upgrade_all(listed, tmp_path / "out", **common(zoo, listed))
    assert sorted(opened) == sorted([base, base, small])  # as source, as the first target, and the second one
    assert sorted(here.lines) == [1, 2, 3, 4]


def test_an_old_model_that_stays_is_not_tried_again(zoo: Zoo, here: Here, tmp_path: Path, listed: Path) -> None:
    given = {**common(zoo, listed), "target": str(zoo["vit-target"])}  # of another shape: nothing can be copied
    first = upgrade_all(listed, tmp_path / "out", **given)
    assert [row.status for row in first.rows] == ["kept", "kept"]
    assert "keep the old model" in first.rows[0].note
    again = upgrade_all(listed, tmp_path / "out", **given)
    assert here.lines == [1, 2]
    assert again.headline == "2 stay with the old model; 2 of them by an earlier start"
    upgrade_all(listed, tmp_path / "out", **{**given, "seed": 1})
    assert here.lines == [1, 2, 1, 2]


@pytest.mark.parametrize("change", ["a1/adapter_config.json", "own.npz", "target/config.json"])
def test_an_old_model_that_stays_is_tried_again_when_an_input_changes(
    zoo: Zoo, here: Here, tmp_path: Path, listed: Path, change: str
) -> None:
    target = shutil.copytree(zoo["vit-target"], listed.parent / "target")
    given = {**common(zoo, listed), "target": str(target)}
    upgrade_all(listed, tmp_path / "out", **given)
    changed = listed.parent / change
    changed.write_bytes(changed.read_bytes() + b"\n")
    again = upgrade_all(listed, tmp_path / "out", **given)
    assert here.lines == [1, 2, *([2] if change.startswith("a1") else [1, 2])]
    assert again.count("kept") == 2


def test_outputs_are_recognised_without_a_summary(zoo: Zoo, here: Here, tmp_path: Path, listed: Path) -> None:
    out, given = tmp_path / "out", common(zoo, listed)
    first = upgrade_all(listed, out, **given)
    assert first.headline == "2 written"
    (out / "summary.json").unlink()
    (out / "summary.html").unlink()
    again = upgrade_all(listed, out, **given)
    assert here.lines == [1, 2]
    assert [row.route for row in again.rows] == ["copy", "copy"]
    assert [row.flips for row in again.rows] == [row.flips for row in first.rows]
    upgrade_all(listed, out, **given, overwrite=True)
    assert here.lines == [1, 2, 1, 2]


@pytest.mark.parametrize("change", ["adapter_model.safetensors", "own.npz"])
def test_the_output_of_an_input_that_changed_is_no_output_of_this(
    zoo: Zoo, here: Here, tmp_path: Path, listed: Path, change: str
) -> None:
    out, given = tmp_path / "out", common(zoo, listed)
    upgrade_all(listed, out, **given)
    place = next(file for file in (listed.parent / "a1" / change, listed.parent / change) if file.exists())
    other = place.read_bytes()
    if change == "own.npz":
        arrays = dict(np.load(place))
        np.savez(place, **{**arrays, "x_train": 255 - arrays["x_train"]})
    else:
        place.write_bytes(other[:-4] + b"\0\0\0\1")
    with pytest.raises(ListError, match=r"lines? .*a1 exists already, and is not what this line asks for"):
        upgrade_all(listed, out, **given)
    place.write_bytes(other)
    assert upgrade_all(listed, out, **given).headline == "2 written; 2 of them by an earlier start"
    assert here.lines == [1, 2]


@pytest.mark.parametrize("change", ["seed", "finetuned"])
def test_the_output_of_another_upgrade_is_no_output_of_this(
    zoo: Zoo, here: Here, tmp_path: Path, listed: Path, change: str
) -> None:
    out, given = tmp_path / "out", common(zoo, listed)
    upgrade_all(listed, out, **given)
    lines = [{"finetuned": str(listed.parent / f"a{n}"), "out": str(out / f"a{n}")} for n in range(2)]
    other = {"seed": 1} if change == "seed" else {"finetuned": str(listed.parent / "a0")}
    write_list(listed, [lines[0], {**lines[1], **other}])
    with pytest.raises(ListError, match=r"line 2: .*a1 exists already, and is not what this line asks for"):
        upgrade_all(listed, out, **given)
    assert here.lines == [1, 2]


def test_the_summary_of_something_else_is_kept(zoo: Zoo, here: Here, tmp_path: Path, listed: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not the summary of a fleet"):
        upgrade_all(listed, out, **common(zoo, listed))
    assert (out / "summary.json").read_text() == "{}"
    assert here.lines == []


def test_the_command(zoo: Zoo, here: Here, tmp_path: Path, listed: Path, run: Run) -> None:
    words = ["upgrade", "--list", listed, "--out", tmp_path / "out", *as_words(common(zoo, listed))]
    break_adapter(listed.parent / "a1")
    done = run(*words)
    assert done.code == 1
    assert "1 written, 1 failed" in done.out
    assert str(tmp_path / "out" / "summary.html") in done.out
    assert done.out.index("a1") < done.out.index("a0")  # the failure comes first
    again = run(*words, "--json")
    assert again.code == 1
    assert [(row["name"], row["status"], row["earlier"]) for row in again.json["rows"]] == [
        ("a1", "failed", False),
        ("a0", "written", True),
    ]
    whole = {f"{row['name']}: {row['note']}" for row in again.json["rows"]}
    assert whole <= {*done.out.splitlines()}  # below a narrow table
    assert again.json == json.loads((tmp_path / "out" / "summary.json").read_text())
    assert here.lines == [1, 2, 2]


def test_ray_that_is_not_there(zoo: Zoo, tmp_path: Path, listed: Path, run: Run, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    words = ["upgrade", "--list", listed, "--out", tmp_path / "out", *as_words(common(zoo, listed))]
    assert_refused(run(*words, "--ray", "local"), 1, 'pip install "tuneport[ray]"')


def row(line: int, status: Any, flips: int | None = None, note: str = "") -> Row:
    return Row(line=line, status=status, flips=flips, note=note, finetuned="f", out=f"out/{line}", fingerprint="x")


def test_rows_are_sorted_by_what_needs_a_look() -> None:
    rows = [row(1, "written", 2), row(2, "written", 5), row(3, "kept"), row(4, "failed"), row(5, "written", None)]
    assert [item.line for item in fleet_of(Path("out"), rows).rows] == [4, 3, 2, 1, 5]


def test_the_page_escapes_what_it_shows() -> None:
    page = fleet_of(Path("out"), [row(1, "failed", note="<script>alert(1)</script>")]).page()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "1 failed" in page


def test_the_page_has_no_column_without_a_value() -> None:
    found = [fleet_of(Path("out"), [row(1, "written", flips)]).page() for flips in (None, 3)]
    assert ["flips</th>" in page for page in found] == [False, True]
    assert "old score</th>" not in found[0]


@pytest.mark.parametrize(
    "spoiled", [{"flips": "1"}, {"line": None}, {"status": "lost"}, {"out": 1}, {"fingerprint": []}, {"note": {}}]
)
def test_a_summary_with_a_value_of_another_type(tmp_path: Path, spoiled: dict[str, Any]) -> None:
    row = Row(status="written", line=1, finetuned="f", out="o", fingerprint="0", new=90.0)
    fleet_of(tmp_path, [row]).write()
    assert earlier_rows(tmp_path) == [row]
    found = json.loads((tmp_path / "summary.json").read_text())
    found["rows"][0] |= spoiled
    (tmp_path / "summary.json").write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match="not the summary of a fleet"):
        earlier_rows(tmp_path)
