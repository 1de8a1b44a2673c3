"""A transfer from end to end: Algorithm 1 of the paper on one screen.

Works on paths and on live modules, and changes nothing that is given. `pipeline.run` writes the result to files.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from ..config import MeasureConfig, TransferConfig
from ..errors import MethodError, first_of
from ..measure.fitted_heads import fit_head, with_teacher_scores
from ..measure.objectives import TokenLoss
from ..measure.samples import Calibration, Limits, Measurement
from ..methods import LayerRecord, Method, Transfer, get_method, name_of
from ..models.base import Model, ModelLike
from ..models.change import Change, Finetuned
from ..models.open import pick_device
from ..outputs import Update, output_of
from ..pairing import Plan
from ..runtime.budget import passes_of
from ..runtime.costs import Costs
from ..runtime.passes import Passes
from ..runtime.resume import Work, fingerprint
from ..task_vectors.low_rank import norm_of
from ..task_vectors.vector import account
from ..types import Events, ScaleRule, Sides, Signal
from .comparison import summarize
from .inputs import check_inputs, conditions_of, count_forward_passes, describe_inputs, open_models, read_change
from .plan import changed_parts, make_plan, not_transported_by
from .result import Result
from .samples import Data, are_samples, draw_samples, label_samples
from .scale import Judge
from .solve import Solution, solve


@dataclass(frozen=True, eq=False)
class Setup:
    """A checked transfer that has not run: every error in the input was found.

    Args:
        models: source and target, with the heads that they need.
        change: what the fine-tune changed in the source.
        plan: the paired layers.
        calibration: samples, losses and heads.
        about: options, inputs with their SHA-256, and notes, for the record.
    """

    models: Sides[Model]
    change: Change
    plan: Plan
    calibration: Calibration
    about: Mapping[str, Any]

    def __repr__(self) -> str:
        names = " to ".join(model.name for model in self.models)
        return f"Setup({names}: {self.plan!r}, {len(self.calibration.samples)} samples)"

    def measurement(self, config: MeasureConfig, method: Method) -> Measurement:
        """What is measured for a method.

        Raises:
            MethodError: if the method needs signals that the setup was not prepared for, or cannot serve the plan.
        """
        if missing := sorted(method.signals - self.calibration.signals):
            known = ", ".join(sorted(self.calibration.signals)) or "no signals"
            raise MethodError(f"the method needs {', '.join(missing)}, and the setup was prepared for {known}.")
        method.check(self.plan)
        device = pick_device(config.device) if config.memory_budget is not None else None
        limits = Limits(config.max_tokens, config.memory_budget, device, seed=config.seed)
        return Measurement(self.models, self.plan, replace(self.calibration, signals=method.signals), limits)


def transfer(
    source: ModelLike,
    finetuned: Finetuned | Sequence[Finetuned],
    target: ModelLike,
    data: Data | None = None,
    *,
    events: Events | None = None,
    **options: Any,
) -> Result:
    """Port a fine-tune of `source` to `target` (Algorithm 1 of the paper).

    Trap: with very few samples a full-strength transfer (`scale=1`, the paper's) can harm. `scale="auto"` chooses the
    strength on calibration samples, and may choose zero; `scale="safe"` needs evidence beyond the smallest candidate.

    Args:
        source: the old base model, as a path, a name or a live module.
        finetuned: the fine-tuned source, an adapter of it, or a task vector; of a list, the changes are added.
        target: the new base model.
        data: a path or a Dataset, from which samples are drawn, or batches for the option `loss`.
        events: listens to the run.
        options: the fields of `TransferConfig`.

    Returns:
        The result, which can be applied and saved.

    Raises:
        TuneportError: if an input or an option is not usable.
    """
    config = TransferConfig.of(**options)
    setup = prepare(source, finetuned, target, data, config)
    return run(setup, config, events=events)


def prepare(
    source: ModelLike,
    finetuned: Finetuned | Sequence[Finetuned],
    target: ModelLike,
    data: Data | None,
    config: MeasureConfig,
    *,
    signals: frozenset[Signal] | None = None,
    tested: bool | None = False,
) -> Setup:
    """Open everything, pair the layers and draw the samples; nothing is measured.

    Args:
        source: the old base model.
        finetuned: the fine-tuned source, or several.
        target: the new base model.
        data: a path or a Dataset, or batches for the option `loss`.
        config: the options.
        signals: those of several methods, in place of those of the method of the options.
        tested: whether a labelled test split will be scored, which needs a head or a loss; None: if it can be.
    """
    wanted = get_method(config.method).signals if signals is None else signals
    models = open_models(source, target, config)
    models, change = read_change(models, finetuned, config, has_samples=are_samples(data))
    calibration, drawn = draw_samples(models, change, data, config, wanted, scored=_scored(config, tested))
    calibration, labels = label_samples(models.source, change, calibration, config.labels)
    drawn = drawn if labels is None else {**drawn, "labels": labels}
    plan = make_plan(models, change, config)
    return Setup(models, change, plan, calibration, describe_inputs(models, change, plan, calibration, drawn, config))


def run(
    setup: Setup,
    config: TransferConfig,
    *,
    passes: Passes | None = None,
    work: Work | None = None,
    events: Events | None = None,
) -> Result:
    """Measure both models, align them, and carry the task vector over.

    Args:
        setup: prepared with the same options.
        config: the options.
        passes: which layers are measured together; unless given, what the memory needs.
        work: keeps what is measured, and gives back what an earlier run under the same conditions has measured.
        events: listens to the run.
    """
    method, output, change = get_method(config.method), output_of(config), setup.change
    scale, events = choose_rule(setup, config.scale), events or Events()
    measurement = setup.measurement(config, method)
    started = time.perf_counter()
    if passes is None:
        passes = passes_of(measurement, change.vector, method, chooses_scale=isinstance(scale, str))
    asked = count_forward_passes(setup.models.source, change, setup.calibration, config.exclude)
    events.step("asking the fine-tuned source", asked * Costs.of(measurement).answer.source, asked)
    checked = check_inputs(setup.models.source, change, setup.plan, setup.calibration, config, events.advance)
    if checked.sentence:
        events.note(checked.sentence)
    samples = with_teacher_scores(setup.models, change, setup.calibration.samples, checked.scores)
    measurement = replace(measurement, calibration=replace(measurement.calibration, samples=samples))
    judge = Judge(setup.models.target, measurement.calibration, output, change.fits_head)
    solution = solve(measurement, change, method, scale, judge, passes=passes, work=work, events=events)  # lines 3 to 9
    _check_moved(change, solution.transfer)
    head = _refitted(judge, solution)
    setup = replace(setup, calibration=measurement.calibration)
    facts = {
        **asdict(
            summarize(None, scale=solution.scale, rule=scale if isinstance(scale, str) else None, head=bool(head))
        ),
        "sanity": checked.record(None if head else solution.choice),
        "fingerprint": fingerprint(conditions_of(setup.about, config, method, scale)),
    }
    return _result(setup, config, solution, head, facts, time.perf_counter() - started)  # line 11


def _result(
    setup: Setup,
    config: TransferConfig,
    solution: Solution,
    head: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    seconds: float,
) -> Result:
    """The result, with its record; `facts` are further entries of it."""
    done, plan, source = solution.transfer, setup.plan, setup.models.source
    kept = not_transported_by(setup.models.target, plan, done.task_vector, done.kept)
    parts = changed_parts(source, setup.change, plan, done.task_vector, done.kept)
    record: dict[str, Any] = {
        **setup.about,
        "options": config.to_json(),
        "method": name_of(get_method(config.method)),
        "scale": solution.scale,
        "samples": solution.counted.samples,
        "seconds": round(seconds, 3),
        "seconds_by_stage": {
            "measure": round(solution.measuring, 3),
            "transport": round(seconds - solution.measuring, 3),
        },
        "passes": dict(solution.counted.passes),
        "layers": _layer_entries(plan, done.records),
        "not_transported": [asdict(item) for item in kept],
        **account(parts),
        **facts,
    }
    if solution.choice is not None:
        record["scale_choice"] = solution.choice.record()
    if head:
        assert setup.calibration.heads is not None
        record["head"] = {"tensors": sorted(head), "classes": list(setup.calibration.heads.target.classes)}
    target = setup.models.target.with_head(head) if head else setup.models.target
    fits, task = setup.change.fits_head, setup.change.task_type
    update = Update(target, done.task_vector, solution.scale, fits, task, parts)
    return Result(update, done.records, kept, config, record, setup)


def _layer_entries(plan: Plan, layers: Iterable[LayerRecord]) -> list[dict[str, Any]]:
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
    return [{**asdict(layer), **places.get(layer.target, {})} for layer in layers]


def _scored(config: MeasureConfig, tested: bool | None) -> bool | None:
    """Whether samples are scored: to choose a scale, for an evaluation or a distillation; None: if they can be."""
    if tested or isinstance(config.scale, str) or (isinstance(config, TransferConfig) and config.distill is not None):
        return True
    return None if tested is None or config.scale is None else False


def choose_rule(setup: Setup, scale: float | ScaleRule | None) -> float | ScaleRule:
    """The scale that was asked for; else a rule that chooses it where samples can be scored, else 1 as in the paper.

    Samples can be scored if they have classes or are predicted token by token, by whole models. The rule for images is
    "safe", for texts "auto".
    """
    if scale is not None:
        return scale
    heads, losses = setup.calibration.heads, setup.calibration.losses
    judged = heads is not None or (losses is not None and isinstance(losses.target, TokenLoss))
    if not judged or any(model.weights.offloaded for model in setup.models):
        return 1.0
    return "safe" if setup.models.target.inputs.kind == "image" else "auto"


def _check_moved(change: Change, done: Transfer) -> None:
    """Raise a MethodError if neither a layer nor a head is changed; a scale of zero is a choice, and no error."""
    entries = done.task_vector.values()
    if change.fits_head or any(record.norm_target for record in done.records) or any(map(norm_of, entries)):
        return
    reasons = Counter(item.reason for item in done.kept).most_common()
    found = first_of((f"{reason} ({count} tensors)" for reason, count in reasons), 3) or "the change is zero"
    raise MethodError(
        f"nothing was moved: {found}. Check that the classes of the head and the labels differ, and the samples too."
    )


def _refitted(judge: Judge, solution: Solution) -> Mapping[str, Tensor]:
    """The target's head, fitted on its ported features; nothing if no head is fitted."""
    if not judge.fits_head:
        return {}
    update = Update(judge.target, solution.transfer.task_vector, fits_head=True)
    with judge.output.scaled(update) as ported:
        ported.set(solution.scale)
        return fit_head(judge.target, ported.module, judge.calibration.samples)
