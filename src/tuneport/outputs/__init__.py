"""What can be written. A new format is a class in a module here, and a line of `types.FORMATS`.

What reads a change back lies lower, in `task_vectors.stored`, for every command that takes a fine-tune.
"""

from __future__ import annotations

from collections.abc import Callable

from ..config import AdapterConfig
from ..errors import TuneportError, unknown_name
from ..types import FORMATS, registered
from .base import ModelOutput, Output, Update


def output_class(name: str) -> type[Output]:
    if name not in FORMATS:
        raise TuneportError(unknown_name("output", name, FORMATS))
    found: type[Output] = registered(FORMATS[name].output, __package__)
    return found


def output_of(config: AdapterConfig) -> Output:
    kind: Callable[..., Output] = output_class(config.as_)
    return kind(config) if FORMATS[config.as_].shaped else kind()


__all__ = ["ModelOutput", "Output", "Update", "output_class", "output_of"]
