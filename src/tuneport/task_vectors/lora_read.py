"""Convert a LoRA adapter, or what peft makes a LoRA of, to a task vector.

A LoRA changes a weight by `scaling * B A`, which becomes a LowRank entry; the other contents of an adapter (whole
modules, biases, DoRA's magnitudes) become dense entries. Adapters name modules as in the live model. Everything that
does not fit the base is collected into one CheckpointError.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError, TuneportError, brief, first_of, shortened
from ..io.places import CONFIG
from ..io.tensors import MOST_PARTS, LazyMapping, TensorSpec, describe
from ..io.untrusted import LONGEST_NAME
from .lora_format import PREFIX, TWICE, Adapter
from .low_rank import Entry, LowRank
from .vector import TaskVector

_INNER = ".base_layer.out_proj.lora_"
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>A|B|embedding_A|embedding_B|magnitude_vector)(?:\.(?P<last>\w+))?")

# Of the squared norm, which peft sums twice in float32, in another order: two sums of r squares differ by up to 2r
# roundings of 2^-24 each. With all of it, the rank would depend on their last digit.
SHARE = 1 - 2**-21


def transposed_weights(module: nn.Module) -> frozenset[str]:
    """Names of weights stored as (in, out): those of GPT-2's Conv1D."""
    return frozenset(f"{path}.weight" for path, part in module.named_modules() if type(part).__name__ == "Conv1D")


def task_vector_of(
    adapter: Adapter,
    base: Mapping[str, Tensor],
    *,
    other_names: Mapping[str, str] | None = None,
    transposed: Collection[str] | None = None,
    head: Collection[str] = (),
) -> TaskVector:
    """The task vector of a LoRA, under the names of `base`: low-rank where it is a plain one.

    One of the two may be inside a wrapper: names of the adapter may begin with `bert.` and those of a bare base not.

    Args:
        adapter: a LoRA; `as_lora` converts other types.
        base: the weights that it changes.
        other_names: further names of tensors (such as those in the files) -> names of `base`.
        transposed: the weights that are stored as (in, out); by default inferred from shapes and `fan_in_fan_out`.
        head: names of whole tensors that are not part of the change.
    """
    if adapter.kind != "LORA":
        raise CheckpointError(f"{adapter.name} is an adapter of type {adapter.kind}, not a LoRA.")
    others = other_names or {}
    rename = renaming(plain_names(adapter), [*base, *others])

    def find(*candidates: str) -> str | None:
        """The base's name of the first candidate that it has under this or another name."""
        names = (name if name in base else others.get(name) for name in map(rename, candidates))
        return next((name for name in names if name is not None and name in base), None)

    found, whole, wrong = _sorted_keys(adapter, find, head)
    is_transposed = _transposition(adapter, found, base, transposed)
    loras: dict[str, _Lora] = {}
    biases: dict[str, tuple[str, float]] = {}  # key and scaling
    for weight, raw in found.items():
        if _INNER in raw.keys.get("A", "") and "B" in raw.keys:
            if all(bool(adapter.tensors[raw.keys[side]].any()) for side in "AB"):
                wrong.append(f"{raw.path} ({TWICE}: merge the adapter into its base)")
            continue
        try:
            lora = loras[weight] = _checked(adapter, raw, describe(base, weight).shape, is_transposed(weight))
        except CheckpointError as error:
            wrong.append(f"{raw.path} ({error})")
            continue
        if "B.bias" in lora.keys:
            bias = find(f"{lora.path}.bias")
            if bias is None or describe(base, bias).shape != describe(adapter.tensors, lora.keys["B.bias"]).shape:
                wrong.append(f"{lora.path} (the base layer has no such bias)")
            else:
                biases[bias] = (lora.keys["B.bias"], lora.scaling)
    for name, key in whole.items():
        given, expected = describe(adapter.tensors, key).shape, describe(base, name).shape
        if given != expected:
            wrong.append(f"{key} {given} vs {expected}")
        elif name in loras and not torch.equal(adapter.tensors[key].float(), base[name].detach().cpu().float()):
            wrong.append(f"{key} (differs from the base's weight: the adapter was trained on another base)")
    if wrong:
        stated = adapter.config.get("base_model_name_or_path") or "not named in its configuration"
        raise CheckpointError(
            f"{len(wrong)} parts of the adapter {adapter.name}, whose base is {shortened(stated)}, do not fit: "
            f"{first_of(wrong, 3)}. Give the base that it was trained from."
        )
    whole = {name: key for name, key in whole.items() if name not in loras}

    def wide(name: str) -> torch.dtype:
        return torch.promote_types(describe(base, name).dtype, torch.float32)

    def spec(name: str) -> TensorSpec:
        shape, lora = describe(base, name).shape, loras.get(name)
        if lora is None:
            return TensorSpec(shape, wide(name))
        return TensorSpec(shape, torch.float32, None if "magnitude" in lora.keys else lora.rank)

    def difference(name: str) -> Tensor:
        return adapter.tensors[whole[name]].to(wide(name)) - base[name].detach().cpu().to(wide(name))

    def bias_of(name: str) -> Tensor:
        key, scaling = biases[name]
        return adapter.tensors[key].to(wide(name)) * scaling

    total = TaskVector(LazyMapping(loras, lambda name: _read(adapter.tensors, loras[name], base, name)), spec)
    total = total + TaskVector(LazyMapping(biases, bias_of), spec) + TaskVector(LazyMapping(whole, difference), spec)
    return total + _lone_biases(total, base)


