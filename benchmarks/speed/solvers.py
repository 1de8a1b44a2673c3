"""Every route to a polar factor against a planted one: orthogonality defect, map error, seconds.

    python benchmarks/speed/solvers.py --out OUT
    python benchmarks/speed/solvers.py --device cuda --sizes 768x1024 3072x4096 4096x4096 --together 8 --out OUT

Shape classes: square, wide, tall. Spectra: conditioned (1 to 0.1), ill-conditioned (1 to 1e-8), like gradients (32
large directions, the rest at 1e-6 to 1e-8), with three null directions, and half null. A route may decline (qdwh
serves a few null directions at most); a result that is not certified counts as a failure. The defect is that of both
factors (largest entry of Q^T Q - I), the map error is relative (Frobenius). With --together K, K of them are solved
and completed at once, as a transfer does on an accelerator.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from record import now, publish, table
from torch import Tensor

from tuneport.maps.polar import ROUTES, polar, polar_together, thin_factors
from tuneport.maps.procrustes import complete

CUT = 9.3e-10  # the rank cut of float32 signals
LIMITS = (1e-6, 1e-5)  # orthogonality defect, map error


def spectrum(name: str, n: int) -> Tensor:
    zeros = torch.zeros
    parts = {
        "conditioned": [torch.linspace(1, 0.1, n)],
        "ill-conditioned": [torch.logspace(0, -8, n, dtype=torch.float64)],
        "like gradients": [torch.linspace(1, 0.1, 32), torch.logspace(-6, -8, n - 32, dtype=torch.float64)],
        "three null": [torch.logspace(0, -4, n - 3), zeros(3)],
        "half null": [torch.logspace(0, -4, n - n // 2), zeros(n // 2)],
    }
    return torch.cat([part.double() for part in parts[name]])


SPECTRA = ("conditioned", "ill-conditioned", "like gradients", "three null", "half null")


def planted(rows: int, columns: int, values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    n = len(values)
    U, V = (
        torch.linalg.qr(torch.randn(size, n, generator=generator, device=device, dtype=torch.float64)).Q
        for size in (rows, columns)
    )
    values = values.to(device)
    kept = values > CUT * values[0]
    return (U * values) @ V.T, U[:, kept] @ V[:, kept].T


def defect(factor: Tensor) -> float:
    gram = factor.T @ factor
    gram.diagonal().sub_(1.0)
    return float(gram.abs().max()) if gram.numel() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["256x256", "192x320", "320x192"])
    parser.add_argument("--spectra", nargs="+", default=list(SPECTRA), choices=SPECTRA)
    parser.add_argument("--routes", nargs="+", default=list(ROUTES), choices=list(ROUTES))
    parser.add_argument("--together", type=int, default=0, metavar="K")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    lines, failures = [], 0
    for size in options.sizes:
        rows, columns = (int(part) for part in size.split("x"))
        for name in options.spectra:
            C, expected = planted(rows, columns, spectrum(name, min(rows, columns)), device)
            wide = C.T if rows > columns else C
            for route in options.routes:
                if name == options.spectra[0]:
                    ROUTES[route](wide[:128], CUT)  # warm up
                started = now(device)
                found = ROUTES[route](wide, CUT)
                seconds = now(device) - started
                if found is None:
                    lines.append([size, name, route, "declines", None, None, None, seconds])
                    continue
                holds = found.certificate.holds
                R = found.dense()
                R = R.T if rows > columns else R
                error = float((R - expected).norm() / expected.norm())
                worst = max(defect(factor) for factor in thin_factors(found))
                good = holds and worst < LIMITS[0] and error < LIMITS[1]
                failures += not good
                lines.append([size, name, route, "yes" if good else "NO", found.rank, worst, error, seconds])
            started = now(device)
            solved = polar(C, CUT)
            middle = now(device)
            filled = complete(solved)
            filling = now(device) - middle
            short = filled.dense() if rows > columns else filled.dense().T
            chosen = f"chosen: {solved.route}, completed"
            good = defect(short) < LIMITS[0]
            failures += not good
            lines.append(
                [
                    size,
                    name,
                    chosen,
                    "yes" if good else "NO",
                    solved.rank,
                    defect(short),
                    None,
                    middle - started + filling,
                ]
            )
            if options.together:
                copies = [C + 0 for _ in range(options.together)]
                polar_together(copies, CUT, fill=True)
                started = now(device)
                all_of_them = polar_together(copies, CUT, fill=True)
                each = (now(device) - started) / len(copies)
                route = f"together: {all_of_them[0].route}, {len(copies)} completed at once, each"
                whole = complete(all_of_them[-1]).dense()
                off = defect(whole if rows > columns else whole.T)
                error = float((whole - filled.dense()).norm() / whole.norm())
                good = off < LIMITS[0] and error < LIMITS[1]
                failures += not good
                lines.append([size, name, route, "yes" if good else "NO", all_of_them[0].rank, off, error, each])
            print(f"{size} {name}: done", file=sys.stderr, flush=True)
    head = ["shape", "spectrum", "route", "certified, within limits", "rank", "defect", "map error", "seconds"]
    text = table(head, lines) + f"\n\n{failures} failures; limits: defect {LIMITS[0]:g}, map error {LIMITS[1]:g}\n"
    data = {"head": head, "rows": lines, "failures": failures}
    publish(f"solvers-{device.type}", options.out, text, data, device)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
