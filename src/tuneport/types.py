"""What several packages share: words with a fixed choice, callbacks, and the registries of methods and formats.

The registries hold what is known before torch is loaded, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from typing_extensions import NamedTuple

if TYPE_CHECKING:  # the command line must answer without torch
    from torch import Tensor, nn

Signal = Literal["input", "output", "output_gradient", "input_gradient", "weight_gradient"]
Completion = Literal["none", "svd"]  # how to complete a rank-deficient map
ScaleRule = Literal["auto", "safe"]  # how to choose the scale of a transfer on its samples
Split = Literal["train", "test"]
Loss = Callable[["nn.Module", Any], "Tensor"]  # loss(module, batch): a sum over the samples
Chat = list[dict[str, Any]]  # messages with "role" and "content", as chat templates take them
Progress = Callable[[int], None]  # gets the number of samples, or steps, that were done since the last call

T = TypeVar("T")


@dataclass(frozen=True)
class Known:
    """What is known of a method before torch is loaded."""

    method: str  # the class, as MODULE:NAME; a module of `methods` begins with a dot
    summary: str
    arguments: tuple[Any, ...] = ()  # of the class
    needs_data: bool = True


ALIGNED = ".bilinear:BilinearAlignment"  # arguments: the signals of both sides, moves_loose, uses_augmented_inputs
METHODS: dict[str, Known] = {
    "bico": Known(
        ALIGNED,
        "the paper's method: layer inputs on one side, output gradients on the other",
        ("input", "output_gradient"),
    ),
    "bico+": Known(
        ALIGNED, "bico with changed views of the samples", arguments=("input", "output_gradient", False, True)
    ),
    "theseus": Known(ALIGNED, "layer inputs and layer outputs; forward passes only, no labels", ("input", "output")),
    "input_only": Known(ALIGNED, "ablation: layer inputs; the output side is padded or cropped", ("input", None)),
    "output_only": Known(
        ALIGNED, "ablation: output gradients; the input side is padded or cropped", (None, "output_gradient")
    ),
    "gradient_only": Known(
        ALIGNED,
        "ablation: gradients with respect to the layer's input and output",
        ("input_gradient", "output_gradient"),
    ),
    "naive": Known(
        ALIGNED,
        "add the task vector as it is, zero-padded or cropped; needs no data",
        (None, None, True),
        needs_data=False,
    ),
    "cross-lora": Known(
        ".cross_lora:CrossLora", "match the singular vectors of the base weights; needs no data", needs_data=False
    ),
    "transfusion": Known(
        ".transfusion:TransFusion",
        "permute the source's units to match the target's weights; same architecture",
        needs_data=False,
    ),
    "gradfix": Known(
        ".gradfix:GradFix", "keep the entries that agree with the target's gradient signs; same architecture"
    ),
    "gradfix_mean": Known(
        ".gradfix:GradFix", "gradfix with the sign of the mean gradient, not a majority of samples", ("mean",)
    ),
}


@dataclass(frozen=True)
class Format:
    """What is known of a format of outputs before torch is loaded; its class says how it is written and read."""

    output: str  # the class, as MODULE:NAME; a module of `outputs` begins with a dot
    words: str  # for what was written, with entries of the run record in braces
    suffix: str = ""  # of the file that it is; without one it is a folder, with a report
    whole: bool = False  # a model, no change of one
    reader: str = ""  # of the change that it holds, as MODULE:NAME; a module of `task_vectors` begins with a dot
    shaped: bool = False  # by the options of a LoRA: its class takes them
    students: bool = True  # it can hold what distillation makes: a whole model, or a LoRA with a head


FORMATS: dict[str, Format] = {
    "model": Format(".base:ModelOutput", "a model", whole=True),
    "adapter": Format(
        ".adapter:AdapterOutput",
        "an adapter of rank {adapter[rank]} for {target[name]}",
        reader=".stored:read_adapter",
        shaped=True,
    ),
    "task-vector": Format(
        ".base:TaskVectorOutput",
        "a task vector for {target[name]}",
        ".safetensors",
        reader=".stored:read_task_vector",
        students=False,
    ),
}


def registered(place: str, package: str | None) -> Any:
    """The class or function at MODULE:NAME; a module of the package begins with a dot."""
    module, _, name = place.partition(":")
    return getattr(import_module(module, package), name)


def ignore(_: int) -> None:
    """The progress of a run that nobody follows."""


class Events:
    """Listens to a run; this one ignores everything. Override what is of interest."""

    def note(self, text: str) -> None:
        """Take a line for the user that is no error; `notes` of a record are those known before anything has run."""

    def step(self, name: str, units: float = 0.0, count: int = 0) -> None:
        """A step of the run begins: worth so many units of the plan, if it has any, with so many samples."""

    def plan(self, total: float) -> None:
        """The run will take so many units; within a step that has units, the step so many samples."""

    def extend(self, units: float) -> None:
        """The run takes so many units more than planned."""

    def advance(self, count: int) -> None:
        """So many samples, or steps of training, are done."""

    def mark(self, mark: Any) -> None:
        """Take a point of the curve of a training run."""


class Sides(NamedTuple, Generic[T]):
    """The same thing of the source and of the target."""

    source: T
    target: T
