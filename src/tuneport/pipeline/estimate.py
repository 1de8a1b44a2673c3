"""What a transfer would do, and what memory it would take, before it runs. The models run on the meta device only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config import DistillConfig, MeasureConfig, PlanConfig, UpgradeConfig
from ..data.dataset import DEFAULT_SAMPLES
from ..data.tasks import read_data
from ..errors import MethodError, TuneportError, first_of
from ..measure.fitted_heads import is_bare
from ..measure.objectives import TokenLoss, forward_only
from ..measure.samples import Calibration, DatasetSamples, Limits, Measurement, UserBatches
from ..methods import Method, get_method, name_of
from ..models.base import Model
from ..models.change import every_layer, is_whole
from ..models.open import DTYPES, outline_model
from ..outputs import ModelOutput
from ..pairing import Kept, Plan
from ..runtime.forecast import Forecast
from ..runtime.passes import Passes, plan_passes
from ..task_vectors.vector import account
from ..training.division import FEW as FEW_TAUGHT
from ..training.division import FEW_STUDENTS, of_passages, schedule_of
from ..training.matching import BATCH, TEXT_BATCH
from ..types import Sides
from .comparison import USUAL, usual_test
from .inputs import check_weights, count_forward_passes
from .lessons import FEW, FEWEST, HELD_OUT, MOST_HELD_OUT, MOST_SAMPLES, PORTED, views_each
from .plan import changed_parts, make_plan, not_transported_by
from .scale import Judge
from .transfer import Setup, prepare

DEVICES = (1, 2, 4, 8)
MOST = 2**24  # the largest number of texts, and of tokens in a batch, in a plan

# The teaching of a LoRA as it was measured on one GPU, results/speed/distill-8b-cuda.json.
GPU = "NVIDIA H200"
SECONDS, TOKENS = 141.66, 409_600  # that were taught
WEIGHTS = 16_027_010_048  # of teacher and student
BESIDE = 10_528_190_464  # bytes beside both models
FEATURES = 2_727_936  # that all layers of the student read and write


def plan(
    source: str | Path,
    finetuned: str | Path | Sequence[str | Path],
    target: str | Path,
    data: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Plan a transfer: what would move, what stays and why, and what memory it would take.

    Args:
        source: the old base model.
        finetuned: the fine-tuned source, or several.
        target: the new base model.
        data: what samples are drawn from.
        options: the fields of `PlanConfig`.

    Returns:
        JSON values; `notes` are for the user.
    """
    config = PlanConfig.of(**options)
    if not finetuned:
        raise TuneportError("`finetuned` is needed; only `shapes_only` does without it.")
    setup = prepare(source, finetuned, target, data, config)
    check_weights(setup.models.source, setup.change.vector, setup.plan, accept=config.accept_unlikely)
    test = usual_test(setup.models.target, setup.calibration, data, config.columns)
    found = describe(setup, config, tested=0 if isinstance(test, str) else min(len(test), USUAL))
    own = 0 if data is None else len(read_data(data, "train", labelled=False, columns=config.columns))
    return {**found, "routes": planned_routes(setup, own), "notes": setup.notes}


