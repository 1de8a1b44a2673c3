"""Token classifiers: no accuracy is claimed, and the changes that the record states are those of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import plain
from builders.classifiers import WIDER, bert
from builders.commands import Run, assert_refused
from builders.loras import adapted, written
from builders.samples import halves
from builders.texts import SENTENCES, SMALL, bert_tokenizer, write

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft
KIND = "BertForTokenClassification"
NAMES = {0: "O", 1: "PER", 2: "LOC"}
LABELLED = {"id2label": NAMES, "label2id": {name: number for number, name in NAMES.items()}}
BOUND = 1e-5  # of the norm of a difference of float32 numbers, which is a twentieth of them


def weights(folder: Path, base: Path | None) -> dict[str, plain.Rows]:
    module: Any = plain.load(KIND, folder, base).module
    module = module if base is None else module.merge_and_unload()
    return {name: tensor.double().numpy() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("as_", ["model", "adapter"])
def test_what_is_said(run: Run, tmp_path: Path, as_: str) -> None:
    tokenizer, base = bert_tokenizer(), bert(KIND, SMALL, **LABELLED)
    lora = adapted(base, target_modules=["query", "value", "dense"], task_type="TOKEN_CLS")
    models = {
        "source": write(tmp_path / "source", base, tokenizer),
        "finetuned": written(lora, tmp_path / "finetuned", as_, tokenizer),
        "target": write(tmp_path / "target", bert(KIND, WIDER, **LABELLED), tokenizer),
        "data": halves(tmp_path / "rows.jsonl", [{"text": text} for text in SENTENCES * 2]),
    }
    out, part = tmp_path / "out", as_ == "adapter"
    given = [word for name, path in models.items() for word in (f"--{name}", path)]
    given += ["--samples", 12, "--scale", 0.5, "--labels", "source", "--as", as_, "--out", out]
    assert_refused(run("transfer", *given, "--evaluate"), 1, "labels tokens, of which tuneport measures no accuracy")
    done = run("transfer", *given, "--json")
    assert done.code == 0, done.err
    assert (done.json["outcome"], "evaluation" in done.json) == ("not measured", False)
    for folder in (models["target"], out):
        refused = run("evaluate", folder, "--data", models["data"])
        assert_refused(refused, 1, "labels tokens, of which tuneport measures no accuracy")
    old, new = weights(models["source"], None), weights(models["finetuned"], models["source"] if part else None)
    before, after = weights(models["target"], None), weights(out, models["target"] if part else None)
    record = json.loads((out / "tuneport.json").read_text(encoding="utf-8"))
    assert record["layers"] == done.json["layers"]
    changed = 0
    for layer in record["layers"]:
        norm = np.linalg.norm(new[layer["source"]] - old[layer["source"]])
        moved = np.linalg.norm(after[layer["target"]] - before[layer["target"]])
        assert layer["norm_source"] == pytest.approx(norm, rel=BOUND)
        assert record["scale"] * layer["norm_target"] == pytest.approx(moved, rel=BOUND)
        changed += moved > 0
    assert changed == 15
    still = set(before) - {layer["target"] for layer in record["layers"]} - set(record["head"]["tensors"])
    assert {name for name in still if not np.array_equal(before[name], after[name])} == set()
