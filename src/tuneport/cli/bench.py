"""`tuneport bench`: run a recipe, given by name, as a file or by options, and print its tables.

Options become the content of a recipe, so that the same code checks both.
"""

from __future__ import annotations

import csv
import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import TuneportError
from .options import Device, Json, Overwrite
from .terminal import emit_json, say, show, stages, tell


def bench(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe by name (see --list) or a TOML file; or give the keys below here.")
    ] = None,
    out: Annotated[str, typer.Option(help="The folder for tables, JSON and plots.")] = "comparison",
    small: Annotated[bool, typer.Option("--small", help="Take the recipe's small variant.")] = False,
    root: Annotated[str | None, typer.Option(help="Where the recipe's paths begin.")] = None,
    cache: Annotated[str | None, typer.Option(help="Where models that the recipe fine-tunes are kept.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the cells that a killed run finished.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="List the recipes of the paper and stop.")] = False,
    source: Annotated[str | None, typer.Option(help="The old base model.")] = None,
    target: Annotated[str | None, typer.Option(help="The new base model.")] = None,
    finetuned: Annotated[list[str] | None, typer.Option(help="TASK=PATH of a fine-tuned old base; repeatable.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="TASK=PATH of that task's data; repeatable.")] = None,
    reference: Annotated[
        list[str] | None, typer.Option(help="TASK=PATH of a fine-tuned target, for a last row.")
    ] = None,
    head: Annotated[list[str] | None, typer.Option(help="TASK=NAME of the head, where it is not the default.")] = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "naive,theseus,bico",
    samples: Annotated[str, typer.Option(help="Calibration budgets N, separated by commas.")] = "",
    shots: Annotated[str, typer.Option(help="Or budgets K per class.")] = "",
    samplers: Annotated[str, typer.Option(help="How samples are drawn, separated by commas.")] = "random",
    seeds: Annotated[str, typer.Option(help="Seeds of the draw.")] = "0",
    scales: Annotated[str, typer.Option(help="Scale rules: numbers, auto and safe.")] = "1,auto",
    protocol: Annotated[str, typer.Option(help="zero-shot, or linear-probe on the same samples.")] = "zero-shot",
    steps: Annotated[str, typer.Option(help="Also fine-tune the target on the samples, for these steps.")] = "",
    warm_start: Annotated[str | None, typer.Option(help="Also fine-tune from this method's result.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Of the fine-tuning runs.")] = 1e-5,
    device: Device = "auto",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Run a recipe, or compare methods on equal terms: the same samples, seeds and scale rules, one capture for all."""
    keys = [name for name in KEYS if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
    given = [f"--{name.replace('_', '-')}" for name in keys]
    if list_recipes or (recipe is None and not given):
        _list_recipes(json)
        return
    from ..bench.recipe import Recipe, make_recipe
    from ..bench.run import run_recipe

    if recipe is not None and given:
        listed = ", ".join(given)
        raise TuneportError(f"{listed} would be overruled by {recipe}: write it there, or leave the recipe out.")
    wanted: Recipe | str = recipe or ""
    if recipe is None:
        content: dict[str, Any] = {"source": source, "target": target, "warm_start": warm_start}
        content |= {"protocol": protocol, "learning_rate": learning_rate, "device": device}
        tables = {"finetuned": finetuned, "data": data, "reference": reference, "heads": head}
        numbers = {"samples": samples, "shots": shots, "seeds": seeds, "steps": steps}
        words = {"methods": methods, "samplers": samplers, "scales": scales}
        content |= {key: _by_task(key.rstrip("s"), value) for key, value in tables.items()}
        content |= {key: _numbers(key, value) for key, value in numbers.items()}
        content |= {key: _words(value) for key, value in words.items()}
        content = {key: value for key, value in content.items() if value is not None}
        wanted = make_recipe(content, "tuneport bench", root=root)
    with stages() as stage:
        run_recipe(
            wanted,
            out,
            small=small,
            root=root,
            cache=cache,
            device=None if device == "auto" else device,
            resume=resume,
            overwrite=overwrite,
            stage=stage,
            note=tell,
        )
    _print_results(Path(out), json)


KEYS = (
    *("source", "target", "finetuned", "data", "reference", "head", "methods", "samples", "shots", "samplers", "seeds"),
    *("scales", "protocol", "steps", "warm_start", "learning_rate"),
)


def _list_recipes(json: bool) -> None:
    """Print the built-in recipes: name, place in the paper and title."""
    from ..bench.recipe import RECIPES, read_toml

    contents = {name: read_toml(name) for name in RECIPES}
    rows = [{"name": name, "paper": found["paper"], "title": found["title"]} for name, found in contents.items()]
    if json:
        emit_json({"recipes": rows})
        return
    show([list(row.values()) for row in rows], "recipe", "paper", "title")
    say("run one: tuneport bench RECIPE --root FOLDER --out OUT, or with --small its small variant")


def _print_results(out: Path, json: bool) -> None:
    """Print the tables of a recipe, or their content as JSON."""
    records = sorted(out.rglob("results.json"))
    contents = {path.parent.name: json_module.loads(path.read_text(encoding="utf-8")) for path in records}
    if json:
        only = next(iter(contents.values())) if len(contents) == 1 else {"pairs": contents}
        emit_json({"out": str(out), **only})
        return
    for path in sorted(out.rglob("table.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            columns, *lines = csv.reader(file)
        show(lines, *columns, title=None if len(contents) == 1 else path.parent.name, fold=True)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    say(f"written to {out}: {', '.join(files)}")


def _by_task(option: str, given: list[str] | None) -> dict[str, str]:
    """TASK=PATH options as a table; a path alone is a task with the name of its stem."""
    parts = [item.partition("=") for item in given or []]
    table = {name if mark else Path(name).stem: path if mark else name for name, mark, path in parts}
    if given and len(table) != len(given):
        raise TuneportError(f"--{option} names a task twice; give each task once as TASK=PATH.")
    return table


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise TuneportError(f"--{option} takes whole numbers separated by commas, got {text!r}.") from None
