"""PEFT LoRA adapters and task vectors: a folder in, low-rank entries out, and back.

The folder format is read and written directly (`adapter_config.json` and `adapter_model.safetensors`), so peft
itself is not needed. A LoRA changes a weight by `scaling * B A`, which is a LowRank entry as it stands; whatever
else an adapter can hold (whole modules, biases, DoRA's magnitudes) becomes a dense entry. Adapters call modules
by their live names. What cannot be read exactly is refused with the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .checkpoint import open_checkpoint, read_json, write_checkpoint
from .errors import CheckpointError, TuneportError, first_of
from .low_rank import Entry, LowRank, check_truncation, truncate
from .soundness import check_finite
from .task_vector import EntrySpec, TaskVector
from .tensors import Lazy, describe

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
PREFIX = "base_model.model."

# Settings of peft's LoraConfig whose adapters are more, or other, than base + scaling * B A.
UNREAD = {
    "target_parameters": "LoRA on bare parameters (target_parameters)",
    "trainable_token_indices": "trainable tokens",
    "layer_replication": "replicated layers",
    "alora_invocation_tokens": "aLoRA, which is active for some tokens only",
    "arrow_config": "Arrow routing between adapters",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA, which changes the base weights",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron's parallel layers",
}
# Initialisations that take something out of the base weights: B A is then not the whole change.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

# Seen in peft 0.21, see its pull request 3774: such a LoRA counts double. Zeros mean the same either way.
TWICE = "peft applies a LoRA on the output projection of torch's attention twice"
_INNER = ".base_layer.out_proj.lora_"

_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>A|B|embedding_A|embedding_B|magnitude_vector)(?:\.(?P<last>\w+))?")


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter as it is stored: its configuration, and its tensors under their names in the file."""

    name: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...] = ()


def is_adapter(thing: object) -> bool:
    """Whether this is the path of an adapter folder, or a live model that carries adapters."""
    if isinstance(thing, (str, Path)):
        return (Path(thing) / CONFIG).is_file()
    return bool(getattr(thing, "peft_config", None)) and isinstance(thing, nn.Module)


def open_adapter(thing: str | Path | nn.Module) -> Adapter:
    """Open an adapter folder, or the active adapter of a live model; refuse what cannot be read exactly."""
    adapter = _live_adapter(thing) if isinstance(thing, nn.Module) else _stored_adapter(Path(thing))
    kind = getattr(adapter.config.get("peft_type"), "value", adapter.config.get("peft_type"))
    if kind != "LORA":
        raise CheckpointError(
            f"{adapter.name} is an adapter of type {kind}; tuneport reads LORA. Merge it into its base."
        )
    odd = [words for key, words in UNREAD.items() if adapter.config.get(key)]
    if odd:
        raise CheckpointError(
            f"{adapter.name} uses {first_of(odd)}, which tuneport does not read. Merge it into its base."
        )
    started = adapter.config.get("init_lora_weights")
    if isinstance(started, str) and started.lower().startswith(CHANGES_BASE):
        raise CheckpointError(
            f"{adapter.name} was initialised by {started}, which changes the base weights. Save it again with "
            "path_initial_model_for_weight_conversion, which makes it a plain LoRA."
        )
    coarse = [name for name in adapter.tensors if describe(adapter.tensors, name).dtype.itemsize < 2]
    if coarse:
        raise CheckpointError(
            f"{len(coarse)} tensors of {adapter.name} are quantised: {first_of(coarse)}. Save it in float32."
        )
    check_finite(adapter.tensors)
    return adapter


def _stored_adapter(folder: Path) -> Adapter:
    config = read_json(folder / CONFIG, "an adapter's configuration")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is not an adapter's configuration: expected a JSON object.")
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f"{folder} has an {CONFIG} but no weights: expected {' or '.join(WEIGHTS)}.")
    return Adapter(str(folder), config, open_checkpoint(weights), (folder / CONFIG, weights))


