"""Similarity of two models against NumPy code of the definitions, for rotated twins, and along a fine-tuning."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from builders import toy
from builders.folders import Zoo
from builders.signals import watch
from paper.likeness import average_by_block, compare_layers, compare_outputs, measure_drift
from paper.similarity import Similarity, TokenAgreement, cka, token_cosine
from tuneport.data.formats import read_plain
from tuneport.errors import TuneportError
from tuneport.measure.signals import INPUT, OUTPUT, OUTPUT_GRADIENT
from tuneport.models.open import open_model

Array = NDArray[np.float64]


def numpy_cka(X: Array, Y: Array) -> float:
    """From the definition: HSIC of centred Gram matrices."""
    n = len(X)
    H = np.eye(n) - np.ones((n, n)) / n
    K, L = H @ (X @ X.T) @ H, H @ (Y @ Y.T) @ H
    return float((K * L).sum() / np.sqrt((K * K).sum() * (L * L).sum()))


def numpy_debiased(X: Array, Y: Array) -> float:
    """HSIC as the average over all ordered quadruples of distinct tokens (the U-statistic itself)."""
    K, L = X @ X.T, Y @ Y.T

    def hsic(A: Array, B: Array) -> float:
        total, count, n = 0.0, 0, len(A)
        for i in range(n):
            for j in range(n):
                for q in range(n):
                    for r in range(n):
                        if len({i, j, q, r}) == 4:
                            total += A[i, j] * (B[i, j] + B[q, r] - 2 * B[i, q])
                            count += 1
        return total / count

    return hsic(K, L) / math.sqrt(hsic(K, K) * hsic(L, L))


def draw(seed: int, tokens: int, *widths: int, offset: float = 0.0) -> list[torch.Tensor]:
    """Signals that share a part, so that CKA is neither 0 nor 1."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(tokens, max(widths), generator=generator, dtype=torch.float64)
    noise = [torch.randn(tokens, width, generator=generator, dtype=torch.float64) for width in widths]
    return [shared[:, :width] + part + offset for width, part in zip(widths, noise, strict=True)]


sizes = st.tuples(st.integers(0, 10**6), st.integers(5, 40), st.integers(1, 12), st.integers(1, 12))


class TestAgainstNumpy:
    @given(sizes, st.sampled_from([0.0, 1.0, 1000.0]))
    @settings(deadline=None, max_examples=60)
    def test_cka(self, size: tuple[int, int, int, int], offset: float) -> None:
        seed, tokens, *widths = size
        X, Y = draw(seed, tokens, *widths, offset=offset)
        assert cka(X, Y) == pytest.approx(numpy_cka(X.numpy() - offset, Y.numpy() - offset), abs=1e-8)

    @given(sizes)
    @settings(deadline=None, max_examples=10)
    def test_debiased_cka(self, size: tuple[int, int, int, int]) -> None:
        seed, _, *widths = size
        X, Y = draw(seed, 9, *widths)
        try:
            expected = numpy_debiased(X.numpy(), Y.numpy())
        except ValueError:  # an unbiased estimate of a positive number may be negative
            assert math.isnan(cka(X, Y, debiased=True))
        else:
            assert cka(X, Y, debiased=True) == pytest.approx(expected, abs=1e-8)

    @given(sizes)
    @settings(deadline=None, max_examples=30)
    def test_cosine(self, size: tuple[int, int, int, int]) -> None:
        seed, tokens, width, other = size
        X, Y = draw(seed, tokens, width, width)
        x, y = X.numpy(), Y.numpy()
        cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        assert token_cosine(X, Y) == pytest.approx(cosines.mean(), abs=1e-8)
        R = np.random.default_rng(seed).normal(size=(width, other))
        Z = draw(seed + 1, tokens, other)[0].numpy()
        moved = x @ R
        cosines = (moved * Z).sum(1) / np.linalg.norm(moved, axis=1) / np.linalg.norm(Z, axis=1)
        found = token_cosine(X, torch.from_numpy(Z), torch.from_numpy(R))
        assert found == pytest.approx(cosines.mean(), abs=1e-8)


