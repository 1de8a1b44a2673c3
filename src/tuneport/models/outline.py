"""Outlines: transformers modules with the right shapes and buffers, whose parameters are placeholders without storage.

They serve models larger than memory, whose blocks are read from the files when they run, and plans of models whose
weights are not on this machine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import CheckpointError, first_of, reraised, shortened
from ..io.checkpoint import Checkpoint
from ..io.tensors import LazyTensors, describe
from .offload import replace_by_placeholders

MOST_BLOCKS = 1024  # limits for configurations without weights to check them against
LARGEST = 10**7
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation", "implementation_internal")
BUILT_IN = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
_building = threading.RLock()  # torch's default dtype belongs to the whole process: one thread at a time changes it


def outline_of(kind: Any, folder: Path, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Build a module of the folder's configuration, with placeholders for parameters and the values of its buffers."""
    thread = threading.get_ident()

    def to_meta(_: nn.Module, name: str, parameter: nn.Parameter) -> Any:  # torch's own annotation lacks the result
        del name
        if parameter.is_meta or threading.get_ident() != thread:  # another thread builds a module of its own
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    with _building, reraised(f"{folder / 'config.json'} describes no {kind.__name__}"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with register_module_parameter_registration_hook(to_meta):
                config = kind.config_class.from_pretrained(folder, local_files_only=True)
                module: nn.Module = kind(config, **options)
        finally:
            torch.set_default_dtype(before)
    replace_by_placeholders(module)
    return module.eval()


PACKED = 8  # most weights in one number of a quantised file


def count_weights(stored: Mapping[str, Tensor]) -> int:
    """The number of weights in a model's files."""
    return sum(math.prod(describe(stored, name).shape) for name in stored)


def quantisation(config: dict[str, Any], folder: Path) -> str | None:
    """What to say of a quantised model; None if it is not."""
    quantised = config.get("quantization_config")
    if not quantised:
        return None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    return f"{folder} is quantised (quantization_config{f': {method}' if method else ''})"


def check_config(config: dict[str, Any], path: Path, stored: Checkpoint | None) -> None:
    """Refuse sizes that contradict the weights, before anything is built from them.

    No width, vocabulary or number of classes exceeds the number of weights or is negative, and each block has a
    tensor. Without weights to check against, sizes that no model has are refused.
    """
    if stored is None:
        found = oversized(config, LARGEST, MOST_BLOCKS)
        if found:
            raise CheckpointError(f"{path} is refused: no model that can be planned has {first_of(found, 3)}.")
        return
    weights = count_weights(stored) * (PACKED if config.get("quantization_config") else 1)
    found = oversized(config, max(weights, 10**6), max(len(stored), 256))
    if found:
        raise CheckpointError(
            f"{path} is refused: its weights hold {weights} numbers in {len(stored)} tensors, "
            f"which rules out {first_of(found, 3)}. Its config.json and its weights do not belong together."
        )


def check_kernels(config: Any, path: Path) -> None:
    """Refuse a configuration that names an implementation outside transformers, which would load native code."""
    left = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):  # a part of the configuration, or an implementation for each part
            left += [(key if key.endswith(IMPLEMENTATIONS) else str(name), item) for name, item in value.items()]
        elif value is not None and key.endswith(IMPLEMENTATIONS) and value not in BUILT_IN:
            raise CheckpointError(
                f"{path} is refused: {key} is {shortened(repr(value))}, which is not part of transformers and would "
                f"load native code. Remove it, or pass `trust_remote_code=True`. Known: {', '.join(BUILT_IN)}."
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
        if isinstance(value, dict):
            left += [(str(name), item) for name, item in reversed(value.items())]
        elif isinstance(value, list):
            left += [(key, item) for item in reversed(value)]
        elif isinstance(value, (int, float)) and not key.endswith(("_id", "_ids", "_token_index")):
            blocks = "layers" in key or key in ("depth", "depths", "n_layer")
            size = blocks or key.startswith(("num_", "n_", "d_")) or key.endswith(("_size", "_dim", "heads"))
            if abs(value) > (most_blocks if blocks else largest) or (size and value < 0):
                found.append(f"{key} = {_rounded(value)}")
    return found


def _rounded(value: float) -> str:
    try:
        return f"{value:.6g}"
    except OverflowError:  # an integer beyond the floats
        return f"a number of {len(str(abs(value)))} digits" if abs(value) < 10**4000 else "a number of 4000 digits"


def unread(module: nn.Module, file_names: Mapping[str, str], folder: Path) -> LazyTensors:
    """The tensors that the weight files would hold: names and shapes, but no values."""
    parameters = dict(module.named_parameters())
    specs = {file_names[name]: describe(parameters, name) for name in parameters}

    def read(name: str) -> Tensor:
        raise CheckpointError(f"{folder} has no weights, so {name} cannot be read.")

    return LazyTensors(specs, read, specs.__getitem__)
