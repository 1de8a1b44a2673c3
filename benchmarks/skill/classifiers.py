"""Classifiers of texts on small encoders, by plain transformers, peft and torch: fine-tune them, score them.

MiniLM-L6 is fine-tuned as a sequence classifier, all weights or a LoRA; targets are encoders without a head. What
tuneport writes is a folder that plain transformers loads; nothing of tuneport is imported here.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.skill.ablations import of
from benchmarks.skill.cells import NEUTRAL_FILE, SMALL, Cell, Schedule
from benchmarks.skill.place import Place, fast_products
from benchmarks.skill.routes import Inputs, scores_by_route, take_classifier
from benchmarks.skill.scores import overlap_of_written, percent

SOURCE, TARGETS = "minilm-l6", ("mpnet", "gte-small", "minilm-l3")
CLASSES = {
    "trec6": ("description", "entity", "abbreviation", "person", "place", "number"),
    "sst2": ("negative", "positive"),
    "subj": ("subjective", "objective"),
}
FILES = {"trec6": "trec6", "sst2": "sst2_stsa", "subj": "subj"}
KINDS = ("full", "lora")  # of the old model
GRID = {f"{SOURCE}>{target}": tuple(f"{task}-{kind}" for task in FILES for kind in KINDS) for target in TARGETS}
ARMS = (
    "old",
    "all-data",
    "target@100",
    "few-shot@100",
    "port@100",
    "distill@100",
    "extra@100",
    "synthetic@20",
    "upgrade@100",
)
TESTS, VALIDATION = 2000, 300
EXTRA, WORDS = 1000, (5, 40)  # sentences of the Brown corpus, and how long they are
GENERATOR = "gemma3-270m"  # the language model that writes sentences, among the encoders
LENGTH = 128  # tokens of a text
ROWS = 256  # texts of one pass
WARM_UP = 0.1
OLD = {"full": Schedule(200, 1e-4, 32), "lora": Schedule(200, 1e-3, 32)}
FEW_SHOT = tuple(Schedule(steps, rate, 32) for rate in (5e-5, 2e-4) for steps in (30, 90, 300))

Labelled = list[tuple[str, int]]


@dataclass(frozen=True)
class Texts:
    """Labelled texts of a task."""

    train: Labelled
    validation: Labelled
    test: Labelled

    def draw(self, number: int, count: int) -> Labelled:
        """The first texts of a fixed order of the training texts: a smaller draw is part of a larger one."""
        return random.Random(number).sample(self.train, len(self.train))[:count]


def missing(models: Path, shared: Path, pairs: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """What must be there and is not, in words."""
    names = dict.fromkeys(name for pair in pairs for name in pair.split(">"))
    found = [f"model {models / name}" for name in names if not (models / name / "config.json").is_file()]
    files = dict.fromkeys([_file(shared, _split(task)[0]) for task in tasks] + [shared / NEUTRAL_FILE])
    return found + [f"data {file}" for file in files if not file.is_file()]


@lru_cache
def read(shared: Path, task: str, small: bool = False) -> Texts:
    """Read the texts of a task; test texts are held out where the file has no such split."""
    with gzip.open(_file(shared, task), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    parts: dict[str, Labelled] = {}
    for row in rows:
        parts.setdefault(row["split"], []).append((row["text"], row["label"]))
    for part in parts.values():
        random.Random(0).shuffle(part)
    train = parts["train"] if "train" in parts else parts["all"]
    if "test" not in parts:
        parts["test"], train = train[:TESTS], train[TESTS:]
    if "dev" not in parts:
        parts["dev"], train = train[:VALIDATION], train[VALIDATION:]
    found = Texts(train, parts["dev"][:VALIDATION], parts["test"][:TESTS])
    return Texts(found.train[: 6 * SMALL], found.validation[:SMALL], found.test[:SMALL]) if small else found


@lru_cache
def sentences(shared: Path) -> list[str]:
    """Sentences of ordinary English, which are of no task."""
    with gzip.open(shared / NEUTRAL_FILE, "rt", encoding="utf-8") as file:
        lines = [" ".join(line.split()) for line in file]
    fitting = [line for line in dict.fromkeys(lines) if WORDS[0] <= len(line.split()) <= WORDS[1]]
    return random.Random(0).sample(fitting, min(EXTRA, len(fitting)))


def _file(shared: Path, task: str) -> Path:
    return shared / f"data/text/{FILES[task]}.jsonl.gz"


def _split(name: str) -> tuple[str, str]:
    """The data and the kind of the old model of a task."""
    task, _, kind = name.rpartition("-")
    return task, kind


class Classifier:
    """A sequence classifier of transformers: of an encoder, with a new head, or one that is written."""

    def __init__(self, folder: Path, task: str, device: str, seed: int = 0) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        names = dict(enumerate(CLASSES[task]))
        labels = {name: index for index, name in names.items()}
        torch.manual_seed(seed)  # of a new head
        self.device = torch.device(device)
        module = AutoModelForSequenceClassification.from_pretrained(
            folder, id2label=names, label2id=labels, dtype=torch.float32
        )
        self.module: Any = module.to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, texts: Sequence[str]) -> Any:
        options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        return self.tokenizer(list(texts), **options).to(self.device)

    def train(self, texts: Labelled, schedule: Schedule, seed: int = 0) -> None:
        """Train what can be trained: all weights, or a LoRA and the head."""
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        optimizer, chance = torch.optim.AdamW(trained, lr=schedule.rate), random.Random(seed)
        self.module.train()
        with fast_products():
            for step in range(schedule.steps):
                share = min((step + 1) / (WARM_UP * schedule.steps), 1.0) * (1 - step / schedule.steps)
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate * share
                rows = chance.sample(texts, min(schedule.batch, len(texts)))
                labels = torch.tensor([label for _, label in rows], device=self.device)
                loss = self.module(**self.encode([text for text, _ in rows]), labels=labels).loss
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
        self.module.eval()

    @torch.inference_mode()
    def right(self, texts: Labelled) -> list[bool]:
        """Of each text, whether its class is found."""
        found: list[int] = []
        for start in range(0, len(texts), ROWS):
            part = self.encode([text for text, _ in texts[start : start + ROWS]])
            found += self.module(**part).logits.argmax(-1).tolist()
        return [one == other for one, (_, other) in zip(found, texts, strict=True)]

    def with_lora(self) -> None:
        """Train a LoRA on queries and values in place of all weights."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
        self.module = get_peft_model(self.module, config)


