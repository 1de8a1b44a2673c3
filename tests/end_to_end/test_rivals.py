"""TransFusion and GradFix against planted truth and against plain implementations of their own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from builders.toy import ToyViT, batches, changed, finetuned, loss
from builders.toy import plan as toy_plan
from builders.toy import problem as toy_problem
from builders.twins import moved
from tuneport.layers import find_layers, find_loose
from tuneport.maps.statistics import Statistics
from tuneport.measure.capture import Request, measure_pairs
from tuneport.methods import Problem
from tuneport.methods.gradfix import GradFix
from tuneport.methods.transfusion import TransFusion, match_weights
from tuneport.pairing import pair_layers
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Sides

WIDTH, HIDDEN, HEADS, DEPTH = 16, 24, 4, 3
STACK = "vision_model.encoder.layers"


def tower(seed: int) -> Any:
    config = transformers.CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        image_size=8,
        patch_size=4,
        projection_dim=12,
    )
    model = transformers.CLIPVisionModelWithProjection(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + ("norm.weight" in name))
    return model


def pose(source: nn.Module, tuned: nn.Module, target: nn.Module) -> Problem:
    source_side, target_side = (find_layers(model, heads=HEADS) for model in (source, target))
    plan = pair_layers(
        source_side,
        target_side,
        loose=Sides(find_loose(source, source_side), find_loose(target, target_side)),
    )
    vector = TaskVector.between(dict(source.named_parameters()), dict(tuned.named_parameters()))
    weights = (dict(model.named_parameters()) for model in (source, target))
    return Problem(plan, vector, Statistics(), *weights)


def shuffled(model: Any, seed: int = 4) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """The same function with heads, units inside heads and hidden units in another order; and those orders."""
    generator = torch.Generator().manual_seed(seed)
    other, orders, size = copy.deepcopy(model), [], WIDTH // HEADS
    with torch.no_grad():
        for block in other.vision_model.encoder.layers:
            heads = torch.randperm(HEADS, generator=generator)
            inner = torch.cat([head * size + torch.randperm(size, generator=generator) for head in heads])
            units = torch.randperm(HIDDEN, generator=generator)
            attention = block.self_attn
            for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
                layer.weight.copy_(layer.weight[inner])
                layer.bias.copy_(layer.bias[inner])
            attention.out_proj.weight.copy_(attention.out_proj.weight[:, inner])
            block.mlp.fc1.weight.copy_(block.mlp.fc1.weight[units])
            block.mlp.fc1.bias.copy_(block.mlp.fc1.bias[units])
            block.mlp.fc2.weight.copy_(block.mlp.fc2.weight[:, units])
            orders.append((inner, units))
    return other, orders


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_transfusion_finds_a_planted_permutation(seed: int) -> None:
    source = tower(seed)
    tuned = moved(source)
    target, orders = shuffled(source, seed=seed + 10)
    images = batches(16, seed=99)[0][0]
    with torch.no_grad():
        before, wanted = (model(images).image_embeds for model in (source, tuned))
        assert float((target(images).image_embeds - before).abs().max()) < 1e-5  # the planted one is one
    posed = pose(source, tuned, target)
    found = match_weights(posed, seed=seed)
    for block, (inner, units) in enumerate(orders):
        assert not torch.equal(inner, torch.arange(WIDTH))
        assert torch.equal(found[STACK, "heads", block], inner)
        assert torch.equal(found[STACK, "hidden", block], units)
        assert torch.equal(found[STACK, "middle", block], torch.arange(WIDTH))
        assert torch.equal(found[STACK, "stream", block], torch.arange(WIDTH))
    answer = TransFusion(seed=seed).transfer(posed)
    assert set(answer.task_vector) == {name for name, _ in target.named_parameters()}
    with torch.no_grad():
        difference = float((changed(target, answer.task_vector)(images).image_embeds - wanted).abs().max())
    assert difference < 1e-5
    assert float((wanted - before).abs().max()) > 1e3 * difference  # the fine-tune did something


# --- the same matching, written down a second time: NumPy, one matrix after the other, no tables of roles


def plain_matching(source: nn.Module, target: nn.Module, seed: int) -> dict[tuple[str, int], np.ndarray]:
    """Weight matching with residual shortcuts and two-level heads, space by space in the same random order."""
    a, b = (
        {name: tensor.detach().double().numpy() for name, tensor in model.named_parameters()}
        for model in (source, target)
    )
    matrices: list[tuple[tuple[str, int] | None, tuple[str, int] | None, np.ndarray, np.ndarray]] = []

    def add(name: str, rows: tuple[str, int] | None, columns: tuple[str, int] | None) -> None:
        source_side, target_side = (side[f"{name}.weight"].reshape(len(side[f"{name}.weight"]), -1) for side in (a, b))
        matrices.append((rows, columns, source_side, target_side))

    add("vision_model.embeddings.patch_embedding", ("stream", 0), None)
    for i in range(DEPTH):
        stem = f"{STACK}.{i}"
        for name in ("k", "v", "q"):
            add(f"{stem}.self_attn.{name}_proj", ("heads", i), ("stream", i))
        add(f"{stem}.self_attn.out_proj", ("middle", i), ("heads", i))
        add(f"{stem}.mlp.fc1", ("hidden", i), ("middle", i))
        add(f"{stem}.mlp.fc2", ("stream", i + 1), ("hidden", i))
    add("visual_projection", None, ("stream", DEPTH))
    spaces: dict[tuple[str, int], int] = {}
    for rows, columns, source_side, _ in matrices:
        for space, size in ((rows, source_side.shape[0]), (columns, source_side.shape[1])):
            if space is not None:
                spaces.setdefault(space, size)
    eye = np.eye(WIDTH)
    for i in range(DEPTH):
        matrices.append((("middle", i), ("stream", i), eye, eye))
        matrices.append((("stream", i + 1), ("middle", i), eye, eye))
    found = {space: np.arange(size) for space, size in spaces.items()}
    size = WIDTH // HEADS
    partner = {}
    for i in range(DEPTH):
        cost = np.zeros((HEADS, HEADS))
        for rows, columns, source_side, target_side in matrices:
            if ("heads", i) not in (rows, columns):
                continue
            x, y = (w if rows == ("heads", i) else w.T for w in (source_side, target_side))
            for h in range(HEADS):
                for g in range(HEADS):
                    one = np.linalg.svd(y[h * size : (h + 1) * size], compute_uv=False)
                    two = np.linalg.svd(x[g * size : (g + 1) * size], compute_uv=False)
                    cost[h, g] += np.sqrt(((one - two) ** 2).sum())
        partner[i] = linear_sum_assignment(cost)[1]
        found["heads", i] = np.concatenate([g * size + np.arange(size) for g in partner[i]])
    random, names = np.random.default_rng(seed), list(spaces)
    for _ in range(100):
        better = False
        for index in random.permutation(len(names)):
            space = names[index]
            gain = np.zeros((spaces[space], spaces[space]))
            for rows, columns, source_side, target_side in matrices:
                if rows == space:
                    gain += target_side @ (source_side if columns is None else source_side[:, found[columns]]).T
                if columns == space:
                    gain += target_side.T @ (source_side if rows is None else source_side[found[rows]])
            if space[0] == "heads":
                new = np.zeros(WIDTH, dtype=np.int64)
                for h, g in enumerate(partner[space[1]]):
                    block = gain[h * size : (h + 1) * size, g * size : (g + 1) * size]
                    new[h * size : (h + 1) * size] = g * size + linear_sum_assignment(-block)[1]
            else:
                new = linear_sum_assignment(-gain)[1]
            units = np.arange(len(new))
            old_gain, new_gain = gain[units, found[space]].sum(), gain[units, new].sum()
            if new_gain > old_gain + 1e-9 * max(1.0, abs(old_gain)):
                found[space], better = new, True
        if not better:
            return found
    raise AssertionError("the plain matching did not come to rest")


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_transfusion_agrees_with_a_plain_implementation(seed: int) -> None:
    source, target = tower(seed), tower(seed + 100)
    posed = pose(source, moved(source), target)
    found, wanted = match_weights(posed, seed=seed), plain_matching(source, target, seed)
    assert {(kind, block) for _, kind, block in found} == set(wanted)
    for (stack, kind, block), permutation in found.items():
        assert stack == STACK
        assert permutation.tolist() == wanted[kind, block].tolist(), (kind, block)
    assert any(permutation.tolist() != list(range(len(permutation))) for permutation in found.values())


@pytest.mark.parametrize("seed", [0, 1])
def test_transfusion_moves_every_tensor_by_its_permutations(seed: int) -> None:
    """The permutations of the plain implementation, applied tensor by tensor by hand."""
    source, target = tower(seed), tower(seed + 100)
    tuned = moved(source)
    at = {place: torch.from_numpy(order) for place, order in plain_matching(source, target, 0).items()}
    answer = TransFusion().transfer(pose(source, tuned, target)).task_vector
    tau = {name: (after - before).detach() for (name, before), after in zip(
        source.named_parameters(), tuned.parameters(), strict=True
    )}  # fmt: skip
    first, last = at["stream", 0], at["stream", DEPTH]
    wanted = {
        "vision_model.embeddings.class_embedding": tau["vision_model.embeddings.class_embedding"][first],
        "vision_model.post_layernorm.weight": tau["vision_model.post_layernorm.weight"][last],
        "visual_projection.weight": tau["visual_projection.weight"][:, last],
    }
    for name in ("patch_embedding.weight", "position_embedding.weight"):
        whole = tau[f"vision_model.embeddings.{name}"]
        wanted[f"vision_model.embeddings.{name}"] = whole[first] if name.startswith("patch") else whole[:, first]
    for i in range(DEPTH):
        stem, heads, hidden = f"{STACK}.{i}", at["heads", i], at["hidden", i]
        stream, middle, after = at["stream", i], at["middle", i], at["stream", i + 1]
        for name in ("q_proj", "k_proj", "v_proj"):
            wanted[f"{stem}.self_attn.{name}.weight"] = tau[f"{stem}.self_attn.{name}.weight"][heads][:, stream]
            wanted[f"{stem}.self_attn.{name}.bias"] = tau[f"{stem}.self_attn.{name}.bias"][heads]
        wanted[f"{stem}.self_attn.out_proj.weight"] = tau[f"{stem}.self_attn.out_proj.weight"][middle][:, heads]
        wanted[f"{stem}.self_attn.out_proj.bias"] = tau[f"{stem}.self_attn.out_proj.bias"][middle]
        wanted[f"{stem}.mlp.fc1.weight"] = tau[f"{stem}.mlp.fc1.weight"][hidden][:, middle]
        wanted[f"{stem}.mlp.fc1.bias"] = tau[f"{stem}.mlp.fc1.bias"][hidden]
        wanted[f"{stem}.mlp.fc2.weight"] = tau[f"{stem}.mlp.fc2.weight"][after][:, hidden]
        wanted[f"{stem}.mlp.fc2.bias"] = tau[f"{stem}.mlp.fc2.bias"][after]
        wanted[f"{stem}.layer_norm1.bias"] = tau[f"{stem}.layer_norm1.bias"][stream]
        wanted[f"{stem}.layer_norm2.weight"] = tau[f"{stem}.layer_norm2.weight"][middle]
    for name, tensor in wanted.items():
        assert torch.equal(answer.dense(name), tensor), name


def test_transfusion_puts_classes_in_the_order_of_the_target() -> None:
    source = ToyViT(seed=1, classes=5)
    tuned, target, order = moved(source), copy.deepcopy(source), torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        target.classifier.weight.copy_(source.classifier.weight[order])
        target.classifier.bias.copy_(source.classifier.bias[order])
    between = toy_plan(source, target)
    classes = torch.eye(5, dtype=torch.float64)[:, order]
    pairs = tuple(replace(p, output_map=classes) if p.target.role == "classifier" else p for p in between.pairs)
    vector = TaskVector.between(source.state_dict(), tuned.state_dict())
    weights = (dict(model.named_parameters()) for model in (source, target))
    posed = Problem(replace(between, pairs=pairs), vector, Statistics(), *weights)
    answer = TransFusion().transfer(posed).task_vector
    assert torch.equal(answer.dense("classifier.weight"), vector.dense("classifier.weight")[order])
    assert torch.equal(answer.dense("classifier.bias"), vector.dense("classifier.bias")[order])


# --- GradFix: every sample's gradient by autograd, one sample at a time


@pytest.mark.parametrize("vote", ["majority", "mean"])
@pytest.mark.parametrize("fused", [False, True])
def test_gradfix_masks_are_those_of_a_plain_loop(vote, fused: bool) -> None:
    source, target = (ToyViT(seed=seed, fused=fused, classes=5).double() for seed in (1, 2))
    tuned = moved(source)
    with torch.no_grad():
        tuned.blocks[0].fc1.weight[0].copy_(source.blocks[0].fc1.weight[0])  # entries of zero stay zero
    data = batches(21, classes=5, batch=8)
    data = [(images.double(), labels) for images, labels in data]
    between = toy_plan(source, target)
    request = Request({"weight_gradient"}, loose=[pair.target.name for pair in between.loose])
    statistics = measure_pairs(Sides(source, target), between.pairs, data, Sides(loss, loss), request)
    assert all(parameter.grad is None for parameter in target.parameters())
    vector = TaskVector.between(source.state_dict(), tuned.state_dict())
    answer = GradFix(vote=vote).transfer(Problem(between, vector, statistics)).task_vector
    total = {name: torch.zeros_like(parameter) for name, parameter in target.named_parameters()}
    for images, labels in data:
        for image, label in zip(images, labels, strict=True):
            target.zero_grad()
            loss(target, (image[None], label[None])).backward()
            for name, parameter in target.named_parameters():
                assert parameter.grad is not None
                total[name] += parameter.grad.sign() if vote == "majority" else parameter.grad
    target.zero_grad(set_to_none=True)
    kept = dropped = 0
    for name in answer:
        tau = vector.dense(name)
        if name.endswith("k_proj.bias") or "qkv.bias" in name:
            # softmax is blind to the key's bias: its gradient is rounding, whose sign means nothing
            rows = slice(8, 16) if "qkv" in name else slice(None)
            blind = torch.zeros_like(tau, dtype=torch.bool)
            blind[rows] = True
        else:
            blind = torch.zeros_like(tau, dtype=torch.bool)
        wanted = torch.where((tau.sign() == -total[name].sign()) & (tau != 0), tau, 0.0)
        found = answer.dense(name)
        assert torch.equal(found[~blind], wanted[~blind].float()), name
        kept += int((found != 0).sum())
        dropped += int(((found == 0) & (tau != 0)).sum())
    assert kept > 100
    assert dropped > 100
    assert not answer.dense("blocks.0.fc1.weight")[0].any()
    assert set(answer) == set(dict(target.named_parameters()))


def test_a_tied_vote_keeps_nothing() -> None:
    """Two samples that pull apart: the majority is undecided, and the entry is dropped; the mean still decides."""
    source, target = ToyViT(seed=1), ToyViT(seed=2)
    posed = toy_problem(source, finetuned(source), target, frozenset({"weight_gradient"}), count=2)
    votes = posed.statistics.weight_gradients["blocks.0.fc1.weight"].votes
    tied = votes == 0
    assert tied.any()
    majority = GradFix().transfer(posed).task_vector.dense("blocks.0.fc1.weight")
    mean = GradFix(vote="mean").transfer(posed).task_vector.dense("blocks.0.fc1.weight")
    assert not majority[tied].any()
    assert mean[tied].any()
    assert torch.equal(majority[~tied] != 0, mean[~tied] != 0)  # both samples agree: so does their mean
