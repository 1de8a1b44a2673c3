"""Rehearsal: what bico+ measures besides the samples, and that other methods and other data are left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from folders import Zoo
from tuneport import transfer
from tuneport.capture import INPUT, OUTPUT_GRADIENT
from tuneport.methods import METHODS
from tuneport.pipeline import check_scale, measure_job, run
from tuneport.preparation import Job, PairedBatches, prepare
from tuneport.rehearsal import STRANGERS, VIEWS, Views, rehearsals


def picture(seed: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def job_of(zoo: Zoo, count: int = 12, method: str = "bico+", **options: Any) -> Job:
    return prepare(*zoo.trio("clip_vision"), zoo.data, method=method, samples=count, scored=True, **options)


class TestViews:
    def test_a_view_keeps_size_and_mode_and_depends_on_the_seed_only(self) -> None:
        images = [picture(i, (9, 6)) for i in range(3)]
        one, again, other = Views(images, 2, 7), Views(images, 2, 7), Views(images, 2, 8)
        assert len(one) == 6
        assert all(np.array_equal(one[i], again[i]) for i in range(6))
        assert any(not np.array_equal(one[i], other[i]) for i in range(6))
        assert {(view.size, view.mode) for view in one} == {((6, 9), "RGB")}
        assert any(not np.array_equal(one[i], images[i % 3]) for i in range(6))

    def test_a_view_of_an_image_is_made_of_its_pixels(self) -> None:
        image = picture(0)
        known = {tuple(pixel) for row in np.array(image) for pixel in row}
        for view in Views([image], 8, 0):
            assert {tuple(pixel) for row in np.array(view) for pixel in row} <= known

    def test_a_view_of_a_text_drops_words_and_adds_none(self) -> None:
        text = "one two three four five six seven eight nine ten"
        views = list(Views([text], 50, 0))
        assert all(set(view.split()) <= set(text.split()) and view for view in views)
        assert 6 < np.mean([len(view.split()) for view in views]) < 10
        assert Views(["word"], 3, 0)[-1] == "word"  # something is always left

    @pytest.mark.parametrize("size", [(1, 1), (1, 5), (3, 40)])
    def test_small_and_long_images(self, size: tuple[int, int]) -> None:
        assert Views([picture(0, size)], 2, 0)[1].size == (size[1], size[0])

    def test_indices(self) -> None:
        views = Views(["a b c"], 2, 0)
        assert views[0:2] == [views[0], views[1]] == list(views)
        with pytest.raises(IndexError):
            views[2]


class TestRehearsals:
    def test_views_serve_the_input_side_and_random_labels_the_output_side(self, zoo: Zoo) -> None:
        job = job_of(zoo)
        (views, first), (strangers, second) = rehearsals(job)
        assert (first, second) == ({INPUT}, {OUTPUT_GRADIENT})
        assert (views.samples, strangers.samples) == (VIEWS * 12, 12)
        for found in (views, strangers):
            assert isinstance(found.batches, PairedBatches)
            assert sum(batch.size or 0 for batch in found.batches) == found.samples
        ours, drawn = job.batches, strangers.batches
        assert isinstance(ours, PairedBatches)
        assert isinstance(drawn, PairedBatches)
        chosen = ours.dataset.subset(ours.indices)
        assert not np.array_equal(drawn.dataset.labels, chosen.labels)
        assert all(0 <= label < len(chosen.classes) for label in drawn.dataset.labels)
        assert all(np.array_equal(one, two) for one, two in zip(drawn.dataset.inputs, chosen.inputs, strict=True))

    @pytest.mark.parametrize(("count", "strangers"), [(4, 4), (20, 20), (25, 16), (40, 10)])
    def test_the_more_samples_the_fewer_strangers(self, zoo: Zoo, count: int, strangers: int) -> None:
        _, (found, _) = rehearsals(job_of(zoo, count))
        assert found.samples == strangers <= STRANGERS

    def test_they_follow_the_seed(self, zoo: Zoo) -> None:
        labels = [
            [job.batches.dataset.labels.tolist() for job, _ in rehearsals(job_of(zoo, seed=seed))][1]  # type: ignore[union-attr]
            for seed in (0, 0, 1)
        ]
        assert labels[0] == labels[1] != labels[2]

    def test_own_batches_are_left_as_they_are(self, zoo: Zoo) -> None:
        job = job_of(zoo)
        assert list(rehearsals(replace(job, batches=list(job.batches)))) == []

    def test_the_statistics_are_those_of_samples_and_rehearsals_together(self, zoo: Zoo) -> None:
        job = job_of(zoo)
        found = measure_job(job)
        plain = measure_job(replace(job, method=METHODS["bico"]))
        more = {signal: job for job, (signal,) in rehearsals(job)}
        for signal, extra in more.items():
            alone = measure_job(replace(extra, method=METHODS["bico"]))
            keys = [key for key in found.covariances if key[1] == signal]
            assert keys
            for key in keys:
                wanted = plain.covariances[key].matrix + alone.covariances[key].matrix
                size = float(wanted.abs().max())
                torch.testing.assert_close(found.covariances[key].matrix, wanted, rtol=0, atol=1e-9 * size)
        assert found.samples == plain.samples == 12
        assert found.passes["forward"] > plain.passes["forward"]
        shared = {id(covariance) for covariance in plain.covariances.values()}
        assert len({id(covariance) for covariance in found.covariances.values()}) == len(shared)

    def test_max_tokens_hold_for_every_sample_alike(self, zoo: Zoo) -> None:
        found = measure_job(job_of(zoo, max_tokens=24))
        tokens = {
            signal: max(c.tokens for key, c in found.covariances.items() if key[1] == signal) for _, signal in found
        }
        assert tokens == {INPUT: 24 * (1 + VIEWS), OUTPUT_GRADIENT: 2 * 24}


class TestPreset:
    def test_its_scale_is_auto_unless_another_is_asked_for(self, zoo: Zoo) -> None:
        assert check_scale(None, "bico+") == "auto"
        assert check_scale(None, "bico") == check_scale(None, METHODS["theseus"]) == 1.0
        assert check_scale("0.5", "bico+") == 0.5
        trio = zoo.trio("clip_vision")
        chosen = transfer(*trio, zoo.data, method="bico+", samples=12)
        assert chosen.record["scale_choice"]["samples"] == 12
        fixed = transfer(*trio, zoo.data, method="bico+", samples=12, scale=1.0)
        assert fixed.scale == 1.0
        assert "scale_choice" not in fixed.record

    def test_the_same_bits_for_the_same_seed(self, zoo: Zoo) -> None:
        one, two = (run(job_of(zoo), scale=1.0).task_vector for _ in range(2))
        assert all(torch.equal(one[name], two[name]) for name in one)
        plain = run(job_of(zoo, method="bico")).task_vector
        assert any(not torch.equal(one[name], plain[name]) for name in one)
