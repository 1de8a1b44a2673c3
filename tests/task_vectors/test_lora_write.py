"""Adapters against the real peft: what we write is what peft loads, and what has no place is named."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tuneport
from builders import toy
from builders.folders import FAMILIES, Zoo
from builders.loras import assert_same, clip, clip_loss, gpt2, images, outputs, read, seeded
from tuneport.errors import TuneportError
from tuneport.task_vectors.lora_format import write_adapter
from tuneport.task_vectors.lora_write import no_place, pack
from tuneport.task_vectors.low_rank import LowRank, as_dense
from tuneport.task_vectors.vector import TaskVector

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def test_full_fine_tune_as_an_adapter_of_chosen_rank(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    tuned = toy.finetuned(source)
    result = tuneport.transfer(source, tuned, target, images(), loss=clip_loss)
    with pytest.raises(TuneportError, match="not low-rank"):
        result.save(tmp_path / "none", as_="adapter")
    assert not (tmp_path / "none").exists()
    out = result.save(tmp_path / "out", as_="adapter", rank=4)
    record = json.loads((out / "tuneport.json").read_text())
    written = read(out, target)
    assert len(record["adapter"]["modules"]) == len(result.records)
    for item in record["adapter"]["modules"]:
        name = f"{item['module']}.weight"
        update = result.task_vector.dense(name).flatten(1).double()
        singular = torch.linalg.svdvals(update)
        optimal = float(singular[4:].square().sum() / singular.square().sum())
        error = float((written.dense(name).flatten(1).double() - update).square().sum() / singular.square().sum())
        assert item["rank"] == written.spec(name).rank == 4
        assert item["lost_energy"] == pytest.approx(optimal, rel=1e-4, abs=1e-9)
        assert error == pytest.approx(optimal, rel=1e-3, abs=1e-9)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(target), out).eval()
    changed = copy.deepcopy(target)
    changed.load_state_dict(dict(written.apply_to(target.state_dict())))
    batch = images()[0]
    torch.testing.assert_close(outputs(loaded, batch), outputs(changed, batch), atol=1e-5, rtol=1e-4)
    exact = result.save(tmp_path / "exact", as_="adapter", energy=1.0)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(target), exact).eval()
    torch.testing.assert_close(outputs(loaded, batch), outputs(result.apply(), batch), atol=1e-5, rtol=1e-4)
    ranks = {item["rank"] for item in json.loads((exact / "tuneport.json").read_text())["adapter"]["modules"]}
    assert len(ranks) > 1  # the pattern tables are needed
    for name in ("adapter_config.json", "adapter_model.safetensors", "README.md", "report.html", "tuneport.json"):
        assert (exact / name).is_file()
    assert "library_name: peft" in (exact / "README.md").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_every_family_load(family: str, zoo: Zoo, tmp_path: Path) -> None:
    """A full fine-tune, cut at nothing: peft's model is the target plus all that has a place in an adapter."""
    source, tuned, target = zoo.trio(family)
    result = tuneport.transfer(source, tuned, target, method="naive")
    out = result.save(tmp_path / "out", as_="adapter", energy=1.0)
    record = json.loads((out / "tuneport.json").read_text())
    assert record["options"]["energy"] == 1.0
    homeless = no_place(result.target.module, result.task_vector)
    stays = {item["tensor"] for item in record["not_transported"]}
    assert {result.target.weights.file_names[name] for name in homeless} <= stays
    vector = result.task_vector.subset(name for name in result.task_vector if name not in homeless)
    expected = dict(vector.apply_to(dict(result.target.module.named_parameters())))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(result.target.module), out).merge_and_unload()
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].detach(), atol=2e-5, rtol=1e-4)


