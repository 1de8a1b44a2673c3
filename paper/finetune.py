"""Fine-tuning by the paper's protocol: the tower is trained with labels, and the head stays frozen.

An encoder-decoder without a head learns to write the words for the labels instead.

    python -m paper.finetune MODEL --data DATA --out OUT

`finetune` trains a copy in memory; `prepare_training` and `run_training` go from paths to a folder that the model's
library loads. The folder appears only when the run is complete. Accuracies in the record are those of the validation
split, never of the test split.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tuneport.cli.terminal import Bar
from tuneport.data.dataset import UNLABELLED, Dataset, align_labels, with_prompts
from tuneport.data.samplers import select
from tuneport.data.tasks import read_data, split_reference
from tuneport.errors import TuneportError
from tuneport.io.output import check_new, new_folder
from tuneport.io.places import companion_bytes, copy_companions, looks_like_hub_id
from tuneport.io.tensors import describe
from tuneport.measure.accuracy import encode_batch, zero_shot
from tuneport.measure.objectives import batch_for, choose_objective
from tuneport.models.base import Model, outside_of
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model, pick_device
from tuneport.report.provenance import data_identity, identity_of, package_version, versions
from tuneport.report.record import write_record
from tuneport.training.loop import Pace, Schedule, run_steps
from tuneport.types import Progress

CHECKPOINTS = "checkpoints"
CACHE_BYTES = 2 * 2**30  # encoded inputs up to this size are cached; larger datasets are encoded batch by batch
CARD = """# A fine-tune by the protocol of the BiCo paper

