"""How alike two models are inside, layer by layer: linear CKA, cosine of paired tokens, drift. Figures, no verdicts.

Everything is a sum over tokens, so memory does not grow with the data: CKA comes from covariances, never from
a token-by-token Gram matrix. Sums are float64. A number that the data leave open (a constant signal, other
widths for a raw cosine, too few tokens) is NaN, which the record writes as null.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from .alignment import Completion, CrossCovariance, Statistics
from .capture import INPUT, OUTPUT, OUTPUT_GRADIENT, SIGNALS, Loss, PairedBatch, Progress, measure
from .data import Dataset
from .errors import TuneportError, first_of
from .evaluation import encoded
from .families import Model
from .pairing import LayerPair
from .tokens import Match, match_tokens

COMPARED = (INPUT, OUTPUT, OUTPUT_GRADIENT)
NAN = float("nan")


class Similarity(CrossCovariance):
    """A cross-covariance that also knows linear CKA and the mean cosine of its paired tokens.

    Holds the two covariances beside the cross-covariance, all around the mean of the first tokens, so that a
    large common offset costs no digits.

    >>> X = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 5.0], [4.0, 1.0], [3.0, 3.0]])
    >>> similarity = Similarity(2, 2)
    >>> similarity.update(X[:2], 7 * X[:2])
    >>> similarity.update(X[2:], 7 * X[2:])
    >>> round(similarity.cka(), 9), round(similarity.cka(debiased=True), 9), round(similarity.cosine, 9)
    (1.0, 1.0, 1.0)
    """

    def __init__(self, source_width: int, target_width: int, *, device: torch.device | str | None = None) -> None:
        super().__init__(source_width, target_width, device=device)
        self._agreement = TokenAgreement(source_width, target_width)
        self._shift: tuple[Tensor, Tensor] | None = None
        self._moments: dict[str, _Moments] = {}

    @property
    def cosine(self) -> float:
        """Mean cosine of the paired tokens as they are; NaN where the widths differ."""
        return self._agreement.cosine

    def update(self, source: Tensor, target: Tensor) -> None:
        super().update(source, target)
        self._agreement.update(source, target)
        X, Y = (signal.to(device=self.source_energy.device, dtype=torch.float64) for signal in (source, target))
        if self._shift is None:
            if not len(X):
                return
            self._shift = X.mean(0), Y.mean(0)
        X, Y = X - self._shift[0], Y - self._shift[1]
        for name, (left, right) in {"xy": (X, Y), "xx": (X, X), "yy": (Y, Y)}.items():
            self._moments.setdefault(name, _Moments(left.shape[1], right.shape[1], left.device)).update(left, right)

    def cka(self, *, debiased: bool = False) -> float:
        """Linear CKA, `|X^T Y|^2 / (|X^T X| |Y^T Y|)` of centred signals, from 0 to 1.

        The plain estimate is too high when there are few tokens for the width. `debiased` puts the unbiased
        estimator of HSIC in all three places: right on average, it may come out slightly below 0.
        """
        if not self._moments:
            return NAN
        both, ours, theirs = (self._moments[name].hsic(debiased=debiased) for name in ("xy", "xx", "yy"))
        return both / math.sqrt(ours * theirs) if ours > 0 and theirs > 0 else NAN


class TokenAgreement:
    """The mean over paired tokens of their cosine and of the relative change of their length.

    `matrix` (d_A, d_B), where given, is applied to the source's tokens first. Tokens that are zero on either side
    have no direction and are left out, such as the gradients at tokens that the loss does not see.
    """

    def __init__(self, source_width: int, target_width: int, *, matrix: Tensor | None = None) -> None:
        self.source_energy = torch.zeros((), dtype=torch.float64)
        self.target_energy = torch.zeros((), dtype=torch.float64)
        self.tokens = 0
        self._matrix = matrix
        self._comparable = matrix is not None or source_width == target_width
        self._cosines = self._changes = 0.0

    @property
    def cosine(self) -> float:
        """Mean of `cos(x_A R, x_B)`."""
        return self._cosines / self.tokens if self._comparable and self.tokens else NAN

    @property
    def direction(self) -> float:
        """Mean of `1 - cos(x_A R, x_B)`: the paper's directional shift."""
        return 1.0 - self.cosine

    @property
    def magnitude(self) -> float:
        """Mean of `| |x_B| - |x_A R| | / |x_A R|`: the paper's magnitude change."""
        return self._changes / self.tokens if self.tokens else NAN

    def update(self, source: Tensor, target: Tensor) -> None:
        """Add the tokens of one batch: source (M, d_A) and target (M, d_B), row i of both the same token."""
        X, Y = source.double(), target.double()
        self.source_energy = self.source_energy.to(X.device) + X.square().sum()
        self.target_energy = self.target_energy.to(Y.device) + Y.square().sum()
        if self._matrix is not None:
            X = X @ self._matrix.to(X)
        lengths = X.norm(dim=1), Y.norm(dim=1)
        there = (lengths[0] > 0) & (lengths[1] > 0)
        ours, theirs = (length[there] for length in lengths)
        self.tokens += int(there.sum())
        self._changes += float(((theirs - ours).abs() / ours).sum())
        if self._comparable:
            self._cosines += float(((X[there] * Y[there]).sum(1) / (ours * theirs)).sum())


