"""Every recipe's small variant, one after another, on the shared zoo: each table and figure of the paper in small.

    python -m benchmarks.claims.recipes --root ../shared --out runs [--device cuda] [--only width seeds] [--jobs 4]

`--root` is the folder with zoo/ and data/images/ (and encoders/, for the text recipe). First all models that the
recipes need are fine-tuned into --cache (OUT/models); then the cells of all recipes run in groups, `--jobs` of them
side by side, each in a process of its own, with its log in OUT/logs; then each recipe is written from its cells. A
recipe that fails does not stop the others. Models, cells and recipes that are there are not run again, so a run that
was stopped goes on. `--tiny` cuts every recipe to one task, one seed and a few samples: it shows that all of them
run, and its numbers mean nothing. OUT/summary.md says what was done, when, and where the paper's order was not found.
`--draw` only draws the plots of OUT again, from each results.json.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from benchmarks.common import load
from benchmarks.rows import commit
from paper.figures import draw
from paper.recipe import FIGURES, RECIPES, Recipe, read_recipe
from paper.run import (
    PASSES,
    Cells,
    _fingerprint,
    cell_names,
    make_finetunes,
    run_pair,
    run_recipe,
    wanted_finetunes,
)
from paper.schema import Comparison
from paper.tables import plot
from tuneport.errors import TuneportError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="the folder with zoo/ and data/images/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="where fine-tuned models go, if not OUT/models")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="recipes by name")
    parser.add_argument("--jobs", type=int, default=1, help="recipes side by side")
    parser.add_argument("--commit", help="of the code, where git cannot tell it")
    parser.add_argument("--machine", help="in words, for the summary")
    parser.add_argument("--tiny", action="store_true", help="cut every recipe to a few samples")
    parser.add_argument("--draw", action="store_true", help="draw the plots of OUT again and do nothing else")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # run this recipe in this process,
    parser.add_argument("--make", help=argparse.SUPPRESS)  # or make this model of it,
    parser.add_argument("--group", help=argparse.SUPPRESS)  # or run these of its cells
    options = parser.parse_args()
    options.cache = options.cache or options.out / "models"
    if options.one:
        return one(options)
    names = list(RECIPES)
    wrong = sorted(set(options.only or ()) - set(names))
    if wrong:
        parser.error(f"there is no recipe {', '.join(wrong)}; known: {', '.join(names)}")
    wanted = [name for name in names if not options.only or name in options.only]
    if options.draw:
        return draw_again(options, wanted)
    (options.out / "logs").mkdir(parents=True, exist_ok=True)
    failed = prepare_models(options, wanted)
    rest = [name for name in wanted if name not in failed]
    groups = [(name, group) for name in rest if not (options.out / name).exists() for group in groups_of(options, name)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda group: start(options, group[0], group=group[1]), groups))
        results = dict(zip(rest, pool.map(lambda name: start(options, name), rest), strict=True))
    write_summary(options, wanted, results, failed)
    return 1 if failed or any(code for code, _ in results.values()) else 0


def recipe_of(options: argparse.Namespace, name: str) -> Recipe:
    recipe = read_recipe(name, small=True, root=options.root)
    parts = {pair: replace(part, device=options.device) for pair, part in recipe.comparisons.items()}
    if options.tiny:
        parts = {pair: tiny(part) for pair, part in parts.items()}
    return replace(recipe, comparisons=parts)


def tiny(part: Comparison) -> Comparison:
    """One task, one seed, one budget, a few test images, two steps."""
    task = list(part.data)[-1]

    def only(table: dict) -> dict:  # type: ignore[type-arg]
        return {key: value for key, value in table.items() if key == task}

    tables = {name: only(getattr(part, name)) for name in ("finetuned", "data", "heads", "reference", "stated")}
    return replace(
        part,
        **tables,
        seeds=part.seeds[:1],
        samples=tuple(min(count, 8) for count in part.samples[-1:]),
        shots=part.shots[:1],
        test_samples=64,
        finetune=replace(part.finetune, steps=2, batch_size=8, warmup=0) if part.finetune else None,
        checkpoint_every=1 if part.checkpoint_every else 0,
    )


def groups_of(options: argparse.Namespace, name: str) -> list[str]:
    """The cells of a recipe in groups "I/N" that take about the same time, without those that are done."""
    recipe = recipe_of(options, name)
    each = max(len(part.budgets) * len(part.methods) for part in recipe.comparisons.values())
    labels, done = labels_of(recipe), Cells(options.out / name, _fingerprint(recipe)).load()
    count = max(1, len(labels) * min(each, 8) // 8)
    groups = [f"{i}/{count}" for i in range(count)] if count > 1 else []
    return [group for group in groups if not done.keys() >= set(in_group(labels, group))]


def in_group(labels: list[str], group: str) -> list[str]:
    index, count = map(int, group.split("/"))
    return labels[len(labels) * index // count : len(labels) * (index + 1) // count]  # neighbours share a task


def labels_of(recipe: Recipe) -> list[str]:
    """The names that a run gives its cells."""
    return [
        "/".join((pair, task, sampler, str(seed)))
        for pair, part in recipe.comparisons.items()
        for task, sampler, seed in cell_names(recipe.kind, part)
    ]


def run_group(options: argparse.Namespace, recipe: Recipe) -> None:
    """Run the cells of a group that are not done, and add them to those that the recipe is resumed from."""
    cells = Cells(options.out / options.one, _fingerprint(recipe))
    mine = Cells(options.out / "logs" / f"{options.one}-{options.group.replace('/', '-of-')}", cells.conditions)
    labels = labels_of(recipe)
    wanted = in_group(labels, options.group)
    nothing = {"rows": [], "passes": dict.fromkeys(PASSES, 0), "seconds": 0.0}
    done = {label: nothing for label in labels if label not in wanted} | cells.load() | mine.load()
    made = make_finetunes(recipe, options.cache, stage=tell)
    for pair in made.comparisons:
        run_pair(made, pair, mine, done, tell)
    with (options.out / f"{options.one}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = cells.load()
        for label, content in mine.load().items():
            if label not in there:
                cells.add(label, content)


def prepare_models(options: argparse.Namespace, names: list[str]) -> dict[str, str]:
    """Fine-tune what the recipes need, each model once; what is wrong with a recipe, by its name."""
    failed, wanted = {}, {}
    for name in names:
        if (options.out / name).exists():
            continue
        try:
            recipe = recipe_of(options, name)
        except TuneportError as error:
            failed[name] = f"{type(error).__name__}: {error}"
            tell(f"{name} failed: {failed[name]}")
            continue
        for part in recipe.comparisons.values():
            for _, place, _ in wanted_finetunes(recipe.kind, part, options.cache):
                wanted.setdefault(place.name, name)
    with ThreadPoolExecutor(options.jobs) as pool:
        codes = dict(zip(wanted, pool.map(lambda model: start(options, wanted[model], model), wanted), strict=True))
    failed |= {wanted[model]: f"fine-tuning {model} failed, see its log" for model, (code, _) in codes.items() if code}
    return failed


def start(
    options: argparse.Namespace, name: str, model: str | None = None, group: str | None = None
) -> tuple[int, float]:
    """Run a recipe, make one of its models or run a group of its cells in a process; its exit code and seconds."""
    label, place = (model, options.cache / model) if model else (name, options.out / name)
    label += f"-{group.replace('/', '-of-')}" if group else ""
    if place.exists():
        tell(f"{label}: done already")
        return 0, 0.0
    started = time.time()
    words = [sys.executable, "-m", "benchmarks.claims.recipes", "--one", name]
    words += ["--root", str(options.root), "--out", str(options.out)]
    words += ["--cache", str(options.cache), "--device", options.device]
    words += [*(["--tiny"] if options.tiny else []), *(["--make", model] if model else [])]
    words += ["--group", group] if group else []
    threads = str(max(1, (os.cpu_count() or 1) // options.jobs))
    with (options.out / "logs" / f"{label}.log").open("w") as log:
        code = subprocess.run(
            words, stdout=log, stderr=log, check=False, env={**os.environ, "OMP_NUM_THREADS": threads}
        ).returncode
    tell(f"{label}: {'done' if code == 0 else 'failed, see its log'} in {time.time() - started:.0f} s")
    return code, time.time() - started


def one(options: argparse.Namespace) -> int:
    try:
        recipe = recipe_of(options, options.one)
        if options.make:
            make_finetunes(recipe, options.cache, only=options.make, stage=tell)
        elif options.group:
            run_group(options, recipe)
        else:
            out = run_recipe(recipe, options.out / options.one, cache=options.cache, resume=True, stage=tell, note=tell)
            forget_places(out, {options.root: "", options.cache: "models/"})
    except TuneportError as error:
        tell(f"{type(error).__name__}: {error}")
        return 1
    return 0


def forget_places(folder: Path, places: dict[Path, str]) -> None:
    """In the results, paths begin at the root, so that no machine's folders are in what is published."""
    path = folder / "results.json"
    text = path.read_text(encoding="utf-8")
    for place, short in places.items():
        text = text.replace(f"{place}/", short)
    path.write_text(text, encoding="utf-8")


