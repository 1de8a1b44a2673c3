"""Hub ids, against a cache made by hand: no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import run_comparison
from builders.folders import Zoo, load
from paper.recipe import make_recipe
from tuneport.errors import CheckpointError, DataError
from tuneport.io.places import hub_name, local, looks_like_hub_id
from tuneport.models.open import open_model
from tuneport.pipeline.arithmetic import extract
from tuneport.pipeline.transfer import transfer


@pytest.fixture
def hub(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A hub that has three models and a data set; the list holds what was asked of it."""
    import huggingface_hub

    asked: list[tuple[str, dict[str, Any]]] = []
    there = {f"org/{part}": zoo[f"vit-{part}"] for part in ("base", "tuned", "target")}
    there["base-uncased"] = zoo["vit-base"]

    def snapshot_download(name: str, **options: Any) -> str:
        asked.append((name, options))
        if name == "org/digits":
            folder = tmp_path / "datasets--org--digits" / "snapshots" / "77"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "x").mkdir(exist_ok=True)
            return str(folder)
        if name not in there:
            raise OSError(f"404 Client Error: no {name}\nmore lines")
        folder = tmp_path / f"models--{name.replace('/', '--')}" / "snapshots" / "42"
        if not folder.exists():
            folder.parent.mkdir(parents=True)
            folder.symlink_to(there[name])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_transfer_between_hub_ids(zoo: Zoo, hub: list[tuple[str, dict[str, Any]]]) -> None:
    result = transfer("org/base", "org/tuned", "org/target", zoo.data, scale=1, samples=24)
    same = transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=24)
    assert result.task_vector.norm() == same.task_vector.norm()
    assert (result.record["source"]["name"], result.record["source"]["revision"]) == ("org/base", "42")
    assert result.record["finetuned"]["name"] == "org/tuned"
    assert {name for name, _ in hub} == {"org/base", "org/tuned", "org/target"}
    assert all("*.bin" in options["ignore_patterns"] for _, options in hub), "pickles stay where they are"
    assert len(extract("org/base", "org/tuned")) == 40


@pytest.mark.usefixtures("hub")
def test_adapter_with_a_hub_id(zoo: Zoo, tmp_path: Path) -> None:
    """The names in an adapter are those of the live model, which is opened where the files have others."""
    pytest.importorskip("peft")
    from builders.loras import adapted, saved

    tuned = adapted(load(zoo["vit-base"]), target_modules=["q_proj"])
    folder = saved(tuned, tmp_path / "lora")
    assert set(extract("org/base", folder)) == set(extract(zoo["vit-base"], folder))


def test_existing_paths_are_not_downloaded(zoo: Zoo, hub: list[Any], tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "base").symlink_to(zoo["vit-base"])
    assert local("org/base") == Path("org/base")
    assert open_model("org/base").name == "org/base"
    for other in ("./org/x", "/org/x", "a/b/c", "a/../b", "~/b", "a b/c", "-a/b", "name:tag/x", "data/x.bin"):
        assert not looks_like_hub_id(other)
        assert local(other) == Path(other)
    assert local("data/x.jsonl", "dataset", (".jsonl",)) == Path("data/x.jsonl")
    assert local("digits", "dataset") == Path("digits"), "data of a bare name are a path"
    assert hub == []
    assert hub_name(Path("org/base")) is None


def test_a_model_without_an_organisation(zoo: Zoo, hub: list[tuple[str, dict[str, Any]]]) -> None:
    result = transfer("base-uncased", zoo["vit-tuned"], zoo["vit-target"], method="naive")
    assert (result.record["source"]["name"], result.record["source"]["revision"]) == ("base-uncased", "42")
    assert {name for name, _ in hub} == {"base-uncased"}


def test_mistyped_data_are_not_looked_up(zoo: Zoo, hub: list[Any]) -> None:
    with pytest.raises(DataError, match=r"no data at data/x\.jsonl: no such file or folder"):
        transfer(*zoo.trio("vit"), "data/x.jsonl")
    assert hub == []


@pytest.mark.usefixtures("hub")
def test_unknown_id_is_one_line() -> None:
    with pytest.raises(CheckpointError) as caught:
        open_model("org/nothing")
    assert str(caught.value) == (
        "there is no path org/nothing, and the hub has no such model, or it cannot be reached: "
        "404 Client Error: no org/nothing. Give a path that exists, or check the name and the network."
    )
    with pytest.raises(DataError, match="the hub has no such dataset, or it cannot be reached"):
        local("org/nothing", "dataset")


def test_data_with_a_hub_id(zoo: Zoo, hub: list[tuple[str, dict[str, Any]]]) -> None:
    with pytest.raises(DataError, match="has no images"):
        transfer(*zoo.trio("vit"), "org/digits", scale=1, samples=24)
    assert hub == [("org/digits", {"repo_type": "dataset", "ignore_patterns": hub[0][1]["ignore_patterns"]})]


def test_offline_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="the hub has no such model, or it cannot be reached") as caught:
        local("org/certainly-not-in-the-cache")
    assert "\n" not in str(caught.value)
    (tmp_path / "my-model-lora").mkdir()
    with pytest.raises(CheckpointError, match=r"Did you mean my-model-lora\? Give a path"):
        local("my-model-lra")


@pytest.mark.usefixtures("hub")
def test_comparison_between_hub_ids(zoo: Zoo) -> None:
    content = {
        "source": "org/base",
        "target": "org/target",
        "finetuned": {"a": "org/tuned"},
        "data": {"a": str(zoo.data)},
    }
    result = run_comparison(make_recipe({**content, "samples": [8], "methods": ["naive"], "scales": ["1"]}).comparison)
    assert {row.method for row in result.rows} == {"target", "naive"}
