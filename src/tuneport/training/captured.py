"""Passes of a decoder on a GPU as CUDA graphs: one launch in place of thousands.

A small model computes faster than its kernels are launched one by one. Batches are padded to lengths that come back,
and the passes of each shape, forward and backward, are recorded once and played from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STEP = 16  # tokens: lengths are padded to a multiple of it
WHOLE = 8192  # tokens whose launches take longer than the tokens themselves
MOST = 64  # shapes that are recorded: each keeps its inputs, outputs and gradients


@contextmanager
def captured(module: nn.Module) -> Iterator[None]:
    """Let the decoder inside a language model be played from graphs where gradients are wanted, if it is on a GPU.

    Its parameters must keep their places meanwhile, and no dropout may be on.
    """
    body = getattr(module, "base_model", module)
    if body is module or next(module.parameters()).device.type != "cuda":
        yield
        return
    body.forward = Played(body)
    try:
        yield
    finally:
        del body.forward


def is_played(module: nn.Module, tokens: int) -> bool:
    """Whether to give whole rows of so many tokens to a graph: few, since rows that share their begin compute more."""
    forward = getattr(getattr(module, "base_model", module), "forward", None)
    return isinstance(forward, Played) and forward.most > 0 and tokens <= WHOLE and torch.is_grad_enabled()


class Played:
    """The forward pass of a decoder, from a graph if its inputs are tokens and their mask alone."""

    def __init__(self, body: nn.Module) -> None:
        self.body, self.eager, self.most = body, body.forward, MOST
        self.kind: Any = None  # of what the decoder gives
        self.graphs: dict[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]] = {}
        self.pool: Any = None

    def __call__(self, input_ids: Tensor | None = None, *, attention_mask: Tensor | None = None, **others: Any) -> Any:
        more = {name for name, value in others.items() if value is not None} - {"use_cache", "return_dict"}
        if more or input_ids is None or attention_mask is None or not torch.is_grad_enabled():
            return self.eager(input_ids, attention_mask=attention_mask, **others)
        if self.kind is None:
            with torch.no_grad():
                self.kind = type(self.eager(input_ids, attention_mask=attention_mask, use_cache=False))
        length = input_ids.shape[1]
        ids, mask = (F.pad(each, (0, -length % STEP)) for each in (input_ids, attention_mask))
        if ids.shape not in self.graphs and len(self.graphs) < self.most:
            try:
                self.graphs[ids.shape] = self.record(ids, mask)
            except RuntimeError:  # a decoder that waits for the device between its kernels
                self.most = 0
        if ids.shape not in self.graphs:
            return self.eager(input_ids, attention_mask=attention_mask, **others)
        return self.kind(last_hidden_state=self.graphs[ids.shape](ids, mask)[:, :length])

    def record(self, ids: Tensor, mask: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """A function that plays the passes of this shape; the shapes share their memory, since none runs in another."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # recorded on a stream of its own
        found: Callable[[Tensor, Tensor], Tensor] = torch.cuda.make_graphed_callables(
            _Body(self.body, self.eager), (ids, mask), num_warmup_iters=1, allow_unused_input=True, pool=self.pool
        )
        return found


class _Body(nn.Module):
    """A decoder as a function of tensors alone."""

    def __init__(self, body: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.passed = body, forward
        self.train(body.training)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.passed(ids, attention_mask=mask, use_cache=False).last_hidden_state
        return found
