"""What a student learns from its teacher: how the answers of two models to the same samples are compared.

A Matching asks both models and gives the loss of the student's answers, and the share of them that agree with the
teacher's. Which one suits follows from the models: class scores where both have a head for the same classes, tokens or
answers where both write text, and the similarities of the samples in a batch for other encoders. No label is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..data.answers import last_answer, shared_answers, without_labels
from ..data.dataset import UNLABELLED, as_numbers
from ..errors import DataError, TuneportError, first_of
from ..measure.answers import is_choice
from ..measure.objectives import TokenLoss, batch_for, next_tokens, with_each_answer
from ..measure.samples import DatasetSamples
from ..measure.tokens import match_spans
from ..models.base import Model, widened
from ..models.heads import Head
from ..models.tokenizer import PADDING, Encoded
from ..types import Sides

Ask = Callable[[nn.Module, Encoded], Any]
Compare = Callable[[Any, Any], Tensor]  # the answers of teacher and student
Tokens = tuple[Tensor, Tensor, int]  # scores (N, K, vocabulary) and labels (N, K) from this position on

BATCH = 128  # samples of an update
TEXT_BATCH = 16  # of language models
TEXTS = 32  # of a pass: texts of a similar length, padded little
ANSWERS = 8  # of a sample at most: each of them takes time
SHOWN = 2  # prompts of a label that show which others are near it
SCORED = 256  # answers that a teacher scores at once
SOFT = 4.0  # by which the log-probabilities of answers are divided: a sharp teacher says little of all but one
NONE = -1e6  # the score of an answer that only other samples have
SOFTNESS = 0.1  # the standard deviation of a sample's class scores in the soft targets


@dataclass(frozen=True, eq=False)
class Matching:
    """`ask` gets the answers of each side, `loss` and `agreement` compare the teacher's with the student's.

    The loss is a mean over samples or tokens, and zero where the answers are the same. `batch_size` samples make an
    update, in passes of `pass_size`. `asking` says whether the teacher judges augmented samples, plain ones at each
    step, or all of them once by scores (N, K). `exam` is the loss of held-out answers if it is another one: of class
    probabilities as they are, since softened ones can come nearer while more samples change their class; of passages,
    whatever the teacher thinks of them; of answers that it has written, the share of tokens that the student would not
    write. `comparable` (N,) says which samples of a batch have anything to compare; None if all have. Held-out samples
    that are judged `apart` show how sure their mean is.
    """

    name: str
    ask: Sides[Ask]
    loss: Compare
    agreement: Compare
    batch_size: int = TEXT_BATCH
    pass_size: int = TEXT_BATCH
    asking: Literal["augmented", "plain", "once"] = "plain"
    exam: Compare | None = None
    comparable: Callable[[Sides[Encoded]], Tensor] | None = None
    apart: bool = False


def unlabelled(samples: DatasetSamples) -> DatasetSamples:
    """The samples without labels; a question to language models is asked with each of its answers."""
    if not is_choice(samples.dataset):
        return _with_labels(samples) if samples.dataset.answers == "teacher" else samples
    if samples.objective.name not in ("causal", "seq2seq"):
        return replace(samples, dataset=replace(samples.dataset, labels=None))
    data = without_labels(samples.chosen, ANSWERS)
    return replace(samples, dataset=data, indices=np.arange(len(data)), objective=with_each_answer(samples.objective))


def _with_labels(samples: DatasetSamples) -> DatasetSamples:
    """Prompts whose answers are labels as questions, each with the labels that its teacher finds near its answer.

    A teacher says more of a label than that it is the right one: how likely it finds the others. Which ones are near a
    label, a few of its prompts show. Other texts stay as they are, and so do prompts that are given two answers.
    """
    data = samples.chosen
    answers = data.targets or [""] * len(data)  # of passages; chats hold theirs
    asked, given = zip(*map(last_answer, data.inputs), strict=True) if data.has_chats else (data.inputs, answers)
    labels, pairs = shared_answers(given), {(str(prompt), answer) for prompt, answer in zip(asked, given, strict=True)}
    if len(labels) < 2 or len(pairs) > len({prompt for prompt, _ in pairs}):
        return samples
    objective, near = with_each_answer(samples.objective), dict.fromkeys(labels, labels)
    if len(labels) > ANSWERS:
        rows = [row for label in labels for row in [at for at, own in enumerate(given) if own == label][:SHOWN]]
        shown, teacher = replace(data.subset(rows), choices=[labels] * len(rows)), samples.models.source
        size = max(SCORED // len(labels), 1)
        parts = [shown.subset(np.arange(at, min(at + size, len(rows)))) for at in range(0, len(rows), size)]
        with torch.no_grad():
            found = [_answers(teacher, teacher.module, objective.encode(teacher, part)) for part in parts]
        scores = torch.cat(found)
        for label, row in zip(labels, scores.view(len(labels), SHOWN, -1).mean(1), strict=True):
            near[label] = tuple(labels[place] for place in row.argsort(descending=True).tolist())
    choices = [[own, *(label for label in near.get(own, labels) if label != own)][:ANSWERS] for own in given]
    return replace(samples, dataset=replace(data, choices=choices), indices=np.arange(len(data)), objective=objective)


def matching_of(samples: DatasetSamples) -> Matching:
    """The matching that suits two models and their samples."""
    teacher, student = samples.models
    if samples.objective.name == "answers":
        return _of_answers(samples.models)
    if samples.heads is not None:
        return _of_classes(samples.models, samples.heads)
    if teacher.generates is not None and teacher.generates == student.generates:
        readers = [model.inputs.reader for model in samples.models]
        same = readers[0] is not None and readers[1] is not None and readers[0].same_tokens(readers[1])
        exam = _other_tokens if samples.dataset.answers == "teacher" else _text_loss
        return _of_tokens(samples.models, exam) if same else _of_texts(samples.models, exam)
    for model in samples.models:
        if model.outputs.features is None:
            raise TuneportError(f"{model.name} gives no features and has no head: there is nothing to distill.")
    asked: Sides[Ask] = Sides(*(partial(_similarities, model) for model in samples.models))
    return Matching("similarities", asked, _relative_error, _same_neighbour, 64, 64, "augmented")


def _of_classes(models: Sides[Model], heads: Sides[Head]) -> Matching:
    """Class probabilities; classes are matched by name, or by position where one side has numbers in place of names."""
    teacher, student = heads.source.classes, heads.target.classes
    unknown, numbers = [name for name in teacher if name not in student], list(range(len(student)))
    numbered = len(teacher) == len(student) == len(unknown) and numbers in (as_numbers(teacher), as_numbers(student))
    if unknown and not numbered:
        raise DataError(
            f"{len(unknown)} of {len(teacher)} classes of the teacher are unknown to {models.target.name}: "
            f"{first_of(unknown)}. It has {first_of(student)}. Give it a head with the teacher's classes, or run an "
            "upgrade, which fits one."
        )
    places = numbers if unknown else [student.index(name) for name in teacher]

    def ask(model: Model, head: Head, order: list[int] | slice, module: nn.Module, encoded: Encoded) -> Any:
        scores = head.scores(model, module, batch_for(model, encoded)[0])[..., order]
        if model.task != "token":
            return scores
        assert encoded.inside is not None
        return scores, encoded.spans[0].masked_fill(~encoded.inside[..., None], PADDING)

    orders: Sides[list[int] | slice] = Sides(slice(None), places)
    asked: Sides[Ask] = Sides(*(partial(ask, *each) for each in zip(models, heads, orders, strict=True)))
    size = BATCH if models.target.inputs.reader is None else TEXTS
    if models.source.regresses:
        return Matching("numbers", asked, _score_error, _explained, BATCH, size, "augmented")
    if models.source.multi_label:  # each class is a question of its own
        return Matching("classes", asked, _score_error, _same_answers, BATCH, size, "augmented")
    compared: list[Compare] = [_soft_loss, _same_class, _divergence]
    if models.source.task != "token":
        loss, agreement, exam = compared
        return Matching("classes", asked, loss, agreement, BATCH, size, "augmented", exam, apart=True)
    loss, agreement, exam = map(_of_text, compared)
    return Matching("classes", asked, loss, agreement, BATCH, size, "augmented", exam, _has_tokens, apart=True)


def _soft_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of class probabilities (N, classes), softened by the teacher's spread.

    A sharp teacher says little beyond its first class. Divided by the spread of its scores, they say how the other
    classes compare, whatever the temperature of its head.
    """
    sharpness = SOFTNESS / teacher.std(-1).mean().clamp(min=1e-6)
    return _divergence(sharpness * teacher, sharpness * student)


