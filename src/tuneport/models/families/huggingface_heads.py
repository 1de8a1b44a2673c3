"""Classification classes of transformers around the weights of a model: BertModel as BertForSequenceClassification.

Modules of the model are shared with the new one, never copied or changed. What the files lack is new: the head, and a
pooler where the class has one. A head that already knows the classes is copied, with its classes in the given order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, first_of, reraised
from ..base import Classifier, Labelling, Model
from . import order_of, quiet

AUTO = {
    "image": "AutoModelForImageClassification",
    "sequence": "AutoModelForSequenceClassification",
    "token": "AutoModelForTokenClassification",
}
TOWER = "vision_model"  # the image tower of CLIP and SigLIP
TASKS = {f"For{task.title()}Classification": task for task in AUTO}  # by the end of the name of a class


def labelling_of(name: str, config: Any) -> Labelling | None:
    """What the classification layer of a class decides; transformers' defaults LABEL_0, LABEL_1 become 0, 1."""
    task = next((task for end, task in TASKS.items() if name.endswith(end)), None)
    if task is None:
        return None
    with reraised("id2label in config.json has keys that are not numbers"):
        labels = {int(index): str(label) for index, label in (config.id2label or {}).items()}
    names = tuple(labels[index] for index in sorted(labels))
    classes = tuple(label.removeprefix("LABEL_") for label in names)
    return Labelling(task, classes, getattr(config, "problem_type", None) or "", names)


def with_classifier(model: Model) -> Model:
    """The model with what its class says about its classification layer, if it has one."""
    found = labelling_of(type(model.module).__name__, model.module.config)
    if found is None:
        return model
    classifier = Classifier(_last_linear(model.module), found)
    outputs = replace(model.outputs, classes=found.classes, logits=lambda module, batch: module(**batch).logits)
    return replace(model, outputs=outputs, classifier=classifier)


def _last_linear(module: Any) -> str:
    """The path of the last linear layer of a classifier's head."""
    inner = f"{module.base_model_prefix}."
    linear: list[str] = [path for path, part in module.named_modules() if isinstance(part, nn.Linear)]
    return [path for path in linear if not path.startswith(inner)][-1]


def classifier_around(module: Any, labelling: Labelling, name: str) -> tuple[nn.Module, frozenset[str]]:
    """A module of the model's classification class with the weights of `module`, and the parameters that are fresh."""
    import transformers

    config = _whole(module.config)
    kind: Any = getattr(transformers, AUTO[labelling.task])._model_mapping.get(type(config), None)
    none = CheckpointError(
        f"{name} is a {type(module).__name__}, of which tuneport can make no class that labels {labelling.task}s: give "
        'another target, or `head_fit="none"`.'
    )
    if kind is None:
        raise none
    numbered = [f"LABEL_{word}" if word == str(i) else word for i, word in enumerate(labelling.classes)]
    config.id2label = dict(enumerate(labelling.names or numbered))
    config.label2id = {word: i for i, word in config.id2label.items()}
    config.problem_type = labelling.problem or None
    config.architectures = [kind.__name__]
    with quiet(), reraised(f"transformers cannot make a {kind.__name__} of {name}"), torch.device("meta"):
        new = kind(config)
    if new.base_model is new:
        inner, old = getattr(new, TOWER, new), getattr(module, TOWER, module)
        if type(old) is not type(inner):
            raise none
    else:
        inner, old = new.base_model, module.base_model
    for parts in ("_modules", "_parameters", "_buffers"):  # those of the same name
        mine, others = ({k: v for k, v in getattr(m, parts).items() if v is not None} for m in (inner, old))
        getattr(inner, parts).update({key: others[key] for key in mine if key in others})
    if type(module) is kind:
        _copy_head(new, module, old, labelling.classes)
    missing = [key for key, tensor in inner.named_parameters() if tensor.is_meta and "pool" not in key]
    if missing:
        raise CheckpointError(f"{name} lacks parts of a {kind.__name__}: {first_of(missing)}.")
    fresh, like = frozenset(key for key, tensor in new.named_parameters() if tensor.is_meta), next(module.parameters())
    _initialise(new, like.device, like.dtype)
    return new.eval(), fresh


def _whole(config: Any) -> Any:
    """A copy of a configuration; that of an image tower as part of one of two towers, for which there are classes."""
    import transformers

    kind_of = str(config.model_type)  # a file may have null in its place
    both = kind_of.removesuffix(f"_{TOWER}")
    if both == kind_of or both not in transformers.CONFIG_MAPPING:
        return copy.deepcopy(config)
    with quiet():
        kind: Any = transformers.CONFIG_MAPPING[both]
        return kind(vision_config=config.to_dict())


def _copy_head(new: Any, old: Any, inner: Any, classes: Sequence[str]) -> None:
    """Copy the head of a module of the same class; the part with the last layer only if it knows the classes."""
    last, known = _last_linear(old), labelling_of(type(old).__name__, old.config)
    order = order_of(classes, known.classes if known is not None else ())
    for name, part in old.named_children():
        if part is not inner and (order is not None or name != last.partition(".")[0]):
            new._modules[name] = copy.deepcopy(part)
    if order is not None:
        layer = new.get_submodule(last)
        for name, tensor in layer.named_parameters():
            layer._parameters[name] = nn.Parameter(tensor.detach()[order], requires_grad=tensor.requires_grad)


def _initialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give values to the parameters that have none: those of linear layers by a seeded draw."""
    generator = torch.Generator().manual_seed(0)
    for part in module.modules():
        if not any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            continue
        part.to_empty(device="cpu", recurse=False)
        if isinstance(part, nn.Linear):
            square = part.in_features == part.out_features  # a hidden layer: a rotation loses nothing
            draw = nn.init.orthogonal_ if square else partial(nn.init.normal_, std=0.02)
            draw(part.weight, generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
        else:
            part.reset_parameters()  # type: ignore[operator]
        part.to(device, dtype)
