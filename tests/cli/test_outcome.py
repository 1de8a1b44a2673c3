"""What a transfer says first: gain, harm, nothing, and the exit code that scripts can ask for."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from builders.commands import Run, assert_refused, loud, options
from builders.folders import SMALL, Zoo, build, images, known_by
from tuneport.data.formats import read_plain
from tuneport.pipeline.transfer import transfer


@pytest.fixture(scope="module")
def ported(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A port at full strength."""
    trio = zoo.trio("vit")
    out = tmp_path_factory.mktemp("ported") / "out"
    return transfer(*trio, zoo.data, method="naive", scale=30, samples=24, head_fit="none").save(out)


def test_a_gain(run: Run, zoo: Zoo, place: Path, ported: Path) -> None:
    data = known_by(ported, place / "known.npz")
    done = run(*loud(zoo, data, place / "out"), "--fail-on-harm")
    assert done.code == 0, done.err
    have, first, *rest = done.out.splitlines()
    assert have == f"written to {place / 'out'}: a model; better than the target was"
    assert first.startswith("accuracy on known: ")
    assert first.endswith("-> 100.0 %: the transfer helped")
    assert [line.split("  ")[1] for line in rest[:3]] == [
        "the fine-tuned source",
        "the target as it was",
        "the port",
    ]
    card = (place / "out" / "README.md").read_text()
    assert f"**{first.replace('->', '-&gt;')}.**" in card


def test_harm_is_said_and_has_an_exit_code(run: Run, zoo: Zoo, place: Path) -> None:
    data = known_by(zoo["vit-target"], place / "known.npz")
    done = run(*loud(zoo, data, place / "out"))
    assert done.code == 0, "an exit code only where it is asked for"
    have, first, *_ = done.out.splitlines()
    assert have.endswith("nothing useful was written: it is worse than the target was")
    assert "100.0 -> " in first
    assert "the transfer did harm; try --scale safe, more samples, or --distill 300" in first
    done = run(*loud(zoo, data, place / "out"), "--overwrite", "--fail-on-harm", "--json")
    assert (done.code, done.json["outcome"]) == (3, "harm")
    assert (place / "out" / "tuneport.json").is_file(), "the output stays"


def test_a_scale_of_zero_is_called_what_it_is(run: Run, zoo: Zoo, place: Path) -> None:
    done = run("transfer", *options(zoo, scale=0), "--out", place / "out", "--verbose")
    assert done.code == 0, done.err
    assert "nothing moved; the scale is 0, and the output is the target as it was" in done.out.splitlines()[1]
    target = zoo["clip_vision-target"] / "model.safetensors"
    assert (place / "out" / "model.safetensors").read_bytes() == target.read_bytes()
    assert json.loads((place / "out" / "tuneport.json").read_text())["outcome"] == "nothing moved"
    rows = dict(line.split(maxsplit=1) for line in done.out.splitlines()[1:] if " " in line)
    assert (rows["moved"], rows["target"]) == ("nothing: the scale is 0", "every tensor stays as it was")
    assert "  kept " not in done.out
    page = " ".join((place / "out" / "report.html").read_text().split())
    assert "mapped by <code>bico</code> and not added: the scale is 0." in page
    card = (place / "out" / "README.md").read_text()
    assert "with the skill of" not in card
    assert "clip\\_vision-target, unchanged" in card
    assert "was ported to" not in card
    assert "is carried over" not in card
    assert card.partition("## What stayed as it was")[2].strip().startswith("- every tensor: the scale is 0\n")


@pytest.mark.parametrize(("more", "samples"), [((), 20), (("--no-evaluate",), 0), (("--evaluate",), 30)])
def test_a_part_of_the_test_split_is_scored_unless_asked_otherwise(
    run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], samples: int
) -> None:
    monkeypatch.setattr("tuneport.pipeline.run.USUAL", 20)
    done = run("transfer", *options(zoo, method="naive", scale=9), *more, "--out", place / "out", "--json")
    assert done.code == 0, done.err
    if not samples:
        assert (done.json["outcome"], "evaluation" in done.json) == ("not measured", False)
        return
    assert {row["samples"] for row in done.json["accuracies"]} == {samples}
    assert sum(row["samples"] for row in done.json["by_class"]) == samples
    turned = [each for side in ("right", "wrong") for each in done.json["turned"][side]]
    assert turned
    test = read_plain(zoo.data, "test")
    for each in turned:
        assert test.classes[test.labels[each["index"]]] == each["label"], "the index is that in the whole split"
        assert each["thumbnail"].startswith("data:image/png;base64,")


def test_data_without_a_test_split_are_not_scored(run: Run, zoo: Zoo, place: Path) -> None:
    pixels, labels = images(30, 1, 3)
    np.savez(place / "x.npz", x_train=pixels, y_train=labels, classes=np.array(("cat", "dog", "owl")))
    done = run("transfer", *options(zoo, method="naive", scale=1, data=place / "x.npz"), "--out", place / "out")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].endswith("how good it is was not measured")
    assert done.out.splitlines()[1].startswith("the gain was not measured: ")


def test_what_looks_like_no_fine_tune_is_an_error_that_can_be_passed(run: Run, zoo: Zoo, place: Path) -> None:
    other = build("clip_vision", replace(SMALL, seed=5), place / "other")
    swapped = options(zoo, source=other, method="naive", scale=1)
    assert_refused(run("transfer", *swapped, "--out", place / "out"), 1, "another base", "--accept-unlikely")
    assert run("transfer", *swapped, "--accept-unlikely", "--out", place / "out").code == 0


@pytest.mark.parametrize("more", [("--rank", "3"), ()])
def test_usage_is_checked_before_libraries_are_loaded(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    for name in ("torch", "tuneport.processes", "tuneport.pipeline.run"):
        monkeypatch.setitem(sys.modules, name, None)  # to import it is an error
    out = place / "new" if more else place
    done = run("transfer", "--source", "a", "--finetuned", "b", "--target", "c", "--data", "d", "--out", out, *more)
    assert_refused(done, 2 if more else 1, "they go with --as adapter" if more else "exists already")


def test_progress_ends_with_the_choice_of_the_scale(
    run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneport.cli.terminal.EVERY", 0.0)
    done = run("transfer", *options(zoo), "--batch-size", "8", "--no-evaluate", "--out", place / "out")
    assert done.code == 0, done.err
    told = [int(found) for found in re.findall(r": (\d+) %", done.err)]
    assert told == sorted(told)
    chosen = [int(found) for found in re.findall(r"choosing the scale: (\d+) %", done.err)]
    assert chosen[0] < chosen[-1] < told[-1] == 100


def test_progress_is_told_where_there_is_no_terminal(
    run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneport.cli.terminal.EVERY", 0.0)
    done = run("transfer", "--scale=1", *options(zoo), "--batch-size", "8", "--no-evaluate", "--out", place / "out")
    measured = [int(found) for found in re.findall(r"measuring: (\d+) %", done.err)]
    assert measured[0] == 0 < measured[-1] < 100
    assert "writing: 100 %" in done.err
