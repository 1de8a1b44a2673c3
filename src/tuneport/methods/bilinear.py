"""Bilinear alignment: `tau_B = R_out^T tau_A R_in` (eq. 8), with a choice of signal for each side.

BiCo aligns layer inputs and output gradients; THESEUS inputs and outputs; the ablations and the naive
transfer are the same formula with other signals, or none. A low-rank tau = B A moves as its factors,
`(R_out^T B)(A R_in)`: exact, of the same rank, and without a dense update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from ..maps.completion import CoordinateMap
from ..maps.procrustes import Alignment, MapSolver
from ..maps.statistics import Key
from ..pairing import Kept, LayerPair, LoosePair
from ..task_vectors.low_rank import Entry, LowRank, as_dense
from ..types import Signal
from .base import LayerRecord, Method, Problem, Transfer
from .entries import Entries, matrix_of, recorded_norm, spectrum_of

Map = Tensor | CoordinateMap | None  # a fixed matrix, a solved one, or pad and crop


@dataclass(frozen=True)
class BilinearAlignment(Method):
    """Align the input side by `in_signal` and the output side by `out_signal`; None pads with zeros or crops.

    With `moves_loose`, the source's change of tensors outside linear layers is added, zero-padded or cropped; otherwise
    the target keeps its own.
    """

    in_signal: Signal | None
    out_signal: Signal | None
    moves_loose: bool = False
    rehearses: bool = False
    usual_scale: float | Literal["auto"] = 1.0
    summary: str = ""

    keeps_rank = True
    by_layer = True

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset(signal for signal in (self.in_signal, self.out_signal) if signal is not None)

    def transfer(self, problem: Problem) -> Transfer:
        entries = Entries()
        records, kept = [], []
        for pair, maps in self._solve(problem):
            sides = list(self._align(pair, maps))
            reason = next((side for side in sides if isinstance(side, str)), None)
            if reason is not None:
                kept += [Kept(name, reason) for name in (pair.target.name, pair.target.bias) if name is not None]
                continue
            (R_in, align_in), (R_out, align_out) = (side for side in sides if not isinstance(side, str))
            tau = matrix_of(pair.source, problem.task_vector[pair.source.weight])
            moved = _transport(tau, R_out, R_in, (pair.target.out_features, pair.target.in_features))
            entries.put(pair.target, _at_home(moved, tau))
            if pair.target.bias is not None and pair.source.bias is not None:
                bias = pair.source.vector(as_dense(problem.task_vector[pair.source.bias])).double()
                entries.put_bias(pair.target, _carry(bias, R_out, pair.target.out_features, 0).to(bias.device))
            records.append(
                LayerRecord(
                    target=pair.target.name,
                    source=pair.source.name,
                    rank_in=align_in.rank if align_in else None,
                    rank_out=align_out.rank if align_out else None,
                    residual_in=align_in.residual if align_in else None,
                    residual_out=align_out.residual if align_out else None,
                    norm_source=recorded_norm(tau),
                    norm_target=recorded_norm(moved),
                    rank=moved.rank if isinstance(moved, LowRank) else None,
                    spectrum_in=_spectrum(align_in, pair.source.in_features, pair.target.in_features),
                    spectrum_out=_spectrum(align_out, pair.source.out_features, pair.target.out_features),
                )
            )
        if self.moves_loose:
            for loose in problem.plan.loose:
                entries.put_loose(loose.target.name, _pad(loose, problem.task_vector[loose.source.name]))
        return Transfer(entries.task_vector(), tuple(records), tuple(kept))

    def _solve(self, problem: Problem) -> Iterator[tuple[LayerPair, Mapping[Key, Alignment]]]:
        """All pairs, each with the maps of its block, which are solved when the first pair of the block is due."""
        blocks = [
            list(group)
            for _, group in groupby(problem.plan.pairs, key=lambda pair: (pair.target.stack, pair.target.block))
        ]
        keys = [[key for key in self._keys(block) if key in problem.statistics] for block in blocks]
        solver = MapSolver(problem.statistics, problem.completion, problem.memory_budget)
        for block, maps in zip(blocks, solver.solve_groups(keys), strict=True):
            yield from ((pair, maps) for pair in block)

    def _keys(self, pairs: Iterable[LayerPair]) -> Iterator[Key]:
        """The maps that these pairs need."""
        for pair in pairs:
            for signal, fixed in ((self.in_signal, pair.input_map), (self.out_signal, pair.output_map)):
                if fixed is None and signal is not None:
                    yield pair.target.name, signal

    def _align(self, pair: LayerPair, maps: Mapping[Key, Alignment]) -> Iterator[tuple[Map, Alignment | None] | str]:
        """For the input side, then the output side: the map and its evidence, or why there is none."""
        for signal, fixed in ((self.in_signal, pair.input_map), (self.out_signal, pair.output_map)):
            if fixed is not None:
                yield fixed, None
            elif signal is None:
                yield None, None
            elif (pair.target.name, signal) not in maps:
                yield "its layer did not run on the calibration data"
            else:
                alignment = maps[pair.target.name, signal]
                words = signal.replace("_", " ")
                yield (alignment.map, alignment) if alignment.rank else f"the {words} at this layer is zero"


def _spectrum(alignment: Alignment | None, *widths: int) -> tuple[float, ...] | None:
    """The singular values, thinned out; None where no map was solved, or by a route that needs none of them."""
    values = alignment.singular_values if alignment is not None else None
    return spectrum_of(values, min(widths)) if values is not None else None


def _transport(tau: Entry, R_out: Map, R_in: Map, shape: tuple[int, int]) -> Entry:
    """R_out^T tau R_in (eq. 8), in float64; of a low-rank tau each factor moves on its own side."""
    if isinstance(tau, LowRank):
        B, A = tau.out_factor.double(), tau.in_factor.double()
        return LowRank(_carry(B, R_out, shape[0], 0), _carry(A, R_in, shape[1], 1))
    return _carry(_carry(tau.double(), R_out, shape[0], 0), R_in, shape[1], 1)


def _at_home(moved: Entry, tau: Entry) -> Entry:
    """In float32, on the device where the source's task vector lies."""
    device = tau.in_factor.device if isinstance(tau, LowRank) else tau.device
    if isinstance(moved, LowRank):
        return LowRank(moved.out_factor.to(device, torch.float32), moved.in_factor.to(device, torch.float32))
    return moved.to(device, torch.float32)


