"""Claim: a trained classifier arrives on another encoder as a whole model, from unlabelled sentences alone.

Fine-tunes MiniLM-L6 as a sequence classifier (all weights, or a LoRA on queries and values), ports it to other encoders
with N sentences and no label, writes the result, and scores it in a process that imports transformers and peft only.
Next to it, with the same sentences: (a) a linear probe on the bare target, with their labels; (b) the head that is
fitted to the fine-tuned source on the target as it is; (c) few-shot fine-tuning with their labels; (d) the target
fine-tuned on the whole training split. Rates and steps of (c) are chosen on validation data. Distilled is the port
after 300 steps with the fine-tuned source as the teacher, on the same sentences and without labels.

    python benchmarks/claims/classifiers.py --encoders ENCODERS --data SHARED/data/text --out benchmarks/results

Rows are added to OUT/classifiers.json, so that a run can be divided (--tasks, --targets, --kinds, --draws) and resumed;
OUT/classifiers.md is the table of all rows that are there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tuneport.data.dataset import Dataset
from tuneport.data.samplers import select
from tuneport.data.tasks import TASKS
from tuneport.measure.accuracy import linear_probe
from tuneport.models.open import open_model, pick_device
from tuneport.pipeline.prepare import SCORED, prepare
from tuneport.pipeline.result import Result
from tuneport.pipeline.transfer import run

FILES = {"trec6": "trec6.jsonl.gz", "sst2": "sst2_stsa.jsonl.gz", "subj": "subj.jsonl.gz"}
SOURCE = "minilm-l6"
TARGETS = ("minilm-l3", "gte-small", "mpnet")
KINDS = ("lora", "full")
COLUMNS = {
    "source": "fine-tuned source",
    "port": "ported with head",
    "port_auto": "the same, scale auto",
    "distilled": "and distilled",
    "probe": "(a) probe, labels",
    "head": "(b) head alone",
    "few": "(c) few-shot, labels",
    "target": "(d) fine-tuned target",
}
STEPS, BATCH, LENGTH = 200, 32, 64
RATES = {"full": 1e-4, "lora": 1e-3}
FEW = [(rate, steps) for rate in (5e-5, 2e-4) for steps in (30, 90)]

CHILD = """
import json, sys, torch, transformers
outputs, base, texts, device = json.loads(sys.argv[1]), sys.argv[2], json.load(open(sys.argv[3])), sys.argv[4]
kind, answers = transformers.AutoModelForSequenceClassification, {}
tokenizer = transformers.AutoTokenizer.from_pretrained(base)
for folder, adapts in outputs.items():
    if adapts:
        from peft import PeftModel
        base_model = kind.from_pretrained(base, num_labels=int(sys.argv[5]), dtype=torch.float32)
        model = PeftModel.from_pretrained(base_model, folder)
    else:
        model = kind.from_pretrained(folder)
    model, found = model.to(device).eval(), []
    with torch.no_grad():
        for start in range(0, len(texts), 256):
            part = texts[start : start + 256]
            part = tokenizer(part, padding=True, truncation=True, max_length=512, return_tensors="pt")
            found += model(**part.to(device)).logits.argmax(-1).tolist()
    answers[folder] = found
