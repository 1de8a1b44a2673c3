"""Moments of paired signals, and the maps that the ideas of lab_ideas.py make of them.

First and second moments are kept for each layer, so that every kind of map can be made from one measurement: orthogonal
ones, ridge regressions either way, orthogonal ones cut or shrunk along their singular values, or head by head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Moments:
    """First and second moments of two signals over the same tokens; unless `full`, of AA and BB the traces only."""

    def __init__(self, source: int, target: int, device: Any, full: bool = True) -> None:
        shapes = {"AB": (source, target), "a": (source,), "b": (target,), "tA": (), "tB": ()}
        if full:
            shapes |= {"AA": (source, source), "BB": (target, target)}
        types = {"AA": torch.float32, "BB": torch.float32}  # large, and for ridges only
        self.parts = {
            name: torch.zeros(shape, dtype=types.get(name, torch.float64), device=device)
            for name, shape in shapes.items()
        }
        self.n = 0.0
        self.source_energy = self.target_energy = torch.ones((), device=device)  # `measure` looks at these

    def update(self, source: Tensor, target: Tensor) -> None:
        x, y = source.double(), target.double()
        more = {"AB": x.T @ y, "a": x.sum(0), "b": y.sum(0), "tA": x.square().sum(), "tB": y.square().sum()}
        if "AA" in self.parts:
            more |= {"AA": x.T @ x, "BB": y.T @ y}
        for name, part in more.items():
            self.parts[name] += part
        self.n += len(x)

    def __getattr__(self, name: str) -> Tensor:
        return self.__dict__["parts"][name]

    def of(self, parts: Mapping[str, Tensor], n: float) -> Moments:
        found = Moments.__new__(Moments)
        found.parts, found.n = dict(parts), n
        return found

    def __add__(self, other: Moments) -> Moments:
        both = {name: part + other.parts[name] for name, part in self.parts.items() if name in other.parts}
        return self.of(both, self.n + other.n)

    def __mul__(self, factor: Any) -> Moments:
        return self.of({name: part * factor for name, part in self.parts.items()}, self.n * factor)

    def unit(self) -> Moments:
        size = (self.tA * self.tB).sqrt()
        return self * (1.0 / torch.where(size > 0, size, torch.ones_like(size)))

    def centred(self) -> Moments:
        a, b, n = self.a, self.b, max(float(self.n), 1e-9)
        less = {"AB": torch.outer(a, b), "a": a * n, "b": b * n, "tA": a.square().sum(), "tB": b.square().sum()}
        if "AA" in self.parts:
            less |= {"AA": torch.outer(a, a), "BB": torch.outer(b, b)}
        return self.of({name: part - less[name] / n for name, part in self.parts.items()}, self.n)

    def cosine(self, R: Tensor) -> Tensor:
        """How well a map explains the one signal by the other, from 0 to 1."""
        return (R * self.AB).sum() / (self.tA * self.tB).sqrt().clamp_min(1e-300)


CUTS = (0.1, 0.03, 0.01, 0.003, 0.0)  # shares of the largest singular value

Sums = dict[str, Moments]  # by target layer; layers that read one tensor share one


def joined(combine: Callable[..., Moments], *many: Sums) -> Sums:
    """Layer by layer; what was shared stays shared."""
    known: dict[tuple[int, ...], Moments] = {}
    found = {}
    for name in many[0]:
        key = tuple(id(sums[name]) for sums in many)
        if key not in known:
            known[key] = combine(*(sums[name] for sums in many))
        found[name] = known[key]
    return found


def with_units(one: Sums, two: Sums) -> Sums:
    return joined(lambda x, y: x.unit() + y.unit(), one, two)


def pooled(sums: Sums, roles: Iterable[str]) -> Sums:
    """Half a layer's own, half the mean over all layers at the residual stream."""
    inside = [name for name in sums if any(role in name for role in roles)]
    shared = {id(sums[name]): sums[name].unit() for name in inside}
    first, *rest = shared.values()
    mean = sum(rest, first) * (1.0 / len(shared))
    return {name: shared[id(m)] * 0.5 + mean * 0.5 if id(m) in shared else m for name, m in sums.items()}


HIDDEN = [  # who writes a hidden space and who reads it, by name
    ("v_proj", "out_proj"), ("self.value", "output.dense"), ("attn.v", "attn.o"),
    ("fc1", "fc2"), ("intermediate.dense", "output.dense"),
]  # fmt: skip
SAME_SPACE = [("q_proj", "k_proj"), ("self.query", "self.key"), ("attn.q", "attn.k")]  # both write one space


