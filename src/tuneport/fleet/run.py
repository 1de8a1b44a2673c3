"""Upgrade all fine-tunes of a list: what is done already is not done again, and a failure stops no other.

Lines of one target and one source follow each other, so that a worker opens each model once. A worker is a process of
this machine, or an actor of Ray; a `Desk` lives in it. Whatever goes wrong with a fine-tune becomes its row; only the
death of the process is left to the one who waits for the row. An output is complete or not there at all, so that a
later start does what is missing.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..config import TransferConfig, TransferInputs, UpgradeConfig, UpgradeInputs
from ..errors import CheckpointError, TuneportError, brief, lacks_memory, reraised
from ..io.fingerprint import file_digests
from ..io.output import claimed
from ..io.places import hub_name
from ..models.base import Model
from ..outputs import output_class
from ..pipeline.inputs import open_models
from ..pipeline.upgrade import upgrade_to_folder
from ..runtime.resume import Work
from ..types import Events, Sides
from .lines import Line, ListError, read_lines
from .summary import Fleet, Row, earlier_rows, failed, fleet_of, row_of

EVERY = 10.0  # seconds between two summaries
Worker = Any  # a LocalWorker or a RayWorker
LOCAL = "local"  # the address of a Ray of this machine alone
PATIENCE = 10.0  # seconds in which a cluster is to answer
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0: Ray listens on the loopback address alone, on any system


def upgrade_all(
    list: str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    events: Events | None = None,
    **options: Any,
) -> Fleet:
    """Upgrade all fine-tunes of a list, in processes of their own; failed ones and old models that stay come first.

    Processes import the script that calls this: call it below `if __name__ == "__main__":`.

    Args:
        list: a file with one JSON object a line, whose keys are the options of `upgrade`.
        out: the folder of the summary, and of the outputs of lines that name none.
        workers: processes; by default one, and with Ray one per GPU, or per machine.
        ray: the address of a Ray cluster, or "local".
        events: listens to the run.
        options: defaults of the lines: `source`, `finetuned`, `target`, `data`, and the fields of `UpgradeConfig`.
    """
    named = {item.name for item, _ in TransferInputs.options()}
    given = {name: options.pop(name) for name in named & set(options)}
    if isinstance(tuned := given.get("finetuned", ()), (str, Path)):
        given["finetuned"] = (str(tuned),)
    inputs = UpgradeInputs.of(list_=str(list), out=str(out), workers=workers, ray=ray, **given)
    return upgrade_lines(read_lines(inputs, UpgradeConfig.of(**options)), inputs, events)


def upgrade_lines(lines: Sequence[Line], inputs: UpgradeInputs, events: Events | None = None) -> Fleet:
    """Upgrade the fine-tunes of lines that were read, and write the summary."""
    events, started, folder = events or Events(), time.perf_counter(), Path(inputs.out)
    with claimed(folder):
        rows = {row.line: row for row in _done(lines, folder, inputs)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror}. Choose another `out`.") from error
        waiting = sorted(
            (line for line in lines if line.number not in rows),
            key=lambda line: (line.inputs.target, line.inputs.source, line.config.device, line.config.dtype),
        )
        events.plan(len(waiting))
        events.step(f"{len(rows)} of {len(lines)} are done already" if rows else "opening models")
        saved = started

        def done(row: Row) -> None:
            nonlocal saved
            rows[row.line] = row
            events.advance(1)
            events.step(f"{row.status}: {Path(row.out).name}")
            if time.perf_counter() - saved > EVERY:
                found().write()
                saved = time.perf_counter()

        def found() -> Fleet:
            return fleet_of(folder, rows.values(), time.perf_counter() - started)

        try:
            if waiting:
                with open_workers(inputs.workers, inputs.ray, waiting) as workers:
                    _work(waiting, workers, done)
        finally:
            fleet = found()
            fleet.write()
    return fleet


def _work(lines: Iterable[Line], workers: Iterable[Worker], done: Callable[[Row], None]) -> None:
    """Give each worker a line at a time; a line whose worker dies is given out again, if that may help."""
    waiting, running, tried = deque(lines), dict[Future[Row], tuple[Worker, Line]](), Counter[int]()

    def begin(worker: Worker) -> None:
        if not waiting:
            worker.close()
            return
        line = waiting.popleft()
        tried[line.number] += 1
        running[worker.submit(line)] = worker, line

    try:
        for worker in workers:
            begin(worker)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                worker, line = running.pop(future)
                error = future.exception()
                if error is None:
                    done(future.result())
                elif tried[line.number] < worker.tries:
                    waiting.append(line)
                else:
                    _clear(line)
                    reason = f"its worker died, also when it tried again ({brief(error)}). Is there too little memory?"
                    done(failed(line, reason))
                if error is not None:
                    worker.restart()
                begin(worker)
    except BaseException:
        for worker in workers:
            worker.close()
        for _, line in running.values():
            _clear(line)
        raise


def _clear(line: Line) -> None:
    """Remove what a killed process has left beside the output; what it has saved to continue stays."""
    with suppress(CheckpointError), claimed(line.out):
        pass


def _done(lines: Sequence[Line], folder: Path, inputs: UpgradeInputs) -> Iterator[Row]:
    """The rows of lines that an earlier start has done; outputs of other upgrades are refused."""
    earlier = {row.fingerprint: row for row in earlier_rows(folder)}
    found, wrong = [], {}
    for line in lines:
        row = earlier.get(line.fingerprint)
        if line.config.overwrite:
            continue
        if os.path.lexists(line.out):
            record = _record(line)
            if record is None:
                wrong[line.number] = (
                    f"{line.out} exists already, and is not what this line asks for: give another `out`"
                )
            else:
                found.append(row if row is not None and row.status == "written" else row_of(line, record))
        elif row is not None and row.status == "kept":
            found.append(row)
    if wrong:
        raise ListError(str(inputs.list_), wrong)
    numbers = {line.fingerprint: line.number for line in lines}
    return (replace(row, earlier=True, line=numbers[row.fingerprint]) for row in found)


def _record(line: Line) -> Mapping[str, Any] | None:
    """The record of a complete output, if it is what the line asks for."""
    output, inputs = output_class(line.config.as_ or "model")(), line.inputs
    try:
        record: Mapping[str, Any] = output.read_record(line.out)
        tuned = record["finetuned"].get("parts") or [record["finetuned"]]
        parts = [*zip(tuned, inputs.finetuned, strict=True)]
        parts += [(record[key], str(getattr(inputs, key))) for key in ("source", "target")]
        same = record["command"] == "upgrade" and record["options"] == line.config.to_json()
        same = same and record["data"].get("path") == inputs.data and all(_is_at(*part) for part in parts)
        same = same and all(map(_unchanged, (*tuned, record["data"])))  # the bases are as large as they are fixed
        return record if same and record["routes"] else None
    except (TuneportError, OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_at(entry: Mapping[str, Any], reference: str) -> bool:
    """Whether an input of a record is the one that a reference means."""
    place = entry.get("path")
    if place is None:
        return bool(entry["name"] == reference)
    known = hub_name(Path(place))
    return os.path.realpath(place) == os.path.realpath(reference) or (known is not None and known[0] == reference)


def _unchanged(entry: Mapping[str, Any]) -> bool:
    """Whether the files of an input in a folder are those of its record; files that were added are not seen."""
    home = Path(entry.get("path") or "")
    if not home.exists():  # a name on the hub, or one before a path
        return True
    home = home.parent if home.is_file() else home
    known = {os.path.normpath(home / name): digest for name, digest in entry.get("sha256", {}).items()}
    return file_digests(known) == known


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


class LocalWorker:
    """A process of this machine, in a pool of its own."""

    tries = 2  # how often a line is given to workers that die of it

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

    tries = 1  # and one of Ray's own

    def __init__(self, ray: Any, gpus: int) -> None:
        asked = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": 1}
        self._ray = ray
        self._actor = ray.remote(**asked, scheduling_strategy="SPREAD")(Desk).remote(os.getcwd())

    def submit(self, line: Line) -> Future[Row]:
        return self._actor.upgrade.remote(line).future()  # type: ignore[no-any-return]

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
