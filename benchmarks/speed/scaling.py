"""Time and peak memory of a transfer against samples, width and depth, with fitted exponents.

    python benchmarks/speed/scaling.py --threads 1 --out OUT
    python benchmarks/speed/scaling.py --device cuda --base 768 12 128 --steps 1 2 4 --out OUT

Towers as in vit.py, the target a third wider and as deep as the source. One of N, width and depth grows by the
factors of --steps, the others stay at --base; each point is a process of its own. An exponent of 1 means proportional.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
import vit
from record import in_own_process, peak_memory, publish, table

AXES = ("samples", "width", "depth")
STAGES = ("measure", "solve", "transport")


def one(options: argparse.Namespace) -> dict[str, Any]:
    width, depth, samples = options.point
    heads = max(width // 64, 1)
    vit.SHAPES["point"] = ((width, depth, heads, 32), (width * 4 // 3 // heads * heads, depth, heads, 32))
    options.shapes, options.samples, options.tf32 = "point", samples, False
    setting = vit.Setting(options)
    setting.tuneport(setting.batches[:1])
    with peak_memory(setting.device) as peak:
        spent = setting.tuneport(setting.batches)
    return {"seconds": sum(spent.values()), **spent, "peak_bytes": peak.bytes}


def exponent(factors: list[float], values: list[float]) -> float:
    """The slope of a line through log(value) against log(factor)."""
    xs, ys = [math.log(x) for x in factors], [math.log(max(y, 1e-9)) for y in values]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=int, nargs=3, default=[96, 2, 16], metavar=("WIDTH", "DEPTH", "N"))
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--point", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.point:
        print(json.dumps(one(options)))
        return
    width, depth, samples = options.base
    lines, fits = [], []
    for axis in AXES:
        rows = []
        for step in options.steps:
            point = [width, depth, samples]
            point[{"width": 0, "depth": 1, "samples": 2}[axis]] *= step
            row = in_own_process(__file__, [*sys.argv[1:], "--point", *map(str, point)])
            rows.append(row)
            lines.append([axis, *point, row["seconds"], *(row[stage] for stage in STAGES), row["peak_bytes"] / 2**20])
        steps = [float(step) for step in options.steps]
        values = {key: [row[key] for row in rows] for key in ("seconds", *STAGES, "peak_bytes")}
        fits.append([axis, *(exponent(steps, values[key]) for key in values)])
    head = ["grows", "width", "depth", "N", "seconds", *STAGES, "peak, MiB"]
    fitted = ["exponent in", "seconds", *STAGES, "peak"]
    text = table(head, lines) + "\n\n" + table(fitted, fits)
    data = {"head": head, "rows": lines, "fitted": fitted, "exponents": fits}
    publish(f"scaling-{torch.device(options.device).type}", options.out, text, data, torch.device(options.device))


if __name__ == "__main__":
    main()
