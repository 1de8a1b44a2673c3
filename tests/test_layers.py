"""What models are made of: roles, blocks and places of layers, on tiny real models and by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from tuneport.layers import Layer, find_layers, find_loose, is_patch_embedding, locate

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**SMALL, "image_size": 8, "patch_size": 4}
TEXT = {**SMALL, "vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}


def clip() -> nn.Module:
    config = transformers.CLIPConfig(text_config=dict(TEXT), vision_config=dict(VISION), projection_dim=6)
    return transformers.CLIPModel(config)


def clip_vision() -> nn.Module:
    return transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**VISION, projection_dim=6))


def siglip() -> nn.Module:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**VISION))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3))


def dinov2() -> nn.Module:
    config = transformers.Dinov2Config(**VISION, mlp_ratio=2, num_labels=3)
    return transformers.Dinov2ForImageClassification(config)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**TEXT))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=20, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return transformers.T5ForConditionalGeneration(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_key_value_heads=1))


class Attended(nn.Module):
    """One block with nn.MultiheadAttention, a bare matrix, a scale, a strided and a patch convolution."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2)
        self.patch_embed = nn.Conv2d(16, 16, 4, 4)
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2, **options)})])
        self.proj = nn.Parameter(torch.zeros(16, 6))
        self.logit_scale = nn.Parameter(torch.zeros(()))


