"""What a fleet of adapters costs beside plain upgrades, on the demo's models.

    python benchmarks/speed/fleet.py --adapters 100 --workers 2 --out OUT

The demo fine-tunes its small model; the fine-tunes of the fleet are the base plus the change at as many strengths. All
of them go to the large model by the routes copy and port. Beside the fleet, some of them are upgraded by a command
each, and by a call each in one process that is warm; so is a plain transfer. Every way has one thread per process. CPU
seconds are compared, of all processes together and with their start: other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from record import publish, table
from safetensors.torch import load_file, save_file

ROUTES = "copy,port"


def cpu_seconds() -> float:
    """CPU seconds of this process and of those of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def timed(work: Callable[..., Any], *given: Any) -> tuple[float, float]:
    """CPU seconds and seconds of a call."""
    used, started = cpu_seconds(), time.perf_counter()
    work(*given)
    return cpu_seconds() - used, time.perf_counter() - started


def make_fleet(folder: Path, count: int) -> dict[str, str]:
    """Write the data and the fine-tunes; return the options that all upgrades share."""
    from tuneport import open_model
    from tuneport.data.formats import read_plain
    from tuneport.demo.run import MODELS, STEPS, finetune, mirrored_digits, save_finetuned
    from tuneport.training.loop import Schedule

    data, small = folder / "mirrored-digits.npz", open_model(MODELS / "small")
    np.savez_compressed(data, allow_pickle=False, **mirrored_digits())
    tuned = finetune(small, read_plain(data, "train"), Schedule(STEPS, batch_size=64, learning_rate=1e-3))
    save_finetuned(small, tuned, folder / "tuned")
    base, whole = load_file(MODELS / "small" / "model.safetensors"), load_file(folder / "tuned" / "model.safetensors")
    for number in range(count):
        strength = 0.9 + 0.2 * number / count
        save_finetuned(small, tuned, folder / f"a{number}")
        tensors = {name: base[name] + strength * (whole[name] - base[name]) for name in base}
        save_file(tensors, folder / f"a{number}" / "model.safetensors", metadata={"format": "pt"})
    return {"source": str(MODELS / "small"), "target": str(MODELS / "large"), "data": str(data), "head": "digits"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--samples", type=int, default=200, help="a quarter judges; with 100, too few do to choose a route"
    )
    parser.add_argument("--plain", type=int, default=5, help="upgrades of the other ways")
    parser.add_argument("--ray", help="as of tuneport upgrade")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        lines, data = measure(Path(place), options)
    head = ["way", "adapters", "CPU s an adapter", "s an adapter", "CPU, ratio to calls in one process"]
    title = (
        f"{options.adapters} adapters of the demo, routes {ROUTES}, {options.samples} own samples, {options.workers} "
    )
    title += (
        f"workers of one thread: {data['headline']}; load of the machine before: {load:.1f} on {os.cpu_count()} cores"
    )
    name = "fleet-demo" + ("" if options.ray is None else "-ray")
    publish(
        name,
        options.out,
        f"{title}\n\n{table(head, lines)}",
        {"head": head, "rows": lines, **data},
        torch.device("cpu"),
    )


def measure(folder: Path, options: argparse.Namespace) -> tuple[list[list[Any]], dict[str, Any]]:
    """The rows of all ways, and the seconds of each upgrade."""
    from tuneport import transfer, upgrade_all
    from tuneport.config import TransferInputs, UpgradeConfig
    from tuneport.pipeline.upgrade import upgrade_to_folder

    common = make_fleet(folder, options.adapters)
    head = common.pop("head")
    asked = {"head": head, "routes": ROUTES, "samples": options.samples}
    config = UpgradeConfig.of(**asked)
    some = [folder / f"a{number}" for number in range(options.plain)]

    def call(tuned: Path) -> None:
        upgrade_to_folder(TransferInputs(finetuned=(str(tuned),), out=f"{tuned}-call", **common), config)

    def command(tuned: Path) -> None:
        words = {**common, **asked, "finetuned": tuned, "out": f"{tuned}-command"}
        given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "tuneport", "upgrade", *given], check=True, capture_output=True)

    def plain(tuned: Path) -> None:
        found = transfer(common["source"], tuned, common["target"], common["data"], head=head, samples=options.samples)
        found.save(f"{tuned}-transfer")

    call(folder / "tuned")  # what a first call in a process loads is no part of the others
    calls, plains, commands = ([timed(way, tuned) for tuned in some] for way in (call, plain, command))
    listed = folder / "list.jsonl"
    tuned = [str(folder / f"a{number}") for number in range(options.adapters)]
    listed.write_text("".join(json.dumps({"finetuned": each}) + "\n" for each in tuned))
    found: list[Any] = []

    def all_of_them() -> None:
        how = {"workers": options.workers, "ray": options.ray}
        found.append(upgrade_all(listed, folder / "out", **how, **common, **asked))

    fleet, again = timed(all_of_them), timed(all_of_them)
    if found[0].count("written") + found[0].count("kept") != options.adapters:
        raise SystemExit(str(found[0]))
    count, unit = options.adapters, median(used for used, _ in calls)
    lines = []
    for name, pairs in (
        ("a command each", commands),
        ("calls in one process", calls),
        ("calls in one process, transfer alone", plains),
    ):
        used, seconds = (median(pair[number] for pair in pairs) for number in (0, 1))
        lines.append([name, len(pairs), used, seconds, used / unit])
    for name, (used, seconds) in (("a fleet", fleet), ("the fleet again: nothing is missing", again)):
        lines.append([name, count, used / count, seconds / count, used / count / unit])
    each = {"calls": calls, "transfers": plains, "commands": commands, "fleet": fleet, "again": again}
    return lines, {"seconds": each, "headline": found[0].headline}


if __name__ == "__main__":
    main()
