"""`tuneport distill` and `tuneport transfer --distill`: outputs, resuming, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders.commands import Run, assert_refused
from builders.folders import Zoo
from tuneport.report.summary import repeat_command
from tuneport.training.distill import _Run


def options(zoo: Zoo, *more: Any) -> list[Any]:
    names = {"--source": "base", "--finetuned": "tuned", "--target": "target"}
    models = [word for name, part in names.items() for word in (name, zoo[f"clip_vision-{part}"])]
    return ["transfer", *models, "--data", zoo.data, "--samples", 16, "--scale", 1, "--distill", 4, *more]


def alone(zoo: Zoo, *more: Any) -> list[Any]:
    models = ["--finetuned", zoo["clip_vision-tuned"], "--target", zoo["clip_vision-target"]]
    return ["distill", *models, "--data", zoo.data, "--samples", 16, "--steps", 4, *more]


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


class TestTransfer:
    def test_the_record_the_card_and_the_report_say_it(self, run: Run, zoo: Zoo, place: Path) -> None:
        done = run(*options(zoo, "--evaluate", "--json", "--out", place / "out"))
        assert done.code == 0, done.err
        entry = done.json["distilled"]
        assert (entry["teacher"], entry["steps"], entry["samples"]) == ("clip_vision-tuned", 4, 16)
        card, page = ((place / "out" / name).read_text() for name in ("README.md", "report.html"))
        assert "4 steps of all linear layers on 16 unlabelled samples" in card
        assert (entry["held_out"], entry["folds"], entry["again"]) == (16, 2, 4)
        assert "; each half judged what the other half taught, and both then taught it, for 4 steps" in card
        said = "both together were nearer to the teacher, so all samples taught this model for 4 steps"
        assert f"After step 4 {said}" in " ".join(card.split())
        assert "was kept: that after step" not in card, "the model that is written has no held-out samples"
        assert "taught two students, each one half of 16 unlabelled samples" in " ".join(page.split())
        assert "so all samples taught this model for 4 steps" in " ".join(page.split())
        assert "without training" not in card
        seconds = rf"{done.json['seconds']:.1f} s to port, {entry['seconds']:.1f} s to distill"
        assert f"| time | {seconds} |" in card, "the time of both"
        assert "Agreement with the teacher" in page
        assert "--distill 4" in page

    def test_an_adapter_is_a_lora_of_its_rank(self, run: Run, zoo: Zoo, place: Path) -> None:
        done = run(*options(zoo, "--as", "adapter", "--rank", 2, "--json", "--out", place / "out"))
        assert done.code == 0, done.err
        assert done.json["distilled"]["lora"] == 2
        assert {module["rank"] for module in done.json["adapter"]["modules"]} == {2}
        assert {module["lost_energy"] for module in done.json["adapter"]["modules"]} == {0.0}

    def test_an_adapter_without_a_rank_is_refused(self, run: Run, zoo: Zoo, place: Path) -> None:
        refused = run(*options(zoo, "--as", "adapter", "--energy", 1, "--out", place / "out"))
        assert_refused(refused, 2, "a distilled adapter is a LoRA of one rank: pass --rank R")


@pytest.mark.parametrize("command", [options, alone])
def test_a_killed_run_is_resumed(
    run: Run, zoo: Zoo, place: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    """An interrupt after a saved step stands for the kill; tools/kill_test.py kills for real."""
    words = command(zoo, "--save-every", 0, "--out", place / "out")
    assert run(*words[:-1], place / "whole").code == 0
    save = _Run.save

    def interrupted(self: Any, step: int, *more: Any) -> None:
        save(self, step, *more)
        if step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_Run, "save", interrupted)
        assert run(*words).code == 130
    assert not (place / "out").exists()
    assert_refused(run(*words, "--seed", 3, "--resume"), 1)
    done = run(*words, "--resume", "--json")
    assert done.code == 0, done.err
    assert weights(place / "out") == weights(place / "whole")
    assert sorted(path.name for path in place.iterdir()) == ["out", "whole"]


class TestAlone:
    def test_the_output_is_a_model(self, run: Run, zoo: Zoo, place: Path) -> None:
        done = run(*alone(zoo, "--out", place / "out"))
        assert done.code == 0, done.err
        assert "by clip_vision-tuned: 4 steps of all linear layers on 16 unlabelled samples" in done.out
        command = done.out.splitlines()[-1].removeprefix("next: tuneport ").split()
        assert run(*command).code == 0
        page = (place / "out" / "report.html").read_text()
        assert "tuneport distill --finetuned" in page

    def test_the_command_of_the_report_repeats_it(self, run: Run, zoo: Zoo, place: Path) -> None:
        done = run(*alone(zoo, "--batch-size", 5, "--json", "--out", place / "out"))
        assert done.json["distilled"]["batch_size"] == 5
        words = repeat_command(done.json)
        assert words is not None
        first = weights(place / "out")
        assert run(*words.split()[1:], "--overwrite").code == 0
        assert weights(place / "out") == first

    def test_inputs_are_not_replaced(self, run: Run, zoo: Zoo) -> None:
        words = alone(zoo, "--overwrite", "--out", zoo["clip_vision-target"])
        assert_refused(run(*words), 1, "clip_vision-target")

    def test_data_of_another_kind(self, run: Run, zoo: Zoo, place: Path) -> None:
        (place / "texts.jsonl").write_text('{"text": "a"}\n' * 20)
        words = alone(zoo, "--out", place / "out")
        words[words.index("--data") + 1] = place / "texts.jsonl"
        assert_refused(run(*words), 1, "holds texts, but", "reads images")
