"""Hugging Face models: local folders, GGUF files and live `transformers` objects, vision and text.

Weights load through the class that the folder's config.json names; code from checkpoints runs only with
`trust_remote_code`. Live parameter names differ from file names in some classes; transformers itself gives the mapping.
"""

from __future__ import annotations

import atexit
import copy
import inspect
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError, first_of, reraised, shortened
from ...io.checkpoint import Checkpoint, open_checkpoint, read_object, write_checkpoint
from ...io.tensors import check_finite
from ..base import Family, HeadedTensors, Model, live_tensors, writer_with_config
from ..outline import PACKED, check_config, check_kernels, count_weights, outline_of, quantisation, unread
from ..parts import Labelling, Weights
from . import not_imported, quiet
from .huggingface_heads import classifier_around, labelling_of, with_classifier
from .huggingface_text import EXPERTS, HEADS, TEXT_KINDS, complete_text, text_class
from .huggingface_vision import ARCHITECTURES, complete_vision

CONVERT = "convert it with from_pretrained(FOLDER, gguf_file=NAME) of AutoModelForCausalLM and AutoTokenizer"
Built = tuple[nn.Module, list[str], list[str]]  # a module, its tensors missing in the files, those of another shape


class HuggingFace(Family):
    """The transformers library."""

    def recognises(self, reference: str) -> bool:
        return (Path(reference) / "config.json").is_file() or (_is_gguf(reference) and Path(reference).is_file())

    def open(self, reference: str, *, device: torch.device, trust_remote_code: bool, dtype: torch.dtype) -> Model:
        folder = Path(reference)
        if _is_gguf(reference):
            return _from_gguf(folder, device, dtype)
        config = _read_config(folder, check=not trust_remote_code)
        stored = open_checkpoint(folder)
        if words := quantisation(config, folder):
            return _dequantised(reference, stored, device, trust_remote_code, dtype, words)
        module = _fitting(folder, stored, partial(_load, folder, trust_remote_code, dtype)).to(device).eval()
        names = _file_names(module, stored)
        model = _model(module, reference, stored, names, folder, trust_remote_code)
        lost = [name for name in names.values() if name not in stored and not EXPERTS.search(name)]
        if lost:
            raise CheckpointError(
                f"{len(lost)} tensors of {type(module).__name__} cannot be traced to the files of {folder}: "
                f"{first_of(lost)}. Save the model again with save_pretrained."
            )
        return model

    def outline(self, reference: str, *, dtype: torch.dtype, weights: bool = True) -> Model:
        folder = Path(reference)
        if _is_gguf(reference):
            raise CheckpointError(f"{folder} is a GGUF file, and cannot be loaded block by block: {CONVERT}.")
        config = _read_config(folder, check=True)
        stored = open_checkpoint(folder) if weights else None
        if weights and (words := quantisation(config, folder)):
            raise CheckpointError(f"{words}, and cannot be loaded block by block: leave out `memory_budget`.")
        module = _fitting(folder, stored, partial(_outline, folder, stored, dtype))
        names = _file_names(module, stored)
        tensors = unread(module, names, folder) if stored is None else stored
        model = _model(module, reference, tensors, names, folder)
        return replace(model, weights=replace(model.weights, offloaded=True))

    def stored(self, reference: str) -> Weights:
        if _is_gguf(reference):
            return super().stored(reference)
        return Weights(open_checkpoint(reference), folder=Path(reference))

    def labelling(self, reference: str) -> Labelling | None:
        from transformers import PretrainedConfig

        if _is_gguf(reference):
            return None
        content = _read_config(Path(reference))
        named = content.get("architectures")
        name = named[0] if isinstance(named, list) and named else ""
        with reraised(f"{reference}/config.json cannot be used"):
            return labelling_of(str(name), PretrainedConfig.from_dict(content))

    def classifier(self, model: Model, labelling: Labelling, *, trust_remote_code: bool) -> Model:
        module, fresh = classifier_around(model.module, labelling, model.name)
        known = {id(parameter): model.weights.file_names[name] for name, parameter in model.module.named_parameters()}
        names, live = _file_names(module), dict(module.named_parameters())
        files = {names[name]: known[id(parameter)] for name, parameter in live.items() if id(parameter) in known}
        head = {names[name]: parameter for name, parameter in live.items() if id(parameter) not in known}
        tensors = HeadedTensors(model.weights.tensors, files, head)
        new = _model(module, model.name, tensors, names, model.weights.folder, trust_remote_code)
        own = {name: live[name].detach().clone() for name in new.classifier_parameters - fresh}
        weights = replace(new.weights, write=writer_with_config(module))
        assert new.classifier is not None
        return replace(new, weights=weights, classifier=replace(new.classifier, own=own, fresh=fresh))

    def knows(self, module: nn.Module) -> bool:
        name, config = type(module).__name__, getattr(module, "config", None)
        known = name in ARCHITECTURES or text_class(name, getattr(config, "model_type", "")) is not None
        return config is not None and known

    def describe(self, module: nn.Module) -> Model:
        names = _file_names(module)
        stored = {names[name]: tensor for name, tensor in live_tensors(module).items() if name in names}
        return _model(module, type(module).__name__, stored, names)


