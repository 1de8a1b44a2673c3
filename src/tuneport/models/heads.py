"""Heads: class embeddings or classifiers that turn a model's features into class scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import CheckpointError, DataError, first_of, is_text
from ..io.checkpoint import open_checkpoint, read_json
from ..io.untrusted import check_regular, parse_json
from .base import Batch, Model, widened

# Short descriptions in several wordings; their embeddings are averaged into one class embedding.
PROMPTS = (
    "a photo of a {}.",
    "a picture that shows a {}.",
    "a close view of a {}.",
    "a small image of a {}.",
    "an example of a {}.",
)
LARGEST_LOG_SCALE = 4.61  # CLIP clips its factor at 100 = e^4.6052


def class_embeddings(classes: Sequence[str], prompts: Sequence[str], embed: Callable[[list[str]], Tensor]) -> Tensor:
    """One embedding per class (classes, dim): the mean of the embedded prompts, by default those of PROMPTS."""
    with torch.no_grad():
        texts = [[prompt.format(name.replace("_", " ")) for prompt in prompts or PROMPTS] for name in classes]
        rows = [F.normalize(widened(embed(each)), dim=-1).mean(0) for each in texts]
        return F.normalize(torch.stack(rows), dim=-1).cpu()


def temperature_of(parameter: Tensor, stored: Mapping[str, Tensor], name: str) -> float:
    """The factor of a zero-shot head's cosines, read from the files: the module may have rounded it or be offloaded."""
    return float(widened(stored.get(name, parameter).detach()).exp())


@dataclass(frozen=True, eq=False)
class Head:
    """Turns features into class scores: by frozen class embeddings or, without them, the classification layer."""

    name: str
    classes: tuple[str, ...]
    class_embeds: Tensor | None = None
    logit_scale: float = 1.0

    def __repr__(self) -> str:
        return f"Head({self.name}: {len(self.classes)} classes)"

    def scores(self, model: Model, module: nn.Module, batch: Batch) -> Tensor:
        """Class scores (N, classes) in float32 at least, or (N, T, classes) of a model that labels tokens."""
        if self.class_embeds is None:
            assert model.outputs.logits is not None
            return widened(model.outputs.logits(module, batch))
        assert model.outputs.features is not None
        features = widened(model.outputs.features(module, batch))
        embeds = self.class_embeds.to(features)
        return self.logit_scale * F.normalize(features, dim=-1) @ F.normalize(embeds, dim=-1).T


def read_head(path: Path) -> Head:
    """Read `class_embeds`, `logit_scale` (a logarithm, as CLIP stores it) and the class names of a head file."""
    stored = open_checkpoint(path)
    missing = [key for key in ("class_embeds", "logit_scale") if key not in stored]
    if missing:
        raise CheckpointError(f"{path} is not a head: no {first_of(missing)} in it, only {first_of(stored)}.")
    if stored.dtype("class_embeds").is_complex or stored.dtype("logit_scale").is_complex:
        raise CheckpointError(f"{path} is not a head: it holds complex numbers.")
    embeds, scale = stored["class_embeds"].float(), stored["logit_scale"].float()
    try:
        classes = parse_json(stored.metadata["classes"])
    except (KeyError, ValueError):
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
    if float(scale) > LARGEST_LOG_SCALE:
        raise CheckpointError(
            f"{path} has logit_scale {float(scale):g}, a factor of e^{float(scale):g}: it is the logarithm of the "
            f"factor, at most ln 100 = 4.605. If the file stores the factor itself, store its logarithm."
        )
    names = tuple(map(str, classes))
    if not all(is_text(name) for name in names):
        raise CheckpointError(f"a class of {path} has a name that is not Unicode text. Rename it.")
    return Head(path.stem, names, embeds, math.exp(float(scale)))


def choose_head(model: Model, wanted: str | None, dataset: Any) -> Head:
    """Choose the head that scores `dataset`: `wanted`, else the model's classifier, its text tower or a stored head.

    `wanted` is the name of a file `heads/NAME.safetensors` in the model's folder, a head file, or a JSON file that
    describes the classes in words. A text tower reads the `words` for the classes of the data set, in its prompts.
    """
    stored = sorted((model.weights.folder / "heads").glob("*.safetensors")) if model.weights.folder is not None else []
    paths = {path.stem: path for path in stored}
    if wanted is not None:
        path = paths.get(wanted, Path(wanted))
        check_regular(path, DataError)
        if not path.is_file():
            known = f"it has {first_of(paths)}" if paths else "it has none"
            out = ", or leave it out" if model.outputs.logits is not None else ""
            raise DataError(
                f"{model.name} has no head '{wanted}': {known}. Pass one of its heads or a file as `head`{out}."
            )
        return _described_head(model, path) if path.suffix == ".json" else _read_fitting(model, path)
    if model.outputs.logits is not None:
        return Head("classifier", model.outputs.classes)
    words = dataset.words
    text = model.inputs.kind == "text"
    numbers = text and not dataset.origin.prompts and bool(words) and all(word.isdecimal() for word in words)
    if model.outputs.embed_texts is not None and words and not numbers:
        prompts = dataset.origin.prompts or (("{}",) if text else PROMPTS)
        embeds = class_embeddings(words, prompts, model.outputs.embed_texts)
        return Head("text", dataset.classes, embeds, model.outputs.logit_scale)
    if dataset.name in paths or len(paths) == 1:
        return _read_fitting(model, paths.get(dataset.name, stored[0]))
    known = f"choose one of its heads with `head`: {first_of(paths)}" if paths else "pass `head=FILE`"
    if numbers:
        raise DataError(
            f"the classes of {dataset.name} are numbers ({first_of(words, 3)}), and {model.name} has no classification "
            f'layer: it needs words for them. Describe them, `head=FILE.json` with {{{words[0]!r}: "..."}}, or name a '
            "task (TASK:PATH), or give a fine-tune with a classification layer."
        )
    if model.outputs.embed_texts is not None:
        raise DataError(f"{dataset.name} names no classes that {model.name} could be asked for; {known}, or .json.")
    raise DataError(f"{model.name} has neither a classification layer nor a text tower; {known}.")


def _described_head(model: Model, path: Path) -> Head:
    """A head from descriptions: {"class": "description", ...}; those of several descriptions are averaged."""
    if model.outputs.embed_texts is None:
        raise DataError(f"{model.name} has no text tower or sentence encoder that could read {path}; pass a head file.")
    content = read_json(path, "a list of class descriptions")
    words = {name: [text] if isinstance(text, str) else text for name, text in content.items()}
    lists = bool(words) and all(isinstance(texts, list) and texts for texts in words.values())
    if not lists or not all(isinstance(text, str) for texts in words.values() for text in texts):
        raise DataError(f'{path} does not describe classes: expected {{"class": "description", ...}} in words.')
    found = (class_embeddings(texts, ("{}",), model.outputs.embed_texts) for texts in words.values())
    rows = [F.normalize(embeds.mean(0), dim=-1) for embeds in found]
    return Head(path.stem, tuple(words), torch.stack(rows), model.outputs.logit_scale)


def _read_fitting(model: Model, path: Path) -> Head:
    """Read a head file and check its width against that of the model's features."""
    head = read_head(path)
    assert head.class_embeds is not None
    width = head.class_embeds.shape[1]
    if model.outputs.width not in (None, width):
        raise DataError(
            f"head '{head.name}' has embeddings of width {width}, but {model.name} gives features of width "
            f"{model.outputs.width}; a head belongs to one model."
        )
    return head
