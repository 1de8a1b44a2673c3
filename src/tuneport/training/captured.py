"""Passes on a GPU as CUDA graphs: one launch in place of thousands.

A small model computes faster than its kernels are launched one by one. Batches are padded to lengths that come back,
and the passes of each shape, forward and backward, are recorded once and played from then on: of a language model those
of its decoder, of towers and encoders all that leads to their answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.base import Model
from ..models.tokenizer import Encoded
from ..types import Sides

STEP = 16  # tokens: lengths are padded to a multiple of it
KNOWN = ({"attention_mask"}, {"attention_mask", "position_ids"})  # inputs beside the tokens
IGNORED = ("use_cache", "return_dict")
MOST = 64  # shapes that are recorded: each keeps its inputs, outputs and gradients
READ = ({"pixel_values"}, {"input_ids", "attention_mask"}, {"input_ids", "attention_mask", "token_type_ids"})

Play = Callable[..., Tensor]
Ask = Callable[[nn.Module, Encoded], Any]


@contextmanager
def captured(module: nn.Module, devices: Collection[str] = ("cuda",)) -> Iterator[None]:
    """Let the decoder inside a language model be played from graphs where gradients are wanted, if it is on a GPU.

    Its parameters must keep their places meanwhile, and no dropout may be on.
    """
    body = getattr(module, "base_model", module)
    if body is module or next(module.parameters()).device.type not in devices:
        yield
        return
    hooks = _apart(module)
    body.forward = Played(body)
    try:
        yield
    finally:
        del body.forward
        for hook in hooks:
            hook.remove()


def _apart(module: nn.Module) -> list[Any]:
    """Hooks that copy gradients: a graph writes them to one place each time, where they must not be summed up."""
    return [each.register_hook(torch.clone) for each in module.parameters() if each.requires_grad]


class Played:
    """The forward pass of a decoder, from a graph if its inputs are tokens, their mask and perhaps their places."""

    def __init__(self, body: nn.Module) -> None:
        self.body, self.eager, self.most = body, body.forward, MOST
        self.kind: Any = None  # of what the decoder gives
        self.graphs: dict[tuple[torch.Size, ...], Play] = {}
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

    def record(self, inputs: dict[str, Tensor]) -> Play:
        """A function that plays the passes of this shape; the shapes share their memory, since none runs in another."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()

        def passed(*values: Tensor) -> Tensor:
            found: Tensor = self.eager(**dict(zip(inputs, values, strict=True)), use_cache=False).last_hidden_state
            return found

        return _recorded(self.body, passed, tuple(inputs.values()), self.pool)


@contextmanager
def captured_answers(
    asked: Sides[Ask], models: Sides[Model], devices: Collection[str] = ("cuda",)
) -> Iterator[Sides[Ask]]:
    """What two models are asked, played from graphs for those on a GPU; no dropout may be on in their modules."""
    played = [
        Answers(ask, model) if model.device.type in devices else ask for ask, model in zip(asked, models, strict=True)
    ]
    try:
        yield Sides(*played)
    finally:
        for each in played:
            if isinstance(each, Answers):
                each.forget()


class Answers:
    """Asks a model for a tensor, from a graph if its inputs are images or whole texts of a shape that comes back."""

    def __init__(self, ask: Ask, model: Model) -> None:
        self.ask, self.model, self.most = ask, model, MOST
        self.module: nn.Module | None = None  # that the graphs are of
        self.graphs: dict[Any, Play | None] = {}  # None for what has come once
        self.hooks: list[Any] = []
        self.pool: Any = None

    def __call__(self, module: nn.Module, encoded: Encoded) -> Any:
        if module is not self.module:
            self.forget()
            self.module, self.hooks = module, _apart(module)
        if set(encoded.inputs) not in READ or encoded.counts or self.model.task == "token":
            return self.ask(module, encoded)
        inputs = self._padded(self.model.place(encoded.inputs))
        # what is recorded holds for the mode and the precision that it was recorded in
        key = *(value.shape for value in inputs.values()), torch.is_grad_enabled(), torch.get_float32_matmul_precision()
        if key in self.graphs and self.graphs[key] is None and self.most:
            try:
                self.graphs[key] = self.record(module, inputs)
            except RuntimeError:  # a model that waits for the device between its kernels
                self.most = 0
        if len(self.graphs) < self.most:
            self.graphs.setdefault(key)
        played = self.graphs.get(key)
        if played is None:
            return self.ask(module, Encoded(inputs, None, ()))
        return played(*inputs.values()).clone()

    def _padded(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs, padded where they are texts."""
        reader = self.model.inputs.reader
        if reader is None:
            return dict(inputs)
        values = {"input_ids": int(reader.tokenizer.pad_token_id or 0)}
        length = inputs["input_ids"].shape[1]
        more = min(-length % STEP, max(reader.limit - length, 0))
        return {name: F.pad(value, (0, more), value=values.get(name, 0)) for name, value in inputs.items()}

    def record(self, module: nn.Module, inputs: dict[str, Tensor]) -> Play:
        """A function that plays the answers to inputs of this shape."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()

        def asked(*values: Tensor) -> Tensor:
            found: Tensor = self.ask(module, Encoded(dict(zip(inputs, values, strict=True)), None, ()))
            return found

        return _recorded(module, asked, tuple(value.clone() for value in inputs.values()), self.pool)

    def forget(self) -> None:
        """Give back what was kept for a module."""
        for hook in self.hooks:
            hook.remove()
        self.module, self.hooks, self.pool = None, [], None
        self.graphs.clear()


def _recorded(module: nn.Module, passed: Play, inputs: tuple[Tensor, ...], pool: Any) -> Play:
    """A function of tensors that uses a module, recorded with its gradients."""
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # recorded on a stream of its own
    body = _Body(module, passed)
    found: Any = torch.cuda.make_graphed_callables(body, inputs, num_warmup_iters=1, allow_unused_input=True, pool=pool)
    return cast(Play, found)


class _Body(nn.Module):
    """A module in a function of tensors alone."""

    def __init__(self, body: nn.Module, passed: Play) -> None:
        super().__init__()
        self.body, self.passed = body, passed
        self.train(body.training)

    def forward(self, *values: Tensor) -> Tensor:
        return self.passed(*values)
