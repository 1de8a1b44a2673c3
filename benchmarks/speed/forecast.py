"""Forecasts of the memory of transfers that were measured on a GPU, from configurations alone.

    python benchmarks/speed/forecast.py --measured benchmarks/results/speed --out OUT

Reads the results of llama.py at 8B (a full change and a LoRA; models, change and result on the device), and plans the
same transfers without weights and without the GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from llama import SHAPES, make
from record import publish, table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, required=True, help="folder with the results of llama.py")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from tuneport.methods import get_method
    from tuneport.models.offload import Placement, bytes_of
    from tuneport.pipeline.outlook import prepare_shapes
    from tuneport.runtime.budget import result_bytes
    from tuneport.runtime.forecast import Forecast

    device = torch.device("cuda")  # planned for, not needed
    with tempfile.TemporaryDirectory() as folder:
        for kind, shape in zip(("llama", "qwen"), SHAPES["8b"], strict=True):
            model = make(kind, shape, torch.device("meta"), torch.bfloat16)
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(Path(folder, kind))
        job = prepare_shapes(
            Path(folder, "llama"), Path(folder, "qwen"), batch_size=4, max_tokens=1024, dtype="bfloat16"
        )
    forecast, pairs = Forecast.of(job), job.plan.pairs
    live = forecast.peak(pairs, (Placement(device), Placement(device)))
    models = sum(bytes_of(model.module.parameters()) for model in (job.source, job.target))
    sizes = {layer.name: 2 * layer.in_features * layer.out_features for layer in job.source.layers}
    changes = {
        "full": (sum(sizes.values()), result_bytes(job, get_method("bico"))),
        "lora": (sum(2 * 16 * (layer.in_features + layer.out_features) for layer in job.source.layers), 0),
    }
    rows, data = [], {}
    for name, (change, result) in changes.items():
        found = json.loads((options.measured / f"llama-8b-{name}-1024-cuda.json").read_text())
        peak = models + change + forecast.statistics_bytes(pairs) + max(live, result + forecast.solving_bytes(pairs))
        rows.append([f"peak, {name}, GiB", peak / 2**30, found["peak_bytes"] / 2**30, found["peak_bytes"] / peak])
        data[name] = {"peak_bytes": peak, "measured": found}
    head = ["", "forecast", "measured", "measured / forecast"]
    title = "Llama-3-8B to Qwen3-8B shapes, bfloat16, N = 100 x 256 tokens, 1024 tokens for maps\n\n"
    publish("forecast-8b", options.out, title + table(head, rows), data, torch.device("cpu"))


if __name__ == "__main__":
    main()
