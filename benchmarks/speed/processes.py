"""Measuring with one and with several gloo processes, each with one thread, and the bits of two equal runs.

    python benchmarks/speed/processes.py --shapes small --samples 32 --out OUT

The towers of vit.py on the CPU. Every process builds the same models and the same samples, measures its part of the
batches and reduces the sums; the time is that of the slowest process, models and samples excluded. The sum over all
entries of the covariances that a process owns is compared between two runs with as many processes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from record import now, publish, table
from torch import distributed as dist
from torch import multiprocessing
from vit import SHAPES, Setting, loss


def work(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    from tuneport.capture import match_tokens
    from tuneport.layers import TokenLayout
    from tuneport.pipeline import measure_job
    from tuneport.preparation import prepare
    from tuneport.task_vector import TaskVector

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    setting = Setting(options)
    job = prepare(
        setting.source,
        TaskVector(setting.task_vector),
        setting.target,
        setting.batches,
        loss=loss,
        match=match_tokens(*(TokenLayout(1, grid) for grid in setting.grids)),
        device="cpu",
    )
    dist.barrier()
    started = now(setting.device)
    found = measure_job(job)
    dist.barrier()
    seconds = now(setting.device) - started
    check = {str(key): float(covariance.matrix.sum()) for key, covariance in found.covariances.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps({"seconds": seconds, "check": check}))
    dist.destroy_process_group()


def measured(size: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (size, folder, options), nprocs=size)
        parts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    check = {key: value for part in parts for key, value in part["check"].items()}
    return {"seconds": max(part["seconds"] for part in parts), "check": check}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.device, options.tf32 = "cpu", False
    lines = []
    for size in options.processes:
        one, two = measured(size, options), measured(size, options)
        best = min(one["seconds"], two["seconds"])
        base = best if not lines else lines[0][1]
        lines.append([size, best, base / best, "yes" if one["check"] == two["check"] else "NO"])
    head = ["processes", "measure, s (better of two)", "times faster", "same bits twice"]
    title = f"{options.shapes}: N = {options.samples}, batches of {options.batch}, one thread each\n\n"
    data = {"head": head, "rows": lines}
    publish(f"processes-{options.shapes}", options.out, title + table(head, lines), data, torch.device("cpu"))


if __name__ == "__main__":
    main()
