"""Claim: whatever a file holds, reading it ends soon, in a result or in a TuneportError, and touches nothing else.

Takes small good files of every kind that is read (weights, indexes, pickles, configurations, models that run,
tokenizers, heads, task vectors, adapters and their patterns, tables, Parquet, archives, images, recipes, prompts,
answers of servers, lists of fleets, saved work), spoils them at random, or puts a pipe, a link or a bomb in their
place, and reads them; the command line is run as well. Counted: good reads, refusals, and what must not happen: other
exceptions, more than 10 s of CPU time or 120 s, more memory than docs/limits.md allows, messages of several lines or
over 2,000 characters (50,000 of a list, which names its wrong lines), files opened for writing outside the folder, code
run from a pickle. Exits 1 if any of these happened.

Bombs, models that run, pipes and commands are read in a process of their own with limits. Case N is the same
whatever the number of jobs is: `--only N` repeats it.

    python tools/fuzz.py --cases 50000 --jobs 16 --out benchmarks/results/fuzz.md
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
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

SLOW = 10.0  # seconds of CPU time
HANGS = 120.0  # seconds
LOOPBACK = "127.0.0.1"  # where servers of cases listen
CHEAP = 4  # cases that are read in the process itself, for one that has a process of its own
MIB = 2**20
BASE_MEMORY = 320 * MIB  # what docs/limits.md allows for a row, a header or a configuration, and code that is loaded
ADDRESSES = 4 * 2**30  # further address space that a process of its own may take


class Guard:
    """Watches which files are opened for writing, through the interpreter's own audit events."""

    def __init__(self, allowed: Path) -> None:
        self.allowed, self.on = str(allowed), False
        self.found: list[str] = []
        sys.dont_write_bytecode = True  # a module that is imported late must not look like a file that is written
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
        elif event in ("os.system", "os.exec", "socket.connect") and arguments[-1][0] != LOOPBACK:
            self.found.append(f"{event} {arguments!r:.100}")
        elif event in ("os.remove", "os.rename", "os.rmdir") and arguments[-1] == -1:  # a whole path
            place = os.path.abspath(os.fsdecode(arguments[0]))
            if not place.startswith(self.allowed):
                self.found.append(f"{event} {arguments!r:.100}")


class TooLongError(BaseException):
    """A case that waits is ended."""


def too_long(*_: object) -> None:
    raise TooLongError(f"no answer after {HANGS:.0f} s")


def memory_of(key: str) -> int:
    """A size of this process in bytes, as Linux reports it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def start_of_peak() -> int:
    """The size of this process, from which the peak is measured again; 0 where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return memory_of("VmRSS")


def read(kind: Any, path: Path, guard: Guard) -> dict[str, Any]:
    """Read a spoiled file: what came out, and what is wrong with it."""
    from tuneport import TuneportError

    wrong: list[str] = []
    before, outcome = start_of_peak(), "read"
    began, started = time.monotonic(), time.process_time()
    guard.found, guard.on = [], True
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        kind.read(path)
    except TuneportError as error:
        outcome, text = "refused", str(error).strip()
        if "\n" in text or len(text) > kind.longest:
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
        signal.setitimer(signal.ITIMER_REAL, 0)
        guard.on = False
    seconds = time.process_time() - started
    memory = memory_of("VmHWM") - before if before else 0
    if seconds > SLOW or time.monotonic() - began > HANGS:
        wrong.append(f"{seconds:.1f} s of CPU time, {time.monotonic() - began:.0f} s")
    allowed = 4 * kind.unpacked + BASE_MEMORY
    if memory > allowed:
        wrong.append(f"{memory // MIB} MiB of memory, more than {allowed // MIB}")
    wrong += [f"outside: {what}" for what in guard.found]
    return {"outcome": outcome, "wrong": wrong, "seconds": seconds, "memory": memory}


