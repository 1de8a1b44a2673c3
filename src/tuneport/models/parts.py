"""The parts of a model: its weights, architecture, inputs, outputs, classification layer, and how it writes text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..io.checkpoint import write_checkpoint
from ..layers import Layer, LooseTensor, TokenLayout
from .tokenizer import Reader

Batch = Mapping[str, Tensor]
Forward = Callable[[nn.Module, Batch], Tensor]
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
Write = Callable[[Path, Mapping[str, Tensor]], object]


@dataclass(frozen=True)
class Labelling:
    """What a classification layer decides: of what ("image", "sequence" or "token") and among which classes.

    `problem` is transformers' `problem_type`, if it is stated: "single_label_classification",
    "multi_label_classification" or "regression". `names` are the classes as a configuration of transformers has them.
    """

    task: str
    classes: tuple[str, ...]
    problem: str = ""
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def regresses(self) -> bool:
        """True if the layer gives numbers, not scores of classes, by the rule of transformers."""
        return self.problem == "regression" or (not self.problem and len(self.classes) == 1)


@dataclass(frozen=True, eq=False)
class Weights:
    """The stored weights of a model, and how others are written in their place.

    Args:
        tensors: by their names in the files, read on access.
        file_names: names of `module.named_parameters()` -> names in the files; empty if no module is built.
        folder: the model's folder, for files that are copied along.
        write: writes tensors to a new folder in the layout of the library, with the configuration if no other
            file of the folder holds it.
        library: the hub's name of the library.
        offloaded: the weights stay in the files, and the parameters of the module are placeholders without storage.
    """

    tensors: Mapping[str, Tensor]
    file_names: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    write: Write = write_checkpoint
    library: str | None = None
    offloaded: bool = False


@dataclass(frozen=True, eq=False)
class Architecture:
    """The parts of a module, by the names of its parameters.

    Args:
        layers: the layers that a transfer can move.
        loose: the tensors outside layers that it can move: norms, biases, embeddings.
        vocabulary_head: the last layer of a model that generates text, if it is not tied to the embedding; also in
            `outside`.
        outside: parameters that stay as they are -> the reason.
    """

    layers: tuple[Layer, ...] = ()
    loose: tuple[LooseTensor, ...] = ()
    vocabulary_head: tuple[LooseTensor, ...] = ()
    outside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a model reads. A field is None if the model has no such thing.

    Args:
        kind: "image" or "text".
        encode: raw samples -> the module's inputs.
        layout: the places of the tokens of a batch of images.
        reader: the tokenizer of a text model.
        prompted: whether the model reads samples inside the task's prompt.
    """

    kind: str | None = None
    encode: Callable[[Sequence[Any]], dict[str, Tensor]] | None = None
    layout: Callable[[Batch], TokenLayout] | None = None
    reader: Reader | None = None
    prompted: bool = False


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a model gives for each sample. A field is None if the model has no such thing.

    Args:
        features: runs the module and returns one vector per sample, of size `width`.
        logits: runs the module and returns the scores of `classes`, of each sample or of each token.
        embed_texts: texts -> vectors to compare with `features`, by its text tower or as a sentence encoder.
        logit_scale: factor of the cosines between features and class embeddings.
    """

    features: Forward | None = None
    width: int | None = None
    logits: Forward | None = None
    classes: tuple[str, ...] = ()
    embed_texts: Callable[[list[str]], Tensor] | None = None
    logit_scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Generation:
    """How a model writes text.

    Args:
        kind: "causal" or "seq2seq".
        generate: continues a batch, padded on the left, by at most so many tokens; a callback gets the scores of the
            next tokens (N, V) and returns the chosen ones (N,) and which texts are finished (N,).
        token_logits: scores of the next tokens (M, vocabulary), of a batch, its labels and the places of interest
            (N, T).
        answer_logits: scores (N, K, vocabulary) and labels (N, K) of rows that are several answers to each question,
            with the number of answers to each; returns None if the shared tokens cannot be read once.
    """

    kind: str
    generate: Callable[[nn.Module, Batch, int, Choose], None]
    token_logits: Callable[[nn.Module, Batch, Tensor, Tensor], Tensor]
    answer_logits: Callable[[nn.Module, Batch, Tensor, Sequence[int]], tuple[Tensor, Tensor] | None] | None = None


@dataclass(frozen=True, eq=False)
class Classifier:
    """A classification layer that can be made again.

    Args:
        path: of the layer, the last one of the head.
        task: what it labels: "image", "sequence" or "token".
        problem: transformers' `problem_type` of it, if it is stated.
        names: of its classes, as a configuration of transformers has them.
        own: its parameters in the files, if the layer was made again for classes that it knows.
        fresh: parameters that are not in the files: parts of a head that was made when the model was opened.
    """

    path: str
    task: str
    problem: str = ""
    names: tuple[str, ...] = field(default=(), compare=False)
    own: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
