"""Tables and saved HF datasets: columns, splits, labels, images in cells, and every error text."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from builders.processes import run_program
from builders.samples import image_folder, jsonl, picture, png, raises
from tuneport.data.formats import read_plain

ROWS = [
    {"split": "train", "text": "good, really", "label": "pos"},
    {"split": "train", "text": 'so "bad"', "label": "neg"},
    {"split": "test", "text": "größer", "label": "unsure"},
]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist(rows), path)
        return path
    if kind == "jsonl":
        text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    else:
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, list(rows[0]), delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
        text = buffer.getvalue()
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


TABLES = ["t.jsonl", "t.jsonl.gz", "t.csv", "t.csv.gz", "t.tsv", "t.parquet"]


@pytest.mark.parametrize("name", TABLES)
def test_tables(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, ROWS)
    train, test = read_plain(path, "train"), read_plain(path, "test")
    assert train.classes == test.classes == ("neg", "pos", "unsure")
    assert (train.name, train.kind, train.origin.split, test.origin.split) == ("t", "text", "train", "test")
    assert list(train.inputs) == ["good, really", 'so "bad"']
    assert list(test.inputs) == ["größer"]
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0], [2])


@pytest.mark.parametrize("name", TABLES)
def test_number_labels_sort_as_numbers(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, [{"text": "a", "label": label} for label in (10, 2, 0, 2)])
    data = read_plain(path, "train")
    assert (data.classes, data.origin.split) == (("0", "2", "10"), "all")
    assert data.labels is not None
    assert data.labels.tolist() == [2, 1, 0, 1]


@pytest.mark.parametrize("keys", [("text", "text_pair"), ("text1", "text2")])
def test_text_pairs(tmp_path: Path, keys: tuple[str, str]) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{keys[0]: "a", keys[1]: "b", "label": True}])
    data = read_plain(path, "train")
    assert data.inputs[0] == ("a", "b")
    assert data.classes == ("1",)


def test_text_targets(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "target": "yes"}, {"text": "b", "target": "no"}])
    data = read_plain(path, "train")
    assert (data.labels, data.classes) == (None, ())
    assert data.targets is not None
    assert list(data.targets) == ["yes", "no"]


@pytest.mark.parametrize("found", ["all", None])
def test_table_whose_split_is_all_serves_both(tmp_path: Path, found: str | None) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "label": 0, "split": found}] * 3)
    assert [len(read_plain(path, "train")), len(read_plain(path, "test"))] == [3, 3]


def test_table_of_image_paths(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"deep": 2})
    rows = [{"image": f"deep/{i}.png", "label": label} for i, label in enumerate(["dog", "cat"])]
    for name in TABLES:
        data = read_plain(write_table(root / name, rows), "train")
        assert (data.kind, data.classes) == ("image", ("cat", "dog"))
        assert data.inputs[1].getpixel((0, 0)) == (11, 11, 11)
    jsonl(root / "t.jsonl", [*rows, {"image": "deep/7.png", "label": "cat"}])
    with raises("1 of 3 images of", "do not exist: deep/7.png. Paths are relative to"):
        read_plain(root / "t.jsonl", "train")


def test_parquet_from_the_hub_holds_images_and_class_names(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    picture(9).save(tmp_path / "there.png")
    images = [
        {"bytes": png(7), "path": "a.png"},
        {"bytes": None, "path": "there.png"},
        {"bytes": b"x", "path": None},
    ]
    table = pa.table({"image": [*images, None], "label": [1, 0, 0, 1]})
    notes = {"info": {"features": {"label": {"names": ["zebra", "ant"], "_type": "ClassLabel"}}}}
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(notes)}), tmp_path / "t.parquet")
    data = read_plain(tmp_path / "t.parquet", "train")
    assert data.classes == ("zebra", "ant")
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0, 0, 1]
    assert [data.inputs[i].getpixel((0, 0))[0] for i in (0, 1)] == [7, 9]
    with raises("cannot read image in row 3 of", "t.parquet: not in a format Pillow knows"):
        data.inputs[2]
    with raises("cannot read image in row 4 of", "expected its bytes or its path, got NoneType"):
        data.inputs[3]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["is empty: it has no rows."]),
        ("{", ["line 1 of", "is not JSON: "]),
        ('{"text": "a", "label": 0}\n\n[1]', ["line 3 of", "is a JSON list; expected an object."]),
        ('{"sentence": "a", "label": 0}', ["has columns sentence, label; expected image, or text"]),
        (
            '{"text1": "a", "label": 0}',
            [
                "has columns text1, label; expected",
                "text1 and text2, or prompt, or tokens (a list of words); and label or target.",
            ],
        ),
        ('{"text": "a"}', ["has no labels; expected a column label or target."]),
        ('{"text": "a", "label": null}', ["has no labels: the column label is empty"]),
        ('{"text": "a", "label": -1}', ["has no labels"]),
        (
            '{"text": "a", "label": 0}\n{"text": "b"}',
            ["1 of 2 rows of", "have no label, the first is row 2.", "give a column that names no classes"],
        ),
        (
            '{"text": "a", "label": 0.5}',
            ["label of row 1 of", "is 0.5; expected a class name or a number from 0."],
        ),
        ('{"text": "a", "label": Infinity}', ["is inf; expected a class name"]),
        ('{"text": "a", "label": -3}', ["is -3; expected a class name"]),
        ('{"text": "a", "label": [1]}', ["is [1]; expected a class name"]),
        ('{"text": 3, "label": 1}', ["text of row 1 of", "is int; expected text."]),
        ('{"text": "a", "target": 1}', ["target of row 1 of", "is int; expected text."]),
        (
            '{"text": "a", "label": 1, "split": "dev"}',
            ["has no train split; found: dev. Add one named train"],
        ),
    ],
)
def test_jsonl_errors(tmp_path: Path, content: str, parts: list[str]) -> None:
    (tmp_path / "t.jsonl").write_text(content)
    with raises(*parts):
        read_plain(tmp_path / "t.jsonl", "train")


def test_hidden_test_labels_do_not_affect_the_training_split(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "label": label, "split": split} for label, split in ((0, "train"), (1, "train"), (-1, "test"))
    ]
    path = jsonl(tmp_path / "t.jsonl", rows)
    assert read_plain(path, "train").classes == ("0", "1")
    with raises("has no labels"):
        read_plain(path, "test")
    assert read_plain(path, "test", labelled=False).labels is None


@pytest.mark.parametrize("labels", [[0.5, 1.0], [-2, 3], [[0, 1], [1, 1]], [["wet"], []]])
def test_labels_that_name_no_class_are_left_where_none_are_needed(tmp_path: Path, labels: list[Any]) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "label": label} for label in labels])
    with raises("label of row 1 of", "expected a class name or a number from 0."):
        read_plain(path, "train")
    found = read_plain(path, "train", labelled=False)
    assert (found.labels, found.classes, len(found)) == (None, (), 2)


def test_other_broken_tables(tmp_path: Path) -> None:
    for name, content, parts in (
        ("a.csv", b"text,label\na\n", ["line 2 of", "a.csv has 1 fields; expected 2 as in its header."]),
        ("b.csv", b'text,label\n"a"b,1\n', ["line 2 of", "b.csv is malformed: "]),
        ("c.csv", b"text,label\n", ["c.csv is empty: it has no rows."]),
        ("h.csv", b'text,label\n"",a\n" ",b\n', ["text of", "h.csv is empty in all of 2 rows; expected text."]),
        ("d.jsonl.gz", b"hello", ["cannot read", "d.jsonl.gz: Not a gzipped file"]),
        ("e.jsonl.gz", gzip.compress(b"{}" * 999)[:-9], ["cannot read", "e.jsonl.gz: "]),
        ("f.jsonl", b'{"text": "\xff"}', ["cannot read", "f.jsonl: 'utf-8' codec"]),
        ("g.parquet", b"PAR1 but no more", ["cannot read", "g.parquet: "]),
    ):
        (tmp_path / name).write_bytes(content)
        with raises(*parts):
            read_plain(tmp_path / name, "train")


def test_empty_targets_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("text,label,target\nhello,0,\nworld,1, \n")
    found = read_plain(path, "train")
    assert found.targets is None
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1]


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "dataset_info.json").write_text("{}")
    with raises("cannot read", "datasets"):
        read_plain(tmp_path, "train")


READ_FROM_HOME = """
import os, sys, tempfile
assert "datasets" not in sys.modules  # it looks for its folders when it is imported
_, home, saved = sys.argv
os.environ.update(dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR"), home))
tempfile.tempdir = None
from tuneport.data import read_data
assert len(read_data(saved, "train")) == 1
"""


def test_reading_a_saved_dataset_writes_no_cache(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"], "label": [0]}).save_to_disk(tmp_path / "set")
    home = tmp_path / "home"
    home.mkdir()
    done = run_program(READ_FROM_HOME, str(home), str(tmp_path / "set"))
    assert done.code == 0, done.err
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_saved_hf_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "ay"])})
    train = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=kinds)
    test = datasets.Dataset.from_dict({"text": ["c"], "label": [1]}, features=kinds)
    datasets.DatasetDict({"train": train, "validation": test}).save_to_disk(tmp_path / "both")
    data = read_plain(tmp_path / "both", "train")
    assert (list(data.inputs), data.classes, data.origin.split, data.name) == (
        ["a", "b"],
        ("no", "ay"),
        "train",
        "both",
    )
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0]
    held_out = read_plain(tmp_path / "both", "test")
    assert (list(held_out.inputs), held_out.origin.split) == (["c"], "validation")

    train.remove_columns("label").save_to_disk(tmp_path / "bare")
    with raises("has no labels; expected a column label or target."):
        read_plain(tmp_path / "bare", "train")
    (tmp_path / "bare" / "state.json").write_text("{}")
    with raises("cannot read", "bare: "):
        read_plain(tmp_path / "bare", "train")


def test_saved_hf_images_are_decoded_on_access(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "image": [{"bytes": png(5), "path": None}, {"bytes": b"broken", "path": None}],
        "label": ["x", "y"],
    }
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "set")
    data = read_plain(tmp_path / "set", "test")
    assert (data.kind, data.classes, data.origin.split) == ("image", ("x", "y"), "all")
    assert data.inputs[0].getpixel((0, 0)) == (5, 5, 5)
    with raises("cannot read image in row 2 of"):
        data.inputs[1]
