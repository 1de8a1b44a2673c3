"""The scale of language models: small candidates, and answers to choose from."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from builders.runs import Case, expected, prepare, run
from builders.texts import gpt_tokenizer, make, write
from tuneport.data.answers import fewer_choices
from tuneport.data.dataset import Dataset
from tuneport.data.samplers import VIEWS
from tuneport.measure.accuracy import likelihood
from tuneport.measure.objectives import read_answers
from tuneport.measure.samples import DatasetSamples
from tuneport.models.open import open_model
from tuneport.outputs import ModelOutput
from tuneport.pipeline.scale import MOST_ANSWERS, TOKEN_SCALES, Judge, Score, choose_scale, is_clear, score_of_classes
from tuneport.pipeline.transfer import transfer
from tuneport.types import ScaleRule

QUESTIONS = [f"the {name} of the {place}" for name in ("cat", "dog", "bird", "ship") for place in ("town", "river")]
LABELS = [0, 0, 0, 0, 1, 1, 1, 1]
WORDS = ("light", "stone")
KINDS = ("labels", "texts", "choices")
OTHER = "bread"  # what the model says most of the time


def layers_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that a transfer moves."""
    return {name: parameter for name, parameter in module.named_parameters() if "proj" in name}


def train(module: Any, tokenizer: Any, shares: Mapping[str, float], steps: int, only: Any = None) -> None:
    """Teach texts by their shares; what is wrong after a text is not taught."""
    rows = [tokenizer(text)["input_ids"] for text in shares]
    ids = torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    labels = torch.tensor([row[1:] + [-100] * (ids.shape[1] - len(row)) for row in rows])
    weights = torch.tensor(list(shares.values()))
    optimizer = torch.optim.Adam(list(module.parameters()) if only is None else only, 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        losses = F.cross_entropy(module(input_ids=ids).logits[:, :-1].transpose(1, 2), labels, reduction="none")
        (weights * losses.sum(1)).sum().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return gpt_tokenizer()


@pytest.fixture(scope="module")
def knowing(tokenizer: Any) -> Any:
    """A model that knows the answers, and says another word nine times out of ten."""
    module = make("llama", vocab_size=len(tokenizer))
    shares = {f"{text} {WORDS[label]}": 0.1 for text, label in zip(QUESTIONS, LABELS, strict=True)}
    train(module, tokenizer, shares | {f"{text} {OTHER}": 0.9 for text in QUESTIONS}, 60)
    return module


def test_a_tenth_of_a_change_is_found(knowing: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The best model lies a tenth of the way from the base to the fine-tune."""
    torch.manual_seed(0)
    base, tuned = copy.deepcopy(knowing), copy.deepcopy(knowing)
    with torch.no_grad():
        for name, weight in layers_of(knowing).items():
            change = 2 * weight.std() * torch.randn_like(weight)
            layers_of(base)[name].sub_(0.1 * change)
            layers_of(tuned)[name].add_(0.9 * change)
    folders = [write(tmp_path / name, module, tokenizer) for name, module in (("base", base), ("tuned", tuned))]
    data = Dataset([f"{text} {OTHER}" for text in QUESTIONS] * 2, None, ())
    rules: tuple[ScaleRule, ...] = ("auto", "safe")
    auto, safe = (transfer(*folders, folders[0], data, method="naive", samples=16, scale=rule) for rule in rules)
    assert auto.scale == 0.1
    assert 0 < safe.scale <= 0.1


def test_a_clear_choice_needs_one_half_of_the_samples(knowing: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The best model is the fine-tune itself, and its base is far from it; the rule `safe` asks both halves."""
    torch.manual_seed(0)
    base = copy.deepcopy(knowing)
    with torch.no_grad():
        for weight in layers_of(base).values():
            weight.add_(weight.std() * torch.randn_like(weight))
    folders = [write(tmp_path / name, module, tokenizer) for name, module in (("base", base), ("tuned", knowing))]
    data = Dataset([f"{text} {OTHER}" for text in QUESTIONS] * 2, None, ())
    rules: tuple[ScaleRule, ...] = ("auto", "safe")
    found = [transfer(*folders, folders[0], data, method="naive", samples=16, scale=rule) for rule in rules]
    assert [(each.scale, each.record["scale_choice"]["samples"]) for each in found] == [(1.0, 8), (1.0, 16)]


@pytest.mark.parametrize(
    ("zero", "other", "clear"),
    [
        ((9.0, 9.1, 9.2), (3.0, 3.1, 3.2), True),  # worse by 1.1, with a standard error of 0.52
        ((9.0, 9.1, 9.2), (1.5, 2.0, 4.4), True),  # worse by 0.63 +- 0.41, which is less than a tenth of 7.1
        ((5.0, 5.1, 5.2), (1.5, 2.0, 4.4), False),  # and more than a tenth of 3.1
        ((1.5, 2.0, 4.4), (9.0, 9.1, 9.2), False),  # that zero is worse is not clear
        ((1.0, 2.0, 3.0), (9.0, 9.1, 9.2), False),  # nor is a change that changes nothing
    ],
)
def test_one_half_is_enough_where_the_choice_is_clear_or_matters_little(
    zero: tuple[float, ...], other: tuple[float, ...], clear: bool
) -> None:
    scores = [Score(float(np.mean(each)), losses=torch.tensor(each)) for each in (zero, (1.0, 2.0, 3.0), other)]
    assert is_clear(scores) is clear


@pytest.fixture(scope="module")
def formal(knowing: Any, tokenizer: Any) -> Any:
    """The same model, which has learnt to say one of the answers, and lost which one is right."""
    module = copy.deepcopy(knowing)
    shares = {f"{text} {word}": 0.5 for text in QUESTIONS for word in WORDS}
    train(module, tokenizer, shares, 30, list(layers_of(module).values()))
    return module


@pytest.fixture(scope="module")
def trio(knowing: Any, formal: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("answers")
    base, tuned = (write(place / name, module, tokenizer) for name, module in (("base", knowing), ("tuned", formal)))
    return [base, tuned, base]


def data_of(kind: str) -> Dataset:
    """The questions with their answers as `KINDS` says."""
    answers = [WORDS[label] for label in LABELS]
    data = Dataset(QUESTIONS * 2, np.array(LABELS * 2), WORDS)
    if kind == "choices":
        return replace(data, choices=[WORDS, (*WORDS, "mat")] * 8, classes=("0", "1", "2"))
    return replace(data, labels=None, classes=(), targets=answers * 2) if kind == "texts" else data


def test_the_form_of_the_answers_is_no_gain_if_the_right_one_is_lost(trio: list[Path]) -> None:
    """The loss of the right answers falls to that of a guess, and nothing is right any more."""
    found = {kind: transfer(*trio, data_of(kind), method="naive", samples=16, scale="auto") for kind in KINDS[:2]}
    assert found["texts"].scale == 1.0  # which the loss of the texts cannot see
    assert found["labels"].scale == 0.0
    job = prepare(*trio, data_of("labels"), signals="naive", scale="auto", samples=16)
    judge = judge_of(job)
    shares = []
    for module in (job.target.module, open_model(trio[1]).module):  # at scale 0 and 1
        found_here = judge.summarize(judge.score_batches(module, judge.batches(job.samples)))
        shares.append(found_here.accuracy)
    assert shares[0] == 1.0
    assert shares[1] is not None
    assert shares[1] < 0.75


@pytest.mark.parametrize("rule", ["auto", "safe"])
def test_a_model_that_is_often_right_and_sometimes_far_off_is_kept(rule: ScaleRule) -> None:
    """At no sharpness is its loss below that of a model that knows only how frequent the answers are."""
    labels = torch.tensor([0, 0, 1, 2, 3] * 8)
    right = F.one_hot(labels, 4).double()
    right[1::5] *= -40  # two of five are wrong, by far
    right[3::5] *= -40
    found = {
        0.0: score_of_classes(right, labels),
        0.25: score_of_classes(torch.tensor([0.7, 0, 0, 0]).expand(40, 4), labels),
    }
    assert found[0.0].loss > found[0.25].loss
    assert (found[0.0].accuracy, found[0.25].accuracy) == (0.6, 0.4)
    for judged, wanted in ((False, 0.25), (True, 0.0)):
        scores = {scale: replace(score, by_likelihood=judged) for scale, score in found.items()}
        choice = choose_scale(scores.__getitem__, samples=40, held_out=True, candidates=(0.0, 0.25), rule=rule)
        assert choice.scale == wanted


@pytest.mark.parametrize("rule", ["auto", "safe"])
def test_answers_need_evidence_to_leave_the_target(rule: ScaleRule) -> None:
    """The same mean gain, in each sample or by chance: 0.2 of a standard error, and eight of them."""
    noise = torch.tensor([5.0, -5.0] * 50).double()
    for spread, wanted in ((1.0, 0.0), (0.025, 0.05)):
        losses = {0.0: torch.full((100,), 2.0).double(), 0.05: 1.9 + spread * noise}
        for judged in (True, False):
            scores = {
                scale: Score(float(each.mean()), 0.4, 1.0, each, by_likelihood=judged) for scale, each in losses.items()
            }
            choice = choose_scale(scores.__getitem__, samples=100, held_out=True, candidates=(0.05,), rule=rule)
            assert choice.scale == (wanted if judged else 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_views_have_the_answers_of_their_samples(kind: str, trio: list[Path]) -> None:
    """`bico+` measures views of the questions, each with the same answer as its question."""
    job = prepare(*trio, data_of(kind), signals="bico+", samples=16)
    assert isinstance(job.samples, DatasetSamples)
    views = job.samples.views(job.config.seed)
    assert views is not None
    answers, wanted = read_answers(views.chosen), read_answers(job.samples.chosen)
    assert answers is not None
    assert wanted is not None
    assert list(answers) == list(wanted) * VIEWS
    found = transfer(*trio, data_of(kind), method="bico+", samples=16, scale=1.0)
    assert found.record["samples"] == 16


def judge_of(case: Case) -> Judge:
    return Judge(case.target, case.setup.calibration, ModelOutput())


def test_scores_are_the_likelihoods_of_answers(trio: list[Path]) -> None:
    """Against the evaluation, which scores all answers of the same samples."""
    job = prepare(*trio, data_of("choices"), signals="naive", scale="auto", samples=16)
    judge = judge_of(job)
    answers = judge.score_batches(job.target.module, judge.batches(job.samples))
    scores, right = (torch.cat(parts) for parts in zip(*answers, strict=True))
    wanted = likelihood(job.target, job.samples.chosen)
    assert (scores.argmax(-1).numpy() == wanted.by_sample.predicted).all()
    assert (right.numpy() == wanted.by_sample.labels).all()
    bits = -scores.gather(1, right[:, None])[:, 0].numpy() / math.log(2)
    assert bits == pytest.approx(wanted.by_sample.bits, rel=1e-5)  # float32 passes in other batches


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(("kind", "answers"), [("labels", 2), ("texts", 1), ("one class", 1)])
def test_the_plan_counts_the_passes_of_all_answers(trio: list[Path], kind: str, answers: int, cached: bool) -> None:
    """A question whose answers share it is read once, and the answers in passes that begin with a cache.

    The plan counts all candidates; few of them are judged.
    """
    data = Dataset(QUESTIONS * 2, np.zeros(16, dtype=np.int64), WORDS[:1]) if kind == "one class" else data_of(kind)
    source, finetuned, target = trio[0], trio[1], open_model(trio[2])
    assert target.generation is not None
    target = target if cached else replace(target, generation=replace(target.generation, answer_logits=None))
    job = prepare(source, finetuned, target, data, signals="naive", scale="auto", samples=16)
    rows: list[int] = []

    def count(_: Any, __: Any, given: dict[str, Any]) -> None:
        if given.get("past_key_values") is None and not given["input_ids"].is_meta:
            rows.append(len(given["input_ids"]))

    job.target.module.register_forward_pre_hook(count, with_kwargs=True)
    planned = expected(job)["expected"]["answers"]["target"]
    run(job)
    assert planned == len(TOKEN_SCALES) * (1 if cached else answers) * 16
    assert planned * 2 / 8 <= sum(rows) <= planned * 7 / 8, (
        "by some of the candidates, and by one half if that is clear"
    )


def test_many_answers_are_judged_by_some(trio: list[Path]) -> None:
    names = tuple(f"{word} {letter}" for word in WORDS for letter in "abcdef")
    data = Dataset(QUESTIONS, np.arange(8), names)
    job = prepare(*trio, data, signals="naive", scale="auto", samples=8)
    fewer = fewer_choices(data, MOST_ANSWERS)
    assert fewer.choices is not None
    assert [words[label] for words, label in zip(fewer.choices, fewer.labels, strict=True)] == list(names[:8])
    assert all(len(set(words)) == MOST_ANSWERS for words in fewer.choices)
    rows = [len(question.batch[0]["input_ids"]) for question in judge_of(job).batches(job.samples)]
    assert sum(rows) == MOST_ANSWERS * 8
