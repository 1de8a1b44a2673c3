"""timm vision transformers: `timm:NAME`, `timm:NAME:FILE`, folders in its hub layout, and live modules.

Names in files are those of the module, without the prefix of distributed training.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, reraised
from ...io.checkpoint import Checkpoint
from ...io.tensors import check_finite
from ...layers import find_layers, find_loose
from ..base import (
    Architecture,
    Batch,
    Classifier,
    Family,
    HeadedTensors,
    Labelling,
    Model,
    Outputs,
    Weights,
    Write,
    live_tensors,
    read_config,
)
from . import Location, check_tensors, fetching, image_inputs, load_library, order_of, unknown_model, write_one_file

PREFIX = "timm:"


class Timm(Family):
    """The timm library."""

    def recognises(self, reference: str) -> bool:
        config = read_config(Path(reference) / "config.json")
        return ("architecture" in config and "architectures" not in config) or reference.startswith(PREFIX)

    def open(self, reference: str, *, device: torch.device, trust_remote_code: bool, dtype: torch.dtype) -> Model:
        del trust_remote_code  # timm runs no code from checkpoints
        library, location = load_library("timm", "timm"), _find(reference)
        stored = location.open_weights() if location.weights is not None else None
        module = _build(library, location, stored, reference)
        if reason := _unknown(module):
            raise CheckpointError(f"{reference} is {reason}. See docs/extending.md.")
        tensors: Mapping[str, Tensor] = live_tensors(module)
        if stored is not None:
            check_tensors(tensors, stored, reference, "timm")
            module.load_state_dict({name: stored[name] for name in tensors})
            tensors = stored
        check_finite(tensors)
        return _model(module.to(device=device, dtype=dtype).eval(), reference, tensors, location.folder)

    def stored(self, reference: str) -> Weights:
        location = _find(reference)
        if location.folder is None:
            return super().stored(reference)
        return Weights(location.open_weights(), folder=location.folder, write=write_one_file)

    def classifier(self, model: Model, labelling: Labelling, *, trust_remote_code: bool) -> Model:
        if labelling.task != "image":
            return super().classifier(model, labelling, trust_remote_code=trust_remote_code)
        if hasattr(model.module, "head_dist"):
            raise CheckpointError(
                f"{model.name} has two classification layers, head and head_dist, and a fitted one replaces one. Give "
                'another target, or `head_fit="none"`.'
            )
        module, known = _with_classes(model.module, labelling.classes)
        head = {f"head.{name}": parameter for name, parameter in module.head.named_parameters()}
        names = {name: name for name in model.weights.tensors if name not in head}
        new = _model(module, model.name, HeadedTensors(model.weights.tensors, names, head), model.weights.folder)
        own = {name: tensor.detach().clone() for name, tensor in head.items()} if known else {}
        classifier = Classifier("head", Labelling("image", labelling.classes), own, frozenset(head) - frozenset(own))
        return replace(new, weights=replace(new.weights, write=_writer(module)), classifier=classifier)

    def knows(self, module: nn.Module) -> bool:
        return any(kind.__module__.startswith("timm.") for kind in type(module).__mro__) and _unknown(module) is None

    def describe(self, module: nn.Module) -> Model:
        return _model(module, type(module).__name__, live_tensors(module), None)


def _find(reference: str) -> Location:
    folder = Path(reference)
    if folder.is_dir():
        return Location(f"local-dir:{folder}", folder, folder=folder)
    library = load_library("timm", "timm")
    name, mark, wanted = reference.removeprefix(PREFIX).partition(":")
    if not library.is_model(name):
        raise unknown_model(reference, "timm", name, library.list_models())
    file = Path(wanted).expanduser()
    if mark and not file.is_file():
        raise CheckpointError(f"{reference} names no model: there is no file {wanted}.")
    return Location(name, file if mark else None)


def _build(library: Any, location: Location, stored: Checkpoint | None, reference: str) -> Any:
    """Build the module; without a file, timm loads the weights from its cache or the network."""
    options: dict[str, Any] = {}
    if stored is not None and location.folder is None:  # a fine-tune may have another number of classes
        options["num_classes"] = stored.shape("head.weight")[0] if "head.weight" in stored else 0
    with fetching(reference, "timm", reference) if stored is None else reraised(f"timm cannot build {reference}"):
        return library.create_model(location.build, pretrained=stored is None, **options)


def _unknown(module: Any) -> str | None:
    """The reason why a model cannot be used, or None."""
    if not any(kind.__name__ == "VisionTransformer" for kind in type(module).__mro__):
        return f"timm's {type(module).__name__}; known is VisionTransformer"
    if not all(hasattr(getattr(block, "attn", None), "qkv") for block in module.blocks):
        kind = type(module.blocks[0]).__name__
        return f"a VisionTransformer with blocks of the kind {kind}; known are those with attn.qkv"
    if not isinstance(getattr(module.patch_embed, "proj", None), nn.Conv2d) or hasattr(module.patch_embed, "backbone"):
        return "a VisionTransformer over features of another network; known are those over patches of pixels"
    if module.global_pool == "":
        return "a VisionTransformer without pooling; give it one (global_pool) so that it has one feature per image"
    return None


def _model(module: Any, name: str, stored: Mapping[str, Tensor], folder: Path | None) -> Model:
    width = int(module.embed_dim)
    pool = {"attn_pool.kv.weight": {"k": ((0, width),), "v": ((width, 2 * width),)}}
    layers = find_layers(module, fused=pool, heads=int(module.blocks[0].attn.num_heads))

    def features(live: Any, batch: Batch) -> Any:
        return live.forward_head(live.forward_features(batch["pixel_values"]), pre_logits=True)

    def logits(live: Any, batch: Batch) -> Any:
        return live(batch["pixel_values"])

    names = {name: name for name, _ in module.named_parameters()}
    classes = _classes(module)
    return Model(
        name=name,
        module=module,
        weights=Weights(stored, names, folder, write_one_file if folder is not None else _writer(module), "timm"),
        architecture=Architecture(layers, find_loose(module, layers)),
        inputs=image_inputs(
            _evaluation_transform(module), int(module.num_prefix_tokens), module.patch_embed.patch_size
        ),
        outputs=Outputs(features, width, logits if classes else None, classes),
        classifier=Classifier("head", Labelling("image", classes)) if classes else None,
    )


def _with_classes(module: Any, classes: tuple[str, ...]) -> tuple[Any, bool]:
    """A copy of a module that shares all but its classification layer, and whether that knew the classes."""
    new, head = copy.copy(module), nn.Linear(int(module.num_features), len(classes))
    order = order_of(classes, _classes(module))
    with torch.no_grad():
        head.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
        head.bias.zero_()
        if order is not None:
            head.weight.copy_(module.head.weight[order])
            head.bias.copy_(module.head.bias[order])
    like = next(module.parameters())
    new._modules = {**module._modules, "head": head.to(like.device, like.dtype).eval()}
    new.num_classes = len(classes)
    new.pretrained_cfg = {**_settings(module), "num_classes": len(classes), "label_names": list(classes)}
    return new, order is not None


def _settings(module: Any) -> Mapping[str, Any]:
    """What timm's factory leaves on a module; nothing on one that was made without it."""
    return getattr(module, "pretrained_cfg", None) or {}


