"""A model folder that its own library loads; tensors are computed one by one as they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from ..io.companions import companion_bytes, copy_companions
from ..io.output import new_folder
from ..io.tensors import describe
from ..methods import Method
from ..pairing import Plan
from ..report.record import Record
from .base import TEXTS, Output, Update, write_texts


class ModelOutput(Output):
    """The target with the change, in the layout of its library."""

    name: ClassVar[str] = "model"

    def size(self, plan: Plan, update: Update, method: Method) -> int:
        del plan, method
        tensors = update.target.weights.tensors
        return (
            sum(describe(tensors, name).nbytes for name in tensors)
            + companion_bytes(update.target.weights.folder)
            + TEXTS
        )

    def write(
        self, out: Path, update: Update, record: Record, *, overwrite: bool, texts: Mapping[str, str] | None = None
    ) -> Record:
        target = update.target
        with new_folder(out, overwrite=overwrite) as folder:
            copy_companions(target.weights.folder, folder)
            target.weights.write(folder, update.in_files().apply_to(target.weights.tensors))
            return write_texts(folder, record, target.weights.library, texts)
