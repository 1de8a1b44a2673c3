"""Convert adapters of other types (LoHa, LoKr, VeRA, ...) to LoRA, by peft's own conversion."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ..errors import CheckpointError, TuneportError, brief, first_of
from .lora_format import PREFIX, Adapter
from .lora_read import plain_names
from .wrappers import renaming

# Of the squared norm, which peft sums twice in float32, in another order: two sums of r squares differ by up to 2r
# roundings of 2^-24 each. With all of it, the rank would depend on their last digit.
SHARE = 1 - 2**-21


def as_lora(adapter: Adapter, module: nn.Module) -> Adapter:
    """The adapter itself if it is a LoRA, else what peft converts it to on a copy of its base.

    The LoRA has the rank of the change, without singular values whose squares are lost in a sum in float32.
    """
    if adapter.kind == "LORA":
        return adapter
    advice = "Merge it into its base with merge_and_unload() of peft, and give the merged model as `finetuned`."
    try:
        from peft import PeftConfig, convert_to_lora, get_peft_model, set_peft_model_state_dict
    except ImportError as error:
        raise CheckpointError(
            f"{adapter.name} is an adapter of type {adapter.kind}, which needs a peft that converts it to LoRA (0.19 "
            f"or newer). {advice}"
        ) from error
    parameters = dict(module.named_parameters())
    names, saved = plain_names(adapter), adapter.config.get("modules_to_save") or ()
    rename = renaming(names, parameters)
    whole = {name for name in names if rename(name) in parameters or name.split(".")[0] in saved}
    factors = {name: key for name, key in names.items() if name not in whole}
    settings = {**adapter.config, "task_type": None, "modules_to_save": None}
    try:
        model = get_peft_model(copy.deepcopy(module), PeftConfig.from_peft_type(**settings))
        if not model.supports_lora_conversion():
            raise TuneportError("peft cannot convert it to LoRA")
        # a key outside the model, as of VeRA's shared matrices, keeps its name
        stored = {key.replace(name, rename(name)): adapter.tensors[key] for name, key in factors.items()}
        loaded: Any = set_peft_model_state_dict(model, stored)
        unknown = loaded.unexpected_keys
        if unknown:
            raise TuneportError(f"{len(unknown)} of its tensors do not fit the base: {first_of(unknown)}")
        config, tensors = convert_to_lora(model, SHARE)
    except Exception as error:
        raise CheckpointError(
            f"{adapter.name} is an adapter of type {adapter.kind}, not a LoRA: {brief(error)}. {advice}"
        ) from error
    kept = {PREFIX + name: adapter.tensors[names[name]] for name in whole}
    facts = {key: adapter.config.get(key) for key in ("task_type", "modules_to_save", "base_model_name_or_path")}
    return Adapter(adapter.name, {**config.to_dict(), **facts}, {**tensors, **kept}, adapter.files, adapter.classes)
