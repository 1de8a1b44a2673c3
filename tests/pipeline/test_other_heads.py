"""Heads that label tokens and heads that give numbers arrive whole: planted truth, plain peft, refusals."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from builders.classifiers import CLASSES, WIDER, bert, grow
from builders.runs import prepare
from builders.texts import (
    FAMILIES,
    LENGTH,
    SENTENCES,
    SMALL,
    TOKENIZERS,
    _plain,
    bert_tokenizer,
    roberta_tokenizer,
    write,
    write_rows,
)
from builders.twins import Twin, finetuned
from paper.finetune import prepare_training
from tuneport import plan, transfer, upgrade
from tuneport.errors import DataError, TuneportError
from tuneport.measure import fitted_heads as heads
from tuneport.models.open import describe_module
from tuneport.outputs.adapter import loader_of
from tuneport.pipeline.comparison import check_test, read_test, usual_test
from tuneport.training.loop import Schedule

NAMES = ("source", "tuned", "target")
TEXTS = [f"{one}, {two}" for one in SENTENCES for two in SENTENCES[:5]]
UNSEEN = [f"{two} and {one}" for one in SENTENCES[5:9] for two in SENTENCES[10:13]]


def planted(folder: Path, kind: str, **settings: Any) -> tuple[list[Path], Any]:
    """A bare encoder, its fine-tune with a head and a bare twin in other coordinates; the data; and the fine-tune."""
    base = bert("BertModel", SMALL)
    plain = describe_module(base)
    config = transformers.BertConfig(**{**base.config.to_dict(), **settings})
    tuned = grow(getattr(transformers, kind)(config).eval(), 3)
    tuned.bert.load_state_dict(finetuned(plain).state_dict(), strict=False)
    twin = Twin(plain, rotary=False, turn=False).build()
    for name, module in zip(NAMES, (base, tuned, twin), strict=True):
        write(folder / name, module, bert_tokenizer())
    data = write_rows(
        folder / "rows.jsonl", [{"text": text, "split": split} for text in TEXTS for split in ("train", "test")]
    )
    return [*(folder / name for name in NAMES), data], tuned


def logits_of(module: Any, texts: list[str] = UNSEEN) -> tuple[Tensor, Tensor]:
    """The logits, and where a token of a text is, neither special nor padding."""
    tokens = bert_tokenizer()(
        texts, padding=True, truncation=True, return_tensors="pt", return_special_tokens_mask=True
    )
    special = tokens.pop("special_tokens_mask")
    with torch.no_grad():
        return module.eval()(**tokens).logits, special == 0


def centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Any]:
    return planted(tmp_path_factory.mktemp("tokens"), "BertForTokenClassification", id2label=CLASSES)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Any]:
    return planted(tmp_path_factory.mktemp("numbers"), "BertForSequenceClassification", id2label={0: "LABEL_0"})


def test_an_upgrade_of_several_labels_of_a_sample_is_refused(tmp_path: Path) -> None:
    """Its routes would be judged by the highest label alone."""
    kind = {"id2label": CLASSES, "problem_type": "multi_label_classification"}
    paths, _ = planted(tmp_path, "BertForSequenceClassification", **kind)
    with pytest.raises(TuneportError, match="gives a sample several labels, and routes are judged by one class"):
        upgrade(*paths)


class TestTokens:
    def test_a_planted_twin_is_exact(self, tokens: tuple[list[Path], Any], tmp_path: Path) -> None:
        paths, tuned = tokens
        transfer(*paths, scale=1, samples=24).save(tmp_path / "out")
        loaded = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "out")
        (ported, inside), (wanted, _) = logits_of(loaded), logits_of(tuned)
        torch.testing.assert_close(centred(ported)[inside], centred(wanted)[inside], atol=1e-4, rtol=1e-4)
        assert loaded.config.id2label == CLASSES

    def test_labels_are_those_of_the_teacher_without_special_tokens_and_padding(
        self, tokens: tuple[list[Path], Any]
    ) -> None:
        job = prepare(*tokens[0], samples=12).with_scores()
        texts = list(job.samples.chosen.inputs)  # type: ignore[attr-defined]
        logits, inside = logits_of(tokens[1], texts)
        wanted = torch.where(inside, logits.argmax(-1), -100)
        for side in next(iter(job.samples.encoded())):  # type: ignore[attr-defined]
            assert torch.equal(side.labels, wanted[: len(side.labels), : side.labels.shape[1]])

    def test_the_tokens_that_fit_a_head_are_spread_over_all_texts(
        self, tokens: tuple[list[Path], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = prepare(*tokens[0], samples=12).with_scores()
        seen: list[tuple[Tensor, Tensor]] = []
        plain = heads.ridge

        def spy(inputs: Tensor, wanted: Tensor, **options: Any) -> Any:
            seen.append((inputs, wanted))
            return plain(inputs, wanted, **options)

        monkeypatch.setattr(heads, "ridge", spy)
        for most in (heads.MOST_TOKENS, 20):
            monkeypatch.setattr(heads, "MOST_TOKENS", most)
            heads.fit_head(job.target, job.target.module, job.samples)
        count = len(seen[0][0])
        texts = list(job.samples.chosen.inputs)  # type: ignore[attr-defined]
        assert count == int(logits_of(tokens[1], texts)[1].sum()), "all tokens, but special ones"
        places = range(0, count, math.ceil(count / 20))
        assert 10 < len(places) <= 20
        for found, whole in zip(seen[1], seen[0], strict=True):
            assert torch.equal(found, whole[list(places)])

    def test_an_adapter_arrives_and_plain_peft_loads_it(self, tokens: tuple[list[Path], Any], tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        (source, _, target, data), _ = tokens
        base = transformers.AutoModelForTokenClassification.from_pretrained(source, num_labels=4)
        config = peft.LoraConfig(task_type="TOKEN_CLS", r=2, target_modules=["query", "value"])
        tuned = peft.get_peft_model(base, config)
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_B" in name or "classifier" in name:
                    parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(6))
        tuned.save_pretrained(tmp_path / "adapter")
        result = transfer(source, tmp_path / "adapter", target, data, scale=1, samples=24)
        result.save(tmp_path / "out", as_="adapter")
        plain = transformers.AutoModelForTokenClassification.from_pretrained(target, num_labels=4)
        loaded = peft.PeftModel.from_pretrained(plain, tmp_path / "out")
        (found, inside), (applied, _), (wanted, _) = map(logits_of, (loaded, result.apply(), tuned))
        name, settings = loader_of(result.target, "TOKEN_CLS").values()  # of the `next:` line
        printed = eval(f"peft.{name}.from_pretrained({str(tmp_path / 'out')!r}{settings})", {"peft": peft})
        assert torch.equal(logits_of(printed)[0], found)
        torch.testing.assert_close(found, applied, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(centred(found)[inside], centred(wanted)[inside], atol=1e-4, rtol=1e-4)

    def test_another_tokenizer_is_taught_by_the_mean_of_the_tokens_that_cover_a_token(
        self, tokens: tuple[list[Path], Any], tmp_path: Path
    ) -> None:
        """The oracle goes character by character, with the offsets of both tokenizers."""
        (source, tuned, _, data), teacher = tokens
        other = transformers.RobertaConfig(**{**_plain(WIDER, vocab_size=320), "pad_token_id": 1, "bos_token_id": 0})
        write(tmp_path / "target", grow(transformers.RobertaModel(other), 2), roberta_tokenizer())
        job = prepare(source, tuned, tmp_path / "target", data, samples=6).with_scores()
        texts = list(job.samples.chosen.inputs)  # type: ignore[attr-defined]
        logits, _ = logits_of(teacher, texts)
        sides = next(iter(job.samples.encoded()))  # type: ignore[attr-defined]
        found = sides.target.labels
        options = {"truncation": True, "return_offsets_mapping": True}
        readers = {bert_tokenizer: LENGTH, roberta_tokenizer: LENGTH - 2}  # RoBERTa's positions begin at two
        for text, scores, labels in zip(texts, logits, found, strict=False):
            places, others = (
                make()(text, max_length=most, **options)["offset_mapping"] for make, most in readers.items()
            )
            by_letter = {letter: scores[index] for index, place in enumerate(places) for letter in range(*place)}
            for place, label in zip(others, labels.tolist(), strict=False):
                covered = [by_letter[letter] for letter in range(*place) if letter in by_letter]
                assert label == (int(torch.stack(covered).mean(0).argmax()) if covered else -100)

    @pytest.mark.parametrize(("family", "reader"), [("llama", "gpt"), ("gpt2", "gpt"), ("t5-encoder", "t5")])
    def test_other_families(self, tmp_path: Path, family: str, reader: str) -> None:
        """The source itself is the target: T5's tokens share characters, and each has a score of its own."""
        tokenizer, entry = TOKENIZERS[reader](), FAMILIES[family]
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        given = {**entry.arguments(SMALL), "vocab_size": len(tokenizer)}
        config, prefix = getattr(transformers, entry.config), entry.config.removesuffix("Config")
        bare = getattr(transformers, prefix + ("EncoderModel" if prefix == "T5" else "Model"))
        base = grow(bare(config(**given)).eval(), 1)
        kind = getattr(transformers, f"{prefix}ForTokenClassification")
        tuned = grow(kind(config(**{**given, "id2label": CLASSES})).eval(), 2)
        tuned.base_model.load_state_dict(finetuned(describe_module(base)).state_dict(), strict=False)
        source, taught = (write(tmp_path / name, part, tokenizer) for name, part in (("a", base), ("b", tuned)))
        rows = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
        ported = transfer(source, taught, source, rows, scale=1, samples=16, max_length=24).apply()
        assert type(ported) is kind
        tokens = tokenizer(UNSEEN, padding=True, truncation=True, max_length=24, return_tensors="pt")
        tokens.pop("token_type_ids", None)
        with torch.no_grad():
            found, wanted = (centred(module(**tokens).logits) for module in (ported, tuned))
        known = tokens["attention_mask"] == 1
        torch.testing.assert_close(found[known], wanted[known], atol=1e-4, rtol=1e-4)

    def test_rows_of_words(self, tokens: tuple[list[Path], Any], tmp_path: Path) -> None:
        """As data sets of named entities are: the words are joined, and their tags are not read."""
        rows = [{"tokens": text.split(), "ner_tags": [0] * len(text.split())} for text in SENTENCES]
        job = prepare(*tokens[0][:3], write_rows(tmp_path / "rows.jsonl", rows), samples=12)
        assert set(job.samples.chosen.inputs) <= set(SENTENCES)  # type: ignore[attr-defined]


