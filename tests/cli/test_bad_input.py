"""One clear line for every bad input, and nothing written."""

from __future__ import annotations

import errno
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from builders.commands import Run, assert_refused, npz, options
from builders.folders import Zoo, edit_weights, images, write_data, write_head
from tuneport.cli import terminal
from tuneport.measure import capture


def nan_folder(zoo: Zoo, tmp_path: Path, part: str) -> Path:
    folder = Path(shutil.copytree(zoo[f"clip_vision-{part}"], tmp_path / f"nan-{part}"))
    return edit_weights(folder, lambda t: t["visual_projection.weight"].fill_(torch.nan))


def other_shapes(zoo: Zoo, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(zoo["clip_vision-tuned"], tmp_path / "other"))
    return edit_weights(folder, lambda t: t.update({"visual_projection.weight": torch.ones(5, 16)}))


def text_file(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def lora_file(path: Path) -> Path:
    """The weights of an adapter alone."""
    path.parent.mkdir(exist_ok=True)
    name = "base_model.model.vision_model.encoder.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format("A"): torch.ones(2, 16), name.format("B"): torch.ones(16, 2)}, path)
    return path


@dataclass(frozen=True)
class Scene:
    zoo: Zoo
    tmp: Path


Change = Callable[[Scene], dict[str, Any]]


BAD: dict[str, tuple[Change, tuple[str, ...]]] = {
    "no source": (lambda s: {"source": s.tmp / "nowhere"}, ("there is no model at", "no such folder")),
    "no fine-tune": (
        lambda s: {"finetuned": s.tmp / "nowhere"},
        ("there is no fine-tune at", "nowhere does not exist"),
    ),
    "no target": (lambda s: {"target": s.tmp / "nowhere"}, ("there is no model at", "no such folder")),
    "no data": (lambda s: {"data": s.tmp / "nowhere"}, ("no data at", "no such file or folder")),
    "data not given": (
        lambda _: {"data": None},
        ("the method bico needs calibration data", "--data"),
    ),
    "not a model": (
        lambda s: {"target": text_file(s.tmp / "folder" / "x.txt", "").parent},
        ("is not a model: no config.json in it",),
    ),
    "an adapter as target": (
        lambda s: {"target": text_file(s.tmp / "lora" / "adapter_config.json", "{}").parent},
        ("is an adapter, not a model", "give it as --finetuned, with its base as --source", "tuneport merge"),
    ),
    "an adapter's file": (
        lambda s: {"finetuned": lora_file(s.tmp / "adapter_model.safetensors")},
        (
            "adapter_model.safetensors holds the factors of a LoRA, not a model",
            "the folder that holds it and",
        ),
    ),
    "an adapter without its configuration": (
        lambda s: {"finetuned": lora_file(s.tmp / "lora" / "adapter_model.safetensors").parent},
        ("lora holds the factors of a LoRA, not a model", "give a folder with its adapter_config.json"),
    ),
    "an adapter's file as target": (
        lambda s: {"target": lora_file(s.tmp / "adapter_model.safetensors")},
        ("adapter_model.safetensors holds the factors of a LoRA, not a model",),
    ),
    "a role without an equals sign": (lambda _: {"roles": "up"}, ("--roles takes SOURCE=TARGET, such as up=fc1",)),
    "not a fine-tune": (
        lambda s: {"finetuned": text_file(s.tmp / "folder" / "x.txt", "").parent},
        ("is not a model",),
    ),
    "a file as source": (lambda s: {"source": text_file(s.tmp / "x.txt", "")}, ("is not a model",)),
    "other shapes": (
        lambda s: {"finetuned": other_shapes(s.zoo, s.tmp)},
        ("visual_projection.weight (5, 16) vs (12, 16)", "--exclude 'visual_projection.*'"),
    ),
    "another family": (lambda s: {"finetuned": s.zoo["vit-tuned"]}, ("Check that", "was fine-tuned from")),
    "nothing changed": (lambda s: {"finetuned": s.zoo["clip_vision-base"]}, ("equals its base in every tensor",)),
    "nan base": (
        lambda s: {"source": nan_folder(s.zoo, s.tmp, "base")},
        ("NaN or infinite", "visual_projection.weight"),
    ),
    "nan fine-tune": (
        lambda s: {"finetuned": nan_folder(s.zoo, s.tmp, "tuned")},
        ("NaN or infinite", "visual_projection.weight"),
    ),
    "nan target": (lambda s: {"target": nan_folder(s.zoo, s.tmp, "target")}, ("NaN or infinite", "visual_projection")),
    "empty npz": (
        lambda s: {"data": npz(s.tmp / "empty.npz", x=np.zeros((0, 4, 4, 3), np.uint8), y=np.zeros(0, int))},
        ("is empty",),
    ),
    "empty folder": (lambda s: {"data": text_file(s.tmp / "images" / "x.txt", "").parent}, ("has no images",)),
    "empty table": (lambda s: {"data": text_file(s.tmp / "data.jsonl", "")}, ("is empty: it has no rows",)),
    "unlabelled": (lambda s: {"data": npz(s.tmp / "bare.npz", x=images(30, 1)[0])}, ("has no labels",)),
    "unknown classes": (
        lambda s: {"data": write_data(s.tmp / "animals.npz", ("cat", "dog", "owl", "wolf", "gnu"))},
        ("1 of 5 classes of animals are unknown to the head: gnu",),
    ),
    "more classes than the head, by number": (
        lambda s: {"data": npz(s.tmp / "n.npz", x=images(30, 1, 5)[0], y=images(30, 1, 5)[1])},
        ("5 of 5 classes of n are unknown to the head: 0, 1, 2, 3, 4",),
    ),
    "too many samples": (lambda _: {"samples": 61}, ("asked for 61 samples but", "has 60; lower --samples")),
    "no samples": (lambda _: {"samples": 0}, ("--samples must be at least 1, got 0",)),
    "negative samples": (lambda _: {"samples": -3}, ("--samples must be at least 1, got -3",)),
    "samples and shots": (lambda _: {"shots": 2}, ("--samples or --shots, not both",)),
    "too many shots": (lambda _: {"samples": None, "shots": 21}, ("asked for 21 shots but", "lower --shots")),
    "unknown method": (lambda _: {"method": "bicco"}, ("unknown method 'bicco'. Did you mean 'bico'? Known:",)),
    "unknown sampler": (lambda _: {"sampler": "randon"}, ("unknown sampler 'randon'. Did you mean 'random'?",)),
    "unknown head": (lambda _: {"head": "plants"}, ("has no head 'plants': it has animals",)),
    "a head of another width": (
        lambda s: {"head": write_head(s.tmp / "mine.safetensors", 7)},
        ("embeddings of width 7, but", "gives features of width 12"),
    ),
    "unknown device": (lambda _: {"device": "gpu"}, ("device 'gpu' is not available",)),
    "missing device": (lambda _: {"device": "cuda:99"}, ("device 'cuda:99' is not available",)),
    "text for an image model": (
        lambda s: {"data": text_file(s.tmp / "texts.csv", "text,label\na,cat\nb,dog\n"), "samples": 2},
        ("texts holds texts, but", "reads images"),
    ),
    "odd data": (lambda s: {"data": text_file(s.tmp / "data.xyz", "")}, ("the format of", ".npz")),
    "scale nan": (lambda _: {"scale": "nan"}, ("--scale must be a finite number",)),
    "scale inf": (lambda _: {"scale": "inf"}, ("--scale must be a finite number",)),
    "scale word": (lambda _: {"scale": "strong"}, ("--scale must be a number",)),
}


USAGE = (  # what the command line alone tells
    "data not given",
    "a role without an equals sign",
    "no samples",
    "negative samples",
    "samples and shots",
    "unknown method",
    "unknown sampler",
    "unknown device",
    "scale nan",
    "scale inf",
    "scale word",
)


@pytest.mark.usefixtures("no_forward")
class TestBadInput:
    @pytest.mark.parametrize("case", BAD)
    def test_is_refused_in_one_line_before_any_work(
        self, run: Run, zoo: Zoo, tmp_path: Path, place: Path, case: str
    ) -> None:
        change, words = BAD[case]
        done = run("transfer", "--scale=1", *options(zoo, **change(Scene(zoo, tmp_path))), "--out", place / "out")
        assert_refused(done, 2 if case in USAGE else 1, *words)
        assert list(place.iterdir()) == []

    @pytest.mark.parametrize("case", ["no source", "other shapes", "unknown head", "too many samples", "no data"])
    def test_a_plan_says_the_same(self, run: Run, zoo: Zoo, tmp_path: Path, case: str) -> None:
        change, words = BAD[case]
        assert_refused(run("plan", *options(zoo, **change(Scene(zoo, tmp_path))), "--json"), 1, *words)

    def test_the_advice_on_tensors_works(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        tuned = other_shapes(zoo, tmp_path)
        for words in (["plan", *options(zoo, finetuned=tuned)], ["extract", zoo["clip_vision-base"], tuned, "-o"]):
            out = [tmp_path / "tau.safetensors"] if words[0] == "extract" else []
            refused = run(*words, *out)
            advice = re.search(r"Exclude them with (--exclude .*)\.$", refused.err.strip())
            assert advice is not None, refused.err
            done = run(*words, *out, *shlex.split(advice[1]))
            assert done.code == 0, done.err

    def test_an_existing_output(self, run: Run, zoo: Zoo, place: Path) -> None:
        (place / "out").mkdir()
        (place / "out" / "precious").write_text("mine")
        done = run("transfer", "--scale=1", *options(zoo), "--out", place / "out")
        assert_refused(done, 1, "out exists already", "--overwrite")
        assert (place / "out" / "precious").read_text() == "mine"
        assert [file.name for file in place.iterdir()] == ["out"]

    def test_a_slip_in_a_path_is_no_hub_id(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(zoo["vit-base"], place / "zoo" / "base")
        shutil.copy(zoo.data, place / "zoo" / "animals.npz")
        monkeypatch.chdir(place)
        done = run("evaluate", "zoo/bas", "--data", "zoo/animals.npz")
        assert_refused(done, 1, "there is no model at zoo/bas: no such folder. Did you mean zoo/base?")
        done = run("evaluate", "zoo/base", "--data", "zoo/anmals.npz")
        assert_refused(done, 1, "no data at zoo/anmals.npz: no such file or folder. Did you mean zoo/animals.npz?")

    @pytest.mark.parametrize("role", ["source", "finetuned", "target", "data"])
    def test_an_output_that_is_an_input(self, run: Run, zoo: Zoo, tmp_path: Path, role: str) -> None:
        data = tmp_path / "animals"
        for name in ("cat", "dog"):
            text_file(data / "x", "")
            (data / name).mkdir()
        given = {part: Path(shutil.copytree(zoo[f"clip_vision-{part}"], tmp_path / part)) for part in ("base", "tuned")}
        target = Path(shutil.copytree(zoo["clip_vision-target"], tmp_path / "target"))
        paths = {"source": given["base"], "finetuned": given["tuned"], "target": target, "data": data}
        before = sorted(str(file) for file in tmp_path.rglob("*"))
        done = run("transfer", "--scale=1", *options(zoo, **paths), "--out", paths[role], "--overwrite")
        assert_refused(done, 1, "cannot be overwritten: it holds the input", str(paths[role]))
        assert sorted(str(file) for file in tmp_path.rglob("*")) == before

    def test_an_output_that_holds_an_input(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        shutil.copytree(zoo["clip_vision-target"], tmp_path / "models" / "target")
        paths = options(zoo, target=tmp_path / "models" / "target")
        done = run("transfer", *paths, "--out", tmp_path / "models", "--overwrite")
        assert_refused(done, 1, "cannot be overwritten: it holds the input")
        assert (tmp_path / "models" / "target" / "model.safetensors").is_file()

    def test_an_output_inside_an_input(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        data = tmp_path / "animals"
        (data / "train" / "cat").mkdir(parents=True)
        text_file(data / "train" / "cat" / "x.png", "")
        for out in (data / "train", data / "new"):
            done = run("transfer", *options(zoo, data=data), "--out", out, "--overwrite")
            assert_refused(done, 1, "cannot be written: it is inside the input")
        assert (data / "train" / "cat" / "x.png").is_file()

    def test_a_folder_that_is_no_output(self, run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
        """--overwrite replaces what the command has written, not what else lies there."""
        base, out = zoo["vit-base"], place / "out"
        tau = tmp_path / "tau.safetensors"
        assert run("extract", base, zoo["vit-tuned"], "-o", tau).code == 0
        text_file(out / "thesis.txt", "mine")
        commands: dict[tuple[Any, ...], str] = {
            ("transfer", "--scale=1", *options(zoo)): "tuneport.json",
            ("apply", tau, base): "tuneport.json",
            ("demo",): "demo.json",
        }
        for words, mark in commands.items():
            done = run(*words, "--out", out, "--overwrite")
            assert_refused(done, 1, f"not an output of this command (no {mark} in it). Remove it by hand")
            assert [file.name for file in place.rglob("*")] == ["out", "thesis.txt"]

    @pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
    def test_a_place_that_cannot_be_written(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        mkdir = Path.mkdir

        def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
            if place in self.parents:
                raise OSError(code, "no", str(self))
            mkdir(self, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", refuse)
        done = run("transfer", "--scale=1", *options(zoo), "--out", place / "out")
        assert_refused(done, 1, "out cannot be written", "Choose a")

    def test_long_lines_and_markup_come_through(self, run: Run, zoo: Zoo, tmp_path: Path, place: Path) -> None:
        name = "[bold]" + "long name " * 15 + "[/nonsense]"
        done = run("transfer", "--scale=1", *options(zoo, source=tmp_path / name), "--out", place / "out")
        assert_refused(done, 1, f"there is no model at {tmp_path / name}: no such folder")


class TestVanishedInput:
    def test_the_targets_weights_go_while_it_is_measured(
        self, run: Run, zoo: Zoo, tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = Path(shutil.copytree(zoo["clip_vision-target"], tmp_path / "target"))
        finish = capture._Accumulator.finish

        def vanish(self: Any, index: int) -> None:
            (target / "model.safetensors").unlink(missing_ok=True)
            finish(self, index)

        monkeypatch.setattr(capture._Accumulator, "finish", vanish)
        done = run("transfer", "--scale=1", *options(zoo, target=target), "--out", place / "out")
        assert_refused(done, 1, "model.safetensors is gone or cannot be read")
        assert list(place.iterdir()) == []

    def test_control_characters_do_not_reach_the_terminal(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        done = run("extract", tmp_path / "a\x1b[2Jb\x07", zoo["vit-tuned"], "-o", tmp_path / "tau.safetensors")
        assert_refused(done, 1, "does not exist")
        assert "\x1b" not in done.err
        assert "\x07" not in done.err

    def test_nor_through_results(self, run: Run, zoo: Zoo, place: Path) -> None:
        data = shutil.copy(zoo.data, place / "a\x1b[2Jb\x07.npz")
        done = run("transfer", "--scale=1", *options(zoo, data=data), "--evaluate", "--out", place / "out")
        assert done.out.splitlines()[1].startswith("accuracy on a\ufffd[2Jb\ufffd: ")
        assert not {"\x1b", "\x07"} & set(done.out)

    def test_no_part_of_a_table_steers_the_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        terminal.show([["\x1b[2Jcell", "[red]"]], "\x1b[2Jcolumn", "\x9b2J", title="\x1b]0;title\x07")
        terminal.say("\x1b[2Jlabel\rtext")
        found = capsys.readouterr().out
        assert not {"\x1b", "\x07", "\x9b", "\r"} & set(found)
        for words in ("[2Jcell", "[red]", "[2Jcolumn", "\ufffd2J", "\ufffd]0;title\ufffd", "[2Jlabel", " text"):
            assert words in found


def fill_disk(monkeypatch: pytest.MonkeyPatch, place: Path, name: str) -> None:
    """Writing to files under `place` whose name ends in `name` fails after some bytes."""
    opened = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, content: Any) -> None:
            self.file.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    def limited(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = opened(self, mode, *args, **kwargs)
        return Full(file) if "w" in mode and place in self.parents and self.name.endswith(name) else file

    monkeypatch.setattr(Path, "open", limited)


class TestFullDisk:
    @pytest.mark.parametrize("file", ["model.safetensors", "README.md", "report.html", "tuneport.json"])
    def test_nothing_half_written_is_left(
        self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        fill_disk(monkeypatch, place, file)
        done = run("transfer", "--scale=1", *options(zoo), "--out", place / "out")
        assert_refused(done, 1, "out cannot be written: the disk is full. Free some space")
        assert list(place.iterdir()) == []

    def test_the_old_output_survives(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "out").mkdir()
        for name in ("precious", "tuneport.json"):
            (place / "out" / name).write_text("mine")
        fill_disk(monkeypatch, place, "model.safetensors")
        done = run("transfer", "--scale=1", *options(zoo, method="naive"), "--out", place / "out", "--overwrite")
        assert_refused(done, 1, "the disk is full")
        assert (place / "out" / "precious").read_text() == "mine"
        assert [file.name for file in place.iterdir()] == ["out"]

    def test_extract(self, run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fill_disk(monkeypatch, place, "")
        done = run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", place / "tau.safetensors")
        assert_refused(done, 1, "the disk is full")
        assert list(place.iterdir()) == []
