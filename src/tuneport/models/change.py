"""Task-vector arithmetic on whole models: the change that a fine-tune makes in its base, and a base plus a change.

A fine-tune is a model, an adapter or a task vector. `change_of` takes an opened base and uses the names of its live
parameters; `extract` and `apply` read only files and use the names in them.

A token that the fine-tune added has no row in the base to differ from, so its whole row moves to the target's token of
the same text, and takes the place of that row. The map between two tables is the orthogonal one that fits the rows of
the tokens that both vocabularies have, times the ratio of the norms of these rows. No sample is needed for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..io.fingerprint import same_weights
from ..io.places import check_no_parts, local
from ..io.tensors import LazyTensors, TensorSpec, check_finite, describe, renamed
from ..maps.procrustes import procrustes
from ..task_vectors.lora_format import Adapter, is_adapter, open_adapter
from ..task_vectors.lora_read import as_lora, plain_names, renaming, task_vector_of, transposed_weights
from ..task_vectors.low_rank import Entry, LowRank
from ..task_vectors.stored import StoredChange, stored_change
from ..task_vectors.vector import Part, TaskVector, merge
from ..types import Sides
from .base import Model, ModelLike
from .families import open_tokenizer
from .open import describe_module, open_stored

Finetuned = ModelLike | Adapter | TaskVector
TIED = "the target's output layer is tied to its embedding, which takes the row of the embedding"
# What peft calls the factors of an embedding -> those of an output layer with the same change, which are transposed.
_FACTORS = {".lora_embedding_A": ".lora_B.weight", ".lora_embedding_B": ".lora_A.weight"}
_NORMS = {"gamma": "weight", "beta": "bias", "weight": "gamma", "bias": "beta"}


@dataclass(frozen=True, eq=False)
class AddedTokens:
    """Tokens that the fine-tune added: the change that puts their rows into the target, and the account of them."""

    vector: TaskVector = field(default_factory=lambda: TaskVector({}))
    parts: tuple[Part, ...] = ()
    rows: frozenset[int] = frozenset()  # of the fine-tune's tables


@dataclass(frozen=True, eq=False)
class Change:
    """What a fine-tune changed in the source, by live names.

    `whole` makes the source its fine-tune, also in the tensors of `exclude`, if that labels samples or its head is
    fitted.
    """

    vector: TaskVector  # the change that is moved; a head that is fitted is no part of it
    parts: tuple[Finetuned, ...] = ()  # the fine-tunes whose changes are added, as they were opened
    whole: TaskVector | None = None
    added: AddedTokens = field(default_factory=AddedTokens)
    fits_head: bool = False  # whether the target's head is fitted to the scores of the fine-tune

    @property
    def teacher(self) -> TaskVector:
        """The change that makes the source the teacher of a head or of labels."""
        return self.vector if self.whole is None else self.whole

    @property
    def task_type(self) -> str | None:
        """peft's name of the task, if the fine-tune is an adapter."""
        return self.parts[0].task_type if self.parts and isinstance(self.parts[0], Adapter) else None


def opened(finetuned: Finetuned) -> Finetuned:
    """Fetch a fine-tune from the hub if it is there, and open it if it is an adapter."""
    if isinstance(finetuned, (Adapter, TaskVector)):
        return finetuned
    finetuned = local(finetuned) if isinstance(finetuned, (str, Path)) else finetuned
    given = finetuned.module if isinstance(finetuned, Model) else finetuned
    if is_adapter(given):
        return open_adapter(given)
    if isinstance(given, Path):
        check_no_parts(given)
    return finetuned


def change_of(source: Model, finetuned: Finetuned, exclude: Sequence[str] = ()) -> TaskVector:
    """The change that an `opened` fine-tune makes in the source, under the names of its live parameters."""
    live = {file: name for name, file in source.weights.file_names.items()}
    if isinstance(finetuned, Adapter):
        base, turned = source.stored_parameters(), transposed_weights(source.module)
        whole = one_table(source, finetuned, exclude)
        whole = replace(whole, tensors=_cut_tables(source, whole, whole.tensors))
        vector = task_vector_of(as_lora(whole, source.module), base, other_names=live, transposed=turned)
        vector = vector.subset(name for name in vector if not source.matches(name, exclude))
    else:
        given = _stored(finetuned)
        if not isinstance(given, TaskVector):
            given = between(source.weights.tensors, _cut_tables(source, finetuned, given), exclude)
        vector = given.rename({name: live[name] for name in given if name in live})
    return vector.subset(name for name in vector if name in source.weights.file_names)


