"""Options in messages, and words with a fixed choice."""

from __future__ import annotations

from typing import get_args

import pytest

import tuneport
from tuneport import TuneportError, cli
from tuneport.outputs import output_class
from tuneport.pipeline.scale import RULES
from tuneport.types import FORMATS, ScaleRule


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TuneportError, match=r"^unknown option 'sampels'\. Did you mean 'samples'\? Known: "):
        tuneport.transfer("old", "tuned", "new", "data", sampels=3)


class TestMessages:
    @pytest.mark.parametrize(
        ("message", "printed"),
        [
            ("lower `samples`.", "lower --samples."),
            ("pass `memory_budget=8GiB`.", "pass --memory-budget 8GiB."),
            ("pass `overwrite=True`.", "pass --overwrite."),
            ('use `as_="task-vector"`.', "use --as task-vector."),
            ("""leave out `exclude=['*', "head.*"]`.""", "leave out --exclude '*' --exclude 'head.*'."),
            ("pass `roles={'fc1': 'wi', 'gate': None}`.", "pass --roles fc1=wi --roles gate=none."),
            ("pass `pairs=[...]`.", "pass pairs=[...]."),
            ("a file called `samples", "a file called `samples"),
        ],
    )
    def test_parameters_are_printed_as_options(self, message: str, printed: str) -> None:
        assert cli.terminal.as_options(message) == printed


def test_words_with_a_fixed_choice_are_those_that_the_code_knows() -> None:
    assert set(get_args(ScaleRule)) == set(RULES)
    assert [output_class(name).name for name in FORMATS] == list(FORMATS)
