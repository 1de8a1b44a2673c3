"""Adapters against the real peft: what we read is what peft merges, what we write is what peft loads."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toy
import tuneport
from folders import FAMILIES, Zoo
from tuneport import cli, measuring, pipeline
from tuneport.adapter import is_adapter, no_place, open_adapter, pack, task_vector_of, transposed_weights
from tuneport.errors import CheckpointError, TuneportError
from tuneport.families import describe_module
from tuneport.families.huggingface import HuggingFace
from tuneport.low_rank import LowRank, as_dense
from tuneport.methods import METHODS
from tuneport.methods.checks import check_method
from tuneport.task_vector import TaskVector, load_task_vector

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model in which every parameter is random, biases and norms too."""
    model = make()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name and name.endswith("weight") else 0.2 * noise)
    return model.eval()


def clip(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        intermediate_size=2 * width,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=8,
    )
    return seeded(lambda: transformers.CLIPVisionModelWithProjection(config), seed)


def llama(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        intermediate_size=2 * width,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=30,
        max_position_embeddings=16,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    return seeded(lambda: transformers.LlamaForCausalLM(config), seed)


def t5(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.T5Config(
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=depth,
        num_heads=2,
        vocab_size=30,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return seeded(lambda: transformers.T5ForConditionalGeneration(config), seed)


def gpt2(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=width, n_layer=depth, n_head=2, vocab_size=30, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    return seeded(lambda: transformers.GPT2LMHeadModel(config), seed)


def vit(width: int = 16, depth: int = 2, seed: int = 0) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        intermediate_size=2 * width,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    return seeded(lambda: transformers.ViTModel(config), seed)


class WithAttention(nn.Module):
    """A module around torch's own attention, whose projections are bare parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0])


MODELS = {"clip": clip, "llama": llama, "t5": t5, "gpt2": gpt2, "vit": vit}
TARGETS = {
    "clip": ["q_proj", "v_proj", "fc1"],
    "llama": ["q_proj", "k_proj", "down_proj"],
    "t5": ["q", "v", "wo"],
    "gpt2": ["c_attn", "c_proj"],
    "vit": ["q_proj", "fc1"],
}


def adapted(base: nn.Module, seed: int = 5, **options: Any) -> Any:
    """A PeftModel on a copy of the base, with every number that training could have changed changed."""
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**{"r": 3, "lora_alpha": 5, **options}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise if ".lora_A" in name or "_embedding_A" in name else parameter + noise)
    return model.eval()


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def peft_deltas(model: Any) -> dict[str, Tensor]:
    """What peft itself says that each adapted weight changes by."""
    return {
        f"{name.removeprefix('base_model.model.')}.weight": part.get_delta_weight("default").detach()
        for name, part in model.named_modules()
        if hasattr(part, "get_delta_weight")
    }


def merged_change(model: Any, base: nn.Module) -> dict[str, Tensor]:
    """Every parameter of the model that peft merges, minus the base."""
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    return {name: merged[name].detach() - parameter.detach() for name, parameter in base.named_parameters()}


def read(folder: Path, base: nn.Module) -> TaskVector:
    return task_vector_of(open_adapter(folder), dict(base.named_parameters()), transposed=transposed_weights(base))


def assert_same(vector: TaskVector, change: Mapping[str, Tensor], tolerance: float = 1e-6) -> None:
    for name, expected in change.items():
        found = vector.dense(name) if name in vector else torch.zeros_like(expected)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert set(vector) <= set(change)


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
def test_every_way_to_name_modules(family: str, which: str, tmp_path: Path) -> None:
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


def test_a_bias_that_changed_alone_is_a_layer_of_rank_0(tmp_path: Path) -> None:
    base = clip()
    vector = read(saved(adapted(base, target_modules=["q_proj"], bias="all"), tmp_path / "lora"), base)
    alone = vector["vision_model.encoder.layers.0.mlp.fc1.weight"]
    assert isinstance(alone, LowRank)
    assert (alone.rank, alone.norm(), bool(alone.dense().any())) == (0, 0.0, False)


def test_torchs_own_attention(tmp_path: Path) -> None:
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


def test_a_pickled_adapter_and_a_live_one_read_the_same(tmp_path: Path) -> None:
    base = clip()
    model = adapted(base, target_modules=TARGETS["clip"], modules_to_save=["visual_projection"])
    folder = saved(model, tmp_path / "lora")
    expected = read(folder, base).materialise()
    model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    assert (tmp_path / "pickled" / "adapter_model.bin").is_file()
    for other in (read(tmp_path / "pickled", base), read(model, base)):
        assert set(other) == set(expected)
        assert all(torch.equal(other.dense(name), expected.dense(name)) for name in expected)
    assert is_adapter(folder)
    assert is_adapter(model)
    assert not is_adapter(base)
    assert not is_adapter(tmp_path)


def test_names_of_the_files_are_understood(tmp_path: Path) -> None:
    """An adapter made when live names were the names in the files (transformers 4) reads the same."""
    from safetensors.torch import load_file, save_file

    base = vit()
    names = describe_module(base).file_names
    folder = saved(adapted(base, target_modules=["q_proj", "fc1"]), tmp_path / "lora")
    expected = read(folder, base).materialise()
    file = folder / "adapter_model.safetensors"
    renamed = {}
    for key, tensor in load_file(file).items():
        module, _, rest = key.removeprefix("base_model.model.").partition(".lora_")
        stored = names[f"{module}.weight"].removesuffix(".weight")
        assert stored != module
        renamed[f"base_model.model.{stored}.lora_{rest}"] = tensor
    save_file(renamed, file)
    other = {stored: live for live, stored in names.items()}
    vector = task_vector_of(open_adapter(folder), dict(base.named_parameters()), other_names=other)
    assert all(torch.equal(vector.dense(name), expected.dense(name)) for name in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"is an adapter of type IA3; tuneport reads LORA"),
        ({"peft_type": "ADALORA"}, r"is an adapter of type ADALORA"),
        ({"peft_type": "LOHA"}, r"is an adapter of type LOHA"),
        ({"alora_invocation_tokens": [1]}, r"uses aLoRA, which is active for some tokens only"),
        (
            {"target_parameters": ["w"], "use_qalora": True},
            r"uses LoRA on bare parameters \(target_parameters\), QALoRA",
        ),
        ({"init_lora_weights": "pissa_niter_4"}, r"initialised by pissa_niter_4, which changes the base weights"),
        ({"r": 4}, r"6 parts of the adapter .* \(factors \(3, 16\) and \(32, 3\), but its configuration says rank 4\)"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    base = clip()
    folder = saved(adapted(base, target_modules=TARGETS["clip"]), tmp_path / "lora")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        read(folder, base)


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


def test_without_a_live_model_shapes_tell_how_a_weight_is_stored(tmp_path: Path) -> None:
    base = gpt2()
    model = adapted(base, target_modules=["c_attn", "c_proj"])  # c_proj of the attention is square
    adapter = open_adapter(saved(model, tmp_path / "lora"))
    assert adapter.config["fan_in_fan_out"] is True
    assert_same(task_vector_of(adapter, dict(base.named_parameters())), merged_change(model, base), 2e-6)
    misled = replace(adapter, config={**adapter.config, "fan_in_fan_out": False})
    with pytest.raises(CheckpointError, match=r"^2 parts .*attn.c_proj \(a square weight: its files do not tell"):
        task_vector_of(misled, dict(base.named_parameters()))
    assert_same(read(tmp_path / "lora", base), merged_change(model, base), 2e-6)


def test_everything_that_does_not_fit_is_said_at_once(tmp_path: Path) -> None:
    folder = saved(
        adapted(clip(), target_modules=TARGETS["clip"], modules_to_save=["visual_projection"]), tmp_path / "a"
    )
    with pytest.raises(
        CheckpointError, match=r"^7 parts of the adapter .* \(factors \(3, 16\) .*; ?|^7 parts"
    ) as error:
        read(folder, clip(width=24))
    assert "visual_projection.weight (8, 16) vs (8, 24)" in str(error.value)
    with pytest.raises(CheckpointError, match=r"\(no such module, or its weight is tied to another\)"):
        read(folder, llama())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights: expected adapter_model.safetensors or adapter_model.bin"):
        read(folder, clip())
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        read(folder, clip())


def images(count: int = 12, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"pixel_values": torch.randn(4, 3, 16, 16, generator=generator)} for _ in range(count // 4)]


def tokens(count: int = 12, seed: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 30, (count // 4, 4, 7), generator=generator)
    return [{"input_ids": part, "labels": part.flip(1)} for part in ids]


def outputs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model(**batch)
    for name in ("logits", "image_embeds", "last_hidden_state"):
        if getattr(found, name, None) is not None:
            return getattr(found, name)
    raise AssertionError(found)


def clip_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    embeds = F.normalize(module(**batch).image_embeds, dim=-1)
    return F.cross_entropy(10 * embeds, torch.arange(len(embeds)), reduction="sum")


def text_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return module(**batch).loss


CASES: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "clip": (clip, images, clip_loss, ["q_proj", "out_proj", "fc2", "patch_embedding", "visual_projection"]),
    "llama": (llama, tokens, text_loss, ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]),
    "t5": (t5, tokens, text_loss, ["q", "v", "o", "wi", "wo"]),
    "gpt2": (gpt2, tokens, text_loss, ["c_attn", "c_proj", "c_fc"]),
}


@pytest.mark.parametrize("method", ["bico", "theseus", "naive"])
@pytest.mark.parametrize("family", CASES)
def test_a_lora_of_one_base_becomes_a_lora_of_another(
    family: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, data, loss, modules = CASES[family]
    source, target = make(), make(width=24, depth=3, seed=1)
    model = adapted(source, target_modules=modules, rank_pattern={modules[0]: 2}, bias="lora_only")
    folder = saved(model, tmp_path / "lora")
    options = {"loss": loss, "method": method, "scale": 0.7}
    with monkeypatch.context() as patch:
        patch.setattr(LowRank, "dense", forbidden)
        result = tuneport.transfer(source, folder, target, data(), **options)
        out = result.save(tmp_path / "out", kind="adapter")
    ranks = {record.target: record.rank for record in result.records}
    assert set(ranks.values()) == {2, 3}
    for name in result.task_vector:
        entry = result.task_vector[name]
        assert isinstance(entry, LowRank) == (entry.ndim > 1 if isinstance(entry, Tensor) else True), name
    written = read(out, target)
    assert {written.spec(name).rank for name in written if written.spec(name).rank is not None} == {2, 3}
    # the same transfer with a dense task vector is the oracle
    dense = TaskVector({name: as_dense(entry) for name, entry in read(folder, source).items()})
    oracle = tuneport.transfer(source, dense, target, data(), **options)
    for name in oracle.task_vector:
        found = result.task_vector.dense(name)
        torch.testing.assert_close(found, oracle.task_vector.dense(name), atol=1e-5, rtol=1e-4)
    for batch in data(8, seed=9):
        expected = outputs(oracle.apply(), batch)
        assert not torch.allclose(expected, outputs(target, batch), atol=1e-3)
        torch.testing.assert_close(outputs(result.apply(), batch), expected, atol=1e-5, rtol=1e-5)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(target), out).eval()
        torch.testing.assert_close(outputs(loaded, batch), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(outputs(loaded.merge_and_unload(), batch), expected, atol=1e-5, rtol=1e-5)


def forbidden(*_: Any) -> Any:
    raise AssertionError("a dense update was made")


def test_a_live_adapter_is_a_fine_tune(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    model = adapted(source, target_modules=["q_proj", "fc1"])
    folder = saved(model, tmp_path / "lora")
    stored, live = (tuneport.transfer(source, given, target, images(), loss=clip_loss) for given in (folder, model))
    assert all(torch.equal(stored.task_vector.dense(n), live.task_vector.dense(n)) for n in stored.task_vector)
    assert stored.record["finetuned"]["adapter"]["rank"] == 3
    assert set(stored.record["finetuned"]["sha256"]) == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(TuneportError, match=r"still carries an adapter\. Pass the bare base"):
        tuneport.transfer(model.get_base_model(), folder, target, images(), loss=clip_loss)


def test_blocks_without_an_adapter_stay(tmp_path: Path) -> None:
    """The depth rule counts all blocks of the source, not only those that the adapter reaches."""
    source, target = clip(depth=4), clip(24, 4, 1)
    model = adapted(source, target_modules=["q_proj"], layers_to_transform=[1])
    result = tuneport.transfer(source, saved(model, tmp_path / "lora"), target, images(), loss=clip_loss)
    assert [(record.target, record.source) for record in result.records] == [
        ("vision_model.encoder.layers.1.self_attn.q_proj.weight",) * 2
    ]
    reasons = {kept.tensor: kept.reason for kept in result.not_transported}
    assert reasons["vision_model.encoder.layers.2.self_attn.q_proj.weight"] == (
        "source block 2 has no change in the role q"
    )
    assert reasons["vision_model.encoder.layers.1.self_attn.q_proj.bias"] == "the fine-tune did not change this bias"
    assert reasons["vision_model.encoder.layers.1.mlp.fc1.weight"] == "the fine-tune changed no layer with the role fc1"


@pytest.mark.parametrize("fused", [(False, True), (True, False), (True, True)])
def test_fused_weights_stay_exact(fused: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = toy.ToyViT(fused=fused[0], seed=1), toy.ToyViT(width=16, depth=3, fused=fused[1], seed=2)
    modules = ["qkv", "fc1"] if fused[0] else ["q_proj", "v_proj", "fc1"]
    folder = saved(adapted(source, target_modules=modules, r=2, bias="lora_only"), tmp_path / "lora")
    with monkeypatch.context() as patch:
        patch.setattr(LowRank, "dense", forbidden)
        result = tuneport.transfer(source, folder, target, toy.batches(64), loss=toy.loss)
        out = result.save(tmp_path / "out", kind="adapter")
    name = "blocks.0.attn.qkv.weight" if fused[1] else "blocks.0.attn.q_proj.weight"
    # separate layers with factors of their own add up; layers that share the input factor go on sharing it
    assert result.task_vector[name].rank == (4 if fused == (False, True) else 2)
    dense = TaskVector({name: as_dense(entry) for name, entry in read(folder, source).items()})
    oracle = tuneport.transfer(source, dense, target, toy.batches(64), loss=toy.loss)
    for name in oracle.task_vector:
        torch.testing.assert_close(result.task_vector.dense(name), oracle.task_vector.dense(name), atol=1e-5, rtol=1e-4)
    pictures = toy.batches(8)[0][0]
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(target), out)
    torch.testing.assert_close(loaded(pictures), oracle.apply()(pictures), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(loaded.merge_and_unload()(pictures), oracle.apply()(pictures), atol=1e-5, rtol=1e-4)


def low_rank(vector: TaskVector, rank: int = 2) -> dict[str, Any]:
    """A task vector whose matrices (kernels too) are random factors."""
    generator = torch.Generator().manual_seed(4)
    entries: dict[str, Any] = {}
    for name in vector:
        shape = vector.shape(name)
        entries[name] = vector[name]
        if len(shape) > 1:
            out, in_ = (
                torch.randn(shape[0], rank, generator=generator),
                torch.randn(rank, *shape[1:], generator=generator),
            )
            entries[name] = LowRank(out, in_)
    return entries


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shapes", [{}, {"width": 16, "depth": 3, "fused": True}])
def test_every_method_moves_factors_as_it_moves_matrices(method: str, shapes: dict[str, Any]) -> None:
    if shapes and method in ("gradfix", "transfusion"):
        pytest.skip("for one architecture only")
    source, target = toy.ToyViT(seed=1), toy.ToyViT(**shapes, seed=2)
    given = toy.problem(source, toy.finetuned(source), target, METHODS[method].signals, count=64)
    factors = low_rank(given.task_vector)
    dense = {name: as_dense(entry) for name, entry in factors.items()}
    moved = check_method(METHODS[method], replace(given, task_vector=factors))
    expected = METHODS[method].transfer(replace(given, task_vector=dense))
    assert METHODS[method].keeps_rank == (method != "gradfix")
    for name in expected.task_vector:
        torch.testing.assert_close(
            moved.task_vector.dense(name), expected.task_vector.dense(name), atol=1e-5, rtol=1e-4
        )
    weights = {pair.target.weight for pair in given.plan.pairs}
    assert all(isinstance(moved.task_vector[name], LowRank) == METHODS[method].keeps_rank for name in weights)
    assert all((record.rank == 2) == METHODS[method].keeps_rank for record in moved.records)


def test_a_full_fine_tune_becomes_an_adapter_of_a_chosen_rank(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    tuned = toy.finetuned(source)
    result = tuneport.transfer(source, tuned, target, images(), loss=clip_loss)
    with pytest.raises(TuneportError, match="not low-rank"):
        result.save(tmp_path / "none", kind="adapter")
    assert not (tmp_path / "none").exists()
    out = result.save(tmp_path / "out", kind="adapter", rank=4)
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
    exact = result.save(tmp_path / "exact", kind="adapter", energy=1.0)
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
    out = result.save(tmp_path / "out", kind="adapter", energy=1.0)
    record = json.loads((out / "tuneport.json").read_text())
    assert record["options"]["energy"] == 1.0
    homeless = no_place(result.target.module, result.task_vector)
    stays = {item["tensor"] for item in record["not_transported"]}
    assert {result.target.file_names[name] for name in homeless} <= stays
    vector = result.task_vector.subset(name for name in result.task_vector if name not in homeless)
    expected = dict(vector.apply_to(dict(result.target.module.named_parameters())))
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(result.target.module), out).merge_and_unload()
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name].detach(), atol=2e-5, rtol=1e-4)


def test_what_an_adapter_has_no_place_for_is_listed(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    tuned = seeded(clip, 7)
    result = tuneport.transfer(source, tuned, target, method="naive")
    out = result.save(tmp_path / "out", kind="adapter", rank=2)
    reasons = {
        item["tensor"]: item["reason"] for item in json.loads((out / "tuneport.json").read_text())["not_transported"]
    }
    assert reasons["vision_model.embeddings.class_embedding"].startswith("a LoRA has no place for a parameter of ")
    assert reasons["vision_model.post_layernorm.weight"] == "a LoRA has no place for a parameter of LayerNorm"
    assert "vision_model.encoder.layers.0.mlp.fc1.weight" not in reasons
    tied = gpt2()
    assert no_place(tied, ["transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"]) == {
        "transformer.wte.weight": "its numbers are shared with lm_head.weight; an adapter would change only one of them"
    }
    with pytest.raises(TuneportError, match="no update can be written as a LoRA"):
        pack(TaskVector({"transformer.ln_f.weight": torch.ones(16)}), tied, dict(tied.named_parameters()))


def test_odd_places(tmp_path: Path) -> None:
    """Torch's attention, embeddings, names that end other names: what is written is what peft loads."""
    from tuneport.adapter import write_adapter

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


def test_low_rank_results_are_used_like_dense_ones(tmp_path: Path) -> None:
    source, target = clip(), clip(24, 3, 1)
    folder = saved(adapted(source, target_modules=["q_proj", "patch_embedding"]), tmp_path / "lora")
    batches = images(16)
    result = tuneport.transfer(source, folder, target, batches, loss=clip_loss, scale="auto")
    assert result.scale == result.record["scale"]
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), clip(24, 3, 1).parameters(), strict=True))
    result = tuneport.transfer(source, folder, target, batches, loss=clip_loss)
    result.save(tmp_path / "tau.safetensors", kind="task-vector")
    vector = load_task_vector(tmp_path / "tau.safetensors")
    assert isinstance(vector["vision_model.embeddings.patch_embedding.weight"], LowRank)
    tensors = result.tensors()
    for name, tensor in vector.apply_to(result.target.tensors).items():
        assert torch.equal(tensor, tensors[name])
    module = result.apply()
    out = result.save(tmp_path / "model")
    loaded = transformers.CLIPVisionModelWithProjection.from_pretrained(out)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), loaded.parameters(), strict=True))


