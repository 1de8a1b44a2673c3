"""Weight files: every dtype and shape, pickles that are refused, damaged headers, and the bytes that are written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from builders.weights import assert_same, error_of, many_kinds
from tuneport.io.checkpoint import open_checkpoint, write_safetensors
from tuneport.io.tensors import describe


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return many_kinds()


def test_reads_every_dtype_and_shape(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    shapes = {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "bits": torch.tensor([True, False, True])}
    eighths = {f"eighth.{dtype}": torch.ones(5).to(dtype) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
    everything = {**tensors, **shapes, **eighths, "half": torch.ones(3, 2, dtype=torch.bfloat16)}
    save_file(everything, tmp_path / "m.safetensors")
    opened, expected = open_checkpoint(tmp_path / "m.safetensors"), load_file(tmp_path / "m.safetensors")
    assert set(opened) == set(expected)
    for name, tensor in expected.items():
        assert opened[name].dtype == tensor.dtype
        assert opened[name].shape == tensor.shape
        assert torch.equal(opened[name].float(), tensor.float())


@pytest.mark.parametrize("legacy", [False, True])
def test_pickles_hold_tensors_only(tmp_path: Path, tensors: dict[str, torch.Tensor], legacy: bool) -> None:
    tensors["transposed"] = torch.arange(6.0).reshape(2, 3).T
    torch.save(tensors, tmp_path / "model.pt", _use_new_zipfile_serialization=not legacy)
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "wrapped.ckpt")
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "model.pt", tmp_path / "folder" / "pytorch_model.bin")
    for name in ("model.pt", "wrapped.ckpt", "folder"):
        checkpoint = open_checkpoint(tmp_path / name)
        assert_same(checkpoint, tensors)
        assert checkpoint["transposed"].is_contiguous()
        checkpoint["scalar"].zero_()
        assert checkpoint["scalar"] == 2.5


class Bomb:
    """Runs a command when unpickled without care."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.target),))


def test_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path, target = tmp_path / "bad.pt", tmp_path / "exploded"
    torch.save({"w": torch.ones(2), "bomb": Bomb(target)}, path)
    assert error_of(lambda: open_checkpoint(path)) == (
        f"{path} is refused: this pickle holds more than tensors and could run code. "
        "Save the model as safetensors where it was made, and use that."
    )
    assert not target.exists()


def test_pickles_without_a_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(2), "epoch": 3}, path)
    assert error_of(lambda: open_checkpoint(path)) == (
        f"{path} is not a state dict: it holds 1 entries that are not tensors: epoch. Save model.state_dict()."
    )
    torch.save([torch.ones(2)], path)
    assert error_of(lambda: open_checkpoint(path)) == (
        f"{path} is not a state dict but a list. Save model.state_dict()."
    )
    torch.save({}, path)
    assert "it holds nothing" in error_of(lambda: open_checkpoint(path))
    path.write_bytes(b"not a pickle")
    assert error_of(lambda: open_checkpoint(path)) == (
        f"{path} was not written by torch.save. Download or save it again."
    )
    torch.save({"w": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:size])
        assert error_of(lambda: open_checkpoint(path)).endswith(" Download or save it again.")


def test_unreadable_headers(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    whole = save({"w": torch.ones(100)})
    for content in (b"", b"x", whole[:60], whole[:-4], whole + b"more"):
        path.write_bytes(content)
        text = error_of(lambda: open_checkpoint(path))
        assert text.startswith(f"{path} cannot be read as safetensors (")
        assert text.endswith("). Download or save it again.")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    assert error_of(lambda: open_checkpoint(path)) == (
        f"{path} is a Git LFS pointer, not the weights. Fetch them with git lfs pull."
    )


def test_unsupported_dtype(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    text = error_of(lambda: open_checkpoint(tmp_path / "x.safetensors"))
    assert "x.safetensors stores w as F4; known are BOOL, " in text or "cannot be read as safetensors" in text


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_that_is_changed_in_place_with_the_same_size(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)({"w": torch.ones(2)}, path)
    checkpoint, before = open_checkpoint(path), path.stat()
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(torch.ones(2).numpy().tobytes(), torch.zeros(2).numpy().tobytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # a clock may be too coarse to show the write
    after = path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    assert path.read_bytes() != content
    assert error_of(lambda: checkpoint["w"]) == f"{path} has changed since it was opened. Open it again."


def test_vanished_and_changed_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, path)
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint["w"], torch.ones(2))
    save_file({"w": torch.zeros(3)}, path)
    assert error_of(lambda: checkpoint["w"]) == f"{path} has changed since it was opened. Open it again."
    path.unlink()
    assert error_of(lambda: checkpoint["w"]) == (
        f"{path} is gone or cannot be read (No such file or directory). Restore it."
    )


def test_golden_bytes(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors['quote " and \u00e9'] = torch.ones(1, dtype=torch.int8)
    tensors["eight"] = torch.ones(3).to(torch.float8_e4m3fn)
    tensors["complex"] = torch.ones(3, dtype=torch.complex64)
    specs = {name: describe(tensors, name) for name in tensors}
    for metadata in ({}, {"format": "pt"}):
        write_safetensors(tmp_path / "x.safetensors", tensors, specs, metadata)
        written = (tmp_path / "x.safetensors").read_bytes()
        assert written == save(tensors, metadata=metadata or None)
        assert int.from_bytes(written[:8], "little") % 8 == 0
