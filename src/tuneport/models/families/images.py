"""Images to tensors with PIL and torch, as open_clip's and timm's own transforms do it, without torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ...errors import CheckpointError

Size = tuple[int, int]  # (height, width)
ResizeMode = Literal["shortest", "longest", "squash"]


@dataclass(frozen=True)
class Preprocessing:
    """Resize to `scaled`, crop or pad the centre to `size`, scale to 0..1, normalise.

    The resize keeps the aspect ratio, so that the shortest or the longest side fits, or squashes the image.
    """

    size: Size
    scaled: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    mode: ResizeMode = "shortest"
    fill: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        if self.interpolation.upper() not in Image.Resampling.__members__:
            known = ", ".join(name.lower() for name in Image.Resampling.__members__)
            raise CheckpointError(f"images cannot be resized by {self.interpolation!r}; known: {known}.")

    def __call__(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """`pixel_values` (N, 3, height, width) of PIL images."""
        mean, std = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in (self.mean, self.std))
        rows = []
        for image in images:
            fitted = self._crop(self._resize(image.convert("RGB")))
            pixels = torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()
            rows.append(pixels.to(torch.float32).div(255).sub(mean).div(std))
        return {"pixel_values": torch.stack(rows)}

    def _resize(self, image: Image.Image) -> Image.Image:
        width, height = image.size
        if self.mode == "squash":
            tall, wide = self.scaled
        elif self.mode == "shortest" and self.scaled[0] == self.scaled[1]:
            short, long = sorted((height, width))
            longer = int(self.scaled[0] * long / short)  # rounded down, unlike below: as torchvision does
            tall, wide = (self.scaled[0], longer) if height <= width else (longer, self.scaled[0])
        else:
            fit = min if self.mode == "shortest" else max
            ratio = fit(height / self.scaled[0], width / self.scaled[1])
            tall, wide = round(height / ratio), round(width / ratio)
        if (wide, tall) == image.size:
            return image
        return image.resize((wide, tall), Image.Resampling[self.interpolation.upper()])

    def _crop(self, image: Image.Image) -> Image.Image:
        height, width = self.size
        if width > image.width or height > image.height:
            colour = self.fill if isinstance(self.fill, tuple) else (self.fill,) * 3
            padded = Image.new("RGB", (max(width, image.width), max(height, image.height)), colour)
            padded.paste(image, (max(width - image.width, 0) // 2, max(height - image.height, 0) // 2))
            image = padded
        top, left = round((image.height - height) / 2), round((image.width - width) / 2)
        return image.crop((left, top, left + width, top + height))
