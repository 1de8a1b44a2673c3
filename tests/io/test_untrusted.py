"""Files that would take unlimited time or memory, or crash a library, are refused; usual ones are not."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tuneport.errors import CheckpointError, DataError
from tuneport.io import untrusted
from tuneport.io.checkpoint import open_checkpoint
from tuneport.io.untrusted import check_pickle, parse_json, pattern_steps, read_apart


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
        monkeypatch.setattr(untrusted, "MOST_OPERATIONS", 1000)
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


def test_json_is_parsed_unless_it_is_deep_or_has_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_json(b'{"a": [1, 2]}') == {"a": [1, 2]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    monkeypatch.setattr(untrusted, "MOST_VALUES", 10)
    with pytest.raises(ValueError, match="it has about 12 values, and at most 10 are read"):
        parse_json("[" + "0," * 11 + "0]")


@pytest.mark.parametrize(
    ("script", "words"),
    [("import os; os.abort()", "lib crashed with exit code -6"), ("raise ValueError('torn\\npage')", "page")],
)
def test_a_script_of_its_own_process_can_crash(tmp_path: Path, script: str, words: str) -> None:
    with pytest.raises(DataError, match=rf"cannot read .*x\.bin: {words}\.$"):
        read_apart(tmp_path / "x.bin", "lib", script)
    assert (
        read_apart(tmp_path / "x.bin", "lib", "print(sys.argv[1:])", "a")
        == f"[{str(tmp_path / 'x.bin')!r}, 'a']\n".encode()
    )


@pytest.mark.parametrize(
    ("pattern", "steps"),
    [("(q|v)_proj", 1.0), (".*q_proj", 201.0), ("(a*)*", float("inf")), ("(a|a)b", 2.0), ("(", 1.0)],
)
def test_steps_of_patterns(pattern: str, steps: float) -> None:
    assert pattern_steps(pattern) == steps
