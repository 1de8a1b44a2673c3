"""Claim: a trained classifier arrives on another encoder as a whole model, from unlabelled sentences alone.

Fine-tunes MiniLM-L6 as a sequence classifier (all weights, or a LoRA on queries and values), ports it to other encoders
with N sentences and no label, writes the result, and scores it in a process that imports transformers and peft only.
Next to it, with the same sentences: (a) a linear probe on the bare target, with their labels; (b) the head that is
fitted to the fine-tuned source on the target as it is; (c) few-shot fine-tuning of the target with their labels; (d)
the target fine-tuned on the whole training split, at the rate and steps of the source. The penalty of (a) and the rate
and steps of (c) are the best on 300 labelled sentences of the validation split, which the port does not see.
Distilled is the port after 100 steps with the fine-tuned source as the teacher, on the same sentences without labels.

    python -m benchmarks.claims.classifiers --encoders ENCODERS --data SHARED/data/text --out ROWS.jsonl --part 0/27
    python -m benchmarks.claims.classifiers --out ROWS.jsonl --write benchmarks/results/classifiers.md

A row is added to ROWS.jsonl when it is done, so that a run can be stopped and continued. Parts may run side by side:
the fine-tunes and rivals that rows share are made once, in --work.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.common import part_of
from benchmarks.rows import add_row, commit, rows_in
from tuneport.config import TransferConfig
from tuneport.data.dataset import Dataset
from tuneport.data.samplers import select
from tuneport.data.tasks import TASKS
from tuneport.measure.accuracy import compute_features
from tuneport.models.open import open_model, pick_device
from tuneport.pipeline.result import Result
from tuneport.pipeline.transfer import prepare, run
from tuneport.training.loop import fast_products

FILES = {"trec6": "trec6.jsonl.gz", "sst2": "sst2_stsa.jsonl.gz", "subj": "subj.jsonl.gz"}
SOURCE = "minilm-l6"
TARGETS = ("mpnet", "gte-small", "minilm-l3")  # the longest first: parts are taken in this order
KINDS = ("lora", "full")
COLUMNS = {
    "source": "fine-tuned source",
    "port": "ported with head",
    "port_auto": "the same, scale auto",
    "distilled": "and distilled",
    "probe": "(a) probe, labels",
    "head": "(b) head alone",
    "few": "(c) few-shot, labels",
    "target_tuned": "(d) fine-tuned target",
}
STEPS, BATCH, LENGTH = 200, 32, 128
RATES = {"full": 1e-4, "lora": 1e-3}
FEW_RATES, FEW_STEPS = (5e-5, 2e-4), (30, 90, 300)
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # C of the logistic regression, on standardised features

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
            part = tokenizer(part, padding=True, truncation=True, max_length=int(sys.argv[6]), return_tensors="pt")
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

    def __init__(self, folder: Path, classes: Sequence[str], device: torch.device, seed: int = 0) -> None:
        names = dict(enumerate(classes))
        labels = {name: index for index, name in names.items()}
        torch.manual_seed(seed)
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
            with fast_products(self.device):
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

    def make() -> bool:
        torch.manual_seed(0)
        AutoModel.from_pretrained(options.encoders / SOURCE, dtype=torch.float32).save_pretrained(folder)
        AutoTokenizer.from_pretrained(options.encoders / SOURCE).save_pretrained(folder)
        return True

    kept(options.work / "base.json", make)
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


def few_shot(
    folder: Path, samples: Dataset, data: dict[str, Dataset], device: torch.device, draw: int, few: Sequence[int]
) -> dict[str, Any]:
    """Fine-tuning on the samples, by the rate and the steps that are best on the validation split."""
    found: list[tuple[float, float, list[float]]] = []
    for rate, steps in itertools.product(FEW_RATES, few):
        trainer = Trainer(folder, samples.classes, device, draw)
        trainer.train(samples, rate, steps, draw)
        found.append((trainer.accuracy(data["validation"]), trainer.accuracy(data["test"]), [rate, steps]))
    best = max(found, key=lambda each: each[0])
    return {"few": best[1], "few_chosen": best[2]}


def probe(folder: Path, samples: Dataset, data: dict[str, Dataset], device: torch.device) -> dict[str, float]:
    """A logistic regression on the target's features, by the penalty that is best on the validation split."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model, found = open_model(folder, device=device), []
    seen = [compute_features(model, part).double().numpy() for part in (samples, data["validation"], data["test"])]
    for penalty in PENALTIES:
        fitted = make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=2000))
        fitted.fit(seen[0], samples.labels)
        right = [
            100.0 * fitted.score(x, data[name].labels) for x, name in zip(seen[1:], ("validation", "test"), strict=True)
        ]
        found.append((*right, penalty))
    best = max(found, key=lambda each: each[0])
    return {"probe": best[1], "probe_chosen": best[2]}


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """What `make` returns; it is made once by all processes, and read from `path` afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            found = json.dumps(make())
            path.with_suffix(".new").write_text(found)
            path.with_suffix(".new").replace(path)
        return json.loads(path.read_text())


def score(outputs: dict[Path, bool], base: Path, test: Dataset, device: torch.device) -> dict[str, float]:
    """The accuracies of written models, and of adapters (True) on their base, in a process without tuneport."""
    texts = next(iter(outputs)).parent / "texts.json"
    texts.write_text(json.dumps(list(test.inputs)))
    folders = json.dumps({str(folder): adapts for folder, adapts in outputs.items()})
    words = [folders, str(base), str(texts), device.type, str(len(test.classes)), str(LENGTH)]
    done = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return {Path(name).name: 100.0 * float(np.mean(np.asarray(found[name]) == test.labels)) for name in found}


def port_rows(
    source: Path, tuned: Path, target: Path, kind: str, data: dict[str, Dataset], draw: int, options: argparse.Namespace
) -> dict[str, float]:
    """The accuracies of the ported classifier, and of the head that is fitted on the target as it is."""
    unlabelled = Dataset(data["train"].inputs, None, (), name=data["train"].name)
    started = time.perf_counter()
    config = TransferConfig.of(samples=options.samples, seed=draw, device=options.device, scale="auto")
    setup = prepare(source, tuned, target, unlabelled, config)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        outputs: dict[Path, bool] = {}

        def write(name: str, result: Result, adapter: bool = False) -> None:
            out = Path(folder) / name
            result.save(out, as_="adapter" if adapter else "model")
            outputs[out] = adapter

        ported = run(setup, replace(config, scale=1.0))
        write("port", ported, adapter=kind == "lora")
        seconds["seconds"] = round(time.perf_counter() - started, 1)
        write("head", run(setup, replace(config, scale=0.0)))
        chosen = run(setup, config)
        write("port_auto", chosen)
        started = time.perf_counter()
        taught = ported.distill(options.distill)
        write("distilled", taught)
        seconds["distill_seconds"] = round(time.perf_counter() - started, 1)
        scores = score(outputs, target, data["test"], pick_device(options.device))
        return {**scores, **seconds, "scale": chosen.scale}


def measure(options: argparse.Namespace) -> None:
    """Add the rows that are missing: both kinds of fine-tune for each target, task and draw of this part."""
    machine = {"machine": platform.machine(), "device": pick_device(options.device).type, "commit": commit()}
    cells = list(itertools.product(options.targets, options.tasks, options.draws))
    for target, task, draw in part_of(cells, options.part):
        for kind in options.kinds:
            row = {"target": target, "task": task, "draw": draw, "kind": kind}
            row |= {"samples": options.samples, "steps": options.steps, "distill": options.distill}
            if not any(all(done[key] == row[key] for key in row) for done in rows_in(options.out)):
                add_row(options.out, {**row, **cell(options, target, task, draw, kind), **machine})


def cell(options: argparse.Namespace, target: str, task: str, draw: int, kind: str) -> dict[str, Any]:
    """The accuracies of the source, the port and its rivals."""
    device, data = pick_device(options.device), read_splits(task, options.data, options.most)
    base, place = whole_base(options), options.encoders / target
    tuned = options.work / f"{SOURCE}-{task}-{kind}-{options.steps}"
    chosen = data["train"].subset(select(data["train"], samples=options.samples, seed=draw))

    def tune_target() -> dict[str, float]:
        trainer = Trainer(place, data["train"].classes, device)
        trainer.train(data["train"], RATES["full"], options.steps)
        return {"target_tuned": trainer.accuracy(data["test"])}

    def rivals() -> dict[str, Any]:
        few = few_shot(place, chosen, data, device, draw, options.few)
        return {**probe(place, chosen, data, device), **few}

    name = f"{target}-{task}-{options.steps}"
    return {
        "source": kept(tuned.with_suffix(".json"), lambda: make_source(base, tuned, kind, data, device, options.steps)),
        **port_rows(base, tuned, place, kind, data, draw, options),
        **kept(options.work / f"{name}-{draw}-{options.samples}.json", rivals),
        **kept(options.work / f"{name}.json", tune_target),
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Means over the draws, over all cells, and differences of the port and each rival."""
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["task"], row["kind"], row["target"]), []).append(row)
    lines = ["| task | fine-tune | target | " + " | ".join(COLUMNS.values()) + " |", "|---" * (3 + len(COLUMNS)) + "|"]
    means = []
    for names, found in sorted(cells.items()):
        means.append([statistics.fmean(row[name] for row in found) for name in COLUMNS])
        lines.append("| " + " | ".join([*names, *(f"{value:.1f}" for value in means[-1])]) + " |")
    total = [statistics.fmean(column) for column in zip(*means, strict=True)]
    lines += ["| mean | | | " + " | ".join(f"{value:.1f}" for value in total) + " |", ""]
    for name in ("port", "port_auto", "distilled"):
        for rival in ("probe", "head", "few", "target_tuned"):
            gaps = [statistics.fmean(row[name] - row[rival] for row in found) for found in cells.values()]
            ahead = sum(gap > 0 for gap in gaps)
            lines.append(
                f"- {COLUMNS[name]} against {COLUMNS[rival]}: {statistics.fmean(gaps):+.1f} points on average "
                f"({min(gaps):+.1f} to {max(gaps):+.1f}), ahead in {ahead} of {len(gaps)} cells"
            )
    return lines


