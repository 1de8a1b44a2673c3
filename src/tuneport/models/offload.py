"""Offloading: run models that are larger than memory, with each block's weights loaded only while it runs.

The weights stay in RAM (for a GPU) or in the model's files (for RAM). Autograd would keep the weights that a backward
pass needs, so a block saves only its inputs in the forward pass and runs again, with its weights, when its gradients
are computed. The results are the same to the bit. Inside `placed`, a module may only be run; afterwards it is restored.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import TuneportError
from ..io.sizes import format_bytes
from ..layers import Layer

PINNED_FROM = 2**20  # bytes from which a tensor is worth pinning


_watcher: ContextVar[Any] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Any) -> Iterator[None]:
    """Context in which a watcher sees the modules that run, also when blocks run again for their gradients.

    It is a context itself, says which modules it `watches`, and is `paused` while a block runs only for its outputs.
    """
    token = _watcher.set(watcher)
    try:
        with watcher:
            yield
    finally:
        _watcher.reset(token)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the weights of one model are while it runs.

    `blocks` are the paths of modules that run again for their gradients; the weights of the `fetched` ones are on the
    `device` only while they run. `home` reads the parameters of an offloaded model by name.
    """

    device: torch.device
    blocks: tuple[str, ...] = ()
    fetched: frozenset[str] = frozenset()
    home: Mapping[str, Tensor] | None = None


