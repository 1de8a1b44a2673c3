"""Fine-tuning as a command: a folder that the library loads, checkpoints on the way, a record; nothing half-done."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from builders.folders import Zoo, load, write_data
from paper import finetune as training
from paper.finetune import PROTOCOL, finetune, mean_losses, prepare_training, run_training
from tuneport.data.formats import read_plain
from tuneport.errors import CheckpointError, DataError
from tuneport.io.checkpoint import open_checkpoint
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model
from tuneport.training.loop import Pace, Schedule, run_steps

SCHEDULE = Schedule(steps=6, batch_size=8, learning_rate=1e-3, warmup=2)


def test_protocol_of_the_paper() -> None:
    assert (PROTOCOL.steps, PROTOCOL.batch_size, PROTOCOL.learning_rate) == (2000, 128, 1e-5)
    assert (PROTOCOL.weight_decay, PROTOCOL.warmup) == (0.1, 200)
    assert PROTOCOL.rate(199) == PROTOCOL.rate(200) == 1e-5
    assert PROTOCOL.rate(0) == pytest.approx(1e-5 / 200)
    assert PROTOCOL.rate(1999) < 1e-10


def test_output_folder_holds_the_trained_weights(zoo: Zoo, tmp_path: Path) -> None:
    base = zoo["clip_vision-base"]
    record = run_training(
        prepare_training(base, zoo.data, SCHEDULE, device="cpu"), tmp_path / "out", checkpoint_every=2
    )
    model = open_model(base)
    data = read_plain(zoo.data, "train")
    wanted = dict(finetune(model, choose_head(model, None, data), data, SCHEDULE, at=(2, 4)))
    module = wanted[6]
    for name, tensor in load(tmp_path / "out").state_dict().items():
        assert torch.equal(tensor, module.state_dict()[name]), name
    steps = [tmp_path / "out" / item["folder"] for item in record["checkpoints"]]
    assert [folder.name for folder in steps] == ["step-000002", "step-000004", "step-000006"]
    first, last = (open_model(folder).module.state_dict() for folder in (steps[0], steps[-1]))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert all(torch.equal(last[name], tensor) for name, tensor in module.state_dict().items())
    assert (tmp_path / "out" / "heads" / "animals.safetensors").is_file()
    written = json.loads((tmp_path / "out" / "tuneport.json").read_text())
    assert sorted(written.pop("files")) == sorted(
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    )
    assert written == json.loads(json.dumps(record))
    assert record["losses"][-1]["step"] == 6
    assert record["options"]["learning_rate"] == 1e-3
    assert "validation_accuracy" not in record  # no split to look at


def test_output_keeps_the_dtypes_of_the_base(zoo: Zoo, tmp_path: Path) -> None:
    run_training(prepare_training(zoo["clip_vision-target16"], zoo.data, SCHEDULE, device="cpu"), tmp_path / "out")
    stored = open_checkpoint(tmp_path / "out")
    assert {stored.dtype(name) for name in stored} == {torch.float16}


def test_validation_accuracy_of_a_task(zoo: Zoo, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "m.npz", x_train=pixels, y_train=np.arange(60) % 3, x_test=pixels[:9], y_test=np.arange(9) % 3)
    ready = prepare_training(zoo["clip-base"], f"mnist:{tmp_path / 'm.npz'}", SCHEDULE, device="cpu")
    assert (len(ready.train), len(ready.validation or ())) == (54, 6)
    record = run_training(ready, tmp_path / "out", checkpoint_every=3)
    assert 0 <= record["validation_accuracy"] <= 100
    assert all("validation_accuracy" in item for item in record["checkpoints"])


def test_uncached_inputs_give_the_same_bits(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = open_model(zoo["clip_vision-base"]), read_plain(zoo.data, "train")
    head = choose_head(model, None, data)
    *_, (_, kept) = finetune(model, head, data, SCHEDULE)
    monkeypatch.setattr(training, "prepared", lambda *_: pytest.fail("prepared as a whole"))
    *_, (_, read) = finetune(model, head, data, SCHEDULE, cache_bytes=0)
    for name, tensor in kept.state_dict().items():
        assert torch.equal(tensor, read.state_dict()[name]), name


def test_passes_of_a_batch_hold_samples_of_similar_length() -> None:
    module, schedule = nn.Linear(1, 1), Schedule(3, batch_size=6, learning_rate=1e-3)
    lengths = torch.tensor([9, 2, 7, 4, 1, 8, 3, 6, 5, 2])

    def batches(lengths: Tensor | None) -> list[list[int]]:
        """The rows of each batch, in the order of its two passes."""
        parts: list[list[int]] = []

        def loss(_: int, rows: Tensor) -> Tensor:
            parts.append(rows.tolist())
            result: Tensor = module(torch.ones(len(rows), 1)).mean()
            return result

        optimizer = schedule.optimizer(module)
        run = run_steps("a test", module, optimizer, schedule, 10, loss, Pace(pass_size=4, lengths=lengths))
        assert [step for step, _ in run] == [1, 2, 3]
        assert [len(part) for part in parts] == [3, 3] * 3
        return [one + two for one, two in zip(parts[::2], parts[1::2], strict=True)]

    for ordered, drawn in zip(batches(lengths), batches(None), strict=True):
        assert set(ordered) == set(drawn)
        assert lengths[ordered].tolist() == sorted(lengths[drawn].tolist())


def test_gradient_accumulation(zoo: Zoo) -> None:
    model, data = open_model(zoo["clip_vision-base"]), read_plain(zoo.data, "train").subset(range(22))
    head = choose_head(model, None, data)
    schedule = Schedule(steps=2, batch_size=22, learning_rate=1e-3)
    logged: list[list[torch.Tensor]] = [[], []]
    found = []
    for losses, size in zip(logged, (22, 8), strict=True):
        run = finetune(model, head, data, schedule, log=losses.append, pass_size=size)
        found.append([module.state_dict() for _, module in run][-1])
    assert [float(loss) for loss in logged[0]] == pytest.approx([float(loss) for loss in logged[1]], rel=1e-5)
    for name, tensor in found[0].items():
        if not name.endswith("k_proj.bias"):  # its gradient is rounding, which Adam blows up
            assert torch.allclose(tensor, found[1][name], atol=2e-5), name


def test_logged_losses_are_means_since_the_last_entry() -> None:
    losses = [torch.tensor(float(step)) for step in range(1, 6)]
    assert mean_losses(losses, every=2) == [
        {"step": 2, "loss": 1.5},
        {"step": 4, "loss": 3.5},
        {"step": 5, "loss": 5.0},
    ]


def test_failed_run_leaves_no_output(zoo: Zoo, tmp_path: Path) -> None:
    ready = prepare_training(zoo["clip_vision-base"], zoo.data, SCHEDULE, device="cpu")

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(ready, tmp_path / "out", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_bad_input(zoo: Zoo, tmp_path: Path) -> None:
    base = zoo["clip_vision-base"]
    write_data(tmp_path / "gnus.npz", ("cat", "gnu"))
    with pytest.raises(DataError, match="unknown to the head: gnu"):
        prepare_training(base, tmp_path / "gnus.npz", head="animals", device="cpu")
    ready = prepare_training(base, zoo.data, SCHEDULE, device="cpu")
    with pytest.raises(CheckpointError, match="it holds the input"):
        run_training(ready, base, overwrite=True)


def test_finetune_command(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, small = str(zoo["clip_vision-base"]), ["--steps", "4", "--batch-size", "8", "--device", "cpu"]

    def call(name: str, *more: str, data: Path = zoo.data) -> None:
        training.main([base, "--data", str(data), "--out", str(tmp_path / name), *small, *more])

    call("out", "--checkpoint-every", "2")
    assert "4 steps in" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "tuneport.json").read_text(encoding="utf-8"))
    assert (record["options"]["warmup"], len(record["checkpoints"])) == (0, 2)
    with pytest.raises(SystemExit, match="exists already"):
        call("out")
    call("few", "--samples", "12")
    few = json.loads((tmp_path / "few" / "tuneport.json").read_text(encoding="utf-8"))
    assert (few["samples"], len(few["data"]["indices"])) == (12, 12)
    with pytest.raises(SystemExit, match="NaN or infinite at step 2 of 4"):
        call("new", "--learning-rate", "1e30")
    with pytest.raises(SystemExit, match="no data at"):
        call("new", data=tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["few", "out"]
