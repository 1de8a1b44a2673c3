"""What the rest of the house knows of a model, whatever library it comes from: a module, its files, its parts.

A family fills in a Model; nobody else needs to know which library made it. Heads turn features into class
scores without being part of what is transferred.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import CheckpointError, DataError, brief, first_of
from ..io.checkpoint import open_checkpoint, read_json, write_checkpoint
from ..io.tensors import LazyTensors, describe
from ..layers import Layer, LooseTensor, TokenLayout, find_layers, find_loose
from .offload import is_hollow
from .tokenizer import Reader

Batch = Mapping[str, Tensor]
Forward = Callable[[nn.Module, Batch], Tensor]
Write = Callable[[Path, Mapping[str, Tensor]], None]
TextHead = Callable[[Sequence[str], Sequence[str]], Tensor]  # class names and prompts to class embeddings

# Short descriptions in several wordings; their embeddings are averaged into one class embedding.
PROMPTS = (
    "a photo of a {}.",
    "a picture that shows a {}.",
    "a close view of a {}.",
    "a small image of a {}.",
    "an example of a {}.",
)


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
    beside the weights carries it; `library` is what the hub calls that library, None where the module is of none.
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
        """The parameters by their live names: the module's own, or those in the files where it holds none."""
        return self.stored_parameters() if is_hollow(self.module) else dict(self.module.named_parameters())

    def stored_parameters(self) -> Mapping[str, Tensor]:
        """The parameters by their live names as they are in the files, whatever the module runs in."""
        names = {live: stored for live, stored in self.file_names.items() if stored in self.tensors}
        return LazyTensors(names, lambda n: self.tensors[names[n]], lambda n: describe(self.tensors, names[n]))

    def matches(self, name: str, patterns: Sequence[str]) -> bool:
        """Whether a parameter, by its live name or by that in the files, fits one of the patterns."""
        return any(fnmatchcase(known, glob) for known in (name, self.file_names.get(name, name)) for glob in patterns)

    def with_module(self, module: nn.Module) -> Model:
        """The same model with other weights in memory."""
        return replace(self, module=module)


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


def class_embeddings(classes: Sequence[str], prompts: Sequence[str], embed: Callable[[list[str]], Tensor]) -> Tensor:
    """One embedding per class (classes, dim): the mean over the prompts of what `embed` makes of the texts.

    Without prompts of the task's own, the general ones are taken.
    """
    rows = []
    for name in classes:
        with torch.no_grad():
            texts = embed([prompt.format(name.replace("_", " ")) for prompt in prompts or PROMPTS])
        rows.append(F.normalize(widened(texts), dim=-1).mean(0))
    return F.normalize(torch.stack(rows), dim=-1).cpu()


def widened(tensor: Tensor) -> Tensor:
    """In float32 at least: what a model in half precision says is reckoned with in more."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def temperature_of(parameter: Tensor, stored: Mapping[str, Tensor], name: str) -> float:
    """The factor of a zero-shot head's cosines, from the files: the module may have rounded it, or hold no numbers."""
    return float(widened(stored.get(name, parameter).detach()).exp())


def config_classes(config: Any) -> tuple[str, ...]:
    """The names of a classification layer's classes; the default LABEL_0, LABEL_1 are mere numbers."""
    try:
        labels = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"config.json names its classes by something else than numbers: {brief(error)}."
        ) from error
    return tuple(labels[i].removeprefix("LABEL_") for i in sorted(labels))


def read_config(path: Path) -> dict[str, Any]:
    """A JSON configuration, or an empty one where there is none that can be read."""
    try:
        content = read_json(path, "a configuration")
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True, eq=False)
class Head:
    """How features become class scores: frozen class embeddings, or the model's own classification layer (None)."""

    name: str
    classes: tuple[str, ...]
    class_embeds: Tensor | None = None
    logit_scale: float = 1.0

    def scores(self, model: Model, module: nn.Module, batch: Batch) -> Tensor:
        """Class scores (N, classes): `scale * cosine(features, class embedding)`, or the module's own logits.

        They are float32 at least, whatever the module runs in.
        """
        if self.class_embeds is None:
            assert model.logits is not None
            return widened(model.logits(module, batch))
        assert model.features is not None
        features = widened(model.features(module, batch))
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


def choose_head(
    model: Model,
    wanted: str | None,
    dataset_name: str,
    classes: Sequence[str],
    prompts: Sequence[str] = (),
    label_texts: Sequence[str] = (),
) -> Head:
    """The head to score with: by name or file, else the model's own classifier, text tower, or fitting file.

    A name is a file `heads/NAME.safetensors` in the model's own folder. A JSON file describes the classes in
    words, which the model's own text tower or encoder turns into a head; so do the `label_texts`, which stand for
    the `classes` where given. A text tower is asked with `prompts`, templates with {} for the class name, where the
    task has its own.
    """
    stored = sorted((model.folder / "heads").glob("*.safetensors")) if model.folder is not None else []
    names = [path.stem for path in stored]
    if wanted is not None:
        if wanted in names:
            return _fitting(model, read_head(stored[names.index(wanted)], wanted))
        if Path(wanted).is_file() and wanted.endswith(".json"):
            return _described_head(model, Path(wanted))
        if Path(wanted).is_file():
            return _fitting(model, read_head(Path(wanted), Path(wanted).stem))
        known = f"it has {first_of(names)}" if names else "it has none"
        raise DataError(f"{model.name} has no head '{wanted}': {known}. Pass --head with one of its heads or a file.")
    if model.logits is not None:
        return Head("classifier", model.classes)
    if model.text_head is not None and (label_texts or classes):
        return Head("text", tuple(classes), model.text_head(label_texts or classes, prompts), model.logit_scale)
    if dataset_name in names:
        return _fitting(model, read_head(stored[names.index(dataset_name)], dataset_name))
    if len(names) == 1:
        return _fitting(model, read_head(stored[0], names[0]))
    known = f"choose one of its heads with --head: {first_of(names)}" if names else "pass --head FILE"
    if model.text_head is not None:
        raise DataError(f"{dataset_name} names no classes that {model.name} could be asked for; {known}, or .json.")
    raise DataError(f"{model.name} has neither a classification layer nor a text tower; {known}.")


def _described_head(model: Model, path: Path) -> Head:
    """A head from words: {"class": "description", ...}, or several descriptions in a list, which are averaged."""
    if model.text_head is None:
        raise DataError(f"{model.name} has no text tower or sentence encoder that could read {path}; pass a head file.")
    content = read_json(path, "a list of class descriptions")
    words = (
        {name: [text] if isinstance(text, str) else text for name, text in content.items()}
        if isinstance(content, dict)
        else {}
    )
    good = [
        isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts) for texts in words.values()
    ]
    if not words or not all(good):
        raise DataError(f'{path} does not describe classes: expected {{"class": "description", ...}} in words.')
    rows = [F.normalize(model.text_head(texts, ("{}",)).mean(0), dim=-1) for texts in words.values()]
    return Head(path.stem, tuple(words), torch.stack(rows), model.logit_scale)


def _fitting(model: Model, head: Head) -> Head:
    """Check a head's width against the model's features without running it, where the family tells."""
    assert head.class_embeds is not None
    if model.width is not None and model.width != head.class_embeds.shape[1]:
        raise DataError(
            f"head '{head.name}' has embeddings of width {head.class_embeds.shape[1]}, but {model.name} gives features "
            f"of width {model.width}; a head belongs to one model."
        )
    return head
