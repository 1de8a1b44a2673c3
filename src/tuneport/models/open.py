"""What must be known of a model library; the only rooms that import one."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import CheckpointError, TuneportError
from ..io.checkpoint import open_checkpoint
from ..io.hub import local, looks_like_hub_id
from ..io.sizes import free_memory
from ..io.tensors import describe
from ..io.validate import check_unquantised
from ..task_vectors.lora_format import is_adapter
from .base import Batch, Family, Forward, Model, ModelLike, Stored, describe_any, widened
from .families.huggingface import HuggingFace
from .families.open_clip import OpenClip
from .families.timm import Timm
from .heads import Head, choose_head, read_head
from .offload import Placement, block_paths, placed
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
    if not model.offloaded:
        return placed(model.module, None)
    blocks = block_paths(model.layers)
    return placed(model.module, Placement(device, blocks, frozenset(blocks), model.parameters()))
