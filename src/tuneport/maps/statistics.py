"""The statistics that a method needs: sums over the tokens of all layer pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import TuneportError
from .covariance import CrossCovariance

Key = tuple[str, str]  # target layer, signal


class WeightGradient:
    """Sums of one layer's per-sample weight and bias gradients, and sums of their signs (votes)."""

    _TENSORS = ("total", "votes", "bias_total", "bias_votes")

    def __init__(self, shape: tuple[int, int], *, device: torch.device | str | None = None) -> None:
        self.total = torch.zeros(shape, device=device, dtype=torch.float64)
        self.votes = torch.zeros(shape, device=device, dtype=torch.int32)
        self.bias_total = torch.zeros(shape[:1], device=device, dtype=torch.float64)
        self.bias_votes = torch.zeros(shape[:1], device=device, dtype=torch.int32)
        self.samples = 0

    def update(self, inputs: Tensor, gradients: Tensor, chunk: int = 16) -> None:
        """Add samples: layer inputs (N, T, d_in) and output gradients (N, T, d_out).

        The gradient of a sample is computed in at least float32, since half precision overflows; sums are in float64.
        """
        for x, g in zip(inputs.split(chunk), gradients.split(chunk), strict=True):
            x, g = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (x, g))
            weight, bias = torch.einsum("nto,nti->noi", g, x), g.sum(1)
            self.total += weight.sum(0, dtype=self.total.dtype)
            self.votes += weight.sign().sum(0).to(self.votes.dtype)
            self.bias_total += bias.sum(0, dtype=self.total.dtype)
            self.bias_votes += bias.sign().sum(0).to(self.votes.dtype)
        self.samples += len(inputs)

    def add_sample(self, gradient: Tensor) -> None:
        """Add the gradient of one sample with respect to a tensor of any shape."""
        gradient = gradient.reshape(self.total.shape)
        self.total += gradient
        self.votes += gradient.sign().to(self.votes.dtype)
        self.samples += 1

    def __add__(self, other: WeightGradient) -> WeightGradient:
        """The sum over both sets of samples."""
        return self.from_state(self.samples + other.samples, lambda name: getattr(self, name) + getattr(other, name))

    def state(self) -> tuple[int, dict[str, Tensor]]:
        """The number of samples and named tensors; `from_state` restores the same bits from them."""
        return self.samples, {name: getattr(self, name) for name in self._TENSORS}

    @classmethod
    def from_state(cls, samples: int, read: Callable[[str], Tensor]) -> WeightGradient:
        """Restore the sum over `samples`; `read` returns its tensors by name, on the device of the sum."""
        restored = WeightGradient((0, 0))
        restored.samples = samples
        for name in cls._TENSORS:
            setattr(restored, name, read(name))
        return restored

    def reduce(self, owner: int) -> WeightGradient:
        """The sum over all processes, valid in process `owner`."""
        count = torch.tensor(self.samples, device=self.total.device)
        parts = {name: tensor.clone() for name, tensor in self.state()[1].items()}
        for part in parts.values():
            dist.reduce(part, owner)
        dist.all_reduce(count)
        return self.from_state(int(count), parts.__getitem__)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Measured sums: cross-covariances by (target layer, signal), weight gradients by target layer or loose tensor.

    Layers that read the same tensor (q, k, v) share one object. `passes` are forward and backward passes per model.
    """

    covariances: Mapping[Key, CrossCovariance] = field(default_factory=dict)
    weight_gradients: Mapping[str, WeightGradient] = field(default_factory=dict)
    samples: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        sums = f"{len(self.covariances)} sums, {len(self.weight_gradients)} weight gradients"
        return f"Statistics({sums}, {self.samples} samples)"

    def __contains__(self, key: object) -> bool:
        return key in self.covariances

    def __iter__(self) -> Iterator[Key]:
        return iter(self.covariances)

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both sets of samples; shared sums stay shared."""
        if not other.passes:
            return self
        if not self.passes:
            return other
        if set(self.covariances) != set(other.covariances):
            raise TuneportError("statistics of different layers or signals cannot be added.")
        total = self.extend(other)
        gradients = {name: first + other.weight_gradients[name] for name, first in self.weight_gradients.items()}
        return replace(total, weight_gradients=gradients, samples=self.samples + other.samples)

    def extend(self, more: Statistics) -> Statistics:
        """Add sums of some of these signals over further samples; shared sums stay shared."""
        sums: dict[tuple[int, int], CrossCovariance] = {}
        covariances = {}
        for key, own in self.covariances.items():
            other = more.covariances.get(key)
            pair = (id(own), id(other))
            if pair not in sums:
                sums[pair] = own if other is None else own + other
            covariances[key] = sums[pair]
        passes = {name: count + more.passes.get(name, 0) for name, count in self.passes.items()}
        return replace(self, covariances=covariances, passes=passes)
