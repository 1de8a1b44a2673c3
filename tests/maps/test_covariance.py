"""Sums of products against float64, and exact products of half-precision signals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tuneport.maps import statistics as products
from tuneport.maps.procrustes import procrustes
from tuneport.maps.statistics import CrossCovariance, add_product, are_half, energy, rank_cut, work_bytes

HALVES = [torch.bfloat16, torch.float16]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: Tensor, y: Tensor) -> Tensor:
    return x.double().T @ y.double()


def off(found: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.matrix_norm(found - wanted, 2) / torch.linalg.matrix_norm(wanted, 2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tokens", [1, 300, 5000])
def test_half_precision_products_are_exact_and_summed_in_float32(dtype: torch.dtype, tokens: int) -> None:
    x, y = (3 * randn(tokens, 1) + randn(tokens, width, seed=width) for width in (130, 170))
    x, y = x.to(dtype), y.to(dtype)
    total = torch.zeros(130, 170, dtype=torch.float64)
    add_product(total, x, y)
    assert off(total, exact(x, y)) < 2e-7
    assert float(energy(x)) == pytest.approx(float(x.double().square().sum()), rel=1e-6)


def test_wider_signals_are_multiplied_in_float64_to_the_bit() -> None:
    x, y = randn(700, 40), randn(700, 50, seed=1)
    for source, target in ((x, y), (x.bfloat16(), y), (x, y.half())):
        total, wanted = (torch.zeros(40, 50, dtype=torch.float64) for _ in range(2))
        add_product(total, source, target)
        for a, b in zip(source.chunk(2), target.chunk(2), strict=True):
            wanted.addmm_(a.double().T, b.double())
        assert torch.equal(total, wanted)
    assert torch.equal(energy(x), torch.linalg.vector_norm(x, dtype=torch.float64).square())
    assert not are_half(torch.bfloat16, torch.float32)


def test_blocks_of_the_product_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = randn(64, 96).bfloat16(), randn(64, 80, seed=1).bfloat16()
    whole, parts = (torch.zeros(96, 80, dtype=torch.float64) for _ in range(2))
    add_product(whole, x, y)
    monkeypatch.setattr(products, "BLOCK_ON_CPU", 7 * 80)
    add_product(parts, x, y)
    assert off(parts, whole) < 1e-7


@pytest.mark.parametrize("dtype", HALVES)
def test_kept_rows_are_summed_up_to_the_same_bits(dtype: torch.dtype) -> None:
    batches = [(randn(40, 60, seed=s).to(dtype), randn(40, 70, seed=s + 9).to(dtype)) for s in range(6)]
    kept, again = CrossCovariance(60, 70), CrossCovariance(60, 70)
    again.matrix = torch.zeros(60, 70, dtype=torch.float64)  # sums from the start
    for x, y in batches:
        kept.update(x, y)
        again.update(x.T.contiguous().T, y)  # the same numbers in another memory layout
    assert kept.rows is None or len(kept.rows) < 6
    assert torch.equal(kept.matrix, again.matrix)


def test_a_map_of_bfloat16_signals_is_that_of_float64_sums() -> None:
    latent = randn(4000, 100) * torch.logspace(0, -2, 100)
    mixes = [torch.linalg.qr(randn(width, 100, seed=width)).Q for width in (128, 160)]
    x, y = ((latent @ mix.T + 0.5).bfloat16() for mix in mixes)
    covariance = CrossCovariance(128, 160)
    for a, b in zip(x.split(900), y.split(900), strict=True):
        covariance.update(a, b)
    cut = rank_cut(torch.bfloat16, torch.float64, 160)
    found, wanted = procrustes(covariance), procrustes(exact(x, y), rtol=cut)
    assert found.rank == wanted.rank < 128
    assert float((found.matrix - wanted.matrix).norm() / wanted.matrix.norm()) < 1e-4


def test_half_precision_products_need_less_memory() -> None:
    cpu = torch.device("cpu")
    assert work_bytes(1000, (300, 400), torch.float32, cpu) == 8 * 1000 * 700
    assert work_bytes(1000, (300, 400), torch.bfloat16, cpu) == 4 * (1000 * 700 + 300 * 400)
    assert work_bytes(10**6, (3000, 4000), torch.bfloat16, cpu) == 4 * (16384 * 7000 + products.BLOCK_ON_CPU + 4000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", HALVES)
def test_on_a_gpu_the_sums_are_the_same_to_rounding(dtype: torch.dtype) -> None:
    x, y = (3 + randn(5000, width, seed=width) for width in (256, 320))
    x, y = x.to("cuda", dtype), y.to("cuda", dtype)
    total = torch.zeros(256, 320, dtype=torch.float64, device="cuda")
    add_product(total, x, y)
    # sums of positive products of 2,048 tokens, each time 16 at once and truncated to 24 bits
    assert off(total, exact(x, y)) < 2048 / 16 * 2**-23
