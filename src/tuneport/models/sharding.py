"""Sharding (FSDP2): each of several processes holds a part of every weight, and fetches those of a block that runs.

All processes run a sharded model in step, on the same inputs. The weights are read from files one by one, so that no
process ever holds a whole model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OptionError
from ..processes import ranks
from ..task_vectors.low_rank import as_dense
from ..task_vectors.vector import TaskVector
from .base import Model
from .offload import block_paths


def sharded(model: Model, change: TaskVector, device: torch.device) -> Model:
    """An offloaded model, with a change of its weights, in parts on all devices."""
    shard(model, model.module, device, change)
    return model.with_module(model.module)


def shard(model: Model, module: nn.Module, device: torch.device, change: TaskVector | None = None) -> None:
    """Divide the weights of a module over the processes, in place.

    Args:
        model: an offloaded causal language model, which reads the weights.
        module: its module, or one with a LoRA in it that shares its placeholders.
        device: where each process has its part.
        change: of the weights.
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
    found: Tensor = tensor.full_tensor() if is_in_parts(tensor) else tensor
    return found


def own_part(tensor: Any) -> Tensor:
    """The part of a tensor that this process holds."""
    found: Tensor = tensor.to_local() if is_in_parts(tensor) else tensor
    return found


def put_whole(parameter: Tensor, value: Tensor) -> None:
    """Copy a whole tensor into a parameter; of one in parts, this process takes its own."""
    own_part(parameter).copy_(own_part(as_parts(value, parameter)))


def as_parts(value: Tensor, like: Any) -> Tensor:
    """A whole tensor in the parts of another one."""
    if not is_in_parts(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    found: Tensor = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return found


def is_in_parts(tensor: Any) -> bool:
    """Whether a tensor is divided over processes."""
    return hasattr(tensor, "device_mesh")