class TestNumbers:
    def test_a_planted_twin_is_exact(self, numbers: tuple[list[Path], Any], tmp_path: Path) -> None:
        """The numbers themselves, not only their differences."""
        paths, tuned = numbers
        transfer(*paths, scale=1, samples=60).save(tmp_path / "out")
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(logits_of(loaded)[0], logits_of(tuned)[0], atol=1e-4, rtol=1e-4)
        assert loaded.config.num_labels == 1

    def test_fractions_as_labels_are_no_obstacle(self, numbers: tuple[list[Path], Any], tmp_path: Path) -> None:
        rows = [{"text": text, "label": place / 4} for place, text in enumerate(SENTENCES)]
        data = write_rows(tmp_path / "rows.jsonl", rows)
        job = prepare(*numbers[0][:3], data, samples=12).with_scores()
        texts = list(job.samples.chosen.inputs)  # type: ignore[attr-defined]
        wanted = logits_of(numbers[1], texts)[0].double()
        torch.testing.assert_close(torch.as_tensor(job.samples.chosen.scores), wanted)  # type: ignore[attr-defined]
        with pytest.raises(DataError, match="gives numbers, and such labels are not read from data"):
            prepare(*numbers[0], samples=12, labels="data")
        headed = transformers.AutoModelForSequenceClassification.from_pretrained(numbers[0][0], num_labels=1)
        write(tmp_path / "headed", headed, bert_tokenizer())
        with pytest.raises(DataError, match="gives numbers, which needs a fitted head"):
            prepare(tmp_path / "headed", *numbers[0][1:], samples=12, head_fit="none")


