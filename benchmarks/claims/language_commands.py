"""Pairs of language models by commands alone: from the download of the models to a chat with the ported LoRA.

It prints each command and runs it, and leaves out what is there: the models, the LoRA of the source, a ported LoRA.
`--show` only prints them. It starts from the root of the repository.

    python -m benchmarks.claims.language_commands --shared SHARED --work WORK
    python -m benchmarks.claims.language_commands --shared SHARED --work WORK --show \
        --pairs qwen-coder-0.5b:qwen-coder-1.5b --task trec6 --samples 100

A run for a CPU has few steps, samples and tokens:

    python -m benchmarks.claims.language_commands --shared SHARED --work WORK --pairs qwen-coder-0.5b:qwen-coder-1.5b \
        --steps 20 --samples 8 --max-tokens 400 --test 20
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims.language_tasks import ALL_DATA, INSTRUCTIONS, read_task

PAIRS = ("qwen-coder-0.5b:qwen-coder-1.5b", "smollm2-135m:qwen-coder-0.5b", "smollm2-135m:gemma3-270m",
         "smollm2-135m:tinyllama-1.1b")  # fmt: skip


@dataclass(frozen=True)
class Session:
    """The commands for one pair and task, and the files that they write."""

    shared: Path
    work: Path
    pair: str
    task: str = "trec6"
    samples: int = 100
    max_tokens: int | None = None
    steps: int = ALL_DATA["steps"]  # of the source's LoRA
    test: int = 300

    @property
    def models(self) -> tuple[Path, Path]:
        source, target = self.pair.split(":")
        return self.work / "models" / source, self.work / "models" / target

    @property
    def lora(self) -> Path:
        """The LoRA of the source."""
        return self.work / f"{self.models[0].name}-{self.task}-{self.steps}x{ALL_DATA['batch']}"

    @property
    def chats(self) -> Path:
        return self.work / f"{self.task}.jsonl"

    @property
    def out(self) -> Path:
        return self.work / f"{self.models[1].name}-{self.task}-from-{self.models[0].name}"

    def commands(self) -> Iterator[tuple[Path | None, list[str]]]:
        """Each command, with what it writes."""
        source, target = self.models
        for model in self.models:
            yield model, ["python", str(self.shared / "get_models.py"), str(model.parent), model.name]
        yield self.lora, [
            "python", "-m", "benchmarks.claims.language_tasks", "--model", str(source), "--data",
            str(self.shared / "data/text"), "--task", self.task, "--out", str(self.lora),
            "--steps", str(self.steps), "--test", str(self.test),
        ]  # fmt: skip
        data = ["--finetuned", str(self.lora), "--data", str(self.chats), "--samples", str(self.samples)]
        few = [] if self.max_tokens is None else ["--max-tokens", str(self.max_tokens)]
        sides = ["--source", str(source), "--target", str(target), *data, *few]
        yield None, ["tuneport", "plan", *sides]
        more = ["--as", "adapter", "--rank", "16", "--evaluate", "--out", str(self.out)]
        yield self.out, ["tuneport", "transfer", *sides, *more]
        yield (
            None,
            [
                "python",
                "examples/serve_lora.py",
                str(self.out),
                "--port",
                "0",
                "--tokens",
                "8",
                "--ask",
                self.question(),
            ],
        )

    def question(self) -> str:
        return f"{INSTRUCTIONS[self.task][0]}\n\nWhat is the capital of Peru ?"

    def write_chats(self) -> None:
        """Write the task as a user has it: one chat a line, with its label and split."""
        lines = []
        for split, data in read_task(self.task, self.shared / "data/text", self.test).items():
            assert data.labels is not None
            for chat, label in zip(data.inputs, data.labels, strict=True):
                row = {"messages": chat, "label": data.classes[label], "split": split}
                lines.append(json.dumps(row))
        self.chats.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with get_models.py and data/text")
    parser.add_argument("--work", type=Path, required=True, help="where models, LoRAs and chats are written")
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="SOURCE:TARGET")
    parser.add_argument("--task", default="trec6", choices=tuple(INSTRUCTIONS))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, help="of all samples together, in the maps")
    parser.add_argument("--steps", type=int, default=ALL_DATA["steps"], help="of the source's LoRA")
    parser.add_argument("--test", type=int, default=300, help="test samples")
    parser.add_argument("--show", action="store_true", help="print the commands and do nothing else")
    options = parser.parse_args()
    for pair in options.pairs:
        sizes = (options.samples, options.max_tokens, options.steps, options.test)
        session = Session(options.shared, options.work, pair, options.task, *sizes)
        if not options.show:
            options.work.mkdir(parents=True, exist_ok=True)
            session.write_chats()
        for made, words in session.commands():
            print(f"$ {shlex.join(words)}", flush=True)
            if not options.show and not (made is not None and made.exists()):
                start = {"python": [sys.executable], "tuneport": [sys.executable, "-m", "tuneport"]}[words[0]]
                subprocess.run([*start, *words[1:]], check=True)


if __name__ == "__main__":
    main()
