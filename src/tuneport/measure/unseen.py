"""The samples of a test split that calibration does not use: on others, a gain would be claimed that is none.

Data without splits serve calibration and evaluation: the samples that calibration does not draw are held out. A test
split may also share samples with the training split, by mistake. Both are found by the content of the samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.dataset import Dataset
from ..data.images import files_of
from ..errors import DataError
from ..io.fingerprint import file_digests
from ..models.base import Model
from .accuracy import usual_protocol
from .samples import Calibration, DatasetSamples

FEWEST = 20  # samples to score, where others were left out
PAIRED = 3  # samples of a fidelity, which correlates the cosines of their pairs


@dataclass(frozen=True, eq=False)
class Unseen:
    """Test samples that calibration does not use, their indices in the whole split, and how many others it uses."""

    test: Dataset
    indices: NDArray[np.int64]
    shared: int = 0

    @property
    def held_out(self) -> bool:
        """True if the data have one split, of which these samples are held out."""
        return self.shared > 0 and self.test.split == "all"

    @property
    def note(self) -> str:
        """For the user, where samples are left out."""
        if self.held_out:
            return (
                f"{self.test.name} has no test split: {len(self.test)} samples that calibration does not use are scored"
            )
        return f"{self.shared} test samples are also calibration samples: they are not scored" if self.shared else ""


def unseen(target: Model, calibration: Calibration, test: Dataset, samples: int | None = None) -> Unseen:
    """Choose the test samples that are scored, `samples` at most, in a fixed draw; those of calibration are left out.

    Raises:
        DataError: if too few are left.
    """
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0)).numpy()
    used = calibration.samples
    seen = frozenset(_contents(used.chosen)) if isinstance(used, DatasetSamples) else frozenset()
    chosen, shared = [], 0
    for index, content in zip(order, _contents(test.subset(order)) if seen else order, strict=True):
        if content in seen:
            shared += 1
        else:
            chosen.append(index)
        if len(chosen) == samples:
            break
    if shared and len(chosen) < min(FEWEST, samples or FEWEST):
        raise DataError(
            f"calibration uses all but {len(chosen)} of the {len(test)} samples of {test}, and a score needs {FEWEST} "
            "others: calibrate on fewer, or add a test split."
        )
    if len(chosen) < PAIRED and calibration.heads is None and usual_protocol(target, test) == "zero-shot":
        raise DataError(f"a fidelity needs {PAIRED} test samples, and {test} has {len(chosen)}.")
    indices = np.sort(np.array(chosen, dtype=np.int64))
    return Unseen(test.subset(indices), indices, shared)


def _contents(data: Dataset) -> Iterator[str]:
    """Yield what tells each sample from others: a digest of its image, or its texts; labels do not count."""
    if files := files_of(data):
        for file in files:
            yield from file_digests([file]).values()
        return
    for index, value in enumerate(data.inputs):
        if data.kind == "image":
            yield f"{value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
        else:
            more = [None if items is None else items[index] for items in (data.targets, data.choices)]
            yield json.dumps([value, *more], sort_keys=True, default=str)