class _Moments:
    """The sums from which HSIC of two linear kernels follows, plain and unbiased."""

    def __init__(self, left: int, right: int, device: torch.device) -> None:
        self._product = torch.zeros(left, right, dtype=torch.float64, device=device)
        self._sums = [torch.zeros(width, dtype=torch.float64, device=device) for width in (left, right)]
        self._weighted = [torch.zeros(width, dtype=torch.float64, device=device) for width in (left, right)]
        self._squares = torch.zeros(3, dtype=torch.float64, device=device)
        self._tokens = 0

    def update(self, X: Tensor, Y: Tensor) -> None:
        self._product.addmm_(X.T, Y)
        x2, y2 = X.square().sum(1), Y.square().sum(1)
        for total, signal in zip(self._sums, (X, Y), strict=True):
            total += signal.sum(0)
        for total, signal, weight in zip(self._weighted, (X, Y), (y2, x2), strict=True):
            total += weight @ signal
        self._squares += torch.stack([x2.sum(), y2.sum(), x2 @ y2])
        self._tokens += len(X)

    def hsic(self, *, debiased: bool) -> float:
        """HSIC up to a factor that cancels in CKA. Unbiased: Song et al., of kernels whose diagonal is zero."""
        n, (sum_x, sum_y) = self._tokens, self._sums
        if not debiased:
            return float((self._product - torch.outer(sum_x, sum_y) / n).square().sum())
        if n < 4:
            return NAN
        x2, y2, x2y2 = self._squares
        trace = self._product.square().sum() - x2y2
        whole = (sum_x @ sum_x - x2) * (sum_y @ sum_y - y2) / ((n - 1) * (n - 2))
        rows = sum_x @ self._product @ sum_y - self._weighted[0] @ sum_x - self._weighted[1] @ sum_y + x2y2
        return float(trace + whole - 2 / (n - 2) * rows) / (n * (n - 3))


def cka(X: Tensor, Y: Tensor, *, debiased: bool = False) -> float:
    """Linear CKA of two sets of paired tokens (M, d_A) and (M, d_B).

    >>> X = torch.eye(5)[:, :3]
    >>> round(cka(X, 2 * X), 9)
    1.0
    """
    similarity = Similarity(X.shape[1], Y.shape[1], device=X.device)
    similarity.update(X, Y)
    return similarity.cka(debiased=debiased)


def token_cosine(X: Tensor, Y: Tensor, matrix: Tensor | None = None) -> float:
    """Mean cosine of paired tokens (M, d_A) and (M, d_B), the first mapped by `matrix` where one is given.

    >>> token_cosine(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    0.5
    """
    agreement = TokenAgreement(X.shape[1], Y.shape[1], matrix=matrix)
    agreement.update(X, Y)
    return agreement.cosine


