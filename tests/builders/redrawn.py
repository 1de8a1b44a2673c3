"""Transfers between very small models that are opened once, and drawn anew from other data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builders import folders
from builders.classifiers import bert, classifier_of
from builders.runs import Case, prepare, run
from builders.texts import Size, bert_tokenizer, write
from tuneport.methods import get_method
from tuneport.pipeline.samples import SCORED, draw_samples

SMALL, LARGE = (
    folders.Size(width=8, depth=1, heads=1, image=16, seed=0),
    folders.Size(width=12, depth=1, heads=2, image=16, seed=1),
)
SMALL_TEXT = Size(width=8, depth=1, heads=2, hidden=12, seed=0)
LARGE_TEXT = Size(width=12, depth=1, heads=3, hidden=16, seed=1)


def image_case(place: Path, family: str, data: Any, **options: Any) -> Case:
    """A prepared transfer between image models."""
    source, target = (
        folders.build(family, size, place / name) for name, size in (("source", SMALL), ("target", LARGE))
    )
    return prepare(source, folders.perturb(source, place / "tuned"), target, data, **options)


def text_case(place: Path, data: Any, **options: Any) -> Case:
    """A prepared transfer of a text classifier to a bare encoder."""
    tokenizer, base = bert_tokenizer(), bert("BertModel", SMALL_TEXT)
    source, tuned = write(place / "source", base, tokenizer), write(place / "tuned", classifier_of(base), tokenizer)
    return prepare(source, tuned, write(place / "target", bert("BertModel", LARGE_TEXT), tokenizer), data, **options)


def redrawn(case: Case, data: Any, **options: Any) -> Case:
    """The same transfer on samples of other data."""
    case = case.using(**options)
    signals = get_method(case.config.method).signals | SCORED
    calibration, _ = draw_samples(case.models, case.change, data, case.config, signals)
    return replace(case, setup=replace(case.setup, calibration=calibration))


def moved(case: Case) -> dict[str, Tensor]:
    """All that a transfer adds to the target, and the head that it has then."""
    result = run(case)
    head = {f"head {name}": result.target.module.get_parameter(name).detach().clone() for name in result.target.head}
    return {**{name: result.task_vector.dense(name) for name in result.task_vector}, **head}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of a tensor, relative to its norm."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-6)) for name in one)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
