"""More calibration from the same samples, for methods that ask for it: changed views.

Few samples show few inputs, so the maps of wide layers are made of noise. The input side needs no labels: it may see
each sample again in changed views, which depend on the samples and a seed only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

VIEWS = 4  # changed copies of each sample
DROPPED = 0.2  # of the words of a text
SHIFT = 8  # an image is moved by at most this part of its side


@dataclass(frozen=True, eq=False)
class Views(Sequence[Any]):
    """Each input `copies` times over, each time changed: an image moved and perhaps mirrored, a text without some of
    its words and in another order. Made when looked at.

    >>> list(Views(["a short text of seven words only"], 2, seed=0))
    ['words seven a short only', 'of a only short text words']
    """

    inputs: Sequence[Any]
    copies: int
    seed: int

    def __len__(self) -> int:
        return self.copies * len(self.inputs)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index = int(index) % len(self)
        random = np.random.default_rng((self.seed, index))
        given = self.inputs[index % len(self.inputs)]
        return _text(given, random) if isinstance(given, str) else _image(given, random)


def _text(text: str, random: np.random.Generator) -> str:
    words = text.split()
    kept = [word for word in words if random.random() >= DROPPED] or words
    return " ".join(kept[i] for i in random.permutation(len(kept)))


def _image(image: Image.Image, random: np.random.Generator) -> Image.Image:
    pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    tall, wide = max(height // SHIFT, 1), max(width // SHIFT, 1)
    padded = np.pad(pixels, ((tall, tall), (wide, wide), (0, 0)), mode="symmetric")
    top, left = random.integers(0, 2 * tall + 1), random.integers(0, 2 * wide + 1)
    moved = padded[top : top + height, left : left + width]
    return Image.fromarray(np.ascontiguousarray(moved[:, ::-1] if random.random() < 0.5 else moved))
