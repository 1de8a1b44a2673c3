"""Hugging Face models: local folders and live `transformers` objects, vision and text.

Weights load through the class that the folder's config.json names; code from checkpoints runs only with
`trust_remote_code`. Live parameter names differ from file names in some classes; transformers itself gives the mapping.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, TuneportError, brief, first_of
from ...io.checkpoint import Checkpoint, open_checkpoint, read_json
from ...io.validate import check_finite
from ..base import Family, Model, Stored, live_tensors, write_weights, writer_with_config
from ..outline import check_config, outline_of, oversized, unread
from . import quiet, torchvision_hint
from .huggingface_text import HEADS, TEXT_KINDS, complete_text, refuse_experts, text_class
from .huggingface_vision import ARCHITECTURES, complete_vision


class HuggingFace(Family):
    """The transformers library."""

    name = "huggingface"

    def recognises(self, reference: str) -> bool:
        return (Path(reference) / "config.json").is_file()

    def open(
        self, reference: str, *, device: torch.device, trust_remote_code: bool, dtype: torch.dtype = torch.float32
    ) -> Model:
        folder = Path(reference)
        stored = open_checkpoint(folder)
        with quiet():
            module = _load(folder, stored, device, trust_remote_code, dtype)
        check_finite(stored)
        names = _traced(module, _file_names(module), stored)
        model = self._model(module, str(reference), stored, names, folder, trust_remote_code)
        lost = [name for name in names.values() if name not in stored]
        if lost:
            raise CheckpointError(
                f"{len(lost)} tensors of {type(module).__name__} cannot be traced to the files of {folder}: "
                f"{first_of(lost)}. Save the model again with save_pretrained."
            )
        return model

    def outline(self, reference: str, *, dtype: torch.dtype, weights: bool = True) -> Model:
        folder = Path(reference)
        stored = open_checkpoint(folder) if weights else None
        with quiet():
            module, names = _outline(folder, stored, dtype)
        if stored is not None:
            check_finite(stored)
        tensors = unread(module, names, folder) if stored is None else stored
        return replace(self._model(module, str(reference), tensors, names, folder, False), offloaded=True)

    def stored(self, reference: str) -> Stored:
        return Stored(open_checkpoint(reference), Path(reference))

    def knows(self, module: nn.Module) -> bool:
        name, config = type(module).__name__, getattr(module, "config", None)
        known_text = text_class(name, getattr(config, "model_type", "")) is not None
        return config is not None and (name in ARCHITECTURES or known_text)

    def describe(self, module: nn.Module) -> Model:
        names = _file_names(module)
        stored = {names[name]: tensor for name, tensor in live_tensors(module).items() if name in names}
        return self._model(module, type(module).__name__, stored, names, None, False)

    def _model(
        self,
        module: nn.Module,
        name: str,
        stored: Mapping[str, Tensor],
        file_names: Mapping[str, str],
        folder: Path | None,
        trust_remote_code: bool,
    ) -> Model:
        model = Model(
            name=name,
            module=module,
            tensors=stored,
            file_names=file_names,
            layers=(),
            loose=(),
            folder=folder,
            write=write_weights if folder is not None else writer_with_config(module),
            library="transformers",
        )
        complete = complete_vision if type(module).__name__ in ARCHITECTURES else complete_text
        return complete(model, trust_remote_code)


def _class_of(folder: Path, stored: Checkpoint | None) -> tuple[Any, bool]:
    """The class that a folder's config.json names, and whether it is a text model."""
    import transformers

    config = _config(folder)
    if stored is not None:
        _check_plain(config, folder)
        _check_numbers(config, folder / "config.json", stored)
    else:
        check_config(config, folder / "config.json")
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    refuse_experts(config, stored or (), str(folder))
    if name is None:
        raise CheckpointError(
            f"{folder / 'config.json'} does not say which class the model is: architectures is missing or empty. Add "
            'it, as in "architectures": ["ViTForImageClassification"].'
        )
    try:
        kind = getattr(transformers, name, None)
    except Exception as error:
        raise TuneportError(f"transformers cannot import {name}: {brief(error)}.{torchvision_hint()}") from error
    is_text = text_class(name, str(config.get("model_type"))) is not None
    if kind is None or not (is_text or name in ARCHITECTURES):
        raise CheckpointError(
            f"{folder} holds a {name}, which tuneport does not know. Known: {', '.join(sorted(ARCHITECTURES))}; and "
            f"for text {', '.join(TEXT_KINDS)}, as {', '.join(HEADS)}. See docs/add-a-family.md."
        )
    if stored is not None:
        _check_size(kind, folder, stored)
    return kind, is_text


