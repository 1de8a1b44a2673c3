"""Resuming: statistics are restored to the bit, and an interrupted run ends in the same files."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from builders.folders import Zoo
from builders.forwards import count_forwards
from builders.runs import Case, port, prepare
from tuneport.errors import CheckpointError
from tuneport.io.fingerprint import digest_of
from tuneport.io.state import FORMAT, StateFile
from tuneport.maps.statistics import CrossCovariance, Statistics, WeightGradient
from tuneport.methods import METHODS
from tuneport.runtime.passes import Passes
from tuneport.runtime.resume import Work, fingerprint, load_statistics, save_statistics

SAMPLES, BATCH = 24, 4
# what is resumed are statistics: one method of all that measure the same
MEASURED = {(each.signals, each.uses_augmented_inputs): name for name, each in METHODS.items() if each.signals}.values()
VOLATILE = ("seconds", "seconds_by_stage", "out")


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


ASKED = 2  # calls before anything is measured: the fine-tuned source and its base have answered


def stop_at(call: int, error: type[BaseException] = Killed) -> Callable[[int], None]:
    """A progress callback that raises at one of its calls."""
    calls = itertools.count(1)

    def progress(_: int) -> None:
        if next(calls) == call:
            raise error

    return progress


def some_statistics() -> Statistics:
    generator = torch.Generator().manual_seed(0)
    shared, alone = CrossCovariance(3, 4), CrossCovariance(2, 2)
    for covariance in (shared, alone):
        rows, columns = covariance.matrix.shape
        covariance.update(torch.randn(7, rows, generator=generator), torch.randn(7, columns, generator=generator))
    gradient = WeightGradient((4, 3))
    gradient.update(torch.randn(5, 2, 3, generator=generator), torch.randn(5, 2, 4, generator=generator))
    covariances = {("q", "input"): shared, ("k", "input"): shared, ("q", "output"): alone}
    return Statistics(covariances, {"q": gradient}, 12, {"forward": 3, "backward": 0})


class TestStatisticsOnDisk:
    def test_every_number_is_restored(self, tmp_path: Path) -> None:
        before = some_statistics()
        state = StateFile(tmp_path / "all.safetensors", {"seed": 0})
        save_statistics(state, before)
        after = load_statistics(state)
        assert after is not None
        assert list(after.covariances) == list(before.covariances)
        for key, saved in before.covariances.items():
            loaded = after.covariances[key]
            for part in ("matrix", "source_energy", "target_energy"):
                one, other = getattr(loaded, part), getattr(saved, part)
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            assert (loaded.tokens, loaded.signal_dtype) == (saved.tokens, saved.signal_dtype)
        assert after.covariances["q", "input"] is after.covariances["k", "input"], "a shared sum is shared again"
        assert after.covariances["q", "input"] is not after.covariances["q", "output"]
        for part in ("total", "votes", "bias_total", "bias_votes", "samples"):
            one, other = (getattr(found.weight_gradients["q"], part) for found in (after, before))
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        assert (after.samples, after.passes) == (12, {"forward": 3, "backward": 0})
        assert [file.name for file in tmp_path.iterdir()] == ["all.safetensors"]

    def test_kept_tokens_are_restored_in_their_batches(self, tmp_path: Path) -> None:
        before = CrossCovariance(40, 50)
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            before.update(torch.randn(3, 40, generator=generator), torch.randn(3, 50, generator=generator))
        state = StateFile(tmp_path / "all.safetensors", {})
        save_statistics(state, Statistics({("q", "input"): before}))
        found = load_statistics(state)
        assert found is not None
        after = found.covariances["q", "input"]
        assert before.rows is not None
        assert after.rows is not None
        assert [[part.dtype for part in pair] for pair in after.rows] == [[torch.float32] * 2] * 2
        for loaded, saved in zip(after.rows, before.rows, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(loaded, saved, strict=True))

    def test_a_damaged_file_gives_one_error(self, tmp_path: Path) -> None:
        file, stated = tmp_path / "all.safetensors", {"format": FORMAT}
        values = {"covariances": [{"tokens": 1}], "keys": [], "gradients": {}, "samples": 1}
        for text in (
            "[" * 10**5,
            "[]",
            json.dumps({"conditions": {}, "values": values}),
            json.dumps({"values": values}),
        ):
            tensors = {"x": torch.ones(1), "content": torch.tensor(list(text.encode()), dtype=torch.uint8)}
            summed = {**stated, "sha256": digest_of(FORMAT, tensors)}
            for held, metadata in (({"x": torch.ones(1)}, summed), (tensors, {}), (tensors, stated), (tensors, summed)):
                save_file(held, file, metadata)
                with pytest.raises(CheckpointError, match="Start over without `resume`"):
                    load_statistics(StateFile(file, {}))

    @pytest.mark.parametrize(
        "change", ["sums zeroed", "a bit of a sum", "passes raised", "a key dropped", "a condition"]
    )
    def test_a_file_that_was_changed_by_hand_is_refused(self, tmp_path: Path, change: str) -> None:
        work = Work(tmp_path / "out", {"seed": 0})
        save_statistics(work.state("all"), some_statistics())
        file = work.folder / "all.safetensors"
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        content = json.loads(bytes(tensors["content"].tolist()))
        if change == "sums zeroed":
            sums = (name for name in tensors if name != "content")
            tensors |= {name: torch.zeros_like(tensors[name]) for name in sums}
        elif change == "a bit of a sum":
            name = next(name for name, tensor in tensors.items() if tensor.numel() > 1 and name != "content")
            tensors[name].view(torch.uint8)[-1] ^= 1
        elif change == "passes raised":
            content["values"]["passes"]["forward"] += 1
        elif change == "a key dropped":
            content["values"]["keys"].pop()
        else:
            content["conditions"]["seed"] = 1
        tensors["content"] = torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)
        save_file(tensors, file, metadata)
        work = Work(tmp_path / "out", content["conditions"])
        for use in (work.check, lambda: load_statistics(work.state("all"))):
            with pytest.raises(CheckpointError, match=r"all\.safetensors is damaged\. Start over without `resume`"):
                use()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestWork:
    def test_conditions_must_be_the_same(self, tmp_path: Path) -> None:
        work = Work(tmp_path / "out", {"options": {"seed": 0, "samples": 8}, "method": "bico"}, every=0)
        save_statistics(work.state("all"), some_statistics())
        assert names(tmp_path) == [".out.tuneport-work"]
        work.check()
        other = Work(tmp_path / "out", {"options": {"seed": 1, "samples": 8}, "method": "bico"})
        with pytest.raises(CheckpointError) as caught:
            other.check()
        assert str(caught.value) == (
            f"{work.folder / 'all.safetensors'} cannot be resumed: options.seed was 0 and is 1. "
            "Give the same inputs and options, or start over without `resume`."
        )
        assert fingerprint(work.conditions) != fingerprint(other.conditions)
        work.remove()
        assert names(tmp_path) == []
        other.check()

    def test_an_incomplete_save_is_not_read(self, tmp_path: Path) -> None:
        work = Work(tmp_path / "out", {"seed": 0}, every=0)
        work.folder.mkdir()
        (work.folder / ".all.tmp-05f11ab9.safetensors").write_bytes(b"half a header")
        assert not work.exists()
        work.check()
        save_statistics(work.state("all"), some_statistics())
        assert names(work.folder) == ["all.safetensors"], "the next save removes it"
        work.check()

    def test_saving_takes_a_tenth_of_the_time_at_most(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now, saved = [0.0], []

        def save(*_: Any) -> None:
            saved.append(now[0])
            now[0] += 20  # a slow disk

        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        monkeypatch.setattr(StateFile, "_save", save)
        state = replace(Work(tmp_path / "out", {}, every=60).state("all"), _last=0.0)
        while now[0] < 600:
            now[0] += 1
            if state.due:
                save_statistics(state, Statistics())
        assert saved[0] == 60
        assert saved[1] == 60 + 20 + 200

    def test_a_symbolic_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / ".out.tuneport-work").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="is a symbolic link, and tuneport does not write to it"):
            Work(tmp_path / "out", {}, every=0).state("all")
        assert names(tmp_path / "elsewhere") == []


def job_of(zoo: Zoo, **options: Any) -> Case:
    given = {"samples": SAMPLES, "batch_size": BATCH, **options}
    return prepare(*zoo.trio("clip_vision"), zoo.data, **given)


def record_of(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "tuneport.json").read_text())
    return {key: value for key, value in record.items() if key not in VOLATILE}


def assert_same_output(one: Path, other: Path) -> None:
    assert names(one) == names(other)
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert record_of(one) == record_of(other)


@pytest.fixture(scope="module")
def job(zoo: Zoo) -> Case:
    return job_of(zoo)


@pytest.fixture(scope="module")
def again(zoo: Zoo) -> Case:
    """The same job, as another process would prepare it."""
    return job_of(zoo)


@pytest.fixture(scope="module")
def other(zoo: Zoo) -> Case:
    """A job with other samples."""
    return job_of(zoo, seed=1)


@pytest.fixture(scope="module")
def methods_jobs(zoo: Zoo) -> list[Case]:
    """A job for any method, prepared twice: two models of one architecture."""
    base, signals = zoo["clip_vision-base"], frozenset().union(*(method.signals for method in METHODS.values()))
    given: dict[str, Any] = {"signals": signals, "samples": SAMPLES // 2, "batch_size": BATCH}
    return [prepare(base, zoo["clip_vision-tuned"], base, zoo.data, **given) for _ in range(2)]


@pytest.fixture(scope="module")
def whole(job: Case, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """A scale, and the output of a run that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    port(job, out, scale=request.param)
    return request.param, out


