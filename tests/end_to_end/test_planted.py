"""Planted truth: a target that is the source in other coordinates must receive the fine-tune exactly."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builders.clip_twins import clip_twin, random_clip
from builders.toy import ToyViT, batches, changed, finetuned, problem, twin
from tuneport.layers import find_layers, find_loose
from tuneport.measure.capture import Request, measure_pairs
from tuneport.methods import METHODS, BilinearAlignment, Problem, Transfer
from tuneport.pairing import pair_layers
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Completion, Sides

SHAPES = {
    "equal": {"heads": 2, "head_width": 4, "hidden": 20},
    "more hidden units": {"heads": 2, "head_width": 4, "hidden": 32},
    "wider heads": {"heads": 2, "head_width": 7, "hidden": 20},
    "more heads": {"heads": 3, "head_width": 4, "hidden": 20},
    "all of it": {"heads": 4, "head_width": 6, "hidden": 40},
}


def assert_full_rank(answer: Transfer, posed: Problem) -> None:
    pairs = {pair.target.name: pair for pair in posed.plan.pairs}
    assert {record.target for record in answer.records} == set(pairs)
    for record in answer.records:
        source, target = pairs[record.target].source, pairs[record.target].target
        if record.rank_in is not None:
            assert record.rank_in == min(source.in_features, target.in_features), record.target
        if record.rank_out is not None:
            assert record.rank_out == min(source.out_features, target.out_features), record.target


@pytest.mark.parametrize("completion", ["svd", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_twin_answers_like_the_finetuned_source(shape: str, completion: Completion) -> None:
    source = ToyViT()
    moved, target = finetuned(source), twin(source, **SHAPES[shape])
    images = batches(64, seed=99)[0][0]
    with torch.no_grad():
        assert float((source(images) - target(images)).abs().max()) < 1e-4  # the twin is one
        shift = float((source(images) - moved(images)).abs().max())
    bico = METHODS["bico"]
    assert isinstance(bico, BilinearAlignment)
    method = replace(bico, completion=completion)
    posed = problem(source, moved, target, method.signals)
    answer = method.transfer(posed)
    assert_full_rank(answer, posed)
    with torch.no_grad():
        difference = float((changed(target, answer.task_vector)(images) - moved(images)).abs().max())
    assert difference < 1e-4
    assert shift > 1e3 * difference  # the fine-tune did something
    assert max(record.residual_out or 0.0 for record in answer.records) < 1e-3
    assert max(record.residual_in or 0.0 for record in answer.records) < 1e-3


def test_the_naive_transfer_fails_where_bico_does_not() -> None:
    source = ToyViT()
    moved, target = finetuned(source), twin(source, **SHAPES["equal"])
    images = batches(64, seed=99)[0][0]
    answer = METHODS["naive"].transfer(problem(source, moved, target, frozenset()))
    with torch.no_grad():
        assert float((changed(target, answer.task_vector)(images) - moved(images)).abs().max()) > 1


@pytest.mark.parametrize("method", ["bico", "theseus", "gradient_only"])
@pytest.mark.parametrize("count", [256, 8])
def test_transfer_to_itself_returns_the_task_vector(method: str, count: int) -> None:
    """Also with 8 samples, where most directions are undetermined: the completion is nearest to the identity."""
    source = ToyViT()
    moved, target = finetuned(source), copy.deepcopy(source)
    posed = problem(source, moved, target, METHODS[method].signals, count=count)
    answer = METHODS[method].transfer(posed)
    assert set(answer.task_vector) == {
        name for name in posed.task_vector if name not in ("class_embedding", "position_embedding")
    }
    for name in answer.task_vector:
        assert float((answer.task_vector.dense(name) - posed.task_vector[name]).abs().max()) < 1e-5, name


def test_a_clip_twin_answers_like_the_finetuned_source() -> None:
    source = random_clip(seed=0)
    target, embedding = clip_twin(source)
    moved = copy.deepcopy(source)
    generator = torch.Generator().manual_seed(8)
    layers = find_layers(source)
    with torch.no_grad():
        parameters = dict(moved.named_parameters())
        for name in {name for layer in layers for name in (layer.weight, layer.bias) if name is not None}:
            parameters[name].add_(torch.randn(parameters[name].shape, generator=generator) * 0.05)
    classes = torch.randn(30, 12, generator=generator)
    heads = {id(source): classes, id(moved): classes, id(target): classes @ embedding.T}

    def logits(model: nn.Module, images: Tensor, head: Tensor) -> Tensor:
        return 5 * F.normalize(model(images).image_embeds, dim=-1) @ F.normalize(head, dim=-1).T

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(logits(model, batch[0], heads[id(model)]), batch[1], reduction="sum")

    images = batches(64, seed=99)[0][0]
    with torch.no_grad():
        wanted, before = logits(moved, images, classes), logits(source, images, classes)
        assert float((logits(target, images, heads[id(target)]) - before).abs().max()) < 1e-4
    target_layers = find_layers(target)
    plan = pair_layers(
        layers, target_layers, loose=Sides(find_loose(source, layers), find_loose(target, target_layers))
    )
    method = METHODS["bico"]
    statistics = measure_pairs(
        Sides(source, target), plan.pairs, batches(256), Sides(loss, loss), Request(method.signals)
    )
    answer = method.transfer(Problem(plan, TaskVector.between(source.state_dict(), moved.state_dict()), statistics))
    for record in answer.records:
        # LayerNorm is blind to a constant, so gradients on the stream never point along it: rank 15 of 16
        on_stream = record.target.endswith(("out_proj.weight", "fc2.weight", "patch_embedding.weight"))
        width = {"fc1.weight": 24, "visual_projection.weight": 12}.get(record.target.split("mlp.")[-1], 16)
        assert record.rank_out == (15 if on_stream else width), record
    with torch.no_grad():
        found = logits(changed(target, answer.task_vector), images, heads[id(target)])
    assert float((found - wanted).abs().max()) < 1e-4
    assert float((before - wanted).abs().max()) > 0.1
