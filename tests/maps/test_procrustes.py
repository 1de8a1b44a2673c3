"""Orthogonal maps and their evidence, against SciPy, NumPy and planted truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tuneport.errors import MethodError, TuneportError
from tuneport.maps.procrustes import Alignment, procrustes, procrustes_together, solve_groups, solve_maps
from tuneport.maps.statistics import CrossCovariance, Statistics, WeightGradient, rank_cut

SHAPES = [(12, 12), (8, 13), (13, 8)]
FLAT = [(12, 12, 5), (8, 13, 5), (13, 8, 5), (10, 10, 1), (6, 6, 5)]  # widths and a rank below both


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rotation(width: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(randn(width, width, seed=seed)).Q


def planted(source: int, target: int, rank: int, seed: int = 0, tokens: int = 300) -> tuple[Tensor, Tensor]:
    """Signals that share `rank` latent directions and nothing else."""
    latent = randn(tokens, rank, seed=seed)
    return latent @ randn(rank, source, seed=seed + 1), latent @ randn(rank, target, seed=seed + 2)


def streamed(x: Tensor, y: Tensor, splits: list[int] | None = None) -> CrossCovariance:
    covariance = CrossCovariance(x.shape[1], y.shape[1])
    for a, b in zip(x.split(splits or len(x)), y.split(splits or len(y)), strict=True):
        covariance.update(a, b)
    return covariance


def polar_oracle(matrix: Tensor, rank: int) -> Tensor:
    U, _, Vh = np.linalg.svd(matrix.numpy(), full_matrices=False)
    return torch.from_numpy(U[:, :rank] @ Vh[:rank])


def close(one: Tensor, other: Tensor | np.ndarray, tolerance: float) -> bool:
    return float((one - torch.as_tensor(other)).abs().max()) <= tolerance


def test_procrustes_agrees_with_scipy_on_square_input() -> None:
    x, y = randn(200, 12), randn(200, 12, seed=1)
    expected, _ = scipy.linalg.orthogonal_procrustes(x.numpy(), y.numpy())
    found = procrustes(streamed(x, y))
    assert close(found.matrix, expected, 1e-10)
    assert found.rank == 12


@pytest.mark.parametrize(("source", "target"), SHAPES)
@pytest.mark.parametrize("completion", ["none", "svd"])
def test_procrustes_agrees_with_numpy_at_full_rank(source: int, target: int, completion) -> None:
    x, y = randn(200, source), randn(200, target, seed=1)
    found = procrustes(x.T @ y, completion=completion)
    assert close(found.matrix, polar_oracle(x.T @ y, min(source, target)), 1e-10)
    assert found.rank == min(source, target)
    assert found.residual is None


@pytest.mark.parametrize(("source", "target", "rank"), FLAT)
def test_below_full_rank_none_keeps_the_determined_part(source: int, target: int, rank: int) -> None:
    x, y = planted(source, target, rank)
    found = procrustes(streamed(x, y), completion="none")
    assert found.rank == rank
    assert close(found.matrix, polar_oracle(x.T @ y, rank), 1e-8)
    assert close(found.matrix @ found.matrix.T @ found.matrix, found.matrix, 1e-10)  # a partial isometry
    assert torch.linalg.matrix_rank(found.matrix) == rank


@pytest.mark.parametrize(("source", "target", "rank"), FLAT)
def test_below_full_rank_svd_fills_up_to_an_isometry(source: int, target: int, rank: int) -> None:
    x, y = planted(source, target, rank)
    R = procrustes(streamed(x, y), completion="svd").matrix
    gram = R @ R.T if source <= target else R.T @ R
    assert close(gram, torch.eye(min(source, target)), 1e-10)
    # the determined part is untouched: on the span of x both completions agree
    assert close(x @ R, x @ polar_oracle(x.T @ y, rank), 1e-8)


def test_svd_completion_of_a_space_with_itself_is_the_identity() -> None:
    x, _ = planted(12, 12, 5)
    assert close(procrustes(streamed(x, x), completion="svd").matrix, torch.eye(12), 1e-10)


@pytest.mark.parametrize(("source", "target", "rank"), [*FLAT, (12, 12, 12), (8, 13, 8), (13, 8, 8)])
@pytest.mark.parametrize("completion", ["none", "svd"])
def test_the_map_depends_on_neither_row_order_nor_batches(source: int, target: int, rank: int, completion) -> None:
    x, y = planted(source, target, rank)
    one = procrustes(streamed(x, y), completion=completion)
    for seed, splits in ((5, [300]), (6, [1, 99, 200]), (7, [150, 150])):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(seed))
        other = procrustes(streamed(x[order], y[order], splits), completion=completion)
        assert other.rank == one.rank
        assert close(other.matrix, one.matrix, 1e-10)


@pytest.mark.parametrize("shift", [3, 6])
def test_svd_completion_is_stable_for_directions_without_an_identity_image(shift: int) -> None:
    """Some units are dead in the source only, some in the target only, some in both."""
    x, y = torch.zeros(200, 14, dtype=torch.float64), torch.zeros(200, 14, dtype=torch.float64)
    x[:, :6] = randn(200, 6)
    y[:, shift : shift + 6] = x[:, :6] @ rotation(6, 1)
    maps = []
    for seed in range(4):
        order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
        maps.append(procrustes(streamed(x[order], y[order], [50] * 4), completion="svd").matrix)
    assert close(maps[0] @ maps[0].T, torch.eye(14), 1e-10)
    assert close(x @ maps[0], y, 1e-10)
    for other in maps[1:]:
        assert close(other, maps[0], 1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_the_rank_cut_finds_the_planted_rank_of_coarse_signals(dtype: torch.dtype, seed: int) -> None:
    x, y = planted(64, 64, 20, seed=10 * seed, tokens=1000)
    assert procrustes(streamed(x.to(dtype), y.to(dtype))).rank == 20
    assert procrustes(streamed(x.to(dtype), y)).rank == 20  # the coarser of the two decides


@pytest.mark.parametrize("tokens", [300, 3000, 30000])
@pytest.mark.parametrize(("source", "target"), [(16, 24), (24, 16), (48, 64)])
def test_rounding_of_one_signal_does_not_count_as_a_direction(source: int, target: int, tokens: int) -> None:
    """Gradients behind a LayerNorm have zero mean up to rounding; the wider signal has other directions."""
    x, y = randn(tokens, source), randn(tokens, target, seed=1)
    narrow, wide = (x, y) if source < target else (y, x)
    wide[:, : narrow.shape[1]] += 3 * narrow
    narrow -= narrow.mean(1, keepdim=True)
    exact, rounded = streamed(x, y), streamed(x.float(), y.float())
    most = min(source, target)
    assert procrustes(exact).rank == procrustes(rounded).rank == most - 1
    assert close(procrustes(rounded, completion="none").matrix, procrustes(exact, completion="none").matrix, 1e-5)
    assert close(procrustes(rounded).matrix, procrustes(exact).matrix, 1e-5)


def test_the_rank_cut_is_the_larger_of_two_floors() -> None:
    assert rank_cut(torch.float64, torch.float64, 100) == 100 * 2.0**-52
    assert rank_cut(torch.float32, torch.float32, 100) == 100 * 2.0**-23
    assert rank_cut(torch.bfloat16, torch.float64, 100) == (4 * 2.0**-7) ** 2


def test_rtol_overrides_the_rank_cut() -> None:
    C = torch.diag(torch.tensor([1.0, 0.5, 0.01], dtype=torch.float64))
    assert procrustes(C, rtol=0.1, completion="none").rank == 2
    assert procrustes(C, rtol=0.001).rank == 3


def test_zero_covariance_has_rank_zero() -> None:
    covariance = streamed(torch.zeros(9, 4, dtype=torch.float64), randn(9, 6))
    none, svd = (procrustes(covariance, completion=completion) for completion in ("none", "svd"))
    assert none.rank == svd.rank == 0
    assert not none.matrix.any()
    assert torch.equal(svd.matrix, torch.eye(4, 6, dtype=torch.float64))
    assert none.residual == svd.residual == 1.0


@pytest.mark.parametrize("completion", ["none", "svd"])
def test_the_same_input_gives_the_same_bits(completion) -> None:
    x, y = planted(13, 9, 4)
    one, two = (procrustes(streamed(x, y, [100, 200]), completion=completion) for _ in range(2))
    assert torch.equal(one.matrix, two.matrix)
    assert one.residual == two.residual


@pytest.mark.parametrize("scale", [1.0, 3.7])
def test_residual_is_zero_for_a_planted_rotation(scale: float) -> None:
    x = randn(100, 10)
    found = procrustes(streamed(x, scale * x @ rotation(10, 4)))
    assert found.residual == pytest.approx(0, abs=1e-6)
    assert close(found.matrix, rotation(10, 4), 1e-10)


def test_residual_is_one_for_orthogonal_signals() -> None:
    basis = rotation(50, 2)
    found = procrustes(streamed(basis[:, :5], basis[:, 5:12]))
    assert found.residual == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("source", "target"), SHAPES)
@pytest.mark.parametrize("completion", ["none", "svd"])
def test_residual_follows_its_definition(source: int, target: int, completion) -> None:
    x, y = planted(source, target, 4)
    x, y = x + randn(300, source, seed=8), y + randn(300, target, seed=9)
    found = procrustes(streamed(x, y), completion=completion)
    cosine = float((x @ found.matrix * y).sum() / (x.norm() * y.norm()))
    assert 0 < cosine < 1
    assert found.residual == pytest.approx((1 - cosine**2) ** 0.5, abs=1e-10)


def test_streamed_covariance_is_the_product() -> None:
    x, y = randn(70, 4), randn(70, 6, seed=1)
    covariance = streamed(x, y, [1, 30, 39])
    assert close(covariance.matrix, x.numpy().T @ y.numpy(), 1e-12)
    assert float(covariance.source_energy) == pytest.approx(float((x**2).sum()))
    assert float(covariance.target_energy) == pytest.approx(float((y**2).sum()))
    assert covariance.tokens == 70


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_covariances_with_nan_or_inf_are_refused(bad: float) -> None:
    C = randn(3, 3)
    C[1, 1] = bad
    with pytest.raises(TuneportError, match="the cross-covariance holds NaN or Inf: check the models and"):
        procrustes(C)


def test_errors_name_shapes_and_choices() -> None:
    covariance = CrossCovariance(3, 4)
    with pytest.raises(TuneportError, match=r"signals must be \(M, 3\) and \(M, 4\) .*, got \(5, 3\) and \(5, 3\)"):
        covariance.update(randn(5, 3), randn(5, 3))
    with pytest.raises(TuneportError, match=r"for M paired tokens, got \(5, 3\) and \(6, 4\)"):
        covariance.update(randn(5, 3), randn(6, 4))
    with pytest.raises(TuneportError, match=r"must be a matrix, got shape \(2, 3, 4\)"):
        procrustes(randn(2, 3, 4))
    with pytest.raises(MethodError, match=r"must be one of \('none', 'svd'\), got 'qr' instead"):
        procrustes(randn(3, 3), completion="qr")  # type: ignore[arg-type]
    assert covariance.tokens == 0
    assert not covariance.matrix.any()


widths = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(source=widths, target=widths, tokens=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_completed_maps_are_isometries_for_any_shape(source: int, target: int, tokens: int, seed: int) -> None:
    x, y = randn(tokens, source, seed=seed), randn(tokens, target, seed=seed + 1)
    found = procrustes(streamed(x, y), completion="svd")
    R = found.matrix
    assert R.shape == (source, target)
    assert found.rank <= min(source, target, tokens)
    assert close(R @ R.T if source <= target else R.T @ R, torch.eye(min(R.shape)), 1e-9)
    assert found.residual is not None
    assert 0 <= found.residual <= 1


@settings(max_examples=40, deadline=None)
@given(source=widths, target=widths, seed=st.integers(0, 10_000))
def test_no_isometry_fits_better(source: int, target: int, seed: int) -> None:
    """The solution maximises tr(R^T C), as Procrustes demands."""
    C = randn(source, target, seed=seed)
    best = float((procrustes(C).matrix * C).sum())
    assert best == pytest.approx(float(np.linalg.svd(C.numpy(), compute_uv=False).sum()))
    big = rotation(max(source, target), seed + 1)
    assert float((big[:source, :target] * C).sum()) <= best + 1e-9


def test_weight_gradient_equals_a_loop_over_samples() -> None:
    x, g = randn(37, 5, 4), randn(37, 5, 3, seed=1)
    gradient = WeightGradient((3, 4))
    gradient.update(x[:20], g[:20])
    gradient.update(x[20:], g[20:])
    total, votes = np.zeros((3, 4)), np.zeros((3, 4), dtype=int)
    for sample in range(37):
        one = sum(np.outer(g[sample, t].numpy(), x[sample, t].numpy()) for t in range(5))
        total += one
        votes += np.sign(one).astype(int)
    assert close(gradient.total, total, 1e-12)
    assert gradient.votes.tolist() == votes.tolist()
    assert close(gradient.bias_total, g.sum((0, 1)), 1e-12)
    assert gradient.bias_votes.tolist() == g.sum(1).sign().sum(0).int().tolist()
    assert gradient.samples == 37


def test_weight_gradients_of_half_precision_neither_overflow_nor_vanish() -> None:
    x, g = torch.full((2, 9, 1), 160.0), torch.full((2, 9, 1), 160.0)
    large, small = WeightGradient((1, 1)), WeightGradient((1, 1))
    large.update(x.half(), g.half())
    assert float(large.total) == 2 * 9 * 160.0**2
    small.update((x * 2.0**-20).half(), (g * 2.0**-20).half())
    assert float(small.total) == 2 * 9 * 160.0**2 * 2.0**-40


def test_a_shared_covariance_is_solved_once() -> None:
    shared, own = streamed(*planted(6, 6, 3)), streamed(randn(50, 6), randn(50, 6, seed=1))
    statistics = Statistics({("q", "input"): shared, ("k", "input"): shared, ("o", "input"): own})
    maps = solve_maps(statistics, statistics)
    assert list(maps) == list(statistics)
    q = maps["q", "input"]
    assert maps["k", "input"] is q
    assert torch.equal(q.matrix, procrustes(shared).matrix)
    assert torch.equal(maps["o", "input"].matrix, procrustes(own).matrix)
    none = solve_maps(statistics, [("q", "input")], "none")["q", "input"]
    assert torch.equal(none.matrix, procrustes(shared, completion="none").matrix)
    assert ("q", "input") in statistics
    assert ("q", "output") not in statistics
    assert list(statistics) == [("q", "input"), ("k", "input"), ("o", "input")]


def test_statistics_of_two_halves_add_up_to_the_whole() -> None:
    x, y = randn(60, 6), randn(60, 5, seed=1)
    inputs, gradients = randn(10, 3, 4), randn(10, 3, 2, seed=1)

    def part(rows: slice, samples: slice) -> Statistics:
        shared, own = streamed(x[rows], y[rows]), streamed(x[rows], x[rows])
        weight = WeightGradient((2, 4))
        weight.update(inputs[samples], gradients[samples])
        covariances = {("q", "input"): shared, ("k", "input"): shared, ("o", "input"): own}
        return Statistics(covariances, {"o": weight}, len(inputs[samples]), {"forward": 1, "backward": 1})

    whole = part(slice(None), slice(None))
    total = part(slice(0, 20), slice(0, 3)) + part(slice(20, None), slice(3, None))
    for key in whole:
        assert close(total.covariances[key].matrix, whole.covariances[key].matrix, 1e-12)
        assert total.covariances[key].tokens == 60
        assert float(total.covariances[key].target_energy) == pytest.approx(float(whole.covariances[key].target_energy))
    assert total.covariances["q", "input"] is total.covariances["k", "input"]
    assert close(total.weight_gradients["o"].total, whole.weight_gradients["o"].total, 1e-12)
    assert close(total.weight_gradients["o"].bias_total, whole.weight_gradients["o"].bias_total, 1e-12)
    assert total.weight_gradients["o"].votes.tolist() == whole.weight_gradients["o"].votes.tolist()
    assert (total.samples, total.weight_gradients["o"].samples) == (10, 10)
    assert total.passes == {"forward": 2, "backward": 2}
    assert (whole + Statistics()).samples == (Statistics() + whole).samples == 10


def test_few_tokens_give_the_map_of_the_dense_covariance() -> None:
    """With fewer tokens than the width, the small problem gives the map of the full one."""
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(10, width, generator=generator, dtype=torch.float64) for width in (120, 150))
    covariance = CrossCovariance(120, 150)
    covariance.update(X, Y)
    found = procrustes(covariance, completion="none")
    whole = procrustes(covariance.matrix, completion="none")
    assert found.rank == whole.rank == 10
    torch.testing.assert_close(found.matrix, whole.matrix, rtol=0, atol=1e-10)
    filled = procrustes(covariance)
    torch.testing.assert_close(filled.matrix @ filled.matrix.T, torch.eye(120, dtype=torch.float64))
    torch.testing.assert_close(filled.matrix, procrustes(covariance.matrix).matrix, rtol=0, atol=1e-9)


def test_tokens_are_kept_while_they_are_few_and_summed_up_to_the_same_bits() -> None:
    X, Y = randn(60, 40, dtype=torch.float32), randn(60, 50, seed=1, dtype=torch.float32)
    kept, summed = CrossCovariance(40, 50), CrossCovariance(40, 50)
    summed.matrix = torch.zeros(40, 50, dtype=torch.float64)
    sizes = []
    for part in torch.arange(60).split(5):
        kept.update(X[part], Y[part])
        summed.update(X[part], Y[part])
        sizes.append(kept.nbytes)
        assert torch.equal(kept.matrix, summed.matrix)
        assert (kept.rows is None) == (2 * kept.tokens * 90 * 4 > 40 * 50 * 8)
    assert sizes[0] < sizes[1] < 40 * 50 * 8 == sizes[-1]
    halves = [streamed(X[part].double(), Y[part].double()) for part in (slice(0, 5), slice(5, 10))]
    both = halves[0] + halves[1]
    assert both.rows is not None
    assert both.tokens == 10
    torch.testing.assert_close(both.matrix, X[:10].double().T @ Y[:10].double())


def test_groups_are_solved_in_batches_that_fit_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU solves one group at a time, an accelerator as many as fit, in batches of similar size."""
    covariances = {(str(index), "input"): streamed(randn(50, 6, seed=index), randn(50, 6)) for index in range(5)}
    groups = [[key] for key in covariances]
    calls: list[int] = []

    def counted(*given: Any) -> dict[tuple[str, str], Alignment]:
        found = solve_maps(*given)
        calls.append(len(found))
        return found

    monkeypatch.setattr("tuneport.maps.procrustes.solve_maps", counted)
    one_by_one = list(solve_groups(Statistics(covariances), groups))
    assert [list(maps) for maps in one_by_one] == groups
    assert calls == [1, 1, 1, 1, 1]
    monkeypatch.setattr(CrossCovariance, "device", torch.device("cuda"))
    monkeypatch.setattr("tuneport.maps.procrustes.HELD", 8 * 6 * 6 * 4)  # four of the five maps
    calls.clear()
    batched = list(solve_groups(Statistics(covariances), groups, budget=1))
    assert calls == [2, 2, 1]  # at most half of all five each
    for one, other in zip(one_by_one, batched, strict=True):
        assert all(torch.equal(one[key].matrix, other[key].matrix) for key in one)


