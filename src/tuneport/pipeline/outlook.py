"""What a transfer would do, and what memory it would take, before it runs. The models run on the meta device only."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import TuneportError
from ..job import Given, Job
from ..measure.objectives import TokenLoss, forward_only
from ..methods import Method, get_method, name_of
from ..models.open import outline_model, pick_dtype
from ..pairing import Kept, Plan
from ..runtime.budget import passes_of, plan_passes
from ..runtime.forecast import Forecast
from ..runtime.passes import Passes
from ..types import ScaleRule, Sides
from . import sanity
from .change import every_layer
from .evaluation import is_whole
from .heads import is_bare
from .moved import account, changed_parts
from .plan import not_transported_by, plan_of
from .scale import answers_per_sample, scales_of
from .transfer import scale_for


def expected(
    job: Job, method: str | Method = "bico", *, scale: float | ScaleRule | None = None, tested: int = 0
) -> dict[str, Any]:
    """What a job would do and need: the pairing, what stays, bytes of statistics, and samples that the models answer.

    Both models answer for the choice of the `scale` (see `scale_for`) and for the evaluation on `tested` samples.
    """
    method, strength = get_method(method), scale_for(job, scale)
    job = job.for_(method)
    passes = passes_of(job, method, strength)
    within: dict[str, Any] = {}
    if passes is not None:
        within = {"groups": [len(group) for group in passes.groups]}
    if passes is not None and job.memory_budget is not None:
        within |= {**_bytes(passes), "home": "files" if job.target.offloaded else "RAM"}
    kept = method.kept(job.plan)
    moved = _moved(job.plan, method, kept) | set(job.added.vector if job.added is not None else ())
    return {
        "method": name_of(method),
        "samples": len(job.samples),
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
            for pair in job.plan.pairs
        ],
        "not_transported": [asdict(item) for item in not_transported_by(job, moved, kept)],
        **account(changed_parts(job, moved, kept)),
        **_tokenizers(job),
        "expected": {
            "statistics_bytes": statistics_bytes(job),
            "answers": answers_of(job, strength, tested)._asdict(),
            **within,
        },
    }


def answers_of(job: Job, strength: float | ScaleRule, tested: int) -> Sides[int]:
    """The samples that each model answers in forward passes of their own, by its name.

    The source and its fine-tune answer all samples before anything is measured. Every candidate scale answers them; a
    language model that cannot keep a question in its cache, once for each answer to choose from. A head is fitted on as
    many for the measurement, for every candidate, for the output, and for a bare target that is tested. The fine-tune,
    the target and the port answer the test split.
    """
    count, fits = len(job.samples), 1 if job.fits_head else 0
    rows = 1 if job.target.answer_logits is not None else max(answers_per_sample(job), 1)
    candidates = len(scales_of(job)) * rows if isinstance(strength, str) else 0
    target = count * (candidates * (1 + fits) + 2 * fits + (tested > 0 and is_bare(job))) + 2 * tested
    return Sides(sanity.answers(job) + (tested if is_whole(job) else 0), target)


def statistics_bytes(job: Job) -> int:
    """The bytes of the statistics after all samples; at most as many, if the models cannot run without values."""
    if not job.signals:
        return 0
    try:
        return Forecast.of(job).statistics_bytes(job.plan.pairs)
    except TuneportError:  # they read values, or the batches can be read only once
        pairs = job.plan.pairs
        return sum(8 * math.prod(pair.widths(signal)) for pair in pairs for signal in pair.wanted(job.signals))


def _tokenizers(job: Job) -> dict[str, Any]:
    """For two text models: whether their tokenizers are equal, and how many tokens of the samples have a partner."""
    source, target = (model.reader for model in job.models)
    if source is None or target is None:
        return {}
    counted = {"tokens": job.record["tokens"]} if "tokens" in job.record else {}
    return {"same_tokenizer": source.same_tokens(target), **counted}


def _bytes(passes: Passes) -> dict[str, int]:
    return {name: getattr(passes, name) for name in ("peak_bytes", "home_bytes", "fetched_bytes")}


def _moved(plan: Plan, method: Method, kept: tuple[Kept, ...]) -> set[str]:
    """The tensors that the method would move."""
    stays = {item.tensor for item in kept}
    pairs = [pair for pair in plan.pairs if pair.target.name not in stays]
    names = {pair.target.weight for pair in pairs}
    names |= {pair.target.bias for pair in pairs if pair.target.bias and pair.source.bias}
    names |= {norm.target.name for pair in pairs for norm in pair.norms}
    if method.moves_loose:
        names |= {pair.target.name for pair in plan.loose} - stays
    return names


DEVICES = (1, 2, 4, 8)
MOST = 2**24  # the largest number of texts, and of tokens in a batch, in a plan


def prepare_shapes(
    source: str | Path,
    target: str | Path,
    *,
    method: str = "bico",
    samples: int = 100,
    length: int = 256,
    batch_size: int = 4,
    max_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cuda",
    dtype: str = "float32",
) -> Job:
    """A Job of two text models from their config.json alone; it can be planned but not run.

    Args:
        source, target: folders or hub ids of the old and the new base.
        method: name of the method.
        samples, length, batch_size: number of texts, tokens per text, texts per batch.
        max_tokens: limit on the tokens that enter the statistics.
        memory_budget: bytes of one device.
        device: the device of the plan; this machine need not have it.
        dtype: dtype of both models.
    """
    if min(samples, length, batch_size) < 1 or max(samples, batch_size * length) > MOST:
        raise TuneportError(
            f"{samples} texts of {length} tokens in batches of {batch_size}: plan for one text or more, and for {MOST} "
            "texts and tokens in a batch at most."
        )
    models = Sides(*(outline_model(path, dtype=pick_dtype(dtype), weights=False) for path in (source, target)))
    for model in models:
        if model.kind != "text" or model.generates == "seq2seq":
            raise TuneportError(f"{model.name}: a plan from config.json needs an encoder or a decoder of text.")
    vector = every_layer(models.source)
    chosen = get_method(method)
    plan = plan_of(*models, vector)
    chosen.check(plan)
    sizes = [min(batch_size, samples - start) for start in range(0, samples, batch_size)]
    ids = torch.zeros(batch_size, length, dtype=torch.int64)
    mask = torch.ones_like(ids)
    texts = [({"input_ids": ids[:size], "attention_mask": mask[:size]}, ids[:size]) for size in sizes]
    losses = Sides(*(TokenLoss(m) if m.generates == "causal" else forward_only(m) for m in models))
    options = {"samples": samples, "length": length, "batch_size": batch_size, "max_tokens": max_tokens, "dtype": dtype}
    return Job(
        models,
        vector,
        plan,
        chosen.signals,
        Given(texts),
        losses,
        max_tokens=max_tokens,
        memory_budget=memory_budget,
        record={"options": options},
        device=torch.device(device),
    )


def plan_devices(
    job: Job, devices: tuple[int, ...] = DEVICES, *, method: str | Method = "bico"
) -> list[dict[str, Any]]:
    """For each number of devices: runs over the data, and bytes on one device and off it.

    If the budget is too small, the line has the `error`.
    """
    if job.memory_budget is None:
        raise TuneportError("a plan for devices needs `memory_budget`, the memory of one device.")
    forecast = Forecast.of(job)
    lines: list[dict[str, Any]] = []
    for count in devices:
        part = job.on(job.samples.take_batches(0, -(-len(job.samples.batch_sizes) // count)))
        try:
            passes = plan_passes(part, job.memory_budget, forecast, method=method)
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
    return lines
