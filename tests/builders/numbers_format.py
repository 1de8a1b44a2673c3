"""A format of outputs that the package does not have: the change as lists of numbers in one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch

from tuneport.io.output import new_file
from tuneport.methods import Method
from tuneport.outputs import Output, Update
from tuneport.outputs.base import Stated, Texts, update_bytes
from tuneport.pairing import Plan
from tuneport.report.record import Record, to_json
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Format

NUMBERS = Format("builders.numbers_format:NumbersOutput", "lists of numbers for {target[name]}", ".json")


class NumbersOutput(Output):
    name: ClassVar[str] = "numbers"

    def size(self, plan: Plan, update: Update, method: Method) -> int:
        return 6 * update_bytes(plan, update.vector, method)

    def write(self, out: Path, update: Update, record: Record, overwrite: bool, texts: Texts = None) -> Record:
        del texts
        return self.write_change(out, update.in_files(), None, record, overwrite)

    def write_change(self, out: Path, vector: TaskVector, base: str | None, record: Record, overwrite: bool) -> Record:
        numbers = {name: vector.dense(name).tolist() for name in vector}
        with new_file(out, overwrite=overwrite) as file:
            file.write_text(json.dumps({"numbers": numbers, "base": base, "record": json.loads(to_json(record))}))
        return record

    def rewrite(self, out: Path, record: Record, library: str | None) -> None:
        del library
        text = json.dumps({**json.loads(out.read_text()), "record": json.loads(to_json(record))})
        with new_file(out, overwrite=True) as file:
            file.write_text(text)

    def read_record(self, out: Path) -> Any:
        return json.loads(out.read_text())["record"]

    def stated(self, out: Path) -> Stated | None:
        if out.suffix != ".json":
            return None
        found = json.loads(out.read_text())
        base = found["base"] or found["record"]["target"]["path"]
        return TaskVector({name: torch.tensor(rows) for name, rows in found["numbers"].items()}), base
