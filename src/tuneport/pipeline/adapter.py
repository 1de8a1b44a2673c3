"""Results as adapters: what peft must know of the base, what cannot be written, and what the record says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from ..errors import TuneportError, first_of
from ..job import Job
from ..methods import Method, name_of
from ..models.base import Model
from ..task_vectors.lora_write import AdapterForm, Packed, no_place, saved_modules
from ..task_vectors.servers import vllm_rank, vllm_refusals

TASKS = {  # of peft, by the ends of names of classes
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}


def adapter_facts(target: Model, wanted: str | None) -> dict[str, Any]:
    """What the configuration of an adapter says of its base: its path, and the task or the class that peft opens.

    The class of the target decides the task; `wanted`, that of the fine-tune, counts for a bare model.
    """
    kind = type(target.module)
    task = next((task for end, task in TASKS.items() if kind.__name__.endswith(end)), None)
    task = task or (wanted if wanted == "FEATURE_EXTRACTION" else None)
    facts: dict[str, Any] = {"task_type": task}
    if target.folder is not None:
        facts["base_model_name_or_path"] = target.name
    if task is None and target.library == "transformers":
        facts["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return facts


LOADERS = {  # of peft, by task
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


def loader_of(target: Model, wanted: str | None) -> tuple[str, str]:
    """The class of peft that opens an adapter of the target together with its base, and the options that it needs."""
    labels = f", num_labels={len(target.classes)}" if target.classes else ""
    return LOADERS.get(adapter_facts(target, wanted)["task_type"], "AutoPeftModel"), labels


def whole_modules(target: Model, changed: Collection[str], fitted: bool) -> list[str]:
    """The modules of the target that an adapter stores whole: those of a fitted or changed head, and by its task."""
    return saved_modules(target.module, whole_head(target, changed, fitted), adapter_facts(target, None)["task_type"])


def whole_head(target: Model, changed: Collection[str], fitted: bool) -> list[str]:
    """The parameters of the target's head that an adapter stores whole."""
    return [name for name in target.head if fitted or name in changed]


def check_adapter(job: Job, method: Method, form: AdapterForm) -> None:
    """Refuse, before anything is measured, a transfer whose result cannot be written as an adapter as asked."""
    form.check()
    changed = {pair.target.weight for pair in job.plan.pairs}
    whole = tuple(f"{path}." for path in whole_modules(job.target, changed, job.fits_head))
    pairs = [pair for pair in job.plan.pairs if not pair.target.weight.startswith(whole)]
    if form.rank is None and form.energy is None:
        names = {pair.source.weight for pair in pairs}
        dense = [name for name in names if job.task_vector.spec(name).rank is None]
        if dense:
            raise TuneportError(
                f"{len(dense)} of {len(names)} updates are not low-rank ({first_of(sorted(dense), 3)}): pass `rank=R` "
                "or `energy=0.95` to make an adapter of them (`energy=1` is exact)."
            )
        if not method.keeps_rank:
            raise TuneportError(f"method {name_of(method)} makes dense updates: pass `rank=R` or `energy=0.95`.")
    weights = {pair.target.weight for pair in pairs}
    homeless = no_place(job.target.module, weights)
    if len(homeless) == len(weights):
        reasons = first_of(f"{name}: {reason}" for name, reason in homeless.items())
        raise TuneportError(f'no layer of the target can be written as a LoRA ({reasons}). Use `kind="model"`.')


def adapter_record(record: Mapping[str, Any], packed: Packed, target: Model) -> dict[str, Any]:
    """The record of a transfer that was written as an adapter: ranks, what they cost, what has no place in it."""
    kept = [{"tensor": target.file_names[name], "reason": reason} for name, reason in packed.kept.items()]
    weights = {layer.name: layer.weight for layer in target.layers}
    return {
        **record,
        "layers": [layer for layer in record["layers"] if weights.get(layer["target"]) not in packed.kept],
        "not_transported": [*record["not_transported"], *kept],
        "adapter": adapter_entry(packed),
    }


def adapter_entry(packed: Packed) -> dict[str, Any]:
    """What a record says of a written adapter; of one for a decoder, also what vLLM makes of it."""
    config = packed.adapter.config
    entry = {"rank": config["r"], "modules": [asdict(item) for item in packed.modules]}
    if config.get("task_type") != "CAUSAL_LM":
        return entry
    return {**entry, "vllm": {"max_lora_rank": vllm_rank(packed.adapter), "refused": [*vllm_refusals(packed.adapter)]}}
