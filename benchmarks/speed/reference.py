"""The straightforward Algorithm 1 that the speed benchmarks compare with: nothing streamed, nothing shared.

Hooks store the input and the output gradient of every linear layer on every batch; each map comes from a float64
`torch.linalg.svd` of its own, on the device of the models; tokens are matched as in the paper (class token kept,
grid resized). It shares no code with the library. `benchmarks/reference.py` is the oracle of the tests; this one
has the same mathematics, keeps to the device, and stores only the two signals that BiCo needs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, object], Tensor]
Grid = tuple[int, int]


def reference_transfer(
    source: nn.Module,
    task_vector: dict[str, Tensor],
    target: nn.Module,
    batches: list[object],
    losses: tuple[Loss, Loss],
    grids: tuple[Grid, Grid] | None = None,
    only: str = r"\.layers\.",
    seconds: dict[str, float] | None = None,
) -> dict[str, Tensor]:
    """tau_B = R_out^T tau_A R_in for each linear layer whose name matches `only`; `seconds` is filled by stage."""
    names = [
        [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and re.search(only, n)]
        for model in (source, target)
    ]
    depths = [1 + max(int(n.split(".layers.")[1].split(".")[0]) for n in side) for side in names]
    started = _now(source)
    sources = _record(source, names[0], batches, losses[0])
    targets = _record(target, names[1], batches, losses[1])
    measured = _now(source)
    deltas: dict[str, Tensor] = {}
    for name in names[1]:
        match = _source_name(name, *depths)
        R_in, R_out = (
            _procrustes(_matched(a, b, grids), b) for a, b in zip(sources[match], targets[name], strict=True)
        )
        tau = task_vector[f"{match}.weight"].double()
        deltas[f"{name}.weight"] = (R_out.T @ tau @ R_in).float()
        if f"{match}.bias" in task_vector:
            deltas[f"{name}.bias"] = (R_out.T @ task_vector[f"{match}.bias"].double()).float()
    done = _now(source)
    if seconds is not None:
        seconds.update(measure=measured - started, solve_and_transport=done - measured)
    return deltas


def _record(model: nn.Module, names: list[str], batches: list[object], loss: Loss) -> dict[str, tuple[Tensor, Tensor]]:
    """The inputs and output gradients of the named layers over all batches, (samples, tokens, width)."""
    model.eval().requires_grad_(False)
    modules = dict(model.named_modules())
    inputs: dict[str, list[Tensor]] = {name: [] for name in names}
    gradients: dict[str, list[Tensor]] = {name: [] for name in names}

    def forward(name: str) -> Callable[..., Tensor]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            inputs[name].append(args[0].detach())
            if not output.requires_grad:
                output = output.detach().requires_grad_(True).clone()
            output.register_hook(lambda gradient: gradients[name].append(gradient.detach()))
            return output

        return hook

    handles = [modules[name].register_forward_hook(forward(name)) for name in names]
    try:
        for batch in batches:
            loss(model, batch).backward()
    finally:
        for handle in handles:
            handle.remove()
    return {name: (torch.cat(inputs[name]), torch.cat(gradients[name])) for name in names}


def _source_name(name: str, depth_source: int, depth_target: int) -> str:
    before, _, after = name.partition(".layers.")
    j, _, rest = after.partition(".")
    i = math.floor(int(j) * (depth_source - 1) / max(depth_target - 1, 1) + 0.5)
    return f"{before}.layers.{i}.{rest}"


def _matched(a: Tensor, b: Tensor, grids: tuple[Grid, Grid] | None) -> Tensor:
    if a.shape[1] == b.shape[1]:
        return a
    assert grids is not None
    patches = a[:, 1:].mT.unflatten(2, grids[0])
    patches = nn.functional.interpolate(patches, size=grids[1], mode="bilinear", align_corners=False)
    return torch.cat([a[:, :1], patches.flatten(2).mT], dim=1)


def _procrustes(a: Tensor, b: Tensor) -> Tensor:
    C = a.flatten(0, 1).double().T @ b.flatten(0, 1).double()
    U, _, Vh = torch.linalg.svd(C, full_matrices=False)
    return U @ Vh


def _now(model: nn.Module) -> float:
    if next(model.parameters()).is_cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
