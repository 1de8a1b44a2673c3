"""Cross-LoRA: planted targets, NumPy's singular vectors as the oracle, other widths, and no data."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from builders.toy import ToyViT, finetuned, problem
from tuneport import transfer
from tuneport.layers import find_layers
from tuneport.methods import METHODS, CrossLora, Problem, Transfer
from tuneport.methods.cross_lora import leading_directions
from tuneport.pairing import pair_layers
from tuneport.task_vectors.low_rank import LowRank

METHOD = METHODS["cross-lora"]
NEAR = {"rtol": 1e-4, "atol": 1e-5}  # entries are float32 and of size 1


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(size: int, seed: int) -> Tensor:
    return torch.linalg.qr(random(size, size, seed=seed))[0]


def permutation(size: int, seed: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)[torch.randperm(size, generator=torch.Generator().manual_seed(seed))]


def one_layer(weight: Tensor) -> nn.Sequential:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return nn.Sequential(layer)


def move(W_A: Tensor, tau: Tensor | LowRank, W_B: Tensor, rank: int = 320) -> Transfer:
    source, target = one_layer(W_A), one_layer(W_B)
    plan = pair_layers(find_layers(source), find_layers(target))
    weights = (dict(source.named_parameters()), dict(target.named_parameters()))
    return CrossLora(rank).transfer(
        Problem(plan, {"0.weight": tau}, source_weights=weights[0], target_weights=weights[1])
    )


def oracle(W_A: Tensor, tau: Tensor, W_B: Tensor, rank: int) -> Tensor:
    """U_B (U_A^T tau V_A) V_B^T with vectors of NumPy's SVD, the largest entry of each left one made positive."""
    sides = []
    for W in (W_A, W_B):
        U, _, Vh = np.linalg.svd(W.numpy(), full_matrices=False)
        signs = np.array([np.sign(column[np.abs(column).argmax()]) for column in U.T])
        sides.append(((U * signs)[:, :rank], (Vh.T * signs)[:, :rank]))
    (U_A, V_A), (U_B, V_B) = sides
    return torch.from_numpy(U_B @ (U_A.T @ tau.numpy() @ V_A) @ V_B.T)


@pytest.mark.parametrize("rank", [320, 4])
@pytest.mark.parametrize(
    ("source", "target"), [((8, 12), (8, 12)), ((8, 12), (14, 9)), ((12, 8), (6, 7)), ((6, 7), (20, 15))]
)
def test_updates_equal_numpy(source: tuple[int, int], target: tuple[int, int], rank: int) -> None:
    W_A, W_B, tau = random(*source, seed=1), random(*target, seed=2), random(*source, seed=3)
    found = move(W_A, tau, W_B, rank)
    assert found.task_vector.shape("0.weight") == target
    expected = oracle(W_A, tau, W_B, min(rank, *source, *target))
    torch.testing.assert_close(found.task_vector["0.weight"].double(), expected, **NEAR)


def test_permuted_units_are_found() -> None:
    """A square weight of full rank leaves nothing out: the update of the permuted target is exact."""
    W, tau, P_out, P_in = random(9, 9, seed=1), random(9, 9, seed=2), permutation(9, 3), permutation(9, 4)
    found = move(W, tau, P_out @ W @ P_in.T).task_vector["0.weight"]
    torch.testing.assert_close(found.double(), P_out @ tau @ P_in.T, **NEAR)


def test_a_cut_keeps_the_part_inside_the_leading_directions() -> None:
    W, tau, P_out, P_in = random(9, 12, seed=1), random(9, 12, seed=2), permutation(9, 3), permutation(12, 4)
    found = move(W, tau, P_out @ W @ P_in.T, 5).task_vector["0.weight"]
    U, _, Vh = np.linalg.svd(W.numpy(), full_matrices=False)
    inside = torch.from_numpy(U[:, :5] @ U[:, :5].T @ tau.numpy() @ Vh[:5].T @ Vh[:5])
    torch.testing.assert_close(found.double(), P_out @ inside @ P_in.T, **NEAR)


def test_a_rotated_target_is_found_up_to_the_signs_of_singular_vectors() -> None:
    W, tau, Q_out, Q_in = random(9, 9, seed=1), random(9, 9, seed=2), rotation(9, 3), rotation(9, 4)
    W_B = Q_out @ W @ Q_in.T
    found = move(W, tau, W_B).task_vector["0.weight"].double()
    (U, _), (U_B, V_B) = leading_directions(W, 9), leading_directions(W_B, 9)
    signs = ((Q_out @ U) * U_B).sum(0).round()
    assert set(signs.tolist()) == {-1.0, 1.0}  # the trap: some pairs are turned
    true = U_B.T @ (Q_out @ tau @ Q_in.T) @ V_B
    torch.testing.assert_close(U_B.T @ found @ V_B, signs[:, None] * true * signs, **NEAR)
    assert float(found.norm()) == pytest.approx(float(tau.norm()), rel=1e-5)


def test_norms_never_grow() -> None:
    for target in ({"width": 16, "hidden": 28}, {"width": 8, "hidden": 14}):
        source = ToyViT(seed=1)
        posed = problem(source, finetuned(source), ToyViT(**target, seed=2), METHOD.signals, count=4)
        fixed = {
            pair.target.name for pair in posed.plan.pairs if pair.input_map is not None or pair.output_map is not None
        }
        records = [record for record in METHOD.transfer(posed).records if record.target not in fixed]
        assert len(records) > 5
        for record in records:
            assert 0 < record.norm_target <= record.norm_source * (1 + 1e-6)


def test_a_low_rank_update_keeps_its_rank() -> None:
    W_A, W_B, out, in_ = random(8, 12, seed=1), random(14, 9, seed=2), random(8, 2, seed=3), random(2, 12, seed=4)
    found = move(W_A, LowRank(out, in_), W_B).task_vector.items()
    ((_, entry),) = found
    assert isinstance(entry, LowRank)
    assert entry.rank == 2
    torch.testing.assert_close(entry.dense().double(), oracle(W_A, out @ in_, W_B, 8), **NEAR)


def test_directions_of_a_weight_of_lower_rank_are_not_invented() -> None:
    W = random(8, 3, seed=1) @ random(3, 12, seed=2)
    left, right = leading_directions(W, 320)
    assert (left.shape, right.shape) == ((8, 3), (12, 3))
    torch.testing.assert_close(left @ left.T @ W @ right @ right.T, W)


def test_a_zero_weight_is_kept_with_a_reason() -> None:
    found = move(random(4, 5, seed=1), random(4, 5, seed=2), torch.zeros(6, 7, dtype=torch.float64))
    assert not found.records
    assert [(item.tensor, item.reason) for item in found.kept] == [("0.weight", "a base weight of this layer is zero")]


def test_a_transfer_needs_no_data() -> None:
    source, target = ToyViT(seed=1), ToyViT(width=16, hidden=28, head_width=6, seed=2)
    before = copy.deepcopy(target.state_dict())
    result = transfer(source, finetuned(source), target, method="cross-lora")
    assert result.record["method"] == "cross-lora"
    assert result.task_vector.norm() > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state_dict().items())
