"""Text tables are read as a stream: bounded memory, bounded rows, and lists of objects in pieces."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tuneport.data import dataset, rows
from tuneport.data.formats import READERS, read_plain
from tuneport.errors import DataError


def peak_of(path: Path, **options: Any) -> int:
    """The bytes of Python and NumPy that reading a data set allocates at most."""
    tracemalloc.start()
    try:
        data = read_plain(path, "train", **options)
        assert len(data) > 0
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def bound(unpacked: int, samples: int) -> int:
    """Four times the text and 64 bytes a sample, as docs/limits.md says; and 512 KiB of buffers."""
    return 4 * unpacked + 64 * samples + 2**19


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "ab"},
        {"text": "ab", "label": 1},
        {"text": "a", "label": "x", "split": "train"},
        {"text": "q", "choices": ["a", "b"], "label": 0},
        {"messages": CHAT},
        {"text": "ab", "other": [[], [], [], [], [], [], [], []]},
    ],
    ids=["text", "label", "split", "choices", "chat", "lists"],
)
def test_memory_is_at_most_four_times_the_unpacked_size(tmp_path: Path, row: dict[str, Any]) -> None:
    line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
    content = line * (3 * 10**5 // len(line))
    (tmp_path / "few.jsonl.gz").write_bytes(gzip.compress(line * 3))
    peak_of(tmp_path / "few.jsonl.gz", labelled=False)  # the first time, modules are imported and caches filled
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(content))
    assert peak_of(tmp_path / "t.jsonl.gz", labelled=False) < bound(len(content), content.count(b"\n"))


def test_memory_of_other_tables(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"text,label\n" + b"ab,1\n" * 20_000)
    assert peak_of(tmp_path / "t.csv") < bound((tmp_path / "t.csv").stat().st_size, 20_000)
    (tmp_path / "t.json").write_text(json.dumps([{"text": "ab"}] * 10_000))
    assert peak_of(tmp_path / "t.json", labelled=False) < bound((tmp_path / "t.json").stat().st_size, 10_000)


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.tsv", "t.json"])
def test_rows_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(rows, "LARGEST_ROW", 1000)
    monkeypatch.setattr(rows, "_CHUNK", 100)
    content = {
        "t.jsonl": json.dumps({"text": "a" * 2000}),
        "t.json": json.dumps([{"text": "a" * 9000}]),
        "t.csv": "text,label\n" + '"a\n",' * 1000,  # a row that never ends
        "t.tsv": "text\tlabel\n" + "\t" * 2000,
    }[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=r"a row may have 1000 characters|is not JSON"):
        read_plain(tmp_path / name, "train", labelled=False)


def test_rows_of_many_names(tmp_path: Path) -> None:
    """As columns of equal length they would take memory that is quadratic in the number of rows."""
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({f"k{i}": 1, "text": "a"}) for i in range(2000)))
    with pytest.raises(DataError, match="more than 1000 columns"):
        read_plain(tmp_path / "t.jsonl", "train", labelled=False)


def test_blank_lines_count_as_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MOST_SAMPLES", 1000)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' + b"\n" * 2000))
    with pytest.raises(DataError, match="at most 1000 are read"):
        read_plain(tmp_path / "t.jsonl.gz", "train", labelled=False)


@pytest.mark.parametrize("seed", range(5))
def test_lists_of_objects_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(rows, "_CHUNK", 3)
    choose = random.Random(seed)
    values: list[Any] = ["a", 'quo"te]', "é\n,}", 1.5, None, [1, {"b": []}], {"c": "}"}, True]
    given = [{f"k{j}": choose.choice(values) for j in range(choose.randrange(4))} for _ in range(20)]
    text = json.dumps(given, indent=choose.choice([None, 2]), ensure_ascii=bool(seed % 2))
    (tmp_path / "t.json").write_text(f" {text}\n", encoding="utf-8")
    columns = READERS[".json"](tmp_path / "t.json", "train").columns
    for key, column in columns.items():
        assert list(column) == [row.get(key) for row in given]
    assert set(columns) == {key for row in given for key in row}


def test_blanks_between_objects(tmp_path: Path) -> None:
    """More of them than are read at once."""
    blanks = " " * (3 * rows._CHUNK)
    (tmp_path / "t.json").write_text(f'{blanks}[{blanks}{{"text": "a"}}{blanks},{blanks}{{"text": "b"}}{blanks}]')
    assert list(read_plain(tmp_path / "t.json", "train", labelled=False).inputs) == ["a", "b"]


@pytest.mark.parametrize("content", ["", "[", "{}", "3", "[1]", '[{"text": 1}', '[{"text": 1} {"text": 2}]', "[,]"])
def test_broken_lists(tmp_path: Path, content: str) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=r"t\.json is (no list of JSON objects|not JSON)"):
        read_plain(tmp_path / "t.json", "train")


def test_names_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": "\\ud800"}')
    with pytest.raises(DataError, match=r"label of row 1 of .* expected a class name"):
        read_plain(tmp_path / "t.jsonl", "train")


def test_of_columns_with_one_name_the_last_counts(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label,text\nfirst,x,last\n\nfirst,y,end\n")
    data = read_plain(tmp_path / "t.csv", "train")
    assert (list(data.inputs), data.classes) == (["last", "end"], ("x", "y"))