class TestProperties:
    @given(sizes, st.floats(1e-3, 1e3), st.booleans())
    @settings(deadline=None, max_examples=60)
    def test_cka_is_invariant_to_rotation_scale_and_offset(
        self, size: tuple[int, int, int, int], scale: float, debiased: bool
    ) -> None:
        seed, tokens, *widths = size
        X, Y = draw(seed, tokens, *widths)
        Q = toy.rotation(X.shape[1], torch.Generator().manual_seed(seed))
        before, after = (cka(signal, Y, debiased=debiased) for signal in (X, scale * X @ Q + 3.0))
        assert after == pytest.approx(before, abs=1e-8, nan_ok=True)
        assert cka(X, scale * X @ Q) == pytest.approx(1.0, abs=1e-8)

    @given(sizes, st.lists(st.integers(1, 9), min_size=1, max_size=8))
    @settings(deadline=None, max_examples=40)
    def test_streamed_equals_in_memory(self, size: tuple[int, int, int, int], cuts: list[int]) -> None:
        seed, tokens, *widths = size
        X, Y = draw(seed, tokens, *widths)
        streamed = Similarity(*widths)
        start = 0
        for stop in [*np.cumsum(cuts).tolist(), tokens]:
            streamed.update(X[start:stop], Y[start:stop])
            start = min(stop, tokens)
        for debiased in (False, True):
            assert streamed.cka(debiased=debiased) == pytest.approx(cka(X, Y, debiased=debiased), abs=1e-8, nan_ok=True)
        assert streamed.cosine == pytest.approx(token_cosine(X, Y), abs=1e-12, nan_ok=True)
        torch.testing.assert_close(streamed.matrix, X.T @ Y)

    def test_few_tokens_bias_only_the_plain_estimate(self) -> None:
        generator = torch.Generator().manual_seed(0)
        X, Y = (torch.randn(40, 200, generator=generator) for _ in range(2))
        assert cka(X, Y) > 0.7
        assert abs(cka(X, Y, debiased=True)) < 0.05

    def test_undetermined_numbers_are_nan(self) -> None:
        X, Y = draw(0, 3, 2, 2)
        assert math.isnan(cka(torch.ones(5, 2), torch.randn(5, 3)))
        assert math.isnan(cka(X, Y, debiased=True))  # it needs four tokens
        assert math.isnan(token_cosine(X, torch.randn(3, 4)))
        assert math.isnan(Similarity(2, 3).cka())

    def test_zero_tokens_are_left_out(self) -> None:
        X = torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 0.0]])
        Y = torch.tensor([[2.0, 0.0], [5.0, 5.0], [0.0, 0.0]])
        agreement = TokenAgreement(2, 2)
        agreement.update(X, Y)
        assert (agreement.cosine, agreement.magnitude, agreement.tokens) == (1.0, 1.0, 1)


def compare(source: toy.ToyViT, target: toy.ToyViT, **options: object) -> dict:
    found = compare_layers(
        source,
        target,
        toy.plan(source, target).pairs,
        toy.batches(96),
        source_loss=toy.loss,
        target_loss=toy.loss,
        held_out=toy.batches(64, seed=8),
        **options,
    )
    return {(item.target, item.signal): item for item in found}


