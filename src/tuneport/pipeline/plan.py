"""The layers that a task vector moves, a reason for every tensor that it does not move, and the account of both.

`pairing` knows layers only; this module adds the fine-tune, exclusions and classes of two models. Every tensor of the
target is moved or listed with a reason, and so is every change of the fine-tune that no target tensor takes.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..config import MeasureConfig
from ..errors import PairingError, first_of
from ..layers import Layer, LooseTensor
from ..methods.base import matrix_of
from ..models.base import MIXTURE, Model
from ..models.change import Change
from ..pairing import Kept, Plan, check_pairs, count_blocks, keep_layers, nearest_block, pair_layers
from ..task_vectors.low_rank import as_dense, norm_of
from ..task_vectors.vector import Part, TaskVector
from ..types import Sides

TABLES = ("embeddings", "vocabulary head")
NOT_MOVED = "not moved by this method"
FITTED = "fitted to the scores of the fine-tuned source, not moved"
NO_PARAMETER = "no parameter of the model that the configuration describes"


def make_plan(
    models: Sides[Model], vector: TaskVector, config: MeasureConfig, fitted: frozenset[str] = frozenset()
) -> Plan:
    """Pair the layers that a task vector changes, and say of every other tensor of the target why it stays.

    The parameters of the target that are `fitted` are not paired.
    """
    (source, target), pairs, exclude = models, config.pairs, config.exclude
    apart = _vocabularies_apart(source, target)
    if apart:
        source = replace(source, architecture=replace(source.architecture, vocabulary_head=()))
    unlike = [*_heads_apart(source, target, fitted), *_sequences_apart(source, target)] if pairs is None else []
    unpaired = {item.tensor for item in unlike}
    layers = tuple(layer for layer in target.architecture.layers if layer.weight not in unpaired)
    target = replace(target, architecture=replace(target.architecture, layers=layers))
    if pairs is None:
        source_layers, source_loose = _included(source, exclude, vector)
        target_layers, target_loose = _included(target, exclude)
        roles = config.roles
        if MIXTURE in target.architecture.outside.values():  # nothing takes what a dense source changed there
            there = {layer.role for layer in layers}
            roles = {layer.role: None for layer in source_layers if layer.role not in there} | dict(roles or {})
        plan = pair_layers(
            source_layers,
            target_layers,
            loose=Sides(source_loose, target_loose),
            roles=roles,
            depth_rule=config.depth_rule or nearest_block,
            output_maps=_class_map(source, target),
            blocks=Sides(count_blocks(source.architecture.layers), count_blocks(layers)),
        )
    else:
        check_pairs(pairs)
        unchanged = [pair.source.weight for pair in pairs if pair.source.weight not in vector]
        if unchanged or not pairs:
            found = f"the task vector has no {first_of(unchanged)}" if unchanged else "pairs is empty"
            raise PairingError(f"{found}: there is nothing to transfer. Pair layers that the fine-tune changed.")
        plan = Plan(tuple(pairs))
    more = [Kept(name, "excluded") for name in target.weights.file_names if target.matches(name, exclude)]
    more += [Kept(*item) for item in target.architecture.outside.items()]
    if pairs is not None:
        more += [Kept(name, "not in the pairs that were given") for name in target.weights.file_names]
    kept = (*apart, *unlike, *_unchanged(plan, source, vector), *more)
    return replace(plan, kept=kept, target_layers=layers)


def _heads_apart(source: Model, target: Model, fitted: frozenset[str]) -> list[Kept]:
    """The target's head, where it is fitted as a whole, or decides among other classes than the source's."""
    if fitted:
        made = target.head - target.classifier_parameters
        reasons = {True: "new part of the head: it stays as it is made", False: FITTED}
        return [Kept(name, reasons[name in made]) for name in sorted(fitted)]
    both = (*source.architecture.layers, *target.architecture.layers)
    counts = [layer.out_features for layer in both if layer.role == "classifier"]
    known = source.classifier is not None and target.classifier is not None
    if len(counts) < 2 or (not known and len(set(counts)) == 1) or _class_map(source, target):
        return []
    layers = [layer for layer in target.architecture.layers if layer.role == "classifier"]
    return keep_layers(layers, "classification layer for other classes: the target keeps its own")


def _sequences_apart(source: Model, target: Model) -> list[Kept]:
    """Layers of a Sequential that has other places in the source: the same number is another layer there."""
    places: list[dict[str, set[str]]] = [{}, {}]
    numbered = []
    for known, model in zip(places, (source, target), strict=True):
        for layer in model.architecture.layers:
            parent, _, number = layer.role.rpartition(".")
            if layer.block is None and number.isdecimal():
                known.setdefault(parent, set()).add(number)
                numbered += [(parent, layer)] if known is places[1] else []
    other = {parent for parent, numbers in places[1].items() if numbers != places[0].get(parent, numbers)}
    layers = [layer for parent, layer in numbered if parent in other]
    return keep_layers(layers, "layer of a Sequential of another depth than the source's: give both in pairs=[...]")


def _included(
    model: Model, exclude: Sequence[str], names: Container[str] | None = None
) -> tuple[list[Layer], list[LooseTensor]]:
    """The layers and loose tensors of a model, without those that are excluded or not among the names."""

    def has(name: str) -> bool:
        return (names is None or name in names) and not model.matches(name, exclude)

    layers = [layer for layer in model.architecture.layers if has(layer.weight)]
    layers = [layer if layer.bias is None or has(layer.bias) else replace(layer, bias=None) for layer in layers]
    return layers, [part for part in (*model.architecture.loose, *model.architecture.vocabulary_head) if has(part.name)]


def _unchanged(plan: Plan, source: Model, vector: TaskVector) -> Iterator[Kept]:
    """What is kept, with another reason where the source has a partner that the fine-tune did not change."""
    biased = {layer.name for layer in source.architecture.layers if layer.bias is not None and layer.bias not in vector}
    still = {pair.target.bias for pair in plan.pairs if pair.source.bias is None and pair.source.name in biased}
    roles = {f"the source has no layer with the role {layer.role}": layer.role for layer in source.architecture.layers}
    for item in plan.kept:
        if item.tensor in still:
            yield Kept(item.tensor, "the fine-tune did not change this bias")
        elif item.reason in roles:
            yield Kept(item.tensor, f"the fine-tune changed no layer with the role {roles[item.reason]}")
        else:
            yield item


def _vocabularies_apart(source: Model, target: Model) -> list[Kept]:
    """The target's head, if it scores other tokens; without both tokenizers, only their number is compared."""
    heads = Sides(source.architecture.vocabulary_head, target.architecture.vocabulary_head)
    readers = Sides(source.inputs.reader, target.inputs.reader)
    if not heads.source or not heads.target:
        return []
    same = readers.source is None or readers.target is None or readers.source.same_tokens(readers.target)
    if same and heads.source[0].shape[0] == heads.target[0].shape[0]:
        return []
    reason = "head over another vocabulary than the source's: the target keeps its own"
    return [Kept(part.name, reason) for part in heads.target]


