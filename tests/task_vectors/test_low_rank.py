"""Low-rank entries against their dense form, and truncation against Eckart and Young."""

from __future__ import annotations

import pytest
import torch

from tuneport.errors import TuneportError
from tuneport.task_vectors.low_rank import LowRank, truncate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1, 3, 9])
def test_low_rank_against_its_dense_form(rank: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    out, in_ = (torch.randn(*shape, generator=generator, dtype=dtype) for shape in ((6, rank), (rank, 4)))
    entry = LowRank(out, in_)
    product = entry.out_factor.double() @ entry.in_factor.double()
    assert entry.shape == (6, 4)
    assert entry.rank == rank
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert entry.dense().dtype == entry.dtype == expected
    torch.testing.assert_close(entry.dense(), product.to(expected))
    assert entry.norm() == pytest.approx(float(torch.linalg.matrix_norm(product)), rel=1e-12)
    for scaled in (entry * -3.0, -3.0 * entry):
        torch.testing.assert_close(scaled.dense(), (-3 * product).to(expected))


@pytest.mark.parametrize(("out", "in_"), [((6, 2), (3, 4)), ((6,), (6, 4)), ((1, 6, 2), (2, 4))])
def test_factors_that_do_not_fit(out: tuple[int, ...], in_: tuple[int, ...]) -> None:
    with pytest.raises(TuneportError) as caught:
        LowRank(torch.zeros(out), torch.zeros(in_))
    assert str(caught.value) == f"low-rank factors must be (d_out, r) and (r, d_in), got {out} and {in_}."


@pytest.mark.parametrize("shape", [(12, 9), (9, 12), (6, 3, 4, 4)])
def test_truncation_is_optimal_and_reports_the_lost_energy(shape: tuple[int, ...]) -> None:
    update = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(update.flatten(1).double())
    total = float(singular.square().sum())
    for rank in (1, 3, 6):
        low, lost = truncate(update, rank=rank)
        assert (low.rank, low.shape) == (rank, shape)
        error = float((update - low.dense()).double().square().sum())
        assert error == pytest.approx(float(singular[rank:].square().sum()), rel=1e-4, abs=1e-9)  # Eckart and Young
        assert lost == pytest.approx(error / total, rel=1e-4, abs=1e-9)
    for energy in (0.5, 0.9, 0.99, 1.0):
        low, lost = truncate(update, energy=energy)
        assert lost <= 1 - energy + 1e-9
        if low.rank > 1:
            assert truncate(update, rank=low.rank - 1)[1] > 1 - energy
    assert truncate(update, energy=1.0)[0].rank == len(singular)
    torch.testing.assert_close(truncate(update, energy=1.0)[0].dense(), update, atol=1e-5, rtol=1e-4)
    low = LowRank(torch.randn(shape[0], 5), torch.randn(5, *shape[1:]))
    assert truncate(low) == (low, 0.0)
    assert truncate(low, rank=5) == (low, 0.0)
    cut, lost = truncate(low, rank=2)
    again, same = truncate(low.dense(), rank=2)
    torch.testing.assert_close(cut.dense(), again.dense(), atol=1e-4, rtol=1e-3)
    assert lost == pytest.approx(same, rel=1e-4)
    assert truncate(torch.zeros(3, 3), energy=0.9)[0].rank == 1
    with pytest.raises(TuneportError, match=r"pass `rank=R` or `energy=0\.95`"):
        truncate(update)
