"""The repr of every public object fits a screen, however large the object is."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import tuneport
from builders.runs import measured, prepare, problem
from builders.toy import ToyViT, batches, finetuned, loss, plan
from tuneport.data.dataset import Dataset
from tuneport.maps.procrustes import Alignment, procrustes
from tuneport.models.base import Model
from tuneport.models.heads import Head
from tuneport.pairing import Plan
from tuneport.pipeline.transfer import Setup

MOST = 400  # characters


@pytest.fixture(scope="module")
def objects() -> dict[type, Any]:
    """An object of each public class that holds data."""
    torch.manual_seed(0)
    source, target = ToyViT(), ToyViT(width=40, depth=3)
    pairs = plan(source, target).pairs
    job = prepare(source, finetuned(source), target, batches(64), loss=loss, pairs=pairs)
    posed = problem(job, measured(job))
    labels = np.zeros(1000, dtype=np.int64)
    made = [
        job.setup,
        job.models.source,
        job.plan,
        job.plan.pairs[0],
        job.task_vector,
        posed,
        tuneport.get_method("bico"),
        tuneport.get_method("bico").transfer(posed),
        tuneport.transfer(source, finetuned(source), target, batches(64), loss=loss, pairs=pairs),
        procrustes(torch.randn(50, 60, dtype=torch.float64)),
        tuneport.TransferConfig.of(pairs=pairs, samples=64, loss=loss),
        tuneport.DistillConfig(steps=3),
        tuneport.EvaluateConfig(),
        Dataset([str(i) for i in range(1000)], labels, tuple(map(str, range(500)))),
        Head("animals", tuple(map(str, range(500))), torch.randn(500, 64)),
    ]
    return {type(item): item for item in made}


def test_the_objects_are_of_every_public_class(objects: dict[type, Any]) -> None:
    named = [getattr(tuneport, name) for name in tuneport.__all__]
    public = {item for item in named if inspect.isclass(item) and not issubclass(item, Exception)}
    public -= {tuneport.Method, tuneport.Events}  # abstract, and without data
    assert public | {Setup, Model, Plan, Dataset, Head, Alignment} == set(objects)


def test_each_fits_a_screen_and_names_its_class(objects: dict[type, Any]) -> None:
    assert objects
    for kind, item in objects.items():
        text = repr(item)
        assert text.startswith(kind.__name__)
        assert len(text) <= MOST, text