def _class_map(source: Model, target: Model) -> dict[str, Tensor]:
    """The map between the class logits of one label set: it puts the classes in the target's order."""
    known, wanted = source.outputs.classes, target.outputs.classes
    if not known or sorted(known) != sorted(wanted) or len(set(known)) < len(known):
        return {}
    order = [wanted.index(name) for name in known]
    return {"classifier": torch.eye(len(order), dtype=torch.float64)[order]}


def not_transported_by(target: Model, plan: Plan, moved: Collection[str], kept: Iterable[Kept]) -> tuple[Kept, ...]:
    """Every tensor of the target's files that is not among the `moved`, with the reason, in the order of the files."""
    reasons: dict[str, str] = {}
    whole = {layer.name: layer.weight for layer in target.architecture.layers if layer.weight not in moved}
    for item in (*kept, *plan.kept):  # the reason of the method comes first
        tensor = whole.get(item.tensor, item.tensor)  # all parts of a fused weight stay: name it once
        stored = target.weights.file_names.get(tensor, tensor)
        if item.tensor not in moved:
            reasons.setdefault(stored, item.reason)
    changed = {target.weights.file_names.get(name, name) for name in moved}
    listed = [Kept(name, reasons.pop(name, NO_PARAMETER)) for name in target.weights.tensors if name not in changed]
    return (*listed, *(Kept(name, reason) for name, reason in reasons.items()))


def changed_parts(
    source: Model, change: Change, plan: Plan, moved: Collection[str], kept: Iterable[Kept] = ()
) -> tuple[Part, ...]:
    """All parts that the fine-tune changed; `moved` and `kept` are a method's parameters of the target."""
    stays = {item.tensor for item in kept}
    return tuple(part for part in _parts(source, change, plan, moved, stays) if part.square > 0)


def _parts(source: Model, change: Change, plan: Plan, moved: Collection[str], stays: Collection[str]) -> Iterator[Part]:
    vector, names = change.vector, source.weights.file_names
    reasons = {item.tensor: item.reason for item in plan.dropped}
    pairs: dict[str, list[Layer]] = {}
    for pair in plan.pairs:
        if pair.target.name not in stays:
            pairs.setdefault(pair.source.name, []).append(pair.target)
    for layer in source.architecture.layers:
        takers, reason = pairs.get(layer.name, []), reasons.get(layer.name, NOT_MOVED)
        if layer.weight in vector:
            targets = tuple(target.weight for target in takers if target.weight in moved)
            square = norm_of(matrix_of(layer, vector[layer.weight])) ** 2
            yield Part(layer.name, "layers", square, targets, reason)
        if layer.bias is not None and layer.bias in vector:
            targets = tuple(target.bias for target in takers if target.bias is not None and target.bias in moved)
            square = norm_of(layer.vector(as_dense(vector[layer.bias]))) ** 2
            yield Part(names.get(layer.bias, layer.bias), "biases", square, targets, reasons.get(layer.bias, reason))
    loose = {pair.source.name: (pair.target.name,) for pair in plan.loose if pair.target.name in moved}
    kinds = {part.name: part.kind for part in (*source.architecture.loose, *source.architecture.vocabulary_head)}
    owned = {name for layer in source.architecture.layers for name in (layer.weight, layer.bias)}
    yield from change.added.parts
    for name in vector:
        if name not in owned:
            kind = kinds.get(name, "other parameters")
            rows = [row for row in change.added.rows if row < vector.shape(name)[0]] if kind in TABLES else []
            inside = norm_of(vector.dense(name)[rows]) if rows else 0.0
            square = max(0.0, vector.norm(name) ** 2 - inside**2)
            reason = source.architecture.outside.get(name, f"{kind}: {NOT_MOVED}")
            yield Part(names.get(name, name), kind, square, loose.get(name, ()), reason)
