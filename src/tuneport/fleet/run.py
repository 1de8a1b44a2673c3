"""Upgrade all fine-tunes of a list: what is done already is not done again, and a failure stops no other.

Lines of one target and one source follow each other, so that a worker opens each model once. An output is complete or
not there at all, so that a later start does what is missing.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import TransferInputs, UpgradeConfig, UpgradeInputs
from ..errors import CheckpointError, TuneportError, brief
from ..io.output import claimed
from ..io.places import hub_name
from ..outputs import OUTPUTS
from ..task_vectors.lora_write import AdapterForm
from ..types import Events
from .lines import Line, ListError, read_lines
from .summary import Fleet, Row, earlier_rows, failed, fleet_of, row_of
from .workers import Worker, open_workers

EVERY = 10.0  # seconds between two summaries


def upgrade_all(
    list: str | Path,
    out: str | Path,
    *,
    workers: int | None = None,
    ray: str | None = None,
    events: Events | None = None,
    **options: Any,
) -> Fleet:
    """Upgrade all fine-tunes of a list, in processes of their own.

    Processes import the script that calls this: call it below `if __name__ == "__main__":`.

    Args:
        list: a file with one JSON object a line, whose keys are the options of `upgrade`.
        out: the folder of the summary, and of the outputs of lines that name none.
        workers: processes; by default one, and with Ray one per GPU, or per machine.
        ray: the address of a Ray cluster, or "local".
        events: listens to the run.
        options: defaults of the lines: `source`, `finetuned`, `target`, `data`, and the fields of `UpgradeConfig`.

    Returns:
        A row per fine-tune, sorted by what needs a look; those that failed say why.
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
    """Yield the rows of lines that an earlier start has done.

    Raises:
        ListError: for outputs of other upgrades.
    """
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
    output, inputs = OUTPUTS[line.config.as_ or "model"](AdapterForm()), line.inputs
    try:
        record: Mapping[str, Any] = output.read_record(line.out)
        tuned = record["finetuned"].get("parts") or [record["finetuned"]]
        parts = [*zip(tuned, inputs.finetuned, strict=True)]
        parts += [(record[key], str(getattr(inputs, key))) for key in ("source", "target")]
        same = record["command"] == "upgrade" and record["options"] == line.config.to_json()
        same = same and record["data"].get("path") == inputs.data and all(_is_at(*part) for part in parts)
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
