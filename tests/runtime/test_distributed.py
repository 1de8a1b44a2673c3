"""Several gloo processes give the result of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from builders.processes import run_together
from builders.runs import measured, prepare, run
from builders.toy import ToyViT, batches, finetuned, loss, plan
from tuneport.methods import BilinearAlignment, Method, Problem, Transfer, get_method
from tuneport.pipeline import solve
from tuneport.pipeline.transfer import Result
from tuneport.processes import Ranks, processes, ranks
from tuneport.runtime import distributed
from tuneport.runtime.distributed import gather_entries
from tuneport.task_vectors.low_rank import LowRank

SIZES = {"two": 2, "again": 2, "four": 4}


class Whole(BilinearAlignment):
    """BiCo as a method that moves all layers at once."""

    by_layer = False

    def transfer(self, problem: Problem) -> Transfer:
        assert {key[0] for key in problem.statistics} == {pair.target.name for pair in problem.plan.pairs}
        return super().transfer(problem)


def result(method: str | Method = "bico", **options: Any) -> Result:
    torch.manual_seed(0)
    source, target = ToyViT(), ToyViT(width=40, depth=3)
    pairs = plan(source, target).pairs
    given = {"loss": loss, "pairs": pairs, "signals": method, **options}
    return run(prepare(source, finetuned(source), target, batches(count=44, batch=8), **given), method)


def worker(rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    try:
        with processes() as here:
            assert (here.rank, here.size) == (rank, size)
            found = result(**options)
            if size == 2:
                bico = get_method("bico")
                assert isinstance(bico, BilinearAlignment)
                whole = result(Whole(**vars(bico))).task_vector
                torch.save({name: whole.dense(name) for name in whole}, f"{folder}/{rank}.whole")
                torch.save(gather_entries(entries_of(rank)), f"{folder}/{rank}.entries")
        entries = {name: found.task_vector.dense(name) for name in found.task_vector}
        torch.save(
            (entries, [record.__dict__ for record in found.records], found.record["samples"]), f"{folder}/{rank}"
        )
    finally:
        dist.destroy_process_group()


def entries_of(rank: int) -> dict[str, Any]:
    """Entries of every kind, with other values in each process."""
    values = torch.arange(12.0).reshape(3, 4) / 7 + rank
    return {
        f"{rank}.dense": values.T,  # not contiguous
        f"{rank}.half": values.bfloat16(),
        f"{rank}.scalar": values[0, 1],
        f"{rank}.empty": values[:0],
        f"{rank}.low": LowRank(values, values.double().T[:, :2]),
    }


def by_processes(size: int, folder: Path, **options: Any) -> list[Any]:
    folder.mkdir()
    run_together(worker, (size, str(folder), options), size)
    return [torch.load(folder / str(rank)) for rank in range(size)]


def assert_same_result(found: list[Any], alone: Result) -> None:
    """Every process has the whole result, the same to the bit, and that of one process but for rounding.

    All signals have the same bits; only the order of the float64 sums differs. 1e-6 leaves a factor of 1e9 for the
    condition of the maps, and covers the rounding of the result to float32.
    """
    assert alone.task_vector
    for entries, records, samples in found:
        assert samples == alone.record["samples"] == 44
        assert list(entries) == list(alone.task_vector)
        assert [record["rank_in"] for record in records] == [record.rank_in for record in alone.records]
        for name, entry in entries.items():
            expected = alone.task_vector.dense(name)
            assert float((entry - expected).norm()) <= 1e-6 * float(expected.norm()) + 1e-12
            assert torch.equal(entry, found[0][0][name])


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """In the default run; the tests with more processes and options are slow."""
    two = by_processes(2, tmp_path / "two")
    assert_same_result(two, result())
    for rank in range(2):
        whole = torch.load(tmp_path / "two" / f"{rank}.whole")
        assert all(torch.equal(entry, two[0][0][name]) for name, entry in whole.items())
        assert list(whole) == list(two[0][0])
    expected = entries_of(0) | entries_of(1)
    for rank in range(2):
        entries = torch.load(tmp_path / "two" / f"{rank}.entries", weights_only=False)
        assert list(entries) == list(expected)
        for name, entry in entries.items():
            sent = expected[name]
            parts = (
                [(entry.out_factor, sent.out_factor), (entry.in_factor, sent.in_factor)]
                if isinstance(sent, LowRank)
                else [(entry, sent)]
            )
            for one, other in parts:
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


def test_the_shares_of_two_processes_draw_the_tokens_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    source, target = ToyViT(), ToyViT(width=40, depth=3)
    given = {"loss": loss, "pairs": plan(source, target).pairs, "signals": "bico", "max_tokens": 33}
    job = prepare(source, finetuned(source), target, batches(count=44, batch=8), **given)
    whole = measured(job)
    monkeypatch.setattr(solve, "reduce_statistics", lambda found, *_, **__: found)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(distributed, "ranks", lambda rank=rank: Ranks(rank, 2))
        parts.append(measured(job))
    total = parts[0] + parts[1]
    assert [part.samples for part in parts] == [24, 20]
    assert list(total.covariances) == list(whole.covariances)
    for key, expected in whole.covariances.items():
        found = total.covariances[key]
        assert found.tokens == expected.tokens
        # the signals have the same bits; sums of 33 products in float64 differ by 33 eps of their sizes at most
        assert float((found.matrix - expected.matrix).abs().max()) <= 33 * 2.3e-16 * float(expected.whole)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_tokens": 33}, {"method": "theseus"}], ids=str)
def test_any_number_of_processes_gives_the_same_result(tmp_path: Path, options: dict[str, Any]) -> None:
    alone = result(**options)
    two, again, four = (by_processes(size, tmp_path / name, **options) for name, size in SIZES.items())
    assert_same_result(two, alone)
    assert_same_result(four, alone)
    assert again[0][0].keys() == two[0][0].keys()
    assert all(torch.equal(again[0][0][name], entry) for name, entry in two[0][0].items())


def test_one_process_needs_no_process_group() -> None:
    with processes("cpu") as here:
        assert here == ranks()
        assert here.first
        assert here.size == 1
    assert not dist.is_initialized()
