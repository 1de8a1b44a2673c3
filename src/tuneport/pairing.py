"""The plan of a transfer: which source layer each target layer takes its update from.

Layers pair by role, blocks by the depth rule. Every target parameter is either in a pair or in `kept`, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import PairingError, first_of
from .layers import Layer, LooseTensor
from .types import Sides

DepthRule = Callable[[int, int, int], int]
Roles = Mapping[str, str | None]

# The layers of a gated feed-forward and of a plain one that do the same; a gate has no counterpart.
COUNTERPARTS = {"up": "fc1", "down": "fc2", "fc1": "up", "fc2": "down", "gate": None}


@dataclass(frozen=True, eq=False)
class LayerPair:
    """A target layer and the source layer it takes its update from.

    `input_map` and `output_map` are fixed maps (d_A, d_B) of signals in one space (pixels, class logits); None for a
    map that alignment finds.
    """

    source: Layer
    target: Layer
    input_map: Tensor | None = None
    output_map: Tensor | None = None

    def __repr__(self) -> str:
        return f"LayerPair({self.source.name} -> {self.target.name})"

    def wanted(self, signals: Iterable[str]) -> frozenset[str]:
        """The signals that are measured at this pair: none of a side with a fixed map."""
        fixed = {"input", "input_gradient"} if self.input_map is not None else set()
        fixed |= {"output", "output_gradient"} if self.output_map is not None else set()
        return frozenset(signals) - fixed

    def widths(self, signal: str) -> tuple[int, int]:
        """The widths of a signal in source and target, or the target's gradient of the weight, which has one side."""
        if signal == "weight_gradient":
            return self.target.out_features, self.target.in_features
        if signal in ("input", "input_gradient"):
            return self.source.in_features, self.target.in_features
        return self.source.out_features, self.target.out_features


@dataclass(frozen=True)
class LoosePair:
    """A loose tensor of the target and the source tensor in the same place, for methods that move those."""

    source: LooseTensor
    target: LooseTensor


@dataclass(frozen=True)
class Kept:
    """A tensor that is not transported, and why."""

    tensor: str
    reason: str


@dataclass(frozen=True, eq=False)
class Plan:
    """Layer pairs, loose pairs, target tensors kept, source tensors left behind, and all layers of the target."""

    pairs: tuple[LayerPair, ...]
    loose: tuple[LoosePair, ...] = ()
    kept: tuple[Kept, ...] = ()
    dropped: tuple[Kept, ...] = ()
    source_blocks: Mapping[str, int] = field(default_factory=dict)
    target_blocks: Mapping[str, int] = field(default_factory=dict)
    target_layers: tuple[Layer, ...] = ()

    def __repr__(self) -> str:
        counts = f"{len(self.pairs)} pairs, {len(self.loose)} loose, {len(self.kept)} kept, {len(self.dropped)} dropped"
        return f"Plan({counts})"


def keep_layers(layers: Iterable[Layer], reason: str) -> list[Kept]:
    """The weights and biases of layers as tensors that are kept."""
    return [Kept(name, reason) for layer in layers for name in (layer.name, layer.bias) if name is not None]