@pytest.mark.parametrize("kind", ["tokens", "numbers"])
class TestBoth:
    def test_the_scale_of_a_planted_twin_is_one_and_the_distillation_starts_there(
        self, kind: str, request: pytest.FixtureRequest
    ) -> None:
        paths, _ = request.getfixturevalue(kind)
        result = transfer(*paths, samples=48)  # a half determines a head of 16 inputs
        assert result.scale == 1.0
        taught = result.distill(steps=1).record["distilled"]
        assert taught["matching"] == {"tokens": "classes", "numbers": "numbers"}[kind]
        assert taught["best"] == 0, "the port is the teacher already"

    def test_accuracy_and_training_are_refused_in_one_line(
        self, kind: str, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        paths, _ = request.getfixturevalue(kind)
        job = prepare(*paths, samples=12)
        test = read_test(paths[3])
        with pytest.raises(TuneportError, match="of which tuneport measures no accuracy"):
            check_test(job.target, job.setup.calibration, test)
        assert "measures no accuracy" in str(usual_test(job.target, job.setup.calibration, paths[3]))
        reason = "the fine-tune .*, and routes are judged by one class for each sample"
        with pytest.raises(TuneportError, match=f"{reason}: use 'tuneport transfer'"):
            upgrade(*paths)
        routes = plan(*paths)["routes"].values()
        assert all(re.fullmatch(reason, route["why_not"]) for route in routes)
        rows = [{"text": text, "label": CLASSES[place % 3]} for place, text in enumerate(SENTENCES)]
        labelled = write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(TuneportError, match="which is not trained here: use transformers' Trainer"):
            prepare_training(paths[1], labelled, Schedule(steps=1))