def sum_of_changes(source: Model, parts: Sequence[Finetuned], exclude: Sequence[str] = ()) -> TaskVector:
    """What several opened fine-tunes change together, under the names in the files of the source."""
    total = merge([change_of(source, part, exclude) for part in parts])
    return total.rename({name: source.weights.file_names[name] for name in total})


def every_layer(model: Model) -> TaskVector:
    """A change of every layer of a model, without values (on the meta device)."""
    layers = model.architecture.layers
    shapes = {layer.weight: layer.weight_shape for layer in layers}
    shapes |= {layer.bias: (layer.out_features,) for layer in layers if layer.bias is not None and not layer.rows}
    return TaskVector({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def is_whole(source: Model, change: Change, exclude: Sequence[str]) -> bool:
    """Whether the fine-tuned source is known whole, and can run."""
    known = set(change.vector) <= {name for name, _ in source.module.named_parameters()}
    return known and not source.weights.offloaded and not exclude


def check_changes(vector: TaskVector, names: Iterable[str], exclude: Sequence[str], use: str = "transfer") -> None:
    """Refuse a task vector that is zero in all these tensors, which `exclude` leaves."""
    if any(vector.changes(name) for name in names):
        return
    found, advice = "the fine-tuned model equals its base in every tensor", "Check the paths"
    if exclude:
        found = f"`exclude={list(exclude)}` leaves no tensor in which the fine-tuned model differs from its base"
        advice = "Exclude less, or check the paths"
    raise CheckpointError(f"{found}: there is nothing to {use}. {advice}.")


def exclude_note(exclude: Sequence[str], *named: Iterable[str]) -> str | None:
    """A note on patterns that match none of these names, most likely by a typing error."""
    names = [name for each in named for name in each]
    idle = [pattern for pattern in exclude if not any(fnmatchcase(name, pattern) for name in names)]
    return f"no tensor has a name like {' or '.join(map(repr, idle))} of `exclude`" if idle else None


def names_of(finetuned: Finetuned) -> Iterable[str]:
    """The names of a fine-tune's tensors in its files; an adapter has no names other than those of its base."""
    given = opened(finetuned)
    return () if isinstance(given, Adapter) else _stored(given)


def _stored(finetuned: ModelLike | TaskVector) -> TaskVector | Mapping[str, Tensor]:
    """The tensors of a fine-tune, or its task vector where only that is known."""
    if isinstance(finetuned, TaskVector):
        return finetuned
    if isinstance(finetuned, (str, Path)):
        found = stored_change(finetuned)
        if found is not None and isinstance(found.change, TaskVector):
            return found.change
        return open_stored(finetuned).tensors
    return (finetuned if isinstance(finetuned, Model) else describe_module(finetuned)).weights.tensors


def between(base: Mapping[str, Tensor], finetuned: Mapping[str, Tensor], exclude: Sequence[str]) -> TaskVector:
    """The task vector of two models under the names of the base."""
    tensors = _under_names_of(base, finetuned)
    vector = TaskVector.between(base, tensors, exclude)
    check_finite(tensors, list(vector))
    return vector


def _under_names_of(base: Mapping[str, Tensor], finetuned: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The fine-tuned tensors under the names of the base.

    One of the two may be part of a class with a head (`bert.` before names), or name the parameters of its norms gamma
    and beta, as old files do.
    """
    rename, names = renaming(finetuned, base), {}
    for name in finetuned:
        called = rename(name)
        stem, _, last = called.rpartition(".")
        other = f"{stem}.{_NORMS.get(last)}"
        names[other if called not in base and other in base else called] = name
    return finetuned if all(called == name for called, name in names.items()) else renamed(finetuned, names)


def check_base(source: Model, finetuned: Finetuned) -> None:
    """Refuse an `opened` fine-tune that is stored with the fingerprint of another base."""
    found = stored_change(finetuned) if isinstance(finetuned, (str, Path)) else finetuned
    stated = found.base_fingerprint if isinstance(found, (Adapter, StoredChange)) else ""
    if stated and same_weights(stated, source.weights.tensors) is False:
        name = finetuned.name if isinstance(finetuned, Adapter) else finetuned
        raise CheckpointError(
            f"{name} was made for other weights than those of {source.name}: give its own base as `source`, "
            "or pass `accept_unlikely=True`."
        )


def added_by(models: Sides[Model], finetuned: Finetuned, exclude: Sequence[str] = ()) -> AddedTokens:
    """The rows of the tokens that an `opened` fine-tune added to the vocabulary of the source, for the target."""
    source, target = models
    tensors: TaskVector | Mapping[str, Tensor] = finetuned.tensors if isinstance(finetuned, Adapter) else {}
    if isinstance(finetuned, (str, Path)):
        tensors = _stored(finetuned)
    if isinstance(tensors, TaskVector) or target.inputs.reader is None:
        return AddedTokens()
    keys = {name: key for name, key in _keys(source, finetuned, tensors).items() if not source.matches(name, exclude)}
    added = _added_tokens(source, finetuned) if keys else {}
    ids = target.reader.tokenizer.get_vocab()
    moved: dict[str, Entry] = {}
    parts: list[Part] = []
    for name, key in keys.items() if added else ():
        table, file = tensors[key], source.weights.file_names[name]
        takers = [other for other in _takers(models, name) if other not in moved and not target.matches(other, exclude)]
        there = {text: row for text, row in added.items() if row < len(table)}
        both = {text: row for text, row in there.items() if text in ids}
        for other in takers if both else ():
            moved[other] = _placed(models, (name, other), table[[*both.values()]], [ids[text] for text in both])
        for text, row in there.items():
            square = float(table[row].double().square().sum())
            if text in both:
                parts.append(Part(file, "rows of added tokens", square, tuple(takers), TIED))
            else:
                lacking = f"the target's tokenizer has no token {text}"
                parts.append(Part(file, "rows of tokens that the target lacks", square, (), lacking))
    return AddedTokens(TaskVector(moved), tuple(parts), frozenset(added.values()))


def _tables_of(model: Model) -> dict[str, str]:
    """The live names of the embedding ("input") and of the output layer ("output"): one name if they are tied."""
    if model.inputs.reader is None or model.weights.library != "transformers":
        return {}
    module: Any = model.module
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = {"input": module.get_input_embeddings(), "output": module.get_output_embeddings()}
    found = {side: names.get(id(getattr(owner, "weight", None))) for side, owner in owners.items()}
    return {side: name for side, name in found.items() if name is not None}


def _added_tokens(source: Model, finetuned: Finetuned) -> dict[str, int]:
    """The tokens that the tokenizer in the folder of a fine-tune has and that of its base has not, with their rows."""
    folder = finetuned.files[0].parent if isinstance(finetuned, Adapter) and finetuned.files else finetuned
    if not isinstance(folder, (str, Path)) or source.inputs.reader is None:
        return {}
    try:
        tokenizer = open_tokenizer(Path(folder), False, "a fine-tune")
    except CheckpointError:  # there is none, or none that can be used
        return {}
    known = source.inputs.reader.tokenizer.get_vocab()
    return {text: row for text, row in tokenizer.get_added_vocab().items() if text not in known}


def _cut_tables(source: Model, finetuned: Finetuned, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a fine-tune; where it has added tokens, its tables are cut at the rows that the source has."""
    rows = {}
    for name, key in _keys(source, finetuned, tensors).items():
        own, given = describe(source.stored_parameters(), name).shape, describe(tensors, key).shape
        if given[0] > own[0] and given[1:] == own[1:]:
            rows[key] = own[0]
    if not rows or not _added_tokens(source, finetuned):
        return tensors

    def spec(name: str) -> TensorSpec:
        found = describe(tensors, name)
        return found._replace(shape=(rows[name], *found.shape[1:])) if name in rows else found

    return LazyTensors(tensors, lambda name: tensors[name][: rows[name]] if name in rows else tensors[name], spec)


def _keys(source: Model, finetuned: Finetuned, tensors: Iterable[str]) -> dict[str, str]:
    """The keys of the tables of a fine-tune in its tensors, by their live names in the source."""
    plain = plain_names(finetuned) if isinstance(finetuned, Adapter) else {name: name for name in tensors}
    tables = _tables_of(source).values()
    found = {name: plain.get(name) or plain.get(source.weights.file_names[name]) for name in tables}
    return {name: key for name, key in found.items() if key is not None}


def one_table(source: Model, adapter: Adapter, exclude: Sequence[str] = ()) -> Adapter:
    """The adapter without its copy for an output layer that has the table of the embedding in the source.

    Refuses one that makes two tables of it, as peft does unless it is told not to.
    """
    tables = _tables_of(source)
    if len(set(tables.values())) == len(tables):
        return adapter
    module: Any = source.module
    owners = (module.get_input_embeddings(), module.get_output_embeddings())
    paths = [next(path for path, part in module.named_modules() if part is owner) for owner in owners]
    base, names, changes = source.stored_parameters()[tables["input"]], plain_names(adapter), []
    sides = [{name.removeprefix(path): key for name, key in names.items() if f"{path}." in name} for path in paths]
    for keys in sides:
        stored = ((part, adapter.tensors[key]) for part, key in keys.items())
        parts = {_FACTORS.get(part, part): each.T if part in _FACTORS else each for part, each in stored}
        changes.append({part: tensor for part, tensor in parts.items() if not _equal(tensor, base)})
    one, two = changes
    same = one.keys() == two.keys() and all(_equal(tensor, two[part]) for part, tensor in one.items())
    if not same and not source.matches(tables["input"], exclude):
        raise CheckpointError(
            f"{adapter.name} does not change {' and '.join(paths)} in one way, and they share one table in "
            f'{source.name}. Leave it out: `exclude=["{tables["input"]}"]`.'
        )
    twice = {*sides[1].values()}
    return replace(adapter, tensors={key: adapter.tensors[key] for key in adapter.tensors if key not in twice})


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.cpu().float(), other.detach().cpu().float())


def _takers(models: Sides[Model], name: str) -> Iterator[str]:
    """The tables of the target that a table of the source moves to: both, if only the source's are tied."""
    source, target = map(_tables_of, models)
    yield from dict.fromkeys(target[side] for side, own in source.items() if own == name and side in target)


def _placed(models: Sides[Model], names: tuple[str, str], rows: Tensor, ids: list[int]) -> LowRank:
    """The change of a table of the target that puts rows (k, d_A) for a table of the source in these places."""
    source, target = (model.stored_parameters()[name].cpu() for model, name in zip(models, names, strict=True))
    X, Y = (table[places].double() for table, places in zip((source, target), _shared(models), strict=True))
    factor = Y.norm() / X.norm() if len(X) else torch.zeros(())
    new = factor * rows.double() @ procrustes(X.T @ Y).matrix
    one_hot = torch.zeros(len(target), len(ids))
    one_hot[ids, torch.arange(len(ids))] = 1.0
    return LowRank(one_hot, (new - target[ids].double()).float())


def _shared(models: Sides[Model]) -> tuple[list[int], list[int]]:
    """The ids of the tokens that both vocabularies have; a blank at the begin is written in two ways."""
    sides = []
    for model in models:
        rows = len(model.stored_parameters()[_tables_of(model)["input"]])
        vocabulary = model.reader.tokenizer.get_vocab()
        sides.append({text.replace("▁", "Ġ"): row for text, row in vocabulary.items() if row < rows})
    both = [text for text in sides[0] if text in sides[1]]
    return [sides[0][text] for text in both], [sides[1][text] for text in both]