def _live_adapter(module: nn.Module) -> Adapter:
    """The active adapter of a PeftModel, as peft would save it."""
    from peft import get_peft_model_state_dict

    configs: Any = module.peft_config
    active: Any = getattr(module, "active_adapter", None)
    names = [active() if callable(active) else active] if active is not None else list(configs)
    if isinstance(names[0], (list, tuple)):
        names = list(names[0])
    if len(names) != 1:
        raise TuneportError(f"{type(module).__name__} has {len(names)} active adapters; set one with set_adapter.")
    tensors = get_peft_model_state_dict(module, adapter_name=names[0], save_embedding_layers=False)
    stated = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    return Adapter(type(module).__name__, configs[names[0]].to_dict(), stated)


def transposed_weights(module: nn.Module) -> frozenset[str]:
    """Names of weights stored (in, out): those of GPT-2's Conv1D."""
    return frozenset(f"{path}.weight" for path, part in module.named_modules() if type(part).__name__ == "Conv1D")


@dataclass
class _Lora:
    """The tensors of one LoRA, by the name of the tensor that it changes."""

    path: str
    keys: dict[str, str] = field(default_factory=dict)


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
    factors, added, absolute = _checked(adapter, base, _Names(base, other_names or {}), transposed)

    def wide(name: str) -> torch.dtype:
        return torch.promote_types(describe(base, name).dtype, torch.float32)

    def change(name: str) -> Entry:
        return _read(adapter.tensors, factors[name], base, name)

    def spec(name: str) -> EntrySpec:
        found = factors[name]
        return EntrySpec(describe(base, name).shape, torch.float32, None if "magnitude" in found.keys else found.rank)

    def difference(name: str) -> Tensor:
        return adapter.tensors[absolute[name]].to(wide(name)) - base[name].detach().cpu().to(wide(name))

    def bias_of(name: str) -> Tensor:
        key, scaling = added[name]
        return adapter.tensors[key].to(wide(name)) * scaling

    def dense(name: str) -> EntrySpec:
        return EntrySpec(describe(base, name).shape, wide(name))

    whole = [name for name in absolute if name not in factors]
    total = TaskVector(Lazy(factors, change), spec)
    if added:
        total = total + TaskVector(Lazy(added, bias_of), dense)
    if whole:
        total = total + TaskVector(Lazy(whole, difference), dense)
    return total + _lone_biases(total, base)


def _checked(
    adapter: Adapter, base: Mapping[str, Tensor], names: _Names, transposed: Collection[str] | None
) -> tuple[dict[str, _Factors], dict[str, tuple[str, float]], dict[str, str]]:
    """Factors by weight, added biases (key and scaling) and whole tensors (key) by name; all of them fit the base."""
    loras, absolute, wrong = _sorted_keys(adapter, names)
    turned = _how_stored(adapter, loras, base, transposed)
    factors: dict[str, _Factors] = {}
    added: dict[str, tuple[str, float]] = {}
    for weight, lora in loras.items():
        if _INNER in lora.keys.get("A", "") and "B" in lora.keys:
            if all(bool(adapter.tensors[lora.keys[side]].any()) for side in "AB"):
                wrong.append(f"{lora.path} ({TWICE}: merge the adapter into its base)")
            continue
        found = _factors(adapter, lora, describe(base, weight).shape, turned(weight))
        if isinstance(found, str):
            wrong.append(f"{lora.path} ({found})")
            continue
        factors[weight] = found
        if "B.bias" in lora.keys:
            bias = names.find(f"{lora.path}.bias")
            if bias is None or describe(base, bias).shape != describe(adapter.tensors, lora.keys["B.bias"]).shape:
                wrong.append(f"{lora.path} (the base layer has no such bias)")
            else:
                added[bias] = (lora.keys["B.bias"], found.scaling)
    for name, key in absolute.items():
        here, there = describe(adapter.tensors, key).shape, describe(base, name).shape
        if here != there:
            wrong.append(f"{key} {here} vs {there}")
        elif name in factors and not torch.equal(adapter.tensors[key].float(), base[name].detach().cpu().float()):
            wrong.append(f"{key} (not the base's own weight: the adapter was trained on another base)")
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} parts of the adapter {adapter.name} do not fit the base: {first_of(wrong)}. "
            f"It was made for {adapter.config.get('base_model_name_or_path') or 'a base that it does not name'}."
        )
    return factors, added, absolute


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