class TestModels:
    def test_cosine_of_a_rotated_twin_is_one_only_after_alignment(self) -> None:
        source = toy.ToyViT(seed=1).double()
        target = toy.twin(source, heads=2, head_width=4, hidden=20).double()
        double = [(images.double(), labels) for images, labels in toy.batches(96)]
        found = compare_layers(
            source, target, toy.plan(source, target).pairs, double, source_loss=toy.loss, target_loss=toy.loss
        )
        inside = [item for item in found if item.block is not None]
        assert {item.signal for item in inside} == {INPUT, OUTPUT, OUTPUT_GRADIENT}
        for item in inside:
            assert item.cka == pytest.approx(1.0, abs=1e-6)
            assert item.cosine_after == pytest.approx(1.0, abs=1e-5)
            assert item.cosine_before < 0.9
            assert item.residual == pytest.approx(0.0, abs=1e-3)

    def test_numbers_equal_those_of_the_raw_signals(self) -> None:
        source, target = toy.ToyViT(seed=1), toy.ToyViT(seed=2, width=16)
        pairs = toy.plan(source, target).pairs
        found = compare(source, target)
        raw: list[dict] = []
        for model, side in ((source, "source"), (target, "target")):
            parts: dict = {}
            for batch in toy.batches(96):
                layers = [getattr(pair, side) for pair in pairs]
                for key, calls in watch(model, layers, batch, toy.loss, (INPUT, OUTPUT, OUTPUT_GRADIENT)).items():
                    parts.setdefault(key, []).append(calls[0].flatten(0, 1).double())
            raw.append({key: torch.cat(value).numpy() for key, value in parts.items()})
        checked = 0
        for pair in pairs:
            for signal in (INPUT, OUTPUT, OUTPUT_GRADIENT):
                if (pair.target.name, signal) not in found or pair.target.block is None:
                    continue
                X, Y = raw[0][pair.source.name, signal], raw[1][pair.target.name, signal]
                item = found[pair.target.name, signal]
                assert item.cka == pytest.approx(numpy_cka(X, Y), abs=1e-8)
                U, _, Vh = np.linalg.svd(X.T @ Y, full_matrices=False)
                if item.rank == min(X.shape[1], Y.shape[1]):
                    moved = X @ (U @ Vh)
                    lengths = np.linalg.norm(moved, axis=1) * np.linalg.norm(Y, axis=1)
                    cosines = ((moved * Y).sum(1)[lengths > 0]) / lengths[lengths > 0]
                    assert item.cosine_after == pytest.approx(cosines.mean(), abs=1e-8)
                    checked += 1
                assert math.isnan(item.cosine_before) == (X.shape[1] != Y.shape[1])
                assert item.cosine_held_out <= item.cosine_after + 0.05
        assert checked > 10

    def test_without_alignment_one_pass_is_enough(self) -> None:
        source, target = toy.ToyViT(seed=1), toy.ToyViT(seed=2)
        plain, whole = compare(source, target, aligned=False), compare(source, target)
        assert plain.keys() == whole.keys() != set()
        for key, item in plain.items():
            assert (item.cka, item.cosine_before) == (whole[key].cka, whole[key].cosine_before)
            assert math.isnan(item.cosine_after)
            assert item.rank is None

    def test_iterators_are_refused(self) -> None:
        source = toy.ToyViT()
        with pytest.raises(TuneportError, match="reads its batches twice"):
            compare_layers(source, source, [], iter(toy.batches()), source_loss=toy.loss, target_loss=toy.loss)


class TestReference:
    def test_a_model_has_similarity_one_to_itself(self, zoo: Zoo) -> None:
        model, data = open_model(zoo["clip_vision-base"]), read_plain(zoo.data, "train")
        same = compare_outputs(model, model, data)
        assert len(same) == len(model.architecture.layers)
        assert all(item.cosine_before == pytest.approx(1.0) and item.cka == pytest.approx(1.0) for item in same)
        tuned = open_model(zoo["clip_vision-tuned"])
        other = compare_outputs(tuned, model, data)
        assert all(item.cosine_before < 1 - 1e-6 for item in other)
        assert set(average_by_block(other, "cosine_before")) == {0, 1}

    def test_other_architectures_are_refused(self, zoo: Zoo) -> None:
        data = read_plain(zoo.data, "train")
        with pytest.raises(TuneportError, match="differ in architecture"):
            compare_outputs(open_model(zoo["vit-base"]), open_model(zoo["vit-target"]), data)

    def test_drift(self, zoo: Zoo) -> None:
        base, tuned = open_model(zoo["vit-base"]), open_model(zoo["vit-tuned"])
        data = read_plain(zoo.data, "train")
        halfway = copy.deepcopy(base.module)
        with torch.no_grad():
            for name, parameter in halfway.named_parameters():
                parameter.add_(0.5 * (dict(tuned.module.named_parameters())[name] - parameter))
        found = measure_drift(base, [(0, base.module), (50, halfway), (100, tuned.module)], data, batch_size=7)
        at = {step: [item for item in found if item.step == step] for step in (0, 50, 100)}
        assert all(len(items) == len(base.architecture.layers) for items in at.values())
        assert all(abs(item.direction) < 1e-9 and item.magnitude == 0 for item in at[0])
        middle, end = (average_by_block(at[step], "direction") for step in (50, 100))
        assert all(0 < middle[block] < end[block] for block in end)

        layer = next(layer for layer in base.architecture.layers if layer.block == 1 and layer.role == "fc1")
        inputs = base.inputs.encode(data.inputs)
        signals = [
            watch(m.module, [layer], inputs, lambda module, batch: module(**batch).logits.sum(), (INPUT,))
            for m in (base, tuned)
        ]
        x, y = (side[layer.name, INPUT][0].flatten(0, 1).double().numpy() for side in signals)
        norms = np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1)
        item = next(item for item in at[100] if item.layer == layer.name)
        assert item.direction == pytest.approx((1 - (x * y).sum(1) / norms[0] / norms[1]).mean(), abs=1e-6)
        assert item.magnitude == pytest.approx((abs(norms[1] - norms[0]) / norms[0]).mean(), abs=1e-6)
