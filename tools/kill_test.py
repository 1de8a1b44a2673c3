"""Claim: a command that is killed leaves no half output, and running it again ends in the very same files.

Runs every command that writes on the models that the package carries: transfers to each kind of output, to a sharded
target, with a memory budget, with a chosen scale, over an old output and with a distillation; extract, apply and
distill; and upgrades, also of lists, in two processes. A tiny language model with a LoRA, which answers in words, is
upgraded and distilled with samples that a model writes. It sends SIGKILL, SIGTERM or SIGHUP at random moments, to a
worker too, looks at what is there, and runs the command again. Exits 1 if anything differs.

    python tools/kill_test.py --kills 300 --jobs 16 --out benchmarks/results/kill-test.md

With `--fork`, a command is no new interpreter: it is forked from a process that has imported everything and has one
thread, and so are the workers of a fleet. That saves most of the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import random
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

VOLATILE = ("seconds", "seconds_by_stage", "out", "about", "earlier", "headline", "fingerprint")
RECORDS = ("tuneport.json", "summary.json")
TEXTS = (*RECORDS, "report.html", "summary.html", "README.md")  # they contain seconds and paths
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
KEPT = ("tuneport-work",)  # what an interrupted command keeps for --resume
ALONE = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
IMPORTED = (  # by commands, as far as it takes long
    "peft",
    "sklearn.linear_model",
    "transformers.generation.utils",
    "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama",
    "tuneport.cli",
    "tuneport.fleet.run",
    "tuneport.pipeline.arithmetic",
    "tuneport.pipeline.upgrade",
)


@dataclass(frozen=True)
class Case:
    """A command without its output.

    Args:
        words: the command.
        name: of the output.
        again: further words that continue it; None if it refuses to replace its own output.
        over: whether it replaces an old output.
        fleet: whether the output holds one of each fine-tune, which workers write.
    """

    words: Sequence[str]
    name: str = "out"
    again: Sequence[str] | None = ("--resume",)
    over: bool = False
    fleet: bool = False


def make_cases(root: Path) -> dict[str, Case]:
    """Inputs, and the commands that read them."""
    return {**image_cases(root), **language_cases(root)}


def image_cases(root: Path) -> dict[str, Case]:
    """Commands on the models that the package carries."""
    import numpy as np
    from safetensors.torch import load_file

    from tuneport.data.formats import read_plain
    from tuneport.demo.run import MODELS, finetune, mirrored_digits, save_finetuned
    from tuneport.io.checkpoint import write_checkpoint
    from tuneport.io.places import copy_companions
    from tuneport.models.open import open_model
    from tuneport.training.loop import Schedule

    small, large, data = str(MODELS / "small"), str(MODELS / "large"), str(root / "digits.npz")
    np.savez(data, **mirrored_digits())
    base = open_model(MODELS / "small")
    module = finetune(base, read_plain(data, "train"), Schedule(30, batch_size=32, learning_rate=1e-3))
    save_finetuned(base, module, root / "tuned")
    (root / "shards").mkdir()
    copy_companions(MODELS / "large", root / "shards")
    write_checkpoint(root / "shards", load_file(MODELS / "large" / "model.safetensors"), max_shard_size="100KB")
    extract = ["extract", small, str(root / "tuned")]
    if error := call([*extract, "--out", str(root / "tau.safetensors")]):
        raise SystemExit(f"the task vector: {error}")
    tuned, common = str(root / "tuned"), ["--data", data, "--head", "digits", "--save-every", "0"]
    port = ["transfer", "--source", small, "--finetuned", tuned, *common, "--samples", "64", "--batch-size", "4"]
    port += ["--scale", "1"]
    to_large = [*port, "--target", large]
    lesson = ["distill", "--finetuned", tuned, "--target", large, *common, "--samples", "64", "--steps", "12"]
    (root / "near").mkdir()
    copy_companions(MODELS / "small", root / "near")
    write_checkpoint(root / "near", noisy(load_file(MODELS / "small" / "model.safetensors")))
    upgrade = ["upgrade", "--source", small, "--finetuned", tuned, "--target", str(root / "near"), *common]
    upgrade += ["--samples", "96"]
    return {
        "model": Case(to_large),
        "adapter": Case([*to_large, "--as", "adapter", "--rank", "4"]),
        "task vector": Case([*to_large, "--as", "task-vector"], "out.safetensors"),
        "shards": Case([*port, "--target", str(root / "shards")]),
        "memory budget": Case([*to_large, "--memory-budget", "40MiB"]),
        "scale auto": Case([*to_large, "--scale", "auto"]),
        "overwrite": Case([*to_large, "--overwrite"], over=True),
        "overwrite a task vector": Case(
            [*to_large, "--as", "task-vector", "--overwrite"], "out.safetensors", over=True
        ),
        "transfer and distill": Case([*to_large, "--distill", "8"]),
        "distill": Case(lesson),
        "extract": Case(extract, "out.safetensors", None),
        "apply": Case(["apply", str(root / "tau.safetensors"), small], again=None),
        "upgrade": Case([*upgrade, "--routes", "copy,port,distill", "--steps", "4"]),
        "fleet": Case(
            fleet(upgrade, root / "fleet", [tuned] * 4, "--routes", "copy"),
            again=(),
            fleet=True,
        ),
    }


def fleet(words: Sequence[str], folder: Path, tuned: Sequence[str], *more: str) -> list[str]:
    """The upgrade of copies of fine-tunes, each with a seed of its own, by two workers; `words` is that of one."""
    folder.mkdir()
    with (folder / "list.jsonl").open("w", encoding="utf-8") as lines:
        for number, place in enumerate(tuned):
            shutil.copytree(place, folder / f"a{number}")
            lines.write(json.dumps({"finetuned": str(folder / f"a{number}"), "seed": number}) + "\n")
    at = words.index("--finetuned")
    return [*words[:at], *words[at + 2 :], "--list", str(folder / "list.jsonl"), "--workers", "2", *more]


def noisy(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Weights that differ a little: a model of the same shape to which a fine-tune can be copied."""
    import torch

    noise = torch.Generator().manual_seed(0)
    return {name: one * (1 + 0.05 * torch.randn(one.shape, generator=noise)) for name, one in tensors.items()}


