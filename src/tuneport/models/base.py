"""Models and their families: what a transfer must know of a model, whatever library it comes from.

A family fills in a Model; no other package needs to know which library made it.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, DataError, TuneportError, reraised
from ..io.checkpoint import read_object, write_checkpoint
from ..io.tensors import LazyTensors, TensorSpec, describe, renamed
from ..layers import Layer, LooseTensor, find_layers, find_loose
from .parts import Architecture, Batch, Classifier, Generation, Inputs, Labelling, Outputs, Weights, Write
from .tokenizer import Reader

MIXTURE = "part of a mixture of experts, which have no common order in two models: the target keeps its own"


class DatasetLike(Protocol):
    """The fields of a data set that this package reads."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def prompts(self) -> tuple[str, ...]: ...
    @property
    def label_texts(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, eq=False)
class Model:
    """A model with everything a transfer needs to know of it.

    Args:
        name: what the user calls the model; used in messages.
        classifier: its classification layer, if it can be made again.
        generation: how it writes text, if it does.
    """

    name: str
    module: nn.Module
    weights: Weights
    architecture: Architecture = field(default_factory=Architecture)
    inputs: Inputs = field(default_factory=Inputs)
    outputs: Outputs = field(default_factory=Outputs)
    classifier: Classifier | None = None
    generation: Generation | None = None

    def __repr__(self) -> str:
        return f"Model({self.name}: {type(self.module).__name__}, {len(self.architecture.layers)} layers)"

    @property
    def unreadable(self) -> str:
        """The error text for a model without `encode`."""
        if self.inputs.kind == "text" and self.weights.folder is not None:
            return f"{self.name} has no tokenizer in its folder: copy its files (tokenizer.json) from the original."
        return f"{self.name} cannot read raw samples; pass batches and loss=, or a model folder."

    @property
    def reader(self) -> Reader:
        """The tokenizer; an error if there is none."""
        if self.inputs.reader is None:
            raise TuneportError(self.unreadable)
        return self.inputs.reader

    @property
    def generates(self) -> str | None:
        """ "causal" or "seq2seq", if the model writes text."""
        return self.generation.kind if self.generation is not None else None

    @property
    def shares_questions(self) -> bool:
        """True if the tokens that several answers to a question share can be read once."""
        return self.generation is not None and self.generation.answer_logits is not None

    @property
    def task(self) -> str:
        """What the classification layer labels, if it can be made again; else empty."""
        return self.classifier.task if self.classifier is not None else ""

    @property
    def labelling(self) -> Labelling | None:
        """What the classification layer decides, if there is one that can be made again."""
        if self.classifier is None:
            return None
        return Labelling(self.classifier.task, self.outputs.classes, self.classifier.problem, self.classifier.names)

    @property
    def labels_samples(self) -> bool:
        """True unless the classification layer labels tokens or gives numbers."""
        return not self.instead

    @property
    def instead(self) -> str:
        """For an error: what a classification layer does that does not label samples; else empty."""
        return "labels tokens" if self.task == "token" else "gives numbers" if self.regresses else ""

    @property
    def regresses(self) -> bool:
        """True if the classification layer gives numbers, not scores of classes."""
        return self.labelling is not None and self.labelling.regresses

    @property
    def multi_label(self) -> bool:
        """True if each class of the classification layer is a question of its own."""
        return self.classifier is not None and self.classifier.problem == "multi_label_classification"

    @property
    def classifier_parameters(self) -> frozenset[str]:
        """The names of the parameters of the classification layer, if there is one."""
        if self.classifier is None:
            return frozenset()
        path = self.classifier.path
        return frozenset(f"{path}.{name}" for name, _ in self.module.get_submodule(path).named_parameters())

    @property
    def head(self) -> frozenset[str]:
        """The parameters of a head that is carried as a whole: the classification layer, and what is fresh."""
        fresh = self.classifier.fresh if self.classifier is not None else frozenset()
        return fresh | self.classifier_parameters

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def place(self, batch: Batch) -> dict[str, Tensor]:
        """An encoded batch on the model's device, with pixels in the dtype of its first layer."""
        layers = self.architecture.layers
        dtype = self.module.get_parameter(layers[0].weight).dtype if layers else None
        return {
            key: value.to(self.device, dtype if value.is_floating_point() else None) for key, value in batch.items()
        }

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by their live names: those of the module, or those in the files if the model is offloaded."""
        return self.stored_parameters() if self.weights.offloaded else dict(self.module.named_parameters())

    def stored_parameters(self) -> Mapping[str, Tensor]:
        """The parameters by their live names, with the values and dtypes of the files."""
        return renamed(
            self.weights.tensors,
            {live: file for live, file in self.weights.file_names.items() if file in self.weights.tensors},
        )

    def require_in_memory(self, what: str, instead: str) -> None:
        """Raise if the model is offloaded: `what` needs it whole in memory, and `instead` says what to do."""
        if self.weights.offloaded:
            large = f"{self.name} is larger than `memory_budget`"
            raise TuneportError(f"{what} needs whole models in memory, and {large}: {instead}.")

    def check_kind(self, data: DatasetLike) -> None:
        """Raise if the data hold images and the model reads texts, or the other way round."""
        if data.kind != self.inputs.kind:
            raise DataError(f"{data.name} holds {data.kind}s, but {self.name} reads {self.inputs.kind}s.")

    def matches(self, name: str, patterns: Sequence[str]) -> bool:
        """Whether the live name of a parameter, or its name in the files, matches one of the patterns."""
        return any(
            fnmatchcase(known, glob) for known in (name, self.weights.file_names.get(name, name)) for glob in patterns
        )

    def with_head(self, head: Mapping[str, Tensor], *, rounded: bool = True) -> Model:
        """The same model with other values of the parameters of its head; everything else is shared.

        They are `rounded` to the dtype in which they are written.
        """
        module = self.module
        for name, tensor in head.items():
            dtype = describe(self.weights.tensors, self.weights.file_names[name]).dtype if rounded else tensor.dtype
            module = _with_parameter(module, name.split("."), tensor.to(dtype))
        files = {self.weights.file_names[name]: tensor for name, tensor in head.items()}
        names = {name: name for name in self.weights.tensors if name not in files}
        tensors = HeadedTensors(self.weights.tensors, names, files)
        return replace(self, module=module, weights=replace(self.weights, tensors=tensors))

    def cut_at(self, max_length: int | None) -> Model:
        """The same model reading texts up to `max_length` tokens, or up to its own limit."""
        if self.inputs.reader is None or max_length is None:
            return self
        reader = replace(self.inputs.reader, max_length=max_length)
        return replace(
            self, inputs=replace(self.inputs, reader=reader, encode=lambda texts: reader.texts(texts).inputs)
        )

    def guarded(self) -> Model:
        """The same model, whose failures when it runs are errors of one line: its files may lie about it."""

        def guard(run: Any) -> Any:
            def guarded(*arguments: Any, **named: Any) -> Any:
                with reraised(f"{self.name} cannot be run; its configuration and its weights may not fit"):
                    return run(*arguments, **named)

            return run and guarded

        def guarded(part: Any, *names: str) -> Any:
            return part and replace(part, **{name: guard(getattr(part, name)) for name in names})

        return replace(
            self,
            inputs=guarded(self.inputs, "encode"),
            outputs=guarded(self.outputs, "features", "logits", "embed_texts"),
            generation=guarded(self.generation, "generate", "token_logits", "answer_logits"),
        )

    def with_module(self, module: nn.Module) -> Model:
        """The same model with other weights, in memory."""
        return replace(self, module=module, weights=replace(self.weights, offloaded=False))


ModelLike = Model | nn.Module | str | Path  # what a user may give as a model


def _with_parameter(module: nn.Module, path: Sequence[str], tensor: Tensor) -> nn.Module:
    """A copy of a module that shares all but one parameter."""
    new, (first, *rest) = copy.copy(module), path
    new._modules, new._parameters = dict(module._modules), dict(module._parameters)
    if rest:
        new._modules[first] = _with_parameter(module.get_submodule(first), rest, tensor)
    else:
        old = module.get_parameter(first)
        new._parameters[first] = nn.Parameter(tensor.detach().to(old), requires_grad=old.requires_grad)
    return new


class HeadedTensors(LazyTensors):
    """The stored tensors of a model that was given a head: under other names, with the tensors of the head.

    Args:
        stored: the tensors in the files.
        names: new name -> name in the files.
        head: the tensors of the head, by their new names; they are stored in the dtype of the others.
    """

    def __init__(self, stored: Mapping[str, Tensor], names: Mapping[str, str], head: Mapping[str, Tensor]) -> None:
        dtype = describe(stored, next(iter(names.values()))).dtype

        def read(name: str) -> Tensor:
            return head[name].detach().to("cpu", dtype) if name in head else stored[names[name]]

        def spec(name: str) -> TensorSpec:
            return TensorSpec(tuple(head[name].shape), dtype) if name in head else describe(stored, names[name])

        super().__init__((*names, *head), read, spec)
        self.files: tuple[Path, ...] = getattr(stored, "files", ())


class Family(ABC):
    """A model library: the references that it can open and the live modules that it knows."""

    @abstractmethod
    def recognises(self, reference: str) -> bool:
        """Whether `reference` names a model of this family."""

    @abstractmethod
    def open(self, reference: str, *, device: torch.device, trust_remote_code: bool, dtype: torch.dtype) -> Model:
        """Load the model in evaluation mode, to run in `dtype`; its `tensors` keep the dtypes of the files."""

    def stored(self, reference: str) -> Weights:
        """The model's weights. Override it if the family can find them without building the model."""
        return self.open(reference, device=torch.device("cpu"), trust_remote_code=False, dtype=torch.float32).weights

    def outline(self, reference: str, *, dtype: torch.dtype, weights: bool = True) -> Model:
        """Open the model offloaded; without `weights` its weight files need not exist."""
        del dtype, weights
        why = "as only transformers' folders can"
        raise CheckpointError(f"{reference} cannot be built without its weights, {why}: leave out `shapes_only`.")

    def labelling(self, reference: str) -> Labelling | None:
        """What the classification layer of a model in files decides; None if it has none."""
        return self.open(reference, device=torch.device("cpu"), trust_remote_code=False, dtype=torch.float32).labelling

    def classifier(self, model: Model, labelling: Labelling, *, trust_remote_code: bool) -> Model:
        """The model with a classification layer for these classes: its own if it knows them, else a fresh one."""
        del labelling, trust_remote_code
        raise CheckpointError(
            f"{model.name} cannot have a classification layer: {model.weights.library} has no class for it. Give "
            'another target, or `head_fit="none"`.'
        )

    @abstractmethod
    def knows(self, module: nn.Module) -> bool:
        """Whether a live module belongs to this family."""

    @abstractmethod
    def describe(self, module: nn.Module) -> Model:
        """The Model of a live module."""


