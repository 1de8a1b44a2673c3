"""A short fine-tune of an image tower, for the demo."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.dataset import Dataset, align_labels
from ..measure.accuracy import encode_batches
from ..models.base import Model, outside_of
from ..models.heads import choose_head
from ..training.loop import Pace, Schedule, run_steps
from ..types import Progress, ignore


def finetune(model: Model, data: Dataset, schedule: Schedule, progress: Progress = ignore) -> nn.Module:
    """Train a copy of the tower on labelled images, with the head frozen."""
    head, module = choose_head(model, "digits", data), copy.deepcopy(model.module).train()
    outside = outside_of(module, model.architecture.layers, model.architecture.loose, "")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in outside)
    parts = list(encode_batches(model, align_labels(data, head.classes), 256))
    inputs = {key: torch.cat([batch[key] for batch, _ in parts]) for key in parts[0][0]}
    labels = torch.cat([found for _, found in parts])

    def loss(_step: int, rows: Tensor) -> Tensor:
        batch = {key: values[rows] for key, values in inputs.items()}
        return F.cross_entropy(head.scores(model, module, batch), labels[rows])

    optimizer, stops = schedule.optimizer(module), {schedule.steps}
    for _ in run_steps("the demo", module, optimizer, schedule, len(data), loss, Pace(stops=stops)):
        progress(1)
    return module.eval()
