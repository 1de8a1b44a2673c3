"""Perplexity, bits per character and likelihoods of answers, against loops in plain transformers."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builders.chats import CHATS, chat_tokenizer
from builders.samples import jsonl, raises
from builders.templates import FAMILIES, family_tokenizer
from builders.texts import SENTENCES, gpt_tokenizer, make, roberta_tokenizer, t5_tokenizer, write
from tuneport.data.dataset import Dataset, Origin
from tuneport.data.formats import read_plain
from tuneport.measure.accuracy import likelihood, perplexity
from tuneport.models.base import Model
from tuneport.models.open import open_model

TEXTS = [*SENTENCES, "  two blanks around  ", "brève, naïve … 🙂 and done"]


def texts(inputs: list[Any], **more: Any) -> Dataset:
    return Dataset(inputs, more.pop("labels", None), more.pop("classes", ()), **more)


@pytest.fixture(scope="module", params=["gpt", "framed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model without any token before the text, and one with tokens before and after it."""
    tokenizer = gpt_tokenizer() if request.param == "gpt" else roberta_tokenizer()
    tokenizer.model_max_length = 200
    module = make("llama", vocab_size=len(tokenizer), max_position_embeddings=200)
    return open_model(write(tmp_path_factory.mktemp(request.param), module, tokenizer))


@functools.cache
def plain(folder: Path) -> tuple[Any, Any]:
    """The tokenizer and the model of a folder, as transformers reads them."""
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()


def nats(model: Model, text: str, start: str = "") -> tuple[float, float, int, int]:
    """The loss of a text after `start`, also without special tokens, its tokens and characters, by transformers."""
    assert model.weights.folder is not None
    tokenizer, module = plain(model.weights.folder)
    found = tokenizer(start + text, return_tensors="pt", return_offsets_mapping=True)
    with torch.no_grad():
        shares = module(input_ids=found["input_ids"]).logits.double().log_softmax(-1)[0]
    loss, own, tokens, first = 0.0, 0.0, 0, None
    for place in range(1, found["input_ids"].shape[1]):
        begin, end = found["offset_mapping"][0, place].tolist()
        if start and end <= len(start):
            continue
        share = float(shares[place - 1, found["input_ids"][0, place]])
        loss -= share
        own -= share if end > begin else 0.0
        tokens += 1
        first = begin if first is None and end > begin else first
    return loss, own, tokens, len((start + text)[max(first or 0, len(start)) :].strip())


def test_bits_per_character_are_those_of_a_loop_in_transformers(model: Model) -> None:
    """With their standard error, that of a ratio of two sums over texts of different lengths."""
    found = perplexity(model, texts(TEXTS), batch_size=5)
    losses, own, tokens, characters = map(np.array, zip(*(nats(model, text) for text in TEXTS), strict=True))
    bits = own / math.log(2)
    each = bits.sum() / characters.sum()
    assert found.bits_per_character == pytest.approx(each, abs=1e-6)
    assert (found.tokens, found.cut) == (tokens.sum(), 0)
    assert found.perplexity == pytest.approx(math.exp(losses.sum() / tokens.sum()), rel=1e-6)
    spread = np.std(bits - each * characters, ddof=1)  # the mean is zero
    assert found.error == pytest.approx(spread * math.sqrt(len(TEXTS)) / characters.sum(), rel=1e-4)
    assert perplexity(model, texts(TEXTS[:1])).error is None


def test_bits_of_a_model_that_knows_nothing(model: Model) -> None:
    """Without an opinion each token costs the logarithm of the vocabulary, whatever the characters."""
    assert model.inputs.reader is not None
    head = model.module.get_output_embeddings().weight
    before = head.detach().clone()
    with torch.no_grad():
        head.zero_()
    try:
        found = perplexity(model, texts(["the cat sat"]))
    finally:
        with torch.no_grad():
            head.copy_(before)
    read = model.inputs.reader.tokenizer
    ids = read("the cat sat")["input_ids"]
    first = read.decode(ids[:1], skip_special_tokens=True)  # is never predicted
    spelled, marks = "the cat sat".removeprefix(first).strip(), set(read.all_special_ids)
    own = sum(number not in marks for number in ids[1:])
    assert found.bits_per_character == pytest.approx(own * math.log2(len(head)) / len(spelled))