def make_old(place: Place, source: str, task: str) -> dict[str, Any]:
    """Fine-tune the source on all training texts, or find it; return its scores."""
    data, kind = _split(task)

    def made(folder: Path) -> dict[str, Any]:
        texts, started, schedule = read(place.shared, data, place.small), place.start(), place.schedule(OLD[kind])
        model = Classifier(_base(place, source), data, place.device)
        if kind == "lora":
            model.with_lora()
        model.train(texts.train, schedule)
        model.module.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
        return _scores(model.right(texts.test)) | place.spent(started) | {"about": {"schedule": asdict(schedule)}}

    return place.kept(_old(source, task), made)


def _old(source: str, task: str) -> str:
    return f"old-{source}-{task}"


def _base(place: Place, source: str) -> Path:
    """The source with a pooler: the files of the encoder have none, and an adapter would not save the one it reads."""
    from transformers import AutoModel, AutoTokenizer

    def made(folder: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        AutoModel.from_pretrained(place.models / source, dtype=torch.float32).save_pretrained(folder)
        AutoTokenizer.from_pretrained(place.models / source).save_pretrained(folder)
        return {}

    place.kept(f"base-{source}", made)
    return place.folder(f"base-{source}")


def make(place: Place, cell: Cell) -> dict[str, Any]:
    """Make the classifier of an arm and return its scores; what does not depend on the old model is made once."""
    data, _ = _split(cell.task)
    draw = "" if cell.draw is None else f"-{cell.draw}"
    if cell.arm in ("all-data", "few-shot"):
        train = _all_data if cell.arm == "all-data" else _few_shot
        return place.kept(f"{cell.target}-{data}-{cell.label.replace('@', '-')}{draw}", lambda _: train(place, cell))
    if cell.arm == "target":
        return _target(place, cell)
    folder = place.empty_folder(cell.name)
    found = _taken(place, cell, folder)

    def score(path: Path) -> dict[str, Any]:
        return _scores(Classifier(path, data, place.device).right(read(place.shared, data, place.small).test))

    found |= scores_by_route(cell, folder, found["about"], score)
    found |= overlap_of_written(folder, [text for text, _ in read(place.shared, data, place.small).test])
    if not folder.exists():  # the upgrade advises against every route
        return {**_target(place, Cell(cell.pair, cell.task, "target", cell.n, cell.draw)), **found}
    return {**score(folder), **found}


def _target(place: Place, cell: Cell) -> dict[str, Any]:
    """The target as it is, with the head that is fitted to the old model's answers."""
    data, _ = _split(cell.task)

    def made(folder: Path) -> dict[str, Any]:
        found = _taken(place, cell, folder)
        right = Classifier(folder, data, place.device).right(read(place.shared, data, place.small).test)
        return {**_scores(right), **found}

    return place.kept(cell.name, made)


def _taken(place: Place, cell: Cell, folder: Path) -> dict[str, Any]:
    """Let tuneport make the classifier from texts without labels."""
    data, _ = _split(cell.task)
    drawn = [text for text, _ in read(place.shared, data, place.small).draw(cell.draw or 0, cell.n or 0)]
    paths = _base(place, cell.source), place.folder(_old(cell.source, cell.task)), place.models / cell.target
    own, more = _write(folder.with_name(f"{folder.name}.jsonl"), drawn), None
    if cell.arm in ("extra", "upgrade"):
        more = _write(folder.with_name(f"{folder.name}.extra.jsonl"), sentences(place.shared))
    elif (ablation := of(cell.arm)).arm == "synthetic":
        more = place.models / (ablation.generator or GENERATOR)
    started, inputs = place.start(), Inputs(*paths, place.device, place.dtype)
    about = take_classifier(cell, own, len(drawn), more, inputs, folder, place.steps)
    return {**place.spent(started), "about": about}


def _write(path: Path, texts: Sequence[str]) -> Path:
    """Write texts without labels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _all_data(place: Place, cell: Cell) -> dict[str, Any]:
    data, _ = _split(cell.task)
    texts, started, schedule = read(place.shared, data, place.small), place.start(), place.schedule(OLD["full"])
    model = Classifier(place.models / cell.target, data, place.device)
    model.train(texts.train, schedule)
    about = {"schedule": asdict(schedule), "samples": len(texts.train)}
    return {**_scores(model.right(texts.test)), **place.spent(started), "about": about}


def _few_shot(place: Place, cell: Cell) -> dict[str, Any]:
    """Train on the labelled texts of the draw; the best of some schedules on validation texts."""
    data, _ = _split(cell.task)
    texts, started, draw = read(place.shared, data, place.small), place.start(), cell.draw or 0
    tried: list[tuple[float, Schedule, list[bool]]] = []
    for schedule in map(place.schedule, FEW_SHOT):
        model = Classifier(place.models / cell.target, data, place.device, draw)
        model.train(texts.draw(draw, cell.n or 0), schedule, draw)
        tried.append((percent(model.right(texts.validation)), schedule, model.right(texts.test)))
    _, schedule, right = max(tried, key=lambda each: each[0])
    about = {"schedule": asdict(schedule), "validation": [round(each[0], 4) for each in tried]}
    return {**_scores(right), **place.spent(started), "about": about}


def _scores(right: list[bool]) -> dict[str, Any]:
    return {"scores": {"accuracy": round(percent(right), 4)}, "right": right, "tests": len(right)}
