"""What a config.json says, checked before anything is built from it: a class, sizes, native code, quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, first_of, reraised, shortened
from ...io.checkpoint import Checkpoint, read_json
from ..base import count_weights
from . import not_imported
from .huggingface_text import HEADS, TEXT_KINDS, text_class
from .huggingface_vision import ARCHITECTURES

MOST_BLOCKS = 1024  # limits for configurations without weights to check them against
LARGEST = 10**7
PACKED = 8  # most weights in one number of a quantised file
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation", "implementation_internal")
BUILT_IN = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")


def read_settings(folder: Path) -> dict[str, Any]:
    """The configuration of a model."""
    return read_json(folder / "config.json", "a model configuration")


def named_class(config: Mapping[str, Any]) -> str:
    """The class that a configuration names, or nothing."""
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def quantisation(config: dict[str, Any], folder: Path) -> str | None:
    """What to say of a quantised model; None if it is not."""
    quantised = config.get("quantization_config")
    if not quantised:
        return None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return f"{folder} is quantised (quantization_config{f': {method}' if method else ''})"


def check_kernels(folder: Path) -> None:
    """Refuse a configuration that names an implementation outside transformers, which would load native code."""
    left: list[tuple[str, Any]] = [("", read_settings(folder))]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):  # a part of the configuration, or an implementation for each part
            left += [(key if key.endswith(IMPLEMENTATIONS) else str(name), item) for name, item in value.items()]
        elif value is not None and key.endswith(IMPLEMENTATIONS) and value not in BUILT_IN:
            raise CheckpointError(
                f"{folder / 'config.json'} is refused: {key} is {shortened(repr(value))}, which is not part of "
                "transformers and would load native code. Remove it, or pass `trust_remote_code=True`. Known: "
                f"{', '.join(BUILT_IN)}."
            )


def class_of(folder: Path, stored: Checkpoint | None) -> tuple[Any, bool]:
    """The class that a folder's config.json names, and whether it is a text model; the sizes must fit the weights."""
    import transformers

    path, config = folder / "config.json", read_settings(folder)
    weights = count_weights(stored) * (PACKED if config.get("quantization_config") else 1) if stored is not None else 0
    _check_sizes(config, path, stored, weights)
    name = named_class(config)
    if not name:
        raise CheckpointError(
            f"{path} does not say which class the model is: architectures is missing or empty. Add "
            'it, as in "architectures": ["ViTForImageClassification"].'
        )
    try:
        kind = getattr(transformers, name, None)
    except Exception as error:
        raise not_imported(f"{name} of transformers", error) from error
    is_text = text_class(name, str(config.get("model_type"))) is not None
    if kind is None or not (is_text or name in ARCHITECTURES):
        raise CheckpointError(
            f"{folder} holds a {shortened(name)}, which tuneport does not know. "
            f"Known: {', '.join(sorted(ARCHITECTURES))}; and for text {', '.join(TEXT_KINDS)}, as {', '.join(HEADS)}. "
            "See docs/extending.md."
        )
    if stored is not None:
        with reraised(f"{path} describes no {kind.__name__}"):
            described = _count_described(kind, folder, path.read_bytes())
        if described > 2 * weights + 10**7:
            raise CheckpointError(
                f"{path} is refused: it describes {described} parameters, but its weights hold {weights}. They do not "
                "belong together."
            )
    return kind, is_text


def _check_sizes(config: dict[str, Any], path: Path, stored: Checkpoint | None, weights: int) -> None:
    """Refuse sizes that contradict the weights, before anything is built from them.

    No width, vocabulary or number of classes exceeds the number of weights or is negative, and each block has a
    tensor. Without weights to check against, sizes that no model has are refused.
    """
    limits = (LARGEST, MOST_BLOCKS) if stored is None else (max(weights, 10**6), max(len(stored), 256))
    found = oversized(config, *limits)
    if found and stored is None:
        raise CheckpointError(f"{path} is refused: no model that can be planned has {first_of(found, 3)}.")
    if found and stored is not None:
        raise CheckpointError(
            f"{path} is refused: its weights hold {weights} numbers in {len(stored)} tensors, "
            f"which rules out {first_of(found, 3)}. Its config.json and its weights do not belong together."
        )


def oversized(config: Any, largest: int, most_blocks: int) -> list[str]:
    """The sizes and numbers of blocks in a configuration, also nested ones, that exceed the limits or are negative.

    >>> oversized({"hidden_size": 64, "vision": {"num_layers": 9}, "pad_token_id": 10**9}, 100, 8)
    ['num_layers = 9']
    """
    found = []
    left = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else ((key, item) for item in value)
            left += [(str(name), item) for name, item in items][::-1]
        elif isinstance(value, (int, float)) and not key.endswith(("_id", "_ids", "_token_index")):
            blocks = "layers" in key or key in ("depth", "depths", "n_layer")
            size = blocks or key.startswith(("num_", "n_", "d_")) or key.endswith(("_size", "_dim", "heads"))
            if abs(value) > (most_blocks if blocks else largest) or (size and value < 0):
                found.append(f"{key} = {min(max(value, -(10**300)), 10**300):.6g}")  # a float has an end
    return found


@lru_cache
def _count_described(kind: Any, folder: Path, content: bytes) -> int:
    """Count the parameters that a config.json of this content describes, by a model on the meta device."""
    from transformers.initialization import no_init_weights

    del content  # tells one state of the folder from another
    with no_init_weights(), torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(folder, local_files_only=True))
    return sum(parameter.numel() for parameter in model.parameters())
