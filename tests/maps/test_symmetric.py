"""Products and inverses of symmetric matrices against torch's own, divided and not, few and many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tuneport.maps import symmetric
from tuneport.maps.symmetric import inverse, inverse_root, lower_product, symmetric_product


@pytest.fixture(params=["by halves", "at once"], autouse=True)
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_PART", "_LEAF", "_HALF", "_ONE_BY_ONE"):
        monkeypatch.setattr(symmetric, name, 7 if request.param == "by halves" else 10**6)


def positive(many: int, n: int) -> Tensor:
    factors = torch.randn(many, n, n + 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return factors @ factors.mT


@pytest.mark.parametrize("n", [1, 28, 61])
def test_products_by_halves_equal_full_products(n: int) -> None:
    X = torch.randn(3, n, n + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = X @ X.mT
    assert torch.allclose(symmetric_product(X, X), whole, atol=1e-12)
    assert torch.allclose(lower_product(X, X).tril(), whole.tril(), atol=1e-12)


@pytest.mark.parametrize("many", [1, 2, 12])
@pytest.mark.parametrize("n", [1, 28, 61])
def test_an_inverse_reads_the_lower_triangle_only(n: int, many: int) -> None:
    A = positive(many, n)
    found = inverse(A + torch.full_like(A, 1e3).triu(1))
    assert torch.allclose(found @ A, torch.eye(n, dtype=torch.float64).expand_as(A), atol=1e-8)
    assert torch.allclose(found, found.mT, atol=1e-10)


@pytest.mark.parametrize("many", [2, 12])
def test_an_inverse_root_is_triangular_and_flags_indefinite_matrices(many: int) -> None:
    A = positive(many, 40)
    A[1, 30, 30] = -1.0  # not positive
    root, bad = inverse_root(A)
    assert bad.tolist() == [index == 1 for index in range(many)]
    assert torch.equal(root[0], root[0].tril())
    assert torch.allclose(root[0] @ A[0] @ root[0].T, torch.eye(40, dtype=torch.float64), atol=1e-9)
