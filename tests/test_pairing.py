"""The plan of a transfer: which layers pair, what stays, and the errors that say so before any work."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import nn

from builders.toy import MATRICES, ToyViT
from tuneport.errors import PairingError
from tuneport.layers import Layer, LooseTensor, find_layers, find_loose
from tuneport.pairing import (
    Kept,
    LayerPair,
    Plan,
    check_pairs,
    nearest_block,
    pair_layers,
    patch_resize,
)
from tuneport.types import Sides


def plan_for(source: nn.Module, target: nn.Module, **options) -> Plan:
    source_side, target_side = find_layers(source, matrices=MATRICES), find_layers(target, matrices=MATRICES)
    loose = Sides(find_loose(source, source_side), find_loose(target, target_side))
    return pair_layers(source_side, target_side, loose=loose, **options)


def layer(role: str, block: int | None = 0, stack: str = "blocks", **options) -> Layer:
    name = f"{stack}.{block}.{role}" if block is not None else role
    bias = options.pop("bias", f"{name}.bias")
    return Layer(f"{name}.weight", bias, (3, 2), role, stack if block is not None else "", block, **options)


def stack_of(depth: int, *roles: str, stack: str = "blocks") -> list[Layer]:
    return [layer(role, block, stack) for block in range(depth) for role in roles]


def partners(plan: Plan) -> dict[str, str]:
    return {pair.target.name: pair.source.name for pair in plan.pairs}


def test_the_depth_rule_for_all_depths_up_to_forty() -> None:
    for source in range(1, 41):
        for target in range(2, 41):
            found = [nearest_block(j, source, target) for j in range(target)]
            exact = [math.floor(Fraction(j * (source - 1), target - 1) + Fraction(1, 2)) for j in range(target)]
            assert found == exact
            assert found == sorted(found)
            assert (found[0], found[-1]) == (0, source - 1)


@pytest.mark.parametrize(
    ("source", "target", "blocks"),
    [
        (6, 3, [0, 3, 5]),  # 2.5 is a tie and goes up
        (2, 3, [0, 1, 1]),
        (2, 4, [0, 0, 1, 1]),
        (12, 24, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11]),
        (24, 12, [0, 2, 4, 6, 8, 10, 13, 15, 17, 19, 21, 23]),
        (4, 4, [0, 1, 2, 3]),
        (5, 1, [4]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_the_depth_rule_pinned(source: int, target: int, blocks: list[int]) -> None:
    assert [nearest_block(j, source, target) for j in range(target)] == blocks
    plan = pair_layers(stack_of(source, "q"), stack_of(target, "q"))
    assert [pair.source.block for pair in plan.pairs] == blocks
    assert (plan.source_blocks, plan.target_blocks) == ({"blocks": source}, {"blocks": target})


def test_another_depth_rule_may_be_passed() -> None:
    plan = pair_layers(stack_of(3, "q"), stack_of(3, "q"), depth_rule=lambda block, source, _: source - 1 - block)
    assert [pair.source.block for pair in plan.pairs] == [2, 1, 0]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({}, {}),
        ({}, {"width": 16, "hidden": 24, "head_width": 6}),
        ({"depth": 3}, {"depth": 2}),
        ({"depth": 2}, {"depth": 5}),
        ({"fused": True}, {}),
        ({}, {"fused": True}),
        ({}, {"patch": 2}),
    ],
)
def test_every_target_parameter_is_paired_or_kept(source: dict, target: dict) -> None:
    one, other = ToyViT(**source), ToyViT(**target)
    plan = plan_for(one, other)
    moved = {name for pair in plan.pairs for name in (pair.target.weight, pair.target.bias) if name is not None}
    kept = [entry.tensor for entry in plan.kept]
    assert len(set(kept)) == len(kept)
    assert not moved & set(kept)
    assert moved | set(kept) == {name for name, _ in other.named_parameters()}
    assert {pair.target.name for pair in plan.loose} == {"class_embedding", "position_embedding"}
    assert all(pair.source.role == pair.target.role for pair in plan.pairs)
    used = {pair.source.name for pair in plan.pairs}
    assert used | {entry.tensor for entry in plan.dropped} == {
        layer.name for layer in find_layers(one, matrices=MATRICES)
    }


def test_what_stays_says_why() -> None:
    model = ToyViT()
    reasons = {entry.tensor: entry.reason for entry in plan_for(model, model).kept}
    assert reasons == {
        "class_embedding": "class tokens: the target keeps its own",
        "position_embedding": "position embeddings: the target keeps its own",
    }


def test_target_layers_without_a_partner_are_kept_with_their_biases() -> None:
    source, target = [layer("q")], [layer("q"), layer("gate"), layer("pooler", None)]
    plan = pair_layers(source, target)
    assert partners(plan) == {"blocks.0.q.weight": "blocks.0.q.weight"}
    reasons = {entry.tensor: entry.reason for entry in plan.kept}
    assert reasons == {
        "blocks.0.gate.weight": "the source has no layer with the role gate",
        "blocks.0.gate.bias": "the source has no layer with the role gate",
        "pooler.weight": "the source has no layer with the role pooler",
        "pooler.bias": "the source has no layer with the role pooler",
    }


def test_depths_may_be_given_where_only_some_blocks_changed() -> None:
    source, target = [layer("q", 1)], [layer("q", i) for i in range(4)]
    plan = pair_layers(source, target, blocks=Sides({"blocks": 4}, {"blocks": 4}))
    assert partners(plan) == {"blocks.1.q.weight": "blocks.1.q.weight"}
    reasons = {entry.tensor: entry.reason for entry in plan.kept}
    assert reasons["blocks.3.q.weight"] == "source block 3 has no change in the role q"
    assert dict(plan.source_blocks) == dict(plan.target_blocks) == {"blocks": 4}
    assert len(pair_layers(source, target).pairs) == 2  # without: two blocks, of which the last is given


def test_biases_on_one_side_only_are_named() -> None:
    bare, biased = layer("q", bias=None), layer("q")
    assert pair_layers([bare], [biased]).kept == (Kept("blocks.0.q.bias", "the source layer has no bias"),)
    assert pair_layers([biased], [bare]).dropped == (Kept("blocks.0.q.bias", "the target layer has no bias"),)
    parts = [replace(layer("qkv"), role=role, rows=((i, i + 1),)) for i, role in enumerate(("q", "k", "v"))]
    plan = pair_layers([layer(role, bias=None) for role in ("q", "k", "v")], parts)
    assert plan.kept == (Kept("blocks.0.qkv.bias", "the source layer has no bias"),)


def test_source_blocks_that_nobody_takes_are_named() -> None:
    plan = pair_layers(stack_of(4, "q"), stack_of(2, "q"))
    assert plan.dropped == tuple(
        Kept(f"blocks.{i}.q.weight", "no target block takes this source block") for i in (1, 2)
    )
    plan = pair_layers([layer("q"), layer("head", None)], [layer("q")])
    assert plan.dropped == (Kept("head.weight", "the target has no layer with the role head"),)


def test_a_lost_role_is_an_error_with_a_way_out() -> None:
    source = stack_of(2, "q", "k", "v", "out", "fc1", "fc2")
    target = stack_of(2, "q", "k", "v", "out", "wi_1", "wo")
    text = (
        "source blocks blocks have roles q, k, v, out, fc1, fc2; target blocks blocks have q, k, v, out, wi_1, wo "
        'and no fc1, fc2. Pass `roles={"fc1": "wi_1", "fc2": "wo"}` or see docs/extending.md.'
    )
    with pytest.raises(PairingError, match=f"^{re.escape(text)}$"):
        pair_layers(source, target)
    plan = pair_layers(source, target, roles={"fc1": "wi_1", "fc2": "wo"})
    assert len(plan.pairs) == 12
    assert partners(plan)["blocks.1.wo.weight"] == "blocks.1.fc2.weight"


def test_a_role_can_be_left_behind() -> None:
    source, target = stack_of(1, "q", "gate"), stack_of(1, "q")
    with pytest.raises(PairingError, match=r'and no gate\. Pass `roles=\{"gate": None\}`'):
        pair_layers(source, target)
    plan = pair_layers(source, target, roles={"gate": None})
    assert partners(plan) == {"blocks.0.q.weight": "blocks.0.q.weight"}
    assert [entry.tensor for entry in plan.dropped] == ["blocks.0.gate.weight"]


def test_gated_and_plain_feed_forwards_are_paired_as_suggested() -> None:
    gated, plain = stack_of(1, "q", "gate", "up", "down"), stack_of(1, "q", "fc1", "fc2")
    with pytest.raises(PairingError, match=r'Pass `roles=\{"gate": None, "up": "fc1", "down": "fc2"\}` or see'):
        pair_layers(gated, plain)
    with pytest.raises(PairingError, match=r'Pass `roles=\{"fc1": "up", "fc2": "down"\}` or see'):
        pair_layers(plain, gated)


def test_unknown_roles_are_refused() -> None:
    with pytest.raises(PairingError, match=r"^roles names fc9, but the source has only k, q\.$"):
        pair_layers(stack_of(1, "q", "k"), stack_of(1, "q", "k"), roles={"fc9": "q"})


def test_nothing_in_common_is_an_error() -> None:
    with pytest.raises(PairingError, match=r"no layer of the target has a partner in the source: source roles a; tar"):
        pair_layers([layer("a", None)], [layer("b", None)])


def test_stacks_pair_in_order_or_by_name() -> None:
    one = pair_layers(stack_of(2, "q", stack="vit.layers"), stack_of(2, "q", stack="vision.blocks"))
    assert partners(one)["vision.blocks.1.q.weight"] == "vit.layers.1.q.weight"
    encoder, decoder = stack_of(2, "q", stack="encoder"), stack_of(3, "q", stack="decoder")
    by_name = pair_layers([*encoder, *decoder], [*decoder, *encoder])
    assert all(pair.source.stack == pair.target.stack for pair in by_name.pairs)
    assert len(by_name.pairs) == 5
    some = pair_layers([*encoder, *decoder], encoder)
    assert {pair.source.stack for pair in some.pairs} == {"encoder"}
    assert [entry.reason for entry in some.dropped] == ["the target has no layer with the role q"] * 3
    with pytest.raises(PairingError, match=r"the source has block stacks \['encoder', 'decoder'\] and the target"):
        pair_layers([*encoder, *decoder], stack_of(2, "q", stack="blocks"))


def test_loose_tensors_pair_by_place_and_depth() -> None:
    def loose(block: int | None, role: str) -> LooseTensor:
        kind, stack = "norms", "blocks" if block is not None else ""
        return LooseTensor(f"{stack}.{block}.{role}", (2,), role, kind, stack, block)

    plan = pair_layers(
        stack_of(3, "q"),
        stack_of(2, "q"),
        loose=Sides(
            [loose(block, "norm1") for block in (0, 1, 2)] + [loose(None, "final")],
            [loose(block, "norm1") for block in (0, 1)] + [loose(None, "final"), loose(None, "extra")],
        ),
    )
    found = {pair.target.name: pair.source.name for pair in plan.loose}
    assert found == {
        "blocks.0.norm1": "blocks.0.norm1",
        "blocks.1.norm1": "blocks.2.norm1",
        ".None.final": ".None.final",
    }
    assert len(plan.kept) == 4


def test_output_maps_go_to_their_role() -> None:
    maps = {"head": torch.eye(3)}
    plan = pair_layers([layer("q"), layer("head", None)], [layer("q"), layer("head", None)], output_maps=maps)
    assert {pair.target.role: pair.output_map for pair in plan.pairs} == {"q": None, "head": maps["head"]}
    with pytest.raises(PairingError, match=r"fixed output map of head.weight must have shape \(3, 3\), got \(3, 4\)\."):
        pair_layers([layer("head", None)], [layer("head", None)], output_maps={"head": torch.eye(3, 4)})


def test_pairs_given_by_hand_are_checked() -> None:
    pair = LayerPair(layer("q"), layer("q"))
    check_pairs([pair, LayerPair(layer("q"), layer("k"))])
    with pytest.raises(PairingError, match=r"target layer blocks.0.q.weight is paired twice; give each target layer"):
        check_pairs([pair, LayerPair(layer("k"), layer("q"))])
    with pytest.raises(
        PairingError, match=r"fixed input map of blocks.0.q.weight must have shape \(2, 2\), got \(5, 2\)"
    ):
        check_pairs([replace(pair, input_map=torch.zeros(5, 2))])


def test_check_pairs_reads_any_iterable_whole() -> None:
    broken = LayerPair(layer("q"), layer("q"), input_map=torch.zeros(5, 2))
    with pytest.raises(PairingError, match="fixed input map"):
        check_pairs(pair for pair in [broken])


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 2, 5)])
def test_patches_of_equal_size_share_their_space(shape: tuple[int, int, int]) -> None:
    assert torch.equal(patch_resize(shape, shape), torch.eye(math.prod(shape), dtype=torch.float64))


@pytest.mark.parametrize(
    ("source", "target"), [((2, 4, 4), (2, 8, 8)), ((2, 8, 8), (2, 4, 4)), ((1, 14, 14), (1, 16, 16))]
)
def test_patch_resize_keeps_constant_patches(source: tuple, target: tuple) -> None:
    P = patch_resize(source, target)
    assert P.shape == (math.prod(source), math.prod(target))
    for channel in range(source[0]):
        patch = torch.zeros(target, dtype=torch.float64)
        patch[channel] = 3.0
        resized = (P @ patch.flatten()).reshape(source)
        expected = torch.zeros(source, dtype=torch.float64)
        expected[channel] = 3.0
        assert torch.allclose(resized, expected, atol=1e-12)


def test_patch_resize_of_ramps_by_hand() -> None:
    """Pixel centres lie at (i + 1/2) / n; a ramp read at other centres stays a ramp away from the borders."""
    up = (patch_resize((1, 1, 4), (1, 1, 2)) @ torch.tensor([0.0, 4.0], dtype=torch.float64)).tolist()
    assert up == pytest.approx([0.0, 1.0, 3.0, 4.0])
    ramp = torch.arange(4, dtype=torch.float64)  # half size: a triangle of 2 + 2 pixels, cut at the border
    down = (patch_resize((1, 1, 2), (1, 1, 4)) @ ramp).tolist()
    first = (0.75 * 0 + 0.75 * 1 + 0.25 * 2) / 1.75
    assert down == pytest.approx([first, 3 - first])
    centres = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
    resized = patch_resize((1, 1, 8), (1, 1, 16)) @ centres
    assert resized[2:-2].tolist() == pytest.approx([(i + 0.5) / 8 for i in range(2, 6)])


def test_a_moved_kernel_answers_a_patch_as_the_source_answers_the_resized_one() -> None:
    kernel, patch = torch.randn(5, 2 * 4 * 4, dtype=torch.float64), torch.randn(1, 2, 8, 8, dtype=torch.float64)
    moved = kernel @ patch_resize((2, 4, 4), (2, 8, 8))
    resized = nn.functional.interpolate(patch, size=(4, 4), mode="bilinear", antialias=True)
    assert torch.allclose(moved @ patch.flatten(), kernel @ resized.flatten(), atol=1e-12)


def test_patch_embeddings_of_other_colours_do_not_pair() -> None:
    source, target = nn.ModuleDict({"conv1": nn.Conv2d(1, 4, 2, 2)}), nn.ModuleDict({"conv1": nn.Conv2d(3, 4, 2, 2)})
    with pytest.raises(PairingError, match=r"conv1.weight reads 1 channels and conv1.weight reads 3; pixels of diff"):
        pair_layers(find_layers(source), find_layers(target))


def test_the_patch_map_is_on_the_input_side() -> None:
    plan = plan_for(ToyViT(patch=4), ToyViT(patch=2, width=16))
    patch = next(pair for pair in plan.pairs if pair.target.role == "patch")
    assert torch.equal(patch.input_map, patch_resize((3, 4, 4), (3, 2, 2)))
    assert all(pair.input_map is None for pair in plan.pairs if pair is not patch)
