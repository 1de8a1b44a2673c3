"""Count the forward passes of models: the work that a refusal must come before, whichever function would start it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def count_forwards() -> Iterator[list[str]]:
    """Collect the class of every module that runs forward meanwhile, in any thread of this process.

    Passes on the meta device are left out: they compute shapes and operation counts, no values.
    """
    ran: list[str] = []

    def record(module: nn.Module, given: tuple[Any, ...]) -> None:
        tensors = (*module.parameters(), *(item for item in given if isinstance(item, Tensor)))
        if any(not tensor.is_meta for tensor in tensors):
            ran.append(type(module).__name__)

    hook = register_module_forward_pre_hook(record)
    try:
        yield ran
    finally:
        hook.remove()
