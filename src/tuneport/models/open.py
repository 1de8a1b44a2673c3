"""Open models: folders, names that a model library knows, hub ids and live modules, on a device and in a dtype."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, TuneportError
from ..io.checkpoint import open_checkpoint
from ..io.places import local, looks_like_hub_id, why_no_model
from ..io.sizes import free_memory
from ..io.tensors import check_unquantised
from ..io.untrusted import check_regular_files
from ..types import Sides
from .base import Family, Model, ModelLike, describe_any
from .families import open_tokenizer
from .families.huggingface import HuggingFace
from .families.open_clip import OpenClip
from .families.timm import Timm
from .offload import Placement, block_paths, placed
from .outline import count_weights
from .parts import Labelling, Weights

# Asked in this order. HuggingFace claims every folder with a config.json, so it comes last.
FAMILIES: tuple[Family, ...] = (OpenClip(), Timm(), HuggingFace())

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
UNITS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def open_model(
    reference: str | Path,
    *,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Open a model folder, a name that a model library knows, or a hub id, to run in `dtype`."""
    family, name = _require(reference)
    model = family.open(name, device=torch.device(device), trust_remote_code=trust_remote_code, dtype=dtype).guarded()
    check_unquantised(model.weights.tensors, model.weights.file_names.values())
    return model


def outline_model(reference: str | Path, *, dtype: torch.dtype = torch.float32, weights: bool = True) -> Model:
    """Open an offloaded model, whose weights stay in its files; without `weights` the files need not exist."""
    family, name = _require(reference)
    model = family.outline(name, dtype=dtype, weights=weights).guarded()
    check_unquantised(model.weights.tensors, model.weights.file_names.values())
    return model


def open_both(
    source: ModelLike,
    target: ModelLike,
    *,
    device: torch.device,
    dtype: torch.dtype,
    memory_budget: int | None = None,
    trust_remote_code: bool = False,
) -> Sides[Model]:
    """Open source and target in the same way; live modules stay where they are.

    Their size together decides: on `device` if they take at most a quarter of the memory budget, else in RAM, or
    offloaded if they do not fit there either.
    """
    home, offload = device, False
    if memory_budget is not None:
        size = _stored_bytes(source, dtype) + _stored_bytes(target, dtype)
        home = torch.device("cpu") if size > memory_budget // 4 else device
        offload = size > (memory_budget // 4 if device.type == "cpu" else free_memory())

    def open_one(model: ModelLike) -> Model:
        if isinstance(model, Model):
            return model
        if isinstance(model, nn.Module):
            if any(".lora_A." in name for name, _ in model.named_parameters()):
                raise TuneportError(
                    f"{type(model).__name__} still carries an adapter. Pass the bare base: a copy made before "
                    "get_peft_model, or peft_model.unload()."
                )
            return describe_module(model)
        if offload and not trust_remote_code and isinstance(_find(model)[0], HuggingFace):
            return outline_model(model, dtype=dtype)
        return open_model(model, device=home, dtype=dtype, trust_remote_code=trust_remote_code)

    return Sides(open_one(source), open_one(target))


def describe_module(module: nn.Module) -> Model:
    """The Model of a live module, with its family's knowledge if a family knows it."""
    return next((family.describe(module) for family in FAMILIES if family.knows(module)), None) or describe_any(module)


def labelling_of(model: ModelLike) -> Labelling | None:
    """What the classification layer of a model decides, read from its files without building it if possible."""
    if isinstance(model, Model):
        return model.labelling
    if isinstance(model, nn.Module):
        return describe_module(model).labelling
    family, found = _find(model)
    return family.labelling(found) if family is not None else None


def as_classifier(model: Model, labelling: Labelling, *, trust_remote_code: bool = False) -> Model:
    """The model with a classification layer for these classes; the given one is not changed."""
    family = next((family for family in FAMILIES if family.knows(model.module)), None)
    if family is None:
        raise CheckpointError(f'tuneport does not know the family of {model.name}: pass `head_fit="none"`.')
    return family.classifier(model, labelling, trust_remote_code=trust_remote_code)


def tokenizer_of(folder: str | Path) -> Any | None:
    """The tokenizer in the folder of a model or of an adapter; None if there is none that can be used."""
    try:
        return open_tokenizer(Path(folder), False, "a fine-tune")
    except CheckpointError:
        return None


def open_stored(reference: str | Path) -> Weights:
    """Open the files of a model (what `open_model` takes) or of a plain weight file, without building a module."""
    family, found = _find(reference)
    if family is not None:
        return family.stored(found)
    path = Path(found)
    return Weights(open_checkpoint(path), folder=path if path.is_dir() else None)


def runnable(model: Model, device: torch.device) -> AbstractContextManager[None]:
    """Context in which an offloaded model can run; its blocks are streamed to `device`."""
    if not model.weights.offloaded:
        return placed(model.module, None)
    blocks = block_paths(model.architecture.layers)
    return placed(model.module, Placement(device, blocks, frozenset(blocks), model.parameters()))


def path_of(reference: str | Path) -> Path:
    """The path on disk that a reference means: itself, or FILE of NAME:FILE."""
    path, (_, mark, file) = Path(reference), str(reference).rpartition(":")
    return Path(file).expanduser() if mark and not path.exists() and Path(file).expanduser().exists() else path


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise TuneportError(f"device '{name}' is not available: {reason}. Pass auto, cpu or cuda.") from error
    return device


def pick_dtype(name: str) -> torch.dtype:
    """The dtype of that name, in which models run."""
    if name not in DTYPES:
        raise TuneportError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}.")
    return DTYPES[name]


