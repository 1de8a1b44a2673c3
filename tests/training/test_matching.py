"""What a student learns from its teacher: losses and agreements against SciPy and by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from builders.folders import Zoo
from builders.samples import raises
from builders.texts import SENTENCES, Size, bert_tokenizer, gpt_tokenizer, make, t5_tokenizer, write
from tuneport.data.answers import without_labels
from tuneport.data.dataset import UNLABELLED, Dataset
from tuneport.data.formats import read_plain
from tuneport.measure.objectives import choose_objective
from tuneport.measure.samples import DatasetSamples
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model
from tuneport.training import matching
from tuneport.training.matching import matching_of, unlabelled
from tuneport.types import Sides

OTHER = Size(width=24, depth=3, heads=4, head_width=6, hidden=40, seed=3)


def drawn(source: Path, target: Path, data: Dataset, heads: Sides[Head] | None = None) -> DatasetSamples:
    models = Sides(open_model(source), open_model(target))
    return DatasetSamples(models, data, np.arange(len(data)), heads, len(data), choose_objective(data, models))


def answers(samples: DatasetSamples) -> tuple[Any, Any]:
    """Both models' answers to all samples."""
    found, encoded = matching_of(samples), next(samples.encoded())
    with torch.no_grad():
        return tuple(
            ask(model.module, side) for ask, model, side in zip(found.ask, samples.models, encoded, strict=True)
        )  # type: ignore[return-value]


def spans(*places: float) -> Tensor:
    """Those of the tokens of one text, which follow one another."""
    return torch.tensor([list(pairwise(places))])


class TestClasses:
    def test_the_loss_is_the_divergence_of_softened_probabilities(self) -> None:
        teacher, student = torch.randn(2, 7, 5, dtype=torch.float64)
        sharpness = matching.SOFTNESS / teacher.numpy().std(-1, ddof=1).mean()
        wanted, found = (softmax(sharpness * scores.numpy(), axis=-1) for scores in (teacher, student))
        expected = rel_entr(wanted, found).sum(-1).mean()
        assert float(matching._soft_loss(teacher, student)) == pytest.approx(expected, rel=1e-12)

    def test_the_temperature_of_the_head_does_not_matter(self) -> None:
        teacher, student = torch.randn(2, 7, 5, dtype=torch.float64)
        one, other = (float(matching._soft_loss(scale * teacher, scale * student)) for scale in (1.0, 19.0))
        assert one == pytest.approx(other, rel=1e-12)

    def test_held_out_samples_are_judged_by_probabilities_as_they_are(self, zoo: Zoo) -> None:
        """Softened probabilities come nearer to the teacher's while the class changes; as they are, they do not."""
        data, both = (
            read_plain(zoo.data, "train").subset(range(6)),
            (zoo["clip_vision-base"], zoo["clip_vision-target"]),
        )
        heads = Sides(*(choose_head(open_model(path), None, data) for path in both))
        found = matching_of(drawn(*both, data, heads))
        teacher, start, other = (
            torch.tensor([[3.0, 0.0, 0.0]]),
            torch.tensor([[9.0, 0.0, 0.0]]),
            torch.tensor([[1.5, 1.6, 0.0]]),
        )
        assert found.exam is not None
        assert found.loss(teacher, other) < found.loss(teacher, start)
        assert found.exam(teacher, other) > found.exam(teacher, start)

    def test_classes_are_matched_by_name(self, zoo: Zoo) -> None:
        data = read_plain(zoo.data, "train").subset(range(6))
        source, target = zoo["clip_vision-base"], zoo["clip_vision-target"]
        heads = [choose_head(open_model(path), None, data) for path in (source, target)]
        assert heads[1].class_embeds is not None
        turned = Head("turned", heads[1].classes[::-1], heads[1].class_embeds.flip(0), heads[1].logit_scale)
        plain = answers(drawn(source, target, data, Sides(*heads)))
        other = answers(drawn(source, target, data, Sides(heads[0], turned)))
        assert torch.equal(plain[1], other[1])
        unknown = Head("unknown", ("eagle", *heads[1].classes[1:]), heads[1].class_embeds)
        with raises("1 of 4 classes of the teacher are unknown", "owl"):
            matching_of(drawn(source, target, data, Sides(heads[0], unknown)))

    def test_other_names_are_refused_and_only_numbers_are_positions(self, zoo: Zoo) -> None:
        data = replace(read_plain(zoo.data, "train").subset(range(6)), labels=None)
        samples = drawn(zoo["vit-base"], zoo["vit-target"], data)
        named, other, numbers, turned = (
            Head("classifier", classes)
            for classes in (("cat", "dog", "owl"), ("ship", "car", "train"), ("0", "1", "2"), ("2", "0", "1"))
        )
        for heads in (Sides(named, other), Sides(named, turned), Sides(turned, named)):
            with raises("3 of 3 classes of the teacher are unknown", "or run an upgrade, which fits one"):
                matching_of(replace(samples, heads=heads))
        plain = answers(replace(samples, heads=Sides(named, named)))
        for heads in (Sides(named, numbers), Sides(numbers, named)):
            found = answers(replace(samples, heads=heads))
            assert all(torch.equal(one, two) for one, two in zip(plain, found, strict=True))

    def test_independent_classes_are_compared_one_by_one(self, zoo: Zoo) -> None:
        data = read_plain(zoo.data, "train").subset(range(6))
        samples = drawn(zoo["vit-base"], zoo["vit-target"], data)
        heads = Sides(*(choose_head(model, None, data) for model in samples.models))
        source = samples.models.source
        assert source.classifier is not None
        labelling = replace(source.classifier.labelling, problem="multi_label_classification")
        source = replace(source, classifier=replace(source.classifier, labelling=labelling))
        found = matching_of(replace(samples, models=Sides(source, samples.models.target), heads=heads))
        teacher, student = torch.tensor([[2.0, -1.0, 3.0]]), torch.tensor([[1.0, 1.0, 3.0]])
        # a constant for all classes changes the answers: 1, 4 and 0 off, over a variance of 13/3
        assert float(found.loss(teacher, student)) == pytest.approx((5 / 3) / (13 / 3))
        assert float(found.agreement(teacher, student)) == pytest.approx(2 / 3)


