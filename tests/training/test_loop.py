"""The loop: every sample of a batch weighs the same however it is divided, and each is drawn once an epoch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tuneport.training.loop import Pace, Schedule, run_steps

COUNT = 7


def taken(pass_size: int, batch_size: int, steps: int) -> tuple[Tensor, list[float], list[Tensor]]:
    """The weights after plain gradient steps, the losses, and the rows of each pass."""
    X = torch.arange(COUNT, dtype=torch.float64)[:, None]
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    drawn: list[Tensor] = []

    def loss(_: int, rows: Tensor) -> Tensor:
        drawn.append(rows)
        return (module(X[rows]) - 3 * X[rows]).square().mean()

    schedule = Schedule(steps, batch_size=batch_size, learning_rate=1e-3)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    losses = [
        float(last) for _, last in run_steps("x", module, optimizer, schedule, COUNT, loss, Pace(pass_size=pass_size))
    ]
    return module.weight.detach().clone(), losses, drawn


@pytest.mark.parametrize("pass_size", [1, 2, 3, 4])
def test_passes_of_uneven_size_give_the_step_of_the_whole_batch(pass_size: int) -> None:
    whole, losses, _ = taken(COUNT, COUNT, 3)
    parts, same, _ = taken(pass_size, COUNT, 3)
    assert torch.allclose(parts, whole, rtol=1e-12, atol=0)
    assert same == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("clip", [0.5, 1e3])
def test_a_large_gradient_is_scaled_down(clip: float) -> None:
    module = nn.Linear(2, 1, bias=False).double()
    schedule = Schedule(1, COUNT, learning_rate=1.0, warmup=0, clip=clip)
    before = module.weight.detach().clone()

    def loss(_: int, _rows: Tensor) -> Tensor:
        return module(torch.tensor([[3.0, 4.0]], dtype=torch.float64)).sum()  # its gradient has the norm 5

    plain = torch.optim.SGD(module.parameters(), lr=1.0)
    list(run_steps("x", module, plain, schedule, COUNT, loss, Pace()))
    assert float((module.weight.detach() - before).norm()) == pytest.approx(min(clip, 5.0), rel=1e-5)


def test_every_sample_is_drawn_once_an_epoch() -> None:
    """Seven steps of three samples are three epochs of seven."""
    _, _, drawn = taken(COUNT, 3, COUNT)
    rows = torch.cat(drawn).tolist()
    for start in range(0, len(rows), COUNT):
        assert Counter(rows[start : start + COUNT]) == Counter(range(COUNT))


@pytest.mark.parametrize(("device", "seeded"), [("cpu", 0), ("meta", 3)])
def test_a_device_with_a_generator_of_its_own_is_seeded(
    device: str, seeded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropout draws there, on whatever is no CPU; on a CPU the generators of other devices are left alone."""
    seeds: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    module, schedule = nn.Linear(2, 1, device=device), Schedule(3)

    def loss(_: int, rows: Tensor) -> Tensor:
        return module(torch.ones(len(rows), 2, device=device)).mean()

    assert len(list(run_steps("x", module, schedule.optimizer(module), schedule, COUNT, loss, Pace()))) == 3
    assert len(set(seeds)) == seeded
