"""Routes are judged on held-out own samples; the best is written, or the old model stays."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builders.commands import Run
from builders.folders import Zoo, load
from tuneport import upgrade
from tuneport.cli.commands import print_routes
from tuneport.config import UpgradeConfig
from tuneport.errors import DataError, OptionError, TuneportError
from tuneport.pipeline.upgrade import Upgrade
from tuneport.report.summary import repeat_command

COUNT = 160  # own samples, of which 40 judge


@pytest.fixture(scope="module")
def tuned(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune that answers otherwise than its base."""
    folder = tmp_path_factory.mktemp("tuned") / "tuned"
    shutil.copytree(zoo["vit-base"], folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith("weight") and tensor.ndim == 2 and "layer" in name:
            tensor += 0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def answers(folder: Path, pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """The classes that plain transformers gives to images."""
    from transformers import AutoImageProcessor

    module, processor = load(folder), AutoImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        return module(**processor(images=list(pixels), return_tensors="pt")).logits.argmax(-1)


@pytest.fixture(scope="module")
def images(tuned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random images, which the fine-tune answers right but for each tenth."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (COUNT + 20, 16, 16, 3), dtype=np.uint8)
    labels = answers(tuned, pixels).numpy()
    labels[::10] = (labels[::10] + 1) % 3
    path = tmp_path_factory.mktemp("own") / "own.npz"
    split = {"x_train": pixels[:COUNT], "y_train": labels[:COUNT], "x_test": pixels[COUNT:], "y_test": labels[COUNT:]}
    np.savez(path, classes=np.array(list(load(tuned).config.id2label.values())), **split)
    return path


@pytest.fixture(scope="module")
def copied(zoo: Zoo, tuned: Path, images: Path) -> Upgrade:
    """The fine-tune, copied to its own base."""
    return upgrade(zoo["vit-base"], tuned, zoo["vit-base"], images)


def test_a_copy_to_the_same_base_agrees_and_ends_the_search(copied: Upgrade) -> None:
    found, rows = copied, {row.name: row for row in copied.routes}
    assert list(rows) == ["old", "target", "copy", "port", "distill", "synthetic"]
    assert rows["copy"].agreement == 100.0
    assert rows["target"].agreement < 90
    assert found.chosen == "copy"
    assert "not needed" in rows["distill"].note
    assert found.result is not None
    assert "route copy" in found.decision


def test_what_python_saves_says_what_was_measured(copied: Upgrade, tmp_path: Path) -> None:
    copied.save(tmp_path / "out")
    record = json.loads((tmp_path / "out" / "tuneport.json").read_text())
    assert (record["chosen"], record["decision"]) == ("copy", copied.decision)
    assert "not measured" not in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "disagreements.jsonl").is_file()


def test_the_flips_are_those_of_plain_transformers(zoo: Zoo, tuned: Path, images: Path, copied: Upgrade) -> None:
    """The target keeps its own head: its row is what transformers says of the held-out samples."""
    held_out = copied.result.record["data"]["indices"][: round(0.25 * COUNT)]  # type: ignore[union-attr]
    stored = np.load(images)
    pixels, labels = stored["x_train"][held_out], torch.from_numpy(stored["y_train"][held_out])
    classes = list(load(zoo["vit-base"]).config.id2label.values())
    places = torch.tensor([classes.index(name) for name in stored["classes"][labels]])
    old, new = answers(tuned, pixels), answers(zoo["vit-base"], pixels)
    rows = {row.name: row for row in copied.routes}
    assert rows["target"].agreement == pytest.approx(100 * float((old == new).double().mean()), abs=1e-3)
    assert rows["old"].score == pytest.approx(100 * float((old == places).double().mean()))
    assert rows["target"].flips == int(((old == places) & (new != places)).sum())


def test_nothing_is_written_where_no_route_helps(zoo: Zoo, tuned: Path, images: Path, run: Run, place: Path) -> None:
    words = ("--source", zoo["vit-base"], "--finetuned", tuned, "--target", zoo["vit-target"], "--data", images)
    done = run("upgrade", *words, "--routes", "copy", "--out", place / "out", "--json")
    assert done.code == 0, done.err
    assert done.json["chosen"] is None
    assert done.json["decision"].startswith("keep the old model")
    assert "another shape" in done.json["routes"][2]["note"]
    assert not (place / "out").exists()


def test_the_output_has_the_table_and_the_disagreements(
    zoo: Zoo, tuned: Path, images: Path, run: Run, place: Path
) -> None:
    words = ("--source", zoo["vit-base"], "--finetuned", tuned, "--target", zoo["vit-base"], "--data", images)
    done = run("upgrade", *words, "--out", place / "out", "--json")
    assert done.code == 0, done.err
    record = json.loads((place / "out" / "tuneport.json").read_text())
    assert record["chosen"] == done.json["chosen"] == "copy"
    assert "note: the target is the source: an upgrade can bring nothing but the old model" in done.err
    assert [row["name"] for row in record["routes"]][:3] == ["old", "target", "copy"]
    assert (place / "out" / "disagreements.jsonl").read_text() == ""  # it agrees on all
    assert "agreement, %" in (place / "out" / "report.html").read_text()
    assert repeat_command(record) == shlex.join(["tuneport", "upgrade", *map(str, words), "--out", str(place / "out")])
    again = run("upgrade", *words, "--out", place / "out")
    assert again.code == 1
    assert "exists already" in again.err
    done = run("upgrade", *words, "--out", place / "out", "--overwrite")
    assert f"next: tuneport evaluate {place / 'out'} --data {images}\n" in done.out


@pytest.mark.parametrize("kind", ["model", "task-vector"])
def test_a_file_has_no_report_beside_it(zoo: Zoo, run: Run, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    record = {"out": "here", "as": kind, "decision": "route copy", "chosen": "copy", "routes": [], "data": {}}
    monkeypatch.setattr("tuneport.pipeline.upgrade.upgrade_to_folder", lambda *_: record)
    base, tuned, target = zoo.trio("vit")
    done = run(
        "upgrade", "--source", base, "--finetuned", tuned, "--target", target, "--data", zoo.data, "--out", "here"
    )
    assert done.code == 0, done.err
    assert ("report: here/report.html" in done.out) == (kind == "model")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"routes": ("copy", "fly")}, OptionError, "unknown route 'fly'"),
        ({"time": "soon"}, OptionError, "`time` must be a time"),
        ({"as_": "task-vector"}, TuneportError, "no task vector"),
        ({"samples": 0}, OptionError, "`samples` must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        UpgradeConfig.of(**options)


def test_too_few_samples_are_refused(zoo: Zoo, tuned: Path, images: Path) -> None:
    with pytest.raises(DataError, match="at least 16 own samples"):
        upgrade(zoo["vit-base"], tuned, zoo["vit-base"], images, samples=12)


def test_labels_of_the_data_are_neither_needed_nor_used(zoo: Zoo, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (24, 16, 16, 3), dtype=np.uint8), rng.integers(0, 3, 24)
    np.savez(tmp_path / "plain.npz", x_train=pixels)
    np.savez(tmp_path / "labelled.npz", x_train=pixels, y_train=labels, classes=np.array(["cat", "dog", "owl"]))
    found = [
        upgrade(
            *zoo.trio("clip_vision"),
            tmp_path / f"{name}.npz",
            head="animals",
            routes="port,distill",
            steps=2,
            accept_unlikely=True,
        )
        for name in ("plain", "labelled")
    ]
    agreements = [[row.agreement for row in each.routes] for each in found]
    assert agreements[0] == agreements[1]
    assert len(agreements[0]) == 4
    assert None not in agreements[0]
    assert [each.routes[1].score is None for each in found] == [True, False]


def test_what_is_said_of_a_route_names_options_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": "synthetic", "score": None, "agreement": None, "interval": None, "flips": None, "neutral": None}
    row |= {"seconds": 0.0, "memory": None}
    print_routes({"routes": [{**row, "note": "name a model with `generator`."}], "chosen": None})
    assert "synthetic: name a model with --generator." in capsys.readouterr().out