def _divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence of the probabilities by scores (N, K)."""
    wanted, found = (scores.log_softmax(-1) for scores in (teacher, student))
    return F.kl_div(found, wanted, log_target=True, reduction="batchmean")


def _same_class(teacher: Tensor, student: Tensor) -> Tensor:
    return (teacher.argmax(-1) == student.argmax(-1)).float().mean()


def _of_text(compare: Compare) -> Compare:
    """Compare the class scores of the tokens of texts, which each side gives with their spans.

    A view that has lost all words with a token says nothing.
    """

    def compared(teacher: tuple[Tensor, Tensor], student: tuple[Tensor, Tensor]) -> Tensor:
        (scores, spans), (others, places) = teacher, student
        wanted, found = match_spans([spans], [places])(scores, others)
        return compare(wanted, found) if len(wanted) else others.sum() * 0.0

    return compared


def _has_tokens(sides: Sides[Encoded]) -> Tensor:
    """Which texts (N,) have a token of their own for both models: some letters have none."""
    one, other = (side.inside for side in sides)
    assert one is not None
    assert other is not None
    return one.any(1) & other.any(1)


def _explained(teacher: Tensor, student: Tensor) -> Tensor:
    """The share of the teacher's variance that the student's numbers explain."""
    return (1 - _score_error(teacher, student)).clamp(min=0)


def _score_error(teacher: Tensor, student: Tensor) -> Tensor:
    """The squared error of the scores over the teacher's variance of them."""
    return F.mse_loss(student, teacher) / teacher.var().clamp(min=1e-12)


