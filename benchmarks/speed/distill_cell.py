"""One cell of the shared zoo by one command on a CPU: wall and CPU seconds, and the share of the fine-tuning gain.

    OMP_NUM_THREADS=2 python benchmarks/speed/distill_cell.py --shared SHARED --full 97.9 --out OUT

The command is `tuneport distill`, from the bare target, or with --start port `tuneport transfer --distill`. Its seconds
are those of the whole process, from the start of Python to the written folder. Wall seconds mean something only on an
idle machine; CPU seconds are those of all its threads. Accuracies are of test images, which nothing was chosen on.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from record import publish, table


def accuracies(folders: list[Path], data: Path, head: str, count: int) -> list[float]:
    """Zero-shot accuracies on the first test images, in percent."""
    import numpy as np

    from tuneport.data.tasks import read_data
    from tuneport.measure.accuracy import zero_shot
    from tuneport.models.heads import choose_head
    from tuneport.models.open import open_model

    test = read_data(data, "test")
    test = test.subset(np.arange(min(len(test), count)))
    models = [open_model(folder) for folder in folders]
    return [zero_shot(model, choose_head(model, head, test), test, batch_size=250).accuracy for model in models]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with zoo/ and data/")
    parser.add_argument("--pair", default="a:a2")
    parser.add_argument("--task", default="mnist")
    parser.add_argument("--start", choices=["target", "port"], default="target")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="the command's own number unless given")
    parser.add_argument("--batch-size", type=int, help="of the bare target; the command's own unless given")
    parser.add_argument("--full", type=float, required=True, help="accuracy of the fine-tuned target, in percent")
    parser.add_argument("--test", type=int, default=2000, help="test images at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    source, target = (options.shared / "zoo" / name for name in options.pair.split(":"))
    data = options.shared / "data/images" / f"{options.task}.npz"
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "written"
        tuned = source.with_name(f"{source.name}-{options.task}")
        given = [f"--finetuned={tuned}", f"--target={target}", f"--data={data}", f"--head={options.task}"]
        given += [
            f"--samples={options.samples}",
            f"--seed={options.seed}",
            f"--out={written}",
            "--device=cpu",
            "--json",
        ]
        name, steps = ("transfer", "--distill") if options.start == "port" else ("distill", "--steps")
        given += [f"--source={source}"] if options.start == "port" else []
        given += [f"{steps}={options.steps}"] if options.steps else []
        given += [f"--batch-size={options.batch_size}"] if options.batch_size else []
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "tuneport", name, *given], stdout=subprocess.PIPE, text=True, check=False
        )
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"tuneport {name} ended with exit code {done.returncode}")
        base, found = accuracies([target, written], data, options.task, options.test)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    entry = json.loads(done.stdout)["distilled"]
    share = 100 * (found - base) / (options.full - base)
    head = ["start", "N", "steps", "batch", "wall s", "CPU s", "of that steps, wall s"]
    head += ["agreement, %", "target, %", "written, %", "share of the gain, %"]
    row = [
        options.start,
        options.samples,
        entry["steps"],
        entry["batch_size"],
        wall,
        processor,
        entry["seconds"],
    ]
    agreement = next(mark["agreement"] for mark in entry["curve"] if mark["step"] == entry["best"])
    row += [100 * agreement, base, found, share]
    title = f"{options.pair.replace(':', ' to ')}, {options.task}, seed {options.seed}\n\n"
    about = {**{key: str(value) for key, value in vars(options).items()}, "wall": wall, "cpu": processor}
    about |= {"distilled": entry, "target": base, "written": found, "share": share}
    where = f"distill-{options.pair.replace(':', '-')}-{options.task}-{options.start}-cpu"
    publish(where, options.out, title + table(head, [row]), about, torch.device("cpu"))


if __name__ == "__main__":
    main()
