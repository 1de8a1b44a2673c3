"""Ridge regression against explicit refits and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as SkRidge

from tuneport.measure.fitted_heads import PENALTIES, ridge


def _problem(samples: int, width: int, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples * 100 + width)
    X = torch.randn(samples, width, generator=generator, dtype=torch.float64) + 3
    true = torch.randn(width, 4, generator=generator, dtype=torch.float64)
    return X, X @ true + noise * torch.randn(samples, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("samples", "width"), [(40, 5), (12, 30), (20, 20)])
def test_the_chosen_fit_and_its_left_out_predictions_are_those_of_refits(
    samples: int, width: int, intercept: bool
) -> None:
    X, Y = _problem(samples, width)
    found = ridge(X, Y, intercept=intercept)
    known = SkRidge(alpha=found.penalty, fit_intercept=intercept, solver="svd").fit(X.numpy(), Y.numpy())
    np.testing.assert_allclose(found.weight, known.coef_, atol=1e-8)
    np.testing.assert_allclose(found.bias, known.intercept_, atol=1e-7)
    # A prediction is a residual over one minus the leverage. With the least penalties that is 1e-10, and the rounding
    # of sums over samples and inputs grows by its inverse. Which of these penalties wins depends on the rounding, too.
    U, S, _ = np.linalg.svd(X.numpy() - intercept * X.numpy().mean(0), full_matrices=False)
    leverage = intercept / samples + U**2 @ (S**2 / (S**2 + found.penalty))
    bound = np.finfo(float).eps * (samples + width) * float(Y.abs().max()) / (1 - leverage).min()
    for row in range(samples):
        rest = np.arange(samples) != row
        refit = SkRidge(alpha=found.penalty, fit_intercept=intercept, solver="svd")
        refit.fit(X.numpy()[rest], Y.numpy()[rest])
        np.testing.assert_allclose(found.left_out[row], refit.predict(X.numpy()[[row]])[0], atol=max(bound, 1e-9))


@pytest.mark.parametrize(("samples", "width"), [(40, 5), (12, 30)])
def test_no_other_penalty_has_a_smaller_left_out_error(samples: int, width: int) -> None:
    X, Y = _problem(samples, width)
    found = ridge(X, Y)
    least = float((found.left_out - Y).square().sum())
    typical = float(torch.linalg.svdvals(X - X.mean(0)).square().mean())
    for factor in PENALTIES[8:].tolist():  # smaller ones lose too many digits in a refit
        error = 0.0
        for row in range(samples):
            rest = np.arange(samples) != row
            refit = SkRidge(alpha=factor * typical, solver="svd").fit(X.numpy()[rest], Y.numpy()[rest])
            error += float(((refit.predict(X.numpy()[[row]])[0] - Y.numpy()[row]) ** 2).sum())
        assert error >= least * (1 - 1e-6)


def test_a_linear_map_is_found_again() -> None:
    """Without noise and with more samples than inputs the least penalty wins; its bias is 1e-10 of the map."""
    X, Y = _problem(30, 6, noise=0.0)
    found = ridge(X.float(), Y.float())
    torch.testing.assert_close(X @ found.weight.T + found.bias, Y, atol=1e-4, rtol=0)


def test_noise_alone_is_predicted_by_its_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(50, width, generator=generator) for width in (20, 2))
    found = ridge(X, Y)
    assert float((found.left_out - Y).square().mean()) < 1.2  # the variance of the noise is 1
    assert float(found.weight.norm()) < 0.5


def test_inputs_that_never_change_give_the_mean() -> None:
    found = ridge(torch.ones(6, 3), torch.arange(6.0)[:, None])
    torch.testing.assert_close(found.bias + found.weight @ torch.ones(3).double(), torch.tensor([2.5]).double())
