"""The last blocks of a student: they learn from stored inputs what they would learn from whole passes."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from builders.folders import FAMILIES, Zoo
from tuneport import transfer
from tuneport.errors import TuneportError
from tuneport.job import Drawn
from tuneport.models.open import open_model
from tuneport.pipeline.result import Result
from tuneport.training import last_blocks
from tuneport.training.augment import PIXELS, Reader
from tuneport.training.last_blocks import LastBlocks, stack_of
from tuneport.training.state import StateFile


@pytest.fixture(autouse=True)
def few_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_blocks, "STORED", 60)


@pytest.fixture(scope="module")
def ported(zoo: Zoo) -> Result:
    return transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=30, labels="source")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_from_stored_inputs_gives_the_bits_of_a_whole_one(zoo: Zoo, family: str) -> None:
    model = open_model(zoo[f"{family}-target"])
    stack, module, run = stack_of(model), model.module, model.features or model.logits
    assert stack is not None
    assert run is not None
    last = LastBlocks(module, stack)
    pixels, others = torch.randn(2, 5, 3, 24, 24)
    with torch.no_grad():
        whole = run(module, {"pixel_values": pixels})
        entering = last.entering(lambda: run(module, {"pixel_values": pixels}))
        with last.fed(entering):
            assert torch.equal(run(module, {"pixel_values": others}), whole)
        assert not torch.equal(run(module, {"pixel_values": others}), whole), "blocks run again afterwards"


def test_only_the_last_blocks_and_what_follows_change(ported: Result) -> None:
    found = ported.distill(12, blocks="last")
    entry = found.record["distilled"]
    best = next(mark for mark in entry["curve"] if mark["step"] == entry["best"])
    assert (entry["blocks"], entry["batch_size"]) == ("last", 16)
    assert best["held_out_loss"] < entry["curve"][0]["held_out_loss"]
    pairs = zip(found.apply().named_parameters(), ported.apply().parameters(), strict=True)
    changed = {name for (name, one), two in pairs if not torch.equal(one, two)}
    # rounding apart, base + (student - base) is the student: what was not trained has the bits of the start
    assert any("layers.2.self_attn.q_proj" in name for name in changed)
    assert "visual_projection.weight" in changed
    assert not [name for name in changed if "layers.0." in name or "layers.1." in name or "embeddings" in name]


def test_every_stored_view_is_another_one(ported: Result) -> None:
    """Of one image, in several copies and passes."""
    assert ported.job is not None
    assert isinstance(ported.job.samples, Drawn)
    reader = Reader(ported.job.samples.take(np.zeros(12, dtype=np.int64)), 1, 0)
    views = torch.cat([view.target.inputs[PIXELS] for view in last_blocks._views(reader, 4)])
    assert len(views) == last_blocks.STORED
    assert not any(torch.equal(one, two) for one, two in combinations(views, 2))


def test_a_killed_run_continues_with_the_same_bits(ported: Result, tmp_path: Path) -> None:
    whole, steps = ported.distill(6, blocks="last"), 0

    def kill(count: int) -> None:
        nonlocal steps
        steps += count
        if steps > 3:
            raise KeyboardInterrupt

    saved = StateFile(tmp_path / "state.safetensors", "these", 0.0)
    with pytest.raises(KeyboardInterrupt):
        ported.distill(6, blocks="last", progress=kill, saved=saved)
    found = ported.distill(6, blocks="last", saved=saved)
    assert found.record["distilled"]["curve"] == whole.record["distilled"]["curve"]
    assert all(torch.equal(found.task_vector.dense(name), whole.task_vector.dense(name)) for name in whole.task_vector)


def test_what_cannot_be_divided_is_refused(ported: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TuneportError, match='`blocks="last"` trains whole weights: leave `lora` out'):
        ported.distill(2, blocks="last", lora=2)
    monkeypatch.setattr(last_blocks, "TRAINED", 0.3)  # of three blocks
    with pytest.raises(TuneportError, match="needs images, a head, and one stack of several blocks"):
        ported.distill(2, blocks="last")
