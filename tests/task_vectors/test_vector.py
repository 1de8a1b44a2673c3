"""Task vectors: exact arithmetic against plain tensors, laziness, files, and every error text."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tuneport.task_vectors.vector as module
from tuneport.errors import CheckpointError, TuneportError
from tuneport.io.checkpoint import open_checkpoint, write_checkpoint
from tuneport.io.output import new_folder
from tuneport.io.tensors import LazyMapping, check_finite, describe
from tuneport.task_vectors.low_rank import LowRank
from tuneport.task_vectors.vector import TaskVector, load_task_vector, save_task_vector


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def low_rank(seed: int, rank: int = 2, dtype: torch.dtype = torch.float32) -> LowRank:
    return LowRank(random(6, rank, seed=seed, dtype=dtype), random(rank, 4, seed=seed + 100, dtype=dtype))


@pytest.fixture
def one() -> TaskVector:
    return TaskVector({"dense": random(3, 3), "mixed": random(6, 4), "low": low_rank(1), "mine": random(2)})


@pytest.fixture
def two() -> TaskVector:
    return TaskVector({"dense": random(3, 3, seed=5), "mixed": low_rank(2), "low": low_rank(3, rank=1)})


class Watched(LazyMapping[torch.Tensor]):
    """Tensors that note who reads them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors, self._note, lambda name: describe(tensors, name))
        self.tensors = tensors
        self.read: list[str] = []

    def _note(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self.tensors[name]


def error_of(kind: type[TuneportError], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0


# Differences


def test_between_is_exact_and_lazy() -> None:
    base = Watched({"w": random(4, 3), "b": random(4), "ids": torch.arange(4)})
    finetuned = Watched({"w": random(4, 3, seed=1), "b": random(4, seed=2), "ids": torch.arange(4)})
    vector = TaskVector.between(base, finetuned)
    assert list(vector) == ["w", "b"]
    assert vector.shape("w") == (4, 3)
    assert vector.dtype("w") == torch.float32
    combined = 2 * (vector + vector) - 0.25 * vector
    assert "w" in combined
    assert combined.shape("w") == (4, 3)
    applied = combined.apply_to(base)
    assert base.read == finetuned.read == []
    assert torch.equal(vector["b"], finetuned.tensors["b"] - base.tensors["b"])
    assert base.read == finetuned.read == ["b"]
    torch.testing.assert_close(applied["w"], base.tensors["w"] + 3.75 * vector.dense("w"))
    assert set(base.read) == {"b", "w"}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_between_computes_in_full_precision(stored: torch.dtype, expected: torch.dtype) -> None:
    base, finetuned = {"w": random(50).to(stored)}, {"w": random(50, seed=1).to(stored)}
    vector = TaskVector.between(base, finetuned)
    assert vector.dtype("w") == vector.dense("w").dtype == expected
    assert torch.equal(vector["w"], finetuned["w"].to(expected) - base["w"].to(expected))
    rebuilt = vector.apply_to(base)
    assert rebuilt.dtype("w") == rebuilt["w"].dtype == stored
    torch.testing.assert_close(rebuilt["w"], finetuned["w"], rtol=1e-6, atol=1e-6)


def test_between_mixed_dtypes_and_live_parameters() -> None:
    base = {"w": torch.nn.Parameter(random(3).double())}
    vector = TaskVector.between(base, {"w": random(3, seed=1).half()})
    assert vector.dense("w").dtype == torch.float64
    assert not vector.dense("w").requires_grad
    assert not vector.apply_to(base)["w"].requires_grad


def test_between_checks_structure() -> None:
    base = {"body.w": random(2), "head.w": random(3, 2)}
    finetuned = {"body.w": random(2, seed=1), "head.w": random(5, 2)}
    assert error_of(CheckpointError, lambda: TaskVector.between(base, finetuned)) == (
        "1 of 2 tensors of the fine-tuned model differ in shape from the base: head.w (5, 2) vs (3, 2). "
        'Exclude them with `exclude=["head.*"]`.'
    )
    assert list(TaskVector.between(base, finetuned, exclude=["head.*"])) == ["body.w"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_between_refuses_quantised_weights(dtype: torch.dtype) -> None:
    model = {"w": torch.ones(2, 2).to(dtype), "norm": torch.ones(2)}
    assert error_of(CheckpointError, lambda: TaskVector.between(model, model)) == (
        f"1 of 2 tensors of the model are quantised: w ({dtype}). Give the model in float32, bfloat16 or float16."
    )
    assert list(TaskVector.between(model, model, exclude=["w"])) == ["norm"]


# Arithmetic


def test_sum_and_difference_take_missing_entries_as_zero(one: TaskVector, two: TaskVector) -> None:
    for combined, sign in ((one + two, 1), (one - two, -1)):
        assert list(combined) == ["dense", "mixed", "low", "mine"]
        for name in two:
            torch.testing.assert_close(combined.dense(name), one.dense(name) + sign * two.dense(name))
            assert combined.spec(name) == TaskVector({name: combined[name]}).spec(name)
        assert torch.equal(combined.dense("mine"), one.dense("mine"))
    assert list(two - one) == ["dense", "mixed", "low", "mine"]
    assert torch.equal((two - one).dense("mine"), -one.dense("mine"))


def test_low_rank_stays_low_rank(one: TaskVector, two: TaskVector) -> None:
    total = (one + two)["low"]
    assert isinstance(total, LowRank)
    assert total.rank == 3
    assert (one + two).spec("low").rank == 3
    assert isinstance((2 * one)["low"], LowRank)
    assert isinstance((one + two)["mixed"], torch.Tensor)
    assert (one + two).spec("mixed").rank is None


def test_scaling(one: TaskVector) -> None:
    for name in one:
        expected = one.dense(name)
        assert torch.equal((-one).dense(name), -expected)
        torch.testing.assert_close((one * 3).dense(name), 3 * expected)
        torch.testing.assert_close((torch.tensor(0.5) * one).dense(name), expected / 2)
    for factor in (math.nan, math.inf, "much", one):
        text = error_of(TuneportError, lambda factor=factor: one * factor)
        assert text == f"a task vector is scaled by a finite number, got {factor!r}."
    assert "got nan" in error_of(TuneportError, lambda: one.apply_to({}, scale=math.nan))


def test_norms(one: TaskVector) -> None:
    each = {name: float(torch.linalg.vector_norm(one.dense(name).double())) for name in one}
    for name, expected in each.items():
        assert one.norm(name) == pytest.approx(expected, rel=1e-6)
    assert one.norm() == pytest.approx(math.sqrt(sum(value**2 for value in each.values())), rel=1e-6)
    assert TaskVector({}).norm() == 0
    assert (one - one).norm() == pytest.approx(0, abs=1e-6)


def test_adding_different_shapes_is_refused(one: TaskVector) -> None:
    other = TaskVector({"dense": torch.zeros(2, 3), "mine": torch.zeros(2)})
    assert error_of(TuneportError, lambda: one + other) == (
        "1 of 2 shared tensors of two task vectors differ in shape: dense (3, 3) vs (2, 3). "
        "Only task vectors of the same model can be added."
    )
    with pytest.raises(TypeError):
        one + 1  # type: ignore[operator]
    with pytest.raises(TypeError):
        one - {"dense": torch.zeros(3, 3)}  # type: ignore[operator]


def test_rename_and_subset(one: TaskVector) -> None:
    swapped = one.rename({"dense": "mine", "mine": "dense", "low": "new"})
    assert list(swapped) == ["mine", "mixed", "new", "dense"]
    assert torch.equal(swapped.dense("dense"), one.dense("mine"))
    assert swapped.spec("new").rank == 2
    assert list(one.subset(["low", "dense"])) == ["low", "dense"]
    assert error_of(TuneportError, lambda: one.rename({"dense": "low"})) == (
        "several tensors would be renamed to low. Give each its own name."
    )
    expected = "1 tensors are not in the task vector: dens (nearest: dense)."
    assert error_of(TuneportError, lambda: one.rename({"dens": "x"})) == expected
    assert error_of(TuneportError, lambda: one.subset(["dens"])) == expected
    assert error_of(TuneportError, lambda: one["dens"]) == expected
    assert one.get("dens") is None
    assert repr(one) == "TaskVector(4 tensors)"


def test_materialise_computes_once() -> None:
    base = Watched({"w": random(3)})
    kept = TaskVector(dict(TaskVector.between(base, {"w": random(3, seed=1)})))
    assert kept["w"] is kept["w"]
    assert base.read == ["w"]


# Application


def test_apply_to_leaves_the_rest_untouched(one: TaskVector) -> None:
    base = {
        "dense": random(3, 3, seed=8).to(torch.bfloat16),
        "mixed": random(6, 4, seed=8),
        "low": random(6, 4, seed=9).double(),
        "mine": random(2, seed=3),
        "other": random(5),
        "ids": torch.arange(3),
    }
    applied = one.apply_to(base, scale=0.5)
    assert list(applied) == list(base)
    for name, tensor in base.items():
        assert applied.shape(name) == tuple(tensor.shape)
        assert applied.dtype(name) == applied[name].dtype == tensor.dtype
        if name in one:
            expected = (tensor.double() + 0.5 * one.dense(name).double()).to(tensor.dtype)
            torch.testing.assert_close(applied[name], expected)
        else:
            assert torch.equal(applied[name], tensor)
    assert all(torch.equal(tensor, base[name]) for name, tensor in one.apply_to(base, scale=0).items())
    with pytest.raises(KeyError):
        applied["nothing"]


def test_apply_to_rounds_once() -> None:
    base, delta = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-9])
    applied = TaskVector({"w": delta}).apply_to({"w": base}, scale=3.0)
    assert applied["w"].item() == 1 + 2.0**-7  # three steps in bfloat16 would have stayed at 1


def test_apply_to_says_which_change_is_too_small() -> None:
    base = {name: torch.tensor([1.0, 2.0], dtype=torch.bfloat16) for name in ("small", "half", "zero", "other")}
    deltas = {"small": [2.0**-10, 2.0**-10], "half": [2.0**-10, 2.0**-6], "zero": [0.0, 0.0]}
    vector, lost = TaskVector({name: torch.tensor(delta) for name, delta in deltas.items()}), set[str]()
    assert dict(vector.apply_to(base, lost=lost)).keys() == base.keys()
    assert lost == {"small"}
    assert dict(vector.apply_to(base, 8.0, lost := set[str]()))
    assert lost == set()


def test_apply_to_another_model_is_refused() -> None:
    vector = TaskVector({"encoder.weight": torch.zeros(2), "zzz": torch.zeros(2)})
    assert error_of(TuneportError, lambda: vector.apply_to({"encode.weight": torch.zeros(2)})) == (
        "2 of 2 tensors are not in the base: encoder.weight (nearest: encode.weight), zzz. Use rename() or subset()."
    )
    base = {"encoder.weight": torch.zeros(3), "zzz": torch.zeros(2, dtype=torch.int64)}
    assert error_of(TuneportError, lambda: vector.apply_to(base)) == (
        "2 of 2 tensors of the task vector do not fit the base: encoder.weight (2,) vs (3,) torch.float32, "
        "zzz (2,) vs (2,) torch.int64. Apply it to the model that it was made for."
    )
    many = TaskVector({f"w{number}": torch.zeros(2) for number in range(12)})
    assert "base: w0, w1, w2, ... and 9 more. Use" in error_of(TuneportError, lambda: many.apply_to({}))
    assert "w3" not in error_of(TuneportError, lambda: many.apply_to({name: torch.zeros(3) for name in many}))


# Files


def test_file_format(tmp_path: Path, one: TaskVector) -> None:
    path = tmp_path / "tau.safetensors"
    save_task_vector(path, one, metadata={"base": "some/model", "version": "ignored"})
    assert sorted(load_file(path)) == ["dense", "low::in", "low::out", "mine", "mixed"]
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"base": "some/model", "format": "tuneport-task-vector", "version": "1"}
    loaded = load_task_vector(path)
    assert list(loaded) == sorted(one)
    for name in one:
        assert loaded.spec(name) == one.spec(name)
        assert torch.equal(loaded.dense(name), one.dense(name))
    assert isinstance(loaded["low"], LowRank)


