"""A transfer from end to end (Algorithm 1 of the paper): prepare, measure, move, and return a Result.

Works on paths and on live modules, and changes nothing that is given. `pipeline.port` writes the result to files.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..errors import MethodError, TuneportError, first_of
from ..job import Job
from ..measure.objectives import TokenLoss
from ..methods import LayerRecord, Method, Transfer, get_method, name_of
from ..models.base import ModelLike
from ..pairing import Plan
from ..report.record import to_json
from ..runtime.budget import passes_of
from ..runtime.distributed import ranks
from ..runtime.passes import Passes
from ..runtime.resume import Work, fingerprint
from ..task_vectors.lora_write import AdapterForm
from ..task_vectors.low_rank import norm_of
from ..types import Progress, Say, ScaleRule
from .change import Finetuned
from .heads import fit_head
from .labels import measurable
from .move import Moved, move
from .moved import account, changed_parts
from .options import Options
from .outcome import outcome_of
from .plan import not_transported_by
from .prepare import Data, prepare
from .result import Result
from .sanity import Seen, look
from .scale import RULES, scaled_as_written


def transfer(
    source: ModelLike,
    finetuned: Finetuned | Sequence[Finetuned],
    target: ModelLike,
    data: Data | None = None,
    *,
    method: str | Method = "bico",
    scale: float | ScaleRule | None = None,
    form: AdapterForm | None = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Result:
    """Port a fine-tune of `source` to `target` (Algorithm 1 of the paper).

    Trap: with very few samples a full-strength transfer (`scale=1`, the paper's) can harm. `scale="auto"` chooses the
    strength on calibration samples, and may choose zero; `scale="safe"` needs evidence beyond the smallest candidate.

    Args:
        source, finetuned, target, data, options: see `prepare`.
        method: the name of a method, or a Method.
        scale: the strength, or the rule that chooses it; see `scale_for`.
        form: of the adapter that the result will be saved as: the scale is chosen for what it holds.
        progress: called with the number of samples that were measured since the last call.
    """
    method = get_method(method)
    strength = check_scale(scale)
    scored = None if strength is None else isinstance(strength, str)
    job = prepare(source, finetuned, target, data, signals=method, scored=scored, **options)
    return run(replace(job, form=form), method, scale=strength, progress=progress)


def run(
    job: Job,
    method: str | Method = "bico",
    *,
    scale: float | ScaleRule | None = None,
    progress: Progress | None = None,
    work: Work | None = None,
    passes: Passes | None = None,
    note: Say | None = None,
    step: Say | None = None,
) -> Result:
    """Measure both models, align them, and carry the task vector over.

    Args:
        job: prepared for the signals of the method.
        method: the name of a method, or a Method.
        scale: the strength, or the rule that chooses it; see `scale_for`.
        progress: called with the number of samples that were measured since the last call.
        work: keeps what is measured, and gives back what an earlier run under the same conditions has measured.
        passes: which layers are measured together; unless given, what the memory of the machine or of the job needs.
        note: called, before anything is measured, with what the fine-tuned source does on the samples.
        step: called with the name of each step as it begins.
    """
    method = get_method(method)
    scale = scale_for(job, scale)
    job = job.for_(method)
    at_once = method.signals and not method.by_layer
    if ranks().size > 1 and (isinstance(scale, str) or work is not None or at_once):
        raise TuneportError(
            'scale="auto", scale="safe", resuming and methods that move all layers at once are not supported with '
            "several processes: pass a number as `scale` and no `resume`, choose another method, or use one process."
        )
    started = time.perf_counter()
    if passes is None:
        passes = passes_of(job, method, scale)
    seen = look(job)
    if note is not None and seen.sentence:
        note(seen.sentence)
    job = measurable(job, seen.scores)
    moved = move(job, method, scale, passes=passes, progress=progress, work=work, step=step)  # lines 3 to 9
    _check_moved(job, moved.transfer)
    head = _refitted(job, moved)
    return _result(job, method, scale, moved, head, seen, time.perf_counter() - started)  # line 11


def _check_moved(job: Job, done: Transfer) -> None:
    """Raise a MethodError if neither a layer nor a head is changed; a scale of zero is a choice, and no error."""
    entries = done.task_vector.values()
    if job.fits_head or any(record.norm_target for record in done.records) or any(map(norm_of, entries)):
        return
    reasons = Counter(item.reason for item in done.kept).most_common()
    found = first_of((f"{reason} ({count} tensors)" for reason, count in reasons), 3) or "the change is zero"
    raise MethodError(
        f"nothing was moved: {found}. Check that the classes of the head and the labels differ, and the samples too."
    )


def _refitted(job: Job, moved: Moved) -> Mapping[str, Tensor]:
    """The target's head, fitted on its ported features; nothing if the job fits no head."""
    if not job.fits_head:
        return {}
    with scaled_as_written(job, moved.transfer.task_vector) as ported:
        ported.set(moved.scale)
        return fit_head(job.target, ported.module, job.samples)


def scale_for(job: Job, scale: float | ScaleRule | None) -> float | ScaleRule:
    """The scale that was asked for; else a rule that chooses it where samples can be scored, else 1 as in the paper.

    Samples can be scored if they have classes or are predicted token by token, by whole models in one process. The rule
    for images is "safe": "auto" can harm there. It has not harmed on texts, where "safe" costs half of the gain
    (docs/what-we-tried.md).
    """
    asked = check_scale(scale)
    if asked is not None:
        return asked
    judged = job.heads is not None or (job.losses is not None and isinstance(job.losses.target, TokenLoss))
    if not judged or ranks().size > 1 or any(model.offloaded for model in job.models):
        return 1.0
    return "safe" if job.target.kind == "image" else "auto"


def check_scale(scale: float | str | None) -> float | ScaleRule | None:
    """A finite number, or the name of a rule that chooses one; None stays None."""
    if scale is None or scale in RULES:
        return scale
    try:
        number = float(scale)
    except ValueError:
        raise TuneportError(f"the scale must be a number, auto or safe, got {scale!r}.") from None
    if not math.isfinite(number):
        raise TuneportError(f"the scale must be a finite number, auto or safe, got {scale}.")
    return number


def conditions_of(job: Job, method: Method, scale: float | str) -> dict[str, Any]:
    """Everything that decides the result, as JSON values; the paths of the inputs do not."""
    inputs = {key: dict(job.record[key]) for key in ("source", "finetuned", "target", "data")}
    for identity in inputs.values():
        identity.pop("path", None)
    kept = {key: job.record[key] for key in ("tuneport", "options", "versions")}
    plain: dict[str, Any] = json.loads(to_json({**kept, "method": name_of(method), **inputs, "scale": scale}))
    return plain


def _result(
    job: Job,
    method: Method,
    scale: float | ScaleRule,
    moved: Moved,
    head: Mapping[str, Tensor],
    seen: Seen,
    seconds: float,
) -> Result:
    done = moved.transfer
    kept = not_transported_by(job, done.task_vector, done.kept)
    parts = changed_parts(job, done.task_vector, done.kept)
    record: dict[str, Any] = {
        **job.record,
        "method": name_of(method),
        "scale": moved.scale,
        "samples": moved.counted.samples,
        "seconds": round(seconds, 3),
        "fingerprint": fingerprint(conditions_of(job, method, scale)),
        "seconds_by_stage": {"measure": round(moved.measuring, 3), "transport": round(seconds - moved.measuring, 3)},
        "passes": dict(moved.counted.passes),
        "layers": _layer_entries(job.plan, done.records),
        "not_transported": [asdict(item) for item in kept],
        **account(parts),
        "sanity": seen.record(None if head else _of_target(seen, moved)),
        **asdict(outcome_of(None, scale=moved.scale, rule=scale if isinstance(scale, str) else None, head=bool(head))),
    }
    if (choice := moved.choice) is not None:
        candidates = [
            {"scale": value, "loss": found.loss, "accuracy": found.accuracy, "sharpness": found.sharpness}
            for value, found in choice.scores.items()
        ]
        about = {"rule": choice.rule, "samples": choice.samples, "held_out": choice.held_out}
        record["scale_choice"] = {**about, "candidates": candidates}
    if head:
        assert job.heads is not None
        record["head"] = {"tensors": sorted(head), "classes": list(job.heads.target.classes)}
    target = job.target.with_head(head) if head else job.target
    return Result(target, done.task_vector, done.records, kept, moved.scale, record, job, parts)


def _of_target(seen: Seen, moved: Moved) -> float | None:
    """The score of the target on the same samples, where the choice of the scale has found it."""
    if moved.choice is None or moved.choice.samples != seen.samples:
        return None
    found = moved.choice.scores[0.0]
    if seen.metric == "loss":
        return found.loss if found.accuracy is None else None
    return None if found.accuracy is None else round(found.accuracy * seen.samples)


def _layer_entries(plan: Plan, records: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """The records of the layers, each with its role and block and the largest possible ranks of its maps."""
    places = {
        pair.target.name: {
            "role": pair.target.role,
            "stack": pair.target.stack,
            "block": pair.target.block,
            "width_in": min(pair.source.in_features, pair.target.in_features),
            "width_out": min(pair.source.out_features, pair.target.out_features),
        }
        for pair in plan.pairs
    }
    return [{**asdict(record), **places.get(record.target, {})} for record in records]