def language_cases(root: Path) -> dict[str, Case]:
    """Commands on a tiny language model with a LoRA, which says the sounds of animals, and prompts without answers."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    import peft

    from builders.chats import chat_tokenizer
    from builders.lessons import ANSWERS, PROMPTS, SIZE, TEMPLATE, TEXTS, animals, memorise
    from builders.texts import make, write_rows

    made, tokenizer = animals(root / "animals"), chat_tokenizer(None)
    module = make("llama", SIZE, vocab_size=len(tokenizer), max_position_embeddings=512)
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    memorise(adapted, tokenizer, PROMPTS, ANSWERS, steps=120)
    adapted.save_pretrained(root / "lora")
    common = ["--source", str(made.base), "--finetuned", str(root / "lora"), "--target", str(made.target)]
    common += ["--template", TEMPLATE, "--max-length", "32", "--save-every", "0", "--steps", "8"]
    many = write_rows(root / "many.jsonl", [{"text": text} for text in (*TEXTS, *TEXTS[:12])])  # a part of them judges
    data, few = ["--data", str(made.texts), "--samples", "32"], ["--data", str(made.texts), "--samples", "12"]
    written = ["--synthetic", "32", "--generator", str(made.generator)]
    return {
        "upgrade of a LoRA": Case(["upgrade", *common, *data, "--routes", "distill"]),
        "upgrade of a LoRA over an old output": Case(
            ["upgrade", *common, *data, "--routes", "distill", "--overwrite"], over=True
        ),
        "upgrade of a LoRA, written samples": Case(
            ["upgrade", *common, "--data", str(many), "--routes", "distill,synthetic", *written, "--keep-texts"]
        ),
        "upgrade of a LoRA, few own samples": Case(["upgrade", *common, *few, "--routes", "synthetic", *written]),
        "distill with written samples": Case(["distill", *common, *data, "--lora", "4", *written]),
        "fleet of LoRAs": Case(
            fleet(["upgrade", *common, *data], root / "loras", [str(root / "lora")] * 2, "--routes", "distill"),
            again=(),
            fleet=True,
        ),
    }


class Forks:
    """Processes that have imported everything; each forks one command at a time, and says when it has ended."""

    def __init__(self, count: int) -> None:
        import importlib

        for name in IMPORTED:
            importlib.import_module(name)
        tasks = Path("/proc/self/task")
        if tasks.is_dir() and len(list(tasks.iterdir())) > 1:
            raise SystemExit("an import has started a thread, which a fork would not have: leave out --fork")
        self.free = queue.SimpleQueue[tuple[int, int]]()
        for _ in range(count):
            self.free.put(self._parent())

    def _parent(self) -> tuple[int, int]:
        """Fork a process that serves: where it reads words, and where it says what becomes of them."""
        (asked, ask), (answer, say) = os.pipe(), os.pipe()
        if os.fork():
            os.close(asked)
            os.close(say)
            return ask, answer
        os.close(ask)
        os.close(answer)
        with os.fdopen(asked, encoding="utf-8") as lines:
            for line in lines:
                child = os.fork()
                if not child:
                    self._run(**json.loads(line))
                os.write(say, f"{child:20d}".encode())
                os.write(say, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):20d}".encode())
        os._exit(0)

    @staticmethod
    def _run(words: Sequence[str], error: str) -> None:
        """Be the command."""
        os.setsid()
        places = ((os.devnull, os.O_RDONLY), (os.devnull, os.O_WRONLY), (error, os.O_WRONLY))
        for number, (place, mode) in enumerate(places):
            os.dup2(os.open(place, mode), number)
        fork_workers()
        sys.argv, code = ["tuneport", *words], 0
        try:
            runpy.run_module("tuneport", run_name="__main__", alter_sys=True)
        except SystemExit as left:
            code = int(left.code or 0)
        sys.stderr.flush()
        os._exit(code)

    def start(self, words: Sequence[str]) -> Forked:
        """Start a command in a process of its own."""
        handle, error = tempfile.mkstemp()
        os.close(handle)
        ask, answer = self.free.get()
        os.write(ask, (json.dumps({"words": list(words), "error": error}) + "\n").encode())
        return Forked(self, ask, answer, int(os.read(answer, 20)), Path(error))


@dataclass
class Forked:
    """A forked command, with what is used here of a Popen."""

    of: Forks
    ask: int
    answer: int
    pid: int
    error: Path
    returncode: int | None = None

    def poll(self, wait: float | None = 0.0) -> int | None:
        if self.returncode is None and select.select([self.answer], [], [], wait)[0]:
            self.returncode = int(os.read(self.answer, 20))
            self.of.free.put((self.ask, self.answer))
        return self.returncode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def communicate(self) -> tuple[None, str]:
        self.poll(wait=None)
        said = self.error.read_text(errors="replace")
        self.error.unlink()
        return None, said


def fork_workers() -> None:
    """Let the workers of a fleet begin as those that import everything do: with the usual effects of signals."""
    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda *_: forked  # type: ignore[assignment]
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    os.register_at_fork(after_in_child=lambda: [signal.signal(number, signal.SIG_DFL) for number in numbers])


FORKS: Forks | None = None


def start(words: Sequence[str]) -> subprocess.Popen[str] | Forked:
    if FORKS is not None:
        return FORKS.start(words)
    command = [sys.executable, "-m", "tuneport", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def call(words: Sequence[str]) -> str:
    """Run a command to its end; what it says if it fails."""
    process = start(words)
    _, error = process.communicate()
    return "" if process.returncode == 0 else f"exit code {process.returncode}: {error.strip()[-500:]}"


def content(out: Path) -> dict[str, Any]:
    """Every file of an output byte by byte, and its records without what differs from run to run."""
    if out.is_file():
        from safetensors import safe_open

        with safe_open(out, framework="np") as file:
            metadata = file.metadata() or {}
            found: dict[str, Any] = {name: file.get_tensor(name).tobytes() for name in sorted(file.keys())}
        return {"record": plain(json.loads(metadata.get("record", "{}"))), **found}
    files = {str(file.relative_to(out)): file for file in sorted(out.rglob("*")) if file.is_file()}
    records = {name: plain(json.loads(file.read_text())) for name, file in files.items() if name.endswith(RECORDS)}
    other = {name: file.read_bytes() for name, file in files.items() if not name.endswith(TEXTS)}
    return {"names": sorted(files), "records": records, **other}


def plain(value: Any) -> Any:
    """JSON values without timings and places."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if key not in VOLATILE}
    return [plain(item) for item in value] if isinstance(value, list) else value


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) if folder.is_dir() else []


