"""Encoder-decoder models: bits per character and the likeliest answers, against plain transformers and peft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from builders import plain
from builders.loras import adapted, written
from builders.samples import halves
from builders.texts import LARGE, SENTENCES, SMALL, make, t5_tokenizer, write

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft
BOUND = 1e-5  # a loss is a mean of some hundred float32 numbers, each with at most a hundred roundings of 6e-8


def translations() -> list[dict[str, Any]]:
    rows = [*SENTENCES[:8], *(f"{text} and so on" for text in SENTENCES[:8])]
    return [{"text": text, "target": " ".join(reversed(text.split()[:5]))} for text in rows]


def questions() -> list[dict[str, Any]]:
    """Two or three answers; each label is the text of the right one."""
    rows = []
    for number, row in enumerate(translations()):
        answers = sorted({*row["text"].split()})[: 2 + number % 2]
        rows.append({"text": row["text"], "choices": answers, "label": answers[number % 2]})
    return rows


def score(rows: Sequence[dict[str, Any]], folder: Path, base: Path | None) -> dict[str, float]:
    model = plain.load("AutoModelForSeq2SeqLM", folder, base)
    if "choices" not in rows[0]:
        return plain.rates([plain.answered(model, row["target"], row["text"]) for row in rows])
    losses = [[plain.answered(model, answer, row["text"]) for answer in row["choices"]] for row in rows]
    return plain.chosen(losses, [row["choices"].index(row["label"]) for row in rows])


# What is asked and what is written do not meet in the code: each of both once.
@pytest.mark.parametrize(("kind", "as_"), [(translations, "adapter"), (questions, "model")])
def test_scores(agree: Callable[..., Any], tmp_path: Path, kind: Callable[[], list[dict[str, Any]]], as_: str) -> None:
    base, tokenizer, rows = make("t5", SMALL), t5_tokenizer(), kind()
    tokenizer.model_max_length = 100
    lora = adapted(base, target_modules=["q", "v", "wo"], task_type="SEQ_2_SEQ_LM")
    models = {
        "source": write(tmp_path / "source", base, tokenizer),
        "finetuned": written(lora, tmp_path / "finetuned", as_, tokenizer),
        "target": write(tmp_path / "target", make("t5-gated" if as_ == "adapter" else "t5", LARGE), tokenizer),
        "data": halves(tmp_path / "rows.jsonl", rows),
    }
    said = "accuracy" if "label" in rows[0] else "bits_per_character"
    test = rows[len(rows) // 2 :]
    found = agree(models, tmp_path / "out", as_, lambda *folders: score(test, *folders), said=said, bound=BOUND)
    assert len({each["bits_per_character"] for each in found.values()}) == 3
