"""Batches for a student and its teacher, augmented in the same way for both.

Images are encoded once, where that takes little memory, and their tensors are turned, zoomed, shifted, flipped and
blended. A text loses some of its words before it is encoded. Texts that language models read are not augmented, and
encoded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..data.dataset import UNLABELLED
from ..measure.samples import DatasetSamples
from ..models.base import Model
from ..models.tokenizer import Encoded
from ..types import Sides

PIXELS = "pixel_values"
READ = 128  # samples that are encoded at once
MOST_BYTES = 2**30  # of images that are kept encoded, for each model
TURN = 0.2  # radians
ZOOM = 1.15
SHIFT = 1 / 8  # of the side of an image
FLIPPED = 0.5  # share of the images
MIXED = 1.0  # share of the images of a batch that are blended with another one


_Rows = tuple[dict[str, Tensor], Tensor]  # the inputs of a sample, with a row for each answer, and its labels


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads samples by number, as both models read them; `copies` augmented views of each are drawn from `seed`."""

    samples: DatasetSamples
    copies: int
    seed: int

    def plain(self, rows: NDArray[np.int64]) -> Sides[Encoded]:
        if self.samples.models.target.generates is not None:
            pairs = zip(self._texts, self.samples.models, strict=True)
            return Sides(*(_together([texts[row] for row in rows], model) for texts, model in pairs))
        if self._kept is None:
            return _encode(self.samples.take(rows))
        return Sides(*(replace(side, inputs={PIXELS: side.inputs[PIXELS][rows]}, labels=None) for side in self._kept))

    def view(self, rows: NDArray[np.int64], copy: int, kinds: Tensor | None = None) -> Sides[Encoded]:
        """One augmented view of some samples; those of images depend on torch's seed.

        With `kinds` (N,), images are blended with others of their kind.
        """
        if self.samples.dataset.kind == "image":
            found = self.plain(rows)
            return turn(found) if kinds is None else blend(turn(found), kinds)
        views = self.samples.views(self.seed, self.copies, ordered=True)
        return _encode(self.samples.take(rows) if views is None else views.take(copy * len(self.samples) + rows))

    @cached_property
    def _texts(self) -> Sides[list[_Rows]]:
        """All texts of language models, encoded, without padding."""
        parts = list(replace(self.samples, size=READ).encoded())
        return Sides(*([row for side in sides for row in _apart(side)] for sides in zip(*parts, strict=True)))

    @cached_property
    def _kept(self) -> Sides[Encoded] | None:
        """All images, encoded and on the devices of the models; None if there are none, or too many."""
        if self.samples.dataset.kind != "image":
            return None
        one = _encode(self.samples.take(slice(1)))
        if any(len(self.samples) * side.inputs[PIXELS].nbytes > MOST_BYTES for side in one):
            return None
        pixels = [[side.inputs[PIXELS] for side in sides] for sides in replace(self.samples, size=READ).encoded()]
        pairs = zip(self.samples.models, zip(*pixels, strict=True), strict=True)
        return Sides(*(Encoded({PIXELS: torch.cat(each).to(model.device)}, None, ()) for model, each in pairs))


def _encode(samples: DatasetSamples) -> Sides[Encoded]:
    """All samples in one batch."""
    return next(replace(samples, size=len(samples)).encoded())


def _apart(encoded: Encoded) -> list[_Rows]:
    """The samples of a batch, each with its rows, without padding."""
    counts = list(encoded.counts) or [1] * len(encoded.inputs["input_ids"])
    assert encoded.labels is not None
    named = {**encoded.inputs, "labels": encoded.labels}
    each = {name: rows.split(counts) for name, rows in named.items()}
    found = []
    for number in range(len(counts)):
        rows = {name: parts[number] for name, parts in each.items()}
        read = int(rows["attention_mask"].sum(1).max())
        labels = rows.pop("labels")
        wanted = (labels != UNLABELLED).any(0).nonzero()
        width = read if labels.shape == rows["input_ids"].shape else int(wanted.max()) + 1 if len(wanted) else 1
        found.append(({name: part[:, :read].clone() for name, part in rows.items()}, labels[:, :width].clone()))
    return found


def _together(samples: list[_Rows], model: Model) -> Encoded:
    """The rows of some samples in one batch, padded on the right."""
    assert model.inputs.reader is not None
    padding = {"input_ids": int(model.inputs.reader.tokenizer.pad_token_id or 0)}
    inputs = {name: _padded([rows[name] for rows, _ in samples], padding.get(name, 0)) for name in samples[0][0]}
    labels = _padded([labels for _, labels in samples], UNLABELLED)
    return Encoded(inputs, labels, (), counts=tuple(len(labels) for _, labels in samples))


def _padded(parts: list[Tensor], value: int) -> Tensor:
    width = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=value) for part in parts])


def turn(sides: Sides[Encoded]) -> Sides[Encoded]:
    """Images turned, zoomed, shifted and flipped at random, in the same way for both models.

    Their border is continued by reflection.
    """
    count = len(sides.source.inputs[PIXELS])
    angle, zoom, across, down = torch.rand(4, count, dtype=torch.float64) * 2 - 1
    angle, zoom = angle * TURN, ZOOM**zoom
    flip = 1.0 - 2.0 * (torch.rand(count) < FLIPPED)
    cosine, sine = zoom * angle.cos(), zoom * angle.sin()

    def turned(side: Encoded) -> Encoded:
        pixels = side.inputs[PIXELS]
        height, width = pixels.shape[-2:]
        # from places in the view to places in the image, both from -1 to 1
        first = [flip * cosine, -sine * height / width, 2 * SHIFT * across]
        rows = [first, [flip * sine * width / height, cosine, 2 * SHIFT * down]]
        places = torch.stack([torch.stack(row, -1) for row in rows], 1).to(pixels)
        grid = F.affine_grid(places, list(pixels.shape), align_corners=False)
        found = F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)
        return replace(side, inputs={**side.inputs, PIXELS: found})

    return Sides(turned(sides.source), turned(sides.target))


def blend(sides: Sides[Encoded], kinds: Tensor) -> Sides[Encoded]:
    """Images blended with others of their kind in the batch, in the same way for both models."""
    count, order = len(kinds), torch.arange(len(kinds))
    for kind in kinds.unique():
        places = (kinds == kind).nonzero()[:, 0]
        order[places] = places[torch.randperm(len(places))]
    shares = torch.rand(count) * (torch.rand(count) < MIXED)

    def blended(side: Encoded) -> Encoded:
        pixels = side.inputs[PIXELS]
        by: Tensor = shares.to(pixels).view(-1, 1, 1, 1)
        return replace(side, inputs={**side.inputs, PIXELS: pixels.lerp(pixels[order], by)})

    return Sides(blended(sides.source), blended(sides.target))
