"""The eight image tasks of the paper: class names, prompts, and their usual layouts on disk.

The class names of SUN397 and Cars come with the data. The prompts were written for tuneport, so zero-shot accuracies
differ a little from those with other prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import DataError
from ...types import Split
from ..dataset import Dataset, of_images
from ..formats import read_plain
from ..images import IMAGE_SUFFIXES
from .base import Layout, Task, TaskReader, plain_name
from .files import find_column, find_numbers, read_idx, read_lines, read_mat, read_rows

DIGITS = tuple("0123456789")


def class_folders(folders: Sequence[str], names: Sequence[str]) -> TaskReader:
    """A reader of one folder per class; folders are matched in any spelling and get the class names `names`."""
    known = {plain_name(folder): index for index, folder in enumerate(folders)}

    def read(place: Path, split: Split) -> Dataset | None:
        inside = {plain_name(child.name) for child in place.iterdir() if child.is_dir()} if place.is_dir() else set()
        deeper = {"train", "training", "test", "testing", "val", "validation"} & inside
        if not deeper and not len(inside & set(known)) > len(known) // 2:
            return None
        data = read_plain(place, split)
        places = [known.get(plain_name(name), -1) for name in data.classes]
        if -1 in places or data.labels is None:
            return None
        return replace(data, labels=np.array(places, dtype=np.int64)[data.labels], classes=tuple(names))

    return read


def _resisc_lists(place: Path, split: Split) -> Dataset | None:
    """One folder per class, and resisc45-train.txt, -val.txt, -test.txt with file names, in it or its parent."""
    home = place / "NWPU-RESISC45" if (place / "NWPU-RESISC45").is_dir() else place
    lists = [folder / f"resisc45-{split}.txt" for folder in (place, home, place.parent)]
    found = next((file for file in lists if file.is_file()), None)
    if found is None:
        return None
    files = [Path(line).name for line in read_lines(found)]
    known = {folder: index for index, folder in enumerate(RESISC_FOLDERS)}
    labels = [known.get(file.rpartition("_")[0], -1) for file in files]
    if -1 in labels:
        raise DataError(f"{found} names {files[labels.index(-1)]}, which is in none of the 45 classes.")
    paths = [home / RESISC_FOLDERS[label] / file for label, file in zip(labels, files, strict=True)]
    return of_images(paths, labels, RESISC45.classes, name="resisc45", split=split, files=[found])


def _gtsrb_original(place: Path, split: Split) -> Dataset | None:
    """Training/CLASS/*.ppm with GT-CLASS.csv; Final_Test/Images/*.ppm with GT-final_test.csv."""
    training, test = place / "Training", place / "Final_Test" / "Images"
    if not (training.is_dir() or (place / "Final_Test").is_dir()):
        return None
    paths: list[Path] = []
    labels: list[int] = []
    read: list[Path] = []
    if split == "test":
        names = ("GT-final_test.csv", "GT-final_test.test.csv")
        tables = [folder / name for folder in (place, place.parent, test) for name in names]
        found = next((file for file in tables if file.is_file()), None)
        if found is None:
            raise DataError(f"{place} has no GT-final_test.csv, which holds the classes of its test images.")
        rows = read_rows(found, ";")
        paths = [test / name for name in find_column(rows, found, "Filename")]
        labels = find_numbers(rows, found, "ClassId")
        read = [found]
    elif not training.is_dir():
        raise DataError(f"{place} has no folder Training, which holds its training images.")
    else:
        for folder in sorted(child for child in training.iterdir() if child.is_dir() and child.name.isdecimal()):
            table = folder / f"GT-{folder.name}.csv"
            listed = find_column(read_rows(table, ";"), table, "Filename") if table.is_file() else []
            files = [folder / name for name in listed] or sorted(folder.glob("*.ppm"))
            paths += files
            labels += [int(folder.name)] * len(files)
            read += [table] if listed else []
    return of_images(paths, labels, GTSRB.classes, name="gtsrb", split=split, files=read)


def _gtsrb_tables(place: Path, split: Split) -> Dataset | None:
    """Train.csv and Test.csv with columns Path and ClassId."""
    table = place / ("Test.csv" if split == "test" else "Train.csv")
    if not table.is_file():
        return None
    rows = read_rows(table, ",")
    paths = [place / path for path in find_column(rows, table, "Path")]
    labels = find_numbers(rows, table, "ClassId")
    return of_images(paths, labels, GTSRB.classes, name="gtsrb", split=split, files=[table])


def _svhn(place: Path, split: Split) -> Dataset | None:
    """train_32x32.mat and test_32x32.mat: X (32, 32, 3, N), y (N, 1), where 10 stands for the digit 0."""
    file = place / f"{split}_32x32.mat"
    if not file.is_file():
        return None
    content = read_mat(file, "X", "y")
    images = np.asarray(content["X"])
    if images.ndim != 4:
        raise DataError(f"X of {file} has shape {images.shape}; expected (32, 32, 3, N).")
    images = np.ascontiguousarray(np.moveaxis(images, -1, 0))  # (N, 32, 32, 3)
    labels = np.asarray(content["y"]).reshape(-1) % 10
    return of_images(images, labels, DIGITS, name="svhn", split=split, files=[file])


def _mnist(place: Path, split: Split) -> Dataset | None:
    """The four idx files, compressed or not."""
    part = "t10k" if split == "test" else "train"
    found = []
    for word, dimensions in (("images", 3), ("labels", 1)):
        names = (f"{part}-{word}-idx{dimensions}-ubyte", f"{part}-{word}.idx{dimensions}-ubyte")
        files = [place / f"{name}{packed}" for name in names for packed in ("", ".gz")]
        found.append(next((file for file in files if file.is_file()), None))
    images, labels = found
    if images is None or labels is None:
        return None
    files = [images, labels]
    return of_images(read_idx(images, 3), read_idx(labels, 1), DIGITS, name="mnist", split=split, files=files)


def _dtd(place: Path, split: Split) -> Dataset | None:
    """images/CLASS/*.jpg with labels/train1.txt, val1.txt, test1.txt: the first of its ten partitions."""
    if not (place / "labels").is_dir() or not (place / "images").is_dir():
        return None
    names = ("test1.txt",) if split == "test" else ("train1.txt", "val1.txt")
    lists = [place / "labels" / name for name in names]
    lines = [line for file in lists for line in read_lines(file)]
    known = {name: index for index, name in enumerate(DTD.classes)}
    labels = [known.get(line.partition("/")[0], -1) for line in lines]
    if -1 in labels:
        raise DataError(f"{place / 'labels'} names {lines[labels.index(-1)]}, which is in none of the 47 classes.")
    paths = [place / "images" / line for line in lines]
    return of_images(paths, labels, DTD.classes, name="dtd", split=split, files=lists)


def _cars(place: Path, split: Split) -> Dataset | None:
    """devkit/cars_meta.mat and cars_train_annos.mat, cars_test_annos_withlabels.mat; cars_train/, cars_test/."""
    kit, meta = place / "devkit", place / "devkit" / "cars_meta.mat"
    if not meta.is_file():
        return None
    names = [
        str(name).strip().replace("/", " ") for name in np.atleast_1d(read_mat(meta, "class_names")["class_names"])
    ]
    title = "cars_test_annos_withlabels.mat" if split == "test" else "cars_train_annos.mat"
    found = next((file for file in (place / title, kit / title) if file.is_file()), None)
    if found is None:
        raise DataError(f"{place} has no {title}, which holds the classes of its {split} images.")
    notes = np.atleast_1d(read_mat(found, "annotations")["annotations"])
    if not {"fname", "class"} <= set(notes.dtype.names or ()):
        raise DataError(f"annotations of {found} have no fname and class.")
    paths = [place / f"cars_{split}" / str(note["fname"]) for note in notes]
    labels = [int(note["class"]) - 1 for note in notes]
    return of_images(paths, labels, names, name="cars", split=split, files=[meta, found])


def _sun(place: Path, split: Split) -> Dataset | None:
    """Folders by letter, ClassName.txt, and optionally Training_01.txt and Testing_01.txt."""
    listed = place / "ClassName.txt"
    letters = [child for child in place.iterdir() if child.is_dir() and len(child.name) == 1] if place.is_dir() else []
    if not letters:
        return None
    if listed.is_file():
        folders = [line.strip("/") for line in read_lines(listed)]
    else:
        folders = sorted({str(file.parent.relative_to(place)) for letter in letters for file in _images(letter)})
    classes = [scene_name(folder) for folder in folders]
    lists = [listed] if listed.is_file() else []
    partition = place / ("Testing_01.txt" if split == "test" else "Training_01.txt")
    if partition.is_file():
        files = [line.strip("/") for line in read_lines(partition)]
        known = {folder: index for index, folder in enumerate(folders)}
        labels = [known.get(file.rpartition("/")[0], -1) for file in files]
        if -1 in labels:
            raise DataError(f"{partition} names {files[labels.index(-1)]}, which is in none of the classes.")
        paths = [place / file for file in files]
        return of_images(paths, labels, classes, name="sun397", split=split, files=[*lists, partition])
    found = [(file, index) for index, folder in enumerate(folders) for file in _images(place / folder, deep=False)]
    paths, labels = [file for file, _ in found], [index for _, index in found]
    return of_images(paths, labels, classes, name="sun397", files=lists)


def _images(folder: Path, *, deep: bool = True) -> list[Path]:
    found = folder.rglob("*") if deep else folder.glob("*")
    return sorted(file for file in found if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())


def scene_name(folder: str) -> str:
    """The class name of a scene's folder, with the last part first.

    >>> scene_name("a/apartment_building/outdoor")
    'outdoor apartment building'
    """
    parts = folder.strip("/").split("/")
    words = parts[1:] if len(parts) > 1 and len(parts[0]) == 1 else parts
    return " ".join(reversed(words)).replace("_", " ")


_FROM_ABOVE = (
    "a satellite image of {}.",
    "a picture taken from high above that shows {}.",
    "an aerial view of {}.",
    "land seen from the air: {}.",
)
_DIGIT_PROMPTS = ("a photo of the number {}.", 'a picture of the digit "{}".', "the figure {} in close-up.")

EUROSAT_FOLDERS = (
    *("AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial"),
    *("Pasture", "PermanentCrop", "Residential", "River", "SeaLake"),
)
EUROSAT_NAMES = (
    *("fields of annual crops", "forest", "low plants and shrubs", "a highway", "industrial buildings"),
    *("pasture", "orchards and other permanent crops", "residential buildings", "a river", "a sea or lake"),
)
EUROSAT = Task(
    name="eurosat",
    title="EuroSAT",
    kind="image",
    classes=EUROSAT_NAMES,
    prompts=_FROM_ABOVE,
    aliases=("2750", "EuroSAT/2750", "eurosat/2750", "EuroSAT_RGB", "EuroSAT_splits"),
    layouts=(Layout("ten class folders such as AnnualCrop/", class_folders(EUROSAT_FOLDERS, EUROSAT_NAMES)),),
)

_LIMITS = (20, 30, 50, 60, 70, 80)
GTSRB = Task(
    name="gtsrb",
    title="GTSRB",
    kind="image",
    classes=(
        *(f"speed limit {number} km/h" for number in _LIMITS),
        "end of the speed limit 80 km/h",
        "speed limit 100 km/h",
        "speed limit 120 km/h",
        "no overtaking",
        "no overtaking by lorries",
        "right of way at the next crossing",
        "priority road",
        "give way",
        "stop",
        "closed to all vehicles",
        "closed to lorries",
        "no entry",
        "danger",
        "sharp bend to the left",
        "sharp bend to the right",
        "double bend",
        "uneven road",
        "slippery road",
        "road narrows on the right",
        "road works",
        "traffic lights ahead",
        "pedestrians",
        "children",
        "cyclists crossing",
        "snow or ice",
        "wild animals",
        "end of all limits",
        "turn right ahead",
        "turn left ahead",
        "straight ahead only",
        "straight ahead or right",
        "straight ahead or left",
        "keep right",
        "keep left",
        "roundabout",
        "end of the overtaking ban",
        "end of the overtaking ban for lorries",
    ),
    prompts=(
        'a photo of the traffic sign "{}".',
        'a road sign in close-up that means "{}".',
        'the German traffic sign for "{}".',
    ),
    aliases=("gtsrb/GTSRB", "GTSRB/GTSRB", "gtsrb"),
    layouts=(
        Layout("Training/00000/*.ppm with GT-00000.csv and Final_Test/Images with GT-final_test.csv", _gtsrb_original),
        Layout("Train.csv and Test.csv with columns Path and ClassId", _gtsrb_tables),
    ),
)

SVHN = Task(
    name="svhn",
    title="SVHN",
    kind="image",
    classes=DIGITS,
    prompts=(*_DIGIT_PROMPTS, "a house number with the digit {} in the middle."),
    layouts=(Layout("train_32x32.mat and test_32x32.mat", _svhn),),
)

RESISC_FOLDERS = tuple(
    """airplane airport baseball_diamond basketball_court beach bridge chaparral church circular_farmland cloud
    commercial_area dense_residential desert forest freeway golf_course ground_track_field harbor industrial_area
    intersection island lake meadow medium_residential mobile_home_park mountain overpass palace parking_lot railway
    railway_station rectangular_farmland river roundabout runway sea_ice ship snowberg sparse_residential stadium
    storage_tank tennis_court terrace thermal_power_station wetland""".split()  # noqa: SIM905
)
RESISC_NAMES = tuple(folder.replace("_residential", "_residential_area").replace("_", " ") for folder in RESISC_FOLDERS)
RESISC45 = Task(
    name="resisc45",
    title="RESISC45",
    kind="image",
    classes=RESISC_NAMES,
    prompts=_FROM_ABOVE,
    aliases=("NWPU-RESISC45", "resisc45/NWPU-RESISC45"),
    layouts=(
        Layout("45 class folders and resisc45-train.txt, -val.txt, -test.txt", _resisc_lists),
        Layout("45 class folders such as airplane/", class_folders(RESISC_FOLDERS, RESISC_NAMES)),
    ),
)

DTD = Task(
    name="dtd",
    title="DTD",
    kind="image",
    classes=tuple(
        """banded blotchy braided bubbly bumpy chequered cobwebbed cracked crosshatched crystalline dotted fibrous
        flecked freckled frilly gauzy grid grooved honeycombed interlaced knitted lacelike lined marbled matted meshed
        paisley perforated pitted pleated polka-dotted porous potholed scaly smeared spiralled sprinkled stained
        stratified striped studded swirly veined waffled woven wrinkled zigzagged""".split()  # noqa: SIM905
    ),
    prompts=("a photo of a {} texture.", "a close view of something {}.", "a {} pattern.", "a surface that is {}."),
    aliases=("dtd/dtd", "DTD/dtd"),
    layouts=(Layout("images/banded/*.jpg with labels/train1.txt, val1.txt, test1.txt", _dtd),),
)

CARS = Task(
    name="cars",
    title="Cars",
    kind="image",
    prompts=("a photo of a {}.", "a picture of the car {}.", "the {}, a car, seen from outside."),
    aliases=("stanford_cars", "StanfordCars"),
    layouts=(Layout("devkit/cars_meta.mat, its annotations, cars_train/ and cars_test/", _cars),),
)

MNIST = Task(
    name="mnist",
    title="MNIST",
    kind="image",
    classes=DIGITS,
    prompts=(*_DIGIT_PROMPTS, "the digit {} written by hand."),
    aliases=("MNIST/raw", "mnist/raw", "raw"),
    layouts=(Layout("train-images-idx3-ubyte and its three partners, also .gz", _mnist),),
)

SUN397 = Task(
    name="sun397",
    title="SUN397",
    kind="image",
    prompts=("a photo of a {}.", "a picture taken at a place: {}.", "a scene that shows a {}."),
    layouts=(Layout("folders a/abbey/ and so on, with ClassName.txt or without", _sun),),
)
