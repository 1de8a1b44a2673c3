"""The statistics that a method needs: sums over the tokens of all layer pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import TuneportError
from ..processes import from_all

PIECE = 16384  # tokens that are converted at once
TENSOR_PIECE = 2048  # tokens that tensor cores sum up in float32, at most 16 at once, and truncate: 1.5e-5 at worst
PIECE_ON_CPU = 512  # so that they stay in the caches
HALF_PIECE_ON_CPU = 4096
ROWS_ON_CPU = 256
BLOCK = 2**24  # numbers of a float32 product that are added to the sum at once
BLOCK_ON_CPU = 2**21
_FINE = 1e-6  # eps of signals that a model rounds at every step, not once
_ABOVE_NOISE = 4.0  # on tiny models and on trained ones, at most twice the noise was seen


class CrossCovariance:
    """Streaming `C = X_A^T X_B` over paired tokens (the matrix of eqs. 6 and 7), uncentred.

    Tokens are kept unsummed while they take less than half the memory of C, without those that are zero in either
    signal (many last gradients). The later sum has the same bits as a sum from the start.

    >>> covariance = CrossCovariance(2, 3)
    >>> covariance.update(torch.ones(5, 2), torch.ones(5, 3))
    >>> covariance.matrix.shape, covariance.tokens, covariance.matrix[0, 0].item()
    (torch.Size([2, 3]), 5, 5.0)
    """

    def __init__(self, source_width: int, target_width: int, *, device: torch.device | str | None = None) -> None:
        self.shape = (source_width, target_width)
        self.rows: list[tuple[Tensor, Tensor]] | None = []  # the unsummed tokens, by batch; None after they are summed
        self.source_energy = torch.zeros((), device=device, dtype=torch.float64)
        self.target_energy = torch.zeros((), device=device, dtype=torch.float64)
        self.tokens = 0
        self.signal_dtype = torch.float64
        self._sum: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.source_energy.device

    @property
    def matrix(self) -> Tensor:
        """C (d_A, d_B), computed at each access while the tokens are kept."""
        if self._sum is not None:
            return self._sum
        total = torch.zeros(self.shape, device=self.device, dtype=torch.float64)
        for source, target in self.rows or ():
            add_product(total, source, target)
        return total

    @matrix.setter
    def matrix(self, value: Tensor) -> None:
        self._sum, self.rows = value, None

    @property
    def nbytes(self) -> int:
        """The memory held now."""
        if self.rows is None:
            return 8 * self.shape[0] * self.shape[1]
        return sum(part.numel() * part.element_size() for pair in self.rows for part in pair)

    def update(self, source: Tensor, target: Tensor) -> None:
        """Add the tokens of one batch: source (M, d_A) and target (M, d_B), row i of both the same token."""
        if source.shape != (len(target), self.shape[0]) or target.shape != (len(target), self.shape[1]):
            wanted = f"(M, {self.shape[0]}) and (M, {self.shape[1]}) for M paired tokens"
            raise TuneportError(f"signals must be {wanted}, got {tuple(source.shape)} and {tuple(target.shape)}")
        self.signal_dtype = _coarser(self.signal_dtype, source.dtype, target.dtype)
        source, target = source.to(self.device), target.to(self.device)
        self.source_energy += energy(source)
        self.target_energy += energy(target)
        self.tokens += len(source)
        if self.rows is not None:
            source, target = _drop_zeros(source, target)
        more = source.numel() * source.element_size() + target.numel() * target.element_size()
        if self.rows is not None and not self.keeps_tokens(self.nbytes + more, self.shape):
            self.matrix = self.matrix  # from here on, summed
        if self.rows is None:
            add_product(self.matrix, source, target)
        elif len(source):
            self.rows.append((source.clone(), target.clone()))

    @property
    def whole(self) -> Tensor:
        """|X_A| |X_B|, an upper bound of <X_A R, X_B> for any orthogonal R."""
        return (self.source_energy * self.target_energy).sqrt()

    def cut(self, size: float, whole: float) -> float:
        """The rank cut of C with norm `size`, above the rounding of one signal; `whole` is |X_A| |X_B|.

        A direction that is empty in the narrower signal (the mean of a gradient behind a LayerNorm) holds rounding of
        eps |X_A| / sqrt(M d) per token, which the other signal turns into eps |X_A| |X_B| / sqrt(M d). With equal
        widths both are empty there. Cuts are in steps of four, so that many maps share one.
        """
        cut, eps = rank_cut(self.signal_dtype, torch.float64, max(self.shape)), torch.finfo(self.signal_dtype).eps
        if eps >= _FINE or not size > 0 or not self.tokens:
            return cut
        above = _ABOVE_NOISE * float(eps * whole / ((self.tokens * min(self.shape)) ** 0.5 * size)) / cut
        return cut * 4.0 ** math.ceil(math.log(above, 4)) if above > 1 else cut

    @property
    def most(self) -> int:
        """The largest rank that C can have by the number of tokens."""
        return self.tokens if self.rows is None else sum(len(source) for source, _ in self.rows)

    def few_tokens(self) -> tuple[Tensor, Tensor] | None:
        """The kept tokens (M, d_A) and (M, d_B), if a map is cheaper to solve from them than from C."""
        if not self.rows or 5 * self.most > 4 * min(self.shape):
            return None
        return torch.cat([source for source, _ in self.rows]), torch.cat([target for _, target in self.rows])

    def __add__(self, other: CrossCovariance) -> CrossCovariance:
        """The sum over both sets of tokens."""
        total = CrossCovariance(*self.shape, device=self.device)
        total.source_energy = self.source_energy + other.source_energy
        total.target_energy = self.target_energy + other.target_energy
        total.tokens = self.tokens + other.tokens
        total.signal_dtype = _coarser(self.signal_dtype, other.signal_dtype)
        kept = self.keeps_tokens(self.nbytes + other.nbytes, self.shape)
        if self.rows is not None and other.rows is not None and kept:
            total.rows = [*self.rows, *other.rows]
        else:
            total.matrix = self.matrix + other.matrix
        return total

    @staticmethod
    def keeps_tokens(nbytes: int, shape: tuple[int, int]) -> bool:
        """Whether tokens that take `nbytes` in both signals are kept, not summed."""
        return 2 * nbytes <= 8 * shape[0] * shape[1]

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON values and named tensors; `from_state` restores the same bits from them."""
        tensors = {"source_energy": self.source_energy, "target_energy": self.target_energy}
        if self.rows is None:
            tensors["matrix"] = self.matrix
        for index, (source, target) in enumerate(self.rows or ()):
            tensors |= {f"source.{index}": source, f"target.{index}": target}
        batches, dtype = None if self.rows is None else len(self.rows), str(self.signal_dtype).removeprefix("torch.")
        return {"shape": list(self.shape), "tokens": self.tokens, "signal_dtype": dtype, "batches": batches}, tensors

    @classmethod
    def from_state(cls, values: Mapping[str, Any], read: Callable[[str], Tensor]) -> CrossCovariance:
        """Restore a sum; `read` returns its tensors by name, on the device of the sum."""
        restored = CrossCovariance(*values["shape"])
        if values["batches"] is None:
            restored.matrix = read("matrix")
        else:
            restored.rows = [(read(f"source.{index}"), read(f"target.{index}")) for index in range(values["batches"])]
        restored.source_energy, restored.target_energy = read("source_energy"), read("target_energy")
        restored.tokens = int(values["tokens"])
        restored.signal_dtype = getattr(torch, values["signal_dtype"])
        return restored

    def reduce(self, owner: int) -> CrossCovariance:
        """The sum over all processes, valid in process `owner`. Overwrites this sum."""
        energies = float(self.source_energy), float(self.target_energy)
        everyone = from_all((self.tokens, self.signal_dtype, energies, self.nbytes, self.rows is None))
        total = CrossCovariance(*self.shape, device=self.device)
        total.tokens = sum(tokens for tokens, *_ in everyone)
        total.signal_dtype = _coarser(*(dtype for _, dtype, *_ in everyone))
        total.source_energy += sum(source for _, _, (source, _), *_ in everyone)
        total.target_energy += sum(target for _, _, (_, target), *_ in everyone)
        kept = self.keeps_tokens(sum(nbytes for *_, nbytes, _ in everyone), self.shape)
        if not kept or any(summed for *_, summed in everyone):
            total.matrix = self.matrix
            dist.reduce(total.matrix, owner)
            return total
        own = [torch.cat(parts).cpu() for parts in zip(*self.rows or (), strict=True)]
        gathered = (parts for parts in from_all(own) if parts)
        total.rows = [(source.to(self.device), target.to(self.device)) for source, target in gathered]
        return total