def _lone_biases(vector: TaskVector, base: Mapping[str, Tensor]) -> TaskVector:
    """Rank-0 changes of the weights whose bias alone changed, so that their layers are transferred."""
    unchanged: dict[str, Entry] = {}
    for name in vector:
        weight = f"{name.removesuffix('.bias')}.weight"
        if name.endswith(".bias") and weight in base and weight not in vector:
            shape = describe(base, weight).shape
            if len(shape) >= 2 and vector.changes(name):
                unchanged[weight] = LowRank(torch.zeros(shape[0], 0), torch.zeros(0, *shape[1:]))
    return TaskVector(unchanged)


@dataclass(frozen=True)
class _Lora:
    """One LoRA: the path of its module, the keys of its tensors by side (A, B, magnitude, B.bias), and their use."""

    path: str
    keys: dict[str, str] = field(default_factory=dict)
    scaling: float = 1.0
    rank: int = 0
    transposed: bool = False  # the weight is stored as (in, out)


def plain_names(adapter: Adapter) -> dict[str, str]:
    """The names in an adapter without what peft adds to those of the model -> the keys; base copies are left out."""
    plain = {key.removeprefix(PREFIX): key for key in adapter.tensors if ".original_module." not in key}
    return {re.sub(r"\.(base_layer|modules_to_save)(?=\.|$)", "", name): key for name, key in plain.items()}


def whole_tensors(adapter: Adapter, names: Collection[str]) -> dict[str, Tensor]:
    """The tensors of these names that an adapter stores whole, as those of `modules_to_save`."""
    return {name: adapter.tensors[key] for name, key in plain_names(adapter).items() if name in names}


def _sorted_keys(
    adapter: Adapter, find: Callable[..., str | None], head: Collection[str]
) -> tuple[dict[str, _Lora], dict[str, str], list[str]]:
    """The adapter's keys: LoRAs by weight, whole tensors by name, and keys that the base has no tensor for.

    A module that was saved whole and that the base lacks is the head of a classifier: it is not part of a change.
    """
    loras: dict[str, _Lora] = {}
    whole: dict[str, str] = {}
    wrong: list[str] = []
    saved = tuple(f"{name}." for name in adapter.config.get("modules_to_save") or ())
    for plain, key in plain_names(adapter).items():
        found = _FACTOR.fullmatch(plain)
        path = found["module"] if found else plain
        name = find(f"{path}.weight", f"{path}.in_proj_weight") if found else find(path)
        if path in head or (name is None and not found and any(part in plain for part in saved)):
            continue
        if name is None:
            wrong.append(f"{path} (no such module, or its weight is tied to another)" if found else key)
        elif found:
            side = found["side"].replace("magnitude_vector", "magnitude")
            side += ".bias" if found["last"] == "bias" else ""
            loras.setdefault(name, _Lora(path)).keys[side] = key
        else:
            whole[name] = key
    return loras, whole, list(dict.fromkeys(wrong))


