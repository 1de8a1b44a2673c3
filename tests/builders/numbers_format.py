"""A format of outputs that the package does not have: the change as lists of numbers in one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch

from tuneport.errors import CheckpointError, TuneportError
from tuneport.io.checkpoint import LARGEST_INDEX, read_json
from tuneport.io.fingerprint import weights_fingerprint
from tuneport.io.output import new_file
from tuneport.io.places import local
from tuneport.methods import Method
from tuneport.models.open import open_stored
from tuneport.outputs import Output, Update
from tuneport.outputs.base import Texts
from tuneport.pairing import Plan
from tuneport.report.record import Record, to_json
from tuneport.task_vectors.stored import StoredChange
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Format

NUMBERS = Format(
    "builders.numbers_format:NumbersOutput",
    "lists of numbers for {target[name]}",
    ".json",
    reader="builders.numbers_format:read_numbers",
    students=False,
)


class NumbersOutput(Output):
    name: ClassVar[str] = "numbers"
    asks_base: ClassVar[bool] = False  # a change is written without it, too

    def check_update(self, update: Update) -> None:
        if update.fits_head:  # it is whole, no change
            raise TuneportError('lists of numbers hold no fitted head: write a model, or pass `head_fit="none"`.')

    def size(self, plan: Plan, update: Update, method: Method) -> int:
        del update, method  # factors of a LoRA are written as their product
        return 24 * sum(pair.target.out_features * pair.target.in_features for pair in plan.pairs)  # characters

    def write(self, out: Path, update: Update, record: Record, overwrite: bool, texts: Texts = None) -> Record:
        del texts
        return self.write_change(out, update.in_files(), record["target"]["path"], record, overwrite)

    def write_change(self, out: Path, vector: TaskVector, base: str | None, record: Record, overwrite: bool) -> Record:
        numbers = {name: vector.dense(name).tolist() for name in vector}
        stored = {} if base is None else open_stored(local(base)).tensors
        about = {"base": base, "base_fingerprint": weights_fingerprint(stored) if stored else ""}
        with new_file(out, overwrite=overwrite) as file:
            file.write_text(json.dumps({"numbers": numbers, **about, "record": json.loads(to_json(record))}))
        return record

    def rewrite(self, out: Path, record: Record, library: str | None) -> None:
        del library
        text = json.dumps({**json.loads(out.read_text()), "record": json.loads(to_json(record))})
        with new_file(out, overwrite=True) as file:
            file.write_text(text)

    def read_record(self, out: Path) -> Any:
        return json.loads(out.read_text())["record"]


def read_numbers(path: Path) -> StoredChange | None:
    """The change in a file of this format; None for every other path, and an error for a damaged file."""
    if path.suffix != ".json" or not path.is_file():
        return None
    found = read_json(path, "lists of numbers", limit=LARGEST_INDEX)  # bounded, since others write such files, too
    if "numbers" not in found:
        return None
    try:
        vector = TaskVector({str(name): torch.tensor(rows) for name, rows in found["numbers"].items()})
        base, fingerprint = found["base"], str(found["base_fingerprint"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from error
    return StoredChange(vector, (path,), None if base is None else str(base), fingerprint)
