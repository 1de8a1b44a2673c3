"""Two gloo processes give what one process gives, by the command line, with its defaults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from builders.chats import chat_tokenizer
from builders.classifiers import write_classifier
from builders.commands import options
from builders.folders import SMALL, Zoo, build
from builders.lessons import ANSWERS, PROMPTS, TEMPLATE, Animals, memorise
from builders.loras import adapted, saved
from builders.processes import run_ranks
from tuneport.io.output import RECORD

# several commands in processes that meet once
TOGETHER = """
import json, sys
import torch
from builders.exams import shorten_exams
from tuneport import cli
from tuneport.processes import processes
torch.set_num_threads(1)
shorten_exams()
with processes("cpu"):
    for words in json.loads(sys.argv[1]):
        sys.argv = ["tuneport", *words]
        try:
            cli.main()
        except SystemExit as left:
            assert not left.code, words
"""

# a command in which one process dies after some saves of sums, texts or states of a training
DYING = """
import os, signal, sys
import torch
from builders.exams import shorten_exams
from tuneport import cli
from tuneport.io.state import StateFile
torch.set_num_threads(1)
shorten_exams()
_, dying, left, *words = sys.argv
left = int(left)

def dying_after(save):
    def dies(*given):
        global left
        save(*given)
        left -= 1
        if not left and os.environ["RANK"] == dying:
            os.kill(os.getpid(), signal.SIGKILL)
    return dies

StateFile.save = dying_after(StateFile.save)
sys.argv = ["tuneport", *words]
cli.main()
"""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def commands(zoo: Zoo, animals: Animals, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Commands by name, without their output."""
    place = tmp_path_factory.mktemp("processes")
    source, tuned, target, rows = write_classifier(place / "classifier")
    classifier = ["--source", source, "--finetuned", tuned, "--target", target, "--data", rows]
    from transformers import AutoModelForCausalLM

    adapter = adapted(AutoModelForCausalLM.from_pretrained(animals.base), target_modules=["q_proj", "down_proj"])
    memorise(adapter, chat_tokenizer(None), PROMPTS, ANSWERS, steps=90)
    lora = saved(adapter, place / "lora")
    llama = ["--source", animals.base, "--finetuned", lora, "--target", animals.target, "--data", animals.texts]
    clip, twin = options(zoo, samples=None), build("clip_vision", replace(SMALL, seed=5), place / "twin")
    lesson = ["--finetuned", animals.tuned, "--target", animals.target, "--template", TEMPLATE, "--data", animals.texts]
    asked = [*llama, "--template", TEMPLATE, "--generator", animals.generator, "--synthetic", 8, "--keep-texts"]
    asked += ["--routes", "copy,port,synthetic"]
    lesson += ["--samples", 24, "--synthetic", 8, "--generator", animals.generator]
    found: dict[str, list[Any]] = {
        "clip": ["transfer", *clip, "--batch-size", "8"],
        "plus": ["transfer", *options(zoo, samples=8), "--method", "bico+", "--scale", "1"],
        "votes": ["transfer", *options(zoo, samples=8, target=twin), "--method", "gradfix", "--scale", "1"],
        "classifier": ["transfer", *classifier, "--samples", 24, "--batch-size", "8"],
        "lesson": ["distill", *lesson, "--steps", 8, "--lora", 4, "--batch-size", 20, "--keep-texts"],
        "upgraded": ["upgrade", *asked, "--steps", 4, "--batch-size", "8"],
        "upgraded classifier": ["upgrade", *classifier, "--samples", 40, "--steps", 4, "--batch-size", "8"],
        "llama": ["transfer", *llama, "--as", "adapter", "--rank", "4", "--batch-size", "8"],
    }
    return {name: [str(word) for word in words] for name, words in found.items()}