{steps} steps of AdamW on {} samples, batch {batch_size}, learning rate {learning_rate:g}, weight decay
{weight_decay:g}, cosine after a warm-up, seed {seed}, head frozen. `tuneport.json` names the model and the data, with
every option, the versions and the SHA-256 of the inputs. The licences of the base model and of the data apply.
"""
PROTOCOL = Schedule(steps=2000, batch_size=128, learning_rate=1e-5, weight_decay=0.1, warmup=200)  # of the paper


def finetune(
    model: Model,
    head: Head | None,
    data: Dataset,
    schedule: Schedule,
    *,
    at: Sequence[int] = (),
    progress: Progress | None = None,
    log: Callable[[Tensor], object] | None = None,
    pass_size: int = 128,
    check_every: int = 50,
    cache_bytes: int = CACHE_BYTES,
) -> Iterator[tuple[int, nn.Module]]:
    """Fine-tune a copy of the model's tower with the head frozen; yield (step, module) at the given steps.

    The last step is always yielded. The yielded module continues to train: use it before the next iteration.
    A run that diverges is a TuneportError, raised before a module with NaN is yielded.

    Args:
        model: the model, which is not changed.
        head: the head that classifies the tower's features; None to learn the texts of the samples.
        data: labelled samples.
        schedule: steps, batches and learning rates.
        at: steps to yield at.
        progress: called with 1 after each step.
        log: called with the loss of each step, which stays on its device.
        pass_size: samples in one forward and backward pass; gradients of a larger batch are accumulated.
        check_every: steps between two checks of the losses, for which the device is synchronised.
        cache_bytes: the largest size of encoded inputs that are cached.
    """
    if schedule.steps < 1:
        raise TuneportError(f"fine-tuning needs at least one step, got {schedule.steps}.")
    module = _trainable(model)
    stops = {*at, schedule.steps}
    loss_of = _text_loss(model, module, data) if head is None else _class_loss(model, module, head, data, cache_bytes)

    what = f"the fine-tuning of {model.name} on {data.name}"
    run = run_steps(
        what,
        module,
        schedule.optimizer(module),
        schedule,
        len(data),
        loss_of,
        Pace(stops=stops, pass_size=pass_size, check_every=check_every),
    )
    for step, loss in run:
        if progress is not None:
            progress(1)
        if log is not None:
            log(loss)
        if step in stops:
            module.eval()
            yield step, module
            module.train(step < schedule.steps)  # the last one stays in evaluation mode


def _class_loss(
    model: Model, module: nn.Module, head: Head, data: Dataset, cache_bytes: int
) -> Callable[[int, Tensor], Tensor]:
    """The mean loss of a batch of rows by their classes."""
    batch_of = batch_reader(model, align_labels(data, head.classes), cache_bytes)

    def loss_of(_step: int, rows: Tensor) -> Tensor:
        batch, labels = batch_of(rows)
        return F.cross_entropy(head.scores(model, module, batch), labels)

    return loss_of


def _text_loss(model: Model, module: nn.Module, data: Dataset) -> Callable[[int, Tensor], Tensor]:
    """The mean loss of the tokens that a batch of rows is to write."""
    data = with_prompts(data)
    objective = choose_objective(data, [model])
    total = objective.loss(model, None)

    def loss_of(_step: int, rows: Tensor) -> Tensor:
        batch = batch_for(model, objective.encode(model, data.subset(rows.numpy())))
        return total(module, batch) / (batch[1] != UNLABELLED).sum()

    return loss_of


@dataclass(frozen=True)
class Training:
    """A checked fine-tuning run."""

    model: Model
    head: Head | None
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
    samples: int | None = None,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Training:
    """Open the model and the training split, choose the head and align the labels, before any training.

    Args:
        model: path or id of the model.
        data: path of the data, or `TASK:PATH`; only a task has a validation split.
        schedule: steps, batches and learning rates.
        head: name or file of the head, chosen by the data if None.
        samples: how many of the training split are learnt, drawn by the seed of the schedule; all if None.
        device: the device to train on.
        trust_remote_code: run code that comes with the model.
    """
    opened = open_model(model, device=pick_device(device), trust_remote_code=trust_remote_code)
    train = read_data(data, "train")
    task, place = split_reference(data)
    validation = task.read(place, "validation") if task is not None else None
    chosen = None if opened.generates == "seq2seq" and head is None else choose_head(opened, head, train)
    if chosen is not None:
        if chosen.class_embeds is None and not opened.labels_samples:
            raise TuneportError(
                f"{opened.name} {opened.instead}, which is not trained here: use transformers' Trainer."
            )
        align_labels(train, chosen.classes)
    opened.check_kind(train)
    drawn = np.arange(len(train)) if samples is None else select(train, samples=samples, seed=schedule.seed)
    about = data_identity(place, train, drawn, () if chosen is None else (chosen,))
    if samples is None:
        about.pop("indices")  # all of them
    train = train.subset(drawn)
    record = {
        "tuneport": package_version("tuneport"),
        "command": "finetune",
        "model": identity_of(opened),
        "data": about,
        "options": {**asdict(schedule), "samples": samples, "head": head, "device": str(opened.device)},
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
    """Fine-tune and write the folder `out`; return the record.

    Every `checkpoint_every` steps (0: never) the model is also written to `out`/checkpoints/step-N.
    """
    out, model, schedule = Path(out), training.model, training.schedule
    stops = range(checkpoint_every, schedule.steps + 1, checkpoint_every) if checkpoint_every else range(0)
    size = companion_bytes(model.weights.folder) + sum(
        describe(model.weights.tensors, name).nbytes for name in model.weights.tensors
    )
    inputs = [] if model.weights.folder is None or looks_like_hub_id(model.name) else [model.weights.folder]
    check_new(out, overwrite, needed_bytes=(1 + len(stops)) * size, inputs=inputs)
    started = time.perf_counter()
    losses: list[Tensor] = []
    history: list[dict[str, Any]] = []
    with new_folder(out, overwrite=overwrite) as folder:
        head, data = training.head, training.train
        run = finetune(model, head, data, schedule, at=stops, progress=progress, log=losses.append)
        for step, module in run:
            scores = {}
            if training.validation is not None and head is not None:
                found = zero_shot(model.with_module(module), head, training.validation)
                scores["validation_accuracy"] = found.accuracy
            if step in stops:
                place = folder / CHECKPOINTS / f"step-{step:06}"
                place.mkdir(parents=True)
                write_model(model, module, place)
                history.append({"step": step, "folder": f"{CHECKPOINTS}/{place.name}", **scores})
        write_model(model, module, folder)
        record = {
            **training.record,
            "out": str(out),
            "steps": schedule.steps,
            "samples": len(data),
            "seconds": round(time.perf_counter() - started, 3),
            "losses": mean_losses(losses),
            "checkpoints": history,
            **scores,
        }
        (folder / "README.md").write_text(CARD.format(len(data), **asdict(schedule)), encoding="utf-8")
        write_record(folder / "tuneport.json", record)
    return record


def write_model(model: Model, module: nn.Module, folder: Path) -> None:
    """Write the weights of a trained copy in the layout and dtypes of the model's files, and copy the companions."""
    copy_companions(model.weights.folder, folder)
    live = {model.weights.file_names[name]: parameter for name, parameter in module.named_parameters()}

    def stored(name: str) -> Tensor:
        if name not in live:
            return model.weights.tensors[name]
        return live[name].detach().to("cpu", describe(model.weights.tensors, name).dtype).contiguous()

    model.weights.write(folder, {name: stored(name) for name in model.weights.tensors})


