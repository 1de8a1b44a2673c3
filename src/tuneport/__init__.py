"""tuneport: port a fine-tune to a new base model.

The public names; each is imported from its module when it is first used, so that `import tuneport` and
`tuneport --help` do not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import DistillConfig as DistillConfig
    from .config import EvaluateConfig as EvaluateConfig
    from .config import TransferConfig as TransferConfig
    from .data.tasks import read_data as read_data
    from .errors import TuneportError as TuneportError
    from .fleet.run import upgrade_all as upgrade_all
    from .layers import find_layers as find_layers
    from .methods import METHODS as METHODS
    from .methods import BilinearAlignment as BilinearAlignment
    from .methods import Method as Method
    from .methods import Problem as Problem
    from .methods import Transfer as Transfer
    from .methods import get_method as get_method
    from .models.open import open_model as open_model
    from .pairing import LayerPair as LayerPair
    from .pairing import pair_layers as pair_layers
    from .pipeline.arithmetic import apply as apply
    from .pipeline.arithmetic import extract as extract
    from .pipeline.arithmetic import merge as merge
    from .pipeline.distill import distill as distill
    from .pipeline.estimate import plan as plan
    from .pipeline.evaluate import evaluate as evaluate
    from .pipeline.transfer import Result as Result
    from .pipeline.transfer import transfer as transfer
    from .pipeline.upgrade import upgrade as upgrade
    from .task_vectors.vector import TaskVector as TaskVector
    from .task_vectors.vector import load_task_vector as load_task_vector
    from .types import Events as Events

_NAMES = {  # the public names of each module
    "config": "DistillConfig EvaluateConfig TransferConfig",
    "data.tasks": "read_data",
    "errors": "TuneportError",
    "fleet.run": "upgrade_all",
    "layers": "find_layers",
    "methods": "BilinearAlignment METHODS Method Problem Transfer get_method",
    "models.open": "open_model",
    "pairing": "LayerPair pair_layers",
    "pipeline.arithmetic": "apply extract merge",
    "pipeline.distill": "distill",
    "pipeline.estimate": "plan",
    "pipeline.evaluate": "evaluate",
    "pipeline.transfer": "Result transfer",
    "pipeline.upgrade": "upgrade",
    "task_vectors.vector": "TaskVector load_task_vector",
    "types": "Events",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'tuneport' has no attribute {name!r}")
    value = getattr(import_module(f"tuneport.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
