"""The scale that a transfer takes where none is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.folders import Zoo, images
from builders.runs import prepare
from builders.texts import SENTENCES, gpt_tokenizer, make, write, write_rows
from builders.toy import ToyViT, batches, finetuned, loss
from builders.twins import moved
from tuneport.config.options import parse_scale
from tuneport.errors import TuneportError
from tuneport.pipeline.transfer import transfer


def test_images_are_scored_with_caution(zoo: Zoo) -> None:
    trio = zoo.trio("clip_vision")
    assert prepare(*trio, zoo.data, samples=12).setup.scale == "safe"
    assert prepare(*trio, zoo.data, samples=12, scale=1).setup.scale == 1.0, "the paper's scale is one number away"


@pytest.mark.parametrize("method", ["bico", "bico+", "theseus", "naive"])
def test_every_method_has_it_also_those_that_need_no_labels(zoo: Zoo, method: str) -> None:
    result = transfer(*zoo.trio("clip_vision"), zoo.data, method=method, samples=12)
    assert result.record["scale_choice"]["rule"] == "safe"
    assert result.scale == result.record["scale"] <= 1.0


def test_texts_of_a_language_model_are_scored_by_auto(tmp_path: Path) -> None:
    words = gpt_tokenizer()
    module = make("llama", vocab_size=len(words))
    modules = {"base": module, "tuned": moved(module), "target": module}
    models = [write(tmp_path / name, each, words) for name, each in modules.items()]
    data = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in SENTENCES])
    assert prepare(*models, data, samples=8).setup.scale == "auto"


def unlabelled(folder: Path) -> Path:
    np.savez(folder / "x.npz", x_train=images(12, 1, 3)[0])
    return folder / "x.npz"


@pytest.mark.parametrize(("method", "data"), [("theseus", unlabelled), ("naive", lambda _: None)])
def test_samples_that_cannot_be_scored_leave_it_at_one(zoo: Zoo, tmp_path: Path, method: str, data: Any) -> None:
    job = prepare(*zoo.trio("clip_vision"), data(tmp_path), method=method, samples=12)
    assert job.setup.scale == 1.0


def test_own_batches_leave_it_at_one() -> None:
    source, target = ToyViT(seed=0), ToyViT(seed=1)
    job = prepare(source, finetuned(source), target, batches(count=16, batch=8), loss=loss)
    assert job.setup.scale == 1.0


def test_wrong_scales_are_refused() -> None:
    for wrong in ("much", "nan", float("inf")):
        with pytest.raises(TuneportError, match="`scale` must be"):
            parse_scale(wrong)
