"""A task vector: one safetensors file with the change at its scale, and the record in its metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..errors import TuneportError
from ..io.checkpoint import open_checkpoint
from ..io.fingerprint import weights_fingerprint
from ..methods import Method
from ..pairing import Plan
from ..report.record import Record, to_json
from ..task_vectors.vector import load_task_vector, save_task_vector
from .base import Output, Update, update_bytes


class TaskVectorOutput(Output):
    """The change of the target as one file."""

    name: ClassVar[str] = "task-vector"

    def check_update(self, update: Update) -> None:
        """Refuse a fitted head: it is not a difference from the target's files."""
        if update.fits_head:
            raise TuneportError(
                'a task vector cannot hold a fitted head: write a model or an adapter, or pass `head_fit="none"`.'
            )

    def size(self, plan: Plan, update: Update, method: Method) -> int:
        return update_bytes(plan, update.vector, method)

    def write(
        self, out: Path, update: Update, record: Record, *, overwrite: bool, texts: Mapping[str, str] | None = None
    ) -> Record:
        del texts  # the file holds the record only
        about = {"record": to_json(record), "base_fingerprint": weights_fingerprint(update.target.weights.tensors)}
        save_task_vector(out, update.in_files(), about, overwrite=overwrite)
        return record

    def rewrite(self, out: Path, record: Record, library: str | None) -> None:
        del library
        about = {**open_checkpoint(out).metadata, "record": to_json(record)}
        save_task_vector(out, load_task_vector(out), about, overwrite=True)

    def read_record(self, out: Path) -> Any:
        return json.loads(open_checkpoint(out).metadata["record"])
