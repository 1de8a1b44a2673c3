"""Amounts of memory: how they are read, shown and asked for."""

from __future__ import annotations

import pytest

from tuneport.config.options import parse_bytes
from tuneport.errors import TuneportError
from tuneport.io.sizes import format_bytes, free_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 2**33),
        ("8 gib", 2**33),
        ("1.5MB", 1_500_000),
        ("700", 700),
        ("2TB", 2 * 10**12),
        ("2kb", 2000),
        (12, 12),
    ],
)
def test_parse_bytes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "8 parsecs", "5XB", "0GB", 0, "1e9", "nan"])
def test_parse_bytes_refuses_other_text(text: int | str) -> None:
    with pytest.raises(TuneportError, match=r"must be a size such as 8GiB or 500MB, got "):
        parse_bytes(text)


def test_format_bytes() -> None:
    found = [format_bytes(size) for size in (0, 1023, 1536, 3 * 2**20, 5 * 2**40)]
    assert found == ["0 B", "1023 B", "1.50 KiB", "3.00 MiB", "5120.00 GiB"]


def test_free_memory() -> None:
    assert free_memory() > 2**20