# The command line


def run(*words: str | Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tuneport", *map(str, words)])
        try:
            cli.main()
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def lora(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    return saved(
        adapted(base, target_modules=["q_proj", "fc1", "patch_embedding"]), tmp_path_factory.mktemp("l") / "lora"
    )


def inputs(zoo: Zoo, finetuned: Path) -> list[str | Path]:
    source, target = zoo["clip_vision-base"], zoo["clip_vision-target"]
    return ["--source", source, "--finetuned", finetuned, "--target", target, "--data", zoo.data, "--samples", "20"]


def test_transfer_as_adapter(zoo: Zoo, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ported"
    assert run("transfer", *inputs(zoo, lora), "--out", out, "--as", "adapter", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "tuneport.json").read_text())
    assert {layer["rank"] for layer in record["layers"]} == {3}
    assert record["adapter"]["rank"] == 3
    assert all(item["lost_energy"] == 0 for item in record["adapter"]["modules"])
    target = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-target"])
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(zoo["clip_vision-target"])
    assert run("transfer", *inputs(zoo, lora), "--out", tmp_path / "whole") == 0
    whole = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "whole").eval()
    loaded = peft.PeftModel.from_pretrained(target, out).eval()
    batch = {"pixel_values": torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))}
    torch.testing.assert_close(outputs(loaded, batch), outputs(whole, batch), atol=1e-5, rtol=1e-4)
    assert "| adapter | 7 modules, rank 3, nothing lost |" in (out / "README.md").read_text()
    text = (tmp_path / "whole" / "report.html").read_text()
    assert "<th scope=col>rank</th>" in text