def test_tensors_that_an_adapter_cannot_hold_are_listed(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    tuned = seeded(clip, 7)
    result = tuneport.transfer(source, tuned, target, method="naive", accept_unlikely=True)
    out = result.save(tmp_path / "out", as_="adapter", rank=2)
    reasons = {
        item["tensor"]: item["reason"] for item in json.loads((out / "tuneport.json").read_text())["not_transported"]
    }
    assert reasons["vision_model.embeddings.class_embedding"].startswith("a LoRA cannot hold a parameter of ")
    assert reasons["vision_model.post_layernorm.weight"] == "a LoRA cannot hold a parameter of LayerNorm"
    assert "vision_model.encoder.layers.0.mlp.fc1.weight" not in reasons
    tied = gpt2()
    assert no_place(tied, ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"]) == {
        "transformer.wte.weight": "it is tied to lm_head.weight; an adapter would change only one of them"
    }
    with pytest.raises(TuneportError, match="no update can be written as a LoRA"):
        pack(TaskVector({"transformer.ln_f.weight": torch.ones(16)}), tied, dict(tied.named_parameters()))


def test_attention_tied_weights_and_convolutions(tmp_path: Path) -> None:
    """Torch's attention, embeddings, names that end other names: what is written is what peft loads."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, 5)
            self.inner = nn.ModuleDict({"head": nn.Linear(8, 8)})

        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            return self.head(self.inner["head"](self.attention(x, x, x)[0]))

    module = seeded(Odd, 0)
    generator = torch.Generator().manual_seed(1)
    entries: dict[str, Any] = {
        name: LowRank(
            torch.randn(shape[0], rank, generator=generator), torch.randn(rank, shape[1], generator=generator)
        )
        for name, shape, rank in (
            ("words.weight", (11, 8), 2),
            ("attention.in_proj_weight", (24, 8), 3),
            ("head.weight", (5, 8), 1),
        )
    }
    for name in ("attention.in_proj_bias", "attention.out_proj.bias", "head.bias", "inner.head.bias"):
        entries[name] = torch.randn(dict(module.named_parameters())[name].shape, generator=generator)
    vector = TaskVector(entries)
    packed = pack(vector, module, dict(module.named_parameters()))
    assert packed.adapter.config["target_modules"] == r"words|attention|head"
    assert packed.adapter.config["bias"] == "all"
    folder = tmp_path / "odd"
    folder.mkdir()
    write_adapter(folder, packed.adapter)
    expected = copy.deepcopy(module)
    expected.load_state_dict(dict(vector.apply_to(module.state_dict())))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(module), folder).eval()
    ids = torch.randint(0, 11, (2, 6), generator=generator)
    torch.testing.assert_close(loaded(ids), expected(ids), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loaded.merge_and_unload()(ids), expected(ids), atol=1e-4, rtol=1e-4)
    assert no_place(module, ["attention.out_proj.weight"])["attention.out_proj.weight"].endswith("twice")
    again = read(folder, module)
    assert_same(
        again,
        {n: as_dense(e) for n, e in entries.items()}
        | {"attention.out_proj.weight": torch.zeros(8, 8), "inner.head.weight": torch.zeros(8, 8)},
    )


def test_a_rank_belongs_to_one_module_though_another_name_ends_like_it(tmp_path: Path) -> None:
    module = nn.ModuleDict({"fc": nn.Linear(6, 6), "inner": nn.ModuleDict({"fc": nn.Linear(6, 6)})})
    ranks = {"fc.weight": 2, "inner.fc.weight": 4}
    generator = torch.Generator().manual_seed(0)
    vector = TaskVector(
        {
            name: LowRank(torch.randn(6, rank, generator=generator), torch.randn(rank, 6, generator=generator))
            for name, rank in ranks.items()
        }
    )
    packed = pack(vector, module, dict(module.named_parameters()))
    write_adapter(tmp_path, packed.adapter)
    config = peft.LoraConfig.from_pretrained(tmp_path)
    model = peft.get_peft_model(copy.deepcopy(module), config)
    found = {name: part.r["default"] for name, part in model.named_modules() if hasattr(part, "lora_A")}
    assert found == {"base_model.model.fc": 2, "base_model.model.inner.fc": 4}  # peft's own reading of the patterns
    written = read(tmp_path, module)
    assert {name: written.spec(name).rank for name in written} == ranks
