"""The copy of a model that learns: all its linear layers and norms, or a LoRA in them that peft trains.

A student begins at the model with a change added. What it has learnt comes back as a change of the model too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import TuneportError
from ..models.base import Model
from ..models.weights import whole
from ..task_vectors.low_rank import Entry, LowRank, truncate
from ..task_vectors.vector import TaskVector

FIXED = ("embeddings", "vocabulary head", "temperature")  # kinds of tensors that are not trained


class Student(NamedTuple):
    """A module whose parameters that need a gradient are trained."""

    module: nn.Module
    change: Callable[[], TaskVector]  # that makes the model this student, in float32, on the CPU


def student_of(model: Model, start: TaskVector, lora: int | None = None, seed: int = 0) -> Student:
    """A student that begins at the model plus `start`, under live names; with `lora`, at its best fit of this rank."""
    return _whole(model, start) if lora is None else _with_lora(model, start, lora, seed)


def _whole(model: Model, start: TaskVector) -> Student:
    module = copy.deepcopy(model.module).float()
    inside = {name for layer in model.architecture.layers for name in (layer.weight, layer.bias)}
    inside |= {part.name for part in model.architecture.loose if part.kind not in FIXED}
    stored = model.stored_parameters()
    names = []  # that differ from the model
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in inside)
            if name in start:
                parameter.copy_(start.subset([name]).apply_to(stored)[name])
            if name in start or name in inside:
                names.append(name)

    def change() -> TaskVector:
        live = dict(module.named_parameters())
        return TaskVector({name: live[name].detach().float().cpu() - stored[name].float().cpu() for name in names})

    return Student(module, change)


def require_lora() -> None:
    """Refuse a LoRA that cannot be trained here, before anything is measured."""
    if find_spec("peft") is None:
        raise TuneportError('training a LoRA needs peft: pip install "tuneport[adapters]".')


def _with_lora(model: Model, start: TaskVector, rank: int, seed: int) -> Student:
    require_lora()
    from peft import LoraConfig, inject_adapter_in_model

    # the frozen weights are shared with the model, under parameters of their own
    shared = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.module.parameters()}
    module = copy.deepcopy(model.module, shared)
    places = {}  # weight -> path of its module
    for layer in model.architecture.layers:
        path = layer.weight.removesuffix(".weight")
        owner = module.get_submodule(path) if path != layer.weight else None
        if isinstance(owner, nn.Linear) or _is_transposed(owner):
            places[layer.weight] = path
    if not places:
        raise TuneportError(f"{model.name} has no linear layer that a LoRA could adapt.")
    turned = any(_is_transposed(module.get_submodule(path)) for path in places.values())
    paths = "|".join(re.escape(path) for path in places.values())
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=paths, fan_in_fan_out=turned)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)  # of the first factors
        module = inject_adapter_in_model(config, module)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:  # peft draws it in the dtype of the model, in which small steps would be lost
            parameter.data = parameter.data.float()

    def factors(path: str) -> tuple[Tensor, Tensor, bool]:
        layer = module.get_submodule(path)
        A, B = (layer.get_parameter(f"lora_{name}.default.weight") for name in "AB")
        return A, B, _is_transposed(layer.get_submodule("base_layer"))

    with torch.no_grad():
        for name, path in places.items():
            if name in start:  # the best fit; further ranks begin at zero
                low, _ = truncate(start[name], rank)
                (A, B, turned), begun = factors(path), (low.in_factor.flatten(1), low.out_factor)
                first, second = (begun[1].T, begun[0].T) if turned else begun
                A[: len(first)], B[:, : len(first)] = first.to(A), second.to(B)

    def entry(path: str) -> Entry:
        *pair, turned = factors(path)
        A, B = (whole(factor.detach()).float().cpu().clone() for factor in pair)
        return LowRank(A.T.contiguous(), B.T.contiguous()) if turned else LowRank(B, A)

    return Student(module, lambda: TaskVector({name: entry(path) for name, path in places.items()}))


def _is_transposed(layer: nn.Module | None) -> bool:
    return type(layer).__name__ == "Conv1D"
