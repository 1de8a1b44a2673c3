"""What is written is what is judged: by `--evaluate`, by `tuneport evaluate`, and by the choice of the scale."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from builders.commands import Run, assert_refused, options
from builders.folders import Zoo
from builders.loras import adapted, saved

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers

OUTPUTS = {
    "model": [],
    "cut": ["--as", "adapter", "--rank", "1"],
    "bfloat16": ["--as", "adapter", "--rank", "2", "--adapter-dtype", "bfloat16", "--uniform-rank"],
    "exact": ["--as", "adapter", "--energy", "1"],
    "task-vector": ["--as", "task-vector", "--head-fit", "none"],
}


@pytest.fixture(scope="module")
def known() -> dict[Path, float]:
    return {}


@pytest.fixture
def accuracy_of(run: Run, zoo: Zoo, known: dict[Path, float]) -> Callable[[Path], float]:
    """What `tuneport evaluate` says of a model that no test changes: each is asked for once."""

    def call(model: Path) -> float:
        if model not in known:
            known[model] = run("evaluate", model, "--data", zoo.data, "--json").json["accuracy"]
        return known[model]

    return call


@pytest.mark.parametrize(
    ("output", "family", "target"),
    [
        ("model", "clip_vision", "target16"),
        ("model", "vit", "target16"),
        ("cut", "clip_vision", "target"),
        ("cut", "vit", "target16"),
        ("bfloat16", "clip_vision", "target16"),
        ("exact", "vit", "target16"),
        ("task-vector", "clip_vision", "target16"),
    ],
)
def test_evaluation_of_what_is_written(
    run: Run, zoo: Zoo, place: Path, accuracy_of: Callable[[Path], float], output: str, family: str, target: str
) -> None:
    """Each output, each kind of head and each precision: an adapter and a model also with a fitted head."""
    out = place / ("out.safetensors" if output == "task-vector" else "out")
    words = options(zoo, family, target=zoo[f"{family}-{target}"], scale=3, samples=12)
    done = run("transfer", "--scale=1", *words, *OUTPUTS[output], "--evaluate", "--out", out, "--json")
    assert done.code == 0, done.err
    found = run("evaluate", out, "--data", zoo.data, "--json")
    assert found.code == 0, found.err
    assert found.json["accuracy"] == done.json["evaluation"]["after"]
    if "head" not in done.json:  # else the target is compared with a head that is fitted to it
        assert accuracy_of(zoo[f"{family}-{target}"]) == done.json["evaluation"]["before"]


def test_an_uncut_lora(run: Run, zoo: Zoo, place: Path) -> None:
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    lora = saved(adapted(base, target_modules=["q_proj", "fc1"]), place / "lora")
    words = options(zoo, finetuned=lora)
    done = run("transfer", "--scale=1", *words, "--as", "adapter", "--evaluate", "--out", place / "out", "--json")
    assert done.code == 0, done.err
    found = run("evaluate", place / "out", "--data", zoo.data, "--json")
    assert found.json["accuracy"] == done.json["evaluation"]["after"]


def test_the_scale_is_chosen_for_the_cut_update(run: Run, zoo: Zoo, place: Path) -> None:
    """What is kept at rank 1 gives other losses than the whole update, at the same scales."""
    words = ["transfer", *options(zoo, scale="auto", samples=16), "--no-evaluate", "--json"]
    cut = run(*words, "--as", "adapter", "--rank", "1", "--out", place / "cut")
    whole = run(*words, "--as", "adapter", "--energy", "1", "--out", place / "whole")
    model = run(*words, "--out", place / "model")
    losses = [[item["loss"] for item in done.json["scale_choice"]["candidates"]] for done in (cut, whole, model)]
    assert losses[0][0] == losses[1][0] == losses[2][0], "at scale zero nothing is added"
    assert all(one != pytest.approx(two, rel=1e-6) for one, two in zip(losses[0][1:], losses[1][1:], strict=True))
    # all singular values, stored in float32: 2^-24 of each number
    assert losses[1][1:] == pytest.approx(losses[2][1:], rel=1e-4)


@pytest.mark.parametrize("output", ["cut", "task-vector"])
def test_a_change_of_nothing_is_scored_as_its_base(
    run: Run, zoo: Zoo, place: Path, accuracy_of: Callable[[Path], float], output: str
) -> None:
    """The command that a transfer at scale 0 prints works, and what is written still is no fine-tune to transfer."""
    out = place / ("out.safetensors" if output == "task-vector" else "out")
    done = run("transfer", *options(zoo, scale=0), *OUTPUTS[output], "--out", out)
    assert done.code == 0, done.err
    assert f"next: tuneport evaluate {out} --data {zoo.data}" in done.out
    found = run("evaluate", out, "--data", zoo.data, "--json")
    assert found.code == 0, found.err
    assert found.json["accuracy"] == accuracy_of(zoo["clip_vision-target"])
    again = options(zoo, source=zoo["clip_vision-target"], finetuned=out, target=zoo["clip_vision-base"])
    assert_refused(run("transfer", *again, "--out", place / "x"), 1, "equals its base in every tensor")


def test_a_task_vector_holds_the_scale(run: Run, zoo: Zoo, place: Path) -> None:
    tau, whole = place / "tau.safetensors", ["--head-fit", "none"]
    assert run("transfer", *options(zoo, "vit", scale=0.5), "--as", "task-vector", *whole, "--out", tau).code == 0
    assert run("transfer", *options(zoo, "vit", scale=0.5), *whole, "--out", place / "model").code == 0
    assert run("apply", tau, zoo["vit-target"], "-o", place / "applied").code == 0
    first, second = (load_file(place / name / "model.safetensors") for name in ("model", "applied"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_base_of_a_change(run: Run, zoo: Zoo, place: Path) -> None:
    tau = place / "tau.safetensors"
    assert run("extract", zoo["vit-base"], zoo["vit-tuned"], "-o", tau).code == 0
    tuned = run("evaluate", zoo["vit-tuned"], "--data", zoo.data, "--json").json
    assert run("evaluate", tau, "--data", zoo.data, "--json").json["accuracy"] == tuned["accuracy"]
    words = ["evaluate", zoo["vit-base"], "--base", zoo["vit-base"], "--data", zoo.data]
    assert_refused(run(*words), 1, "--base goes with an adapter or a task vector, and", "is a model.")
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    lora = saved(adapted(base, target_modules=["q_proj"]), place / "lora")
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    assert_refused(
        run("evaluate", lora, "--data", zoo.data), 1, "does not name the model that it changes: pass it as --base."
    )
    found = run("evaluate", lora, "--base", zoo["clip_vision-base"], "--data", zoo.data, "--json")
    assert found.code == 0, found.err
