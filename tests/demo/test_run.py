"""The demo, run whole once: what it prints holds, what it writes loads, and nothing of it points to a passing place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CLIPVisionModelWithProjection
from typer.testing import CliRunner

from tuneport.cli import app
from tuneport.demo.run import mirrored_digits, run_demo
from tuneport.errors import CheckpointError

TRAIN = 600  # images


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "out"


def few_digits() -> dict[str, Any]:
    """Some of the images: encoding all of them takes as long as fine-tuning."""
    digits = mirrored_digits()
    counts = {"train": TRAIN, "test": 200}
    return {key: array[: counts.get(key.partition("_")[2])] for key, array in digits.items()}


@pytest.fixture(scope="module")
def shown(place: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuneport.demo.run.STEPS", 25)  # a quarter: fine-tuning takes most of the time
        patch.setattr("tuneport.demo.run.mirrored_digits", few_digits)
        return run_demo(place)


@pytest.fixture(scope="module")
def record(shown: dict[str, Any]) -> dict[str, Any]:
    return json.loads((Path(shown["out"]) / "tuneport.json").read_text(encoding="utf-8"))


def test_bico_helps_more_than_its_rivals(shown: dict[str, Any]) -> None:
    found = {row["model"]: row["accuracy"] for row in shown["table"]}
    bico = found["target, ported by bico"]
    assert bico > found["target, zero-shot"] + 10
    assert bico > found["target, ported by theseus"] + 10
    assert bico > found["target, ported by naive"] + 10
    assert found[f"target, fine-tuned on all {TRAIN} images"] > bico


def test_the_next_command_gives_the_accuracy_of_the_table(shown: dict[str, Any]) -> None:
    words = shown["next"].split()
    assert words[:2] == ["tuneport", "evaluate"]
    answer = CliRunner().invoke(app, [*words[1:], "--json"])
    assert answer.exit_code == 0, answer.output
    (bico,) = (row["accuracy"] for row in shown["table"] if row["model"] == "target, ported by bico")
    assert json.loads(answer.stdout)["accuracy"] == pytest.approx(bico)


def test_what_it_writes_loads(shown: dict[str, Any]) -> None:
    model = CLIPVisionModelWithProjection.from_pretrained(shown["out"])
    assert sum(parameter.numel() for parameter in model.parameters()) > 0
    assert (Path(shown["out"]) / "report.html").is_file()
    assert shown["report"] == str(Path(shown["out"]) / "report.html")


def test_the_record_names_places_that_are_there(record: dict[str, Any], shown: dict[str, Any], place: Path) -> None:
    assert record["out"] == shown["out"] == str(place / "large-mirrored")
    for key in ("source", "finetuned", "target", "data"):
        assert Path(record[key]["path"]).parent == place
        assert Path(record[key]["path"]).exists()
    assert ".tmp" not in json.dumps(record)


def test_another_run_needs_leave_to_overwrite(shown: dict[str, Any], place: Path) -> None:
    before = (Path(shown["out"]) / "tuneport.json").read_bytes()
    with pytest.raises(CheckpointError, match="overwrite=True"):
        run_demo(place)
    assert (Path(shown["out"]) / "tuneport.json").read_bytes() == before