def _outline(folder: Path, stored: Checkpoint | None, dtype: torch.dtype) -> tuple[nn.Module, dict[str, str]]:
    """A module whose parameters are placeholders, and their names in the files."""
    import transformers

    kind, is_text = _class_of(folder, stored)
    base = transformers.AutoModel._model_mapping.get(kind.config_class, kind) if is_text else kind
    candidates: list[tuple[Any, dict[str, Any]]] = [(kind, {})]
    if stored is not None and is_text:  # as in _load
        candidates += [(base, {}), (base, {"add_pooling_layer": False})]
    wrong: list[str] = []
    for each, options in candidates:
        try:
            module = outline_of(each, folder, dtype, **options)
        except CheckpointError:
            if options:
                continue
            raise
        names = _file_names(module)
        if stored is None:
            return module, names
        names = _traced(module, names, stored)
        left = [
            name
            for name, parameter in module.named_parameters()
            if names[name] not in stored or stored.shape(names[name]) != tuple(parameter.shape)
        ]
        if not left:
            return module, names
        wrong = wrong or left
    raise _mismatch(kind, folder, wrong)


def _load(
    folder: Path, stored: Checkpoint, device: torch.device, trust_remote_code: bool, dtype: torch.dtype
) -> nn.Module:
    import transformers

    kind, is_text = _class_of(folder, stored)
    module, missing, misshapen = _build(kind, folder, trust_remote_code, dtype)
    if missing and not misshapen and is_text:
        # encoders are often stored without the head, or the pooler, that their config.json names
        base = transformers.AutoModel._model_mapping.get(kind.config_class, kind)
        for options in ({}, {"add_pooling_layer": False}):
            other, *left = _build(base, folder, trust_remote_code, dtype, **options)
            if not any(left):
                module, missing = other, []
                break
    wrong = [*missing, *misshapen]
    if wrong:
        raise _mismatch(kind, folder, wrong)
    model: nn.Module = module
    return model.to(device).eval()


def _mismatch(kind: Any, folder: Path, wrong: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{len(wrong)} tensors of {kind.__name__} are missing or misshapen in {folder}: {first_of(wrong)}. "
        "Its config.json and its weights do not belong together."
    )


def _build(
    kind: Any, folder: Path, trust_remote_code: bool, dtype: torch.dtype, **options: Any
) -> tuple[Any, list[str], list[str]]:
    """A module with the folder's weights, the names of missing tensors, and those with another shape."""
    try:
        module, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported, with their names
            **options,
        )
    except Exception as error:
        if isinstance(error, TypeError) and options:  # the class does not take them
            return None, [str(error)], []
        raise CheckpointError(f"transformers cannot load {folder} as {kind.__name__}: {brief(error)}.") from error
    misshapen = (f"{name} {tuple(stored)} vs {tuple(live)}" for name, stored, live in info["mismatched_keys"])
    return module, sorted(info["missing_keys"]), sorted(misshapen)


def _check_plain(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a quantised model before transformers asks for the library that could load it."""
    found = config.get("quantization_config")
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else None
        raise CheckpointError(
            f"{folder} is quantised (quantization_config{f': {method}' if method else ''}), and tuneport cannot change "
            "quantised weights. Give the model in float32, bfloat16 or float16."
        )


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json", "a model configuration")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / 'config.json'} is not a model configuration: expected a JSON object.")
    return config


def _check_numbers(config: Any, path: Path, stored: Checkpoint) -> None:
    """Refuse sizes that contradict the weights, before anything is built from them.

    No width, vocabulary or number of classes exceeds the number of weights, and each block has a tensor.
    """
    weights = sum(math.prod(stored.shape(name)) for name in stored)
    found = oversized(config, max(weights, 10**6), max(len(stored), 256))
    if found:
        raise CheckpointError(
            f"{path} is refused: its weights hold {weights} numbers in {len(stored)} tensors, "
            f"which rules out {first_of(found, 3)}. Its config.json and its weights do not belong together."
        )


def _check_size(kind: Any, folder: Path, stored: Checkpoint) -> None:
    """Build the model on the meta device, and refuse one that is far larger than its weights."""
    weights = sum(math.prod(stored.shape(name)) for name in stored)
    try:
        with torch.device("meta"):
            model = kind(kind.config_class.from_pretrained(folder, local_files_only=True))
        described = sum(parameter.numel() for parameter in model.parameters())
    except Exception as error:
        raise CheckpointError(f"{folder / 'config.json'} describes no {kind.__name__}: {brief(error)}.") from error
    if described > 2 * weights + 10**7:
        raise CheckpointError(
            f"{folder / 'config.json'} is refused: it describes {described} parameters, but its weights hold "
            f"{weights}. They do not belong together."
        )


def _file_names(module: nn.Module) -> dict[str, str]:
    """Live parameter name -> name in the files, as transformers would save it."""
    state = module.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(module, dict(state))  # type: ignore[arg-type]
    except ImportError:
        saved = state
    live = {(tensor.data_ptr(), tensor.shape): name for name, tensor in state.items()}
    back = {live[key]: name for name, tensor in saved.items() if (key := (tensor.data_ptr(), tensor.shape)) in live}
    return {name: back.get(name, name) for name, _ in module.named_parameters()}


def _traced(module: Any, names: dict[str, str], stored: Checkpoint) -> dict[str, str]:
    """The names with the prefix of the base model (`bert.`) if the files hold a bare model under that prefix."""
    inside = {name: f"{module.base_model_prefix}.{file}" for name, file in names.items()}
    bare = not any(file in stored for file in names.values())
    return inside if bare and all(file in stored for file in inside.values()) else names
