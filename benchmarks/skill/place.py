"""Where everything is and how it is computed; what every arm needs of it."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.skill.cells import Schedule

SMALL_STEPS = 2


@dataclass(frozen=True)
class Place:
    """Folders, and the machine."""

    models: Path
    shared: Path
    work: Path
    device: str
    dtype: str
    autocast: bool
    small: bool

    def schedule(self, given: Schedule) -> Schedule:
        return replace(given, steps=SMALL_STEPS, batch=2) if self.small else given

    @property
    def steps(self) -> int | None:
        """Of a distillation, if not by its own rule."""
        return SMALL_STEPS if self.small else None

    def without_paths(self, text: str) -> str:
        """The text with names in place of this machine's folders, as in a row's command."""
        for name in ("models", "shared", "work"):
            text = text.replace(str(getattr(self, name)), name.upper())
        return text

    def folder(self, name: str) -> Path:
        """A folder below WORK."""
        return self.work / f"{name}{'-small' * self.small}"

    def empty_folder(self, name: str) -> Path:
        """The same, without what was left there."""
        folder = self.folder(name)
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def kept(self, name: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """What `make` returns for an empty folder below WORK; one process makes it, others wait and read it."""
        folder = self.folder(name)
        about = folder / "scores.json"
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if not about.exists():
                found = make(self.empty_folder(name))
                folder.mkdir(parents=True, exist_ok=True)
                about.write_text(json.dumps(found), encoding="utf-8")
        return dict(json.loads(about.read_text(encoding="utf-8")))

    def start(self) -> float:
        """Forget the peak of memory, and read the clock."""
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats(self.device)
        return time.perf_counter()

    def spent(self, started: float) -> dict[str, float]:
        """Seconds, and the peak of memory: of the GPU's tensors, or of the whole process so far without one."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
            peak = torch.cuda.max_memory_allocated(self.device)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": round(time.perf_counter() - started, 1), "peak_gib": round(peak / 2**30, 2)}


@contextmanager
def fast_products() -> Iterator[None]:
    """Context in which a GPU multiplies in TF32: for training, not for scores."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def begin_process(jobs: int) -> None:
    """Share the processor's cores among the jobs, unless OMP_NUM_THREADS does, and draw no progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
