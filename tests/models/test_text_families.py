"""Text families: planted truth, parity with autograd, round trips through save_pretrained, refusals."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from builders.folders import edit_json, edit_weights, load
from builders.runs import prepare
from builders.signals import watch
from builders.texts import FAMILIES, LABELS, LARGE, SMALL, Size, make, scatter, tokens, write
from builders.twins import Twin, finetuned
from tuneport import transfer
from tuneport.errors import CheckpointError, PairingError
from tuneport.measure.signals import INPUT, OUTPUT_GRADIENT
from tuneport.models.open import describe_module, open_model
from tuneport.pipeline.arithmetic import extract

Batch = tuple[dict[str, Tensor], Tensor]


def answers(module: Any, batch: Batch, head: Tensor | None = None) -> Tensor:
    """The output of a model: class scores (N, classes), or token scores (N, T, vocabulary)."""
    inputs, labels = batch
    kind = type(module).__name__
    if kind == "T5ForConditionalGeneration":
        return module(**inputs, decoder_input_ids=labels).logits
    if kind == "T5ForSequenceClassification":  # it looks for the end of the text
        ended = torch.cat([inputs["input_ids"][:, :-1], torch.full_like(labels[:, :1], 1)], 1)
        return module(input_ids=ended).logits
    if kind == "T5EncoderModel":
        assert head is not None
        return module(**inputs).last_hidden_state.mean(1) @ head
    return module(**inputs).logits


def loss_with(heads: dict[int, Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(module: nn.Module, batch: Batch) -> Tensor:
        scores, labels = answers(module, batch, heads.get(id(module))), batch[1]
        if scores.ndim == 2:
            return F.cross_entropy(scores, labels[:, 0] % scores.shape[1], reduction="sum")
        wanted = torch.cat([labels, labels], 1)[:, : scores.shape[1]]
        return F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum")

    return loss


# --- planted truth


def even_norms(module: nn.Module) -> None:
    with torch.no_grad():
        for part in module.modules():
            if "RMSNorm" in type(part).__name__ or "T5LayerNorm" in type(part).__name__:
                for parameter in part.parameters(recurse=False):
                    parameter.fill_(0.1 if "Gemma" in type(part).__name__ else 1.1)


ROTATED = ("t5", "t5-gated", "llama", "qwen3", "gemma2")  # a few of those with RMS norms


@pytest.mark.parametrize(("family", "turn"), [(family, family in ROTATED) for family in FAMILIES])
def test_a_twin_answers_like_the_finetuned_source(family: str, turn: bool) -> None:
    module = make(family)
    if turn:
        even_norms(module)
    source = describe_module(module)
    coordinates = Twin(source, FAMILIES[family].rotary, turn)
    target, moved = coordinates.build(), finetuned(source)
    head = torch.randn(SMALL.width, LABELS, generator=torch.Generator().manual_seed(3))
    heads = {id(module): head, id(moved): head, id(target): coordinates.stream.T.float() @ head}
    test = tokens(32, seed=99)[0]
    with torch.no_grad():
        before, wanted = answers(module, test, head), answers(moved, test, head)
        assert float((answers(target, test, heads[id(target)]) - before).abs().max()) < 2e-5  # the twin is one
    count = 256 if family == "t5-encoder" else 64  # a mean over tokens leaves small gradients
    result = transfer(module, moved, target, tokens(count), loss=loss_with(heads))
    with torch.no_grad():
        found = answers(result.apply(), test, heads[id(target)])
    difference, shift = float((found - wanted).abs().max()), float((before - wanted).abs().max())
    assert difference < 1e-4
    assert shift > 1e3 * difference
    assert {record.target for record in result.records} == {
        layer.name for layer in describe_module(target).architecture.layers
    }


@pytest.mark.parametrize("family", ["bert", "t5", "llama", "phi3", "gpt-neox"])
def test_the_naive_transfer_fails_on_the_same_twin(family: str) -> None:
    module = make(family)
    source = describe_module(module)
    target, moved = Twin(source, FAMILIES[family].rotary, False).build(), finetuned(source)
    test = tokens(32, seed=99)[0]
    result = transfer(module, moved, target, method="naive")
    with torch.no_grad():
        before, wanted, found = (answers(model, test) for model in (module, moved, result.apply()))
    assert float((found - wanted).norm()) > float((before - wanted).norm())  # worse than nothing


# --- captured signals against autograd


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_inputs_and_gradients_are_those_of_autograd(family: str) -> None:
    """G^T X is the gradient of the weight, and the sum of G that of the bias, also of the parts of fused weights."""
    module = make(family).double()
    layers = describe_module(module).architecture.layers
    head = torch.randn(SMALL.width, LABELS, generator=torch.Generator().manual_seed(3)).double()
    loss, (batch,) = loss_with({id(module): head}), tokens(6)
    seen = watch(module, layers, batch, loss, (INPUT, OUTPUT_GRADIENT), size=6)
    module.requires_grad_(True)
    loss(module, batch).backward()
    parameters = dict(module.named_parameters())
    covered: dict[str, int] = {}
    for layer in layers:
        inputs, gradients = seen[layer.name, INPUT], seen[layer.name, OUTPUT_GRADIENT]
        assert len(inputs) == len(gradients) == 1
        X, G = inputs[0].flatten(0, 1), gradients[0].flatten(0, 1)
        wanted = layer.matrix(parameters[layer.weight].grad)
        assert float(wanted.abs().max()) > 1e-6
        assert float((G.T @ X - wanted).abs().max()) < 1e-12 * max(1.0, float(wanted.abs().max())), layer.name
        if layer.bias is not None:
            bias = layer.vector(parameters[layer.bias].grad)
            assert float((G.sum(0) - bias).abs().max()) < 1e-12 * max(1.0, float(bias.abs().max())), layer.name
        covered[layer.weight] = covered.get(layer.weight, 0) + wanted.numel()
    assert covered == {name: parameters[name].numel() for name in covered}  # fused weights without gap or overlap


@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_weight_of_a_tower_is_a_layer(family: str) -> None:
    module = make(family)
    model = describe_module(module)
    linear = {
        f"{path}.weight"
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    }
    tied = {"lm_head.weight"} if FAMILIES[family].tied else set()
    assert {layer.weight for layer in model.architecture.layers} == linear - set(model.architecture.outside) - tied
    assert set(model.architecture.outside) <= {"lm_head.weight"}


@pytest.mark.parametrize("family", FAMILIES)
def test_roles_have_the_effect_of_their_name(family: str) -> None:
    """Without values nothing is mixed, without queries keys have no effect, and gate and up differ."""
    module = make(family)
    layers = {
        layer.role: layer for layer in describe_module(module).architecture.layers if layer.block == 0
    }  # T5: the decoder's
    head = torch.zeros(SMALL.width, LABELS)
    loss, (batch,) = loss_with({id(module): head}), tokens(4)

    def inputs_of(role: str) -> Tensor:
        return watch(module, [layers[role]], batch, loss, (INPUT,), size=4)[layers[role].name, INPUT][0]

    def changed(role: str, change: Callable[[Tensor], Tensor], seen: str) -> Tensor:
        """What `seen` reads after a change of the weights and biases of a role, which is undone."""
        layer, parameters = layers[role], dict(module.named_parameters())
        names = [name for name in (layer.weight, layer.bias) if name is not None]
        before = {name: parameters[name].detach().clone() for name in names}
        with torch.no_grad():
            layer.store(change(layer.matrix(before[layer.weight]).clone()), parameters[layer.weight])
            if layer.bias is not None:
                layer.store(change(layer.vector(before[layer.bias]).clone()), parameters[layer.bias])
            try:
                return inputs_of(seen)
            finally:
                for name in names:
                    parameters[name].copy_(before[name])

    def without_queries(kind: str) -> Tensor:
        layer, parameters = layers[f"{kind}q"], dict(module.named_parameters())
        names = [name for name in (layer.weight, layer.bias) if name is not None]
        before = {name: parameters[name].detach().clone() for name in names}
        with torch.no_grad():
            for name in names:
                part = layer.matrix(before[name]) if name == layer.weight else layer.vector(before[name])
                layer.store(torch.zeros_like(part), parameters[name])
            found = changed(f"{kind}k", lambda w: w + 1.0, f"{kind}out") - inputs_of(f"{kind}out")
            for name in names:
                parameters[name].copy_(before[name])
        return found

    for kind in ("", "cross_") if "cross_out" in layers else ("",):
        plain = inputs_of(f"{kind}out")
        assert float(plain.abs().max()) > 0.01
        assert float(changed(f"{kind}v", torch.zeros_like, f"{kind}out").abs().max()) == 0
        for role in ("q", "k"):
            moved = changed(f"{kind}{role}", lambda w: w.flip(0), f"{kind}out")
            assert float((moved - plain).abs().max()) > 1e-3
        assert float(without_queries(kind).abs().max()) < 1e-5
    if "up" in layers:
        down = "down" if "down" in layers else "fc2"
        plain = inputs_of(down)
        assert torch.allclose(changed("up", torch.neg, down), -plain, atol=1e-5)
        assert not torch.allclose(changed("gate", torch.neg, down), -plain, atol=1e-2)


# --- across families


def as_phi3(llama: Any) -> Any:
    """The same function with fused projections: Phi-3 is a Llama with fused weights."""
    other = make("phi3")
    state = llama.state_dict()
    for block in range(SMALL.depth):
        start = f"model.layers.{block}."
        parts = [state.pop(f"{start}self_attn.{name}_proj.weight") for name in "qkv"]
        state[f"{start}self_attn.qkv_proj.weight"] = torch.cat(parts)
        parts = [state.pop(f"{start}mlp.{name}_proj.weight") for name in ("gate", "up")]
        state[f"{start}mlp.gate_up_proj.weight"] = torch.cat(parts)
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("back", [False, True])
def test_a_llama_and_its_twin_with_fused_weights(back: bool) -> None:
    """From separate projections to fused ones and the other way: each part finds its own rows."""
    module = make("llama")
    twin = Twin(describe_module(module), rotary=True, turn=False).build()
    source, target = (as_phi3(module), twin) if back else (module, as_phi3(twin))
    moved, test = finetuned(describe_module(source)), tokens(32, seed=99)[0]
    result = transfer(source, moved, target, tokens(64), loss=loss_with({}))
    with torch.no_grad():
        before, wanted, found = (answers(model, test) for model in (target, moved, result.apply()))
    difference, shift = float((found - wanted).abs().max()), float((before - wanted).abs().max())
    assert difference < 1e-4
    assert shift > 1e3 * difference


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bert", "mpnet"),
        ("mpnet", "roberta"),
        ("roberta", "distilbert"),
        ("llama", "qwen2"),
        ("qwen3", "gemma"),
        ("gemma2", "phi3"),
        ("mistral", "gemma3"),
        ("gpt2", "gpt-neox"),
        ("t5", "t5-encoder"),
    ],
)
def test_one_family_to_another(one: str, other: str) -> None:
    """Layers pair by role, not by name; each block of the target moves whole."""
    source, target = make(one), make(other, LARGE)
    moved = finetuned(describe_module(source))
    head = {size: torch.randn(size, LABELS) for size in (SMALL.width, LARGE.width)}

    def loss(module: Any, batch: Batch) -> Tensor:
        return loss_with({id(module): head[module.config.hidden_size]})(module, batch)

    result = transfer(source, moved, target, tokens(32), loss=loss)
    inner = [layer for layer in describe_module(target).architecture.layers if layer.block is not None]
    records = {record.target: record for record in result.records}
    assert {layer.name for layer in inner} <= set(records)
    roles = {layer.name: layer.role for layer in describe_module(source).architecture.layers}
    assert all(roles[records[layer.name].source] == layer.role for layer in inner)


def test_families_with_different_blocks_are_refused() -> None:
    source, target = make("bert"), make("modernbert")
    with pytest.raises(
        PairingError, match=r"source blocks bert\.encoder\.layer have roles .*fc1, fc2; .* and no fc1, fc2"
    ):
        transfer(source, finetuned(describe_module(source)), target, tokens(8), loss=loss_with({}))


# --- folders


def cast(module: Any, dtype: torch.dtype) -> Any:
    return copy.deepcopy(module).to(dtype)


HALF = ("bert", "t5", "llama", "phi3")


@pytest.mark.parametrize(
    ("family", "dtype"), [(family, torch.bfloat16 if family in HALF else torch.float32) for family in FAMILIES]
)
def test_round_trip_through_save_pretrained(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Folders of a base, its fine-tune and a wider, deeper target; the result is what transformers loads."""
    base = make(family)
    write(tmp_path / "base", cast(base, dtype))
    write(tmp_path / "tuned", cast(finetuned(describe_module(base), amount=0.1), dtype))
    write(tmp_path / "target", cast(make(family, LARGE), dtype))
    width = torch.Generator().manual_seed(3)
    head = {size: torch.randn(size, LABELS, generator=width) for size in (SMALL.width, LARGE.width)}

    def loss(module: Any, batch: Batch) -> Tensor:
        return loss_with({id(module): head[module.config.hidden_size]})(module, batch)

    result = transfer(*(tmp_path / name for name in ("base", "tuned", "target")), tokens(24), loss=loss)
    out = result.save(tmp_path / "out")
    stored, wanted = load_file(out / "model.safetensors"), result.tensors()
    assert set(stored) == set(wanted)
    for name, tensor in stored.items():
        assert tensor.dtype == dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name
    loaded = load(out)
    assert type(loaded).__name__ == FAMILIES[family].kind
    before = load_file(tmp_path / "target" / "model.safetensors")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, wanted[result.target.weights.file_names[name]].float()), name
    moved = {result.target.weights.file_names[layer.weight] for layer in result.target.architecture.layers}
    assert {name for name in stored if not torch.equal(stored[name], before[name])} >= moved
    kept = {item.tensor for item in result.not_transported}
    assert kept == set(stored) - {result.target.weights.file_names[name] for name in result.task_vector}
    assert all(torch.equal(stored[name], before[name]) for name in kept)
    if FAMILIES[family].tied:
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_a_t5_whose_head_is_not_tied_keeps_its_two_matrices(tmp_path: Path) -> None:
    model = open_model(write(tmp_path / "flan", make("t5-gated")))
    assert model.architecture.outside == {"lm_head.weight": "head over the vocabulary: the target keeps its own"}
    assert not torch.equal(model.module.lm_head.weight, model.module.shared.weight)


