"""Adapters of text models through the command line: bare bases, roles of other names, what moved."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from builders import texts
from builders.commands import Run, assert_refused
from builders.loras import adapted, saved
from tuneport.pipeline.arithmetic import extract

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def rows(path: Path) -> Path:
    return texts.write_rows(path, [{"text": text, "label": i % 3} for i, text in enumerate(texts.SENTENCES)])


def test_an_adapter_of_a_headed_model_on_the_bare_base(run: Run, place: Path) -> None:
    """As it is on disk: the adapter says bert.encoder..., the folder holds encoder..."""
    headed = [texts.make("bert", size, num_labels=3) for size in (texts.SMALL, texts.LARGE)]
    for model, name in zip(headed, ("old", "new"), strict=True):
        texts.write(place / name, model.bert, texts.bert_tokenizer())
    lora = saved(adapted(headed[0], target_modules=["query", "value"], task_type="SEQ_CLS"), place / "lora")
    words = [
        "--source",
        place / "old",
        "--finetuned",
        lora,
        "--target",
        place / "new",
        "--data",
        rows(place / "r.jsonl"),
    ]
    done = run(
        "transfer", "--scale=1", *words, "--labels", "source", "--as", "adapter", "--out", place / "out", "--json"
    )
    assert done.code == 0, done.err
    assert len(done.json["layers"]) == 6, "query and value of three blocks"
    assert {layer["rank"] for layer in done.json["layers"]} == {3}
    assert done.json["moved_share"] == pytest.approx(1.0)
    vector = extract(place / "old", lora)
    assert set(vector) == {
        f"encoder.layer.{i}.attention.self.{part}.weight" for i in (0, 1) for part in ("query", "value")
    }


def test_an_adapter_of_the_bare_model_on_a_headed_base(place: Path) -> None:
    headed = texts.make("bert", num_labels=3)
    lora = saved(adapted(headed.bert, target_modules=["query"]), place / "lora")
    base = texts.write(place / "old", headed, texts.bert_tokenizer())
    assert set(extract(base, lora)) == {f"bert.encoder.layer.{i}.attention.self.query.weight" for i in (0, 1)}


def test_the_suggested_roles_work(run: Run, place: Path) -> None:
    vocabulary = {"vocab_size": 320}
    old, new = texts.make("llama", **vocabulary), texts.make("gpt2", texts.LARGE, **vocabulary)
    for model, name in ((old, "old"), (new, "new")):
        texts.write(place / name, model, texts.gpt_tokenizer())
    lora = saved(adapted(old, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]), place / "lora")
    data = texts.write_rows(place / "r.jsonl", [{"text": text} for text in texts.SENTENCES])
    words = ["--source", place / "old", "--finetuned", lora, "--target", place / "new", "--data", data]
    refused = run("transfer", "--scale=1", *words, "--out", place / "out")
    assert_refused(refused, 1, "and no gate, up, down. Pass --roles gate=none --roles up=fc1 --roles down=fc2 or see")
    advice = re.search(r"Pass (--roles .*?) or see", refused.err)
    assert advice is not None
    done = run("transfer", "--scale=1", *words, *shlex.split(advice[1]), "--out", place / "out", "--json")
    assert done.code == 0, done.err
    sources = {layer["role"]: layer["source"].split(".")[-2] for layer in done.json["layers"]}
    assert sources == {"q": "q_proj", "fc1": "up_proj", "fc2": "down_proj"}
    assert done.json["options"]["roles"] == {"gate": None, "up": "fc1", "down": "fc2"}
    assert {item["tensor"].split(".")[-2] for item in done.json["left_behind"]} == {"gate_proj"}
    assert "--roles gate=none" in (place / "out" / "report.html").read_text()


def test_what_moved_is_on_the_terminal_and_the_card(run: Run, place: Path) -> None:
    old, new = (texts.make("bert", size, num_labels=3) for size in (texts.SMALL, texts.LARGE))
    tuned = texts.make("bert", num_labels=3)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "query" in name or "LayerNorm" in name or "word_embeddings" in name:
                parameter.add_(0.1)
    for model, name in ((old, "old"), (tuned, "tuned"), (new, "new")):
        texts.write(place / name, model, texts.bert_tokenizer())
    words = ["--source", place / "old", "--finetuned", place / "tuned", "--target", place / "new"]
    done = run("transfer", "--scale=1", *words, "--data", rows(place / "r.jsonl"), "--verbose", "--out", place / "out")
    assert done.code == 0, done.err
    line = re.search(r"moved +([\d.]+ % of the change \(squared norm\); left behind: .*)", done.out)
    assert line is not None, done.out
    assert re.fullmatch(r"[\d.]+ % of .*; left behind: embeddings [\d.]+ %, norms [\d.]+ %", line[1].strip())
    assert line[1].strip() in (place / "out" / "README.md").read_text()
    shares = json.loads((place / "out" / "tuneport.json").read_text())
    # all numbers change by 0.1: shares are those of their counts
    sizes = {name: p.numel() for name, p in old.named_parameters() if "query" in name}
    whole = sum(p.numel() for n, p in old.named_parameters() if any(w in n for w in ("query", "LayerNorm", "word_emb")))
    assert shares["moved_share"] == pytest.approx(sum(sizes.values()) / whole, rel=1e-4)
    planned = run("plan", *words, "--data", place / "r.jsonl")
    assert "would move: " in planned.out
