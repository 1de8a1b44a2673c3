"""Claim: a transfer that is killed leaves no half output, and `--resume` ends in the very same files.

Runs `tuneport transfer` on the models that the package carries, kills it with SIGKILL at random moments, looks at what
is there, and resumes it (killing some of the resumed runs again). Exits 1 if anything differs.

    python benchmarks/kill_test.py --out benchmarks/results/kill-test.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

VOLATILE = ("seconds", "seconds_by_stage", "out")


def make_inputs(root: Path, samples: int, distill: int) -> list[str]:
    """A data set and a fine-tune of the small model that the package carries; returns the options naming them."""
    import numpy as np
    import torch
    from safetensors.torch import load_file, save_file

    from tuneport.demo.run import MODELS, mirrored_digits
    from tuneport.io.companions import copy_companions

    np.savez(root / "digits.npz", **mirrored_digits())
    (root / "tuned").mkdir()
    copy_companions(MODELS / "small", root / "tuned")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (tensor.float() + 0.02 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in load_file(MODELS / "small" / "model.safetensors").items()
    }
    save_file(tensors, root / "tuned" / "model.safetensors", {"format": "pt"})
    models = ["--source", MODELS / "small", "--finetuned", root / "tuned", "--target", MODELS / "large"]
    given = [*models, "--data", root / "digits.npz", "--head", "digits", "--samples", samples, "--batch-size", 4]
    given += ["--distill", distill] if distill else []
    return [str(word) for word in (*given, "--save-every", 0)]


def transfer(options: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tuneport", "transfer", *options, "--out", str(out), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> None:
    _, error = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a run that was not killed failed: {error}")


def content(folder: Path) -> dict[str, Any]:
    """Every file of an output byte by byte, and its record without what differs from run to run."""
    record = json.loads((folder / "tuneport.json").read_text())
    plain = {key: value for key, value in record.items() if key not in VOLATILE}
    plain.get("distilled", {}).pop("seconds", None)
    files = {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
    shown = ("tuneport.json", "report.html", "README.md")  # these tell the seconds
    return {"record": plain, "names": sorted(files), **{name: files[name] for name in files if name not in shown}}


def work_of(out: Path) -> bool:
    return any((out.parent / f".{out.name}.tuneport-work").rglob("[!.]*.safetensors"))


def run_until(process: subprocess.Popen[str], out: Path, after_work: float | None, after_start: float) -> bool:
    """Kill a process some seconds after it has saved work (or after its start); whether it was still running."""
    started = time.perf_counter()
    saved: float | None = None
    while process.poll() is None:
        now = time.perf_counter()
        saved = now if saved is None and work_of(out) else saved
        since, delay = (started, after_start) if after_work is None else (saved, after_work)
        if since is not None and now - since > delay:
            process.kill()
            break
        time.sleep(0.005)
    process.communicate()
    return process.returncode != 0


def undisturbed(process: subprocess.Popen[str], out: Path) -> tuple[float, float]:
    """Seconds of a whole run, and of its part after the first save."""
    started = first = time.perf_counter()
    while process.poll() is None:
        if first == started and work_of(out):
            first = time.perf_counter()
        time.sleep(0.005)
    ended = time.perf_counter()
    finish(process)
    return ended - started, ended - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--distill", type=int, default=0, help="steps of a distillation after the port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    choose, seen = random.Random(options.seed), Counter[str]()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch)
        given = make_inputs(root, options.samples, options.distill)
        whole, after = undisturbed(transfer(given, root / "whole"), root / "whole")
        expected = content(root / "whole")
        for number in range(options.runs):
            out = root / f"out-{number}"
            kills = 0
            while kills == 0 or choose.random() < 0.25:
                # Most of a run is imports and loading: three in four kills aim at what comes after.
                early = choose.random() < 0.25
                delay = choose.uniform(0.0, 1.05) * (whole if early else after)
                process = transfer(given, out, *(["--resume"] if kills else []))
                killed = run_until(process, out, None if early else delay, delay)
                kills += 1
                seen["killed" if killed else "had ended before the kill"] += 1
                seen["killed with work saved"] += killed and work_of(out)
                if out.exists():
                    seen["output complete after the kill"] += killed
                    if content(out) != expected:
                        raise SystemExit(f"run {number}: the output after the kill is not the whole one")
                else:
                    seen["no output after the kill"] += 1
            finish(transfer(given, out, "--resume"))
            if content(out) != expected:
                raise SystemExit(f"run {number}: the resumed output differs from the undisturbed one")
            seen["resumed to the same bytes"] += 1
            left = [path.name for path in root.iterdir() if path.name.startswith(".")]
            if left:
                raise SystemExit(f"run {number} left {left}")
            print(f"{number + 1}/{options.runs} {dict(seen)}", file=sys.stderr)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    distilled = f", {options.distill} steps of distillation" if options.distill else ""
    lines = [
        "# Killed runs",
        "",
        f"{options.runs} runs of `tuneport transfer` (two small vision transformers, {options.samples} samples"
        f"{distilled}, saved after each batch and step), each aimed at with SIGKILL at a random moment once or more, "
        "then resumed; some had ended before. "
        "After each kill the output was absent or whole; each resumed run ended in the same bytes as an undisturbed "
        "one (except timings) and left no other file behind.",
        "",
        "| what happened | times |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in sorted(seen.items())),
        "",
        f"- command: `python benchmarks/kill_test.py {' '.join(sys.argv[1:])}`",
        f"- machine: {platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}",
        f"- one undisturbed run: {whole:.0f} s; all: {time.perf_counter() - started:.0f} s",
        f"- commit: {commit.stdout.strip() or 'unknown'}",
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
