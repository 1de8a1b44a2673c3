"""`tuneport extract` and `tuneport apply`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from builders.commands import Run, assert_refused, options
from builders.folders import Zoo, edit_weights


class TestExtractAndApply:
    def test_a_round_trip(self, run: Run, zoo: Zoo, place: Path) -> None:
        base, tuned, tau = zoo["vit-base"], zoo["vit-tuned"], place / "tau.safetensors"
        done = run("extract", base, tuned, "-o", tau, "--json")
        assert done.code == 0
        assert done.json["out"] == str(tau)
        assert done.json["tensors"] == 40
        assert done.json["norm"] > 0
        done = run("apply", tau, base, "-o", place / "again", "--json")
        assert done.code == 0
        assert done.json == {"out": str(place / "again"), "tensors": 40, "scale": 1.0}
        first, second = load_file(place / "again" / "model.safetensors"), load_file(tuned / "model.safetensors")
        for name in second:
            torch.testing.assert_close(first[name], second[name], atol=1e-7, rtol=2e-7)
        assert run("apply", tau, base, "-o", place / "none", "--scale", "0").code == 0
        untouched = load_file(place / "none" / "model.safetensors")
        assert all(
            torch.equal(tensor, untouched[name]) for name, tensor in load_file(base / "model.safetensors").items()
        )

    def test_the_words_for_people(self, run: Run, zoo: Zoo, place: Path) -> None:
        tau = place / "[red]tau.safetensors"
        done = run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau, "--exclude", "classifier.*")
        assert done.code == 0
        assert re.fullmatch(rf"38 tensors, norm [\d.]+, written to {re.escape(str(tau))}\n", done.out)

    def test_nothing_to_extract(self, run: Run, zoo: Zoo, place: Path) -> None:
        base, tuned, tau = zoo["vit-base"], zoo["vit-tuned"], place / "tau.safetensors"
        assert_refused(run("extract", base, base, "-o", tau), 1, "equals its base", "there is nothing to extract")
        done = run("extract", base, tuned, "-o", tau, "--exclude", "*")
        assert_refused(done, 1, "--exclude '*' leaves no tensor", "there is nothing to extract. Exclude less")
        assert list(place.iterdir()) == []

    def test_another_base_is_told(self, run: Run, zoo: Zoo, place: Path) -> None:
        base, tuned, tau = zoo["vit-base"], zoo["vit-tuned"], place / "tau.safetensors"
        assert run("extract", base, tuned, "-o", tau).code == 0
        assert run("apply", tau, base, "-o", place / "own").err == ""
        done = run("apply", tau, tuned, "-o", place / "other")
        assert (done.code, done.err) == (0, f"note: {tau} was made for other weights than those of {tuned}\n")

    def test_a_change_that_is_lost_in_writing_is_told(self, run: Run, zoo: Zoo, place: Path) -> None:
        base = Path(shutil.copytree(zoo["vit-base"], place / "base"))
        edit_weights(base, lambda t: t.update({name: x.to(torch.bfloat16) for name, x in t.items()}))
        tau = place / "tau.safetensors"
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau, "--exclude", "classifier.*").code == 0
        done = run("apply", tau, base, "-o", place / "out", "--scale", "1e-9")
        note = re.search(
            r"note: (the change of (\d+) of 38 tensors is too small for their dtype and is lost .*)\n", done.err
        )
        assert note is not None, done.err
        assert note[1].endswith("): weights in float32 keep it")
        stored, before = (load_file(folder / "model.safetensors") for folder in (place / "out", base))
        tensors = load_file(tau)
        same = [name for name in tensors if torch.equal(stored[name], before[name]) and tensors[name].any()]
        assert len(same) == int(note[2]) > 0
        assert json.loads((place / "out" / "tuneport.json").read_text())["notes"] == [note[1]]

    def test_what_a_transfer_loses_in_writing_is_told(self, run: Run, zoo: Zoo, place: Path) -> None:
        trio = options(zoo, "vit", target=zoo["vit-target16"])
        done = run("transfer", "--scale=1e-9", *trio, "--out", place / "out", "--json")
        assert done.json["notes"][-1].endswith("weights in float32 keep it")
        assert f"note: {done.json['notes'][-1]}\n" in done.err

    def test_patterns_that_match_nothing_are_told(self, run: Run, zoo: Zoo, place: Path) -> None:
        base, tuned, tau = zoo["vit-base"], zoo["vit-tuned"], place / "tau.safetensors"
        words = ("--exclude", "classifier.*", "--exclude", "clasifier.*")
        line = "no tensor has a name like 'clasifier.*' of `exclude`"
        printed = "note: no tensor has a name like 'clasifier.*' of --exclude\n"
        done = run("extract", base, tuned, "-o", tau, *words)
        assert (done.code, done.err) == (0, printed)
        done = run("plan", *options(zoo, "vit"), *words)
        assert (done.code, done.err) == (0, printed)
        done = run("transfer", "--scale=1", *options(zoo, "vit"), *words, "--out", place / "out", "--json")
        assert done.json["notes"] == [line]
        done = run("plan", *options(zoo, "vit", finetuned=tau), "--exclude", "classifier.*")
        assert (done.code, done.err) == (0, "")
        for finetuned in (tuned, tau):
            done = run("plan", *options(zoo, "vit", finetuned=finetuned), "--exclude", "*")
            assert_refused(done, 1, "--exclude '*' leaves no tensor", "there is nothing to transfer")

    def test_extract_does_not_replace_an_input(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        base = Path(shutil.copytree(zoo["vit-base"], tmp_path / "base"))
        before = (base / "model.safetensors").read_bytes()
        for target in (base / "model.safetensors", tmp_path / "base" / "config.json"):
            done = run("extract", base, zoo["vit-tuned"], "-o", target, "--overwrite")
            assert_refused(done, 1, "cannot be written: it is inside the input")
        assert (base / "model.safetensors").read_bytes() == before

    def test_apply_does_not_replace_an_input(self, run: Run, zoo: Zoo, place: Path) -> None:
        (place / "out").mkdir()
        tau = place / "out" / "tau.safetensors"
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
        done = run("apply", tau, zoo["vit-base"], "-o", place / "out", "--overwrite")
        assert_refused(done, 1, "cannot be overwritten: it holds the input", str(tau))
        assert tau.is_file()

    @pytest.mark.parametrize("scale", ["nan", "inf"])
    def test_a_scale_that_is_no_number(self, run: Run, zoo: Zoo, place: Path, scale: str) -> None:
        tau = place / "tau.safetensors"
        assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
        assert_refused(run("apply", tau, zoo["vit-base"], "-o", place / "out", "--scale", scale), 2, "finite number")
        assert [file.name for file in place.iterdir()] == ["tau.safetensors"]

    def test_bad_input(self, run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
        base, tuned, out = zoo["vit-base"], zoo["vit-tuned"], place / "out.safetensors"
        assert_refused(run("extract", base, zoo["dinov2-tuned"], "-o", out), 1, "Check that", "was fine-tuned from")
        assert_refused(run("extract", base, tmp_path / "nowhere", "-o", out), 1, "nowhere does not exist")
        assert_refused(run("apply", base, base, "-o", out), 1, "is a folder, not a task vector")
        file = tuned / "model.safetensors"
        assert_refused(run("apply", file, base, "-o", out), 1, "is not a task vector", "tuneport extract")
        nan = Path(shutil.copytree(tuned, tmp_path / "nan"))
        edit_weights(nan, lambda t: t["classifier.bias"].fill_(torch.nan))
        assert_refused(run("extract", base, nan, "-o", out), 1, "hold NaN or infinite values: classifier.bias")
        tau = tmp_path / "tau.safetensors"
        assert run("extract", base, tuned, "-o", tau).code == 0
        assert_refused(run("apply", tau, zoo["vit-target"], "-o", out), 1, "do not fit the base")
        assert_refused(run("apply", tau, base, "-o", base, "--overwrite"), 1, "it holds the input")
        assert_refused(run("extract", base, tuned, "-o", tau), 1, "exists already", "--overwrite")
        assert list(place.iterdir()) == []

    @pytest.mark.parametrize("name", ["tau", "tau.tv", "tau.safetensors.bak"])
    def test_a_name_by_which_the_file_would_not_be_known(self, run: Run, zoo: Zoo, place: Path, name: str) -> None:
        line = f"{place / name} must end in .safetensors"
        assert_refused(run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", place / name), 1, line)
        assert_refused(
            run("transfer", "--scale=1", *options(zoo), "--as", "task-vector", "--out", place / name), 1, line
        )
        assert list(place.iterdir()) == []
