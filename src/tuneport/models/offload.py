"""Offloading: run models that are larger than memory, with each block's weights loaded only while it runs.

The weights stay in RAM (for a GPU) or in the model's files (for RAM). Autograd would keep the weights that a backward
pass needs, so a block saves only its inputs in the forward pass and runs again, with its weights, when its gradients
are computed. The results are the same to the bit. Inside `placed`, a module may only be run; afterwards it is restored.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import TuneportError
from ..io.sizes import format_bytes
from ..layers import Layer

PINNED_FROM = 2**20  # bytes from which a tensor is worth pinning


class Watcher(Protocol):
    """Observes a model while it runs; `paused` while a block runs only for its outputs."""

    paused: bool

    def watches(self, module: nn.Module) -> bool: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Context in which a watcher sees the modules that run, also when blocks run again for their gradients."""
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

    def on_meta(self) -> Placement:
        """The same placement for a copy of the module on the meta device."""
        return replace(self, device=torch.device("meta"), home=None)


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


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of the tensors, each counted once."""
    return sum(t.numel() * t.element_size() for t in {id(tensor): tensor for tensor in tensors}.values())


def sizes(module: nn.Module, paths: Sequence[str]) -> tuple[int, dict[str, int]]:
    """The bytes of everything outside the blocks, and of the parameters that belong to each block alone."""
    inside = {path: list(module.get_submodule(path).parameters()) for path in paths}
    shared = _shared(module, paths)
    blocks = {path: bytes_of(p for p in own if id(p) not in shared) for path, own in inside.items()}
    owned = {id(p) for own in inside.values() for p in own} - shared
    rest = bytes_of([*(p for p in module.parameters() if id(p) not in owned), *module.buffers()])
    return rest, blocks


def _shared(module: nn.Module, paths: Iterable[str]) -> set[int]:
    """The ids of parameters used by more than one block or by the rest of the model."""
    paths = tuple(paths)
    users: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        user = next((path for path in paths if name.startswith(f"{path}.")), "")
        users.setdefault(id(parameter), set()).add(user)
    return {key for key, found in users.items() if len(found) > 1 or "" in found}


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

    shared = _shared(module, placement.blocks)
    fetched = {
        path: [p for p in module.get_submodule(path).parameters() if id(p) not in shared] for path in placement.fetched
    }
    loaded_later = {id(parameter) for own in fetched.values() for parameter in own}
    with ExitStack() as stack:
        for parameter in module.parameters():
            if id(parameter) not in loaded_later:
                stack.enter_context(_moved(parameter, read(parameter).to(placement.device)))
        for buffer in module.buffers():
            stack.enter_context(_moved(buffer, buffer.data.to(placement.device)))
        if placement.blocks:
            stack.enter_context(_without_caches(module))
        for path in placement.blocks:
            part = module.get_submodule(path)
            own = fetched.get(path, [])
            block = _Block(part, part.forward, own, read, placement.device, home is not None)
            stack.enter_context(_forward_replaced(part, block))
        yield


@contextmanager
def _moved(tensor: Tensor, data: Tensor) -> Iterator[None]:
    """Context in which a tensor has other data."""
    before = tensor.data
    tensor.data = data
    try:
        yield
    finally:
        tensor.data = before


@contextmanager
def _without_caches(module: nn.Module) -> Iterator[None]:
    """Switch off key-value caches, which would grow when a block runs a second time."""
    configs = {id(c): c for c in (getattr(part, "config", None) for part in module.modules()) if c is not None}
    using = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in using:
        config.use_cache = False
    try:
        yield
    finally:
        for config in using:
            config.use_cache = True


@contextmanager
def _forward_replaced(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Context in which `run` replaces a module's forward."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = run
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


@dataclass(frozen=True, eq=False)
class _Block:
    """The forward of a module that loads its weights first and recomputes its outputs for their gradients."""

    module: nn.Module
    forward: Callable[..., Any]
    parameters: Sequence[Tensor]
    read: Callable[[Tensor], Tensor]
    device: torch.device
    fresh: bool  # `read` returns new tensors, which need no copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = _watcher.get()
        tensors, inputs = _split((args, kwargs))
        watches = watcher is not None and watcher.watches(self.module)
        if not torch.is_grad_enabled() or not (watches or any(tensor.requires_grad for tensor in tensors)):
            with self.weights_loaded():
                return self.forward(*args, **kwargs)
        call = _Call(self, watcher if watches else None, inputs, _autocast(self.device))
        anchor = torch.zeros(
            (), requires_grad=watches
        )  # so that a watched block gets gradients even if no input requires them
        results = _Recompute.apply(call, anchor, *tensors)
        assert call.outputs is not None
        return call.outputs.filled(results if isinstance(results, tuple) else (results,))

    @contextmanager
    def weights_loaded(self) -> Iterator[None]:
        """Context in which the weights are on the device."""
        with ExitStack() as stack:
            for parameter in self.parameters:
                data = self.read(parameter).to(self.device, non_blocking=True, copy=not self.fresh)
                stack.enter_context(_moved(parameter, data))
                del data
            yield


@dataclass(frozen=True, eq=False)
class _Structure:
    """Nested values (a pytree) without their tensors."""

    others: list[Any]
    places: list[int]
    structure: Any

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The nested values with these tensors in place."""
        leaves = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


