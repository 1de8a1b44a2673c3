"""open_clip models: `NAME:TAG`, `NAME:FILE`, folders in its hub layout, and live modules. The image tower moves.

Weights load through open_clip's own loader. Names in files are those of the module, without the prefix of distributed
training; old files store text towers without `text.`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, first_of, reraised
from ...io.checkpoint import Checkpoint
from ...io.tensors import check_finite
from ...layers import find_layers, find_loose
from ..base import Architecture, Family, Model, Outputs, Weights, live_tensors, outside_of, read_config
from ..heads import temperature_of
from . import Location, check_tensors, fetching, image_inputs, load_library, unknown_model, write_one_file

CONFIG = "open_clip_config.json"
STEM = "open_clip_model"
# In the order in which open_clip itself chooses.
WEIGHTS = (
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.safetensors",
    "open_clip_pytorch_model.bin",
    "open_clip_pytorch_model.pth",
    "model.safetensors",
    "pytorch_model.bin",
)
TOWER = ("visual.",)
RESIZED = ("positional_embedding", "logit_scale", "logit_bias")  # open_clip resizes these when it loads them
BPE_WORDS = 49408  # vocabulary of CLIP's own tokenizer, which comes with the library
_library = partial(load_library, "open_clip", "open-clip")


class OpenClip(Family):
    """The open_clip library."""

    def recognises(self, reference: str) -> bool:
        folder = Path(reference)
        if folder.exists():
            return (folder / CONFIG).is_file() and "architectures" not in read_config(folder / "config.json")
        return re.match(r"(?!timm:)[\w.+-]{2,}:.", reference) is not None

    def open(self, reference: str, *, device: torch.device, trust_remote_code: bool, dtype: torch.dtype) -> Model:
        del trust_remote_code  # open_clip runs no code from checkpoints
        library, location = _library(), _find(reference)
        stored = location.open_weights()
        with _quiet():
            with reraised(f"open_clip cannot build {reference}"):
                module = library.create_model(
                    location.build, pretrained=location.pretrained, load_weights=False, pretrained_text=False
                )
            if reason := _unknown(module):
                raise CheckpointError(f"{reference} is {reason}. See docs/extending.md.")
            names = _file_names(module, stored, reference)
            check_finite(stored)
            with reraised(f"open_clip cannot load {location.weights}"):
                library.load_checkpoint(module, str(location.weights), weights_only=True)
        module = module.to(device=device, dtype=dtype).eval()
        return _model(module, reference, stored, names, location, lambda: library.get_tokenizer(location.build))

    def stored(self, reference: str) -> Weights:
        location = _find(reference)
        return Weights(location.open_weights(), folder=location.folder, write=partial(_write, location))

    def knows(self, module: nn.Module) -> bool:
        own = any(kind.__module__.startswith("open_clip.") for kind in type(module).__mro__)
        return own and hasattr(module, "visual") and _unknown(module) is None

    def describe(self, module: nn.Module) -> Model:
        names = {name: name for name, _ in module.named_parameters()}
        parts: Any = module
        words = partial(_library().SimpleTokenizer, context_length=parts.context_length)
        own = words if parts.vocab_size == BPE_WORDS else None
        return _model(module, type(module).__name__, live_tensors(module), names, None, own)


def _find(reference: str) -> Location:
    """The location of a model; open_clip fetches the weights of a tag from its cache or the network."""
    folder = Path(reference)
    if folder.is_dir():
        found = [folder / name for name in WEIGHTS if (folder / name).is_file()]
        if not found:
            raise CheckpointError(f"{folder} has an {CONFIG} but no weights: expected one of {', '.join(WEIGHTS)}.")
        if "model_cfg" not in read_config(folder / CONFIG):
            raise CheckpointError(f"{folder / CONFIG} is not a model configuration: no model_cfg in it.")
        return Location(f"local-dir:{folder}", found[0], folder=folder)
    library = _library()
    name, _, wanted = reference.partition(":")
    if library.get_model_config(name) is None:
        raise unknown_model(reference, "open_clip", name, library.list_models())
    file = Path(wanted).expanduser()
    if file.is_file():
        return Location(name, file, str(file))
    settings = library.get_pretrained_cfg(name, wanted)
    if not settings:
        weights = f"open_clip's weights of {name}"
        tags = first_of(library.list_pretrained_tags_by_model(name), 20) or "none"
        raise CheckpointError(f"{wanted} is neither a file nor one of {weights}, which are: {tags}.")
    with _quiet(), fetching(reference, "open_clip", name):
        return Location(name, Path(library.download_pretrained(settings)), wanted)


def _unknown(module: Any) -> str | None:
    """The reason why a model cannot be used, or None."""
    tower = module.visual
    if type(tower).__name__ != "VisionTransformer":
        return f"an open_clip model with a {type(tower).__name__} as its image tower; known is VisionTransformer"
    if tower.attn_pool is not None or tower.output_tokens or tower.pool_type == "none":
        return f"a {type(module).__name__} with attentional pooling; known are towers pooled by class token or mean"
    return None


def _file_names(module: nn.Module, stored: Checkpoint, reference: str) -> dict[str, str]:
    """Live parameter name -> name in the file, which may store the text tower without `text.`."""
    parameters = dict(module.named_parameters())
    names = {
        name: next((key for key in (name, name.removeprefix("text.")) if key in stored), name) for name in parameters
    }
    resized = {key for name, key in names.items() if name.endswith(RESIZED) and (key in stored or name == "logit_bias")}
    by_file = {names[name]: parameter for name, parameter in parameters.items()}
    check_tensors(by_file, stored, reference, "open_clip", optional=resized)
    return names


def _model(
    module: Any,
    name: str,
    stored: Mapping[str, Tensor],
    names: Mapping[str, str],
    location: Location | None,
    tokenizer: Callable[[], Any] | None,
) -> Model:
    tower = module.visual
    attention = tower.transformer.resblocks[0].attn
    projection = ("visual.proj",) if tower.proj is not None else ()
    layers = find_layers(module, matrices=projection, within=TOWER, heads=int(attention.num_heads))
    loose = find_loose(module, layers, within=TOWER)
    folder = location.folder if location is not None else None
    return Model(
        name=name,
        module=module,
        weights=Weights(stored, names, folder, partial(_write, location), "open_clip"),
        architecture=Architecture(layers, loose, outside=outside_of(module, layers, loose, "outside the image tower")),
        inputs=image_inputs(_evaluation_transform(tower), 1, tower.patch_size),
        outputs=Outputs(
            features=lambda live, batch: live.encode_image(batch["pixel_values"]),  # type: ignore[operator]
            width=int(tower.output_dim),
            embed_texts=_text_tower(module, name, tokenizer) if tokenizer is not None else None,
            logit_scale=temperature_of(module.logit_scale, stored, names["logit_scale"]),
        ),
    )


def _evaluation_transform(tower: Any) -> Any:
    """open_clip's evaluation transform, with the settings that its loader leaves on the tower."""
    transforms = load_library("open_clip.transform", "open-clip")
    settings = {key: value for key, value in getattr(tower, "preprocess_cfg", {}).items() if value is not None}
    config = transforms.PreprocessCfg(**{**settings, "size": tower.image_size})
    return transforms.image_transform_v2(config, is_train=False)