def in_hidden_spaces(X: Sums, G: Sums) -> dict[str, Sums]:
    """Inputs and gradients where what is written and read in one hidden space shares one sum, half and half."""
    inputs, gradients = dict(X), dict(G)

    def partners(name: str, roles: list[tuple[str, str]]) -> list[str]:
        found = [name.replace(one, two) for one, two in roles if one in name]
        return [other for other in found if other != name and other in G and other in X]

    for name in G:
        for other in partners(name, HIDDEN)[:1]:
            inputs[other] = gradients[name] = G[name].unit() + X[other].unit()
        for other in partners(name, SAME_SPACE)[:1]:
            gradients[name] = gradients[other] = G[name].unit() + G[other].unit()
    return {"X": inputs, "G": gradients}


def similarity(m: Moments) -> float:
    """Linear CKA."""
    m = m.centred()
    return float(m.AB.square().sum() / (m.AA.norm() * m.BB.norm()).clamp_min(1e-300))


def trust(one: Sums, two: Sums, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, float]:
    """How far the maps of one half hold on the other, raised to what both together would reach (Spearman, Brown)."""
    found = {}
    for name in one:
        own = (first[name] * one[name].AB).sum() + (second[name] * two[name].AB).sum()
        other = (first[name] * two[name].AB).sum() + (second[name] * one[name].AB).sum()
        r = min(max(float(other / own), 0.0), 1.0)
        found[name] = 2 * r / (1 + r)
    return found


def polar(C: Tensor) -> Tensor:
    """Polar factors of a stack of matrices by a weighted Halley iteration; what is below 1e-8 stays small."""
    if C.shape[1] > C.shape[2]:
        return polar(C.mT).mT
    most = torch.linalg.matrix_norm(C, 1) * torch.linalg.matrix_norm(C, torch.inf)  # the largest squared, or more
    X = C / most.sqrt().clamp_min(1e-300)[:, None, None]
    eye, low = torch.eye(C.shape[1], dtype=C.dtype, device=C.device), 1e-8
    while low < 1 - 1e-9:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        a = min(2e3, (1 + d) ** 0.5 + 0.5 * (8 - 4 * d + 8 * (2 - low**2) / (low**2 * (1 + d) ** 0.5)) ** 0.5)
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        X = (b / c) * X + (a - b / c) * torch.cholesky_solve(X, torch.linalg.cholesky(eye + c * (X @ X.mT)))
        low = min(low * (a + b * low**2) / (1 + c * low**2), 1.0)
    return X


def largest(C: Tensor) -> Tensor:
    """The largest singular value of each, by power iteration."""
    x = torch.ones(*C.shape[:2], 1, dtype=C.dtype, device=C.device)
    for _ in range(60):
        x = C @ (C.mT @ x)
        x = x / x.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return (C.mT @ x).norm(dim=1).squeeze(-1).clamp_min(1e-300)


def cut(C: Tensor, at: Tensor, R: Tensor) -> Tensor:
    """The polar factors R of C without directions below shares `at` of the largest: by the sign of C C^T - at^2."""
    if C.shape[1] > C.shape[2]:
        return cut(C.mT, at, R.mT).mT
    eye = torch.eye(C.shape[1], dtype=C.dtype, device=C.device)
    unit = C / largest(C)[:, None, None]
    sign = polar(unit @ unit.mT - at.square()[:, None, None] * eye)
    return 0.5 * (R + sign @ R)


def softened(C: Tensor, at: float, R: Tensor) -> Tensor:
    """U s / (s + at) V^T, with s the singular values as a share of the largest."""
    if C.shape[1] > C.shape[2]:
        return softened(C.mT, at, R.mT).mT
    H = C @ R.mT
    H = (H + H.mT) / 2
    eye = torch.eye(C.shape[1], dtype=C.dtype, device=C.device)
    return torch.linalg.solve(H + at * largest(C)[:, None, None] * eye, C)


