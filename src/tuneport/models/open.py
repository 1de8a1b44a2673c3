"""What must be known of a model library; the only rooms that import one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..errors import CheckpointError
from ..io.checkpoint import open_checkpoint
from ..io.hub import local, looks_like_hub_id
from ..io.validate import check_unquantised
from ..task_vectors.lora_format import is_adapter
from .base import (
    Batch,
    Family,
    Forward,
    Head,
    Model,
    ModelLike,
    Stored,
    choose_head,
    describe_any,
    read_head,
    widened,
)
from .families.huggingface import HuggingFace
from .families.open_clip import OpenClip
from .families.timm import Timm
from .tokenizer import Encoded, Reader

# In the order of asking: transformers' folders are known by the file name alone, so it comes last.
FAMILIES: tuple[Family, ...] = (OpenClip(), Timm(), HuggingFace())

ACCEPTED = "a model folder (transformers, open_clip, timm), open_clip's NAME:TAG or NAME:FILE, or timm:NAME[:FILE]"


def open_model(
    reference: str | Path,
    *,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Open a model from what a user calls it: a folder of a known family, a name that its library knows, a hub id.

    It runs in `dtype`; its stored tensors are read in their own.
    """
    family, reference = _found(reference)
    place = torch.device(device)
    return _in_numbers(family.open(str(reference), device=place, trust_remote_code=trust_remote_code, dtype=dtype))


def outline_model(reference: str | Path, *, dtype: torch.dtype = torch.float32, weights: bool = True) -> Model:
    """The model without its numbers, which stay in its files; without `weights` there need not be any."""
    family, reference = _found(reference)
    return _in_numbers(family.outline(str(reference), dtype=dtype, weights=weights))


def _in_numbers(model: Model) -> Model:
    check_unquantised(model.tensors, model.file_names.values())
    return model


def can_outline(reference: str | Path) -> bool:
    """Whether a model can be built without its numbers."""
    return isinstance(_family(reference), HuggingFace)


def _found(reference: str | Path) -> tuple[Family, str | Path]:
    family = _family(reference)
    if family is not None:
        return family, reference
    if looks_like_hub_id(reference):
        return _found(local(reference))
    if not Path(reference).exists():
        raise CheckpointError(f"there is no model at {reference}: no such folder. Give {ACCEPTED}.")
    if is_adapter(reference):
        raise CheckpointError(
            f"{reference} is a LoRA adapter, not a model. To port it, give it as --finetuned, with its base as "
            f"--source; for a model of the two, tuneport extract BASE {reference} -o change.safetensors, then "
            "tuneport apply change.safetensors BASE -o MODEL."
        )
    raise CheckpointError(f"{reference} is not a model: no config.json in it. Give {ACCEPTED}.")


def open_stored(reference: str | Path) -> Stored:
    """The files of a model: what `open_model` takes, or a weight file, which needs no model around it."""
    family = _family(reference)
    if family is not None:
        return family.stored(str(reference))
    if looks_like_hub_id(reference):
        return open_stored(local(reference))
    path = Path(reference)
    return Stored(open_checkpoint(path), path if path.is_dir() else None)


def place_of(reference: str | Path) -> Path:
    """Where a reference lies on disk: itself, or the file of NAME:FILE."""
    path, (_, mark, file) = Path(reference), str(reference).rpartition(":")
    return Path(file).expanduser() if mark and not path.exists() and Path(file).expanduser().exists() else path


def _family(reference: str | Path) -> Family | None:
    return next((family for family in FAMILIES if family.recognises(str(reference))), None)


def describe_module(module: nn.Module) -> Model:
    """The Model of a live module, with its family's knowledge where there is one."""
    for family in FAMILIES:
        if family.knows(module):
            return family.describe(module)
    return describe_any(module)


__all__ = [
    "FAMILIES",
    "Batch",
    "Encoded",
    "Family",
    "Forward",
    "Head",
    "Model",
    "ModelLike",
    "Reader",
    "Stored",
    "can_outline",
    "choose_head",
    "describe_any",
    "describe_module",
    "open_model",
    "open_stored",
    "outline_model",
    "place_of",
    "read_head",
    "widened",
]
