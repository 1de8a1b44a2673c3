"""Workers of a fleet: processes that upgrade one fine-tune at a time and keep the base models open.

A worker is a process of this machine, in a pool of its own, or an actor of Ray. A `Desk` lives in it. Whatever goes
wrong with a fine-tune becomes its row; only the death of the process is left to the one who waits for the row.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch

from ..config import TransferConfig
from ..errors import CheckpointError, TuneportError, brief, lacks_memory, reraised
from ..models.base import Model
from ..pipeline.inputs import open_models
from ..pipeline.upgrade import upgrade_to_folder
from ..runtime.resume import Work
from ..types import Sides
from .lines import Line
from .summary import Row, failed, row_of

LOCAL = "local"  # the address of a Ray of this machine alone
PATIENCE = 10.0  # seconds in which a cluster is to answer
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray listens on the loopback address alone, on any system


class Desk:
    """Upgrades fine-tunes one after the other, and keeps the last source and the last target open."""

    def __init__(self, folder: str | None = None) -> None:
        if folder is not None:  # relative paths are those of the one who asks
            os.chdir(folder)
        self._open: dict[Any, Model] = {}

    def upgrade(self, line: Line) -> Row:
        """Upgrade one fine-tune; an error becomes the row."""
        started = time.perf_counter()
        try:
            record, reason = self._record(line), ""
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            record, reason = {}, _reason(error)
            if not isinstance(error, TuneportError):
                self._open.clear()  # an error from anywhere may have left anything
        seconds = round(time.perf_counter() - started, 3)
        return failed(line, reason, seconds=seconds) if reason else row_of(line, record, seconds=seconds)

    def _record(self, line: Line) -> dict[str, Any]:
        models, begun = self._models(line), Work(line.out, {}).folder.exists()
        try:
            return upgrade_to_folder(line.inputs, line.config, models=models)
        except CheckpointError:
            if not begun:
                raise
        Work(line.out, {}).remove()  # of other options, or damaged: start over
        return upgrade_to_folder(line.inputs, line.config, models=models)

    def _models(self, line: Line) -> Sides[Model]:
        """The base models of a line; what is not needed any more goes before another one is opened."""
        inputs, config = line.inputs, line.config
        way = (config.device, config.dtype, config.trust_remote_code)
        source, target = ("source", inputs.source, *way), ("target", inputs.target, *way)
        self._open = {key: model for key, model in self._open.items() if key in (source, target)}
        asked = TransferConfig(device=way[0], dtype=way[1], trust_remote_code=way[2])
        models = open_models(self._open.get(source, inputs.source), self._open.get(target, inputs.target), asked)
        self._open = {source: models.source, target: models.target}
        return models


def _reason(error: BaseException) -> str:
    if isinstance(error, TuneportError):
        return str(error)
    if isinstance(error, MemoryError) or lacks_memory(error):
        return f"there is too little memory ({brief(error)}): use fewer workers, or a smaller `batch_size`."
    return f"{type(error).__name__}: {brief(error)}"


class Worker(Protocol):
    """What upgrades one fine-tune at a time.

    `tries` is how often a line is given to workers that die of it.
    """

    tries: int

    def submit(self, line: Line) -> Future[Row]:
        """Begin with a line."""

    def restart(self) -> None:
        """Be ready again after the process has died."""

    def close(self) -> None:
        """End; a line that is under way is left as it is, and continued by the next start."""


class LocalWorker:
    """A process of this machine."""

    tries = 2

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._start()

    def _start(self) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawned, initializer=_begin, initargs=(self._threads,))
        self._process: Future[int] | None = None

    def submit(self, line: Line) -> Future[Row]:
        try:
            self._process = self._process or self._pool.submit(os.getpid)
            return self._pool.submit(_upgrade, line)
        except BrokenProcessPool:  # it died while it had nothing to do
            self.restart()
            return self.submit(line)

    def restart(self) -> None:
        self._pool.shutdown()
        self._start()

    def close(self) -> None:
        if self._process is not None and self._process.done() and self._process.exception() is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.result(), signal.SIGTERM)
        self._process = None
        self._pool.shutdown(cancel_futures=True)


_desk = Desk()


def _upgrade(line: Line) -> Row:
    """Upgrade one fine-tune; if the parent asks the process to end, clean up."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        return _desk.upgrade(line)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _begin(threads: int | None) -> None:
    """Begin a process, which ends when its pool or its parent does; Ctrl-C reaches the parent too."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    if threads is not None:
        torch.set_num_threads(threads)


class RayWorker:
    """An actor of Ray, which starts it again when it dies, and gives it its line again."""

    tries = 1

    def __init__(self, ray: Any, gpus: int) -> None:
        asked = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": 1}
        self._ray = ray
        self._actor = ray.remote(**asked, scheduling_strategy="SPREAD")(Desk).remote(os.getcwd())

    def submit(self, line: Line) -> Future[Row]:
        found: Future[Row] = self._actor.upgrade.remote(line).future()
        return found

    def restart(self) -> None:
        """Ray does that."""

    def close(self) -> None:
        self._ray.kill(self._actor)


@contextmanager
def open_workers(count: int | None, address: str | None, lines: Sequence[Line]) -> Iterator[Sequence[Worker]]:
    """Context with as many workers, or with those of a Ray cluster at an address."""
    workers: list[Worker] = []
    with start_ray(address, count) as ray:
        try:
            if ray is None:
                count = min(count or 1, len(lines))
                threads = max(1, torch.get_num_threads() // count) if count > 1 else None
                workers += [LocalWorker(threads) for _ in range(count)]
            else:
                there = ray.cluster_resources()
                gpus = int(any(line.config.device != "cpu" for line in lines) and there.get("GPU", 0) >= 1)
                usual = int(there["GPU"]) if gpus else len(ray.nodes())
                workers += [RayWorker(ray, gpus) for _ in range(min(count or usual, len(lines)))]
            yield workers
        finally:
            for worker in workers:
                worker.close()


@contextmanager
def start_ray(address: str | None, count: int | None) -> Iterator[Any]:
    """Context with Ray; one of this machine alone listens on no other address."""
    if address is None:
        yield None
        return
    if address == LOCAL:
        os.environ.setdefault(LOOPBACK, "0")
    try:
        import ray
    except ImportError:
        raise TuneportError('Ray is not installed: pip install "tuneport[ray]".') from None
    running = ray.is_initialized()
    if not running:
        alone = {"num_cpus": count or 1, "include_dashboard": False} if address == LOCAL else {}
        host, mark, port = address.removeprefix("ray://").rpartition(":")
        with reraised(f"Ray does not answer at {address}", TuneportError):
            if mark and port.isdigit():  # Ray itself tries for many minutes
                socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
            ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **alone)
    try:
        yield ray
    finally:
        if not running:
            ray.shutdown()
