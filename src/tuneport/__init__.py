"""tuneport: port a fine-tune to a new base model, without training.

The public names; each is imported from its module when it is first used, so that `import tuneport` and
`tuneport --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .alignment import Alignment, procrustes
    from .capture import measure
    from .checkpoint import open_checkpoint
    from .errors import TuneportError
    from .evaluation import linear_probe, zero_shot
    from .families import choose_head, open_model
    from .job import Job
    from .layers import find_layers
    from .methods import METHODS, BilinearAlignment, Method, Problem, Transfer, get_method
    from .pairing import LayerPair, pair_layers
    from .pipeline import transfer
    from .preparation import prepare
    from .result import Result
    from .task_vector import TaskVector, load_task_vector
    from .tasks import read_data

_HOME = {
    "alignment": ("Alignment", "procrustes"),
    "capture": ("measure",),
    "checkpoint": ("open_checkpoint",),
    "errors": ("TuneportError",),
    "evaluation": ("linear_probe", "zero_shot"),
    "families": ("choose_head", "open_model"),
    "job": ("Job",),
    "layers": ("find_layers",),
    "methods": ("METHODS", "BilinearAlignment", "Method", "Problem", "Transfer", "get_method"),
    "pairing": ("LayerPair", "pair_layers"),
    "pipeline": ("transfer",),
    "preparation": ("prepare",),
    "result": ("Result",),
    "task_vector": ("TaskVector", "load_task_vector"),
    "tasks": ("read_data",),
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
    "measure",
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
