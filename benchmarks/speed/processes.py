"""Measuring with one and with several gloo processes, each with one thread, and the bits of equal runs.

    python benchmarks/speed/processes.py --shapes small --depth 2 --samples 32 --out OUT

The towers of vit.py on the CPU. Every process builds the same models and the same samples, measures its part of the
batches and reduces the sums; models and samples are not in the time. One and several processes take turns; ratios are
taken within a turn, and their median is shown. On a machine with other work, look at CPU seconds: those of the process
that took most, which is what the wall clock would show on idle cores. Every bit of the covariances that a process owns
is compared between the turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import now, prepare, publish, table
from torch import distributed as dist
from torch import multiprocessing
from vit import SHAPES, Setting, loss


def work(rank: int, size: int, folder: str, options: argparse.Namespace) -> None:
    from tuneport.layers import TokenLayout
    from tuneport.measure.tokens import match_tokens
    from tuneport.pipeline import solve

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    setting = Setting(options)
    trial = prepare(
        setting.source,
        setting.task_vector,
        setting.target,
        setting.batches,
        loss=loss,
        match=match_tokens(*(TokenLayout(1, grid) for grid in setting.grids)),
        device="cpu",
    )
    spent = {"reduce_seconds": 0.0, "reduce_cpu_seconds": 0.0}
    reduced = solve.reduce_statistics

    def timed(*given: Any) -> Any:
        dist.barrier()  # waiting for the slowest is no part of it
        begun, used = now(setting.device), time.process_time()
        found = reduced(*given)
        spent["reduce_seconds"] = now(setting.device) - begun
        spent["reduce_cpu_seconds"] = time.process_time() - used
        return found

    solve.reduce_statistics = timed
    dist.barrier()
    started, used = now(setting.device), time.process_time()
    found = solve.measure(trial.measurement)
    dist.barrier()
    spent |= {"seconds": now(setting.device) - started, "cpu_seconds": time.process_time() - used}
    check = {
        str(key): hashlib.sha256(covariance.matrix.contiguous().numpy().tobytes()).hexdigest()
        for key, covariance in found.covariances.items()
    }
    Path(folder, f"{rank}.json").write_text(json.dumps({**spent, "check": check}))
    dist.destroy_process_group()


def measured(size: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (size, folder, options), nprocs=size)
        parts = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
    check = {key: value for part in parts for key, value in part["check"].items()}
    names = ("seconds", "cpu_seconds", "reduce_seconds", "reduce_cpu_seconds")
    return {**{name: max(part[name] for part in parts) for name in names}, "check": check}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--depth", type=int, help="use only this number of blocks of each")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.device, options.tf32 = "cpu", False
    load = os.getloadavg()[0]
    turns = [{size: measured(size, options) for size in options.processes} for _ in range(options.turns)]
    first = options.processes[0]
    lines = []
    for size in options.processes:
        mine = [turn[size] for turn in turns]
        ratios = [median(turn[first][name] / turn[size][name] for turn in turns) for name in ("seconds", "cpu_seconds")]
        times = [median(one[name] for one in mine) for name in ("seconds", "cpu_seconds", "reduce_seconds")]
        same = all(one["check"] == mine[0]["check"] for one in mine)
        lines.append([size, *times, *ratios, "yes" if same else "NO"])
    head = ["processes", "measure, s", "CPU s of one process", "of that reducing, s"]
    head += ["times faster", "times faster by CPU s", f"same bits in {options.turns} turns"]
    only = f", {options.depth} blocks" if options.depth else ""
    title = f"{options.shapes}{only}: N = {options.samples}, batches of {options.batch}, one thread each; medians of "
    title += f"{options.turns} turns; load of the machine before: {load:.1f} on {os.cpu_count()} cores\n\n"
    for turn in turns:
        for one in turn.values():
            del one["check"]
    data = {"head": head, "rows": lines, "turns": turns, "load": load}
    name = f"processes-{options.shapes}" + (f"-depth{options.depth}" if options.depth else "")
    publish(name, options.out, title + table(head, lines), data, torch.device("cpu"))


if __name__ == "__main__":
    main()
