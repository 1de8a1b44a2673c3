"""The mathematics of a coordinate change: streamed cross-covariances and orthogonal Procrustes maps.

Torch only: no models, no files. Statistics are sums over tokens, so memory does not grow with the data.
Signals may come in any floating dtype; sums and solves are float64 unless told otherwise (products of half-precision
signals: `products`). Every map says how much of it the data determine (rank) and how well it fits (residual).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..errors import MethodError, TuneportError
from .certificate import Certificate
from .completion import CoordinateMap, complete, complete_thin
from .polar import Polar, polar, polar_of_factors, polar_together, together_bytes
from .products import add_product, energy
from .rank import cut_above_noise, rank_cut

Completion = Literal["none", "svd"]
COMPLETIONS: tuple[Completion, ...] = ("none", "svd")
HELD = 2**28  # bytes of solved maps that are remembered


class CrossCovariance:
    """Streaming `C = X_A^T X_B` over paired tokens (the matrix of eqs. 6 and 7), uncentred.

    While the tokens take less than half the memory of C, they are kept as they came, without those that are zero in
    either signal (all but the class tokens in the last gradients of a model that reads only those); then they are
    summed up, to the same bits as if they had been summed from the start.

    >>> covariance = CrossCovariance(2, 3)
    >>> covariance.update(torch.ones(5, 2), torch.ones(5, 3))
    >>> covariance.matrix.shape, covariance.tokens, covariance.matrix[0, 0].item()
    (torch.Size([2, 3]), 5, 5.0)
    """

    def __init__(
        self,
        source_width: int,
        target_width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.shape = (source_width, target_width)
        self.dtype = dtype
        self.rows: list[tuple[Tensor, Tensor]] | None = []  # what was given, until it is summed up
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
        """C (d_A, d_B); made anew each time while the tokens are kept."""
        return self._total() if self._sum is None else self._sum

    @matrix.setter
    def matrix(self, value: Tensor) -> None:
        self._sum, self.rows = value, None

    @property
    def nbytes(self) -> int:
        """The memory held now."""
        if self.rows is None:
            return self.shape[0] * self.shape[1] * self.dtype.itemsize
        return sum(part.numel() * part.element_size() for pair in self.rows for part in pair)

    def update(self, source: Tensor, target: Tensor) -> None:
        """Add the tokens of one batch: source (M, d_A) and target (M, d_B), row i of both the same token."""
        wanted = f"(M, {self.shape[0]}) and (M, {self.shape[1]})"
        if source.shape[1:] != self.shape[:1] or target.shape[1:] != self.shape[1:]:
            raise TuneportError(f"signals must be {wanted}, got {tuple(source.shape)} and {tuple(target.shape)}")
        if len(source) != len(target):
            raise TuneportError(f"signals must be paired token by token, got {len(source)} and {len(target)} tokens")
        self.signal_dtype = _coarser(self.signal_dtype, _coarser(source.dtype, target.dtype))
        source, target = source.to(self.device), target.to(self.device)
        self.source_energy += energy(source)
        self.target_energy += energy(target)
        self.tokens += len(source)
        if self.rows is not None:  # so few that it pays to look
            source, target = _with_signal(source, target)
        more = source.numel() * source.element_size() + target.numel() * target.element_size()
        if self.rows is not None and 2 * (self.nbytes + more) > self.shape[0] * self.shape[1] * self.dtype.itemsize:
            self.matrix = self._total()
        if self.rows is None:
            add_product(self.matrix, source, target)
        elif len(source):
            self.rows.append((source.clone(), target.clone()))

    @property
    def whole(self) -> Tensor:
        """|X_A| |X_B|, the most that <X_A R, X_B> can be for any orthogonal R."""
        return (self.source_energy * self.target_energy).sqrt()

    def cut(self, size: float, whole: float) -> float:
        """The rank cut, given the norm of C and `whole`: numbers that a device gives for many at once."""
        return cut_above_noise(self.signal_dtype, self.dtype, self.shape, self.tokens, size, whole)

    @property
    def most(self) -> int:
        """The largest rank that C can have by the number of tokens."""
        return self.tokens if self.rows is None else sum(len(source) for source, _ in self.rows)

    def few_tokens(self) -> tuple[Tensor, Tensor] | None:
        """The tokens (M, d_A) and (M, d_B), while they are kept and so few that they are the cheaper way to a map."""
        if not self.rows or 5 * self.most > 4 * min(self.shape):
            return None
        return torch.cat([source for source, _ in self.rows]), torch.cat([target for _, target in self.rows])

    def _total(self) -> Tensor:
        total = torch.zeros(self.shape, device=self.device, dtype=self.dtype)
        for source, target in self.rows or ():
            add_product(total, source, target)
        return total

    def __add__(self, other: CrossCovariance) -> CrossCovariance:
        """The statistic of both sets of tokens together."""
        total = CrossCovariance(*self.shape, device=self.device, dtype=self.dtype)
        total.source_energy = self.source_energy + other.source_energy
        total.target_energy = self.target_energy + other.target_energy
        total.tokens = self.tokens + other.tokens
        total.signal_dtype = _coarser(self.signal_dtype, other.signal_dtype)
        room = self.shape[0] * self.shape[1] * self.dtype.itemsize
        if self.rows is not None and other.rows is not None and 2 * (self.nbytes + other.nbytes) <= room:
            total.rows = [*self.rows, *other.rows]
        else:
            total.matrix = self.matrix + other.matrix
        return total


@dataclass(frozen=True, eq=False)
class Alignment:
    """An orthogonal map from source to target coordinates, with its evidence.

    `map` is R (d_A, d_B) as factors, `matrix` R itself: `x_A R` stands in target coordinates. `rank` directions
    are determined by the data, the rest comes from the completion. `residual` is sqrt(1 - s^2) with
    s = <X_A R, X_B> / (|X_A| |X_B|) in [0, 1], over all tokens and features: 0 when one orthogonal map and one
    scale explain everything, 1 when nothing does; None where only C was given. `route` and `certificate` say how
    the map was found and how well it holds; `singular_values` of C are there where that route finds them.
    """

    map: CoordinateMap
    rank: int
    residual: float | None
    singular_values: Tensor | None
    route: str
    certificate: Certificate

    @cached_property
    def matrix(self) -> Tensor:
        """R itself (d_A, d_B), made when first looked at; `map` applies it without."""
        return self.map.dense()


def procrustes(
    covariance: CrossCovariance | Tensor, *, completion: Completion = "svd", rtol: float | None = None
) -> Alignment:
    """Solve orthogonal Procrustes, `argmin_R ||X_A R - X_B||_F` (eqs. 6 and 7), from `C = X_A^T X_B`.

    R = U V^T of the thin SVD. d_A <= d_B gives R R^T = I; d_A > d_B gives R^T R = I. Below full rank U V^T
    is not unique: `completion="none"` keeps the determined part only (the partial isometry U_r V_r^T);
    `completion="svd"` fills the rest, as a thin SVD does, with an isometry between the two null spaces, and
    picks among them the one nearest to the identity, so that the result depends neither on the order of the
    rows nor on the linear-algebra library.

    >>> rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> points = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 4.0]], dtype=torch.float64)
    >>> torch.allclose(procrustes(points.T @ (points @ rotation)).matrix, rotation)
    True
    """
    if completion not in COMPLETIONS:
        raise MethodError(f"The 'completion' of procrustes must be one of {COMPLETIONS}, got {completion!r} instead.")
    streamed = covariance if isinstance(covariance, CrossCovariance) else None
    few = streamed.few_tokens() if streamed is not None else None
    C = few or (covariance.matrix if isinstance(covariance, CrossCovariance) else covariance,)
    if C[0].ndim != 2:
        raise TuneportError(f"a cross-covariance must be a matrix, got shape {tuple(C[0].shape)}")
    if not all(bool(torch.isfinite(part).all()) for part in C):
        raise TuneportError(_NOT_FINITE)
    whole = float(streamed.whole) if streamed is not None else None
    if rtol is None:
        size = 0.0 if few else float(C[0].norm())  # of few tokens, all directions are seen
        rtol = rank_cut(torch.float64, C[0].dtype, max(C[0].shape))
        rtol = rtol if streamed is None or whole is None else streamed.cut(size, whole)
    most = streamed.most if streamed is not None else None
    found = polar_of_factors(*few, rtol) if few else polar(C[0].double(), rtol, most=most)
    return _alignment(found, whole, completion, thin=few is not None)


def procrustes_together(covariances: Sequence[CrossCovariance], completion: Completion = "svd") -> list[Alignment]:
    """`procrustes` of each; on an accelerator, those of one shape all at once."""
    alignments: dict[int, Alignment] = {}
    together: list[int] = []
    for index, covariance in enumerate(covariances):
        if covariance.device.type == "cpu" or covariance.few_tokens() is not None:
            alignments[index] = procrustes(covariance, completion=completion)
        else:
            together.append(index)
    numbers = [torch.stack([covariances[i].matrix.norm().double(), covariances[i].whole]) for i in together]
    told = dict(zip(together, torch.stack(numbers).tolist() if numbers else [], strict=True))  # in one wait
    if not all(math.isfinite(size) for size, _ in told.values()):
        raise TuneportError(_NOT_FINITE)
    alike: dict[tuple[tuple[int, int], float], list[int]] = {}
    for index, (size, whole) in told.items():
        alike.setdefault((covariances[index].shape, covariances[index].cut(size, whole)), []).append(index)
    for (_, cut), indices in alike.items():
        found = polar_together([covariances[i].matrix.double() for i in indices], cut, fill=completion == "svd")
        for index, solved in zip(indices, found, strict=True):
            alignments[index] = _alignment(solved, told[index][1], completion)
    return [alignments[index] for index in range(len(covariances))]


_NOT_FINITE = "the cross-covariance holds NaN or Inf: check the models and the calibration data"


def _alignment(found: Polar, whole: float | None, completion: Completion, thin: bool = False) -> Alignment:
    """`whole` is |X_A| |X_B|, where it is known."""
    if completion == "none":
        mapping = CoordinateMap(found.left, found.right)
    else:
        mapping = complete_thin(found) if thin else complete(found)
    residual = None
    if whole is not None:
        cosine = min(found.total / whole, 1.0) if whole > 0 else 0.0
        residual = (1.0 - cosine**2) ** 0.5
    return Alignment(mapping, found.rank, residual, found.singular_values, found.route, found.certificate)


def _with_signal(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens that are not zero in either signal; the others add nothing."""
    alive = source.any(dim=1) & target.any(dim=1)
    return (source, target) if bool(alive.all()) else (source[alive], target[alive])


def _coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return first if torch.finfo(first).eps >= torch.finfo(second).eps else second


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


def held_bytes(device: torch.device | None) -> int:
    """The bytes of solved maps that are remembered, those solved last aside: more on accelerators."""
    return HELD if device is None or device.type == "cpu" else max(HELD, together_bytes(device))