VIT_ROLES = {"q", "k", "v", "out", "fc1", "fc2"}
# model -> stacks with their depth and the roles of a block; roles outside the blocks
EXPECTED: dict[str, tuple[Callable[[], nn.Module], dict[str, set[str]], set[str]]] = {
    "clip_vision": (clip_vision, {"vision_model.encoder.layers": VIT_ROLES}, {"patch", "projection"}),
    "clip": (
        clip,
        {"vision_model.encoder.layers": VIT_ROLES, "text_model.encoder.layers": VIT_ROLES},
        {"patch", "projection", "text_projection"},
    ),
    "siglip": (
        siglip,
        {"encoder.layers": VIT_ROLES},
        {"patch", *(f"head.{part}" for part in ("attention.q", "attention.k", "attention.v"))}
        | {"head.attention.out_proj", "head.mlp.fc1", "head.mlp.fc2"},
    ),
    "vit": (vit, {"vit.layers": VIT_ROLES}, {"patch", "classifier"}),
    "dinov2": (dinov2, {"dinov2.encoder.layer": VIT_ROLES}, {"patch", "classifier"}),
    "bert": (bert, {"encoder.layer": VIT_ROLES}, {"pooler"}),
    "t5": (
        t5,
        {
            "encoder.block": {"q", "k", "v", "out", "gate", "up", "fc2"},
            "decoder.block": {"q", "k", "v", "out", "gate", "up", "fc2", "cross_q", "cross_k", "cross_v", "cross_out"},
        },
        set(),
    ),
    "gpt2": (gpt2, {"transformer.h": {"attn.c_attn", "out", "fc1", "fc2"}}, set()),
    "llama": (llama, {"model.layers": {"q", "k", "v", "out", "gate", "up", "down"}}, {"lm_head"}),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_roles_blocks_and_stacks_of_real_models(name: str) -> None:
    make, stacks, outer = EXPECTED[name]
    layers = find_layers(make())
    found: dict[str, dict[int, set[str]]] = {}
    for layer in layers:
        if layer.block is not None:
            found.setdefault(layer.stack, {}).setdefault(layer.block, set()).add(layer.role)
    assert found == {stack: {0: roles, 1: roles} for stack, roles in stacks.items()}
    assert {layer.role for layer in layers if layer.block is None} == outer
    places = [(layer.stack, layer.block, layer.role) for layer in layers]
    assert len(set(places)) == len(places)


MODELS = {name: make for name, (make, _, _) in EXPECTED.items()}
MODELS["attended"] = Attended
MODELS["separate"] = lambda: Attended(kdim=5, vdim=7)
MODELS["no bias"] = lambda: Attended(bias=False, add_bias_kv=True)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_a_layer_or_loose_and_never_in_both(name: str) -> None:
    model = MODELS[name]()
    layers = find_layers(model)
    loose = [part.name for part in find_loose(model, layers)]
    owned = {name for layer in layers for name in (layer.weight, layer.bias) if name is not None}
    assert len(set(loose)) == len(loose)
    assert not owned & set(loose)
    assert owned | set(loose) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_layers_cover_their_weights_once_and_fit_them(name: str) -> None:
    model = MODELS[name]()
    parameters = dict(model.named_parameters())
    written = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    layers = find_layers(model)
    assert layers
    for layer in layers:
        weight = parameters[layer.weight]
        assert layer.weight_shape == tuple(weight.shape)
        assert tuple(layer.matrix(weight).shape) == (layer.out_features, layer.in_features)
        ones = torch.zeros_like(weight)
        layer.store(torch.ones(layer.out_features, layer.in_features), ones)
        written[layer.weight] += ones
        if layer.bias is not None:
            assert layer.vector(parameters[layer.bias]).shape == (layer.out_features,)
            ones = torch.zeros_like(written[layer.bias])
            layer.store(torch.ones(layer.out_features), ones)
            written[layer.bias] += ones
    owned = {name for layer in layers for name in (layer.weight, layer.bias) if name is not None}
    for name in owned:
        assert bool((written[name] == 1).all()), name


@pytest.mark.parametrize("name", MODELS)
def test_layers_come_in_the_order_of_parameters(name: str) -> None:
    model = MODELS[name]()
    order = [name for name, _ in model.named_parameters()]
    found = [order.index(layer.weight) for layer in find_layers(model)]
    assert found == sorted(found)


def test_kinds_of_loose_tensors() -> None:
    def kinds(model: nn.Module) -> dict[str, str]:
        return {part.name: part.kind for part in find_loose(model, find_layers(model))}

    of = kinds(clip())
    assert of["logit_scale"] == "temperature"
    assert of["vision_model.embeddings.class_embedding"] == "class tokens"
    assert of["vision_model.embeddings.position_embedding.weight"] == "position embeddings"
    assert of["text_model.embeddings.token_embedding.weight"] == "embeddings"
    assert of["text_model.encoder.layers.1.layer_norm1.bias"] == "norms"
    of = kinds(t5())
    assert of["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == "position embeddings"
    assert of["encoder.final_layer_norm.weight"] == "norms"
    of = kinds(dinov2())
    assert of["dinov2.encoder.layer.0.layer_scale1.lambda1"] == "layer scales"
    assert of["dinov2.embeddings.mask_token"] == "learnt tokens"
    assert kinds(siglip())["head.probe"] == "learnt tokens"
    of = kinds(Attended())
    assert of["stem.weight"] == of["stem.bias"] == "convolutions"
    assert of["proj"] == "other parameters"


def test_loose_tensors_of_two_towers_do_not_share_a_role() -> None:
    model = clip()
    loose = find_loose(model, find_layers(model))
    places = [(part.stack, part.block, part.role) for part in loose]
    assert len(set(places)) == len(places)
    vision = find_loose(model, find_layers(model), within=["vision_model."])
    assert {part.role for part in vision} >= {"class token", "position embedding", "final norm", "norm1", "norm2.bias"}


def test_tied_heads_are_not_layers() -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not [layer for layer in find_layers(model) if "lm_head" in layer.weight or "wte" in layer.weight]
    assert "transformer.wte.weight" in [part.name for part in find_loose(model, find_layers(model))]


def test_conv1d_is_transposed_and_fused_only_when_told() -> None:
    model = gpt2()
    weight = "transformer.h.0.attn.c_attn.weight"
    plain = next(layer for layer in find_layers(model) if layer.weight == weight)
    assert plain.transposed
    assert plain.rows is None
    assert (plain.in_features, plain.out_features) == (16, 48)
    fused = {weight: {"q": ((0, 16),), "k": ((16, 32),), "v": ((32, 48),)}}
    split = [layer for layer in find_layers(model, fused=fused) if layer.weight == weight]
    assert [(layer.role, layer.name) for layer in split] == [(part, f"{weight}[{part}]") for part in "qkv"]
    stored = dict(model.named_parameters())[weight]
    assert torch.equal(split[1].matrix(stored), stored[:, 16:32].T)
    assert torch.equal(split[1].vector(torch.arange(48)), torch.arange(16, 32))


def test_multihead_attention_is_four_layers() -> None:
    layers = [layer for layer in find_layers(Attended()) if layer.block == 0]
    assert [layer.role for layer in layers] == ["q", "k", "v", "out"]
    assert [layer.rows for layer in layers] == [((0, 16),), ((16, 32),), ((32, 48),), None]
    assert layers[0].bias == "blocks.0.attn.in_proj_bias"
    separate = [layer for layer in find_layers(Attended(kdim=5, vdim=7)) if layer.block == 0]
    assert [layer.role for layer in separate] == ["q", "k", "v", "out"]
    assert [layer.in_features for layer in separate] == [16, 5, 7, 16]
    assert [layer.bias for layer in find_layers(Attended(bias=False)) if layer.block == 0] == [None] * 4


def test_a_fused_projection_is_three_layers() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(4, 12)})])})
    layers = find_layers(model)
    assert [layer.name for layer in layers] == [f"blocks.0.qkv.weight[{part}]" for part in "qkv"]
    assert [layer.rows for layer in layers] == [((0, 4),), ((4, 8),), ((8, 12),)]
    odd = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(4, 10)})])})
    assert [layer.rows for layer in find_layers(odd)] == [None]
    ranges = {"q": ((0, 6),), "k": ((6, 8),), "v": ((8, 10),)}
    split = find_layers(odd, fused={"blocks.0.qkv.weight": ranges})
    assert [layer.out_features for layer in split] == [6, 2, 2]


