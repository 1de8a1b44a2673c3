"""Labelled samples: a `Dataset` of files, arrays or texts, with labels that can be aligned to a head's classes.

A dataset copies no sample and opens no file: its inputs are loaded on each access.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, first_of, reraised
from ..io.untrusted import check_regular
from ..types import Split

Kind = Literal["image", "text"]
Answers = Literal["data", "choice", "teacher", "none"]

MOST_SAMPLES = 10**7
DEFAULT_SAMPLES = 100  # of a draw
UNLABELLED = -100  # the label of an unlabelled sample, which torch's cross_entropy ignores

SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "test": ("test", "dev", "validation", "val", "valid"),  # in order of preference
}


@dataclass(frozen=True, eq=False)
class LazySequence(Sequence[Any]):
    """A sequence whose items `load(index)` returns on each access; slices stay lazy."""

    indices: NDArray[np.int64] | range
    load: Callable[[int], Any]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return LazySequence(self.indices[index], self.load)
        return self.load(int(self.indices[index]))


@dataclass(frozen=True, eq=False)
class Table:
    """What a reader finds in a file or folder: columns of equal length, by name.

    Images are paths, bytes, the `{bytes, path}` of HF datasets, or arrays.
    """

    columns: Mapping[str, Sequence[Any]]
    classes: tuple[str, ...] | None = None  # names, if the source has them: its labels are then their numbers
    split: str | None = None  # the source's name of the chosen split; without it, a column split names that of rows
    files: tuple[Path, ...] = ()  # that were read
    expected: str = "a column label or target"  # where this format has its labels


@dataclass(frozen=True)
class Origin:
    """What the reader of a data set knows of it."""

    split: str = "all"  # the split's name in the source; "all" if it has none
    files: tuple[Path, ...] = ()  # that were read, without the image files of single samples
    prompts: tuple[str, ...] = ()  # templates, of a known task
    label_texts: tuple[str, ...] = ()  # that describe the classes, of a known task


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with labels, with text targets, or with neither.

    `inputs` are RGB `PIL.Image`s (read from disk on access), texts, pairs of texts, or chats. `labels` index `classes`,
    or the `choices` of each sample. `answers` says whose the targets and the last answers of chats are: the data's, one
    of a choice, a teacher's with the end of its turn, or nobody's for bare prompts. `scores` (N, classes) are those
    that a teacher gives to the samples; of a teacher that labels tokens, N pairs of the spans (T, 2) and scores
    (T, classes) of the tokens of a text, NaN for special ones.

    >>> data = Dataset(inputs=["good", "bad", "fine"], labels=np.array([1, 0, 1]), classes=("neg", "pos"))
    >>> data.subset([2, 1]).inputs[0], len(data)
    ('fine', 3)
    """

    inputs: Sequence[Any]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    name: str = "data"
    kind: Kind = "text"
    targets: Sequence[str] | None = None
    choices: Sequence[Sequence[str]] | None = None
    answers: Answers = "data"
    scores: NDArray[Any] | None = None
    origin: Origin = Origin()

    def __len__(self) -> int:
        return len(self.inputs)

    def __repr__(self) -> str:
        return f"Dataset({self}: {len(self)} {self.kind}s, {len(self.classes)} classes)"

    def __str__(self) -> str:
        return self.name if self.origin.split == "all" else f"{self.origin.split} split of {self.name}"

    @property
    def words(self) -> tuple[str, ...]:
        """The texts for the classes."""
        return self.origin.label_texts or self.classes

    @property
    def has_chats(self) -> bool:
        """Whether the samples are chats, which hold their answers."""
        return self.kind == "text" and len(self) > 0 and isinstance(self.inputs[0], list)

    def subset(self, indices: ArrayLike) -> Dataset:
        """The samples at `indices`, in that order; copies no sample and opens no file."""
        wanted = np.asarray(indices)
        picked = np.arange(len(self))[wanted if wanted.size else wanted.astype(np.int64)]
        arrays = {name: getattr(self, name) for name in ("labels", "scores")}
        found: dict[str, Any] = {name: array[picked] for name, array in arrays.items() if array is not None}
        for name in ("inputs", "targets", "choices"):
            if (items := getattr(self, name)) is not None:
                found[name] = _pick(items, picked)
        return replace(self, **found)


def _pick(items: Sequence[Any], indices: NDArray[np.int64]) -> Sequence[Any]:
    if isinstance(items, LazySequence):  # views of views would grow with every subset
        return LazySequence(np.asarray(items.indices)[indices], items.load)
    return LazySequence(indices, items.__getitem__)


def with_prompts(dataset: Dataset) -> Dataset:
    """The dataset with each text put into the task's prompt, as text-to-text models read it; unchanged without one."""
    if dataset.kind != "text" or not dataset.origin.prompts:
        return dataset
    prompt, inputs = dataset.origin.prompts[0], dataset.inputs

    def fill(index: int) -> str:
        first, second = (texts, "") if isinstance(texts := inputs[index], str) else texts
        return re.sub(r"\{text(_pair)?\}", lambda found: second if found[1] else first, prompt)

    return replace(dataset, inputs=LazySequence(np.arange(len(dataset)), fill))


