"""Every route finds the planted polar factor or falls back to another; completions match a plain SVD."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tuneport.errors import TuneportError
from tuneport.maps import halley, symmetric
from tuneport.maps import polar as solver
from tuneport.maps import procrustes as completion
from tuneport.maps.certificate import Polar, certify
from tuneport.maps.polar import ROUTES, polar, polar_of_factors, polar_together, thin_factors
from tuneport.maps.procrustes import complete, procrustes
from tuneport.runtime.forecast import solving_bytes

CUT = 1e-9
SHAPES = [(96, 96), (80, 130), (130, 80)]
SPECTRA = {
    "conditioned": lambda n: torch.linspace(1, 0.1, n, dtype=torch.float64),
    "ill-conditioned": lambda n: torch.logspace(0, -8, n, dtype=torch.float64),
    "one large direction": lambda n: torch.tensor([1.0] + [1e-6] * (n - 1), dtype=torch.float64),
    "down to the cut": lambda n: torch.logspace(0, -12, n, dtype=torch.float64),
    "a few null directions": lambda n: torch.cat(
        [torch.logspace(0, -5, n - 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)]
    ),
    "half of them null": lambda n: torch.cat(
        [torch.logspace(0, -3, n // 2, dtype=torch.float64), torch.full((n - n // 2,), 1e-13, dtype=torch.float64)]
    ),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(rows: int, columns: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix with these singular values, and the polar factor of those above the cut."""
    U, V = (torch.linalg.qr(randn(width, len(values), seed=width)).Q for width in (rows, columns + 1))
    V = torch.linalg.qr(V[:columns]).Q
    kept = values > CUT * values[0]
    return (U * values) @ V.T, U[:, kept] @ V[:, kept].T


@pytest.mark.parametrize("route", [name for name in ROUTES if name != "few"])  # "few" is for coarse cuts only
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_route_finds_the_planted_map(route: str, spectrum: str, rows: int, columns: int) -> None:
    values = SPECTRA[spectrum](min(rows, columns))
    C, expected = planted(rows, columns, values)
    found = polar(C, CUT, route)
    few = int((values <= CUT).sum()) < halley.NULLS
    assert found.route == (route if few or route != "qdwh" else "lift")
    assert found.rank == int((values > CUT).sum())
    assert float((found.dense() - expected).norm() / expected.norm()) < 1e-6
    for factor in thin_factors(found):
        assert float((factor.T @ factor - torch.eye(found.rank)).abs().max()) < 1e-7
    assert found.total == pytest.approx(float(values[: found.rank].sum()), rel=1e-9)
    assert found.certificate.holds
    short = thin_factors(found)[0 if rows <= columns else 1]
    assert found.null.shape == (len(short), len(short) - found.rank)
    assert float((short.T @ found.null).abs().sum()) < 1e-6


@pytest.mark.parametrize("spectrum", ["a few null directions", "half of them null"])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_completions_do_not_depend_on_the_route(spectrum: str, rows: int, columns: int) -> None:
    C, _ = planted(rows, columns, SPECTRA[spectrum](min(rows, columns)))
    maps = [complete(polar(C, CUT, route)).dense() for route in ROUTES]
    R = maps[0]
    gram = R @ R.T if rows <= columns else R.T @ R
    assert float((gram - torch.eye(len(gram))).abs().max()) < 1e-8
    for other in maps[1:]:
        assert float((other - R).abs().max()) < 1e-7


@pytest.mark.parametrize(("rows", "columns"), [(120, 120), (90, 150), (150, 90)])
@pytest.mark.parametrize("tokens", [1, 12, 30])
def test_few_tokens_give_the_map_of_the_whole_problem(rows: int, columns: int, tokens: int) -> None:
    X, Y = randn(tokens, rows), randn(tokens, columns, seed=1)
    thin, whole = polar_of_factors(X, Y, CUT), polar(X.T @ Y, CUT, "svd")
    assert thin.rank == whole.rank == tokens
    assert float((thin.dense() - whole.dense()).abs().max()) < 1e-12
    filled, dense = complete(thin), complete(whole).dense()
    assert filled.identity
    assert filled.left.shape[1] < 4 * tokens
    assert float((filled.dense() - dense).abs().max()) < 1e-9
    x = randn(5, rows, seed=3)
    assert torch.allclose(filled.carry(x, 1), x @ dense, atol=1e-9)
    assert torch.allclose(filled.carry(x.T, 0), dense.T @ x.T, atol=1e-9)
    assert torch.allclose(filled.carry(x[0], 0), dense.T @ x[0], atol=1e-9)


