"""What the precision of the sums costs: maps from float32, TF32 and bfloat16 products against float64.

    python benchmarks/speed/accumulation.py --out OUT
    python benchmarks/speed/accumulation.py --device cuda --width 1024 1536 --tokens 20000 --out OUT

Two signals share a latent signal whose spectrum falls from 1 to 1e-3, plus noise of their own and a large mean, as
layer inputs have; the last `--null` directions hold nothing but rounding. float32 signals; products in one precision,
sums of the batches' products in float64. Map error: relative, on the completed map, against the map from float64
products of the same signals. A second table has bfloat16 signals, their own rank cut, and the sums of the library,
which multiplies such signals in float32 (`tuneport.maps.products`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from record import now, publish, table
from torch import Tensor

from tuneport.maps.procrustes import procrustes
from tuneport.maps.statistics import add_product, rank_cut


def signals(widths: tuple[int, int], tokens: int, null: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    common = min(widths) - null
    latent = torch.randn(tokens, common, generator=generator) * torch.logspace(0, -3, common)
    sides = []
    for width in widths:
        mix = torch.linalg.qr(torch.randn(width, common, generator=generator)).Q
        noise = 0.3 * torch.randn(tokens, common, generator=generator) * torch.logspace(0, -3, common)
        mean = 3 * torch.randn(common, generator=generator) / common**0.5
        sides.append(((latent + noise + mean) @ mix.T).to(device))
    return sides[0], sides[1]


def product(X: Tensor, Y: Tensor, how: str) -> Tensor:
    if how == "library":
        total = torch.zeros(X.shape[1], Y.shape[1], device=X.device, dtype=torch.float64)
        add_product(total, X, Y)
        return total
    if how == "float64":
        return X.double().T @ Y.double()
    if how == "bfloat16":
        return (X.bfloat16().T @ Y.bfloat16()).double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if how == "tf32" else "highest")
    try:
        return (X.float().T @ Y.float()).double()
    finally:
        torch.set_float32_matmul_precision(before)


def compared(X: Tensor, Y: Tensor, ways: list[str], batch: int) -> list[list[object]]:
    """A row for each precision of the products: errors of C and of the map, its rank, and the time of the sums."""
    cut = rank_cut(X.dtype, torch.float64, max(X.shape[1], Y.shape[1]))
    wanted = torch.zeros(X.shape[1], Y.shape[1], device=X.device, dtype=torch.float64)
    for x, y in zip(X.split(batch), Y.split(batch), strict=True):
        wanted.addmm_(x.double().T, y.double())
    exact = procrustes(wanted, rtol=cut)
    lines: list[list[object]] = []
    for how in ways:
        product(X[:batch], Y[:batch], how)
        started = now(X.device)
        C = sum(product(x, y, how) for x, y in zip(X.split(batch), Y.split(batch), strict=True))
        seconds = now(X.device) - started
        assert isinstance(C, Tensor)
        found = procrustes(C, rtol=cut)
        off = float(torch.linalg.matrix_norm(C - wanted, 2) / torch.linalg.matrix_norm(wanted, 2))
        error = float((found.matrix - exact.matrix).norm() / exact.matrix.norm())
        lines.append([how, off, found.rank, error, seconds])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, nargs=2, default=[192, 256])
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=1000, help="tokens per product")
    parser.add_argument("--null", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    widths = (options.width[0], options.width[1])
    X, Y = signals(widths, options.tokens, options.null, device)
    ways = ["float64", "float32", *(["tf32"] if device.type == "cuda" else []), "bfloat16"]
    tables = {"float32": compared(X, Y, ways, options.batch)}
    tables["bfloat16"] = compared(X.bfloat16(), Y.bfloat16(), ["float64", "library", "bfloat16"], options.batch)
    head = ["products in", "error of C, spectral", f"rank (true: {min(widths) - options.null})", "map error", "seconds"]
    data = {"head": head, **tables, "options": {k: str(v) for k, v in vars(options).items()}}
    text = "\n\n".join(f"{name} signals\n\n{table(head, lines)}" for name, lines in tables.items())
    publish(f"accumulation-{device.type}", options.out, text, data, device)


if __name__ == "__main__":
    main()