def replace_by_placeholders(module: nn.Module) -> None:
    """Replace parameters by stride-0 placeholders: right shape and dtype, no storage."""
    known: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if id(parameter) not in known:
                empty = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                known[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            part._parameters[name] = known[id(parameter)]


def block_paths(layers: Iterable[Layer]) -> tuple[str, ...]:
    """The paths of the blocks that a model repeats, in order."""
    places = [(layer.stack, layer.block) for layer in layers if layer.block is not None]
    return tuple(dict.fromkeys(f"{stack}.{block}" if stack else str(block) for stack, block in places))


def sizes(module: nn.Module, paths: Sequence[str]) -> tuple[int, dict[str, int]]:
    """The bytes of everything outside the blocks, and of the parameters that belong to each block alone."""
    own = _own_parameters(module, paths)
    blocks = {path: sum(parameter.nbytes for parameter in parameters) for path, parameters in own.items()}
    whole = sum(tensor.nbytes for tensor in {*module.parameters(), *module.buffers()})
    return whole - sum(blocks.values()), blocks


def _own_parameters(module: nn.Module, paths: Sequence[str]) -> dict[str, list[nn.Parameter]]:
    """The parameters of each block that neither another block nor the rest of the model uses."""
    users: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        user = next((path for path in paths if name.startswith(f"{path}.")), "")
        users.setdefault(id(parameter), set()).add(user)
    return {path: [p for p in module.get_submodule(path).parameters() if users[id(p)] == {path}] for path in paths}


@contextmanager
def placed(module: nn.Module, placement: Placement | None) -> Iterator[None]:
    """Context in which a module runs as its placement says; without one, as it is."""
    if placement is None:
        yield
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    home = placement.home

    def read(parameter: Tensor) -> Tensor:
        return parameter.data if home is None else home[names[id(parameter)]].to(parameter.dtype)

    own = _own_parameters(module, placement.blocks)
    loaded_later = {id(parameter) for path in placement.fetched for parameter in own[path]}
    with ExitStack() as stack:
        for parameter in module.parameters():
            if id(parameter) not in loaded_later:
                stack.enter_context(with_attribute(parameter, "data", read(parameter).to(placement.device)))
        for buffer in module.buffers():
            stack.enter_context(with_attribute(buffer, "data", buffer.data.to(placement.device)))
        for part in module.modules() if placement.blocks else ():
            config = getattr(part, "config", None)
            if getattr(config, "use_cache", None) is True:  # a cache would grow when a block runs a second time
                stack.enter_context(with_attribute(config, "use_cache", False))
        for path in placement.blocks:
            part = module.get_submodule(path)
            loaded = own[path] if path in placement.fetched else []
            vars(part)["forward"] = _Block(part, part.forward, loaded, read, placement.device, home is None)
            stack.callback(vars(part).pop, "forward")
        yield


@contextmanager
def with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass(frozen=True, eq=False)
class _Block:
    """The forward of a module that loads its weights first and recomputes its outputs for their gradients."""

    module: nn.Module
    forward: Callable[..., Any]
    parameters: Sequence[Tensor]
    read: Callable[[Tensor], Tensor]
    device: torch.device
    copied: bool  # what `read` returns is the weight itself, which must stay where it is

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = _watcher.get()
        watches = watcher is not None and watcher.watches(self.module)
        leaves, inputs = pytree.tree_flatten((args, kwargs))
        differentiable = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        if not torch.is_grad_enabled() or not (watches or differentiable):
            with self.weights_loaded():
                return self.forward(*args, **kwargs)
        outputs: Any = None

        def run(leaves: Iterable[Any]) -> tuple[Any, ...]:
            nonlocal outputs
            args, kwargs = pytree.tree_unflatten(leaves, inputs)
            found, outputs = pytree.tree_flatten(self.forward(*args, **kwargs))
            return tuple(found)

        kind = "cpu" if self.device.type == "meta" else self.device.type
        autocast = torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        again = (autocast, watcher if watches else nullcontext())
        anchor = torch.zeros((), requires_grad=watches)  # a watched block gets gradients even if no input requires them
        return pytree.tree_unflatten(_Recompute.apply(run, self.weights_loaded, again, anchor, *leaves), outputs)

    @contextmanager
    def weights_loaded(self) -> Iterator[None]:
        """Context in which the weights are on the device."""
        with ExitStack() as stack:
            for parameter in self.parameters:
                data = self.read(parameter).to(self.device, non_blocking=True, copy=self.copied)
                stack.enter_context(with_attribute(parameter, "data", data))
                del data
            yield


class _Recompute(torch.autograd.Function):
    """Run a block on the leaves of its arguments, save only these, and run it again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, run: Any, weights_loaded: Any, again: Any, anchor: Tensor, *leaves: Any) -> tuple[Any, ...]:
        del anchor
        ctx.run, ctx.weights_loaded, ctx.again = run, weights_loaded, again
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx.others = [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves]  # a leaf may be None itself
        watcher = _watcher.get()
        with with_attribute(watcher, "paused", True) if watcher is not None else nullcontext(), weights_loaded():
            found: tuple[Any, ...] = run(leaves)
        tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
        ctx.mark_non_differentiable(*(tensor for tensor in tensors if not tensor.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, (autocast, watcher) = iter(ctx.saved_tensors), ctx.again
        leaves = [
            other[0] if other else next(saved).detach().requires_grad_(need)
            for other, need in zip(ctx.others, ctx.needs_input_grad[4:], strict=True)
        ]
        with torch.enable_grad(), ctx.weights_loaded():
            with autocast, watcher:
                found = ctx.run(leaves)
            due = [
                (leaf, gradient)
                for leaf, gradient in zip(found, gradients, strict=True)
                if isinstance(leaf, Tensor) and leaf.requires_grad and gradient is not None
            ]
            del found
            if due:
                torch.autograd.backward([leaf for leaf, _ in due], [gradient for _, gradient in due])
        return *(None,) * 4, *(leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves)


@contextmanager
def pinned(module: nn.Module, placement: Placement | None) -> Iterator[None]:
    """Context in which weights that stay in RAM are page-locked, for fast copies to the GPU; failures are ignored."""
    if placement is None or placement.device.type != "cuda" or placement.home is not None:
        yield
        return
    library, done = torch.cuda.cudart(), set[int]()
    try:
        for part in map(module.get_submodule, placement.fetched):
            for parameter in part.parameters():
                at = parameter.data_ptr()
                if parameter.device.type != "cpu" or parameter.nbytes < PINNED_FROM or at in done:
                    continue
                if int(library.cudaHostRegister(at, parameter.nbytes, 0)) == 0:
                    done.add(at)
                else:
                    with suppress(RuntimeError):  # the next CUDA call raises the error, and so clears it
                        torch.zeros(1, device=placement.device).add_(1).item()
        yield
    finally:
        torch.cuda.synchronize(placement.device)
        for at in done:
            library.cudaHostUnregister(at)


def to_temporary_file(tensor: Tensor) -> Tensor:
    """Move a tensor to a memory-mapped temporary file, deleted with the tensor."""
    with tempfile.NamedTemporaryFile(prefix="tuneport-") as file:
        if hasattr(os, "posix_fallocate"):  # writing to a memory-mapped file on a full disk kills the process
            try:
                os.posix_fallocate(file.fileno(), 0, max(tensor.nbytes, 1))
            except OSError as error:
                raise TuneportError(
                    f"{tempfile.gettempdir()} has no space for {format_bytes(tensor.nbytes)} of the result "
                    f"({error.strerror}): free some, or set TMPDIR to a folder on another disk."
                ) from error
        mapped = torch.from_file(file.name, shared=True, size=max(tensor.numel(), 1), dtype=tensor.dtype)
    return mapped[: tensor.numel()].view(tensor.shape).copy_(tensor)
