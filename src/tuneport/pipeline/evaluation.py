"""What a transfer does on the test split: the target before and after, next to the fine-tuned source.

Language models are scored by bits per character or by their likeliest answers, encoders without classes by their
fidelity to the fine-tuned source. `measure.accuracy` scores classifiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.dataset import Dataset, align_labels
from ..data.tasks import read_data
from ..errors import DataError
from ..job import Job
from ..measure.accuracy import compute_features
from ..measure.language import likelihood, perplexity, usual_protocol
from ..models.base import Model
from .scale import Scaled


def read_test(data: str | Path | None, columns: Mapping[str, str] | None = None) -> Dataset:
    """The test split; images must have labels, and `check_test` looks at texts when the models are known."""
    if data is None:
        raise DataError("an accuracy needs labelled data and a head for it: pass `data`.")
    test = read_data(data, "test", labelled=False, columns=columns)
    return read_data(data, "test") if test.kind == "image" and test.labels is None else test


def check_test(job: Job, test: Dataset) -> None:
    """Refuse a test split that cannot be scored."""
    if job.heads is not None:
        align_labels(test, job.heads.target.classes)
    elif job.target.features is None:
        raise DataError("an accuracy needs labelled data and a head for it: pass `data`.")


def fidelity(features: Tensor, reference: Tensor) -> float:
    """The correlation of the cosines between all pairs of samples with those of a reference.

    >>> turned = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 2.0]])
    >>> round(fidelity(turned, turned[:, 1:].double()), 6)
    1.0
    """
    cosines = []
    for rows in (features, reference):
        unit = F.normalize(rows.double(), dim=-1)
        cosines.append((unit @ unit.T)[tuple(torch.triu_indices(len(rows), len(rows), 1))])
    return float(torch.corrcoef(torch.stack(cosines))[0, 1])


def evaluate_texts(job: Job, changed: nn.Module, test: Dataset) -> dict[str, Any]:
    """Scores of the target as it is and with a changed module, and of the fine-tuned source, for a run record.

    Without all of the fine-tune (`exclude`) or of the source in memory, a fine-tuned language model is not scored.
    """
    target, modules = job.target, {"before": job.target.module, "after": changed}
    about: dict[str, Any] = {"data": test.name, "samples": len(test)}
    protocol = usual_protocol(target, test)
    if protocol == "zero-shot":  # an encoder without classes
        job.source.require_in_memory("a comparison with the fine-tuned source", "evaluate the result afterwards")
        wanted = _of_finetuned(job, lambda source: compute_features(source, test))
        rows = {name: compute_features(target.with_module(module), test) for name, module in modules.items()}
        scores = {name: fidelity(features, wanted) for name, features in rows.items()}
        return {**about, "protocol": "fidelity", "metric": "fidelity", **scores}
    measure = likelihood if protocol == "likelihood" else perplexity
    found = {name: measure(target.with_module(module), test) for name, module in modules.items()}
    whole = set(job.task_vector) <= {name for name, _ in job.source.module.named_parameters()}
    if whole and not job.source.offloaded and not job.record["options"]["exclude"]:
        found["source"] = _of_finetuned(job, lambda source: measure(source, test))
    metric = "accuracy" if protocol == "likelihood" else "bits per character"
    values = {name: getattr(each, metric.replace(" ", "_")) for name, each in found.items()}
    details = ("accuracy", "perplexity", "tokens", "bits_per_character", "cut")
    rest = {name: {key: getattr(each, key) for key in details} for name, each in found.items()}
    return {**about, "protocol": protocol, "metric": metric, **values, "scores": rest}


def _of_finetuned(job: Job, score: Callable[[Model], Any]) -> Any:
    with Scaled(job.source.module, job.task_vector, job.source.stored_parameters()) as tuned:
        tuned.set(1.0)
        return score(job.source)
