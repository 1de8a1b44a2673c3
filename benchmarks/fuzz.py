"""Claim: whatever a file holds, reading it ends soon, in a result or in a TuneportError, and touches nothing else.

Takes small good files of every kind that is read (weights, indexes, pickles, configurations, models that run,
tokenizers, heads, task vectors, adapters and their patterns, tables, Parquet, archives, images, recipes, saved
statistics), spoils them at random, or puts a pipe, a link or a bomb in their place, and reads them; the command line is
run as well. Counted: good reads, refusals, and what must not happen: other exceptions, more than 10 s of CPU time or
120 s, more memory than docs/limits.md allows, messages of several lines or over 2,000 characters, files opened for
writing outside the folder, code run from a pickle. Exits 1 if any of these happened.

Bombs, models that run, pipes and commands are read in a process of their own with limits. Case N is the same
whatever the number of processes is: `--only N` repeats it.

    python benchmarks/fuzz.py --cases 50000 --processes 16 --out benchmarks/results/fuzz.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fuzz_kinds import MIB, TEXT, UNPACKED, Kind, kinds

from tuneport import TuneportError
from tuneport.data import arrow, formats, rows

SLOW = 10.0  # seconds of CPU time
HANGS = 120.0  # seconds
CHEAP = 4  # cases that are read in this process, for one that has a process of its own
LONGEST = 2000  # characters of a message
MEMORY = 4 * UNPACKED + 512 * MIB  # four times the largest table, and what the docs allow for rows and samples
ADDRESSES = 4 * 2**30  # further address space that a process of its own may take


class Guard:
    """Watches which files are opened for writing, through the interpreter's own audit events."""

    def __init__(self, allowed: Path) -> None:
        self.allowed, self.on = str(allowed), False
        self.found: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            mode, flags = arguments[1], arguments[2]
            writes = any(mark in mode for mark in "wax+") if isinstance(mode, str) else False
            writes = writes or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            place = os.path.abspath(os.fsdecode(arguments[0]))
            if writes and not place.startswith((self.allowed, os.devnull)):
                self.found.append(f"open {arguments[0]!r}")
        elif event in ("os.system", "os.exec", "socket.connect"):
            self.found.append(f"{event} {arguments!r:.100}")
        elif event in ("os.remove", "os.rename", "os.rmdir") and arguments[-1] == -1:  # a whole path
            place = os.path.abspath(os.fsdecode(arguments[0]))
            if not place.startswith(self.allowed):
                self.found.append(f"{event} {arguments!r:.100}")


def read(kind: Kind, path: Path, guard: Guard) -> dict[str, Any]:
    """Read a spoiled file: what came out, and what is wrong with it."""
    wrong: list[str] = []
    started, outcome = time.process_time(), "read"
    guard.found, guard.on = [], True
    try:
        kind.read(path)
    except TuneportError as error:
        outcome, text = "refused", str(error).strip()
        if "\n" in text or len(text) > LONGEST:
            wrong.append(f"a message of {len(text)} characters: {text!r:.200}")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = "wrong"
        where = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in where if "tuneport" in frame.filename] or list(where)
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        wrong.append(f"{type(error).__name__}: {str(error)!r:.400} at {place}")
    finally:
        guard.on = False
    seconds = time.process_time() - started
    if seconds > SLOW:
        wrong.append(f"{seconds:.1f} s of CPU time")
    wrong += [f"outside: {what}" for what in guard.found]
    return {"outcome": outcome, "wrong": wrong, "seconds": seconds, "memory": 0}


