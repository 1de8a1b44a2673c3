"""The main job from end to end on two small vision transformers that ship with the package (see models/README.md).

The demo fine-tunes the small one on mirrored digits, ports the change to the large one with 100 labelled images, and
compares with what else could be done. It downloads nothing and takes about a minute on two cores.
"""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from ..config import TransferConfig
from ..data.formats import read_plain
from ..errors import TuneportError
from ..io.companions import copy_companions
from ..io.output import check_new_folder, new_folder
from ..measure.accuracy import zero_shot
from ..measure.unseen import unseen
from ..models.base import Model
from ..models.heads import choose_head
from ..models.open import open_model
from ..outputs import output_of
from ..pipeline.comparison import Role, compare, summarize
from ..pipeline.transfer import prepare, run
from ..report.record import write_record
from ..training.loop import Schedule
from ..types import Events
from .finetune import finetune

MODELS = Path(__file__).parent / "models"
SAMPLES = 100
STEPS = 100
PORTED = ("naive", "theseus", "bico")
TABLE = "demo.json"
WRITTEN = {  # where the inputs of the run will lie
    "source": "small",
    "finetuned": "small-mirrored",
    "target": "large",
    "data": "mirrored-digits.npz",
}


def run_demo(out: Path, *, seed: int = 0, overwrite: bool = False, events: Events | None = None) -> dict[str, Any]:
    """Fine-tune, port, evaluate; write the data, the bases, the fine-tuned source and the port under `out`."""
    check_new_folder(out, overwrite, marks=[TABLE])
    events = events or Events()
    small, large = (open_model(MODELS / name) for name in ("small", "large"))
    with new_folder(out, overwrite=overwrite, marks=[TABLE]) as folder:
        for name in ("small", "large"):
            shutil.copytree(MODELS / name, folder / name)
        data = folder / "mirrored-digits.npz"
        np.savez_compressed(data, allow_pickle=False, **mirrored_digits())
        train, test = read_plain(data, "train"), read_plain(data, "test")
        head = choose_head(large, "digits", test)

        def accuracy(module: nn.Module) -> float:
            return zero_shot(large.with_module(module), head, test).accuracy

        found = {"target, zero-shot": accuracy(large.module)}
        schedule = Schedule(STEPS, batch_size=64, learning_rate=1e-3)
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
        made: dict[Role, Any] = {"port": (large, output_of(config).written(best.update))}
        on = unseen(large, setup.calibration, test)
        scored = compare(setup.models, setup.change, setup.calibration, made, on, config, name="small-mirrored")
        more = {
            "out": str(out / "large-mirrored"),
            "as": "model",
            **scored.record(),
            **asdict(summarize(scored, scale=best.scale)),
        }
        replace(best, record={**best.record, **more}).save(folder / "large-mirrored")
        # smaller batches: the target is larger, and its fine-tuning takes most of the demo's time
        schedule = replace(schedule, batch_size=32)
        events.step("fine-tuning the target", count=STEPS)
        reference = finetune(large, train, schedule, events.advance)
        found[f"target, fine-tuned on all {len(train)} images"] = accuracy(reference)
        table = [{"model": name, "accuracy": value} for name, value in found.items()]
        write_record(folder / TABLE, {"seed": seed, "samples": SAMPLES, "table": table})
    ported_at = out / "large-mirrored"
    return {
        "out": str(ported_at),
        "report": str(ported_at / "report.html"),
        "table": table,
        "next": shlex.join(
            ["tuneport", "evaluate", str(ported_at), "--data", str(out / data.name), "--head", "digits"]
        ),
    }


def mirrored_digits() -> dict[str, NDArray[Any]]:
    """scikit-learn's digits, enlarged to 16 x 16 and mirrored; the split is that of the pre-training."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise TuneportError("the demo needs scikit-learn: pip install scikit-learn") from None
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


def save_finetuned(model: Model, module: nn.Module, folder: Path) -> None:
    """Write a folder like the base's, with other weights."""
    folder.mkdir()
    tensors = {
        model.weights.file_names[name]: tensor.detach().contiguous() for name, tensor in module.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    copy_companions(model.weights.folder, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2), encoding="utf-8")