def test_saving_computes_each_entry_once_and_caches_none(tmp_path: Path) -> None:
    base = Watched({f"w{i}": random(3, seed=i) for i in range(5)})
    vector = TaskVector.between(base, {name: tensor + 1 for name, tensor in base.tensors.items()})
    save_task_vector(tmp_path / "tau.safetensors", vector)
    assert base.read == list(base)

    calls: list[str] = []

    def make(name: str) -> LowRank:
        calls.append(name)
        return low_rank(1)

    lazy = TaskVector(LazyMapping(["a", "b"], make), lambda _: TaskVector({"x": low_rank(1)}).spec("x"))
    save_task_vector(tmp_path / "low.safetensors", lazy)
    assert calls == ["a", "b"]


def test_saving_is_atomic(tmp_path: Path, one: TaskVector) -> None:
    path = tmp_path / "tau.safetensors"
    save_task_vector(path, one)
    before = path.read_bytes()
    assert error_of(CheckpointError, lambda: save_task_vector(path, one)) == (
        f"{path} exists already. Choose another name or pass `overwrite=True`."
    )

    def explode(_: str) -> torch.Tensor:
        raise KeyboardInterrupt

    broken = TaskVector(LazyMapping(["dense"], explode), lambda _: one.spec("dense"))
    with pytest.raises(KeyboardInterrupt):
        save_task_vector(path, broken, overwrite=True)
    assert path.read_bytes() == before
    save_task_vector(path, one * 2, overwrite=True)
    assert torch.equal(load_task_vector(path).dense("dense"), 2 * one.dense("dense"))
    assert list(tmp_path.iterdir()) == [path]
    odd = TaskVector({"w::out": torch.zeros(2)})
    assert error_of(TuneportError, lambda: save_task_vector(tmp_path / "odd.safetensors", odd)) == (
        "task vector cannot be saved: names must not end in ::out or ::in: w::out."
    )


