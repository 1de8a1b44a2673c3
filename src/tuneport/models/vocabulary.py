"""Tokens that a fine-tune added to its vocabulary: their rows move to the target's tokens of the same text.

A token that the base lacks has no row to differ from, so its whole row moves, and takes the place of the target's. The
map between two tables is the orthogonal one that fits the rows of the tokens that both vocabularies have, times the
ratio of the norms of these rows. No sample is needed for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..io.tensors import LazyTensors, TensorSpec, describe
from ..maps.procrustes import procrustes
from ..task_vectors.lora_format import Adapter
from ..task_vectors.lora_read import plain_names
from ..task_vectors.low_rank import Entry, LowRank
from ..task_vectors.vector import Part, TaskVector
from ..types import Sides
from .base import Model
from .open import tokenizer_of

TIED = "the target's output layer is tied to its embedding, which takes the row of the embedding"


@dataclass(frozen=True, eq=False)
class AddedTokens:
    """Tokens that the fine-tune added: the change that puts their rows into the target, and the account of them."""

    vector: TaskVector = field(default_factory=lambda: TaskVector({}))
    parts: tuple[Part, ...] = ()
    rows: frozenset[int] = frozenset()  # of the fine-tune's tables


def tables_of(model: Model) -> dict[str, str]:
    """The live names of the embedding ("input") and of the output layer ("output"): one name if they are tied."""
    if model.inputs.reader is None or model.weights.library != "transformers":
        return {}
    module: Any = model.module
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners = {"input": module.get_input_embeddings(), "output": module.get_output_embeddings()}
    found = {side: names.get(id(getattr(owner, "weight", None))) for side, owner in owners.items()}
    return {side: name for side, name in found.items() if name is not None}


def added_tokens(source: Model, finetuned: object) -> dict[str, int]:
    """The tokens that the tokenizer in the folder of a fine-tune has and that of its base has not, with their rows."""
    folder = finetuned.files[0].parent if isinstance(finetuned, Adapter) and finetuned.files else finetuned
    tokenizer = tokenizer_of(folder) if isinstance(folder, (str, Path)) else None
    if tokenizer is None or source.inputs.reader is None:
        return {}
    known = source.inputs.reader.tokenizer.get_vocab()
    return {text: row for text, row in tokenizer.get_added_vocab().items() if text not in known}


def cut_tables(source: Model, finetuned: object, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a fine-tune; where it has added tokens, its tables are cut at the rows that the source has."""
    rows = {}
    for name, key in _keys(source, finetuned, tensors).items():
        own, given = describe(source.stored_parameters(), name).shape, describe(tensors, key).shape
        if given[0] > own[0] and given[1:] == own[1:]:
            rows[key] = own[0]
    if not rows or not added_tokens(source, finetuned):
        return tensors

    def spec(name: str) -> TensorSpec:
        found = describe(tensors, name)
        return found._replace(shape=(rows[name], *found.shape[1:])) if name in rows else found

    return LazyTensors(tensors, lambda name: tensors[name][: rows[name]] if name in rows else tensors[name], spec)


def added_rows(
    models: Sides[Model], finetuned: object, tensors: Mapping[str, Tensor], exclude: Sequence[str] = ()
) -> AddedTokens | None:
    """The rows of added tokens as changes of the target's tables, and the account of them; None if there are none."""
    source, target = models
    keys = _keys(source, finetuned, tensors)
    keys = {name: key for name, key in keys.items() if not source.matches(name, exclude)}
    added = added_tokens(source, finetuned) if keys and target.inputs.reader is not None else {}
    if not added:
        return None
    ids = target.reader.tokenizer.get_vocab()
    moved: dict[str, Entry] = {}
    parts: list[Part] = []
    for name, key in keys.items():
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


def _keys(source: Model, finetuned: object, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The keys of the tables of a fine-tune in its tensors, by their live names in the source."""
    plain = plain_names(finetuned) if isinstance(finetuned, Adapter) else {name: name for name in tensors}
    found = {name: plain.get(name) or plain.get(source.weights.file_names[name]) for name in tables_of(source).values()}
    return {name: key for name, key in found.items() if key is not None}


def _takers(models: Sides[Model], name: str) -> Iterator[str]:
    """The tables of the target that a table of the source moves to: both, if only the source's are tied."""
    source, target = map(tables_of, models)
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
        rows = len(model.stored_parameters()[tables_of(model)["input"]])
        vocabulary = model.reader.tokenizer.get_vocab()
        sides.append({text.replace("▁", "Ġ"): row for text, row in vocabulary.items() if row < rows})
    both = [text for text in sides[0] if text in sides[1]]
    return [sides[0][text] for text in both], [sides[1][text] for text in both]
