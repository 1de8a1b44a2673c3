"""A distillation with both models divided over two processes: half the memory, the same adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from builders.chats import chat_tokenizer
from builders.commands import Run, assert_refused
from builders.lessons import TEXTS
from builders.processes import run_ranks
from builders.texts import Size, make, write, write_rows
from tuneport.io.output import RECORD

SIZE = Size(width=32, depth=16, heads=4, groups=4, head_width=8, hidden=64)
# a command that writes the most bytes of parameters, gradients and optimizer state that were alive at once
MEASURED = """
import gc, os, sys
from pathlib import Path
import torch
from torch import nn
from builders.exams import shorten_exams
from tuneport import cli
torch.set_num_threads(1)
shorten_exams()
gc.collect()
gc.freeze()  # to look at few objects
_, place, *words = sys.argv
most, optimizers = 0, []

def sample(*_):
    global most
    gc.collect()  # what is out of reach is not alive, whenever it is freed
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    held = [t for t in tensors if isinstance(t, nn.Parameter)]
    held += [each.grad for each in held if each.grad is not None]
    held += [value for one in optimizers for state in one.state.values() for value in state.values()]
    held = [t.to_local() if hasattr(t, "to_local") else t for t in held]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held if t.device.type != "meta"}
    most = max(most, sum(held.values()))

def watch(module, given, found):
    if getattr(getattr(module, "self_attn", None), "layer_idx", 0) == 8 and found.shape[1] > 1:
        sample()
        if found.requires_grad:
            found.register_hook(sample)

def step(self, closure=None, take=torch.optim.AdamW.step):
    optimizers[:] = [self]
    sample()
    take(self)
    sample()

torch.optim.AdamW.step = step
nn.modules.module.register_module_forward_hook(watch)
sys.argv = ["tuneport", *words]
try:
    cli.main()
except SystemExit as left:
    assert not left.code
Path(place, os.environ["RANK"]).write_text(str(most))
"""


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    place = tmp_path_factory.mktemp("deep")
    tokenizer = chat_tokenizer(None)
    more = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    models = [
        write(place / str(seed), make("llama", Size(**{**vars(SIZE), "seed": seed}), **more), tokenizer)
        for seed in (0, 1)
    ]
    data = write_rows(place / "texts.jsonl", [{"text": text} for text in TEXTS[:16]])
    return ["distill", "--finetuned", models[0], "--target", models[1], "--data", data, "--lora", 2, "--steps", 2]


def test_a_sharded_distillation_takes_half_the_memory(lesson: list[Any], tmp_path: Path) -> None:
    """All weights but those of the blocks that run are in halves; the LoRA, its gradients and moments too."""
    found = []
    for count in (1, 2):
        place, more = tmp_path / str(count), ["--shard"] if count > 1 else []
        place.mkdir()
        done = run_ranks(MEASURED, count, str(place), *map(str, lesson), "--out", str(place / "out"), *more)
        assert [each.code for each in done] == [0] * count, [each.err for each in done]
        found.append([int((place / str(rank)).read_text()) for rank in range(count)])
    assert max(found[1]) <= 0.6 * found[0][0]
    records = [json.loads((tmp_path / name / "out" / RECORD).read_text()) for name in ("1", "2")]
    curves = [record["distilled"]["curve"] for record in records]
    assert len(curves[0]) == 3
    for first, second in zip(*curves, strict=True):
        known = {key: value for key, value in first.items() if value is not None}
        assert {key: second[key] for key in known} == pytest.approx(known, rel=1e-5)
    one, two = (load_file(tmp_path / name / "out" / "adapter_model.safetensors") for name in ("1", "2"))
    assert one.keys() == two.keys()
    assert any(bool(tensor.any()) for name, tensor in one.items() if "lora_B" in name)
    for name, tensor in one.items():
        assert float((two[name] - tensor).norm()) <= 1e-4 * float(tensor.norm())


def test_what_cannot_be_sharded_is_refused(run: Run, lesson: list[Any], tmp_path: Path) -> None:
    out = ["--out", tmp_path / "out"]
    assert_refused(run(*lesson, *out, "--shard"), 2, "several processes", "torchrun")
    assert_refused(run(*lesson[:7], *out, "--shard"), 2, "--lora")
    assert_refused(run(*lesson, *out, "--shard", "--synthetic", 8), 2, "--generator")