def test_errors_come_before_any_work(
    zoo: Zoo, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "measure", forbidden)
    out = ["--out", tmp_path / "out"]
    for words, message in (
        (["--rank", "3"], "--rank and --energy shape an adapter; they go with --as adapter"),
        (["--as", "adapter", "--rank", "3", "--energy", "0.9"], "either a rank or an energy"),
        (["--as", "adapter", "--energy", "1.5"], "above 0 and at most 1, got 1.5"),
    ):
        assert run("transfer", *inputs(zoo, lora), *out, *words) == 1
        assert message in " ".join(capsys.readouterr().err.split())
    tuned = zoo["clip_vision-tuned"]
    assert run("transfer", *inputs(zoo, tuned), *out, "--as", "adapter") == 1
    assert "updates are not low-rank" in capsys.readouterr().err
    same = ["--source", zoo["clip_vision-base"], "--finetuned", lora, "--target", zoo["clip_vision-base"]]
    data = ["--data", zoo.data, "--samples", "20"]
    assert run("transfer", *same, *data, *out, "--as", "adapter", "--method", "gradfix") == 1
    assert "method gradfix makes dense updates: pass --rank R" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_extract_and_apply_an_adapter(zoo: Zoo, lora: Path, tmp_path: Path) -> None:
    base = zoo["clip_vision-base"]
    tau = tmp_path / "tau.safetensors"
    assert run("extract", base, lora, "-o", tau) == 0
    vector = load_task_vector(tau)
    assert all(isinstance(vector[name], LowRank) for name in vector)
    assert run("apply", tau, base, "-o", tmp_path / "whole") == 0
    whole = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "whole")
    model = transformers.CLIPVisionModelWithProjection.from_pretrained(base)
    merged = peft.PeftModel.from_pretrained(model, lora).merge_and_unload()
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(dict(whole.named_parameters())[name], parameter, atol=1e-6, rtol=1e-5)