def _transposition(
    adapter: Adapter, loras: Mapping[str, _Lora], base: Mapping[str, Tensor], transposed: Collection[str] | None
) -> Callable[[str], bool | None]:
    """A function that says whether a weight is stored as (in, out): as given, else by shape, else by `fan_in_fan_out`.

    It returns None where this is unknown: peft sets `fan_in_fan_out` for the last module only, so a square weight is
    ambiguous if the shape of another weight contradicts the setting.
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


def _checked(adapter: Adapter, lora: _Lora, shape: tuple[int, ...], transposed: bool | None) -> _Lora:
    """A LoRA with its rank and scaling, or a CheckpointError if it does not fit a weight of this shape."""
    embedded = "embedding_A" in lora.keys or "embedding_B" in lora.keys
    kind = "embedding_" if embedded else ""
    if f"{kind}A" not in lora.keys or f"{kind}B" not in lora.keys:
        raise CheckpointError("one of its two factors is missing")
    if embedded and "magnitude" in lora.keys:
        raise CheckpointError("DoRA on an embedding: merge it into its base")
    if adapter.config.get("use_dora") and "magnitude" not in lora.keys:
        raise CheckpointError("its configuration has DoRA, and its magnitudes are missing")
    A, B = (describe(adapter.tensors, lora.keys[f"{kind}{side}"]).shape for side in "AB")
    try:
        rank = int(_setting(adapter.config, "rank_pattern", "r", lora.path, 8))
        alpha = float(_setting(adapter.config, "alpha_pattern", "lora_alpha", lora.path, 8))
    except (TypeError, ValueError, OverflowError, LookupError, re.error) as error:
        raise CheckpointError(f"its rank or alpha in {CONFIG} cannot be read: {error}") from error
    if not math.isfinite(alpha):
        raise CheckpointError(f"its alpha in {CONFIG} is {alpha}")
    if len(A) < 2 or len(B) < 2 or A[0] != rank or B[1] != rank or rank < 1:
        raise CheckpointError(f"factors {A} and {B}, but its configuration has rank {rank}")
    if transposed is None and not embedded:
        raise CheckpointError("a square weight: the files do not say whether it is stored transposed; use a live model")
    scaling = alpha / (math.sqrt(rank) if adapter.config.get("use_rslora") else rank)
    flipped = embedded or bool(transposed)
    product = (B[0], *A[1:])
    if (product[::-1] if flipped else product) != shape or set(B[2:]) - {1}:
        raise CheckpointError(f"the product of factors {A} and {B} is not {shape}")
    if "magnitude" in lora.keys and math.prod(describe(adapter.tensors, lora.keys["magnitude"]).shape) != B[0]:
        raise CheckpointError(f"its magnitudes do not fit factors {A} and {B}")
    keys = {side.removeprefix(kind): key for side, key in lora.keys.items()}
    return replace(lora, keys=keys, scaling=scaling, rank=rank, transposed=flipped)


def _setting(config: Mapping[str, Any], patterns: str, default: str, path: str, otherwise: int) -> Any:
    """A setting of one module: that of the first pattern that matches the end of its path, as in peft."""
    table = config.get(patterns) or {}
    if table and len(path) > LONGEST_NAME:
        raise CheckpointError(f"its name has {len(path)} characters, more than {LONGEST_NAME}")
    key = next((key for key in table if re.match(rf"(.*\.)?({key})$", path)), None)
    return config.get(default, otherwise) if key is None else table[key]


def _read(tensors: Mapping[str, Tensor], lora: _Lora, base: Mapping[str, Tensor], name: str) -> Entry:
    """The change of one weight: `scaling * B A`, or with DoRA `m / |W + scaling B A| * (W + scaling B A) - W`."""
    A, B = tensors[lora.keys["A"]].float(), tensors[lora.keys["B"]].float().flatten(1) * lora.scaling
    entry = LowRank(A.T.contiguous(), B.T.contiguous()) if lora.transposed else LowRank(B, A)
    if "magnitude" not in lora.keys:
        return entry
    weight = base[name].detach().cpu().float()
    moved = weight + entry.dense()
    rows = moved.T if lora.transposed else moved.flatten(1)
    magnitude = tensors[lora.keys["magnitude"]].float().flatten()
    factor = (magnitude / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
    scaled = (factor * rows).T if lora.transposed else (factor * rows).reshape(weight.shape)
    change: Tensor = scaled - weight
    return change


def renaming(names: Collection[str], base: Iterable[str]) -> Callable[[str], str]:
    """A function from `names` to those of the base, where one of the two models is inside a wrapper of any depth.

    >>> renaming(["bert.encoder.0.lora_A"], ["encoder.0.weight"])("bert.encoder.0.lora_A")
    'encoder.0.lora_A'
    >>> renaming(["encoder.0.weight"], ["bert.encoder.0.weight", "head.weight"])("encoder.0.weight")
    'bert.encoder.0.weight'
    """
    modules = {name.rpartition(".")[0] for name in base} - {""}
    if any(_first_in(modules, name) for name in names):
        return lambda name: name
    cut = (next((outer for outer, inner in _cuts(name) if _first_in(modules, inner)), None) for name in names)
    if removed := Counter(filter(None, cut)):
        return lambda name: name.removeprefix(removed.most_common(1)[0][0])
    inside: dict[str, set[str]] = {}
    for module in modules:
        for outer, inner in _cuts(module):
            inside.setdefault(inner, set()).add(outer)
    found = (inside.get(_first_in(inside, name), set()) for name in names)
    added = Counter(outer for outers in found if len(outers) == 1 for outer in outers)
    return lambda name: added.most_common(1)[0][0] + name if added else name


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """The ways to cut a name after one of its dots; a stranger's name can have thousands."""
    parts = name.split(".", MOST_PARTS)
    return ((".".join(parts[:at]) + ".", ".".join(parts[at:])) for at in range(1, len(parts)))


