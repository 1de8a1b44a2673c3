"""Several gloo processes give what one gives, whatever their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from builders.toy import ToyViT, batches, finetuned, loss, plan
from tuneport.errors import TuneportError
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.result import Result
from tuneport.pipeline.transfer import run
from tuneport.runtime.distributed import processes, ranks


def result(**options: Any) -> Result:
    torch.manual_seed(0)
    source, target = ToyViT(), ToyViT(width=40, depth=3)
    pairs = plan(source, target).pairs
    given = {"loss": loss, "pairs": pairs, **options}
    return run(prepare(source, finetuned(source), target, batches(count=44, batch=8), **given))


def worker(rank: int, size: int, folder: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    try:
        with processes() as here:
            assert (here.rank, here.size) == (rank, size)
            found = result(**options)
        entries = {name: found.task_vector.dense(name) for name in found.task_vector}
        torch.save(
            (entries, [record.__dict__ for record in found.records], found.record["samples"]), f"{folder}/{rank}"
        )
    finally:
        dist.destroy_process_group()


def by_processes(size: int, folder: Path, **options: Any) -> list[Any]:
    folder.mkdir()
    multiprocessing.spawn(worker, (size, str(folder), options), nprocs=size)
    return [torch.load(folder / str(rank)) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_tokens": 33}, {"method": "theseus"}], ids=str)
def test_any_number_of_processes_gives_the_same_result(tmp_path: Path, options: dict[str, Any]) -> None:
    alone = result(**options)
    assert alone.task_vector
    for size in (2, 4):
        found = by_processes(size, tmp_path / str(size), **options)
        assert len(found) == size
        for entries, records, samples in found:  # every process has all of it
            assert samples == alone.record["samples"] == 44
            assert list(entries) == list(alone.task_vector)
            assert [record["rank_in"] for record in records] == [record.rank_in for record in alone.records]
            for name, entry in entries.items():
                expected = alone.task_vector.dense(name)
                assert float((entry - expected).norm()) <= 1e-6 * float(expected.norm()) + 1e-12
                assert torch.equal(entry, found[0][0][name])
    again = by_processes(2, tmp_path / "again", **options)
    first = torch.load(tmp_path / "2" / "0")
    assert again[0][0].keys() == first[0].keys()
    assert all(torch.equal(again[0][0][name], entry) for name, entry in first[0].items())


def one_batch_each(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    torch.manual_seed(0)
    source, target = ToyViT(), ToyViT()
    job = prepare(
        source, finetuned(source), target, batches(count=8, batch=8), loss=loss, pairs=plan(source, target).pairs
    )
    try:
        with pytest.raises(TuneportError, match=r"1 calibration batches cannot be split over 2 processes"):
            run(job)
        with pytest.raises(TuneportError, match=r"are not supported with several processes: pass a number as `scale`"):
            run(job, scale="auto")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_what_cannot_be_split_is_refused_at_once(tmp_path: Path) -> None:
    multiprocessing.spawn(one_batch_each, (2, str(tmp_path)), nprocs=2)


def test_one_process_is_nothing_special() -> None:
    with processes("cpu") as here:
        assert here == ranks()
        assert here.first
        assert here.size == 1
    assert not dist.is_initialized()
