"""Open what a transfer has written: a model, or the base of an adapter or task vector with its change."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import CheckpointError, TuneportError
from ..io.hub import local
from ..models.base import Model
from ..models.open import as_classifier, open_model
from ..task_vectors.lora_format import Adapter, is_adapter
from ..task_vectors.lora_read import whole_tensors
from .change import change_of, is_task_vector, opened, stated_base
from .heads import labelling_by


def open_written(
    reference: str | Path,
    base: str | Path | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> Model:
    """Open a model, or the base of an adapter or task vector with its change, as `apply` would write it.

    `base` replaces the base that an adapter or a task vector names. A bare base gets the head of an adapter.
    """
    item = local(reference)
    if not is_adapter(item) and not is_task_vector(item):
        if base is not None:
            raise TuneportError(f"`base` goes with an adapter or a task vector, and {reference} is a model.")
        return open_model(reference, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    base = base or stated_base(item)
    if base is None:
        raise CheckpointError(f"{reference} does not name the model that it changes: pass it as `base`.")
    model = open_model(base, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    change = opened(item)
    head = {}
    if isinstance(change, Adapter):
        labelling = labelling_by(change, model)
        if labelling is not None and labelling != model.labelling:
            model = as_classifier(model, labelling, trust_remote_code=trust_remote_code)
        head = whole_tensors(change, model.head)
    vector = change_of(model, change)
    new = vector.apply_to(model.stored_parameters())
    with torch.no_grad():
        for name, tensor in ({name: new[name] for name in vector} | head).items():
            model.module.get_parameter(name).copy_(tensor)
    return model