class TestRefusals:
    def test_unknown_architectures(self, tmp_path: Path) -> None:
        config = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=60)
        write(tmp_path / "bloom", transformers.BloomForCausalLM(config))
        with pytest.raises(
            CheckpointError, match=r"holds a BloomForCausalLM, which tuneport does not know\. Known: "
        ) as caught:
            open_model(tmp_path / "bloom")
        assert "\n" not in str(caught.value)

    def test_an_encoder_as_language_model_is_unknown(self, tmp_path: Path) -> None:
        module = transformers.BertLMHeadModel(
            transformers.BertConfig(**FAMILIES["bert"].arguments(SMALL), is_decoder=True)
        )
        write(tmp_path / "bert", module)
        with pytest.raises(CheckpointError, match="holds a BertLMHeadModel, which tuneport does not know"):
            open_model(tmp_path / "bert")

    def test_a_classifier_of_another_size_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "bert", make("bert"))
        edit_json(tmp_path / "bert" / "config.json", id2label={str(i): str(i) for i in range(5)}, label2id=None)
        with pytest.raises(CheckpointError, match=r"tensors of BertForSequenceClassification are missing or misshapen"):
            open_model(tmp_path / "bert")

    def test_a_missing_block_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "bert", make("bert"))
        edit_weights(tmp_path / "bert", lambda tensors: tensors.pop("bert.encoder.layer.1.output.dense.weight"))
        with pytest.raises(CheckpointError, match=r"1 tensors .* missing or misshapen .*layer\.1\.output\.dense"):
            open_model(tmp_path / "bert")


