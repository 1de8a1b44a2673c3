"""What can be written. A new format is a class in a module here, a line of OUTPUTS and a name in `types`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..config import MergeConfig, TransferConfig
from ..errors import TuneportError, unknown_name
from ..task_vectors.lora_write import AdapterForm
from .adapter import AdapterOutput
from .base import ModelOutput, Output, TaskVectorOutput, Update

OUTPUTS: Mapping[str, Callable[[AdapterForm], Output]] = {
    ModelOutput.name: lambda _: ModelOutput(),
    AdapterOutput.name: AdapterOutput,
    TaskVectorOutput.name: lambda _: TaskVectorOutput(),
}


def output_of(config: TransferConfig | MergeConfig) -> Output:
    """The output that the options ask for."""
    if config.as_ not in OUTPUTS:
        raise TuneportError(unknown_name("output", config.as_, OUTPUTS))
    form = AdapterForm(config.rank, config.energy, config.uniform_rank, config.adapter_dtype)
    return OUTPUTS[config.as_](form)


__all__ = ["OUTPUTS", "AdapterOutput", "ModelOutput", "Output", "TaskVectorOutput", "Update", "output_of"]
