"""Reading data: class folders and .npz archives, their splits, and every error text."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.samples import image_folder, picture, png, raises
from tuneport.data import formats, npz
from tuneport.data.dataset import Table
from tuneport.data.formats import read_plain
from tuneport.data.tasks import read_data, split_reference
from tuneport.errors import DataError


def test_image_data_can_be_pickled_for_worker_processes(tmp_path: Path) -> None:
    data = read_plain(image_folder(tmp_path / "pets", {"cat": 2, "dog": 1}), "train").subset([2, 0])
    copy = pickle.loads(pickle.dumps(data))
    assert copy.inputs[0].size == (4, 4)


def test_folder_without_splits_serves_both(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "pets", {"dog": 2, "cat": 3, ".hidden": 1})
    (root / "cat" / "notes.txt").write_text("not an image")
    (root / "empty").mkdir()
    for split in ("train", "test"):
        data = read_plain(root, split)  # type: ignore[arg-type]
        assert (data.classes, data.origin.split, data.kind, data.name) == (("cat", "dog"), "all", "image", "pets")
        assert data.labels is not None
        assert data.labels.tolist() == [0, 0, 0, 1, 1]
        assert data.labels.dtype == np.int64
    first = data.inputs[1]
    assert (first.mode, first.getpixel((0, 0))) == ("RGB", (11, 11, 11))


@pytest.mark.parametrize("held_out", ["test", "val", "validation", "dev"])
def test_folder_splits_agree_on_classes(tmp_path: Path, held_out: str) -> None:
    image_folder(tmp_path / "train", {"b": 2, "c": 1})
    image_folder(tmp_path / held_out, {"a": 1, "c": 2}, value=50)
    train, test = read_plain(tmp_path, "train"), read_plain(tmp_path, "test")
    assert train.classes == test.classes == ("a", "b", "c")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == [1, 1, 2]
    assert test.labels.tolist() == [0, 2, 2]
    assert (train.origin.split, test.origin.split) == ("train", held_out)


def test_folder_prefers_test_to_validation(tmp_path: Path) -> None:
    for split, count in (("train", 1), ("val", 2), ("test", 3)):
        image_folder(tmp_path / split, {"a": count})
    assert len(read_plain(tmp_path, "test")) == 3


def test_class_called_train(tmp_path: Path) -> None:
    image_folder(tmp_path, {"car": 1, "train": 2})
    data = read_plain(tmp_path, "train")
    assert (data.classes, len(data)) == (("car", "train"), 3)


def test_folder_images_are_opened_only_on_access(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "pets", {"cat": 1})
    (root / "cat" / "broken.jpg").write_bytes(b"not a jpeg")
    (root / "cat" / "cut.png").write_bytes(png(3)[:-30])
    data = read_plain(root, "train")
    assert len(data) == 3
    with raises("cannot read image", "broken.jpg", "not in a format Pillow knows"):
        data.inputs[1]
    with raises("cannot read image", "cut.png"):
        data.inputs[2]


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".gif", ".webp", ".tiff", ".ppm"])
def test_every_format_that_is_opened_is_found(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "cat").mkdir()
    picture(1).save(tmp_path / "cat" / f"x{suffix}")
    data = read_plain(tmp_path, "train")
    assert (len(data), data.inputs[0].mode) == (1, "RGB")


def test_folder_errors(tmp_path: Path) -> None:
    with raises("no data at", "nowhere", "no such file or folder. Pass an image folder"):
        read_plain(tmp_path / "nowhere", "train")
    with raises("has no images; expected a sub-folder per class"):
        read_plain(tmp_path, "train")
    image_folder(tmp_path / "a" / "train", {"cat": 1})
    with raises("has no test split; found: train.", "Add one named test or dev or validation"):
        read_plain(tmp_path / "a", "test")
    (tmp_path / "a" / "test" / "cat").mkdir(parents=True)
    with raises("has no images in its test split"):
        read_plain(tmp_path / "a", "test")
    (tmp_path / "model.bin").write_bytes(b"")
    with raises("the format of", "model.bin"):
        read_plain(tmp_path / "model.bin", "train")
    with raises("unknown split 'tests'. Did you mean 'test'? Known: test, train."):
        read_plain(tmp_path, "tests")  # type: ignore[arg-type]


@pytest.mark.parametrize("empty", ["null", "NaN", "-1", '""'])
def test_empty_label_column_is_named(tmp_path: Path, empty: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text(f'{{"text": "a", "label": {empty}}}\n' * 3)
    with raises("texts.jsonl has no labels: the column label is empty", "in every row of the split all"):
        read_plain(path, "train")
    path.write_text('{"text": "a"}\n' * 3)
    with raises("has no labels; expected a column label or target."):
        read_plain(path, "train")


def test_flat_folder_is_unlabelled(tmp_path: Path) -> None:
    picture(1).save(tmp_path / "x.png")
    with raises("has no labels; expected one sub-folder of images per class."):
        read_plain(tmp_path, "train")
    data = read_plain(tmp_path, "train", labelled=False)
    assert (data.labels, data.classes, len(data)) == (None, (), 1)


def test_npz_with_splits(tmp_path: Path) -> None:
    x = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    np.savez(
        tmp_path / "toy.npz",
        x_train=x, y_train=np.array([1, 0], dtype=np.uint8),
        x_test=x[:1], y_test=np.array([[2]]),
        classes=np.array(["a", "b", "c"]),
    )  # fmt: skip
    train, test = read_plain(tmp_path / "toy.npz", "train"), read_plain(tmp_path / "toy.npz", "test")
    assert (train.name, train.origin.split, test.origin.split, train.classes) == (
        "toy",
        "train",
        "test",
        ("a", "b", "c"),
    )
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
    data = read_plain(tmp_path / "toy.npz", "test")
    assert (data.origin.split, data.classes) == ("all", ("0", "1", "2", "3", "4"))
    expected = whole[2] if channel is None else np.moveaxis(whole[2], channel if channel < 0 else 0, -1)
    if expected.ndim == 2:
        expected = expected[..., None]
    got = np.asarray(data.inputs[2])
    assert got.shape == (6, 7, 3)
    assert np.array_equal(got, np.broadcast_to(expected, got.shape))


def test_npz_without_names_counts_classes_over_all_splits(tmp_path: Path) -> None:
    x = np.zeros((2, 3, 3), dtype=np.uint8)
    np.savez(tmp_path / "t.npz", x_train=x, y_train=np.array([0, 1]), x_val=x, y_val=np.array([0, 3]))
    assert read_plain(tmp_path / "t.npz", "train").classes == ("0", "1", "2", "3")
    assert read_plain(tmp_path / "t.npz", "test").origin.split == "val"


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
        (
            {"x": np.where(np.arange(3) == 1, np.nan, 0.5)[:, None, None] + np.zeros((3, 4, 4)), "y": Y},
            ["x of", "holds NaN in 1 of 3 images, the first is x[1]. Replace or drop them."],
        ),
        ({"x": X}, ["has no labels; expected an array y, or y_train and y_test."]),
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
        read_plain(tmp_path / "t.npz", "train")


def test_broken_npz(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, x=X, y=Y)
    for content in (b"", b"hello", path.read_bytes()[:-40], pickle.dumps({"x": X})):
        path.write_bytes(content)
        with raises("cannot read", "t.npz"):
            read_plain(path, "train")
    with path.open("wb") as file:
        np.save(file, X)
    with raises("cannot read", "t.npz"):
        read_plain(path, "train")


def test_unlabelled_npz_on_request(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", x=X)
    assert read_plain(tmp_path / "t.npz", "train", labelled=False).labels is None


def archive(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return path


def member(array: Any) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, array)
    return content.getvalue()


IMAGES = np.zeros((2, 3, 3, 3), np.uint8)


def test_npz_members_that_are_no_arrays(tmp_path: Path) -> None:
    path = archive(tmp_path / "d.npz", {"x.npy": b"PK not an array", "y.npy": member(np.array([0, 1]))})
    with pytest.raises(DataError, match=r"cannot read .*d\.npz: the magic string is not correct"):
        read_plain(path, "train")


def test_npz_classes_with_impossible_code_points(tmp_path: Path) -> None:
    for number in (0x110000, 0xFFFFFFFF, 0xD800):
        names = np.array([number, ord("b")], "<u4").view("<U1")
        members = {"x.npy": member(IMAGES), "y.npy": member(np.array([0, 1])), "classes.npy": member(names)}
        with pytest.raises(DataError, match=r"a class of .*d\.npz has a name that is not Unicode text"):
            read_plain(archive(tmp_path / "d.npz", members), "train")


def test_npz_headers_are_checked_before_an_array_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npz, "_read_member", lambda *_: pytest.fail("too late"))
    monkeypatch.setattr(npz, "LARGEST_ARCHIVE", 10**6)
    many = {"x.npy": member(np.zeros((100, 100, 100, 3), np.uint8)), "y.npy": member(np.zeros(100, np.int64))}
    with pytest.raises(DataError, match=r"refused: it has 2\.86 MiB uncompressed, and may have 976\.56 KiB"):
        read_plain(archive(tmp_path / "d.npz", many), "train")
    header = member(np.zeros((1, 3, 3, 3), np.uint8)).replace(b"(1, 3, 3, 3)", b"(9, 3, 3, 3)")
    with pytest.raises(DataError, match="x claims 243 bytes, but has 155"):
        read_plain(archive(tmp_path / "d.npz", {"x.npy": header}), "train")
    labels = {"x.npy": member(IMAGES), "y.npy": member(np.zeros(10**7 + 1, np.uint8))}
    with pytest.raises(DataError, match=r"y of .* has 10000001 samples, and at most 10000000 are read"):
        read_plain(archive(tmp_path / "d.npz", labels), "train")


def test_a_new_format_is_one_line_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_words(path: Path, _: str) -> Table:
        return Table({"text": path.read_text().split(), "label": [0, 1]}, ("no", "yes"), files=(path,))

    monkeypatch.setitem(formats.READERS, ".words", read_words)
    (tmp_path / "some.words").write_text("good bad")
    data = read_plain(tmp_path / "some.words", "train")
    assert (list(data.inputs), data.classes, data.name, data.origin.files) == (
        ["good", "bad"], ("no", "yes"), "some", (tmp_path / "some.words",),
    )  # fmt: skip
    with raises("no data at", "Pass an image folder", ".words"):
        read_plain(tmp_path / "other.words", "train")
    assert read_data(tmp_path / "some.words", "test").origin.split == "all"
    assert split_reference("org/other.words")[1] == Path("org/other.words"), "and no hub id"