def batch_reader(
    model: Model, data: Dataset, cache_bytes: int = CACHE_BYTES
) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """A function from row numbers to a batch on the model's device; inputs of small datasets are encoded once."""
    one, labels = encode_batch(model, data.subset([0])), torch.as_tensor(data.labels).to(model.device)
    if len(data) * sum(value.nbytes for value in one.values()) <= cache_bytes:
        inputs = prepared(model, data)
        return lambda rows: (rows_of(inputs, rows), labels[rows])
    return lambda rows: (encode_batch(model, data.subset(rows.numpy())), labels[rows])


def prepared(model: Model, data: Dataset) -> dict[str, Tensor]:
    """All samples encoded, on the model's device."""
    parts = [encode_batch(model, data.subset(range(len(data))[at : at + 256])) for at in range(0, len(data), 256)]
    inputs = {}
    for key, first in parts[0].items():
        values = [batch[key] for batch in parts]
        if first.ndim == 2:  # shorter texts are padded with zeros, which their attention mask hides
            longest = max(value.shape[1] for value in values)
            values = [F.pad(value, (0, longest - value.shape[1])) for value in values]
        inputs[key] = torch.cat(values)
    return inputs


def rows_of(inputs: Mapping[str, Tensor], rows: Tensor | slice) -> dict[str, Tensor]:
    """Some samples of encoded inputs; texts are cut to the longest of them."""
    batch = {key: value[rows] for key, value in inputs.items()}
    if "attention_mask" not in batch:
        return batch
    longest = int(batch["attention_mask"].sum(1).max())
    return {key: value[:, :longest] if value.ndim == 2 else value for key, value in batch.items()}


def _trainable(model: Model) -> nn.Module:
    """A copy of the model's module in training mode, in which the tower's parameters need a gradient."""
    module = copy.deepcopy(model.module).train()
    outside = outside_of(module, model.architecture.layers, model.architecture.loose, "")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in outside)
    return module


def mean_losses(losses: Sequence[Tensor], every: int = 50) -> list[dict[str, float]]:
    """The mean of each `every` losses, and of the last ones, with the number of the last step in it."""
    parts = torch.stack(list(losses)).split(every)
    return [{"step": min((i + 1) * every, len(losses)), "loss": float(part.mean())} for i, part in enumerate(parts)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Fine-tune a model and write it; the defaults are those of the paper."""
    parser = argparse.ArgumentParser(prog="python -m paper.finetune", description="Fine-tune by the paper's protocol.")
    parser.add_argument("model", help="folder or id of the model")
    parser.add_argument("--data", required=True, help="labelled data, or TASK:PATH; the training split is learnt")
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument("--head", help="name or file of the head")
    parser.add_argument("--samples", type=int, help="learn this many of the training samples")
    parser.add_argument("--steps", type=int, default=PROTOCOL.steps)
    parser.add_argument("--batch-size", type=int, default=PROTOCOL.batch_size)
    parser.add_argument("--learning-rate", type=float, default=PROTOCOL.learning_rate)
    parser.add_argument("--weight-decay", type=float, default=PROTOCOL.weight_decay)
    parser.add_argument("--warmup", type=int, help="steps of a rising rate: 200, or a tenth if fewer")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="also write the model every N steps")
    parser.add_argument("--seed", type=int, default=PROTOCOL.seed)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args(arguments)
    warmup = min(200, given.steps // 10) if given.warmup is None else given.warmup
    schedule = Schedule(
        given.steps, given.batch_size, given.learning_rate, given.weight_decay, seed=given.seed, warmup=warmup
    )
    places = {"checkpoint_every": given.checkpoint_every, "overwrite": given.overwrite}
    try:
        check_new(given.out, given.overwrite)
        training = prepare_training(
            given.model, given.data, schedule, head=given.head, samples=given.samples, device=given.device
        )
        with Bar("fine-tuning") as events:
            events.plan(given.steps)
            record = run_training(training, given.out, progress=events.advance, **places)
    except TuneportError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    found = record.get("validation_accuracy")
    accuracy = "" if found is None else f", {found:.2f} % of the validation split right"
    print(f"{given.steps} steps in {record['seconds']:.1f} s, loss {record['losses'][-1]['loss']:.4g}{accuracy}")
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