def _model(
    module: nn.Module,
    name: str,
    stored: Mapping[str, Tensor],
    names: Mapping[str, str],
    folder: Path | None = None,
    trust_remote_code: bool = False,
) -> Model:
    experts = {file: file for file in stored if EXPERTS.search(file) and file not in names.values()}
    names = {**names, **experts}  # transformers joins them
    write = write_checkpoint if folder is not None else writer_with_config(module)
    model = Model(name, module, Weights(stored, names, folder, write, "transformers"))
    complete = complete_vision if type(module).__name__ in ARCHITECTURES else complete_text
    return with_classifier(complete(model, trust_remote_code))


def _read_config(folder: Path, *, check: bool = False) -> dict[str, Any]:
    """The configuration of a model; `check` refuses native code."""
    config = read_object(path := folder / "config.json", "a model configuration")
    if check:
        check_kernels(config, path)
    return config


@quiet()
def _dequantised(
    reference: str, stored: Checkpoint, device: torch.device, trust_remote_code: bool, dtype: torch.dtype, words: str
) -> Model:
    """A quantised model as transformers dequantises it; its tensors are those values in bfloat16."""
    folder = Path(reference)
    kind, _ = _class_of(folder, stored)
    advice = "Give the model in float32, bfloat16 or float16"
    settings = _read_config(folder)["quantization_config"]
    if not _unpacks(settings.get("quant_method") if isinstance(settings, dict) else None):
        raise CheckpointError(f"{words}, which transformers cannot dequantise. {advice}.")
    with reraised(f"{words}, and transformers cannot dequantise it here. {advice}. The reason"):
        packed = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code)
        unpacked = packed.dequantize(dtype)
        return _in_bfloat16(unpacked, reference, folder, device, dtype, trust_remote_code)


def _unpacks(method: object) -> bool:
    """Whether transformers can dequantise a format, as far as it knows the format."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.base import HfQuantizer

    known: Any = AUTO_QUANTIZER_MAPPING.get(str(method))
    return known is None or known._dequantize is not HfQuantizer._dequantize


def _is_gguf(reference: str) -> bool:
    return reference.lower().endswith(".gguf")


@quiet()
def _from_gguf(file: Path, device: torch.device, dtype: torch.dtype) -> Model:
    """A language model in a GGUF file as transformers dequantises it, with its tokenizer in a temporary folder."""
    import transformers

    if find_spec("gguf") is None:
        raise CheckpointError(
            f'{file} is a GGUF file, and gguf, which reads it, is not installed: pip install "tuneport[gguf]", or '
            f"{CONVERT}."
        )
    given = {"gguf_file": file.name, "local_files_only": True}
    dense = getattr(transformers, "GgufConfig", None)  # older versions always dequantise
    options = {} if dense is None else {"quantization_config": dense(dequantize=True)}
    with reraised(f"transformers cannot dequantise {file}. Give the model in float32, bfloat16 or float16. The reason"):
        config = transformers.AutoConfig.from_pretrained(file.parent, **given)
        kind: Any = transformers.AutoModelForCausalLM._model_mapping.get(type(config), type(config))
        if text_class(kind.__name__, config.model_type) is None:
            raise CheckpointError(f"{kind.__name__} is a model that tuneport does not know")
        module = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **given, **options)
        folder = Path(tempfile.mkdtemp(prefix="tuneport-gguf-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        transformers.AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)
        return _in_bfloat16(module, str(file), folder, device, dtype)


def _in_bfloat16(
    unpacked: Any,
    reference: str,
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> Model:
    """A model whose weights were dequantised; its tensors are those values in bfloat16."""
    config = copy.deepcopy(unpacked.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    module = type(unpacked)(config)  # a plain one: the first remembers how its weights were converted
    module.load_state_dict(unpacked.state_dict())
    module = module.to(device, dtype).eval()
    names = _file_names(module)
    tensors = {names[n]: t.to("cpu", torch.bfloat16) for n, t in live_tensors(module).items() if n in names}
    model = _model(module, reference, tensors, names, folder, trust_remote_code)
    return replace(model, weights=replace(model.weights, write=writer_with_config(module)))


def _class_of(folder: Path, stored: Checkpoint | None) -> tuple[Any, bool]:
    """The class that a folder's config.json names, and whether it is a text model."""
    import transformers

    path, config = folder / "config.json", _read_config(folder)
    check_config(config, path, stored)
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    if name is None:
        raise CheckpointError(
            f"{path} does not say which class the model is: architectures is missing or empty. Add "
            'it, as in "architectures": ["ViTForImageClassification"].'
        )
    try:
        kind = getattr(transformers, name, None)
    except Exception as error:
        raise not_imported(f"{name} of transformers", error) from error
    is_text = text_class(name, str(config.get("model_type"))) is not None
    if kind is None or not (is_text or name in ARCHITECTURES):
        raise CheckpointError(
            f"{folder} holds a {shortened(name)}, which tuneport does not know. "
            f"Known: {', '.join(sorted(ARCHITECTURES))}; and for text {', '.join(TEXT_KINDS)}, as {', '.join(HEADS)}. "
            "See docs/extending.md."
        )
    if stored is not None:
        _check_size(kind, path, stored, bool(config.get("quantization_config")))
    return kind, is_text


