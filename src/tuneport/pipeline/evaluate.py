"""Score a model, or the base of an adapter or task vector with its change, on a test split, or ask it something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..config import EvaluateConfig, ModelConfig
from ..data.dataset import align_labels
from ..data.samplers import select
from ..data.tasks import read_data
from ..errors import CheckpointError, OptionError, TuneportError
from ..io.checkpoint import read_record
from ..io.places import local
from ..measure.accuracy import (
    Evaluation,
    check_counted,
    likelihood,
    linear_probe,
    perplexity,
    usual_protocol,
    zero_shot,
)
from ..measure.fitted_heads import labelling_by, renamed_classes
from ..models.base import Model
from ..models.change import change_of
from ..models.generation import Prompt, Sampling, Written, generate_texts
from ..models.heads import choose_head
from ..models.open import as_classifier, open_model, pick_device
from ..models.weights import put
from ..task_vectors.lora_format import Adapter
from ..task_vectors.lora_read import whole_tensors
from ..task_vectors.stored import stored_change
from ..types import Events

IMAGES, TEXTS = 128, 16  # samples per pass
ANSWER = 128  # most tokens of an answer


def evaluate(
    model: str | Path,
    data: str | Path,
    base: str | Path | None = None,
    *,
    events: Events | None = None,
    **options: object,
) -> Evaluation:
    """Score a model on the test split of the data: with its head, by a linear probe, or a language model by its loss.

    Args:
        model: a model, or an adapter or task vector of one.
        data: labelled data, or texts.
        base: the model of an adapter or task vector; the one that it names unless given.
        events: listens to the run.
        options: the fields of `EvaluateConfig`.

    Returns:
        The accuracy or the perplexity, and what it was made from.
    """
    config, events = EvaluateConfig.of(**options), events or Events()
    test = read_data(data, "test", labelled=False, columns=config.columns)
    device = pick_device(config.device)
    more: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "classes": config.classes}
    opened = open_written(model, base, device=device, **more).cut_at(config.max_length)
    protocol = config.protocol or usual_protocol(opened, test, config.head)
    if protocol == "zero-shot" and config.head is None and opened.outputs.logits is not None:
        check_counted(opened, choose_head(opened, None, test))
    if protocol != "perplexity" and test.labels is None:
        read_data(data, "test", columns=config.columns)  # the error says what is missing
    total = len(test)
    if protocol == "zero-shot":
        scorer = choose_head(opened, config.head, test)
        align_labels(test, scorer.classes)
        score = partial(zero_shot, opened, scorer, test)
    elif protocol == "linear-probe":
        train = read_data(data, "train", columns=config.columns)
        if config.samples is not None:
            train = train.subset(select(train, samples=config.samples, seed=config.seed))
        score = partial(linear_probe, opened, train, test)
        total += len(train)
    else:
        score = partial(perplexity if protocol == "perplexity" else likelihood, opened, test)
    events.step("evaluating")
    events.plan(total)
    size = config.batch_size or (TEXTS if protocol in ("perplexity", "likelihood") else IMAGES)
    return score(batch_size=size, progress=events.advance)


def ask(
    prompt: str,
    models: Sequence[str | Path],
    base: str | Path | None = None,
    *,
    events: Events | None = None,
    **options: Any,
) -> dict[str, Written]:
    """Let models answer one prompt, as a question in a chat where they have a template; the likeliest tokens.

    Args:
        prompt: the text.
        models: models, or adapters or task vectors of one. One output of tuneport is answered for by the old model,
            the target and itself, as far as its record names them.
        base: the model of an adapter or task vector; the one that it names unless given.
        events: listens to the run.
        options: the fields of `EvaluateConfig`; of these, `device` and `trust_remote_code` count.

    Returns:
        What each model wrote, by its name.
    """
    config, events = EvaluateConfig.of(**options), events or Events()
    asked = {str(model): (model, base) for model in models}
    if len(models) == 1:
        asked = _lineage(models[0]) or asked
    device, found = pick_device(config.device), {}
    events.plan(len(asked))
    for name, (reference, its_base) in asked.items():
        events.step(f"asking {name}")
        model = open_written(reference, its_base, device=device, trust_remote_code=config.trust_remote_code)
        question: Prompt = prompt
        if model.inputs.reader is not None and model.inputs.reader.tokenizer.chat_template:
            question = [{"role": "user", "content": prompt}]
        most = ANSWER if model.inputs.reader is None else min(ANSWER, max(1, model.inputs.reader.limit // 2))
        [found[name]] = generate_texts(model, [question], Sampling(most, temperature=0.0))
        events.advance(1)
    return found


def _lineage(out: str | Path) -> dict[str, tuple[str | Path, str | Path | None]]:
    """The old model, the target and an output, each with its base, as far as the output's record names them."""
    try:
        record = read_record(Path(out))
        places = {role: record.get(role, {}).get("path") for role in ("finetuned", "source", "target")}
    except (TuneportError, AttributeError):
        return {}
    found: dict[str, tuple[str | Path, str | Path | None]] = {}
    tuned = places["finetuned"]
    if tuned and places["source"]:
        found["old"] = tuned, places["source"] if stored_change(local(tuned)) is not None else None
    if places["target"]:
        found["target"] = places["target"], None
    return {**found, "new": (out, None)}


def with_protocol(
    about: Mapping[str, Any], model: Model, data: str | Path | None, config: ModelConfig
) -> Mapping[str, Any]:
    """Add to the data of a record how `evaluate` scores their test split with a model, where it can."""
    try:
        test = read_data(data or "", "test", labelled=False, columns=config.columns)
        protocol = usual_protocol(model, test, config.head)
        if protocol == "zero-shot" and test.labels is not None:
            scorer = choose_head(model, config.head, test)
            check_counted(model, scorer)
            align_labels(test, scorer.classes)
    except TuneportError:
        return about
    unused = test.origin.split != "all"  # else calibration has used some of the samples
    found = unused and (protocol == "perplexity" or test.labels is not None)
    return {**about, "data": {**about["data"], "protocol": protocol}} if found else about


def open_written(
    reference: str | Path,
    base: str | Path | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    classes: Sequence[str] | None = None,
) -> Model:
    """Open a model, or the base of an adapter or task vector with its change, as `apply` would write it.

    `base` replaces the base that an adapter or a task vector names. A bare base gets the head of an adapter, and its
    classes the names of `classes`.
    """
    stored = stored_change(local(reference))
    if stored is None:
        if base is not None:
            raise TuneportError(f"`base` goes with an adapter or a task vector, and {reference} is a model.")
        if classes is not None:
            raise OptionError(f"`classes` goes with an adapter, and {reference} is a model with classes of its own.")
        return open_model(reference, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    change, base = stored.change, base or stored.base
    if base is None:
        raise CheckpointError(f"{reference} does not name the model that it changes: pass it as `base`.")
    model = open_model(base, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    head = {}
    if isinstance(change, Adapter):
        labelling = renamed_classes(labelling_by(change, model), classes)
        if labelling is not None and labelling != model.labelling:
            model = as_classifier(model, labelling, trust_remote_code=trust_remote_code)
        head = whole_tensors(change, model.head)
    vector = change_of(model, change)
    new = vector.apply_to(model.stored_parameters())
    put(model.module, {name: new[name] for name in vector} | head)
    return model
