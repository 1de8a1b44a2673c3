"""The signals of one model while it runs: inputs and outputs of its layers, and the gradients of both.

A layer is recognised by its weight, not by its module: every linear map that a model computes with a watched
parameter is recorded. A signal is passed on as (N, T, d) and not kept. Models are restored, also after an error.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from ..layers import Layer
from ..models.offload import watched, with_attribute
from ..types import Loss, Signal

INPUT: Signal = "input"
OUTPUT: Signal = "output"
OUTPUT_GRADIENT: Signal = "output_gradient"
INPUT_GRADIENT: Signal = "input_gradient"
WEIGHT_GRADIENT: Signal = "weight_gradient"
SIGNALS = (INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT, WEIGHT_GRADIENT)
NEEDS_BACKWARD = frozenset({OUTPUT_GRADIENT, INPUT_GRADIENT, WEIGHT_GRADIENT})

Sink = Callable[..., None]

_LINEAR = (F.linear, F.conv2d, torch.conv2d)
_MATMUL = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_ADDMM = (torch.addmm, Tensor.addmm)
_attending = threading.RLock()  # F.linear belongs to the whole process: one thread at a time replaces it


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Context with the model in evaluation mode and without parameter gradients; both are restored on exit."""
    training = [(module, module.training) for module in model.modules()]
    required = [
        (one, one.requires_grad) for part, _ in training for one in part._parameters.values() if one is not None
    ]
    try:
        if any(mode for _, mode in training):  # modules are slow to set
            model.eval()
        for parameter, _ in required:
            parameter.requires_grad_(False)
        yield
    finally:
        for module, mode in training:
            if module.training != mode:
                module.training = mode
        for parameter, flag in required:
            parameter.requires_grad_(flag)