def as_prompts(dataset: Dataset, template: str) -> Dataset:
    """The texts, or what users ask in chats of one message, as plain prompts that a language model has to answer.

    >>> as_prompts(Dataset(["four"], None, ()), "Spell {text}:").inputs[0]
    'Spell four:'
    """
    inputs = dataset.inputs

    def fill(index: int) -> str:
        sample = inputs[index]
        if isinstance(sample, list) and len(sample) == 1:
            sample = sample[0]["content"]
        if not isinstance(sample, str):
            raise DataError(f"`template` takes one text; sample {index + 1} of {dataset} is a pair or a longer chat.")
        return template.replace("{text}", sample)

    bare = dataset.targets is None and dataset.labels is None and dataset.choices is None
    filled = LazySequence(np.arange(len(dataset)), fill)
    return replace(dataset, inputs=filled, answers="none" if bare else dataset.answers)


def joined(first: Dataset, second: Dataset) -> Dataset:
    """The samples of both, without labels; both have targets, choices, or neither."""

    def both(name: str) -> Any:
        one, two = getattr(first, name), getattr(second, name)
        if one is None or two is None:
            return None
        return LazySequence(np.arange(len(one) + len(two)), lambda at: one[at] if at < len(one) else two[at - len(one)])

    more = {name: both(name) for name in ("inputs", "targets", "choices")}
    return replace(first, labels=None, scores=None, **more)


def check_count(samples: int, name: object) -> None:
    """Refuse more samples than are kept track of."""
    if samples > MOST_SAMPLES:
        raise DataError(f"{name} is refused: it has {samples} samples, and at most {MOST_SAMPLES} are read. Split it.")


def count_drawn(
    dataset: Dataset, samples: int | None = None, shots: int | None = None, *, labels_for: str | None = None
) -> int:
    """The number of samples that `samples`, or `shots` of every class, are.

    `samples` are by default 100, or all if there are fewer; `labels_for` says what needs labels besides `shots`. Raises
    a DataError if the data have too few samples, or no labels where they are needed.
    """
    if dataset.labels is None and (shots is not None or labels_for is not None):
        expected = f"expected a label per sample for {labels_for if shots is None else '`shots`'}"
        raise DataError(f"{dataset} has no labels; {expected}. Use `samples` and the sampler random.")
    if shots is None:
        count = min(DEFAULT_SAMPLES, max(len(dataset), 1)) if samples is None else samples
        if count <= 0:
            raise DataError(f"asked for {count} samples; expected at least 1 in `samples`.")
        if count > len(dataset):
            raise DataError(f"asked for {count} samples but {dataset} has {len(dataset)}; lower `samples`.")
        return count
    assert dataset.labels is not None
    sizes = Counter(dataset.labels.tolist())
    short = [f"{dataset.classes[label]} ({size})" for label, size in sorted(sizes.items()) if size < shots]
    if short:
        raise DataError(
            f"asked for {shots} shots but {len(short)} of {len(sizes)} classes of {dataset} have fewer: "
            f"{first_of(short)}; lower `shots`."
        )
    return shots * len(sizes)


def align_labels(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """Map labels to a head's `classes`, by name; the head may have more classes than the data.

    Class names that are numbers ("0", "1", ...) and unknown to the head are positions in it.
    """
    if dataset.labels is None:
        raise DataError(f"{dataset} has no labels; expected labels among the head's {len(classes)} classes.")
    head = tuple(classes)
    if dataset.classes == head:
        return dataset
    unknown = [name for name in dataset.classes if name not in head]
    places = [head.index(name) for name in dataset.classes] if not unknown else as_numbers(dataset.classes)
    if unknown and not (places and max(places) < len(head)):
        raise DataError(
            f"{len(unknown)} of {len(dataset.classes)} classes of {dataset.name} are unknown to the head: "
            f"{first_of(unknown)}. The head has {len(head)}: {first_of(head)}. "
            "Name the classes as the head does, or number them in its order from 0"
            + ("; of an adapter without names, pass them as `classes`." if as_numbers(head) else ".")
        )
    repeats = Counter(head) | Counter(dataset.classes)
    if twice := [name for name in dict.fromkeys(dataset.classes) if repeats[name] > 1]:
        raise DataError(f"more than one class is called {first_of(twice)}, in {dataset.name} or in the head.")
    return replace(dataset, labels=np.array(places, dtype=np.int64)[dataset.labels], classes=head)


def as_numbers(names: Sequence[str]) -> list[int]:
    """The names as numbers, or nothing if they are not distinct numbers."""
    numbers = [int(name) for name in names if name.isdecimal() and len(name) < 20]
    return numbers if len(set(numbers)) == len(names) else []


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of other libraries into a DataError that names the file; a pipe, socket or device is one too."""
    check_regular(path, DataError)
    with reraised(f"cannot read {path}", DataError):
        yield


def choose_split(found: Sequence[str], split: Split, path: Path, also: Sequence[str] = ()) -> str | None:
    """The source's name of `split`; None if it has no splits. `also` holds further names of the split."""
    by_name = {name.lower(): name for name in found}
    names = (*SPLIT_NAMES[split], *also)
    chosen = next((by_name[name] for name in names if name in by_name), None)
    if chosen is not None or set(by_name) <= {"all", ""}:
        return chosen
    raise DataError(
        f"{path} has no {split} split; found: {first_of(sorted(by_name))}. "
        f"Add one named {' or '.join(names)}, or drop the splits to use all samples for both."
    )
