"""Fine-tuning by the paper's protocol, from what a user gives to a folder that the model's library loads.

The tower is trained and the head stays frozen. The folder appears when the run is complete; a run that stops
leaves nothing. Accuracies in the record are those of the validation split, never of the test split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..data.dataset import Dataset, align_labels
from ..data.tasks import read_data, split_reference
from ..errors import DataError
from ..io.companions import copy_companions
from ..io.hub import looks_like_hub_id
from ..io.output import check_new_folder, claimed, new_folder
from ..io.tensors import describe
from ..measure.accuracy import zero_shot
from ..models.base import Head, Model, choose_head
from ..models.open import open_model
from ..models.opening import pick_device
from ..report.provenance import data_identity, identity_of, package_version, versions
from ..report.record import training_card, write_record
from ..types import Progress
from .finetuning import Schedule, finetune

CHECKPOINTS = "checkpoints"
PROTOCOL = Schedule(steps=2000, batch_size=128, learning_rate=1e-5, weight_decay=0.1, warmup=200)
LOG_EVERY = 50  # steps between two losses in the record


@dataclass(frozen=True)
class Training:
    """A fine-tuning run that has been checked whole."""

    model: Model
    head: Head
    train: Dataset
    validation: Dataset | None
    schedule: Schedule
    record: Mapping[str, Any]


def prepare_training(
    model: str | Path,
    data: str | Path,
    schedule: Schedule = PROTOCOL,
    *,
    head: str | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Training:
    """Open the model and the training split, choose the head, match the labels: nothing is left to go wrong."""
    opened = open_model(model, device=pick_device(device), trust_remote_code=trust_remote_code)
    train = read_data(data, "train")
    task, place = split_reference(data)
    validation = task.read(place, "validation") if task is not None else None
    chosen = choose_head(opened, head, train.name, train.classes, train.prompts, train.label_texts)
    align_labels(train, chosen.classes)
    if train.kind != opened.kind:
        raise DataError(f"{train.name} holds {train.kind}s, but {opened.name} reads {opened.kind}s.")
    about = data_identity(place, train, np.arange(len(train)), (chosen,))
    about.pop("indices")  # all of them
    record = {
        "tuneport": package_version("tuneport"),
        "command": "finetune",
        "model": identity_of(opened),
        "data": about,
        "options": {**asdict(schedule), "head": head, "device": str(opened.device)},
        "versions": versions(),
    }
    return Training(opened, chosen, train, validation, schedule, record)


def run_training(
    training: Training,
    out: str | Path,
    *,
    checkpoint_every: int = 0,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune and write OUT, with a loadable folder OUT/checkpoints/step-N every so many steps; return the record."""
    out, model, schedule = Path(out), training.model, training.schedule
    stops = range(checkpoint_every, schedule.steps + 1, checkpoint_every) if checkpoint_every else range(0)
    size = sum(describe(model.tensors, name).nbytes for name in model.tensors)
    inputs = [] if model.folder is None or looks_like_hub_id(model.name) else [model.folder]
    check_new_folder(out, overwrite, needed_bytes=(1 + len(stops)) * size, inputs=inputs)
    started = time.perf_counter()
    losses: list[dict[str, float]] = []
    history: list[dict[str, Any]] = []
    with claimed(out), new_folder(out, overwrite=overwrite) as folder:
        run = finetune(
            model,
            training.head,
            training.train,
            schedule,
            at=tuple(stops),
            progress=progress,
            log=_logger(schedule.steps, losses),
        )
        for step, module in run:
            place = folder / CHECKPOINTS / f"step-{step:06}"
            if step in stops:
                place.mkdir(parents=True)
                write_model(model, module, place)
                history.append({"step": step, "folder": f"{CHECKPOINTS}/{place.name}", **_validated(training, module)})
            if step == schedule.steps:
                write_model(model, module, folder)
                final = _validated(training, module)
        record = {
            **training.record,
            "out": str(out),
            "steps": schedule.steps,
            "samples": len(training.train),
            "seconds": round(time.perf_counter() - started, 3),
            "losses": losses,
            "checkpoints": history,
            **final,
        }
        write_record(folder / "tuneport.json", record)
        (folder / "README.md").write_text(training_card(record), encoding="utf-8")
    return record


def write_model(model: Model, module: nn.Module, folder: Path) -> None:
    """The module's weights in the layout and dtypes of the model that it is a copy of, and what stands beside them."""
    copy_companions(model.folder, folder)
    live = {model.file_names[name]: parameter for name, parameter in module.named_parameters()}

    def stored(name: str) -> Tensor:
        if name not in live:
            return model.tensors[name]
        return live[name].detach().to("cpu", describe(model.tensors, name).dtype).contiguous()

    model.write(folder, {name: stored(name) for name in model.tensors})


def _validated(training: Training, module: nn.Module) -> dict[str, float]:
    if training.validation is None:
        return {}
    found = zero_shot(training.model.with_module(module), training.head, training.validation)
    return {"validation_accuracy": found.accuracy}


def _logger(steps: int, losses: list[dict[str, float]]) -> Callable[[int, Tensor], None]:
    """Means over the steps since the last entry; the device is waited for only then."""
    waiting: list[Tensor] = []

    def log(step: int, loss: Tensor) -> None:
        waiting.append(loss)
        if step % LOG_EVERY == 0 or step == steps:
            losses.append({"step": step, "loss": float(torch.stack(waiting).mean())})
            waiting.clear()

    return log
