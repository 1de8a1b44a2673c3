"""How many samples a draw takes, and whether the data have them. Nothing here needs a heavy library."""

from __future__ import annotations

from collections import Counter

from ..errors import DataError, first_of
from .dataset import Dataset

DEFAULT_SAMPLES = 100


def count_drawn(
    dataset: Dataset, samples: int | None = None, shots: int | None = None, *, labels_for: str | None = None
) -> int:
    """The number of samples that `samples`, or `shots` of every class, are.

    Args:
        dataset: the samples to draw from.
        samples: how many; by default 100, or all if there are fewer.
        shots: how many of every class that occurs, in place of `samples`.
        labels_for: what needs labels besides `shots`, in words.

    Raises:
        DataError: if the data have too few samples, or no labels where they are needed.
    """
    if samples is not None and shots is not None:
        raise DataError(f"asked for {samples} samples and for {shots} shots; pass `samples` or `shots`, not both.")
    if dataset.labels is None and (shots is not None or labels_for is not None):
        expected = f"expected a label per sample for {labels_for if shots is None else '`shots`'}"
        raise DataError(f"{dataset} has no labels; {expected}. Use `samples` and the sampler random.")
    if shots is not None:
        return _count_shots(dataset, shots)
    count = min(DEFAULT_SAMPLES, max(len(dataset), 1)) if samples is None else samples
    if count <= 0:
        raise DataError(f"asked for {count} samples; expected at least 1 in `samples`.")
    if count > len(dataset):
        raise DataError(f"asked for {count} samples but {dataset} has {len(dataset)}; lower `samples`.")
    return count


def _count_shots(dataset: Dataset, shots: int) -> int:
    if shots <= 0:
        raise DataError(f"asked for {shots} shots; expected at least 1 in `shots`.")
    sizes = Counter([] if dataset.labels is None else dataset.labels.tolist())
    short = [f"{dataset.classes[label]} ({size})" for label, size in sorted(sizes.items()) if size < shots]
    if short:
        raise DataError(
            f"asked for {shots} shots but {len(short)} of {len(sizes)} classes of {dataset} have fewer: "
            f"{first_of(short)}; lower `shots`."
        )
    return shots * len(sizes)
