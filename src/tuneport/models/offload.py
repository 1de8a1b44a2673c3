"""Models larger than the memory they run in: a block's weights come when it runs and go when it has run.

The weights stay at home (RAM under a GPU, the model's own files under RAM). Autograd would hold on to the weights that
a backward pass needs, so a block keeps nothing but its inputs in the forward pass and runs once more, with its weights,
when its gradients are due. The numbers do not change. Inside `placed` a module must not be used in other ways than
by running it; outside it is as it was.
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
    """Whoever looks at a model while it runs; `paused` while a block runs for its outputs only."""

    paused: bool

    def watches(self, module: nn.Module) -> bool: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Let a watcher see what runs inside, and again what is run anew for its gradients."""
    token = _watcher.set(watcher)
    try:
        with watcher:
            yield
    finally:
        _watcher.reset(token)


@dataclass(frozen=True, eq=False)
class Placement:
    """Where one model's numbers are while it runs.

    `blocks` are the paths of modules that run anew for their gradients; the weights of the `fetched` ones are on the
    `device` only while they run. `home` reads parameters by name where the module does not hold them itself.
    """

    device: torch.device
    blocks: tuple[str, ...] = ()
    fetched: frozenset[str] = frozenset()
    home: Mapping[str, Tensor] | None = None

    def without_numbers(self) -> Placement:
        """The same for a copy of the module that has shapes only."""
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
    """The paths of the modules that a model repeats, in their order."""
    places = [(layer.stack, layer.block) for layer in layers if layer.block is not None]
    return tuple(dict.fromkeys(f"{stack}.{block}" if stack else str(block) for stack, block in places))


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes of distinct tensors."""
    return sum(t.numel() * t.element_size() for t in {id(tensor): tensor for tensor in tensors}.values())


def sizes(module: nn.Module, paths: Sequence[str]) -> tuple[int, dict[str, int]]:
    """The bytes of what is in no block, and of the parameters of each block that nothing outside it shares."""
    inside = {path: list(module.get_submodule(path).parameters()) for path in paths}
    shared = _shared(module, paths)
    blocks = {path: bytes_of(p for p in own if id(p) not in shared) for path, own in inside.items()}
    owned = {id(p) for own in inside.values() for p in own} - shared
    rest = bytes_of([*(p for p in module.parameters() if id(p) not in owned), *module.buffers()])
    return rest, blocks


def _shared(module: nn.Module, paths: Iterable[str]) -> set[int]:
    """Parameters that more than one of the blocks, or the rest of the model, use."""
    paths = tuple(paths)
    users: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        user = next((path for path in paths if name.startswith(f"{path}.")), "")
        users.setdefault(id(parameter), set()).add(user)
    return {key for key, found in users.items() if len(found) > 1 or "" in found}


@contextmanager
def placed(module: nn.Module, placement: Placement | None) -> Iterator[None]:
    """Have a module run on the placement's device within the memory that it says."""
    if placement is None:
        yield
        return
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    home = placement.home

    def read(parameter: Tensor) -> Tensor:
        return parameter.data if home is None else home[names[id(parameter)]].to(parameter.dtype)

    shared = _shared(module, placement.blocks)
    come_and_go = {
        path: [p for p in module.get_submodule(path).parameters() if id(p) not in shared] for path in placement.fetched
    }
    away = {id(parameter) for own in come_and_go.values() for parameter in own}
    with ExitStack() as stack:
        for parameter in module.parameters():
            if id(parameter) not in away:
                stack.enter_context(_moved(parameter, read(parameter).to(placement.device)))
        for buffer in module.buffers():
            stack.enter_context(_moved(buffer, buffer.data.to(placement.device)))
        if placement.blocks:
            stack.enter_context(_without_caches(module))
        for path in placement.blocks:
            part = module.get_submodule(path)
            own = come_and_go.get(path, [])
            stack.enter_context(
                _runs_anew(part, _Block(part, part.forward, own, read, placement.device, home is not None))
            )
        yield


