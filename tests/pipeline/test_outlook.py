"""A plan agrees with the transfer."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from builders import toy
from builders.folders import SAMPLES, Zoo, cross, edit_json
from builders.runs import Case, expected, measured, port, prepare
from tuneport.data.formats import read_plain
from tuneport.pipeline.estimate import statistics_bytes


def answered(module: nn.Module, layer: str, counts: Counter[str], name: str) -> None:
    """Count the samples that pass through a layer, and not through its copies on the meta device."""

    def count(_: nn.Module, given: tuple[Tensor]) -> None:
        counts[name] += 0 if given[0].is_meta else len(given[0])

    module.get_submodule(layer.removesuffix(".weight")).register_forward_pre_hook(count)


class TestPlan:
    @pytest.mark.parametrize(
        ("family", "bare", "scale"),
        [("clip_vision", False, None), ("vit", False, None), ("vit", True, None), ("vit", True, 0.5)],
    )
    def test_the_passes_are_those_of_the_transfer(
        self, zoo: Zoo, tmp_path: Path, family: str, bare: bool, scale: float | None
    ) -> None:
        """With a zero-shot head, with one that is fitted, and the same of a target without one for these classes.

        A number as the scale leaves out the judging alone, whatever the head is.
        """
        source, tuned, target = zoo.trio(family)
        if bare:
            target = Path(shutil.copytree(target, tmp_path / "bare"))
            edit_json(target / "config.json", id2label={"0": "sun", "1": "moon", "2": "star"})
        job, test = prepare(source, tuned, target, zoo.data, samples=SAMPLES), read_plain(zoo.data, "test")
        planned = expected(job, scale=scale, tested=len(test))["expected"]
        counts: Counter[str] = Counter()
        pair = next(pair for pair in job.plan.pairs if pair.target.block is not None)
        answered(job.source.module, pair.source.weight, counts, "source")
        answered(job.target.module, pair.target.weight, counts, "target")
        port(job, tmp_path / "out", scale=scale, test=test)
        assert counts == {name: count + SAMPLES for name, count in planned["answers"].items()}, "and the measured ones"

    def test_the_plan_agrees_with_the_transfer(self, zoo: Zoo) -> None:
        for source, target in (("vit", "vit"), ("clip", "clip_vision"), ("siglip_vision", "siglip_vision")):
            job: Case = prepare(
                zoo[f"{source}-base"], zoo[f"{source}-tuned"], zoo[f"{target}-target"], zoo.data, samples=SAMPLES
            )
            outlook, result = expected(job), cross(zoo, source, target)
            assert outlook["samples"] == SAMPLES
            assert [(row["target"], row["source"]) for row in outlook["layers"]] == [
                (record.target, record.source) for record in result.records
            ]
            assert outlook["not_transported"] == result.record["not_transported"]
            assert outlook["expected"]["statistics_bytes"] > 0


class TestStatistics:
    """The bytes in a plan are those of the statistics that are measured."""

    # each limit once, and each family; the latter has layers that do not share a sum
    @pytest.mark.parametrize(("family", "limit"), [("vit", 1), ("siglip_vision", 4), ("siglip_vision", None)])
    def test_bytes_are_those_of_the_sums(
        self, zoo: Zoo, family: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tuneport.maps.statistics._drop_zeros", lambda source, target: (source, target))
        job = prepare(*zoo.trio(family), zoo.data, samples=SAMPLES, max_tokens=limit)
        sums = {id(found): found for found in measured(job).covariances.values()}.values()
        assert any(found.rows is not None for found in sums) == (limit is not None)
        assert statistics_bytes(job.measurement) == sum(found.nbytes for found in sums)

    def test_nothing_is_measured_for_a_method_without_signals(self, zoo: Zoo) -> None:
        assert statistics_bytes(prepare(*zoo.trio("vit"), signals="naive").measurement) == 0

    def test_models_that_read_values_have_a_bound(self) -> None:
        source, target = toy.ToyViT(seed=1), toy.ToyViT(seed=2)

        def loss(module: Any, batch: Any) -> Tensor:
            return toy.loss(module, batch) / float(batch[0].square().mean())

        batches = toy.batches(64)
        options = {"loss": loss, "pairs": toy.plan(source, target).pairs}
        job = prepare(source, toy.finetuned(source), target, batches, **options)
        sums = {id(found): found for found in measured(job).covariances.values()}.values()
        assert statistics_bytes(job.measurement) >= sum(found.nbytes for found in sums) > 0
        once = prepare(source, toy.finetuned(source), target, iter(batches), **options)
        assert statistics_bytes(once.measurement) == statistics_bytes(job.measurement)
        assert len(list(once.samples)) == len(batches), "batches that can be read once are not used up"
