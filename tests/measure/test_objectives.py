"""Losses on texts against direct computations, their choice, and their use on the command line."""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from builders.folders import Zoo
from builders.samples import empty_dataset
from builders.texts import (
    LABELS,
    LARGE,
    SENTENCES,
    SMALL,
    Size,
    bert_tokenizer,
    gpt_tokenizer,
    make,
    roberta_tokenizer,
    t5_tokenizer,
    write,
    write_rows,
)
from builders.twins import finetuned
from tuneport import transfer
from tuneport.cli import app
from tuneport.data.dataset import UNLABELLED, Dataset, Origin
from tuneport.data.formats import read_plain
from tuneport.errors import DataError, TuneportError
from tuneport.measure import accuracy
from tuneport.measure.objectives import (
    OBJECTIVES,
    TokenLoss,
    batch_for,
    choose_objective,
    labelled_tokens,
    load_loss,
    next_tokens,
    questions_at_once,
)
from tuneport.models.base import Model
from tuneport.models.families.huggingface_text import SENTENCE_SCALE
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import describe_module, open_model

TOKENIZERS = {"llama": gpt_tokenizer, "gpt2": gpt_tokenizer, "t5": t5_tokenizer, "bert": bert_tokenizer}


def folder(place: Path, family: str, size: Size = SMALL, tokenizer: Any = None, tuned: bool = False) -> Path:
    words = (tokenizer or TOKENIZERS[family.partition("-")[0]])()
    module = make(family, size, vocab_size=len(words))
    return write(place, finetuned(describe_module(module)) if tuned else module, words)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    root = tmp_path_factory.mktemp("models")
    return {family: open_model(folder(root / family, family)) for family in ("llama", "gpt2", "t5", "bert")}


def data(inputs: Sequence[Any], **more: Any) -> Dataset:
    return Dataset(inputs=inputs, labels=None, classes=(), **{"name": "texts", **more})


def value(name: str, model: Model, samples: Dataset, head: Any = None) -> float:
    objective = OBJECTIVES[name]
    batch = batch_for(model, objective.encode(model, samples))
    with torch.no_grad():
        return float(objective.loss(model, head)(model.module, batch))


