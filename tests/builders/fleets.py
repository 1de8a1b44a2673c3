"""Fleets of tiny adapters, and a worker that is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from builders.folders import Zoo, load
from builders.loras import adapted, saved

COUNT = 120  # own samples, of which 30 judge


def write_fleet(zoo: Zoo, folder: Path, count: int) -> Path:
    """Adapters of one tiny model, named a0, a1, ..., unlabelled images, and the list; return that."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (COUNT, 16, 16, 3), dtype=np.uint8)
    names = list(load(zoo["vit-base"]).config.id2label.values())
    labels = np.arange(COUNT) % len(names)
    np.savez(folder / "own.npz", classes=np.array(names), x_train=pixels, y_train=labels)
    for number in range(count):
        model = adapted(load(zoo["vit-base"]), seed=number, lora_alpha=30, target_modules=["q_proj", "fc1"])
        saved(model, folder / f"a{number}")
    return write_list(folder / "list.jsonl", [{"finetuned": str(folder / f"a{number}")} for number in range(count)])


def write_list(place: Path, lines: Sequence[Any]) -> Path:
    """A list; a text is written as it is."""
    place.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return place


def common(zoo: Zoo, listed: Path) -> dict[str, str]:
    """The defaults of the lines: the change is copied back to its own base, where it agrees with the old model."""
    base = str(zoo["vit-base"])
    return {"source": base, "target": base, "data": str(listed.parent / "own.npz"), "routes": "copy"}


def break_adapter(folder: Path) -> None:
    """Cut the weights of an adapter."""
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


@contextmanager
def killed_worker(out: Path) -> Iterator[list[int]]:
    """Context in which the first process that writes `out` is killed; yields a list that has its id then."""
    lock, found, stop = out.parent / f".{out.name}.tuneport-lock", list[int](), threading.Event()

    def watch() -> None:
        while not found and not stop.is_set():
            with suppress(OSError, ValueError):
                number = int(lock.read_text())
                os.kill(number, signal.SIGKILL)
                found.append(number)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