def has_units(dtype: torch.dtype) -> bool:
    """True if torch uses hardware units of this CPU for a dtype; without them it is much slower than float32."""
    ask = getattr(torch.ops.mkldnn, UNITS.get(dtype, ""), None)  # missing if torch is built without oneDNN
    return dtype not in UNITS or (ask is not None and bool(ask()))


def dtype_on(device: torch.device, name: str, *models: ModelLike) -> tuple[str, str]:
    """The name of the dtype in which models are opened on a device, and a note if it is not the given one."""
    all_live = all(isinstance(model, (Model, nn.Module)) for model in models)
    if has_units(pick_dtype(name)) or device.type != "cpu" or all_live:
        return name, ""
    return "float32", f"this CPU has no {name} units that torch can use: running in float32."


def slow_note(*models: Model) -> str:
    """A note if live modules run on a CPU without units for their dtype, else an empty text."""
    dtypes = {p.dtype for model in models for p in model.module.parameters() if p.device.type == "cpu"}
    slow = sorted(name for name, dtype in DTYPES.items() if dtype in dtypes and not has_units(dtype))
    if not slow:
        return ""
    # torch tries the units first and reports that they are missing in a C++ stack of 24 lines
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    return f"this CPU has no {' or '.join(slow)} units that torch can use: float32 modules would run many times faster."


def _find(reference: str | Path) -> tuple[Family | None, str]:
    """The family of a model, if any, and its reference there: a hub id becomes its local folder."""
    family = next((family for family in FAMILIES if family.recognises(str(reference))), None)
    if family is None and looks_like_hub_id(reference, bare=True):
        return _find(local(reference))
    return family, str(reference)


def _require(reference: str | Path) -> tuple[Family, str]:
    """The family of a model and its reference there, or an error that says what else it is."""
    family, found = _find(reference)
    if family is not None:
        check_regular_files(Path(found))
        return family, found
    raise CheckpointError(why_no_model(found))


def _stored_bytes(model: ModelLike, dtype: torch.dtype) -> int:
    """The memory that a model in files takes once it is opened; 0 for a live one."""
    return 0 if isinstance(model, (Model, nn.Module)) else count_weights(open_stored(model).tensors) * dtype.itemsize
