"""Outputs: whole or absent, locked, and every error text."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuneport.cli import stopped_by_signals
from tuneport.errors import CheckpointError
from tuneport.io.checkpoint import write_checkpoint
from tuneport.io.output import RECORD, check_new, claimed, new_file, new_folder

HAS_DEV_FULL = Path("/dev/full").is_char_device()


def error_of(work: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        work()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_new_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out.v1"
    with new_folder(out) as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(".out.tmp-")
        assert not out.exists()
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        (folder / "link").symlink_to("nowhere")
    assert (out / "sub" / "file").read_text() == "x"
    assert list(tmp_path.iterdir()) == [out]
    reference = tmp_path / "reference"
    reference.mkdir()
    assert out.stat().st_mode == reference.stat().st_mode


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1), FileNotFoundError(2, "x")])
@pytest.mark.parametrize("overwrite", [False, True])
def test_new_folder_leaves_nothing_after_an_error(tmp_path: Path, error: BaseException, overwrite: bool) -> None:
    out = tmp_path / "out"
    if overwrite:
        out.mkdir()
        (out / RECORD).write_text("old")

    def work() -> None:
        with new_folder(out, overwrite=overwrite) as folder:
            (folder / "file").write_text("x")
            raise error

    with pytest.raises(type(error)) as caught:
        work()
    assert caught.value is error
    assert [path.name for path in tmp_path.rglob("*")] == (["out", RECORD] if overwrite else [])


def test_existing_output_is_refused_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / RECORD).write_text("old")

    def work() -> None:
        with new_folder(out):
            pytest.fail("work was done")

    expected = f"{out} exists already. Choose another name or pass `overwrite=True`."
    assert error_of(work) == expected
    assert error_of(lambda: check_new(out)) == expected
    assert (out / RECORD).read_text() == "old"


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / RECORD).write_text("old")
    with new_folder(out, overwrite=True) as folder:
        assert (out / RECORD).exists()
        (folder / "new").write_text("new")
    assert [path.name for path in out.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(("call", "content"), [(1, "old"), (2, "new")])
def test_an_interrupt_between_the_renames_leaves_one_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, content: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "x").write_text("old")
    rename, calls = os.rename, []

    def interrupted(*names: Path) -> None:
        rename(*names)
        calls.append(names)
        if len(calls) == call:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(out, overwrite=True, marks=["x"]) as folder:
        (folder / "x").write_text("new")
    assert (out / "x").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_overwrite_restores_the_old_folder_when_the_swap_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / RECORD).write_text("old")
    rename = os.rename

    def failing(one: Path, other: Path) -> None:
        if ".tmp-" in Path(one).name:
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(one, other)

    monkeypatch.setattr(os, "rename", failing)

    def work() -> None:
        with new_folder(out, overwrite=True) as folder:
            (folder / "new").write_text("new")

    assert error_of(work).startswith(f"{out} cannot be written: the disk is full.")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", RECORD]


def test_overwrite_reports_an_old_folder_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    remove = shutil.rmtree

    def failing(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.EBUSY, "busy")
        remove(path, ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", failing)

    def work() -> None:
        with new_folder(out, overwrite=True) as folder:
            (folder / "new").write_text("new")

    text = error_of(work)
    assert text.startswith(f"{out} is written, but the folder that it replaced could not be removed (")
    assert (out / "new").read_text() == "new"


def test_overwrite_refuses_links_and_other_types(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("keep")
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(precious)
    file.write_text("keep")
    for open_new, kind in ((new_folder, "folder"), (new_file, "file")):

        def work(out: Path, open_new: Any = open_new) -> None:
            with open_new(out, overwrite=True):
                pytest.fail("work was done")

        expected = f"{link} is a symbolic link and is not overwritten. Give the {kind} itself."
        assert error_of(lambda work=work: work(link)) == expected
        wrong = file if kind == "folder" else precious
        assert error_of(lambda work=work, wrong=wrong: work(wrong)) == (
            f"{wrong} is not a {kind} and is not overwritten by one. Choose another name."
        )
    assert (precious / "file").read_text() == file.read_text() == "keep"

    out = tmp_path / "out"
    out.mkdir()
    (out / RECORD).write_text("old")
    (out / "inner").symlink_to(precious)
    with new_folder(out, overwrite=True):
        pass
    assert (precious / "file").read_text() == "keep"


def test_output_created_during_the_run_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work() -> None:
        with new_folder(out):
            out.mkdir()

    assert error_of(work) == f"{out} was created by another program and is kept. Choose another name."
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("name", [".", "..", "/", "", "sub/.."])
def test_output_must_have_a_name(name: str) -> None:
    assert "does not name a new folder" in error_of(lambda: check_new(name, overwrite=True))


def test_missing_folders_above_an_output_are_made(tmp_path: Path) -> None:
    out = tmp_path / "no" / "such" / "out"
    check_new(out)
    assert list(tmp_path.iterdir()) == [], "a check makes nothing"
    with pytest.raises(ZeroDivisionError), new_folder(out):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [], "an error leaves nothing"
    with new_folder(out) as folder:
        (folder / "x").write_text("")
    assert (out / "x").is_file()


def test_a_file_above_an_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no").write_text("")
    out = tmp_path / "no" / "such" / "out"
    expected = f"{out} cannot be written: {tmp_path / 'no'} is not a folder. Choose another place."
    assert error_of(lambda: check_new(out)) == expected

    def work() -> None:
        with new_folder(out):
            pytest.fail("work was done")

    assert error_of(work) == expected


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that not even root can write to")
def test_unwritable_parent() -> None:
    assert error_of(lambda: check_new("/proc/out")).startswith("/proc/out cannot be written: ")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EROFS, "the file system is read-only. Choose another place."),
        (errno.EACCES, "permission denied. Choose a place that you may write to."),
        (errno.ENOSPC, "the disk is full. Free some space or choose another place."),
    ],
)
def test_disk_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str) -> None:
    out = tmp_path / "out"

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    def work() -> None:
        with new_folder(out) as folder:
            (folder / "file").write_text("x")
            monkeypatch.setattr(os, "fsync", refuse)

    assert error_of(work) == f"{out} cannot be written: {reason}"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert error_of(lambda: check_new(out)) == f"{out} cannot be written: {reason}"


@pytest.mark.skipif(not HAS_DEV_FULL, reason="needs /dev/full")
def test_full_disk(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def work() -> None:
        with new_folder(out) as folder:
            # A link, so that nothing can ever be renamed over the device itself.
            (folder / "model.safetensors").symlink_to("/dev/full")
            write_checkpoint(folder, {"w": torch.ones(100_000)})

    expected = f"{out} cannot be written: the disk is full. Free some space or choose another place."
    assert error_of(work) == expected
    assert list(tmp_path.iterdir()) == []
    assert Path("/dev/full").is_char_device()


def test_errors_about_other_files_pass_through(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), new_folder(tmp_path / "sub"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/input")


def test_free_space_and_inputs_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    check_new(out, needed_bytes=1)
    text = error_of(lambda: check_new(out, needed_bytes=10**18))
    assert text.startswith(f"{out} needs about 931322574.62 GiB, but only ")
    assert text.endswith(f"iB are free in {tmp_path}. Free some space or choose another place.")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1024))
        text = error_of(lambda: check_new(out, needed_bytes=2048))
    assert f"{out} needs about 2.00 KiB, but only 1.00 KiB are free in {tmp_path}." in text
    text = error_of(lambda: check_new(tmp_path / "tau.safetensors", suffix=".safetensors", needed_bytes=10**18))
    assert text.startswith(f"{tmp_path / 'tau.safetensors'} needs about 931322574.62 GiB, but only ")
    (out / "model").mkdir(parents=True)
    (out / RECORD).write_text("old")
    check_new(out, overwrite=True, inputs=[tmp_path / "other"])
    for given in (out, out / "model"):
        assert error_of(lambda given=given: check_new(out, overwrite=True, inputs=[given])) == (
            f"{out} cannot be overwritten: it holds the input {given}. Choose another name."
        )


def test_overwrite_replaces_outputs_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_new(out, overwrite=True)
    (out / "thesis.txt").write_text("mine")

    def work() -> None:
        with new_folder(out, overwrite=True):
            pytest.fail("work was done")

    expected = (
        f"{out} is not overwritten: it is not empty, and not an output of this command (no tuneport.json in it). "
        "Remove it by hand or choose another name."
    )
    assert error_of(work) == expected
    assert error_of(lambda: check_new(out, overwrite=True)) == expected
    (out / RECORD).write_text("{}")
    check_new(out, overwrite=True)
    text = error_of(lambda: check_new(out, overwrite=True, marks=["a/results.json", "b/results.json"]))
    assert "(no a/results.json in it)" in text
    assert (out / "thesis.txt").read_text() == "mine"


def test_nothing_is_written_into_an_input(tmp_path: Path) -> None:
    given, link = tmp_path / "images", tmp_path / "link"
    (given / "train" / "cat").mkdir(parents=True)
    link.symlink_to(given)
    for out in (given / "new", given / "train", given / "train" / "cat", link / "train"):
        for suffix in ("", ".safetensors") if not out.exists() else ("",):
            check = partial(check_new, out, overwrite=True, inputs=[given], suffix=suffix)
            assert error_of(check) == (
                f"{out} cannot be written: it is inside the input {given}. Choose another place."
            )


def test_a_file_behind_a_link_in_an_input_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "shared.safetensors"
    out.write_text("weights")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(out)
    text = error_of(lambda: check_new(out, overwrite=True, suffix=".safetensors", inputs=[tmp_path / "model"]))
    assert text.startswith(f"{out} cannot be overwritten: it holds the input ")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere file names are Unicode")
def test_a_name_that_is_not_unicode_is_refused_first(tmp_path: Path) -> None:
    out = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.safetensors"))
    for suffix in ("", ".safetensors"):
        assert error_of(partial(check_new, out, suffix=suffix)) == (
            f"{tmp_path}/caf\\xe9.safetensors has a byte that is not UTF-8, as a run record needs. Choose another name."
        )


def test_new_file(tmp_path: Path) -> None:
    out = tmp_path / "tau.safetensors"
    with new_file(out) as temporary:
        assert temporary.suffix == ".safetensors"
        temporary.write_text("one")
        assert not out.exists()
    assert out.read_text() == "one"

    def refused() -> None:
        with new_file(out):
            pytest.fail("work was done")

    assert error_of(refused) == f"{out} exists already. Choose another name or pass `overwrite=True`."

    def interrupted() -> None:
        with new_file(out, overwrite=True) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert out.read_text() == "one"
    with new_file(out, overwrite=True) as temporary:
        temporary.write_text("two")
    assert out.read_text() == "two"
    assert list(tmp_path.iterdir()) == [out]


class TestClaims:
    def test_second_run_is_refused(self, tmp_path: Path) -> None:
        """Another process holds the output: one clear line, and nothing of it is touched."""
        out = tmp_path / "out"
        program = (
            "import sys, time\nfrom tuneport.io.output import new_folder\n"
            "with new_folder(sys.argv[1]) as folder:\n"
            "    (folder / 'file').write_text('first run')\n    print('ready', flush=True)\n    sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", program, str(out)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"

            def work() -> None:
                with new_folder(tmp_path / "." / "out", overwrite=True):
                    pytest.fail("work was done")

            text = error_of(work)
            other.communicate()
        expected = f"another run (process {other.pid}) is writing {out}. Wait until it ends, or choose another name."
        assert text == expected
        assert (out / "file").read_text() == "first run"
        assert list(tmp_path.iterdir()) == [out]

    def test_leftovers_of_a_killed_run_are_removed(self, tmp_path: Path) -> None:
        out = tmp_path / "out.d"
        program = (
            "import os, sys\nfrom tuneport.io.output import new_folder\n"
            "with new_folder(sys.argv[1], overwrite=True) as folder:\n"
            "    (folder / 'half').write_text('x')\n    os.kill(os.getpid(), 9)\n"
        )
        for _ in range(2):
            subprocess.run([sys.executable, "-c", program, str(out)], check=False)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert ".out.d.tuneport-lock" in names
        assert len(names) == 2, "the second run has cleared what the first left"
        bystanders = [tmp_path / name for name in (".out.tmp-12345678", ".out.tmp-1234.d", ".other.tmp-12345678.d")]
        for path in (
            *bystanders,
            tmp_path / ".out.try-12345678.d",
        ):  # the last: it was killed while it checked the place
            path.mkdir()
        with new_folder(out):
            pass
        assert sorted(tmp_path.iterdir()) == sorted([out, *bystanders])

    def test_old_output_of_an_interrupted_swap_is_restored(self, tmp_path: Path) -> None:
        old = tmp_path / ".out.old-0123abcd"
        old.mkdir()
        (old / "precious").write_text("mine")

        def work() -> None:
            with new_folder(tmp_path / "out"):
                pytest.fail("work was done")

        assert error_of(work) == f"{tmp_path / 'out'} exists already. Choose another name or pass `overwrite=True`."
        assert (tmp_path / "out" / "precious").read_text() == "mine"

    def test_threads_and_nested_claims(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        found: list[str] = []

        def elsewhere() -> None:
            try:
                with claimed(out):
                    found.append("claimed")
            except CheckpointError as error:
                found.append(str(error))

        with claimed(out), claimed(out):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        assert found == [
            f"another run (process {os.getpid()}) is writing {out}. Wait until it ends, or choose another name."
        ]
        elsewhere()
        assert found[1:] == ["claimed"]
        assert list(tmp_path.iterdir()) == []

    def test_a_lock_on_a_file_that_was_just_removed_protects_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last holder removes the file after it is opened and before it is locked: a new file is locked."""
        out, file = tmp_path / "out", tmp_path / ".out.tuneport-lock"
        flock, calls = fcntl.flock, []

        def late(descriptor: int, operation: int) -> None:
            calls.append(operation)
            if len(calls) == 1:
                file.unlink()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        with claimed(out), file.open() as other, pytest.raises(BlockingIOError):
            flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert list(tmp_path.iterdir()) == []

    def test_without_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with claimed(tmp_path / "missing" / "out"):
            pass
        (tmp_path / ".out.tuneport-lock").symlink_to(tmp_path / "victim")
        with claimed(tmp_path / "out"):
            pass
        assert not (tmp_path / "victim").exists(), "a link in the lock's place is not followed"
        assert not (tmp_path / "missing").exists()

        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refuse)
        with new_folder(tmp_path / "other"):
            pass
        assert (tmp_path / "other").is_dir()

    def test_lock_file_removed_by_its_last_holder_is_created_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last holder removes the file between opening and locking: the lock is taken again on a new file."""
        out, file = tmp_path / "out", tmp_path / ".out.tuneport-lock"
        flock, calls = fcntl.flock, []

        def late(descriptor: int, operation: int) -> None:
            calls.append(operation)
            if len(calls) == 1:
                file.unlink()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        with claimed(out):
            assert len(calls) == 2
            with file.open() as other, pytest.raises(BlockingIOError):
                flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("moment", ["flock", "unlink"])
    def test_a_signal_while_the_lock_is_taken_or_removed_leaves_no_file(
        self, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python runs the handler of a signal right after the system call in which it arrived."""
        place = fcntl if moment == "flock" else Path
        whole, sent = getattr(place, moment), []

        def interrupted(*given: Any, **options: Any) -> None:
            if moment == "flock":
                whole(*given, **options)
            sent.append(moment)
            signal.raise_signal(signal.SIGTERM)
            if moment == "unlink":
                whole(*given, **options)

        def claim() -> None:
            with stopped_by_signals(), claimed(tmp_path / "out"):
                assert moment == "unlink"

        with monkeypatch.context() as patch:
            patch.setattr(place, moment, interrupted)
            with pytest.raises(KeyboardInterrupt):
                claim()
        assert sent
        assert list(tmp_path.iterdir()) == []
        with claimed(tmp_path / "out"):  # and it is not held any more
            pass
