"""Task vectors of whole models: extracted, applied, and the same in whatever form a fine-tune comes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from builders.folders import FAMILIES, SAMPLES, Zoo, edit_weights, load, same
from builders.runs import prepare
from builders.texts import gpt_tokenizer, make, write
from tuneport.errors import CheckpointError
from tuneport.models.change import change_of, opened
from tuneport.models.open import open_model
from tuneport.models.weights import finetuned
from tuneport.pipeline.arithmetic import apply, extract
from tuneport.pipeline.transfer import transfer
from tuneport.task_vectors.vector import TaskVector, load_task_vector, save_task_vector


@pytest.fixture(scope="module")
def ported(zoo: Zoo) -> TaskVector:
    """What arrives of a fine-tune that comes as a folder."""
    return transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=SAMPLES).task_vector


class TestTaskVectors:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_extract_and_apply_give_the_fine_tune_back(self, zoo: Zoo, tmp_path: Path, family: str) -> None:
        base, tuned = zoo[f"{family}-base"], zoo[f"{family}-tuned"]
        save_task_vector(tmp_path / "tau.safetensors", extract(base, tuned))
        apply(load_task_vector(tmp_path / "tau.safetensors"), base, tmp_path / "again")
        first, second = load_file(tmp_path / "again" / "model.safetensors"), load_file(tuned / "model.safetensors")
        assert first.keys() == second.keys()
        for name in second:
            # (b - a) + a is b up to one rounding of the difference
            torch.testing.assert_close(first[name], second[name], atol=1e-7, rtol=2e-7)
        assert (tmp_path / "again" / "preprocessor_config.json").is_file()
        torch.testing.assert_close(
            outputs_at(load(tmp_path / "again"), 16), outputs_at(load(tuned), 16), atol=1e-5, rtol=1e-5
        )

    def test_a_fine_tune_on_a_coarse_grid_comes_back_bit_by_bit(self, zoo: Zoo, tmp_path: Path) -> None:
        """Where the difference itself is exact in float32, so is the round trip."""
        folders = [Path(shutil.copytree(path, tmp_path / path.name)) for path in zoo.trio("vit")[:2]]
        for folder in folders:
            edit_weights(folder, lambda t: t.update({name: (x * 1024).round() / 1024 for name, x in t.items()}))
        apply(extract(*folders), folders[0], tmp_path / "again")
        first, second = (load_file(path / "model.safetensors") for path in (tmp_path / "again", folders[1]))
        assert first.keys() == second.keys() != set()
        assert all(torch.equal(first[name], second[name]) for name in second)

    @pytest.mark.parametrize("form", ["file", "vector", "module", "model"])
    def test_the_fine_tune_may_come_in_any_form(self, zoo: Zoo, ported: TaskVector, tmp_path: Path, form: str) -> None:
        base, tuned, target = zoo.trio("vit")
        given: Any = {
            "vector": lambda: extract(base, tuned),
            "module": lambda: load(tuned),
            "model": lambda: open_model(tuned),
            "file": lambda: tmp_path / "tau.safetensors",
        }[form]()
        if form == "file":
            save_task_vector(given, extract(base, tuned))
        assert same(transfer(base, given, target, zoo.data, scale=1, samples=SAMPLES).task_vector, ported)

    def test_a_live_model_and_its_folder_give_the_same_task_vector(self, zoo: Zoo) -> None:
        base, tuned, target = zoo.trio("vit")
        job = prepare(base, tuned, target, zoo.data, samples=SAMPLES, head_fit="none")
        live = prepare(load(base), load(tuned), load(target), signals="naive")
        assert same(job.task_vector, live.task_vector)
        naive = transfer(base, tuned, target, method="naive")
        alive = transfer(load(base), load(tuned), load(target), method="naive")
        assert same(naive.task_vector, alive.task_vector)
        assert naive.not_transported == alive.not_transported


def outputs_at(module: Any, size: int) -> Tensor:
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))
    for part in ("vision_model", "vit", "dinov2"):
        module = getattr(module, part, module)
    with torch.no_grad():
        return module(pixels).last_hidden_state


@pytest.mark.parametrize(
    ("options", "one"),
    [
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, True),
        ({"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"target_modules": ["q_proj"]}, True),
        ({"target_modules": ["q_proj"], "save_embedding_layers": True}, True),  # peft does, if tokens were added
    ],
)
def test_an_adapter_that_unties_tables_is_refused(tmp_path: Path, options: dict[str, Any], one: bool) -> None:
    """What peft answers is what the source answers with the change, or the change is not accepted."""
    peft = pytest.importorskip("peft")
    tokenizer = gpt_tokenizer(300)
    base = write(tmp_path / "base", make("llama-tied", vocab_size=300), tokenizer)
    options, saving = dict(options), {}
    if "save_embedding_layers" in options:
        saving["save_embedding_layers"] = options.pop("save_embedding_layers")
    model, generator = (
        peft.get_peft_model(load(base), peft.LoraConfig(r=2, **options)),
        torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                seed = 1 if one and "modules_to_save" in name else None  # one change for both tables
                drawn = generator if seed is None else torch.Generator().manual_seed(seed)
                parameter += 0.1 * torch.randn(parameter.shape, generator=drawn)
    model.save_pretrained(tmp_path / "lora", **saving)
    source, ids = open_model(base), torch.arange(8)[None]
    adapter = opened(tmp_path / "lora")
    if not one:
        with pytest.raises(CheckpointError, match="share one table") as error:
            change_of(source, adapter)
        assert 'exclude=["model.embed_tokens.weight"]' in str(error.value)
        assert all("q_proj" in name for name in change_of(source, adapter, ["model.embed_tokens.weight"]))
        with pytest.raises(CheckpointError, match="share one table"):
            extract(base, tmp_path / "lora")
        assert all("q_proj" in name for name in extract(base, tmp_path / "lora", exclude=["model.embed_tokens.weight"]))
        return
    apply(extract(base, tmp_path / "lora"), base, tmp_path / "whole")
    torch.testing.assert_close(load(tmp_path / "whole")(ids).logits, model.eval()(ids).logits, atol=1e-5, rtol=1e-5)
    with torch.no_grad(), finetuned(source, change_of(source, adapter)):
        found = source.module(ids).logits
        # sums in another order
        torch.testing.assert_close(found, model.eval()(ids).logits, atol=1e-5, rtol=1e-5)