class TestPort:
    @pytest.mark.parametrize(("whole", "after"), [(1.0, 1), (1.0, 5), ("auto", 3), ("auto", 6)], indirect=["whole"])
    def test_an_interrupted_run_continues(self, job: Case, again: Case, tmp_path: Path, whole: Any, after: int) -> None:
        (scale, wanted), out = whole, tmp_path / "out"
        with pytest.raises(Killed):
            port(job, out, scale=scale, save_every=0, progress=stop_at(ASKED + after))
        assert names(tmp_path) == ([".out.tuneport-work"] if after > 1 else [])
        notes: list[str] = []
        done: list[int] = []
        port(again, out, scale=scale, resume=True, progress=done.append, note=notes.append)
        assert notes[0] == (
            "continuing what an earlier run has saved" if after > 1 else "nothing to resume: starting over"
        )
        assert [note.partition(" is right on ")[0] for note in notes[1:]] == ["the fine-tuned source"]
        # asked, measured once, and then scored at each candidate if the scale is chosen
        scored = 0 if scale == 1 else len(record_of(out)["scale_choice"]["candidates"])
        assert sum(done) == (ASKED + 1 + scored) * SAMPLES
        assert names(tmp_path) == ["out"]
        assert_same_output(out, wanted)

    def test_other_groups_of_layers_are_measured_again(
        self, job: Case, again: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pairs = job.plan.pairs
        port(job, tmp_path / "whole", scale=1)

        def divide(cut: int) -> None:
            passes = Passes((pairs[:cut], pairs[cut:]))
            monkeypatch.setattr("tuneport.pipeline.transfer.passes_of", lambda *_, **__: passes)

        out = tmp_path / "out"
        divide(5)
        with pytest.raises(Killed):
            port(job, out, scale=1, save_every=0, progress=stop_at(ASKED + 8))
        divide(3)
        port(again, out, scale=1, resume=True)
        assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()

    @pytest.mark.parametrize("method", MEASURED)
    def test_all_that_methods_measure(self, methods_jobs: list[Case], tmp_path: Path, method: str) -> None:
        first, second = methods_jobs
        port(first, tmp_path / "whole", scale=1, method=method)
        with pytest.raises(Killed):
            port(first, tmp_path / "out", scale=1, method=method, save_every=0, progress=stop_at(ASKED + 3))
        port(second, tmp_path / "out", scale=1, method=method, resume=True)
        assert_same_output(tmp_path / "out", tmp_path / "whole")

    def test_other_options_are_refused_and_a_new_start_gives_a_note(
        self, job: Case, again: Case, other: Case, tmp_path: Path
    ) -> None:
        notes: list[str] = []
        out = tmp_path / "out"
        with pytest.raises(KeyboardInterrupt):
            port(
                job,
                out,
                scale=1,
                save_every=0,
                progress=stop_at(ASKED + 3, KeyboardInterrupt),
                note=notes.append,
            )
        assert notes[1:] == ["what was measured is kept; the same call with `resume=True` continues from it"]
        with pytest.raises(CheckpointError, match=r"cannot be resumed: options.seed was 0 and is 1, data.indices was "):
            port(other, out, scale=1, resume=True)
        with pytest.raises(CheckpointError, match=r"cannot be resumed: scale was 1.0 and is 0.5\."):
            port(again, out, scale=0.5, resume=True)
        assert names(tmp_path) == [".out.tuneport-work"]
        notes.clear()
        port(again, out, scale=1, note=notes.append)
        assert len(notes) == 2
        assert "is dropped; `resume=True` continues from it" in notes[0]
        assert names(tmp_path) == ["out"]

    def test_another_head_in_the_same_file_is_refused(self, zoo: Zoo, tmp_path: Path) -> None:
        head, out = tmp_path / "head.json", tmp_path / "out"

        def described(dog: str) -> Case:
            head.write_text(json.dumps({"cat": "a cat", "dog": dog, "owl": "an owl"}))
            given = {"samples": SAMPLES, "batch_size": BATCH, "head": str(head), "accept_unlikely": True}
            return prepare(*zoo.trio("clip"), zoo.data, signals="bico", **given)

        with pytest.raises(Killed):
            port(described("a dog"), out, scale=1, save_every=0, progress=stop_at(ASKED + 3))
        with pytest.raises(CheckpointError, match="cannot be resumed: head was"):
            port(described("a photo of an owl"), out, scale=1, resume=True)
        port(described("a dog"), out, scale=1, resume=True)

    @pytest.mark.parametrize(("kind", "given"), [("model", {}), ("adapter", {"rank": 2}), ("task-vector", {})])
    def test_a_complete_output_is_not_computed_again(
        self, job: Case, again: Case, other: Case, tmp_path: Path, kind: str, given: dict[str, Any]
    ) -> None:
        out = tmp_path / ("tau.safetensors" if kind == "task-vector" else "out")
        first = port(job, out, scale=1, as_=kind, **given)
        notes: list[str] = []
        with count_forwards() as ran:
            second = port(again, out, scale=1, as_=kind, resume=True, note=notes.append, **given)
        assert ran == []
        assert json.dumps(second) == json.dumps(first)
        assert notes == [f"{out} was complete already"]
        with pytest.raises(CheckpointError, match="exists already"):
            port(other, out, scale=1, as_=kind, resume=True, **given)


def command(zoo: Zoo, out: Path, *more: str) -> list[str]:
    source, finetuned, target = map(str, zoo.trio("clip_vision"))
    words = ["--source", source, "--finetuned", finetuned, "--target", target, "--data", str(zoo.data)]
    words += ["--samples", "48", "--batch-size", "2", "--save-every", "0", "--out", str(out), *more]
    return ["transfer", "--scale=1", *words]


KILLED = """
import os, signal, sys
from tuneport import cli
place, last = sys.argv.pop(1), int(sys.argv.pop(1))
seen = 0
def count(event, given):
    global seen
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(given[0]).startswith(place):
        seen += 1
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
try:
    cli.main()
finally:
    print(seen)
"""


@pytest.mark.slow
def test_killed_runs(zoo: Zoo, tmp_path: Path) -> None:
    """Five runs killed before a random change in the folder of the output; tools/kill_test.py does hundreds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    place = tmp_path / "place"
    place.mkdir()

    def start(last: int, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", KILLED, str(place), str(last), *command(zoo, out, *more)]
        return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)

    whole = start(0, place / "whole")
    assert whole.returncode == 0, whole.stderr
    changes = int(whole.stdout.splitlines()[-1])
    assert changes > 48 // 2, "every batch is saved"
    for number, last in enumerate(random.Random(0).sample(range(1, changes + 1), 5)):
        out = place / f"out{number}"
        assert start(last, out).returncode == -signal.SIGKILL, last
        if out.exists():
            assert load_file(out / "model.safetensors")
        again = start(0, out, "--resume")
        assert again.returncode == 0, again.stderr
        assert_same_output(out, place / "whole")
    assert not [name for name in names(place) if name.startswith(".")]
