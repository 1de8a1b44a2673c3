"""Hugging Face models: local folders and live `transformers` objects. Vision towers and image classifiers.

Weights load through the class that the folder's config.json names; code from checkpoints is never run unless
`trust_remote_code` is passed on. Live parameter names differ from file names in some families, so the way
back is taken from transformers itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import Checkpoint, check_finite, open_checkpoint, read_json
from ..errors import CheckpointError, first_of
from ..layers import TokenLayout, find_layers, find_loose
from .base import (
    Batch,
    Family,
    Model,
    Stored,
    TextHead,
    class_embeddings,
    outside_of,
    write_weights,
    writer_with_config,
)
from .libraries import first_line as _line
from .libraries import mend_torchvision

LARGEST_IMAGE = 8192  # pixels a side
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")

Run = Callable[[Any, Batch], Tensor]  # Any: transformers modules carry their parts as untyped attributes


@dataclass(frozen=True)
class Architecture:
    """What names cannot tell about one transformers class."""

    features: Run
    special_tokens: int
    classifies: bool = False
    tower: tuple[str, ...] = ()


def _first_token(part: str) -> Run:
    return lambda module, batch: getattr(module, part)(**batch).last_hidden_state[:, 0]


ARCHITECTURES: Mapping[str, Architecture] = {
    "CLIPModel": Architecture(
        lambda m, b: m.visual_projection(m.vision_model(**b).pooler_output),
        1,
        tower=("vision_model.", "visual_projection."),
    ),
    "CLIPVisionModelWithProjection": Architecture(lambda m, b: m(**b).image_embeds, 1),
    "CLIPVisionModel": Architecture(lambda m, b: m(**b).pooler_output, 1),
    "SiglipModel": Architecture(lambda m, b: m.vision_model(**b).pooler_output, 0, tower=("vision_model.",)),
    "SiglipVisionModel": Architecture(lambda m, b: m(**b).pooler_output, 0),
    "SiglipForImageClassification": Architecture(
        lambda m, b: m.vision_model(**b).last_hidden_state.mean(1), 0, classifies=True
    ),
    "ViTModel": Architecture(lambda m, b: m(**b).last_hidden_state[:, 0], 1),
    "ViTForImageClassification": Architecture(_first_token("vit"), 1, classifies=True),
    "Dinov2Model": Architecture(lambda m, b: m(**b).last_hidden_state[:, 0], 1),
    "Dinov2ForImageClassification": Architecture(_first_token("dinov2"), 1, classifies=True),
}


class HuggingFace(Family):
    """The transformers library."""

    name = "huggingface"

    def recognises(self, reference: str) -> bool:
        return (Path(reference) / "config.json").is_file()

    def open(self, reference: str, *, device: torch.device, trust_remote_code: bool) -> Model:
        folder = Path(reference)
        stored = open_checkpoint(folder)
        with _quiet():
            module = _load(folder, stored, device, trust_remote_code)
        check_finite(stored)
        model = self._model(module, str(reference), stored, folder, trust_remote_code)
        lost = [name for name in model.file_names.values() if name not in stored]
        if lost:
            raise CheckpointError(
                f"{len(lost)} tensors of {type(module).__name__} cannot be traced to the files of {folder}: "
                f"{first_of(lost)}. Save the model again with save_pretrained."
            )
        return model

    def stored(self, reference: str) -> Stored:
        return Stored(open_checkpoint(reference), Path(reference))

    def knows(self, module: nn.Module) -> bool:
        return type(module).__name__ in ARCHITECTURES and hasattr(module, "config")

    def describe(self, module: nn.Module) -> Model:
        tensors = {name: tensor.detach() for name, tensor in module.state_dict().items()}
        names = _file_names(module)
        stored = {names[name]: tensor for name, tensor in tensors.items() if name in names}
        return self._model(module, type(module).__name__, stored, None, False)

    def _model(
        self, module: nn.Module, name: str, stored: Mapping[str, Tensor], folder: Path | None, trust_remote_code: bool
    ) -> Model:
        architecture = ARCHITECTURES[type(module).__name__]
        config: Any = module.config
        tower = getattr(config, "vision_config", config)
        layers = find_layers(module, within=architecture.tower, heads=int(tower.num_attention_heads))
        loose = find_loose(module, layers, within=architecture.tower)
        patch = int(tower.patch_size)
        projected = [layer.out_features for layer in layers if layer.role == "projection"]

        def layout(batch: Batch) -> TokenLayout:
            height, width = batch["pixel_values"].shape[-2:]
            return TokenLayout(architecture.special_tokens, (height // patch, width // patch))

        scale: Any = getattr(module, "logit_scale", None)
        has_text = hasattr(module, "text_model") and hasattr(module, "vision_model")
        return Model(
            name=name,
            module=module,
            tensors=stored,
            file_names=_file_names(module),
            layers=layers,
            loose=loose,
            folder=folder,
            kind="image",
            classes=_classes(config) if architecture.classifies else (),
            encode=_image_encoder(folder, trust_remote_code) if folder is not None else None,
            features=architecture.features,
            logits=(lambda m, b: m(**b).logits) if architecture.classifies else None,
            layout=layout,
            text_head=_text_head(module, folder, trust_remote_code) if has_text and folder is not None else None,
            logit_scale=float(scale.detach().exp()) if scale is not None else 1.0,
            width=projected[0] if projected else int(tower.hidden_size),
            outside=outside_of(module, layers, loose, "outside the image tower"),
            write=write_weights if folder is not None else writer_with_config(module),
        )


def _load(folder: Path, stored: Checkpoint, device: torch.device, trust_remote_code: bool) -> nn.Module:
    import transformers

    config = _config(folder)
    _check_numbers(config, folder / "config.json", stored)
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    if name is None or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{folder} holds a {name or config.get('model_type', 'model without architecture')}, which tuneport does "
            f"not know. Known: {', '.join(sorted(ARCHITECTURES))}. See docs/add-a-family.md."
        )
    _check_size(getattr(transformers, name), folder, stored)
    try:
        loaded = getattr(transformers, name).from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported below, with their names
        )
    except Exception as error:
        raise CheckpointError(f"transformers cannot load {folder} as {name}: {_line(error)}") from error
    module, info = loaded
    misshapen = (f"{name} {tuple(there)} vs {tuple(here)}" for name, there, here in info["mismatched_keys"])
    wrong = sorted({*info["missing_keys"], *misshapen})
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors of {name} are missing or misshapen in {folder}: {first_of(wrong)}. "
            "Its config.json and its weights do not belong together."
        )
    model: nn.Module = module
    return model.to(device).eval()


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json", "a model configuration")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} is not a model configuration: expected a JSON object.")
    return config


def _check_numbers(config: Any, path: Path, stored: Checkpoint) -> None:
    """Refuse sizes that the weights rule out before anything is built from them.

    No width, vocabulary or number of classes exceeds the number of weights, and each block has a tensor.
    """
    weights = sum(math.prod(stored.shape(name)) for name in stored)
    limits = {"size": max(weights, 10**6), "blocks": max(len(stored), 256)}
    found: list[str] = []

    def look(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                look(item, str(name))
        elif isinstance(value, list):
            for item in value:
                look(item, key)
        elif isinstance(value, (int, float)) and not key.endswith(("_id", "_ids", "_token_index")):
            blocks = "layers" in key or key in ("depth", "depths", "n_layer")
            if abs(value) > limits["blocks" if blocks else "size"]:
                found.append(f"{key} = {value:.6g}")

    look(config, "")
    if found:
        raise CheckpointError(
            f"{path} is refused: its weights hold {weights} numbers in {len(stored)} tensors, "
            f"which rules out {first_of(found, 3)}. Its config.json and its weights do not belong together."
        )


def _check_size(kind: Any, folder: Path, stored: Checkpoint) -> None:
    """Build the model without memory, and refuse one that is far larger than the weights beside it."""
    weights = sum(math.prod(stored.shape(name)) for name in stored)
    try:
        with torch.device("meta"):
            model = kind(kind.config_class.from_pretrained(folder, local_files_only=True))
        described = sum(parameter.numel() for parameter in model.parameters())
    except Exception as error:
        raise CheckpointError(f"{folder / 'config.json'} describes no {kind.__name__}: {_line(error)}") from error
    if described > 2 * weights + 10**7:
        raise CheckpointError(
            f"{folder / 'config.json'} is refused: it describes {described} parameters, but the weights beside it hold "
            f"{weights}. They do not belong together."
        )


def _file_names(module: nn.Module) -> dict[str, str]:
    """Live parameter name -> name in the files, as transformers itself would save it."""
    state = module.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(module, dict(state))  # type: ignore[arg-type]
    except ImportError:
        saved = state
    live = {(tensor.data_ptr(), tensor.shape): name for name, tensor in state.items()}
    back = {live[key]: name for name, tensor in saved.items() if (key := (tensor.data_ptr(), tensor.shape)) in live}
    return {name: back.get(name, name) for name, _ in module.named_parameters()}


def _classes(config: Any) -> tuple[str, ...]:
    """The names of a classification layer's classes; the default LABEL_0, LABEL_1 are mere numbers."""
    try:
        labels = {int(index): str(name) for index, name in (config.id2label or {}).items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(
            f"config.json names its classes by something else than numbers: {_line(error)}"
        ) from error
    return tuple(labels[i].removeprefix("LABEL_") for i in sorted(labels))


def _image_encoder(folder: Path, trust_remote_code: bool) -> Callable[[Sequence[Any]], dict[str, Tensor]]:
    """Images to `pixel_values` through the folder's own preprocessor_config.json."""
    if not (folder / "preprocessor_config.json").is_file():
        raise CheckpointError(
            f"{folder} has no preprocessor_config.json, so images cannot be prepared. Copy it from the original model."
        )
    read_json(folder / "preprocessor_config.json", "a preprocessor configuration")
    with _quiet():
        from transformers import AutoImageProcessor

        try:
            processor = AutoImageProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:
            raise CheckpointError(f"{folder / 'preprocessor_config.json'} cannot be used: {_line(error)}") from error
    sizes = [getattr(processor, name, None) or {} for name in ("size", "crop_size", "pad_size")]
    sides = [side for size in sizes for side in dict(size).values() if isinstance(side, (int, float))]
    if any(not 0 < side <= LARGEST_IMAGE for side in sides):
        raise CheckpointError(
            f"{folder / 'preprocessor_config.json'} is refused: it makes images of {max(sides, key=abs):.6g} pixels a "
            f"side; expected 1 to {LARGEST_IMAGE}."
        )

    def encode(images: Sequence[Any]) -> dict[str, Tensor]:
        try:
            return {"pixel_values": processor(list(images), return_tensors="pt")["pixel_values"]}
        except Exception as error:
            raise CheckpointError(f"{folder / 'preprocessor_config.json'} cannot be used: {_line(error)}") from error

    return encode


def _text_head(module: Any, folder: Path, trust_remote_code: bool) -> TextHead:
    """Class names to class embeddings: prompts through the model's own text tower, averaged."""

    def embed(classes: Sequence[str], prompts: Sequence[str] = ()) -> Tensor:
        # without any of these files, transformers makes up a tokenizer that knows no words
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise CheckpointError(
                f"{folder} has a text tower but no tokenizer; copy its files from the original model, or pass --head."
            )
        with _quiet():
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=trust_remote_code
                )
            except Exception as error:
                raise CheckpointError(
                    f"{folder} has a text tower but no usable tokenizer ({_line(error)}); pass --head NAME or FILE."
                ) from error
        device = next(module.parameters()).device
        padding = "max_length" if type(module).__name__.startswith("Siglip") else True
        longest = int(module.config.text_config.max_position_embeddings)

        def texts_to_embeddings(texts: list[str]) -> Tensor:
            tokens = tokenizer(texts, padding=padding, truncation=True, max_length=longest, return_tensors="pt")
            pooled: Tensor = module.text_model(**tokens.to(device)).pooler_output
            return module.text_projection(pooled) if hasattr(module, "text_projection") else pooled

        return class_embeddings(classes, prompts, texts_to_embeddings)

    return embed


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading without transformers' bars and hints; its settings are put back."""
    mend_torchvision()  # transformers imports it where it is installed
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
