"""What a transfer leaves behind: a folder with all that belongs in it, a task-vector file, a module at a scale."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load
from safetensors.torch import load_file

from builders.folders import CLASSES, SAMPLES, Zoo, cross, load, write_head
from builders.samples import empty_dataset
from tuneport import TuneportError
from tuneport.errors import CheckpointError
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model
from tuneport.pipeline.arithmetic import apply
from tuneport.pipeline.transfer import transfer
from tuneport.task_vectors.vector import load_task_vector


@pytest.fixture(scope="module")
def laden(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with more files next to the weights than a transfer should copy."""
    root = tmp_path_factory.mktemp("trio")
    trio = [Path(shutil.copytree(path, root / path.name)) for path in zoo.trio("clip")]
    target = trio[2]
    write_head(target / "heads" / "plants.safetensors", 20)
    for name in ("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.onnx", "training_args.bin"):
        (target / name).write_bytes(b"weights of another format")
    (target / "README.md").write_text("the old card")
    (target / ".hidden").write_text("")
    (target / "LICENSE").write_text("a licence")
    for name in ("1_Pooling/config.json", "2_Dense/model.safetensors", "2_Dense/.hidden", "other/notes.txt"):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(name)
    return trio


@pytest.fixture(scope="module")
def saved(laden: list[Path], zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saved") / "out"
    transfer(*laden, zoo.data, samples=SAMPLES, seed=3, scale=0.5).save(out)
    return out


class TestSaved:
    def test_companions_come_along_and_other_weights_do_not(self, laden: list[Path], saved: Path) -> None:
        written = {"README.md", "tuneport.json", "report.html", "model.safetensors"}
        companions = {
            "config.json",
            "preprocessor_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "LICENSE",
            "heads/plants.safetensors",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
        }
        found = {str(file.relative_to(saved)) for file in saved.rglob("*") if file.is_file()}
        assert found == written | companions
        for name in companions:
            assert (saved / name).read_bytes() == (laden[2] / name).read_bytes()

    def test_the_record_holds_what_the_contract_says(self, zoo: Zoo, laden: list[Path], saved: Path) -> None:
        record = json.loads((saved / "tuneport.json").read_text())
        assert record["out"] == str(saved)
        assert (record["method"], record["scale"], record["samples"]) == ("bico", 0.5, SAMPLES)
        assert record["seconds"] > 0
        assert record["options"]["seed"] == 3
        assert record["options"]["samples"] == SAMPLES
        assert {"shots", "sampler", "head", "batch_size", "exclude", "device"} <= set(record["options"])
        assert {"torch", "transformers", "safetensors", "numpy", "python"} <= set(record["versions"])
        fields = {"target", "source", "rank_in", "rank_out", "residual_in", "residual_out", "norm_source"}
        assert record["layers"]
        for layer in record["layers"]:
            assert fields | {"norm_target"} <= set(layer)
        assert record["not_transported"]
        assert all(set(item) == {"tensor", "reason"} for item in record["not_transported"])
        for role, folder in zip(("source", "finetuned", "target"), laden, strict=True):
            assert record[role]["name"] == folder.name
            digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
            assert record[role]["sha256"]["model.safetensors"] == digest
            assert {"config.json", "preprocessor_config.json"} <= set(record[role]["sha256"])
        digest = hashlib.sha256(zoo.data.read_bytes()).hexdigest()
        assert record["data"]["sha256"] == {zoo.data.name: digest}
        assert record["data"]["split"] == "train"
        assert len(record["data"]["indices"]) == SAMPLES

    def test_the_card_names_base_and_method(self, laden: list[Path], saved: Path) -> None:
        card = (saved / "README.md").read_text()
        about = metadata_load(saved / "README.md")
        assert about is not None
        assert about["base_model"][0] == laden[2].name
        assert "bico" in about["tags"]
        assert f"`{laden[0].name}`" in card
        assert f"`{laden[1].name}`" in card
        assert "scale 0.5" in card
        assert "old card" not in card

    def test_the_page_is_well_formed_and_shows_every_layer(self, saved: Path) -> None:
        page = Page()
        page.feed((saved / "report.html").read_text())
        page.close()
        assert page.open == []
        assert not page.outside, "it opens offline"
        record = json.loads((saved / "tuneport.json").read_text())
        for layer in record["layers"]:
            assert layer["target"] in page.cells
        for item in record["not_transported"]:
            assert item["tensor"] in page.cells
            assert item["reason"] in page.cells

    def test_text_and_images_still_work_together(self, saved: Path) -> None:
        head = choose_head(open_model(saved), None, empty_dataset("animals", CLASSES))
        assert head.name == "text"

    def test_the_result_can_be_ported_on(self, zoo: Zoo, laden: list[Path], saved: Path) -> None:
        result = transfer(laden[2], saved, zoo["clip-base"], zoo.data, scale=1, samples=SAMPLES)
        assert result.task_vector.norm() > 0

    def test_an_existing_folder_is_kept_without_overwrite(self, zoo: Zoo, tmp_path: Path) -> None:
        result = cross(zoo, "vit", "vit", method="naive")
        out = tmp_path / "out"
        out.mkdir()
        (out / "precious").write_text("")
        with pytest.raises(CheckpointError, match="exists already"):
            result.save(out)
        assert [file.name for file in tmp_path.rglob("*")] == ["out", "precious"]
        with pytest.raises(CheckpointError, match="not an output of this command"):
            result.save(out, overwrite=True)
        (out / "tuneport.json").write_text("")
        result.save(out, overwrite=True)
        assert not (out / "precious").exists()
        assert (out / "model.safetensors").is_file()

    def test_an_unknown_kind(self, zoo: Zoo, tmp_path: Path) -> None:
        with pytest.raises(TuneportError, match=r"unknown as 'zip'\. Known: adapter, model, task-vector"):
            cross(zoo, "vit", "vit", method="naive").save(tmp_path / "out", as_="zip")

    @pytest.mark.parametrize("file", ["config.json", "heads/animals.safetensors"])
    def test_a_disk_that_fills_up_while_companions_are_copied(
        self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
    ) -> None:
        copy = shutil.copy

        def full(source: Path, place: Path) -> Any:
            if str(source).endswith(file):  # as shutil reports it: the file that it read comes first
                raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(place))
            return copy(source, place)

        result = cross(zoo, "clip_vision", "clip_vision", method="naive")
        monkeypatch.setattr(shutil, "copy", full)
        with pytest.raises(CheckpointError, match="cannot be written: the disk is full"):
            result.save(tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_what_the_transfer_was_made_from_is_not_overwritten(self, zoo: Zoo, tmp_path: Path) -> None:
        trio = [Path(shutil.copytree(path, tmp_path / path.name / "model")) for path in zoo.trio("vit")]
        data = shutil.copy(zoo.data, tmp_path / "data.npz")
        result = transfer(*trio, data, scale=1, samples=SAMPLES)
        for folder in (*trio, *(path.parent for path in trio)):
            for kind in ("model", "adapter"):
                with pytest.raises(CheckpointError, match="cannot be overwritten: it holds the input"):
                    result.save(folder, as_=kind, rank=2 if kind == "adapter" else None, overwrite=True)
        for file in (trio[2] / "model.safetensors", data):
            with pytest.raises(
                CheckpointError, match=r"cannot be (overwritten: it holds|written: it is inside) the input"
            ):
                result.save(file, as_="task-vector", overwrite=True)
        bare = replace(result, record={**result.record, "target": {"name": "moved"}})
        with pytest.raises(CheckpointError, match="cannot be overwritten: it holds the input"):
            bare.save(trio[2], overwrite=True)
        assert all(open_model(path) for path in trio)

    def test_saved_as_a_task_vector_it_applies_to_the_same_model(self, zoo: Zoo, tmp_path: Path) -> None:
        result = cross(zoo, "vit", "vit", head_fit="none")
        result.save(tmp_path / "model")
        result.save(tmp_path / "tau.safetensors", as_="task-vector")
        apply(load_task_vector(tmp_path / "tau.safetensors"), zoo["vit-target"], tmp_path / "applied")
        first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "applied"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_scale(self, zoo: Zoo) -> None:
        result = cross(zoo, "vit", "vit", scale=0.5)
        base = load(zoo["vit-target"])
        name = "vit.layers.0.mlp.fc1.weight"
        tau = result.task_vector.dense(name)
        for module, scale in ((result.apply(), 0.5), (result.apply(2.0), 2.0), (result.apply(0.0), 0.0)):
            torch.testing.assert_close(module.get_parameter(name), base.get_parameter(name) + scale * tau)
        for scale in (float("nan"), float("inf")):
            with pytest.raises(TuneportError, match="finite number"):
                cross(zoo, "vit", "vit", scale=scale)


class Page(HTMLParser):
    """Checks that tags close in order, and collects the text of table cells."""

    VOID = frozenset({"meta", "br", "hr", "img", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: set[str] = set()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [
            value or "" for name, value in attrs if name in ("src", "href") and not f"{value}".startswith("#")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.add(data)
