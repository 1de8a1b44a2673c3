"""A finished transfer, and what it can become: a live module, a model folder, a LoRA adapter, a task-vector file.

The target is never changed: `apply` works on a copy, and a model's tensors are computed one by one as they are written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import DistillConfig, TransferConfig
from ..errors import TuneportError
from ..io.state import StateFile
from ..measure.fitted_heads import fit_head
from ..measure.samples import DatasetSamples, Samples
from ..methods import LayerRecord
from ..models.base import Model
from ..models.open import path_of
from ..outputs import Update, output_of
from ..pairing import Kept
from ..task_vectors.vector import TaskVector
from ..training.distill import teach
from ..training.division import Extra, hold_out
from ..types import Events
from .comparison import summarize

if TYPE_CHECKING:
    from .transfer import Setup


@dataclass(frozen=True, eq=False)
class Result:
    """A finished transfer: the target's task vector, the evidence per layer, and the ways to use it.

    Args:
        update: what changes in the target.
        records: the evidence per layer.
        not_transported: the tensors of the target that stay, with reasons.
        config: the options.
        record: what the run record says.
        setup: what it was made from.
        texts: files of text that are written beside the weights, by name.
    """

    update: Update
    records: tuple[LayerRecord, ...]
    not_transported: tuple[Kept, ...]
    config: TransferConfig
    record: Mapping[str, Any]
    setup: Setup | None = None
    texts: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        moved = f"{len(self.records)} layers moved, {len(self.not_transported)} tensors stay"
        return f"Result({self.target.name}: {self.record.get('method', 'a transfer')} at scale {self.scale:g}, {moved})"

    @property
    def target(self) -> Model:
        """The target, with its fitted head if it has one."""
        return self.update.target

    @property
    def task_vector(self) -> TaskVector:
        """The change of the target at scale 1, by live names."""
        return self.update.vector

    @property
    def scale(self) -> float:
        return self.update.scale

    def change(self, scale: float | None = None) -> TaskVector:
        """What is added to the target, under the names in its files."""
        return (self.update if scale is None else replace(self.update, scale=scale)).in_files()

    def tensors(self, scale: float | None = None) -> Mapping[str, Tensor]:
        """The new model's tensors under their names in the files, in the target's dtypes, computed when read."""
        return self.change(scale).apply_to(self.target.weights.tensors)

    def apply(self, scale: float | None = None) -> nn.Module:
        """A copy of the target with the skill: the numbers that `save` writes, in the dtype that the target runs in."""
        self.target.require_in_memory("apply()", "use save() instead")
        module = copy.deepcopy(self.target.module)
        tensors = self.tensors(scale)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.task_vector:
                    parameter.copy_(tensors[self.target.weights.file_names[name]])
        return module

    def distill(
        self,
        steps: int | None = None,
        *,
        learning_rate: float | None = None,
        lora: int | None = None,
        batch_size: int | None = None,
        samples: Samples | None = None,
        extra: Extra | None = None,
        events: Events | None = None,
        saved: StateFile | None = None,
    ) -> Result:
        """Let the fine-tuned source teach the ported target on the calibration samples; no label is used.

        A tenth of the samples is held out. The result is the last state that none is nearer to the teacher
        than, beyond chance, and that may be this transfer as it is.

        Args:
            steps: updates of the student; by default they follow from the samples.
            learning_rate: the highest, after the warm-up; by default it follows from the target's width.
            lora: train a LoRA of this rank in place of all linear layers, from the best fit of the transfer.
            batch_size: samples of an update; by default it follows from what is compared.
            samples: in place of the calibration samples.
            extra: samples that are taught beside them.
            events: listens to the run.
            saved: keeps the state of the run, and gives back that of a killed one.
        """
        if self.setup is None:
            raise TuneportError("this result does not know the models and samples that it was made from.")
        change, target = self.setup.change, self.target
        samples = self.setup.calibration.samples if samples is None else samples
        if change.fits_head and isinstance(samples, DatasetSamples):  # held-out samples must not have fitted it
            target = target.with_head(fit_head(target, self.apply(), hold_out(samples)[1]))
        config = DistillConfig.of(
            steps=steps, learning_rate=learning_rate, lora=lora, seed=self.config.seed, batch_size=batch_size
        )
        start = self.task_vector * self.scale
        vector, entry = teach(samples, target, change.vector, start, config, extra=extra, events=events, saved=saved)
        record = {**self.record, "distilled": {"teacher": self.record["finetuned"]["name"], **entry}}
        if lora is None and entry["best"] == 0:
            return replace(self, record=record)
        changed = {self.target.weights.file_names[name] for name in vector}
        kept = tuple(item for item in self.not_transported if item.tensor not in changed)
        record["not_transported"] = [asdict(item) for item in kept]
        record |= asdict(summarize(None, scale=1.0, distilled=True))
        update = replace(self.update, target=target, vector=vector, scale=1.0)
        return replace(self, update=update, not_transported=kept, record=record)

    def save(self, out: str | Path, **options: Any) -> Path:
        """Write the new model as a folder that its own library loads, a LoRA adapter, or the task vector as one file.

        An output that holds what the transfer was made from is refused, also with `overwrite`.

        Args:
            out: a folder, or a file for a task vector, which holds the change at the scale of the result.
            options: those of the output: `as_`, `rank`, `energy`, `uniform_rank`, `adapter_dtype`, `overwrite`.
        """
        self.write(out, **options)
        return Path(out)

    def write(self, out: str | Path, *, texts: Mapping[str, str] | None = None, **options: Any) -> Mapping[str, Any]:
        """As `save`, with `texts` by file name beside the weights; return the run record."""
        config = replace(self.config, **options)
        config.check()
        out, output = Path(out), output_of(config)
        output.check_place(out, config.overwrite, inputs=self._inputs())
        output.check_update(self.update)
        texts = {**self.texts, **(texts or {})}
        record = {**self.record, "out": str(self.record.get("out", out)), "as": config.as_}
        recorded = {item.name for item, about in config.options() if about.recorded}
        given = {name.rstrip("_"): value for name, value in options.items() if name in recorded}
        record["options"] = {**record.get("options", {}), **given}
        return output.write(out, self.update, record, overwrite=config.overwrite, texts=texts)

    def _inputs(self) -> list[Path]:
        """The known paths of the models and the data of the transfer."""
        parts = [self.record.get(key, {}) for key in ("source", "finetuned", "target", "data")]
        paths = [part.get("path") for part in (*parts, *parts[1].get("parts", ()))]
        known = [path_of(path) for path in paths if path]
        return known if self.target.weights.folder is None else [*known, self.target.weights.folder]
