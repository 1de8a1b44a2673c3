"""The main job from end to end on two small vision transformers that ship with the package (see models/README.md).

The demo fine-tunes the small one on mirrored digits, ports the change to the large one with 100 labelled images, and
compares with what else could be done. It downloads nothing and takes about a minute on two cores.
"""

from __future__ import annotations

import copy
import json
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import TransferConfig
from ..data.dataset import Dataset, align_labels
from ..data.formats import read_plain
from ..io.checkpoint import write_checkpoint
from ..io.output import check_new, new_folder
from ..io.places import copy_companions
from ..measure.accuracy import encode_batch, zero_shot
from ..measure.unseen import unseen
from ..models.base import Model, outside_of
from ..models.heads import choose_head
from ..models.open import open_model
from ..outputs import output_of
from ..pipeline.comparison import Role, compare, summarize
from ..pipeline.transfer import prepare, run
from ..report.record import write_record
from ..training.loop import Pace, Schedule, run_steps
from ..types import Events, Progress, ignore

MODELS = Path(__file__).parent / "models"
SAMPLES = 100
STEPS = 100
PORTED = ("naive", "theseus", "bico")
TABLE = "demo.json"
DATA = "mirrored-digits.npz"
WRITTEN = {"source": "small", "finetuned": "small-mirrored", "target": "large", "data": DATA}  # places of the inputs


def run_demo(out: Path, *, seed: int = 0, overwrite: bool = False, events: Events | None = None) -> dict[str, Any]:
    """Fine-tune, port, evaluate; write the data, the bases, the fine-tuned source and the port under `out`."""
    check_new(out, overwrite, marks=[TABLE])
    events, ported_at = events or Events(), out / "large-mirrored"
    small, large = (open_model(MODELS / name) for name in ("small", "large"))
    with new_folder(out, overwrite=overwrite, marks=[TABLE]) as folder:
        for name in ("small", "large"):
            shutil.copytree(MODELS / name, folder / name)
        data = folder / DATA
        np.savez_compressed(data, allow_pickle=False, **mirrored_digits())
        train, test = read_plain(data, "train"), read_plain(data, "test")
        head = choose_head(large, "digits", test)

        def accuracy(module: nn.Module) -> float:
            return zero_shot(large.with_module(module), head, test).accuracy

        found, schedule = {"target, zero-shot": accuracy(large.module)}, Schedule(STEPS, 64, learning_rate=1e-3)
        events.step("fine-tuning the source", count=STEPS)
        tuned = finetune(small, train, schedule, events.advance)
        save_finetuned(small, tuned, folder / "small-mirrored")
        events.step("porting", count=len(PORTED))
        for name in PORTED:
            config = TransferConfig.of(method=name, head="digits", samples=SAMPLES, seed=seed, scale=1.0)
            setup = prepare(small, folder / "small-mirrored", large, data, config)
            inputs = {key: {**setup.about[key], "path": str(out / place)} for key, place in WRITTEN.items()}
            best = run(replace(setup, about={**setup.about, **inputs}), config)  # the last is bico
            found[f"target, ported by {name}"] = accuracy(best.apply())
            events.advance(1)
        made: dict[Role, Any] = {"port": (large, output_of(config).new_parameters(best.update))}
        on = unseen(large, setup.calibration, test)
        scored = compare(setup.models, setup.change, setup.calibration, made, on, config, name="small-mirrored")
        more = {"out": str(ported_at), "as": "model", **scored.record(), **asdict(summarize(scored, scale=best.scale))}
        replace(best, record={**best.record, **more}).save(folder / ported_at.name)
        schedule = replace(schedule, batch_size=32)  # this fine-tuning takes most of the demo's time
        events.step("fine-tuning the target", count=STEPS)
        reference = finetune(large, train, schedule, events.advance)
        found[f"target, fine-tuned on all {len(train)} images"] = accuracy(reference)
        table = [{"model": name, "accuracy": value} for name, value in found.items()]
        write_record(folder / TABLE, {"seed": seed, "samples": SAMPLES, "table": table})
    again = ["tuneport", "evaluate", str(ported_at), "--data", str(out / DATA), "--head", "digits"]
    report = str(ported_at / "report.html")
    return {"out": str(ported_at), "report": report, "table": table, "next": shlex.join(again)}


def mirrored_digits() -> dict[str, NDArray[Any]]:
    """scikit-learn's digits, enlarged to 16 x 16 and mirrored; the split is that of the pre-training."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] * (255 / 16)
    images = F.interpolate(images, size=16, mode="bilinear", align_corners=False).round().byte()
    mirrored = images[:, 0].flip(-1).numpy()
    labels = digits.target.astype(np.int64)
    order = np.random.RandomState(0).permutation(len(mirrored))
    train, test = order[:1297], order[1297:]
    return {
        "x_train": mirrored[train],
        "y_train": labels[train],
        "x_test": mirrored[test],
        "y_test": labels[test],
        "classes": np.array([str(digit) for digit in range(10)]),
    }


def finetune(model: Model, data: Dataset, schedule: Schedule, progress: Progress = ignore) -> nn.Module:
    """Train a copy of the tower on labelled images, with the head frozen."""
    head, module = choose_head(model, "digits", data), copy.deepcopy(model.module).train()
    outside = outside_of(module, model.architecture.layers, model.architecture.loose, "")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in outside)
    inputs, labels = encode_batch(model, data), torch.as_tensor(align_labels(data, head.classes).labels)

    def loss(_step: int, rows: Tensor) -> Tensor:
        batch = {key: values[rows] for key, values in inputs.items()}
        return F.cross_entropy(head.scores(model, module, batch), labels[rows])

    optimizer, stops = schedule.optimizer(module), {schedule.steps}
    for _ in run_steps("the demo", module, optimizer, schedule, len(data), loss, Pace(stops=stops)):
        progress(1)
    return module.eval()


def save_finetuned(model: Model, module: nn.Module, folder: Path) -> None:
    folder.mkdir()
    names = model.weights.file_names
    write_checkpoint(folder, {names[name]: tensor.detach() for name, tensor in module.named_parameters()})
    copy_companions(model.weights.folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2), encoding="utf-8")
