"""Merged task vectors against peft's own merge of adapters, and against sums by hand."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from builders.loras import adapted, clip, llama, merged_change, read, saved
from tuneport.errors import TuneportError
from tuneport.task_vectors.low_rank import LowRank
from tuneport.task_vectors.vector import TaskVector, merge

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def vectors() -> list[TaskVector]:
    generator = torch.Generator().manual_seed(0)
    first = {"w": torch.randn(6, 5, generator=generator), "b": torch.randn(6, generator=generator)}
    return [TaskVector(first), TaskVector({"w": torch.randn(6, 5, generator=generator)})]


def test_a_sum_of_adapters_is_the_sum_of_what_peft_merges(tmp_path: Path) -> None:
    base = llama()
    models = [adapted(base, seed, target_modules=["q_proj", "down_proj"], r=seed) for seed in (2, 3)]
    read_ones = [read(saved(model, tmp_path / str(i)), base) for i, model in enumerate(models)]
    total = merge(read_ones, [0.5, 2.0])
    assert all(isinstance(total[name], LowRank) and total.spec(name).rank == 5 for name in total)
    changes = [merged_change(model, base) for model in models]
    for name in total:
        expected = 0.5 * changes[0][name] + 2.0 * changes[1][name]
        torch.testing.assert_close(total.dense(name), expected, atol=1e-5, rtol=1e-4)


def test_ties_equals_peft() -> None:
    """peft merges each factor by itself, with the roots of the weights; here A is the identity and B the change."""
    base = clip()
    width = base.config.hidden_size
    settings = peft.LoraConfig(r=width, lora_alpha=width, target_modules=["q_proj"])
    model = peft.get_peft_model(copy.deepcopy(base), settings)
    model.add_adapter("two", settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(torch.eye(width) if "lora_A" in name else noise)
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
    changes = [
        TaskVector({name: layer.get_delta_weight(adapter).detach() for name, layer in layers.items()})
        for adapter in ("default", "two")
    ]
    merged = merge(changes, [1.0, 0.5], rule="ties", density=0.4)
    model.add_weighted_adapter(["default", "two"], [1.0, 0.25], "both", combination_type="ties", density=0.4)
    for name, layer in layers.items():
        torch.testing.assert_close(layer.lora_B["both"].weight, merged.dense(name), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rule", ["sum", "ties", "dare", "dare-ties"])
def test_every_rule_at_full_density_on_one_vector_is_that_vector(rule: str) -> None:
    one, _ = vectors()
    found = merge([one], rule=rule, density=1.0)
    assert all(torch.equal(found.dense(name), one.dense(name)) for name in one)


def test_ties_by_hand() -> None:
    one = TaskVector({"w": torch.tensor([4.0, -3.0, 0.5, 0.1])})
    two = TaskVector({"w": torch.tensor([2.0, 5.0, 0.2, 0.3])})
    # half of each is kept: (4, -3, 0, 0) and (2, 5, 0, 0); signs by the sum: +, +; mean of those that agree
    assert merge([one, two], rule="ties", density=0.5).dense("w").tolist() == [3.0, 5.0, 0.0, 0.0]


def test_dare_keeps_a_share_and_its_expectation() -> None:
    one = TaskVector({"w": torch.ones(100, 100)})
    found = merge([one], rule="dare", density=0.25).dense("w")
    assert set(found.unique().tolist()) == {0.0, 4.0}
    # a binomial share of 10,000 entries: standard deviation 0.0043, ten of them cannot fail for this fixed seed
    assert abs(float((found > 0).float().mean()) - 0.25) < 0.043
    again = merge([one], rule="dare", density=0.25).dense("w")
    assert torch.equal(found, again)
    assert not torch.equal(found, merge([one], rule="dare", density=0.25, seed=1).dense("w"))


def test_a_tensor_that_only_one_vector_has() -> None:
    one, two = vectors()
    assert torch.equal(merge([one, two], [2.0, 1.0]).dense("b"), 2 * one["b"])
    assert torch.equal(merge([two, one], [1.0, 1.0], rule="ties", density=1.0).dense("b"), one["b"])


def test_bad_input() -> None:
    one, two = vectors()
    with pytest.raises(TuneportError, match="2 task vectors and 1 `weights`: give a weight for each vector"):
        merge([one, two], [1.0])
    with pytest.raises(
        TuneportError, match=r"1 of 1 shared tensors of two task vectors differ in shape: w \(6, 5\) vs"
    ):
        merge([one, TaskVector({"w": torch.zeros(3, 3)})], rule="dare")