assert "tuneport" not in sys.modules
print(json.dumps(answers))
"""


def read_splits(task: str, folder: Path, most: int) -> dict[str, Dataset]:
    """Training, validation and test samples; at most 300 of the validation split and `most` of the test split."""
    random, found = np.random.default_rng(0), {}
    for split, limit in (("train", 10**9), ("validation", 300), ("test", most)):
        data = TASKS[task].read(folder / FILES[task], split)
        found[split] = data.subset(np.sort(random.permutation(len(data))[:limit]))
    return found


class Trainer:
    """Plain AdamW on a classifier of transformers."""

    def __init__(self, folder: Path, classes: Sequence[str], device: torch.device) -> None:
        names = dict(enumerate(classes))
        labels = {name: index for index, name in names.items()}
        torch.manual_seed(0)
        found = AutoModelForSequenceClassification.from_pretrained(
            folder, id2label=names, label2id=labels, dtype=torch.float32
        )
        self.module, self.device = found.to(device), device
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, texts: Sequence[str]) -> Any:
        options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        return self.tokenizer(list(texts), **options).to(self.device)

    def train(self, data: Dataset, rate: float, steps: int, seed: int = 0) -> None:
        assert data.labels is not None
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        optimizer, random = torch.optim.AdamW(trained, lr=rate), np.random.default_rng(seed)
        self.module.train()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(10 * (step + 1) / steps, 1.0) * (1 - step / steps)
            rows = random.choice(len(data), min(BATCH, len(data)), replace=False)
            labels = torch.as_tensor(data.labels[rows], device=self.device)
            loss = self.module(**self.encode([data.inputs[row] for row in rows]), labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.module.eval()

    def accuracy(self, data: Dataset) -> float:
        found: list[int] = []
        with torch.no_grad():
            for start in range(0, len(data), 256):
                found += self.module(**self.encode(data.inputs[start : start + 256])).logits.argmax(-1).tolist()
        return 100.0 * float(np.mean(np.asarray(found) == data.labels))


def whole_base(options: argparse.Namespace) -> Path:
    """The source with a pooler: the files of the encoder have none, and an adapter would not save the one it reads."""
    folder: Path = options.work / f"{SOURCE}-base"
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(0)
        AutoModel.from_pretrained(options.encoders / SOURCE, dtype=torch.float32).save_pretrained(folder)
        AutoTokenizer.from_pretrained(options.encoders / SOURCE).save_pretrained(folder)
    return folder


def make_source(
    folder: Path, out: Path, kind: str, data: dict[str, Dataset], device: torch.device, steps: int
) -> float:
    """Fine-tune the source and write a model or an adapter; return its accuracy."""
    trainer = Trainer(folder, data["train"].classes, device)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="SEQ_CLS", r=8, lora_alpha=16, target_modules=["query", "value"])
        trainer.module = get_peft_model(trainer.module, config)
    trainer.train(data["train"], RATES[kind], steps)
    trainer.module.save_pretrained(out)
    if kind == "full":
        trainer.tokenizer.save_pretrained(out)
    return trainer.accuracy(data["test"])


def few_shot(folder: Path, samples: Dataset, data: dict[str, Dataset], device: torch.device) -> float:
    """Fine-tuning on the samples, by the rate and the steps that are best on the validation split."""
    found: list[tuple[float, float]] = []
    for rate, steps in FEW:
        trainer = Trainer(folder, samples.classes, device)
        trainer.train(samples, rate, steps)
        found.append((trainer.accuracy(data["validation"]), trainer.accuracy(data["test"])))
    return max(found, key=lambda pair: pair[0])[1]


def score(outputs: dict[Path, bool], base: Path, test: Dataset, device: torch.device) -> dict[str, float]:
    """The accuracies of written models, and of adapters (True) on their base, in a process without tuneport."""
    texts = next(iter(outputs)).parent / "texts.json"
    texts.write_text(json.dumps(list(test.inputs)))
    folders = json.dumps({str(folder): adapts for folder, adapts in outputs.items()})
    words = [folders, str(base), str(texts), device.type, str(len(test.classes))]
    done = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {Path(name).name: 100.0 * float(np.mean(np.asarray(found[name]) == test.labels)) for name in found}


def port_rows(
    source: Path, tuned: Path, target: Path, kind: str, data: dict[str, Dataset], draw: int, samples: int, device: str
) -> dict[str, float]:
    """The accuracies of the ported classifier, and of the head that is fitted on the target as it is."""
    place = pick_device(device)
    unlabelled = Dataset(data["train"].inputs, None, (), name=data["train"].name)
    started = time.perf_counter()
    job = prepare(
        source,
        tuned,
        target,
        unlabelled,
        signals=frozenset({"input"}) | SCORED,
        samples=samples,
        seed=draw,
        device=device,
    )
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        outputs: dict[Path, bool] = {}

        def write(name: str, result: Result, adapter: bool = False) -> None:
            out = Path(folder) / name
            result.save(out, kind="adapter" if adapter else "model")
            outputs[out] = adapter

        ported = run(job, scale=1.0)
        write("port", ported, adapter=kind == "lora")
        seconds["seconds"] = round(time.perf_counter() - started, 1)
        write("head", run(job, scale=0.0))
        chosen = run(job, scale="auto")
        write("port_auto", chosen)
        started = time.perf_counter()
        taught = ported.distill()
        write("distilled", taught)
        seconds["distill_seconds"] = round(time.perf_counter() - started, 1)
        return {**score(outputs, target, data["test"], place), **seconds, "scale": chosen.scale}


def cell(options: argparse.Namespace, task: str, kind: str, target: str, cache: dict[Any, Any]) -> list[dict[str, Any]]:
    """The rows of one task, kind of fine-tune and target: one for each draw."""
    device = pick_device(options.device)
    data = cache.setdefault(task, read_splits(task, options.data, options.most))
    source, place = whole_base(options), options.encoders / target
    tuned = options.work / f"{SOURCE}-{task}-{kind}-{options.steps}"
    if not (tuned / "accuracy.json").is_file():
        accuracy = make_source(source, tuned, kind, data, device, options.steps)
        (tuned / "accuracy.json").write_text(json.dumps(accuracy))
    if (task, target) not in cache:
        trainer = Trainer(place, data["train"].classes, device)
        trainer.train(data["train"], RATES["full"], options.steps)
        cache[task, target] = trainer.accuracy(data["test"])
    rows = []
    for draw in options.draws:
        chosen = data["train"].subset(select(data["train"], samples=options.samples, seed=draw))
        row: dict[str, Any] = {"task": task, "kind": kind, "target": target, "draw": draw, "samples": options.samples}
        row |= {"source": json.loads((tuned / "accuracy.json").read_text()), "steps": options.steps}
        row |= port_rows(source, tuned, place, kind, data, draw, options.samples, options.device)
        if (task, target, draw) not in cache:
            probe = linear_probe(open_model(place, device=device), chosen, data["test"]).accuracy
            cache[task, target, draw] = {"probe": probe, "few": few_shot(place, chosen, data, device)}
        rows.append({**row, **cache[task, target, draw], "target_tuned": cache[task, target]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means over the draws, and over all cells."""
    values = [{**row, "target": row["target"], "tuned": row["target_tuned"]} for row in rows]
    keys = {name: "tuned" if name == "target" else name for name in COLUMNS}
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in values:
        cells.setdefault((row["task"], row["kind"], row["target"]), []).append(row)
    lines = ["| task | fine-tune | target | " + " | ".join(COLUMNS.values()) + " |", "|---" * (3 + len(COLUMNS)) + "|"]
    means = []
    for names, found in sorted(cells.items()):
        means.append([statistics.fmean(row[keys[name]] for row in found) for name in COLUMNS])
        lines.append("| " + " | ".join([*names, *(f"{value:.1f}" for value in means[-1])]) + " |")
    if means:
        total = [statistics.fmean(column) for column in zip(*means, strict=True)]
        lines.append("| mean | | | " + " | ".join(f"{value:.1f}" for value in total) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", type=Path, required=True, help="Folder of the encoders.")
    parser.add_argument("--data", type=Path, required=True, help="Folder of the texts.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="Folder of the results.")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "classifiers", help="Fine-tunes.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=STEPS, help="Of the fine-tunes on whole training splits.")
    parser.add_argument("--most", type=int, default=2000, help="Test samples at most.")
    options = parser.parse_args()
    missing = [str(path) for path in (options.encoders / SOURCE, options.data / FILES["trec6"]) if not path.exists()]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}. Fetch the encoders and texts first.")
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    store, cache = options.out / "classifiers.json", {}
    rows: list[dict[str, Any]] = json.loads(store.read_text())["rows"] if store.is_file() else []
    machine = {"machine": platform.machine(), "torch": torch.__version__, "device": str(pick_device(options.device))}
    for task in options.tasks:
        for target in options.targets:
            for kind in options.kinds:
                done = {(row["task"], row["target"], row["kind"], row["draw"]) for row in rows}
                left = [draw for draw in options.draws if (task, target, kind, draw) not in done]
                wanted = argparse.Namespace(**{**vars(options), "draws": left})
                rows += cell(wanted, task, kind, target, cache) if left else []
                store.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    command = "python benchmarks/claims/classifiers.py"
    head = f"Accuracy in percent, means over draws of {options.samples} sentences. `{command}`, {machine}."
    (options.out / "classifiers.md").write_text(f"# Classifiers\n\n{head}\n\n{table(rows)}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
