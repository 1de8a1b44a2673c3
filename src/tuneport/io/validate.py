"""Checks of weights: finite, not quantised, and the same structure in base and fine-tuned model.

Each check collects all findings into one CheckpointError that says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from ..errors import CheckpointError, first_of
from .tensors import Tensors, TensorSpec, all_finite, describe

LONGEST_PATTERN = 200  # characters of a pattern in an error
MOST_PARTS = 20  # of a name, whose prefixes are compared


def check_finite(tensors: Tensors, names: Iterable[str] | None = None) -> None:
    """Raise a CheckpointError that names the tensors holding NaN or infinity, reading one at a time."""
    chosen = list(tensors if names is None else names)
    bad = [name for name in chosen if _is_weight(describe(tensors, name)) and not all_finite(tensors[name])]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(chosen)} tensors of {_name_of(tensors, 'the model')} hold NaN or infinite "
            f"values: {first_of(bad)}. Use a checkpoint from before training diverged."
        )


def check_unquantised(tensors: Tensors, names: Iterable[str]) -> None:
    """Raise a CheckpointError that names the quantised tensors."""
    chosen = [name for name in names if name in tensors]
    quantised = [f"{name} ({dtype})" for name in chosen if is_quantised(dtype := describe(tensors, name).dtype)]
    if quantised:
        raise CheckpointError(
            f"{len(quantised)} of {len(chosen)} tensors of {_name_of(tensors, 'the model')} are quantised: "
            f"{first_of(quantised)}. Give the model in float32, bfloat16 or float16."
        )


def is_quantised(dtype: torch.dtype) -> bool:
    """True for dtypes of one byte: their values are codes and cannot be subtracted."""
    return dtype.itemsize == 1 and dtype != torch.bool


def same_structure(base: Tensors, finetuned: Tensors, exclude: Sequence[str] = ()) -> None:
    """Raise one CheckpointError with every weight that is missing in one model or differs in shape.

    `exclude` holds glob patterns of names to leave out.
    """
    tuned, old = (
        {
            name: spec.shape
            for name in model
            if not any(fnmatchcase(name, glob) for glob in exclude) and _is_weight(spec := describe(model, name))
        }
        for model in (finetuned, base)
    )
    tuned_name, base_name = _name_of(finetuned, "the fine-tuned model"), _name_of(base, "the base")
    differing = {
        name: f"{name} {tuned[name]} vs {old[name]}" for name in tuned if tuned[name] != old.get(name, tuned[name])
    }
    extra = {name: name for name in tuned if name not in base}
    missing = {name: name for name in old if name not in finetuned}
    total = len({**tuned, **old})
    findings = [
        f"{len(found)} of {total} tensors of {holder} {are} {other_holder}: {first_of(found.values(), 3)}."
        for found, holder, are, other_holder in (
            (differing, tuned_name, "differ in shape from", base_name),
            (extra, tuned_name, "are not in", base_name),
            (missing, base_name, "are not in", tuned_name),
        )
        if found
    ]
    if findings:
        padding = _padding({(tuned[name], old[name]) for name in differing})
        exclusion = _exclusion_of([*differing, *extra, *missing], {**tuned, **old}, tuned_name, base_name)
        raise CheckpointError(" ".join([*findings, *padding, exclusion]))


def _padding(shapes: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[str]:
    """Advice where models differ only in the length of tables that look like vocabularies (256 rows or more)."""
    similar = all(len(one) == len(two) == 2 and one[1] == two[1] and min(one[0], two[0]) >= 256 for one, two in shapes)
    if not similar or len({(one[0], two[0]) for one, two in shapes}) != 1:
        return []
    ((one, _), (other, _)), *_ = shapes
    return [
        f"If these are vocabularies of {one} and {other} entries, and one of them is padded, resize one with "
        "resize_token_embeddings."
    ]


def _is_weight(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _exclusion_of(names: Sequence[str], among: Collection[str], one: str, other: str) -> str:
    """Advice on patterns that exclude these names: their modules, or shorter prefixes if those are more than three."""
    patterns = sorted({f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names})
    if len(patterns) > 3 and 2 * len(names) < len(among):
        others = set(among) - set(names)
        patterns = sorted({_widest(name, others) for name in names})
    if len(patterns) > 3 or max(map(len, patterns)) > LONGEST_PATTERN:
        return f"Check that {one} was fine-tuned from {other}."
    return f"Exclude them with `exclude={json.dumps(patterns)}`."


def _widest(name: str, others: Collection[str]) -> str:
    """A pattern of the shortest prefix of a name that none of the others has."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) + "." for length in range(1, min(len(parts), MOST_PARTS)))
    return next((f"{start}*" for start in prefixes if not any(o.startswith(start) for o in others)), name)


def _name_of(tensors: object, default: str) -> str:
    path = getattr(tensors, "path", None)
    return default if path is None else f"{path}{'/' if Path(path).is_dir() else ''}"