# --- losses against those of transformers


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_causal_loss_is_that_of_transformers_times_the_tokens(models: dict[str, Model], family: str) -> None:
    model, total = models[family], 0.0
    for text in SENTENCES[:4]:
        ids = torch.tensor([model.inputs.reader.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            total += float(model.module(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
    assert value("causal", model, data(SENTENCES[:4])) == pytest.approx(total, rel=1e-5)


def test_causal_loss_with_a_target_leaves_out_the_prompt(models: dict[str, Model]) -> None:
    """Only tokens beyond the prompt are predicted; one blank joins prompt and target."""
    model = models["llama"]
    prompts, targets = ["the cat sat", "a small dog barked at "], ["on the mat", "the tall man in the garden"]
    total = 0.0
    for prompt, target in zip(prompts, targets, strict=True):
        start = model.inputs.reader.tokenizer(prompt.rstrip())["input_ids"]
        whole = torch.tensor([model.inputs.reader.tokenizer(f"{prompt.rstrip()} {target}")["input_ids"]])
        assert whole[0, : len(start)].tolist() == start
        labels = whole.clone()
        labels[0, : len(start)] = -100
        with torch.no_grad():
            total += float(model.module(input_ids=whole, labels=labels).loss) * (whole.shape[1] - len(start))
    assert value("causal", model, data(prompts, targets=targets)) == pytest.approx(total, rel=1e-5)
    found = model.inputs.reader.continuations(prompts, targets)
    kept = [model.inputs.reader.tokenizer.decode(row[row != -100]).strip() for row in found.labels]
    assert kept == targets


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_before_the_first_answer_are_not_scored(models: dict[str, Model], family: str) -> None:
    """The scores that are left are those of transformers at the same places."""
    model = models[family]
    prompts, targets = ["the cat sat", "a small dog barked at "], ["on the mat", "the tall man in the garden"]
    batch = batch_for(model, OBJECTIVES["causal"].encode(model, data(prompts, targets=targets)))
    inputs, labels = batch
    seen = []
    handle = model.module.get_output_embeddings().register_forward_hook(lambda _m, given, _o: seen.append(given[0]))
    try:
        with torch.no_grad():
            scores, kept = next_tokens(model, model.module, batch)
            whole = model.module(**inputs).logits
    finally:
        handle.remove()
    first = int((labels != UNLABELLED).any(0).nonzero()[0])
    assert first > 1
    assert [part.shape[:2].numel() for part in seen] == [2 * (labels.shape[1] - first), labels.numel()]
    assert torch.equal(kept, labels[:, first:])
    torch.testing.assert_close(scores, whole[:, first - 1 : -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_only_tokens_with_a_label_are_scored(models: dict[str, Model], family: str) -> None:
    """The head over the vocabulary sees them alone; their scores are those of transformers at the same places."""
    model = models[family]
    prompts, targets = ["the cat sat", "a small dog barked at "], ["on the mat", "the tall man in the garden"]
    name = str(model.generates)
    inputs, labels = batch_for(model, OBJECTIVES[name].encode(model, data(prompts, targets=targets)))
    seen = []
    handle = model.module.get_output_embeddings().register_forward_hook(lambda _m, given, _o: seen.append(given[0]))
    try:
        with torch.no_grad():
            scores, kept, rows = labelled_tokens(model, model.module, (inputs, labels))
    finally:
        handle.remove()
    with torch.no_grad():
        whole = model.module(**inputs, **({"labels": labels} if name == "seq2seq" else {})).logits
    whole = whole[:, :-1] if name == "causal" else whole
    wanted = labels[:, 1:] if name == "causal" else labels
    named = wanted != UNLABELLED
    assert name == "seq2seq" or seen[0].shape[:2].numel() == int(named.sum()) < named.numel()
    assert torch.equal(kept, wanted[named])
    assert torch.equal(rows, named.nonzero()[:, 0])
    torch.testing.assert_close(scores, whole[named], rtol=1e-5, atol=1e-5)


def test_a_model_that_cannot_leave_scores_out_has_the_same_loss(models: dict[str, Model]) -> None:
    model = models["llama"]
    samples = data(["the cat sat", "a small dog barked at "], targets=["on the mat", "the tall man in the garden"])

    class Plain(type(model.module)):  # type: ignore[misc]
        """Its forward pass has no option for the places of the scores."""

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return super().forward(input_ids=input_ids, attention_mask=attention_mask)

    module = copy.copy(model.module)
    module.__class__ = Plain
    plain = value("causal", model.with_module(module), samples)
    assert plain == pytest.approx(value("causal", model, samples), rel=1e-5)


def test_answers_that_are_not_read_at_once_take_whole_passes_of_the_batch_size(models: dict[str, Model]) -> None:
    generation = models["llama"].generation
    assert generation is not None
    assert questions_at_once(models["llama"], 8, 4) == 8, "32 rows, a quarter of them in a whole pass"
    assert questions_at_once(replace(models["llama"], generation=replace(generation, answer_logits=None)), 8, 4) == 2
    assert questions_at_once(models["llama"], 2, 100) == 1
    model = replace(models["llama"], generation=replace(generation, answer_logits=lambda *_: None))
    batch = batch_for(model, OBJECTIVES["causal"].encode(model, data(SENTENCES[:8])))
    rows: list[int] = []
    handle = model.module.get_input_embeddings().register_forward_hook(lambda _m, _a, out: rows.append(len(out)))
    try:
        with torch.no_grad():
            parted, whole = (next_tokens(model, model.module, batch, counts) for counts in ((4, 4), ()))
    finally:
        handle.remove()
    assert rows == [2, 2, 2, 2, 8]
    assert torch.equal(parted[1], whole[1])
    torch.testing.assert_close(parted[0], whole[0], rtol=1e-5, atol=1e-5)


def test_labels_that_are_all_left_out_have_no_loss(models: dict[str, Model]) -> None:
    model = models["llama"]
    inputs, labels = batch_for(model, OBJECTIVES["causal"].encode(model, data(SENTENCES[:2])))
    with torch.no_grad():
        scores, kept = next_tokens(model, model.module, (inputs, torch.full_like(labels, UNLABELLED)))
    assert scores.shape[:2] == kept.shape
    assert float(TokenLoss(model)(model.module, (inputs, torch.full_like(labels, UNLABELLED)))) == 0.0


def test_seq2seq_loss_is_that_of_transformers_times_the_tokens(models: dict[str, Model]) -> None:
    model, total = models["t5"], 0.0
    texts, targets = list(SENTENCES[:3]), ["yes", "the garden", "no one"]
    for text, target in zip(texts, targets, strict=True):
        ids, labels = (torch.tensor([model.inputs.reader.tokenizer(part)["input_ids"]]) for part in (text, target))
        with torch.no_grad():
            total += float(model.module(input_ids=ids, labels=labels).loss) * labels.shape[1]
    assert value("seq2seq", model, data(texts, targets=targets)) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize(("name", "family"), [("causal", "llama"), ("seq2seq", "t5")])
def test_label_texts_are_targets(models: dict[str, Model], name: str, family: str) -> None:
    texts, labels = list(SENTENCES[:3]), np.array([1, 0, 1])
    labelled = Dataset(inputs=texts, labels=labels, classes=("no", "yes"))
    described = Dataset(inputs=texts, labels=labels, classes=("0", "1"), origin=Origin(label_texts=("no", "yes")))
    wanted = value(name, models[family], data(texts, targets=["yes", "no", "yes"]))
    assert value(name, models[family], labelled) == wanted
    assert value(name, models[family], described) == wanted


def test_contrastive_loss_against_a_direct_computation(models: dict[str, Model]) -> None:
    model = models["bert"]
    pairs = [(SENTENCES[2 * i], SENTENCES[2 * i + 1]) for i in range(4)]

    def embedded(text: str) -> Tensor:
        ids = torch.tensor([model.inputs.reader.tokenizer(text)["input_ids"]])
        return F.normalize(model.module.bert(input_ids=ids).last_hidden_state[0].mean(0), dim=0)

    with torch.no_grad():
        firsts, seconds = (torch.stack([embedded(pair[side]) for pair in pairs]) for side in range(2))
        scores = SENTENCE_SCALE * firsts @ seconds.T
        wanted = -float(sum(scores[i].log_softmax(0)[i] for i in range(4)))
    assert value("contrastive", model, data(pairs)) == pytest.approx(wanted, rel=1e-4)


def test_classification_loss_against_a_direct_computation(models: dict[str, Model]) -> None:
    model = models["bert"]
    labels = np.array([3, 0, 7])
    samples = Dataset(inputs=list(SENTENCES[:3]), labels=labels, classes=tuple(map(str, range(LABELS))))
    total = 0.0
    for text, label in zip(SENTENCES, labels, strict=False):
        ids = torch.tensor([model.inputs.reader.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            total += float(model.module(input_ids=ids, labels=torch.tensor([label])).loss)
    head = choose_head(model, None, empty_dataset("texts", samples.classes))
    assert value("classification", model, samples, head) == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("name", ["causal", "seq2seq", "classification"])
def test_padding_does_not_change_the_loss(models: dict[str, Model], name: str) -> None:
    """A short text is padded in a batch with a long one; its loss stays the same."""
    model = models[{"causal": "gpt2", "seq2seq": "t5", "classification": "bert"}[name]]
    head = Head("classifier", model.outputs.classes) if name == "classification" else None
    samples = Dataset(
        inputs=["the cat", SENTENCES[5], "rain", SENTENCES[9]],
        labels=np.array([1, 0, 1, 0]),
        classes=tuple(map(str, range(LABELS))),
        targets=["on the mat", "in the morning and more", "falls", "herbs"] if name != "classification" else None,
    )
    alone = sum(value(name, model, samples.subset([i]), head) for i in range(4))
    assert value(name, model, samples, head) == pytest.approx(alone, rel=1e-5)


# --- the choice


class TestChoice:
    def test_by_data_and_models(self, models: dict[str, Model], zoo: Zoo) -> None:
        text, pairs = data(["a"]), data([("a", "b")])
        labelled = Dataset(inputs=["a"], labels=np.array([0]), classes=("x",))
        bert = open_model(zoo["vit-base"])  # any model with a classifier
        assert choose_objective(text, [models["llama"]] * 2).name == "causal"
        assert choose_objective(labelled, [models["gpt2"]] * 2).name == "causal"
        assert choose_objective(labelled, [models["t5"]] * 2).name == "seq2seq"
        assert choose_objective(labelled, [models["bert"]] * 2).name == "classification"
        assert choose_objective(pairs, [models["bert"]] * 2).name == "classification"  # both have classifiers
        assert choose_objective(labelled, [bert, models["bert"]]).name == "classification"
        assert choose_objective(pairs, [models["bert"]] * 2, "contrastive").name == "contrastive"

    def test_default_for_pairs_without_labels_and_classifiers_is_contrastive(self, tmp_path: Path) -> None:
        module = make("bert").bert
        sentence = open_model(write(tmp_path / "bare", module, bert_tokenizer()))
        assert choose_objective(data([("a", "b")]), [sentence] * 2).name == "contrastive"
        labelled = Dataset(inputs=[("a", "b")], labels=np.array([0]), classes=("x",))
        assert choose_objective(labelled, [sentence] * 2).name == "classification"

    def test_unsuitable_data_and_models_are_refused(self, models: dict[str, Model]) -> None:
        text, pairs = data(["a"]), data([("a", "b")])
        cases: list[tuple[Dataset, list[Model], str | None, str]] = [
            (text, [models["llama"], models["t5"]], None, "one model is causal and the other an encoder-decoder"),
            (text, [models["bert"]] * 2, "causal", r"the causal loss needs a model .*bert writes no text"),
            (text, [models["t5"]] * 2, "causal", r"the causal loss needs .*t5 generates as seq2seq"),
            (text, [models["bert"]] * 2, "contrastive", r"needs pairs of texts; texts has none: columns text and"),
            (text, [models["t5"]] * 2, None, r"needs what is to be written; texts has no column target or label"),
            (pairs, [models["bert"]] * 2, "contrastiv", r"unknown loss 'contrastiv'. Did you mean 'contrastive'\?"),
        ]
        for samples, pair, name, message in cases:
            with pytest.raises(TuneportError, match=message) as caught:
                choose_objective(samples, pair, name)
            assert "\n" not in str(caught.value)


# --- custom losses


OWN = """
import torch
calls = []
def loss(model, batch):
    inputs, labels = batch
    calls.append(len(labels))
    return model(**inputs).logits.logsumexp(-1).sum()
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_own_losses.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_own_losses", raising=False)
    return "my_own_losses"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_own_losses:absent", "cannot be imported: AttributeError"),
        ("no_such_module:loss", "cannot be imported: ModuleNotFoundError"),
        ("my_own_losses:number", "is not a function"),
        ("my_own_losses:", "cannot be imported: AttributeError"),
        (":loss", "cannot be imported: ValueError"),
        ("my broken/name:loss", "cannot be imported: ModuleNotFoundError"),
    ],
)
@pytest.mark.usefixtures("own")
def test_bad_names_of_losses_are_refused(name: str, message: str) -> None:
    before = list(sys.path)
    with pytest.raises(TuneportError, match=message) as caught:
        load_loss(name)
    assert "\n" not in str(caught.value)
    assert sys.path == before


# --- the command line


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Classifiers, and the same models without heads and with different tokenizers."""
    root = tmp_path_factory.mktemp("encoders")
    source, target = make("bert"), make("bert", LARGE, vocab_size=320)
    moved = finetuned(describe_module(source))
    found = {
        "source": write(root / "source", source, bert_tokenizer()),
        "tuned": write(root / "tuned", moved, bert_tokenizer()),
        "target": write(root / "target", target, roberta_tokenizer()),
    }
    for name, module in (("source", source), ("tuned", moved), ("target", target)):
        words = roberta_tokenizer() if name == "target" else bert_tokenizer()
        found[f"bare-{name}"] = write(root / f"bare-{name}", module.bert, words)
    found["labels"] = write_rows(
        root / "labels.jsonl", [{"text": text, "label": i % 5} for i, text in enumerate(SENTENCES)]
    )
    found["pairs"] = write_rows(
        root / "pairs.jsonl",
        [{"text": SENTENCES[i], "text_pair": SENTENCES[(i + 1) % len(SENTENCES)]} for i in range(len(SENTENCES))],
    )
    return found


def arguments(paths: dict[str, Path], bare: bool, out: Path, *more: str) -> list[str]:
    kind = "bare-" if bare else ""
    parts = {"source": f"{kind}source", "finetuned": f"{kind}tuned", "target": f"{kind}target"}
    given = [word for option, name in parts.items() for word in (f"--{option}", str(paths[name]))]
    return ["transfer", "--scale=1", *given, "--out", str(out), "--samples", "16", "--json", *more]


def test_custom_loss_on_the_command_line(own: str, encoders: dict[str, Path], tmp_path: Path) -> None:
    command = arguments(encoders, False, tmp_path / "out", "--data", str(encoders["labels"]), "--batch-size", "6")
    done = CliRunner().invoke(app, [*command, "--loss", f"{own}:loss"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["resolved"]["loss"] == f"{own}:loss"
    assert sys.modules[own].calls[:6] == [6, 6, 6, 6, 4, 4]  # source and target, batch by batch
    own_way = open_model(tmp_path / "out").weights.tensors
    plain = CliRunner().invoke(app, arguments(encoders, False, tmp_path / "plain", "--data", str(encoders["labels"])))
    assert json.loads(plain.stdout)["resolved"]["loss"] == "classification"
    other = open_model(tmp_path / "plain").weights.tensors
    assert any(not torch.equal(own_way[name], other[name]) for name in own_way)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("my_own_losses:absent", "cannot be imported"),
        ("os:system", "the loss os:system failed: "),
        ("builtins:print", "the loss must return one number (a sum over samples), got NoneType"),
        ("casual", "unknown loss 'casual'. Did you mean 'causal'?"),
        ("seq2seq", "writes no text"),
        ("contrastive", "needs pairs of texts"),
    ],
)
@pytest.mark.usefixtures("own")
def test_bad_losses_are_reported_in_one_line(
    encoders: dict[str, Path], tmp_path: Path, loss: str, message: str
) -> None:
    command = arguments(encoders, False, tmp_path / "out", "--data", str(encoders["labels"]), "--loss", loss)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert isinstance(done.exception, TuneportError)
    assert message in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_bad_loss_is_refused_even_if_the_method_needs_none(encoders: dict[str, Path], tmp_path: Path) -> None:
    command = arguments(encoders, False, tmp_path / "out", "--method", "naive", "--loss", "casual")
    done = CliRunner().invoke(app, command)
    assert "unknown loss 'casual'" in str(done.exception)


def test_transfer_with_contrastive_pairs(encoders: dict[str, Path], tmp_path: Path) -> None:
    """Sentence encoders with different widths, depths and tokenizers; the result loads and encodes texts."""
    done = CliRunner().invoke(app, arguments(encoders, True, tmp_path / "out", "--data", str(encoders["pairs"])))
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["resolved"]["loss"] == "contrastive"
    assert record["samples"] == len(SENTENCES)
    assert record["tokens"]["share"] > 0.8
    roles = {layer["target"] for layer in record["layers"]}
    assert "encoder.layer.2.attention.self.query.weight" in roles
    before, after = (open_model(path) for path in (encoders["bare-target"], tmp_path / "out"))
    vectors = [
        accuracy.compute_features(model, read_plain(encoders["pairs"], "test", labelled=False))
        for model in (before, after)
    ]
    assert torch.isfinite(vectors[1]).all()
    assert not torch.allclose(*vectors)
    # a pair is two sequences: all 32 rows are used
    ranks = [layer["rank_in"] for layer in record["layers"] if layer["target"].endswith("query.weight")]
    assert min(ranks) == SMALL.width


def forty_pairs() -> Dataset:
    words = " ".join(SENTENCES).split()
    return Dataset([(" ".join(words[i : i + 4]), " ".join(words[i + 4 : i + 8])) for i in range(40)], None, ())


def test_the_batch_size_does_not_change_contrastive_pairs(encoders: dict[str, Path]) -> None:
    """The loss of a pair depends on the others of its batch, which are always 32."""
    folders = [encoders[f"bare-{name}"] for name in ("source", "tuned", "target")]
    results = [transfer(*folders, forty_pairs(), samples=40, batch_size=size) for size in (32, 5, 40)]
    assert results[0].record["resolved"]["loss"] == "contrastive"
    assert results[0].scale > 0
    for result in results[1:]:
        assert result.scale == results[0].scale
        for name in results[0].task_vector:
            assert torch.equal(result.task_vector.dense(name), results[0].task_vector.dense(name)), name


# --- perplexity


class TestPerplexity:
    @pytest.mark.parametrize("family", ["llama", "gpt2"])
    def test_perplexity_of_one_sample_is_that_of_transformers(self, models: dict[str, Model], family: str) -> None:
        model = models[family]
        ids = torch.tensor([model.inputs.reader.tokenizer(SENTENCES[0])["input_ids"]])
        with torch.no_grad():
            out = model.module(input_ids=ids, labels=ids)
        found = accuracy.perplexity(model, data([SENTENCES[0]]))
        assert found.perplexity == pytest.approx(math.exp(float(out.loss)), rel=1e-5)
        assert found.tokens == ids.shape[1] - 1
        right = (out.logits[0, :-1].argmax(-1) == ids[0, 1:]).float().mean()
        assert found.accuracy == pytest.approx(100 * float(right))

    def test_perplexity_of_an_encoder_decoder(self, models: dict[str, Model]) -> None:
        model = models["t5"]
        ids, labels = (
            torch.tensor([model.inputs.reader.tokenizer(text)["input_ids"]]) for text in (SENTENCES[0], "yes")
        )
        with torch.no_grad():
            wanted = math.exp(float(model.module(input_ids=ids, labels=labels).loss))
        found = accuracy.perplexity(model, data([SENTENCES[0]], targets=["yes"]))
        assert found.perplexity == pytest.approx(wanted, rel=1e-5)
        assert found.tokens == labels.shape[1]

    def test_batch_size_does_not_matter(self, models: dict[str, Model]) -> None:
        one, many = (accuracy.perplexity(models["gpt2"], data(SENTENCES), batch_size=size) for size in (1, 16))
        assert one.perplexity == pytest.approx(many.perplexity, rel=1e-5)
        assert (one.tokens, one.samples, one.accuracy) == (many.tokens, many.samples, many.accuracy)

    def test_models_and_data_without_perplexity_are_refused(self, models: dict[str, Model], zoo: Zoo) -> None:
        with pytest.raises(TuneportError, match="bert writes no text; perplexity needs a causal"):
            accuracy.perplexity(models["bert"], data(SENTENCES))
        with pytest.raises(DataError, match=r"animals holds images, but .*llama reads texts"):
            accuracy.perplexity(models["llama"], read_plain(zoo.data, "test"))
        with pytest.raises(DataError, match="has no token to predict"):
            accuracy.perplexity(models["gpt2"], data(["a"]))

    def test_perplexity_on_the_command_line(self, models: dict[str, Model], tmp_path: Path) -> None:
        rows = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in SENTENCES])
        model = models["llama"]
        command = ["evaluate", str(model.weights.folder), "--data", str(rows), "--protocol", "perplexity", "--json"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        record = json.loads(done.stdout)
        wanted = accuracy.perplexity(model, data(SENTENCES))
        assert record["perplexity"] == pytest.approx(wanted.perplexity)
        assert (record["tokens"], record["samples"], record["protocol"]) == (wanted.tokens, 16, "perplexity")
        plain = CliRunner().invoke(app, command[:-1])
        assert plain.stdout.startswith("perplexity ")


def test_transfer_of_a_language_model(tmp_path: Path) -> None:
    """Prompts and targets from a table; Llamas of different sizes and tokenizers."""
    paths = [
        folder(tmp_path / "source", "llama"),
        folder(tmp_path / "tuned", "llama", tuned=True),
        folder(tmp_path / "target", "llama", LARGE, t5_tokenizer),
    ]
    rows = [{"prompt": text.rpartition(" ")[0], "target": text.rpartition(" ")[2]} for text in SENTENCES]
    result = transfer(*paths, write_rows(tmp_path / "rows.jsonl", rows), samples=16)
    assert result.record["resolved"]["loss"] == "causal"
    assert result.record["samples"] == 16
    out = open_model(result.save(tmp_path / "out"))
    assert accuracy.perplexity(out, data(SENTENCES)).perplexity < math.inf
