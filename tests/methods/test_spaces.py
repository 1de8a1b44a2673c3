"""Spaces of tensors, on copies of every family with a permuted residual stream."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from builders.runs import expected, prepare
from builders.texts import FAMILIES, Size, make, scatter
from builders.twins import Twin, moved
from tuneport import transfer
from tuneport.config import MeasureConfig
from tuneport.layers import Layer, find_layers, find_loose
from tuneport.maps.statistics import Statistics
from tuneport.methods import Problem
from tuneport.methods.transfusion import TURNED, UNMATCHED, TransFusion, match_weights, places_of
from tuneport.models.base import Model
from tuneport.models.open import describe_module
from tuneport.pairing import pair_layers
from tuneport.pipeline.plan import make_plan
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Sides

SIZE = Size(width=24, depth=3, groups=4)
IMAGES = {
    "clip": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {"projection_dim": 12}),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}),
    "vit": ("ViTForImageClassification", "ViTConfig", {}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {"mlp_ratio": 2}),
}
# Tensors whose space is unknown, by the end of their names; all others must move.
SIGLIP_HEAD = (
    *("head.probe", "head.attention.in_proj_weight", "head.attention.in_proj_bias", "head.attention.out_proj.weight"),
    *("head.attention.out_proj.bias", "head.layernorm.weight", "head.layernorm.bias", "head.mlp.fc1.weight"),
    *("head.mlp.fc1.bias", "head.mlp.fc2.weight", "head.mlp.fc2.bias"),
)
KEPT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mpnet", "t5", "t5-gated", "t5-classifier", "t5-encoder"), ("relative_attention_bias.weight",)),
    "modernbert": ("head.norm.weight",),
    "siglip": SIGLIP_HEAD,
    "dinov2": ("classifier.weight", "classifier.bias"),  # it reads two tokens side by side
}


class Reordered(Twin):
    """A permuted residual stream and pooler output; heads and hidden units keep their order."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, rotary=True, turn=False)

    def order(self, stack: str, block: int | None, cross: bool) -> Tensor:
        del stack, block, cross
        return torch.arange(self.heads).reshape(self.groups, -1)

    def attention(self, layer: Layer, part: str, width: int) -> Tensor:
        del layer, part
        return torch.eye(width, dtype=torch.float64)

    def units(self, layer: Layer, width: int) -> Tensor:
        del layer
        return torch.eye(width, dtype=torch.float64)

    def around(self, layer: Layer) -> tuple[Tensor, Tensor]:
        into, out = (torch.eye(n, dtype=torch.float64) for n in (layer.in_features, layer.out_features))
        if layer.role == "patch":
            return into, self.stream
        if layer.role in ("projection", "head.attention.k", "head.attention.v"):
            return self.stream, out
        if layer.role.startswith("head."):
            return into, out
        if layer.role == "classifier" and layer.in_features == 2 * len(self.stream):
            return torch.block_diag(self.stream, self.stream), out
        return super().around(layer)

    def loose(self, name: str, kind: str, stack: str, tensor: Tensor) -> Tensor:
        if name in SIGLIP_HEAD:
            return tensor
        return super().loose(name, kind, stack, tensor)


def module_of(family: str) -> Any:
    if family in FAMILIES:
        return make(family, SIZE)
    kind, config, more = IMAGES[family]
    sizes = {"hidden_size": SIZE.width, "intermediate_size": SIZE.hidden, "num_hidden_layers": SIZE.depth}
    sizes |= {"num_attention_heads": SIZE.heads, "image_size": 8, "patch_size": 4, "num_labels": 5, **more}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        scatter(module)
    return module.eval()


