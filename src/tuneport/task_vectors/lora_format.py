"""PEFT adapters as they are stored: read the configuration and tensors of a folder or live model, write a folder.

The folder format (`adapter_config.json` and `adapter_model.safetensors`) is read and written directly, so peft is not
needed for a LoRA; other types are converted (`lora_read.as_lora`). An adapter that cannot be ported is refused with the
reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import CheckpointError, TuneportError, first_of, shortened
from ..io.checkpoint import open_checkpoint, read_json, read_record, write_checkpoint
from ..io.places import CONFIG, WEIGHTS
from ..io.tensors import check_finite, check_unquantised
from ..io.untrusted import LONGEST_NAME, MOST_STEPS, pattern_steps

PREFIX = "base_model.model."

# Settings of peft's LoraConfig whose adapters are not base + scaling * B A.
UNREAD = {
    "target_parameters": "LoRA on bare parameters (target_parameters)",
    "trainable_token_indices": "trainable tokens",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "aLoRA, which applies only to some tokens",
    "arrow_config": "Arrow routing between adapters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA, which changes the base weights",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's parallel layers",
}
# Types that add trained tokens.
TOKENS = (
    "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT", "CARTRIDGE", "ADAPTION_PROMPT",
)  # fmt: skip
# Initialisations that change the base weights: B A is then not the whole change.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Settings with regular expressions.
WHOLE = ("target_modules", "exclude_modules")  # one pattern of a whole name, or a list of plain names
ENDS = ("rank_pattern", "alpha_pattern", "layers_pattern", "modules_to_save")  # patterns after any prefix of a name

# Seen in peft 0.21, see its pull request 3774. A LoRA of zeros is not affected.
TWICE = "peft applies a LoRA on the output projection of torch's attention twice"


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as it is stored: its configuration, its tensors under their names in the file, and class names."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The adapter's type as peft calls it: LORA, LOHA, ..."""
        kind = self.config.get("peft_type")
        return shortened(getattr(kind, "value", kind))

    @property
    def task_type(self) -> str | None:
        """The task as peft calls it: SEQ_CLS, CAUSAL_LM, ..."""
        task = self.config.get("task_type")
        return getattr(task, "value", task)

    @property
    def base(self) -> str | None:
        """The model that the adapter says that it changes."""
        return self.config.get("base_model_name_or_path")

    @property
    def base_fingerprint(self) -> str:
        """The fingerprint of the weights of its base, if tuneport wrote the adapter; else nothing."""
        with suppress(TuneportError, AttributeError):
            return str(read_record(self.files[0].parent).get("base_fingerprint", "")) if self.files else ""
        return ""


def is_adapter(thing: object) -> bool:
    """True for the path of an adapter folder and for a live model with adapters."""
    if isinstance(thing, (str, Path)):
        return (Path(thing) / CONFIG).is_file()
    return bool(getattr(thing, "peft_config", None)) and isinstance(thing, nn.Module)


def open_adapter(thing: str | Path | nn.Module) -> Adapter:
    """Open an adapter folder, or the active adapter of a live model; refuse one that cannot be read exactly."""
    adapter = _live_adapter(thing) if isinstance(thing, nn.Module) else _stored_adapter(Path(thing))
    config = adapter.config
    start, stated = config.get("init_lora_weights"), config.get("base_model_name_or_path")
    wrong = ""
    if adapter.kind in TOKENS:
        wrong = (
            f"is an adapter of type {adapter.kind}: it adds trained tokens and changes no weight, so that nothing can "
            "be ported. Port a LoRA or a full fine-tune."
        )
    elif unread := [words for key, words in UNREAD.items() if config.get(key)]:
        wrong = f"uses {first_of(unread)}, which tuneport does not read. Merge it into its base."
    elif isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        wrong = (
            f"was initialised by {start}, which changes the base weights. Save it again with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA."
        )
    if wrong:
        raise CheckpointError(f"{adapter.name} {wrong}")
    if stated is not None and not isinstance(stated, str):
        given = f"is {type(stated).__name__}; expected the name of a model"
        raise CheckpointError(f"base_model_name_or_path in {CONFIG} of {adapter.name} {given}.")
    _check_patterns(adapter.config, adapter.name)
    check_unquantised(adapter.tensors, adapter.tensors)
    check_finite(adapter.tensors)
    return adapter


def _check_patterns(config: Mapping[str, Any], name: str) -> None:
    """Refuse an adapter with patterns that could take too long to match."""
    for key in (*WHOLE, *ENDS):
        value = config.get(key)
        values = value if isinstance(value, (dict, list, tuple)) and key in ENDS else [value]
        patterns = [item for item in values if isinstance(item, str)]
        total = sum(map(pattern_steps, patterns)) * (LONGEST_NAME if key in ENDS else 1)
        if total > MOST_STEPS:
            worst = shortened(repr(max(patterns, key=pattern_steps)))
            raise CheckpointError(
                f"{key} of the adapter {name} is refused: matching {worst} could take too long. Write it without "
                "nested or adjacent repetitions, or as plain names of modules."
            )


def _stored_adapter(folder: Path) -> Adapter:
    config = read_json(folder / CONFIG, "an adapter's configuration")
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f"{folder} has an {CONFIG} but no weights: expected {' or '.join(WEIGHTS)}.")
    return Adapter(str(folder), config, open_checkpoint(weights), (folder / CONFIG, weights), _classes(folder))


def _classes(folder: Path) -> tuple[str, ...]:
    """The names of the classes that the run record of an output has: peft stores none."""
    try:
        found = read_record(folder)["head"]["classes"]
    except (CheckpointError, KeyError, TypeError):
        return ()
    return tuple(map(str, found)) if isinstance(found, list) else ()


def _live_adapter(module: nn.Module) -> Adapter:
    """The active adapter of a PeftModel, as peft saves it."""
    from peft import get_peft_model_state_dict

    configs: Any = module.peft_config
    active: Any = getattr(module, "active_adapters", None)  # a method of models of transformers without peft's class
    names = active if isinstance(active, list) else list(configs)
    if len(names) != 1:
        raise TuneportError(f"{type(module).__name__} has {len(names)} active adapters; set one with set_adapter.")
    state = get_peft_model_state_dict(module, adapter_name=names[0], save_embedding_layers=False)
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    return Adapter(type(module).__name__, configs[names[0]].to_dict(), tensors)


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write the two files of an adapter; it is not atomic: use it inside `new_folder`."""
    text = json.dumps(dict(adapter.config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    write_checkpoint(folder, adapter.tensors, stem="adapter_model", max_shard_size="1000TB")
