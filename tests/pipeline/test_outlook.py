"""A plan agrees with the transfer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from builders.folders import SAMPLES, Zoo, cross, load
from tuneport.data.formats import read_plain
from tuneport.job import Job
from tuneport.pipeline.outlook import expected
from tuneport.pipeline.port import port
from tuneport.pipeline.prepare import prepare
from tuneport.runtime.speed import Rates


def answered(module: nn.Module, layer: str, counts: Counter[str], name: str) -> None:
    """Count the samples that pass through a layer, and not through its copies on the meta device."""

    def count(_: nn.Module, given: tuple[Tensor]) -> None:
        counts[name] += 0 if given[0].is_meta else len(given[0])

    module.get_submodule(layer.removesuffix(".weight")).register_forward_pre_hook(count)


class TestPlan:
    @pytest.mark.parametrize("family", ["clip_vision", "vit"])  # with a zero-shot head, and one that is fitted
    @pytest.mark.parametrize("scale", [None, 0.5])
    def test_the_passes_are_those_of_the_transfer(
        self, zoo: Zoo, tmp_path: Path, family: str, scale: float | None
    ) -> None:
        job, test = prepare(*zoo.trio(family), zoo.data, samples=SAMPLES), read_plain(zoo.data, "test")
        planned = expected(job, scale=scale, tested=len(test))["expected"]
        counts: Counter[str] = Counter()
        pair = next(pair for pair in job.plan.pairs if pair.target.block is not None)
        answered(job.source.module, pair.source.weight, counts, "source")
        answered(job.target.module, pair.target.weight, counts, "target")
        port(job, tmp_path / "out", scale=scale, test=test)
        assert counts == {name: count + SAMPLES for name, count in planned["answers"].items()}, "and the measured ones"

    def test_seconds_grow_by_the_choice_of_the_scale_and_the_scores(self, zoo: Zoo, monkeypatch: Any) -> None:
        """Every rate is 1, so that seconds are FLOPs."""
        monkeypatch.setattr("tuneport.pipeline.outlook.probe", lambda *_: Rates(1, 1, 1, 1, 1, 1))
        job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES)
        given, chosen, scored = (
            expected(job, scale=scale, tested=tested)["expected"]
            for scale, tested in ((1.0, 0), (None, 0), (None, 10 * SAMPLES))
        )
        counted = given["cost"]["counted"]
        once = counted["forward"]  # of both models on all samples
        assert given["seconds"] == pytest.approx(counted["total"] + given["answer_flops"], rel=1e-9)
        solving = counted["solves"] + counted["transport"]
        more = chosen["seconds"] - given["seconds"] - (chosen["answer_flops"] - given["answer_flops"])
        assert 0.1 * solving < more <= 2 * solving * (1 + 1e-9), "two solves from half of the tokens"
        assert 10 * once < scored["answer_flops"] - chosen["answer_flops"] < 20 * once

    def test_the_plan_agrees_with_the_transfer(self, zoo: Zoo) -> None:
        for source, target in (("vit", "vit"), ("clip", "clip_vision"), ("siglip_vision", "siglip_vision")):
            job: Job = prepare(
                zoo[f"{source}-base"], zoo[f"{source}-tuned"], zoo[f"{target}-target"], zoo.data, samples=SAMPLES
            )
            outlook, result = expected(job), cross(zoo, source, target)
            assert outlook["samples"] == SAMPLES
            assert [(row["target"], row["source"]) for row in outlook["layers"]] == [
                (record.target, record.source) for record in result.records
            ]
            assert outlook["not_transported"] == result.record["not_transported"]
            assert outlook["expected"]["flops"] > 0
            assert outlook["expected"]["statistics_bytes"] > 0

    def test_the_cost_equals_a_count_by_hand(self, zoo: Zoo) -> None:
        layers = expected(prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES))
        paper = layers["expected"]["cost"]["paper"]
        weights = {part: sum(p.numel() for p in load(zoo[f"vit-{part}"]).parameters()) for part in ("base", "target")}
        assert paper["passes"] == 6 * SAMPLES * (5 * weights["base"] + 10 * weights["target"]), "patches, class token"
        assert 0 < layers["expected"]["flops"] < paper["passes"], "frozen weights need no gradients of their own"
        naive = expected(prepare(*zoo.trio("vit"), signals="naive"), "naive")
        assert naive["expected"]["flops"] == naive["expected"]["statistics_bytes"] == 0