class Recorder(TorchFunctionMode):
    """Reports the signals of every linear map with a watched weight as (N, T, d) to `sink`.

    `layers` are the wanted signals of each layer, `size` is the number of sequences in a batch. The sink gets layer,
    signal, number of the call and tensor; for a weight gradient, the output gradient and the inputs.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[Layer, frozenset[str]], sink: Sink, size: int, backward: bool
    ) -> None:
        super().__init__()
        self.paused = False
        self._model = model
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = {layer: parameters[layer.weight] for layer in layers}
        self._watched: dict[int, list[Layer]] = {}
        for layer, parameter in self._parameters.items():
            self._watched.setdefault(id(parameter), []).append(layer)
        self._wanted, self._sink, self._size, self._backward = layers, sink, size, backward
        self._calls: Counter[Layer] = Counter()
        self._views: deque[tuple[weakref.ref[Tensor], int, Tensor]] = deque(maxlen=4)

    def run(self, batch: Any, loss: Loss) -> None:
        """Run one forward pass and, with `backward`, one backward pass."""
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.set_grad_enabled(self._backward), watched(self):
                value = loss(self._model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise CaptureError(f"the loss must return one number (a sum over samples), got {got}.")
            if self._backward and not value.requires_grad:
                raise CaptureError("the loss does not depend on any paired layer: no gradient can be measured.")
            if self._backward:
                value.backward()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not self.paused:
            return self._run_attention(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.paused:
            return result
        if func in _LINEAR:
            return self._record(_argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), result)
        if (func in _MATMUL and len(args) == 2) or (func in _ADDMM and len(args) == 3):
            return self._record(*args[-2:], result, in_by_out=True)
        return result

    def watches(self, module: nn.Module) -> bool:
        """True if the module holds a watched weight."""
        return any(id(parameter) in self._watched for parameter in module.parameters())

    def _run_attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the projections of nn.MultiheadAttention, which one function computes on (L, N, E) tensors."""
        query = _argument(args, kwargs, 0, "query")
        samples = query.shape[1] if query.ndim == 3 else 1
        with _attending:
            linear = F.linear

            def record(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
                return self._record(input, weight, linear(input, weight, bias), sequence_first=samples)

            with with_attribute(F, "linear", record):
                return func(*args, **kwargs)

    def _record(
        self, x: Any, weight: Any, result: Any, *, in_by_out: bool = False, sequence_first: int | None = None
    ) -> Any:
        layers, first_row = self._layers_of(weight, in_by_out)
        if not layers:
            return result
        if self._backward and not result.requires_grad:
            result = result.detach().requires_grad_(True).clone()

        def tokens(tensor: Tensor) -> Tensor:
            return _tokens(tensor, self._size, sequence_first)

        shaped = tokens if layers[0].kernel is None else lambda y: y.flatten(2).transpose(1, 2)
        calls = {layer: self._calls[layer] for layer in layers}
        self._calls.update(layers)
        inputs: Tensor | None = None
        for layer in layers:
            wanted = self._wanted[layer]
            if wanted & {INPUT, WEIGHT_GRADIENT}:
                inputs = self._view(x, layer, tokens)
            if INPUT in wanted:
                self._sink(layer, INPUT, calls[layer], inputs)
            if OUTPUT in wanted:
                self._sink(layer, OUTPUT, calls[layer], shaped(_rows(result.detach(), layer, first_row)))
        if self._backward and any(self._wanted[layer] & NEEDS_BACKWARD for layer in layers):
            kept = inputs.clone() if inputs is not None and WEIGHT_GRADIENT in self._wanted[layers[0]] else None

            def record(grad: Tensor) -> None:
                for layer in layers:
                    gradient, wanted = shaped(_rows(grad.detach(), layer, first_row)), self._wanted[layer]
                    if OUTPUT_GRADIENT in wanted:
                        self._sink(layer, OUTPUT_GRADIENT, calls[layer], gradient)
                    if INPUT_GRADIENT in wanted:
                        weight = layer.matrix(self._parameters[layer].detach())
                        self._sink(layer, INPUT_GRADIENT, calls[layer], gradient @ weight)
                    if WEIGHT_GRADIENT in wanted:
                        self._sink(layer, WEIGHT_GRADIENT, calls[layer], gradient, kept)

            result.register_hook(record)
        return result

    def _view(self, x: Tensor, layer: Layer, tokens: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's input as (N, T, d): the same object for layers that read the same, unchanged tensor."""
        version = 0 if x.is_inference() else x._version  # counts the changes in place
        for seen, seen_version, view in self._views:
            if seen() is x and seen_version == version:
                return view
        if layer.kernel is None:
            view = tokens(x.detach())
        else:
            view = F.unfold(x.detach(), kernel_size=layer.kernel[1:], stride=layer.kernel[1:]).transpose(1, 2)
        self._views.append((weakref.ref(x), version, view))
        return view

    def _layers_of(self, weight: Any, in_by_out: bool) -> tuple[list[Layer], int]:
        """The watched layers that use this weight or view of a weight, and the view's first row."""
        if not isinstance(weight, Tensor):
            return [], 0
        base, first_row = weight, 0
        if id(weight) not in self._watched:
            base = weight._base  # type: ignore[assignment]
            if base is None or id(base) not in self._watched:
                return [], 0
            if weight.ndim == 2 and weight.shape == base.shape[::-1] and weight.stride() == base.stride()[::-1]:
                in_by_out = not in_by_out
            elif weight.shape[1:] == base.shape[1:] and weight.stride() == base.stride():
                first_row = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
            else:
                return [], 0
        last_row = first_row + weight.shape[0]
        whole = weight.shape in (base.shape, base.shape[::-1])

        def inside(layer: Layer) -> bool:
            return layer.rows is not None and all(first_row <= start and stop <= last_row for start, stop in layer.rows)

        watched = self._watched[id(base)]
        return [one for one in watched if one.transposed == in_by_out and (whole or inside(one))], first_row


def _rows(result: Tensor, layer: Layer, first_row: int) -> Tensor:
    """The part of a fused output (or its gradient) that belongs to one layer."""
    if layer.rows is None:
        return result
    parts = [result[..., start - first_row : stop - first_row] for start, stop in layer.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _tokens(tensor: Tensor, size: int, sequence_first: int | None) -> Tensor:
    """Reshape an activation to (N, T, d). `sequence_first` is the batch size of a (L, N, E) or (L*N, E) tensor."""
    if sequence_first is not None:
        return tensor.reshape(-1, sequence_first, tensor.shape[-1]).transpose(0, 1)
    if tensor.ndim == 3 and tensor.shape[0] != size and tensor.shape[1] == size:
        return tensor.transpose(0, 1)
    if tensor.ndim >= 2 and tensor.shape[0] % size == 0:
        return tensor.reshape(size, -1, tensor.shape[-1])
    return tensor.reshape(1, -1, tensor.shape[-1])


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs[name]