@dataclass(frozen=True)
class LayerSimilarity:
    """How alike one signal of two paired layers is.

    `cosine_before` and `cosine_after` are means over tokens, without and with the Procrustes map of that signal;
    `cosine_held_out` is the latter on tokens that the map has not seen. `rank` and `residual` are the map's.
    """

    target: str
    source: str
    role: str
    block: int | None
    signal: str
    tokens: int
    cka: float
    cka_debiased: float
    cosine_before: float
    cosine_after: float = NAN
    cosine_held_out: float = NAN
    rank: int | None = None
    residual: float | None = None


@dataclass(frozen=True)
class Drift:
    """How far a layer's input has moved from the base model's after so many steps of fine-tuning."""

    step: int
    layer: str
    role: str
    block: int | None
    direction: float
    magnitude: float


def layer_similarity(
    source: nn.Module,
    target: nn.Module,
    pairs: Sequence[LayerPair],
    batches: Iterable[Any],
    *,
    source_loss: Loss,
    target_loss: Loss,
    signals: Collection[str] = COMPARED,
    held_out: Iterable[Any] = (),
    aligned: bool = True,
    completion: Completion = "svd",
    match: Match | None = None,
    progress: Progress | None = None,
) -> tuple[LayerSimilarity, ...]:
    """CKA, cosine, rank and residual of every pair and signal, over the batches.

    The models run over `batches` twice: once for the sums and the maps, once for the cosine under the maps
    (`aligned=False` leaves that out), and over `held_out` for the cosine that counts: the maps have not seen it.
    Batches and losses are those of `capture.measure`; batches that can be read only once do not serve.
    """

    def run(over: Iterable[Any], make_sum: Callable[..., Any]) -> Statistics:
        options = {"source_loss": source_loss, "target_loss": target_loss, "match": match, "progress": progress}
        return measure(source, target, pairs, over, signals=signals, make_sum=make_sum, **options)  # type: ignore[arg-type]

    if aligned and iter(batches) is batches:
        raise TuneportError("layer_similarity reads its batches twice; give a list, not an iterator.")
    statistics = run(batches, lambda _pair, _signal, ours, theirs, device: Similarity(ours, theirs, device=device))
    if not aligned:
        return tuple(_similarities(pairs, statistics))

    def mapped(pair: LayerPair, signal: str, ours: int, theirs: int, device: torch.device) -> TokenAgreement:
        del device
        return TokenAgreement(ours, theirs, matrix=statistics.align(pair.target.name, signal, completion).matrix)

    after = run(batches, mapped).covariances
    unseen = run(held_out, mapped).covariances if _any(held_out) else {}
    return tuple(_similarities(pairs, statistics, after, unseen, completion))


def _similarities(
    pairs: Sequence[LayerPair],
    statistics: Statistics,
    after: Mapping[tuple[str, str], Any] | None = None,
    held_out: Mapping[tuple[str, str], Any] | None = None,
    completion: Completion = "svd",
) -> Iterator[LayerSimilarity]:
    """In the order of the pairs, whatever the order in which signals came."""
    for pair, signal in product(pairs, SIGNALS):
        name = pair.target.name
        found = statistics.covariances.get((name, signal))
        if not isinstance(found, Similarity):
            continue
        aligned = statistics.align(name, signal, completion) if after is not None else None
        yield LayerSimilarity(
            name,
            pair.source.name,
            pair.target.role,
            pair.target.block,
            signal,
            found.tokens,
            found.cka(),
            found.cka(debiased=True),
            found.cosine,
            _cosine_of(after, (name, signal)),
            _cosine_of(held_out, (name, signal)),
            aligned.rank if aligned else None,
            aligned.residual if aligned else None,
        )


def _cosine_of(sums: Mapping[tuple[str, str], Any] | None, key: tuple[str, str]) -> float:
    return sums[key].cosine if sums and key in sums else NAN