def _same_answers(teacher: Tensor, student: Tensor) -> Tensor:
    return ((teacher > 0) == (student > 0)).float().mean()


def _similarities(model: Model, module: nn.Module, encoded: Encoded) -> Tensor:
    """The cosines between the samples of a batch (N, N), or between the texts of its pairs."""
    assert model.outputs.features is not None
    vectors = F.normalize(widened(model.outputs.features(module, batch_for(model, encoded)[0])), dim=-1)
    return vectors @ vectors.T


def _others(cosines: Tensor) -> Tensor:
    """The cosines without those of a sample with itself (N, N - 1)."""
    count = len(cosines)
    return cosines.flatten()[1:].view(count - 1, count + 1)[:, :-1].reshape(count, count - 1)


def _relative_error(teacher: Tensor, student: Tensor) -> Tensor:
    """The squared error of the cosines over the teacher's variance of them."""
    return _score_error(_others(teacher), _others(student))


def _same_neighbour(teacher: Tensor, student: Tensor) -> Tensor:
    return (_others(teacher).argmax(-1) == _others(student).argmax(-1)).float().mean()


def _of_answers(models: Sides[Model]) -> Matching:
    """Probabilities of the answers to each question, among one another."""

    def comparable(sides: Sides[Encoded]) -> Tensor:
        return torch.tensor(sides.target.counts) > 1

    asked: Sides[Ask] = Sides(*(partial(_answers, model) for model in models))
    return Matching("answers", asked, _answer_loss, _same_class, asking="once", comparable=comparable, apart=True)