def planned_routes(setup: Setup, own: int) -> dict[str, dict[str, Any]]:
    """What each route of an upgrade would do with `own` samples: samples and steps, or why it would not run."""
    count = min(own, MOST_SAMPLES)
    target, written = setup.models.target, UpgradeConfig().synthetic or 0
    writes = target.generates is not None and setup.calibration.heads is None
    few = writes and count < FEW  # all are taught, and written ones judge
    taught = count if few else count - min(round(HELD_OUT * count), MOST_HELD_OUT)
    usual = TEXT_BATCH if writes else BATCH
    samples = setup.calibration.samples
    passages = isinstance(samples, DatasetSamples) and of_passages(samples)
    prompts = writes and not passages
    viewed = taught * max(2 * views_each(taught), 1) if prompts else taught  # they are repeated as often as viewed
    counts = (viewed, taught + written)
    schedules = [schedule_of(DistillConfig(), target, usual, number, passages=passages) for number in counts]
    folded: dict[str, Any] = {"students": FEW_STUDENTS} if taught < FEW_TAUGHT else {}
    found: dict[str, dict[str, Any]] = {
        "copy": {"samples": 0},
        "port": {"samples": min(taught, PORTED)},
        "distill": {"samples": taught, "steps": schedules[0].steps, **folded},
        "synthetic": {"samples": taught, "written": written, "steps": schedules[1].steps},
    }
    why_not: dict[str, str] = {}
    try:
        check_same_shapes(setup)
    except MethodError as error:
        why_not["copy"] = str(error)
    if count < FEWEST:
        why_not |= dict.fromkeys(("port", "distill"), f"{count} own samples, and {FEWEST} are needed")
    if reason := why_unjudged(setup.models.source):
        why_not = dict.fromkeys(found, reason)
    elif not writes:
        why_not["synthetic"] = "nobody writes samples: it needs `generator` or `extra`"
    return found | {name: {"why_not": text} for name, text in why_not.items()}


def why_unjudged(source: Model) -> str:
    """Why an upgrade can judge no route for the head of a source, or nothing."""
    does = "gives a sample several labels" if source.multi_label else source.instead
    return does and f"the fine-tune {does}, and routes are judged by one class for each sample"


def check_same_shapes(setup: Setup) -> None:
    """Refuse to copy a change between models of other shapes."""
    parameters = dict(setup.models.target.module.named_parameters())
    vector, said = setup.change.vector, []
    shared = [name for name in vector if name in parameters]
    if lacking := [name for name in vector if name not in parameters]:
        said.append(f"{len(lacking)} are of layers that the target does not have ({first_of(lacking, 2)})")
    if other := [name for name in shared if vector.shape(name) != tuple(parameters[name].shape)]:
        said.append(f"{len(other)} have another shape there ({first_of(other, 2)})")
    if said:
        raise MethodError(f"of {len(vector)} changed tensors, {' and '.join(said)}")


def describe(setup: Setup, config: MeasureConfig, *, tested: int = 0) -> dict[str, Any]:
    """What a checked transfer would do and need; `tested` samples of a test split are scored."""
    method, change = get_method(config.method), setup.change
    measurement, plan, models = setup.measurement(config, method), setup.plan, setup.models
    passes = setup.passes(config, method)
    within: dict[str, Any] = {}
    if config.memory_budget is not None:
        within = {**_bytes(passes), "home": "files" if models.target.weights.offloaded else "RAM"}
    if within or len(passes.groups) > 1:
        within["groups"] = [len(group) for group in passes.groups]
    tokenizers: dict[str, Any] = {}
    source, target = (model.inputs.reader for model in models)
    if source is not None and target is not None:
        tokenizers["same_tokenizer"] = source.same_tokens(target)
        tokenizers |= {name: setup.about[name] for name in ("tokens",) if name in setup.about}
    kept = method.kept(plan)
    moved = _moved(plan, method, kept) | set(change.added.vector)
    return {
        "method": name_of(method),
        "samples": len(setup.calibration.samples),
        "layers": [
            {
                "target": pair.target.name,
                "target_shape": [pair.target.out_features, pair.target.in_features],
                "source": pair.source.name,
                "source_shape": [pair.source.out_features, pair.source.in_features],
                "role": pair.target.role,
                "stack": pair.target.stack,
                "block": pair.target.block,
                "source_block": pair.source.block,
            }
            for pair in plan.pairs
        ],
        "not_transported": [asdict(item) for item in not_transported_by(models.target, plan, moved, kept)],
        **account(changed_parts(models.source, change, plan, moved, kept)),
        **tokenizers,
        "expected": {
            "statistics_bytes": statistics_bytes(measurement),
            "answers": count_answers(setup, tested, config.exclude)._asdict(),
            **within,
        },
    }


