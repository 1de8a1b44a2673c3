"""Commands that need no model: `methods`, `samplers` and `demo`. They download nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import Json, Overwrite, Seed
from .terminal import emit_json, say, show, show_list, stages


def methods(json: Json = False) -> None:
    """What methods there are, one line each."""
    from ..methods import METHODS

    _print_names({name: method.summary for name, method in METHODS.items()}, json)


def samplers(json: Json = False) -> None:
    """How calibration samples can be drawn, one line each."""
    from ..data.samplers import SAMPLERS

    _print_names({name: sampler.description for name, sampler in SAMPLERS.items()}, json)


def demo(
    out: Annotated[str, typer.Option(help="The folder to write.")] = "tuneport-demo",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """The main job from end to end, offline, on what the package carries: about a minute on two cores."""
    from ..demo import run

    with stages() as stage:
        result = run.run_demo(Path(out), seed=seed, overwrite=overwrite, stage=stage)
    if json:
        emit_json(result)
        return
    rows = [(row["model"], f"{row['accuracy']:.1f} %") for row in result["table"]]
    show(rows, "", "accuracy", title="mirrored digits, the larger model")
    say(f"the ported model: {result['out']}, its report: {result['report']}")
    say(f"next: {result['next']}")


def _print_names(names: dict[str, str], json: bool) -> None:
    if json:
        emit_json(names)
        return
    show_list(names.items(), "bold")
