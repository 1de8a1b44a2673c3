"""A transfer on the CPU within less memory than its models take: blocks are read from the models' files when they run.

    python benchmarks/speed/files.py --shapes small --samples 8 --length 128 --budgets 90MiB 60MiB --out OUT

The models of llama.py, float32, saved to a folder; a full change in every linear layer of the blocks. Each line is a
process of its own: first without a budget, then within each. The measured peak is the resident memory of the process
above what Python and torch took before, less the change (which lies in memory here) and, with a budget, less the
result, which lies in temporary files. Results are compared by SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from llama import SHAPES, loss, make, random_change
from record import in_own_process, now, peak_memory, prepare, publish, table


def one(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cpu")
    small = make("llama", SHAPES["tiny"][0], device, torch.float32)  # libraries load here, not in the peak
    small.requires_grad_(True)
    loss(small, torch.zeros(2, 8, dtype=torch.int64)).backward()
    torch.linalg.eigh(torch.eye(256, dtype=torch.float64))
    torch.manual_seed(1)
    source = make("llama", SHAPES[options.shapes][0], torch.device("meta"), torch.float32)
    change = {
        name: 0.01 * torch.randn(entry.shape, device="cpu") for name, entry in random_change(source, None).items()
    }
    texts = torch.randint(0, 2000 if options.shapes != "tiny" else 500, (options.samples, options.length))
    with peak_memory(device) as peak:
        trial = prepare(
            str(options.folder / "llama"),
            change,
            str(options.folder / "qwen"),
            list(texts.split(options.batch)),
            loss=loss,
            max_tokens=options.max_tokens,
            memory_budget=options.budget,
            device="cpu",
        )
        passes = trial.passes(trial.config.memory_budget)
        started = now(device)
        result = trial.run(passes)
        seconds = now(device) - started
    digest = hashlib.sha256()
    for name, entry in result.task_vector.items():
        digest.update(name.encode() + entry.contiguous().numpy().tobytes())
    shelved = sum(entry.numel() * 4 for entry in result.task_vector.values()) if passes.result_in_files else 0
    return {
        "budget": options.budget,
        "runs": len(passes.groups),
        "models_bytes": passes.home_bytes or passes.fixed_bytes,
        "fetched_bytes": passes.fetched_bytes,
        "expected_bytes": passes.peak_bytes,
        "measured_bytes": peak.bytes - shelved,
        "seconds": seconds,
        "sha256": digest.hexdigest(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens per text")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--budgets", nargs="+", default=["90MiB"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--budget", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.folder is not None:
        print(json.dumps(one(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        for kind, shape in zip(("llama", "qwen"), SHAPES[options.shapes], strict=True):
            torch.manual_seed(len(kind))
            make(kind, shape, torch.device("cpu"), torch.float32).save_pretrained(Path(folder, kind))
        rows = []
        for budget in [None, *options.budgets]:
            more = ["--folder", folder, *(["--budget", budget] if budget else [])]
            rows.append(in_own_process(__file__, [*sys.argv[1:], *more], tight=True))
    head = ["budget", "runs", "read from files, MiB", "expected peak, MiB", "measured peak, MiB"]
    head += ["measured / expected", "s", "same bits"]
    lines = [
        [
            row["budget"] or "none",
            row["runs"],
            row["fetched_bytes"] / 2**20,
            row["expected_bytes"] / 2**20,
            row["measured_bytes"] / 2**20,
            row["measured_bytes"] / row["expected_bytes"],
            row["seconds"],
            "yes" if row["sha256"] == rows[0]["sha256"] else "NO",
        ]
        for row in rows
    ]
    title = f"{options.shapes}: N = {options.samples} x {options.length} tokens, batches of {options.batch}, "
    title += f"{options.max_tokens} tokens for maps\n\n"
    publish(f"files-{options.shapes}", options.out, title + table(head, lines), {"rows": rows}, torch.device("cpu"))


if __name__ == "__main__":
    main()
