"""Convert a task vector to a LoRA adapter that peft loads.

Low-rank entries are stored exactly; dense entries are truncated to a rank, and the lost share of the update is
reported. Tensors that an adapter cannot hold are reported with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import TuneportError, first_of
from .lora_format import PREFIX, TWICE, Adapter
from .low_rank import LowRank, check_truncation, truncate
from .vector import TaskVector


@dataclass(frozen=True)
class AdaptedModule:
    """One module of a written adapter: its rank, and the share of the update's energy that truncation lost."""

    module: str
    rank: int
    lost_energy: float


@dataclass(frozen=True, eq=False)
class Packed:
    """A task vector as an adapter: the adapter, a record per module, and why it cannot hold the remaining tensors."""

    adapter: Adapter
    modules: tuple[AdaptedModule, ...]
    kept: Mapping[str, str]


def pack(
    vector: TaskVector,
    module: nn.Module,
    base: Mapping[str, Tensor],
    *,
    scale: float = 1.0,
    rank: int | None = None,
    energy: float | None = None,
    about: Mapping[str, Any] | None = None,
) -> Packed:
    """Convert a task vector of a live module to a LoRA that peft loads.

    Low-rank entries are stored as they are; dense entries, and all entries if `rank` or `energy` is given, are
    truncated by SVD. Biases are stored as their new values, as peft stores trained biases.

    Args:
        vector: the task vector, by parameter names of `module`.
        module: the live module that the adapter is for.
        base: the weights of `module`.
        scale: factor of the task vector, folded into B, with lora_alpha = r.
        rank: the largest rank of an entry.
        energy: the share of each entry's squared norm to keep, in place of `rank`.
        about: additional settings of the adapter's configuration.
    """
    check_truncation(rank, energy)
    places = _places(module, vector)
    kept = {name: place for name, place in places.items() if isinstance(place, str)}
    held = {name: place for name, place in places.items() if isinstance(place, _Place)}
    biases = {name: place for name, place in held.items() if place.kind == "bias"}
    entries = ((place, vector[name]) for name, place in held.items() if name not in biases)
    low = [
        (place, *truncate(entry, rank, energy))
        for place, entry in entries
        if not isinstance(entry, LowRank) or entry.rank > 0
    ]
    if not low:
        reasons = first_of(f"{name} ({reason})" for name, reason in kept.items()) or "only biases changed"
        raise TuneportError(f'no update can be written as a LoRA: {reasons}. Use `kind="model"`.')
    tensors: dict[str, Tensor] = {}
    for place, factors, _ in low:
        tensors |= _factor_tensors(place, factors * scale)
        owner: Any = module.get_submodule(place.target)
        if isinstance(owner, nn.MultiheadAttention):  # peft also adapts its output projection: by zeros
            inner, shape = f"{place.path}.base_layer.out_proj", (owner.embed_dim, factors.rank)
            zeros = LowRank(torch.zeros(shape), torch.zeros(shape[::-1]))
            tensors |= _factor_tensors(_Place(inner, inner, "linear"), zeros)
    ranks = {place.target: factors.rank for place, factors, _ in low}
    for name, place in biases.items():
        key = _bias_key(name, place.target) if place.target in ranks else name
        tensors[PREFIX + key] = base[name].detach().cpu().float() + scale * vector.dense(name).cpu().float()
    transposed = any(place.kind == "transposed" for place, _, _ in low)
    trained = "none" if not biases else "lora_only" if all(p.target in ranks for p in biases.values()) else "all"
    config = _config(module, ranks, about or {}, fan_in_fan_out=transposed, bias=trained)
    records = tuple(AdaptedModule(place.path, factors.rank, lost) for place, factors, lost in low)
    return Packed(Adapter("adapter", config, tensors), records, kept)


def _config(
    module: nn.Module, ranks: Mapping[str, int], about: Mapping[str, Any], *, fan_in_fan_out: bool, bias: str
) -> dict[str, Any]:
    """The configuration of a LoRA with a rank for each adapted module and a scaling of 1."""
    most = max(ranks.values())
    others = {f"^{re.escape(target)}": number for target, number in ranks.items() if number != most}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        **about,
        "r": most,
        "lora_alpha": most,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "target_modules": _target_modules(module, list(ranks)),
        "fan_in_fan_out": fan_in_fan_out,
        "bias": bias,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }


class _Place(NamedTuple):
    """Where an adapter stores the change of a tensor: the module in target_modules, the path, the layout."""

    target: str
    path: str
    kind: str


def no_place(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The parameters whose change an adapter cannot hold, with the reasons."""
    return {name: place for name, place in _places(module, names).items() if isinstance(place, str)}


def _places(module: nn.Module, names: Iterable[str]) -> dict[str, _Place | str]:
    """Where a LoRA stores the change of each parameter, or the reason why it cannot."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = {name: [other for other in group if other != name] for group in groups.values() for name in group}
    return {name: _place(module, name, tied.get(name, ())) for name in names}


def _place(module: nn.Module, name: str, tied: Sequence[str]) -> _Place | str:
    if tied:
        return f"it is tied to {first_of(tied)}; an adapter would change only one of them"
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    above = path.rpartition(".")[0]
    in_attention = bool(above) and isinstance(module.get_submodule(above), nn.MultiheadAttention)
    if isinstance(owner, nn.MultiheadAttention) and last in ("in_proj_weight", "in_proj_bias"):
        return _Place(path, path, "linear" if last == "in_proj_weight" else "bias")
    if last == "bias" and _adapts(owner):
        return _Place(above if in_attention else path, path, "bias")
    if last != "weight" or not _adapts(owner):
        return f"a LoRA cannot hold a parameter of {type(owner).__name__}"
    if in_attention:
        return TWICE
    if isinstance(owner, nn.Embedding):
        return _Place(path, path, "embedding")
    if isinstance(owner, nn.Conv2d):
        return _Place(path, path, "convolution")
    return _Place(path, path, "linear" if isinstance(owner, nn.Linear) else "transposed")


def _adapts(owner: nn.Module) -> bool:
    """True if peft adapts a module of this type."""
    if isinstance(owner, nn.Conv2d):
        return owner.groups == 1
    return isinstance(owner, (nn.Linear, nn.Embedding)) or type(owner).__name__ == "Conv1D"


def _factor_tensors(place: _Place, low: LowRank) -> dict[str, Tensor]:
    """The factors of one module in peft's layout."""
    B, A = low.out_factor.float(), low.in_factor.float()
    if place.kind in ("transposed", "embedding"):
        B, A = A.T, B.T
    if place.kind == "convolution":
        B = B[:, :, None, None]
    key = f"{PREFIX}{place.path}." + ("lora_embedding_{}" if place.kind == "embedding" else "lora_{}.weight")
    return {key.format("A"): A.contiguous(), key.format("B"): B.contiguous()}


def _bias_key(name: str, target: str) -> str:
    """The name of a bias of an adapted module: peft puts a base layer inside each adapted module."""
    path, _, last = name.rpartition(".")
    inner = path.removeprefix(target)  # of an attention module, its output projection
    return f"{target}.base_layer{inner}{'.base_layer' if inner else ''}.{last}"


def _target_modules(module: nn.Module, paths: Sequence[str]) -> list[str] | str:
    """Full names, or a regular expression if another module's name ends in one of them, as peft would match it."""
    endings = tuple(f".{path}" for path in paths)
    if any(name.endswith(endings) and name not in paths for name, _ in module.named_modules()):
        return "|".join(re.escape(path) for path in paths)
    return list(paths)