def draw_again(options: argparse.Namespace, names: list[str]) -> int:
    for name in names:
        folder = options.out / name
        if not folder.exists():
            tell(f"{name}: not there")
            continue
        recipe = read_recipe(name, small=True, root=options.root, on_disk=False)
        if recipe.kind in FIGURES:
            means = json.loads((folder / "results.json").read_text(encoding="utf-8"))["means"]
            numbered = {
                plot: {line: {float(x): value for x, value in points.items()} for line, points in series.items()}
                for plot, series in means.items()
            }
            draw(recipe.title, numbered, folder)
        else:
            (folder / "plot.svg").write_text(plot(load(folder), recipe), encoding="utf-8")
    return 0


def write_summary(
    options: argparse.Namespace, names: list[str], results: dict[str, tuple[int, float]], failed: dict[str, str]
) -> None:
    """What was run and how long it took, and where the order of methods is not the paper's."""
    text = [
        "# Every recipe in small",
        "",
        "| recipe | result | seconds | order of methods as in the paper |",
        "|---|---|---|---|",
    ]
    for name in names:
        code, seconds = results.get(name, (1, 0.0))
        state = failed.get(name) or ("done" if code == 0 else "failed")
        text.append(f"| {name} | {state} | {seconds:.0f} | {order_words(options.out / name)} |")
    flags = "".join(f" --{key}" for key in ("tiny",) if getattr(options, key))
    flags += f" --only {' '.join(options.only)}" if options.only else ""
    text += [
        "",
        f"- command: python -m benchmarks.claims.recipes --root ../shared --out {options.out.name} "
        f"--device {options.device} --jobs {options.jobs}{flags}",
        f"- commit: {options.commit or commit()}",
        *([f"- machine: {options.machine}"] if options.machine else []),
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]
    (options.out / "summary.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


def order_words(folder: Path) -> str:
    try:
        orders = json.loads((folder / "results.json").read_text(encoding="utf-8"))["paper"]["orders"]
    except (OSError, KeyError, ValueError):
        return "–"
    if not orders:
        return "–"
    return ", ".join(f"{item['budget']}: {'yes' if item['same'] else 'no'}" for item in orders)


def tell(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
