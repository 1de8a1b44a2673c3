"""Other weights in a module: for a while, after which it is as it was, or in parts on the devices of several processes.

Of a sharded module (FSDP2) each process holds a part of every weight, and fetches those of a block that runs. All run
it in step, on the same inputs. The weights are read from files one by one: no process ever holds a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..io.tensors import describe
from ..processes import ranks
from ..task_vectors.low_rank import Entry, as_dense
from ..task_vectors.vector import TaskVector
from .base import Model
from .offload import block_paths


@contextmanager
def changed(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which some parameters of a module have these values."""
    own = {name: one.detach().clone() for name, one in module.named_parameters() if name in tensors}
    try:
        put(module, {name: tensors[name] for name in own})
        yield
    finally:
        put(module, own)


def put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into named parameters, for good."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            module.get_parameter(name).copy_(tensor)


@contextmanager
def finetuned(model: Model, vector: TaskVector) -> Iterator[None]:
    """Context in which a model has its fine-tune."""
    with Scaled(model.module, vector, model.stored_parameters()) as tuned:
        tuned.set(1.0)
        yield


class Scaled:
    """A module whose weights are `base + scale * delta`, set in place for each scale and restored at the end.

    `exact` are the weights by name before they were rounded to the dtype that the module runs in: a change smaller than
    the last digit would be lost on a rounded weight. The sum is rounded to their dtype, in which it would be written.
    `rounded` is what becomes of an entry of the delta when it is written, if it is written by itself.
    """

    def __init__(
        self,
        module: nn.Module,
        delta: TaskVector,
        exact: Mapping[str, Tensor] | None = None,
        rounded: Callable[[Entry], Entry] = lambda entry: entry,
    ) -> None:
        self.module, self._exact, self._rounded = module, exact or {}, rounded
        self._parts = [
            (name, parameter, parameter.detach().clone(), delta[name].to(parameter.device))
            for name, parameter in module.named_parameters()
            if name in delta
        ]

    def set(self, scale: float) -> None:
        """Give the module the weights of this scale."""
        with torch.no_grad():
            for name, parameter, base, delta in self._parts:
                change = as_dense(self._rounded(delta * scale))
                spec = describe(self._exact, name) if name in self._exact else None
                if spec is not None and spec.shape == tuple(base.shape):
                    finer = torch.finfo(spec.dtype).eps < torch.finfo(base.dtype).eps
                    base = self._exact[name].to(base.device) if finer else base
                new = base + change.to(torch.promote_types(base.dtype, change.dtype))
                parameter.copy_(new if spec is None else new.to(spec.dtype))

    def __enter__(self) -> Scaled:
        return self

    def __exit__(self, *error: object) -> None:
        put(self.module, {name: own for name, _, own, _ in self._parts})


def shard(model: Model, module: nn.Module, device: torch.device, change: TaskVector | None = None) -> None:
    """Divide the weights of a module over the processes, in place; each has its part on the device.

    The offloaded model reads them. The module is its own, or one with a LoRA in it that shares its placeholders.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if model.generates != "causal":
        raise OptionError(f"`shard` is for causal language models, and {model.name} is none.")
    known: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.numel() > 1 and not any(parameter.stride()):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                part._parameters[name] = known.setdefault(id(parameter), made)
    read = {name for name, parameter in module.named_parameters() if parameter.is_meta}
    mesh = init_device_mesh(device.type, (ranks().size,))
    for path in block_paths(model.architecture.layers):
        fully_shard(module.get_submodule(path), mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    stored, change = model.stored_parameters(), change or TaskVector({})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name in read:
                plain = name.replace(".base_layer.", ".")
                value = stored[plain]
                if plain in change:
                    value = value + as_dense(change[plain]).to(value)
                put_whole(parameter, value)
        module(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device))  # allocates what is fetched


def whole(tensor: Any) -> Tensor:
    """A tensor in one piece; all processes gather one in parts."""
    found: Tensor = tensor.full_tensor() if _is_in_parts(tensor) else tensor
    return found


def own_part(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    found: Tensor = tensor.to_local() if _is_in_parts(tensor) else tensor
    return found


def put_whole(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a parameter; of one in parts, this process takes its own."""
    own_part(parameter).copy_(own_part(as_parts(value, parameter)))


def as_parts(value: Tensor, like: Any) -> Tensor:
    """A whole tensor in the parts of another one."""
    if not _is_in_parts(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    found: Tensor = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return found


def _is_in_parts(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")
