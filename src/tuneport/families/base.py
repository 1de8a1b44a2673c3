"""What the rest of the house knows of a model, whatever library it comes from: a module, its files, its parts.

A family fills in a Model; nobody else needs to know which library made it. Heads turn features into class
scores without being part of what is transferred.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checkpoint import open_checkpoint
from ..errors import CheckpointError, DataError, first_of
from ..layers import Layer, LooseTensor, TokenLayout, find_layers, find_loose

Batch = Mapping[str, Tensor]
Forward = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, eq=False)
class Model:
    """A model with everything a transfer needs to know of it.

    `tensors` reads the stored weights by their name in the files; `file_names` leads there from the names of
    `module.named_parameters()`. `encode` turns raw samples into the module's inputs, `features` and `logits`
    run it, `text_head` builds class embeddings with the model's own text tower; each is None where the
    model has no such thing. `width` is that of the features.
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
    text_head: Callable[[Sequence[str]], Tensor] | None = None
    logit_scale: float = 1.0
    width: int | None = None
    outside: Mapping[str, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def with_module(self, module: nn.Module) -> Model:
        """The same model with other weights in memory."""
        return replace(self, module=module)


class Family(ABC):
    """A model library: what it can open and what it knows of live modules."""

    name: str

    @abstractmethod
    def recognises(self, reference: str) -> bool:
        """Whether `reference` names a model of this family."""

    @abstractmethod
    def open(self, reference: str, *, device: torch.device, trust_remote_code: bool) -> Model:
        """Load the model in float32, in evaluation mode."""

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
    return Model(type(module).__name__, module, tensors, names, layers, find_loose(module, layers))


@dataclass(frozen=True, eq=False)
class Head:
    """How features become class scores: frozen class embeddings, or the model's own classification layer (None)."""

    name: str
    classes: tuple[str, ...]
    class_embeds: Tensor | None = None
    logit_scale: float = 1.0

    def scores(self, model: Model, module: nn.Module, batch: Batch) -> Tensor:
        """Class scores (N, classes): `scale * cosine(features, class embedding)`, or the module's own logits."""
        if self.class_embeds is None:
            assert model.logits is not None
            return model.logits(module, batch)
        assert model.features is not None
        features = model.features(module, batch)
        embeds = self.class_embeds.to(features)
        return self.logit_scale * F.normalize(features, dim=-1) @ F.normalize(embeds, dim=-1).T


def read_head(path: Path, name: str) -> Head:
    """Read `class_embeds`, `logit_scale` and the class names of a head file."""
    stored = open_checkpoint(path)
    missing = [key for key in ("class_embeds", "logit_scale") if key not in stored]
    if missing:
        raise CheckpointError(f"{path} is not a head: no {first_of(missing)} in it, only {first_of(stored)}.")
    complex_ones = [key for key in ("class_embeds", "logit_scale") if stored.dtype(key).is_complex]
    if complex_ones:
        raise CheckpointError(f"{path} is not a head: {first_of(complex_ones)} hold complex numbers.")
    embeds, scale = stored["class_embeds"].float(), stored["logit_scale"].float()
    try:
        classes = json.loads(stored.metadata["classes"])
    except (KeyError, ValueError, RecursionError):
        classes = None
    if not isinstance(classes, list):
        raise CheckpointError(f"{path} names no classes: its metadata needs 'classes', a JSON list of names.")
    if embeds.ndim != 2 or scale.numel() != 1 or len(embeds) != len(classes):
        raise CheckpointError(
            f"{path} does not fit together: class_embeds {tuple(embeds.shape)}, logit_scale {tuple(scale.shape)} "
            f"and {len(classes)} class names; expected (classes, dim), one number and one name per class."
        )
    if not bool(torch.isfinite(embeds).all() and torch.isfinite(scale).all()):
        raise CheckpointError(f"{path} holds NaN or infinite values.")
    return Head(name, tuple(str(c) for c in classes), embeds, float(scale))


def choose_head(model: Model, wanted: str | None, dataset_name: str, classes: Sequence[str]) -> Head:
    """The head to score with: by name or file, else the model's own classifier, text tower, or fitting file.

    A name is a file `heads/NAME.safetensors` in the model's own folder.
    """
    stored = sorted((model.folder / "heads").glob("*.safetensors")) if model.folder is not None else []
    names = [path.stem for path in stored]
    if wanted is not None:
        if wanted in names:
            return _fitting(model, read_head(stored[names.index(wanted)], wanted))
        if Path(wanted).is_file():
            return _fitting(model, read_head(Path(wanted), Path(wanted).stem))
        known = f"it has {first_of(names)}" if names else "it has none"
        raise DataError(f"{model.name} has no head '{wanted}': {known}. Pass --head with one of its heads or a file.")
    if model.logits is not None:
        return Head("classifier", model.classes)
    if model.text_head is not None:
        return Head("text", tuple(classes), model.text_head(classes), model.logit_scale)
    if dataset_name in names:
        return _fitting(model, read_head(stored[names.index(dataset_name)], dataset_name))
    if len(names) == 1:
        return _fitting(model, read_head(stored[0], names[0]))
    known = f"choose one of its heads with --head: {first_of(names)}" if names else "pass --head FILE"
    raise DataError(f"{model.name} has neither a classification layer nor a text tower; {known}.")


def _fitting(model: Model, head: Head) -> Head:
    """Check a head's width against the model's features without running it, where the family tells."""
    assert head.class_embeds is not None
    if model.width is not None and model.width != head.class_embeds.shape[1]:
        raise DataError(
            f"head '{head.name}' has embeddings of width {head.class_embeds.shape[1]}, but {model.name} gives features "
            f"of width {model.width}; a head belongs to one model."
        )
    return head
