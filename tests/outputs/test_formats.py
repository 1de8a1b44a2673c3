"""A format of outputs is a class and a line of `FORMATS`; nothing else knows the formats."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from builders.commands import Run, assert_refused, options
from builders.folders import Zoo
from builders.numbers_format import NUMBERS, NumbersOutput
from tuneport.task_vectors.vector import TaskVector, load_task_vector
from tuneport.types import FORMATS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NumbersOutput.name, NUMBERS)


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
        stated = NumbersOutput().stated(out)
        assert stated is not None
        vector, wanted = stated[0], load_task_vector(same)
        assert isinstance(vector, TaskVector)
        assert set(vector) == set(wanted)
        assert all(torch.equal(vector.dense(name), wanted.dense(name)) for name in wanted)
        assert any(wanted.dense(name).any() for name in wanted)

    def test_wrong_words_are_refused_before_any_work(self, run: Run, zoo: Zoo, tmp_path: Path) -> None:
        words = ["transfer", *options(zoo, "vit"), "--out", tmp_path / "change.txt", "--as"]
        assert_refused(run(*words, "numbers"), 1, "must end in .json")
        assert_refused(run(*words, "number"), 2, "unknown as 'number'. Did you mean 'numbers'?", "model, numbers, task")
        assert_refused(run(*words, "numbers", "--rank", 2), 2, "they go with --as adapter")


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
        assert "model, adapter, task-vector or numbers." in " ".join(done.stdout.split()), done.stdout