@dataclass(frozen=True)
class _Names:
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
    absolute: dict[str, str] = {}
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
            absolute[name] = key
    return loras, absolute, list(dict.fromkeys(wrong))


class _Factors(NamedTuple):
    """How to make the change of one weight: the keys of its factors, in which order, and how strong."""

    keys: Mapping[str, str]
    scaling: float
    rank: int
    transposed: bool


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


@dataclass(frozen=True)
class AdaptedModule:
    """One module of a written adapter: the rank that it got, and the share of the update's energy lost by it."""

    module: str
    rank: int
    lost_energy: float


@dataclass(frozen=True, eq=False)
class Packed:
    """A task vector as an adapter: the adapter, a record per module, and tensors it has no place for."""

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
    """A task vector of a live module, by its parameter names, as a LoRA that plain peft loads.

    Low-rank entries go in as they are; dense ones, and all where `rank` or `energy` is given, by truncated SVD.
    The scale is folded into B, with lora_alpha = r. Biases are stored as peft stores trained biases, as the new
    values. `base` holds the module's weights; `about` adds to the configuration.
    """
    check_truncation(rank, energy)
    places = _places(module, vector)
    kept = {name: place for name, place in places.items() if isinstance(place, str)}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    records, biases, turned = [], [], False
    low: dict[str, tuple[_Place, LowRank]] = {}
    for name, place in places.items():
        if isinstance(place, str):
            continue
        if place.kind == "bias":
            biases.append((name, place))
            continue
        entry = vector[name]
        if isinstance(entry, LowRank) and entry.rank == 0:
            continue
        factors, lost = truncate(entry, rank, energy)
        low[name] = (place, factors * scale)
        ranks[place.target] = factors.rank
        records.append(AdaptedModule(place.path, factors.rank, lost))
    if not low:
        raise TuneportError(
            f"no update can be written as a LoRA: {_reasons(kept) or 'only biases changed'}. Use --as model."
        )
    for place, factors in low.values():
        turned = turned or place.kind == "transposed"
        tensors |= _factor_tensors(place, factors)
        owner: Any = module.get_submodule(place.target)
        if isinstance(owner, nn.MultiheadAttention):  # adapting it adapts its output projection too: by nothing
            tensors |= _nothing(f"{place.path}.base_layer.out_proj", owner.out_proj.weight, factors.rank)
    for name, place in biases:
        key = _bias_key(name, place, place.target in ranks)
        tensors[key] = base[name].detach().cpu().float() + scale * vector.dense(name).cpu().float()
    most = max(ranks.values())
    others = {f"^{re.escape(target)}": number for target, number in ranks.items() if number != most}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        **(about or {}),
        "r": most,
        "lora_alpha": most,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "target_modules": _target_modules(module, list(ranks)),
        "fan_in_fan_out": turned,
        "bias": "none" if not biases else "lora_only" if all(place.target in ranks for _, place in biases) else "all",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "inference_mode": True,
    }
    return Packed(Adapter("adapter", config, tensors), tuple(records), kept)


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write the two files of an adapter; use it inside `new_folder`."""
    text = json.dumps(dict(adapter.config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    write_checkpoint(folder, adapter.tensors, stem="adapter_model", max_shard_size="1000TB")


class _Place(NamedTuple):
    """Where an adapter keeps the change of a tensor: the module that peft is told to adapt, the path, the layout."""

    target: str
    path: str
    kind: str


def no_place(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The parameters whose change an adapter has no place for, with the reasons."""
    return {name: place for name, place in _places(module, names).items() if isinstance(place, str)}


