"""Which layers a task vector moves, and of every tensor that stays or is left behind, why.

`pairing` knows layers alone; here the fine-tune, exclusions and classes of two models come in. Nothing is silent: a
tensor of the target is moved or listed with a reason, and so is what the fine-tune changed and no layer takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import PairingError, first_of
from ..job import Job
from ..layers import Layer, LooseTensor
from ..methods import Method
from ..models.base import Model
from ..pairing import (
    KEPT_BY_KIND,
    DepthRule,
    Kept,
    LayerPair,
    Plan,
    check_pairs,
    count_blocks,
    nearest_block,
    pair_layers,
)
from ..task_vectors.vector import TaskVector

NO_PARAMETER = "no parameter of the model that the configuration describes"


def plan_of(
    source: Model,
    target: Model,
    vector: TaskVector,
    *,
    pairs: Sequence[LayerPair] | None = None,
    roles: Mapping[str, str | None] | None = None,
    depth_rule: DepthRule = nearest_block,
    exclude: Sequence[str] = (),
) -> Plan:
    """Pair the layers that a task vector changes, and say of every other tensor of the target why it stays."""
    apart = _vocabularies_apart(source, target)
    source = replace(source, vocabulary_head=()) if apart else source
    plan = _paired(source, target, vector, roles, depth_rule, exclude) if pairs is None else _given(pairs, vector)
    more = [Kept(name, "excluded") for name in target.file_names if target.matches(name, exclude)]
    more += [Kept(*item) for item in target.outside.items()]
    if pairs is not None:
        more += [Kept(name, "not in the pairs that were given") for name in target.file_names]
    kept = (*apart, *_unchanged(plan, source, vector), *more)
    return replace(plan, kept=kept, target_layers=target.layers)


def _paired(
    source: Model,
    target: Model,
    vector: TaskVector,
    roles: Mapping[str, str | None] | None,
    depth_rule: DepthRule,
    exclude: Sequence[str],
) -> Plan:
    """The layers that a task vector changes, paired by role and depth."""

    def included(layer: Layer, model: Model) -> Layer:
        without = layer.bias is not None and (
            model.matches(layer.bias, exclude) or (model is source and layer.bias not in vector)
        )
        return replace(layer, bias=None) if without else layer

    source_layers = [
        included(layer, source)
        for layer in source.layers
        if layer.weight in vector and not source.matches(layer.weight, exclude)
    ]
    target_layers = [included(layer, target) for layer in target.layers if not target.matches(layer.weight, exclude)]

    def loose(model: Model) -> list[LooseTensor]:
        return [part for part in (*model.loose, *model.vocabulary_head) if not model.matches(part.name, exclude)]

    return pair_layers(
        source_layers,
        target_layers,
        source_loose=[part for part in loose(source) if part.name in vector],
        target_loose=loose(target),
        roles=roles,
        depth_rule=depth_rule,
        output_maps=_class_map(source, target),
        source_blocks=count_blocks(source.layers),
        target_blocks=count_blocks(target.layers),
    )


def _given(pairs: Sequence[LayerPair], vector: TaskVector) -> Plan:
    """The pairs that a user gives, of layers that a task vector changes."""
    check_pairs(pairs)
    unchanged = [pair.source.weight for pair in pairs if pair.source.weight not in vector]
    if unchanged or not pairs:
        found = f"the task vector has no {first_of(unchanged)}" if unchanged else "pairs is empty"
        raise PairingError(f"{found}: there is nothing to transfer. Pair layers that the fine-tune changed.")
    return Plan(tuple(pairs))


def _unchanged(plan: Plan, source: Model, vector: TaskVector) -> Iterator[Kept]:
    """What is kept, where the source has a partner after all and only the fine-tune left it as it was."""
    biased = {layer.name for layer in source.layers if layer.bias is not None and layer.bias not in vector}
    still = {pair.target.bias for pair in plan.pairs if pair.source.bias is None and pair.source.name in biased}
    roles = {f"the source has no layer with the role {layer.role}": layer.role for layer in source.layers}
    for item in plan.kept:
        if item.tensor in still:
            yield Kept(item.tensor, "the fine-tune did not change this bias")
        elif item.reason in roles:
            yield Kept(item.tensor, f"the fine-tune changed no layer with the role {roles[item.reason]}")
        else:
            yield item


def _vocabularies_apart(source: Model, target: Model) -> list[Kept]:
    """The target's head, where it scores other tokens; without both tokenizers, the number of tokens has to do."""
    source_head, target_head = source.vocabulary_head, target.vocabulary_head
    if not source_head or not target_head:
        return []
    if source_head[0].shape[0] == target_head[0].shape[0] and (
        source.reader is None or target.reader is None or source.reader.same_tokens(target.reader)
    ):
        return []
    return [
        Kept(part.name, "head over another vocabulary than the source's: the target keeps its own")
        for part in target_head
    ]


def _class_map(source: Model, target: Model) -> dict[str, Tensor]:
    """Class logits of one label set are one space: the map only puts the classes in the target's order."""
    source_classes, target_classes = source.classes, target.classes
    distinct = len(set(source_classes)) == len(source_classes)
    if not source_classes or sorted(source_classes) != sorted(target_classes) or not distinct:
        return {}
    matrix = torch.zeros(len(source_classes), len(target_classes), dtype=torch.float64)
    for index, name in enumerate(source_classes):
        matrix[index, target_classes.index(name)] = 1.0
    return {"classifier": matrix}


def left_behind(job: Job, method: Method) -> tuple[Kept, ...]:
    """What the fine-tune changed in the source that no target tensor takes up."""
    stays_there = {item.tensor for item in method.kept(job.plan)}
    taken = {pair.source.name for pair in job.plan.loose if method.moves_loose and pair.target.name not in stays_there}
    stays = [
        Kept(part.name, KEPT_BY_KIND[part.kind].replace("the target keeps its own", "not moved by this method"))
        for part in job.source.loose
        if part.name in job.task_vector and part.name not in taken and job.task_vector.changes(part.name)
    ]
    stays += [
        Kept(name, reason)
        for name, reason in job.source.outside.items()
        if name in job.task_vector and name not in taken and job.task_vector.changes(name)
    ]
    named = (Kept(job.source.file_names.get(item.tensor, item.tensor), item.reason) for item in stays)
    return (*job.plan.dropped, *named)


def not_transported_by(job: Job, moved: TaskVector, kept: Iterable[Kept]) -> tuple[Kept, ...]:
    """Every tensor of the target's files that stays as it was, with the reason, in the order of the files."""
    reasons: dict[str, str] = {}
    whole = {layer.name: layer.weight for layer in job.target.layers if layer.weight not in moved}
    for item in (*kept, *job.plan.kept):  # the method knows the nearer reason
        tensor = whole.get(item.tensor, item.tensor)  # all parts of a fused weight stay: name it once
        stored = job.target.file_names.get(tensor, tensor)
        if item.tensor not in moved:
            reasons.setdefault(stored, item.reason)
    changed = {job.target.file_names.get(name, name) for name in moved}
    listed = [Kept(name, reasons.pop(name, NO_PARAMETER)) for name in job.target.tensors if name not in changed]
    return (*listed, *(Kept(name, reason) for name, reason in reasons.items()))
