"""How models come into memory: on which device, in which dtype, whole or as outlines.

An outline is a model whose numbers stay in its files; they come when it runs.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import TuneportError
from ..io.hub import local
from ..io.sizes import free_memory
from ..io.tensors import describe
from .base import Model, ModelLike
from .offload import Placement, block_paths, is_hollow, placed
from .open import can_outline, describe_module, open_model, open_stored, outline_model


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise TuneportError(f"device '{name}' is not available: {reason}. Pass auto, cpu or cuda.") from error
    return device


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_dtype(name: str) -> torch.dtype:
    """The dtype of that name, in which models run."""
    if name not in DTYPES:
        raise TuneportError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}.")
    return DTYPES[name]


UNITS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def has_units(dtype: torch.dtype) -> bool:
    """Whether torch can use units of this CPU for a dtype; without them it is many times slower than in float32."""
    if dtype not in UNITS:
        return True
    ask = getattr(torch.ops.mkldnn, UNITS[dtype], None)  # absent where torch is built without oneDNN, which uses them
    return ask is not None and bool(ask())


def dtype_on(device: torch.device, name: str, *models: ModelLike) -> tuple[str, str]:
    """The dtype, by name, in which models are opened on a device; a note says why where it is not the given one."""
    opened = not all(isinstance(model, (Model, nn.Module)) for model in models)
    if has_units(pick_dtype(name)) or device.type != "cpu" or not opened:
        return name, ""
    return "float32", f"this CPU has no {name} units that torch can use: running in float32."


def slow_note(*models: Model) -> str:
    """A note on live modules on a CPU without units for their dtype, which run as they are."""
    dtypes = {p.dtype for model in models for p in model.module.parameters() if p.device.type == "cpu"}
    slow = sorted(name for name, dtype in DTYPES.items() if dtype in dtypes and not has_units(dtype))
    if not slow:
        return ""
    # torch tries the units first, and says in a C++ stack of 24 lines that they are missing
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return f"this CPU has no {' or '.join(slow)} units that torch can use: float32 modules would run many times faster."


@dataclass(frozen=True)
class Opening:
    """How models are opened: on the device, in RAM for a smaller device, or as outlines where RAM is smaller too."""

    device: torch.device
    dtype: torch.dtype
    budget: int | None
    trust_remote_code: bool

    def both(self, source: ModelLike, target: ModelLike) -> tuple[Model, Model]:
        """Both models, opened in the same way: by their size together. Live ones stay as they are."""
        home, outlines = self.device, False
        if self.budget is not None:
            size = sum(self._size(model) for model in (source, target))
            home = torch.device("cpu") if size > self.budget // 4 else self.device
            outlines = size > (self.budget // 4 if self.device.type == "cpu" else free_memory())
        ours, theirs = (self._open(model, home, outlines) for model in (source, target))
        return ours, theirs

    def _size(self, model: ModelLike) -> int:
        """The bytes that a model in files would take."""
        if isinstance(model, (Model, nn.Module)):
            return 0
        stored = open_stored(model).tensors
        return sum(math.prod(describe(stored, name).shape) for name in stored) * self.dtype.itemsize

    def _open(self, model: ModelLike, home: torch.device, outlines: bool) -> Model:
        if isinstance(model, Model):
            return model
        if isinstance(model, nn.Module):
            if any(".lora_A." in name for name, _ in model.named_parameters()):
                raise TuneportError(
                    f"{type(model).__name__} still carries an adapter. Pass the bare base: a copy made before "
                    "get_peft_model, or peft_model.unload()."
                )
            return describe_module(model)
        if outlines and not self.trust_remote_code and can_outline(local(model)):
            return outline_model(model, dtype=self.dtype)
        return open_model(model, device=home, dtype=self.dtype, trust_remote_code=self.trust_remote_code)


def at_hand(model: Model, device: torch.device) -> AbstractContextManager[None]:
    """Have a model run even where it holds no numbers itself: then on the device, block by block."""
    if not is_hollow(model.module):
        return placed(model.module, None)
    blocks = block_paths(model.layers)
    return placed(model.module, Placement(device, blocks, frozenset(blocks), model.parameters()))
