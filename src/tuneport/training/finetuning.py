"""Fine-tuning a model on labelled samples: the honest alternative to a transfer, and its sequel (warm start)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.dataset import Dataset, align_labels
from ..errors import TuneportError
from ..io.tensors import all_finite
from ..measure.accuracy import encoded
from ..models.base import Head, Model
from ..types import Progress

Log = Callable[[int, Tensor], None]  # step and loss

PASS = 128  # samples in one pass; a larger batch takes several
CHECK_EVERY = 50  # steps between two looks at the losses
KEPT_BYTES = 2 * 2**30  # prepared inputs up to this size are kept; larger sets are prepared batch by batch


@dataclass(frozen=True)
class Schedule:
    """How to train: the paper's protocol is AdamW with weight decay 0.1, cosine decay after a linear warm-up.

    The warm-up takes a share of the steps, or exactly `warmup` steps where that is given.
    """

    steps: int
    batch_size: int = 128
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    warmup_share: float = 0.1
    seed: int = 0
    warmup: int | None = None

    def rate(self, step: int) -> float:
        """The learning rate of a step (0-based): linear warm-up, then a half cosine to zero."""
        warmup = int(self.warmup_share * self.steps) if self.warmup is None else self.warmup
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        along = (step - warmup) / max(self.steps - warmup, 1)
        return self.learning_rate * 0.5 * (1.0 + float(np.cos(np.pi * along)))


def finetune(
    model: Model,
    head: Head,
    data: Dataset,
    schedule: Schedule,
    *,
    at: Sequence[int] = (),
    progress: Progress | None = None,
    log: Log | None = None,
) -> Iterator[tuple[int, nn.Module]]:
    """Fine-tune a copy of the model's tower with the head frozen; yield (step, module) at the given steps.

    The last step is always yielded. The module that is yielded goes on training: use it before asking for
    the next. Inputs of small sets are prepared once and kept. `log` gets the loss of each step. A run that diverges
    is a TuneportError, raised before anything is yielded that has gone wrong.
    """
    if schedule.steps < 1:
        raise TuneportError(f"fine-tuning needs at least one step, got {schedule.steps}.")
    data = align_labels(data, head.classes)
    batch_of = batch_reader(model, data)
    module = copy.deepcopy(model.module).train()
    inside = {layer.weight for layer in model.layers} | {layer.bias for layer in model.layers}
    inside |= {part.name for part in model.loose}
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in inside)
    optimizer = torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=schedule.learning_rate,
        weight_decay=schedule.weight_decay,
    )
    run = _Run(f"{model.name} on {data.name}", schedule)
    stops = {*at, schedule.steps}
    unchecked: list[Tensor] = []  # losses that are still on the device, to be waited for now and then
    for step, rows in enumerate(_draws(len(data), schedule)):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        optimizer.zero_grad(set_to_none=True)
        losses = []
        with _dropout(schedule.seed, step, model.device):
            for part in rows.split(PASS):  # gradients of a large batch add up
                batch, labels = batch_of(part)
                share = F.cross_entropy(head.scores(model, module, batch), labels) * (len(part) / len(rows))
                share.backward()
                losses.append(share.detach())
        optimizer.step()
        if progress is not None:
            progress(1)
        unchecked.append(torch.stack(losses).sum())
        if log is not None:
            log(step + 1, unchecked[-1])
        if step + 1 in stops or len(unchecked) == CHECK_EVERY:
            run.check_losses(unchecked, step + 1)
            unchecked.clear()
        if step + 1 in stops:
            run.check_weights(module, step + 1)
            module.eval()
            yield step + 1, module
            module.train(step + 1 < schedule.steps)  # the last one stays ready to be evaluated


@dataclass(frozen=True)
class _Run:
    """A fine-tuning run by name, to say of it that it has diverged."""

    name: str
    schedule: Schedule

    def check_losses(self, losses: Sequence[Tensor], step: int) -> None:
        """Refuse to go on where one of the losses up to a step is no number."""
        wrong = (~torch.stack(list(losses)).isfinite()).nonzero()
        if len(wrong):
            self._stop(f"the loss is no number at step {step - len(losses) + 1 + int(wrong[0])}")

    def check_weights(self, module: nn.Module, step: int) -> None:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not all_finite(parameter.detach()):
                self._stop(f"{name} holds NaN or infinite values after step {step}")

    def _stop(self, why: str) -> NoReturn:
        raise TuneportError(
            f"the fine-tuning of {self.name} has diverged: {why} of {self.schedule.steps}. Lower the learning rate "
            f"(--learning-rate), which is {self.schedule.learning_rate:g}."
        )


@contextmanager
def _dropout(seed: int, step: int, device: torch.device) -> Iterator[None]:
    """What a model drops depends on seed and step only, and the global generators are left as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed((seed * 1_000_003 + step) % 2**63)
        yield


def batch_reader(model: Model, data: Dataset) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """Row numbers to a batch on the model's device: from inputs that are all prepared, or prepared when asked for."""
    one, _ = next(encoded(model, data.subset([0]), 1))
    if len(data) * sum(value.nbytes for value in one.values()) <= KEPT_BYTES:
        inputs, labels = prepared(model, data)
        return lambda rows: (rows_of(inputs, rows), labels[rows])

    def read(rows: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        batch, found = next(encoded(model, data.subset(rows.numpy()), len(rows)))
        return batch, found.to(model.device)

    return read


def prepared(model: Model, data: Dataset) -> tuple[dict[str, Tensor], Tensor]:
    """All samples as the model wants them, on its device, with their labels."""
    parts = list(encoded(model, data, 256))
    inputs = {key: _stacked([batch[key] for batch, _ in parts]) for key in parts[0][0]}
    return inputs, torch.cat([labels for _, labels in parts]).to(model.device)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Batches one above the other; those of shorter texts are filled up with zeros, which their mask hides."""
    if parts[0].ndim != 2:
        return torch.cat(list(parts))
    longest = max(part.shape[1] for part in parts)
    return torch.cat([F.pad(part, (0, longest - part.shape[1])) for part in parts])


def rows_of(inputs: Mapping[str, Tensor], rows: Tensor | slice) -> dict[str, Tensor]:
    """Some samples of prepared inputs; of texts, no more tokens than the longest of them has."""
    batch = {key: value[rows] for key, value in inputs.items()}
    if "attention_mask" not in batch:
        return batch
    longest = int(batch["attention_mask"].sum(1).max())
    return {key: value[:, :longest] if value.ndim == 2 else value for key, value in batch.items()}


def _draws(count: int, schedule: Schedule) -> Iterator[Tensor]:
    """Batches of row numbers: epochs of a seeded permutation; a set smaller than a batch is taken whole."""
    generator = torch.Generator().manual_seed(schedule.seed)
    queue = torch.empty(0, dtype=torch.long)
    size = min(schedule.batch_size, count)
    for _ in range(schedule.steps):
        if len(queue) < size:
            queue = torch.cat([queue, torch.randperm(count, generator=generator)])
        rows, queue = queue[:size], queue[size:]
        yield rows
