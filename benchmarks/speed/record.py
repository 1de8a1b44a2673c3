"""What the speed benchmarks share: a clock that waits for the device, peak memory, tables, and files of results."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tuneport import Method, Result, TransferConfig
    from tuneport.measure.samples import Measurement
    from tuneport.pipeline.transfer import Setup
    from tuneport.runtime.passes import Passes


def now(device: torch.device) -> float:
    """Seconds, after everything that was started on the device has ended.

    With one CPU thread those of the process, since others on the machine take away the rest.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time() if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter()


@dataclass
class Peak:
    """Memory above what was held at the beginning, in bytes."""

    before: int = 0
    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Peak of the device's allocator, or on the CPU of the resident memory, looked at every few milliseconds."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        peak.before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - peak.before
        return
    peak.before = highest = _resident()
    done = threading.Event()

    def look() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, _resident())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak.bytes = max(highest, _resident()) - peak.before


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Trial:
    """A prepared transfer with its options."""

    setup: Setup
    config: TransferConfig

    @property
    def method(self) -> Method:
        from tuneport import get_method

        return get_method(self.config.method)

    @property
    def measurement(self) -> Measurement:
        """What is measured."""
        return self.setup.measurement(self.config, self.method)

    def passes(self, budget: int | None) -> Passes:
        """How the layers are divided within a budget."""
        from tuneport.runtime.passes import plan_passes

        return plan_passes(self.measurement, self.setup.change.vector, self.method, budget)

    def run(self, passes: Passes | None = None) -> Result:
        """Run the transfer."""
        from tuneport.pipeline.transfer import run

        return run(self.setup, self.config, passes=passes)


def prepare(source: Any, change: Mapping[str, Any], target: Any, batches: Any, **options: Any) -> Trial:
    """Prepare a transfer of a change of the source at scale 1, on batches."""
    from tuneport import TaskVector, TransferConfig
    from tuneport.pipeline import transfer

    config = TransferConfig.of(scale=1.0, **options)
    return Trial(transfer.prepare(source, TaskVector(change), target, batches, config), config)


def stages(trial: Trial, device: torch.device, passes: Passes | None = None) -> dict[str, float]:
    """Run a prepared transfer; seconds spent measuring, solving the maps, and carrying the task vector over."""
    from tuneport.maps import procrustes
    from tuneport.pipeline.solve import measure, problem_of
    from tuneport.runtime.passes import Passes, groups_of

    spent = [0.0]

    solve, change, method = procrustes.solve_maps, trial.setup.change.vector, trial.method

    def timed(*given: Any) -> Any:
        begun = now(device)
        maps = solve(*given)
        spent[0] += now(device) - begun
        return maps

    def moved(group: Any) -> Any:
        begun = now(device)
        found = measure(group)
        seconds["measure"] += now(device) - begun
        print(f"measured in {now(device) - begun:.2f} s", file=sys.stderr, flush=True)
        return method.transfer(problem_of(group, change, found))

    seconds = {"measure": 0.0}
    started = now(device)
    procrustes.solve_maps = timed
    try:
        results = [
            moved(group) for group in groups_of(trial.measurement, passes or Passes((trial.setup.plan.pairs,)))
        ]  # all are held, as a transfer holds them
    finally:
        procrustes.solve_maps = solve
    total = now(device) - started
    missing = len(trial.setup.plan.pairs) - sum(len(result.records) for result in results)
    if missing:
        raise SystemExit(f"{missing} layers were not moved")
    return {**seconds, "solve": spent[0], "transport": total - seconds["measure"] - spent[0]}


def in_own_process(script: str, arguments: Sequence[str], tight: bool = False) -> dict[str, Any]:
    """Run one part of a benchmark in a process of its own and return the JSON object of its last line.

    `tight` makes the C library give freed memory back at once, so that resident memory is memory in use.
    """
    environment = {
        **os.environ,
        **({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"} if tight else {}),
    }
    done = subprocess.run(
        [sys.executable, script, *arguments], stdout=subprocess.PIPE, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def publish(
    name: str, out: Path | None, text: str, data: dict[str, Any], device: torch.device, commit: str | None = None
) -> None:
    """Print the table; keep it with the data and where it comes from (`commit`: where there is no repository).

    All that is kept in the folder `out` is on one page beside it.
    """
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "command": "python " + " ".join([Path(sys.argv[0]).as_posix(), *sys.argv[1:]]),
        "machine": machine(device),
        "commit": commit or os.environ.get("COMMIT") or found.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }
    text = text.rstrip() + "\n\n" + "\n".join(f"- {key}: {value}" for key, value in about.items() if value) + "\n"
    print(text)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        kept = json.dumps({**data, **about, "page": text}, indent=1)
        if out.is_absolute():
            kept = kept.replace(str(out), "OUT")
        (out / f"{name}.json").write_text(kept + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(page(out), encoding="utf-8")


def page(folder: Path) -> str:
    """One page of all that is kept in a folder."""
    parts = [f"## {path.stem}\n\n{json.loads(path.read_text())['page']}" for path in sorted(folder.glob("*.json"))]
    return "\n".join(["# Speed and memory\n", *parts])
