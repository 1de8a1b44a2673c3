"""`tuneport transfer`: port a fine-tune, print what came of it and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ..config import TransferConfig, TransferInputs
from ..types import FILE_FORMATS
from .terminal import as_options, emit_json, listening, say

HARM = 3  # the exit code of --fail-on-harm


def transfer(inputs: TransferInputs, config: TransferConfig, json: bool) -> None:
    """Port a fine-tune to a new base model."""
    from ..pipeline.run import run_to_folder
    from ..processes import processes

    with processes(config.device) as here, listening("measuring", here.first) as events:
        record = run_to_folder(inputs, config, events)
    if not here.first:
        return
    if json:
        emit_json(record)
    else:
        _print_result(record, config.verbose)
        print_next(record)
    if config.fail_on_harm and record["outcome"] == "harm":
        raise typer.Exit(HARM)


def _print_result(record: Mapping[str, Any], verbose: bool) -> None:
    """Print what there is now, how good it is, how sure that is, what to do; with `verbose`, also how it was made."""
    from ..report.summary import score_rows, score_words, summary_rows, written_words

    say(written_words(record))
    say(record["headline"], prose=True)
    if scores := score_rows(record):
        width = max(len(label) for label, _ in scores)
        for label, text in scores:
            say(f"  {label:<{width}}  {text}")
        say(f"  {score_words(record)}")
    say(record["recommendation"], prose=True)
    if verbose:
        for label, text in summary_rows(record):
            say(f"{label:<12} {as_options(text)}")
        if record["scale"]:
            print_kept(record)
    if record["as"] not in FILE_FORMATS:
        say(f"report: {Path(record['out'], 'report.html')}")


def print_next(record: Mapping[str, Any]) -> None:
    """Print commands that work on an output: its evaluation if the data allow it, and what loads an adapter."""
    from ..outputs.adapter import LOADER
    from ..report.summary import data_reference, evaluate_command

    out, place = record["out"], data_reference(record)
    if "protocol" in record["data"] and place:
        say(f"next: {evaluate_command(record, out, place)}")
    if "vllm" in record.get("adapter", {}):  # of a decoder
        say(f"next: {shlex.join(['tuneport', 'evaluate', out, '--ask', 'Hello, who are you?'])}")
    if record.get("adapter", {}).get("loader"):
        say(f"next: {shlex.join(['python', str(Path(out, LOADER))])}")


def print_kept(record: Mapping[str, Any]) -> None:
    """Print how many tensors stay, by reason."""
    from ..report.summary import kept_rows

    for reason, count in kept_rows(record):
        say(f"  kept {count}: {reason}")
