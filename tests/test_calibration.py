"""Reading data in every format, and choosing calibration samples from them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tuneport import data as data_module
from tuneport.calibration import SAMPLERS, UNLABELLED, batches, select
from tuneport.data import Dataset, align_labels, read_data
from tuneport.errors import DataError


def raises(*parts: str) -> Any:
    """Expect a DataError of one line that holds every part, in order."""
    pattern = ".*".join(re.escape(part) for part in parts)
    return pytest.raises(DataError, match=f"^[^\n]*{pattern}[^\n]*$")


def picture(value: int, size: int = 4, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (size, size), (value,) * len(mode) if len(mode) > 1 else value)


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


def image_folder(root: Path, counts: dict[str, int], value: int = 10) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            picture(value + index).save(root / name / f"{index}.png")
    return root


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def labelled(labels: list[int] | np.ndarray, **fields: Any) -> Dataset:
    codes = np.asarray(labels, dtype=np.int64)
    names = tuple(f"class{i}" for i in range(int(codes.max()) + 1))
    return Dataset(**{"inputs": list(range(len(codes))), "labels": codes, "classes": names, **fields})


def test_subset_is_a_lazy_view_of_a_view() -> None:
    loaded: list[int] = []
    inputs = data_module.Lazy(np.arange(10), lambda index: loaded.append(index) or index * 10)  # type: ignore[func-returns-value]
    data = Dataset(inputs, np.arange(10), tuple("abcdefghij"), targets=list("ABCDEFGHIJ"))
    part = data.subset([9, 3, 5]).subset(torch.tensor([2, 0]))
    assert loaded == []
    assert list(part.inputs) == [50, 90]
    assert loaded == [5, 9]
    assert part.labels is not None
    assert part.targets is not None
    assert part.labels.tolist() == [5, 9]
    assert list(part.targets) == ["F", "J"]
    assert list(data.inputs[2:4]) == [20, 30]
    assert data.inputs[-1] == 90
    assert len(data.subset([])) == 0
    assert len(data.subset(np.arange(10) > 6)) == 3
    with pytest.raises(IndexError):
        data.subset([10])


def test_image_data_can_be_pickled_for_worker_processes(tmp_path: Path) -> None:
    data = read_data(image_folder(tmp_path / "pets", {"cat": 2, "dog": 1}), "train").subset([2, 0])
    copy = pickle.loads(pickle.dumps(data))
    assert copy.inputs[0].size == (4, 4)


def test_folder_without_splits_serves_both(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "pets", {"dog": 2, "cat": 3, ".hidden": 1})
    (root / "cat" / "notes.txt").write_text("not an image")
    (root / "empty").mkdir()
    for split in ("train", "test"):
        data = read_data(root, split)  # type: ignore[arg-type]
        assert (data.classes, data.split, data.kind, data.name) == (("cat", "dog"), "all", "image", "pets")
        assert data.labels is not None
        assert data.labels.tolist() == [0, 0, 0, 1, 1]
        assert data.labels.dtype == np.int64
    first = data.inputs[1]
    assert (first.mode, first.getpixel((0, 0))) == ("RGB", (11, 11, 11))


@pytest.mark.parametrize("held_out", ["test", "val", "validation", "dev"])
def test_folder_splits_agree_on_classes(tmp_path: Path, held_out: str) -> None:
    image_folder(tmp_path / "train", {"b": 2, "c": 1})
    image_folder(tmp_path / held_out, {"a": 1, "c": 2}, value=50)
    train, test = read_data(tmp_path, "train"), read_data(tmp_path, "test")
    assert train.classes == test.classes == ("a", "b", "c")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == [1, 1, 2]
    assert test.labels.tolist() == [0, 2, 2]
    assert (train.split, test.split) == ("train", held_out)


def test_folder_prefers_test_to_validation(tmp_path: Path) -> None:
    for split, count in (("train", 1), ("val", 2), ("test", 3)):
        image_folder(tmp_path / split, {"a": count})
    assert len(read_data(tmp_path, "test")) == 3


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    image_folder(tmp_path, {"car": 1, "train": 2})
    data = read_data(tmp_path, "train")
    assert (data.classes, len(data)) == (("car", "train"), 3)


def test_folder_images_are_opened_only_on_access(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "pets", {"cat": 1})
    (root / "cat" / "broken.jpg").write_bytes(b"not a jpeg")
    (root / "cat" / "cut.png").write_bytes(png(3)[:-30])
    data = read_data(root, "train")
    assert len(data) == 3
    with raises("cannot read image", "broken.jpg", "not in a format Pillow knows"):
        data.inputs[1]
    with raises("cannot read image", "cut.png"):
        data.inputs[2]


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "bmp", "gif", "webp", "tif", "PNG"])
def test_every_image_suffix(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "cat").mkdir()
    picture(100).save(tmp_path / "cat" / f"one.{suffix}")
    image = read_data(tmp_path, "train").inputs[0]
    assert (image.mode, image.size) == ("RGB", (4, 4))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "1", "LA", "CMYK"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    (tmp_path / "cat").mkdir()
    picture(255, mode="RGB").convert(mode).save(tmp_path / "cat" / ("x.jpg" if mode == "CMYK" else "x.png"))
    image = read_data(tmp_path, "train").inputs[0]
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_sixteen_bit_images_are_scaled_and_float_images_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    Image.fromarray(np.full((2, 2), 32768, dtype=np.uint16)).save(tmp_path / "cat" / "a.png")
    Image.fromarray(np.full((2, 2), 0.5, dtype=np.float32)).save(tmp_path / "cat" / "b.tif")
    data = read_data(tmp_path, "train")
    assert data.inputs[0].getpixel((0, 0)) == (128, 128, 128)
    with raises("b.tif", "pixels are floats"):
        data.inputs[1]


def test_decompression_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read_data(image_folder(tmp_path / "pets", {"cat": 1}), "train")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with raises("0.png is too large to open safely", "Resize it."):
        data.inputs[0]


def test_folder_errors(tmp_path: Path) -> None:
    with raises("no data at", "nowhere", "no such file or folder. Pass an image folder"):
        read_data(tmp_path / "nowhere", "train")
    with raises("has no images; expected a sub-folder per class"):
        read_data(tmp_path, "train")
    image_folder(tmp_path / "a" / "train", {"cat": 1})
    with raises("has no test split; found: train.", "Add one named test or dev or validation"):
        read_data(tmp_path / "a", "test")
    (tmp_path / "a" / "test" / "cat").mkdir(parents=True)
    with raises("has no images in its test split"):
        read_data(tmp_path / "a", "test")
    (tmp_path / "model.bin").write_bytes(b"")
    with raises("cannot tell what data", "model.bin"):
        read_data(tmp_path / "model.bin", "train")
    with raises("unknown split 'tests'. Did you mean 'test'? Known: test, train."):
        read_data(tmp_path, "tests")  # type: ignore[arg-type]


def test_flat_folder_is_unlabelled(tmp_path: Path) -> None:
    picture(1).save(tmp_path / "x.png")
    with raises("has no labels; expected one sub-folder of images per class."):
        read_data(tmp_path, "train")
    data = read_data(tmp_path, "train", labelled=False)
    assert (data.labels, data.classes, len(data)) == (None, (), 1)


def test_npz_with_splits(tmp_path: Path) -> None:
    x = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    np.savez(
        tmp_path / "toy.npz",
        x_train=x, y_train=np.array([1, 0], dtype=np.uint8),
        x_test=x[:1], y_test=np.array([[2]]),
        classes=np.array(["a", "b", "c"]),
    )  # fmt: skip
    train, test = read_data(tmp_path / "toy.npz", "train"), read_data(tmp_path / "toy.npz", "test")
    assert (train.name, train.split, test.split, train.classes) == ("toy", "train", "test", ("a", "b", "c"))
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0], [2])
    assert np.array_equal(np.asarray(train.inputs[1]), x[1])


@pytest.mark.parametrize(
    ("shape", "channel"),
    [((5, 6, 7), None), ((5, 6, 7, 1), -1), ((5, 6, 7, 3), -1), ((5, 3, 6, 7), 1), ((5, 1, 6, 7), 1)],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float16])
def test_npz_shapes_and_types(tmp_path: Path, shape: tuple[int, ...], channel: int | None, dtype: Any) -> None:
    whole = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    x = whole if dtype is np.uint8 else (whole / 255).astype(dtype)
    np.savez(tmp_path / "toy.npz", x=x, y=np.arange(5))
    data = read_data(tmp_path / "toy.npz", "test")
    assert (data.split, data.classes) == ("all", ("0", "1", "2", "3", "4"))
    expected = whole[2] if channel is None else np.moveaxis(whole[2], channel if channel < 0 else 0, -1)
    if expected.ndim == 2:
        expected = expected[..., None]
    got = np.asarray(data.inputs[2])
    assert got.shape == (6, 7, 3)
    assert np.array_equal(got, np.broadcast_to(expected, got.shape))


def test_npz_without_names_counts_classes_over_all_splits(tmp_path: Path) -> None:
    x = np.zeros((2, 3, 3), dtype=np.uint8)
    np.savez(tmp_path / "t.npz", x_train=x, y_train=np.array([0, 1]), x_val=x, y_val=np.array([0, 3]))
    assert read_data(tmp_path / "t.npz", "train").classes == ("0", "1", "2", "3")
    assert read_data(tmp_path / "t.npz", "test").split == "val"


X = np.zeros((3, 4, 4), dtype=np.uint8)
Y = np.array([0, 1, 1])
ACCEPTED = "expected uint8, or floats from 0 to 1, of shape (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W)"


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"x": X, "y": Y[:2]}, ["has 3 images in x but 2 labels in y."]),
        ({"x": X, "y": Y[:0]}, ["has 3 images in x but 0 labels in y."]),
        (
            {"x": X, "y": Y + 1, "classes": np.array(["a", "b"])},
            ["has labels 2; expected 0 to 1 for its 2 classes"],
        ),
        ({"x": X, "y": Y - 1}, ["y of", "has labels -1; expected 0 to 0"]),
        (
            {"x": X, "y": Y.astype(float)},
            ["y of", "is float64 of shape (3,); expected integers of shape (N,)."],
        ),
        ({"x": X[:0], "y": Y[:0]}, ["x of", "is empty: uint8 of shape (0, 4, 4)."]),
        ({"x": X[0], "y": Y}, ["x of", "is uint8 of shape (4, 4);", ACCEPTED]),
        ({"x": np.zeros((3, 4, 4, 2), np.uint8), "y": Y}, ["uint8 of shape (3, 4, 4, 2)", ACCEPTED]),
        ({"x": X.astype(np.int64), "y": Y}, ["x of", "is int64 of shape (3, 4, 4);", ACCEPTED]),
        ({"x": X - 1.5, "y": Y}, ["float64 with values from -1.5 to -1.5;", ACCEPTED]),
        ({"x": X + np.nan, "y": Y}, ["float64 with values from nan to nan;", ACCEPTED]),
        ({"x": X}, ["has no labels; expected an array y, or y_train and y_test, beside the images."]),
        ({"pixels": X, "y": Y}, ["has arrays pixels, y; expected x_train, y_train, x_test, y_test, or x, y"]),
        ({"x_test": X, "y_test": Y}, ["has no train split; found: test."]),
        (
            {"x": X, "y": Y, "classes": np.array([{}], dtype=object)},
            ["holds pickled objects; save plain arrays."],
        ),
    ],
)
def test_npz_errors(tmp_path: Path, arrays: dict[str, Any], parts: list[str]) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    with raises(*parts):
        read_data(tmp_path / "t.npz", "train")


def test_npz_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, x=X, y=Y)
    for content in (b"", b"hello", path.read_bytes()[:-40], pickle.dumps({"x": X})):
        path.write_bytes(content)
        with raises("cannot read", "t.npz"):
            read_data(path, "train")
    with path.open("wb") as file:
        np.save(file, X)
    with raises("cannot read", "t.npz"):
        read_data(path, "train")


def test_unlabelled_npz_on_request(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=X)
    assert read_data(tmp_path / "t.npz", "train", labelled=False).labels is None


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
    train, test = read_data(path, "train"), read_data(path, "test")
    assert train.classes == test.classes == ("neg", "pos", "unsure")
    assert (train.name, train.kind, train.split, test.split) == ("t", "text", "train", "test")
    assert list(train.inputs) == ["good, really", 'so "bad"']
    assert list(test.inputs) == ["größer"]
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0], [2])


@pytest.mark.parametrize("name", TABLES)
def test_number_labels_sort_as_numbers(tmp_path: Path, name: str) -> None:
    path = write_table(tmp_path / name, [{"text": "a", "label": label} for label in (10, 2, 0, 2)])
    data = read_data(path, "train")
    assert (data.classes, data.split) == (("0", "2", "10"), "all")
    assert data.labels is not None
    assert data.labels.tolist() == [2, 1, 0, 1]


@pytest.mark.parametrize("keys", [("text", "text_pair"), ("text1", "text2")])
def test_text_pairs(tmp_path: Path, keys: tuple[str, str]) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{keys[0]: "a", keys[1]: "b", "label": True}])
    data = read_data(path, "train")
    assert data.inputs[0] == ("a", "b")
    assert data.classes == ("1",)


def test_text_targets(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "target": "yes"}, {"text": "b", "target": "no"}])
    data = read_data(path, "train")
    assert (data.labels, data.classes, data.targets) == (None, (), ["yes", "no"])


@pytest.mark.parametrize("found", ["all", None])
def test_a_table_whose_split_is_all_serves_both(tmp_path: Path, found: str | None) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "label": 0, "split": found}] * 3)
    assert [len(read_data(path, "train")), len(read_data(path, "test"))] == [3, 3]


def test_table_of_image_paths(tmp_path: Path) -> None:
    root = image_folder(tmp_path, {"deep": 2})
    rows = [{"image": f"deep/{i}.png", "label": label} for i, label in enumerate(["dog", "cat"])]
    for name in TABLES:
        data = read_data(write_table(root / name, rows), "train")
        assert (data.kind, data.classes) == ("image", ("cat", "dog"))
        assert data.inputs[1].getpixel((0, 0)) == (11, 11, 11)
    jsonl(root / "t.jsonl", [*rows, {"image": "deep/7.png", "label": "cat"}])
    with raises("1 of 3 images of", "are not there: deep/7.png. Paths are relative to"):
        read_data(root / "t.jsonl", "train")


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
    data = read_data(tmp_path / "t.parquet", "train")
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
            ["has columns text1, label; expected", "text1 and text2, or prompt; and label or target."],
        ),
        ('{"text": "a"}', ["has no labels; expected a column label or target."]),
        ('{"text": "a", "label": null}', ["has no labels; expected a column label or target."]),
        ('{"text": "a", "label": -1}', ["has no labels"]),
        (
            '{"text": "a", "label": 0}\n{"text": "b"}',
            ["1 of 2 rows of", "have no label, the first is row 2."],
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
        read_data(tmp_path / "t.jsonl", "train")


def test_hidden_test_labels_do_not_trouble_training_data(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "label": label, "split": split} for label, split in ((0, "train"), (1, "train"), (-1, "test"))
    ]
    path = jsonl(tmp_path / "t.jsonl", rows)
    assert read_data(path, "train").classes == ("0", "1")
    with raises("has no labels"):
        read_data(path, "test")
    assert read_data(path, "test", labelled=False).labels is None


def test_other_broken_tables(tmp_path: Path) -> None:
    for name, content, parts in (
        ("a.csv", b"text,label\na\n", ["line 2 of", "a.csv has 1 fields; expected 2 as in its header."]),
        ("b.csv", b'text,label\n"a"b,1\n', ["line 2 of", "b.csv is malformed: "]),
        ("c.csv", b"text,label\n", ["c.csv is empty: it has no rows."]),
        ("d.jsonl.gz", b"hello", ["cannot read", "d.jsonl.gz: Not a gzipped file"]),
        ("e.jsonl.gz", gzip.compress(b"{}" * 999)[:-9], ["cannot read", "e.jsonl.gz: "]),
        ("f.jsonl", b'{"text": "\xff"}', ["cannot read", "f.jsonl: 'utf-8' codec"]),
        ("g.parquet", b"PAR1 but no more", ["cannot read", "g.parquet: "]),
    ):
        (tmp_path / name).write_bytes(content)
        with raises(*parts):
            read_data(tmp_path / name, "train")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "t.parquet").write_bytes(b"")
    with raises("needs pyarrow, which is not installed. Run: pip install tuneport[data]"):
        read_data(tmp_path / "t.parquet", "train")
    (tmp_path / "dataset_info.json").write_text("{}")
    with raises("needs datasets, which is not installed. Run: pip install tuneport[data]"):
        read_data(tmp_path, "train")


def test_saved_hf_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "ay"])})
    train = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=kinds)
    test = datasets.Dataset.from_dict({"text": ["c"], "label": [1]}, features=kinds)
    datasets.DatasetDict({"train": train, "validation": test}).save_to_disk(tmp_path / "both")
    data = read_data(tmp_path / "both", "train")
    assert (list(data.inputs), data.classes, data.split, data.name) == (
        ["a", "b"],
        ("no", "ay"),
        "train",
        "both",
    )
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0]
    held_out = read_data(tmp_path / "both", "test")
    assert (list(held_out.inputs), held_out.split) == (["c"], "validation")

    train.remove_columns("label").save_to_disk(tmp_path / "bare")
    with raises("has no labels; expected a column label or target."):
        read_data(tmp_path / "bare", "train")
    (tmp_path / "bare" / "state.json").write_text("{}")
    with raises("cannot read", "bare: "):
        read_data(tmp_path / "bare", "train")


def test_saved_hf_images_are_decoded_on_access(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "image": [{"bytes": png(5), "path": None}, {"bytes": b"broken", "path": None}],
        "label": ["x", "y"],
    }
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "set")
    data = read_data(tmp_path / "set", "test")
    assert (data.kind, data.classes, data.split) == ("image", ("x", "y"), "all")
    assert data.inputs[0].getpixel((0, 0)) == (5, 5, 5)
    with raises("cannot read image in row 2 of"):
        data.inputs[1]


def named(*classes: str) -> Dataset:
    return Dataset(list(classes), np.arange(len(classes)), classes, name="pets", split="test")


@pytest.mark.parametrize(
    ("classes", "head", "expected"),
    [
        (("a", "b"), ("a", "b"), [0, 1]),
        (("a", "b", "c"), ("c", "a", "b"), [1, 2, 0]),
        (("a", "b"), ("z", "b", "y", "a"), [3, 1]),
        (("0", "1", "2"), ("cat", "dog", "eel", "fox"), [0, 1, 2]),
        (("0", "1", "10", "2"), tuple("abcdefghijk"), [0, 1, 10, 2]),
        (("00", "02"), ("cat", "dog", "eel"), [0, 2]),
        (("0", "1"), ("1", "0"), [1, 0]),
        (("0", "1"), ("LABEL_0", "LABEL_1"), [0, 1]),
    ],
)
def test_align_labels(classes: tuple[str, ...], head: tuple[str, ...], expected: list[int]) -> None:
    data = align_labels(named(*classes), list(head))
    assert data.labels is not None
    assert data.labels.tolist() == expected
    assert data.classes == head
    assert data.labels.dtype == np.int64


@pytest.mark.parametrize(
    ("classes", "head", "parts"),
    [
        (
            ("a", "x", "y"),
            ("a", "b"),
            ["2 of 3 classes of pets are unknown to the head: x, y. The head has 2: a, b."],
        ),
        (("0", "1", "2"), ("a", "b"), ["3 of 3 classes of pets are unknown to the head: 0, 1, 2."]),
        (("0", "00"), ("a", "b"), ["unknown to the head: 0, 00."]),
        (("crane", "b"), ("crane", "b", "crane"), ["more than one class is called crane"]),
    ],
)
def test_align_errors(classes: tuple[str, ...], head: tuple[str, ...], parts: list[str]) -> None:
    with raises(*parts):
        align_labels(named(*classes), head)


def test_align_needs_labels() -> None:
    with raises("test split of pets has no labels; expected labels among the head's 2 classes."):
        align_labels(Dataset(["a"], None, (), name="pets", split="test"), ["a", "b"])


LABELS = st.lists(st.integers(0, 4), min_size=2, max_size=40)


def points(data: Dataset) -> torch.Tensor:
    return torch.randn(len(data), 3, generator=torch.Generator().manual_seed(7))


def draw(data: Dataset, sampler: str, **options: Any) -> list[int]:
    return list(select(data, sampler=sampler, features=points, **options).tolist())


def class_counts(data: Dataset, indices: list[int]) -> list[int]:
    assert data.labels is not None
    present = np.unique(data.labels)
    return [int((data.labels[indices] == label).sum()) for label in present]


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_sampler_contract(sampler: str) -> None:
    data = labelled(np.arange(200) % 4)
    state = torch.get_rng_state()
    first = draw(data, sampler, samples=20, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert draw(data, sampler, samples=20, seed=3) == first
    assert len(set(first)) == 20
    assert draw(data, sampler, samples=40, seed=3)[:20] == first
    assert any(draw(data, sampler, samples=20, seed=seed) != first for seed in (4, 5, 6))
    assert SAMPLERS[sampler].description
    assert "\n" not in SAMPLERS[sampler].description


@given(labels=LABELS, seed=st.integers(0, 1000), ends=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("sampler", ["random", "class_balanced", "centroid_near", "centroid_far"])
def test_small_draws_begin_larger_ones(sampler: str, labels: list[int], seed: int, ends: st.DataObject) -> None:
    data = labelled(labels)
    many = ends.draw(st.integers(1, len(labels)))
    few = ends.draw(st.integers(1, many))
    larger = draw(data, sampler, samples=many, seed=seed)
    assert larger[:few] == draw(data, sampler, samples=few, seed=seed)
    assert len(set(larger)) == many


@given(labels=LABELS, seed=st.integers(0, 1000), ends=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("sampler", ["class_balanced", "centroid_near", "centroid_far"])
def test_balanced_samplers_go_round(sampler: str, labels: list[int], seed: int, ends: st.DataObject) -> None:
    data = labelled(labels)
    count = ends.draw(st.integers(1, len(labels)))
    counts = class_counts(data, draw(data, sampler, samples=count, seed=seed))
    sizes = class_counts(data, list(range(len(data))))
    open_classes = [got for got, size in zip(counts, sizes, strict=True) if got < size]
    # Whoever has samples left is at most one turn behind whoever is ahead.
    assert all(got >= max(counts) - 1 for got in open_classes)


@pytest.mark.parametrize(("sampler", "reverse"), [("centroid_near", False), ("centroid_far", True)])
def test_centroid_samplers_by_brute_force(sampler: str, reverse: bool) -> None:
    rng = np.random.default_rng(1)
    data = labelled(rng.integers(0, 3, 60))
    assert data.labels is not None
    space = points(data).double().numpy()
    chosen = draw(data, sampler, samples=12)
    for label in range(3):
        members = [i for i in range(60) if data.labels[i] == label]
        centre = np.mean([space[i] for i in members], axis=0)
        ranked = sorted(members, key=lambda i: float(np.linalg.norm(space[i] - centre)), reverse=reverse)
        assert [i for i in chosen if data.labels[i] == label] == ranked[:4]


def test_random_covers_all_samples_evenly() -> None:
    data = labelled([0] * 5 + [1] * 5)
    hits = np.bincount([i for seed in range(500) for i in draw(data, "random", samples=2, seed=seed)], minlength=10)
    assert hits.min() > 60  # 100 expected, standard deviation 9
    assert hits.max() < 140


@pytest.mark.parametrize(("classes", "half"), [(1, 1), (2, 1), (5, 2), (6, 3)])
def test_half_class(classes: int, half: int) -> None:
    data = labelled(np.arange(120) % classes)
    seen = set()
    for seed in range(10):
        counts = class_counts(data, draw(data, "half_class", samples=20, seed=seed))
        assert sum(count > 0 for count in counts) == half
        seen.add(tuple(count > 0 for count in counts))
    assert len(seen) > 1 or classes == 1


def test_half_class_too_small() -> None:
    with raises("asked for 5 samples, but the 1 of 3 classes drawn by half_class have 3; lower --samples."):
        draw(labelled([0, 1, 2] * 3), "half_class", samples=5)


def test_single_class() -> None:
    data = labelled([0] * 3 + [1] * 30 + [2] * 30)
    assert data.labels is not None
    seen = {tuple(sorted(set(data.labels[draw(data, "single_class", samples=9, seed=s)].tolist()))) for s in range(12)}
    assert seen == {(1,), (2,)}
    small = {int(data.labels[draw(data, "single_class", samples=2, seed=s)][0]) for s in range(20)}
    assert small == {0, 1, 2}
    with raises("asked for 31 samples of one class, but the largest class has 30; lower --samples."):
        draw(data, "single_class", samples=31)


def test_draw_checks_its_request() -> None:
    labels, generator = torch.tensor([0, 1, 1]), torch.Generator()
    with raises("asked for 4 of 3 samples; expected 1 to 3."):
        SAMPLERS["random"].draw(labels, 4, generator)
    with raises("needs features of the pre-trained model; none were given."):
        SAMPLERS["centroid_far"].draw(labels, 1, generator)
    for features in (torch.zeros(2, 5), torch.zeros(3), torch.full((3, 2), torch.nan)):
        with raises(f"features of shape {tuple(features.shape)} for 3 samples; expected (3, width), all finite."):
            SAMPLERS["centroid_near"].draw(labels, 1, generator, features)


def test_select_takes_a_hundred_unless_told() -> None:
    assert len(select(labelled(np.arange(150) % 3))) == 100


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=20), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("sampler", ["random", "class_balanced", "centroid_near", "centroid_far"])
def test_shots_are_equal_and_nested(sampler: str, labels: list[int], seed: int) -> None:
    data = labelled(labels * 3)
    previous: list[int] = []
    for shots in (1, 2, 3):
        chosen = draw(data, sampler, shots=shots, seed=seed)
        assert set(class_counts(data, chosen)) == {shots}
        assert chosen[: len(previous)] == previous
        previous = chosen


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"samples": 5000}, ["asked for 5000 samples but train split of pets has 6; lower --samples."]),
        ({}, ["asked for 100 samples but train split of pets has 6; lower --samples."]),
        ({"samples": 0}, ["asked for 0 samples; expected at least 1 in --samples."]),
        ({"samples": -1}, ["asked for -1 samples"]),
        ({"shots": 0}, ["asked for 0 shots; expected at least 1 in --shots."]),
        (
            {"shots": 2},
            ["asked for 2 shots but 1 of 3 classes of train split of pets have fewer: class2 (1); lower"],
        ),
        (
            {"samples": 2, "shots": 2},
            ["asked for 2 samples and for 2 shots; pass --samples or --shots, not both."],
        ),
        ({"sampler": "randon"}, ["unknown sampler 'randon'. Did you mean 'random'? Known: centroid_far, "]),
        (
            {"samples": 2, "sampler": "centroid_far"},
            ["sampler 'centroid_far' needs features of the pre-trained model."],
        ),
        (
            {"shots": 1, "sampler": "half_class"},
            ["--shots takes", "'half_class' does not. Use random, class_balanced"],
        ),
    ],
)
def test_select_errors(options: dict[str, Any], parts: list[str]) -> None:
    data = labelled([0, 0, 0, 1, 1, 2], name="pets", split="train")
    with raises(*parts):
        select(data, **options)


def test_select_from_unlabelled_data() -> None:
    data = Dataset(list("abc"), None, (), name="raw")
    assert sorted(select(data, samples=3).tolist()) == [0, 1, 2]
    with raises("raw has no labels; expected a label per sample for sampler 'class_balanced'. Use --samples"):
        select(data, samples=2, sampler="class_balanced")
    with raises("raw has no labels; expected a label per sample for --shots."):
        select(data, shots=1)


def test_features_are_asked_for_only_when_needed() -> None:
    def refuse(data: Dataset) -> torch.Tensor:
        raise AssertionError(data)

    select(labelled([0, 1]), samples=1, features=refuse)


def test_batches() -> None:
    data = Dataset(list("abcde"), np.array([0, 1, 2, 1, 0]), ("x", "y", "z"))
    got = list(batches(data, np.array([4, 2, 0]), 2))
    assert [inputs for inputs, _ in got] == [["e", "c"], ["a"]]
    assert [labels.tolist() for _, labels in got] == [[0, 2], [0]]
    assert got[0][1].dtype == torch.int64


def test_batches_of_unlabelled_data() -> None:
    ((inputs, labels),) = batches(Dataset(list("ab"), None, ()), [1, 0], 8)
    assert (inputs, labels.tolist()) == (["b", "a"], [UNLABELLED, UNLABELLED])


def test_batches_check_before_they_start() -> None:
    with raises("asked for batches of 0; expected at least 1."):
        batches(labelled([0, 1]), [0], 0)
