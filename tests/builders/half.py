"""A transfer between live modules in bfloat16."""

from __future__ import annotations

import torch
from torch import nn

from tuneport.pipeline.transfer import Result, transfer
from tuneport.task_vectors.vector import TaskVector

BF16 = torch.bfloat16


def live_transfer() -> Result:
    """A transfer between bfloat16 modules that are large enough for torch to try the units."""
    generator = torch.Generator().manual_seed(0)
    source, target = (nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).to(BF16) for _ in range(2))
    vector = TaskVector({"0.weight": torch.randn(96, 64, generator=generator)})
    data = [torch.randn(8, 64, 64, generator=generator).to(BF16)]  # 8 samples of 64 tokens
    return transfer(source, vector, target, data, loss=lambda module, x: module(x).float().square().sum())
