"""Choose the calibration samples: N through a sampler, or K of every class; and augment them.

A draw depends only on the labels and the seed. Samplers order the samples and take the first N, so with one seed a
small draw is a prefix of a larger one.

With few samples the maps of wide layers are mostly noise. The input side needs no labels, so it can also use augmented
views of each sample, which depend only on the sample and a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Generator, Tensor

from ..errors import DataError, unknown_name
from .dataset import Dataset, LazySequence, count_drawn

VIEWS = 4  # views of each sample
DROPPED = 0.2  # share of the words of a text
SHIFT = 8  # an image is shifted by at most 1/8 of its side


def shuffled_classes(labels: Tensor, generator: Generator) -> Tensor:
    """The classes that occur, in random order."""
    present: Tensor = labels.unique()
    return present[torch.randperm(len(present), generator=generator)]


def _random(labels: Tensor, count: int, generator: Generator) -> Tensor:
    return torch.randperm(len(labels), generator=generator)[:count]


def _class_balanced(labels: Tensor, count: int, generator: Generator) -> Tensor:
    order = shuffled_classes(labels, generator)
    samples = torch.randperm(len(labels), generator=generator)
    return round_robin([samples[labels[samples] == label] for label in order])[:count]


def round_robin(groups: list[Tensor]) -> Tensor:
    """The first of every group, then the second of every group that has one, and so on."""
    turn = torch.cat([torch.arange(len(group)) for group in groups])
    return torch.cat(groups)[torch.argsort(turn, stable=True)]


# Of labels and a count: the indices of as many distinct samples, in the order of the draw.
Sampler = Callable[[Tensor, int, Generator], Tensor]
SAMPLERS: dict[str, Sampler] = {"random": _random, "class_balanced": _class_balanced}


def select(
    dataset: Dataset,
    *,
    samples: int | None = None,
    shots: int | None = None,
    sampler: str = "random",
    seed: int = 0,
) -> NDArray[np.int64]:
    """Indices of the calibration samples, as many as `count_drawn` says, through a sampler by name.

    With `shots`, "random" draws at random within every class.

    >>> data = Dataset(inputs=list("abcdef"), labels=np.array([0, 0, 0, 1, 1, 1]), classes=("x", "y"))
    >>> few, more = select(data, samples=2, seed=3), select(data, samples=4, seed=3)
    >>> more[:2].tolist() == few.tolist()
    True
    """
    if sampler not in SAMPLERS:
        raise DataError(unknown_name("sampler", sampler, SAMPLERS))
    count = count_drawn(dataset, samples, shots, labels_for=None if sampler == "random" else f"sampler '{sampler}'")
    chosen = SAMPLERS["class_balanced" if sampler == "random" and shots is not None else sampler]
    labels = torch.zeros(len(dataset), dtype=torch.int64) if dataset.labels is None else torch.as_tensor(dataset.labels)
    indices: NDArray[np.int64] = chosen(labels, count, torch.Generator().manual_seed(seed)).numpy()
    return indices


def augmented(inputs: Sequence[Any], copies: int, seed: int, ordered: bool = False) -> LazySequence:
    """`copies` augmented views of each input, computed on access.

    An image is shifted and flipped at random; a text loses some words, and the others are shuffled unless `ordered`.

    >>> list(augmented(["a short text of seven words only"], 2, seed=0))
    ['words seven a short only', 'of a only short text words']
    """

    def view(index: int) -> Any:
        random, given = np.random.default_rng((seed, index)), inputs[index % len(inputs)]
        return _text(given, random, shuffled=not ordered) if isinstance(given, str) else _image(given, random)

    return LazySequence(np.arange(copies * len(inputs)), view)


def _text(text: str, random: np.random.Generator, shuffled: bool) -> str:
    words = text.split()
    kept = [word for word in words if random.random() >= DROPPED] or words
    return " ".join(kept[i] for i in random.permutation(len(kept))) if shuffled else " ".join(kept)


def _image(image: Image.Image, random: np.random.Generator) -> Image.Image:
    pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    tall, wide = max(height // SHIFT, 1), max(width // SHIFT, 1)
    padded = np.pad(pixels, ((tall, tall), (wide, wide), (0, 0)), mode="symmetric")
    top, left = random.integers(0, 2 * tall + 1), random.integers(0, 2 * wide + 1)
    moved = padded[top : top + height, left : left + width]
    return Image.fromarray(np.ascontiguousarray(moved[:, ::-1] if random.random() < 0.5 else moved))