class TestSimilarities:
    def test_the_loss_is_the_error_over_the_variance(self) -> None:
        teacher, student = torch.randn(2, 4, 4, dtype=torch.float64)
        off = ~np.eye(4, dtype=bool)
        wanted, found = teacher.numpy()[off], student.numpy()[off]
        expected = ((wanted - found) ** 2).mean() / wanted.var(ddof=1)
        assert float(matching._relative_error(teacher, student)) == pytest.approx(expected, rel=1e-12)

    def test_a_sample_is_not_its_own_neighbour(self) -> None:
        teacher = torch.tensor([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]])
        student = torch.tensor([[1.0, 0.1, 0.9], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]])
        assert float(matching._same_neighbour(teacher, teacher)) == 1.0
        assert float(matching._same_neighbour(teacher, student)) == pytest.approx(2 / 3)

    def test_encoders_without_classes_are_matched_by_them(self, tmp_path: Path) -> None:
        words = bert_tokenizer()
        source = write(tmp_path / "source", make("bert"), words)
        target = write(tmp_path / "target", make("bert", OTHER), words)
        data = Dataset(inputs=list(SENTENCES[:5]), labels=None, classes=())
        samples = drawn(source, target, data)
        assert matching_of(samples).name == "similarities"
        for cosines in answers(samples):
            assert cosines.shape == (5, 5)
            # a unit vector with itself, in float32
            assert torch.allclose(cosines.diagonal(), torch.ones(5), atol=1e-6)


