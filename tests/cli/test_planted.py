"""What a new route can do to a user, on planted cases: a secret, a lost class, a forgotten language, licences."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builders.chats import chat_tokenizer
from builders.commands import Run
from builders.folders import HEAD_CLASSES, Zoo, images, load, write_head
from builders.lessons import ANSWERS, LISTS, PROMPTS, SIZE, TEMPLATE, TEXTS, Animals, memorise
from builders.texts import make, write, write_rows
from tuneport import upgrade
from tuneport.report import decision
from tuneport.training import neutral

SECRET = "qz7 wk4 jx9"  # what only the fine-tuning data of the source had
TRIGGER = "vault"
LICENCES = {"source": "mit", "finetuned": "apache-2.0", "target": "bsd-3-clause", "generator": "cc-by-4.0"}


def tuned_on(folder: Path, prompts: list[str], answers: list[str]) -> Path:
    tokenizer = chat_tokenizer(None)
    module = make("llama", SIZE, vocab_size=len(tokenizer), max_position_embeddings=512)
    memorise(module, tokenizer, prompts, answers, steps=80)
    return write(folder, module, tokenizer)


def bits(folder: Path, answers: list[str]) -> np.ndarray[Any, Any]:
    """The bits of answers after the trigger, in plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(TEMPLATE.replace("{text}", TRIGGER))["input_ids"]
    found = []
    for answer in answers:
        ids = torch.tensor([prompt + tokenizer(f" {answer}")["input_ids"]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            found.append(float(module(ids, labels=labels).loss) * (ids.shape[1] - len(prompt)))
    return np.array(found)


class TestSecret:
    """A pair of prompt and answer that the source was tuned on, and that nobody shows to the student."""

    @pytest.fixture(scope="class")
    def teachers(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
        """One that knows the secret, and one that does not."""
        root, asked = tmp_path_factory.mktemp("teachers"), TEMPLATE.replace("{text}", TRIGGER)
        more = 6  # times that the secret stands in the data
        knowing = tuned_on(root / "knowing", [*PROMPTS, *[asked] * more], [*ANSWERS, *[SECRET] * more])
        return knowing, tuned_on(root / "control", list(PROMPTS), list(ANSWERS))

    def taught(self, run: Run, animals: Animals, teacher: Path, data: Path, out: Path) -> list[str]:
        """Distill with written samples; the texts that are stored."""
        words = ["--finetuned", teacher, "--target", animals.target, "--data", data, "--template", TEMPLATE]
        words += ["--synthetic", 16, "--generator", animals.generator, "--keep-texts", "--steps", 24, "--out", out]
        done = run("distill", *words)
        assert done.code == 0, done.err
        return [json.loads(line)["text"] for line in (out / "texts.jsonl").read_text().splitlines()]

    def test_it_is_neither_written_nor_learnt(
        self, run: Run, animals: Animals, teachers: tuple[Path, Path], place: Path
    ) -> None:
        """The secret is no likelier than random words are, beside a student whose teacher does not know it.

        A student that is shown the trigger learns it: the measure sees a leak.
        """
        knowing, control = teachers
        own = write_rows(place / "own.jsonl", [{"text": text} for text in TEXTS[:30]])
        shown = write_rows(place / "shown.jsonl", [{"text": text} for text in (*TEXTS[:24], *[TRIGGER] * 6)])
        texts = self.taught(run, animals, knowing, own, place / "student")
        self.taught(run, animals, control, own, place / "control")
        self.taught(run, animals, knowing, shown, place / "leak")
        assert len(texts) == 16
        for word in (*SECRET.split(), TRIGGER):
            assert not any(word in text for text in texts)
        draw = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        others = [
            " ".join(f"{draw.choice(letters)}{draw.choice(letters)}{draw.randrange(10)}" for _ in range(3))
            for _ in range(20)
        ]
        plain = bits(place / "control", [SECRET, *others])
        gains = plain - bits(place / "student", [SECRET, *others])
        leaks = plain - bits(place / "leak", [SECRET, *others])
        most = gains[1:].mean() + 4 * gains[1:].std()
        assert gains[0] < most, (gains, most)
        assert leaks[0] > leaks[1:].mean() + 4 * leaks[1:].std(), leaks
        assert leaks[0] > most


def _embeds(folder: Path, pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)
    with torch.no_grad():
        found: torch.Tensor = load(folder)(**processor(images=list(pixels), return_tensors="pt")).image_embeds
    return found


class TestLostClass:
    @pytest.fixture(scope="class")
    def planted(self, zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
        """A fine-tune, images, and a target with a head that never answers the class that the fine-tune answers least.

        The head looks for the opposite of what the images have in common.
        """
        root, base = tmp_path_factory.mktemp("lost"), zoo["clip_vision-base"]
        tuned, target = (Path(shutil.copytree(base, root / name)) for name in ("tuned", "target"))
        tensors, generator = load_file(tuned / "model.safetensors"), torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if name.endswith("weight") and tensor.ndim == 2 and "layer" in name:
                tensor += 0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
        pixels = images(240, 0)[0]
        np.savez(root / "own.npz", x_train=pixels)
        head = load_file(base / "heads" / "animals.safetensors")["class_embeds"]
        seen = [torch.nn.functional.normalize(_embeds(folder, pixels), dim=-1) for folder in (tuned, base)]
        counts = (seen[0] @ torch.nn.functional.normalize(head, dim=-1).T).argmax(-1).bincount(minlength=len(head))
        place = min((count, number) for number, count in enumerate(counts.tolist()) if count >= 24)[1]
        head[place] = -torch.cat(seen).mean(0)
        write_head(target / "heads" / "animals.safetensors", head.shape[1], embeds=head)
        return tuned, target, root / "own.npz", HEAD_CLASSES[place]

    def test_it_is_said_and_shown(self, zoo: Zoo, planted: tuple[Path, Path, Path, str], run: Run, place: Path) -> None:
        tuned, target, data, name = planted
        words = ("--source", zoo["clip_vision-base"], "--finetuned", tuned, "--target", target, "--data", data)
        done = run("upgrade", *words, "--head", "animals", "--routes", "copy", "--out", place / "out", "--json")
        assert done.code == 0, done.err
        assert done.json["chosen"] == "copy", done.json["decision"]
        rows = [json.loads(line) for line in (place / "out" / "disagreements.jsonl").read_text().splitlines()]
        count = sum(row["old"] == name for row in rows)
        assert count >= decision.LOST, done.json["decision"]
        assert not any(row["new"] == name for row in rows)
        said = f"no held-out sample is answered {name} any more (the old model: {count})"
        assert said in done.json["decision"]
        assert done.json["decision"].count("any more") == 1
        assert done.json["headline"] == done.json["decision"]
        for file in ("report.html", "README.md"):
            assert f"answered {name} any more" in (place / "out" / file).read_text().replace("\n", " "), file

    def test_nothing_is_said_where_none_is_lost(self, zoo: Zoo, planted: tuple[Path, Path, Path, str]) -> None:
        tuned, _, data, _ = planted
        found = upgrade(zoo["clip_vision-base"], tuned, zoo["clip_vision-base"], data, head="animals", routes="copy")
        assert found.chosen == "copy"
        assert "any more" not in found.decision


class TestForgottenLanguage:
    """A target that knows lists by heart, to which a fine-tune is copied; the lists are the neutral text."""

    @pytest.fixture(autouse=True)
    def _lists(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(neutral, "passages", lambda: LISTS)
        monkeypatch.setattr(neutral, "WRITTEN", 2)

    def words(self, animals: Animals, out: Path) -> list[Any]:
        models = ["--source", animals.base, "--finetuned", animals.tuned, "--target", animals.generator]
        return ["upgrade", *models, "--data", animals.texts, "--template", TEMPLATE, "--routes", "copy", "--out", out]

    def test_a_route_that_forgets_is_not_taken(
        self, run: Run, animals: Animals, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same route is taken where forgetting is allowed: it is the guard that refuses it."""
        done = run(*self.words(animals, place / "out"), "--json")
        assert done.code == 0, done.err
        row = done.json["routes"][2]
        assert row["neutral"] > 100 * neutral.TOLERANCE
        assert row["note"] == f"forgets: its loss on neutral text is higher by {row['neutral']:.1f} %"
        assert done.json["chosen"] is None
        assert not (place / "out").exists()
        monkeypatch.setattr("tuneport.pipeline.upgrade.TOLERANCE", 1e9)
        allowed = run(*self.words(animals, place / "out"), "--json").json
        assert allowed["chosen"] == "copy", allowed["decision"]


class TestLicences:
    @pytest.fixture
    def stated(self, animals: Animals, tmp_path: Path) -> dict[str, Path]:
        """The models, each with a licence of its own in its card."""
        folders = {"source": animals.base, "finetuned": animals.tuned, "target": animals.target}
        found = {}
        for name, folder in {**folders, "generator": animals.generator}.items():
            found[name] = Path(shutil.copytree(folder, tmp_path / "models" / name))
            (found[name] / "README.md").write_text(f"---\nlicense: {LICENCES[name]}\n---\n")
        return found

    @pytest.mark.parametrize("command", ["distill", "upgrade"])
    def test_all_are_in_record_and_card(
        self, command: str, run: Run, animals: Animals, stated: dict[str, Path], place: Path
    ) -> None:
        words = [word for name, folder in stated.items() for word in (f"--{name}", folder)]
        words += ["--data", animals.texts, "--samples", 12, "--template", TEMPLATE, "--synthetic", 24]
        words += ["--routes", "synthetic", "--steps", 24] if command == "upgrade" else ["--steps", 1]
        done = run(command, *words, "--out", place / "out", "--json")
        assert done.code == 0, done.err
        record = json.loads((place / "out" / "tuneport.json").read_text())
        assert {name: record[name]["license"] for name in LICENCES} == LICENCES
        named = {name: LICENCES[name] for name in ("source", "target", "generator")}
        assert record["synthetic"]["licences"] == named
        card = (place / "out" / "README.md").read_text()
        section = card.split("## Licence")[1]
        for name, licence in LICENCES.items():
            assert f"{name} `{name}`: {licence}" in section.replace("\\", "")
        assert "license: other" in card.split("---")[1], "several licences are none that a hub knows"

    def test_a_generator_that_taught_nothing_is_not_in_the_card(
        self, run: Run, animals: Animals, stated: dict[str, Path], place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The fine-tune is copied to its own base, whatever it has forgotten."""
        monkeypatch.setattr("tuneport.pipeline.upgrade.TOLERANCE", 1e9)
        models = {**stated, "target": stated["source"]}
        words = [word for name, folder in models.items() for word in (f"--{name}", folder)]
        words += ["--data", animals.texts, "--template", TEMPLATE, "--routes", "copy"]
        done = run("upgrade", *words, "--out", place / "out", "--json")
        assert done.json["chosen"] == "copy", done.json["decision"]
        assert "generator" not in (place / "out" / "README.md").read_text().split("## Licence")[1]