def test_plan_and_the_way_through_a_task_vector(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = transformers.CLIPVisionModelWithProjection.from_pretrained(zoo["clip_vision-base"])
    lora = saved(adapted(base, target_modules=["q_proj"], bias="all"), tmp_path / "lora")
    assert run("plan", *inputs(zoo, lora), "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert any(row["target"].endswith("fc1.weight") for row in plan["layers"])  # its bias changed
    tau = tmp_path / "tau.safetensors"
    assert run("extract", zoo["clip_vision-base"], lora, "-o", tau) == 0
    for given, out in ((lora, "direct"), (tau, "through")):
        assert run("transfer", *inputs(zoo, given), "--out", tmp_path / out, "--as", "adapter") == 0
    direct, through = (open_adapter(tmp_path / out).tensors for out in ("direct", "through"))
    assert set(direct) == set(through)
    assert all(torch.equal(direct[name], through[name]) for name in direct)
    assert open_adapter(tmp_path / "direct").config["bias"] == "all"


def test_extract_where_live_names_are_not_those_of_the_files(zoo: Zoo, tmp_path: Path) -> None:
    base = zoo["vit-base"]
    model = transformers.ViTForImageClassification.from_pretrained(base)
    tuned = adapted(model, target_modules=["q_proj"], modules_to_save=["classifier"])
    folder = saved(tuned, tmp_path / "lora")
    vector = pipeline.extract(base, folder)
    names = HuggingFace().describe(model).file_names
    assert set(vector) <= set(names.values())
    assert_same(
        vector.rename({stored: live for live, stored in names.items() if stored in vector}),
        merged_change(tuned, model),
        2e-6,
    )
    again = pipeline.extract(base, folder, exclude=["classifier*"])
    assert set(vector) - set(again) == {"classifier.weight", "classifier.bias"}


def test_another_name_of_the_base_is_only_a_note(
    zoo: Zoo, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copied = Path(shutil.copytree(lora, tmp_path / "lora"))
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "someone/other"}))
    assert run("transfer", *inputs(zoo, copied), "--method", "naive", "--out", tmp_path / "out", "--as", "adapter") == 0
    assert "note: the adapter names someone/other as its base" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("changed", [{"r": float("inf")}, {"lora_alpha": float("inf")}, {"lora_alpha": float("nan")}])
def test_numbers_that_are_none_are_refused(tmp_path: Path, changed: dict[str, float]) -> None:
    """JSON as Python reads it knows Infinity and NaN; found by fuzzing."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["a"]} | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    shapes = {"A": (2, 3), "B": (4, 2)}
    factors = {f"base_model.model.a.lora_{side}.weight": torch.ones(shape) for side, shape in shapes.items()}
    safetensors.torch.save_file(factors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"rank or alpha|alpha in"):
        task_vector_of(open_adapter(tmp_path), {"a.weight": torch.zeros(4, 3)})
