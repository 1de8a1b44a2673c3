"""Claim: a wrong command line is refused in one line and in seconds, before torch is loaded.

    python tools/mistakes.py            # each in a process of its own: message and seconds, as a Markdown table
    python tools/mistakes.py --json     # all in one process: exit code, message, and whether torch was loaded

The folders and tables that the commands name are made in a temporary folder, without a model library.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PORT = "--source old --finetuned tuned --target new"


@dataclass(frozen=True)
class Mistake:
    """A command line, the exit code, and words of its message; what it advises, as words in place of others.

    An empty `advised[0]` means that the words are added.
    """

    words: str
    code: int
    said: tuple[str, ...]
    advised: tuple[str, str]

    @property
    def corrected(self) -> str:
        """The command line after the advice."""
        wrong, right = self.advised
        return self.words.replace(wrong, right) if wrong else f"{self.words} {right}"


MISTAKES = {
    # paths
    "data": Mistake(
        f"transfer {PORT} --data rowz.csv --out out",
        1,
        ("no data at rowz.csv", "Did you mean rows.csv?"),
        ("rowz.csv", "rows.csv"),
    ),
    "source": Mistake(
        "transfer --source ./odl --finetuned tuned --target new --data rows.csv --out out",
        1,
        ("there is no model at ./odl", "Did you mean old?"),
        ("./odl", "old"),
    ),
    "fine-tune": Mistake(
        "transfer --source old --finetuned ./tunde --target new --data rows.csv --out out",
        1,
        ("there is no fine-tune at ./tunde", "Did you mean tuned?"),
        ("./tunde", "tuned"),
    ),
    "target": Mistake(
        "upgrade --source old --finetuned tuned --target ./nwe --data rows.csv --out out",
        1,
        ("there is no model at ./nwe", "Did you mean new?"),
        ("./nwe", "new"),
    ),
    "every path": Mistake(
        "transfer --source ./a --finetuned ./b --target ./c --data ./d --out out",
        1,
        ("no model at ./a", "no fine-tune at ./b", "no model at ./c", "no data at ./d"),
        ("./a --finetuned ./b --target ./c --data ./d", "old --finetuned tuned --target new --data rows.csv"),
    ),
    "a hub id that does not exist": Mistake(
        "evaluate no-such-model-anywhere --data rows.csv",
        1,
        ("the hub has no such model, or it cannot be reached",),
        ("no-such-model-anywhere", "old"),
    ),
    "a folder without a model": Mistake(
        "transfer --source empty --finetuned tuned --target new --data rows.csv --out out",
        1,
        ("empty is not a model: no config.json in it",),
        ("--source empty", "--source old"),
    ),
    "an adapter as target": Mistake(
        "transfer --source old --finetuned tuned --target lora --data rows.csv --out out",
        1,
        ("lora is an adapter, not a model", "give it as --finetuned"),
        ("--finetuned tuned --target lora", "--finetuned lora --target new"),
    ),
    "an adapter without its configuration": Mistake(
        "transfer --source old --finetuned parts --target new --data rows.csv --out out",
        1,
        ("parts holds the factors of a LoRA", "adapter_config.json"),
        ("parts", "lora"),
    ),
    "an existing output": Mistake(
        f"transfer {PORT} --data rows.csv --out made", 1, ("made exists", "--overwrite"), ("", "--overwrite")
    ),
    "a file as output folder": Mistake(
        f"upgrade {PORT} --data rows.csv --out rows.csv --overwrite",
        1,
        ("rows.csv is not a folder",),
        ("--out rows.csv", "--out out"),
    ),
    "an input as output": Mistake(
        f"transfer {PORT} --data rows.csv --out old --overwrite",
        1,
        ("old cannot be overwritten: it holds the input",),
        ("--out old", "--out out"),
    ),
    "a task vector without its suffix": Mistake(
        f"transfer {PORT} --data rows.csv --as task-vector --out tau",
        1,
        ("tau must end in .safetensors",),
        ("tau", "tau.safetensors"),
    ),
    # heads
    "a head": Mistake(
        f"transfer {PORT} --data rows.csv --head crs --out out",
        1,
        ("old has no head 'crs': it has cars",),
        ("crs", "cars"),
    ),
    "a head file": Mistake(
        f"transfer {PORT} --data rows.csv --head heads/none.safetensors --out out",
        1,
        ("old has no head", "new has no"),
        ("heads/none.safetensors", "old/heads/cars.safetensors"),
    ),
    "a head of an evaluation": Mistake(
        "evaluate old --data rows.csv --head crs", 1, ("old has no head 'crs'",), ("crs", "cars")
    ),
    # numbers and names
    "no samples": Mistake(
        f"transfer {PORT} --data rows.csv --samples 0 --out out",
        2,
        ("--samples must be at least 1",),
        ("--samples 0", "--samples 1"),
    ),
    "words for samples": Mistake(
        f"transfer {PORT} --data rows.csv --samples many --out out", 2, ("'--samples'", "integer"), ("many", "4")
    ),
    "a scale": Mistake(
        f"transfer {PORT} --data rows.csv --scale strong --out out", 2, ("--scale must be a number",), ("strong", "1")
    ),
    "a scale that is no number": Mistake(
        f"transfer {PORT} --data rows.csv --scale nan --out out",
        2,
        ("--scale must be a finite number",),
        ("nan", "safe"),
    ),
    "several options": Mistake(
        f"transfer {PORT} --data rows.csv --scale strong --samples 0 --dtype half --out out",
        2,
        ("--scale must be", "--samples must be", "unknown dtype 'half'"),
        ("strong --samples 0 --dtype half", "auto --samples 1 --dtype float32"),
    ),
    "a method": Mistake(
        f"transfer {PORT} --data rows.csv --method bicco --out out", 2, ("Did you mean 'bico'?",), ("bicco", "bico")
    ),
    "a sampler": Mistake(
        f"transfer {PORT} --data rows.csv --sampler randon --out out",
        2,
        ("Did you mean 'random'?",),
        ("randon", "random"),
    ),
    "a loss": Mistake(
        f"transfer {PORT} --data rows.csv --loss casual --out out", 2, ("Did you mean 'causal'?",), ("casual", "causal")
    ),
    "a device": Mistake(
        f"transfer {PORT} --data rows.csv --device gpu --out out", 2, ("device 'gpu'", "Pass auto"), ("gpu", "auto")
    ),
    "a dtype": Mistake(
        "distill --finetuned tuned --target new --data rows.csv --out out --dtype f16",
        2,
        ("Known:",),
        ("f16", "float16"),
    ),
    "roles": Mistake(
        f"transfer {PORT} --data rows.csv --roles up --out out",
        2,
        ("--roles takes SOURCE=TARGET",),
        ("--roles up", "--roles up=fc1"),
    ),
    "columns": Mistake(
        f"upgrade {PORT} --data rows.csv --columns text --out out",
        2,
        ("expected NAME=COLUMN",),
        ("--columns text", "--columns text=text,label=label"),
    ),
    "a memory budget": Mistake(
        f"plan {PORT} --data rows.csv --memory-budget lots", 2, ("such as 8GiB",), ("lots", "8GiB")
    ),
    "a format": Mistake(
        f"transfer {PORT} --data rows.csv --as zip --out out", 2, ("unknown as 'zip'",), ("zip", "adapter --rank 4")
    ),
    "a route": Mistake(
        f"upgrade {PORT} --data rows.csv --routes prot --out out", 2, ("Did you mean 'port'?",), ("prot", "port")
    ),
    "a time": Mistake(
        f"upgrade {PORT} --data rows.csv --time soon --out out", 2, ("such as 90s, 10m or 2h",), ("soon", "10m")
    ),
    "a learning rate": Mistake(
        "distill --finetuned tuned --target new --data rows.csv --out out --learning-rate 0",
        2,
        ("above 0",),
        ("--learning-rate 0", "--learning-rate 0.001"),
    ),
    "an option": Mistake(
        f"transfer {PORT} --data rows.csv --smaples 5 --out out", 2, ("--smaples", "--samples"), ("smaples", "samples")
    ),
    "a command": Mistake(
        "trasnfer", 2, ("trasnfer", "transfer"), ("trasnfer", f"transfer {PORT} --data rows.csv --out out")
    ),
    "no output": Mistake(f"transfer {PORT} --data rows.csv", 2, ("--out",), ("", "--out out")),
    # combinations
    "samples and shots": Mistake(
        f"transfer {PORT} --data rows.csv --samples 4 --shots 2 --out out",
        2,
        ("--samples or --shots, not both",),
        (" --shots 2", ""),
    ),
    "shots of labels that are not used": Mistake(
        f"transfer {PORT} --data rows.csv --labels source --shots 2 --out out",
        2,
        ("with --labels source",),
        (" --shots 2", ""),
    ),
    "a rank of a model": Mistake(
        f"transfer {PORT} --data rows.csv --rank 4 --out out", 2, ("they go with --as adapter",), ("", "--as adapter")
    ),
    "rank and energy": Mistake(
        f"transfer {PORT} --data rows.csv --as adapter --rank 4 --energy 0.9 --out out",
        2,
        ("not both",),
        (" --energy 0.9", ""),
    ),
    "a method without data": Mistake(
        f"transfer {PORT} --out out", 2, ("needs calibration data: pass --data",), ("", "--data rows.csv")
    ),
    "a plan without a fine-tune": Mistake(
        "plan --source old --target new", 2, ("--finetuned is needed",), ("", "--finetuned tuned")
    ),
    "a plan for devices": Mistake(
        "plan --source old --target new --shapes-only", 2, ("needs --memory-budget",), ("", "--memory-budget 8GiB")
    ),
    "samples of an evaluation": Mistake(
        "evaluate old --data rows.csv --samples 5",
        2,
        ("--samples goes with --protocol linear-probe",),
        ("", "--protocol linear-probe"),
    ),
    "an evaluation on nothing": Mistake(
        "evaluate old", 2, ("pass --data to score models, or --ask with a prompt",), ("", "--data rows.csv")
    ),
    "weights of a merge": Mistake(
        "merge tuned lora --weights 1 --base old -o tau.safetensors",
        2,
        ("2 fine-tunes and 1 --weights",),
        ("--weights 1", "--weights 1,1"),
    ),
    "the density of a merge": Mistake(
        "merge tuned lora --rule ties --density 0 --base old -o tau.safetensors",
        2,
        ("--density must be above 0",),
        ("--density 0", "--density 0.5"),
    ),
    # data
    "more samples than there are": Mistake(
        f"transfer {PORT} --data rows.csv --samples 50 --out out",
        1,
        ("asked for 50 samples but rows has 20",),
        ("--samples 50", "--samples 20"),
    ),
    "more shots than there are": Mistake(
        f"transfer {PORT} --data rows.csv --shots 50 --out out",
        1,
        ("asked for 50 shots", "lower --shots"),
        ("--shots 50", "--shots 2"),
    ),
    "an empty table": Mistake(
        f"upgrade {PORT} --data empty.jsonl --out out", 1, ("empty.jsonl is empty",), ("empty.jsonl", "rows.csv")
    ),
    "a folder without images": Mistake(
        f"plan {PORT} --data empty", 1, ("empty has no images",), ("--data empty", "--data images")
    ),
    "a broken row": Mistake(
        f"upgrade {PORT} --data broken.jsonl --out out",
        1,
        ("line 2 of broken.jsonl is not JSON",),
        ("broken.jsonl", "mended.jsonl"),
    ),
    "unknown columns": Mistake(
        f"upgrade {PORT} --data other.csv --out out",
        1,
        ("sentence", "--columns"),
        ("", "--columns text=sentence,label=mood"),
    ),
    "a column that is not there": Mistake(
        f"upgrade {PORT} --data rows.csv --columns text=body --out out",
        1,
        ("rows.csv has no column body",),
        ("text=body", "text=text"),
    ),
    "an unknown format": Mistake(
        f"upgrade {PORT} --data rows.xyz --out out", 1, ("the format of rows.xyz",), ("rows.xyz", "rows.csv")
    ),
    "no training split": Mistake(
        "distill --finetuned tuned --target new --data tests.csv --out out", 1, ("train",), ("tests.csv", "whole.csv")
    ),
    "an unknown task": Mistake(
        f"transfer {PORT} --data svnh:rows.csv --out out", 1, ("Did you mean 'svhn'?",), ("svnh", "svhn")
    ),
    "classes that are not there": Mistake(
        "evaluate old --data texts.jsonl --by-class", 1, ("has no classes",), (" --by-class", "")
    ),
    # other commands
    "two paths of a merge": Mistake(
        "merge ./a ./b --base old -o tau.safetensors",
        1,
        ("no fine-tune at ./a", "no fine-tune at ./b"),
        ("./a ./b", "tuned lora"),
    ),
    "a task vector": Mistake(
        "apply ./tau.safetensors old -o out",
        1,
        ("no task vector at ./tau.safetensors",),
        ("./tau.safetensors", "change.safetensors"),
    ),
    "the base of an extraction": Mistake(
        "extract ./odl tuned -o tau.safetensors", 1, ("no model at ./odl",), ("./odl", "old")
    ),
}


def make_scene(folder: Path) -> None:
    """Write the folders and tables that the commands name."""
    for name in ("old", "new", "tuned"):
        (folder / name / "heads").mkdir(parents=True)
        (folder / name / "config.json").write_text('{"model_type": "clip_vision_model"}')
        save_file({"class_embeds": np.ones((2, 4), np.float32)}, folder / name / "heads" / "cars.safetensors")
    (folder / "empty").mkdir()
    (folder / "made").mkdir()
    factors = {"base_model.model.layer.lora_A.weight": np.ones((1, 4), np.float32)}
    for name in ("lora", "parts"):
        (folder / name).mkdir()
        save_file(factors, folder / name / "adapter_model.safetensors")
    (folder / "lora" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    rows = "".join(f"text {number},{'good' if number % 2 else 'bad'}\n" for number in range(20))
    (folder / "rows.csv").write_text("text,label\n" + rows)
    (folder / "other.csv").write_text("sentence,mood\nfine,good\n")
    (folder / "tests.csv").write_text("text,label,split\nfine,good,test\n")
    (folder / "whole.csv").write_text("text,label\nfine,good\n")
    (folder / "rows.xyz").write_text("")
    (folder / "empty.jsonl").write_text("")
    (folder / "texts.jsonl").write_text('{"text": "a text"}\n')
    (folder / "mended.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    change = {"layer.weight": np.ones((1, 4), np.float32)}
    save_file(change, folder / "change.safetensors", {"format": "tuneport-task-vector"})
    for name in ("cat", "dog"):
        (folder / "images" / name).mkdir(parents=True)
        (folder / "images" / name / "1.ppm").write_bytes(b"P6 1 1 255 abc")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')


def run_here(words: str) -> tuple[int, str]:
    """Run a command in this process; its exit code and what it says."""
    from tuneport import cli
    from tuneport.cli import terminal

    sys.argv = ["tuneport", *words.split()]
    said = io.StringIO()
    terminal.err_console.file = said
    with contextlib.redirect_stderr(said):
        try:
            cli.main()
        except SystemExit as left:
            return int(left.code or 0), said.getvalue()
    return 0, said.getvalue()


def run_apart(words: str) -> tuple[int, str, float]:
    """Run a command in a process of its own; also its seconds."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tuneport.cli", *words.split()], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="all in this process, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_scene(Path(name))
        os.chdir(name)
        if given.json:
            from typer import main as typer

            typer.get_command = cache(typer.get_command)  # which makes the parsers again for each call
            found = {}
            for mistake, about in MISTAKES.items():
                code, text = run_here(about.words)
                found[mistake] = {"code": code, "text": text, "torch": "torch" in sys.modules}
            for mistake, about in MISTAKES.items():  # these load torch
                found[mistake]["corrected"] = run_here(about.corrected)[1]
            json.dump(found, sys.stdout)
            return
        print("| mistake | exit | seconds | message |\n|---|---|---|---|")
        slow = 0
        for mistake, about in MISTAKES.items():
            code, text, seconds = run_apart(about.words)
            slow += seconds >= 2
            print(f"| {mistake} | {code} | {seconds:.2f} | {' '.join(text.split())[:160]} |", flush=True)
        print(f"\n{len(MISTAKES)} mistakes, {len(MISTAKES) - slow} refused in under two seconds")


if __name__ == "__main__":
    main()
