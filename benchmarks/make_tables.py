"""Make every table of the results, in parts that run side by side and can be stopped and continued.

    python benchmarks/make_tables.py --shared ../shared --encoders ENCODERS --runs runs --jobs 16 --device cuda
    python benchmarks/make_tables.py --shared ../shared --runs runs --only zoo verdict
    python benchmarks/make_tables.py --list
    python benchmarks/make_tables.py --shared ../shared --runs small --smallest

A table is a list of commands that may run side by side, its parts, and one that writes it from what they left under
--runs. A part whose exit code was 0 is not run again: RUNS/done/PART says so, with the commit. Parts start in the order
of the tables, which is that of --only, --jobs of them side by side. A table is written when all its parts are done and
the tables that it reads are written; it names the commit of the code (the variable COMMIT on
a machine without the repository). Output goes to RUNS/logs. --smallest runs one small cell of every table, and writes
next to the runs, not into benchmarks/results: it shows that all commands work, and its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.rows import commit  # noqa: E402

TASKS = ("mnist", "fashion", "gtsrb", "cifar10")
TEXT_TASKS = ("trec6", "sst2", "subj", "agnews")
ENCODERS = ("minilm-l3", "gte-small", "mpnet")


@dataclass(frozen=True)
class Table:
    """Commands of the parts by name, the commands that write the table, and the tables that it reads.

    A `>FILE` at the end of a command takes its output.
    """

    parts: dict[str, str]
    write: tuple[str, ...]
    after: tuple[str, ...] = ()
    minutes: str = ""  # of all parts, on 16 cores and a GPU
    needs: tuple[str, ...] = field(default=())  # options


def tables(o: argparse.Namespace) -> dict[str, Table]:
    """Every table, for these options."""
    results = o.runs / "results" if o.smallest else ROOT / "benchmarks/results"
    results.mkdir(parents=True, exist_ok=True)
    found = {**of_zoo(o, results), **of_text(o, results)}
    if wrong := sorted(set(o.only or ()) - set(found)):
        sys.exit(f"there is no table {', '.join(wrong)}; known: {', '.join(found)}")
    return {name: found[name] for name in o.only or found}


def parts(o: argparse.Namespace, name: str, count: int, command: str, least: str) -> dict[str, str]:
    """The parts of a script that can divide its work, or its smallest cell."""
    if o.smallest:
        return {name: f"{command} {least}"}
    return {f"{name}-{i}": f"{command} --part {i}/{count}" for i in range(count)}


def of_zoo(o: argparse.Namespace, results: Path) -> dict[str, Table]:
    shared, runs, claims = o.shared, o.runs, "python -m benchmarks.claims"
    rivals = {
        f"rivals-{task}-{seed}": f"{claims}.rivals --shared {shared} --device {o.device} --tasks {task} --seeds {seed} "
        f"{'--shots 1 --steps 1 --test 50' if o.smallest else ''} --out {runs}/rivals/{task}-{seed}"
        for task in (TASKS[:1] if o.smallest else TASKS)
        for seed in ((0,) if o.smallest else (0, 1, 2))
    }
    merged = " ".join(str(runs / "rivals" / name.removeprefix("rivals-")) for name in rivals)
    reference = f"{claims}.reference --out {runs}/reference.jsonl"
    zoo, verdict = f"{claims}.zoo --runs {runs}/zoo", f"{claims}.verdict --runs {runs}/verdict"
    distill = f"{claims}.distill --out {results}/distill.jsonl"
    recipes = f"{claims}.recipes --root {o.root or shared} --out {runs}/recipes --device {o.device}"
    few = "--pairs a:a2 --tasks mnist --samples 20 --draws 0 --steps 2 --test 50"
    return {
        "reference": Table(
            parts(
                o,
                "reference",
                15,
                f"{reference} --shared {shared} --device {o.device}",
                "--cells a:a2:mnist --samples 4 --part 0/5",
            ),
            (f"{reference} --write {results}/reference.md",),
            minutes="5 minutes, 10 GB of memory for each part",
        ),
        "zoo": Table(
            parts(
                o,
                "zoo",
                18,
                f"{zoo} --shared {shared} --seeds 0 1 2",
                "--part 3/18 --seeds 0 --samples 10 --scales 1 --test 50",
            ),
            (f"{zoo} --write {results}/zoo-n100.md",),
            minutes="10 minutes",
        ),
        "verdict": Table(
            parts(o, "verdict", 16, f"{verdict} --shared {shared} --seeds 0 1 2", "--part 3/54 --trial-only"),
            (f"{verdict} --write {results}/verdict.md",),
            after=("zoo",),
            minutes="3 minutes",
        ),
        "rivals": Table(rivals, (f"{claims}.rivals --merge {merged} --out {results}/rivals",), minutes="6 minutes"),
        "recipes": Table(
            {"recipes": f"{recipes} {'--tiny --only width' if o.smallest else f'--jobs {o.jobs}'}"},
            (f"python benchmarks/make_tables.py --copy {runs}/recipes {results}/recipes",),
            minutes="6 minutes; --root is a folder with zoo/, data/ and encoders/",
        ),
        "distill": Table(
            parts(o, "distill", 16, f"{distill} --shared {shared} --device {o.device}", few),
            (f"{distill} >{results}/distill-table.md",),
            minutes="60 minutes; goes on from the rows that are committed",
        ),
    }


def of_text(o: argparse.Namespace, results: Path) -> dict[str, Table]:
    data = o.shared / "data/text"
    base = f"python -m benchmarks.claims.text --encoders {o.encoders} --data {data} --device {o.device}"
    little = "--samples 20 --seeds 1 --steps 2 --test 20" if o.smallest else ""
    cells = [(task, name) for task in TEXT_TASKS for name in ENCODERS][: 1 if o.smallest else None]
    texts = {
        f"text-{task}-{name}": f"{base} --tasks {task} --targets {name} {little} --out {o.runs}/text/{task}-{name}.md"
        for task, name in cells
    }
    joined = " ".join(str(o.runs / "text" / f"{task}-{name}.json") for task, name in cells)
    chosen = f"--tasks {cells[0][0]} --targets {cells[0][1]} {little}" if o.smallest else ""
    classifiers = f"python -m benchmarks.claims.classifiers --out {results}/classifiers.jsonl"
    least = "--tasks trec6 --targets minilm-l3 --draws 0 --samples 20 --steps 2 --few 1 --distill 1 --most 50"
    tokens = f"python -m benchmarks.claims.token_classifier --out {o.runs}/token-classifier.jsonl"
    given = f"--encoders {o.encoders} --data {data} --device {o.device} --work {o.runs}/classifiers"
    return {
        "classifiers": Table(
            parts(o, "classifiers", 27, f"{classifiers} {given}", least),
            (f"{classifiers} --write {results}/classifiers.md",),
            minutes="15 minutes, an estimate",
            needs=("encoders",),
        ),
        "token-classifier": Table(
            parts(
                o, "token-classifier", 9, f"{tokens} {given}", "--targets minilm-l3 --draws 0 --samples 10 --steps 2"
            ),
            (f"{tokens} --write {results}/token-classifier.md",),
            minutes="5 minutes, an estimate",
            needs=("encoders",),
        ),
        "text": Table(
            texts,
            (f"{base} --merge {joined} {chosen} --out {results}/text.md",),
            minutes="6 minutes",
            needs=("encoders",),
        ),
    }


def run(name: str, command: str, runs: Path) -> bool:
    """Run one command, its output in a log; a `>FILE` at its end takes what it prints."""
    (runs / "logs").mkdir(parents=True, exist_ok=True)
    command, _, file = command.partition(" >")
    log, printed = (runs / "logs" / f"{name}.{end}" for end in ("log", "out"))
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    words = command.replace("python ", f"{shlex.quote(sys.executable)} ")
    started = time.time()
    with log.open("w") as errors, printed.open("w") as out:
        print(words, file=errors, flush=True)
        done = subprocess.run(
            words, shell=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COMMIT": commit()},
            stdout=out if file else errors, stderr=errors, check=False,
        )  # fmt: skip
    if file and done.returncode == 0:
        shown = command.replace(str(runs), "RUNS")
        about = f"\n\n- command: `{shown}`\n- commit: {commit()}\n- date: {time.strftime('%Y-%m-%d')}\n"
        Path(file).write_text(printed.read_text().rstrip("\n") + about)
    print(f"{name}: {f'FAILED, see {log}' if done.returncode else 'done'}, {time.time() - started:.0f} s", flush=True)
    return done.returncode == 0


def make(found: dict[str, Table], options: argparse.Namespace) -> list[str]:
    """Run the parts that are not done, and write the tables; returns the names of those that are not written."""
    done = options.runs / "done"
    done.mkdir(parents=True, exist_ok=True)

    def part(name: str, command: str) -> bool:
        if (done / name).exists():
            return True
        good = run(name, command, options.runs)
        if good:
            (done / name).write_text(commit() + "\n")
        return good

    written: set[str] = set()
    waiting, running = dict(found), dict[str, list[Future[bool]]]()
    with ThreadPoolExecutor(options.jobs) as pool:
        while waiting or running:
            for table in [name for name in waiting if not any(o in waiting or o in running for o in found[name].after)]:
                missing = [f"--{need}" for need in found[table].needs if getattr(options, need) is None]
                missing += [name for name in found[table].after if name in found and name not in written]
                if missing:
                    print(f"{table}: left out, needs {', '.join(missing)}", flush=True)
                else:
                    running[table] = [pool.submit(part, *item) for item in found[table].parts.items()]
                del waiting[table]
            wait([f for futures in running.values() for f in futures if not f.done()], None, FIRST_COMPLETED)
            for table in [name for name, futures in running.items() if all(future.done() for future in futures)]:
                good = all(future.result() for future in running.pop(table))
                if good and all(run(f"{table}-table-{i}", c, options.runs) for i, c in enumerate(found[table].write)):
                    written.add(table)
    return [name for name in found if name not in written]


def copy(source: Path, target: Path) -> None:
    """Copy the small files of recipes: results.json and table.md of each folder."""
    for file in sorted([*source.glob("*/results.json"), *source.glob("*/table.md"), *source.glob("summary.md")]):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with zoo/ and data/")
    parser.add_argument("--encoders", type=Path, help="folder with the text encoders")
    parser.add_argument(
        "--root", type=Path, help="of the recipes: a folder with zoo/, data/ and encoders/, if not --shared"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where parts leave their files")
    parser.add_argument("--only", nargs="+", metavar="TABLE", help="these tables, in this order")
    parser.add_argument("--jobs", type=int, default=1, help="parts side by side")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--smallest", action="store_true", help="one small cell of every table")
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    parser.add_argument("--copy", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.copy:
        copy(*options.copy)
        return
    options.shared, options.runs = options.shared.resolve(), options.runs.resolve()
    options.encoders = options.encoders.resolve() if options.encoders else None
    found = tables(options)
    if options.list:
        for name, table in found.items():
            print(f"\n## {name} ({table.minutes})")
            print("\n".join([*table.parts.values(), *table.write]))
        return
    left = make(found, options)
    sys.exit(f"not written: {', '.join(left)}" if left else 0)


if __name__ == "__main__":
    main()