def count_answers(setup: Setup, tested: int, exclude: Sequence[str] = ()) -> Sides[int]:
    """The samples that each model answers in forward passes of their own.

    The source and its fine-tune answer all samples before anything is measured. Every candidate scale answers them: of
    a language model the number is the most, since few are judged. One that cannot keep a question in its cache answers
    once for each answer to choose from. A head is fitted on as many for the measurement, for every candidate, for the
    output, and for a bare target that is tested. The fine-tune, the target and the port answer the test split.
    """
    (source, target), change, calibration = setup.models, setup.change, setup.calibration
    judge = Judge(target, calibration, ModelOutput(), change.fits_head)
    count, fits = len(calibration.samples), 1 if change.fits_head else 0
    candidates = len(judge.candidates) * judge.passes if setup.rule is not None else 0
    of_source = count_forward_passes(source, change, calibration, exclude)
    of_source += tested if is_whole(source, change, exclude) else 0
    bare = 1 if tested and is_bare(target, fits=change.fits_head) else 0
    return Sides(of_source, count * (candidates * (1 + fits) + 2 * fits + bare) + 2 * tested)


def statistics_bytes(measurement: Measurement) -> int:
    """The bytes of the statistics after all samples; at most as many, if the models cannot run without values."""
    signals, pairs = measurement.signals, measurement.plan.pairs
    if not signals:
        return 0
    try:
        return Forecast.of(measurement).statistics_bytes(pairs)
    except TuneportError:  # they read values, or the batches can be read only once
        return sum(8 * math.prod(pair.widths(signal)) for pair in pairs for signal in pair.wanted(signals))


def _bytes(passes: Passes) -> dict[str, int]:
    return {name: getattr(passes, name) for name in ("peak_bytes", "home_bytes", "fetched_bytes")}


def _moved(plan: Plan, method: Method, kept: tuple[Kept, ...]) -> set[str]:
    """The tensors that the method would move."""
    stays = {item.tensor for item in kept}
    pairs = [pair for pair in plan.pairs if pair.target.name not in stays]
    names = {pair.target.weight for pair in pairs}
    names |= {pair.target.bias for pair in pairs if pair.target.bias and pair.source.bias}
    return names | ({pair.target.name for pair in plan.loose} - stays if method.moves_loose else set())


