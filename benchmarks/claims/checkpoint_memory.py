"""Claim: `extract` and `apply` need memory for the largest tensor, not for the model.

Makes a synthetic pair of sharded bfloat16 checkpoints (6 GB each by default) in a temporary folder, runs
both commands as processes of their own and records their peak resident memory. Exits 1 above the limit.

    python benchmarks/claims/checkpoint_memory.py --out benchmarks/results/checkpoint-memory.md
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

WIDTH, HIDDEN, VOCABULARY = 4096, 11008, 32000
LIMIT = 1.5e9


def shapes(gigabytes: float) -> dict[str, tuple[int, int]]:
    """Tensors of a decoder of this many gigabytes in bfloat16."""
    names = {"embed.weight": (VOCABULARY, WIDTH), "head.weight": (VOCABULARY, WIDTH)}
    block = {**dict.fromkeys("qkvo", (WIDTH, WIDTH)), "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH)}
    block["down"] = (WIDTH, HIDDEN)
    layer = 0
    while sum(2 * a * b for a, b in names.values()) < gigabytes * 1e9:
        names |= {f"layers.{layer}.{part}.weight": shape for part, shape in block.items()}
        layer += 1
    return names


def write_model(folder: Path, names: Mapping[str, tuple[int, int]], change: float) -> None:
    import torch

    from tuneport.io.checkpoint import write_checkpoint
    from tuneport.io.tensors import LazyTensors, TensorSpec

    noise = torch.randn(2**22, generator=torch.Generator().manual_seed(0))

    def tensor(name: str) -> torch.Tensor:
        rows, columns = names[name]
        flat = noise.roll(len(name) * 7919).repeat(-(-rows * columns // len(noise)))[: rows * columns]
        return (flat * 0.02 + change).to(torch.bfloat16).view(rows, columns)

    folder.mkdir()
    spec = {name: TensorSpec(shape, torch.bfloat16) for name, shape in names.items()}
    write_checkpoint(folder, LazyTensors(names, tensor, spec.__getitem__), max_shard_size="2GB")
    (folder / "config.json").write_text("{}")


def peak(*arguments: str) -> tuple[float, float]:
    """Peak resident bytes and seconds of one command.

    A process begins with the peak of the one that started it, so this one stays small: it imports no torch.
    """
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "tuneport", *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"tuneport {' '.join(arguments)} failed")
    return usage.ru_maxrss * 1024, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--scratch", type=Path, default=None, help="folder for the temporary files (some 5 x the size)")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--make", type=Path, default=None, help="only write the two models, here")
    options = parser.parse_args()
    names = shapes(options.gigabytes)
    if options.make is not None:
        write_model(options.make / "base", names, 0.0)
        write_model(options.make / "tuned", names, 0.004)
        return
    needed = 5.5 * options.gigabytes * 1e9
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch)
        if shutil.disk_usage(root).free < needed:
            raise SystemExit(f"this needs {needed / 1e9:.0f} GB of free disk in {root}")
        make = [sys.executable, __file__, "--gigabytes", str(options.gigabytes), "--make", str(root)]
        subprocess.run(make, check=True)
        size = sum(2 * a * b for a, b in names.values())
        largest = max(2 * a * b for a, b in names.values())
        idle = peak("methods")
        extract = peak("extract", str(root / "base"), str(root / "tuned"), "-o", str(root / "tau.safetensors"))
        shutil.rmtree(root / "tuned")
        apply = peak("apply", str(root / "tau.safetensors"), str(root / "base"), "-o", str(root / "again"))
        shards = len(list((root / "again").glob("*.safetensors")))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = [
        "# Memory of `extract` and `apply`",
        "",
        f"A model of {size / 1e9:.2f} GB in bfloat16, in shards of 2 GB: {len(names)} tensors, the largest "
        f"{largest / 1e6:.0f} MB. The task vector is float32 and twice as large; `apply` writes {shards} file(s). "
        f"Limit: {LIMIT / 1e9} GB.",
        "",
        "| command | peak resident memory | seconds |",
        "|---|---|---|",
        f"| `tuneport methods` (imports only) | {idle[0] / 1e9:.2f} GB | {idle[1]:.0f} |",
        f"| `tuneport extract` | {extract[0] / 1e9:.2f} GB | {extract[1]:.0f} |",
        f"| `tuneport apply` | {apply[0] / 1e9:.2f} GB | {apply[1]:.0f} |",
        "",
        f"- command: `python benchmarks/claims/checkpoint_memory.py --gigabytes {options.gigabytes:g}`",
        f"- machine: {platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}",
        f"- commit: {commit.stdout.strip() or 'unknown'}",
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if max(extract[0], apply[0]) > LIMIT:
        raise SystemExit("above the limit")


if __name__ == "__main__":
    main()
