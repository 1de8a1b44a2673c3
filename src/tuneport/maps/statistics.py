"""The sums of all pairs that a method needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import TuneportError
from .covariance import CrossCovariance
from .procrustes import Alignment, Completion, held_bytes, procrustes_together


class WeightGradient:
    """Per-sample gradients of one layer's weight and bias, summed and as sums of their signs (votes)."""

    def __init__(self, shape: tuple[int, int], *, device: torch.device | str | None = None) -> None:
        self.total = torch.zeros(shape, device=device, dtype=torch.float64)
        self.votes = torch.zeros(shape, device=device, dtype=torch.int32)
        self.bias_total = torch.zeros(shape[:1], device=device, dtype=torch.float64)
        self.bias_votes = torch.zeros(shape[:1], device=device, dtype=torch.int32)
        self.samples = 0

    def update(self, inputs: Tensor, gradients: Tensor, chunk: int = 16) -> None:
        """Add samples: layer inputs (N, T, d_in) and output gradients (N, T, d_out).

        A sample's gradient is a product in float32 at least, for half precision would overflow; sums are in float64.
        """
        for x, g in zip(inputs.split(chunk), gradients.split(chunk), strict=True):
            x, g = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (x, g))
            weight, bias = torch.einsum("nto,nti->noi", g, x), g.sum(1)
            self.total += weight.sum(0, dtype=self.total.dtype)
            self.votes += weight.sign().sum(0).to(self.votes.dtype)
            self.bias_total += bias.sum(0, dtype=self.total.dtype)
            self.bias_votes += bias.sign().sum(0).to(self.votes.dtype)
        self.samples += len(inputs)

    def __add__(self, other: WeightGradient) -> WeightGradient:
        """The statistic of both sets of samples together."""
        total = WeightGradient((self.total.shape[0], self.total.shape[1]), device=self.total.device)
        for name in ("total", "votes", "bias_total", "bias_votes", "samples"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total


@dataclass(frozen=True, eq=False)
class Statistics:
    """What was measured: cross-covariances by (target layer, signal), weight gradients by target layer.

    Layers that read the same tensor (q, k, v) hold the same CrossCovariance object, and `align` solves it
    once. `passes` counts the forward and backward passes per model.
    """

    covariances: Mapping[tuple[str, str], CrossCovariance] = field(default_factory=dict)
    weight_gradients: Mapping[str, WeightGradient] = field(default_factory=dict)
    samples: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)
    _solved: dict[tuple[int, Completion], Alignment] = field(default_factory=dict, repr=False)

    def __contains__(self, key: object) -> bool:
        return key in self.covariances

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.covariances)

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both sets of samples together; what was shared stays shared."""
        if not other.passes:
            return self
        if not self.passes:
            return other
        if set(self.covariances) != set(other.covariances):
            raise TuneportError("statistics of different layers or signals cannot be added.")
        sums: dict[tuple[int, int], CrossCovariance] = {}
        covariances = {}
        for key, ours in self.covariances.items():
            theirs = other.covariances[key]
            pair = (id(ours), id(theirs))
            if pair not in sums:
                sums[pair] = ours + theirs
            covariances[key] = sums[pair]
        gradients = {name: ours + other.weight_gradients[name] for name, ours in self.weight_gradients.items()}
        passes = {name: count + other.passes[name] for name, count in self.passes.items()}
        return Statistics(covariances, gradients, self.samples + other.samples, passes)

    def extended(self, more: Statistics) -> Statistics:
        """With what was measured of some of these signals on further samples; what was shared stays shared."""
        sums: dict[int, CrossCovariance] = {}
        covariances = {}
        for key, ours in self.covariances.items():
            if id(ours) not in sums:
                sums[id(ours)] = ours + more.covariances[key] if key in more.covariances else ours
            covariances[key] = sums[id(ours)]
        passes = {name: count + more.passes.get(name, 0) for name, count in self.passes.items()}
        return Statistics(covariances, self.weight_gradients, self.samples, passes)

    def align(self, layer: str, signal: str, completion: Completion = "svd") -> Alignment:
        """The Procrustes map of one signal at one target layer, solved once and remembered while there is room."""
        self.solve([(layer, signal)], completion)
        return self._solved[id(self.covariances[layer, signal]), completion]

    def solve(self, keys: Iterable[tuple[str, str]], completion: Completion = "svd") -> None:
        """Solve the maps of several layers and signals, together where that is faster; `align` then gives them.

        Maps solved earlier are forgotten, oldest first, when all together take more than `held_bytes`.
        """
        wanted = {(id(self.covariances[key]), completion): self.covariances[key] for key in keys}
        room = held_bytes(next((covariance.device for covariance in wanted.values()), None))
        known = {key: self._solved[key] for key in wanted if key in self._solved}
        wanted = {key: covariance for key, covariance in wanted.items() if key not in known}
        if not wanted:  # maps that were solved together stay together
            return
        found = procrustes_together(list(wanted.values()), completion)
        asked = {**known, **dict(zip(wanted, found, strict=True))}
        earlier = [key for key in self._solved if key not in asked]
        held = sum(alignment.map.nbytes for alignment in (*self._solved.values(), *found))
        for key in earlier:
            if held > room:
                held -= self._solved.pop(key).map.nbytes
        self._solved.update(asked)

    def in_batches(self, groups: Sequence[Iterable[tuple[str, str]]]) -> Iterator[int]:
        """How many of the next groups of maps (blocks) to solve together.

        One on a CPU; on an accelerator as many as may be held, in batches of much the same size.
        """
        sizes, room = [], 0
        for keys in groups:
            covariances = {id(self.covariances[key]): self.covariances[key] for key in keys}
            sizes.append(sum(8 * covariance.shape[0] * covariance.shape[1] for covariance in covariances.values()))
            device = next((covariance.device for covariance in covariances.values()), None)
            if device is not None and device.type != "cpu":
                room = held_bytes(device)
        share = sum(sizes) / max(-(-sum(sizes) // room), 1) if room else 0.0
        count, held = 0, 0
        for size in sizes:
            if count and held + size > share:
                yield count
                count, held = 0, 0
            count, held = count + 1, held + size
        if count:
            yield count
