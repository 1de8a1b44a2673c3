"""A transfer from end to end: Algorithm 1 of the paper on one screen.

Works on paths and on live modules, and changes nothing that is given. `pipeline.run` writes the result to files.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..config import DistillConfig, MeasureConfig, TransferConfig
from ..errors import MethodError, OptionError, TuneportError, first_of
from ..io.places import path_of
from ..io.state import StateFile
from ..measure.fitted_heads import fit_head, with_teacher_scores
from ..measure.objectives import TokenLoss
from ..measure.samples import Calibration, DatasetSamples, Limits, Measurement, Samples
from ..methods import LayerRecord, Method, Transfer, get_method, name_of
from ..models.base import Model, ModelLike
from ..models.change import Change, Finetuned
from ..models.open import pick_device
from ..outputs import Update, output_of
from ..pairing import Kept, Plan
from ..report.summary import label_words
from ..runtime.passes import Costs, Passes, passes_of
from ..runtime.resume import Work, fingerprint
from ..synthetic.samples import OldModel
from ..task_vectors.low_rank import norm_of
from ..task_vectors.vector import TaskVector, account
from ..training.distill import teach
from ..training.division import Extra
from ..types import Events, ScaleRule, Sides, Signal
from .comparison import summarize
from .inputs import check_inputs, conditions_of, count_forward_passes, describe_inputs, open_models, read_change
from .lessons import read_extra
from .plan import changed_parts, make_plan, not_transported_by
from .samples import SCORED, Data, are_samples, draw_samples
from .scale import Judge
from .solve import Solution, solve

UNTOUCHED = "distill"  # the method in the record of what no method has moved


@dataclass(frozen=True, eq=False)
class Setup:
    """A checked transfer that has not run: every error in the input was found."""

    models: Sides[Model]  # with the heads that they need
    change: Change  # what the fine-tune changed in the source
    plan: Plan
    calibration: Calibration
    about: Mapping[str, Any]  # options, inputs with their SHA-256, and notes, for the record
    scale: float | ScaleRule = 1.0  # a number, or the rule that chooses it on the samples

    def __repr__(self) -> str:
        names = " to ".join(model.name for model in self.models)
        return f"Setup({names}: {self.plan!r}, {len(self.calibration.samples)} samples)"

    @property
    def rule(self) -> ScaleRule | None:
        """The rule that chooses the scale on the samples, if one does."""
        return self.scale if isinstance(self.scale, str) else None

    @property
    def notes(self) -> list[str]:
        """What a user may not expect."""
        words = label_words(self.about)
        labels = [f"{len(self.calibration.samples)} samples {words}"] if words else []
        return [*labels, *self.about.get("notes", ())]

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

    def passes(self, config: MeasureConfig, method: Method) -> Passes:
        """Which layers are measured together: what the memory needs."""
        chooses = self.rule is not None
        return passes_of(self.measurement(config, method), self.change.vector, method, chooses_scale=chooses)


@dataclass(frozen=True, eq=False)
class Result:
    """A finished transfer: what it can become, a live module, a model folder, a LoRA adapter, a task-vector file.

    The target is never changed: `apply` works on a copy, and a model's tensors are computed as they are written.
    """

    update: Update  # what changes in the target
    records: tuple[LayerRecord, ...]  # the evidence per layer
    not_transported: tuple[Kept, ...]  # the tensors of the target that stay, with reasons
    config: TransferConfig
    record: Mapping[str, Any]  # what the run record says
    setup: Setup  # what it was made from
    texts: Mapping[str, str] = field(default_factory=dict)  # files that are written beside the weights, by name

    def __repr__(self) -> str:
        moved = f"{len(self.records)} layers moved, {len(self.not_transported)} tensors stay"
        return f"Result({self.target.name}: {self.record.get('method', 'a transfer')} at scale {self.scale:g}, {moved})"

    @property
    def target(self) -> Model:
        """The target, with its fitted head if it has one."""
        return self.update.target

    @property
    def task_vector(self) -> TaskVector:
        """The change of the target at scale 1, by live names."""
        return self.update.vector

    @property
    def scale(self) -> float:
        return self.update.scale

    def tensors(self, scale: float | None = None) -> Mapping[str, Tensor]:
        """The new model's tensors under their names in the files, in the target's dtypes, computed when read."""
        update = self.update if scale is None else replace(self.update, scale=scale)
        return update.in_files().apply_to(self.target.weights.tensors)

    def apply(self, scale: float | None = None) -> nn.Module:
        """A copy of the target with the skill: the numbers that `save` writes, in the dtype that the target runs in."""
        self.target.require_in_memory("apply()", "use save() instead")
        module = copy.deepcopy(self.target.module)
        tensors = self.tensors(scale)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.task_vector:
                    parameter.copy_(tensors[self.target.weights.file_names[name]])
        return module

    def distill(
        self,
        steps: int | None = None,
        *,
        events: Events | None = None,
        saved: StateFile | None = None,
        **options: Any,
    ) -> Result:
        """Let the fine-tuned source teach the ported target on the calibration samples; no label is used.

        A tenth of the samples is held out; of few, each half judges what the other half teaches. The result is the last
        state that none is nearer to the teacher than, beyond chance, and that may be this transfer as it is.

        Args:
            steps: updates of the student; by default they follow from the samples.
            events: listens to the run.
            saved: keeps the state of the run, and gives back that of a killed one.
            options: further fields of `DistillConfig`: `learning_rate`, `batch_size`, `seed`, `extra`, or `lora`, the
                rank of a LoRA that is trained in place of all linear layers, from the best fit of the transfer.
        """
        config = DistillConfig.of(**{"steps": steps, "seed": self.config.seed, **options})
        if idle := sorted(options.keys() - {"learning_rate", "batch_size", "seed", "extra", "lora"}):
            raise OptionError(f"`{idle[0]}` is for `tuneport.distill`: models and samples are those of the port.")
        extra, samples, events = None, self.setup.calibration.samples, events or Events()
        if isinstance(samples, DatasetSamples) and samples.dataset.kind == "text":
            # they are in the order of their lengths: the shortest would judge
            samples = samples.take(np.random.default_rng(config.seed).permutation(len(samples)))
        if isinstance(samples, DatasetSamples) and config.extra is not None:
            heads = self.setup.calibration.heads
            old = OldModel(self.setup.models, self.setup.change.vector, None if heads is None else heads.source)
            others = read_extra(old, samples.chosen, config, events)
            extra = None if others is None else Extra(others)
        return self.taught(config, samples, extra=extra, events=events, saved=saved)

    def taught(self, config: DistillConfig, samples: Samples | None = None, **more: Any) -> Result:
        """As `distill`, with all options of a distillation."""
        change = self.setup.change
        samples = self.setup.calibration.samples if samples is None else samples
        if not isinstance(samples, DatasetSamples):
            raise TuneportError("a distillation draws its own samples: pass a data set or a path, not batches.")
        samples = replace(samples, models=Sides(samples.models.source, self.target))

        def headed(taught: DatasetSamples) -> Model:
            return self.target.with_head(fit_head(self.target, self.apply(), taught))

        start, more["headed"] = self.task_vector * self.scale, headed if change.fits_head else None
        vector, entry, target = teach(samples, change.vector, start, config, **more)
        record = {**self.record, "distilled": {"teacher": self.record["finetuned"]["name"], **entry}}
        if self.record.get("method") == UNTOUCHED:
            seconds = entry["seconds"]
            record |= {"samples": len(samples), "seconds": seconds, "seconds_by_stage": {"distill": seconds}}
        if config.lora is None and entry["best"] == 0:
            return replace(self, record=record)
        changed = {self.target.weights.file_names[name] for name in vector}
        kept = tuple(item for item in self.not_transported if item.tensor not in changed)
        record["not_transported"] = [asdict(item) for item in kept]
        if "outcome" in record:
            record |= asdict(summarize(None, scale=1.0, distilled=True))
        update = replace(self.update, target=target, vector=vector, scale=1.0)
        return replace(self, update=update, not_transported=kept, record=record)

    def save(self, out: str | Path, **options: Any) -> Path:
        """Write the new model as a folder that its own library loads, a LoRA adapter, or the task vector as one file.

        An output that holds what the transfer was made from is refused, also with `overwrite`.

        Args:
            out: a folder, or a file for a task vector, which holds the change at the scale of the result.
            options: those of the output: `as_`, `rank`, `energy`, `uniform_rank`, `adapter_dtype`, `overwrite`.
        """
        self.write(out, **options)
        return Path(out)

    def write(self, out: str | Path, *, texts: Mapping[str, str] | None = None, **options: Any) -> Mapping[str, Any]:
        """As `save`, with `texts` by file name beside the weights; return the run record."""
        config = replace(self.config, **options)
        config.check()
        out, output = Path(out), output_of(config)
        output.check_place(out, config.overwrite, inputs=self._inputs())
        output.check_update(self.update)
        texts = {**self.texts, **(texts or {})}
        record = {**self.record, "out": str(self.record.get("out", out)), "as": config.as_}
        recorded = {item.name for item, about in config.options() if about.recorded}
        given = {name.rstrip("_"): value for name, value in options.items() if name in recorded}
        record["options"] = {**record.get("options", {}), **given}
        return output.write(out, self.update, record, overwrite=config.overwrite, texts=texts)

    def _inputs(self) -> list[Path]:
        """The known paths of the models and the data of the transfer."""
        parts = [self.record.get(key, {}) for key in ("source", "finetuned", "target", "data")]
        paths = [part.get("path") for part in (*parts, *parts[1].get("parts", ()))]
        known = [path_of(path) for path in paths if path]
        return known if self.target.weights.folder is None else [*known, self.target.weights.folder]


def untouched(setup: Setup, config: TransferConfig) -> Result:
    """The target as it is, which a distillation without a port begins with."""
    record = {**setup.about, "method": UNTOUCHED, "scale": 1.0, "passes": {}}
    record |= {"layers": [], "not_transported": [], "left_behind": []}
    return Result(Update(setup.models.target, TaskVector({})), (), (), config, record, setup)


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
    optional: frozenset[Signal] = frozenset(),
) -> Setup:
    """Open everything, pair the layers, draw the samples and decide on the scale; nothing is measured.

    `signals` are needed, in place of those of the method of the options; `optional` ones are prepared if they can be.
    """
    needed = get_method(config.method).signals if signals is None else signals
    if isinstance(config.scale, str) or (isinstance(config, TransferConfig) and config.distill is not None):
        needed |= SCORED
    elif config.scale is None:
        optional |= SCORED
    models = open_models(source, target, config)
    models, change = read_change(models, finetuned, config, has_samples=are_samples(data))
    calibration, drawn = draw_samples(models, change, data, config, needed, optional)
    plan = make_plan(models, change.vector, config, models.target.head if change.fits_head else frozenset())
    about = describe_inputs(models, change, plan, calibration, drawn, config)
    scale = _usual_scale(models, calibration) if config.scale is None else config.scale
    return Setup(models, change, plan, calibration, about, scale)


def run(
    setup: Setup,
    config: TransferConfig,
    *,
    passes: Passes | None = None,
    work: Work | None = None,
    events: Events | None = None,
) -> Result:
    """Measure both models, align them, and carry the task vector over; `setup` is prepared with the same options.

    `passes` say which layers are measured together; unless given, what the memory needs. `work` keeps what is measured,
    and gives back what an earlier run under the same conditions has measured.
    """
    method, output, change = get_method(config.method), output_of(config), setup.change
    events = events or Events()
    measurement = setup.measurement(config, method)
    started = time.perf_counter()
    if passes is None:
        passes = setup.passes(config, method)
    asked = count_forward_passes(setup.models.source, change, setup.calibration, config.exclude)
    events.step("asking the fine-tuned source", asked * Costs.of(measurement).answer.source, asked)
    checked = check_inputs(setup.models.source, change, setup.plan, setup.calibration, config, events.advance)
    if checked.sentence:
        events.note(checked.sentence)
    samples = with_teacher_scores(setup.models, change, setup.calibration.samples, checked.scores)
    measurement = replace(measurement, calibration=replace(measurement.calibration, samples=samples))
    judge = Judge(setup.models.target, measurement.calibration, output, change.fits_head)
    # lines 3 to 9
    solution = solve(measurement, change, method, setup.scale, judge, passes=passes, work=work, events=events)
    _check_moved(change, solution.transfer)
    head = _refitted(judge, solution)
    setup = replace(setup, calibration=measurement.calibration)
    facts = {
        **asdict(summarize(None, scale=solution.scale, rule=setup.rule, head=bool(head))),
        "sanity": checked.record(None if head else solution.choice),
        "fingerprint": fingerprint(conditions_of(setup.about, config, method=name_of(method), scale=setup.scale)),
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
    found, pairs = [], {pair.target.name: pair for pair in plan.pairs}
    for layer in layers:
        entry = asdict(layer)
        if (pair := pairs.get(layer.target)) is not None:
            source, target = pair.source, pair.target
            entry |= {"role": target.role, "stack": target.stack, "block": target.block}
            entry["width_in"] = min(source.in_features, target.in_features)
            entry["width_out"] = min(source.out_features, target.out_features)
        found.append(entry)
    return found


def _usual_scale(models: Sides[Model], calibration: Calibration) -> float | ScaleRule:
    """A rule that chooses the scale where samples can be scored, else 1 as in the paper.

    Samples can be scored if they have classes or are predicted token by token, by whole models. The rule for images is
    "safe", for texts "auto".
    """
    heads, losses = calibration.heads, calibration.losses
    judged = heads is not None or (losses is not None and isinstance(losses.target, TokenLoss))
    if not judged or any(model.weights.offloaded for model in models):
        return 1.0
    return "safe" if models.target.inputs.kind == "image" else "auto"


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
    with judge.output.scaled(Update(judge.target, solution.transfer.task_vector, fits_head=True)) as ported:
        ported.set(solution.scale)
        return fit_head(judge.target, ported.module, judge.calibration.samples)
