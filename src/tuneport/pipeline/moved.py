"""How much of a fine-tune's change moves, and what is left behind: shares of the squared norm of the change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..job import AddedTokens, Job, Part
from ..layers import Layer
from ..methods.entries import matrix_of
from ..pairing import KEPT_BY_KIND, Kept
from ..task_vectors.low_rank import as_dense, norm_of
from ..task_vectors.vector import TaskVector

TABLES = ("embedding", "vocabulary head")
NOT_MOVED = "not moved by this method"
KINDS = {  # of tensors outside layers, in the plural
    "normalisation": "norms",
    "position embedding": "position embeddings",
    "class token": "class tokens",
    "embedding": "embeddings",
    "vocabulary head": "vocabulary head",
    "logit scale": "temperature",
    "layer scale": "layer scales",
    "learnt token": "learnt tokens",
    "convolution": "convolutions",
}


def changed_parts(job: Job, moved: Collection[str], kept: Iterable[Kept] = ()) -> tuple[Part, ...]:
    """All parts that the fine-tune changed; `moved` and `kept` are a method's parameters of the target."""
    return tuple(part for part in _parts(job, moved, {item.tensor for item in kept}) if part.square > 0)


def account(parts: Iterable[Part], kept: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The share of the change that moves and what is left behind, for a record; `kept` are not written after all."""
    kept, parts = kept or {}, tuple(parts)
    total = sum(part.square for part in parts)
    left: dict[tuple[str, str, str], float] = {}
    for part in parts:
        if not [name for name in part.targets if name not in kept]:
            reason = kept[part.targets[0]] if part.targets else part.reason
            key = (part.tensor, reason, part.kind)  # layers share a fused bias
            left[key] = left.get(key, 0.0) + part.square
    behind = [
        {"tensor": tensor, "reason": reason, "kind": kind, "share": square / total}
        for (tensor, reason, kind), square in left.items()
    ]
    return {"moved_share": 1.0 - sum(left.values()) / total if total else 0.0, "left_behind": behind}


def _parts(job: Job, moved: Collection[str], stays: Collection[str]) -> Iterator[Part]:
    vector, source = job.task_vector, job.source
    reasons = {item.tensor: item.reason for item in job.plan.dropped}
    pairs: dict[str, list[Layer]] = {}
    for pair in job.plan.pairs:
        if pair.target.name not in stays:
            pairs.setdefault(pair.source.name, []).append(pair.target)
    for layer in source.layers:
        takers = pairs.get(layer.name, [])
        if layer.weight in vector:
            targets = tuple(target.weight for target in takers if target.weight in moved)
            square = norm_of(matrix_of(layer, vector[layer.weight])) ** 2
            yield Part(layer.name, "layers", square, targets, reasons.get(layer.name, NOT_MOVED))
        if layer.bias is not None and layer.bias in vector:
            targets = tuple(target.bias for target in takers if target.bias is not None and target.bias in moved)
            square = norm_of(layer.vector(as_dense(vector[layer.bias]))) ** 2
            reason = reasons.get(layer.bias, reasons.get(layer.name, NOT_MOVED))
            yield Part(source.file_names.get(layer.bias, layer.bias), "biases", square, targets, reason)
    loose = {pair.source.name: pair.target.name for pair in job.plan.loose if pair.target.name in moved}
    kinds = {part.name: part.kind for part in (*source.loose, *source.vocabulary_head)}
    owned = {name for layer in source.layers for name in (layer.weight, layer.bias)}
    added = job.added or AddedTokens()
    yield from added.parts
    for name in vector:
        if name not in owned:
            kind = kinds.get(name, "parameter")
            stated = KEPT_BY_KIND[kind].replace("the target keeps its own", NOT_MOVED)
            targets = (loose[name],) if name in loose else ()
            reason = source.outside.get(name, stated)
            yield Part(
                source.file_names.get(name, name),
                KINDS.get(kind, "other parameters"),
                _square_without(vector, name, added.rows if kind in TABLES else ()),
                targets,
                reason,
            )


def _square_without(vector: TaskVector, name: str, rows: Collection[int]) -> float:
    """The squared norm of a change, without these rows of it."""
    square, count = vector.norm(name) ** 2, vector.shape(name)[0] if rows else 0
    inside = [row for row in rows if row < count]
    return max(0.0, square - norm_of(vector.dense(name)[inside]) ** 2) if inside else square
