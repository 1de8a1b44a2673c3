"""The contract of an output format: what is checked before any work, written, and read again; models, task vectors."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..errors import TuneportError, first_of
from ..io.checkpoint import open_checkpoint, read_record
from ..io.fingerprint import weights_fingerprint
from ..io.output import check_new, new_file, new_folder
from ..io.places import companion_bytes, copy_companions, local, path_of
from ..io.tensors import check_unquantised, describe
from ..methods import Method
from ..models.base import Model
from ..models.open import open_stored
from ..models.weights import Scaled
from ..pairing import Plan
from ..report.card import model_card
from ..report.page import report_page
from ..report.record import Record, to_json, write_record
from ..report.summary import data_reference, evaluate_command
from ..task_vectors.vector import Part, TaskVector, load_task_vector, save_task_vector
from ..types import FORMATS

Texts = Mapping[str, str] | None  # by file name, beside the weights
TEXTS = 2**20  # bytes that card, record and report take at most, except for models of thousands of layers


@dataclass(frozen=True, eq=False)
class Update:
    """What a transfer changes in a target."""

    target: Model  # with its fitted head if it has one
    vector: TaskVector  # the change, by live names
    scale: float = 1.0
    fits_head: bool = False
    task_type: str | None = None  # peft's name of the task of the fine-tune, if it is an adapter
    parts: tuple[Part, ...] = ()  # all that the fine-tune changed, for the account of what moves

    def in_files(self) -> TaskVector:
        """The scaled change under the names in the target's files."""
        names = {name: self.target.weights.file_names[name] for name in self.vector}
        return self.vector.rename(names) * self.scale


class Output(ABC):
    """A format of outputs; `types.FORMATS` has what is known of it before torch is loaded."""

    name: ClassVar[str]
    asks_base: ClassVar[bool] = True  # a merge must know the base, which is never None then

    def check_place(self, out: Path, overwrite: bool, *, inputs: Iterable[Path] = (), needed_bytes: int = 0) -> None:
        """Refuse an output that must not be replaced, or that does not fit on the disk."""
        check_new(out, overwrite, suffix=FORMATS[self.name].suffix, needed_bytes=needed_bytes, inputs=inputs)

    def check(self, plan: Plan, update: Update, method: Method) -> None:
        """Refuse, before anything is measured, a transfer whose result cannot be written.

        `update` has the task vector of the *source*, whose ranks the method may keep.
        """
        del plan, method
        self.check_update(update)

    def check_update(self, update: Update) -> None:
        """Refuse a change that cannot be written."""
        del update

    @abstractmethod
    def size(self, plan: Plan, update: Update, method: Method) -> int:
        """The expected number of bytes of the output; the arguments are those of `check`."""

    @abstractmethod
    def write(self, out: Path, update: Update, record: Record, overwrite: bool, texts: Texts = None) -> Record:
        """Write the output, its record and `texts` by file name; return the record as it was written."""

    @abstractmethod
    def write_change(self, out: Path, vector: TaskVector, base: str | None, record: Record, overwrite: bool) -> Record:
        """Write a change of a base, by the names in its files, and a record; return the record with what it lacked."""

    def rewrite(self, out: Path, record: Record, library: str | None) -> None:
        """Put another record into an output, in place of its own, with the card and the report that follow from it."""
        parts = {**texts_of(record, library), "tuneport.json": to_json(record) + "\n"}
        for name, text in parts.items():
            with new_file(out / name, overwrite=True) as file:
                file.write_text(text, encoding="utf-8")

    def read_record(self, out: Path) -> Any:
        """The run record of an output; an error of any kind if there is none."""
        return read_record(out)

    def next_commands(self, record: Record) -> list[str]:
        """Commands that work on a written output: its evaluation, if the data allow it."""
        place = data_reference(record)
        return [evaluate_command(record, record["out"], place)] if "protocol" in record["data"] and place else []

    def new_parameters(self, update: Update) -> Mapping[str, Tensor]:
        """The parameters that `write` changes, by live names, as they are read from what it writes."""
        return (update.vector * update.scale).apply_to(update.target.stored_parameters())

    def scaled(self, update: Update) -> Scaled:
        """The target with the change as it will be written, for any scale."""
        target = update.target
        return Scaled(target.module, update.vector, target.stored_parameters())


