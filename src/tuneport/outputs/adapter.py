"""A LoRA adapter that peft loads: what peft must know of the base, what cannot be written, what the record says."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..config import AdapterConfig
from ..errors import TuneportError, first_of
from ..io.fingerprint import weights_fingerprint
from ..io.output import new_folder
from ..io.tensors import LazyTensors
from ..methods import Method, name_of
from ..models.base import Model
from ..models.open import open_model
from ..models.weights import Scaled
from ..pairing import Plan
from ..report.record import Record, write_record
from ..task_vectors.lora_format import write_adapter
from ..task_vectors.lora_read import task_vector_of, transposed_weights, whole_tensors
from ..task_vectors.lora_write import (
    UNCUT,
    Packed,
    cut,
    no_place,
    pack,
    rounded,
    saved_modules,
    vllm_rank,
    vllm_refusals,
)
from ..task_vectors.vector import TaskVector, account
from .base import TEXTS, Output, Texts, Update, update_bytes, write_texts

TASKS = {  # of peft, by the ends of names of classes
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
LOADERS = {  # of peft, by task
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}
LOADER = "load.py"
LOAD = '''"""Open this adapter with its base, by peft."""

from pathlib import Path

import peft

model = peft.{name}.from_pretrained(str(Path(__file__).resolve().parent){options})
if __name__ == "__main__":
    print(type(model.get_base_model()).__name__, "with the adapter in", Path(__file__).resolve().parent)
'''


@dataclass(frozen=True)
class AdapterOutput(Output):
    """The change as a LoRA of a form."""

    name: ClassVar[str] = "adapter"

    form: AdapterConfig = UNCUT

    def check(self, plan: Plan, update: Update, method: Method) -> None:
        """Refuse dense updates without a rank, and targets of which no layer can have a LoRA."""
        target, vector = update.target, update.vector
        moved = {pair.target.weight for pair in plan.pairs}
        whole = tuple(f"{path}." for path in whole_modules(target, moved, update.fits_head))
        pairs = [pair for pair in plan.pairs if not pair.target.weight.startswith(whole)]
        if self.form.rank is None and self.form.energy is None:
            names = {pair.source.weight for pair in pairs}
            dense = [name for name in names if vector.spec(name).rank is None]
            if dense:
                raise TuneportError(
                    f"{len(dense)} of {len(names)} updates are not low-rank ({first_of(sorted(dense), 3)}): pass "
                    "`rank=R` or `energy=0.95` to make an adapter of them (`energy=1` is exact)."
                )
            if not method.keeps_rank:
                raise TuneportError(f"method {name_of(method)} makes dense updates: pass `rank=R` or `energy=0.95`.")
        weights = {pair.target.weight for pair in pairs}
        unsupported = no_place(target.module, weights)
        if len(unsupported) == len(weights):
            reasons = first_of(f"{name}: {reason}" for name, reason in unsupported.items())
            raise TuneportError(f'no layer of the target can be written as a LoRA ({reasons}). Use `as_="model"`.')

    def size(self, plan: Plan, update: Update, method: Method) -> int:
        return update_bytes(plan, update.vector, method, lora=self.form.rank or 0) + TEXTS

    def write(self, out: Path, update: Update, record: Record, overwrite: bool, texts: Texts = None) -> Record:
        packed, loader = self.packed(update), loader_of(update.target, update.task_type)
        record = _with_adapter(record, update, packed, loader)
        with new_folder(out, overwrite=overwrite) as folder:
            write_adapter(folder, packed.adapter)
            more = {**(texts or {}), **({LOADER: LOAD.format(**loader)} if loader else {})}
            return write_texts(folder, record, update.target.weights.library, more)

    def write_change(self, out: Path, vector: TaskVector, base: str | None, record: Record, overwrite: bool) -> Record:
        assert base is not None
        model = open_model(base)
        live = {file: name for name, file in model.weights.file_names.items()}
        packed = self.packed(Update(model, vector.rename({name: live[name] for name in vector if name in live})))
        record = {**record, "adapter": adapter_entry(packed)}
        files = model.weights.file_names
        if lost := [f"{files[name]}: {why}" for name, why in packed.kept.items() if vector.changes(files[name])]:
            words = f"the change of {len(lost)} of {len(vector)} tensors is left out"
            record["notes"] = [*record.get("notes", ()), f"{words} ({first_of(lost, 3)}): a model has it"]
        with new_folder(out, overwrite=overwrite) as folder:
            write_adapter(folder, packed.adapter)
            write_record(folder / "tuneport.json", record)
        return record

    def next_commands(self, record: Record) -> list[str]:
        """Also a question to a decoder, and what loads the adapter."""
        out, about = record["out"], record["adapter"]
        lines = [["tuneport", "evaluate", out, "--ask", "Hello, who are you?"]] if "vllm" in about else []
        lines += [["python", str(Path(out, LOADER))]] if about.get("loader") else []
        return [*super().next_commands(record), *map(shlex.join, lines)]

    def new_parameters(self, update: Update) -> Mapping[str, Tensor]:
        target = update.target
        base, adapter = target.stored_parameters(), self.packed(update).adapter
        vector = task_vector_of(adapter, base, transposed=transposed_weights(target.module), head=target.head)
        head, new = whole_tensors(adapter, target.head), vector.apply_to(base)
        return LazyTensors([*vector, *head], lambda name: head[name] if name in head else new[name])

    def scaled(self, update: Update) -> Scaled:
        target = update.target
        whole = whole_modules(target, update.vector, update.fits_head)
        vector, *_ = cut(update.vector, target.module, self.form, whole)
        return Scaled(target.module, vector, target.stored_parameters(), partial(rounded, form=self.form))

    def packed(self, update: Update) -> Packed:
        target = update.target
        return pack(
            update.vector,
            target.module,
            target.stored_parameters(),
            self.form,
            scale=update.scale,
            head=whole_head(target, update.vector, update.fits_head),
            about=adapter_facts(target, update.task_type),
        )


def _with_adapter(record: Record, update: Update, packed: Packed, loader: Mapping[str, str]) -> dict[str, Any]:
    """The record with ranks, what they cost, and what has no place in the adapter."""
    target = update.target
    kept = [{"tensor": target.weights.file_names[name], "reason": reason} for name, reason in packed.kept.items()]
    weights = {layer.name: layer.weight for layer in target.architecture.layers}
    return {
        **record,
        "layers": [layer for layer in record["layers"] if weights.get(layer["target"]) not in packed.kept],
        "not_transported": [*record["not_transported"], *kept],
        "base_fingerprint": weights_fingerprint(target.weights.tensors),
        "adapter": {**adapter_entry(packed), **({"loader": loader} if loader else {})},
        **(account(update.parts, packed.kept) if update.parts else {}),
    }


def adapter_facts(target: Model, wanted: str | None) -> dict[str, Any]:
    """What the configuration of an adapter says of its base: its path, and the task or the class that peft opens.

    The class of the target decides the task; `wanted`, that of the fine-tune, counts for a bare model.
    """
    kind = type(target.module)
    task = next((task for end, task in TASKS.items() if kind.__name__.endswith(end)), None)
    task = task or (wanted if wanted == "FEATURE_EXTRACTION" else None)
    facts: dict[str, Any] = {"task_type": task}
    if target.weights.folder is not None:
        facts["base_model_name_or_path"] = target.name
    if task is None and target.weights.library == "transformers":
        facts["auto_mapping"] = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    return facts


def loader_of(target: Model, wanted: str | None) -> dict[str, str]:
    """The class of peft that opens an adapter with its base, if that is a folder of transformers, and its options."""
    if target.weights.library != "transformers" or target.weights.folder is None or not Path(target.name).is_dir():
        return {}
    labels = f", num_labels={len(target.outputs.classes)}" if target.outputs.classes else ""
    return {"name": LOADERS.get(adapter_facts(target, wanted)["task_type"], "AutoPeftModel"), "options": labels}


def whole_modules(target: Model, changed: Collection[str], fitted: bool) -> list[str]:
    """The modules of the target that an adapter stores whole: those of a fitted or changed head, and by its task."""
    return saved_modules(target.module, whole_head(target, changed, fitted), adapter_facts(target, None)["task_type"])


def whole_head(target: Model, changed: Collection[str], fitted: bool) -> list[str]:
    """The parameters of the target's head that an adapter stores whole."""
    return [name for name in target.head if fitted or name in changed]


def adapter_entry(packed: Packed) -> dict[str, Any]:
    """What a record says of a written adapter; of one for a decoder, also what vLLM makes of it."""
    config = packed.adapter.config
    entry = {"rank": config["r"], "modules": packed.modules}
    if config.get("task_type") != "CAUSAL_LM":
        return entry
    return {**entry, "vllm": {"max_lora_rank": vllm_rank(packed.adapter), "refused": [*vllm_refusals(packed.adapter)]}}
