"""Parquet files whose few bytes stand for many values: refused, or read without writing the values out."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from tuneport.data import rows
from tuneport.data.formats import read_plain
from tuneport.errors import DataError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

DAMAGED = """
eNqVVD1v2kAYPvMlqnggUc+yKwZkJVZa5QNIoElEpZxpABPSBKQkQFVVxhjjyhiKTQiJunfs2KFDx/6ADh06d+pU9S9060/o0LszJmmSpSe499
73ffw8z70WHKFaCoZgCe5WIAvBAgCL9wMAADcZjoAU/qbDkeQGrWzSPQMB5OCDFYyOwQiMxLNgOeBm+ICbnJ/HgLllAmOZYPDttwBmTsDFCg6E
OZYD08VMI+ZagNwVFx/1O3zUx3Jg+Y4q1bqX8LSY4CMsIULJV5rfDROvQ9W0Q+SgO+5NKWw7TAF8iLRv8wmVDOAjjtbVeyqMAMguBQj03F0ClT
jxHsKFsKW2dIs0s3zYGVim3+VYIS7kJBCHrJABkZjgPQsDHMt9YbjPjNSWov/OTlgh7mGATCWGQ47jhYggARbTEaLQlMjTpEzfGe4nI/1hpK/M
/83ultbD60q+Ze9GVOk9w31kpB9B6V3wjtHdtp6dWec+hDhWinKfQhjGz3VHhmHaRkfVdL52KZp2py/uJC7Fjq66o6Hu0ITekJ5stUdrz0W7L6
4kxAnOXuD40p0MdFwX85bqOBWKf4MX4FlUqx2e7ngvjv8dXCcrbcgIoSry1j5Cm0g2UAEhA+UNWpPlf/pjEvdmfcXPfRaaKyTKNBKQTJmIECoo
5PRY6VmjZm/LPDTJuWk16rWU1ju5UF71DX1SdhqnZauVV7JKyTFbvYLbrB8QbEvpZc4Uc2wotmVpk3K7kkdmfaOW0YrHuI/Mavq8q208O/CeL2
936qltLFgh0mrpxG6msW662W2kjz2rpfHMNPW3/xQPZYtcqUAv5VnfQ7N1TIoXWvF80CZpmeDXFbJRii4FXd3XWwWytYoFs3l6NZ88Vp9CKbw6
fahA+w0kj9HBVNyfvyzXaNRu8FN/7eLJZnuWV6/3nwA+MVCHr0e6u6oNBqvqcNgfJ870oWP27UQ6u5ZcSwk5/PP0PuBXEIAj/Af4F4UlCAo=
"""


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pa.table(columns), path, **options)
    return path


def repeated(value: Any, count: int) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))


def test_a_text_that_is_repeated_is_not_written_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"text": repeated("a" * 10**5, 2_000), "label": repeated("x" * 10**4, 2_000)})
    assert path.stat().st_size < 300_000
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    data = read_plain(path, "train")
    python, arrow_bytes = tracemalloc.get_traced_memory()[1], pa.total_allocated_bytes() - before
    tracemalloc.stop()
    assert len(data) == 2_000
    assert data.inputs[1_999] == "a" * 10**5
    assert python + arrow_bytes < 10**7  # written out it is 220 MB


def test_texts_that_are_too_large_together(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"text": repeated("a" * 10**6, 5_000)})
    with pytest.raises(DataError, match=r"t\.parquet is refused: a table may have 4\.00 GiB uncompressed"):
        read_plain(path, "train", labelled=False)
    chats = pa.ListArray.from_arrays(pa.array([0, 5_000]), repeated("a" * 10**6, 5_000))
    path = write(tmp_path / "n.parquet", {"messages": chats})
    with pytest.raises(DataError, match="a table may have"):
        read_plain(path, "train", labelled=False)


def test_declared_sizes_are_checked_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.parquet", {"text": [str(i) * 100 for i in range(1000)]}, use_dictionary=False)
    monkeypatch.setattr(rows, "LARGEST_TABLE", 10**4)
    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", lambda *_: pytest.fail("too late"))
    with pytest.raises(DataError, match="a table may have"):
        read_plain(path, "train", labelled=False)


def test_more_rows_than_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", {"label": pa.nulls(10**7 + 1, pa.int8())})
    with pytest.raises(DataError, match="has 10000001 samples, and at most 10000000 are read"):
        read_plain(path, "train", labelled=False)


def test_encodings_that_repeat_prefixes(tmp_path: Path) -> None:
    options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    path = write(tmp_path / "t.parquet", {"text": ["a" * 1000 + str(i) for i in range(100)]}, **options)
    with pytest.raises(DataError, match="encoding DELTA_BYTE_ARRAY"):
        read_plain(path, "train", labelled=False)


@pytest.mark.parametrize("names", [1.5, {"a": 1}, None, "ab", "deep"])
def test_class_names_in_the_metadata_that_are_no_list(tmp_path: Path, names: Any) -> None:
    notes = json.dumps({"info": {"features": {"label": {"names": names}}}}).encode()
    notes = b"[" * 100_000 if names == "deep" else notes
    table = pa.table({"text": ["a", "b"], "label": [0, 1]}).replace_schema_metadata({b"huggingface": notes})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert read_plain(tmp_path / "t.parquet", "train").classes == ("0", "1")


def test_a_crash_of_pyarrow_is_an_error_of_one_line(tmp_path: Path) -> None:
    """One byte of the metadata of a column differs: pyarrow 26 ends the process that asks for them, with signal 6."""
    path = tmp_path / "damaged.parquet"
    path.write_bytes(zlib.decompress(base64.b64decode(DAMAGED)))
    with pytest.raises(DataError, match=r"cannot read .*damaged\.parquet: [^\n]+\.$"):
        read_plain(path, "train")
