"""Types that several packages share: words with a fixed choice, and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
class Format:
    """What is known of a format of outputs before torch is loaded; its class says how it is written and read."""

    output: str  # the class, as MODULE:NAME; a module of `outputs` begins with a dot
    words: str  # for what was written, with entries of the run record in braces
    suffix: str = ""  # of the file that it is; without one it is a folder, with a report
    whole: bool = False  # a model, no change of one
    shaped: bool = False  # by the options of a LoRA: its class takes them
    students: bool = True  # it can hold what `upgrade` teaches


FORMATS: dict[str, Format] = {
    "model": Format(".base:ModelOutput", "a model", whole=True),
    "adapter": Format(".adapter:AdapterOutput", "an adapter of rank {adapter[rank]} for {target[name]}", shaped=True),
    "task-vector": Format(".base:TaskVectorOutput", "a task vector for {target[name]}", ".safetensors", students=False),
}


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
