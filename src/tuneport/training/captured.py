"""Passes of a decoder on a GPU as CUDA graphs: one launch in place of thousands.

A small model computes faster than its kernels are launched one by one. Batches are padded to lengths that come back,
and the passes of each shape, forward and backward, are recorded once and played from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEP = 16  # tokens: lengths are padded to a multiple of it
KNOWN = ({"attention_mask"}, {"attention_mask", "position_ids"})  # inputs beside the tokens
IGNORED = ("use_cache", "return_dict")
MOST = 64  # shapes that are recorded: each keeps its inputs, outputs and gradients


@contextmanager
def captured(module: nn.Module, devices: Collection[str] = ("cuda",)) -> Iterator[None]:
    """Let the decoder inside a language model be played from graphs where gradients are wanted, if it is on a GPU.

    Its parameters must keep their places meanwhile, and no dropout may be on.
    """
    body = getattr(module, "base_model", module)
    if body is module or next(module.parameters()).device.type not in devices:
        yield
        return
    # a graph writes its gradients to the same place each time, where they must not be summed up
    hooks = [each.register_hook(torch.clone) for each in module.parameters() if each.requires_grad]
    body.forward = Played(body)
    try:
        yield
    finally:
        del body.forward
        for hook in hooks:
            hook.remove()


class Played:
    """The forward pass of a decoder, from a graph if its inputs are tokens, their mask and perhaps their places."""

    def __init__(self, body: nn.Module) -> None:
        self.body, self.eager, self.most = body, body.forward, MOST
        self.kind: Any = None  # of what the decoder gives
        self.graphs: dict[tuple[torch.Size, ...], Callable[..., Tensor]] = {}
        self.pool: Any = None

    def __call__(self, input_ids: Tensor | None = None, **others: Any) -> Any:
        given = {name: value for name, value in others.items() if value is not None and name not in IGNORED}
        plain = all(isinstance(value, Tensor) for value in given.values())
        if input_ids is None or not plain or set(given) not in KNOWN or not torch.is_grad_enabled():
            return self.eager(input_ids, **others)
        if self.kind is None:
            with torch.no_grad():
                self.kind = type(self.eager(input_ids, **others))
        length, inputs = input_ids.shape[1], {"input_ids": input_ids, **given}
        if given["attention_mask"].ndim == 2:
            inputs = {name: F.pad(value, (0, -length % STEP)) for name, value in inputs.items()}
        shapes = tuple(value.shape for value in inputs.values())
        if shapes not in self.graphs and len(self.graphs) < self.most:
            try:
                self.graphs[shapes] = self.record(inputs)
            except RuntimeError:  # a decoder that waits for the device between its kernels
                self.most = 0
        if shapes not in self.graphs:
            return self.eager(input_ids, **others)
        return self.kind(last_hidden_state=self.graphs[shapes](*inputs.values())[:, :length])

    def record(self, inputs: dict[str, Tensor]) -> Callable[..., Tensor]:
        """A function that plays the passes of this shape; the shapes share their memory, since none runs in another."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # recorded on a stream of its own
        body = _Body(self.body, self.eager, tuple(inputs))
        found: Any = torch.cuda.make_graphed_callables(
            body, tuple(inputs.values()), num_warmup_iters=1, allow_unused_input=True, pool=self.pool
        )
        return cast(Callable[..., Tensor], found)


class _Body(nn.Module):
    """A decoder as a function of tensors alone."""

    def __init__(self, body: nn.Module, forward: Callable[..., Any], names: tuple[str, ...]) -> None:
        super().__init__()
        self.body, self.passed, self.names = body, forward, names
        self.train(body.training)

    def forward(self, *values: Tensor) -> Tensor:
        given = dict(zip(self.names, values, strict=True))
        found: Tensor = self.passed(**given, use_cache=False).last_hidden_state
        return found
