"""Programs in processes of their own, forked from one that has imported the libraries: importing them takes seconds."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing import start_processes

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tuneport.cli",
        "tuneport.fleet.run",
        "tuneport.pipeline.distill",
        "tuneport.pipeline.run",
        "tuneport.pipeline.upgrade",
        "peft",
        "scipy.stats",
        "sklearn.linear_model",
        "transformers.models.bert.modeling_bert",
        "transformers.models.clip.image_processing_pil_clip",
        "transformers.models.clip.modeling_clip",
        "transformers.models.llama.modeling_llama",
        "transformers.models.t5.modeling_t5",
        "transformers.models.vit.modeling_vit",
        "builders.parsers",
    ]
)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def warnings(self) -> str:
        """What stderr has apart from the line about the samples, which every transfer with labels prints."""
        lines = self.err.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("note: the fine-tuned source "))

    @property
    def json(self) -> dict[str, Any]:
        content = json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert isinstance(content, dict)
        return content


def run_program(program: str, *words: str) -> Done:
    """Run a program as `python -c` does, in a new process; a negative code is the signal that ended it."""
    with tempfile.TemporaryDirectory() as folder:
        process = FORKS.Process(target=_run, args=(program, words, folder))
        process.start()
        process.join()
        assert process.exitcode is not None
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
        return Done(process.exitcode, out, err)


def run_ranks(program: str, count: int, *words: str) -> list[Done]:
    """Run a program in several processes at once, with the variables that torchrun sets."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(count)}
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(rank)) for rank in range(count)]
        running = []
        for rank, folder in enumerate(folders):
            folder.mkdir()
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            running.append(FORKS.Process(target=_run, args=(program, words, str(folder), variables)))
            running[-1].start()
        for process in running:
            process.join()
        texts = [[Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err")] for folder in folders]
        return [Done(int(one.exitcode or 0), *text) for one, text in zip(running, texts, strict=True)]


def _free_port() -> int:
    """Find a port below those that the system gives to connections: it is still free when the processes start."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def run_together(work: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Call `work(rank, *arguments)` in several processes at once, and raise what one of them raises."""
    start_processes(work, arguments, nprocs=count, start_method="forkserver")


def _run(program: str, words: tuple[str, ...], folder: str, variables: Mapping[str, str] | None = None) -> None:
    os.environ.update(variables or {})
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    gc.freeze()  # what is imported is read by no garbage collection, and its pages stay shared
    gc.set_threshold(10_000)
    sys.argv[:] = ["-c", *words]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
