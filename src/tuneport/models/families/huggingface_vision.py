"""transformers' vision classes: image towers, image classifiers, and text towers for their heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ...errors import CheckpointError, reraised, shortened
from ...io.checkpoint import read_json
from ...layers import TokenLayout, find_layers, find_loose
from ..base import Architecture, Batch, Inputs, Model, Outputs, outside_of
from ..heads import temperature_of
from . import open_tokenizer, quiet

LARGEST_IMAGE = 8192  # pixels a side
LARGEST_SHARE = 4  # of a side that a processor makes, before it crops it, in sides that the model reads
SIDES = ("height", "width", "shortest_edge", "longest_edge")
Run = Callable[[Any, Batch], Tensor]  # Any: transformers modules carry their parts as untyped attributes


@dataclass(frozen=True)
class VisionClass:
    """What is particular to one transformers class."""

    features: Run
    special_tokens: int
    tower: tuple[str, ...] = ()
    any_size: bool = False  # interpolates its positions for images of other sizes


ARCHITECTURES: Mapping[str, VisionClass] = {
    "CLIPModel": VisionClass(
        lambda m, b: m.visual_projection(m.vision_model(**b).pooler_output), 1, ("vision_model.", "visual_projection.")
    ),
    "CLIPVisionModelWithProjection": VisionClass(lambda m, b: m(**b).image_embeds, 1),
    "CLIPVisionModel": VisionClass(lambda m, b: m(**b).pooler_output, 1),
    "CLIPForImageClassification": VisionClass(lambda m, b: m.vision_model(**b).last_hidden_state[:, 1:].mean(1), 1),
    "SiglipModel": VisionClass(lambda m, b: m.vision_model(**b).pooler_output, 0, tower=("vision_model.",)),
    "SiglipVisionModel": VisionClass(lambda m, b: m(**b).pooler_output, 0),
    "SiglipForImageClassification": VisionClass(lambda m, b: m.vision_model(**b).last_hidden_state.mean(1), 0),
    "ViTModel": VisionClass(lambda m, b: m(**b).last_hidden_state[:, 0], 1),
    "ViTForImageClassification": VisionClass(lambda m, b: m.vit(**b).last_hidden_state[:, 0], 1),
    "Dinov2Model": VisionClass(lambda m, b: m(**b).last_hidden_state[:, 0], 1, any_size=True),
    "Dinov2ForImageClassification": VisionClass(lambda m, b: m.dinov2(**b).last_hidden_state[:, 0], 1, any_size=True),
}


def complete_vision(model: Model, trust_remote_code: bool) -> Model:
    """The model with its layers, its image processor and the functions that run it."""
    module: Any = model.module
    folder, kind = model.weights.folder, ARCHITECTURES[type(module).__name__]
    tower = getattr(module.config, "vision_config", module.config)
    layers = find_layers(module, within=kind.tower, heads=int(tower.num_attention_heads))
    loose = find_loose(module, layers, within=kind.tower)
    patch, special = int(tower.patch_size), kind.special_tokens
    projected = [layer.out_features for layer in layers if layer.role == "projection"]

    outputs = Outputs(kind.features, width=projected[0] if projected else int(tower.hidden_size))
    if hasattr(module, "text_model"):  # the other of two towers
        name = model.weights.file_names["logit_scale"]
        scale = temperature_of(module.logit_scale, model.weights.tensors, name)
        embed = _text_tower(module, folder, trust_remote_code) if folder is not None else None
        outputs = replace(outputs, embed_texts=embed, logit_scale=scale)
    inputs = Inputs(
        "image",
        _image_encoder(folder, trust_remote_code, tower, kind) if folder is not None else None,
        lambda batch: TokenLayout.of_patches(special, (patch, patch), batch["pixel_values"]),
    )
    outside = outside_of(module, layers, loose, "outside the image tower")
    return replace(model, architecture=Architecture(layers, loose, outside=outside), inputs=inputs, outputs=outputs)


def _image_encoder(
    folder: Path, trust_remote_code: bool, tower: Any, kind: VisionClass
) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
    """The `encode` of a model: its folder's image processor (preprocessor_config.json)."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {path.name}, needed to prepare images. Copy it from the original model."
        )
    read_json(path, "a preprocessor configuration")
    with quiet(), reraised(f"{path} cannot be used"):
        from transformers import AutoImageProcessor

        options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        processor = AutoImageProcessor.from_pretrained(folder, **options)
    _check_sizes(processor, path, tower, kind)

    @reraised(f"{path} cannot be used")
    def encode(images: Sequence[Any]) -> dict[str, Tensor]:
        return {"pixel_values": processor(list(images), return_tensors="pt")["pixel_values"]}

    return encode


def _check_sizes(processor: Any, path: Path, tower: Any, kind: VisionClass) -> None:
    """Refuse a processor that makes images of absurd sizes, or of others than the model reads."""
    steps = (("do_resize", "size"), ("do_center_crop", "crop_size"), ("do_pad", "pad_size"))
    used = [dict(getattr(processor, size, None) or {}) for do, size in steps if getattr(processor, do, None)]
    sides = [size[key] for size in used for key in SIDES if isinstance(size.get(key), (int, float))]
    if any(not 0 < side <= LARGEST_IMAGE for side in sides):
        largest = shortened(max(sides, key=abs), 20)
        raise CheckpointError(
            f"{path} is refused: it makes images of {largest} pixels a side; expected 1 to {LARGEST_IMAGE}."
        )
    reads = getattr(tower, "image_size", None)
    reads = (reads, reads) if isinstance(reads, int) else tuple(reads or ())
    last = used[-1] if used else {}
    makes = tuple(last[key] for key in ("height", "width") if isinstance(last.get(key), (int, float)))
    wrong = len(makes) == 2 and len(reads) == 2 and makes != reads and not kind.any_size
    if wrong or (reads and max(sides, default=0) > LARGEST_SHARE * max(reads)):
        given = makes if wrong else (max(sides),) * 2
        raise CheckpointError(
            f"{path} makes images of {given[0]:.6g} x {given[1]:.6g} pixels, but {path.parent.name} reads {reads[0]} x "
            f"{reads[-1]}. Copy it from the original model."
        )


def _text_tower(module: Any, folder: Path, trust_remote_code: bool) -> Callable[[list[str]], Tensor]:
    """The `embed_texts` of a model; its tokenizer is opened at the first call."""
    tokenizer = cache(partial(open_tokenizer, folder, trust_remote_code, "a text tower"))
    padding = "max_length" if type(module).__name__.startswith("Siglip") else True
    project = getattr(module, "text_projection", lambda pooled: pooled)

    def embed(texts: list[str]) -> Tensor:
        longest = int(module.config.text_config.max_position_embeddings)
        tokens = tokenizer()(texts, padding=padding, truncation=True, max_length=longest, return_tensors="pt")
        found: Tensor = project(module.text_model(**tokens.to(next(module.parameters()).device)).pooler_output)
        return found

    return embed
