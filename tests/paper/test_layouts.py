"""Tasks: every usual layout of every data set is read as what it is, splits stay apart, names become words."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from paper import files
from paper.files import read_idx, read_mat
from paper.layouts import FACTS, scene_name
from tuneport.data.dataset import Dataset
from tuneport.data.images import files_of
from tuneport.data.tasks import TASKS, VALIDATION_SHARE, get_task, read_data
from tuneport.errors import DataError
from tuneport.io.untrusted import read_apart
from tuneport.report.provenance import data_identity

Maker = Callable[[Path], Path]
SPLITS = ("train", "validation", "test")


def write_image(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade % 256, 10, 200)).save(path)
    return path


def lines(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts) + "\n")


def eurosat(root: Path) -> Path:
    for index, name in enumerate(FACTS["eurosat"].folders):
        for number in range(10):
            write_image(root / "2750" / name / f"{name}_{number}.jpg", 20 * index)
    return root


def resisc45(root: Path) -> Path:
    folders = FACTS["resisc45"].folders
    for index, name in enumerate(folders):
        for number in range(4):
            write_image(root / "NWPU-RESISC45" / name / f"{name}_{number:03}.jpg", 5 * index)
    lines(
        root / "resisc45-train.txt",
        *(f"{name}_{number:03}.jpg" for name in folders for number in range(3)),
    )
    lines(root / "resisc45-test.txt", *(f"{name}_003.jpg" for name in folders))
    return root


def gtsrb(root: Path) -> Path:
    home = root / "GTSRB"
    for label in (0, 14, 42):
        names = [f"{number:05}.ppm" for number in range(5)]
        for name in names:
            write_image(home / "Training" / f"{label:05}" / name, label)
        rows = [f"{name};8;8;1;1;6;6;{label}" for name in names]
        head = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"
        lines(home / "Training" / f"{label:05}" / f"GT-{label:05}.csv", head, *rows)
    for number in range(3):
        write_image(home / "Final_Test" / "Images" / f"{number:05}.ppm", number)
    lines(root / "GT-final_test.csv", "Filename;Width;ClassId", "00000.ppm;8;42", "00001.ppm;8;0", "00002.ppm;8;14")
    return root


def gtsrb_tables(root: Path) -> Path:
    for split, count in (("Train", 6), ("Test", 3)):
        for number in range(count):
            write_image(root / split / f"{number}.png", number)
        rows = [f"8,8,{number % 3},{split}/{number}.png" for number in range(count)]
        lines(root / f"{split}.csv", "Width,Height,ClassId,Path", *rows)
    return root


def svhn(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    for split, count in (("train", 30), ("test", 20)):
        pixels = np.zeros((32, 32, 3, count), dtype=np.uint8)
        pixels[..., :] = np.arange(count)
        labels = np.arange(count) % 10 + 1  # 1 to 10, where 10 is the digit 0
        savemat(root / f"{split}_32x32.mat", {"X": pixels, "y": labels[:, None].astype(np.uint8)})
    return root


def write_idx(path: Path, values: np.ndarray, packed: bool) -> None:
    head = np.array([0x800 + values.ndim, *values.shape], dtype=">u4").tobytes()
    content = head + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    if packed:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def mnist(root: Path) -> Path:
    for part, count, packed in (("train", 40, False), ("t10k", 20, True)):
        images = np.zeros((count, 28, 28)) + np.arange(count)[:, None, None]
        write_idx(root / "raw" / f"{part}-images-idx3-ubyte", images, packed)
        write_idx(root / "raw" / f"{part}-labels-idx1-ubyte", np.arange(count) % 10, packed)
    return root


def dtd(root: Path) -> Path:
    names = ("banded", "polka-dotted", "zigzagged")
    for split, numbers in (("train", range(6)), ("val", range(6, 10)), ("test", range(10, 13))):
        listed = [f"{name}/{name}_{number:04}.jpg" for name in names for number in numbers]
        for path in listed:
            write_image(root / "images" / path)
        lines(root / "labels" / f"{split}1.txt", *listed)
    return root


def cars(root: Path) -> Path:
    names = ["AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012"]
    (root / "devkit").mkdir(parents=True)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array(names, dtype=object)})
    places = {"train": root / "devkit" / "cars_train_annos.mat", "test": root / "cars_test_annos_withlabels.mat"}
    for split, place in places.items():
        kinds = [("bbox_x1", "O"), ("class", "O"), ("fname", "O")]
        notes = np.array([(1, number % 2 + 1, f"{number:05}.jpg") for number in range(20)], dtype=kinds)
        for number in range(20):
            write_image(root / f"cars_{split}" / f"{number:05}.jpg")
        savemat(place, {"annotations": notes})
    return root


def sun397(root: Path) -> Path:
    folders = ("a/abbey", "a/apartment_building/outdoor", "u/underwater/coral_reef")
    for folder in folders:
        for number in range(10):
            write_image(root / folder / f"sun_{number}.jpg")
    lines(root / "ClassName.txt", *(f"/{folder}" for folder in folders))
    return root


def sun397_parted(root: Path) -> Path:
    sun397(root)
    lines(
        root / "Training_01.txt",
        *(f"/a/abbey/sun_{number}.jpg" for number in range(4)),
        "/u/underwater/coral_reef/sun_0.jpg",
    )
    lines(root / "Testing_01.txt", "/a/apartment_building/outdoor/sun_9.jpg")
    return root


LAYOUTS: dict[str, tuple[str, Maker, int, int]] = {  # task, maker, samples of train + validation, of test
    "eurosat": ("eurosat", eurosat, 90, 10),
    "resisc45": ("resisc45", resisc45, 135, 45),
    "gtsrb": ("gtsrb", gtsrb, 15, 3),
    "gtsrb tables": ("gtsrb", gtsrb_tables, 6, 3),
    "svhn": ("svhn", svhn, 30, 20),
    "mnist": ("mnist", mnist, 40, 20),
    "dtd": ("dtd", dtd, 30, 9),
    "cars": ("cars", cars, 20, 20),
    "sun397": ("sun397", sun397, 27, 3),
    "sun397 parted": ("sun397", sun397_parted, 5, 1),
}


@dataclass(frozen=True)
class Layout:
    """The files of a layout, and what its task reads from them; no test changes either."""

    name: str
    place: Path
    splits: dict[str, Dataset]


@pytest.fixture(scope="module", autouse=True)
def _matlab_files_read_once() -> Iterator[None]:
    """Keep what a MATLAB file has: each is read in a process that imports SciPy."""
    known: dict[Any, bytes] = {}

    def read(path: Path, *given: str) -> bytes:
        key = (hashlib.sha256(path.read_bytes()).digest(), *given)
        if key not in known:
            known[key] = read_apart(path, *given)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_apart", read)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Layout]:
    """Make a layout when it is first asked for."""

    @cache
    def make(layout: str) -> Layout:
        name, write, *_ = LAYOUTS[layout]
        place = write(tmp_path_factory.mktemp("layout") / "data")
        return Layout(name, place, {split: get_task(name).read(place, split) for split in SPLITS})

    return make


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayouts:
    def test_sizes_images_and_classes(self, layout: str, made: Callable[[str], Layout]) -> None:
        name, _, trained, tested = LAYOUTS[layout]
        task = get_task(name)
        train, validation, test = made(layout).splits.values()
        assert (len(train) + len(validation), len(test)) == (trained, tested)
        assert train.classes == validation.classes == test.classes
        assert not task.classes or train.classes == task.classes
        for data in (train, validation, test):
            assert (data.name, data.kind, data.origin.prompts) == (name, "image", task.prompts)
            assert data.inputs[0].mode == "RGB"
            assert data.labels is not None
            assert data.labels.max() < len(data.classes)

    def test_splits_are_disjoint_and_reproducible(self, layout: str, made: Callable[[str], Layout]) -> None:
        task, place, splits = get_task(made(layout).name), made(layout).place, [*made(layout).splits.values()]
        files = [files_of(data) for data in splits]
        if files[0]:
            assert len({file for part in files for file in part}) == sum(map(len, files))
        else:  # arrays: each training image has a shade of its own
            shades = [{image.getpixel((0, 0)) for image in data.inputs} for data in splits[:2]]
            assert not shades[0] & shades[1]
        again = task.read(place, "validation")
        assert again.labels is not None
        assert again.labels.tolist() == splits[1].labels.tolist()  # type: ignore[union-attr]

    def test_reference_reads_the_same(self, layout: str, made: Callable[[str], Layout]) -> None:
        name, _, _, tested = LAYOUTS[layout]
        data = read_data(f"{name.upper()}:{made(layout).place}", "test")
        assert (len(data), data.name) == (tested, name)


USED: dict[str, set[str]] = {  # the files other than images that a reader opens for the training split
    "eurosat": set(),
    "resisc45": {"resisc45-train.txt"},
    "gtsrb": {f"GTSRB/Training/{label:05}/GT-{label:05}.csv" for label in (0, 14, 42)},
    "gtsrb tables": {"Train.csv"},
    "svhn": {"train_32x32.mat"},
    "mnist": {"raw/train-images-idx3-ubyte", "raw/train-labels-idx1-ubyte"},
    "dtd": {"labels/train1.txt", "labels/val1.txt"},
    "cars": {"devkit/cars_meta.mat", "devkit/cars_train_annos.mat"},
    "sun397": {"ClassName.txt"},
    "sun397 parted": {"ClassName.txt", "Training_01.txt"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_record_has_exactly_the_files_that_were_read(
    layout: str, made: Callable[[str], Layout], tmp_path: Path
) -> None:
    name, place = made(layout).name, shutil.copytree(made(layout).place, tmp_path / "data")
    for folder in (place, *(child for child in place.iterdir() if child.is_dir())):
        (folder / "diary.md").write_text("not of the data set")
    train = read_data(f"{name}:{place}", "train")
    digests = data_identity(place, train, np.array([2, 0]))["sha256"]
    drawn = {str(file.relative_to(place)) for file in files_of(train.subset([2, 0]))}
    assert set(digests) == USED[layout] | drawn
    assert all(hashlib.sha256((place / file).read_bytes()).hexdigest() == digest for file, digest in digests.items())


class TestContent:
    def test_labels_are_those_of_the_files(self, made: Callable[[str], Layout]) -> None:
        test = made("gtsrb").splits["test"]
        assert [test.classes[label] for label in test.labels] == [  # type: ignore[union-attr]
            "end of the overtaking ban for lorries",
            "speed limit 20 km/h",
            "stop",
        ]
        assert [image.getpixel((0, 0))[0] for image in test.inputs] == [0, 1, 2]

    def test_folder_names_become_class_names_in_order(self, made: Callable[[str], Layout]) -> None:
        data = made("eurosat").splits["train"]
        shades = {
            round(image.getpixel((4, 4))[0] / 20)
            for image, label in zip(data.inputs, data.labels, strict=True)
            if label == 9
        }  # type: ignore[arg-type]
        assert shades == {9}
        assert data.classes[9] == "lake or sea"

    def test_svhn_label_10_is_the_digit_0(self, made: Callable[[str], Layout]) -> None:
        test = made("svhn").splits["test"]
        by_shade = {
            image.getpixel((0, 0))[0]: int(label) for image, label in zip(test.inputs, test.labels, strict=True)
        }  # type: ignore[arg-type]
        assert by_shade[0] == 1
        assert by_shade[9] == 0

    def test_cars_and_scenes_take_their_names_from_the_data(self, made: Callable[[str], Layout]) -> None:
        assert made("cars").splits["train"].classes == (
            "AM General Hummer SUV 2000",
            "Ram C V Cargo Van Minivan 2012",
        )
        scenes = made("sun397").splits["train"].classes
        assert scenes == ("abbey", "outdoor apartment building", "coral reef underwater")
        assert scene_name("/b/balcony/exterior") == "exterior balcony"

    def test_class_counts(self) -> None:
        counts = {name: len(task.classes) for name, task in TASKS.items() if task.kind == "image"}
        assert counts == {
            "cars": 0,
            "dtd": 47,
            "eurosat": 10,
            "gtsrb": 43,
            "mnist": 10,
            "resisc45": 45,
            "sun397": 0,
            "svhn": 10,
        }
        for task in TASKS.values():
            assert len(set(task.classes)) == len(task.classes)
            assert all("{}" in prompt or "{text}" in prompt for prompt in task.prompts)

    def test_validation_split_is_a_tenth(self, made: Callable[[str], Layout]) -> None:
        train, validation, _ = made("mnist").splits.values()
        assert len(validation) == 10  # one of each class of four
        assert len(train) == 30
        assert VALIDATION_SHARE == 0.1


class TestErrors:
    def test_unknown_layout_lists_the_known_ones(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"does not look like SVHN\. Known layouts: train_32x32\.mat and test"):
            read_data(f"svhn:{tmp_path}", "test")

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\x00\x00\x08\x03" + 12 * b"\xff",
            b"\x00\x00\x08\x03" + 4 * b"\x00" + 8 * b"\xff",  # no images of 2^64 bytes each
            b"\x00\x00\x08\x01\x00\x00\x00\x09ab",
        ],
    )
    def test_broken_idx_files(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(DataError, match="is not an idx file"):
            read_idx(tmp_path / "x", 3 if content[3:4] == b"\x03" else 1)

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("validation.csv", b"sentence1,sentence2,label\ncaf\xe9,b,0\n"),
            ("validation.csv.gz", gzip.compress(b"sentence1,sentence2,label\na,b,0\n")[:-9]),
        ],
        ids=["latin-1", "cut"],
    )
    def test_tables_that_cannot_be_read_are_named(self, tmp_path: Path, name: str, content: bytes) -> None:
        (tmp_path / name).write_bytes(content)
        for place in (tmp_path, tmp_path / name):
            with pytest.raises(DataError, match=rf"^cannot read \S*{name}: [^\n]+\.$"):
                read_data(f"rte:{place}", "test")

    def test_disk_errors_of_layouts_are_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def closed(place: Path) -> None:
            raise PermissionError(13, "Permission denied", str(place))

        monkeypatch.setattr(Path, "iterdir", closed)
        with pytest.raises(DataError, match=r"^cannot read \S+: .*Permission denied"):
            read_data(f"eurosat:{tmp_path}", "test")

    def test_dataset_with_only_a_test_split(self, tmp_path: Path) -> None:
        place = gtsrb(tmp_path / "gtsrb")
        shutil.rmtree(place / "GTSRB" / "Training")
        assert len(read_data(f"gtsrb:{place}", "test")) == 3
        with pytest.raises(DataError, match="has no folder Training, which holds its training images"):
            read_data(f"gtsrb:{place}", "train")

    def test_broken_files_end_in_one_line(self, tmp_path: Path) -> None:
        place = svhn(tmp_path / "svhn")
        (place / "test_32x32.mat").write_bytes(b"no matlab file")
        with pytest.raises(DataError, match=r"cannot read .*test_32x32\.mat"):
            read_data(f"svhn:{place}", "test")
        place = gtsrb(tmp_path / "gtsrb")
        (place / "GT-final_test.csv").write_text("Filename;ClassId\n00000.ppm;x\n")
        with pytest.raises(DataError, match="expected whole numbers"):
            read_data(f"gtsrb:{place}", "test")
        place = dtd(tmp_path / "dtd")
        (place / "labels" / "test1.txt").write_text("banded/../../secret.jpg\n")
        with pytest.raises(DataError, match="is outside its folder"):
            read_data(f"dtd:{place}", "test")
        (place / "labels" / "test1.txt").write_text("banned/none.jpg\n")
        with pytest.raises(DataError, match=r"labels names an image in 'banned', which is none of the 47 classes"):
            read_data(f"dtd:{place}", "test")
        (place / "labels" / "test1.txt").write_text("banded/none.jpg\n")
        with pytest.raises(DataError, match=r"1 of 1 images of dtd are not in"):
            read_data(f"dtd:{place}", "test")


class TestBounds:
    def test_matlab_files_count_with_what_they_unpack_to(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also inside cells, whose shapes do not say it."""
        monkeypatch.setattr(files, "_LARGEST", 10**6)
        cell = np.empty(2, dtype=object)
        cell[:] = [np.zeros(9 * 10**5, np.uint8), np.zeros(9 * 10**5, np.uint8)]
        for name, value in (("cell", cell), ("array", np.zeros(2 * 10**5))):
            savemat(tmp_path / f"{name}.mat", {"X": value}, do_compression=True)
            assert (tmp_path / f"{name}.mat").stat().st_size < 10**4
            with pytest.raises(DataError, match=rf"{name}\.mat is refused: a file may have .* uncompressed"):
                read_mat(tmp_path / f"{name}.mat", "X")
        for packed in (True, False):
            savemat(tmp_path / "small.mat", {"X": cell[:1], "Y": "text"}, do_compression=packed)
            assert len(read_mat(tmp_path / "small.mat", "X")["X"]) == 9 * 10**5

    def test_crash_of_scipy_is_an_error_of_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """22 bytes are missing from the middle: scipy 1.17 ends with a segmentation fault. The working folder has a
        module that must not be imported."""
        notes = np.array([("a.jpg", 1)], dtype=[("fname", object), ("class", object)])
        file = tmp_path / "damaged.mat"
        savemat(file, {"X": np.zeros((3, 4, 4), np.uint8), "y": np.arange(3), "annotations": notes})
        content = file.read_bytes()
        file.write_bytes(content[:288] + content[310:])
        (tmp_path / "pickle.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(DataError, match=r"cannot read .*damaged\.mat: [^\n]+\.$"):
            read_mat(file, "annotations")
        assert not (tmp_path / "imported").exists()

    def test_lists_of_many_columns(self, tmp_path: Path) -> None:
        """Each of the rows would get them all: memory that is quadratic in the size of the file."""
        (tmp_path / "t.csv").write_text(",".join(map(str, range(2000))) + "\n" + "a\n" * 2000)
        with pytest.raises(DataError, match=r"t\.csv is refused: it has more than 1000 columns"):
            files.read_rows(tmp_path / "t.csv", ",")