def _places(module: nn.Module, names: Iterable[str]) -> dict[str, _Place | str]:
    """Where a LoRA can hold the change of each parameter, or why nowhere."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    tied = {name: group for group in groups.values() if len(group) > 1 for name in group}

    def place(name: str) -> _Place | str:
        if name not in tied:
            return _place(module, name)
        twins = first_of(other for other in tied[name] if other != name)
        return f"its numbers are shared with {twins}; an adapter would change only one of them"

    return {name: place(name) for name in names}


def _place(module: nn.Module, name: str) -> _Place | str:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    above = path.rpartition(".")[0]
    in_attention = bool(above) and isinstance(module.get_submodule(above), nn.MultiheadAttention)
    if isinstance(owner, nn.MultiheadAttention) and last == "in_proj_weight":
        return _Place(path, path, "linear")
    if isinstance(owner, nn.MultiheadAttention) and last == "in_proj_bias":
        return _Place(path, path, "bias")
    if last == "bias" and _adapts(owner):
        return _Place(above if in_attention else path, path, "bias")
    if last != "weight" or not _adapts(owner):
        return f"a LoRA has no place for a parameter of {type(owner).__name__}"
    if in_attention:
        return TWICE
    if isinstance(owner, nn.Embedding):
        return _Place(path, path, "embedding")
    if isinstance(owner, nn.Conv2d):
        return _Place(path, path, "convolution")
    return _Place(path, path, "linear" if isinstance(owner, nn.Linear) else "transposed")


def _adapts(owner: nn.Module) -> bool:
    """Whether peft adapts a module of this type."""
    if isinstance(owner, nn.Conv2d):
        return owner.groups == 1
    return isinstance(owner, (nn.Linear, nn.Embedding)) or type(owner).__name__ == "Conv1D"


def _factor_tensors(place: _Place, low: LowRank) -> dict[str, Tensor]:
    """The stored factors of one module, laid out as peft lays them out."""
    B, A = low.out_factor.float(), low.in_factor.float()
    if place.kind in ("transposed", "embedding"):
        B, A = A.T, B.T
    if place.kind == "embedding":
        return {f"{PREFIX}{place.path}.lora_embedding_{side}": t.contiguous() for side, t in (("A", A), ("B", B))}
    if place.kind == "convolution":
        B = B[:, :, None, None]
    return {f"{PREFIX}{place.path}.lora_{side}.weight": t.contiguous() for side, t in (("A", A), ("B", B))}


def _bias_key(name: str, place: _Place, adapted: bool) -> str:
    """Where a bias stands in the adapted model: peft puts a base layer inside each module that it adapts."""
    path, _, last = name.rpartition(".")
    if not adapted:
        return f"{PREFIX}{name}"
    inner = path.removeprefix(place.target)  # of an attention module, its output projection
    return f"{PREFIX}{place.target}.base_layer{inner}{'.base_layer' if inner else ''}.{last}"


def _nothing(path: str, weight: Tensor, rank: int) -> dict[str, Tensor]:
    """Factors of a change by zero."""
    rows, columns = weight.shape
    return _factor_tensors(_Place(path, path, "linear"), LowRank(torch.zeros(rows, rank), torch.zeros(rank, columns)))


def _target_modules(module: nn.Module, paths: Sequence[str]) -> list[str] | str:
    """Full names; a regular expression where a full name is also the end of another module's name."""
    chosen = set(paths)
    endings = tuple(f".{path}" for path in paths)
    if any(name.endswith(endings) for name, _ in module.named_modules() if name not in chosen):
        return "|".join(re.escape(path) for path in paths)
    return list(paths)


def _reasons(kept: Mapping[str, str]) -> str:
    return first_of(f"{name} ({reason})" for name, reason in kept.items())
