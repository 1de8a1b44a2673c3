"""What a LoRA changes in its base: an adapter in, a task vector out.

A LoRA changes a weight by `scaling * B A`, which is a LowRank entry as it stands; whatever else an adapter can hold
(whole modules, biases, DoRA's magnitudes) becomes a dense entry. Adapters call modules by their live names. What does
not fit the base is collected and said in one CheckpointError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, first_of
from ..io.tensors import LazyMapping, describe
from .lora_format import CONFIG, PREFIX, TWICE, Adapter
from .low_rank import Entry, LowRank
from .vector import EntrySpec, TaskVector

_INNER = ".base_layer.out_proj.lora_"

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>A|B|embedding_A|embedding_B|magnitude_vector)(?:\.(?P<last>\w+))?")


def transposed_weights(module: nn.Module) -> frozenset[str]:
    """Names of weights stored (in, out): those of GPT-2's Conv1D."""
    return frozenset(f"{path}.weight" for path, part in module.named_modules() if type(part).__name__ == "Conv1D")


def task_vector_of(
    adapter: Adapter,
    base: Mapping[str, Tensor],
    *,
    other_names: Mapping[str, str] | None = None,
    transposed: Collection[str] | None = None,
) -> TaskVector:
    """What an adapter changes in its base, under the names of `base`: low-rank where it is a plain LoRA.

    `other_names` leads from further names that modules go by (such as those in the files) to names of `base`;
    `transposed` says which weights are stored (in, out), and is told from shapes and `fan_in_fan_out` if not given.
    Raises one CheckpointError with everything that does not fit.
    """
    parts = _checked(adapter, base, _Names(base, other_names or {}), transposed)

    def wide(name: str) -> torch.dtype:
        return torch.promote_types(describe(base, name).dtype, torch.float32)

    def change(name: str) -> Entry:
        return _read(adapter.tensors, parts.factors[name], base, name)

    def spec(name: str) -> EntrySpec:
        found = parts.factors[name]
        return EntrySpec(describe(base, name).shape, torch.float32, None if "magnitude" in found.keys else found.rank)

    def difference(name: str) -> Tensor:
        return adapter.tensors[parts.whole[name]].to(wide(name)) - base[name].detach().cpu().to(wide(name))

    def bias_of(name: str) -> Tensor:
        key, scaling = parts.biases[name]
        return adapter.tensors[key].to(wide(name)) * scaling

    def dense(name: str) -> EntrySpec:
        return EntrySpec(describe(base, name).shape, wide(name))

    whole = [name for name in parts.whole if name not in parts.factors]
    total = TaskVector(LazyMapping(parts.factors, change), spec)
    if parts.biases:
        total = total + TaskVector(LazyMapping(parts.biases, bias_of), dense)
    if whole:
        total = total + TaskVector(LazyMapping(whole, difference), dense)
    return total + _lone_biases(total, base)


def _lone_biases(vector: TaskVector, base: Mapping[str, Tensor]) -> TaskVector:
    """Where a bias changed and its weight did not: a change of rank 0, so that the layer takes part."""
    still: dict[str, Entry] = {}
    for name in vector:
        weight = f"{name.removesuffix('.bias')}.weight"
        if name.endswith(".bias") and weight in base and weight not in vector:
            shape = describe(base, weight).shape
            if len(shape) >= 2 and vector.changes(name):
                still[weight] = LowRank(torch.zeros(shape[0], 0), torch.zeros(0, *shape[1:]))
    return TaskVector(still)


class _Factors(NamedTuple):
    """How to make the change of one weight: the keys of its factors, in which order, and how strong."""

    keys: Mapping[str, str]
    scaling: float
    rank: int
    transposed: bool


@dataclass(frozen=True)
class _Parts:
    """What an adapter holds, by names of the base: factors, added biases (key, scaling) and whole tensors (key)."""

    factors: dict[str, _Factors]
    biases: dict[str, tuple[str, float]]
    whole: dict[str, str]