def _split(values: Any) -> tuple[list[Tensor], _Structure]:
    """The tensors in nested values, and the rest."""
    leaves, structure = pytree.tree_flatten(values)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return [leaves[place] for place in places], _Structure(others, places, structure)


@dataclass(eq=False)
class _Call:
    """One call of a block, with its arguments other than tensors, so that it can run again."""

    block: _Block
    watcher: Watcher | None
    inputs: _Structure
    autocast: Callable[[], Any]
    outputs: _Structure | None = None

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the block and return the tensors among its outputs."""
        args, kwargs = self.inputs.filled(tensors)
        found, outputs = _split(self.block.forward(*args, **kwargs))
        self.outputs = self.outputs or outputs
        return found


class _Recompute(torch.autograd.Function):
    """Run a block, save only its inputs, and run it again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        del anchor
        ctx.call = call
        ctx.save_for_backward(*tensors)
        watcher = _watcher.get()
        before = watcher.paused if watcher is not None else False
        try:
            if watcher is not None:
                watcher.paused = True
            with call.block.weights_loaded():
                found = call.run(tensors)
        finally:
            if watcher is not None:
                watcher.paused = before
        ctx.mark_non_differentiable(*(tensor for tensor in found if not tensor.is_floating_point()))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        needed = ctx.needs_input_grad[2:]
        tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, needed, strict=True)]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(call.block.weights_loaded())
            with ExitStack() as running:
                running.enter_context(call.autocast())
                if call.watcher is not None:
                    running.enter_context(call.watcher)
                found = call.run(tensors)
            due = [
                (tensor, gradient)
                for tensor, gradient in zip(found, gradients, strict=True)
                if tensor.requires_grad and gradient is not None
            ]
            del found
            if due:
                torch.autograd.backward([tensor for tensor, _ in due], [gradient for _, gradient in due])
        return None, None, *(tensor.grad for tensor in tensors)


def _autocast(device: torch.device) -> Callable[[], Any]:
    """A function that enters the current autocast state again."""
    kind = device.type if device.type != "meta" else "cpu"
    enabled = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


@contextmanager
def pinned(module: nn.Module, placement: Placement | None) -> Iterator[None]:
    """Context in which weights that stay in RAM are page-locked, for fast copies to the GPU; failures are ignored."""
    if placement is None or placement.device.type != "cuda" or placement.home is not None:
        yield
        return
    library = torch.cuda.cudart()
    done: list[int] = []
    try:
        for path in placement.fetched:
            for parameter in module.get_submodule(path).parameters():
                size = parameter.numel() * parameter.element_size()
                at = parameter.data_ptr()
                if parameter.device.type == "cpu" and size >= PINNED_FROM and at not in done:
                    if int(library.cudaHostRegister(at, size, 0)) == 0:
                        done.append(at)
                    else:
                        _forget_error(placement.device)
        yield
    finally:
        torch.cuda.synchronize(placement.device)
        for at in done:
            library.cudaHostUnregister(at)


def _forget_error(device: torch.device) -> None:
    """Clear the driver's error, which the next CUDA call would raise otherwise."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1).item()


def to_temporary_file(tensor: Tensor) -> Tensor:
    """Move a tensor to a memory-mapped temporary file, deleted with the tensor.

    The file is allocated first, because writing to a memory-mapped file on a full disk kills the process.
    """
    with tempfile.NamedTemporaryFile(prefix="tuneport-") as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, max(tensor.nbytes, 1))
            except OSError as error:
                raise TuneportError(
                    f"{tempfile.gettempdir()} has no space for {format_bytes(tensor.nbytes)} of the result "
                    f"({error.strerror}): free some, or set TMPDIR to a folder on another disk."
                ) from error
        mapped = torch.from_file(file.name, shared=True, size=max(tensor.numel(), 1), dtype=tensor.dtype)
    return mapped[: tensor.numel()].view(tensor.shape).copy_(tensor)
