"""A transfer whose models, change and result are larger than the memory budget of the device.

    python benchmarks/speed/offload.py --shapes 8b --device cuda --max-tokens 1024 --memory-budget 21GiB --out OUT

The models of llama.py with random weights and a full change in every linear layer of the blocks, kept in RAM. First the
plan: what lives where, runs over the data, expected peak. Then the transfer within the budget, with the
device's peak. With `--compare` the same transfer also runs before that without a budget, everything on the device, and
the results are compared bit by bit (deterministic kernels are asked for, for both). `tiny` is a trial for the CPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from llama import SHAPES, loss, make, random_change
from record import now, peak_memory, prepare, publish, table
from torch import Tensor


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def checksum(tensor: Tensor) -> int:
    """A number that changes with any bit of a float32 tensor."""
    total = 0
    for part in tensor.flatten().split(2**24):
        bits = part.to(torch.float32).view(torch.int32).long()
        weights = torch.arange(1, 2 * len(bits), 2, device=bits.device)
        total = (total * 31 + int((bits * weights).sum())) % 2**63
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--length", type=int, default=256, help="tokens per text")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--memory-budget", required=True)
    parser.add_argument("--compare", action="store_true", help="run without a budget first, and compare the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = torch.device(options.device)
    from tuneport.io.sizes import format_bytes

    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shapes = SHAPES[options.shapes]
    source, target = make("llama", shapes[0], device, dtype), make("qwen", shapes[1], device, dtype)
    change = random_change(source, None)
    vocabulary = min(shape["vocab_size"] for shape in shapes)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, vocabulary, (options.samples, options.length), generator=generator)
    common: dict[str, Any] = {"loss": loss, "max_tokens": options.max_tokens, "device": str(device)}
    before: dict[str, Any] = {}
    if options.compare:
        with peak_memory(device) as peak:
            trial = prepare(source, change, target, list(texts.to(device).split(options.batch)), **common)
            started = now(device)
            whole = trial.run()
            before = {"seconds": now(device) - started, "peak_bytes": peak.before, **whole.record["seconds_by_stage"]}
        before["peak_bytes"] += peak.bytes
        sums = {name: checksum(entry) for name, entry in whole.task_vector.items()}
        shown = [name for name in sums if f".{shapes[1]['num_hidden_layers'] // 2}." in name]
        some = {name: whole.task_vector[name].cpu() for name in shown}
        say(f"without a budget: {before}")
        del trial, whole
    with ThreadPoolExecutor(8) as pool:  # new memory comes slowly, one page after the other
        tensors = [*source.parameters(), *target.parameters()]
        for parameter, data in zip(tensors, pool.map(lambda p: p.data.cpu(), tensors), strict=True):
            parameter.data = data
        change = dict(zip(change, pool.map(lambda entry: entry.cpu(), change.values()), strict=True))
    source, target = source.cpu(), target.cpu()  # and their buffers
    del tensors
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    say("models and change are in RAM")
    with peak_memory(device) as peak:
        batches = list(texts.split(options.batch))
        trial = prepare(source, change, target, batches, memory_budget=options.memory_budget, **common)
        started = now(device)
        passes = trial.passes(trial.config.memory_budget)
        planning = now(device) - started
        stay = [
            f"{len(placement.blocks) - len(placement.fetched)} of {len(placement.blocks)} blocks stay"
            for placement in passes.placements or ()
        ]
        say(f"planned in {planning:.1f} s: {len(passes.groups)} runs, peak {format_bytes(passes.peak_bytes)}, {stay}, ")
        say(f"{format_bytes(passes.fetched_bytes)} fetched")
        started = now(device)
        result = trial.run(passes)
        seconds = now(device) - started
    stages = result.record["seconds_by_stage"]
    say(f"within the budget: {seconds:.1f} s, {stages}, peak {format_bytes(peak.before + peak.bytes)}")
    same, worst = None, 0.0
    if options.compare:
        found = {name: checksum(entry.to(device)) for name, entry in result.task_vector.items()}
        same = sum(found[name] == value for name, value in sums.items())
        worst = max(
            float((entry.to(device) - result.task_vector[name].to(device)).norm() / entry.to(device).norm())
            for name, entry in some.items()
        )
        say(f"{same} of {len(sums)} tensors are the same to the bit; block in the middle off by {worst:.1e}")
    measured = peak.before + peak.bytes
    head = ["", "runs", "peak, GiB", "seconds", "measure", "solve and transport"]
    rows = [
        ["planned", len(passes.groups), passes.peak_bytes / 2**30],
        ["measured", len(passes.groups), measured / 2**30, seconds, stages["measure"], stages["transport"]],
        ["measured / planned", None, measured / passes.peak_bytes],
    ]
    if before:
        rows.append(
            ["without a budget", 1, before["peak_bytes"] / 2**30]
            + [before[name] for name in ("seconds", "measure", "transport")]
        )
    title = f"{options.shapes}: N = {options.samples} x {options.length} tokens, batches of {options.batch}, "
    title += f"{options.max_tokens or 'all'} tokens for maps, budget {options.memory_budget}; {'; '.join(stay)}; "
    title += f"{format_bytes(passes.fetched_bytes)} fetched from RAM; planned in {planning:.1f} s"
    if same is not None:
        title += f"; {same} of {len(sums)} tensors the same to the bit as without a budget, "
        title += f"those of a block in the middle off by {worst:.1e}"
    data = {
        "options": {key: str(value) for key, value in vars(options).items()},
        "planned": {"peak_bytes": passes.peak_bytes, "fetched_bytes": passes.fetched_bytes},
        "measured": {"peak_bytes": measured, "seconds": seconds, **stages},
        "without_budget": before,
        "same_bits": same,
        "off_by": worst,
    }
    name = f"offload-{options.shapes}-{options.max_tokens or 'all'}-{device.type}-{options.memory_budget}"
    publish(name, options.out, title + "\n\n" + table(head, rows), data, device, options.commit)


if __name__ == "__main__":
    main()
