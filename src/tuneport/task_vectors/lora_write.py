"""Convert a task vector to a LoRA adapter that peft loads.

Low-rank entries are stored exactly; dense entries are truncated to a rank, and the lost share of the update is
reported. A head is stored whole, in `modules_to_save`. What an adapter cannot hold is reported with the reason.

The checks of vLLM are those of its `peft_helper.py`, `lora_model.py` and `config/lora.py`. It does not read
`rank_pattern`, so one rank for all layers is the safe form. It casts the factors to its own dtype.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import AdapterConfig
from ..errors import TuneportError, first_of
from .lora_format import PREFIX, TWICE, Adapter
from .low_rank import Entry, LowRank, truncate
from .vector import TaskVector

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CLASSIFIERS = ("classifier", "score")  # peft always saves modules of these names whole for its two tasks of labels
LABELS = ("SEQ_CLS", "TOKEN_CLS")
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank takes
VLLM_MODULES = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")
)


UNCUT = AdapterConfig()


def cut(
    vector: TaskVector, module: nn.Module, form: AdapterConfig, saved: Sequence[str] = ()
) -> tuple[TaskVector, dict[str, float], dict[str, str]]:
    """What an adapter of a live module holds of a task vector; the modules in `saved` are stored whole.

    Low-rank updates are kept as they are; dense ones, and all if `rank` or `energy` is given, are cut by SVD. Also the
    share that each update loses, and why the adapter cannot hold the rest.
    """
    whole = [name for name in vector if name.startswith(tuple(f"{path}." for path in saved))]
    held: dict[str, Entry] = {name: vector[name] for name in whole}
    lost, kept = {}, {}
    for name, place in _places(module, [name for name in vector if name not in held]).items():
        if isinstance(place, str):
            kept[name] = place
            continue
        entry = vector[name]
        if place.kind == "bias":
            held[name] = entry
        elif not isinstance(entry, LowRank) or entry.rank > 0:
            held[name], lost[name] = truncate(entry, form.rank, form.energy)
    if not lost:
        reasons = first_of(f"{name} ({reason})" for name, reason in kept.items()) or "only biases changed"
        raise TuneportError(f'no update can be written as a LoRA: {reasons}. Use `as_="model"`.')
    return TaskVector(held), lost, kept


def rounded(entry: Entry, form: AdapterConfig) -> Entry:
    """An entry as it is read from an adapter of this form."""
    return entry.to(DTYPES[form.adapter_dtype]).to(torch.float32)


@dataclass(frozen=True, eq=False)
class Packed:
    """A task vector as an adapter: the adapter, what is recorded of each module, and why it cannot hold the rest."""

    adapter: Adapter
    modules: list[dict[str, Any]]  # its rank, and the share of the update's energy that truncation lost
    kept: Mapping[str, str]


def pack(
    vector: TaskVector,
    module: nn.Module,
    base: Mapping[str, Tensor],
    form: AdapterConfig = UNCUT,
    *,
    scale: float = 1.0,
    head: Iterable[str] = (),
    about: Mapping[str, Any] | None = None,
) -> Packed:
    """Convert a task vector, by parameter names of a live module with the weights `base`, to a LoRA that peft loads.

    The scale is folded into B, with lora_alpha = r; parameters of the `head` are stored whole; `about` has further
    settings of the configuration. Biases are stored as their new values, as peft stores trained biases.
    """
    saved = saved_modules(module, head, (about or {}).get("task_type"))
    held, lost, kept = cut(vector, module, form, saved)
    places = {name: place for name, place in _places(module, held).items() if isinstance(place, _Place)}
    factors = {name: entry for name in lost if isinstance(entry := held[name], LowRank)}
    most = max(entry.rank for entry in factors.values())
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, entry in factors.items():
        place, rank = places[name], most if form.uniform_rank else entry.rank
        ranks[place.target] = rank
        tensors |= _factor_tensors(place, _padded(entry * scale, rank))
        owner: Any = module.get_submodule(place.target)
        if isinstance(owner, nn.MultiheadAttention):  # peft also adapts its output projection: by zeros
            inner, width = f"{place.path}.base_layer.out_proj", owner.embed_dim
            zeros = LowRank(torch.zeros(width, rank), torch.zeros(rank, width))
            tensors |= _factor_tensors(_Place(inner, inner, "linear"), zeros)

    def new(name: str) -> Tensor:
        return base[name].detach().cpu().float() + scale * held.dense(name).cpu().float()

    whole = {f"{path}.{part}": live for path in saved for part, live in module.get_submodule(path).state_dict().items()}
    for name, live in whole.items():
        tensors[PREFIX + name] = new(name) if name in held else base.get(name, live).detach().cpu()
    biases = {name: places[name] for name in held if name not in factors and name not in whole}
    for name, place in biases.items():
        tensors[PREFIX + (_bias_key(name, place.target) if place.target in ranks else name)] = new(name)
    trained = "none" if not biases else "lora_only" if all(p.target in ranks for p in biases.values()) else "all"
    largest = max(ranks.values())
    others = {f"^{re.escape(target)}": rank for target, rank in ranks.items() if rank != largest}
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        **(about or {}),
        "r": largest,
        "lora_alpha": largest,
        "rank_pattern": others,
        "alpha_pattern": dict(others),
        "target_modules": _target_modules(module, list(ranks)),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "fan_in_fan_out": any(places[name].kind == "transposed" for name in factors),
        "bias": trained,
        "modules_to_save": saved or None,
    }
    dtype = DTYPES[form.adapter_dtype]
    stored = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    modules = [
        {"module": places[name].path, "rank": entry.rank, "lost_energy": lost[name]} for name, entry in factors.items()
    ]
    return Packed(Adapter("adapter", config, stored), modules, kept)


def saved_modules(module: nn.Module, head: Iterable[str], task_type: str | None = None) -> list[str]:
    """The modules that an adapter stores whole: those of the head, and those that peft always saves for a task.

    peft finds them by the ends of their names, and reads each of them from the file.
    """
    names = {name.rpartition(".")[0] for name in head} | set(CLASSIFIERS if task_type in LABELS else ())
    paths = [path for path, _ in module.named_modules() if names and path.endswith(tuple(names))]
    return [path for path in paths if not path.startswith(tuple(f"{other}." for other in paths))]


def _padded(factors: LowRank, rank: int) -> LowRank:
    """The same matrix with factors of this rank."""
    zeros = factors.in_factor.new_zeros(rank - factors.rank, *factors.shape[1:])
    return LowRank(F.pad(factors.out_factor, (0, len(zeros))), torch.cat([factors.in_factor, zeros]))


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


def vllm_rank(adapter: Adapter) -> int | None:
    """The least `--max-lora-rank` with which vLLM loads an adapter; None if no value is large enough."""
    return next((rank for rank in VLLM_RANKS if rank >= int(adapter.config["r"])), None)


def vllm_refusals(adapter: Adapter) -> Iterator[str]:
    """The reasons why vLLM would refuse an adapter, or would serve something else."""
    config = adapter.config
    if vllm_rank(adapter) is None:
        yield f"rank {config['r']}, and {VLLM_RANKS[-1]} is the largest: pass `rank=R`"
    if config.get("rank_pattern"):
        yield "layers of several ranks: pass `uniform_rank=True`"
    if config.get("use_dora"):
        yield "DoRA"
    if saved := config.get("modules_to_save"):
        yield f"modules that are stored whole ({first_of(saved)})"
    if config.get("bias", "none") != "none":
        yield "biases"
    paths = {key.partition(".lora_")[0].rpartition(".")[2] for key in adapter.tensors if ".lora_" in key}
    if others := sorted(paths - VLLM_MODULES):
        yield f"layers that it does not adapt ({first_of(others)})"
