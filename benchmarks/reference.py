"""Algorithm 1 of the paper, written down plainly in float64 and from files: the oracle of the tests.

It shares no code with the library: it reads head files itself, has its own loss and hooks, stores every signal of every
layer, and takes each map from its own SVD in numpy. It knows CLIP: vision towers with a projection, with a head file or
with a text tower. `tests/end_to_end/test_reference.py` compares it with `tuneport.transfer` on small towers, and
`benchmarks/claims/reference.py` on trained ones.

Below full rank U V^T is not unique. CLIP's residual stream never has it on the side of the gradients: every path to the
loss goes through a LayerNorm, so that these gradients are orthogonal to the vector of ones.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn

Array = NDArray[np.float64]
Signals = dict[tuple[str, str], Tensor]  # by layer and signal, each (samples, tokens, width)

METHODS: dict[str, tuple[str | None, str | None]] = {
    "bico": ("input", "output_gradient"),
    "theseus": ("input", "output"),
    "input_only": ("input", None),
    "output_only": (None, "output_gradient"),
    "gradient_only": ("input_gradient", "output_gradient"),
    "naive": (None, None),
}
PROMPTS = (
    "a photo of a {}.",
    "a picture that shows a {}.",
    "a close view of a {}.",
    "a small image of a {}.",
    "an example of a {}.",
)


@dataclass(frozen=True, eq=False)
class Moved:
    """The target's task vector by parameter, and the layers both of whose maps have full rank."""

    deltas: dict[str, Array]
    full: frozenset[str]


@dataclass(frozen=True, eq=False)
class Head:
    """Class embeddings and the factor of their cosines."""

    embeds: Tensor
    factor: float
    classes: tuple[str, ...]


def measure(
    source: Path,
    target: Path,
    samples: tuple[NDArray[np.uint8], NDArray[np.int64], Sequence[str]],
    head: str | None = None,
    factor: Callable[[float], float] = math.exp,
) -> tuple[Signals, Signals]:
    """The signals of both base models.

    Args:
        source, target: folders of CLIP models.
        samples: images, labels and class names; every sample is used.
        head: the name of the head files of both models; without one, their text towers read the class names.
        factor: of a stored `logit_scale`.
    """
    images, labels, classes = samples

    def signals(folder: Path) -> Signals:
        model = open_tower(folder)
        found = read_head(folder, head, factor) if head else text_head(folder, model, classes, factor)
        places = torch.tensor([found.classes.index(classes[label]) for label in labels])
        return record(model, prepare_images(folder, images), lambda features: loss(features, found, places))

    return signals(source), signals(target)


def move(
    folders: tuple[Path, Path, Path],
    signals: tuple[Signals, Signals],
    method: str,
    complete: bool = True,
    ranks: Mapping[str, tuple[int | None, int | None]] | None = None,
) -> Moved:
    """tau_B = R_out^T tau_A R_in (eq. 8) for each linear layer of the target's vision tower.

    It takes the layer of the same role from the source block that the depth rule gives. The folders are those of
    source, fine-tuned source and target. With `complete`, a map keeps the singular vectors of zero singular values,
    which are those below the rounding of the SVD. `ranks` of the maps for inputs and outputs of a layer take the place
    of the count of singular values.
    """
    models = [open_tower(folder) for folder in folders]
    source, changed, target = map(vision_layers, models)
    sides = METHODS[method]
    deltas: dict[str, Array] = {}
    full = set()
    for name, layer in target.items():
        other = source_name(name, depth(source), depth(target))
        weight = difference(changed[other].weight, source[other].weight)
        weight = weight.reshape(len(weight), -1)  # (d_out_A, d_in_A)
        d_out, d_in = layer.weight.flatten(1).shape
        pixels = isinstance(layer, nn.Conv2d)  # one space for both models

        rank_in, rank_out = (None, None) if ranks is None else ranks[name]

        def align(
            signal: str | None, widths: tuple[int, int], names: tuple[str, str], rank: int | None
        ) -> tuple[Array, bool]:
            if signal is None:
                return np.eye(*widths), True
            return procrustes(*(found[key, signal] for found, key in zip(signals, names, strict=True)), complete, rank)

        R_in, full_in = align(None if pixels else sides[0], (weight.shape[1], d_in), (other, name), rank_in)
        R_out, full_out = align(sides[1], (weight.shape[0], d_out), (other, name), rank_out)
        deltas[f"{name}.weight"] = (R_out.T @ weight @ R_in).reshape(layer.weight.shape)  # (d_out_B, d_in_B)
        if layer.bias is not None:
            deltas[f"{name}.bias"] = difference(changed[other].bias, source[other].bias) @ R_out
        if full_in and full_out:
            full.add(name)
    return Moved(deltas, frozenset(full))


def difference(after: Tensor, before: Tensor) -> Array:
    """In float64: that of two stored numbers is then exact, or nearly so."""
    return (after - before).numpy()


def procrustes(a: Tensor, b: Tensor, complete: bool, rank: int | None = None) -> tuple[Array, bool]:
    """R = U V^T of C = A^T B (eq. 6, 7), and whether C has full rank; its `rank` is counted if not given."""
    C = match_tokens(a, b).flatten(0, 1).numpy().T @ b.flatten(0, 1).numpy()  # (d_A, d_B)
    U, values, Vh = np.linalg.svd(C, full_matrices=False)
    if rank is None:
        rank = int((values > max(C.shape) * np.finfo(C.dtype).eps * values[0]).sum())  # as numpy.linalg.matrix_rank
    kept = slice(None if complete else rank)
    return U[:, kept] @ Vh[kept], rank == len(values)