def read_alone(kind: Any, path: Path, guard: Guard) -> dict[str, Any]:
    """Read a spoiled file in a process of its own, which may neither hang nor take much memory."""
    addresses = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    answer, hand = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(answer)
        resource.setrlimit(resource.RLIMIT_AS, (addresses + ADDRESSES,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        found = read(kind, path, guard)
        os.write(hand, json.dumps(found).encode()[:60_000])
        os._exit(0)
    os.close(hand)
    ready = select.select([answer], [], [], HANGS + 10)[0]
    content = os.read(answer, 2**16) if ready else b""
    os.close(answer)
    if not content:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if content:
        result: dict[str, Any] = json.loads(content)
        return result
    what = f"the process ended with signal {status & 0x7F}, code {status >> 8}" if ready else "no answer"
    return failed(what)


def failed(what: str) -> dict[str, Any]:
    return {"outcome": "wrong", "wrong": [what], "seconds": 0.0, "memory": 0}


def fuzz(cases: range, seed: int, word: str, out: Path) -> None:
    """Run these cases over all kinds with this word in their names; write a line before and a line after each."""
    from fuzz_kinds import kinds, set_limits

    signal.signal(signal.SIGALRM, too_long)
    set_limits()
    with tempfile.TemporaryDirectory() as folder, out.open("w", encoding="utf-8") as lines:
        good, work, canary = (Path(folder) / name for name in ("good", "work", "canary"))
        good.mkdir()
        canary.mkdir()
        (canary / "file").write_text("untouched")
        chosen = [kind for kind in kinds(good) if word in kind.name]
        all_kinds = [kind for kind in chosen if not kind.alone] * CHEAP + [kind for kind in chosen if kind.alone]
        random.Random(0).shuffle(all_kinds)
        shutil.copytree(good, work)
        guard = Guard(work)
        for case in cases:
            kind = all_kinds[case % len(all_kinds)]
            lines.write(json.dumps({"case": case, "kind": kind.name}) + "\n")
            lines.flush()
            choose = random.Random(f"{seed}/{case}")
            kind.put(work / kind.file, kind.spoil((good / kind.file).read_bytes(), choose))
            result = (read_alone if kind.alone else read)(kind, work / kind.file, guard)
            restore(good / kind.file, work / kind.file)
            if (good / "RAN").exists() or (work / "RAN").exists():
                result["wrong"].append("code of a pickle was run")
            if [path.name for path in canary.iterdir()] != ["file"] or (canary / "file").read_text() != "untouched":
                result["wrong"].append("the canary was touched")
            lines.write(json.dumps({"case": case, "kind": kind.name, **result}) + "\n")
            lines.flush()


def restore(good: Path, place: Path) -> None:
    """Put the good file back; kinds may share a folder."""
    for path in (place, place.with_name(f"{place.name}.other")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    shutil.copy(good, place)


def run_job(first: int, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run every case of one job in a process; after a case that ends the process, go on in another."""
    found: list[dict[str, Any]] = []
    while first < options.cases:
        out = folder / f"{first}.jsonl"
        command = [sys.executable, __file__, f"--first={first}", f"--part-out={out}", f"--cases={options.cases}"]
        command += [f"--jobs={options.jobs}", f"--seed={options.seed}", f"--kind={options.kind}"]
        with (folder / f"{first}.log").open("wb") as log:
            process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log)
            while process.poll() is None:
                time.sleep(0.2)
                if out.exists() and time.time() - out.stat().st_mtime > 2 * HANGS:
                    process.kill()
        lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        found += [line for line in lines if "outcome" in line]
        if process.returncode == 0:
            break
        if not lines:
            said = (folder / f"{first}.log").read_text(errors="replace")[-2000:]
            raise SystemExit(f"a process ended with code {process.returncode} before its first case: {said}")
        found.append({**lines[-1], **failed(f"the process ended with code {process.returncode}")})
        first = lines[-1]["case"] + options.jobs
    for result in found:
        for what in result["wrong"]:
            print(f"{result['kind']} (case {result['case']}): {what}", file=sys.stderr, flush=True)
    return found


def report(results: list[dict[str, Any]], seconds: float) -> str:
    """What happened, as a page."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    rows = []
    for kind in sorted({result["kind"] for result in results}):
        of_kind = [result for result in results if result["kind"] == kind]
        ends = Counter("wrong" if result["wrong"] else result["outcome"] for result in of_kind)
        slowest, memory = (max(result[key] for result in of_kind) for key in ("seconds", "memory"))
        rows.append(
            f"| {kind} | {ends['read']} | {ends['refused']} | {ends['wrong']} | {slowest:.1f} | {memory // MIB} |"
        )
    failures = [f"{r['kind']} (case {r['case']}): {what}" for r in results for what in r["wrong"]]
    lines = [
        "# Spoiled files",
        "",
        f"{len(results)} spoiled files, pipes, links, bombs and commands of {len(rows)} kinds. Refused: a "
        "TuneportError of one line. Wrong: any other end.",
        "",
        f"{len(failures)} failures: other exceptions, over {SLOW:.0f} s of CPU time or {HANGS:.0f} s, messages "
        "over 2000 characters (50000 of a list, which names its wrong lines) or of several lines, writes outside, code "
        f"run, or more memory than {BASE_MEMORY // MIB} MiB and four times what a table or an archive may unpack to. "
        "While fuzzing that is 64 MiB for archives and Parquet files and 2 MiB for other tables in place of 4 GiB.",
        *(f"- {failure}" for failure in failures[:100]),
        "",
        "| kind | read | refused | wrong | most seconds of CPU time | most MiB |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"- command: `python tools/fuzz.py {' '.join(sys.argv[1:])}`",
        f"- seconds: {seconds:.0f}",
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
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--kind", default="", help="a word in the names of the kinds to try")
    parser.add_argument("--only", type=int, help="repeat one case")
    parser.add_argument("--out", type=Path, help="a page")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--part-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.perf_counter()
    if options.first is not None:
        fuzz(range(options.first, options.cases, options.jobs), options.seed, options.kind, options.part_out)
        return
    firsts = range(min(options.jobs, options.cases))
    if options.only is not None:
        firsts, options.cases = range(options.only, options.only + 1), options.only + 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(firsts)) as pool:
        parts = pool.map(lambda first: run_job(first, options, Path(folder)), firsts)
        results = [result for part in parts for result in part]
    page = report(results, time.perf_counter() - started)
    print(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")
    if any(result["wrong"] for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
