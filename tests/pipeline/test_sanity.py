"""Swapped, foreign and mislabelled inputs are refused before anything is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builders.chats import chat_tokenizer
from builders.folders import LARGE, SMALL, Zoo, build, load, perturb, write_data
from builders.lessons import TEXTS
from builders.runs import prepare, run
from builders.texts import Size, make, write, write_rows
from tuneport.errors import CheckpointError
from tuneport.io.fingerprint import same_weights, weights_fingerprint
from tuneport.measure import fitted_heads as heads
from tuneport.models.open import open_model
from tuneport.pipeline import inputs
from tuneport.pipeline.arithmetic import extract, fingerprint_of
from tuneport.pipeline.inputs import check_inputs
from tuneport.pipeline.transfer import transfer
from tuneport.task_vectors.vector import save_task_vector

Trio = tuple[Path, Path, Path]
SAMPLES = 100


@pytest.fixture(scope="module")
def skilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Zoo, Path]:
    """A zoo whose fine-tune knows its classes: its samples have the labels that the fine-tune gives them."""
    place = tmp_path_factory.mktemp("skilled")
    zoo = Zoo(place)
    data = write_data(place / "drawn.npz", train=SAMPLES)
    job = prepare(*zoo.trio("clip_vision"), data, samples=SAMPLES, labels="source")
    chosen = job.samples.chosen  # type: ignore[attr-defined]
    pixels = np.stack([np.asarray(image) for image in chosen.inputs])
    names = np.array(chosen.classes)
    np.savez(place / "skilled.npz", x_train=pixels, y_train=chosen.labels, classes=names)
    return zoo, place / "skilled.npz"


def test_the_counts_are_those_of_the_models(skilled: tuple[Zoo, Path]) -> None:
    zoo, data = skilled
    result = transfer(*zoo.trio("clip_vision"), data, samples=SAMPLES)
    found = result.record["sanity"]
    assert (found["samples"], found["finetuned"]) == (SAMPLES, SAMPLES), "its own labels"
    assert found["source"] < SAMPLES
    assert found["target"] == round(SAMPLES * result.record["scale_choice"]["candidates"][0]["accuracy"])
    assert found["sentence"].startswith(
        f"the fine-tuned source is right on {SAMPLES} of {SAMPLES} samples, its base on"
    )
    assert 0.05 < found["change"] < 0.5


def test_some_texts_tell_the_loss_of_a_language_model(tmp_path: Path) -> None:
    """The same texts in batches of any size, and the losses that the model itself gives."""
    tokenizer = chat_tokenizer(None)
    more = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    base, tuned = (
        write(tmp_path / name, make("llama", Size(seed=seed), **more), tokenizer)
        for name, seed in (("base", 0), ("tuned", 1))
    )
    texts = [f"{text} {number}" for number, text in enumerate(TEXTS[:16] * 3)][:40]
    data = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    options = {"samples": 40, "scale": 1.0, "accept_unlikely": True}
    found = [transfer(base, tuned, base, data, batch_size=size, **options).record["sanity"] for size in (3, 40)]
    assert [each["samples"] for each in found] == [14, 14]
    model, reader = (kind.from_pretrained(base) for kind in (AutoModelForCausalLM, AutoTokenizer))
    losses = []
    for text in texts[::3]:
        tokens = reader(text, return_tensors="pt").input_ids
        with torch.no_grad():
            losses.append(float(model(tokens, labels=tokens).loss) * (tokens.shape[1] - 1))
    for each in found:
        assert each["source"] == pytest.approx(np.mean(losses), rel=1e-5)


def swapped(zoo: Zoo, data: Path, place: Path) -> tuple[Trio, Path]:
    del place
    base, tuned, target = zoo.trio("clip_vision")
    return (tuned, base, target), data


def other_base(zoo: Zoo, data: Path, place: Path) -> tuple[Trio, Path]:
    _, tuned, target = zoo.trio("clip_vision")
    return (build("clip_vision", replace(SMALL, seed=5), place / "other"), tuned, target), data


def other_order(zoo: Zoo, data: Path, place: Path) -> tuple[Trio, Path]:
    known = np.load(data)
    labels = (known["y_train"] + 1) % len(known["classes"])
    np.savez(place / "turned.npz", x_train=known["x_train"], y_train=labels, classes=known["classes"])
    return zoo.trio("clip_vision"), place / "turned.npz"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (swapped, "the two may be swapped"),
        (other_base, "it has most likely another base"),
        (other_order, "the two may be swapped|no more than a guess"),
    ],
)
def test_what_cannot_be_a_fine_tune_is_refused(
    skilled: tuple[Zoo, Path], tmp_path: Path, case: Callable[..., Any], words: str, no_measuring: None
) -> None:
    del no_measuring
    trio, data = case(*skilled, tmp_path)
    with pytest.raises(CheckpointError, match=words) as refused:
        transfer(*trio, data, samples=SAMPLES)
    assert "`accept_unlikely=True`" in str(refused.value)
    job = prepare(*trio, data, samples=SAMPLES, accept_unlikely=True)
    assert check_inputs(job.source, job.change, job.plan, job.setup.calibration, job.config).change is not None


def test_a_wrong_head_of_the_right_kind_is_refused(zoo: Zoo) -> None:
    """Ten of 300 are clearly more than none of them, and no more than a guess among 43 classes."""
    source = open_model(zoo["clip_vision-base"])
    right = np.arange(300) < 10
    with pytest.raises(CheckpointError, match="right on 10 of 300 samples, no more than a guess among 43 classes"):
        inputs.check_right(source, np.zeros(300, dtype=bool), right, 43)


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where anything is measured."""
    monkeypatch.setattr("tuneport.pipeline.transfer.solve", lambda *_, **__: pytest.fail("measured"))


