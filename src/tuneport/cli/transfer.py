"""`tuneport transfer`: port a fine-tune, print what came of it and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import typer

from ..config import TransferConfig, TransferInputs
from .terminal import Bar, as_options, emit_json, say

HARM = 3  # the exit code of --fail-on-harm


def transfer(inputs: TransferInputs, config: TransferConfig, json: bool) -> None:
    """Port a fine-tune to a new base model."""
    from ..pipeline.run import run_to_folder
    from ..runtime.distributed import processes

    with processes(config.device) as here:
        with Bar("measuring") as events:
            record = run_to_folder(inputs, config, events)
        if not here.first:
            return
    if json:
        emit_json(record)
    else:
        _print_result(record)
        for command in next_commands(record):
            say(f"next: {command}")
    if config.fail_on_harm and record["outcome"] == "harm":
        raise typer.Exit(HARM)


def _print_result(record: Mapping[str, Any]) -> None:
    from ..report.summary import score_rows, score_words, summary_rows

    say(record["headline"])
    if scores := score_rows(record):
        width = max(len(label) for label, _ in scores)
        for label, text in scores:
            say(f"  {label:<{width}}  {text}")
        say(f"  {score_words(record)}")
    say(record["recommendation"])
    for label, text in summary_rows(record):
        say(f"{label:<12} {as_options(text)}")
    if record["scale"]:
        print_kept(record)
    say(f"written to {record['out']}" + ("" if record["as"] == "task-vector" else ", report in report.html"))


def next_commands(record: Mapping[str, Any]) -> list[str]:
    """Commands that work on an output: its evaluation if the data allow it, and what loads an adapter."""
    from ..report.summary import data_reference, evaluate_command

    found, out, place = [], record["out"], data_reference(record)
    if "protocol" in record["data"] and place:
        found.append(evaluate_command(record, out, place))
    if loader := record.get("adapter", {}).get("loader"):
        found.append(
            shlex.join(
                ["python", "-c", f"import peft; peft.{loader['name']}.from_pretrained({out!r}{loader['options']})"]
            )
        )
    return found


def print_kept(record: Mapping[str, Any]) -> None:
    """Print how many tensors stay, by reason."""
    from ..report.summary import kept_rows

    for reason, count in kept_rows(record):
        say(f"  kept {count}: {reason}")
