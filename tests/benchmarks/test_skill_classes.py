"""Towers and classifiers of texts in the table of skills: made from tiny models, scored without tuneport."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from benchmarks.skill import classifiers, towers
from benchmarks.skill import routes as routes_module
from benchmarks.skill.ablations import STARTS
from benchmarks.skill.arms import make_row
from benchmarks.skill.cells import Cell, Schedule, cells_of
from benchmarks.skill.groups import GROUPS
from benchmarks.skill.place import Place
from builders.classifiers import WIDER, bert
from builders.folders import CLASSES, LARGE, build, images, perturb, write_head
from builders.folders import SMALL as SMALL_TOWER
from builders.processes import run_program
from builders.texts import SENTENCES, SMALL, bert_tokenizer, write
from builders.writers import taught_writer

# the processes of the tests start with tuneport imported
FORGET = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] in ("tuneport", "benchmarks")]:
    del sys.modules[name]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Tiny models and data where the groups look for them."""
    root = tmp_path_factory.mktemp("shared")
    models = root / "models"
    for name, size in (("a", SMALL_TOWER), ("a2", LARGE)):
        build("clip_vision", size, models / name)
        for task in ("mnist", "cifar10"):
            write_head(models / name / f"heads/{task}.safetensors", size.width - 4, CLASSES, seed=size.seed)
    perturb(models / "a", models / "a-mnist")
    (root / "data/images").mkdir(parents=True)
    for seed, task in enumerate(("mnist", "cifar10")):
        (x_train, y_train), (x_test, y_test) = images(240, seed), images(9, seed + 9)
        x_train, x_test = (x[..., 0] if task == "mnist" else x for x in (x_train, x_test))
        path = root / f"data/images/{task}.npz"
        np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=np.array(CLASSES))
    write(models / "minilm-l6", bert("BertModel", SMALL), bert_tokenizer())
    write(models / "mpnet", bert("BertModel", WIDER), bert_tokenizer())
    (root / "data/text").mkdir(parents=True)
    chance, words = random.Random(0), " ".join(SENTENCES).split()
    rows = [
        {"text": " ".join(chance.sample(words, 8)), "label": at % 2, "split": "train" if at % 5 else "test"}
        for at in range(600)
    ]
    with gzip.open(root / "data/text/sst2_stsa.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, rows)))
    with gzip.open(root / "data/text/brown.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(" ".join(chance.sample(words, 9)) for _ in range(60)))
    return Place(models, root, root / "work", "cpu", "float32", autocast=False, small=True)


def made(place: Place, group: str, pair: str, task: str, arms: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    assert not GROUPS[group].lacking(place.models, place.shared, cells_of([(pair, task)], arms, [1]))
    GROUPS[group].check([pair], [task], arms)
    found = {cell.label: make_row(place, group, cell) for cell in cells_of([(pair, task)], arms, [1])}
    assert not [row["error"] for row in found.values() if "error" in row]
    for label, row in found.items():
        assert {"scores", "flips", "tests", "seconds", "peak_gib", "commit", "machine", "command"} < set(row)
        assert row["draw"] == (1 if "@" in label else None)
        assert f"--group {group}" in row["command"]
        assert str(place.shared) not in json.dumps(row)
        assert "right" not in row
    return found


def test_cells_of_towers_are_made(place: Place) -> None:
    arms = ("old", "target", "all-data", "few-shot@20", "port@20", "distill@20", "extra@20", "upgrade@20")
    arms += tuple(f"{name}@20" for name in STARTS)
    found = made(place, "towers", "a>a2", "mnist", arms)
    assert all(found[f"{name}@20"]["about"]["distilled"]["curve"][0]["step"] == 0 for name in STARTS)
    left = routes_module.beside(place.folder("a-to-a2-mnist-upgrade-20-1"), "copy")
    left.mkdir()  # what a failed run has left is not scored
    again = make_row(place, "towers", Cell("a>a2", "mnist", "upgrade", 20, 1))
    assert again["by_route"] == found["upgrade@20"]["by_route"]
    routes = found["upgrade@20"]["by_route"]
    assert set(routes) == {"port", "distill", "synthetic"}  # the shapes are too unlike for a copy
    if (chosen := found["upgrade@20"]["about"]["chosen"]) is not None:
        assert routes[chosen] == found["upgrade@20"]["scores"]
    assert found["extra@20"]["about"]["distilled"]["extra"] == 24  # all that --small leaves
    assert found["distill@20"]["about"]["distilled"]["extra"] == 0
    assert found["port@20"]["about"]["scale"] is not None
    if found["upgrade@20"]["about"]["chosen"] is None:  # nothing is written: the base is scored
        assert found["upgrade@20"]["scores"] == found["target"]["scores"]
    assert found["all-data"]["about"]["samples"] == 24


def test_cells_of_classifiers_are_made(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ("old", "all-data", "target@20", "few-shot@20", "port@20", "distill@20", "extra@20")
    arms += ("synthetic@20", "upgrade@20", "distill-unported@20")
    monkeypatch.setattr(classifiers, "EXTRA", 30)
    texts = [f"{first}{second.lower()}" for first in SENTENCES[:6] for second in SENTENCES[:6]]
    lists = ["Examples:" + "".join(f"\n- {text}" for text in texts[start:][:8]) + "\n" for start in range(0, 28, 7)]
    taught_writer(place.models / classifiers.GENERATOR, lists, steps=60)
    found = made(place, "classifiers", "minilm-l6>mpnet", "sst2-lora", arms)
    assert found["extra@20"]["about"]["distilled"]["extra"] == 30
    assert found["target@20"]["about"]["scale"] == 0
    assert len(found["few-shot@20"]["about"]["validation"]) == 6
    about = found["synthetic@20"]["about"]["routes"]
    assert [row["name"] for row in about] == ["old", "target", "synthetic"]
    assert about[-1]["agreement"] is not None
    routes = found["upgrade@20"]["by_route"]
    assert {"port", "distill"} <= set(routes)
    assert all(0 <= scores["accuracy"] <= 100 for scores in routes.values())


def test_extra_samples_are_of_another_data_set(place: Place) -> None:
    assert all(task != other for task, other in towers.OTHER.items())
    whole = Place(**{**vars(place), "small": False})
    with np.load(towers._extra(whole, "mnist")) as file:
        assert file.files == ["x_train"]  # no labels
        assert file["x_train"].shape[1:] == (16, 16, 3)
    own = {text for text, _ in classifiers.read(place.shared, "sst2").train}
    assert not own & set(classifiers.sentences(place.shared))


def test_parts_do_not_overlap_and_draws_do_not_depend_on_their_number(place: Place) -> None:
    found = towers.read(place.shared, "mnist")
    assert len(found.train[0]) == 140
    assert len(found.validation[0]) == 100
    assert np.array_equal(found.draw(0, 10)[0], found.draw(0, 20)[0][:10])
    assert not np.array_equal(found.draw(0, 10)[0], found.draw(1, 10)[0])
    texts = classifiers.read(place.shared, "sst2")
    assert len(texts.train) + len(texts.validation) == 480
    assert len(texts.test) == 120
    assert texts.draw(0, 10) == texts.draw(0, 20)[:10]


def test_a_tower_is_scored_as_plain_transformers_does(place: Place) -> None:
    tower = towers.Tower(place.models / "a2", place.models / "a2/heads/mnist.safetensors", "cpu")
    found = towers.read(place.shared, "mnist")
    x, labels = found.test
    module = transformers.CLIPVisionModelWithProjection.from_pretrained(place.models / "a2").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(place.models / "a2")
    right = []
    for image, label in zip(x, labels, strict=True):
        with torch.no_grad():
            pixels = processor(np.stack([image] * 3, -1), return_tensors="pt")["pixel_values"]
            scores = tower.classes @ F.normalize(module(pixels).image_embeds[0], dim=-1)
        right.append(int(scores.argmax()) == int(label))
    assert tower.right(found.test) == right


def test_training_a_tower_lowers_its_loss(place: Place) -> None:
    tower = towers.Tower(place.models / "a2", place.models / "a2/heads/cifar10.safetensors", "cpu")
    train = towers.read(place.shared, "cifar10").train
    pixels, labels = tower.pixels(train[0]), torch.as_tensor(train[1])

    def loss() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(tower.logits(pixels), labels))

    before = loss()
    tower.train(train, Schedule(30, 1e-3, 32), flip=True)
    assert loss() < 0.9 * before


def test_half_of_the_images_are_mirrored_if_any() -> None:
    pixels = torch.linspace(-1, 1, 16).expand(64, 3, 16, 16)  # darker on the left
    left_to_right = [
        towers.augmented(pixels, torch.Generator().manual_seed(0), flip).diff(dim=-1).mean((1, 2, 3)) > 0
        for flip in (False, True)
    ]
    assert bool(left_to_right[0].all())
    assert 16 < int(left_to_right[1].sum()) < 48


def test_scores_do_not_need_tuneport() -> None:
    names = ", ".join(f"benchmarks.skill.{name}" for name in ("towers", "classifiers", "models"))
    done = run_program(f"{FORGET}import {names}\nassert not [x for x in sys.modules if x.startswith('tuneport')]")
    assert done.code == 0, done.err


def test_what_is_not_there_is_said(place: Place, tmp_path: Path) -> None:
    cells = cells_of([("a>a2", "mnist"), ("a>a2", "gtsrb")], ["extra@20"], [0])
    lost = GROUPS["towers"].lacking(place.models, tmp_path, cells)
    assert f"model {place.models / 'a-gtsrb'}" in lost
    assert f"data {tmp_path / 'data/images/cifar10.npz'}" in lost  # the extra images
    shutil.copytree(place.models / "mpnet", tmp_path / "mpnet")
    cells = cells_of([("minilm-l6>mpnet", "sst2-full")], ["distill@20"], [0])
    lost = GROUPS["classifiers"].lacking(tmp_path, place.shared, cells)
    assert lost == [f"model {tmp_path / 'minilm-l6'}"]
    cells = cells_of([("minilm-l6>mpnet", "sst2-full")], ["synthetic@20"], [0])
    lost = GROUPS["classifiers"].lacking(tmp_path, place.shared, cells)
    assert lost == [f"model {tmp_path / name}" for name in ("minilm-l6", classifiers.GENERATOR)]
    cells = cells_of([("minilm-l6>mpnet", "sst2-full")], ["synthetic-by-smollm2-135m@20"], [0])
    lost = GROUPS["classifiers"].lacking(tmp_path, place.shared, cells)
    assert lost == [f"model {tmp_path / name}" for name in ("minilm-l6", "smollm2-135m")]


@pytest.mark.parametrize(
    ("group", "arm"),
    [
        ("towers", "target@100"),
        ("classifiers", "target"),
        ("towers", "copy@9"),
        ("towers", "synthetic-500@20"),
        ("towers", "distill-by-text@100"),
        ("classifiers", "distill-by-text@100"),
    ],
)
def test_an_arm_of_another_group_is_refused(group: str, arm: str) -> None:
    with pytest.raises(SystemExit, match="unknown arm"):
        GROUPS[group].check([], [], [arm])
