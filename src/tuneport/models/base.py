"""Models and their families: what a transfer must know of a model, whatever library it comes from.

A family fills in a Model; no other package needs to know which library made it.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, DataError, TuneportError, reraised
from ..io.checkpoint import read_json, write_checkpoint
from ..io.tensors import LazyTensors, TensorSpec, describe, renamed
from ..layers import Layer, LooseTensor, TokenLayout, find_layers, find_loose
from .tokenizer import Reader

MIXTURE = "part of a mixture of experts, which have no common order in two models: the target keeps its own"
Batch = Mapping[str, Tensor]
Forward = Callable[[nn.Module, Batch], Tensor]
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
Write = Callable[[Path, Mapping[str, Tensor]], object]


@dataclass(frozen=True, eq=False)
class Weights:
    """The stored weights of a model, and how others are written in their place."""

    tensors: Mapping[str, Tensor]  # by their names in the files, read on access
    file_names: Mapping[str, str] = field(default_factory=dict)  # by live names; empty if no module is built
    folder: Path | None = None  # of the model, for files that are copied along
    write: Write = write_checkpoint  # to a new folder, with the configuration if no other file of the folder holds it
    library: str | None = None  # the hub's name of it
    offloaded: bool = False  # the weights stay in the files, and those of the module are placeholders without storage


@dataclass(frozen=True, eq=False)
class Architecture:
    """The parts of a module, by the names of its parameters."""

    layers: tuple[Layer, ...] = ()  # that a transfer can move
    loose: tuple[LooseTensor, ...] = ()  # tensors outside layers that it can move: norms, biases, embeddings
    vocabulary_head: tuple[LooseTensor, ...] = ()  # the last layer of a writer, if it is not tied; also in `outside`
    outside: Mapping[str, str] = field(default_factory=dict)  # parameters that stay as they are -> the reason


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model reads. A field is None if the model has no such thing."""

    kind: str | None = None  # "image" or "text"
    encode: Callable[[Sequence[Any]], dict[str, Tensor]] | None = None  # raw samples -> the module's inputs
    layout: Callable[[Batch], TokenLayout] | None = None  # the places of the tokens of a batch of images
    reader: Reader | None = None  # the tokenizer of a text model
    prompted: bool = False  # whether the model reads samples inside the task's prompt


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model gives for each sample. A field is None if the model has no such thing."""

    features: Forward | None = None  # one vector per sample, of size `width`
    width: int | None = None
    logits: Forward | None = None  # scores of the `classes`, of each sample or of each token
    classes: tuple[str, ...] = ()
    embed_texts: Callable[[list[str]], Tensor] | None = None  # vectors to compare with `features`
    logit_scale: float = 1.0  # factor of the cosines between features and class embeddings


@dataclass(frozen=True, eq=False)
class Generation:
    """How a model writes text.

    `generate` continues a batch, padded on the left, by at most so many tokens; a callback gets the scores of the next
    tokens (N, V) and returns the chosen ones (N,) and which texts are finished (N,). `token_logits` gives the scores of
    the next tokens (M, vocabulary), of a batch, its labels and the places of interest (N, T). `answer_logits` gives
    scores (N, K, vocabulary) and labels (N, K) of rows that are several answers to each question, with the number of
    answers to each, or None if the shared tokens cannot be read once.
    """

    kind: str  # "causal" or "seq2seq"
    generate: Callable[[nn.Module, Batch, int, Choose], None]
    token_logits: Callable[[nn.Module, Batch, Tensor, Tensor], Tensor]
    answer_logits: Callable[[nn.Module, Batch, Tensor, Sequence[int]], tuple[Tensor, Tensor] | None] | None = None


@dataclass(frozen=True)
class Labelling:
    """What a classification layer decides."""

    task: str  # of what: "image", "sequence" or "token"
    classes: tuple[str, ...]
    problem: str = ""  # transformers' `problem_type`, if it is stated
    names: tuple[str, ...] = field(default=(), compare=False)  # the classes as transformers' configuration has them

    @property
    def regresses(self) -> bool:
        """True if the layer gives numbers, not scores of classes, by the rule of transformers."""
        return self.problem == "regression" or (not self.problem and len(self.classes) == 1)


@dataclass(frozen=True, eq=False)
class Classifier:
    """A classification layer that can be made again."""

    path: str  # of the layer, the last one of the head
    labelling: Labelling
    own: Mapping[str, Tensor] = field(default_factory=dict)  # its weights, if it was made again for known classes
    fresh: frozenset[str] = frozenset()  # parameters that are not in the files, but were made when it was opened


@dataclass(frozen=True, eq=False)
class Model:
    """A model with everything a transfer needs to know of it. Its `name` is what the user calls it."""

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
    def labelling(self) -> Labelling | None:
        """What the classification layer decides, if there is one that can be made again."""
        return self.classifier.labelling if self.classifier is not None else None

    @property
    def task(self) -> str:
        """What the classification layer labels, if it can be made again; else empty."""
        return self.labelling.task if self.labelling is not None else ""

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
        return self.labelling is not None and self.labelling.problem == "multi_label_classification"

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
        return {key: one.to(self.device, dtype if one.is_floating_point() else None) for key, one in batch.items()}

    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters by their live names: those of the module, or those in the files if the model is offloaded."""
        return self.stored_parameters() if self.weights.offloaded else dict(self.module.named_parameters())

    def stored_parameters(self) -> Mapping[str, Tensor]:
        """The parameters by their live names, with the values and dtypes of the files."""
        stored = self.weights.tensors
        return renamed(stored, {live: file for live, file in self.weights.file_names.items() if file in stored})

    def require_in_memory(self, what: str, instead: str) -> None:
        """Raise if the model is offloaded: `what` needs it whole in memory, and `instead` says what to do."""
        if self.weights.offloaded:
            large = f"{self.name} is larger than `memory_budget`"
            raise TuneportError(f"{what} needs whole models in memory, and {large}: {instead}.")

    def check_kind(self, data: Any) -> None:
        """Raise if the data hold images and the model reads texts, or the other way round."""
        if data.kind != self.inputs.kind:
            raise DataError(f"{data.name} holds {data.kind}s, but {self.name} reads {self.inputs.kind}s.")

    def matches(self, name: str, patterns: Sequence[str]) -> bool:
        """Whether the live name of a parameter, or its name in the files, matches one of the patterns."""
        known = (name, self.weights.file_names.get(name, name))
        return any(fnmatchcase(each, glob) for each in known for glob in patterns)

    def with_head(self, head: Mapping[str, Tensor], *, rounded: bool = True) -> Model:
        """The same model with other values of the parameters of its head; everything else is shared.

        They are `rounded` to the dtype in which they are written, which must hold them.
        """
        stored, live = self.weights.tensors, dict(self.module.named_parameters())
        shared = [tensor for name, tensor in live.items() if name not in head] + list(self.module.buffers())
        module = copy.deepcopy(self.module, {id(tensor): tensor for tensor in shared})
        for name, tensor in head.items():
            dtype = describe(stored, self.weights.file_names[name]).dtype if rounded else tensor.dtype
            if tensor.abs().max() > torch.finfo(dtype).max:
                raise CheckpointError(
                    f"{name} of {self.name} is to have values up to {float(tensor.abs().max()):.3g}, which {dtype} "
                    "cannot hold: give this model in bfloat16 or float32."
                )
            module.get_parameter(name).data.copy_(tensor.to(dtype))
        files = {self.weights.file_names[name]: tensor for name, tensor in head.items()}
        tensors = HeadedTensors(stored, {name: name for name in stored if name not in files}, files)
        return replace(self, module=module, weights=replace(self.weights, tensors=tensors))

    def cut_at(self, max_length: int | None) -> Model:
        """The same model reading texts up to `max_length` tokens, or up to its own limit."""
        if self.inputs.reader is None or max_length is None:
            return self
        reader = replace(self.inputs.reader, max_length=max_length)
        return replace(self, inputs=replace(self.inputs, reader=reader, encode=reader.encode))

    def guarded(self) -> Model:
        """The same model, whose failures when it runs are errors of one line: its files may lie about it."""
        guard = reraised(f"{self.name} cannot be run; its configuration and its weights may not fit")

        def guarded(part: Any, *names: str) -> Any:
            runs = {name: getattr(part, name, None) for name in names}
            return part and replace(part, **{name: guard(run) for name, run in runs.items() if run is not None})

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


class HeadedTensors(LazyTensors):
    """The stored tensors of a model that was given a head: by `names` of new -> old, with the tensors of the head.

    These have their new names, and are stored in the dtype of the others.
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
        raise CheckpointError(
            f"{reference} cannot be built without its weights, as only transformers' folders can: leave out "
            "`shapes_only`."
        )

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
    names = {name: name for name, _ in module.named_parameters()}
    weights = Weights(live_tensors(module), names, write=writer_with_config(module))
    return Model(type(module).__name__, module, weights, Architecture(layers, find_loose(module, layers)))


def live_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The state of a live module, detached."""
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}


def count_weights(stored: Mapping[str, Tensor]) -> int:
    """The number of weights in a model's files."""
    return sum(math.prod(describe(stored, name).shape) for name in stored)


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
        return read_json(path, "a configuration")
    except CheckpointError:
        return {}
