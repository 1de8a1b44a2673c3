"""Products of two paired signals, `X_A^T X_B`, in as much precision as the signals carry. Torch only.

float32 signals are multiplied in float64. Half-precision ones say nothing below 10^-3 of the largest singular value
(bfloat16; 10^-5 float16: `rank.rank_cut`). Their products are exact in float32; they are summed in float32 over a
piece of tokens, and the pieces in float64, which leaves an error of 10^-7.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PIECE = 16384  # tokens that are converted at once
PIECE_ON_CPU = 512  # which stay in its caches
HALF_PIECE_ON_CPU = 4096
ROWS_ON_CPU = 256
BLOCK = 2**24  # numbers of a float32 product that are added to the sum at once
BLOCK_ON_CPU = 2**21


def add_product(total: Tensor, source: Tensor, target: Tensor) -> None:
    """Add X_A^T X_B to a sum, a piece at a time; the bits depend on these rows alone, not on what came before."""
    halves = are_half(source.dtype, target.dtype)
    for x, y in zip(*(_pieces(side, _piece(halves, total.device)) for side in (source, target)), strict=True):
        if halves:
            _add_halves(total, x, y)
        else:
            total.addmm_(x.to(total.dtype).T, y.to(total.dtype))


def energy(signal: Tensor) -> Tensor:
    """|X|^2, summed in float64; of half-precision signals the rows in float32."""
    if are_half(signal.dtype):
        size = ROWS_ON_CPU if signal.device.type == "cpu" else PIECE
        rows = [torch.linalg.vector_norm(part.float(), dim=1) for part in signal.split(size)]
        return torch.cat(rows).double().square().sum()
    norm: Tensor = torch.linalg.vector_norm(signal, dtype=torch.float64)
    return norm.square()


def are_half(*dtypes: torch.dtype) -> bool:
    """Whether products of such numbers are exact in float32."""
    return all(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes)


def work_bytes(rows: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> int:
    """The memory that `add_product` needs beside signals of so many rows and the sum."""
    rows = min(rows, PIECE)
    if not are_half(dtype):
        return 8 * rows * sum(shape)
    return 4 * (rows * sum(shape) + min(shape[0] * shape[1], _block(device) + shape[1]))


def _piece(halves: bool, device: torch.device) -> int:
    if device.type != "cpu":
        return PIECE
    return HALF_PIECE_ON_CPU if halves else PIECE_ON_CPU


def _pieces(signal: Tensor, size: int) -> tuple[Tensor, ...]:
    return signal.chunk(-(-len(signal) // size) or 1)


def _block(device: torch.device) -> int:
    return BLOCK_ON_CPU if device.type == "cpu" else BLOCK


def _add_halves(total: Tensor, x: Tensor, y: Tensor) -> None:
    """A block of rows of the product at a time, so that no second matrix of the sum's size is needed.

    By way of float32, also where a GPU is allowed TF32: it holds such numbers without rounding.
    """
    both_bfloat16 = x.dtype == y.dtype == torch.bfloat16
    x, y = (side.to(torch.float32, memory_format=torch.contiguous_format) for side in (x, y))
    rows = max(_block(total.device) // max(y.shape[1], 1), 1)
    with _bfloat16_units(both_bfloat16 and total.device.type == "cpu"):
        for start in range(0, x.shape[1], rows):
            total[start : start + rows] += torch.mm(x[:, start : start + rows].T, y)


@contextmanager
def _bfloat16_units(wanted: bool) -> Iterator[None]:
    """Let the CPU multiply float32 matrices by its bfloat16 units, which is exact where they hold bfloat16 values.

    torch knows this as a setting of the whole process. It is put back at once, and left alone while another thread
    may be computing (one that is not a daemon): products are then as right, and slower.
    """
    setting = getattr(getattr(torch.backends, "mkldnn", None), "matmul", None)
    before = getattr(setting, "fp32_precision", None)
    if not wanted or before is None or not _alone() or not _set(setting, "bf16"):
        yield
        return
    try:
        yield
    finally:
        _set(setting, before)


def _set(setting: object, value: str) -> bool:
    try:
        setting.fp32_precision = value  # type: ignore[attr-defined]
    except RuntimeError:  # settings may be locked
        return False
    return True


def _alone() -> bool:
    own = threading.current_thread()
    return all(thread is own or thread.daemon for thread in threading.enumerate())
