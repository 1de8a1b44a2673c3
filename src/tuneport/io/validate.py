"""Whether weights can be worked with: numbers, none of them NaN or infinite, and of one structure on both sides.

The checks collect everything they find and say it in one CheckpointError, with what to do about it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ..errors import CheckpointError, first_of
from .tensors import TensorSpec, all_finite, describe


def check_finite(tensors: Mapping[str, torch.Tensor], names: Iterable[str] | None = None) -> None:
    """Raise a CheckpointError that names the tensors holding NaN or infinity, reading one at a time."""
    chosen = list(tensors if names is None else names)
    bad = []
    for name in chosen:
        if not _is_weight(describe(tensors, name)):
            continue
        if not all_finite(tensors[name]):
            bad.append(name)
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(chosen)} tensors of {_name_of(tensors, 'the model')} hold NaN or infinite "
            f"values: {first_of(bad)}. Use a checkpoint from before training diverged."
        )


def check_unquantised(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Raise a CheckpointError that names the weights that are codes in place of numbers."""
    chosen = [name for name in names if name in tensors]
    coarse = [f"{name} ({dtype})" for name in chosen if is_quantised(dtype := describe(tensors, name).dtype)]
    if coarse:
        raise CheckpointError(
            f"{len(coarse)} of {len(chosen)} tensors of {_name_of(tensors, 'the model')} are quantised: "
            f"{first_of(coarse)}. Give the model in float32, bfloat16 or float16."
        )


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype != torch.bool


def same_structure(
    base: Mapping[str, torch.Tensor], finetuned: Mapping[str, torch.Tensor], exclude: Sequence[str] = ()
) -> None:
    """Raise one CheckpointError with every tensor that is missing on a side or differs in shape.

    `exclude` holds glob patterns of names to leave out. Integer tensors (position ids, counters) are no
    part of a fine-tune and are left out too.
    """
    specs = [
        {name: describe(side, name) for name in side if not any(fnmatchcase(name, glob) for glob in exclude)}
        for side in (finetuned, base)
    ]
    here, there = ({name: spec for name, spec in side.items() if _is_weight(spec)} for side in specs)
    one, other = _name_of(finetuned, "the fine-tuned model"), _name_of(base, "the base")
    total = len({**here, **there})
    differing = {
        name: f"{name} {here[name].shape} vs {there[name].shape}"
        for name in here
        if name in there and here[name].shape != there[name].shape
    }
    extra = {name: name for name in here if name not in base}
    missing = {name: name for name in there if name not in finetuned}
    findings = [
        f"{len(found)} of {total} tensors of {holder} {are} {other_holder}: {first_of(found.values())}."
        for found, holder, are, other_holder in (
            (differing, one, "differ in shape from", other),
            (extra, one, "are not in", other),
            (missing, other, "are not in", one),
        )
        if found
    ]
    if findings:
        padding = _padding({_vocabularies(here[name], there[name]) for name in differing})
        exclusion = _exclusion_of([*differing, *extra, *missing], {**here, **there}, one, other)
        raise CheckpointError(" ".join([*findings, *padding, exclusion]))


def _vocabularies(one: TensorSpec, other: TensorSpec) -> tuple[int, int] | None:
    """The lengths of two tables with equal rows, and many of them, as vocabularies have; else None."""
    alike = len(one.shape) == 2 and one.shape[1:] == other.shape[1:] and min(one.shape[0], other.shape[0]) >= 256
    return (one.shape[0], other.shape[0]) if alike else None


def _padding(lengths: Collection[tuple[int, int] | None]) -> list[str]:
    """What to do where all that differs is the length of the vocabulary."""
    found = next(iter(lengths)) if len(lengths) == 1 else None
    if found is None:
        return []
    return [
        f"If these are vocabularies of {found[0]} and {found[1]} entries, one of them padded, give both the "
        "same length with resize_token_embeddings."
    ]


def _is_weight(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _exclusion_of(names: Sequence[str], among: Collection[str], one: str, other: str) -> str:
    """What to pass to leave these names out: their modules, or, where those are many, what holds nothing else."""
    patterns = sorted({f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names})
    if len(patterns) > 3 and 2 * len(names) < len(among):
        others = set(among) - set(names)
        patterns = sorted({_widest(name, others) for name in names})
    if len(patterns) > 3:
        return f"Check that {one} was fine-tuned from {other}."
    return "Exclude them with " + " ".join(f'--exclude "{pattern}"' for pattern in patterns) + "."


def _widest(name: str, others: Collection[str]) -> str:
    """The shortest beginning of a name that none of the others shares, as a pattern."""
    parts = name.split(".")
    beginnings = (".".join(parts[:length]) + "." for length in range(1, len(parts)))
    return next((f"{start}*" for start in beginnings if not any(o.startswith(start) for o in others)), name)


def _name_of(tensors: object, default: str) -> str:
    path = getattr(tensors, "path", None)
    return default if path is None else f"{path}{'/' if Path(path).is_dir() else ''}"
