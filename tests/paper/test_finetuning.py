"""Fine-tuning on a few samples: the schedule by hand, nothing given is changed, and it learns."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from builders import texts
from builders.folders import Zoo
from paper.finetune import finetune, prepare_training, prepared
from tuneport.data.dataset import Dataset, align_labels
from tuneport.data.formats import read_plain
from tuneport.errors import TuneportError
from tuneport.models.base import Model
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model
from tuneport.training.loop import Schedule, fast_products

CPU = torch.device("cpu")


@pytest.fixture
def setting(zoo: Zoo) -> tuple[Model, Head, Dataset]:
    model = open_model(zoo["clip_vision-base"], device=CPU)
    data = read_plain(zoo.data, "train").subset(range(24))
    return model, choose_head(model, None, data), data


def last(model: Model, head: Head, data: Dataset, schedule: Schedule) -> nn.Module:
    *_, (step, module) = finetune(model, head, data, schedule)
    assert step == schedule.steps
    return module


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_schedule_against_the_formula() -> None:
    schedule = Schedule(steps=20, learning_rate=2.0)
    rates = [schedule.rate(step) for step in range(20)]
    assert rates[:2] == [1.0, 2.0]  # a tenth of the steps to warm up
    assert rates[2:] == pytest.approx([1 + math.cos(math.pi * step / 18) for step in range(18)])
    assert rates[-1] > 0


@pytest.mark.parametrize("steps", [1, 9])
def test_short_runs_have_no_warm_up(steps: int) -> None:
    schedule = Schedule(steps=steps, learning_rate=0.5)
    assert schedule.rate(0) == 0.5
    assert all(schedule.rate(step + 1) < schedule.rate(step) for step in range(steps - 1))


def test_zero_steps_are_refused(setting: tuple[Model, Head, Dataset]) -> None:
    with pytest.raises(TuneportError, match="at least one step, got 0"):
        list(finetune(*setting, Schedule(steps=0)))


def test_diverging_run_is_an_error(setting: tuple[Model, Head, Dataset]) -> None:
    expected = (
        f"the fine-tuning of {setting[0].name} on {setting[2].name} has diverged: the loss is NaN or infinite at "
        "step 2 of 3. Lower `learning_rate`, which is 1e+30."
    )
    with pytest.raises(TuneportError) as caught:
        list(finetune(*setting, Schedule(steps=3, learning_rate=1e30)))
    assert str(caught.value) == expected
    seen: list[int] = []
    with pytest.raises(TuneportError, match="at step 2 of 99"):
        list(finetune(*setting, Schedule(steps=99, learning_rate=1e30), progress=seen.append, check_every=4))
    assert len(seen) == 3, "a long run stops at the fourth step"
    with pytest.raises(TuneportError, match="holds NaN or infinite values after step 1 of 1"):
        list(finetune(*setting, Schedule(steps=1, learning_rate=1e30, weight_decay=1e10)))


def test_one_step_equals_adamw(setting: tuple[Model, Head, Dataset]) -> None:
    """Against PyTorch, written down plainly: a set smaller than a batch is taken whole."""
    model, head, data = setting
    found = state(last(model, head, data, Schedule(steps=1, learning_rate=1e-3)))
    other = open_model(str(model.weights.folder), device=CPU)
    inputs, labels = prepared(other, data), torch.as_tensor(align_labels(data, head.classes).labels)
    module = other.module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)
    F.cross_entropy(head.scores(other, module, inputs), labels).backward()
    optimizer.step()
    for name, tensor in module.state_dict().items():
        if not name.endswith("k_proj.bias"):  # softmax is blind to it: its gradient is rounding, which Adam blows up
            assert torch.allclose(found[name], tensor, atol=2e-6), name


def test_same_seed_gives_same_bits(setting: tuple[Model, Head, Dataset]) -> None:
    model, head, data = setting
    one, two, other = (
        state(last(model, head, data, Schedule(steps=4, batch_size=7, learning_rate=1e-3, seed=seed)))
        for seed in (3, 3, 4)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_dropout_follows_the_seed_and_keeps_the_global_generators(tmp_path: Path) -> None:
    """BERT drops a tenth while it trains: a seed gives the same bits, another one others."""
    words = texts.bert_tokenizer()
    model = open_model(texts.write(tmp_path / "bert", texts.make("bert"), words))
    for part in model.module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.5
    data = Dataset(inputs=["the old cat", "a river"], labels=np.array([0, 1]), classes=("0", "1"))
    head = choose_head(model, None, data)
    found = []
    for seed, noise in ((3, 1), (3, 2), (4, 1)):
        torch.manual_seed(noise)
        state = torch.get_rng_state()
        *_, (_, module) = finetune(model, head, data, Schedule(3, learning_rate=1e-2, seed=seed))
        assert torch.equal(torch.get_rng_state(), state)
        found.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_given_model_does_not_change(setting: tuple[Model, Head, Dataset]) -> None:
    model, head, data = setting
    assert head.class_embeds is not None
    before, embeds = state(model.module), head.class_embeds.clone()
    flags = [parameter.requires_grad for parameter in model.module.parameters()]
    module = last(model, head, data, Schedule(steps=3, learning_rate=1e-2))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.module.state_dict().items())
    assert [parameter.requires_grad for parameter in model.module.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.module.parameters())
    assert not model.module.training
    assert torch.equal(head.class_embeds, embeds)  # the head is frozen
    assert module is not model.module
    assert not module.training  # ready to be evaluated


def test_text_towers_stay_frozen(zoo: Zoo) -> None:
    model = open_model(zoo["clip-base"], device=CPU)
    data = read_plain(zoo.data, "train").subset(range(6))
    head = choose_head(model, None, data)
    before = state(model.module)
    after = state(last(model, head, data, Schedule(steps=2, learning_rate=1e-2)))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith(("vision_model.", "visual_projection.")) for name in moved)


def test_the_loss_falls(setting: tuple[Model, Head, Dataset]) -> None:
    model, head, data = setting
    inputs, labels = prepared(model, data), torch.as_tensor(align_labels(data, head.classes).labels)

    def loss(module: nn.Module) -> float:
        with torch.inference_mode():
            return float(F.cross_entropy(head.scores(model, module, inputs), labels))

    steps = {}
    for step, module in finetune(model, head, data, Schedule(steps=40, learning_rate=3e-3), at=(1, 10)):
        steps[step] = loss(module)
    assert list(steps) == [1, 10, 40]
    assert steps[40] < steps[10] < loss(model.module)
    assert steps[40] < 0.3 * loss(model.module)


def test_every_epoch_sees_every_sample_once(
    setting: tuple[Model, Head, Dataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[float]] = []
    plain = Head.scores

    def scores(self: Head, model: Model, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(batch["pixel_values"].flatten(1).double().sum(1).tolist())
        return plain(self, model, module, batch)

    monkeypatch.setattr(Head, "scores", scores)
    model, head, data = setting
    last(model, head, data, Schedule(steps=6, batch_size=8))
    assert [len(batch) for batch in seen] == [8] * 6
    first, second = (sorted(value for batch in seen[start : start + 3] for value in batch) for start in (0, 3))
    assert first == second
    assert len(set(first)) == 24
    assert seen[:3] != seen[3:]


def test_an_encoder_decoder_learns_to_write_the_words_for_the_labels(tmp_path: Path) -> None:
    """The first loss is that of transformers for the whole batch, and the last is lower."""
    plain = texts.make("t5", texts.Size(depth=1), dropout_rate=0.0)
    folder = texts.write(tmp_path / "t5", plain, texts.t5_tokenizer())
    rows = [{"text": text, "label": label} for text, label in (("the old cat", "dog"), ("a river town", "winter"))]
    data = texts.write_rows(tmp_path / "rows.jsonl", [{**row, "split": "train"} for row in rows * 4])
    schedule = Schedule(steps=12, batch_size=8, learning_rate=1e-2, warmup=0)
    training = prepare_training(folder, data, schedule, device="cpu")
    assert training.head is None
    losses: list[torch.Tensor] = []
    *_, (_, module) = finetune(training.model, None, training.train, schedule, log=losses.append)
    words = texts.t5_tokenizer()
    inputs, wanted = (words([row[key] for row in rows], return_tensors="pt", padding=True) for key in ("text", "label"))
    labels = wanted["input_ids"].masked_fill(wanted["attention_mask"] == 0, -100)
    with torch.no_grad():
        expected = plain.eval()(**inputs, labels=labels).loss
    torch.testing.assert_close(losses[0].detach(), expected, rtol=1e-4, atol=1e-5)
    assert float(losses[-1]) < 0.9 * float(losses[0])
    assert not torch.equal(module.state_dict()["shared.weight"], plain.state_dict()["shared.weight"])


def test_only_a_gpu_multiplies_in_tf32_and_only_in_its_steps() -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    seen = []
    for name in ("cuda", "cpu"):
        with fast_products(torch.device(name)):
            seen.append(torch.get_float32_matmul_precision())
    assert seen == ["high", "highest"]
    with pytest.raises(ZeroDivisionError), fast_products(torch.device("cuda")):
        _ = 1 // 0
    assert torch.get_float32_matmul_precision() == "highest"
