"""Answers to one question, whose shared tokens a decoder reads once, against whole passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from tuneport.data.dataset import UNLABELLED
from tuneport.models.families.huggingface_generation import answer_logits

SHARED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SHARED, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**SHARED, num_key_value_heads=2),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SHARED,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "mistral": lambda: transformers.MistralConfig(**SHARED, num_key_value_heads=2, sliding_window=5),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
COUNTS = (3, 1, 2)


def model(name: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def questions() -> tuple[dict[str, Tensor], Tensor]:
    """Rows of three questions of 12, 5 and 9 tokens, with answers of 1 to 3 tokens each, padded on the right."""
    generator = torch.Generator().manual_seed(1)
    rows, lengths = [], []
    for length, count in zip((12, 5, 9), COUNTS, strict=True):
        asked = torch.randint(1, 64, (length,), generator=generator).tolist()
        for answer in range(count):
            said = torch.randint(1, 64, (1 + (answer + length) % 4,), generator=generator).tolist()
            rows.append(asked + said)
            lengths.append(length)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    labels = ids.masked_fill((mask == 0) | (torch.arange(width) < torch.tensor(lengths)[:, None]), UNLABELLED)
    return {"input_ids": ids, "attention_mask": mask}, labels


def losses(scores: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(scores.transpose(1, 2), labels, ignore_index=UNLABELLED, reduction="none")
    return each.sum(1)


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_of_whole_passes(name: str) -> None:
    module, (batch, labels) = model(name), questions()
    with torch.no_grad():
        whole = losses(module(**batch).logits[:, :-1], labels[:, 1:])
        found = answer_logits(module, batch, labels, COUNTS)
    assert found is not None
    torch.testing.assert_close(losses(*found), whole, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_whole_passes() -> None:
    module, (batch, labels) = model("llama").double(), questions()
    losses(module(**batch).logits[:, :-1], labels[:, 1:]).sum().backward()
    whole = {name: weight.grad.clone() for name, weight in module.named_parameters()}
    module.zero_grad()
    found = answer_logits(module, batch, labels, COUNTS)
    assert found is not None
    losses(*found).sum().backward()
    for name, weight in module.named_parameters():
        torch.testing.assert_close(weight.grad, whole[name], rtol=1e-3, atol=1e-5)  # norms are in float32


def test_what_answers_share_is_read_once() -> None:
    module, (batch, labels) = model("llama"), questions()
    seen: list[int] = []
    module.get_input_embeddings().register_forward_hook(lambda _m, given, _o: seen.append(given[0].numel()))
    with torch.no_grad():
        answer_logits(module, batch, labels, COUNTS)
    assert seen == [3 * 16], "the questions, and behind them the tokens of each answer but its last"


def test_padding_has_no_positions_beyond_those_of_the_model() -> None:
    """The longest question has a short answer, and another question a long one."""
    batch, labels = questions()
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=labels.shape[1])
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    rows, longer = torch.tensor([0, 0, 3, 3]), torch.full((4, labels.shape[1]), UNLABELLED)
    ids, mask = batch["input_ids"][rows], batch["attention_mask"][rows]
    ids[2:, 5:], mask[2:] = torch.arange(2 * (ids.shape[1] - 5)).view(2, -1) % 63 + 1, 1
    ids[1, 12] = ids[0, 12] % 63 + 1
    longer[:2, 12:13], longer[2:, 5:] = ids[:2, 12:13], ids[2:, 5:]
    batch = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        whole = losses(module(**batch).logits[:, :-1], longer[:, 1:])
        found = answer_logits(module, batch, longer, (2, 2))
    assert found is not None
    torch.testing.assert_close(losses(*found), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fault", ["nothing shared", "padded on the left", "other inputs", "no positions", "stretched", "recurrent"]
)
def test_rows_and_models_that_it_cannot_read(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, (batch, labels) = model("llama"), questions()
    if fault == "nothing shared":
        batch["input_ids"][0, 0] += 1
    elif fault == "padded on the left":
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    elif fault == "other inputs":
        batch["token_type_ids"] = torch.zeros_like(labels)
    elif fault == "stretched":
        module.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    elif fault == "recurrent":
        module.config.layer_types = ["linear_attention", "full_attention"]
    else:
        monkeypatch.setattr("tuneport.models.families.huggingface_generation.NEEDED", {"positions"})
    with torch.no_grad():
        assert answer_logits(module, batch, labels, COUNTS) is None
