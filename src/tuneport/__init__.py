"""tuneport: port a fine-tune to a new base model, without training.

The public names; each is imported from its module when it is first used, so that `import tuneport` and
`tuneport --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .data.tasks import read_data
    from .errors import TuneportError
    from .io.checkpoint import open_checkpoint
    from .job import Job
    from .layers import find_layers
    from .maps.procrustes import Alignment, procrustes
    from .measure.accuracy import linear_probe, zero_shot
    from .measure.capture import measure_pairs
    from .methods import METHODS, BilinearAlignment, Method, Problem, Transfer, get_method
    from .models.heads import choose_head
    from .models.open import open_model
    from .pairing import LayerPair, pair_layers
    from .pipeline.prepare import prepare
    from .pipeline.result import Result
    from .pipeline.transfer import transfer
    from .task_vectors.vector import TaskVector, load_task_vector

_HOME = {
    "errors": ("TuneportError",),
    "job": ("Job",),
    "layers": ("find_layers",),
    "pairing": (
        "LayerPair",
        "pair_layers",
    ),
    "data.tasks": ("read_data",),
    "io.checkpoint": ("open_checkpoint",),
    "maps.procrustes": (
        "Alignment",
        "procrustes",
    ),
    "measure.accuracy": (
        "linear_probe",
        "zero_shot",
    ),
    "measure.capture": ("measure_pairs",),
    "methods": (
        "METHODS",
        "BilinearAlignment",
        "Method",
        "Problem",
        "Transfer",
        "get_method",
    ),
    "models.heads": ("choose_head",),
    "models.open": ("open_model",),
    "pipeline.prepare": ("prepare",),
    "pipeline.result": ("Result",),
    "pipeline.transfer": ("transfer",),
    "task_vectors.vector": (
        "TaskVector",
        "load_task_vector",
    ),
}

__all__ = [
    "METHODS",
    "Alignment",
    "BilinearAlignment",
    "Job",
    "LayerPair",
    "Method",
    "Problem",
    "Result",
    "TaskVector",
    "Transfer",
    "TuneportError",
    "choose_head",
    "find_layers",
    "get_method",
    "linear_probe",
    "load_task_vector",
    "measure_pairs",
    "open_checkpoint",
    "open_model",
    "pair_layers",
    "prepare",
    "procrustes",
    "read_data",
    "transfer",
    "zero_shot",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module 'tuneport' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