@pytest.fixture(scope="module")
def both(commands: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of what one and of what two processes wrote."""
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    for count, place in ((1, one), (2, two)):
        given = [[*words, "--out", str(place / name)] for name, words in commands.items()]
        for done in run_ranks(TOGETHER, count, json.dumps(given)):
            assert done.code == 0, done.err
    return one, two


@pytest.mark.parametrize("name", ["clip", "plus", "votes", "classifier", "llama"])
def test_a_transfer_with_the_defaults_is_the_same(both: tuple[Path, Path], name: str) -> None:
    """Scores have the same bits given the same weights. Sums of signals in float64 have another order.

    As in tests/runtime/test_distributed.py, 1e-6 leaves a factor of 1e9 for the condition of the maps.
    """
    one, two = (record(folder / name) for folder in both)
    for key in ("scale", "samples", "passes", "outcome", "head", "sanity"):
        assert two.get(key) == one.get(key), key
    rows = [each.get("accuracies", []) for each in (one, two)]
    assert [row["value"] for row in rows[1]] == pytest.approx([row["value"] for row in rows[0]], rel=1e-6)
    losses = [[each["loss"] for each in found.get("scale_choice", {}).get("candidates", ())] for found in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert bool(losses[0]) == (name in ("clip", "classifier", "llama"))
    assert one["layers"]
    for first, second in zip(one["layers"], two["layers"], strict=True):
        numbers = {key for key, value in first.items() if isinstance(value, float)}
        assert {key: second[key] for key in numbers} == pytest.approx({key: first[key] for key in numbers}, rel=1e-6)
        assert {key: second[key] for key in second.keys() - numbers} == {
            key: first[key] for key in first.keys() - numbers
        }
    tensors = [weights(folder / name) for folder in both]
    assert tensors[0].keys() == tensors[1].keys()
    for key, tensor in tensors[0].items():
        # a head is fitted to features in float32, whose last places follow from those of the weights
        bound = 1e-4 if key.startswith("classifier") else 1e-6
        assert float((tensors[1][key] - tensor).norm()) <= bound * float(tensor.norm()), key


def test_a_distillation_is_the_same(both: tuple[Path, Path]) -> None:
    """8 steps of 20 texts, in two passes of 16 at most; sums of float32 gradients have another order."""
    one, two = (record(folder / "lesson") for folder in both)
    assert two["distilled"]["steps"] == 8
    curves = [each["distilled"]["curve"] for each in (one, two)]
    assert [mark["step"] for mark in curves[0]] == [0, 2, 4, 6, 8]
    for first, second in zip(*curves, strict=True):
        known = {key: value for key, value in first.items() if value is not None}
        assert {key: second[key] for key in known} == pytest.approx(known, rel=1e-5)
    assert two["distilled"]["best"] == one["distilled"]["best"] > 0
    assert curves[0][-1]["loss"] < 0.9 * curves[0][1]["loss"], "it learns"


@pytest.mark.parametrize(("name", "chosen"), [("upgraded", "synthetic"), ("upgraded classifier", "distill")])
def test_an_upgrade_is_the_same(both: tuple[Path, Path], name: str, chosen: str) -> None:
    """The same table of routes and the same choice; bounds are those of a transfer and of a distillation."""
    one, two = (record(folder / name) for folder in both)
    assert two["chosen"] == one["chosen"] == chosen
    assert two["scale"] == one["scale"]
    taught = ["synthetic"] if name == "upgraded" else ["distill", "synthetic"]
    assert [row["name"] for row in one["routes"]] == ["old", "target", "copy", "port", *taught]
    for first, second in zip(one["routes"], two["routes"], strict=True):
        assert second["neutral"] == (first["neutral"] and pytest.approx(first["neutral"], abs=1e-3))  # rounded
        for key in first.keys() - {"neutral", "seconds"}:
            assert second[key] == first[key], key
    tensors = [weights(folder / name) for folder in both]
    assert tensors[0].keys() == tensors[1].keys()
    for key, tensor in tensors[0].items():
        assert float((tensors[1][key] - tensor).norm()) <= 1e-4 * float(tensor.norm()), key
    shown = [(folder / name / "disagreements.jsonl").read_bytes() for folder in both]
    assert shown[0] == shown[1]


@pytest.mark.parametrize("name", ["lesson", "upgraded"])
def test_written_texts_have_the_same_bytes(both: tuple[Path, Path], name: str) -> None:
    one, two = ((folder / name / "texts.jsonl").read_bytes() for folder in both)
    assert one.count(b"\n") == 8
    assert two == one


@pytest.mark.parametrize(("name", "deaths"), [("clip", {"1": "2"}), ("lesson", {"0": "1", "1": "3"})])
def test_either_process_is_killed_and_the_run_resumed(
    both: tuple[Path, Path], commands: dict[str, list[str]], tmp_path: Path, name: str, deaths: dict[str, str]
) -> None:
    """One dies after two batches of a transfer, one after texts are written, and one after three steps."""
    words = [*commands[name], "--out", str(tmp_path / "out"), "--save-every", "0", "--resume"]
    for dying, saves in deaths.items():
        done = run_ranks(DYING, 2, dying, saves, *words)
        left = done[1 - int(dying)]
        assert done[int(dying)].code == -9
        assert left.code == 1, left.err
        assert left.out == ""
        said = [line for line in left.err.splitlines() if not line.startswith("note: ")]
        assert len(said) == 1, left.err
        assert "another process of this run has ended" in said[0]
        assert "--resume" in said[0]
        assert not (tmp_path / "out").exists()
    for finished in run_ranks(DYING, 2, "none", "0", *words):
        assert finished.code == 0, finished.err
    expected = both[1] / name
    files = [path.name for path in expected.iterdir() if path.suffix in (".safetensors", ".jsonl")]
    assert files
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (expected / file).read_bytes(), file
    curves = [record(place).get("distilled", {}).get("curve") for place in (expected, tmp_path / "out")]
    assert curves[0] == curves[1]
    assert not list(tmp_path.glob(".*"))
