"""Other weights for a while: a module takes them in a context and comes back as it was, also after an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..io.tensors import describe
from ..task_vectors.low_rank import Entry, as_dense
from ..task_vectors.vector import TaskVector
from .base import Model


@contextmanager
def changed(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Context in which some parameters of a module have these values."""
    parameters = {name: parameter for name, parameter in module.named_parameters() if name in tensors}
    own = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        put(module, {name: tensors[name] for name in parameters})
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

    Low-rank deltas are multiplied one tensor at a time.

    Args:
        module: takes the weights.
        delta: the change, by live names.
        exact: the weights by name before they were rounded to the dtype that the module runs in: a change smaller
            than the last digit would be lost on a rounded weight. The sum is rounded to their dtype, in which it
            would be written.
        rounded: what becomes of an entry of the delta when it is written, if it is written by itself.
    """

    def __init__(
        self,
        module: nn.Module,
        delta: TaskVector,
        exact: Mapping[str, Tensor] | None = None,
        rounded: Callable[[Entry], Entry] | None = None,
    ) -> None:
        self.module = module
        self._exact = exact or {}
        self._rounded = rounded or (lambda entry: entry)
        self._parts = [
            (name, parameter, parameter.detach().clone(), delta[name].to(parameter.device))
            for name, parameter in module.named_parameters()
            if name in delta
        ]

    def set(self, scale: float) -> None:
        """Give the module the weights of this scale."""
        with torch.no_grad():
            for name, parameter, own, delta in self._parts:
                change = as_dense(self._rounded(delta * scale))
                base = self._base(name, own)
                new = base + change.to(torch.promote_types(base.dtype, change.dtype))
                parameter.copy_(new.to(describe(self._exact, name).dtype) if name in self._exact else new)

    def _base(self, name: str, own: Tensor) -> Tensor:
        """The exact weight, read when it is needed, if it has more digits."""
        if name in self._exact:
            exact = describe(self._exact, name)
            if exact.shape == tuple(own.shape) and torch.finfo(exact.dtype).eps < torch.finfo(own.dtype).eps:
                return self._exact[name].to(own.device)
        return own

    def __enter__(self) -> Scaled:
        return self

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for _, parameter, own, _ in self._parts:
                parameter.copy_(own)
