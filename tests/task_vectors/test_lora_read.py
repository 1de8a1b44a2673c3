"""LoRAs against the real peft: what we read is what peft merges."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from builders.loras import (
    MODELS,
    TARGETS,
    WithAttention,
    adapted,
    assert_same,
    clip,
    gpt2,
    llama,
    merged_change,
    read,
    saved,
    seeded,
    vit,
)
from tuneport import transfer
from tuneport.errors import CheckpointError
from tuneport.models.open import describe_module
from tuneport.task_vectors.lora_format import open_adapter
from tuneport.task_vectors.lora_read import renaming, task_vector_of
from tuneport.task_vectors.low_rank import LowRank
from tuneport.task_vectors.vector import TaskVector

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def peft_deltas(model: Any) -> dict[str, Tensor]:
    """What peft itself says that each adapted weight changes by."""
    return {
        f"{name.removeprefix('base_model.model.')}.weight": part.get_delta_weight("default").detach()
        for name, part in model.named_modules()
        if hasattr(part, "get_delta_weight")
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "rank pattern": {"rank_pattern": {"v_proj": 5, "v": 5, "c_proj": 2, "fc1": 1}},
    "patterns with anchors": {
        "rank_pattern": {r"^.*\.0\..*": 2},
        "alpha_pattern": {r"[a-z_.]*layers\.1\..*": 7, "q_proj": 11, "q": 11, "c_attn": 13},
        "use_rslora": True,
    },
    "lora bias": {"lora_bias": True},
    "biases": {"bias": "lora_only"},
    "all biases": {"bias": "all"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("family", MODELS)
def test_reading_equals_peft(family: str, option: str, tmp_path: Path) -> None:
    if option == "lora bias" and family in ("llama", "t5"):
        pytest.skip("its layers have no bias, and peft cannot merge")
    base = MODELS[family]()
    model = adapted(base, target_modules=TARGETS[family], **OPTIONS[option])
    vector = read(saved(model, tmp_path / "lora"), base)
    deltas = peft_deltas(model)
    assert deltas
    for name, delta in deltas.items():
        assert isinstance(vector[name], LowRank)
        torch.testing.assert_close(vector.dense(name), delta, atol=1e-6, rtol=1e-6)
        assert vector.spec(name).rank == vector[name].rank
        assert vector.spec(name).shape == vector[name].shape == tuple(delta.shape)
    assert_same(vector, merged_change(model, base), 2e-6)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("which", ["all-linear", "regex"])
def test_every_form_of_target_modules(family: str, which: str, tmp_path: Path) -> None:
    base = MODELS[family]()
    target = "all-linear" if which == "all-linear" else rf".*\.1\..*({'|'.join(TARGETS[family])})"
    model = adapted(base, target_modules=target)
    vector = read(saved(model, tmp_path / "lora"), base)
    assert set(vector) == set(peft_deltas(model))
    assert_same(vector, merged_change(model, base), 2e-6)


@pytest.mark.parametrize("family", ["clip", "gpt2", "llama"])
def test_dora_is_read_exactly_as_a_dense_change(family: str, tmp_path: Path) -> None:
    base = MODELS[family]()
    more = ["patch_embedding"] if family == "clip" else []
    model = adapted(base, target_modules=[*TARGETS[family], *more], use_dora=True)
    vector = read(saved(model, tmp_path / "lora"), base)
    assert all(vector.spec(name).rank is None for name in vector)
    assert_same(vector, merged_change(model, base), 2e-6)


def test_whole_modules_convolutions_and_embeddings(tmp_path: Path) -> None:
    base = clip()
    options = {"target_modules": ["q_proj", "patch_embedding"], "modules_to_save": ["visual_projection", "layer_norm1"]}
    model = adapted(base, **options, bias="all")
    vector = read(saved(model, tmp_path / "clip"), base)
    patch = vector["vision_model.embeddings.patch_embedding.weight"]
    assert isinstance(patch, LowRank)
    assert patch.in_factor.shape == (3, 3, 8, 8)
    assert vector.spec("visual_projection.weight").rank is None
    assert_same(vector, merged_change(model, base), 2e-6)
    base = llama()
    model = adapted(base, target_modules=["embed_tokens", "q_proj"])
    vector = read(saved(model, tmp_path / "llama"), base)
    assert isinstance(vector["model.embed_tokens.weight"], LowRank)
    assert_same(vector, merged_change(model, base), 2e-6)


def test_bias_without_weight_change_is_a_layer_of_rank_0(tmp_path: Path) -> None:
    base = clip()
    vector = read(saved(adapted(base, target_modules=["q_proj"], bias="all"), tmp_path / "lora"), base)
    alone = vector["vision_model.encoder.layers.0.mlp.fc1.weight"]
    assert isinstance(alone, LowRank)
    assert (alone.rank, alone.norm(), bool(alone.dense().any())) == (0, 0.0, False)


def test_multihead_attention(tmp_path: Path) -> None:
    """peft counts its output projection twice, so that part is read only where it is zero."""
    base = seeded(WithAttention, 0)
    model = adapted(base, target_modules=["attention", "head"])
    with pytest.raises(CheckpointError, match=r"1 parts .* attention.out_proj \(peft applies a LoRA .* twice: merge"):
        read(model, base)
    with torch.no_grad():
        model.base_model.model.attention.base_layer.out_proj.lora_B["default"].weight.zero_()
    vector = read(saved(model, tmp_path / "lora"), base)
    assert {"attention.in_proj_weight", "head.weight"} == set(vector)
    assert_same(vector, merged_change(model, base), 2e-6)


def test_file_names_of_modules(tmp_path: Path) -> None:
    """An adapter made when live names were the names in the files (transformers 4) reads the same."""
    from safetensors.torch import load_file, save_file

    base = vit()
    names = describe_module(base).weights.file_names
    folder = saved(adapted(base, target_modules=["q_proj", "fc1"]), tmp_path / "lora")
    expected = TaskVector(dict(read(folder, base)))
    file = folder / "adapter_model.safetensors"
    renamed = {}
    for key, tensor in load_file(file).items():
        module, _, rest = key.removeprefix("base_model.model.").partition(".lora_")
        stored = names[f"{module}.weight"].removesuffix(".weight")
        assert stored != module
        renamed[f"base_model.model.{stored}.lora_{rest}"] = tensor
    assert renamed
    save_file(renamed, file)
    other = {stored: live for live, stored in names.items()}
    vector = task_vector_of(open_adapter(folder), dict(base.named_parameters()), other_names=other)
    assert set(vector) == set(expected) != set()
    assert all(torch.equal(vector.dense(name), expected.dense(name)) for name in expected)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"r": "three"}, {}, r"rank or alpha in adapter_config.json cannot be read"),
        ({"rank_pattern": {"(": 2}}, {}, r"rank or alpha in adapter_config.json cannot be read"),
        ({}, {"q_proj.lora_A.weight": torch.ones(3)}, r"factors \(3,\) and \(16, 3\)"),
        ({}, {"q_proj.lora_A.weight": None}, r"one of its two factors is missing"),
        ({}, {"q_proj.lora_B.weight": torch.full((16, 3), torch.nan)}, r"hold NaN or infinite values"),
        ({}, {"q_proj.lora_B.weight": torch.ones(16, 3, dtype=torch.int8)}, r"are quantised"),
        ({}, {"q_proj.lora_magnitude_vector": torch.ones(5)}, r"its magnitudes do not fit"),
        ({"use_dora": True}, {}, r"has DoRA, and its magnitudes are missing"),
        ({}, {"q_proj.lora_B.bias": torch.ones(5)}, r"the base layer has no such bias"),
        ({}, {"q_proj.base_layer.weight": torch.ones(16, 16)}, r"the adapter was trained on another base"),
        ({}, {"q_proj.lora_C.weight": torch.ones(1)}, r"q_proj.lora_C.weight"),
    ],
)
def test_damaged_adapters(config: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = clip()
    folder = saved(adapted(base, target_modules=["q_proj"]), tmp_path / "lora")
    stored = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**stored, **config}))
    file = folder / "adapter_model.safetensors"
    prefix = "base_model.model.vision_model.encoder.layers.0.self_attn."
    content = {**load_file(file), **{prefix + name: tensor for name, tensor in tensors.items()}}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, file)
    with pytest.raises(CheckpointError, match=message):
        read(folder, base)


def test_transposed_weights_are_recognised_by_shape(tmp_path: Path) -> None:
    base = gpt2()
    model = adapted(base, target_modules=["c_attn", "c_proj"])  # c_proj of the attention is square
    adapter = open_adapter(saved(model, tmp_path / "lora"))
    assert adapter.config["fan_in_fan_out"] is True
    assert_same(task_vector_of(adapter, dict(base.named_parameters())), merged_change(model, base), 2e-6)
    misled = replace(adapter, config={**adapter.config, "fan_in_fan_out": False})
    with pytest.raises(CheckpointError, match=r"^2 parts .*attn.c_proj \(a square weight: the files do not say"):
        task_vector_of(misled, dict(base.named_parameters()))
    assert_same(read(tmp_path / "lora", base), merged_change(model, base), 2e-6)


def test_all_mismatches_are_in_one_error(tmp_path: Path) -> None:
    folder = saved(adapted(clip(), target_modules=["fc1"], modules_to_save=["visual_projection"]), tmp_path / "a")
    with pytest.raises(
        CheckpointError, match=r"^3 parts of the adapter .*, whose base is not named in its configuration, do not fit"
    ) as error:
        read(folder, clip(width=24))
    assert "visual_projection.weight (8, 16) vs (8, 24)" in str(error.value)
    assert str(error.value).endswith(". Give the base that it was trained from.")
    with pytest.raises(CheckpointError, match=r"\(no such module, or its weight is tied to another\)"):
        read(folder, llama())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights: expected adapter_model.safetensors or adapter_model.bin"):
        read(folder, clip())
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read(folder, clip())


@pytest.mark.parametrize("changed", [{"r": float("inf")}, {"lora_alpha": float("inf")}, {"lora_alpha": float("nan")}])
def test_nan_and_infinity_are_refused(tmp_path: Path, changed: dict[str, float]) -> None:
    """JSON as Python reads it knows Infinity and NaN; found by fuzzing."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["a"]} | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    shapes = {"A": (2, 3), "B": (4, 2)}
    factors = {f"base_model.model.a.lora_{side}.weight": torch.ones(shape) for side, shape in shapes.items()}
    safetensors.torch.save_file(factors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"rank or alpha|alpha in"):
        task_vector_of(open_adapter(tmp_path), {"a.weight": torch.zeros(4, 3)})