def _classes(module: Any) -> tuple[str, ...]:
    """The class names of the configuration, else numbers; none for a model without a classification layer."""
    count = int(module.num_classes)
    names = _settings(module).get("label_names") or ()
    if isinstance(names, Mapping):
        names = [names.get(str(index), names.get(index, str(index))) for index in range(count)]
    return tuple(map(str, names)) if len(names) == count else tuple(map(str, range(count)))


def _evaluation_transform(module: Any) -> Any:
    """timm's evaluation transform, with the settings that the model carries."""
    data = load_library("timm.data", "timm")
    settings = data.resolve_model_data_config(module)
    if module.patch_embed.img_size:  # as built, which may differ from the size of the pretrained weights
        settings["input_size"] = (3, *module.patch_embed.img_size)
    return data.create_transform(**settings)


def _sizes(module: Any) -> dict[str, Any]:
    """The arguments with which timm makes a model of these sizes, which its architecture may not have."""
    patches, blocks = module.patch_embed, module.blocks
    sizes = {"img_size": patches.img_size, "patch_size": patches.patch_size, "embed_dim": module.embed_dim}
    sizes |= {"depth": len(blocks), "num_heads": blocks[0].attn.num_heads}
    if type(blocks[0].mlp).__name__ == "Mlp":  # others have several hidden layers
        sizes["mlp_ratio"] = blocks[0].mlp.fc1.out_features / module.embed_dim
    return {name: size for name, size in sizes.items() if size is not None}


def _writer(module: Any) -> Write:
    """A writer of timm's hub layout: config.json names the architecture and, in a copied one, the classes of a head."""

    def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        write_one_file(folder, tensors)
        given, path = _settings(module), folder / "config.json"
        if config := read_config(path):
            classes = {key: given[key] for key in ("num_classes", "label_names")}
            config |= {**classes, "pretrained_cfg": {**config.get("pretrained_cfg", {}), **classes}}
            config.get("model_args", {}).pop("num_classes", None)  # it would win over those of the new head
        elif given.get("architecture") is not None:
            origin = {"url", "file", "source", "hf_hub_id", "hf_hub_filename", "state_dict", "custom_load"}
            settings = {key: value for key, value in given.items() if value is not None and key not in origin}
            config = {
                "architecture": settings.pop("architecture"),
                **{key: getattr(module, key) for key in ("num_classes", "num_features", "global_pool")},
                "model_args": _sizes(module),
                "pretrained_cfg": {**settings, "num_classes": module.num_classes},
            }
        if config:
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    return write