def estimate_shapes(source: str | Path, target: str | Path, config: PlanConfig) -> dict[str, Any]:
    """Estimate a transfer between two text models of any size from their config.json alone, for several devices.

    Returns:
        JSON values: for each number of devices, runs over the data, and bytes on one device and off it.
    """
    measurement = measurement_of_shapes(source, target, config)
    vector, method = every_layer(measurement.models.source), get_method(config.method)
    forecast = Forecast.of(measurement)
    lines: list[dict[str, Any]] = []
    for count in DEVICES:
        samples = measurement.samples
        part = measurement.with_samples(samples.take_batches(0, -(-len(samples.batch_sizes) // count)))
        try:
            passes = plan_passes(part, vector, method, config.memory_budget, forecast)
        except TuneportError as error:
            lines.append({"devices": count, "error": str(error)})
            continue
        # a device solves its share of the blocks, from the tokens of all devices
        solving = max(forecast.statistics_bytes(each) // count + forecast.solving_bytes(each) for each in passes.groups)
        stay = [len(set(p.blocks) - p.fetched) if p.blocks else "all" for p in passes.placements or ()]
        lines.append(
            {
                "devices": count,
                "runs": len(passes.groups),
                **_bytes(passes),
                "peak_bytes": max(passes.peak_bytes, solving),
                "blocks_that_stay": stay,
                "samples": len(part.samples),
            }
        )
    return {
        "options": config.to_json(),
        "layers": len(measurement.plan.pairs),
        "samples": len(measurement.samples),
        "plans": lines,
        **({"teaching": teaching_of_shapes(measurement.models, config)} if measurement.target.generates else {}),
    }


def teaching_of_shapes(models: Sides[Model], config: PlanConfig) -> dict[str, Any]:
    """Estimate the teaching of a LoRA with written texts: hours, and bytes of a device, scaled from a measured run.

    Devices that hold both models divide the samples. Others hold parts of the models and run them in step: more of them
    save time only where there are several fine-tunes.
    """
    texts, budget, size = UpgradeConfig().synthetic or 0, config.memory_budget or 0, DTYPES[config.dtype].itemsize
    steps = schedule_of(DistillConfig(), models.target, TEXT_BATCH, texts).steps
    weights = sum(weight.numel() for model in models for weight in model.module.parameters())
    hours = SECONDS / 3600 * (steps * TEXT_BATCH * config.length / TOKENS) * (weights / WEIGHTS)
    features = sum(layer.in_features + layer.out_features for layer in models.target.architecture.layers)
    beside, fetched = round(BESIDE * (features / FEATURES)), size * max(map(_fetched_weights, models))
    whole = size * weights + beside <= budget
    lines: list[dict[str, Any]] = []
    fewest = 0  # devices that hold both models
    for count in DEVICES:
        peak = beside + (size * weights if whole else size * weights // count + fetched)
        fewest = fewest or (count if peak <= budget else 0)
        line: dict[str, Any] = {"devices": count, "peak_bytes": peak}
        if fewest:
            line |= {"hours": hours / count if whole else hours, "hours_of_1000": 1000 * hours / (count // fewest)}
        lines.append(line)
    return {"gpu": GPU, "texts": texts, "steps": steps, "in_parts": not whole, "plans": lines}


def _fetched_weights(model: Model) -> int:
    """The most weights of a model in parts that are whole at once: those outside blocks, and two blocks."""
    layers = model.architecture.layers
    inside = sum(layer.in_features * layer.out_features for layer in layers)
    blocks = len({(layer.stack, layer.block) for layer in layers})
    return sum(weight.numel() for weight in model.module.parameters()) - inside + 2 * inside // blocks


def measurement_of_shapes(source: str | Path, target: str | Path, config: PlanConfig) -> Measurement:
    """A measurement of two text models from their config.json alone; it can be planned but not run."""
    samples, length, batch_size = config.samples or DEFAULT_SAMPLES, config.length, config.batch_size
    if min(samples, length, batch_size) < 1 or max(samples, batch_size * length) > MOST:
        raise TuneportError(
            f"{samples} texts of {length} tokens in batches of {batch_size}: plan for one text or more, and for {MOST} "
            "texts and tokens in a batch at most."
        )
    dtype, device = DTYPES[config.dtype], "cuda" if config.device == "auto" else config.device
    models = Sides(*(outline_model(path, dtype=dtype, weights=False) for path in (source, target)))
    for model in models:
        if model.inputs.kind != "text" or model.generates == "seq2seq":
            raise TuneportError(f"{model.name}: a plan from config.json needs an encoder or a decoder of text.")
    method, plan = get_method(config.method), make_plan(models, every_layer(models.source), MeasureConfig())
    method.check(plan)
    sizes = [min(batch_size, samples - start) for start in range(0, samples, batch_size)]
    ids = torch.zeros(batch_size, length, dtype=torch.int64)
    mask = torch.ones_like(ids)
    texts = [({"input_ids": ids[:size], "attention_mask": mask[:size]}, ids[:size]) for size in sizes]
    losses = Sides(*(TokenLoss(m) if m.generates == "causal" else forward_only(m) for m in models))
    limits = Limits(config.max_tokens, config.memory_budget, torch.device(device))
    return Measurement(models, plan, Calibration(UserBatches(texts), method.signals, losses), limits)
