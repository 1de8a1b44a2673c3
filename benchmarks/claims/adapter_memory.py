"""Peak memory of carrying a LoRA over as its factors, against carrying the same update as dense matrices.

    python benchmarks/claims/adapter_memory.py [--layers 12] [--source 768] [--target 1024] [--rank 8] [--out FILE.md]

One claim: the transport stage of a low-rank transfer makes no dense update. Both variants run in a process of their
own, on the same maps, which are solved beforehand; the task vector is made layer by layer when asked for, as from a
file. Memory is the peak of the resident set during `method.transfer`, less what was resident before it (Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

from tuneport.io.tensors import LazyMapping, TensorSpec
from tuneport.layers import Layer
from tuneport.maps import procrustes
from tuneport.maps.statistics import CrossCovariance, Statistics
from tuneport.methods import METHODS, Problem
from tuneport.pairing import LayerPair, Plan
from tuneport.task_vectors.low_rank import LowRank
from tuneport.task_vectors.vector import TaskVector


def square(width: int, block: int) -> Layer:
    return Layer(f"blocks.{block}.fc.weight", None, (width, width), "fc", "blocks", block)


def resident(field: str) -> int:
    """Bytes, from the kernel's own count: VmRSS now, VmHWM at most."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def child(options: argparse.Namespace) -> None:
    """Carry the update over in one of the two ways and print what it took."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    pairs = [LayerPair(square(options.source, i), square(options.target, i)) for i in range(options.layers)]
    covariances = {}
    for pair in pairs:
        for signal in ("input", "output_gradient"):
            found = CrossCovariance(options.source, options.target)
            signals = (torch.randn(64, width, generator=generator) for width in (options.source, options.target))
            found.update(*signals)
            covariances[pair.target.name, signal] = found
    statistics = Statistics(covariances)
    maps = procrustes.solve_maps(statistics, covariances, "none")
    procrustes.solve_maps = lambda _, keys, *__: {key: maps[key] for key in keys}  # not counted

    def update(name: str) -> LowRank | torch.Tensor:
        own = torch.Generator().manual_seed(hash(name) % 2**31)
        B = torch.randn(options.source, options.rank, generator=own)
        low = LowRank(B, torch.randn(options.rank, options.source, generator=own))
        return low if options.variant == "low-rank" else low.dense()

    names = [pair.source.weight for pair in pairs]
    rank = options.rank if options.variant == "low-rank" else None
    spec = TensorSpec((options.source, options.source), torch.float32, rank)
    problem = Problem(Plan(tuple(pairs)), TaskVector(LazyMapping(names, update), lambda _: spec), statistics, "none")
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve the transport unseen
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, started = resident("VmRSS"), time.perf_counter()
    moved = METHODS["bico"].transfer(problem)
    seconds = time.perf_counter() - started
    print(json.dumps({"peak": resident("VmHWM") - before, "seconds": seconds, "norm": moved.task_vector.norm()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--source", type=int, default=768)
    parser.add_argument("--target", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--variant", choices=["dense", "low-rank"], help="for the two processes of the run itself")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.variant is not None:
        child(options)
        return
    found = {}
    for variant in ("dense", "low-rank"):
        sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "source", "target", "rank")]
        command = [sys.executable, __file__, *sizes, "--variant", variant]
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        answer = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        found[variant] = json.loads(answer.stdout)
    dense, low = found["dense"], found["low-rank"]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    text = f"""# Memory of the transport stage: a LoRA as its factors, and as dense matrices

{options.layers} layers, {options.source} to {options.target} wide, rank {options.rank}, method bico.
The maps are solved beforehand and not counted: both ways need the same ones.

| | peak memory | seconds |
|---|---|---|
| dense | {dense["peak"] / 2**20:.1f} MiB | {dense["seconds"]:.3f} |
| low-rank | {low["peak"] / 2**20:.1f} MiB | {low["seconds"]:.3f} |
| ratio | {dense["peak"] / low["peak"]:.1f} | {dense["seconds"] / low["seconds"]:.1f} |

Norm of the result: {dense["norm"]:.6g} and {low["norm"]:.6g}. Times come from a shared machine, for orientation only.

- command: `python benchmarks/claims/adapter_memory.py {" ".join(sizes)}`
- machine: {platform.machine()}, {platform.system()}, {software}, one thread
- commit: {commit}, {datetime.date.today()}
"""
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
