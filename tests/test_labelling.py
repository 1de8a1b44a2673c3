"""Labels from the fine-tuned source: what it says, nothing changed, no true label looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folders import Zoo
from tuneport import transfer
from tuneport.data import Dataset, align_labels
from tuneport.errors import DataError, TuneportError
from tuneport.evaluation import encoded
from tuneport.families import choose_head, open_model
from tuneport.labelling import agreement, labelled_by
from tuneport.preparation import PairedBatches, prepare
from tuneport.tasks import read_data

CLASSES = ("cat", "dog")


def answers(folder: Path, data: Dataset) -> list[int]:
    """What the model in a folder says itself."""
    model = open_model(folder)
    head = choose_head(model, None, data.name, data.classes, (), ())
    with torch.no_grad():
        return [
            int(x) for batch, _ in encoded(model, data, 8) for x in head.scores(model, model.module, batch).argmax(-1)
        ]


def without_labels(zoo: Zoo, tmp_path: Path) -> Path:
    """The same images in a file that says nothing of their classes, under the same name."""
    given = np.load(zoo.data)
    np.savez(tmp_path / zoo.data.name, x=given["x_train"])
    return tmp_path / zoo.data.name


class TestLabels:
    def test_are_those_of_the_fine_tuned_source(self, zoo: Zoo) -> None:
        trio, data = zoo.trio("clip_vision"), read_data(zoo.data, "train")
        job = prepare(*trio, zoo.data, samples=24, labels="source")
        assert isinstance(job.batches, PairedBatches)
        labelled = job.batches.dataset
        chosen = data.subset(job.record["data"]["indices"])
        assert labelled.labels is not None
        assert labelled.labels.tolist() == answers(trio[1], chosen)
        assert labelled.labels.tolist() != answers(trio[0], chosen)  # the fine-tune does say something of its own
        share = float(np.mean(align_labels(chosen, labelled.classes).labels == labelled.labels))  # by name
        assert job.record["data"]["labels"] == {"by": "source", "agreement": pytest.approx(share, abs=1e-4)}

    def test_leave_the_source_as_it_was(self, zoo: Zoo) -> None:
        trio, data = zoo.trio("clip_vision"), read_data(zoo.data, "train").subset(range(6))
        job = prepare(*trio, zoo.data, samples=6)
        before = {name: tensor.clone() for name, tensor in job.source.module.state_dict().items()}
        head = choose_head(job.source, None, data.name, data.classes, (), ())
        labelled_by(job.source, job.task_vector, head, data)
        after = job.source.module.state_dict()
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
        assert isinstance(found.batches, PairedBatches)
        theirs = found.batches.dataset
        given = transfer(*trio, theirs, samples=len(theirs))
        asked = transfer(*trio, zoo.data, samples=20, labels="source")
        for name in given.task_vector:  # the same samples in another order
            assert torch.allclose(given.task_vector.dense(name), asked.task_vector.dense(name), atol=1e-6)


class TestAgreement:
    def test_goes_by_names_of_classes(self) -> None:
        ours = Dataset(inputs=list("abcd"), labels=np.array([0, 1, 1, 0]), classes=CLASSES)
        known = Dataset(inputs=list("abcd"), labels=np.array([1, 0, 1, 1]), classes=CLASSES[::-1])
        assert agreement(ours, known) == 0.75

    def test_is_unknown_without_labels_or_with_other_classes(self) -> None:
        ours = Dataset(inputs=["a"], labels=np.array([0]), classes=CLASSES)
        assert agreement(ours, replace(ours, labels=None)) is None
        assert agreement(ours, replace(ours, classes=("horse", "cow"))) is None


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"labels": "sauce"}, "unknown labels 'sauce'"),
            ({"labels": "source", "sampler": "class_balanced"}, "has no labels"),
            ({"labels": "source", "shots": 2}, "has no labels"),
        ],
    )
    def test_in_one_line(self, zoo: Zoo, options: dict[str, Any], words: str) -> None:
        with pytest.raises(TuneportError, match=words):
            prepare(*zoo.trio("clip_vision"), zoo.data, **options)

    def test_for_batches_of_the_caller(self, zoo: Zoo) -> None:
        with pytest.raises(DataError, match="goes with data in files"):
            prepare(*zoo.trio("clip_vision"), [torch.zeros(1)], labels="source", loss=lambda *_: torch.zeros(()))

    def test_where_the_source_holds_no_numbers(self, zoo: Zoo) -> None:
        data = read_data(zoo.data, "train").subset(range(2))
        job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=2)
        head = choose_head(job.source, None, data.name, data.classes, (), ())
        for parameter in job.source.module.parameters():
            parameter.data = torch.zeros(()).expand(parameter.shape)
        with pytest.raises(TuneportError, match="larger than the memory budget"):
            labelled_by(job.source, job.task_vector, head, data)
