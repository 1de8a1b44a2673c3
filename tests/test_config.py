"""Options are declared once: the command line, the record, the repeat command and the reference follow from a field."""

from __future__ import annotations

import re
import runpy
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from builders.options import INPUTS, application, other_options, read_words
from tuneport.config import (
    ApplyConfig,
    DistillConfig,
    EvaluateConfig,
    ExtractConfig,
    MergeConfig,
    PlanConfig,
    TransferConfig,
    TransferInputs,
    UpgradeConfig,
)
from tuneport.config.options import Config, option, repeat_command
from tuneport.errors import OptionError, TuneportError

CONFIGS: tuple[type[Config], ...] = (
    UpgradeConfig,
    TransferConfig,
    PlanConfig,
    DistillConfig,
    EvaluateConfig,
    ExtractConfig,
    ApplyConfig,
    MergeConfig,
)


class Extended(TransferConfig):
    warmth: int = option(3, help="How warm it is.", least=1)


CASES = [(config, item.name) for config in CONFIGS for item, about in config.options() if not about.python]


class TestOneField:
    """A new field is an option everywhere."""

    def test_in_the_help(self) -> None:
        done = CliRunner().invoke(application(Extended)[0], ["--help"], env={"COLUMNS": "100"})
        assert re.search(r"--warmth +N +How warm it is\. +\[default: 3\]", done.output), done.output

    def test_on_the_command_line(self) -> None:
        words = ["--source", "a", "--finetuned", "b", "--target", "t", "--out", "o", "--warmth", "5", "--json"]
        inputs, config, json = read_words(Extended, words)
        assert isinstance(config, Extended)
        assert (inputs.finetuned, config.warmth, config.samples, json) == (("b",), 5, None, True)

    def test_in_the_record_the_repeat_command_and_the_reference(self) -> None:
        config = Extended.of(warmth=4)
        assert config.to_json()["warmth"] == 4
        assert repeat_command("transfer", INPUTS, config).endswith("--warmth 4")
        reference = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "hooks.py"))["reference"]
        assert "| `--warmth` | `3` | How warm it is. |" in reference(Extended)

    def test_in_the_checks(self) -> None:
        with pytest.raises(OptionError, match="`warmth` must be at least 1, got 0"):
            Extended.of(warmth=0)


@pytest.mark.parametrize(("config", "name"), CASES, ids=lambda value: getattr(value, "command", value))
class TestEveryField:
    def test_the_command_line_gives_the_value_back(self, config: type[Config], name: str) -> None:
        """What differs from its default is in the words of the command, and the words give the same config."""
        given = config.of(**other_options(config, name))
        assert getattr(given, name) != getattr(config(), name)
        assert read_words(config, [*INPUTS.to_args(), *given.to_args()]) == (INPUTS, given, False)

    def test_a_record_gives_the_value_back(self, config: type[Config], name: str) -> None:
        given = config(**other_options(config, name))
        recorded = {item.name for item, about in config.options() if about.recorded}
        wanted = given if name in recorded else config()  # how to run it again is another question
        assert config.from_json(given.to_json()) == wanted


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
        with pytest.raises(OptionError, match="`shots` needs them"):
            TransferConfig.of(labels="source", shots=3)

    @pytest.mark.parametrize("name", ["rank", "energy", "uniform_rank", "adapter_dtype"])
    def test_a_form_without_an_adapter(self, name: str) -> None:
        given = {key: value for key, value in other_options(TransferConfig, name).items() if key != "as_"}
        with pytest.raises(TuneportError, match="go with"):
            TransferConfig.of(**given)

    @pytest.mark.parametrize("scale", ["nan", "inf", "full", float("nan"), float("inf")])
    def test_a_scale(self, scale: float | str) -> None:
        with pytest.raises(TuneportError, match="scale"):
            TransferConfig.of(scale=scale)

    def test_a_number_is_the_same_in_every_spelling(self) -> None:
        found = [TransferConfig.of(scale=scale, memory_budget=size) for scale, size in ((1, 1024), ("1", "1KiB"))]
        assert found[0] == found[1]
        assert {type(each.scale) for each in found} == {float}

    @pytest.mark.parametrize("size", ["0", "x", "8XB", 0])
    def test_a_size(self, size: int | str) -> None:
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
