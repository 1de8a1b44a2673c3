"""A list is read whole, and all its wrong lines are named before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.commands import Run, assert_refused
from builders.fleets import write_list
from builders.folders import Zoo
from tuneport import checks
from tuneport.config import UpgradeConfig, UpgradeInputs
from tuneport.errors import DataError
from tuneport.fleet.lines import Line, ListError, read_lines


@pytest.fixture
def given(zoo: Zoo) -> dict[str, Any]:
    """What a line needs; the command gives it, unless a line says otherwise."""
    return {"source": str(zoo["vit-base"]), "target": str(zoo["vit-target"]), "data": str(zoo.data)}


def read(folder: Path, lines: list[Any], given: dict[str, Any], **options: Any) -> tuple[Line, ...]:
    listed = write_list(folder / "list.jsonl", lines)
    return read_lines(UpgradeInputs(list_=str(listed), out=str(folder / "out"), **given), UpgradeConfig.of(**options))


def test_a_line_says_more_than_the_command(zoo: Zoo, tmp_path: Path, given: dict[str, Any]) -> None:
    tuned, out = str(zoo["vit-tuned"]), str(tmp_path / "else")
    more = {"routes": ["port"], "as": "adapter", "batch-size": 8, "exclude": "head.*", "classes": ["a", "b"]}
    lines = [{"finetuned": tuned}, "", {"finetuned": [tuned], "out": out, "time": "2m", "describe": None, **more}]
    first, second = read(tmp_path, lines, given, routes="copy", time=30, describe="images", rank=4)
    assert (first.number, second.number) == (1, 3)
    assert first.inputs.finetuned == second.inputs.finetuned == (tuned,)
    assert first.inputs.out == str(tmp_path / "out" / "vit-tuned")
    assert second.inputs.out == out
    assert (first.config.routes, first.config.time, first.config.describe) == (("copy",), 30, "images")
    assert (second.config.routes, second.config.time, second.config.describe) == (("port",), 120, None)
    assert (second.config.as_, second.config.batch_size, second.config.exclude) == ("adapter", 8, ("head.*",))
    assert second.config.classes == ("a", "b")
    assert first.config.rank == second.config.rank == 4
    assert first.config.resume
    assert first.fingerprint != second.fingerprint


def test_all_wrong_lines_are_named(zoo: Zoo, tmp_path: Path, given: dict[str, Any]) -> None:
    tuned = str(zoo["vit-tuned"])
    lines: list[Any] = [
        {"finetune": tuned},
        "{",
        "[1]",
        {"finetuned": tuned, "rank": "16"},
        {"finetuned": tuned, "seed": True, "samples": 0.5},
        {"finetuned": tuned, "samples": 0},
        {"finetuned": tuned[:-1]},
        {"finetuned": tuned, "routes": ["copy", "fly"]},
        {},
        {"finetuned": tuned},
        {"finetuned": tuned},
        {"finetuned": tuned, "out": str(tmp_path / "out" / "vit-tuned" / "in")},
        {"finetuned": tuned, "out": str(tmp_path / "out")},
        {"finetuned": tuned, "target": tuned + "-not", "out": "x"},
        {"finetuned": tuned, "data": None, "out": "y"},
        {"finetune": tuned},
    ]
    with pytest.raises(ListError) as raised:
        read(tmp_path, lines, given)
    text = str(raised.value)
    assert text.startswith(f"{tmp_path / 'list.jsonl'}: lines 1, 16: unknown key 'finetune'. Did you mean 'finetuned'?")
    for words in (
        "line 2: it is not JSON",
        "line 3: it is no JSON object",
        'line 4: `rank` must be a whole number, got "16"',
        "line 5: `seed` must be a whole number, got true. `samples` must be a whole number, got 0.5",
        "line 6: `samples` must be at least 1, got 0",
        f"line 7: there is no fine-tune at {tuned[:-1]}",
        "line 8: unknown route 'fly'",
        "line 9: `finetuned` and `out` are missing",
        "line 11: `out` is",
        "line 12: `out` is",
        "where the summary goes",
        "line 14: there is no model at",
        "line 15: there are no samples",
    ):
        assert words in text
    assert "line 10" not in text.replace("as in line 10", "")
    assert not (tmp_path / "out").exists()


def test_a_hundred_wrong_lines_are_named(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ListError) as raised:
        read(tmp_path, [{f"key {number}": 1} for number in range(100)], given)
    assert all(f"line {number}: unknown key 'key {number - 1}'" in str(raised.value) for number in range(1, 101))


def test_of_many_wrong_lines_a_hundred_are_named(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ListError) as raised:
        read(tmp_path, ["{"] * 9000, given)
    assert "98, 99, 100: it is not JSON" in str(raised.value)
    assert str(raised.value).endswith("; other lines may be wrong too.")


def test_of_many_wrong_keys_the_first_are_named(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(ListError, match=r"unknown key 'seed 1'.*unknown key 'seed 10'") as raised:
        read(tmp_path, [{f"seed {number}": 1 for number in range(1, 50_000)}], given)
    assert "seed 11" not in str(raised.value)


@pytest.mark.parametrize("place", ["a\x00b", "\ud800", "x/" * 3000, "y" * 5000])
@pytest.mark.parametrize("key", ["finetuned", "out", "source", "data", "head", "extra"])
def test_a_text_that_is_no_path(zoo: Zoo, tmp_path: Path, given: dict[str, Any], key: str, place: str) -> None:
    with pytest.raises(ListError, match=r"line 1: .* cannot be a path: it ") as raised:
        read(tmp_path, [{"finetuned": str(zoo["vit-tuned"]), key: place}], given)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("out", ["out", ".", "..", "out/x/.."])
def test_an_output_that_holds_the_summary(zoo: Zoo, tmp_path: Path, given: dict[str, Any], out: str) -> None:
    home = tmp_path / "deep" / "er"
    lines = write_list(tmp_path / "list.jsonl", [{"finetuned": str(zoo["vit-tuned"]), "out": str(home / out)}])
    with pytest.raises(ListError, match=r"line 1: .*(where the summary goes|does not name a new folder)"):
        read_lines(UpgradeInputs(list_=str(lines), out=str(home / "out"), **given), UpgradeConfig.of())


def test_of_many_missing_models_ten_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(checks, "why_unknown", lambda place: asked.append(place) or f"there is no {place}.")
    with pytest.raises(ListError, match=r"line 1: there is no org/0\. there is no org/1\."):
        read(tmp_path, [{"finetuned": [f"org/{number}" for number in range(1000)], "out": "o"}], given)
    assert len(asked) == 10


def test_a_list_that_is_too_large(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="has 10001 lines, and at most 10000 are read"):
        read(tmp_path, ["{}"] * 10_001, given)
    with pytest.raises(DataError, match=r"has 1\d{7} bytes, and at most 10000000 are read"):
        read(tmp_path, [" " * 10**7, "{}"], given)


def test_a_list_that_is_none(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="has no line"):
        read(tmp_path, ["", " "], given)
    with pytest.raises(DataError, match=r"cannot be read: No such file.* Did you mean .*list\.jsonl"):
        read_lines(UpgradeInputs(list_=str(tmp_path / "lists.jsonl"), out="o"), UpgradeConfig.of())


class TestCommand:
    def test_wrong_lines(self, run: Run, tmp_path: Path) -> None:
        listed = write_list(tmp_path / "list.jsonl", [{"finetune": "x"}])
        done = run("upgrade", "--list", listed, "--out", tmp_path / "out")
        assert_refused(done, 2, "line 1: unknown key 'finetune'. Did you mean 'finetuned'?")

    def test_what_one_upgrade_needs(self, run: Run, tmp_path: Path) -> None:
        done = run("upgrade", "--source", "a", "--out", tmp_path / "out")
        assert_refused(done, 2, "--finetuned and --target are missing")

    def test_workers_without_a_list(self, run: Run, tmp_path: Path) -> None:
        done = run("upgrade", "--workers", "2", "--out", tmp_path / "out")
        assert_refused(done, 2, "--workers and --ray go with --list")
