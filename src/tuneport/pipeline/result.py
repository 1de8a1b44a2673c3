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

from ..errors import TuneportError
from ..io.checkpoint import open_checkpoint
from ..io.companions import companion_bytes, copy_companions
from ..io.fingerprint import weights_fingerprint
from ..io.output import check_new_file, check_new_folder, new_file, new_folder
from ..io.tensors import LazyTensors, describe
from ..job import Drawn, Job, Part
from ..methods import LayerRecord, Method
from ..models.base import Model
from ..models.open import path_of
from ..pairing import Kept
from ..report.card import model_card
from ..report.page import report_page
from ..report.record import to_json, write_record
from ..task_vectors.lora_format import write_adapter
from ..task_vectors.lora_read import task_vector_of, transposed_weights, whole_tensors
from ..task_vectors.lora_write import UNCUT, AdapterForm, Packed, pack
from ..task_vectors.vector import TaskVector, load_task_vector, save_task_vector
from ..training.distill import STEPS, Lesson, Mark, divide
from ..training.state import StateFile
from ..types import Blocks, OutputKind, Progress
from .adapter import adapter_facts, adapter_record, whole_head
from .distill import teach
from .heads import fit_head
from .moved import account
from .outcome import outcome_of

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
    parts: tuple[Part, ...] = ()  # all that the fine-tune changed

    def __repr__(self) -> str:
        moved = f"{len(self.records)} layers moved, {len(self.not_transported)} tensors stay"
        return f"Result({self.target.name}: {self.record.get('method', 'a transfer')} at scale {self.scale:g}, {moved})"

    def change(self, scale: float | None = None) -> TaskVector:
        """What is added to the target, under the names in its files."""
        names = {name: self.target.file_names[name] for name in self.task_vector}
        return self.task_vector.rename(names) * (self.scale if scale is None else scale)

    def tensors(self, scale: float | None = None) -> Mapping[str, Tensor]:
        """The new model's tensors under their names in the files, in the target's dtypes, computed when read."""
        return self.change(scale).apply_to(self.target.tensors)

    def written(self, kind: OutputKind = "model", form: AdapterForm = UNCUT) -> Mapping[str, Tensor]:
        """The parameters that `save` changes, by live names, as they are read from what it writes."""
        base, vector, head = self.target.stored_parameters(), self.task_vector * self.scale, {}
        if kind == "adapter":
            adapter, turned = self._packed(form).adapter, transposed_weights(self.target.module)
            vector = task_vector_of(adapter, base, transposed=turned, head=self.target.head)
            head = whole_tensors(adapter, self.target.head)
        new = vector.apply_to(base)
        return LazyTensors([*vector, *head], lambda name: head[name] if name in head else new[name])

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
        batch_size: int | None = None,
        blocks: Blocks = "all",
        progress: Progress | None = None,
        watch: Callable[[Mark], None] | None = None,
        saved: StateFile | None = None,
    ) -> Result:
        """Let the fine-tuned source teach the ported target on the calibration samples; no label is used.

        A tenth of the samples is held out. The result is the state whose answers there are nearest to the teacher's, or
        of a language model that reads texts the one that predicts these best, and that may be this transfer as it is.

        Args:
            steps: updates of the student.
            learning_rate: the highest, after the warm-up; by default it follows from the target's width.
            lora: train a LoRA of this rank in place of all linear layers, from the best fit of the transfer.
            batch_size: samples of an update; by default it follows from what is compared.
            blocks: train "all", or only the "last", which is quicker on a CPU; for images.
            progress: called with 1 after each step.
            watch: called with each point of the curve.
            saved: keeps the state of the run, and gives back that of a killed one.
        """
        if self.job is None:
            raise TuneportError("this result does not know the models and samples that it was made from.")
        lesson = Lesson(steps, learning_rate, lora, self.job.seed, batch_size, blocks)
        target = self.target
        if self.job.fits_head and isinstance(self.job.samples, Drawn):  # held-out samples must not have fitted it
            target = target.with_head(fit_head(target, self.apply(), divide(self.job.samples)[1]))
        vector, entry = teach(
            self.job.samples,
            target,
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
        record |= asdict(outcome_of(None, scale=1.0, distilled=True))
        return replace(self, target=target, task_vector=vector, scale=1.0, not_transported=kept, record=record)

    def save(
        self,
        out: str | Path,
        *,
        kind: OutputKind = "model",
        rank: int | None = None,
        energy: float | None = None,
        uniform_rank: bool = False,
        adapter_dtype: str = "float32",
        overwrite: bool = False,
    ) -> Path:
        """Write the new model as a folder that its own library loads, a LoRA adapter, or the task vector as one file.

        An output that holds what the transfer was made from is refused, also with `overwrite`.

        Args:
            out: a folder, or a file for a task vector, which holds the change at the scale of the result.
            kind: "model", "adapter" or "task-vector".
            rank, energy, uniform_rank, adapter_dtype: of an adapter, see `AdapterForm`.
            overwrite: replace an existing output.
        """
        form = AdapterForm(rank, energy, uniform_rank, adapter_dtype)
        out = Path(out)
        place = self.record.get("out", str(out))  # a record may know where the folder will be moved to
        record = {**self.record, "out": place, "as": kind}
        check_output(out, kind, overwrite, inputs=self._inputs())
        check_vector(kind, "head" in self.record)
        if kind == "task-vector":
            about = {"record": to_json(record), "base_fingerprint": weights_fingerprint(self.target.tensors)}
            save_task_vector(out, self.change(), about, overwrite=overwrite)
            return out
        packed = self._packed(form) if kind == "adapter" else None
        with new_folder(out, overwrite=overwrite) as folder:
            if packed is not None:
                write_adapter(folder, packed.adapter)
                record["options"] = {**record.get("options", {}), "as": kind, **asdict(form)}
                record["base_fingerprint"] = weights_fingerprint(self.target.tensors)
                moved = account(self.parts, packed.kept) if self.parts else {}
                record = {**adapter_record(record, packed, self.target), **moved}
            else:
                copy_companions(self.target.folder, folder)
                self.target.write(folder, self.tensors())
            for name, text in _texts(record, self.target.library).items():
                (folder / name).write_text(text, encoding="utf-8")
            write_record(folder / "tuneport.json", record)
        return out

    def _inputs(self) -> list[Path]:
        """The known paths of the models and the data of the transfer."""
        parts = [self.record.get(key, {}) for key in ("source", "finetuned", "target", "data")]
        paths = [part.get("path") for part in (*parts, *parts[1].get("parts", ()))]
        known = [path_of(path) for path in paths if path]
        return known if self.target.folder is None else [*known, self.target.folder]

    def _packed(self, form: AdapterForm) -> Packed:
        task = self.record.get("finetuned", {}).get("adapter", {}).get("task_type")
        about = adapter_facts(self.target, task)
        return pack(
            self.task_vector,
            self.target.module,
            self.target.stored_parameters(),
            form,
            scale=self.scale,
            head=whole_head(self.target, self.task_vector, "head" in self.record),
            about=about,
        )


def _texts(record: Mapping[str, Any], library: str | None) -> dict[str, str]:
    """Return the files for people: the model card and the report."""
    return {"README.md": model_card(record, library), "report.html": report_page(record)}


def rewrite(out: Path, kind: OutputKind, record: Mapping[str, Any], library: str | None) -> None:
    """Put another record into an output, in place of its own, with the card and the report that follow from it."""
    if kind == "task-vector":
        about = {**open_checkpoint(out).metadata, "record": to_json(record)}
        save_task_vector(out, load_task_vector(out), about, overwrite=True)
        return
    for name, text in {**_texts(record, library), "tuneport.json": to_json(record) + "\n"}.items():
        with new_file(out / name, overwrite=True) as file:
            file.write_text(text, encoding="utf-8")


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