def _answers(model: Model, module: nn.Module, encoded: Encoded) -> Tensor:
    """The scores of the answers to each question (N, most answers)."""
    losses = TokenLoss(model).each(module, batch_for(model, encoded), encoded.counts)
    return pad_sequence((-losses).split(list(encoded.counts)), batch_first=True, padding_value=NONE)


def _answer_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """The divergence among the answers (N, K), softened, and the surprise at the teacher's own.

    The student has to write the latter. The factor makes up for part of what softening takes from the gradients.
    """
    own = student.gather(1, teacher.argmax(-1, keepdim=True))
    return SOFT * _divergence(teacher / SOFT, student / SOFT) - own.mean()


def _of_tokens(models: Sides[Model], exam: Compare) -> Matching:
    """Distributions over one vocabulary, at each token to predict."""

    def comparable(sides: Sides[Encoded]) -> Tensor:
        one, other = (_predicted(model, side) for model, side in zip(models, sides, strict=True))
        length = min(one.shape[1], other.shape[1])
        return _same_ids(one[:, :length], other[:, :length]).any(1)

    def loss(teacher: Tokens, student: Tokens) -> Tensor:
        return _divergence(*_common(teacher, student)) + _text_loss(teacher, student)

    def agreement(teacher: Tokens, student: Tokens) -> Tensor:
        return _same_class(*_common(teacher, student))

    asked: Sides[Ask] = Sides(*(partial(_tokens, model) for model in models))
    return Matching("tokens", asked, loss, agreement, exam=exam, comparable=comparable, apart=True)


def _tokens(model: Model, module: nn.Module, encoded: Encoded) -> Tokens:
    """The scores and labels of the tokens to predict."""
    inputs, named = batch_for(model, encoded)
    scores, labels = next_tokens(model, module, (inputs, named))
    return scores, labels, named.shape[1] - labels.shape[1]


def _predicted(model: Model, encoded: Encoded) -> Tensor:
    """The labels of the tokens that a model predicts: a causal one does not predict the first."""
    assert encoded.labels is not None
    return encoded.labels[:, model.generates == "causal" :]


def _same_ids(labels: Tensor, others: Tensor) -> Tensor:
    """Where both models predict the same token."""
    return (labels == others) & (labels != UNLABELLED)


def _common(teacher: Tokens, student: Tokens) -> Sides[Tensor]:
    """The scores (M, vocabulary) of both where they predict the same token at the same position."""
    start = max(teacher[2], student[2])
    one, labels, two, others = (part[:, start - side[2] :] for side in (teacher, student) for part in side[:2])
    length = min(labels.shape[1], others.shape[1])
    one, labels, two, others = (part[:, :length] for part in (one, labels, two, others))
    wanted = _same_ids(labels, others)
    size = min(one.shape[-1], two.shape[-1])  # some vocabularies are padded
    return Sides(widened(one[wanted][:, :size]), widened(two[wanted][:, :size]))


def _text_loss(_: Tokens | None, student: Tokens) -> Tensor:
    """The mean loss of the tokens to predict, whatever the teacher thinks of them."""
    scores, labels = student[:2]
    return F.cross_entropy(widened(scores).flatten(0, 1), labels.flatten(), ignore_index=UNLABELLED)


def _other_tokens(_: Tokens | None, student: Tokens) -> Tensor:
    """The share of the tokens to predict that the student would not write."""
    scores, labels = student[:2]
    wanted = labels != UNLABELLED
    return (scores[wanted].argmax(-1) != labels[wanted]).float().mean()


def _of_texts(models: Sides[Model], exam: Compare) -> Matching:
    """The texts themselves: passages, or answers that the teacher has written. The teacher says no more."""

    def comparable(sides: Sides[Encoded]) -> Tensor:
        return (_predicted(models.target, sides.target) != UNLABELLED).any(1)

    def agreement(_: None, student: Tokens) -> Tensor:
        return 1 - _other_tokens(_, student)

    asked: Sides[Ask] = Sides(lambda *_: None, partial(_tokens, models.target))
    return Matching("texts", asked, _text_loss, agreement, exam=exam, comparable=comparable, apart=True)
