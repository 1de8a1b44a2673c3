"""Rehearsal: what bico+ measures besides the samples, and that other methods and other data are left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from builders.folders import Zoo
from builders.runs import Case, measured, prepare, run
from tuneport import transfer
from tuneport.data.samplers import VIEWS, augmented
from tuneport.measure.samples import DatasetSamples, UserBatches
from tuneport.measure.signals import INPUT, OUTPUT_GRADIENT
from tuneport.report.summary import repeat_command


def picture(seed: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def job_of(zoo: Zoo, count: int = 12, method: str = "bico+", **options: Any) -> Case:
    return prepare(*zoo.trio("clip_vision"), zoo.data, signals=method, samples=count, **options)


class TestViews:
    def test_view_keeps_size_and_mode_and_depends_only_on_the_seed(self) -> None:
        images = [picture(i, (9, 6)) for i in range(3)]
        one, again, other = augmented(images, 2, 7), augmented(images, 2, 7), augmented(images, 2, 8)
        assert len(one) == 6
        assert all(np.array_equal(one[i], again[i]) for i in range(6))
        assert any(not np.array_equal(one[i], other[i]) for i in range(6))
        assert {(view.size, view.mode) for view in one} == {((6, 9), "RGB")}
        assert any(not np.array_equal(one[i], images[i % 3]) for i in range(6))

    @pytest.mark.parametrize("ordered", [False, True])
    def test_the_views_of_a_sample_differ(self, ordered: bool) -> None:
        """Also those of two samples that are the same."""
        texts = list(augmented([" ".join(map(str, range(40)))] * 2, 4, 0, ordered))
        assert len(set(texts)) == 8
        images = {view.tobytes() for view in augmented([picture(0, (64, 64))] * 2, 3, 1, ordered)}
        assert len(images) == 6

    def test_view_of_an_image_consists_of_its_pixels(self) -> None:
        image = picture(0)
        known = {tuple(pixel) for row in np.array(image) for pixel in row}
        views = list(augmented([image], 8, 0))
        assert len(views) == 8
        for view in views:
            assert {tuple(pixel) for row in np.array(view) for pixel in row} <= known

    def test_view_of_a_text_is_a_subset_of_its_words(self) -> None:
        text = "one two three four five six seven eight nine ten"
        views = list(augmented([text], 50, 0))
        assert all(set(view.split()) <= set(text.split()) and view for view in views)
        assert 6 < np.mean([len(view.split()) for view in views]) < 10
        assert augmented(["word"], 3, 0)[-1] == "word"  # something is always left

    @pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 40)])
    def test_small_and_narrow_images(self, size: tuple[int, int]) -> None:
        assert augmented([picture(0, size)], 2, 0)[1].size == (size[1], size[0])

    def test_indices(self) -> None:
        views = augmented(["a b c"], 2, 0)
        assert list(views[0:2]) == [views[0], views[1]] == list(views)
        with pytest.raises(IndexError):
            views[2]


class TestRehearsal:
    def test_every_sample_has_augmented_views(self, zoo: Zoo) -> None:
        job = job_of(zoo)
        views = job.samples.views(job.config.seed)
        assert isinstance(views, DatasetSamples)
        assert len(views) == VIEWS * 12
        assert sum(batch.size or 0 for batch in views) == len(views)
        assert isinstance(job.samples, DatasetSamples)
        assert job.samples.chosen.labels is not None
        assert np.array_equal(views.chosen.labels, np.tile(job.samples.chosen.labels, VIEWS))  # type: ignore[arg-type]

    def test_views_follow_the_seed(self, zoo: Zoo) -> None:
        jobs = [job_of(zoo, seed=seed) for seed in (0, 0, 1)]
        found = [job.samples.views(job.config.seed) for job in jobs]
        first, again, other = ([np.asarray(view) for view in views.dataset.inputs] for views in found)  # type: ignore[union-attr]
        assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
        assert not all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))

    def test_given_batches_have_no_views(self, zoo: Zoo) -> None:
        job = job_of(zoo)
        assert UserBatches(list(job.samples)).views(seed=0) is None

    def test_views_extend_input_statistics_but_not_gradients(self, zoo: Zoo) -> None:
        job = job_of(zoo)
        found = measured(job, views=True)
        plain = measured(job)
        views = job.samples.views(job.config.seed)
        assert views is not None
        more = measured(job.on(views))
        assert {signal for _, signal in found.covariances} == {INPUT, OUTPUT_GRADIENT}
        for key, covariance in found.covariances.items():
            wanted = plain.covariances[key].matrix
            if key[1] == INPUT:
                wanted = wanted + more.covariances[key].matrix
            size = float(wanted.abs().max())
            torch.testing.assert_close(covariance.matrix, wanted, rtol=0, atol=1e-9 * size)
        assert found.samples == plain.samples == 12
        assert found.passes["forward"] > plain.passes["forward"]
        shared = {id(covariance) for covariance in plain.covariances.values()}
        assert len({id(covariance) for covariance in found.covariances.values()}) == len(shared)

    def test_max_tokens_apply_per_sample(self, zoo: Zoo) -> None:
        found = measured(job_of(zoo, max_tokens=24), views=True)
        tokens = {
            signal: max(c.tokens for key, c in found.covariances.items() if key[1] == signal) for _, signal in found
        }
        assert tokens == {INPUT: 24 * (1 + VIEWS), OUTPUT_GRADIENT: 24}


class TestPreset:
    def test_the_scale_is_chosen_by_default(self, zoo: Zoo) -> None:
        trio = zoo.trio("clip_vision")
        chosen = transfer(*trio, zoo.data, method="bico+", samples=12)
        assert chosen.record["scale_choice"]["samples"] == 12
        fixed = transfer(*trio, zoo.data, method="bico+", samples=12, scale=1.0)
        assert fixed.scale == 1.0
        assert "scale_choice" not in fixed.record

    def test_safe_scale_is_recorded_and_at_most_auto(self, zoo: Zoo) -> None:
        trio = zoo.trio("clip_vision")
        found = {rule: transfer(*trio, zoo.data, samples=12, scale=rule) for rule in ("auto", "safe")}
        rules = {rule: result.record["scale_choice"].pop("rule") for rule, result in found.items()}
        assert rules == {"auto": "auto", "safe": "safe"}
        assert found["safe"].scale <= found["auto"].scale
        assert found["safe"].record["scale_choice"] == found["auto"].record["scale_choice"]  # the same search
        assert "--scale safe" in (repeat_command(transfer(*trio, zoo.data, samples=12, scale="safe").record) or "")

    def test_same_seed_gives_same_bits(self, zoo: Zoo) -> None:
        one, two = (run(job_of(zoo), "bico+", scale=1.0).task_vector for _ in range(2))
        assert all(torch.equal(one[name], two[name]) for name in one)
        plain = run(job_of(zoo), "bico", scale=1.0).task_vector
        assert any(not torch.equal(one[name], plain[name]) for name in one)
