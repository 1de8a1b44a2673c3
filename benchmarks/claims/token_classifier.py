"""Claim: a token classifier arrives on another encoder from unlabelled sentences alone.

MiniLM-L6, which reads no capitals, learns to find names (capitalised words after the first) and numbers in the
questions of TREC-6. It is ported to other encoders with N questions and no label, and scored word piece by word piece
next to the head that is fitted on the target as it is, and to a linear probe on the bare target with the labels of the
same questions, whose penalty is the best on validation questions. F1 is that of names and numbers together.

    python -m benchmarks.claims.token_classifier --encoders ENCODERS --data SHARED/data/text --out ROWS.jsonl --part 0/9
    python -m benchmarks.claims.token_classifier --out ROWS.jsonl --write benchmarks/results/token-classifier.md
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForTokenClassification, AutoTokenizer

from benchmarks.claims.classifiers import FILES, PENALTIES, SOURCE, kept, options_of_rows, read_splits
from benchmarks.common import part_of
from benchmarks.rows import add_row, commit, rows_in
from tuneport.config import TransferConfig
from tuneport.data.dataset import Dataset
from tuneport.models.open import pick_device
from tuneport.pipeline.transfer import prepare, run

CLASSES = {0: "other", 1: "name", 2: "number"}
UNLABELLED, LENGTH, BATCH = -100, 64, 16
COLUMNS = {
    "source": "fine-tuned source",
    "port": "ported with head",
    "port_auto": "the same, scale auto",
    "head": "head alone",
    "probe": "probe, labels",
}


def classes_of(text: str) -> list[int]:
    """The class of each character."""
    found, start = [0] * len(text), 0
    for place, word in enumerate(text.split()):
        begin = text.index(word, start)
        start = begin + len(word)
        number = 2 if any(letter.isdigit() for letter in word) else int(place > 0 and word[0].isupper())
        found[begin:start] = [number] * len(word)
    return found


class Reader:
    """A tokenizer that also gives the class of each token, by its first character."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.tokenizer, self.device = AutoTokenizer.from_pretrained(folder), device

    def __call__(self, texts: Sequence[str]) -> tuple[Any, Tensor]:
        options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
        tokens = self.tokenizer(list(texts), **options, return_offsets_mapping=True)
        offsets, classes = tokens.pop("offset_mapping"), list(map(classes_of, texts))
        labels = [
            [classes[row][begin] if end > begin else UNLABELLED for begin, end in places]
            for row, places in enumerate(offsets.tolist())
        ]
        return tokens.to(self.device), torch.tensor(labels, device=self.device)

    def outputs(self, module: Any, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """The logits or states of all tokens of the texts, and their classes."""
        found = []
        with torch.no_grad():
            for start in range(0, len(texts), 128):
                tokens, labels = self(texts[start : start + 128])
                rows = module.eval()(**tokens)[0]
                found.append((rows[labels >= 0].cpu(), labels[labels >= 0].cpu()))
        return torch.cat([rows for rows, _ in found]), torch.cat([labels for _, labels in found])


def rates(found: Any, labels: Any) -> dict[str, float]:
    """Accuracy, and the F1 of all classes but the first, in percent."""
    found, labels = np.asarray(found), np.asarray(labels)
    right, both = (found == labels) & (labels > 0), (found > 0).sum() + (labels > 0).sum()
    return {"accuracy": 100 * float((found == labels).mean()), "f1": 200 * float(right.sum() / max(both, 1))}


def make_source(options: argparse.Namespace, folder: Path, data: dict[str, Dataset]) -> dict[str, float]:
    """Fine-tune the source on the whole training split, and write it."""
    device, place = pick_device(options.device), options.encoders / SOURCE
    torch.manual_seed(0)
    names = {"id2label": CLASSES, "label2id": {name: index for index, name in CLASSES.items()}}
    module = AutoModelForTokenClassification.from_pretrained(place, dtype=torch.float32, **names).to(device).train()
    reader, random = Reader(place, device), np.random.default_rng(0)
    optimizer, inputs = torch.optim.AdamW(module.parameters(), lr=1e-4), data["train"].inputs
    for _ in range(options.steps):
        tokens, labels = reader([inputs[row] for row in random.choice(len(inputs), BATCH, replace=False)])
        logits = module(**tokens).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=UNLABELLED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    module.save_pretrained(folder)
    reader.tokenizer.save_pretrained(folder)
    logits, labels = reader.outputs(module, list(data["test"].inputs))
    return rates(logits.argmax(-1), labels)


def probe(folder: Path, texts: Sequence[str], data: dict[str, Dataset], device: torch.device) -> dict[str, float]:
    """A logistic regression on the target's token states, by the penalty that is best on the validation split."""
    from sklearn.linear_model import LogisticRegression

    reader, module = Reader(folder, device), AutoModel.from_pretrained(folder, dtype=torch.float32).to(device)
    parts = [texts, list(data["validation"].inputs), list(data["test"].inputs)]
    seen = [[each.numpy() for each in reader.outputs(module, part)] for part in parts]
    fits = [LogisticRegression(C=penalty, max_iter=1000).fit(*seen[0]) for penalty in PENALTIES]
    best = max(fits, key=lambda fit: rates(fit.predict(seen[1][0]), seen[1][1])["f1"])
    return rates(best.predict(seen[2][0]), seen[2][1])


def measure(options: argparse.Namespace) -> None:
    """Add the rows of this part that are missing: one for each target and draw."""
    device, data = pick_device(options.device), read_splits("trec6", options.data, 500)
    tuned = options.work / f"{SOURCE}-tokens-{options.steps}"
    source = kept(tuned.with_suffix(".json"), lambda: make_source(options, tuned, data))
    unlabelled = Dataset(data["train"].inputs, None, (), name="trec6")
    cells = list(itertools.product(options.targets, options.draws))
    for target, draw in part_of(cells, options.part):
        row = {"target": target, "draw": draw, "samples": options.samples, "steps": options.steps}
        if any(all(done[key] == row[key] for key in row) for done in rows_in(options.out)):
            continue
        place = options.encoders / target
        config = TransferConfig.of(samples=options.samples, seed=draw, device=options.device, scale="auto")
        setup = prepare(options.encoders / SOURCE, tuned, place, unlabelled, config)
        reader, found = Reader(place, device), {"source": source}
        for name, scale in (("head", 0.0), ("port", 1.0), ("port_auto", "auto")):
            result = run(setup, replace(config, scale=scale))  # type: ignore[arg-type]
            logits, labels = reader.outputs(result.apply(), list(data["test"].inputs))
            found[name] = {**rates(logits.argmax(-1), labels), "scale": result.scale}
        found["probe"] = probe(place, list(setup.calibration.samples.chosen.inputs), data, device)  # type: ignore[attr-defined]
        about = {"machine": platform.machine(), "device": device.type, "commit": commit()}
        add_row(options.out, {**row, **found, **about})


def write(options: argparse.Namespace) -> None:
    """Print the table of the rows, and write it to a file."""
    rows = rows_in(options.out)
    if not rows:
        sys.exit(f"{options.out} has no rows. Give --encoders and --data to make them.")
    lines = ["# A token classifier", "", f"Accuracy / F1 in percent, {rows[0]['samples']} questions.", ""]
    lines += ["| target | draws | " + " | ".join(COLUMNS.values()) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for target in dict.fromkeys(row["target"] for row in rows):
        own = [row for row in rows if row["target"] == target]
        means = ([statistics.fmean(row[name][key] for row in own) for key in ("accuracy", "f1")] for name in COLUMNS)
        lines.append(f"| {target} | {len(own)} | " + " | ".join(f"{a:.1f} / {b:.1f}" for a, b in means) + " |")
    ran = sorted({f"{row['machine']}, {row['device']}, commit {row['commit']}" for row in rows})
    lines += ["", f"- command: `python -m benchmarks.claims.token_classifier`; {'; '.join(ran)}"]
    if options.write is not None:
        options.write.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = options_of_rows(__doc__, "target and draw")
    parser.add_argument("--steps", type=int, default=150, help="Of the fine-tune of the source.")
    options = parser.parse_args()
    if options.encoders is None or options.data is None:
        write(options)
    elif not (options.data / FILES["trec6"]).exists():
        sys.exit(f"missing: {options.data / FILES['trec6']}. Fetch the texts first.")
    else:
        measure(options)


if __name__ == "__main__":
    main()
