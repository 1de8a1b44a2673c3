"""Labels from the fine-tuned source: what it says, nothing changed, no true label looked at."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builders.folders import FAMILIES, WITH_TEXT, Zoo
from builders.runs import prepare
from tuneport import transfer
from tuneport.data.dataset import Dataset, align_labels
from tuneport.data.tasks import read_data
from tuneport.errors import DataError, TuneportError
from tuneport.measure.accuracy import encode_batch
from tuneport.measure.fitted_heads import agreement, scores_by
from tuneport.measure.samples import DatasetSamples
from tuneport.models.base import Model
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model

CLASSES = ("cat", "dog")


def answers(given: Path | Model, data: Dataset, base: Path | None = None) -> list[int]:
    """What a model says itself, with its own head or, where it has a text tower, with that of its base."""
    model = given if isinstance(given, Model) else open_model(given)
    head = choose_head(model if base is None else open_model(base), None, data)
    with torch.no_grad():
        scores = head.scores(model, model.module, encode_batch(model, data))
    return [int(label) for label in scores.argmax(-1)]


def without_labels(zoo: Zoo, tmp_path: Path) -> Path:
    """The same images in a file that says nothing of their classes, under the same name."""
    given = np.load(zoo.data)
    np.savez(tmp_path / zoo.data.name, x=given["x_train"])
    return tmp_path / zoo.data.name


class TestLabels:
    def test_are_those_of_the_fine_tuned_source(self, zoo: Zoo) -> None:
        trio, data = zoo.trio("clip_vision"), read_data(zoo.data, "train")
        job = prepare(*trio, zoo.data, samples=24, labels="source")
        assert isinstance(job.samples, DatasetSamples)
        labelled = job.samples.dataset
        chosen = data.subset(job.record["data"]["indices"])
        assert labelled.labels is not None
        assert labelled.labels.tolist() == answers(trio[1], chosen)
        assert labelled.labels.tolist() != answers(trio[0], chosen)  # the fine-tune does say something of its own
        share = float(np.mean(align_labels(chosen, labelled.classes).labels == labelled.labels))  # by name
        assert job.record["data"]["labels"] == {"by": "source", "agreement": pytest.approx(share, abs=1e-4)}

    @pytest.mark.parametrize("family", FAMILIES)
    def test_of_every_family(self, zoo: Zoo, family: str) -> None:
        trio, data = zoo.trio(family), read_data(zoo.data, "train")
        job = prepare(*trio, zoo.data, samples=10, labels="source")
        assert isinstance(job.samples, DatasetSamples)
        assert job.samples.dataset.labels is not None
        chosen = data.subset(job.record["data"]["indices"])
        assert job.samples.dataset.labels.tolist() == answers(trio[1], chosen, trio[0])
        assert len(list(job.samples)) == 1  # the target knows these classes

    def test_of_an_adapter(self, zoo: Zoo, tmp_path: Path) -> None:
        from peft import LoraConfig, get_peft_model

        base, _, target = zoo.trio("clip_vision")
        tuned = get_peft_model(open_model(base).module, LoraConfig(r=2, target_modules=["q_proj", "fc1"]))
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(3)
            for name, parameter in tuned.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.5)
        tuned.save_pretrained(tmp_path / "adapter")
        job = prepare(base, tmp_path / "adapter", target, zoo.data, samples=20, labels="source")
        assert isinstance(job.samples, DatasetSamples)
        data = read_data(zoo.data, "train").subset(job.record["data"]["indices"])
        found = answers(open_model(base).with_module(tuned.merge_and_unload()), data)
        assert job.samples.dataset.labels is not None
        assert job.samples.dataset.labels.tolist() == found != answers(base, data)

    @pytest.mark.parametrize(("family", "glob"), [("vit", "classifier*"), ("clip_vision", "*fc1*")])
    def test_are_the_whole_fine_tune_s_whatever_is_not_to_be_moved(self, zoo: Zoo, family: str, glob: str) -> None:
        some, every = (prepare(*zoo.trio(family), zoo.data, samples=12, labels="source", exclude=out, head_fit="none")
                       for out in ([glob], []))  # fmt: skip
        assert isinstance(some.samples, DatasetSamples)
        assert isinstance(every.samples, DatasetSamples)
        assert set(some.task_vector) < set(every.task_vector)
        assert some.samples.dataset.labels.tolist() == every.samples.dataset.labels.tolist()  # type: ignore[union-attr]

    def test_leave_the_source_as_it_was(self, zoo: Zoo) -> None:
        trio, data = zoo.trio("clip_vision"), read_data(zoo.data, "train").subset(range(6))
        job = prepare(*trio, zoo.data, samples=6)
        before = {name: tensor.clone() for name, tensor in job.source.module.state_dict().items()}
        head = choose_head(job.source, None, data)
        scores_by(job.source, job.task_vector, head, data)
        after = job.source.module.state_dict()
        assert before.keys() == after.keys() != set()
        assert all(torch.equal(before[name], after[name]) for name in before)

    def test_do_not_look_at_true_ones(self, zoo: Zoo, tmp_path: Path) -> None:
        trio = zoo.trio("clip_vision")
        seen = transfer(*trio, zoo.data, samples=20, labels="source", scale="auto")
        blind = transfer(*trio, without_labels(zoo, tmp_path), samples=20, labels="source", scale="auto")
        assert blind.record["data"]["labels"] == {"by": "source", "agreement": None}
        assert seen.scale == blind.scale
        assert all(
            torch.equal(seen.task_vector.dense(name), blind.task_vector.dense(name)) for name in seen.task_vector
        )

    def test_give_what_the_same_labels_in_the_data_give(self, zoo: Zoo) -> None:
        trio = zoo.trio("clip_vision")
        found = prepare(*trio, zoo.data, samples=20, labels="source")
        assert isinstance(found.samples, DatasetSamples)
        relabelled = found.samples.dataset
        drawn = prepare(*trio, relabelled, samples=len(relabelled)).record["data"]["indices"]
        in_order = relabelled.subset(np.argsort(drawn))  # drawn in the order of `found`, so that the bits are the same
        given = transfer(*trio, in_order, scale=1, samples=len(in_order))
        asked = transfer(*trio, zoo.data, scale=1, samples=20, labels="source")
        assert set(given.task_vector) == set(asked.task_vector)
        for name in given.task_vector:
            assert torch.equal(given.task_vector.dense(name), asked.task_vector.dense(name))


class TestHeads:
    @pytest.mark.parametrize("family", WITH_TEXT)
    def test_a_text_tower_needs_names_of_classes(self, zoo: Zoo, tmp_path: Path, family: str) -> None:
        data = without_labels(zoo, tmp_path)
        with pytest.raises(DataError, match="names no classes"):
            prepare(*zoo.trio(family), data, samples=8, labels="source")
        (tmp_path / "classes.json").write_text('{"cat": "a cat", "dog": "a dog"}')
        job = prepare(*zoo.trio(family), data, samples=8, labels="source", head=str(tmp_path / "classes.json"))
        assert isinstance(job.samples, DatasetSamples)
        assert job.samples.dataset.classes == ("cat", "dog")

    def test_classes_that_the_target_does_not_know_are_refused_before_any_work(self, zoo: Zoo, tmp_path: Path) -> None:
        source, tuned, target = zoo.trio("clip_vision")
        shutil.copytree(target, tmp_path / "target")
        head = load_file(tmp_path / "target" / "heads" / "animals.safetensors")
        some = {"class_embeds": head["class_embeds"][:2].contiguous(), "logit_scale": head["logit_scale"]}
        save_file(some, tmp_path / "target" / "heads" / "animals.safetensors", {"classes": '["cat", "dog"]'})
        with pytest.raises(DataError, match=r"the head of .* unknown to the head"):
            prepare(source, tuned, tmp_path / "target", without_labels(zoo, tmp_path), labels="source", samples=4)


class TestAgreement:
    def test_goes_by_names_of_classes(self) -> None:
        labelled = Dataset(inputs=list("abcd"), labels=np.array([0, 1, 1, 0]), classes=CLASSES)
        known = Dataset(inputs=list("abcd"), labels=np.array([1, 0, 1, 1]), classes=CLASSES[::-1])
        assert agreement(labelled, known) == 0.75

    def test_is_unknown_without_labels_or_with_other_classes(self) -> None:
        labelled = Dataset(inputs=["a"], labels=np.array([0]), classes=CLASSES)
        assert agreement(labelled, replace(labelled, labels=None)) is None
        assert agreement(labelled, replace(labelled, classes=("horse", "cow"))) is None


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"labels": "sauce"}, "unknown labels 'sauce'"),
            ({"labels": "source", "sampler": "class_balanced"}, "sampler 'class_balanced' needs them"),
            ({"labels": "source", "shots": 2}, "`shots` needs them"),
        ],
    )
    def test_in_one_line(self, zoo: Zoo, options: dict[str, Any], words: str) -> None:
        with pytest.raises(TuneportError, match=words):
            prepare(*zoo.trio("clip_vision"), zoo.data, **options)

    def test_for_batches_of_the_caller(self, zoo: Zoo) -> None:
        with pytest.raises(DataError, match="not batches"):
            prepare(*zoo.trio("clip_vision"), [torch.zeros(1)], labels="source", loss=lambda *_: torch.zeros(()))

    def test_where_the_source_is_offloaded(self, zoo: Zoo) -> None:
        data = read_data(zoo.data, "train").subset(range(2))
        job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=2)
        head = choose_head(job.source, None, data)
        with pytest.raises(TuneportError, match="labelling samples needs whole models in memory"):
            scores_by(
                replace(job.source, weights=replace(job.source.weights, offloaded=True)), job.task_vector, head, data
            )
