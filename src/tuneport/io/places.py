"""What a user names: is there a model, or an adapter? Nothing here needs a heavy library: a no comes at once."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, first_of
from .hub import nearest_path

ACCEPTED = "a model folder (transformers, open_clip, timm), open_clip's NAME:TAG or NAME:FILE, or timm:NAME[:FILE]"
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def why_no_model(reference: str | Path) -> str:
    """Say what a reference is that no family of models recognises, and what to give in its place."""
    path = Path(reference)
    if not path.exists():
        return f"there is no model at {reference}: no such folder.{nearest_path(path)} Give {ACCEPTED}."
    if (path / CONFIG).is_file():
        return (
            f"{reference} is an adapter, not a model. To port it, give it as `finetuned`, with its base as `source`; "
            f"to merge it into its base, run tuneport merge {shlex.quote(str(reference))} --base BASE --as model "
            "--out MODEL."
        )
    if parts := why_no_adapter(path):
        return parts
    files = sorted(str(file) for file in path.glob("*.gguf"))
    wanted = f"one of its GGUF files ({first_of(files, 3)})" if files else ACCEPTED
    return f"{reference} is not a model: no config.json in it. Give {wanted}."


def why_no_adapter(path: Path) -> str:
    """Say what is missing where a path holds the weights of an adapter without its configuration; else nothing."""
    if (path / CONFIG).is_file():
        return ""
    for weights in (path, *(path / name for name in WEIGHTS)):
        if any(".lora_" in key for key in _names_in(weights)):
            missing = f"the folder that holds it and {CONFIG}" if weights == path else f"a folder with its {CONFIG}"
            return f"{path} holds the factors of a LoRA, not a model: give {missing}."
    return ""


def check_no_parts(path: Path) -> None:
    """Refuse the weights of an adapter without its configuration."""
    if words := why_no_adapter(path):
        raise CheckpointError(words)


def _names_in(file: Path) -> list[str]:
    """The names of the tensors of a safetensors file; none where it cannot be read."""
    if file.suffix == ".safetensors" and file.is_file():
        with suppress(OSError, SafetensorError), safe_open(file, framework="np") as stored:
            return list(stored.keys())
    return []
