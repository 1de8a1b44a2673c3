"""Bilinear alignment: `tau_B = R_out^T tau_A R_in` (eq. 8), with a choice of signal for each side.

BiCo aligns layer inputs and output gradients; THESEUS inputs and outputs; the ablations and the naive transfer use
other signals, or none. A low-rank tau = B A moves as its factors, `(R_out^T B)(A R_in)`: exact and of the same rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..maps.procrustes import Alignment, CoordinateMap, solve_groups
from ..maps.statistics import Key
from ..pairing import LayerPair, LoosePair, blocks_of, keep_layers
from ..task_vectors.low_rank import Entry, LowRank, as_dense
from ..types import Completion, Signal
from .base import NOT_RUN, Entries, LayerRecord, Method, Problem, Transfer, bias_of, matrix_of, record_of

Map = Tensor | CoordinateMap | None  # a fixed map, a solved map, or pad and crop


@dataclass(frozen=True)
class BilinearAlignment(Method):
    """Align the input side by `in_signal` and the output side by `out_signal`; None pads with zeros or crops.

    With `moves_loose`, tensors outside linear layers are padded or cropped too; otherwise the target keeps its own.
    `completion` says how a rank-deficient map is completed.
    """

    in_signal: Signal | None
    out_signal: Signal | None
    moves_loose: bool = False
    uses_augmented_inputs: bool = False
    completion: Completion = "svd"
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
            problem.on_layer(pair)
            keys = self._keys(pair)
            unsolved = [key for key in keys if key and not (key in maps and maps[key].rank)]
            if unsolved:
                layer, signal = unsolved[0]
                zero = f"the {signal.replace('_', ' ')} at this layer is zero"
                kept += keep_layers([pair.target], zero if (layer, signal) in maps else NOT_RUN)
                continue
            align_in, align_out = (maps[key] if key else None for key in keys)
            R_in = align_in.map if align_in else pair.input_map
            R_out = align_out.map if align_out else pair.output_map
            evidence = {
                f"{name}_{side}": getattr(found, name)
                for side, found in (("in", align_in), ("out", align_out))
                for name in ("rank", "residual")
                if found
            }
            records.append(move(pair, problem.task_vector, R_out, R_in, entries, **evidence))
        for loose in problem.plan.loose if self.moves_loose else ():
            entries.put_loose(loose.target.name, _pad(loose, problem.task_vector[loose.source.name]))
        return Transfer(entries.task_vector(), tuple(records), tuple(kept))

    def _solve(self, problem: Problem) -> Iterator[tuple[LayerPair, Mapping[Key, Alignment]]]:
        """Yield all pairs, each with the maps of its block, which are solved at the first pair of the block."""
        blocks = blocks_of(problem.plan.pairs)
        known = problem.statistics.covariances
        keys = [[key for pair in block for key in self._keys(pair) if key and key in known] for block in blocks]
        solved = solve_groups(problem.statistics, keys, self.completion, problem.memory_budget)
        for block, maps in zip(blocks, solved, strict=True):
            yield from ((pair, maps) for pair in block)

    def _keys(self, pair: LayerPair) -> list[Key | None]:
        """The maps to solve for the input and the output side; None for a fixed map, or to pad and crop."""
        sides = ((self.in_signal, pair.input_map), (self.out_signal, pair.output_map))
        return [(pair.target.name, signal) if signal and fixed is None else None for signal, fixed in sides]


def move(
    pair: LayerPair, task_vector: Mapping[str, Entry], R_out: Map, R_in: Map, into: Entries, **evidence: Any
) -> LayerRecord:
    """Transport the change of a layer, put it into the entries of the target, and record it with its evidence."""
    tau = matrix_of(pair.source, task_vector[pair.source.weight])
    moved = transport(tau, R_out, R_in, (pair.target.out_features, pair.target.in_features))
    into.put(pair.target, moved.to(tau.device, torch.float32))
    bias = bias_of(pair, task_vector)
    if bias is not None:
        into.put_bias(pair.target, carry(bias.double(), R_out, pair.target.out_features, 0).to(bias.device))
    return record_of(pair, tau, moved, **evidence)


def transport(tau: Entry, R_out: Map, R_in: Map, shape: tuple[int, int]) -> Entry:
    """R_out^T tau R_in (eq. 8), in float64; each factor of a low-rank tau moves on its own side."""
    if isinstance(tau, LowRank):
        B, A = tau.out_factor.double(), tau.in_factor.double()
        return LowRank(carry(B, R_out, shape[0], 0), carry(A, R_in, shape[1], 1))
    return carry(carry(tau.double(), R_out, shape[0], 0), R_in, shape[1], 1)


def carry(tau: Tensor, R: Map, width: int, axis: int) -> Tensor:
    """Change one axis of tau to target coordinates: contract with R, on the device of a solved map, or pad and crop."""
    if R is None:
        return _resize(tau, axis, width)
    if isinstance(R, CoordinateMap):
        return R.carry(tau, axis)
    R = R.to(device=tau.device, dtype=tau.dtype)
    return R.T @ tau if axis == 0 else tau @ R


def _resize(tensor: Tensor, axis: int, width: int) -> Tensor:
    """Zero-pad or crop one axis at its end."""
    later = (0, 0) * (tensor.ndim - 1 - axis)
    return torch.nn.functional.pad(tensor, (*later, 0, width - tensor.shape[axis]))


def _pad(pair: LoosePair, tau: Entry) -> Entry:
    """Zero-pad or crop every axis; axes of length one do not count, so (d,) fits (1, 1, d)."""
    if isinstance(tau, LowRank) and len(tau.shape) == len(pair.target.shape) == 2:
        rows, columns = pair.target.shape
        return LowRank(_resize(tau.out_factor, 0, rows), _resize(tau.in_factor, 1, columns))
    tau = as_dense(tau)
    shape = [size for size in pair.target.shape if size > 1] or [1]
    tau = tau.reshape([size for size in tau.shape if size > 1] or [1])
    more = tau.ndim - len(shape)
    tau = tau[(0,) * more + (None,) * -more]
    for axis, width in enumerate(shape):
        tau = _resize(tau, axis, width)
    return tau.reshape(pair.target.shape)