def cross_validated(C: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Polar factors cut where those of each half fit the other half best, one share for each matrix."""
    fits = []
    maps = [polar(first), polar(second)]
    for at in CUTS:
        shares = torch.full((len(C),), at, dtype=C.dtype, device=C.device)
        one, two = (cut(half, shares, R) if at else R for half, R in zip((first, second), maps, strict=True))
        fits.append((one * second).sum((1, 2)) + (two * first).sum((1, 2)))
    shares = torch.tensor(CUTS, dtype=C.dtype, device=C.device)[torch.stack(fits).argmax(0)]
    R = polar(C)
    return torch.where(shares[:, None, None] > 0, cut(C, shares, R), R)


def half_of_energy(tau: Tensor) -> Tensor:
    """The fewest singular directions that hold half of the energy."""
    if tau.shape[0] > tau.shape[1]:
        return half_of_energy(tau.T).T
    energy, Q = torch.linalg.eigh(tau @ tau.T)
    kept = energy.cumsum(0) > 0.5 * energy.sum()
    return Q[:, kept] @ (Q[:, kept].T @ tau)


def headwise(C: Tensor, heads: tuple[int, int]) -> Tensor:
    """Orthogonal within heads, the source's heads given to the target's, those that fit best first.

    A map between what heads write is cut into blocks on both sides; each target head gets one source head at most.
    """
    source, target = heads
    blocks = C.reshape(source, C.shape[0] // source, target, C.shape[1] // target).transpose(1, 2)
    maps = polar(blocks.flatten(0, 1)).unflatten(0, (source, target))
    fit, R = (maps * blocks).sum((2, 3)).cpu(), torch.zeros_like(maps)
    for _ in range(min(heads)):
        i, j = divmod(int(fit.argmax()), target)
        R[i, j] = maps[i, j]
        fit[i], fit[:, j] = -1.0, -1.0
    return R.transpose(1, 2).reshape(C.shape)


class Maps:
    """Maps of all layers, those of a shape solved together, each once."""

    def __init__(self, heads: tuple[int, int]) -> None:
        self._known: dict[tuple[int, str, bool], tuple[Moments, Tensor]] = {}
        self._heads = heads

    def of(self, sums: Sums, kind: str, centred: bool, roles: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """The map of each layer; of kind `heads` only where a layer has one of the roles, else orthogonal."""
        kinds = {
            name: "orthogonal" if kind == "heads" and not any(role in name for role in roles) else kind for name in sums
        }
        shapes: dict[Any, dict[int, Moments]] = {}
        for name, m in sums.items():
            if (id(m), kinds[name], centred) not in self._known:
                shapes.setdefault((tuple(m.AB.shape), kinds[name]), {})[id(m)] = m
        for (_, one), group in shapes.items():
            used = [m.centred() if centred else m for m in group.values()]
            for m, R in zip(group.values(), self._solve(used, one), strict=True):
                self._known[id(m), one, centred] = (m, R)
        return {name: self._known[id(m), kinds[name], centred][1] for name, m in sums.items()}

    def forget(self, but: Iterable[Moments]) -> None:
        """Keep the orthogonal maps of these sums only."""
        kept = {id(m) for m in but}
        self._known = {key: found for key, found in self._known.items() if key[0] in kept and key[1] == "orthogonal"}

    def crossed(self, whole: Sums, one: Sums, two: Sums) -> dict[str, Tensor]:
        """Orthogonal maps of a rank that halves of the samples choose."""
        shapes: dict[Any, dict[int, str]] = {}
        for name, m in whole.items():
            shapes.setdefault(tuple(m.AB.shape), {}).setdefault(id(m), name)
        found: dict[int, Tensor] = {}
        for group in shapes.values():
            sums = (torch.stack([sums[name].AB for name in group.values()]) for sums in (whole, one, two))
            found |= dict(zip(group, cross_validated(*sums), strict=True))
        return {name: found[id(m)] for name, m in whole.items()}

    def _solve(self, used: list[Moments], kind: str) -> Tensor:
        AB = torch.stack([m.AB for m in used])
        if kind == "orthogonal":
            return polar(AB)
        if kind == "heads":
            return torch.stack([headwise(C, self._heads) for C in AB])
        way, weight = kind.split()
        if way == "cut":
            return cut(AB, torch.full_like(AB[:, 0, 0], float(weight)), polar(AB))
        if way == "soft":
            return softened(AB, float(weight), polar(AB))
        gram = torch.stack([(m.AA if way == "forward" else m.BB).double() for m in used])
        ridge = float(weight) * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-300)
        gram = gram + torch.diag_embed(ridge[:, None].expand(-1, gram.shape[1]))
        return torch.linalg.solve(gram, AB) if way == "forward" else torch.linalg.solve(gram, AB.mT).mT
