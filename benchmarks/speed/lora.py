"""A LoRA ported between two language models on a CPU, by the command of two checkouts in turns: CPU seconds, the scale
that is chosen, the score of each adapter on the test split; of the second, the CPU seconds of each step and how true
the progress is; and, as a floor, those of bare forward and backward passes of both models over the samples.

    python benchmarks/speed/lora.py BEFORE AFTER --source smollm2-135m --finetuned lora --target gemma3-270m \\
        --data chats.jsonl --samples 50 --out benchmarks/results/speed

Each runs in a process of its own, with one thread and its own sources; BEFORE may be any commit that has `transfer`.
CPU seconds are those of the process: what else runs on the machine adds little to them. Shares are those of a bar
against the CPU seconds since the plan was made. A quarter of an hour on one core of 2020.
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
from pathlib import Path
from typing import Any

import torch

INPUTS = ("source", "finetuned", "target", "data")
SCORES = ("accuracy", "perplexity", "bits_per_character", "samples")


def port(options: argparse.Namespace) -> dict[str, Any]:
    """Port in this process."""
    from tuneport.cli.terminal import Bar
    from tuneport.config import TransferConfig, TransferInputs
    from tuneport.pipeline.run import run_to_folder

    class Watched(Bar):
        """Keeps the CPU seconds at which each step begins, and the shares that are shown."""

        def __init__(self) -> None:
            super().__init__("porting")
            self.steps: list[tuple[str, float]] = [("opening", 0.0)]
            self.planned, self.shares = 0.0, list[tuple[float, float]]()

        def step(self, name: str, *more: Any) -> None:
            self.steps.append((name, time.process_time()))
            super().step(name, *more)

        def plan(self, total: float) -> None:
            self.planned = self.planned or time.process_time()
            super().plan(total)

        def _show(self, **changes: Any) -> None:
            super()._show(**changes)
            found = self._bars._bar.tasks[self._task]
            if found.total:
                self.shares.append((found.completed / found.total, time.process_time()))

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        inputs = {name: getattr(options, name) for name in INPUTS}
        inputs |= {"finetuned": (options.finetuned,), "out": str(Path(folder) / "out")}
        config = TransferConfig.of(as_="adapter", rank=options.rank, samples=options.samples, device="cpu")
        with Watched() as watched:
            record = run_to_folder(TransferInputs(**inputs), config, watched)
    end = time.process_time()
    seconds: dict[str, float] = {}
    for (name, begun), (_, over) in zip(watched.steps, [*watched.steps[1:], ("", end)], strict=True):
        seconds[name] = seconds.get(name, 0.0) + over - begun
    whole = end - watched.planned
    return {
        "seconds": seconds,
        "cpu_seconds": end,
        "scale": record["scale"],
        "candidates": [each["scale"] for each in record.get("scale_choice", {}).get("candidates", ())],
        "scores": {row["role"]: row["value"] for row in record.get("accuracies", ())},
        "shares": [(round(shown, 4), round((at - watched.planned) / whole, 4)) for shown, at in watched.shares],
    }


def bare(options: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward passes of both models over the training samples, eight at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
    chats = [row["messages"] for row in rows if row.get("split", "train") == "train"][: options.samples]
    seconds = {}
    for path in (options.source, options.target):
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).requires_grad_(False)
        begun = time.process_time()
        for start in range(0, len(chats), 8):
            texts = ["\n".join(turn["content"] for turn in chat) for chat in chats[start : start + 8]]
            batch = tokenizer(texts, return_tensors="pt", padding=True)
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            inputs = model.get_input_embeddings()(batch.pop("input_ids")).requires_grad_()
            model(inputs_embeds=inputs, labels=labels, **batch).loss.backward()
        seconds[Path(path).name] = time.process_time() - begun
    return {"seconds": seconds, "cpu_seconds": sum(seconds.values())}


def run(checkout: Path, *command: str) -> tuple[dict[str, Any], float]:
    """The JSON object that a program prints with the sources of a checkout, and its CPU seconds."""
    paths = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    before = _cpu_seconds()
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=False, env=paths)
    if done.returncode:
        raise SystemExit(f"{checkout}: exit code {done.returncode}")
    return json.loads(done.stdout[done.stdout.index("{") :]), _cpu_seconds() - before


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def commit_of(checkout: Path) -> str:
    asked = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return asked.stdout.strip()


def compare(options: argparse.Namespace, given: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Port by the command of each checkout, and score both adapters by that of the second."""
    found = {}
    for name in ("before", "after"):
        checkout, out = getattr(options, name).resolve(), str(folder / name)
        words = [*given, "--as", "adapter", "--device", "cpu", "--out", out, "--json"]
        record, seconds = run(checkout, "-m", "tuneport", "transfer", *words)
        found[name] = {"commit": commit_of(checkout), "cpu_seconds": seconds, "scale": record["scale"]}
    for name, each in found.items():
        words = ["evaluate", str(folder / name), "--data", options.data, "--device", "cpu", "--json"]
        score, _ = run(options.after.resolve(), "-m", "tuneport", *words)
        each["score"] = {key: score[key] for key in SCORES if score.get(key) is not None}
        print(json.dumps(each), file=sys.stderr, flush=True)
    return found


