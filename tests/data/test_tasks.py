"""Tasks: known class names and prompts, splits that stay apart, and references in commands."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from builders.folders import Zoo
from builders.runs import prepare
from tuneport import cli
from tuneport.data.tasks import TASKS, get_task, read_data, split_reference
from tuneport.errors import DataError
from tuneport.models.heads import PROMPTS, class_embeddings
from tuneport.report.provenance import data_identity


def write_image(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade % 256, 10, 200)).save(path)
    return path


def lines(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts) + "\n")


def test_files_of_tables_inside_a_folder(tmp_path: Path) -> None:
    import paper  # noqa: F401  (knows the layouts of its data sets)

    rows = [{"sentence1": f"a {i}", "sentence2": "b", "label": i % 2, "text": f"a {i}"} for i in range(20)]
    for file in ("RTE/train.jsonl", "RTE/validation.jsonl", "notes.jsonl", "sst2_stsa.jsonl.gz"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / file).write_bytes(gzip.compress(content) if file.endswith(".gz") else content)
    for name, used in (("rte", "RTE/train.jsonl"), ("sst2", "sst2_stsa.jsonl.gz")):
        train = read_data(f"{name}:{tmp_path}", "train")
        assert list(data_identity(tmp_path, train, np.arange(3))["sha256"]) == [used]


def test_files_of_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).save_to_disk(str(tmp_path / "SST-2"))
    (tmp_path / "diary.md").write_text("not of the data set")
    train = read_data(f"sst2:{tmp_path}", "train")
    files = {f"SST-2/{file.name}" for file in (tmp_path / "SST-2").iterdir()}
    assert set(data_identity(tmp_path, train, np.arange(2))["sha256"]) == files
    assert any(file.endswith(".arrow") for file in files)


def test_datasets_in_memory_have_no_files(tmp_path: Path) -> None:
    (tmp_path / "diary.md").write_text("not of the data set")
    assert data_identity(tmp_path)["sha256"] == {}


class TestContent:
    def test_other_formats_get_the_class_names_of_the_task(self, tmp_path: Path) -> None:
        labels = np.arange(20) % 10
        np.savez(tmp_path / "digits.npz", x=np.zeros((20, 8, 8), dtype=np.uint8), y=labels)
        data = read_data(f"svhn:{tmp_path / 'digits.npz'}", "test")
        assert data.classes == tuple("0123456789")
        assert data.origin.split == "test"
        assert len(data) == 10

    def test_prompts_of_the_task_make_the_head(self) -> None:
        import torch

        seen: list[list[str]] = []

        def embed(texts: list[str]) -> torch.Tensor:
            seen.append(texts)
            return torch.ones(len(texts), 4)

        class_embeddings(["stop"], ("the sign {}!",), embed)
        class_embeddings(["stop"], (), embed)
        assert seen == [["the sign stop!"], [prompt.format("stop") for prompt in PROMPTS]]


class TestErrors:
    def test_unknown_tasks_name_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"unknown task 'mnits'\. Did you mean 'mnist'\? Known: .*cars, .*dtd"):
            read_data(f"mnits:{tmp_path}", "test")

    def test_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no such file or folder, for the task svhn"):
            read_data(f"svhn:{tmp_path / 'none'}", "test")

    def test_task_without_a_layout_gives_only_the_reason(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=rf"does not look like TREC-6\. {tmp_path} "):
            read_data(f"trec6:{tmp_path}", "test")

    def test_existing_path_with_a_colon(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "mnist:old").mkdir()
        assert split_reference("mnist:old") == (None, Path("mnist:old"))
        assert split_reference("mnist:new")[0] is TASKS["mnist"]

    def test_one_sample_per_class_cannot_be_split(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "few.npz", x=np.zeros((10, 8, 8), dtype=np.uint8), y=np.arange(10))
        reference = f"mnist:{tmp_path / 'few.npz'}"
        assert len(read_data(reference, "train")) == 10
        with pytest.raises(
            DataError, match=r"too few samples for a test split of MNIST: no class has two\. Add samples, or"
        ):
            read_data(reference, "test")
        with pytest.raises(DataError, match=r"too few samples for a validation split of MNIST: .* Add samples\.$"):
            get_task("mnist").read(tmp_path / "few.npz", "validation")


def test_commands_take_references(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record names the file, and evaluate scores with the task's own prompts."""
    pixels = np.random.default_rng(0).integers(0, 255, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "three.npz", x=pixels, y=np.arange(60) % 3)
    reference = f"eurosat:{tmp_path / 'three.npz'}"
    models = [zoo[f"clip-{part}"] for part in ("base", "tuned", "target")]
    job = prepare(*models, reference, samples=4, device="cpu")
    assert job.record["data"]["path"] == str(tmp_path / "three.npz")
    assert list(job.record["data"]["sha256"]) == ["three.npz"]
    assert job.record["data"]["name"] == "eurosat"
    assert job.heads is not None
    assert job.heads.target.classes == TASKS["eurosat"].classes
    words = ["tuneport", "evaluate", str(models[0]), "--data", reference, "--json", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code in (0, None)
    assert json.loads(capsys.readouterr().out)["samples"] == 6
