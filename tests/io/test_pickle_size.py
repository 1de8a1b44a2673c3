"""Pickles that unpack to much more than their size are refused before they are loaded; usual ones are not."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tuneport.errors import CheckpointError
from tuneport.io import pickle_size
from tuneport.io.checkpoint import open_checkpoint
from tuneport.io.pickle_size import check_pickle


def nested(depth: int) -> Any:
    found: Any = ("a",)
    for _ in range(depth):
        found = (found, found)
    return found


def as_key(value: Any) -> bytes:
    """A dictionary with this value as its key, which is hashed when it is loaded, written without hashing it."""
    return b"\x80\x02}" + pickle.dumps(value, 2)[2:-1] + b"Ns."


BOMBS = {
    "shared tuples": (as_key(nested(60)), "and 10000000 objects"),
    "tuples of many": (as_key(((("a",) * 2000,) * 2000,) * 2000), "and 10000000 objects"),
    "buffer": (b"\x80\x02c__builtin__\nbytearray\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R.", "asks for a buffer"),
    "tensor": (b"\x80\x02ctorch\nTensor\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R.", "asks for a buffer"),
    "lists": (b"\x80\x02(" + b"]" * 2000 + b"l.", "may have 1000 operations"),
}


def written(folder: Path, content: bytes, legacy: bool, packing: int = zipfile.ZIP_STORED) -> Path:
    """A file of torch.save with this pickle as its state."""
    good, path = folder / "good.pt", folder / "bomb.pt"
    if legacy:
        facts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        path.write_bytes(b"".join(pickle.dumps(fact, 2) for fact in facts) + content + pickle.dumps([], 2))
        return path
    torch.save({"w": torch.ones(2)}, good)
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(path, "w", packing) as archive:
        for name in source.namelist():
            archive.writestr(name, content if name.endswith("data.pkl") else source.read(name))
    return path


@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "zip"])
@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_are_refused_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, legacy: bool
) -> None:
    content, words = BOMBS[kind]
    if kind == "lists":
        monkeypatch.setattr(pickle_size, "MOST_OPERATIONS", 1000)
    path = written(tmp_path, content, legacy)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("too late"))  # which would take hours or 2 GB
    with pytest.raises(CheckpointError, match=rf"bomb\.pt is refused: .*{words}"):
        open_checkpoint(path)


def test_a_length_that_does_not_fit_in_memory_is_refused(tmp_path: Path) -> None:
    text_of_any_length = pickle.PROTO + b"\x04" + pickle.BINUNICODE8
    path = written(tmp_path, text_of_any_length + struct.pack("<Q", 2**62), legacy=True)
    with pytest.raises(CheckpointError, match=r"bomb\.pt is refused: its pickle states a length that does not fit"):
        open_checkpoint(path)


def test_a_broken_pickle_does_not_hide_a_bomb_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads data.pkl only, wherever it stands in the archive."""
    path = written(tmp_path, BOMBS["shared tuples"][0], legacy=False)
    with zipfile.ZipFile(path) as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("good/first.pkl", b"no pickle")
        for name, content in members.items():
            archive.writestr(name, content)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(CheckpointError, match=r"bomb\.pt is refused: .*and 10000000 objects"):
        open_checkpoint(path)


def test_members_that_are_too_large_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, b"\x80\x02X" + struct.pack("<I", 4 * 10**6) + bytes(4 * 10**6) + b".", False)
    with pytest.raises(CheckpointError, match=r"its member good/data\.pkl has 4000008 bytes, and may have 4000000"):
        open_checkpoint(path)


def test_compressed_members_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, b"\x80\x02X" + struct.pack("<I", 10**6) + bytes(10**6) + b".", False, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 10**4
    with pytest.raises(CheckpointError, match=r"its member good/data\.pkl is compressed"):
        open_checkpoint(path)


@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "zip"])
def test_checkpoints_with_optimizers_pass(tmp_path: Path, legacy: bool) -> None:
    """Parameter groups share their betas, and tied weights their storage."""
    weight, betas = torch.ones(3, 3), (0.9, 0.99)
    optimizer = {"state": {0: {"step": 1, "sum": weight * 2}}, "groups": [{"betas": betas} for _ in range(100)]}
    state = {"state_dict": {"weight": weight, "tied": weight}, "optimizer": optimizer, "more": [betas] * 100}
    torch.save(state, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    check_pickle(tmp_path / "w.pt")
    assert torch.equal(open_checkpoint(tmp_path / "w.pt")["weight"], weight)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02", b"text", pickle.dumps({"a": 1}, 4), b"t.", b"0."])
def test_broken_files_are_left_to_their_reader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pt").write_bytes(content)
    check_pickle(tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt (was not written by torch|cannot be read as|is not)"):
        open_checkpoint(tmp_path / "w.pt")
