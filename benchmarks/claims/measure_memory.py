"""Peak memory of `measure` must not grow with the number of samples: N = 100 against N = 400, in one run.

    python benchmarks/claims/measure_memory.py --out benchmarks/results/measure-memory.md

Two CLIP towers of the zoo's shapes (192 x 6 to 256 x 6) with random weights, signals of BiCo, batches of 32 made on
the fly. Each N runs in a process of its own; the number is that process's peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

BATCH = 32


def one(samples: int) -> None:
    import torch
    from torch.nn import functional as F
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    from tuneport.layers import find_layers
    from tuneport.measure.capture import Request, measure_pairs
    from tuneport.pairing import pair_layers
    from tuneport.types import Sides

    def tower(width: int) -> CLIPVisionModelWithProjection:
        return CLIPVisionModelWithProjection(
            CLIPVisionConfig(
                hidden_size=width,
                intermediate_size=4 * width,
                num_hidden_layers=6,
                num_attention_heads=width // 64,
                image_size=32,
                patch_size=4,
                projection_dim=128,
            )
        )

    source, target = tower(192), tower(256)
    heads = {id(model): torch.randn(10, 128) for model in (source, target)}

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(
            model(pixel_values=batch[0]).image_embeds @ heads[id(model)].T, batch[1], reduction="sum"
        )

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for start in range(0, samples, BATCH):
            size = min(BATCH, samples - start)
            yield torch.randn(size, 3, 32, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator)

    plan = pair_layers(find_layers(source), find_layers(target))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    request = Request({"input", "output_gradient"})
    measure_pairs(Sides(source, target), plan.pairs, batches(), Sides(loss, loss), request)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"samples": samples, "before_kib": before, "peak_kib": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return
    rows = []
    for samples in options.samples:
        done = subprocess.run(
            [sys.executable, __file__, "--one", str(samples)], capture_output=True, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    base = rows[0]["peak_kib"]
    lines = ["| N | peak of the process, MiB | above the models, MiB | ratio of peaks |", "|---|---|---|---|"]
    for row in rows:
        above = (row["peak_kib"] - row["before_kib"]) / 1024
        lines.append(
            f"| {row['samples']} | {row['peak_kib'] / 1024:.0f} | {above:.0f} | {row['peak_kib'] / base:.3f} |"
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    lines += [
        "",
        "- command: python benchmarks/claims/measure_memory.py",
        f"- machine: {platform.machine()}, {platform.system()}, CPU",
        f"- commit: {commit.strip()}",
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
