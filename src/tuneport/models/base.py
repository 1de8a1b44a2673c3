"""What the rest of the house knows of a model, whatever library it comes from: a module, its files, its parts.

A family fills in a Model; nobody else needs to know which library made it. Heads turn features into class
scores without being part of what is transferred.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, TuneportError
from ..io.checkpoint import read_json, write_checkpoint
from ..io.tensors import LazyTensors, describe
from ..layers import Layer, LooseTensor, TokenLayout, find_layers, find_loose
from .tokenizer import Reader

Batch = Mapping[str, Tensor]
Forward = Callable[[nn.Module, Batch], Tensor]
Write = Callable[[Path, Mapping[str, Tensor]], None]


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Weights as from_pretrained expects them: `model.safetensors`, or shards and their index."""
    write_checkpoint(folder, tensors)


@dataclass(frozen=True, eq=False)
class Model:
    """A model with everything a transfer needs to know of it.

    `tensors` reads the stored weights by their name in the files; `file_names` leads there from the names of
    `module.named_parameters()`. `encode` turns raw samples into the module's inputs, `features` and `logits`
    run it, `text_head` builds class embeddings with the model's own text tower; each is None where the
    model has no such thing. A text model has a `reader`; one that writes has `token_logits` of a batch and its
    labels, and `generates` says how: causal or seq2seq; one that is `prompted` reads samples inside the task's prompt;
    `vocabulary_head` is its last layer where that is not tied, and stands in `outside` too. `width` is that of the
    features. `write` puts tensors into a new folder in the library's own layout, with the configuration where nothing
    beside the weights carries it; `library` is what the hub calls that library, None where the module is of none. An
    `offloaded` model's weights stay in its files; its module's parameters are placeholders without storage.
    """

    name: str
    module: nn.Module
    tensors: Mapping[str, Tensor]
    file_names: Mapping[str, str]
    layers: tuple[Layer, ...]
    loose: tuple[LooseTensor, ...]
    folder: Path | None = None
    kind: str | None = None
    classes: tuple[str, ...] = ()
    encode: Callable[[Sequence[Any]], dict[str, Tensor]] | None = None
    features: Forward | None = None
    logits: Forward | None = None
    layout: Callable[[Batch], TokenLayout] | None = None
    reader: Reader | None = None
    token_logits: Callable[[nn.Module, Batch, Tensor], Tensor] | None = None
    generates: str | None = None
    prompted: bool = False
    vocabulary_head: tuple[LooseTensor, ...] = ()
    text_head: TextHead | None = None
    logit_scale: float = 1.0
    width: int | None = None
    outside: Mapping[str, str] = field(default_factory=dict)
    write: Write = write_weights
    library: str | None = None
    offloaded: bool = False

    @property
    def unreadable(self) -> str:
        """Why the model cannot read raw samples, where it has no `encode`, and what to do."""
        if self.kind == "text" and self.folder is not None:
            return f"{self.name} has no tokenizer beside it: copy its files (tokenizer.json) from the original model."
        return f"{self.name} cannot read raw samples; pass batches and loss=, or a model folder."

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """What `encode` has made, on the model's device, and pixels in the dtype of its first layer."""
        dtype = self.module.get_parameter(self.layers[0].weight).dtype if self.layers else None
        return {
            key: value.to(self.device, dtype if value.is_floating_point() else None) for key, value in batch.items()
        }

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by their live names: those of the module, or those in the files if the model is offloaded."""
        return self.stored_parameters() if self.offloaded else dict(self.module.named_parameters())

    def require_in_memory(self, what: str, instead: str) -> None:
        """Raise if the model is offloaded: `what` needs it whole in memory, and `instead` says what to do."""
        if self.offloaded:
            raise TuneportError(
                f"{what} needs whole models in memory, and {self.name} is larger than `memory_budget`: {instead}."
            )

    def stored_parameters(self) -> Mapping[str, Tensor]:
        """The parameters by their live names as they are in the files, whatever the module runs in."""
        names = {live: stored for live, stored in self.file_names.items() if stored in self.tensors}
        return LazyTensors(names, lambda n: self.tensors[names[n]], lambda n: describe(self.tensors, names[n]))

    def matches(self, name: str, patterns: Sequence[str]) -> bool:
        """Whether a parameter, by its live name or by that in the files, fits one of the patterns."""
        return any(fnmatchcase(known, glob) for known in (name, self.file_names.get(name, name)) for glob in patterns)

    def with_module(self, module: nn.Module) -> Model:
        """The same model with other weights in memory."""
        return replace(self, module=module, offloaded=False)


ModelLike = Model | nn.Module | str | Path  # what a user may give as a model


@dataclass(frozen=True, eq=False)
class Stored:
    """A model's files before it is built: tensors read when asked for, and how its library keeps them."""

    tensors: Mapping[str, Tensor]
    folder: Path | None = None
    write: Write = write_weights


class Family(ABC):
    """A model library: what it can open and what it knows of live modules."""

    name: str

    @abstractmethod
    def recognises(self, reference: str) -> bool:
        """Whether `reference` names a model of this family."""

    @abstractmethod
    def open(
        self, reference: str, *, device: torch.device, trust_remote_code: bool, dtype: torch.dtype = torch.float32
    ) -> Model:
        """Load the model in evaluation mode, to run in `dtype`; its `tensors` stay as they are in the files."""

    def stored(self, reference: str) -> Stored:
        """The model's files; families that can tell without building the model do so lazily."""
        model = self.open(reference, device=torch.device("cpu"), trust_remote_code=False)
        return Stored(model.tensors, model.folder, model.write)

    def outline(self, reference: str, *, dtype: torch.dtype, weights: bool = True) -> Model:
        """The model without its numbers, which stay in its files; without `weights` there need not be any."""
        del dtype, weights
        raise CheckpointError(
            f"{reference} cannot be built without its weights: only transformers' folders can. Leave out --shapes-only."
        )

    @abstractmethod
    def knows(self, module: nn.Module) -> bool:
        """Whether a live module is one of this family's."""

    @abstractmethod
    def describe(self, module: nn.Module) -> Model:
        """The Model of a live module."""


def describe_any(module: nn.Module) -> Model:
    """The Model of a module that no family knows: layers by type and name, nothing about its inputs."""
    layers = find_layers(module)
    tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
    names = {name: name for name, _ in module.named_parameters()}
    loose = find_loose(module, layers)
    return Model(type(module).__name__, module, tensors, names, layers, loose, write=writer_with_config(module))


def writer_with_config(module: nn.Module) -> Write:
    """Weights, and the configuration of a live module that carries one as transformers' do."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return write_weights

    def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        write_weights(folder, tensors)
        config.save_pretrained(folder)

    return write


def outside_of(module: nn.Module, layers: Sequence[Layer], loose: Sequence[LooseTensor], reason: str) -> dict[str, str]:
    """The parameters that are neither in a layer nor loose, with the reason why not."""
    inside = {part.name for part in loose} | {layer.weight for layer in layers} | {layer.bias for layer in layers}
    return {name: reason for name, _ in module.named_parameters() if name not in inside}


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: what a model in half precision says is reckoned with in more."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def read_config(path: Path) -> dict[str, Any]:
    """A JSON configuration, or an empty one where there is none that can be read."""
    try:
        content = read_json(path, "a configuration")
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}


TextHead = Callable[[Sequence[str], Sequence[str]], Tensor]  # class names and prompts to class embeddings