def memory_of(key: str) -> int:
    """A size of this process in bytes, as Linux reports it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def read_alone(kind: Kind, path: Path, guard: Guard) -> dict[str, Any]:
    """Read a spoiled file in a process of its own, which may neither hang nor take much memory."""
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    answer, hand = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(answer)
        resource.setrlimit(resource.RLIMIT_AS, (addresses + ADDRESSES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
        before = memory_of("VmRSS")
        found = read(kind, path, guard)
        found["memory"] = memory_of("VmHWM") - before
        os.write(hand, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(hand)
    ready = select.select([answer], [], [], HANGS)[0]
    content = os.read(answer, 2**16) if ready else b""
    os.close(answer)
    if not content:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not ready:
        return {"outcome": "wrong", "wrong": [f"no answer after {HANGS:.0f} s"], "seconds": HANGS, "memory": 0}
    if not content:
        what = f"the process ended with signal {status & 0x7F}, code {status >> 8}"
        return {"outcome": "wrong", "wrong": [what], "seconds": 0.0, "memory": 0}
    result: dict[str, Any] = json.loads(content)
    if result["memory"] > MEMORY:
        result["wrong"].append(f"{result['memory'] // MIB} MiB of memory, more than {MEMORY // MIB}")
    return result


def fuzz(cases: range, seed: int = 0, word: str = "") -> dict[str, Any]:
    """Run these cases over all kinds with this word in their names, and return what happened."""
    outcomes: dict[str, Counter[str]] = {}
    failures: list[str] = []
    slowest, largest = 0.0, 0
    rows.LARGEST_TABLE = TEXT
    arrow.LARGEST_TABLE = formats._LARGEST_ARCHIVE = UNPACKED
    with tempfile.TemporaryDirectory() as folder:
        good, work = Path(folder) / "good", Path(folder) / "work"
        good.mkdir()
        canary = Path(folder) / "canary"
        canary.mkdir()
        (canary / "file").write_text("untouched")
        chosen = [kind for kind in kinds(good) if word in kind.name]
        all_kinds = [kind for kind in chosen if not kind.alone] * CHEAP + [kind for kind in chosen if kind.alone]
        shutil.copytree(good, work)
        guard = Guard(work)
        for case in cases:
            kind = all_kinds[case % len(all_kinds)]
            choose = random.Random(f"{seed}/{case}")
            kind.put(work / kind.file, kind.spoil((good / kind.file).read_bytes(), choose))
            result = (read_alone if kind.alone else read)(kind, work / kind.file, guard)
            restore(good / kind.file, work / kind.file)
            outcomes.setdefault(kind.name, Counter())["wrong" if result["wrong"] else result["outcome"]] += 1
            slowest, largest = max(slowest, result["seconds"]), max(largest, result["memory"])
            found = [f"{kind.name} (case {case}): {what}" for what in result["wrong"]]
            failures += found
            for failure in found:
                print(failure, file=sys.stderr, flush=True)
        if (good / "RAN").exists() or (work / "RAN").exists():
            failures.append("code of a pickle was run")
        if sorted(path.name for path in canary.iterdir()) != ["file"] or (canary / "file").read_text() != "untouched":
            failures.append("the canary was touched")
    return {"outcomes": outcomes, "failures": failures, "slowest": slowest, "memory": largest}


def restore(good: Path, place: Path) -> None:
    """Put the good file back; kinds may share a folder."""
    for path in (place, place.with_name(f"{place.name}.other")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    shutil.copy(good, place)


def in_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Divide the cases over processes and add up what happened."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number in range(options.processes):
            part = [f"--part={number}", f"--processes={options.processes}", f"--part-out={folder}/{number}.json"]
            command = [
                sys.executable,
                __file__,
                f"--cases={options.cases}",
                f"--seed={options.seed}",
                f"--kind={options.kind}",
            ]
            started.append(subprocess.Popen([*command, *part], env={**os.environ, "OMP_NUM_THREADS": "1"}))
        codes = [process.wait() for process in started]
        found = [Path(folder, f"{number}.json") for number in range(options.processes)]
        parts = [json.loads(path.read_text()) for path in found if path.exists()]
    total: dict[str, Any] = {"outcomes": {}, "failures": [], "slowest": 0.0, "memory": 0}
    for part in parts:
        for kind, counts in part["outcomes"].items():
            total["outcomes"].setdefault(kind, Counter()).update(counts)
        total["failures"] += part["failures"]
        total["slowest"], total["memory"] = max(total["slowest"], part["slowest"]), max(total["memory"], part["memory"])
    lost = sum(code != 0 for code in codes)
    total["failures"] += [f"{lost} of {len(codes)} processes ended early"] if lost else []
    return total


def report(result: dict[str, Any], options: argparse.Namespace, seconds: float) -> str:
    """What happened, as a page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    outcomes = {kind: Counter(counts) for kind, counts in result["outcomes"].items()}
    total = sum(sum(counts.values()) for counts in outcomes.values())
    lines = [
        "# Spoiled files",
        "",
        f"{total} spoiled files, pipes, links, bombs and commands of {len(outcomes)} kinds. Refused: a TuneportError "
        "of one line. Wrong: any other end.",
        "",
        "| kind | read | refused | wrong |",
        "|---|---|---|---|",
        *(f"| {kind} | {n['read']} | {n['refused']} | {n['wrong']} |" for kind, n in outcomes.items()),
        "",
        f"- failures (other exceptions, over {SLOW:.0f} s of CPU time, over {MEMORY // MIB} MiB, messages over "
        f"{LONGEST} characters, writes outside, code run): {len(result['failures'])}",
        f"- slowest case: {result['slowest']:.2f} s of CPU time; most memory: {result['memory'] // MIB} MiB, with "
        f"archives limited to {UNPACKED // MIB} MiB and text tables to {TEXT // MIB} MiB in place of 4 GiB; all: "
        f"{seconds:.0f} s",
        f"- command: `python benchmarks/fuzz.py --cases {options.cases} --seed {options.seed} "
        f"--processes {options.processes}`",
        f"- machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors", "pillow")),
        f"- commit: {commit.stdout.strip() or 'unknown'}",
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kind", default="", help="a word in the names of the kinds to try")
    parser.add_argument("--only", type=int, help="repeat one case")
    parser.add_argument("--out", type=Path, help="a page; the same as JSON is written next to it")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.perf_counter()
    if options.part is not None:
        result = fuzz(range(options.part, options.cases, options.processes), options.seed, options.kind)
        options.part_out.write_text(json.dumps(result), encoding="utf-8")
        return
    if options.only is not None:
        result = fuzz(range(options.only, options.only + 1), options.seed, options.kind)
    else:
        result = (
            in_processes(options) if options.processes > 1 else fuzz(range(options.cases), options.seed, options.kind)
        )
    page = report(result, options, time.perf_counter() - started)
    print(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")
        facts = {"cases": options.cases, "seed": options.seed, **result}
        options.out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if result["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