def test_loading_other_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    assert error_of(CheckpointError, lambda: load_task_vector(tmp_path)) == (
        f"{tmp_path} is a folder, not a task vector. Make one with tuneport extract."
    )
    save_file({"w": torch.zeros(2)}, path, metadata={"format": "pt"})
    assert error_of(CheckpointError, lambda: load_task_vector(path)) == (
        f"{path} is not a task vector: its metadata have format 'pt', expected 'tuneport-task-vector'. "
        "Make one with tuneport extract."
    )
    save_file({"w": torch.zeros(2)}, path, metadata={"format": "tuneport-task-vector", "version": "2"})
    assert error_of(CheckpointError, lambda: load_task_vector(path)) == (
        f"{path} has version '2' of the task-vector format, this tuneport reads '1'. "
        "Upgrade tuneport or make the file again."
    )
    right = {"format": "tuneport-task-vector", "version": "1"}
    for tensors in (
        {"w::out": torch.zeros(2, 1)},
        {"w::out": torch.zeros(2, 1), "w::in": torch.zeros(2, 2)},
        {"w::out": torch.zeros(2, 1), "w::in": torch.zeros(1, 2), "w": torch.zeros(2, 2)},
    ):
        save_file(tensors, path, metadata=right)
        assert error_of(CheckpointError, lambda: load_task_vector(path)) == (
            f"{path} is damaged: w lack one of two factors of matching shapes."
        )


