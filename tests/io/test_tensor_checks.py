"""Checks of weights: what is not finite and what does not fit is collected and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from builders.weights import error_of, many_kinds
from tuneport.io.checkpoint import open_checkpoint, write_checkpoint
from tuneport.io.output import new_folder
from tuneport.io.tensors import check_finite, same_structure


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return many_kinds()


def test_check_finite(tensors: dict[str, torch.Tensor]) -> None:
    check_finite(tensors)
    tensors["half"][1] = torch.inf
    tensors["block.2.bias"][0] = torch.nan
    assert error_of(lambda: check_finite(tensors)) == (
        "2 of 8 tensors of the model hold NaN or infinite values: block.2.bias, half. "
        "Use a checkpoint from before training diverged."
    )
    check_finite(tensors, names=["scalar", "mask"])
    assert "1 of 1 tensors" in error_of(lambda: check_finite(tensors, ["half"]))


def test_same_structure_error_texts(tmp_path: Path) -> None:
    base = {f"layer.{i}": torch.zeros(1) for i in range(3)} | {"head.weight": torch.zeros(4, 2)}
    same_structure(base, {name: tensor + 1 for name, tensor in base.items()})
    finetuned = base | {"head.weight": torch.zeros(3, 2)}
    for name, state in (("base", base), ("ft", finetuned)):
        with new_folder(tmp_path / name) as folder:
            write_checkpoint(folder, state)
    opened = [open_checkpoint(tmp_path / name) for name in ("base", "ft")]
    assert error_of(lambda: same_structure(*opened)) == (
        f"1 of 4 tensors of {tmp_path}/ft/ differ in shape from {tmp_path}/base/: "
        'head.weight (3, 2) vs (4, 2). Exclude them with `exclude=["head.*"]`.'
    )
    same_structure(*opened, exclude=["head.*"])


def test_same_structure_collects_everything() -> None:
    base = {"a.w": torch.zeros(1), "b.w": torch.zeros(2), "ids": torch.arange(3)}
    finetuned = {"b.w": torch.zeros(3), "c": torch.zeros(1), "count": torch.tensor(1)}
    assert error_of(lambda: same_structure(base, finetuned)) == (
        "1 of 3 tensors of the fine-tuned model differ in shape from the base: b.w (3,) vs (2,). "
        "1 of 3 tensors of the fine-tuned model are not in the base: c. "
        "1 of 3 tensors of the base are not in the fine-tuned model: a.w. "
        'Exclude them with `exclude=["a.*", "b.*", "c"]`.'
    )
    many = {f"block.{i}.w": torch.zeros(1) for i in range(12)}
    text = error_of(lambda: same_structure({}, many))
    assert text.startswith("12 of 12 tensors of the fine-tuned model are not in the base: block.0.w, block.1.w,")
    assert text.endswith("block.2.w, ... and 9 more. Check that the fine-tuned model was fine-tuned from the base.")


def test_vocabularies_of_different_length() -> None:
    base = {"embed": torch.zeros(300, 4), "head": torch.zeros(300, 4), "w": torch.zeros(4, 4)}
    padded = {"embed": torch.zeros(320, 4), "head": torch.zeros(320, 4), "w": torch.zeros(4, 4)}
    assert error_of(lambda: same_structure(base, padded)) == (
        "2 of 3 tensors of the fine-tuned model differ in shape from the base: embed (320, 4) vs (300, 4), "
        "head (320, 4) vs (300, 4). If these are vocabularies of 320 and 300 entries, and one of them is padded, "
        'resize one with resize_token_embeddings. Exclude them with `exclude=["embed", "head"]`.'
    )
    assert "vocabularies" not in error_of(lambda: same_structure(base, {**base, "w": torch.zeros(5, 4)}))


def test_long_names_take_neither_pages_nor_hours() -> None:
    """Prefixes of a name of a million parts, joined one after the other, would have 10^12 characters."""
    names = ["n" * 10**5, *(f"{start}.{'.'.join('a' * 10**6)}" for start in "bcde")]
    base = {f"layer.{index}.weight": torch.ones(1) for index in range(20)}
    message = error_of(lambda: same_structure(base, {**base, **dict.fromkeys(names, torch.ones(1))}))
    assert "5 of 25 tensors of the fine-tuned model are not in the base" in message
    assert len(message) < 2000
    message = error_of(lambda: same_structure(base, {**base, names[0]: torch.ones(1)}))
    assert message.endswith("Check that the fine-tuned model was fine-tuned from the base.")