def describe_any(module: nn.Module) -> Model:
    """The Model of a module that no family knows: layers by type and name, nothing about its inputs."""
    layers = find_layers(module)
    loose = find_loose(module, layers)
    names = {name: name for name, _ in module.named_parameters()}
    weights = Weights(live_tensors(module), names, write=writer_with_config(module))
    return Model(type(module).__name__, module, weights, Architecture(layers, loose))


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The state of a live module, detached."""
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def writer_with_config(module: nn.Module) -> Write:
    """A writer of weights, and of the module's configuration if it has one of transformers' kind.

    Its dtype, which transformers loads the weights in, is that of most weights, whatever the module ran in.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return write_checkpoint

    def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        write_checkpoint(folder, tensors)
        sizes: Counter[torch.dtype] = Counter()
        for spec in (describe(tensors, name) for name in tensors):
            sizes[spec.dtype] += math.prod(spec.shape) if spec.dtype.is_floating_point else 0
        stored = copy.deepcopy(config)
        for part in (stored, *(getattr(stored, name) for name in stored.sub_configs)):
            part.dtype = max(sizes, key=sizes.__getitem__)
        stored.save_pretrained(folder)

    return write


def outside_of(module: nn.Module, layers: Sequence[Layer], loose: Sequence[LooseTensor], reason: str) -> dict[str, str]:
    """The parameters that are neither in a layer nor loose, each with the reason."""
    inside = {part.name for part in loose} | {layer.weight for layer in layers} | {layer.bias for layer in layers}
    return {name: reason for name, _ in module.named_parameters() if name not in inside}


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least, for computations on the outputs of half-precision models."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def read_config(path: Path) -> dict[str, Any]:
    """A JSON configuration, or an empty one if it is missing or cannot be read."""
    try:
        return read_object(path, "a configuration")
    except CheckpointError:
        return {}