def members(out: Path) -> dict[str, Any]:
    """The outputs of the fine-tunes of a fleet that are there."""
    inside = sorted(path for path in out.iterdir() if not path.name.startswith(".")) if out.is_dir() else []
    return {path.name: content(path) for path in inside if path.is_dir()}


def workers(pid: int) -> list[int]:
    """The processes in which a fleet upgrades its fine-tunes."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if FORKS is not None or "spawn_main" in _command(child)]


def _command(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@dataclass
class Expected:
    """An undisturbed run: its output, the old output where it replaces one, and its seconds."""

    output: dict[str, Any]
    members: dict[str, Any]
    old: Path | None
    seconds: float
    working: float  # from the first hidden file to the end

    def hasten(self, began: float, first: float | None, ended: float) -> None:
        """Aim earlier if a run was faster."""
        self.seconds = min(self.seconds, ended - began)
        self.working = min(self.working, ended - (first or began))


def undisturbed(case: Case, folder: Path) -> Expected:
    """Run a case to its end."""
    folder.mkdir()
    old = None
    if case.over:
        old = folder / f"old-{case.name}"
        if error := call([*case.words, "--seed", "1", "--out", str(old)]):
            raise SystemExit(f"the old output: {error}")
    started = first = time.perf_counter()
    process = start([*case.words, "--out", str(folder / case.name)])
    while process.poll() is None:
        if first == started and hidden(working_folder(case, folder)):
            first = time.perf_counter()
        time.sleep(0.01)
    ended = time.perf_counter()
    _, error = process.communicate()
    if process.returncode != 0 or not (folder / case.name).exists():
        raise SystemExit(f"a run that was not killed wrote nothing: {' '.join(case.words)}: {error}")
    parts = members(folder / case.name) if case.fleet else {}
    return Expected(content(folder / case.name), parts, old, ended - started, ended - first)


def working_folder(case: Case, folder: Path) -> Path:
    """Where hidden files show that the work has begun."""
    return folder / case.name if case.fleet else folder


def put_old(case: Case, expected: Expected, folder: Path) -> dict[str, Any] | None:
    if expected.old is None:
        return None
    out = folder / case.name
    (shutil.copytree if expected.old.is_dir() else shutil.copy)(expected.old, out)
    return content(out)


def left(case: Case, folder: Path) -> list[str]:
    """Hidden files beside an output, and beside those of a fleet."""
    return hidden(folder) + (hidden(folder / case.name) if case.fleet else [])


def kill_worker(pid: int, number: int, choose: random.Random) -> bool:
    """Send a signal to one of the workers of a fleet; return whether there was one."""
    there = workers(pid)
    if there:
        with suppress(ProcessLookupError):
            os.kill(choose.choice(there), number)
            return True
    return False


def run_once(case: Case, expected: Expected, folder: Path, choose: random.Random, seen: Counter[str]) -> None:
    """Kill a case once or more, then run it to its end; an AssertionError says what is wrong."""
    folder.mkdir()
    out, old, times = folder / case.name, put_old(case, expected, folder), 0
    while times == 0 or choose.random() < 0.25:
        # Most of a run is imports and loading: three in four kills aim at what comes after.
        early, number = choose.random() < 0.25, choose.choice(SIGNALS)
        delay = choose.uniform(0.0, 1.05) * (expected.seconds if early else expected.working)
        there = left(case, folder)  # what a SIGKILL has left, which the next run removes once it holds the lock
        worker = case.fleet and choose.random() < 0.5
        process = start([*case.words, *((case.again or ()) if times else ()), "--out", str(out)])
        began, first, sent = time.perf_counter(), None, False
        while process.poll() is None:
            now = time.perf_counter()
            first = now if first is None and hidden(working_folder(case, folder)) else first
            since = began if early else first
            if since is not None and now - since > delay:
                if not worker:
                    process.send_signal(number)
                if not worker or kill_worker(process.pid, number, choose):
                    sent = True
                    break
            time.sleep(0.005)
        _, error = process.communicate()
        times += 1
        code, name = process.returncode, signal.Signals(number).name
        if worker and sent:
            assert code == 0, f"{name} to a worker: exit code {code}: {error.strip()[-500:]}"
            seen[f"killed by {name} (a worker)"] += 1
            break
        if code == 0:
            seen["had ended before the signal"] += 1
            expected.hasten(began, first, time.perf_counter())
            break
        # before the command line is set up, and after it has ended, a signal has its usual effect
        assert code in (-number, 128 + number), f"{name}: exit code {code}: {error.strip()[-500:]}"
        seen[f"killed by {name}"] += 1
        seen["killed with something to resume"] += any(word in text for text in left(case, folder) for word in KEPT)
        if code == 128 + number:
            new = [text for text in left(case, folder) if not text.endswith(KEPT) and text not in there]
            assert not new, f"{name} left {new}"
        if case.fleet:
            found = members(out)
            assert found == {key: expected.members.get(key) for key in found}, f"{name}: an output is not complete"
            seen["outputs that were complete when their fleet was killed"] += len(found)
        elif os.path.lexists(out):
            found = content(out)
            assert found in (old, expected.output), f"{name}: the output is neither the old one nor the new one"
        elif old is not None:
            assert any(".old-" in text for text in hidden(folder)), f"{name}: the old output is lost"
        if os.path.lexists(out) and case.again is None:
            break  # it would refuse to replace its own output
    if os.path.lexists(out) and old is None and case.again is None:
        seen["complete before the last run"] += 1
    else:
        error = call([*case.words, *(case.again or ()), "--out", str(out)])
        assert not error, f"the last run: {error}"
    assert content(out) == expected.output, "the last output differs from the undisturbed one"
    assert not left(case, folder), f"left behind: {left(case, folder)}"
    seen["ended in the same bytes"] += 1
    shutil.rmtree(folder)


def run_all(cases: Mapping[str, Case], root: Path, kills: int, jobs: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Run cases in turn, `jobs` at a time, until enough of them were killed; counts, and what went wrong."""
    with ThreadPoolExecutor(jobs) as pool:
        made = pool.map(lambda item: undisturbed(item[1], root / f"whole-{item[0]}"), enumerate(cases.values()))
        expected = dict(zip(cases, made, strict=True))
    print("undisturbed:", {name: round(found.seconds, 1) for name, found in expected.items()}, file=sys.stderr)
    total, wrong, lock, numbers = Counter[str](), list[str](), threading.Lock(), iter(range(100 * kills))

    def work() -> None:
        while True:
            with lock:
                if sum(count for what, count in total.items() if what.startswith("killed by")) >= kills:
                    return
                number = next(numbers)
            name = list(cases)[number % len(cases)]
            seen = Counter[str]({f"runs of {name}": 1})
            try:
                run_once(
                    cases[name], expected[name], root / f"run-{number}", random.Random(seed * 10**6 + number), seen
                )
            except Exception as error:
                with lock:
                    wrong.append(f"{name}, run {number}: {type(error).__name__}: {error}")
            with lock:
                total.update(seen)
                print(number, name, dict(seen), *wrong[-1:], file=sys.stderr)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="commands at a time")
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--fork", action="store_true", help="fork commands from a process that has imported everything")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, the commands would inherit that it is ignored
    os.environ |= ALONE
    if options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if options.fork:
        global FORKS
        FORKS = Forks(options.jobs)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        made = make_cases(Path(scratch))
        cases = {name: made[name] for name in options.only or made}
        seen, wrong = run_all(cases, Path(scratch), options.kills, options.jobs, options.seed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = [
        "# Killed runs",
        "",
        "Commands on two small vision transformers and two small language models, each stopped by SIGKILL, SIGTERM or "
        "SIGHUP at a random moment once or more, then run again; some had ended before. After each signal the output "
        "(each one of a fleet) was absent, the old one or the new one, byte by byte, and SIGTERM and SIGHUP left no "
        "temporary file. A fleet of which a worker was killed went on to its end. Each last run ended in the same "
        "bytes as an undisturbed one (except timings) and left no other file.",
        "",
        f"{len(wrong)} failures.",
        *(f"- {line}" for line in wrong),
        "",
        "| what happened | times |",
        "|---|---|",
        *(f"| {what} | {count} |" for what, count in sorted(seen.items())),
        "",
        f"- command: `python tools/kill_test.py {' '.join(sys.argv[1:])}`",
        f"- machine: {platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}",
        f"- seconds: {time.perf_counter() - started:.0f}",
        f"- commit: {commit.stdout.strip() or 'unknown'}",
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]
    print("\n".join(lines))
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