@pytest.mark.parametrize("turned", [False, True])
def test_thin_and_dense_completions_pair_dead_units_in_the_same_way(turned: bool) -> None:
    x, y = torch.zeros(20, 90, dtype=torch.float64), torch.zeros(20, 110, dtype=torch.float64)
    x[:, :6] = randn(20, 6)
    y[:, 3:9] = x[:, :6]
    x, y = (y, x) if turned else (x, y)
    thin, whole = complete(polar_of_factors(x, y, CUT)).dense(), complete(polar(x.T @ y, CUT, "svd")).dense()
    assert float((thin - whole).abs().max()) < 1e-10
    gram = thin.T @ thin if turned else thin @ thin.T
    assert float((gram - torch.eye(90)).abs().max()) < 1e-10


@pytest.mark.parametrize(("rows", "columns"), [(240, 240), (200, 330), (330, 200)])
@pytest.mark.parametrize("rank", [1, 7])
def test_few_directions_above_a_coarse_cut_are_found_by_subspace_iteration(rows: int, columns: int, rank: int) -> None:
    cut, size = 1e-3, min(rows, columns)
    values = torch.cat([torch.logspace(0, -2.9, rank, dtype=torch.float64), 1e-5 * randn(size - rank).abs()])
    C, _ = planted(rows, columns, values)
    found, exact = polar(C, cut, "few"), polar(C, cut, "svd")
    assert (found.route, found.rank, exact.rank) == ("few", rank, rank)
    assert float((found.dense() - exact.dense()).abs().max()) < 1e-11
    assert found.total == pytest.approx(exact.total, rel=1e-12)
    assert found.certificate.holds
    assert float((complete(found).dense() - complete(exact).dense()).abs().max()) < 1e-10


@pytest.mark.parametrize(
    "values",
    [
        torch.logspace(0, -6, 240, dtype=torch.float64),  # too many above the cut
        torch.cat(
            [torch.ones(3), torch.full((237,), 8e-4)]
        ).double(),  # below the cut, but their sum is too large for a proof
        torch.logspace(0, -12, 240, dtype=torch.float64),
    ],
)
def test_unproven_subspace_iteration_falls_back_to_eigenvectors(values: Tensor) -> None:
    C, _ = planted(240, 260, values)
    found, exact = polar(C, 1e-3, "few"), polar(C, 1e-3, "svd")
    assert found.route == "eigh"
    assert found.rank == exact.rank
    assert float((found.dense() - exact.dense()).abs().max()) < 1e-9
    assert solver.by_few(C, CUT) is None