def match_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Resize the source's square patch grid to the target's, bilinearly; its class token stays as it is."""
    if a.shape[1] == b.shape[1]:
        return a
    sides = [math.isqrt(signal.shape[1]) for signal in (a, b)]
    special = a.shape[1] - sides[0] ** 2  # 1 with a class token, 0 at the patch embedding
    patches = a[:, special:].mT.unflatten(2, (sides[0], sides[0]))  # (samples, width, rows, columns)
    patches = nn.functional.interpolate(patches, size=(sides[1], sides[1]), mode="bilinear", align_corners=False)
    return torch.cat([a[:, :special], patches.flatten(2).mT], dim=1)


@cache
def open_tower(folder: Path) -> Any:
    """The model of a folder in float64, with what it computes in a pass as transformers defines it."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def prepare_images(folder: Path, images: NDArray[np.uint8]) -> Tensor:
    images = np.stack([images] * 3, axis=-1) if images.ndim == 3 else images  # grey
    processor = transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    return processor(list(images), return_tensors="pt")["pixel_values"].double()


def read_head(folder: Path, name: str, factor: Callable[[float], float]) -> Head:
    """Class embeddings and the temperature, which CLIP stores as a logarithm."""
    with safe_open(folder / "heads" / f"{name}.safetensors", "pt") as file:
        embeds, scale = file.get_tensor("class_embeds").double(), float(file.get_tensor("logit_scale"))
        return Head(embeds, factor(scale), tuple(json.loads(file.metadata()["classes"])))


def text_head(folder: Path, model: Any, classes: Sequence[str], factor: Callable[[float], float]) -> Head:
    """The mean direction of each class in the prompts, as the text tower reads them one by one."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    rows = []
    for name in classes:
        vectors = []
        for prompt in PROMPTS:
            tokens = tokenizer(prompt.format(name), return_tensors="pt")
            text = model.text_projection(model.text_model(**tokens).pooler_output)[0]
            vectors.append(text / text.norm())
        rows.append(torch.stack(vectors).mean(0))
    return Head(torch.stack(rows), factor(float(model.logit_scale)), tuple(classes))


def loss(features: Tensor, head: Head, places: Tensor) -> Tensor:
    """The sum over samples of -log softmax(factor * cosine)[label]."""
    features = features / features.norm(dim=1, keepdim=True)
    embeds = head.embeds / head.embeds.norm(dim=1, keepdim=True)
    scores = head.factor * features @ embeds.T
    return (scores.logsumexp(1) - scores[torch.arange(len(places)), places]).sum()


def vision_layers(model: nn.Module) -> dict[str, Any]:
    inside = ("vision_model.", "visual_projection")
    named = ((name, part) for name, part in model.named_modules() if name.startswith(inside))
    return {name: part for name, part in named if isinstance(part, (nn.Linear, nn.Conv2d))}


def record(model: Any, pixels: Tensor, value: Callable[[Tensor], Tensor]) -> Signals:
    """All four signals of every layer, from one forward and one backward pass over all samples."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    layers = vision_layers(model)

    def keep(name: str, x: Tensor, y: Tensor) -> None:
        seen[name] = (x, y if y.requires_grad else y.requires_grad_())  # the graph begins at the first layer

    hooks = [
        layer.register_forward_hook(lambda _, args, y, name=name: keep(name, args[0], y))
        for name, layer in layers.items()
    ]
    total = value(model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output))
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(total, [y for _, y in seen.values()])
    signals: Signals = {}
    for (name, (x, y)), gradient in zip(seen.items(), gradients, strict=True):
        if isinstance(layers[name], nn.Conv2d):
            signals[name, "output"], signals[name, "output_gradient"] = tokens_of(y), tokens_of(gradient)
            continue
        signals[name, "input"], signals[name, "output"] = tokens_of(x), tokens_of(y)
        signals[name, "output_gradient"] = tokens_of(gradient)
        signals[name, "input_gradient"] = tokens_of(gradient @ layers[name].weight)
    return signals


def tokens_of(x: Tensor) -> Tensor:
    """(samples, tokens, width): a projection sees one pooled token, a convolution a grid of patches."""
    x = x.detach()
    return x.flatten(2).mT if x.ndim == 4 else x.unsqueeze(1) if x.ndim == 2 else x


def source_name(name: str, depth_source: int, depth_target: int) -> str:
    """The name of the source layer: the same role, in block floor(j (D_A - 1) / (D_B - 1) + 1/2)."""
    found = re.search(r"\.layers\.(\d+)\.", name)
    if found is None:
        return name
    steps = int(found[1]) * (depth_source - 1) / (depth_target - 1) if depth_target > 1 else depth_source - 1
    return f"{name[: found.start(1)]}{math.floor(steps + 0.5)}{name[found.end(1) :]}"


def depth(layers: dict[str, Any]) -> int:
    return 1 + max(int(found[1]) for name in layers if (found := re.search(r"\.layers\.(\d+)\.", name)))
