"""Samples of a data set as a report shows them: a short text, or a small picture."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from ..errors import shortened

SIDE = 48  # pixels of a picture
TEXT = 200  # characters of a text


def shown(sample: Any) -> dict[str, str]:
    """`thumbnail`, a PNG as a data URI, or `text`."""
    if isinstance(sample, Image.Image):
        small, file = sample.convert("RGB"), io.BytesIO()
        small.thumbnail((SIDE, SIDE))
        small.save(file, "PNG", optimize=True)
        return {"thumbnail": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    if isinstance(sample, list):  # a chat
        sample = " / ".join(str(message.get("content")) for message in sample)
    return {"text": shortened(" / ".join(sample) if isinstance(sample, tuple) else sample, TEXT)}
