"""Messages stay readable, whatever was given."""

from __future__ import annotations

import pytest

from tuneport.config.options import parse_bytes
from tuneport.errors import LONGEST, TuneportError


def test_message_with_a_long_value_is_cut_in_the_middle() -> None:
    value = "a" * 3000
    with pytest.raises(TuneportError) as caught:
        parse_bytes(value)
    assert len(str(caught.value)) == LONGEST
    assert " ... " in str(caught.value)
    assert "a'" in str(caught.value)[-60:]  # what follows the value is there