def answer(module: Any) -> Tensor:
    if hasattr(module.config, "patch_size"):
        found = module(pixel_values=torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
        return next(found[name] for name in ("logits", "image_embeds", "pooler_output") if name in found)
    ids = torch.tensor([[1, 5, 9, 7, 2], [1, 8, 4, 6, 2]])
    if type(module).__name__ == "T5ForConditionalGeneration":
        return module(input_ids=ids, decoder_input_ids=ids).logits
    if type(module).__name__ == "T5ForSequenceClassification":
        return module(input_ids=ids.masked_fill(ids == 2, 1)[:, 1:]).logits
    if type(module).__name__ == "T5EncoderModel":
        return module(input_ids=ids).last_hidden_state.sort(-1).values
    return module(input_ids=ids).logits


@pytest.mark.parametrize("family", [*FAMILIES, *IMAGES])
def test_no_tensor_is_added_in_the_order_of_the_source(family: str) -> None:
    source = module_of(family)
    tuned = moved(source)
    target, wanted = (Reordered(describe_module(module)).build() for module in (source, tuned))
    with torch.no_grad():
        torch.testing.assert_close(
            answer(target), answer(source), atol=2e-4, rtol=1e-4
        )  # the copy computes the same function
    result = transfer(source, tuned, target, method="transfusion")
    planned = expected(prepare(source, tuned, target, signals="transfusion"))
    assert [asdict(item) for item in result.not_transported] == planned["not_transported"]
    before, after = dict(target.named_parameters()), dict(wanted.named_parameters())
    kept = set()
    for name in before:
        if name in result.task_vector:
            torch.testing.assert_close(
                result.task_vector.dense(name), (after[name] - before[name]).detach(), atol=1e-5, rtol=1e-4, msg=name
            )
        else:
            kept.add(name)
    assert {result.target.weights.file_names[name] for name in kept} == {item.tensor for item in result.not_transported}
    assert kept == {name for name in before if name.endswith(KEPT.get(family, ("nothing",)))}


@pytest.mark.parametrize("changed", [("classifier", "query", "value"), ("query", "value", "LayerNorm")])
def test_partial_task_vectors_move_or_are_kept_as_unmatched(changed: tuple[str, ...]) -> None:
    """Unchanged weights still determine permutations; tensors without a matched neighbour are kept."""
    source = module_of("bert")
    target, wanted = (Reordered(describe_module(module)).build() for module in (source, moved(source)))
    whole = TaskVector.between(dict(source.named_parameters()), dict(moved(source).named_parameters()))
    vector = TaskVector({name: entry for name, entry in whole.items() if any(word in name for word in changed)})
    plan = make_plan(Sides(describe_module(source), describe_module(target)), vector, MeasureConfig())
    weights = (dict(module.named_parameters()) for module in (source, target))
    answer = TransFusion().transfer(Problem(plan, vector, Statistics(), *weights))
    before, after = dict(target.named_parameters()), dict(wanted.named_parameters())
    for name in answer.task_vector:
        tau = (after[name] - before[name]).detach()
        torch.testing.assert_close(answer.task_vector.dense(name), tau, atol=1e-5, rtol=1e-4, msg=name)
    assert set(answer.task_vector) | {item.tensor for item in answer.kept} == set(vector)
    unmatched = {item.tensor for item in answer.kept}
    assert {item.reason for item in answer.kept} <= {UNMATCHED}
    after_attention = {name for name in vector if "attention.output.LayerNorm" in name}
    assert unmatched == after_attention | {name for name in vector if f"{SIZE.depth - 1}.output.LayerNorm" in name}


class Shuffled(Reordered):
    """Permuted heads too, and permuted units inside them, except those of rotary queries and keys."""

    def order(self, stack: str, block: int | None, cross: bool) -> Tensor:
        return Twin.order(self, stack, block, cross)

    def attention(self, layer: Layer, part: str, width: int) -> Tensor:
        key, order = (layer.stack, layer.block), self.order(layer.stack, layer.block, False).flatten()
        size, kind = width // self.heads, "v" if part in ("v", "mixed") else "qk"
        turned = [torch.eye(size, dtype=torch.float64)] * self.heads
        if kind == "v":
            inside = self.once((*key, kind), lambda: torch.stack([self.shuffle(size) for _ in range(self.heads)]))
            turned = list(inside)
        whole = torch.zeros(width, width, dtype=torch.float64)
        for head, place in enumerate(order.tolist()):
            whole[head * size : (head + 1) * size, place * size : (place + 1) * size] = turned[head]
        return whole


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt-neox", "modernbert"])
def test_units_of_rotary_queries_and_keys_keep_their_order_inside_a_head(family: str) -> None:
    """The target computes the same function: heads and value units are permuted, query and key units are not."""
    source = module_of(family)
    target, wanted = (Shuffled(describe_module(module)).build() for module in (source, moved(source)))
    with torch.no_grad():
        torch.testing.assert_close(answer(target), answer(source), atol=2e-4, rtol=1e-4)
    result = transfer(source, moved(source), target, method="transfusion")
    before, after = dict(target.named_parameters()), dict(wanted.named_parameters())
    for name in result.task_vector:
        tau = (after[name] - before[name]).detach()
        torch.testing.assert_close(result.task_vector.dense(name), tau, atol=1e-5, rtol=1e-4, msg=name)
    strangers = module_of(family)
    with torch.no_grad():
        for parameter in strangers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    models = Sides(describe_module(source), describe_module(strangers))
    plan = make_plan(models, TaskVector.between(*map(weights_of, (source, moved(source)))), MeasureConfig())
    found = match_weights(Problem(plan, TaskVector({}), Statistics(), weights_of(source), weights_of(strangers)))
    turned = {space: order for space, order in found.items() if space is not None and space[1] == TURNED}
    assert len(turned) == SIZE.depth
    for (stack, _, block), order in turned.items():
        size = len(order) // SIZE.heads
        assert torch.equal(order % size, torch.arange(len(order)) % size)
        assert torch.equal(order[::size] // size, found[stack, "heads", block][::size] // size)


def weights_of(module: Any) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def test_a_norm_over_all_heads_shares_their_space() -> None:
    config = transformers.Olmo2Config(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    module = transformers.Olmo2ForCausalLM(config)
    layers = find_layers(module, heads=4)
    found = find_loose(module, layers)
    places = places_of(pair_layers(layers, layers, loose=Sides(found, found)))
    norms = [part for part in found if part.name.endswith(("q_norm.weight", "k_norm.weight"))]
    assert len(norms) == 4
    assert [places.loose[part.name] for part in norms] == [(part.stack, TURNED, part.block) for part in norms]
