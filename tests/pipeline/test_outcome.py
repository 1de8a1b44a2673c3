"""The first sentence about a transfer, and what it recommends, for every way that one can end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from builders.chats import MARKS, chat_tokenizer
from builders.texts import make, write
from tuneport.data.dataset import Dataset
from tuneport.measure.accuracy import BySample, Evaluation, perplexity
from tuneport.measure.unseen import Unseen
from tuneport.models.open import open_model
from tuneport.pipeline.comparison import Comparison, ModelScore, Role, summarize
from tuneport.report.summary import score_rows

COUNT = 100
LABELS = np.zeros(COUNT, dtype=np.int64)


def scored(role: Role, right: int) -> ModelScore:
    """A model that is right on the first samples."""
    predicted = (np.arange(COUNT) >= right).astype(np.int64)
    found = Evaluation(float(right), COUNT, "zero-shot", by_sample=BySample(predicted, LABELS, ("a", "b")))
    return ModelScore(role, role, found.accuracy, found)


def evaluated(**right: int) -> Comparison:
    test = Dataset(["text"] * COUNT, LABELS, ("a", "b"), name="mnist")
    models = {role: scored(role, count) for role, count in right.items()}  # type: ignore[arg-type]
    return Comparison(Unseen(test, np.arange(COUNT)), "zero-shot", "accuracy", models)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "port", "word", "sentence"),
    [
        (30, 45, "no clear change", "30.0 -> 45.0 %: no better than a guess among 2 classes"),
        (50, 70, "gain", "50.0 -> 70.0 %: the transfer helped"),
        (72, 60, "harm", "72.0 -> 60.0 %: the transfer did harm; try --scale safe, more samples, or --distill 300"),
        (50, 53, "no clear change", "50.0 -> 53.0 %: no clear change on 100 test samples"),
        (50, 45, "no clear change", "50.0 -> 45.0 %: no clear change on 100 test samples"),  # 5 of 5: p = 0.06
        (50, 44, "harm", "50.0 -> 44.0 %: the transfer did harm; try --scale safe, more samples, or --distill 300"),
    ],
)
def test_a_change_is_named_where_chance_cannot_make_it(target: int, port: int, word: str, sentence: str) -> None:
    found = summarize(evaluated(target=target, port=port), scale=1.0)
    assert (found.outcome, found.headline) == (word, f"accuracy on mnist: {sentence}")


def test_advice_does_not_repeat_what_was_done() -> None:
    found = summarize(evaluated(target=72, port=60), scale=0.25, rule="safe")
    assert "did harm; try more samples, or --distill 300" in found.headline


def test_a_scale_of_zero_is_no_port() -> None:
    for given in (None, evaluated(target=72, port=72)):
        found = summarize(given, scale=0.0, rule="auto")
        assert found.outcome == "nothing moved"
        assert "nothing moved" in found.headline
        assert "the chosen scale is 0, and the output is the target as it was" in found.headline
        assert found.recommendation.startswith("Keep the old model: no strength of this change helps")
        asked = summarize(given, scale=0.0)
        assert "; the scale is 0, and the output" in asked.headline.replace(": the", "; the")
        assert asked.recommendation.startswith("Leave the scale to the samples"), "no other strength was tried"
    alone = summarize(None, scale=0.0, head=True)
    assert (alone.outcome, alone.headline) == (
        "not measured",
        "the gain was not measured; only the head changed: the scale is 0",
    )
    gained = summarize(evaluated(target=50, port=80), scale=0.0, head=True)
    assert gained.headline.endswith("80.0 %: the transfer helped; only the head changed: the scale is 0")
    harmed = summarize(evaluated(target=50, port=40), scale=0.0, head=True)
    assert "try more samples, or --distill 300; only" in harmed.headline, "no scale is safer than 0"
    assert summarize(evaluated(target=50, port=50, distilled=80), scale=1.0, distilled=True).outcome == "gain"


def test_nothing_is_claimed_without_a_test_split() -> None:
    found = summarize(None, scale=1.0, reason="the data have no test split")
    assert (found.outcome, found.headline) == ("not measured", "the gain was not measured: the data have no test split")


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ({"finetuned": 95, "target": 50, "port": 60}, "Keep the old model while you can (95.0 % against 60.0 %)"),
        ({"finetuned": 62, "target": 50, "port": 60}, "Use the port: the old model has 62.0 %."),
        ({"target": 50, "port": 60}, "Use the port."),
        ({"finetuned": 95, "target": 60, "port": 50}, "Keep the old model (95.0 %), or add --distill 300"),
        ({"target": 60, "port": 50}, "Keep the target as it was, or add --distill 300"),
        ({"finetuned": 52, "target": 50, "port": 51}, "The test split shows no gain"),
    ],
)
def test_one_recommendation(right: dict[str, int], words: str) -> None:
    assert summarize(evaluated(**right), scale=1.0).recommendation.startswith(words)


def test_rows_have_intervals_and_samples_that_turned() -> None:
    record = evaluated(finetuned=95, target=70, port=60).record()
    assert [row["role"] for row in record["accuracies"]] == ["finetuned", "target", "port"]
    assert all(row["low"] < row["value"] < row["high"] for row in record["accuracies"])
    assert record["by_class"] == [{"class": "a", "samples": COUNT, "before": 70.0, "after": 60.0}]
    turned = record["turned"]
    assert (turned["right_count"], turned["wrong_count"], len(turned["right"])) == (0, 10, 0)
    assert turned["wrong"][0] == {"index": 60, "label": "a", "before": "a", "after": "b", "text": "text"}


def test_headline_and_table_show_the_same_digits() -> None:
    test = Dataset(["text"] * COUNT, None, (), name="poems", kind="text")
    models = {role: ModelScore(role, role, value) for role, value in (("target", 1.23456), ("port", 1.04321))}
    found = Comparison(Unseen(test, np.arange(COUNT)), "perplexity", "bits per character", models)  # type: ignore[arg-type]
    headline = summarize(found, scale=1.0).headline
    assert [text for _, text in score_rows(found.record())] == ["1.235", "1.043"]
    assert "1.235 -> 1.043" in headline


def spoken(folder: Path, template: str | None, word: float, mark: float) -> Evaluation:
    """A model that gives each token of an answer so many bits, and so many to each token that ends the turn."""
    tokenizer = chat_tokenizer(template)
    module = make("gpt2", vocab_size=len(tokenizer), max_position_embeddings=512, n_positions=512)
    ends = [tokenizer.convert_tokens_to_ids(each) for each in MARKS] + tokenizer("\n")["input_ids"]
    words = sorted({number for _, answer in ANSWERS for number in tokenizer(answer)["input_ids"]})
    shares = torch.full((len(tokenizer),), 2.0**-40)
    shares[ends], shares[words] = 2.0**-mark, 2.0**-word
    shares[0] = 1 - shares[1:].sum()  # no token of a chat
    with torch.no_grad():  # hidden states are the first unit vector, so that scores are the first column
        module.transformer.ln_f.weight.zero_()
        module.transformer.ln_f.bias.copy_(torch.eye(len(module.transformer.ln_f.bias))[0])
        module.transformer.wte.weight[:, 0] = shares.log()
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ANSWERS]
    return perplexity(open_model(write(folder, module, tokenizer)), Dataset(chats, None, ()))


ANSWERS = [("which animal?", "cat"), ("which colour?", "blue"), ("which season?", "winter"), ("what falls?", "rain")]


def test_a_model_is_not_kept_or_dropped_for_how_its_turns_end(tmp_path: Path) -> None:
    """The old model knows the words best, and has a template whose marks it does not expect."""
    models = {
        "finetuned": spoken(tmp_path / "old", "chatml", word=5, mark=30),
        "target": spoken(tmp_path / "target", None, word=9, mark=9),
        "port": spoken(tmp_path / "port", None, word=7, mark=7),
    }
    rows = {role: ModelScore(role, role, each.bits_per_character, each) for role, each in models.items()}  # type: ignore
    test = Dataset([answer for _, answer in ANSWERS], None, (), name="words")
    found = Comparison(Unseen(test, np.arange(4)), "perplexity", "bits per character", rows)  # type: ignore[arg-type]
    assert summarize(found, scale=1.0).recommendation.startswith("Keep the old model while you can")
    assert [rows[role].value / rows["port"].value for role in ("finetuned", "target")] == pytest.approx([5 / 7, 9 / 7])
