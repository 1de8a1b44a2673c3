"""The raw signals of one model, for comparisons with sums."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from tuneport.layers import Layer
from tuneport.measure.capture import count_samples
from tuneport.measure.signals import NEEDS_BACKWARD, Recorder, frozen
from tuneport.types import Loss


def watch(
    model: nn.Module,
    layers: Iterable[Layer] | Mapping[Layer, Collection[str]],
    batch: Any,
    loss: Loss,
    signals: Collection[str],
    size: int | None = None,
) -> dict[tuple[str, str], list[Tensor]]:
    """Run one model once and return the raw signals (N, T, d) by (layer name, signal), a list entry per call.

    Layers that read one tensor get one copy of it. A mapping of layers gives the signals of each.
    """
    kept: dict[tuple[str, str], dict[int, Tensor]] = {}
    copies: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def keep(layer: Layer, signal: str, call: int, tensor: Tensor, _inputs: Tensor | None = None) -> None:
        if tensor not in copies:
            copies[tensor] = tensor.clone()
        kept.setdefault((layer.name, signal), {})[call] = copies[tensor]

    given = layers if isinstance(layers, Mapping) else dict.fromkeys(layers, signals)
    wanted = {layer: frozenset(names) for layer, names in given.items()}
    with frozen(model):
        backward = bool(NEEDS_BACKWARD & set(signals))
        Recorder(model, wanted, keep, size or count_samples(batch), backward).run(batch, loss)
    return {key: [calls[call] for call in sorted(calls)] for key, calls in kept.items()}
