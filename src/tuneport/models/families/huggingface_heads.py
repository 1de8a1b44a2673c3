"""Classification classes of transformers around the weights of a model: BertModel as BertForSequenceClassification.

Modules of the model are shared with the new one, never copied or changed. What the files lack is new: the head, and a
pooler where the class has one. A head that already knows the classes is copied, with its classes in the given order.
"""

from __future__ import annotations

import copy
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
    return replace(model, outputs=replace(model.outputs, classes=found.classes), classifier=classifier)


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
    inner = new.base_model
    if type(module) is kind:
        known = labelling_of(kind.__name__, module.config)
        _share_same(new, module, order_of(labelling.classes, known.classes if known is not None else ()))
    elif inner is new:
        tower = getattr(module, TOWER, module)
        if type(tower) is not type(getattr(new, TOWER, None)):
            raise none
        new._modules[TOWER] = tower
    else:
        _share(inner, module.base_model)
    inner = getattr(new, TOWER, new) if inner is new else new.base_model
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


def _share(new: nn.Module, old: nn.Module) -> None:
    """Put the parts of a model into a new one that has parts of the same names."""
    for kind in ("_modules", "_parameters", "_buffers"):
        mine, others = getattr(new, kind), getattr(old, kind)
        both = (name for name, part in mine.items() if part is not None and others.get(name) is not None)
        mine.update({name: others[name] for name in both})


def _share_same(new: Any, old: Any, order: list[int] | None) -> None:
    """Share the parts of a module of the same class and copy its head; `order` says where each class is there."""
    last = _last_linear(old)
    root, inner = last.partition(".")[0], old.base_model_prefix
    for name, part in old.named_children():
        if name != root or order is not None:
            inside = name == inner or (inner not in old._modules and name != root)
            new._modules[name] = part if inside else copy.deepcopy(part)
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
