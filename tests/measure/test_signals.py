"""Signals against autograd and hooks, for every way to compute a linear map."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builders.linear_maps import CASES, Called, layers_of, relative, squares
from builders.signals import watch
from builders.toy import MATRICES, ToyViT, batches, loss
from tuneport.layers import find_layers
from tuneport.measure.signals import INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT, SIGNALS, frozen

BICO = (INPUT, OUTPUT_GRADIENT)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("case", CASES)
def test_signals_give_the_weight_gradient_of_autograd(case: str, training: bool) -> None:
    """G^T X is the weight's gradient and the sum of G the bias's, exactly."""
    model, batch = CASES[case]()
    model.double().train(training)
    batch = batch.double() if batch.is_floating_point() else batch
    layers = layers_of(model)
    assert layers
    signals = watch(model, layers, batch, squares, SIGNALS)
    assert all(parameter.grad is None for parameter in model.parameters())
    reference = copy.deepcopy(model).eval()
    squares(reference, batch).backward()
    parameters = dict(reference.named_parameters())
    for layer in layers:
        x, g = signals[layer.name, INPUT], signals[layer.name, OUTPUT_GRADIENT]
        assert len(x) == len(g)
        assert all(one.shape[0] == 3 and one.ndim == 3 for one in (*x, *g))
        found = sum(torch.einsum("nto,nti->oi", b, a) for a, b in zip(x, g, strict=True))
        gradient = parameters[layer.weight].grad
        assert relative(found, layer.matrix(gradient)) < 1e-12, layer.name
        if layer.bias is not None:
            bias = layer.vector(parameters[layer.bias].grad)
            # a key's bias shifts all logits equally: its gradient is a rounding error
            assert torch.allclose(sum(one.sum((0, 1)) for one in g), bias, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_input_gradients_follow_from_the_weight(case: str) -> None:
    model, batch = CASES[case]()
    model.double()
    batch = batch.double() if batch.is_floating_point() else batch
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layers = layers_of(model)
    assert layers
    signals = watch(model, layers, batch, squares, SIGNALS)
    for layer in layers:
        assert all(signals[layer.name, signal] for signal in SIGNALS)
        weight = layer.matrix(parameters[layer.weight])
        bias = layer.vector(parameters[layer.bias]) if layer.bias is not None else 0
        if layer.bias is None and "attn.in_proj_bias" in parameters:  # separate projections share one bias
            start = 6 * ("q_proj_weight", "k_proj_weight", "v_proj_weight").index(layer.weight.rsplit(".", 1)[-1])
            bias = parameters["attn.in_proj_bias"][start : start + 6]
        for x, y in zip(signals[layer.name, INPUT], signals[layer.name, OUTPUT], strict=True):
            assert torch.allclose(x @ weight.T + bias, y, atol=1e-12), layer.name
        for g, h in zip(signals[layer.name, OUTPUT_GRADIENT], signals[layer.name, INPUT_GRADIENT], strict=True):
            assert torch.allclose(g @ weight, h, atol=1e-12), layer.name


@pytest.mark.parametrize("case", CASES)
def test_forward_signals_need_no_backward_pass(case: str) -> None:
    """Without gradients torch would take fused paths that hide layers: the same signals must be seen."""
    model, batch = CASES[case]()
    layers = layers_of(model)
    assert layers
    alone, together = (watch(model, layers, batch, squares, which) for which in ([INPUT, OUTPUT], SIGNALS))
    assert set(alone) == {(layer.name, signal) for layer in layers for signal in (INPUT, OUTPUT)}
    for key, values in alone.items():
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(values, together[key], strict=True)), key


def test_inputs_are_the_tensors_that_a_plain_hook_sees() -> None:
    model, batch = CASES["two linears"]()
    seen = {}
    handles = [
        part.register_forward_hook(lambda _, args, out, name=name: seen.update({name: (args[0], out)}))
        for name, part in model.named_children()
    ]
    signals = watch(model, layers_of(model), batch, squares, [INPUT, OUTPUT])
    for handle in handles:
        handle.remove()
    assert seen.keys() == dict(model.named_children()).keys() != set()
    for name, (x, y) in seen.items():
        assert torch.equal(signals[f"{name}.weight", INPUT][0], x)
        assert torch.equal(signals[f"{name}.weight", OUTPUT][0], y)


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_tokens_come_sample_by_sample(batch_first: bool) -> None:
    """A sample with its number in every feature: token order (N, T, d), also for sequence-first modules."""
    module = nn.MultiheadAttention(6, 2, batch_first=batch_first, bias=False)
    numbered = torch.arange(15.0).reshape(3, 5, 1).expand(3, 5, 6).contiguous()  # sample n, token t: 5 n + t

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        out = self.attn(x, x, x, attn_mask=torch.full((5, 5), -math.inf).fill_diagonal_(0.0))[0]
        return out if batch_first else out.transpose(0, 1)

    model = Called(forward, attn=module)
    layers = layers_of(model)
    signals = watch(model, layers, numbered, squares, BICO)
    for layer in layers[:3]:
        assert torch.equal(signals[layer.name, INPUT][0], numbered)
    # each token sees itself only, so out_proj reads v of the same token: linear in the token's number
    value = numbered[0, 1] @ module.in_proj_weight[12:].T
    expected = torch.arange(15.0).reshape(3, 5, 1) * value.detach()
    assert torch.allclose(signals["attn.out_proj.weight", INPUT][0], expected, atol=1e-4)


def test_a_layer_called_twice_reports_its_calls_in_order() -> None:
    model, batch = CASES["called twice"]()
    signals = watch(model, layers_of(model), batch, squares, [*BICO, OUTPUT])
    first, second = signals["fc.weight", INPUT]
    assert torch.equal(first, batch)
    assert torch.allclose(second, model.fc(batch).sin().detach())
    leaf = signals["fc.weight", OUTPUT][1].clone().requires_grad_()
    (leaf * torch.linspace(0.5, 1.5, 4)).pow(2).sum().backward()
    assert torch.allclose(signals["fc.weight", OUTPUT_GRADIENT][1], leaf.grad)


def test_an_error_inside_attention_restores_linear() -> None:
    model = Called(lambda m, x: m.attn(x, x[..., :-1], x)[0], attn=nn.MultiheadAttention(6, 2, batch_first=True))
    linear = F.linear
    with pytest.raises((RuntimeError, AssertionError)):
        watch(model, layers_of(model), torch.randn(3, 5, 6), squares, BICO)
    assert F.linear is linear


def test_frozen_works_on_one_model_twice() -> None:
    model = ToyViT().train()
    with frozen(model), frozen(model):
        assert not model.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_named_matrices_are_watched() -> None:
    model = ToyViT()
    with_proj, without = find_layers(model, matrices=MATRICES), find_layers(model)
    signals = watch(model, with_proj, batches(4)[0], loss, BICO)
    assert {name for name, _ in signals} == {layer.name for layer in with_proj}
    assert {name for name, _ in watch(model, without, batches(4)[0], loss, BICO)} == {layer.name for layer in without}


def test_threads_that_watch_attention_restore_torch() -> None:
    linear, found = F.linear, []

    def look() -> None:
        model = nn.MultiheadAttention(6, 2, batch_first=True)
        layers = find_layers(model)
        for _ in range(40):
            seen = watch(model, layers, torch.randn(3, 5, 6), lambda m, x: m(x, x, x)[0].square().sum(), BICO)
            found.append(len(seen))

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.linear is linear
    assert len(found) == 120
    assert len(set(found)) == 1
