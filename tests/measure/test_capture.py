"""Statistics against stored signals; the number of passes; models and memory are restored."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builders.linear_maps import CASES, Called, attention, layers_of, relative, squares
from builders.signals import watch
from builders.toy import ToyViT, batches, loss, plan
from tuneport.errors import CaptureError
from tuneport.layers import TokenLayout
from tuneport.maps.statistics import Statistics
from tuneport.measure.capture import PairedBatch, Request, measure_pairs
from tuneport.measure.signals import INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT, SIGNALS, WEIGHT_GRADIENT
from tuneport.measure.tokens import TokenLimit, match_tokens
from tuneport.pairing import LayerPair, pair_layers
from tuneport.types import Sides

BICO = (INPUT, OUTPUT_GRADIENT)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def pairs_of(source: nn.Module, target: nn.Module) -> list[LayerPair]:
    return list(pair_layers(layers_of(source), layers_of(target)).pairs)


def measured(source: nn.Module, target: nn.Module, data: list, signals: Any = BICO, **options: Any):
    pairs = options.pop("pairs", None) or pairs_of(source, target)
    losses = Sides(options.pop("source_loss", squares), options.pop("target_loss", squares))
    heard = {name: options.pop(name) for name in ("progress", "start", "on_batch") if name in options}
    return measure_pairs(Sides(source, target), pairs, data, losses, Request(signals, **options), **heard)


@pytest.mark.parametrize("case", CASES)
def test_statistics_equal_the_product_of_stored_signals(case: str) -> None:
    source, batch = CASES[case]()
    batch = batch.double() if batch.is_floating_point() else batch
    target = copy.deepcopy(source)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    source.double(), target.double()
    kinds = [INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT, WEIGHT_GRADIENT]
    pairs = [LayerPair(one, one) for one in layers_of(source)]  # no fixed maps: measure both sides everywhere
    found = measured(source, target, [batch[:2], batch[2:]], kinds, pairs=pairs)
    whole = measured(source, target, [batch], kinds, pairs=pairs)
    assert (found.samples, whole.samples) == (3, 3)
    source_signals = watch(source, layers_of(source), batch, squares, SIGNALS)
    target_signals = watch(target, layers_of(target), batch, squares, SIGNALS)
    assert set(found) == {(pair.target.name, kind) for pair in pairs for kind in kinds[:4]}
    for key in found:
        expected = sum(
            a.flatten(0, 1).T @ b.flatten(0, 1) for a, b in zip(source_signals[key], target_signals[key], strict=True)
        )
        assert relative(found.covariances[key].matrix, expected) < 1e-10, key
        assert relative(whole.covariances[key].matrix, expected) < 1e-10, key
        assert float(found.covariances[key].source_energy) == pytest.approx(
            sum(float(a.pow(2).sum()) for a in source_signals[key])
        )
    for name, gradient in found.weight_gradients.items():
        x, g = target_signals[name, INPUT], target_signals[name, OUTPUT_GRADIENT]
        per_call = [torch.einsum("nto,nti->noi", b, a) for a, b in zip(x, g, strict=True)]
        assert relative(gradient.total, sum(one.sum(0) for one in per_call)) < 1e-10


def test_queries_keys_and_values_share_one_covariance() -> None:
    for make in (lambda: ToyViT(), lambda: ToyViT(fused=True)):
        source, target = make(), ToyViT(seed=1)
        found = measured(
            source, target, batches(8), pairs=plan(source, target).pairs, source_loss=loss, target_loss=loss
        )
        of = {role: found.covariances[f"blocks.1.attn.{role}_proj.weight", INPUT] for role in "qkv"}
        assert of["q"] is of["k"] is of["v"]
        gradients = {role: found.covariances[f"blocks.1.attn.{role}_proj.weight", OUTPUT_GRADIENT] for role in "qkv"}
        assert len({id(covariance) for covariance in gradients.values()}) == 3
        assert found.covariances["blocks.0.attn.q_proj.weight", INPUT] is not of["q"]
        assert found.covariances["blocks.1.fc1.weight", INPUT] is not of["q"]
        assert of["q"].tokens == 8 * 5


class Count:
    """Counts forward and backward passes through a model with hooks."""

    def __init__(self, model: nn.Module, last: nn.Module) -> None:
        self.forward = self.backward = 0
        self._handles = [
            model.register_forward_hook(lambda *_: self._add("forward")),
            last.register_full_backward_hook(lambda *_: self._add("backward")),
        ]

    def _add(self, which: str) -> None:
        setattr(self, which, getattr(self, which) + 1)

    def stop(self) -> tuple[int, int]:
        for handle in self._handles:
            handle.remove()
        return self.forward, self.backward


@pytest.mark.parametrize(
    ("signals", "backward"), [(BICO, 3), ((INPUT, OUTPUT), 0), ((WEIGHT_GRADIENT,), 3), (SIGNALS, 3)]
)
def test_one_forward_and_one_backward_per_model_and_batch(signals: tuple, backward: int) -> None:
    source, target = ToyViT(), ToyViT(width=16, seed=1)
    counts = [Count(model, model.classifier) for model in (source, target)]
    grad_modes = []

    def spy(model: nn.Module, batch: Any) -> Tensor:
        grad_modes.append(torch.is_grad_enabled())
        return loss(model, batch)

    found = measured(
        source,
        target,
        batches(24, batch=8),
        signals,
        pairs=plan(source, target).pairs,
        source_loss=spy,
        target_loss=spy,
    )
    seen = [count.stop() for count in counts]
    assert seen[1] == (3, backward)
    assert seen[0] == ((0, 0) if set(signals) == {"weight_gradient"} else (3, backward))  # its signals are not wanted
    assert found.passes == {"forward": 3, "backward": backward}
    assert grad_modes == [bool(backward)] * (seen[0][0] + seen[1][0])
    assert found.samples == 24


def test_progress_and_paired_batches() -> None:
    source, target = ToyViT(), ToyViT(size=12, seed=1)
    steps = []
    data = [
        PairedBatch(small, large)
        for small, large in zip(batches(20, 8, batch=8), batches(20, 12, batch=8), strict=True)
    ]
    found = measured(
        source,
        target,
        data,
        pairs=plan(source, target).pairs,
        source_loss=loss,
        target_loss=loss,
        match=match_tokens(TokenLayout(1, (2, 2)), TokenLayout(1, (3, 3))),
        progress=steps.append,
    )
    assert steps == [8, 8, 4]
    assert found.covariances["blocks.0.fc1.weight", INPUT].tokens == 20 * 10
    assert found.covariances["classifier.weight", INPUT].tokens == 20


def test_a_batch_may_have_its_own_match() -> None:
    """A match that drops the last token of each sample keeps it out of the sums."""
    model, batch = CASES["linear"]()
    data = [PairedBatch(batch, batch, match=lambda a, b: (a[:, :-1].flatten(0, 1), b[:, :-1].flatten(0, 1)))]
    found = measured(model, copy.deepcopy(model), data)
    short = batch[:, :-1].flatten(0, 1).double()
    assert relative(found.covariances["fc.weight", INPUT].matrix, short.T @ short) < 1e-6


def test_sides_with_fixed_maps_are_not_measured() -> None:
    source, target = ToyViT(), ToyViT(seed=1)
    found = measured(source, target, batches(8), pairs=plan(source, target).pairs, source_loss=loss, target_loss=loss)
    assert ("patch_embedding.weight", INPUT) not in found
    assert ("patch_embedding.weight", OUTPUT_GRADIENT) in found
    assert ("classifier.weight", INPUT) in found
    assert ("classifier.weight", OUTPUT_GRADIENT) not in found


# --- models are restored


def state(model: nn.Module) -> list:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        [part.training for part in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad for parameter in model.parameters()],
        [len(getattr(part, kind)) for part in model.modules() for kind in hooks],
        [parameter._backward_hooks for parameter in model.parameters()],
        [parameter.dtype for parameter in model.parameters()],
    ]


@pytest.mark.parametrize("fails", [None, "source", "target", "backward"])
@pytest.mark.parametrize("fast", [True, False])
def test_models_and_torch_settings_are_restored(fails: str | None, fast: bool) -> None:
    models = {name: attention(batch_first=True)()[0] for name in ("source", "target")}
    for model in models.values():
        model.train()
        model.attn.out_proj.eval()
        model.attn.in_proj_bias.requires_grad_(False)
    before = {name: (state(model), copy.deepcopy(model.state_dict())) for name, model in models.items()}

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(*_) -> Tensor:
            raise ZeroDivisionError("in backward")

    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        assert not model.training
        value = squares(model, batch)
        if fails == "backward":
            return Broken.apply(value)
        if fails is not None and model is models[fails]:
            raise ZeroDivisionError("in the loss")
        return value

    linear, fast_path = F.linear, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    grad = torch.is_grad_enabled()
    try:
        data = [torch.randn(3, 5, 6)]
        options = {"source_loss": failing, "target_loss": failing}
        if fails is None:
            measured(models["source"], models["target"], data, **options)
        else:
            with pytest.raises(ZeroDivisionError):
                measured(models["source"], models["target"], data, **options)
        assert torch.backends.mha.get_fastpath_enabled() is fast
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    assert F.linear is linear
    assert torch.nn.functional.linear is linear
    assert torch.is_grad_enabled() is grad
    for name, model in models.items():
        assert state(model) == before[name][0]
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before[name][1].items())


def test_existing_gradients_are_kept() -> None:
    model, batch = CASES["linear"]()
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    measured(model, model, [batch])
    assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight))


# --- tensors changed in place


def residual_in_place(model: nn.Module, x: Tensor) -> Tensor:
    x = x * 1.0
    x += model.a(x).tanh()
    x += model.b(x).tanh()
    return x


def residual(model: nn.Module, x: Tensor) -> Tensor:
    x = x + model.a(x).tanh()
    return x + model.b(x).tanh()


def output_in_place(model: nn.Module, x: Tensor) -> Tensor:
    y = model.a(x)
    y *= 2
    z = model.b(y)
    y.zero_()
    return z


def output_apart(model: nn.Module, x: Tensor) -> Tensor:
    return model.b(model.a(x) * 2)


@pytest.mark.parametrize(
    ("changing", "pure", "signals"),
    [
        (residual_in_place, residual, (INPUT, OUTPUT)),
        (output_in_place, output_apart, (INPUT, OUTPUT)),
        (lambda m, x: m.b(F.relu_(m.a(x))), lambda m, x: m.b(F.relu(m.a(x))), (INPUT, OUTPUT, OUTPUT_GRADIENT)),
        (lambda m, x: m.b(m.a(x).mul_(2)), output_apart, SIGNALS),
        (lambda m, x: m.a(x).add_(m.b(x)), lambda m, x: m.a(x) + m.b(x), SIGNALS),
    ],
    ids=["x += in a residual stream", "output zeroed after use", "relu in place", "output scaled", "sum in place"],
)
def test_changes_in_place_do_not_reach_the_signals(changing: Callable, pure: Callable, signals: tuple) -> None:
    parts = {"a": nn.Linear(4, 4).double(), "b": nn.Linear(4, 4).double()}
    one, other = Called(changing, **parts), Called(pure, **parts)
    batch = torch.randn(3, 5, 4, dtype=torch.float64)
    found, expected = (measured(model, model, [batch], signals) for model in (one, other))
    assert set(found) == set(expected)
    for key in expected:
        assert relative(found.covariances[key].matrix, expected.covariances[key].matrix) < 1e-12, key
    found, expected = (watch(model, layers_of(model), batch, squares, signals) for model in (one, other))
    for key in expected:
        assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(found[key], expected[key], strict=True)), key


# --- errors


def test_error_for_nan_names_layer_and_batch() -> None:
    model, batch = CASES["two linears"]()
    target = copy.deepcopy(model)
    with torch.no_grad():
        target.b.weight[0, 0] = math.nan
    with pytest.raises(CaptureError, match=r"NaN or Inf in batch 0 at .*\(output\).*: check the weights and the calib"):
        measured(model, target, [batch], (OUTPUT,))
    broken = batch.clone()
    broken[1, 2, 3] = math.nan
    with pytest.raises(CaptureError, match=r"NaN or Inf in batch 1 at a\.weight \(input\), b\.weight \(input\): "):
        measured(model, copy.deepcopy(model), [batch, broken], (INPUT,))


def test_layers_that_never_run_are_absent() -> None:
    source = Called(lambda m, x: m.a(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    target = Called(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    batch = torch.randn(3, 5, 4)
    for one, other in ((source, target), (target, source)):
        found = measured(one, other, [batch])
        assert set(found) == {("a.weight", INPUT), ("a.weight", OUTPUT_GRADIENT)}


@pytest.mark.parametrize("more", ["source", "target"])
def test_pairs_with_different_numbers_of_calls_are_refused(more: str) -> None:
    once = Called(lambda m, x: m.a(x), a=nn.Linear(4, 4))
    twice = Called(lambda m, x: m.a(m.a(x)), a=nn.Linear(4, 4))
    source, target = (twice, once) if more == "source" else (once, twice)
    counts = (2, 1) if more == "source" else (1, 2)
    text = rf"source layer a\.weight ran {counts[0]} times and target layer a\.weight {counts[1]} times on batch 0"
    with pytest.raises(CaptureError, match=text):
        measured(source, target, [torch.randn(3, 5, 4)])


def test_layers_that_stop_sharing_their_input_are_refused() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model.q(x) + model.k(x if len(x) == 3 else x * 2)

    source, target = (Called(forward, q=nn.Linear(4, 4), k=nn.Linear(4, 4)) for _ in range(2))
    measured(source, target, [torch.randn(3, 5, 4), torch.randn(3, 5, 4)])
    with pytest.raises(CaptureError, match=r"k\.weight read the same tensor as another layer in the first batch but"):
        measured(source, target, [torch.randn(3, 5, 4), torch.randn(2, 5, 4)])


def test_bad_arguments_are_refused() -> None:
    model, batch = CASES["linear"]()
    with pytest.raises(CaptureError, match=r"unknown signals activation; known: input, output, output_gradient, inp"):
        measured(model, model, [batch], ("activation",))
    with pytest.raises(CaptureError, match=r"there are no calibration batches; give at least one sample\."):
        measured(model, model, [])
    with pytest.raises(CaptureError, match=r"the loss must return one number .*, got a tensor of shape \(3, 5, 7\)\."):
        measured(model, model, [batch], source_loss=lambda m, x: m(x))
    with pytest.raises(CaptureError, match=r"the loss must return one number .*, got float\."):
        measured(model, model, [batch], source_loss=lambda m, x: m(x).sum().item())
    with pytest.raises(
        CaptureError, match=r"the loss does not depend on any paired layer: no gradient can be measured"
    ):
        measured(model, model, [batch], source_loss=lambda _, x: x.sum())
    with pytest.raises(CaptureError, match=r"cannot tell the size of a batch of type str; use PairedBatch\(size=...\)"):
        measured(model, model, ["text"])


@pytest.mark.parametrize(
    "wrap", [lambda x: {"pixels": x}, lambda x: (x, 1), lambda x: [{"a": None, "b": x}], lambda x: PairedBatch(x, x)]
)
def test_batches_may_be_nested(wrap: Callable) -> None:
    model, batch = CASES["linear"]()
    inner = lambda m, _: squares(m, batch)  # noqa: E731
    assert measured(model, model, [wrap(batch)], source_loss=inner, target_loss=inner).samples == 3


def test_signals_of_a_batch_are_freed() -> None:
    source, target = ToyViT(), ToyViT(seed=1)
    seen: list[weakref.ref] = []

    def spy(_: nn.Module, args: tuple, out: Tensor) -> None:
        seen.extend((weakref.ref(args[0]), weakref.ref(out)))

    handles = [
        part.register_forward_hook(spy)
        for model in (source, target)
        for part in model.modules()
        if isinstance(part, nn.Linear)
    ]
    alive: list[int] = []
    copies: list[int] = []

    def signals_alive() -> int:
        tensors = (part for part in gc.get_objects() if issubclass(type(part), Tensor))
        return sum(tuple(part.shape) == (8, 5, 12) for part in tensors)  # (N, T, d)

    before = signals_alive()

    def count(_: int) -> None:
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
        copies.append(signals_alive() - before)

    found = measured(
        source,
        target,
        batches(16, batch=8),
        SIGNALS,
        pairs=plan(source, target).pairs,
        source_loss=loss,
        target_loss=loss,
        progress=count,
    )
    for handle in handles:
        handle.remove()
    gc.collect()
    assert len(seen) == 2 * 2 * 2 * 13
    assert alive == [0, 0]
    assert found.samples == 16
    assert copies == [0, 0]  # copies of signals are freed before the next batch
    assert signals_alive() == before


def test_signals_in_half_precision_are_multiplied_exactly_and_summed_in_double() -> None:
    model, batch = CASES["two linears"]()
    model, batch = model.bfloat16(), batch.bfloat16()
    found = measured(model, copy.deepcopy(model), [batch], BICO)
    covariance = found.covariances["a.weight", INPUT]
    assert covariance.matrix.dtype == torch.float64
    assert covariance.signal_dtype == torch.bfloat16
    exact = batch.double().flatten(0, 1)
    assert relative(covariance.matrix, exact.T @ exact) < 1e-7  # sums over a batch are float32


def test_limited_covariances_sum_the_drawn_tokens() -> None:
    # in float64: passes in batches of another size differ by its rounding, 1e-16, far below the 1e-7 of assert_close
    source, target, limit = ToyViT().double(), ToyViT().double(), TokenLimit(20, 12, seed=1)
    pairs = plan(source, target).pairs

    def given(size: int) -> list[tuple[Tensor, Tensor]]:
        return [(images.double(), labels) for images, labels in batches(count=12, batch=size)]

    def measured(size: int) -> Statistics:
        samples = given(size)
        return measure_pairs(Sides(source, target), pairs, samples, Sides(loss, loss), Request(BICO, limit=limit))

    whole, parts = measured(12), measured(5)
    for key in whole:
        assert whole.covariances[key].tokens == parts.covariances[key].tokens <= 20
        torch.testing.assert_close(whole.covariances[key].matrix, parts.covariances[key].matrix)
    pair = next(pair for pair in pairs if pair.target.role == "fc1")
    [batch] = given(12)
    sides = ((source, pair.source), (target, pair.target))
    x, y = (watch(model, [layer], batch, loss, [INPUT])[layer.name, INPUT][0].flatten(0, 1) for model, layer in sides)
    rows = limit.rows(0, 12, len(x))
    assert rows is not None
    expected = x[rows].T @ y[rows]
    torch.testing.assert_close(whole.covariances[pair.target.name, INPUT].matrix, expected)


@pytest.mark.parametrize("limit", [None, TokenLimit(60, 24)])
def test_a_batch_in_parts_has_the_sums_of_the_whole(limit: TokenLimit | None) -> None:
    source, target = ToyViT().double(), ToyViT(width=16, seed=1).double()
    given = [(images.double(), labels) for images, labels in batches(24, batch=12)]
    pairs, steps = plan(source, target).pairs, []
    whole, parts = (
        measured(
            source,
            target,
            given,
            SIGNALS,
            pairs=pairs,
            source_loss=loss,
            target_loss=loss,
            most_samples=most,
            progress=steps.append,
            limit=limit,
        )
        for most in (None, 5)
    )
    assert steps == [12, 12, 5, 5, 2, 5, 5, 2]
    assert parts.samples == whole.samples == 24
    assert parts.passes == whole.passes  # they count batches, for resume
    for key, one in whole.covariances.items():
        assert parts.covariances[key].tokens == one.tokens
        assert torch.allclose(parts.covariances[key].matrix, one.matrix, rtol=1e-9, atol=1e-12)
    for name, one in whole.weight_gradients.items():
        assert torch.allclose(parts.weight_gradients[name].total, one.total, rtol=1e-9, atol=1e-12)


def test_a_batch_with_its_own_match_is_divided_by_its_part_function() -> None:
    source, target = ToyViT(), ToyViT(width=16, seed=1)
    images, labels = batches(12, batch=12)[0]
    sizes: list[int] = []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        sizes.append(len(batch[1]))
        return loss(model, batch)

    def part(start: int, stop: int) -> PairedBatch:
        half = (images[start:stop], labels[start:stop])
        return PairedBatch(half, half, size=stop - start, match=match)

    match = match_tokens(None, None)
    whole = PairedBatch((images, labels), (images, labels), size=12, match=match)
    for batch, wanted in ((whole, [12, 12]), (replace(whole, part=part), [8, 8, 4, 4])):
        sizes.clear()
        measured(
            source,
            target,
            [batch],
            pairs=plan(source, target).pairs,
            source_loss=counted,
            target_loss=counted,
            most_samples=8,
        )
        assert sizes == wanted