def _carry(tau: Tensor, R: Map, width: int, axis: int) -> Tensor:
    """Change one axis of tau from source to target coordinates: contract with R, or pad and crop.

    A solved map works where it was solved, so the result may be on another device than tau.
    """
    if R is None:
        return _resize(tau, axis, width)
    if isinstance(R, CoordinateMap):
        return R.carry(tau, axis)
    R = R.to(device=tau.device, dtype=tau.dtype)
    return R.T @ tau if axis == 0 else tau @ R


def _resize(tensor: Tensor, axis: int, width: int) -> Tensor:
    """Zero-pad or crop one axis at its end."""
    have = tensor.shape[axis]
    if have >= width:
        return tensor.narrow(axis, 0, width)
    shape = list(tensor.shape)
    shape[axis] = width - have
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def _pad(pair: LoosePair, tau: Entry) -> Entry:
    """Zero-pad or crop every axis; axes of length one do not count, so (d,) fits (1, 1, d)."""
    if isinstance(tau, LowRank) and len(tau.shape) == len(pair.target.shape) == 2:
        rows, columns = pair.target.shape
        return LowRank(_resize(tau.out_factor, 0, rows), _resize(tau.in_factor, 1, columns))
    tau = as_dense(tau)
    shape = [size for size in pair.target.shape if size > 1] or [1]
    tau = tau.reshape([size for size in tau.shape if size > 1] or [1])
    tau = tau[(0,) * max(tau.ndim - len(shape), 0)]
    tau = tau.reshape((1,) * (len(shape) - tau.ndim) + tuple(tau.shape))
    for axis, width in enumerate(shape):
        tau = _resize(tau, axis, width)
    return tau.reshape(pair.target.shape)