def deviation(shares: list[tuple[float, float]]) -> float:
    """The largest distance of the share that is shown from the true one, also just before it changes."""
    ends = [at for _, at in shares[1:]] + [1.0]
    return max(max(abs(shown - at), abs(shown - end)) for (shown, at), end in zip(shares, ends, strict=True))


def tenths(shares: list[tuple[float, float]]) -> list[list[Any]]:
    """What is shown at each tenth of the run."""
    rows = []
    for tenth in range(1, 10):
        shown = max((share for share, at in shares if at <= tenth / 10), default=0.0)
        rows.append([f"{10 * tenth} %", f"{100 * shown:.0f} %"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    for name in INPUTS:
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help="port once, in this process")
    parser.add_argument("--bare", action="store_true", help="the bare passes alone, in this process")
    options = parser.parse_args()
    if options.one or options.bare:
        print(json.dumps(port(options) if options.one else bare(options)))
        return
    from record import publish, table

    given = [word for name in INPUTS for word in (f"--{name}", getattr(options, name))]
    given += ["--samples", str(options.samples), "--rank", str(options.rank)]
    with tempfile.TemporaryDirectory() as folder:
        found = compare(options, given, Path(folder))
    paths = [__file__, str(options.before), str(options.after), *given]
    watched, floor = (run(options.after.resolve(), *paths, what)[0] for what in ("--one", "--bare"))
    before, after = found.values()
    ratio = after["cpu_seconds"] / before["cpu_seconds"]
    lines = [[key.replace("_", " "), before[key], after[key]] for key in ("commit", "scale")]
    lines.append(["CPU seconds", *(f"{each['cpu_seconds']:.0f}" for each in (before, after))])
    lines.append(["ratio", "1", f"{ratio:.2f}"])
    lines += [[f"{key} on the test split", before["score"][key], after["score"][key]] for key in after["score"]]
    lines += [[f"of these: {name}", "", f"{seconds:.0f}"] for name, seconds in watched["seconds"].items()]
    lines.append(["bare passes of both models", "", f"{floor['cpu_seconds']:.0f}"])
    title = (
        f"A LoRA of {Path(options.source).name} ported to {Path(options.target).name}, {options.samples} samples\n\n"
    )
    text = title + table(["", "before", "after"], lines)
    text += f"\n\nProgress, after: at most {100 * deviation(watched['shares']):.0f} % from the true share.\n\n" + table(
        ["share of the CPU seconds", "shown"], tenths(watched["shares"])
    )
    publish(
        "lora-port",
        options.out,
        text,
        {**found, "ratio": ratio, "watched": watched, "floor": floor},
        torch.device("cpu"),
    )


if __name__ == "__main__":
    main()
