"""Commands that need no model: `methods` and `demo`. They download nothing."""

from __future__ import annotations

from pathlib import Path

from ..config import Config, DemoConfig, DemoInputs
from .terminal import Stages, emit_json, say, show, show_list


def methods(config: Config, json: bool) -> None:
    """What methods there are, one line each."""
    del config
    from ..methods import METHODS

    names = {name: method.summary for name, method in METHODS.items()}
    if json:
        emit_json(names)
    else:
        show_list(names.items(), "bold")


def demo(inputs: DemoInputs, config: DemoConfig, json: bool) -> None:
    """The main job from end to end, offline, on what the package carries: about a minute on two cores."""
    from ..demo import run

    with Stages() as events:
        result = run.run_demo(Path(inputs.out), seed=config.seed, overwrite=config.overwrite, events=events)
    if json:
        emit_json(result)
        return
    rows = [(row["model"], f"{row['accuracy']:.1f} %") for row in result["table"]]
    show(rows, "", "accuracy", title="mirrored digits, the larger model")
    say(f"the ported model: {result['out']}, its report: {result['report']}")
    say(f"next: {result['next']}")
