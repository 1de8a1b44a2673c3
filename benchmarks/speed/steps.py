"""A step of a distillation between small language models: its kernels launched one by one, and played from graphs.

    python benchmarks/speed/steps.py --models MODELS --shared SHARED --device cuda --out benchmarks/results/speed

From SmolLM2-135M to Gemma-3-270M (MODELS has a folder of each), with a LoRA, 16 prompts of banking77 a step; `answers`
learns how likely the labels are, `texts` what is written. The median of the steps between two exams counts. Without a
GPU nothing is played.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import now, peak_memory, publish, table

PAIR = "smollm2-135m", "gemma3-270m"
FILE = Path("data/chat/banking77.jsonl.gz")


def measure(options: argparse.Namespace, dtype: str, kind: str, way: str) -> list[Any]:
    from tuneport import DistillConfig, TaskVector
    from tuneport.data.dataset import Dataset
    from tuneport.models.open import open_model
    from tuneport.pipeline.lessons import samples_of
    from tuneport.training import distill
    from tuneport.training.student import student_of
    from tuneport.types import Sides

    device = torch.device(options.device)
    with gzip.open(options.shared / FILE, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(options.samples), strict=False)]
    prompts = [f"Message: {row['prompt']}\nIntent:" for row in rows]
    answers = [row["answer"] + (f" {number}" if kind == "texts" else "") for number, row in enumerate(rows)]
    data = Dataset(prompts, None, (), targets=answers, answers="teacher")
    both = Sides(*(open_model(options.models / name, device=device, dtype=getattr(torch, dtype)) for name in PAIR))
    student = student_of(both.target, TaskVector({}), 16, 0)
    moments: list[float] = []
    run, graphs = distill.run_steps, distill.captured

    def timed(*args: Any) -> Iterator[Any]:
        for found in run(*args):
            moments.append(now(device))
            yield found
            moments.append(now(device))  # an exam lies between, if there was one

    distill.run_steps = timed
    distill.captured = graphs if way == "played" else lambda _: nullcontext()
    try:
        with peak_memory(device) as peak:
            config = DistillConfig(lora=16, steps=options.steps)
            found = distill.distill(samples_of(both, data, None), student.module, config)
    finally:
        distill.run_steps, distill.captured = run, graphs
    steps = [end - begun for begun, end in zip(moments[1:-1:2], moments[2::2], strict=True)]
    late = steps[len(steps) // 2 :]  # shapes have come back by then
    seconds = median(late)
    return [found["matching"], dtype, way, 1000 * seconds, 1 / seconds, (peak.before + peak.bytes) / 2**30]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not (options.shared / FILE).is_file():
        raise SystemExit(f"there is no {options.shared / FILE}: give the folder of shared data as --shared.")
    ways = ("one by one", "played") if options.device.startswith("cuda") else ("one by one",)
    rows = [
        measure(options, dtype, kind, way) for dtype in options.dtypes for kind in ("answers", "texts") for way in ways
    ]
    title = f"{PAIR[0]} to {PAIR[1]}: {options.samples} prompts, {options.steps} steps\n\n"
    head = ["matching", "dtype", "kernels", "ms a step", "steps a second", "peak, GiB"]
    data = {"options": {key: str(value) for key, value in vars(options).items()}, "rows": rows}
    device = torch.device(options.device)
    publish(f"steps-{device.type}", options.out, title + table(head, rows), data, device)


if __name__ == "__main__":
    main()