def blocks_of(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """Consecutive pairs of one block of the target together."""
    return [list(group) for _, group in groupby(pairs, key=lambda pair: (pair.target.stack, pair.target.block))]


def nearest_block(block: int, source_depth: int, target_depth: int) -> int:
    """The paper's depth rule: target block j takes source block floor(j (D_A - 1) / (D_B - 1) + 1/2).

    Ties go up; a one-block target takes the last source block.

    >>> [nearest_block(j, 6, 3) for j in range(3)], [nearest_block(j, 2, 4) for j in range(4)]
    ([0, 3, 5], [0, 0, 1, 1])
    """
    if target_depth == 1:
        return source_depth - 1
    steps = target_depth - 1
    return (2 * block * (source_depth - 1) + steps) // (2 * steps)


def pair_layers(
    source: Sequence[Layer],
    target: Sequence[Layer],
    *,
    loose: Sides[Sequence[LooseTensor]] | None = None,
    roles: Roles | None = None,
    depth_rule: DepthRule = nearest_block,
    output_maps: Mapping[str, Tensor] | None = None,
    blocks: Sides[Mapping[str, int]] | None = None,
) -> Plan:
    """Pair every target layer with a source layer and say what stays.

    Raises PairingError if a source role of a block has no place in the target: that part of the change would be lost.

    Args:
        loose: the tensors of both models outside layers.
        roles: source roles to target roles where names differ; None leaves a role behind.
        depth_rule: the source block for (target block, depth of the source, depth of the target).
        output_maps: fixed output maps of roles whose outputs are in one space, such as class logits.
        blocks: the depth of each stack in both models, if not all of its layers are given.
    """
    roles, loose = roles or {}, loose or Sides((), ())
    stacks = _pair_stacks(source, target)
    _check_roles(source, target, roles, stacks)
    depth_a, depth_b = blocks or (count_blocks(source), count_blocks(target))
    by_place = {(layer.stack, layer.block, roles.get(layer.role, layer.role)): layer for layer in source}

    def place(part: Layer | LooseTensor) -> tuple[str, int | None, str]:
        if part.block is None or part.stack not in stacks:
            return part.stack, part.block, part.role
        stack = stacks[part.stack]
        return stack, depth_rule(part.block, depth_a[stack], depth_b[part.stack]), part.role

    pairs, kept = [], []
    for layer in target:
        partner = by_place.get(place(layer))
        if partner is None:
            stack, block, role = place(layer)
            reason = f"the source has no layer with the role {role}"
            if any(known[0] == stack and known[2] == role for known in by_place):
                reason = f"source block {block} has no change in the role {role}"
            kept += keep_layers([layer], reason)
            continue
        pairs.append(LayerPair(partner, layer, _patch_map(partner, layer), (output_maps or {}).get(layer.role)))
        if layer.bias is not None and partner.bias is None:
            kept.append(Kept(layer.bias, "the source layer has no bias"))
    loose_at = {(part.stack, part.block, roles.get(part.role, part.role)): part for part in loose.source}
    loose_pairs = [LoosePair(loose_at[place(part)], part) for part in loose.target if place(part) in loose_at]
    kept += [Kept(part.name, f"{part.kind}: the target keeps its own") for part in loose.target]
    used, there, dropped = {pair.source.name for pair in pairs}, {layer.role for layer in target}, []
    for layer in source:
        if layer.name not in used:
            taken = roles.get(layer.role, layer.role) in there and layer.block is not None
            no_block = taken and layer.stack in stacks.values()
            no_role = f"the target has no layer with the role {layer.role}"
            dropped.append(Kept(layer.name, "no target block takes this source block" if no_block else no_role))
    dropped += [
        Kept(pair.source.bias, "the target layer has no bias")
        for pair in pairs
        if pair.source.bias is not None and pair.target.bias is None
    ]
    if not pairs:
        names = [first_of(dict.fromkeys(layer.role for layer in side), 12) or "none" for side in (source, target)]
        raise PairingError(
            f"no layer of the target has a partner in the source: source roles {names[0]}; target roles {names[1]}. "
            "Pass roles={...} or pairs=[...], or see docs/extending.md."
        )
    _check_maps(pairs)
    kept, dropped = list(dict.fromkeys(kept)), list(dict.fromkeys(dropped))  # a fused bias is named once
    return Plan(tuple(pairs), tuple(loose_pairs), tuple(kept), tuple(dropped), depth_a, depth_b, tuple(target))


def check_pairs(pairs: Iterable[LayerPair]) -> None:
    """Check pairs given by hand: each target layer once, fixed maps of the right shape."""
    pairs = list(pairs)
    for name, count in Counter(pair.target.name for pair in pairs).items():
        if count > 1:
            raise PairingError(f"target layer {name} is paired twice; give each target layer one source.")
    _check_maps(pairs)


def patch_resize(source: tuple[int, ...], target: tuple[int, ...]) -> Tensor:
    """The linear map P (d_A, d_B) with `P x_B = x_A`: a target patch resized to the source's patch size.

    Equal sizes give the identity.
    """
    channels, height, width = target
    basis = torch.eye(channels * height * width, dtype=torch.float64).reshape(-1, channels, height, width)
    if source[1:] == target[1:]:
        return basis.flatten(1).T
    return F.interpolate(basis, size=source[1:], mode="bilinear", antialias=True).flatten(1).T


def _patch_map(source: Layer, target: Layer) -> Tensor | None:
    if source.kernel is None or target.kernel is None:
        return None
    if source.kernel[0] != target.kernel[0]:
        raise PairingError(
            f"{source.name} reads {source.kernel[0]} channels and {target.name} reads {target.kernel[0]}; "
            "pixels of different colour spaces are not aligned."
        )
    return patch_resize(source.kernel, target.kernel)


def _pair_stacks(source: Sequence[Layer], target: Sequence[Layer]) -> dict[str, str]:
    """Target stack -> source stack: by name, or one to one in order where the counts agree."""
    source_stacks, target_stacks = list(count_blocks(source)), list(count_blocks(target))
    named = {stack: stack for stack in target_stacks if stack in source_stacks}
    if len(source_stacks) == len(target_stacks) != len(named):
        return dict(zip(target_stacks, source_stacks, strict=True))
    if target_stacks and not named:
        raise PairingError(
            f"the source has block stacks {source_stacks or 'none'} and the target {target_stacks}: name one stack on "
            "each side, or pass pairs=[...]."
        )
    return named


def count_blocks(layers: Sequence[Layer]) -> dict[str, int]:
    """The number of blocks of each stack."""
    depths: dict[str, int] = {}
    for layer in layers:
        if layer.block is not None:
            depths[layer.stack] = max(depths.get(layer.stack, 0), layer.block + 1)
    return depths


def _check_roles(source: Sequence[Layer], target: Sequence[Layer], roles: Roles, stacks: Mapping[str, str]) -> None:
    known = {layer.role for layer in source}
    if unknown := sorted(set(roles) - known):
        raise PairingError(f"roles names {first_of(unknown)}, but the source has only {first_of(sorted(known), 30)}.")
    for target_stack, source_stack in stacks.items():
        wanted = list(dict.fromkeys(layer.role for layer in source if layer.stack == source_stack))
        there = list(dict.fromkeys(layer.role for layer in target if layer.stack == target_stack))
        missing = [role for role in wanted if roles.get(role, role) not in (None, *there)]
        if missing:
            spare = [role for role in there if role not in wanted]
            likely = {role: COUNTERPARTS[role] for role in missing if COUNTERPARTS.get(role, "") in (None, *spare)}
            others = iter([role for role in spare if role not in likely.values()])
            guess = {role: likely[role] if role in likely else next(others, None) for role in missing}
            listed = ", ".join(f'"{role}": ' + (f'"{other}"' if other else "None") for role, other in guess.items())
            raise PairingError(
                f"source blocks {source_stack} have roles {', '.join(wanted)}; target blocks {target_stack} have "
                f"{', '.join(there)} and no {', '.join(missing)}. Pass `roles={{{listed}}}` or see "
                "docs/extending.md."
            )


def _check_maps(pairs: Iterable[LayerPair]) -> None:
    for pair in pairs:
        for side, given, shape in (
            ("input", pair.input_map, (pair.source.in_features, pair.target.in_features)),
            ("output", pair.output_map, (pair.source.out_features, pair.target.out_features)),
        ):
            if given is not None and tuple(given.shape) != shape:
                raise PairingError(
                    f"the fixed {side} map of {pair.target.name} must have shape {shape}, got {tuple(given.shape)}."
                )
