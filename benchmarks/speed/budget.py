"""Expected and measured peak memory of a transfer, whole and in groups of layers.

    python benchmarks/speed/budget.py --shapes small --samples 32 --out OUT
    python benchmarks/speed/budget.py --shapes large --samples 100 --device cuda --out OUT

The towers of vit.py. Each line is a process of its own: no budget, then budgets that leave three quarters, a half and
a quarter (or the least that will do) of what a single run needs beyond the models and the result. The measured peak is
that of the process above what Python and torch took before the models were made (on a GPU: of the allocator); the task
vector and the images count to neither side.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from record import in_own_process, now, peak_memory, prepare, publish, table
from vit import SHAPES, Setting, loss, tower

SHARES = (1.0, 0.75, 0.5, 0.25)


def one(options: argparse.Namespace) -> dict[str, Any]:
    from tuneport import TuneportError
    from tuneport.layers import TokenLayout
    from tuneport.measure.tokens import match_tokens

    device = torch.device(options.device)
    small = tower(64, 1, 2, 112, device, 0)  # libraries load here, not in the peak
    loss(
        small, (torch.zeros(2, 3, 224, 224, device=device), torch.zeros(2, dtype=torch.int64, device=device))
    ).backward()
    torch.linalg.eigh(torch.eye(256, dtype=torch.float64, device=device))
    with peak_memory(device) as peak:
        setting = Setting(options)
        change = sum(4 * entry.numel() for entry in setting.task_vector.values())
        images = sum(4 * batch[0].numel() for batch in setting.batches)
        trial = prepare(
            setting.source,
            setting.task_vector,
            setting.target,
            setting.batches,
            loss=loss,
            match=match_tokens(*(TokenLayout(1, grid) for grid in setting.grids)),
            device=options.device,
        )
        whole = trial.passes(None)
        budget, passes = None, whole
        while options.share < 1:
            budget = whole.fixed_bytes + int((whole.peak_bytes - whole.fixed_bytes) * options.share)
            try:
                passes = trial.passes(budget)
                break
            except TuneportError:
                options.share += 0.05
        started = now(device)
        trial.run(passes)
        seconds = now(device) - started
    return {
        "share": options.share,
        "budget_bytes": budget,
        "groups": len(passes.groups),
        "expected_bytes": passes.peak_bytes,
        "measured_bytes": peak.bytes - change - images,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--tf32", action="store_true", help="let the models' products use TF32")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.share is not None:
        print(json.dumps(one(options)))
        return
    rows = [in_own_process(__file__, [*sys.argv[1:], "--share", str(share)], tight=True) for share in SHARES]
    head = ["budget, MiB", "runs over the data", "expected peak, MiB", "measured peak, MiB", "measured / expected", "s"]
    lines = [
        [
            row["budget_bytes"] and row["budget_bytes"] / 2**20,
            row["groups"],
            row["expected_bytes"] / 2**20,
            row["measured_bytes"] / 2**20,
            row["measured_bytes"] / row["expected_bytes"],
            row["seconds"],
        ]
        for row in rows
    ]
    device = torch.device(options.device)
    title = f"{options.shapes}: N = {options.samples}, batches of {options.batch}\n\n"
    publish(f"budget-{options.shapes}-{device.type}", options.out, title + table(head, lines), {"rows": rows}, device)


if __name__ == "__main__":
    main()