# --- heads that come and go


def encoder(kind: str, size: Size = SMALL) -> Any:
    """A BERT or MPNet of another class, with the same weights in the parts that the classes share."""
    family = "mpnet" if kind.startswith("MPNet") else "bert"
    config = getattr(transformers, FAMILIES[family].config)(**FAMILIES[family].arguments(size))
    with torch.random.fork_rng():
        torch.manual_seed(size.seed)
        module = getattr(transformers, kind)(config)
        scatter(module)
    return module.eval()


class TestHeads:
    @pytest.mark.parametrize("family", ["MPNet", "Bert"])
    def test_a_folder_that_names_a_head_and_holds_the_base(self, family: str, tmp_path: Path) -> None:
        base = encoder(f"{family}Model")
        write(tmp_path / "base", base)
        edit_json(tmp_path / "base" / "config.json", architectures=[f"{family}ForMaskedLM"])
        model = open_model(tmp_path / "base")
        assert type(model.module).__name__ == f"{family}Model"
        assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in model.module.named_parameters())

    @pytest.mark.parametrize("named", ["BertModel", "BertForMaskedLM"])
    def test_a_base_without_its_pooler(self, named: str, tmp_path: Path) -> None:
        write(tmp_path / "base", encoder("BertModel"))
        edit_json(tmp_path / "base" / "config.json", architectures=[named])
        edit_weights(tmp_path / "base", lambda t: [t.pop(name) for name in list(t) if name.startswith("pooler")])
        model = open_model(tmp_path / "base")
        assert type(model.module).__name__ == "BertModel"
        assert model.module.pooler is None
        assert not [layer for layer in model.architecture.layers if layer.role == "pooler"]

    @pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification"])
    def test_a_named_head_whose_weights_are_missing_under_a_prefix(self, kind: str, tmp_path: Path) -> None:
        write(tmp_path / "base", encoder(kind))
        edit_weights(tmp_path / "base", lambda t: [t.pop(name) for name in list(t) if not name.startswith("bert.")])
        model = open_model(tmp_path / "base")
        assert type(model.module).__name__ == "BertModel"
        assert set(model.weights.file_names.values()) == set(load_file(tmp_path / "base" / "model.safetensors"))
        out = transfer(tmp_path / "base", moved_folder(tmp_path), tmp_path / "base", method="naive").save(
            tmp_path / "out"
        )
        again = open_model(out)
        assert set(again.weights.tensors) == set(model.weights.tensors)

    @pytest.mark.parametrize(
        ("base", "tuned"),
        [
            ("BertModel", "BertForSequenceClassification"),
            ("BertForSequenceClassification", "BertModel"),
            ("BertForMaskedLM", "BertModel"),
            ("BertModel", "BertForMaskedLM"),
            ("BertForMaskedLM", "BertForSequenceClassification"),
        ],
    )
    def test_a_fine_tune_in_another_class_than_its_base(self, base: str, tuned: str, tmp_path: Path) -> None:
        """Names with and without the prefix `bert.`: the task vector covers the weights that both share."""
        original, changed_model = encoder(base), encoder(tuned, replace(SMALL, seed=4))
        inner, changed = getattr(original, "bert", original), getattr(changed_model, "bert", changed_model)
        shared = {name: tensor for name, tensor in inner.state_dict().items() if name in changed.state_dict()}
        moved = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in shared.items()}
        changed.load_state_dict(moved, strict=False)
        write(tmp_path / "base", original)
        write(tmp_path / "tuned", changed_model)
        folders = [tmp_path / name for name in ("base", "tuned", "base")]
        with pytest.raises(CheckpointError, match=r"tensors of .* are not in ") as caught:
            prepare(*folders, signals="naive")  # heads are not skipped silently
        assert "\n" not in str(caught.value)
        job = prepare(*folders, signals="naive", exclude=["*cls.*", "*classifier.*", "*pooler.*"])
        shared = {name: tensor for name, tensor in shared.items() if not name.startswith("pooler")}
        prefix = "bert." if hasattr(original, "bert") else ""
        assert {name.removeprefix(prefix) for name in job.task_vector} == set(shared)
        for name in job.task_vector:
            wanted = moved[name.removeprefix(prefix)] - shared[name.removeprefix(prefix)]
            assert torch.equal(job.task_vector.dense(name), wanted), name
        extracted = extract(*folders[:2], exclude=["*cls.*", "*classifier.*", "*pooler.*"])
        stored = {job.source.weights.file_names[name]: name for name in job.task_vector}
        assert set(extracted) == set(stored)
        assert all(torch.equal(extracted.dense(file), job.task_vector.dense(name)) for file, name in stored.items())

    @pytest.mark.parametrize("old", ["base", "tuned", "both"])
    def test_old_names_of_norms(self, old: str, tmp_path: Path) -> None:
        """gamma and beta in one file, weight and bias in the other: the same model."""
        original = make("bert")
        write(tmp_path / "base", original)
        write(tmp_path / "tuned", finetuned(describe_module(original)))
        for name in ("base", "tuned") if old == "both" else (old,):
            edit_weights(tmp_path / name, to_old_names)
        assert set(extract(tmp_path / "base", tmp_path / "tuned")) == set(
            load_file(tmp_path / "base" / "model.safetensors")
        )
        result = transfer(tmp_path / "base", tmp_path / "tuned", tmp_path / "base", method="naive")
        stored = load_file(result.save(tmp_path / "out") / "model.safetensors")
        assert set(stored) == set(load_file(tmp_path / "base" / "model.safetensors"))
        wanted = load_file(tmp_path / "tuned" / "model.safetensors")
        name = "bert.encoder.layer.1.output.dense.weight"
        assert torch.allclose(stored[name], wanted[name], atol=1e-6)

    def test_the_error_about_heads_names_patterns_to_exclude(self, tmp_path: Path) -> None:
        """A base for pretraining and a classifier share no head: the patterns in the error make it work."""
        write(tmp_path / "base", encoder("BertForMaskedLM"))
        write(tmp_path / "tuned", encoder("BertForSequenceClassification", replace(SMALL, seed=3)))
        folders = [tmp_path / name for name in ("base", "tuned", "base")]
        with pytest.raises(CheckpointError) as caught:
            prepare(*folders, signals="naive")
        patterns = json.loads(re.findall(r"`exclude=(\[.*?\])`", str(caught.value))[0])
        assert patterns == ["bert.pooler.*", "classifier.*", "cls.*"]
        assert prepare(*folders, signals="naive", exclude=patterns).plan.pairs


def to_old_names(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "LayerNorm" in name]:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        tensors[old] = tensors.pop(name)


def moved_folder(tmp_path: Path) -> Path:
    """The base of this test with its linear layers moved."""
    shutil.copytree(tmp_path / "base", tmp_path / "moved")

    def move(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            if name.endswith("dense.weight"):
                tensors[name] = tensors[name] + 0.1

    return edit_weights(tmp_path / "moved", move)
