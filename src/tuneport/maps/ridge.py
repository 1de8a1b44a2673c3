"""Ridge regression with an intercept, and a penalty that is chosen by leave-one-out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PENALTIES = torch.logspace(-10, 3, 27, dtype=torch.float64)  # factors of the mean squared singular value


@dataclass(frozen=True, eq=False)
class Ridge:
    """The linear map `y = x W^T + b` of a fit, its penalty, and what it predicts for samples that it has not seen.

    `left_out` (N, outputs) holds, of every sample, the prediction of a fit on all the others.
    """

    weight: Tensor
    bias: Tensor
    penalty: float
    left_out: Tensor


def ridge(inputs: Tensor, outputs: Tensor, *, intercept: bool = True) -> Ridge:
    """Minimise `|Y - X W^T - b|^2 + penalty |W|^2` over W and b, in float64; the intercept b is free, or zero.

    The penalty has the least squared leave-one-out error among `PENALTIES`, which one SVD of the centred inputs gives
    in closed form: the error of a sample is its residual divided by one minus its leverage.

    >>> found = ridge(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> round(float(found.weight), 6), round(float(found.bias), 6)
    (2.0, 1.0)
    """
    X, Y = inputs.double(), outputs.double()
    share = 1.0 if intercept else 0.0
    centre, mean = share * X.mean(0), share * Y.mean(0)
    U, S, Vh = torch.linalg.svd(X - centre, full_matrices=False)  # (N, k), (k,), (k, d)
    Z = U.T @ (Y - mean)  # (k, outputs)
    energy = S.square()
    typical = energy.mean().clamp(min=torch.finfo(torch.float64).tiny)

    def predicted(penalty: Tensor) -> Tensor:
        shrink = energy / (energy + penalty)
        fitted = mean + U @ (shrink[:, None] * Z)
        leverage = share / len(X) + U.square() @ shrink
        free = (1 - leverage).clamp(min=1e-12)  # a lone sample, or one that no other helps to predict
        left_out: Tensor = Y - (Y - fitted) / free[:, None]
        return left_out

    penalties = PENALTIES.to(X.device) * typical
    errors = torch.stack([(Y - predicted(each)).square().sum() for each in penalties])
    penalty = penalties[errors.argmin()]
    weight = (Z.T * (S / (energy + penalty))) @ Vh  # (outputs, d)
    return Ridge(weight, mean - weight @ centre, float(penalty), predicted(penalty))
