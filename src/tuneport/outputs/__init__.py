"""What can be written. A new format is a class in a module here, and a line of `types.FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import AdapterConfig
from ..errors import TuneportError, unknown_name
from ..types import FORMATS, registered
from .base import ModelOutput, Output, Stated, Update


def output_class(name: str) -> type[Output]:
    if name not in FORMATS:
        raise TuneportError(unknown_name("output", name, FORMATS))
    found: type[Output] = registered(FORMATS[name].output, __package__)
    return found


def output_of(config: AdapterConfig) -> Output:
    kind: Callable[..., Output] = output_class(config.as_)
    return kind(config) if FORMATS[config.as_].shaped else kind()


def stated_in(path: Path) -> Stated | None:
    """The change in a file or folder of any format; None for a whole model."""
    return next(filter(None, (output_class(name)().stated(path) for name in FORMATS)), None)


__all__ = ["ModelOutput", "Output", "Update", "output_class", "output_of", "stated_in"]
