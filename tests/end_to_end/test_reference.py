"""Transfers from files against `benchmarks/reference.py`, a plain float64 implementation that shares no code with them.

Targets are wider, deeper and narrower than the source, with another patch grid; heads are files or text towers. Both
sides compute in float64. They differ in the order of sums and of the factors of a map (1e-16 of the largest singular
value, over the least one that is not zero: 1e-7 of it here), and in the task vector's float32: 6e-8 of each entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from benchmarks import reference
from builders.folders import load, scatter, write_head, write_processor, write_tokenizer
from builders.runs import Case, prepare, run
from tuneport import transfer
from tuneport.methods import BilinearAlignment, Method, get_method
from tuneport.pipeline.transfer import Result
from tuneport.types import Signal

SHAPES = {  # width, depth, image size
    "source": (16, 2, 8),
    "wider": (24, 2, 8),
    "deeper": (16, 3, 12),
    "narrower": (12, 2, 8),
}
SAMPLES = 48  # in the last block of a tower only class tokens have gradients, one a sample: more than its widths
CLOSE = 1e-5
SIGNALS: frozenset[Signal] = frozenset({"input", "output", "output_gradient", "input_gradient"})


class Towers:
    """Folders of small CLIP models with a head file (`vision`) or a text tower (`clip`), and samples for them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        random = np.random.default_rng(3)
        images = random.integers(0, 256, (SAMPLES, 8, 8, 3)).astype(np.uint8)
        self.samples = images, random.integers(0, 3, SAMPLES), ("cat", "dog", "owl")
        self.data = root / "animals.npz"
        np.savez(self.data, x_train=images, y_train=self.samples[1], classes=np.array(self.samples[2]))

    def folder(self, kind: str, name: str) -> Path:
        path = self.root / f"{kind}-{name}"
        if not path.exists():
            width, depth, image = SHAPES["source" if name == "tuned" else name]
            with torch.random.fork_rng():
                torch.manual_seed(len(name))
                model = load(self.folder(kind, "source")) if name == "tuned" else build(kind, width, depth, image)
                for parameter in model.parameters() if name == "tuned" else ():
                    parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
            model.save_pretrained(path)
            write_processor(path, image)
            if kind == "clip":
                write_tokenizer(path)
            else:  # another temperature for each model, far from 1 and from its logarithm
                write_head(path / "heads" / "animals.safetensors", 10, scale=8.0 + 3 * depth, seed=width)
        return path

    def folders(self, kind: str, target: str) -> tuple[Path, Path, Path]:
        return self.folder(kind, "source"), self.folder(kind, "tuned"), self.folder(kind, target)


def build(kind: str, width: int, depth: int, image: int) -> Any:
    size = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2}
    vision = {**size, "num_hidden_layers": depth, "image_size": image, "patch_size": 4}
    if kind == "vision":
        model = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**vision, projection_dim=10))
    else:
        text = {**size, "num_hidden_layers": 1, "vocab_size": 40, "max_position_embeddings": 12}
        text |= {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
        config = transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=10)
        model = transformers.CLIPModel(config)
    scatter(model)
    return model


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Towers:
    return Towers(tmp_path_factory.mktemp("towers"))


@dataclass(frozen=True, eq=False)
class Prepared:
    """Folders, a case from them for all methods, and the reference's signals; `soft` are without the exponential."""

    folders: tuple[Path, Path, Path]
    case: Case
    signals: tuple[reference.Signals, reference.Signals]
    soft: tuple[reference.Signals, reference.Signals]

    def determined(self, method: str) -> dict[str, NDArray[np.float64]]:
        return dense(run(self.case, without_completion(method), scale=1.0))


def without_completion(method: str) -> Method:
    """The method, whose maps are only what the samples determine."""
    found = get_method(method)
    assert isinstance(found, BilinearAlignment)
    return replace(found, completion="none")


def dense(result: Result) -> dict[str, NDArray[np.float64]]:
    return {name: result.task_vector.dense(name).double().numpy() for name in result.task_vector}


def differences(found: dict[str, NDArray[np.float64]], wanted: reference.Moved) -> dict[str, float]:
    """For each tensor of the reference, the relative distance."""
    return {
        name: float(np.linalg.norm(found[name] - value) / np.linalg.norm(value))
        for name, value in wanted.deltas.items()
    }


@pytest.fixture(scope="module", params=["vision wider", "vision deeper", "vision narrower", "clip wider"])
def case(request: pytest.FixtureRequest, towers: Towers) -> Prepared:
    kind, target = request.param.split()
    folders = towers.folders(kind, target)
    ends = folders[0], folders[2]
    head = "animals" if kind == "vision" else None
    signals = [reference.measure(*ends, towers.samples, head, factor) for factor in (math.exp, float)]
    prepared = prepare(*folders, towers.data, signals=SIGNALS, samples=SAMPLES, dtype="float64")
    return Prepared(folders, prepared, *signals)


@pytest.mark.parametrize("method", reference.METHODS)
def test_what_the_samples_determine_agrees(case: Prepared, method: str) -> None:
    wanted = reference.move(case.folders, case.signals, method, complete=False)
    found = case.determined(method)
    assert max(differences(found, wanted).values()) < CLOSE
    if method != "naive":  # which moves tensors outside linear layers too
        assert set(found) == set(wanted.deltas)


@pytest.mark.parametrize("method", ["bico", "theseus"])
def test_maps_of_full_rank_agree_with_a_plain_svd(case: Prepared, method: str, towers: Towers) -> None:
    wanted = reference.move(case.folders, case.signals, method)
    result = transfer(*case.folders, towers.data, method=method, scale=1.0, samples=SAMPLES, dtype="float64")
    filled = differences(dense(result), wanted)
    full = {name: value for name, value in filled.items() if name.rpartition(".")[0] in wanted.full}
    assert max(full.values()) < CLOSE
    # the gradients of a residual stream are orthogonal to the ones, the outputs of fc1 have the rank of its inputs
    low = {"bico": ("out_proj", "fc2", "patch_embedding"), "theseus": ("fc1",)}[method]
    assert {name for name in filled if name.split(".")[-2] not in low} == set(full)


def test_another_temperature_would_be_noticed(case: Prepared) -> None:
    """The factor of a cosine is the exponential of what is stored; with the stored number itself the maps differ."""
    found = case.determined("bico")
    soft = reference.move(case.folders, case.soft, "bico", complete=False)
    assert min(value for name, value in differences(found, soft).items() if "projection" in name) > 1000 * CLOSE