def output_similarity(
    model: Model,
    reference: Model,
    data: Dataset,
    *,
    signal: str = OUTPUT,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> tuple[LayerSimilarity, ...]:
    """CKA and cosine of every layer's outputs to those of a reference of the same architecture.

    The paper asks this of a ported target against the fine-tuned target. One forward pass of both models over
    the data; `signal="input"` compares inputs instead.
    """
    pairs = _same_layers(model, reference)
    return layer_similarity(
        reference.module,
        model.module,
        pairs,
        _batches(model, data, batch_size),
        source_loss=_forward(reference),
        target_loss=_forward(model),
        signals=(signal,),
        aligned=False,
        progress=progress,
    )


def activation_drift(
    base: Model,
    checkpoints: Iterable[tuple[int, nn.Module]],
    data: Dataset,
    *,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> tuple[Drift, ...]:
    """How layer inputs move along a fine-tuning trajectory: for each (step, module), each layer.

    Direction is the mean over tokens of `1 - cos(x_t, x_pre)`, magnitude that of `| |x_t| - |x_pre| | / |x_pre|`.
    Checkpoints are modules of the base's architecture, taken one at a time.
    """
    found = []
    for step, module in checkpoints:
        tuned = base.with_module(module)
        pairs = _same_layers(tuned, base)
        sums = measure(
            base.module,
            module,
            pairs,
            _batches(base, data, batch_size),
            signals=(INPUT,),
            source_loss=_forward(base),
            target_loss=_forward(tuned),
            progress=progress,
            make_sum=lambda _pair, _signal, ours, theirs, _device: TokenAgreement(ours, theirs),
        ).covariances
        for pair in pairs:
            moved: Any = sums.get((pair.target.name, INPUT))
            if moved is not None:
                layer = pair.target
                found.append(Drift(step, layer.name, layer.role, layer.block, moved.direction, moved.magnitude))
    return tuple(found)


def by_block(items: Iterable[Any], value: str) -> dict[int, float]:
    """The mean of a field over the layers of each block, as the paper's figures show it; NaN does not count."""
    groups: dict[int, list[float]] = defaultdict(list)
    for item in items:
        number = getattr(item, value)
        if item.block is not None and number is not None and math.isfinite(number):
            groups[item.block].append(number)
    return {block: sum(values) / len(values) for block, values in sorted(groups.items())}


def _same_layers(model: Model, reference: Model) -> list[LayerPair]:
    """Each layer with itself in the reference; models of other architectures are refused."""
    theirs = {layer.name: layer for layer in reference.layers}
    missing = [
        layer.name
        for layer in model.layers
        if layer.name not in theirs or theirs[layer.name].weight_shape != layer.weight_shape
    ]
    if missing or len(theirs) != len(model.layers):
        raise TuneportError(
            f"{model.name} and {reference.name} differ in architecture ({first_of(missing) or 'more layers'}); "
            "layers can only be compared one by one between two models of the same one."
        )
    return [LayerPair(theirs[layer.name], layer) for layer in model.layers]


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A data set as one model reads it, for two models that read alike; can be gone through again."""

    model: Model
    data: Dataset
    size: int

    def __iter__(self) -> Iterator[PairedBatch]:
        for batch, labels in encoded(self.model, self.data, self.size):
            layout = self.model.layout(batch) if self.model.layout is not None else None
            yield PairedBatch((batch, labels), (batch, labels), len(labels), match_tokens(layout, layout))


def _batches(model: Model, data: Dataset, size: int) -> _Encoded:
    return _Encoded(model, data, size)


def _forward(model: Model) -> Loss:
    """Run the model for its activations; the number means nothing."""
    forward = model.logits or model.features
    if forward is None:
        raise TuneportError(f"{model.name} cannot be run on raw samples: tuneport does not know its family.")

    def loss(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return forward(module, batch[0]).sum()

    return loss


def _any(batches: Iterable[Any]) -> bool:
    return next(iter(batches), None) is not None
