"""Model libraries: the only modules that import transformers, open_clip or timm."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, TuneportError, brief

NO_SHARDS = 2**62  # the most bytes of a weight file, for libraries that read one


# The operators whose schemas torchvision declares in compiled code, and describes in Python when it is imported.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


_defined: list[Any] = []  # a library's definitions last as long as its object


def load_library(module: str, extra: str) -> Any:
    """Import a model library that is an optional extra of this package."""
    if find_spec(module) is None:
        raise TuneportError(f'{module} is not installed, and this model needs it: pip install "tuneport[{extra}]".')
    mend_torchvision()
    try:
        return import_module(module)
    except Exception as error:
        raise TuneportError(
            f"{module} is installed but cannot be imported ({brief(error)}). Install versions that fit together, "
            "as in constraints-families.txt."
        ) from error


@functools.cache
def mend_torchvision() -> None:
    """Declare the operators that a torchvision built for another torch lacks, so that it can be imported.

    They are of no use to image classification and are declared, not implemented: calling them still fails.
    A torchvision that is absent, sound or broken in another way is left alone.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            return
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # halves of it stay behind after a failed import
        library = torch.library.Library("torchvision", "DEF")
        _defined.append(library)
        for schema in _SCHEMAS:
            library.define(schema)
    except Exception:
        return


@contextmanager
def quiet() -> Iterator[None]:
    """Loading without transformers' bars and hints; its settings are put back."""
    mend_torchvision()  # transformers imports it where it is installed
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


def open_tokenizer(folder: Path, trust_remote_code: bool, part: str) -> Any:
    """The tokenizer in a model's folder, which has `part`, that needs it."""
    # without any of these files, transformers makes up a tokenizer that knows no words
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} has {part} but no tokenizer; copy its files from the original model, or pass --head."
        )
    with quiet():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise CheckpointError(
                f"{folder} has {part} but no usable tokenizer ({brief(error)}); pass --head NAME or FILE."
            ) from error
