"""The steps of a training run: AdamW on mean losses of seeded batches, one loop for labels and for a teacher.

A run depends only on its inputs and its schedule: batches are seeded permutations, and dropout follows seed, step and
pass. So a run that continues at a step from the state that it had there ends with the same bits, and several processes
that divide the passes learn the same but for the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import TuneportError
from ..io.tensors import all_finite
from ..models.weights import own_part
from ..processes import summed, turns


@dataclass(frozen=True)
class Schedule:
    """AdamW with a linear warm-up, then cosine decay to zero.

    The warm-up takes `warmup` steps, or the share `warmup_share` of all steps if `warmup` is None. Gradients are scaled
    down to the norm `clip`.
    """

    steps: int
    batch_size: int = 128
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    warmup_share: float = 0.1
    seed: int = 0
    warmup: int | None = None
    clip: float | None = None

    def rate(self, step: int) -> float:
        """The learning rate of a step (0-based)."""
        warmup = int(self.warmup_share * self.steps) if self.warmup is None else self.warmup
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        along = (step - warmup) / max(self.steps - warmup, 1)
        return self.learning_rate * 0.5 * (1.0 + float(np.cos(np.pi * along)))

    def optimizer(self, module: nn.Module) -> torch.optim.AdamW:
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        fused = bool(trained) and trained[0].device.type == "cuda"
        return torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=self.weight_decay, fused=fused)


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Let float32 products on a GPU use TF32, which suffices for training; other devices are left as they are."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True, eq=False)
class Pace:
    """How the steps are taken, which changes no result but for the order of sums.

    Args:
        first: steps that an earlier run has done.
        stops: steps at which the module must be sound.
        pass_size: samples in one forward and backward pass; gradients of a larger batch are accumulated.
        lengths: of the samples (N,): passes of a batch hold samples of a similar length, which need little padding.
        check_every: steps between two checks of the losses, for which the device is synchronised.
    """

    first: int = 0
    stops: Collection[int] = ()
    pass_size: int = 128
    lengths: Tensor | None = None
    check_every: int = 50


def run_steps(
    what: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    count: int,
    loss: Callable[[int, Tensor], Tensor],
    pace: Pace,
    more: Callable[[int], Tensor | None] | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Train in place; yield the number of steps done, and the loss of the last, after each step.

    Several processes divide the passes of each batch and take the same steps. A run that diverges is a TuneportError,
    raised at the latest at the next of the `stops`.

    Args:
        what: the run in words, for the error.
        module: its parameters that need a gradient are trained.
        count: the number of samples.
        loss: the mean loss of some samples, given by their rows, at a step (0-based).
        more: a loss of a step that no sample has, or None; it is not part of the loss that is yielded.
    """
    stops, lengths, device, here = pace.stops, pace.lengths, next(module.parameters()).device, turns()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    unchecked: list[Tensor] = []  # losses that are still on the device

    def check(ok: bool, why: str) -> None:
        if not ok:
            advice = f"Lower `learning_rate`, which is {schedule.learning_rate:g}."
            raise TuneportError(f"{what} has diverged: {why} of {schedule.steps}. {advice}")

    for step, rows in islice(enumerate(_draws(count, schedule)), pace.first, None):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        optimizer.zero_grad(set_to_none=True)
        losses = []
        # Dropout depends only on seed, step and pass; the global generators are restored.
        with fast_products(device), torch.random.fork_rng([device] if device.type == "cuda" else []):
            if lengths is not None:
                rows = rows[lengths[rows].argsort(stable=True)]
            parts = passes(rows, pace.pass_size)
            for place in range(here.rank, len(parts), here.size):
                seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
                seed((schedule.seed * 1_000_003 + step + (place << 40)) % 2**63)
                share = loss(step, parts[place]) * (len(parts[place]) / len(rows))
                share.backward()
                losses.append(share.detach())
            # the next in turn has the fewest passes
            extra = more(step) if more is not None and len(parts) % here.size == here.rank else None
            if extra is not None:
                extra.backward()
        last = _of_all(trained, torch.stack(losses).sum() if losses else torch.zeros((), device=device))
        if schedule.clip is not None:
            nn.utils.clip_grad_norm_(trained, schedule.clip)
        optimizer.step()
        unchecked.append(last)
        if step + 1 in stops or len(unchecked) == pace.check_every:
            for number, finite in enumerate(torch.stack(unchecked).isfinite().tolist(), step + 2 - len(unchecked)):
                if not finite and number == 1:
                    raise TuneportError(
                        f"the loss of {what} is NaN or infinite before anything is learnt: check the weights and the "
                        "samples."
                    )
                check(finite, f"the loss is NaN or infinite at step {number}")
            unchecked.clear()
        if step + 1 in stops:
            for key, parameter in module.named_parameters():
                finite = not parameter.requires_grad or all_finite(own_part(parameter.detach()))
                check(finite, f"{key} holds NaN or infinite values after step {step + 1}")
        yield step + 1, last


def _of_all(trained: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
    """Sum gradients over the processes, in place, and return the sum of their losses."""
    if turns().size == 1:
        return loss
    has = torch.tensor([float(parameter.grad is not None) for parameter in trained], device=loss.device)
    own = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    total = summed(torch.cat([loss.view(1).float(), has, *(each.flatten().float() for each in own)]))
    sums = total[1 + len(trained) :].split([parameter.numel() for parameter in trained])
    for parameter, count, values in zip(trained, total[1 : 1 + len(trained)].tolist(), sums, strict=True):
        parameter.grad = values.view_as(parameter).to(parameter.dtype) if count else None
    return total[0]


def passes(rows: Tensor, most: int) -> tuple[Tensor, ...]:
    """The rows in passes of at most `most`, of nearly one size: no sample is left alone, without others to compare.

    >>> [len(part) for part in passes(torch.arange(33), 32)]
    [17, 16]
    """
    return rows.tensor_split(math.ceil(len(rows) / most))


def _draws(count: int, schedule: Schedule) -> Iterator[Tensor]:
    """Batches of row numbers from seeded permutations; a dataset smaller than a batch is one batch."""
    generator = torch.Generator().manual_seed(schedule.seed)
    queue = torch.empty(0, dtype=torch.long)
    size = min(schedule.batch_size, count)
    for _ in range(schedule.steps):
        if len(queue) < size:
            queue = torch.cat([queue, torch.randperm(count, generator=generator)])
        rows, queue = queue[:size], queue[size:]
        yield rows