def test_bare_matrices_are_layers_when_named() -> None:
    model = Attended()
    assert "proj" not in [layer.weight for layer in find_layers(model)]
    found = next(layer for layer in find_layers(model, matrices=["proj"]) if layer.weight == "proj")
    assert (found.in_features, found.out_features, found.transposed, found.bias) == (16, 6, True, None)
    assert "proj" not in [part.name for part in find_loose(model, find_layers(model, matrices=["proj"]))]


def test_within_keeps_to_its_prefixes() -> None:
    model = clip()
    layers = find_layers(model, within=["vision_model."])
    assert layers
    assert all(layer.weight.startswith("vision_model.") for layer in layers)
    assert all(part.name.startswith("vision_model.") for part in find_loose(model, layers, within=["vision_model."]))


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"kernel_size": 4, "stride": 4}, True),
        ({"kernel_size": (2, 4), "stride": (2, 4)}, True),
        ({"kernel_size": 4, "stride": 4, "padding": "valid"}, True),
        ({"kernel_size": 1, "stride": 1}, True),
        ({"kernel_size": 4, "stride": 2}, False),
        ({"kernel_size": 4, "stride": 4, "padding": 1}, False),
        ({"kernel_size": 4, "stride": 4, "groups": 2}, False),
        ({"kernel_size": 4, "stride": 4, "dilation": 2}, False),
    ],
)
def test_which_convolutions_are_patch_embeddings(options: dict, answer: bool) -> None:
    assert is_patch_embedding(nn.Conv2d(4, 8, **options)) is answer
    assert bool(find_layers(nn.Sequential(nn.Conv2d(4, 8, **options)))) is answer


def test_a_role_that_two_layers_of_a_block_would_share_becomes_their_own_names() -> None:
    block = nn.ModuleDict({"a": nn.ModuleDict({"fc1": nn.Linear(2, 2)}), "b": nn.ModuleDict({"fc1": nn.Linear(2, 2)})})
    layers = find_layers(nn.ModuleDict({"blocks": nn.ModuleList([block, block])}))
    assert [layer.role for layer in layers] == ["a.fc1", "b.fc1"]


