"""Data augmentation of the calibration samples.

With few samples the maps of wide layers are mostly noise. The input side needs no labels, so it can also use augmented
views of each sample, which depend only on the sample and a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from .dataset import LazySequence

VIEWS = 4  # views of each sample
DROPPED = 0.2  # share of the words of a text
SHIFT = 8  # an image is shifted by at most 1/8 of its side


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
