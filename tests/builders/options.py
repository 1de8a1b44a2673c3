"""Other values for the options of commands, and what a command line makes of its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import typer
from typer.testing import CliRunner

from tuneport.cli.command import command
from tuneport.config import TransferInputs
from tuneport.config.options import Config

INPUTS = TransferInputs(source="a", finetuned=("b b", "c"), target="t", data="d", out="o")
OTHER: dict[str, Any] = {  # another value for each option that has no obvious one
    "scale": "safe",
    "columns": {"text": "sentence", "label": "y"},
    "labels": "data",
    "template": "a {text} b",
    "head_fit": "none",
    "exclude": ("*.bias", "a b"),
    "roles": {"up": "fc1", "gate": None},
    "as_": "adapter",
    "protocol": "linear-probe",
    "weights": (0.5, 1e-3),
    "rule": "ties",
    "sampler": "class_balanced",
    "energy": 0.5,
    "learning_rate": 0.25,
    "routes": ("copy", "port"),
    "time": 600,
    "dtype": "bfloat16",
    "classes": ("red", "dark green"),
    "adapter_dtype": "float16",
}
WITH: dict[str, dict[str, Any]] = {  # options that go with another one
    **{name: {"as_": "adapter"} for name in ("rank", "energy", "uniform_rank", "adapter_dtype")},
    "samples": {"protocol": "linear-probe"},
    "shapes_only": {"memory_budget": 2**30},
    **{name: {"synthetic": 99} for name in ("describe", "generator", "generator_url", "keep_texts")},
    "shard": {"lora": 4},
}
NUMBERS = (
    "samples",
    "shots",
    "max_length",
    "max_tokens",
    "memory_budget",
    "rank",
    "lora",
    "batch_size",
    "distill",
    "steps",
    "synthetic",
)


def other_value(name: str, default: Any) -> Any:
    """A value of an option that is not its default."""
    if isinstance(default, bool) or name == "evaluate":
        return not default
    if isinstance(default, (int, float)):
        return default / 2 if name == "density" else default + 1
    return OTHER.get(name, 9 if default is None and name in NUMBERS else "word")


def other_options(config: type[Config], name: str) -> dict[str, Any]:
    """One option with another value than its default, and those that go with it."""
    defaults = {item.name: item.default for item in fields(config)}
    more = {key: value for key, value in WITH.get(name, {}).items() if key in defaults}
    return {**more, name: other_value(name, defaults[name])}


@cache
def application(config: type[Config]) -> tuple[typer.Typer, list[Any]]:
    """A program with a transfer that takes this config, and the list of what it was called with."""
    app, calls = typer.Typer(), []

    def transfer(inputs: TransferInputs, config: Config, json: bool) -> None:
        """Transfer."""
        calls.append((inputs, config, json))

    app.command()(command(transfer, TransferInputs, config))
    return app, calls


def read_words(config: type[Config], words: Sequence[str]) -> tuple[TransferInputs, Config, bool]:
    """The inputs, the options and `json` that a command line reads out of these words."""
    app, calls = application(config)
    calls.clear()
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, (words, done.output, done.exception)
    (call,) = calls
    assert isinstance(call, tuple)
    return call