def update_bytes(plan: Plan, vector: TaskVector, method: Method, lora: int | None = None) -> int:
    """The bytes of all updates in float32; `vector` is that of the source, whose ranks the method may keep.

    `lora` is the rank of a LoRA; 0 if it is chosen later, which counts as one; None for dense updates.
    """
    numbers = 0
    for pair in plan.pairs:
        shape, weight = (pair.target.out_features, pair.target.in_features), pair.source.weight
        rank = vector.spec(weight).rank if method.keeps_rank and weight in vector else None
        if lora is not None:
            rank = min(lora or rank or 1, *shape)
        numbers += math.prod(shape) if rank is None else rank * sum(shape)
    return 4 * numbers


def texts_of(record: Record, library: str | None) -> dict[str, str]:
    """The files for people: the model card and the report."""
    return {"README.md": model_card(record, library), "report.html": report_page(record)}


def write_texts(folder: Path, record: Record, library: str | None, more: Mapping[str, str] | None = None) -> Record:
    """Write the card, the report, more texts and the record next to the weights; the record is last and returned."""
    for name, text in {**texts_of(record, library), **(more or {})}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return write_record(folder / "tuneport.json", record)


class ModelOutput(Output):
    """The target with the change, in the layout of its library."""

    name: ClassVar[str] = "model"

    def size(self, plan: Plan, update: Update, method: Method) -> int:
        del plan, method
        weights = update.target.weights
        held = sum(describe(weights.tensors, name).nbytes for name in weights.tensors)
        return held + companion_bytes(weights.folder) + TEXTS

    def write(self, out: Path, update: Update, record: Record, overwrite: bool, texts: Texts = None) -> Record:
        target, change, lost = update.target, update.in_files(), set[str]()
        with new_folder(out, overwrite=overwrite) as folder:
            copy_companions(target.weights.folder, folder)
            target.weights.write(folder, change.apply_to(target.weights.tensors, lost=lost))
            return write_texts(folder, _noted(record, lost, change), target.weights.library, texts)

    def write_change(
        self, out: Path, vector: TaskVector, base: str | None, record: Record, overwrite: bool, scale: float = 1.0
    ) -> Record:
        assert base is not None
        stored, lost = open_stored(place := local(base)), set[str]()
        check_unquantised(stored.tensors, vector)
        tensors = vector.apply_to(stored.tensors, scale, lost)
        size = companion_bytes(stored.folder) + sum(describe(stored.tensors, name).nbytes for name in stored.tensors)
        self.check_place(out, overwrite, needed_bytes=size, inputs=[path_of(place)])
        with new_folder(out, overwrite=overwrite) as folder:
            copy_companions(stored.folder, folder)
            stored.write(folder, tensors)
            record = _noted(record, lost, vector)
            write_record(folder / "tuneport.json", record)
        return record


def _noted(record: Record, lost: Collection[str], change: TaskVector) -> Record:
    """The record with a note on the tensors whose change was lost when it was written."""
    if not lost:
        return record
    words = f"the change of {len(lost)} of {len(change)} tensors is too small for their dtype and is lost"
    note = f"{words} ({first_of(sorted(lost), 3)}): weights in float32 keep it"
    return {**record, "notes": [*record.get("notes", ()), note]}


class TaskVectorOutput(Output):
    """The change of the target as one file."""

    name: ClassVar[str] = "task-vector"
    asks_base: ClassVar[bool] = False

    def check_update(self, update: Update) -> None:
        """Refuse a fitted head: it is not a difference from the target's files."""
        if update.fits_head:
            raise TuneportError(
                'a task vector cannot hold a fitted head: write a model or an adapter, or pass `head_fit="none"`.'
            )

    def size(self, plan: Plan, update: Update, method: Method) -> int:
        return update_bytes(plan, update.vector, method)

    def write(self, out: Path, update: Update, record: Record, overwrite: bool, texts: Texts = None) -> Record:
        del texts  # the file holds the record only
        about = {"record": to_json(record), "base_fingerprint": weights_fingerprint(update.target.weights.tensors)}
        save_task_vector(out, update.in_files(), about, overwrite=overwrite)
        return record

    def write_change(self, out: Path, vector: TaskVector, base: str | None, record: Record, overwrite: bool) -> Record:
        about = {}
        if base is not None:
            about = {"base": base, "base_fingerprint": weights_fingerprint(open_stored(local(base)).tensors)}
        save_task_vector(out, vector, {**about, "merged": to_json(record)}, overwrite=overwrite)
        return record

    def rewrite(self, out: Path, record: Record, library: str | None) -> None:
        del library
        about = {**open_checkpoint(out).metadata, "record": to_json(record)}
        save_task_vector(out, load_task_vector(out), about, overwrite=True)

    def read_record(self, out: Path) -> Any:
        return json.loads(open_checkpoint(out).metadata["record"])