NESTED = "(([a-z0-9_.]+)+)+!"


@pytest.mark.parametrize(
    "key", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_pattern"]
)
@pytest.mark.parametrize("pattern", [NESTED, "(a|a)*b", "(.*)*x", ".*.*.*.*.*.*x", "a?" * 40 + "a" * 40, "(?=(.+)+!)"])
def test_patterns_that_take_too_long_are_refused(key: str, pattern: str, tmp_path: Path) -> None:
    """Matched, each of them would take hours: the test would not end."""
    folder = saved(adapted(clip(), target_modules=["q_proj"]), tmp_path / "lora")
    stored = json.loads((folder / "adapter_config.json").read_text())
    stored[key] = {pattern: 3} if key in ("rank_pattern", "alpha_pattern") else pattern
    (folder / "adapter_config.json").write_text(json.dumps(stored))
    with pytest.raises(CheckpointError, match=rf"{key} of the adapter .* is refused: .* could take too long"):
        open_adapter(folder)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "layers.0.self_attn.q_proj",
        r"^vision_model\.encoder\.layers\.1\.self_attn\.q_proj",
        r"^self_attn\.q_proj",
        r"layers\.\d+\.self_attn\.(q|v)_proj",
        r".*\.layers\.[01]\.self_attn\.q_proj",
        "proj",
        r"0\.self_attn\.q_proj|1\.self_attn\.v_proj",
    ],
)
def test_patterns_are_matched_as_peft_matches_them(pattern: str, tmp_path: Path) -> None:
    base = clip()
    options = {"rank_pattern": {pattern: 2}, "alpha_pattern": {pattern: 7}}
    model = adapted(base, target_modules=["q_proj", "v_proj"], **options)
    assert_same(read(saved(model, tmp_path / "lora"), base), merged_change(model, base), 2e-6)