def write(options: argparse.Namespace) -> None:
    """Print the table of the rows, and write it to a file."""
    rows = rows_in(options.out)
    if not rows:
        sys.exit(f"{options.out} has no rows. Give --encoders and --data to make them.")
    ran = sorted({f"{row['machine']}, {row['device']}, commit {row['commit']}" for row in rows})
    about = (
        f"Accuracy in percent, means over {len({row['draw'] for row in rows})} draws of {rows[0]['samples']} "
        f"sentences; {rows[0]['distill']} steps of distillation"
    )
    whole = len(TARGETS) * len(FILES) * len(KINDS) * 3
    command = f"- command: `python -m benchmarks.claims.classifiers`, {len(rows)} of {whole} rows; {'; '.join(ran)}"
    lines = ["# Classifiers", "", f"{about}.", "", *table(rows), "", command]
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def options_of_rows(about: str | None, cell: str) -> argparse.ArgumentParser:
    """The options of a script that adds rows of encoders to a file, cell by cell."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", type=Path, help="Folder of the encoders.")
    parser.add_argument("--data", type=Path, help="Folder of the texts.")
    parser.add_argument("--out", type=Path, required=True, help="Rows, one JSON object a line.")
    parser.add_argument("--write", type=Path, help="Write the table of the rows to this file.")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "classifiers", help="Fine-tunes.")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--part", default="0/1", help=f"I/N: every Nth {cell}, from the Ith.")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=100)
    return parser


def main() -> None:
    parser = options_of_rows(__doc__, "target, task and draw")
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="Of the fine-tunes on whole training splits.")
    parser.add_argument("--few", nargs="+", type=int, default=list(FEW_STEPS), help="Of few-shot fine-tuning.")
    parser.add_argument("--distill", type=int, default=100, help="Steps of the distillation.")
    parser.add_argument("--most", type=int, default=2000, help="Test samples at most.")
    options = parser.parse_args()
    if options.encoders is None or options.data is None:
        write(options)
        return
    missing = [str(path) for path in (options.encoders / SOURCE, options.data / FILES["trec6"]) if not path.exists()]
    if missing:
        sys.exit(f"missing: {', '.join(missing)}. Fetch the encoders and texts first.")
    measure(options)


if __name__ == "__main__":
    main()
