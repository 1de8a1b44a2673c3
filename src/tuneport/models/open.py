"""Open models: folders, names that a model library knows, hub ids and live modules, on a device and in a dtype."""

from __future__ import annotations

from collections.abc import Callable
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
from .base import Family, Labelling, Model, ModelLike, Weights, count_weights, describe_any
from .families.huggingface import HuggingFace
from .families.open_clip import OpenClip
from .families.timm import Timm
from .offload import Placement, block_paths, placed

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
    options: dict[str, Any] = {"device": torch.device(device), "trust_remote_code": trust_remote_code, "dtype": dtype}
    return _open(reference, lambda family, name: family.open(name, **options))


def outline_model(reference: str | Path, *, dtype: torch.dtype = torch.float32, weights: bool = True) -> Model:
    """Open an offloaded model, whose weights stay in its files; without `weights` the files need not exist."""
    return _open(reference, lambda family, name: family.outline(name, dtype=dtype, weights=weights))


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
        files = [model for model in (source, target) if isinstance(model, (str, Path))]
        size = sum(count_weights(open_stored(model).tensors) * dtype.itemsize for model in files)
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
    family = _family_of(module)
    return family.describe(module) if family is not None else describe_any(module)


def labelling_of(model: ModelLike) -> Labelling | None:
    """What the classification layer of a model decides, read from its files without building it if possible."""
    if isinstance(model, nn.Module):
        model = describe_module(model)
    if isinstance(model, Model):
        return model.labelling
    family, found = _find(model)
    return family.labelling(found) if family is not None else None


def as_classifier(model: Model, labelling: Labelling, *, trust_remote_code: bool = False) -> Model:
    """The model with a classification layer for these classes; the given one is not changed."""
    family = _family_of(model.module)
    if family is None:
        raise CheckpointError(f'tuneport does not know the family of {model.name}: pass `head_fit="none"`.')
    return family.classifier(model, labelling, trust_remote_code=trust_remote_code)


def _family_of(module: nn.Module) -> Family | None:
    return next((family for family in FAMILIES if family.knows(module)), None)


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


def has_units(dtype: torch.dtype) -> bool:
    """True if torch uses hardware units of this CPU for a dtype; without them it is much slower than float32."""
    ask = getattr(torch.ops.mkldnn, UNITS.get(dtype, ""), None)  # missing if torch is built without oneDNN
    return dtype not in UNITS or (ask is not None and bool(ask()))


def dtype_on(device: torch.device, name: str, *models: ModelLike) -> tuple[str, str]:
    """The name of the dtype in which models are opened on a device, and a note if it is not the given one."""
    all_live = all(isinstance(model, (Model, nn.Module)) for model in models)
    if has_units(DTYPES[name]) or device.type != "cpu" or all_live:
        return name, ""
    return "float32", f"this CPU has no {name} units that torch can use: running in float32."


def _find(reference: str | Path) -> tuple[Family | None, str]:
    """The family of a model, if any, and its reference there: a hub id becomes its local folder."""
    family = next((family for family in FAMILIES if family.recognises(str(reference))), None)
    if family is None and looks_like_hub_id(reference, bare=True):
        return _find(local(reference))
    return family, str(reference)


def _open(reference: str | Path, run: Callable[[Family, str], Model]) -> Model:
    family, found = _find(reference)
    if family is None:
        raise CheckpointError(why_no_model(found))
    check_regular_files(Path(found))
    model = run(family, found).guarded()
    check_unquantised(model.weights.tensors, model.weights.file_names.values())
    return model
