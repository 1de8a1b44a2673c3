"""Questions with answers to choose from: each question read once, against one whole pass for each answer.

    python benchmarks/speed/answers.py --models MODELS/smollm2-135m MODELS/gemma3-270m \
        --data trec6.jsonl --samples 16 --out benchmarks/results/speed

Needs folders of decoders and chats with a column `label`, as `claims/language_commands.py` writes them. Of three runs
of each, the fastest counts. Both compute scores over the vocabulary only from the first answer on.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import now, publish, table

RUNS = 3


def compare(folder: Path, data: Path, samples: int, device: torch.device) -> dict[str, Any]:
    from tuneport.data.tasks import read_data
    from tuneport.measure.accuracy import likelihood
    from tuneport.models.open import open_model

    model = open_model(folder, device=device)
    asked = read_data(data, "test").subset(np.arange(samples))
    assert model.generation is not None
    ways = {"once": model, "whole": replace(model, generation=replace(model.generation, answer_logits=None))}
    seconds, found = dict.fromkeys(ways, float("inf")), {}
    for _ in range(RUNS):
        for name, way in ways.items():
            begun = now(device)
            found[name] = likelihood(way, asked)
            seconds[name] = min(seconds[name], now(device) - begun)
    once, whole = found["once"], found["whole"]
    assert once.by_sample.bits is not None
    assert whole.by_sample.bits is not None
    return {
        "model": folder.name,
        "answers": len(asked.classes),
        "seconds": seconds,
        "ratio": seconds["whole"] / seconds["once"],
        "same": int((once.by_sample.predicted == whole.by_sample.predicted).sum()),
        "difference": float(np.abs(once.by_sample.bits - whole.by_sample.bits).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True, help="folders of decoders")
    parser.add_argument("--data", type=Path, required=True, help="chats with labels, and a test split")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows = [compare(folder, options.data, options.samples, device) for folder in options.models]
    head = ["model", "answers", "each question once, s", "whole passes, s", "ratio", "same choice"]
    head += ["largest difference, bits of a text"]
    lines = [
        [
            row["model"],
            row["answers"],
            row["seconds"]["once"],
            row["seconds"]["whole"],
            row["ratio"],
            f"{row['same']} of {options.samples}",
            row["difference"],
        ]
        for row in rows
    ]
    text = f"Likelihood of all answers to {options.samples} questions of {options.data.stem}\n\n{table(head, lines)}"
    publish(f"answers-{device.type}", options.out, text, {"rows": rows}, device)


if __name__ == "__main__":
    main()
