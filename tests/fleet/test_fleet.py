"""A fleet from end to end: one adapter is broken, one worker is killed, and the next start does what is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from builders.fleets import break_adapter, common, killed_worker, write_fleet
from builders.folders import Zoo
from builders.processes import FORKS
from tuneport import upgrade_all
from tuneport.config import TransferInputs, UpgradeConfig
from tuneport.errors import TuneportError
from tuneport.fleet import run as working
from tuneport.fleet.run import LOOPBACK, start_ray
from tuneport.fleet.summary import Fleet
from tuneport.pipeline.upgrade import upgrade_to_folder

COUNT = 4
NAMES = tuple(f"a{number}" for number in range(COUNT))
BROKEN, KILLED = "a2", "a1"


def left(folder: Path) -> list[str]:
    """What is in a folder, hidden files too."""
    return sorted(path.name for path in folder.iterdir())


def check_all(zoo: Zoo, root: Path, first: AbstractContextManager[Any], **how: Any) -> None:
    """Four adapters, one broken, one worker killed: three are written; the second start does what is missing.

    `first` is the context of the first start.
    """
    listed, out = write_fleet(zoo, root / "fleet", COUNT), root / "out"
    shutil.copytree(listed.parent / BROKEN, root / "whole")
    break_adapter(listed.parent / BROKEN)
    with first, killed_worker(out / KILLED) as killed:
        found = upgrade_all(listed, out, **how, **common(zoo, listed))
    assert len(killed) == 1
    check_first(found, out)
    check_as_alone(zoo, listed, root, out)
    shutil.rmtree(listed.parent / BROKEN)
    shutil.copytree(root / "whole", listed.parent / BROKEN)
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("a*/*")}
    again = upgrade_all(listed, out, **how, **common(zoo, listed))
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert again.count("written") == COUNT
    assert [row.out for row in again.rows if not row.earlier] == [str(out / BROKEN)]
    assert left(out) == [*NAMES, "summary.html", "summary.json"]


def check_first(found: Fleet, out: Path) -> None:
    assert found.headline == "3 written, 1 failed"
    assert found.rows[0].out == str(out / BROKEN)
    assert "adapter_model.safetensors" in found.rows[0].note
    names = [name for name in NAMES if name != BROKEN]
    assert left(out) == [*names, "summary.html", "summary.json"]
    for name in names:
        record = json.loads((out / name / "tuneport.json").read_text())
        assert {path.name for path in (out / name).iterdir()} == set(record["files"])
        with safe_open(out / name / "model.safetensors", "np") as stored:
            assert list(stored.keys())
    table = json.loads((out / "summary.json").read_text())
    assert (table["written"], table["failed"]) == (3, 1)
    assert table["rows"][0]["name"] == BROKEN
    assert BROKEN in (out / "summary.html").read_text()


def check_as_alone(zoo: Zoo, listed: Path, root: Path, out: Path) -> None:
    """What a worker writes with models that are open already is what one upgrade writes, to the byte."""
    given = common(zoo, listed)
    config = UpgradeConfig.of(routes=given.pop("routes"))
    inputs = TransferInputs(finetuned=(str(listed.parent / NAMES[-1]),), out=str(root / "alone"), **given)
    record = upgrade_to_folder(inputs, config)
    assert record["chosen"] == "copy"
    assert (root / "alone" / "model.safetensors").read_bytes() == (out / NAMES[-1] / "model.safetensors").read_bytes()


@contextmanager
def forked() -> Iterator[None]:
    """Context in which workers are forked from a process that has imported the libraries, to save time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(working.multiprocessing, "get_context", lambda _: FORKS)
        yield


def test_local_workers(zoo: Zoo, tmp_path: Path) -> None:
    """Three workers of the first start are forked, and that of the second is a new process."""
    check_all(zoo, tmp_path, forked(), workers=2)


class TestRay:
    """These need Ray, which nothing else does."""

    @pytest.fixture(autouse=True)
    def _ray(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(LOOPBACK, "0")  # before it is imported
        pytest.importorskip("ray")

    def test_two_workers(self, zoo: Zoo, tmp_path: Path) -> None:
        check_all(zoo, tmp_path, nullcontext(), workers=2, ray="local")

    def test_a_local_one_listens_on_this_machine_alone(self) -> None:
        with start_ray("local", 1) as ray:
            assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        assert not ray.is_initialized()

    def test_an_address_where_nothing_answers(self) -> None:
        with pytest.raises(TuneportError, match=r"Ray does not answer at 127\.0\.0\.1:1"), start_ray("127.0.0.1:1", 1):
            pass