def _checked(adapter: Adapter, base: Mapping[str, Tensor], names: _Names, transposed: Collection[str] | None) -> _Parts:
    """The parts of an adapter, all of which fit the base."""
    loras, whole, wrong = _sorted_keys(adapter, names)
    turned = _how_stored(adapter, loras, base, transposed)
    parts = _Parts({}, {}, whole)
    for weight, lora in loras.items():
        if _INNER in lora.keys.get("A", "") and "B" in lora.keys:
            if all(bool(adapter.tensors[lora.keys[side]].any()) for side in "AB"):
                wrong.append(f"{lora.path} ({TWICE}: merge the adapter into its base)")
            continue
        found = _factors(adapter, lora, describe(base, weight).shape, turned(weight))
        if isinstance(found, str):
            wrong.append(f"{lora.path} ({found})")
            continue
        parts.factors[weight] = found
        if "B.bias" in lora.keys:
            bias = names.find(f"{lora.path}.bias")
            if bias is None or describe(base, bias).shape != describe(adapter.tensors, lora.keys["B.bias"]).shape:
                wrong.append(f"{lora.path} (the base layer has no such bias)")
            else:
                parts.biases[bias] = (lora.keys["B.bias"], found.scaling)
    wrong += _whole_misfits(adapter, base, parts)
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} parts of the adapter {adapter.name} do not fit the base: {first_of(wrong)}. "
            f"It was made for {adapter.config.get('base_model_name_or_path') or 'a base that it does not name'}."
        )
    return parts


def _whole_misfits(adapter: Adapter, base: Mapping[str, Tensor], parts: _Parts) -> list[str]:
    """Whole tensors of another shape, and those beside factors that are not what the factors were trained on."""
    wrong = []
    for name, key in parts.whole.items():
        here, there = describe(adapter.tensors, key).shape, describe(base, name).shape
        if here != there:
            wrong.append(f"{key} {here} vs {there}")
        elif name in parts.factors and not torch.equal(adapter.tensors[key].float(), base[name].detach().cpu().float()):
            wrong.append(f"{key} (not the base's own weight: the adapter was trained on another base)")
    return wrong


@dataclass
class _Lora:
    """The tensors of one LoRA, by the name of the tensor that it changes."""

    path: str
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Names:
    """The names of a base's tensors, and further ones that lead to them."""

    base: Mapping[str, Tensor]
    other: Mapping[str, str]

    def find(self, *candidates: str) -> str | None:
        """The name in the base of the first candidate that it has, under this or its other name."""
        for name in candidates:
            known = name if name in self.base else self.other.get(name)
            if known is not None and known in self.base:
                return known
        return None


def _sorted_keys(adapter: Adapter, names: _Names) -> tuple[dict[str, _Lora], dict[str, str], list[str]]:
    """The adapter's tensors as LoRAs by weight, as whole tensors by name, and those that have no place."""
    loras: dict[str, _Lora] = {}
    whole: dict[str, str] = {}
    wrong: list[str] = []
    for key in adapter.tensors:
        plain = key.removeprefix(PREFIX)
        if ".original_module." in plain:  # the base's own copy beside a module that was saved whole
            continue
        found = _FACTOR.fullmatch(plain)
        path = re.sub(r"\.(base_layer|modules_to_save)(?=\.|$)", "", found["module"] if found else plain)
        name = names.find(f"{path}.weight", f"{path}.in_proj_weight") if found else names.find(path)
        if name is None:
            missing = f"{path} (no such module, or its weight is tied to another)" if found else key
            wrong.append(missing)
        elif found:
            side = found["side"].replace("magnitude_vector", "magnitude")
            side += ".bias" if found["last"] == "bias" else ""
            loras.setdefault(name, _Lora(path)).keys[side] = key
        else:
            whole[name] = key
    return loras, whole, list(dict.fromkeys(wrong))