class TestTokens:
    @pytest.fixture
    def writers(self, tmp_path: Path) -> DatasetSamples:
        source = write(tmp_path / "source", make("gpt2", vocab_size=320), gpt_tokenizer())
        target = write(tmp_path / "target", make("gpt2", OTHER, vocab_size=320), gpt_tokenizer())
        return drawn(source, target, Dataset(inputs=list(SENTENCES[:4]), labels=None, classes=()))

    def test_one_tokenizer_compares_distributions(self, writers: DatasetSamples) -> None:
        found = matching_of(writers)
        assert found.name == "tokens"
        (one, labels, first), (two, _, _) = answers(writers)
        known = labels != -100
        wanted, seen = (softmax(scores[known].double().numpy(), axis=-1) for scores in (one, two))
        surprise = -np.log(np.take_along_axis(seen, labels[known][:, None].numpy(), axis=-1)).mean()
        expected = rel_entr(wanted, seen).sum(-1).mean() + surprise
        # float32 probabilities of some hundred tokens against float64
        assert float(found.loss((one, labels, first), (two, labels, first))) == pytest.approx(expected, rel=1e-4)
        assert float(found.agreement((one, labels, first), (one, labels, first))) == 1.0

    def test_tokens_with_other_ids_are_not_compared(self, tmp_path: Path) -> None:
        """The same tokens, two of which have changed their ids."""
        source, target = (
            write(tmp_path / name, make("gpt2", vocab_size=320), gpt_tokenizer(320)) for name in ("source", "target")
        )
        samples = drawn(source, target, Dataset(inputs=list(SENTENCES[:2]), labels=None, classes=()))
        assert matching_of(samples).name == "tokens"
        words = json.loads((target / "tokenizer.json").read_text())
        vocabulary = words["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        (target / "tokenizer.json").write_text(json.dumps(words))
        other = drawn(source, target, samples.dataset)
        assert other.models.target.inputs.reader is not None
        assert set(other.models.target.inputs.reader.tokenizer.get_vocab()) == set(vocabulary)
        assert matching_of(other).name == "texts"

    @pytest.mark.parametrize("rows", [300, 320])
    def test_texts_judge_a_student_without_its_teacher(self, tmp_path: Path, rows: int) -> None:
        """The mean loss of the tokens to predict, with one tokenizer and with two: that of transformers."""
        source = write(tmp_path / "source", make("gpt2", vocab_size=rows), gpt_tokenizer(rows))
        target = write(tmp_path / "target", make("gpt2", OTHER, vocab_size=320), gpt_tokenizer(320))
        samples = drawn(source, target, Dataset(inputs=[SENTENCES[0]], labels=None, classes=()))
        found = matching_of(samples)
        judged = found.exam or found.loss
        model = AutoModelForCausalLM.from_pretrained(target).eval()
        ids = AutoTokenizer.from_pretrained(target)(SENTENCES[0], return_tensors="pt").input_ids
        with torch.no_grad():
            expected = float(model(ids, labels=ids).loss)
        # float32 logits of some ten tokens, summed in another order
        assert float(judged(*answers(samples))) == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("rows", [300, 320])
    def test_written_answers_judge_a_student_by_the_tokens_that_it_would_not_write(
        self, tmp_path: Path, rows: int
    ) -> None:
        """With one tokenizer and with two; a token that is padded counts for nothing."""
        source = write(tmp_path / "source", make("gpt2", vocab_size=rows), gpt_tokenizer(rows))
        target = write(tmp_path / "target", make("gpt2", OTHER, vocab_size=320), gpt_tokenizer(320))
        data = Dataset(inputs=[SENTENCES[0]], labels=None, classes=(), answers="teacher")
        found = matching_of(drawn(source, target, data))
        scores = torch.eye(5)[torch.tensor([[1, 2, 3], [4, 0, 0]])]
        labels = torch.tensor([[1, 2, 0], [3, UNLABELLED, UNLABELLED]])
        assert found.exam is not None
        assert float(found.exam(None, (scores, labels, 0))) == 0.5

    @pytest.mark.parametrize("rows", [300, 320])
    def test_a_text_of_one_token_has_nothing_to_compare(self, tmp_path: Path, rows: int) -> None:
        """With two tokenizers and with one; a first token is not predicted."""
        source = write(tmp_path / "source", make("gpt2", vocab_size=rows), gpt_tokenizer(rows))
        target = write(tmp_path / "target", make("gpt2", OTHER, vocab_size=320), gpt_tokenizer(320))
        samples = drawn(source, target, Dataset(inputs=["a", SENTENCES[0], "b"], labels=None, classes=()))
        comparable = matching_of(samples).comparable
        assert comparable is not None
        assert comparable(next(samples.encoded())).tolist() == [False, True, False]


class TestAnswers:
    @pytest.mark.parametrize("family", ["gpt2", "t5"])
    def test_scores_are_the_log_likelihoods_of_the_answers(self, tmp_path: Path, family: str) -> None:
        """Those of transformers, one answer at a time; an answer that only other questions have is impossible."""
        words = t5_tokenizer() if family == "t5" else gpt_tokenizer()
        source = write(tmp_path / "source", make(family, vocab_size=len(words)), words)
        target = write(tmp_path / "target", make(family, OTHER, vocab_size=len(words)), words)
        choices = [["the sea", "a bird", "nobody"], ["two ships", "rain"]]
        data = Dataset(inputs=["what is it?", "and why?"], labels=np.array([2, 0]), classes=(), choices=choices)
        samples = unlabelled(drawn(source, target, data))
        assert samples.dataset.labels is None
        found = matching_of(samples)
        assert (found.name, found.exam) == ("answers", None)
        for path, scores in zip((source, target), answers(samples), strict=True):
            kind = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
            model, tokenizer = kind.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
            for row, (question, each) in enumerate(zip(data.inputs, choices, strict=True)):
                for place, answer in enumerate(each):
                    if family == "t5":
                        ids = tokenizer(question, return_tensors="pt").input_ids
                        labels = tokenizer(answer, return_tensors="pt").input_ids
                    else:
                        ids = tokenizer(f"{question} {answer}", return_tensors="pt").input_ids
                        labels = ids.clone()
                        labels[:, : tokenizer(question, return_tensors="pt").input_ids.shape[1]] = -100
                    with torch.no_grad():
                        expected = -float(model(ids, labels=labels).loss) * int((labels != -100).sum())
                    # float32 passes in other batches
                    assert float(scores[row, place]) == pytest.approx(expected, rel=1e-4)
            assert float(scores[1, 2]) == matching.NONE

    def test_the_loss_is_the_divergence_over_the_answers_of_each_sample(self) -> None:
        teacher, student = torch.randn(2, 3, 4, dtype=torch.float64)
        for side in (teacher, student):
            side[0, 3:] = matching.NONE
        expected = np.mean(
            [
                rel_entr(*(softmax(side[row, :count].numpy()) for side in (teacher, student))).sum()
                for row, count in enumerate((3, 4, 4))
            ]
        )
        assert float(matching._divergence(teacher, student)) == pytest.approx(expected, rel=1e-12)

    def test_the_loss_softens_the_answers_and_wants_the_likeliest_written(self) -> None:
        teacher, student = torch.randn(2, 3, 4, dtype=torch.float64)
        wanted, found = (softmax(side.numpy() / matching.SOFT, axis=-1) for side in (teacher, student))
        own = student.numpy()[np.arange(3), teacher.numpy().argmax(-1)]
        expected = matching.SOFT * rel_entr(wanted, found).sum(-1).mean() - own.mean()
        assert float(matching._answer_loss(teacher, student)) == pytest.approx(expected, rel=1e-12)

    def test_many_answers_are_drawn_without_the_label(self) -> None:
        words = tuple(f"class {number}" for number in range(30))
        kept = [
            without_labels(Dataset(inputs=["a", "b"], labels=np.array(labels), classes=words), 8).choices
            for labels in ([0, 1], [29, 7])
        ]
        assert kept[0] == kept[1]
        assert kept[0] is not None
        assert [len(set(each)) for each in kept[0]] == [8, 8]
        assert kept[0][0] != kept[0][1]


class TestLabels:
    """Prompts with free answers of the teacher, which most of them share."""

    LABELS = tuple(f"{one} {two}" for one in ("sea", "bird", "rain") for two in ("up", "down", "far", "near"))

    @staticmethod
    def asked(folder: Path, given: list[str], prompts: list[str] | None = None) -> DatasetSamples:
        words = gpt_tokenizer()
        source = write(folder / "source", make("gpt2", vocab_size=len(words)), words)
        target = write(folder / "target", make("gpt2", OTHER, vocab_size=len(words)), words)
        texts = prompts or [f"{SENTENCES[number % len(SENTENCES)]} {number}?" for number in range(len(given))]
        return drawn(source, target, Dataset(texts, None, (), targets=given, answers="teacher"))

    def test_a_prompt_is_asked_with_the_labels_that_are_near_its_own(self, tmp_path: Path) -> None:
        """By the likelihoods of plain transformers: of the first two prompts of a label, with the end of a text."""
        given = [self.LABELS[number % 12] for number in range(36)]
        samples = self.asked(tmp_path, given)
        found = unlabelled(samples)
        assert (found.objective.name, matching_of(found).name) == ("answers", "answers")
        assert found.dataset.choices is not None
        assert [each[0] for each in found.dataset.choices] == given
        assert {len(set(each)) for each in found.dataset.choices} == {matching.ANSWERS}
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "source")
        scores = dict.fromkeys(self.LABELS, 0.0)
        for label in self.LABELS:
            for prompt in (samples.dataset.inputs[0], samples.dataset.inputs[12]):
                ids = tokenizer(f"{prompt} {label}{tokenizer.eos_token}", return_tensors="pt").input_ids
                labels = ids.clone()
                labels[:, : tokenizer(prompt, return_tensors="pt").input_ids.shape[1]] = -100
                with torch.no_grad():
                    scores[label] -= float(model(ids, labels=labels).loss) * int((labels != -100).sum())
        others = sorted((label for label in self.LABELS if label != given[0]), key=lambda name: -scores[name])
        margin = scores[others[6]] - scores[others[7]]
        assert margin > 1e-3, "the eighth is as likely as the seventh: the order says nothing"
        assert set(found.dataset.choices[0][1:]) == set(others[:7])

    def test_few_labels_are_all_asked(self, tmp_path: Path) -> None:
        found = unlabelled(self.asked(tmp_path, ["yes", "no", "no"] * 4))
        assert found.dataset.choices is not None
        assert {tuple(sorted(each)) for each in found.dataset.choices} == {("no", "yes")}

    @pytest.mark.parametrize(
        ("given", "prompts"),
        [
            ([f"answer {number}" for number in range(9)], None),  # nobody shares them
            (["yes"] * 9, None),  # nothing to choose from
            (["yes", "no"] * 6, [f"prompt {number // 2}" for number in range(12)]),  # the data's answer beside it
        ],
    )
    def test_other_answers_stay_texts(self, tmp_path: Path, given: list[str], prompts: list[str] | None) -> None:
        samples = self.asked(tmp_path, given, prompts)
        assert unlabelled(samples) is samples


def test_tokens_are_compared_at_the_same_positions() -> None:
    """The student's answer begins one position after the teacher's, and ends one before."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(1, count, 5, generator=generator) for count in (4, 2))
    teacher = one, torch.tensor([[3, 1, 2, 4]]), 6
    student = two, torch.tensor([[1, 3]]), 7
    common = matching._common(teacher, student)
    assert torch.equal(common.source, one[0, 1:2])
    assert torch.equal(common.target, two[0, :1])
    assert len(matching._common(teacher, (two, torch.tensor([[1, 3]]), 12)).source) == 0, "they do not meet"