def test_few_directions_of_many_matrices_are_found_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spectra that subspace iteration resolves: with a gap, slowly decaying, and with all others just below the cut.

    It does not resolve too many directions above the cut, and no values at all.
    """
    monkeypatch.setattr(solver, "LARGE", 240)
    n, cut = 240, 1e-3
    spectra = [
        torch.cat([torch.linspace(1, 0.1, 9), torch.full((n - 9,), 1e-5)]),
        torch.cat([torch.ones(1), 0.02 / torch.arange(1, n) ** 1.2]),  # 13 above the cut, a quarter of it at the 40th
        torch.cat([torch.ones(3), torch.full((n - 3,), 8e-4)]),
        torch.logspace(0, -6, n),
    ]
    matrices = [planted(n, 260, values.double())[0] for values in spectra] + [torch.zeros(n, 260).double()]
    alone = solver.few_together(torch.stack(matrices), cut)
    assert [one is not None for one in alone] == [True, True, True, False, False]
    for C, one in zip(matrices[:-1], polar_together(matrices[:-1], cut), strict=True):
        exact = polar(C, cut, "svd")
        assert one.certificate.holds
        assert one.rank == exact.rank
        # the error of a Gram matrix, eps / cut^2 = 2e-10, over the gap of a tenth at the cut
        assert float((one.dense() - exact.dense()).norm()) < 1e-8
        assert one.total == pytest.approx(exact.total, rel=1e-9)
        assert float((complete(one).dense() - complete(exact).dense()).norm()) < 1e-7


@pytest.mark.parametrize(("rows", "columns"), [(96, 96), (80, 130), (130, 80)])
@pytest.mark.parametrize("rank", [1, 20, 40])
@pytest.mark.parametrize("tilt", [None, 0.0, 1e-6, 1e-3])
def test_completions_of_low_rank_need_no_null_basis(rows: int, columns: int, rank: int, tilt: float | None) -> None:
    size = min(rows, columns)
    values = torch.cat([torch.linspace(1, 0.5, rank), torch.zeros(size - rank)]).double()
    C, _ = planted(rows, columns, values)
    if tilt is not None:  # the identity maps null directions (nearly) into mapped ones
        U, V = torch.eye(rows, rank).double(), torch.zeros(columns, rank).double()
        V[rank : 2 * rank], V[:rank] = torch.eye(rank).double(), tilt * torch.eye(rank).double()
        C = U @ torch.linalg.qr(V).Q.T * 2
    found = polar(C, CUT, "svd")
    few = complete(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completion, "_complete_few", lambda *_: None)
        whole = complete(found)
    assert few.identity == (tilt != 0.0)
    assert not whole.identity
    assert float((few.dense() - whole.dense()).abs().max()) < 1e-9
    gram = few.dense() @ few.dense().T if rows <= columns else few.dense().T @ few.dense()
    assert float((gram - torch.eye(size)).abs().max()) < 1e-9


def test_a_zero_matrix_has_rank_zero_and_is_completed_by_the_identity() -> None:
    for route in ROUTES:
        found = polar(torch.zeros(70, 80, dtype=torch.float64), CUT, route)
        assert found.rank == 0
        assert torch.equal(complete(found).dense(), torch.eye(70, 80, dtype=torch.float64))


def test_a_route_that_fails_its_certificate_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    C, expected = planted(80, 90, SPECTRA["conditioned"](80))

    def sloppy(matrix: Tensor, _: float) -> Polar:
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
        return solver._decomposed("svd", matrix, U, Vh.T + 1e-4 * randn(*Vh.T.shape), S)

    monkeypatch.setitem(ROUTES, "eigh", sloppy)
    found = polar(C, CUT, "eigh")
    assert found.route == "svd"
    assert float((found.dense() - expected).abs().max()) < 1e-10
    monkeypatch.setitem(ROUTES, "svd", sloppy)
    with pytest.raises(TuneportError, match=r"no route gives a certified polar factor of a \(80, 90\)"):
        polar(C, CUT, "eigh")


def test_a_wrong_map_does_not_get_a_certificate() -> None:
    C, _ = planted(80, 80, SPECTRA["conditioned"](80))
    U, S, Vh = torch.linalg.svd(C)
    assert certify(C, U, Vh.T, S).holds
    assert not certify(C, U, Vh.T.roll(1, dims=1), S).holds  # orthogonal, but the wrong pairs
    assert not certify(C, U, -Vh.T, S).holds  # stationary, but the worst map


@pytest.mark.parametrize("side", [0, 1])
def test_a_certificate_probes_both_sides(side: int) -> None:
    """A factor that is not orthogonal, with values for which the product is stationary."""
    C, _ = planted(80, 80, SPECTRA["conditioned"](80))
    U, S, Vh = torch.linalg.svd(C)
    factors = [U, Vh.T]
    factors[side] = 2 * factors[side]
    found = certify(C, *factors, 2 * S)
    assert found.stationarity <= found.limit
    # |(4 - 1) probe| is 3 times a root mean square of about 1
    assert 2 < found.orthogonality < 4
    assert not found.holds


def test_a_value_at_the_cut_is_not_determined() -> None:
    """All numbers are powers of two, so that no rounding moves the value off the cut."""
    C = torch.diag(torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64))
    assert polar(C, 0.5, "svd").rank == 1
    assert polar(C, 0.49, "svd").rank == 2
    assert procrustes(C, rtol=0.5).rank == 1


@pytest.mark.parametrize("fault", ["turned", "worst", "stretched"])
def test_a_wrong_iterate_does_not_get_a_certificate(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    C, _ = planted(80, 80, SPECTRA["conditioned"](80))
    right = ROUTES["qdwh"](C, CUT)
    assert right is not None
    assert right.certificate.holds
    turn = torch.linalg.matrix_exp(1e-4 * (randn(80, 80) - randn(80, 80).T))
    finish = halley._finish
    wrong = {"turned": lambda X: X @ turn, "worst": lambda X: -X, "stretched": lambda X: X * (1 + 1e-5)}[fault]
    monkeypatch.setattr(halley, "_finish", lambda X, tail: wrong(finish(X, tail)))
    for route in ("qdwh", "lift"):
        found = ROUTES[route](C, CUT)
        assert found is None or not found.certificate.holds
        assert polar(C, CUT, route).route == "eigh"


@functools.cache
def single_ones(rows: int, columns: int) -> tuple[list[Tensor], list[tuple[Polar, Tensor]]]:
    """Matrices of all spectra, with their polar factors by the plain route, and these completed."""
    n = min(rows, columns)
    spectra = [*SPECTRA.values(), lambda n: torch.zeros(n, dtype=torch.float64)]
    problems = [planted(rows, columns, spectrum(n))[0] for spectrum in spectra]
    alone = [polar(C, CUT, "svd") for C in problems]
    return problems, [(each, complete(each).dense()) for each in alone]


# Each setting with each of the others: inverses by halves (of 25) and at once, by the two routes, filled and not.
SETTINGS = [(False, 25, 0), (True, 25, 100), (True, 1024, 0), (False, 1024, 100)]


@pytest.mark.parametrize(("fill", "leaf", "few"), SETTINGS)
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (220, 250)])
def test_batched_polar_factors_equal_single_ones(
    rows: int, columns: int, fill: bool, leaf: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(symmetric, "_FEW", few)
    for name in ("_LEAF", "_PART", "_HALF", "_ONE_BY_ONE"):
        monkeypatch.setattr(symmetric, name, leaf)
    monkeypatch.setattr(solver, "together_bytes", lambda *_: 8 * rows * columns * 4)  # several batches
    problems, singles = single_ones(rows, columns)
    found = polar_together(problems, CUT, fill=fill)
    for one, (alone, filled) in zip(found, singles, strict=True):
        assert one.rank == alone.rank
        assert one.certificate.holds
        assert one.total == pytest.approx(alone.total, rel=1e-9)
        expected = filled if fill else alone.dense()
        assert float(((complete(one).dense() if fill else one.dense()) - expected).abs().max()) < 1e-7
    assert [one.route for one in found[:4]] == ["qdwh", "qdwh", "qdwh", "lift"]
    assert [one.route for one in found[4:]] == ["qdwh", "lift", "eigh"]


@pytest.mark.parametrize("cut", [1e-12, 1e-9, 1e-6, 1e-4, 1e-3, 0.03])
def test_the_iteration_keeps_the_order_at_any_cut(cut: float) -> None:
    """Lifted values stay on their side of the cut, and every determined value converges to 1."""
    steps = halley._steps(cut)
    values = torch.logspace(0, -16, 2000, dtype=torch.float64) / 1.05
    lifted = values.clone()
    for a, b, c in steps.heavy:
        lifted = lifted * (a + b * lifted**2) / (1 + c * lifted**2)
    above = values > cut / 1.05
    assert float(lifted[above].min()) >= steps.lifted > float(lifted[~above].max())
    for a, b, c in steps.tail[0]:
        lifted = lifted * (a + b * lifted**2) / (1 + c * lifted**2)
    assert float((1 - lifted[above]).abs().max()) < 0.021
    for route in ("qdwh", "lift"):
        C, _ = planted(90, 100, torch.cat([torch.linspace(1, 3 * cut, 86), torch.full((4,), cut / 10)]).double())
        found = polar(C, cut, route)
        assert found.rank == 86
        assert found.route == route or cut < 1e-10  # near the rounding, another route may be used
        assert float((found.dense() - polar(C, cut, "svd").dense()).abs().max()) < 1e-6 + 1e-17 / cut


def test_any_spectrum_is_split_at_the_cut() -> None:
    """For values over thirteen orders, some near the cut, the map equals that of the singular vectors."""
    for seed in range(6):
        values = 10 ** (-13 * torch.rand(120, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
        values[0] = 1.0
        near = (values / CUT).log().abs() < 0.1  # a value at the cut may fall on either side
        C, expected = planted(120, 150, values[~near].sort(descending=True).values)
        found = ROUTES["lift"](C, CUT)
        assert found is not None
        assert found.certificate.holds
        assert found.rank == int((values[~near] > CUT).sum())
        assert float((found.dense() - expected).norm() / expected.norm()) < 1e-6
        assert float((found.null.T @ expected).norm()) < 1e-6


def test_rank_deficient_matrices_fail_the_full_rank_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "LARGE", 64)
    problems = [planted(80, 130, SPECTRA[name](80))[0] for name in SPECTRA]
    for C, one in zip(problems, polar_together(problems, CUT), strict=True):
        alone = polar(C, CUT, "svd")
        assert one.rank == alone.rank
        assert float((one.dense() - alone.dense()).abs().max()) < 1e-7
    blind = halley.iterate(torch.stack(problems), CUT, nulls="none")
    assert [one is not None and one.certificate.holds for one in blind] == [True, True, True, False, False, False]


def test_null_directions_without_an_identity_image_are_paired_in_order() -> None:
    """Dead units: the source's last two and the target's first two, in a square problem."""
    values = torch.linspace(1, 0.1, 78, dtype=torch.float64)
    C = torch.zeros(80, 80, dtype=torch.float64)
    C[:78, 2:] = planted(78, 78, values)[0]
    maps = [complete(one).dense() for one in (*polar_together([C] * 4, CUT, fill=True), polar(C, CUT, "svd"))]
    for R in maps[:4]:
        assert float((R - maps[4]).abs().max()) < 1e-8


def test_the_gram_route_counts_values_near_the_cut_as_an_svd_does() -> None:
    """One Gram matrix is not enough: its rounding hides singular values below 1e-8."""
    values = torch.cat([torch.ones(60, dtype=torch.float64), CUT * torch.linspace(1.3, 0.7, 40, dtype=torch.float64)])
    C, _ = planted(100, 120, values)
    expected = int((np.linalg.svd(C.numpy(), compute_uv=False) > CUT * 1.0).sum())
    assert polar(C, CUT, "eigh").rank == polar(C, CUT, "svd").rank == pytest.approx(expected, abs=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_single_and_batched_maps_on_a_gpu_equal_those_of_the_cpu(spectrum: str) -> None:
    problems = [planted(rows, columns, SPECTRA[spectrum](min(rows, columns)))[0] for rows, columns in SHAPES]
    there = [complete(polar(C, CUT, "svd")).dense() for C in problems]
    for route in (None, *ROUTES):
        here = [complete(polar(C.cuda(), CUT, route)) for C in problems]
        together = [complete(polar_together([C.cuda()] * 4, CUT, fill=True)[1]) for C in problems]
        for one, other, expected in zip(here, together, there, strict=True):
            assert float((one.dense().cpu() - expected).abs().max()) < 1e-6
            assert float((other.dense().cpu() - expected).abs().max()) < 1e-6


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors that were created inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)
                self.peak = max(self.peak, sum(self.sizes.values()))
        return result


@pytest.mark.parametrize("spectrum", ["conditioned", "down to the cut", "a few null directions", "half of them null"])
@pytest.mark.parametrize(("rows", "columns", "many"), [(300, 300, 4), (150, 200, 10), (500, 250, 4)])
def test_solving_bytes_bounds_the_peak_memory_of_the_solver(rows: int, columns: int, many: int, spectrum: str) -> None:
    C, _ = planted(rows, columns, SPECTRA[spectrum](min(rows, columns)))
    matrices = [C.clone() for _ in range(many)]
    _, work = solving_bytes((rows, columns), 10**6, torch.device("cuda"))
    with Live() as live:
        found = polar_together(matrices, CUT, fill=True)
    assert all(one.certificate.holds for one in found)
    assert 0.4 * many * work < live.peak <= many * work
