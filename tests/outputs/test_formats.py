"""A format of outputs is a class, a function that reads it back and a line of `FORMATS`; nothing else knows them."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from builders.commands import Run, assert_refused, options
from builders.folders import Zoo
from builders.numbers_format import NUMBERS, NumbersOutput, read_numbers
from tuneport.io.checkpoint import open_checkpoint
from tuneport.task_vectors.vector import TaskVector, load_task_vector
from tuneport.types import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NumbersOutput.name, NUMBERS)


@pytest.fixture
def vector(run: Run, zoo: Zoo, tmp_path: Path) -> Path:
    """A fine-tune as a task vector."""
    out = tmp_path / "vector.safetensors"
    assert run("merge", zoo["vit-tuned"], "--base", zoo["vit-base"], "--out", out).code == 0
    return out


@pytest.fixture
def numbers(run: Run, zoo: Zoo, tmp_path: Path) -> Path:
    """The same change in the new format."""
    out = tmp_path / "numbers.json"
    assert run("merge", zoo["vit-tuned"], "--base", zoo["vit-base"], "--as", "numbers", "--out", out).code == 0
    return out


def change_in(path: Path) -> TaskVector:
    found = read_numbers(path)
    assert found is not None
    assert isinstance(found.change, TaskVector)
    return found.change


@pytest.mark.usefixtures("registered")
class TestNewFormat:
    def test_a_transfer_is_written_named_and_read_again(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        out = tmp_path / "change.json"
        words = [*options(zoo, "vit", scale=2, samples=12), "--head-fit", "none", "--as", "numbers", "--out", out]
        done = run("transfer", *words, "--evaluate")
        assert done.code == 0, done.err
        assert done.out.startswith(f"written to {out}: lists of numbers for {zoo['vit-target'].name}; ")
        assert "report:" not in done.out, "one file has no report beside it"
        record = NumbersOutput().read_record(out)
        assert (record["as"], record["options"]["as"]) == ("numbers", "numbers")
        [line] = [line.removeprefix("next: ") for line in done.out.splitlines() if line.startswith("next: ")]
        found = run(*shlex.split(line)[1:], "--json")
        assert found.code == 0, found.err
        assert found.json["accuracy"] == record["evaluation"]["after"]
        again = run("transfer", *words, "--evaluate", "--resume")
        assert again.code == 0, again.err
        assert f"{out} was complete already" in again.err

    def test_a_complete_output_is_opened_again_to_score_it(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        out = tmp_path / "change.json"
        words = [*options(zoo, "vit", scale=2, samples=12), "--head-fit", "none", "--as", "numbers", "--out", out]
        assert run("transfer", *words, "--no-evaluate").code == 0
        before = NumbersOutput().read_record(out)
        assert "evaluation" not in before
        done = run("transfer", *words, "--evaluate", "--resume", "--json")
        assert done.code == 0, done.err
        found = run("evaluate", out, "--data", zoo.data, "--json").json["accuracy"]
        assert done.json["evaluation"]["after"] == found
        assert NumbersOutput().read_record(out) == done.json
        assert done.json["seconds"] == before["seconds"], "nothing was measured again"

    def test_fine_tunes_are_merged_into_it(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        out, same = tmp_path / "merged.json", tmp_path / "merged.safetensors"
        words = ["merge", zoo["vit-tuned"], zoo["vit-tuned"], "--weights", "1,0.5", "--base", zoo["vit-base"], "--out"]
        assert run(*words, same).code == 0
        done = run(*words, out, "--as", "numbers")
        assert done.code == 0, done.err
        vector, wanted = change_in(out), load_task_vector(same)
        assert set(vector) == set(wanted)
        assert all(torch.equal(vector.dense(name), wanted.dense(name)) for name in wanted)
        assert any(wanted.dense(name).any() for name in wanted)

    def test_wrong_words_are_refused_before_any_work(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        words = ["transfer", *options(zoo, "vit"), "--out", tmp_path / "change.txt", "--as"]
        assert_refused(run(*words, "numbers"), 1, "must end in .json")
        assert_refused(run(*words, "number"), 2, "unknown as 'number'. Did you mean 'numbers'?", *FORMATS)
        assert_refused(run(*words, "numbers", "--rank", 2), 2, "they go with --as adapter")
        fitted = ["transfer", *options(zoo, "vit"), "--out", tmp_path / "change.json", "--as", "numbers"]
        assert_refused(run(*fitted), 1, "lists of numbers hold no fitted head")

    def test_what_is_written_is_a_fine_tune(self, run: Run, zoo: Zoo, numbers: Path, tmp_path: Path) -> None:
        merged, again = tmp_path / "merged.json", tmp_path / "again.safetensors"
        assert run("merge", numbers, numbers, "--weights", "1,0.5", "--as", "numbers", "--out", merged).code == 0
        done = run("merge", merged, numbers, "--weights", "1,-1", "--out", again, "--json")
        assert done.code == 0, done.err
        digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (merged, numbers)]
        assert [part["sha256"] for part in done.json["finetuned"]] == [
            {"merged.json": digests[0]},
            {"numbers.json": digests[1]},
        ]
        once, half = change_in(numbers), load_task_vector(again)
        assert set(half) == set(once)
        assert all(torch.allclose(half.dense(name), 0.5 * once.dense(name), atol=1e-7) for name in once)
        other = run("merge", numbers, "--base", zoo["vit-target"], "--out", tmp_path / "other.safetensors")
        assert_refused(other, 1, "is no fine-tune of")

    def test_it_is_applied_as_the_same_task_vector_is(
        self, run: Run, zoo: Zoo, numbers: Path, vector: Path, tmp_path: Path
    ) -> None:
        outs = [tmp_path / "of-numbers", tmp_path / "of-vector"]
        for change, out in zip((numbers, vector), outs, strict=True):
            done = run("apply", change, zoo["vit-base"], "--out", out)
            assert done.code == 0, done.err
        found, wanted = (open_checkpoint(out) for out in outs)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_it_is_moved_as_the_same_task_vector_is(
        self, run: Run, zoo: Zoo, numbers: Path, vector: Path, tmp_path: Path
    ) -> None:
        outs = [tmp_path / "of-numbers.safetensors", tmp_path / "of-vector.safetensors"]
        for change, out in zip((numbers, vector), outs, strict=True):
            words = options(zoo, "vit", finetuned=change, scale=2, samples=12, out=out)
            done = run("transfer", *words, "--head-fit", "none", "--as", "task-vector", "--json")
            assert done.code == 0, done.err
            assert list(done.json["finetuned"]["sha256"]) == [change.name]
        found, wanted = map(load_task_vector, outs)
        assert any(wanted.dense(name).any() for name in wanted)
        assert all(torch.equal(found.dense(name), wanted.dense(name)) for name in wanted)

    def test_another_base_is_refused(self, run: Run, zoo: Zoo, numbers: Path, tmp_path: Path) -> None:
        words = options(zoo, "vit", finetuned=numbers, source=zoo["vit-target"], out=tmp_path / "out")
        assert_refused(run("transfer", *words), 1, "was made for other weights than those of")

    def test_a_change_is_not_extracted(self, run: Run, zoo: Zoo, numbers: Path, vector: Path, tmp_path: Path) -> None:
        for change in (numbers, vector):
            done = run("extract", zoo["vit-base"], change, "--out", tmp_path / "out.safetensors")
            assert_refused(done, 1, f"{change} is a change of a model already")

    def test_foreign_and_damaged_files_are_refused(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        given = tmp_path / "given.json"
        for text, reason in {'{"a": 1}': "is not a weight file", '{"numbers": 3}': "is damaged"}.items():
            given.write_text(text)
            done = run("merge", given, "--base", zoo["vit-base"], "--out", tmp_path / "out.safetensors")
            assert_refused(done, 1, f"{given} {reason}")


def test_the_help_names_every_format() -> None:
    program = """
import sys
from tuneport.types import FORMATS, Format
FORMATS["numbers"] = Format("nowhere:NumbersOutput", "numbers", ".json")
from tuneport.cli import main
sys.argv = ["tuneport", sys.argv[1], "--help"]
main()
"""
    for command in ("transfer", "upgrade", "merge"):
        done = subprocess.run([sys.executable, "-c", program, command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{', '.join(FORMATS)} or numbers." in " ".join(done.stdout.split()), done.stdout