@quiet()
def _fitting(folder: Path, stored: Checkpoint | None, build: Callable[..., Built]) -> nn.Module:
    """Build the class that config.json names or, for a text model, one with fewer parts that the weights fit."""
    import transformers

    kind, is_text = _class_of(folder, stored)
    module, missing, misshapen = build(kind)
    if missing and is_text and not misshapen:
        # encoders are often stored without the head, or the pooler, that their config.json names
        base: Any = transformers.AutoModel._model_mapping.get(kind.config_class, kind)
        choices: list[dict[str, Any]] = [{}]
        if "add_pooling_layer" in inspect.signature(base).parameters:
            choices.append({"add_pooling_layer": False})
        built = (build(base, **options) for options in choices)
        module, missing, misshapen = next((each for each in built if not any(each[1:])), (module, missing, misshapen))
    wrong = [*missing, *misshapen]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors of {kind.__name__} are missing or misshapen in {folder}: {first_of(wrong, 3)}. "
            "Its config.json and its weights do not belong together."
        )
    if stored is not None:
        check_finite(stored)
    return module


def _outline(folder: Path, stored: Checkpoint | None, dtype: torch.dtype, kind: Any, **options: Any) -> Built:
    module = outline_of(kind, folder, dtype, **options)
    if stored is None:
        return module, [], []
    missing, misshapen = [], []
    for name, file in _file_names(module, stored).items():
        shape = tuple(module.get_parameter(name).shape)
        if file not in stored:
            if EXPERTS.search(name):
                raise CheckpointError(
                    f"{folder} holds the experts of a mixture one by one, which tuneport cannot load block by block: "
                    "leave out `memory_budget`."
                )
            missing.append(name)
        elif stored.shape(file) != shape:
            misshapen.append(f"{name} {stored.shape(file)} vs {shape}")
    return module, missing, misshapen


def _load(folder: Path, trust_remote_code: bool, dtype: torch.dtype, kind: Any, **options: Any) -> Built:
    with reraised(f"transformers cannot load {folder} as {kind.__name__}"):
        module, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=True,  # reported, with their names
            **options,
        )
    misshapen = (f"{name} {tuple(stored)} vs {tuple(live)}" for name, stored, live in info["mismatched_keys"])
    return module, sorted(info["missing_keys"]), sorted(misshapen)


def _check_size(kind: Any, path: Path, stored: Checkpoint, packed: bool) -> None:
    """Refuse a model that is far larger than its weights."""
    weights = count_weights(stored) * (PACKED if packed else 1)
    with reraised(f"{path} describes no {kind.__name__}"):
        described = _count_described(kind, path.parent, path.read_bytes())
    if described > 2 * weights + 10**7:
        raise CheckpointError(
            f"{path} is refused: it describes {described} parameters, but its weights hold {weights}. They do not "
            "belong together."
        )


@lru_cache
def _count_described(kind: Any, folder: Path, content: bytes) -> int:
    """Count the parameters that a config.json of this content describes, by a model on the meta device."""
    from transformers.initialization import no_init_weights

    del content  # tells one state of the folder from another
    with no_init_weights(), torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(folder, local_files_only=True))
    return sum(parameter.numel() for parameter in model.parameters())


def _file_names(module: Any, stored: Checkpoint | None = None) -> dict[str, str]:
    """Live parameter name -> name in the files, where a bare model may have the prefix of its class (`bert.`)."""
    state = module.state_dict()
    try:
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(module, dict(state))
    except ImportError:
        saved = state
    live = {(tensor.data_ptr(), tensor.shape): name for name, tensor in state.items()}
    back = {live[key]: name for name, tensor in saved.items() if (key := (tensor.data_ptr(), tensor.shape)) in live}
    names = {name: back.get(name, name) for name, _ in module.named_parameters()}
    if stored is None or any(file in stored for file in names.values()):
        return names
    inside = {name: f"{module.base_model_prefix}.{file}" for name, file in names.items()}
    return inside if all(file in stored for file in inside.values()) else names