@contextmanager
def _moved(tensor: Tensor, data: Tensor) -> Iterator[None]:
    before = tensor.data
    tensor.data = data
    try:
        yield
    finally:
        tensor.data = before


@contextmanager
def _without_caches(module: nn.Module) -> Iterator[None]:
    """A cache of keys and values would grow when a block runs a second time."""
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
def _runs_anew(module: nn.Module, run: Callable[..., Any]) -> Iterator[None]:
    """Put another function in the place of a module's forward."""
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
    """A module's forward that brings its weights along."""

    module: nn.Module
    forward: Callable[..., Any]
    parameters: Sequence[Tensor]
    read: Callable[[Tensor], Tensor]
    device: torch.device
    fresh: bool  # whether what is read is nobody else's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = _watcher.get()
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        watches = watcher is not None and watcher.watches(self.module)
        if not torch.is_grad_enabled() or not (watches or any(tensor.requires_grad for tensor in tensors)):
            with self.at_work():
                return self.forward(*args, **kwargs)
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        call = _Call(self, watcher if watches else None, others, places, structure, _autocast(self.device))
        anchor = torch.zeros((), requires_grad=watches)  # a watched block has gradients whatever comes in
        results = _Anew.apply(call, anchor, *tensors)
        assert call.outputs is not None
        return call.outputs.filled(results if isinstance(results, tuple) else (results,))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """With the weights on the device."""
        with ExitStack() as stack:
            for parameter in self.parameters:
                data = self.read(parameter).to(self.device, non_blocking=True, copy=not self.fresh)
                stack.enter_context(_moved(parameter, data))
                del data
            yield


@dataclass(frozen=True, eq=False)
class _Nest:
    """A nest of values with its tensors taken out."""

    others: list[Any]
    places: list[int]
    structure: Any

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


class _Call:
    """One run of a block: what it was given beside tensors, and how to run it again."""

    def __init__(
        self, block: _Block, watcher: Watcher | None, others: list[Any], places: list[int], structure: Any, cast: Any
    ) -> None:
        self.block, self.watcher, self.cast = block, watcher, cast
        self.inputs = _Nest(others, places, structure)
        self.outputs: _Nest | None = None

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors among the outputs."""
        args, kwargs = self.inputs.filled(tensors)
        leaves, structure = pytree.tree_flatten(self.block.forward(*args, **kwargs))
        places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        found = [leaves[place] for place in places]
        if self.outputs is None:
            self.outputs = _Nest([None if isinstance(leaf, Tensor) else leaf for leaf in leaves], places, structure)
        return found


class _Anew(torch.autograd.Function):
    """Run a block and keep its inputs only; for its gradients run it again."""

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
            with call.block.at_work():
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
            stack.enter_context(call.block.at_work())
            with ExitStack() as running:
                running.enter_context(call.cast())
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
    """The autocast that holds now, to be entered again."""
    kind = device.type if device.type != "meta" else "cpu"
    enabled = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


@contextmanager
def pinned(module: nn.Module, placement: Placement | None) -> Iterator[None]:
    """Let the GPU read the weights that stay in RAM at full speed; where it cannot, it reads them more slowly."""
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
    """A refusal of the driver would otherwise be raised by whatever runs next."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1).item()


def shelved(tensor: Tensor) -> Tensor:
    """The tensor in a file of its own, gone when the tensor is; the system keeps in RAM what it has room for.

    The file gets all its room first: a disk that is full when memory mapped to it is written kills the process.
    """
    with tempfile.NamedTemporaryFile(prefix="tuneport-") as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, max(tensor.nbytes, 1))
            except OSError as error:
                raise TuneportError(
                    f"no room for {format_bytes(tensor.nbytes)} of the result in {tempfile.gettempdir()} "
                    f"({error.strerror}): make room, or set TMPDIR to a folder on another disk."
                ) from error
        there = torch.from_file(file.name, shared=True, size=max(tensor.numel(), 1), dtype=tensor.dtype)
    return there[: tensor.numel()].view(tensor.shape).copy_(tensor)