def test_a_head_that_is_fitted_costs_no_second_pass(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of the fine-tuned source and of its base serve the check and the fit of the head."""
    passes = []
    scores_by = heads.scores_by
    for module in (heads, inputs):
        monkeypatch.setattr(module, "scores_by", lambda *a, **b: passes.append(a[1]) or scores_by(*a, **b))
    run(prepare(*zoo.trio("vit"), zoo.data, samples=24), scale=1.0)
    assert len(passes) == 2


class TestFingerprint:
    def test_copies_in_another_dtype_are_the_same_and_fine_tunes_are_not(self, zoo: Zoo, tmp_path: Path) -> None:
        base = dict(load(zoo["vit-base"]).named_parameters())
        mark = weights_fingerprint(base)
        assert same_weights(mark, base)
        for dtype in (torch.float16, torch.bfloat16):
            assert same_weights(mark, {name: tensor.to(dtype) for name, tensor in base.items()})
        for other in (perturb(zoo["vit-base"], tmp_path / "tuned", 0.02), zoo["vit-tuned"]):
            assert same_weights(mark, dict(load(other).named_parameters())) is False

    @pytest.mark.parametrize("broken", ["", "{", "[1]", '{"a": 1}', '{"vit.x": [1]}', "null"])
    def test_a_broken_one_says_nothing(self, zoo: Zoo, broken: str) -> None:
        assert same_weights(broken, dict(load(zoo["vit-base"]).named_parameters())) is None

    def test_files_name_their_base_and_another_is_refused(self, zoo: Zoo, tmp_path: Path) -> None:
        base, tuned, target = zoo.trio("vit")
        tau = tmp_path / "tau.safetensors"
        save_task_vector(tau, extract(base, tuned), {"base_fingerprint": fingerprint_of(base)})
        assert prepare(base, tau, target, signals="naive").task_vector
        other = build("vit", replace(SMALL, seed=5), tmp_path / "other")
        with pytest.raises(CheckpointError, match=r"made for other weights than those of .*`accept_unlikely=True`"):
            prepare(other, tau, target, signals="naive")
        assert prepare(other, tau, target, signals="naive", accept_unlikely=True).task_vector

    def test_what_a_transfer_writes_names_the_target(self, zoo: Zoo, tmp_path: Path) -> None:
        base, tuned, target = zoo.trio("clip_vision")
        made = transfer(base, tuned, target, method="naive")
        made.save(tmp_path / "tau.safetensors", as_="task-vector")
        made.save(tmp_path / "lora", as_="adapter", energy=1.0)
        other = build("clip_vision", replace(LARGE, seed=5), tmp_path / "other")
        for name in ("tau.safetensors", "lora"):
            assert prepare(target, tmp_path / name, target, signals="naive").task_vector
            with pytest.raises(CheckpointError, match="made for other weights"):
                prepare(other, tmp_path / name, target, signals="naive")
