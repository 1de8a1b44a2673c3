"""The speed of this machine by kind of work, from a short probe, and the seconds that a transfer takes on it.

The probe takes a second or two. Seconds are sums of work over rate; nothing overlaps. Several devices share samples and
maps evenly, each with its own link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from ..maps.covariance import CrossCovariance
from ..maps.procrustes import procrustes_together
from .cost import SVD, Flops, thin_flops
from .passes import Passes

LONG = 0.5  # seconds of a run that needs no repetition


@dataclass(frozen=True)
class Rates:
    """FLOP per second of model passes, of float64 `products` (statistics and transport), of `dense` and `thin` maps (in
    the FLOPs of `flops_of`), and bytes per second of the `link` from host memory to the device and of the way `back`.
    """

    passes: float
    products: float
    dense: float
    thin: float
    link: float
    back: float


@cache
def probe(device: torch.device, dtype: torch.dtype, tokens: int = 1024) -> Rates:
    """Measure the rates of this machine, once per process; a product has as many rows as a batch has `tokens`."""
    on_gpu = device.type == "cuda"
    width = 4096 if on_gpu else 512
    rows = min(tokens, width) if on_gpu else width
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=torch.float32).to(dtype)

    x, weight = random(rows, width, dtype=dtype), random(width, width, dtype=dtype)
    exact = weight.double()
    passes = 2 * rows * width**2 / _seconds(lambda: x @ weight, device, 20)
    products = 2 * width**3 / _seconds(lambda: exact @ exact, device, 3)
    count = 4 if on_gpu else 1
    full, few = (CrossCovariance(size, size, device=device) for size in (width // 4, width))
    full.matrix = random(width // 4, width // 4, dtype=torch.float64)
    few.update(*(random(width // 4, width, dtype=torch.float32) for _ in range(2)))
    in_full, in_few = (_seconds(partial(procrustes_together, [each] * count), device, 1) for each in (full, few))
    dense, thin = count * SVD * (width // 4) ** 3 / in_full, count * thin_flops(width, width, width // 4) / in_few
    size = 2**28 if on_gpu else 2**25
    on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
    on_device = torch.empty_like(on_host, device=device)
    link = size / _seconds(lambda: on_device.copy_(on_host, non_blocking=True), device, 4)
    back = size / _seconds(lambda: on_device.to("cpu", copy=True), device, 2)
    return Rates(passes, products, dense, thin, link, back)


def _seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """The mean of some runs after a first one; on a CPU, that of the first one if it is long."""
    seconds = 0.0
    for repeat in (1, times):
        started = time.perf_counter()
        for _ in range(repeat):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - started) / repeat
        if seconds > LONG and device.type == "cpu":  # on a GPU, the first run also loads kernels
            break
    return max(seconds, 1e-9)


def seconds_of(flops: Flops, rates: Rates, passes: Passes | None = None, devices: int = 1) -> dict[str, float]:
    """Seconds by stage, and their total.

    Args:
        flops: the work of one run over all samples.
        rates: the speed of one device.
        passes: of each device; each group counts as a whole backward pass, also where later groups need less.
        devices: devices that share the work.
    """
    passes = passes or Passes(((),), 0, ())
    recomputed = any(placement.blocks for placement in passes.placements or ())
    run = flops.forward * (2 if recomputed else 1) + flops.backward
    found = {
        "passes": len(passes.groups) * run / rates.passes / devices,
        "fetch": passes.fetched_bytes / rates.link,
        "sums": flops.statistics / rates.products / devices,
        "solve": (flops.dense / rates.dense + flops.thin / rates.thin) / devices,
        "transport": (flops.transport / rates.products + passes.returned_bytes / rates.back) / devices,
    }
    return {**found, "total": sum(found.values())}