def test_tokens_without_a_signal_change_nothing() -> None:
    x, y = randn(60, 20), randn(60, 30)
    x[2:58] = 0.0
    y[1] = 0.0
    plain = CrossCovariance(20, 30)
    plain.matrix = x.T @ y
    sparse = CrossCovariance(20, 30)
    for part in range(0, 60, 20):
        sparse.update(x[part : part + 20], y[part : part + 20])
    assert sparse.tokens == 60
    assert sparse.most == 3
    assert torch.allclose(sparse.matrix, x.T @ y, atol=1e-12)
    assert float(sparse.source_energy) == pytest.approx(float(x.square().sum()))
    assert procrustes(sparse).rank == procrustes(plain).rank == 3
    assert float((procrustes(sparse).matrix - procrustes(plain).matrix).abs().max()) < 1e-9


def test_batched_maps_equal_those_solved_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batched solver on a CPU, for several shapes, cuts and ranks, few tokens, and NaN."""
    generator = torch.Generator().manual_seed(3)
    covariances = []
    for rows, columns, tokens, rank in [(70, 90, 400, 70), (70, 90, 400, 30), (90, 70, 300, 69), (70, 90, 20, 20)] * 4:
        core = torch.randn(tokens, rank, generator=generator)
        sides = [core @ torch.randn(rank, width, generator=generator) for width in (rows, columns)]
        covariances.append(CrossCovariance(rows, columns))
        covariances[-1].update(*sides)
    alone = [procrustes(one) for one in covariances]
    monkeypatch.setattr(CrossCovariance, "device", torch.device("cuda"))
    together = procrustes_together(covariances)
    assert {"qdwh", "lift"} < {one.route for one in together}
    for one, other in zip(together, alone, strict=True):
        assert one.rank == other.rank
        assert one.residual == pytest.approx(other.residual, abs=1e-9)
        assert torch.allclose(one.matrix, other.matrix, atol=1e-7)
    covariances[1].matrix = torch.full((70, 90), torch.nan, dtype=torch.float64)
    with pytest.raises(TuneportError, match="the cross-covariance holds NaN or Inf"):
        procrustes_together(covariances)
