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
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...errors import CheckpointError, first_of, reraised
from ...io.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from ...io.tensors import LazyTensors, check_finite, describe
from ..base import Family, HeadedTensors, Labelling, Model, Weights, live_tensors, writer_with_config
from ..offload import replace_by_placeholders
from . import quiet
from .huggingface_config import check_kernels, class_of, named_class, quantisation, read_settings
from .huggingface_heads import classifier_around, labelling_of, with_classifier
from .huggingface_text import EXPERTS, complete_text, text_class
from .huggingface_vision import ARCHITECTURES, complete_vision

CONVERT = "convert it with from_pretrained(FOLDER, gguf_file=NAME) of AutoModelForCausalLM and AutoTokenizer"
UNPACKED = "Give the model in float32, bfloat16 or float16"
Built = tuple[nn.Module, list[str], list[str]]  # a module, its tensors missing in the files, those of another shape
_building = threading.RLock()  # torch's default dtype belongs to the whole process: one thread at a time changes it


class HuggingFace(Family):
    """The transformers library."""

    def recognises(self, reference: str) -> bool:
        return (Path(reference) / "config.json").is_file() or (_is_gguf(reference) and Path(reference).is_file())

    def open(self, reference: str, *, device: torch.device, trust_remote_code: bool, dtype: torch.dtype) -> Model:
        folder = Path(reference)
        if _is_gguf(reference):
            return _from_gguf(folder, device, dtype)
        if not trust_remote_code:
            check_kernels(folder)
        stored = open_checkpoint(folder)
        if words := quantisation(read_settings(folder), folder):
            return _dequantised(folder, stored, device, trust_remote_code, dtype, words)
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
        check_kernels(folder)
        stored = open_checkpoint(folder) if weights else None
        if weights and (words := quantisation(read_settings(folder), folder)):
            raise CheckpointError(f"{words}, and cannot be loaded block by block: leave out `memory_budget`.")
        module = _fitting(folder, stored, partial(_outline, folder, stored, dtype))
        names = _file_names(module, stored)
        tensors = _unread(module, names, folder) if stored is None else stored
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
        content = read_settings(Path(reference))
        with reraised(f"{reference}/config.json cannot be used"):
            return labelling_of(named_class(content), PretrainedConfig.from_dict(content))

    def classifier(self, model: Model, labelling: Labelling, *, trust_remote_code: bool) -> Model:
        module, fresh = classifier_around(model.module, labelling, model.name)
        known = {id(parameter): model.weights.file_names[name] for name, parameter in model.module.named_parameters()}
        names, live = _file_names(module), dict(module.named_parameters())
        files = {names[name]: known[id(parameter)] for name, parameter in live.items() if id(parameter) in known}
        head = {names[name]: parameter for name, parameter in live.items() if id(parameter) not in known}
        tensors = HeadedTensors(model.weights.tensors, files, head)
        new = _model(module, model.name, tensors, names, model.weights.folder, trust_remote_code)
        made = frozenset() if model.classifier is None else model.classifier.fresh  # a drawn head stays one
        own = {name: live[name].detach().clone() for name in new.classifier_parameters - fresh - made}
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


@quiet()
def _dequantised(
    folder: Path, stored: Checkpoint, device: torch.device, trust_remote_code: bool, dtype: torch.dtype, words: str
) -> Model:
    """A quantised model as transformers dequantises it, where it can."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.base import HfQuantizer

    kind, _ = class_of(folder, stored)
    settings = read_settings(folder)["quantization_config"]
    method = str(settings.get("quant_method")) if isinstance(settings, dict) else ""
    quantizer: Any = AUTO_QUANTIZER_MAPPING.get(method)
    if quantizer is not None and quantizer._dequantize is HfQuantizer._dequantize:
        raise CheckpointError(f"{words}, which transformers cannot dequantise. {UNPACKED}.")
    with reraised(f"{words}, and transformers cannot dequantise it here. {UNPACKED}. The reason"):
        packed = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code)
        return _in_bfloat16(packed.dequantize(dtype), str(folder), folder, device, dtype, trust_remote_code)


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
    with reraised(f"transformers cannot dequantise {file}. {UNPACKED}. The reason"):
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
    unpacked: Any, name: str, folder: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
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
    model = _model(module, name, tensors, names, folder, trust_remote_code)
    return replace(model, weights=replace(model.weights, write=writer_with_config(module)))


@quiet()
def _fitting(folder: Path, stored: Checkpoint | None, build: Callable[..., Built]) -> nn.Module:
    """Build the class that config.json names, or one without a pooler or a head of texts that the files fit."""
    import transformers

    kind, is_text = class_of(folder, stored)
    module, missing, misshapen = build(kind)
    if missing and not misshapen:
        # encoders are often stored without the head, or the pooler, that their config.json names
        base: Any = transformers.AutoModel._model_mapping.get(kind.config_class, kind)
        choices: list[dict[str, Any]] = [{}] if is_text and base is not kind else []
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


def _outline(folder: Path, stored: Checkpoint | None, dtype: torch.dtype, kind: Any, **options: Any) -> Built:
    """Build a module with placeholders for parameters, and with the values of its buffers."""
    thread = threading.get_ident()

    def to_meta(_: nn.Module, name: str, parameter: nn.Parameter) -> Any:  # torch's own annotation lacks the result
        del name
        if parameter.is_meta or threading.get_ident() != thread:  # another thread builds a module of its own
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    with _building, reraised(f"{folder / 'config.json'} describes no {kind.__name__}"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with register_module_parameter_registration_hook(to_meta):
                config = kind.config_class.from_pretrained(folder, local_files_only=True)
                module: nn.Module = kind(config, **options).eval()
        finally:
            torch.set_default_dtype(before)
    replace_by_placeholders(module)
    if stored is None:
        return module, [], []
    missing, misshapen = [], []
    for name, file in _file_names(module, stored).items():
        shape = tuple(module.get_parameter(name).shape)
        if file in stored:
            misshapen += [f"{name} {stored.shape(file)} vs {shape}"] if stored.shape(file) != shape else []
        elif EXPERTS.search(name):
            raise CheckpointError(
                f"{folder} holds the experts of a mixture one by one, which tuneport cannot load block by block: "
                "leave out `memory_budget`."
            )
        else:
            missing.append(name)
    return module, missing, misshapen


def _unread(module: nn.Module, file_names: Mapping[str, str], folder: Path) -> LazyTensors:
    """The tensors that the weight files would hold: names and shapes, but no values."""
    parameters = dict(module.named_parameters())
    specs = {file_names[name]: describe(parameters, name) for name in parameters}

    def read(name: str) -> Tensor:
        raise CheckpointError(f"{folder} has no weights, so {name} cannot be read.")

    return LazyTensors(specs, read, specs.__getitem__)


def _file_names(module: Any, stored: Checkpoint | None = None) -> dict[str, str]:
    """Live parameter name -> name in the files, where a bare model may have the prefix of its class (`bert.`)."""
    from transformers.core_model_loading import revert_weight_conversion

    state = module.state_dict()
    live = {(tensor.data_ptr(), tensor.shape): name for name, tensor in state.items()}
    saved = revert_weight_conversion(module, dict(state)).items()
    back = {live[key]: name for name, tensor in saved if (key := (tensor.data_ptr(), tensor.shape)) in live}
    names = {name: back.get(name, name) for name, _ in module.named_parameters()}
    if stored is None or any(file in stored for file in names.values()):
        return names
    inside = {name: f"{module.base_model_prefix}.{file}" for name, file in names.items()}
    return inside if all(file in stored for file in inside.values()) else names
