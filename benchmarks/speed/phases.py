"""Where the time of solving goes, by shape, route and phase, on the covariances of a pair of vision towers.

    python benchmarks/speed/phases.py --shapes large --samples 100 --device cuda --out benchmarks/results/speed

Towers and samples as in vit.py. First the whole of solving and carrying over without clocks in between (twice: the
second has everything loaded), then once more with a clock around each phase, which waits for the device and so costs
a little. Phases contain each other: `iterate` holds `_step_matrix`, `_null_directions`, `_finish` and `_certify`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vit
from record import now, publish, table

from tuneport.maps import halley, polar, procrustes
from tuneport.pipeline.solve import measure, problem_of

PHASES = (
    (polar, "iterate"),
    (halley, "_split"),
    (halley, "largest_values"),
    (halley, "_step_matrix"),
    (halley, "_null_directions"),
    (halley, "_finish"),
    (halley, "_certify"),
    (halley, "_stationarity"),
    (halley, "_fill"),
    (procrustes, "polar_of_factors"),
    (procrustes, "complete"),
)


def clocked(device: torch.device) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Put a clock around each phase; seconds and matrices by phase and shape."""
    seconds: Counter[tuple[str, str]] = Counter()
    matrices: Counter[tuple[str, str]] = Counter()

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            first = args[0] if isinstance(args[0], torch.Tensor) else None
            key = name, "x".join(map(str, first.shape[-2:])) if first is not None else ""
            begun = now(device)
            result = function(*args, **options)
            seconds[key] += now(device) - begun
            matrices[key] += len(first) if first is not None and first.ndim == 3 else 1
            return result

        return run

    for module, name in PHASES:
        setattr(module, name, around(name, getattr(module, name)))
    polar.ROUTES["eigh"] = around("eigh", polar.ROUTES["eigh"])
    polar.ROUTES["svd"] = around("svd", polar.ROUTES["svd"])
    return seconds, matrices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=vit.SHAPES, default="tiny")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--depth", type=int, help="use only this number of blocks of each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.tf32 = False
    torch.set_num_threads(options.threads)
    setting = vit.Setting(options)
    device = setting.device
    if device.type == "cuda":
        setting.warm_up("tuneport")
    trial = setting.trial(setting.batches)
    begun = now(device)
    found = measure(trial.measurement)
    lines: list[list[Any]] = [["measure", "", None, now(device) - begun]]

    def moved() -> float:
        begun = now(device)
        fresh = procrustes.Statistics(found.covariances, {}, found.samples, found.passes)
        trial.method.transfer(problem_of(trial.measurement, trial.setup.change.vector, fresh))
        return now(device) - begun

    lines += [["solve and carry over, no clocks", "", None, moved()] for _ in range(2)]
    seconds, matrices = clocked(device)
    lines.append(["solve and carry over, with clocks", "", None, moved()])
    lines += [[name, shape, matrices[name, shape], spent] for (name, shape), spent in seconds.most_common()]
    distinct = list({id(one): one for one in found.covariances.values()}.values())
    routes: Counter[tuple[str, str]] = Counter()
    for one, solved in zip(distinct, procrustes.procrustes_together(distinct), strict=True):
        rank = "full rank" if solved.rank == min(one.shape) else "deficient"
        routes[f"route {solved.route}, {rank}", "x".join(map(str, one.shape))] += 1
    lines += [[name, shape, count, None] for (name, shape), count in sorted(routes.items())]
    head = ["phase", "shape", "matrices", "seconds"]
    publish(f"phases-{options.shapes}-{device.type}", options.out, table(head, lines), {"rows": lines}, device)


if __name__ == "__main__":
    main()
