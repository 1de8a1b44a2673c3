"""A finished transfer, and what it can become: a live module, a model folder, a LoRA adapter, a task-vector file.

The target is never changed: `apply` works on a copy, and a model's tensors are computed one by one as they are written.
A folder appears when it is complete, with the run record, the model card and the report next to the weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TuneportError, first_of
from ..io.companions import companion_bytes, copy_companions
from ..io.output import check_new_file, check_new_folder, new_folder
from ..io.tensors import describe
from ..job import Job
from ..methods import LayerRecord, Method, name_of
from ..models.base import Model
from ..models.open import path_of
from ..pairing import Kept
from ..report.card import model_card
from ..report.page import report_page
from ..report.record import to_json, write_record
from ..task_vectors.lora_format import write_adapter
from ..task_vectors.lora_write import Packed, no_place, pack
from ..task_vectors.vector import TaskVector, save_task_vector
from ..training.distill import STEPS, Lesson, Mark
from ..training.state import StateFile
from ..types import OutputKind, Progress
from .distill import teach

TEXTS = 2**20  # bytes that card, record and report take at most, except for models of thousands of layers


@dataclass(frozen=True, eq=False)
class Result:
    """A finished transfer: the target's task vector, the evidence per layer, and the ways to use it."""

    target: Model
    task_vector: TaskVector
    records: tuple[LayerRecord, ...]
    not_transported: tuple[Kept, ...]
    scale: float
    record: Mapping[str, Any]
    job: Job | None = None  # what it was made from

    def __repr__(self) -> str:
        moved = f"{len(self.records)} layers moved, {len(self.not_transported)} tensors stay"
        return f"Result({self.target.name}: {self.record.get('method', 'a transfer')} at scale {self.scale:g}, {moved})"

    def tensors(self, scale: float | None = None) -> Mapping[str, Tensor]:
        """The new model's tensors under their names in the files, in the target's dtypes, computed when read."""
        vector = self.task_vector.rename({name: self.target.file_names[name] for name in self.task_vector})
        return vector.apply_to(self.target.tensors, self.scale if scale is None else scale)

    def apply(self, scale: float | None = None) -> nn.Module:
        """A copy of the target with the skill: the numbers that `save` writes, in the dtype that the target runs in."""
        self.target.require_in_memory("apply()", "use save() instead")
        module = copy.deepcopy(self.target.module)
        tensors = self.tensors(scale)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.task_vector:
                    parameter.copy_(tensors[self.target.file_names[name]])
        return module

    def distill(
        self,
        steps: int = STEPS,
        *,
        learning_rate: float | None = None,
        lora: int | None = None,
        progress: Progress | None = None,
        watch: Callable[[Mark], None] | None = None,
        saved: StateFile | None = None,
    ) -> Result:
        """Let the fine-tuned source teach the ported target on the calibration samples; no label is used.

        A tenth of the samples is held out. The result is the state whose answers there are nearest to the teacher's,
        and that may be this transfer as it is.

        Args:
            steps: updates of the student.
            learning_rate: the highest, after the warm-up; by default it follows from the target's width.
            lora: train a LoRA of this rank in place of all linear layers, from the best fit of the transfer.
            progress: called with 1 after each step.
            watch: called with each point of the curve.
            saved: keeps the state of the run, and gives back that of a killed one.
        """
        if self.job is None:
            raise TuneportError("this result does not know the models and samples that it was made from.")
        lesson = Lesson(steps, learning_rate, lora, self.job.seed)
        vector, entry = teach(
            self.job.samples,
            self.target,
            self.job.task_vector,
            self.task_vector * self.scale,
            lesson,
            progress=progress,
            watch=watch,
            saved=saved,
        )
        teacher = self.record.get("finetuned", {}).get("name")
        record = {**self.record, "distilled": {"teacher": teacher, **entry}}
        if lora is None and entry["best"] == 0:
            return replace(self, record=record)
        changed = {self.target.file_names[name] for name in vector}
        kept = tuple(item for item in self.not_transported if item.tensor not in changed)
        record["not_transported"] = [asdict(item) for item in kept]
        return replace(self, task_vector=vector, scale=1.0, not_transported=kept, record=record)

    def save(
        self,
        out: str | Path,
        *,
        kind: OutputKind = "model",
        rank: int | None = None,
        energy: float | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the new model as a folder that its own library loads, a LoRA adapter, or the task vector as one file.

        An adapter takes low-rank updates unchanged; others, and all if `rank` or `energy` is given, are cut
        by SVD to that rank, or to the least rank that keeps this share of |tau|^2. An output that holds what the
        transfer was made from is refused, also with `overwrite`.
        """
        out = Path(out)
        place = self.record.get("out", str(out))  # a record may know where the folder will be moved to
        record = {**self.record, "out": place, "as": kind}
        check_output(out, kind, overwrite, inputs=self._inputs())
        check_vector(kind, "head" in self.record)
        if kind == "task-vector":
            names = {name: self.target.file_names[name] for name in self.task_vector}
            save_task_vector(out, self.task_vector.rename(names), {"record": to_json(record)}, overwrite=overwrite)
            return out
        packed = self._packed(rank, energy) if kind == "adapter" else None
        with new_folder(out, overwrite=overwrite) as folder:
            if packed is not None:
                write_adapter(folder, packed.adapter)
                asked = {"as": kind, "rank": rank, "energy": energy}
                record["options"] = {**record.get("options", {}), **asked}
                record = _adapter_record(record, packed, self.target)
            else:
                copy_companions(self.target.folder, folder)
                self.target.write(folder, self.tensors())
            (folder / "README.md").write_text(model_card(record, self.target.library), encoding="utf-8")
            (folder / "report.html").write_text(report_page(record), encoding="utf-8")
            write_record(folder / "tuneport.json", record)
        return out

    def _inputs(self) -> list[Path]:
        """The known paths of the models and the data of the transfer."""
        paths = [self.record.get(key, {}).get("path") for key in ("source", "finetuned", "target", "data")]
        known = [path_of(path) for path in paths if path]
        return known if self.target.folder is None else [*known, self.target.folder]

    def _packed(self, rank: int | None, energy: float | None) -> Packed:
        base = self.target.stored_parameters()
        source = self.record.get("finetuned", {}).get("adapter", {})
        about = {
            "base_model_name_or_path": self.target.name if self.target.folder is not None else None,
            "task_type": source.get("task_type"),
        }
        return pack(self.task_vector, self.target.module, base, scale=self.scale, rank=rank, energy=energy, about=about)


def check_output(
    out: str | Path, kind: OutputKind, overwrite: bool, *, inputs: Iterable[Path] = (), needed_bytes: int = 0
) -> None:
    """Refuse an unknown kind, an output that must not be replaced, and one that does not fit on the disk."""
    if kind == "task-vector":
        check_new_file(out, overwrite, needed_bytes=needed_bytes, inputs=inputs)
    elif kind in ("model", "adapter"):
        check_new_folder(out, overwrite, needed_bytes=needed_bytes, inputs=inputs)
    else:
        raise TuneportError(f"a transfer can be saved as model, adapter or task-vector, not as {kind!r}.")


def output_bytes(target: Model, kind: OutputKind, updates: Iterable[tuple[tuple[int, int], int | None]]) -> int:
    """The expected size of an output; a CheckpointError if a companion of the target cannot be copied to it.

    `updates` are the shapes of the updates, each with its rank, or None where it is dense.
    """
    if kind == "model":
        weights = sum(describe(target.tensors, name).nbytes for name in target.tensors)
        return weights + companion_bytes(target.folder) + TEXTS
    numbers = sum(math.prod(shape) if rank is None else rank * sum(shape) for shape, rank in updates)
    return 4 * numbers + (TEXTS if kind == "adapter" else 0)


def updates_of(
    job: Job, method: Method, kind: OutputKind, rank: int | None
) -> Iterator[tuple[tuple[int, int], int | None]]:
    """The shape and the rank of each update that a transfer writes; a rank that is chosen later counts as one."""
    for pair in job.plan.pairs:
        shape, weight = (pair.target.out_features, pair.target.in_features), pair.source.weight
        own = job.task_vector.spec(weight).rank if method.keeps_rank and weight in job.task_vector else None
        yield shape, min(rank or own or 1, *shape) if kind == "adapter" else own


def check_vector(kind: OutputKind, fitted: bool) -> None:
    """Refuse to write a fitted head as a task vector: it is not a difference from the target's files."""
    if kind == "task-vector" and fitted:
        raise TuneportError(
            'a task vector cannot hold a fitted head: write a model or an adapter, or pass `head_fit="none"`.'
        )


def check_adapter(job: Job, method: Method, rank: int | None, energy: float | None) -> None:
    """Refuse, before anything is measured, a transfer whose result cannot be written as an adapter as asked."""
    if rank is None and energy is None:
        names = {pair.source.weight for pair in job.plan.pairs}
        dense = [name for name in names if job.task_vector.spec(name).rank is None]
        if dense:
            raise TuneportError(
                f"{len(dense)} of {len(names)} updates are not low-rank ({first_of(sorted(dense), 3)}): pass `rank=R` "
                "or `energy=0.95` to make an adapter of them (`energy=1` is exact)."
            )
        if not method.keeps_rank:
            raise TuneportError(f"method {name_of(method)} makes dense updates: pass `rank=R` or `energy=0.95`.")
    weights = {pair.target.weight for pair in job.plan.pairs}
    homeless = no_place(job.target.module, weights)
    if len(homeless) == len(weights):
        reasons = first_of(f"{name}: {reason}" for name, reason in homeless.items())
        raise TuneportError(f'no layer of the target can be written as a LoRA ({reasons}). Use `kind="model"`.')


def _adapter_record(record: Mapping[str, Any], packed: Packed, target: Model) -> dict[str, Any]:
    """The record of a transfer that was written as an adapter: ranks, what they cost, what has no place in it."""
    kept = [{"tensor": target.file_names[name], "reason": reason} for name, reason in packed.kept.items()]
    weights = {layer.name: layer.weight for layer in target.layers}
    return {
        **record,
        "layers": [layer for layer in record["layers"] if weights.get(layer["target"]) not in packed.kept],
        "not_transported": [*record["not_transported"], *kept],
        "adapter": {"rank": packed.adapter.config["r"], "modules": [asdict(item) for item in packed.modules]},
    }