def _drop_zeros(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the tokens that are zero in either signal, which add nothing to C."""
    alive = source.any(dim=1) & target.any(dim=1)
    return (source, target) if bool(alive.all()) else (source[alive], target[alive])


def _coarser(*dtypes: torch.dtype) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def add_product(total: Tensor, source: Tensor, target: Tensor) -> None:
    """Add X_A^T X_B to a sum, one piece of rows at a time; its bits depend on these rows alone, not on earlier ones.

    Half-precision signals are multiplied into float32 sums, exactly, by tensor cores where there are some, and added by
    blocks of the product, so that no second matrix of the sum's size is needed.
    """
    halves = are_half(source.dtype, target.dtype)
    on_cuda = source.device.type == "cuda" and torch.version.hip is None and torch.__version__ >= "2.8"
    tensor_cores = halves and on_cuda and source.dtype == target.dtype
    size = TENSOR_PIECE if tensor_cores else PIECE
    if total.device.type == "cpu":
        size = HALF_PIECE_ON_CPU if halves else PIECE_ON_CPU
    pieces = -(-len(source) // size) or 1
    rows = max(_block(total.device) // max(target.shape[1], 1), 1)
    for x, y in zip(source.chunk(pieces), target.chunk(pieces), strict=True):
        if not halves:
            total.addmm_(x.to(total.dtype).T, y.to(total.dtype))
            continue
        if not tensor_cores:
            x, y = (side.to(torch.float32, memory_format=torch.contiguous_format) for side in (x, y))
        for start in range(0, x.shape[1], rows):
            columns = x[:, start : start + rows].T
            total[start : start + rows] += (
                torch.mm(columns, y, out_dtype=torch.float32) if tensor_cores else torch.mm(columns, y)
            )


def _block(device: torch.device) -> int:
    return BLOCK_ON_CPU if device.type == "cpu" else BLOCK


def energy(signal: Tensor) -> Tensor:
    """|X|^2, summed in float64; the rows of half-precision signals in float32."""
    if are_half(signal.dtype):
        size = ROWS_ON_CPU if signal.device.type == "cpu" else PIECE
        rows = [torch.linalg.vector_norm(part.float(), dim=1) for part in signal.split(size)]
        return torch.cat(rows).double().square().sum()
    norm: Tensor = torch.linalg.vector_norm(signal, dtype=torch.float64)
    return norm.square()


def are_half(*dtypes: torch.dtype) -> bool:
    """Whether products of such numbers are exact in float32."""
    return all(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)


def work_bytes(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> int:
    """The memory that `add_product` needs for `rows` tokens, in addition to the signals and the sum."""
    rows = min(rows, PIECE)
    if not are_half(dtype):
        return 8 * rows * sum(shape)
    return 4 * (rows * sum(shape) + min(shape[0] * shape[1], _block(device) + shape[1]))


def rank_cut(signal_dtype: torch.dtype, sum_dtype: torch.dtype, width: int) -> float:
    """The share of the largest singular value of C below which a direction counts as undetermined.

    Two floors: rounding of the sum (width * eps of its dtype), and rounding of the signals. A direction with
    relative amplitude a in both signals has a^2 in C, and counts while a is above the error of the signals.
    Models amplify rounding by cancellation (a LayerNorm's backward pass leaves 1e-5, some 200 eps of float32, in a
    direction that is exactly zero), hence (256 eps)^2. Half-precision signals are rounded once, from sums in float32:
    (4 eps)^2. The cut of a measured C may be higher (`CrossCovariance.cut`).
    """
    eps = torch.finfo(signal_dtype).eps
    return max(width * torch.finfo(sum_dtype).eps, ((256 if eps < _FINE else 4) * eps) ** 2)


Key = tuple[str, str]  # target layer, signal


class WeightGradient:
    """Sums of one layer's per-sample weight and bias gradients, and sums of their signs (votes)."""

    _TENSORS = ("total", "votes", "bias_total", "bias_votes")

    def __init__(self, shape: tuple[int, int], *, device: torch.device | str | None = None) -> None:
        sums = ((part, dtype) for part in (shape, shape[:1]) for dtype in (torch.float64, torch.int32))
        tensors = [torch.zeros(part, device=device, dtype=dtype) for part, dtype in sums]
        self.total, self.votes, self.bias_total, self.bias_votes = tensors
        self.samples = 0

    def update(self, inputs: Tensor, gradients: Tensor) -> None:
        """Add layer inputs (N, T, d_in) and output gradients (N, T, d_out), in float32: half precision overflows."""
        for x, g in zip(inputs.split(16), gradients.split(16), strict=True):
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
        total = self.extend(other)
        gradients = {name: first + other.weight_gradients[name] for name, first in self.weight_gradients.items()}
        return replace(total, weight_gradients=gradients, samples=self.samples + other.samples)

    def extend(self, more: Statistics) -> Statistics:
        """Add sums of some of these signals over further samples; shared sums stay shared."""
        pairs = {key: (own, more.covariances.get(key)) for key, own in self.covariances.items()}
        sums = {pair: pair[0] if pair[1] is None else pair[0] + pair[1] for pair in set(pairs.values())}
        passes = {name: count + more.passes.get(name, 0) for name, count in self.passes.items()}
        return replace(self, covariances={key: sums[pair] for key, pair in pairs.items()}, passes=passes)
