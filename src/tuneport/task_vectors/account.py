"""How much of a fine-tune's change moves, and what is left behind: shares of the squared norm of the change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A tensor that the fine-tune changed, or the part of a fused one that is a layer."""

    tensor: str  # its name in the source's files; of a layer, the layer's name
    kind: str  # what it is, in the plural
    square: float  # the squared norm of its change
    targets: tuple[str, ...]  # the parameters of the target that take it up
    reason: str  # why there are none


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