def test_layers_of_a_sequential_are_called_by_name() -> None:
    layers = find_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)))
    assert [(layer.role, layer.block, layer.name) for layer in layers] == [
        ("0", None, "0.weight"),
        ("2", None, "2.weight"),
    ]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("visual.transformer.resblocks.4.mlp.c_fc.weight", ("visual.transformer.resblocks", 4, "fc1")),
        ("visual.transformer.resblocks.4.mlp.c_proj.bias", ("visual.transformer.resblocks", 4, "fc2.bias")),
        ("blocks.11.attn.proj.weight", ("blocks", 11, "out")),
        ("bert.encoder.layer.7.attention.output.dense.weight", ("bert.encoder.layer", 7, "out")),
        ("bert.encoder.layer.7.output.dense.weight", ("bert.encoder.layer", 7, "fc2")),
        ("decoder.layers.2.encoder_attn.v_proj.weight", ("decoder.layers", 2, "cross_v")),
        ("visual.proj", ("", None, "projection")),
        ("head.weight", ("", None, "classifier")),
        ("patch_embed.proj.weight", ("", None, "patch")),
        ("3.weight", ("", None, "3")),
        ("something.else", ("", None, "something.else")),
    ],
)
def test_locate(name: str, place: tuple) -> None:
    assert locate(name) == place


ROUND_TRIPS = {
    "plain": Layer("w", "b", (6, 4), "r"),
    "rows": Layer("w", "b", (6, 4), "r", rows=((2, 4),)),
    "several ranges": Layer("w", "b", (6, 4), "r", rows=((5, 6), (0, 2))),
    "transposed": Layer("w", "b", (4, 6), "r", transposed=True),
    "transposed rows": Layer("w", "b", (4, 6), "r", rows=((0, 1), (3, 5)), transposed=True),
    "kernel": Layer("w", "b", (6, 3, 2, 5), "r"),
}


@pytest.mark.parametrize("kind", ROUND_TRIPS)
def test_matrix_and_store_are_inverse(kind: str) -> None:
    layer = ROUND_TRIPS[kind]
    weight, bias = torch.randn(layer.weight_shape), torch.randn(6)
    assert layer.matrix(weight).shape == (layer.out_features, layer.in_features)
    assert layer.vector(bias).shape == (layer.out_features,)
    other, other_bias = torch.full_like(weight, 9.0), torch.full_like(bias, 9.0)
    layer.store(layer.matrix(weight), other)
    layer.store(layer.vector(bias), other_bias)
    assert torch.equal(layer.matrix(other), layer.matrix(weight))
    assert torch.equal(layer.vector(other_bias), layer.vector(bias))
    share = layer.out_features / 6
    assert float((other == 9.0).double().mean()) == pytest.approx(1 - share)  # the rest is untouched
    assert float((other_bias == 9.0).double().mean()) == pytest.approx(1 - share)


def test_matrices_lie_where_they_should() -> None:
    weight = torch.arange(24.0).reshape(6, 4)
    assert ROUND_TRIPS["several ranges"].matrix(weight).tolist() == [weight[i].tolist() for i in (5, 0, 1)]
    stored = torch.arange(24.0).reshape(4, 6)
    assert ROUND_TRIPS["transposed rows"].matrix(stored).tolist() == [stored[:, i].tolist() for i in (0, 3, 4)]
    kernel = torch.arange(180.0).reshape(6, 3, 2, 5)
    assert ROUND_TRIPS["kernel"].matrix(kernel)[4].tolist() == kernel[4].flatten().tolist()


def test_heads_are_told_to_attention_layers_only() -> None:
    layers = find_layers(vit(), heads=2)
    assert {layer.role for layer in layers if layer.heads == 2} == {"q", "k", "v", "out"}
    assert {layer.heads for layer in layers if layer.role in ("fc1", "patch", "classifier")} == {None}
