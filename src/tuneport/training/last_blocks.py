"""The last blocks of a student learn from stored inputs, which takes less time than to train all of it.

The blocks before them do not change. So each view of a sample passes through them once, and the teacher answers it
once. A view may then be learnt from as often as the steps ask for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..models.base import Model
from ..models.tokenizer import Encoded
from ..types import Sides
from .augment import PIXELS, Reader
from .loop import passes
from .matching import Matching

STORED = 800  # views, of all samples together
TRAINED = 1 / 2  # share of the blocks


def stack_of(model: Model) -> str | None:
    """The path of the only stack of blocks in a model; None if there are several, or too few blocks to divide."""
    blocks = {(layer.stack, layer.block) for layer in model.layers if layer.block is not None}
    stacks = {stack for stack, _ in blocks}
    return stacks.pop() if len(stacks) == 1 and len(blocks) * TRAINED >= 1 else None


class LastBlocks:
    """The last half of the blocks in a stack, and all that runs after them."""

    def __init__(self, module: nn.Module, stack: str) -> None:
        blocks = list(module.get_submodule(stack).children())
        first = len(blocks) - int(len(blocks) * TRAINED)
        self.before, self.trained = blocks[:first], blocks[first:]

    def entering(self, run: Callable[[], Any]) -> Tensor:
        """What enters the first of them in a pass of the module (N, ...); they do not run."""
        found: list[Any] = []
        hook = self.before[-1].register_forward_hook(lambda *passed: found.append(passed[-1]))
        try:
            with _answering(self.trained, lambda: found[0]):
                run()
        finally:
            hook.remove()
        self.in_tuple = isinstance(found[0], tuple)
        entering: Tensor = found[0][0] if self.in_tuple else found[0]
        return entering

    @contextmanager
    def fed(self, entering: Tensor) -> Iterator[None]:
        """Let passes of the module begin with what enters them."""
        with _answering(self.before, lambda: (entering,) if self.in_tuple else entering):
            yield


@contextmanager
def _answering(blocks: Sequence[nn.Module], answer: Callable[[], Any]) -> Iterator[None]:
    """Blocks that give an answer without running."""
    for block in blocks:
        block.forward = lambda *_, **__: answer()
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # that of the class is there again


class StoredViews:
    """Augmented views of all samples, with the teacher's answers and what enters the student's last blocks.

    Parameters of the student that only run before these blocks need no gradient from then on.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        matching: Matching,
        precision: AbstractContextManager[Any],
        reader: Reader,
        stack: str,
    ) -> None:
        """Draw the views and run both models on them.

        Args:
            teacher, student: modules of the fine-tuned source and of the target.
            matching: what both models are asked.
            precision: the context that models run in.
            reader: draws the views.
            stack: the path of the student's blocks.
        """
        self.student, self.matching, self.precision = student, matching, precision
        self.last = LastBlocks(student, stack)
        views = list(_views(reader, matching.pass_size))
        asked = (partial(matching.ask.target, student, view.target) for view in views)
        with precision, torch.no_grad():
            self.answers = torch.cat([matching.ask.source(teacher, view.source) for view in views])
            self.entering = torch.cat([self.last.entering(ask) for ask in asked])
        pixels = torch.cat([view.target.inputs[PIXELS] for view in views])
        self.inputs = replace(views[0].target, inputs={PIXELS: pixels})
        self.loss(torch.arange(2)).backward()
        for parameter in student.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter.grad is not None)
            parameter.grad = None

    def __len__(self) -> int:
        return len(self.answers)

    def loss(self, rows: Tensor) -> Tensor:
        """The loss of the student on some of the views."""
        pixels = self.inputs.inputs[PIXELS][rows]
        with self.precision, self.last.fed(self.entering[rows]):
            found = self.matching.ask.target(self.student, replace(self.inputs, inputs={PIXELS: pixels}))
            return self.matching.loss(self.answers[rows], found)


def _views(reader: Reader, size: int) -> Iterator[Sides[Encoded]]:
    """Blended views of all samples, as many of each as there is place for, in batches."""
    count = len(reader.samples)
    for copy, rows in product(range(math.ceil(STORED / count)), passes(torch.arange(count), size)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(reader.seed * 1_000_003 + copy * count + int(rows[0]))
            view = reader.view(rows.numpy(), copy, blended=True)
        yield view
