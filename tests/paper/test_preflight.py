"""The verdict before a transfer: a trial on samples that the maps have not seen, and words that follow from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from builders.folders import Zoo, load
from builders.runs import measured, prepare, problem
from paper import likeness
from paper.likeness import COMPARED
from paper.preflight import (
    FOLDS,
    LIKELY,
    UNCERTAIN,
    UNLIKELY,
    Trial,
    compare,
    judge,
    summary,
    try_transfer,
)
from tuneport.data.formats import read_plain
from tuneport.errors import DataError, TuneportError
from tuneport.measure.capture import measure_pairs
from tuneport.measure.samples import DatasetSamples, UserBatches
from tuneport.methods import METHODS
from tuneport.pipeline import statistics as measuring
from tuneport.pipeline.scale import SCALES, Score, choose_scale
from tuneport.runtime import passes


@pytest.fixture
def job(zoo: Zoo) -> Any:
    source, tuned, target = zoo.trio("clip_vision")
    return prepare(source, tuned, target, zoo.data, signals=COMPARED, samples=24)


class TestTrial:
    def test_every_sample_is_scored_by_maps_that_have_not_seen_it(self, job: Any) -> None:
        found = try_transfer(job, scale=1.0)
        indices = job.samples.indices
        before, after = [], []
        for number in range(FOLDS):
            held_out = np.array_split(indices, FOLDS)[number]
            rest = np.concatenate([part for i, part in enumerate(np.array_split(indices, FOLDS)) if i != number])
            fitted = replace(job, samples=replace(job.samples, indices=rest))
            moved = METHODS["bico"].transfer(problem(job, measured(fitted)))
            module = load(job.target.folder)
            (batch, labels) = next(iter(replace(job.samples, indices=held_out))).target
            for weights, scores in ((None, before), (moved.task_vector, after)):
                with torch.no_grad():
                    for name, parameter in module.named_parameters() if weights else ():
                        if name in weights:
                            parameter.add_(weights[name])
                    logits = job.heads.target.scores(job.target, module, batch)
                losses = F.cross_entropy(logits, labels, reduction="none")
                scores += zip(losses.tolist(), (logits.argmax(-1) == labels).tolist(), strict=True)
        assert found.samples == 24
        assert found.loss_before == pytest.approx(np.mean([loss for loss, _ in before]), rel=1e-4)
        assert found.loss_after == pytest.approx(np.mean([loss for loss, _ in after]), rel=1e-3)
        assert found.accuracy_before == pytest.approx(100 * np.mean([right for _, right in before]))
        assert found.accuracy_after == pytest.approx(100 * np.mean([right for _, right in after]), abs=5)
        assert found.gain == pytest.approx(100 * (found.turned_right - found.turned_wrong) / 24)

    def test_the_scale_is_that_of_a_transfer(self, job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """With images the rule is "safe", and the answers of the other folds choose."""
        asked: list[tuple[int, str]] = []

        def choose(score: Any, *, samples: int, rule: str, **given: Any) -> Any:
            asked.append((samples, rule))
            return choose_scale(
                lambda scale: score(scale) if len(asked) > 1 else Score(-scale), samples=samples, **given
            )

        monkeypatch.setattr("paper.preflight.choose_scale", choose)
        found = try_transfer(job)
        assert asked == [(18, "safe")] * FOLDS
        assert (found.scales[0], found.rule) == (SCALES[-1], "safe")

    def test_a_scale_of_zero_changes_no_answer(self, job: Any) -> None:
        found = try_transfer(job, scale=0.0)
        assert (found.loss_before, found.accuracy_before) == (found.loss_after, found.accuracy_after)
        assert (found.loss_falls, found.turned_right, found.turned_wrong) == (0, 0, 0)
        assert judge(found).verdict == UNLIKELY
        assert judge(found).reasons == ("at scale 0, the target stays as it is",)

    def test_a_token_limit_is_shared_by_the_folds(self, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
        limits: list[int | None] = []

        def seen(fold: Any, **given: Any) -> Any:
            limits.append(fold.max_tokens)
            return measured(fold, **given)

        monkeypatch.setattr("tuneport.pipeline.statistics.measured", seen)
        source, tuned, target = zoo.trio("clip_vision")
        try_transfer(prepare(source, tuned, target, zoo.data, signals=COMPARED, samples=24, max_tokens=40))
        assert limits == [10] * 4

    def test_a_transfer_that_must_help_and_one_that_must_harm(self, zoo: Zoo) -> None:
        """Between equal models the trial is the fine-tune itself: the loss falls where the fine-tune is good."""
        base = zoo["clip_vision-base"]
        data = read_plain(zoo.data, "train")
        job = prepare(base, zoo["clip_vision-tuned"], base, data, signals=COMPARED, samples=24)
        found = try_transfer(job, scale=1.0)
        module = job.source.module
        batch, labels = next(iter(job.samples)).target
        moved = {name: tensor for name, tensor in job.task_vector.items() if "norm" not in name}
        with torch.no_grad():
            before = F.cross_entropy(job.heads.target.scores(job.target, module, batch), labels)
            for name, parameter in module.named_parameters():
                if name in moved and parameter.ndim > 1:
                    parameter.add_(moved[name])
            after = F.cross_entropy(job.heads.target.scores(job.target, module, batch), labels)
        assert found.loss_before == pytest.approx(float(before), rel=1e-5)
        assert (found.loss_after > found.loss_before) == (float(after) > float(before))

    def test_nothing_is_left_changed(self, job: Any) -> None:
        before = {name: tensor.clone() for name, tensor in job.target.module.state_dict().items()}
        compare(job)
        assert before
        assert all(torch.equal(tensor, before[name]) for name, tensor in job.target.module.state_dict().items())

    def test_methods_without_signals(self, zoo: Zoo) -> None:
        source, tuned, target = zoo.trio("vit")
        naive = prepare(source, tuned, target, zoo.data, signals=COMPARED, samples=24)
        assert try_transfer(naive, "naive").samples == 24

    def test_without_a_head_only_the_loss_counts(self, job: Any) -> None:
        found = try_transfer(replace(job, heads=None))
        assert (found.scales, found.rule) == ((1.0,) * FOLDS, None), "no sample can be scored to choose a scale"
        assert found.gain is None
        assert found.samples == 24
        assert math.isfinite(found.loss_after)
        assert judge(found).verdict in (UNCERTAIN, UNLIKELY)


class TestVerdict:
    @pytest.mark.parametrize(
        ("trial", "expected"),
        [
            (Trial(100, 2.0, 1.8, 0.85, 40.0, 43.0, 6, 3), LIKELY),
            (Trial(100, 2.0, 1.8, 0.55, 40.0, 43.0, 6, 3), UNCERTAIN),  # 55 of 100: p = 0.18
            (Trial(40, 2.0, 1.8, 0.8, 65.0, 90.0, 10, 0), LIKELY),  # ten of ten: p = 0.002
            (Trial(40, 2.0, 1.8, 0.4, 65.0, 90.0, 10, 0), UNLIKELY),
            (Trial(100, 2.0, 1.8, 0.95, 40.0, 40.0, 3, 3), UNCERTAIN),
            (Trial(100, 2.0, 1.8, 0.95, 40.0, 38.0, 1, 3), UNCERTAIN),
            (Trial(100, 2.0, 1.8, 0.68, 40.0, 30.0, 2, 12), UNLIKELY),
            (Trial(100, 2.0, 2.2, 0.45, 40.0, 42.0, 4, 2), UNLIKELY),
            (Trial(100, 2.0, 1.9, 0.9), UNCERTAIN),
            (Trial(100, 2.0, 2.9, 0.1), UNLIKELY),
            (Trial(100, 2.0, 1.8, 0.7, 40.0, 43.0, 6, 3, rule="auto"), LIKELY),
            (Trial(100, 2.0, 1.8, 0.7, 40.0, 41.0, 4, 3, rule="auto"), UNCERTAIN),
            (Trial(100, 2.0, 1.8, 0.68, 40.0, 36.0, 2, 6, rule="auto"), UNCERTAIN),
            (None, UNCERTAIN),
        ],
    )
    def test_words(self, trial: Trial | None, expected: str) -> None:
        found = judge(trial)
        assert found.verdict == expected
        assert found.reasons

    @pytest.mark.parametrize(
        ("scales", "rule", "words"),
        [
            ((1.0, 1.0), None, "at scale 1, the loss falls on 85 % of"),
            ((0.25, 0.25), "safe", "at scale 0.25, chosen by safe on the other samples, the loss falls"),
            ((0.5, 0.0, 1.0), "auto", "at scales of 0 to 1, chosen by auto on the other samples, the loss falls"),
        ],
    )
    def test_reasons_name_the_scale(self, scales: tuple[float, ...], rule: Any, words: str) -> None:
        found = judge(Trial(100, 2.0, 1.8, 0.85, 40.0, 43.0, 6, 3, scales=scales, rule=rule))
        assert found.reasons[0].startswith(words)

    def test_reasons_name_the_numbers(self, job: Any) -> None:
        found = compare(job, scale=1.0)
        text = "\n".join(found.verdict.reasons)
        assert f"{found.trial.turned_right} of them turn right" in text
        means = summary(found.similarity)
        assert set(means) == {"input", "output", "output_gradient"}
        assert f"inputs: CKA {means['input']['cka']:.2f}" in text


class TestPair:
    def test_without_a_fine_tune_every_layer_is_compared(self, zoo: Zoo) -> None:
        job = prepare(zoo["clip_vision-base"], None, zoo["clip_vision-target"], zoo.data, signals=COMPARED, samples=16)
        assert len(job.plan.pairs) == len(job.target.layers)
        found = compare(job, trial=False)
        assert found.trial is None
        assert found.verdict.verdict == UNCERTAIN
        assert len(found.similarity) > 3 * 10

    @pytest.mark.parametrize("free", [0, 200_000])  # one weight, or some of them
    def test_layers_whose_sums_do_not_fit_are_measured_in_groups(
        self, job: Any, free: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []

        def recorded(*args: Any, **options: Any) -> Any:
            seen.append(len(args[2]))
            return measure_pairs(*args, **options)

        for module in (likeness, measuring):
            monkeypatch.setattr(module, "measure_pairs", recorded)
        whole = compare(job)
        layers = len(job.plan.pairs)
        assert set(seen) == {layers}
        seen.clear()
        monkeypatch.setattr(passes, "free_memory", lambda: free)
        parts = compare(job)
        assert max(seen) < layers
        assert parts.similarity == whole.similarity
        assert replace(parts.trial, seconds=0.0) == replace(whole.trial, seconds=0.0)
        assert parts.verdict.verdict == whole.verdict.verdict

    def test_a_memory_budget_divides_the_layers_too(self, job: Any) -> None:
        models = sum(part.nbytes for model in job.models for part in model.module.parameters())
        sizes = [len(passes.jobs_that_fit(replace(job, memory_budget=models + more), COMPARED, lambda *_: 1000))
                 for more in (0, 40_000, 10**9)]  # fmt: skip
        assert sizes[0] == len(passes.by_weight(job.plan.pairs))
        assert sizes[0] > sizes[1] > sizes[2] == 1

    def test_two_live_modules(self, zoo: Zoo) -> None:
        source, target = (load(zoo["vit-base"]) for _ in range(2))
        data = read_plain(zoo.data, "train")
        with pytest.raises(TuneportError, match="cannot read raw samples"):
            prepare(source, None, target, data, signals=COMPARED, samples=16)

    def test_a_model_with_itself(self, zoo: Zoo) -> None:
        job = prepare(zoo["vit-base"], None, zoo["vit-base"], zoo.data, signals=COMPARED, samples=16)
        similarity = compare(job, trial=False).similarity
        assert similarity
        for item in similarity:
            assert item.cka == pytest.approx(1.0, abs=1e-6)
            assert item.cosine_before == pytest.approx(1.0, abs=1e-6)

    def test_too_few_samples_and_batches(self, zoo: Zoo) -> None:
        source, tuned, target = zoo.trio("vit")
        with pytest.raises(DataError, match="at least 8 samples, got 5"):
            compare(prepare(source, tuned, target, zoo.data, signals=COMPARED, samples=5))
        job = prepare(source, tuned, target, zoo.data, samples=8)
        assert isinstance(job.samples, DatasetSamples)
        with pytest.raises(DataError, match="draws its own samples"):
            compare(replace(job, samples=UserBatches(list(job.samples))))


@pytest.mark.parametrize(
    ("after", "error", "word"),
    [(180.0, 9.0, LIKELY), (180.0, 11.0, UNCERTAIN), (200.0, 1.0, UNLIKELY), (math.nan, 1.0, UNLIKELY)],
)
def test_a_language_model_is_judged_by_its_loss(after: float, error: float, word: str) -> None:
    """Two standard errors are evidence; a loss that does not fall is none, however many samples gain."""
    found = judge(Trial(40, 200.0, after, 0.9, loss_error=error))
    assert found.verdict == word
    assert f"their mean loss in nats a text is 200.0 before, {after:.1f} after" in found.reasons[1]