def test_long_names_of_types_are_shortened(tmp_path: Path) -> None:
    folder = saved(adapted(clip(), target_modules=["q_proj"]), tmp_path / "lora")
    stored = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**stored, "peft_type": "9" * 4000}))
    with pytest.raises(CheckpointError, match=r"is an adapter of type 9+ \.\.\. 9+") as caught:
        transfer(clip(), folder, clip(), method="naive")
    assert len(str(caught.value)) < 2000


def test_names_of_thousands_of_parts_take_no_hours() -> None:
    """All their prefixes, compared with all others, would have 10^15 characters."""
    plain, deep = "encoder.0.weight", f"encoder.{'a.' * 10**5}weight"
    for names, base in (([f"x.{deep}"], [plain]), ([plain], [f"x.{deep}", plain])):
        assert renaming(names, base)(names[0]) == names[0]
    assert renaming([f"x.{plain}"], [plain, deep])(f"x.{plain}") == plain


def test_bases_that_are_no_names(tmp_path: Path) -> None:
    folder = saved(adapted(clip(), target_modules=["q_proj"]), tmp_path / "lora")
    stored = json.loads((folder / "adapter_config.json").read_text())
    for base in (3, ["a"], {"a": 1}):
        (folder / "adapter_config.json").write_text(json.dumps({**stored, "base_model_name_or_path": base}))
        with pytest.raises(CheckpointError, match=r"base_model_name_or_path in adapter_config\.json of .* is \w+; exp"):
            open_adapter(folder)
