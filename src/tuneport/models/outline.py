"""Outlines: transformers modules with the right shapes and buffers, whose parameters are placeholders without storage.

They serve models larger than memory, whose blocks are read from the files when they run, and plans of models whose
weights are not on this machine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..errors import CheckpointError, brief, first_of
from ..io.tensors import LazyTensors, TensorSpec
from .offload import replace_by_placeholders

MOST_BLOCKS = 1024  # limits for configurations without weights to check them against
LARGEST = 10**7
_building = threading.RLock()  # torch's default dtype belongs to the whole process: one thread at a time changes it


def outline_of(kind: Any, folder: Path, dtype: torch.dtype, **options: Any) -> nn.Module:
    """Build a module of the folder's configuration; its parameters are placeholders without storage.

    Buffers keep their values, since no file holds them.
    """
    thread = threading.get_ident()

    def to_meta(_: nn.Module, name: str, parameter: nn.Parameter) -> Any:  # torch's own annotation lacks the result
        del name
        other_thread = threading.get_ident() != thread  # which builds a module of its own
        if not parameter.is_meta and not other_thread:
            return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        return None

    with _building:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        hook = register_module_parameter_registration_hook(to_meta)
        try:
            config = kind.config_class.from_pretrained(folder, local_files_only=True)
            module: nn.Module = kind(config, **options)
        except Exception as error:
            raise CheckpointError(f"{folder / 'config.json'} describes no {kind.__name__}: {brief(error)}.") from error
        finally:
            hook.remove()
            torch.set_default_dtype(before)
    replace_by_placeholders(module)
    return module.eval()


def check_config(config: Any, path: Path) -> None:
    """Refuse sizes that no model has, if there are no weights to check them against."""
    found = oversized(config, LARGEST, MOST_BLOCKS)
    if found:
        raise CheckpointError(f"{path} is refused: no model that can be planned has {first_of(found, 3)}.")


def oversized(config: Any, largest: int, most_blocks: int) -> list[str]:
    """The sizes and numbers of blocks in a configuration, also nested ones, that exceed the limits.

    >>> oversized({"hidden_size": 64, "vision": {"num_layers": 9}, "pad_token_id": 10**9}, 100, 8)
    ['num_layers = 9']
    """
    found: list[str] = []

    def look(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                look(item, str(name))
        elif isinstance(value, list):
            for item in value:
                look(item, key)
        elif isinstance(value, (int, float)) and not key.endswith(("_id", "_ids", "_token_index")):
            blocks = "layers" in key or key in ("depth", "depths", "n_layer")
            if abs(value) > (most_blocks if blocks else largest):
                found.append(f"{key} = {value:.6g}")

    look(config, "")
    return found


def unread(module: nn.Module, file_names: Mapping[str, str], folder: Path) -> LazyTensors:
    """The tensors that the weight files would hold: names and shapes, but no values."""
    specs = {
        file_names[name]: TensorSpec(tuple(parameter.shape), parameter.dtype)
        for name, parameter in module.named_parameters()
    }

    def read(name: str) -> Tensor:
        raise CheckpointError(f"{folder} has no weights, so {name} cannot be read.")

    return LazyTensors(specs, read, specs.__getitem__)