def test_a_target_alone_is_counted(model: Model) -> None:
    found = perplexity(model, texts(["the cat sat on the"], targets=["mat"]))
    _, own, tokens, characters = nats(model, " mat", start="the cat sat on the")
    assert characters == 3
    assert found.tokens == tokens
    assert found.bits_per_character == pytest.approx(own / math.log(2) / 3, abs=1e-6)


@pytest.mark.parametrize(("text", "target"), [("two and two:", " 4"), ("two and two: ", "4"), ("two and two:", "4")])
def test_one_blank_stands_between_a_text_and_its_target(model: Model, text: str, target: str) -> None:
    found = perplexity(model, texts([text], targets=[target]))
    start = text if text.endswith(" ") else "two and two:"  # a blank of the text carries no loss of its own
    loss, _, tokens, _ = nats(model, "two and two: 4".removeprefix(start), start=start)
    assert found.tokens == tokens
    assert found.perplexity == pytest.approx(math.exp(loss / tokens), rel=1e-6)


def test_texts_that_are_cut_are_counted(model: Model) -> None:
    found = perplexity(model.cut_at(10), texts(TEXTS[:4]))
    assert (found.cut, found.tokens) == (4, 4 * 9)


@pytest.mark.parametrize("template", ["chatml", "gemma", None])
def test_bits_of_an_answer_do_not_depend_on_how_its_turn_ends(template: str | None, tmp_path: Path) -> None:
    """The end of a turn is a token to predict, and no character of the answer."""
    tokenizer = chat_tokenizer(template)
    module = make("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    opened = open_model(write(tmp_path, module, tokenizer))
    with torch.no_grad():
        opened.module.get_output_embeddings().weight.zero_()
    found = perplexity(opened, texts(list(CHATS)))
    answers = [m["content"] for chat in CHATS for m in chat if m["role"] == "assistant"]
    own = [len(tokenizer(answer)["input_ids"]) for answer in answers]
    assert found.bits_per_character == pytest.approx(sum(own) * math.log2(len(tokenizer)) / sum(map(len, answers)))
    if template is None:
        assert found.tokens == sum(own)
        return
    marked = chat_tokenizer(template, marked=True)
    masks = marked.apply_chat_template(CHATS, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
    assert found.tokens == sum(map(sum, masks)) > sum(own)


def test_the_end_of_what_a_decoder_writes_is_no_character(tmp_path: Path) -> None:
    tokenizer = t5_tokenizer()
    opened = open_model(write(tmp_path, make("t5", vocab_size=len(tokenizer)), tokenizer))
    with torch.no_grad():
        opened.module.get_output_embeddings().weight.zero_()
    found = perplexity(opened, texts(["the cat sat"], targets=["on the mat"]))
    tokens = tokenizer("on the mat")["input_ids"]
    assert (tokens[-1], found.tokens) == (tokenizer.eos_token_id, len(tokens))
    assert found.bits_per_character == pytest.approx((len(tokens) - 1) * math.log2(len(tokenizer)) / len("on the mat"))


WORDS = ("cat", "small dog", "river")


def best(model: Model, text: str, words: tuple[str, ...]) -> int:
    return int(np.argmin([nats(model, f" {word}", start=text)[0] for word in words]))


def test_the_likeliest_word_of_a_class_is_the_answer(model: Model) -> None:
    chosen = [best(model, text, WORDS) for text in SENTENCES]
    for shift in (0, 1):
        labels = (np.array(chosen) + shift * (np.arange(len(chosen)) % 2)) % 3
        found = likelihood(model, texts(list(SENTENCES), labels=labels, classes=WORDS), batch_size=3)
        assert found.accuracy == pytest.approx(100 * np.mean(labels == chosen))
        assert (found.samples, found.protocol) == (len(SENTENCES), "likelihood")
    described = texts(
        list(SENTENCES), labels=np.array(chosen), classes=("a", "b", "c"), origin=Origin(label_texts=WORDS)
    )
    assert likelihood(model, described).accuracy == 100.0


def test_multiple_choices_of_a_table(model: Model, tmp_path: Path) -> None:
    """Three ways to write the right choice; each row has choices of its own."""
    choices = [list(WORDS), list(WORDS[::-1]), list(WORDS[1:])]
    right = [best(model, text, tuple(words)) for text, words in zip(SENTENCES, choices, strict=False)]
    texts_of_right = [words[place] for words, place in zip(choices, right, strict=True)]
    for ways in (right, list(map(str, right)), ["ABC"[place] for place in right], texts_of_right):
        rows = [
            {"question": text, "choices": words, "answer": way}
            for text, words, way in zip(SENTENCES, choices, ways, strict=False)
        ]
        path = jsonl(tmp_path / "t.jsonl", rows)
        data = read_plain(path, "test", columns={"text": "question", "label": "answer"})
        assert data.labels is not None
        assert data.labels.tolist() == right
    assert likelihood(model, data).accuracy == 100.0
    found = likelihood(model, data.subset([0, 1]))
    loss, _, tokens, _ = np.sum([nats(model, f" {choices[i][right[i]]}", start=SENTENCES[i]) for i in (0, 1)], axis=0)
    assert found.perplexity == pytest.approx(math.exp(loss / tokens), rel=1e-6)
    named = {"text": list(WORDS), "label": ["1", "2", "3"]}
    arc = jsonl(tmp_path / "arc.jsonl", [{"text": SENTENCES[0], "choices": named, "label": str(right[0] + 1)}])
    assert likelihood(model, read_plain(arc, "test")).accuracy == 100.0


NUMBERS = ["0", "3", "1", "2"]


@pytest.mark.parametrize(
    ("labels", "right"),
    [
        (["1", "2", "3"], [1, 2, 3]),  # each is a place, so all are
        (["1", "2", "7"], [2, 3, 1]),  # one can only be a text, so all are
        ([1, 2, 3], [1, 2, 3]),
    ],
)
def test_labels_of_a_file_are_all_places_or_all_texts(labels: list[Any], right: list[int], tmp_path: Path) -> None:
    """The first rows read the same in both files; what they mean depends on the whole column, in every split."""
    choices = [NUMBERS, NUMBERS, ["5", "7", "8", "9"] if labels[-1] == "7" else NUMBERS]
    rows = [
        {"text": "how many?", "choices": words, "label": label, "split": split}
        for words, label, split in zip(choices, labels, ("train", "train", "test"), strict=True)
    ]
    path = jsonl(tmp_path / "t.jsonl", rows)
    found = [read_plain(path, split).labels for split in ("train", "test")]
    assert np.concatenate([each for each in found if each is not None]).tolist() == right


def test_labels_of_a_file_in_two_ways_are_refused(tmp_path: Path) -> None:
    rows = [{"text": "why?", "choices": ["cat", "dog"], "label": label} for label in (0, "dog", 1)]
    with raises(
        "label of", "t.jsonl", "is 0 in row 1 and 'dog' in row 2", "all places from 0, all letters or all texts"
    ):
        read_plain(jsonl(tmp_path / "t.jsonl", rows), "train")


@pytest.mark.parametrize("family", FAMILIES)
def test_letters_in_chats_are_those_that_transformers_choose(family: str, tmp_path: Path) -> None:
    """Each letter is scored with the end of its turn, by the mask that transformers makes of the marked template."""
    marked = family_tokenizer(family, marked=True)
    module = make("llama", vocab_size=len(marked), max_position_embeddings=512).eval()
    opened = open_model(write(tmp_path, module, family_tokenizer(family)))
    letters, losses = tuple("abcd"), np.empty((6, 4))
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "a"}] for text in SENTENCES[:6]]
    for row, chat in enumerate(chats):
        for column, letter in enumerate(letters):
            said = [chat[0], {**chat[1], "content": letter}]
            tokens = marked.apply_chat_template(said, return_dict=True, return_assistant_tokens_mask=True)
            ids, mask = (torch.tensor(tokens[name]) for name in ("input_ids", "assistant_masks"))
            with torch.no_grad():
                shares = module(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
            losses[row, column] = -float((shares.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum())
    found = likelihood(opened, texts(chats, labels=np.arange(len(chats)) % 4, classes=letters))
    assert found.by_sample.predicted is not None
    chosen = np.take_along_axis(losses, found.by_sample.predicted[:, None], 1)[:, 0]
    np.testing.assert_allclose(chosen, losses.min(1), atol=1e-4)  # rounding in float32 may decide a tie


def test_answers_in_chats(tmp_path: Path) -> None:
    """The last answer is replaced by each word; everything before it stays."""
    tokenizer = chat_tokenizer("gemma")
    module = make("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    opened = open_model(write(tmp_path, module, tokenizer))
    asked = [{"role": "user", "content": SENTENCES[0]}, {"role": "assistant", "content": "cat"}]
    losses = []
    for word in WORDS:
        said = [asked[0], {"role": "assistant", "content": word}]
        alone = perplexity(opened, texts([said]))
        assert alone.perplexity is not None
        assert alone.tokens is not None
        losses.append(math.log(alone.perplexity) * alone.tokens)
    for label in range(3):
        data = texts([asked], labels=np.array([label]), classes=WORDS)
        assert likelihood(opened, data).accuracy == 100.0 * (label == np.argmin(losses))


def test_earlier_answers_of_a_chat_are_not_scored(tmp_path: Path) -> None:
    """They are the same for every word, and hide that the last answer is cut: then nothing tells the words apart."""
    tokenizer = chat_tokenizer("chatml")
    module = make("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    opened = open_model(write(tmp_path, module, tokenizer))
    chat, data = CHATS[0], texts([CHATS[0]], labels=np.array([1]), classes=WORDS)
    assert [message["role"] for message in chat].count("assistant") == 2
    said = [*chat[:-1], {"role": "assistant", "content": WORDS[1]}]
    start = len(tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True)["input_ids"])
    ids = torch.tensor(tokenizer.apply_chat_template(said)["input_ids"])
    with torch.no_grad():
        shares = opened.module(input_ids=ids[None]).logits[0, start - 1 : -1].double().log_softmax(-1)
    found = likelihood(opened, data)
    assert found.tokens == len(ids) - start
    assert found.perplexity == pytest.approx(math.exp(-float(shares.gather(1, ids[start:, None]).mean())), rel=1e-5)
    with raises("no token of the target of a sample is left to predict", f"is longer than {start} tokens"):
        likelihood(opened.cut_at(start), data)


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"choices": ["a"], "label": 0}, ["choices of row 1 of", "expected a list of two texts or more."]),
        ({"choices": ["a", "b"], "label": 2}, ["label of row 1 of", "is 2; expected 0, 1 or A, B or a, b."]),
        ({"choices": ["a", "b"]}, ["is None; expected 0, 1 or A, B"]),
    ],
)
def test_wrong_choices(row: dict[str, Any], parts: list[str], tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "why?", **row}])
    with raises(*parts):
        read_plain(path, "train")


def test_data_without_answers_have_no_likelihood(model: Model) -> None:
    with raises("has no answers to choose from; expected a column label, or choices and label."):
        likelihood(model, texts(TEXTS))
