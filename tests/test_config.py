"""Options are declared once: the command line, the record, the repeat command and the reference follow from a field."""

from __future__ import annotations

import re
import shlex
from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tuneport.cli.command import command
from tuneport.config import (
    ApplyConfig,
    Config,
    DistillConfig,
    EvaluateConfig,
    ExtractConfig,
    MergeConfig,
    PlanConfig,
    TransferConfig,
    TransferInputs,
    option,
    reference,
    repeat_command,
)
from tuneport.errors import DataError, OptionError, TuneportError

CONFIGS: tuple[type[Config], ...] = (
    TransferConfig,
    PlanConfig,
    DistillConfig,
    EvaluateConfig,
    ExtractConfig,
    ApplyConfig,
    MergeConfig,
)
INPUTS = TransferInputs(source="a", finetuned=("b b", "c"), target="t", data="d", out="o")
OTHER: dict[str, Any] = {  # another value for each option that has no obvious one
    "scale": "safe",
    "columns": {"text": "sentence", "label": "y"},
    "labels": "source",
    "head_fit": "none",
    "exclude": ("*.bias", "a b"),
    "roles": {"up": "fc1", "gate": None},
    "as_": "adapter",
    "protocol": "linear-probe",
    "weights": (0.5, 1e-3),
    "rule": "ties",
    "sampler": "class_balanced",
}
WITH: dict[str, dict[str, Any]] = {  # options that go with another one
    **{name: {"as_": "adapter"} for name in ("rank", "energy", "uniform_rank", "adapter_dtype")},
    "samples": {"protocol": "linear-probe"},
}


@dataclass(frozen=True, kw_only=True)
class Extended(TransferConfig):
    warmth: int = option(3, help="How warm it is.", least=1)


def other_value(name: str, default: Any) -> Any:
    if isinstance(default, bool) or name == "evaluate":
        return not default
    if isinstance(default, (int, float)):
        return default + 1
    if name in OTHER:
        return OTHER[name]
    return {"energy": 0.5, "learning_rate": 0.25}.get(name, 7 if default is None and name in NUMBERS else "word")


NUMBERS = ("samples", "shots", "max_length", "max_tokens", "memory_budget", "rank", "lora", "batch_size", "distill")
CASES = [(config, item.name) for config in CONFIGS for item, about in config.options() if not about.python]


def application(config: type[Config]) -> tuple[typer.Typer, list[Any]]:
    """A program with a transfer that takes this config, and the list of what it was called with."""
    app, calls = typer.Typer(), []

    def transfer(inputs: TransferInputs, config: Config, json: bool) -> None:
        """Transfer."""
        calls.append((inputs, config, json))

    app.command()(command(transfer, TransferInputs, config, ()))
    return app, calls


class TestOneField:
    """A new field is an option everywhere."""

    def test_in_the_help(self) -> None:
        done = CliRunner().invoke(application(Extended)[0], ["--help"], env={"COLUMNS": "100"})
        assert re.search(r"--warmth +N +How warm it is\. +\[default: 3\]", done.output), done.output

    def test_on_the_command_line(self) -> None:
        app, calls = application(Extended)
        words = ["--source", "a", "--finetuned", "b", "--target", "t", "--out", "o", "--warmth", "5", "--json"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        (inputs, config, json), *_ = calls
        assert (inputs.finetuned, config.warmth, config.samples, json) == (("b",), 5, None, True)

    def test_in_the_record_the_repeat_command_and_the_reference(self) -> None:
        config = Extended.of(warmth=4)
        assert config.to_json()["warmth"] == 4
        assert repeat_command("transfer", INPUTS, config).endswith("--warmth 4")
        assert "| `--warmth` | `3` | How warm it is. |" in reference(Extended)

    def test_in_the_checks(self) -> None:
        with pytest.raises(OptionError, match="`warmth` must be at least 1, got 0"):
            Extended.of(warmth=0)


@pytest.mark.parametrize(("config", "name"), CASES, ids=lambda value: getattr(value, "command", value))
class TestEveryField:
    def test_the_command_line_gives_the_value_back(self, config: type[Config], name: str) -> None:
        """What differs from its default is in the words of the command, and the words give the same config."""
        default = next(item.default for item in fields(config) if item.name == name)
        known = {item.name for item in fields(config)}
        more = {key: value for key, value in WITH.get(name, {}).items() if key in known}
        given = config.of(**{**more, name: other_value(name, default)})
        assert getattr(given, name) != default
        app, calls = application(config)
        words = [*INPUTS.to_args(), *given.to_args()]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, (words, done.output, done.exception)
        assert calls == [(INPUTS, given, False)]

    def test_a_record_gives_the_value_back(self, config: type[Config], name: str) -> None:
        default = next(item.default for item in fields(config) if item.name == name)
        given = config(**{name: other_value(name, default)})
        assert config.from_json(given.to_json()) == given


def test_the_words_of_inputs_are_quoted_once() -> None:
    line = repeat_command("transfer", INPUTS, TransferConfig.of())
    assert shlex.split(line)[2:] == [
        *("--source", "a", "--finetuned", "b b", "--finetuned", "c", "--target", "t", "--data", "d", "--out", "o"),
    ]


class TestHelp:
    @pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.command)
    def test_panels_are_short(self, config: type[Config]) -> None:
        listed = [about for cls in (TransferInputs, config) for _, about in cls.options() if about.listed]
        shown = [about.group for about in listed if not about.python]
        assert len(shown) <= 31  # and --json
        assert max(shown.count(group) for group in shown) <= 8
        assert shown.count("Usual options") <= 7

    def test_every_option_has_a_sentence(self) -> None:
        for config in CONFIGS:
            for item, about in config.options():
                assert about.help.endswith((".", "...")), item.name


class TestRefusals:
    def test_an_unknown_option(self) -> None:
        with pytest.raises(TuneportError, match=r"unknown option 'sample'\. Did you mean 'samples'"):
            TransferConfig.of(sample=3)

    def test_a_choice(self) -> None:
        with pytest.raises(OptionError, match="unknown head_fit 'x'"):
            TransferConfig.of(head_fit="x")

    def test_labels_that_are_not_used(self) -> None:
        with pytest.raises(DataError, match="`shots` needs them"):
            TransferConfig.of(labels="source", shots=3)

    @pytest.mark.parametrize("name", ["rank", "energy", "uniform_rank", "adapter_dtype"])
    def test_a_form_without_an_adapter(self, name: str) -> None:
        with pytest.raises(TuneportError, match="go with"):
            TransferConfig.of(**{name: other_value(name, {"uniform_rank": False}.get(name))})

    @pytest.mark.parametrize("scale", ["nan", "inf", "full", float("nan"), float("inf")])
    def test_a_scale(self, scale: float | str) -> None:
        with pytest.raises(TuneportError, match="scale"):
            TransferConfig.of(scale=scale)

    @pytest.mark.parametrize("size", ["0", "x", "8XB"])
    def test_a_size(self, size: str) -> None:
        with pytest.raises(TuneportError, match="8GiB"):
            TransferConfig.of(memory_budget=size)

    def test_python_objects_have_no_command(self) -> None:
        config = TransferConfig.of(loss=len)
        assert config.to_json()["python"] == ["loss"]
        with pytest.raises(TuneportError, match="Python object"):
            config.to_args()
        with pytest.raises(TuneportError, match="Python object"):
            TransferConfig.from_json(config.to_json())


def test_required_inputs_have_no_default() -> None:
    assert {item.name for item in fields(TransferInputs) if item.default is MISSING} == {
        "source",
        "finetuned",
        "target",
        "out",
    }