def _text_tower(module: Any, name: str, make: Callable[[], Any]) -> Callable[[list[str]], Tensor]:
    """The `embed_texts` of a model; its tokenizer is made at the first call."""

    @cache
    def tokenizer() -> Any:
        with _quiet(), reraised(f"{name} has a text tower but no usable tokenizer; pass a name or a file as `head`"):
            return make()

    return lambda texts: module.encode_text(tokenizer()(texts).to(next(module.parameters()).device))


def _write(location: Location | None, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write open_clip's hub layout: one weight file and, unless it was copied, the configuration."""
    write_one_file(folder, tensors, stem=STEM)
    if location is None or (folder / CONFIG).exists():
        return
    library = _library()
    model = library.get_model_config(location.build)
    found = library.get_pretrained_cfg(location.build, location.pretrained) if location.pretrained else {}
    default = load_library("open_clip.transform", "open-clip").PreprocessCfg()
    settings = {key: found.get(key) or getattr(default, key) for key in ("mean", "std", "interpolation", "resize_mode")}
    text = json.dumps({"model_cfg": model, "preprocess_cfg": settings}, indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    if model["text_cfg"].get("hf_tokenizer_name"):
        with _quiet(), suppress(Exception):  # without it, opening the text tower raises a clear error
            library.get_tokenizer(location.build).save_pretrained(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the root logger: open_clip warns of missing weights, since its loader is asked to load none."""
    root, stand_in = logging.getLogger(), logging.NullHandler()
    before = root.manager.disable
    root.addHandler(stand_in)  # otherwise logging.warning sets up handlers that stay
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
        root.removeHandler(stand_in)
