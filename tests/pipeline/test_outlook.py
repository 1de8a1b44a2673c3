"""A plan agrees with the transfer."""

from __future__ import annotations

from builders.folders import SAMPLES, Zoo, cross, load
from tuneport.job import Job
from tuneport.pipeline.outlook import expected
from tuneport.pipeline.prepare import prepare


class TestPlan:
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
