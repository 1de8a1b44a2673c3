"""The sums of all pairs that a method needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from typing_extensions import TypeVar

from ..errors import TuneportError
from .covariance import CrossCovariance

Key = tuple[str, str]  # target layer, signal


class PairSum(Protocol):
    """A sum over paired tokens, as `measure_pairs` fills it: `update` adds rows, the energies show NaN and Inf."""

    source_energy: Tensor
    target_energy: Tensor

    def update(self, source: Tensor, target: Tensor) -> None: ...


S = TypeVar("S", bound=PairSum, default=CrossCovariance)


class WeightGradient:
    """Per-sample gradients of one layer's weight and bias, summed and as sums of their signs (votes)."""

    _TENSORS = ("total", "votes", "bias_total", "bias_votes")

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
        return self.from_state(self.samples + other.samples, lambda name: getattr(self, name) + getattr(other, name))

    def state(self) -> tuple[int, dict[str, Tensor]]:
        """The number of samples and named tensors, from which `from_state` restores this sum to the bit."""
        return self.samples, {name: getattr(self, name) for name in self._TENSORS}

    @classmethod
    def from_state(cls, samples: int, read: Callable[[str], Tensor]) -> WeightGradient:
        """The sum over `samples`; `read` gives its tensors by name, on the device where it is to be."""
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
class Statistics(Generic[S]):
    """Measured sums: cross-covariances by (target layer, signal), weight gradients by target layer.

    Layers that read the same tensor (q, k, v) share one object. `passes` counts the forward and backward passes per
    model. `Statistics` alone means sums of type CrossCovariance; diagnostics put in their own (`PairSum`).
    """

    covariances: Mapping[Key, S] = field(default_factory=dict)
    weight_gradients: Mapping[str, WeightGradient] = field(default_factory=dict)
    samples: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)

    def __contains__(self, key: object) -> bool:
        return key in self.covariances

    def __iter__(self) -> Iterator[Key]:
        return iter(self.covariances)

    def __add__(self: Statistics, other: Statistics) -> Statistics:
        """The statistics of both sets of samples together; shared sums stay shared."""
        if not other.passes:
            return self
        if not self.passes:
            return other
        if set(self.covariances) != set(other.covariances):
            raise TuneportError("statistics of different layers or signals cannot be added.")
        sums: dict[tuple[int, int], CrossCovariance] = {}
        covariances = {}
        for key, first in self.covariances.items():
            second = other.covariances[key]
            pair = (id(first), id(second))
            if pair not in sums:
                sums[pair] = first + second
            covariances[key] = sums[pair]
        gradients = {name: first + other.weight_gradients[name] for name, first in self.weight_gradients.items()}
        passes = {name: count + other.passes[name] for name, count in self.passes.items()}
        return Statistics(covariances, gradients, self.samples + other.samples, passes)

    def extend(self: Statistics, more: Statistics) -> Statistics:
        """Add sums of some of these signals over further samples; shared sums stay shared."""
        sums: dict[int, CrossCovariance] = {}
        covariances = {}
        for key, own in self.covariances.items():
            if id(own) not in sums:
                sums[id(own)] = own + more.covariances[key] if key in more.covariances else own
            covariances[key] = sums[id(own)]
        passes = {name: count + more.passes.get(name, 0) for name, count in self.passes.items()}
        return Statistics(covariances, self.weight_gradients, self.samples, passes)