def _first_in(modules: Collection[str], name: str) -> str:
    """The module that a name begins with, the longest that is known; empty if none is."""
    return max((outer[:-1] for outer, _ in _cuts(name) if outer[:-1] in modules), key=len, default="")


def as_lora(adapter: Adapter, module: nn.Module) -> Adapter:
    """The adapter itself if it is a LoRA, else what peft (0.19 or newer) converts it to on a copy of its base.

    The LoRA has the rank of the change, without singular values whose squares are lost in a sum in float32.
    """
    if adapter.kind == "LORA":
        return adapter
    parameters = dict(module.named_parameters())
    names, saved = plain_names(adapter), adapter.config.get("modules_to_save") or ()
    rename = renaming(names, parameters)
    whole = {name for name in names if rename(name) in parameters or name.split(".")[0] in saved}
    factors = {name: key for name, key in names.items() if name not in whole}
    settings = {**adapter.config, "task_type": None, "modules_to_save": None}
    try:
        from peft import PeftConfig, convert_to_lora, get_peft_model, set_peft_model_state_dict

        model = get_peft_model(copy.deepcopy(module), PeftConfig.from_peft_type(**settings))
        if not model.supports_lora_conversion():
            raise TuneportError("peft cannot convert it to LoRA")
        # a key outside the model, as of VeRA's shared matrices, keeps its name
        stored = {key.replace(name, rename(name)): adapter.tensors[key] for name, key in factors.items()}
        loaded: Any = set_peft_model_state_dict(model, stored)
        if unknown := loaded.unexpected_keys:
            raise TuneportError(f"{len(unknown)} of its tensors do not fit the base: {first_of(unknown, 3)}")
        config, tensors = convert_to_lora(model, SHARE)
    except Exception as error:
        raise CheckpointError(
            f"{adapter.name} is an adapter of type {adapter.kind}, not a LoRA: {brief(error)}. Merge it into its base "
            "with merge_and_unload() of peft, and give the merged model as `finetuned`."
        ) from error
    kept = {PREFIX + name: adapter.tensors[names[name]] for name in whole}
    facts = {key: adapter.config.get(key) for key in ("task_type", "modules_to_save", "base_model_name_or_path")}
    return Adapter(adapter.name, {**config.to_dict(), **facts}, {**tensors, **kept}, adapter.files, adapter.classes)