def _how_stored(
    adapter: Adapter, loras: Mapping[str, _Lora], base: Mapping[str, Tensor], transposed: Collection[str] | None
) -> Callable[[str], bool | None]:
    """Whether a weight is stored (in, out): as given, else by its shape, else as `fan_in_fan_out` says.

    None where that cannot be told: peft leaves in `fan_in_fan_out` what was right for the last module, so a square
    weight is unclear as soon as another weight contradicts it.
    """
    if transposed is not None:
        return lambda weight: weight in transposed
    seen: dict[str, bool] = {}
    for weight, lora in loras.items():
        if "A" in lora.keys and "B" in lora.keys:
            A, B = (describe(adapter.tensors, lora.keys[side]).shape for side in "AB")
            if len(A) == len(B) == 2 and A[1] != B[0]:
                seen[weight] = (A[1], B[0]) == describe(base, weight).shape
    stated = bool(adapter.config.get("fan_in_fan_out"))
    square = stated if set(seen.values()) <= {stated} else None
    return lambda weight: seen.get(weight, square if len(describe(base, weight).shape) == 2 else False)


def _factors(adapter: Adapter, lora: _Lora, shape: tuple[int, ...], transposed: bool | None) -> _Factors | str:
    """How to read one LoRA, or what is wrong with it."""
    embedded = "embedding_A" in lora.keys or "embedding_B" in lora.keys
    kind = "embedding_" if embedded else ""
    if f"{kind}A" not in lora.keys or f"{kind}B" not in lora.keys:
        return "one of its two factors is missing"
    if embedded and "magnitude" in lora.keys:
        return "DoRA on an embedding: merge it into its base"
    A, B = (describe(adapter.tensors, lora.keys[f"{kind}{side}"]).shape for side in "AB")
    try:
        rank = int(_patterned(adapter.config, "rank_pattern", "r", lora.path, 8))
        alpha = float(_patterned(adapter.config, "alpha_pattern", "lora_alpha", lora.path, 8))
    except (TypeError, ValueError, OverflowError, LookupError, re.error) as error:
        return f"its rank or alpha in {CONFIG} cannot be read: {error}"
    if not math.isfinite(alpha):
        return f"its alpha in {CONFIG} is {alpha}"
    if len(A) < 2 or len(B) < 2 or A[0] != rank or B[1] != rank or rank < 1:
        return f"factors {A} and {B}, but its configuration says rank {rank}"
    if transposed is None and not embedded:
        return "a square weight: its files do not tell whether it is stored transposed; use a live model"
    scaling = alpha / (math.sqrt(rank) if adapter.config.get("use_rslora") else rank)
    flipped = embedded or bool(transposed)
    product = (B[0], *A[1:])
    if (product[::-1] if flipped else product) != shape or set(B[2:]) - {1}:
        return f"factors {A} and {B} do not make {shape}"
    if "magnitude" in lora.keys and math.prod(describe(adapter.tensors, lora.keys["magnitude"]).shape) != B[0]:
        return f"its magnitudes do not fit factors {A} and {B}"
    return _Factors({side.removeprefix(kind): key for side, key in lora.keys.items()}, scaling, rank, flipped)


def _patterned(config: Mapping[str, Any], patterns: str, default: str, path: str, otherwise: int) -> Any:
    """A setting of one module: the first pattern that matches the end of its path, as peft matches them."""
    table = config.get(patterns) or {}
    key = next((key for key in table if re.match(rf"(.*\.)?({key})$", path)), None)
    return config.get(default, otherwise) if key is None else table[key]


def _read(tensors: Mapping[str, Tensor], factors: _Factors, base: Mapping[str, Tensor], name: str) -> Entry:
    """The change of one weight: `scaling * B A`, or with DoRA `m / |W + scaling B A| * (W + scaling B A) - W`."""
    A, B = tensors[factors.keys["A"]].float(), tensors[factors.keys["B"]].float().flatten(1) * factors.scaling
    entry = LowRank(A.T.contiguous(), B.T.contiguous()) if factors.transposed else LowRank(B, A)
    if "magnitude" not in factors.keys:
        return entry
    weight = base[name].detach().cpu().float()
    moved = weight + entry.dense()
    rows = moved.T if factors.transposed else moved.flatten(1)
    magnitude = tensors[factors.keys["magnitude"]].float().flatten()
    factor = (magnitude / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
    scaled = (factor * rows).T if factors.transposed else (factor * rows).reshape(weight.shape)
    change: Tensor = scaled - weight
    return change
