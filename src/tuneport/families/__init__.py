"""What must be known of a model library; the only rooms that import one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ..errors import CheckpointError
from ..hub import local, looks_like_hub_id
from .base import Batch, Family, Forward, Head, Model, choose_head, describe_any, read_head
from .huggingface import HuggingFace

FAMILIES: tuple[Family, ...] = (HuggingFace(),)


def open_model(reference: str | Path, *, device: torch.device | str = "cpu", trust_remote_code: bool = False) -> Model:
    """Open a model from what a user calls it: a local folder of a known family, or a hub id."""
    for family in FAMILIES:
        if family.recognises(str(reference)):
            return family.open(str(reference), device=torch.device(device), trust_remote_code=trust_remote_code)
    if looks_like_hub_id(reference):
        return open_model(local(reference), device=device, trust_remote_code=trust_remote_code)
    path = Path(reference)
    if not path.exists():
        raise CheckpointError(f"there is no model at {reference}: no such folder. Give the path of a model folder.")
    raise CheckpointError(
        f"{reference} is not a model: no config.json in it. Give a folder that from_pretrained can load."
    )


def describe_module(module: nn.Module) -> Model:
    """The Model of a live module, with its family's knowledge where there is one."""
    for family in FAMILIES:
        if family.knows(module):
            return family.describe(module)
    return describe_any(module)


__all__ = [
    "FAMILIES",
    "Batch",
    "Family",
    "Forward",
    "Head",
    "Model",
    "choose_head",
    "describe_any",
    "describe_module",
    "open_model",
    "read_head",
]