def test_extract_and_apply_on_real_models(tmp_path: Path) -> None:
    from transformers import AutoModel, ViTConfig, ViTModel

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
    )
    models: dict[str, Any] = {name: ViTModel(config).eval() for name in ("base", "ft")}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name, max_shard_size="20KB" if name == "ft" else "5GB")
    base, finetuned = open_checkpoint(tmp_path / "base"), open_checkpoint(tmp_path / "ft")
    save_task_vector(tmp_path / "tau.safetensors", TaskVector.between(base, finetuned))
    result = load_task_vector(tmp_path / "tau.safetensors").apply_to(base)
    check_finite(result)
    with new_folder(tmp_path / "out") as folder:
        write_checkpoint(folder, result, max_shard_size="20KB")
        models["base"].config.save_pretrained(folder)
    rebuilt = AutoModel.from_pretrained(tmp_path / "out").eval()
    image = random(1, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            rebuilt(image).last_hidden_state, models["ft"](image).last_hidden_state, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_policy(tmp_path: Path, dtype: torch.dtype) -> None:
    """Differences in float32 (float64 where an input is), sums in the same, one rounding to the base's own dtype."""
    generator = torch.Generator().manual_seed(0)
    base, finetuned = ({"w": torch.randn(64, 3, generator=generator).to(dtype)} for _ in range(2))
    vector = TaskVector.between(base, finetuned)
    wide = torch.promote_types(dtype, torch.float32)
    assert vector.dtype("w") == wide
    assert torch.equal(vector.dense("w"), finetuned["w"].to(wide) - base["w"].to(wide))
    save_task_vector(tmp_path / "tau.safetensors", vector)
    applied = load_task_vector(tmp_path / "tau.safetensors").apply_to(base, 0.5)["w"]
    assert applied.dtype == dtype
    assert torch.equal(applied, (base["w"].to(wide) + 0.5 * vector.dense("w")).to(dtype))
