"""Language models on the command line: chats in, an evaluated transfer and a verdict out."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from builders.chats import chat_tokenizer
from builders.commands import Run, assert_refused
from builders.samples import jsonl
from builders.texts import LARGE, SENTENCES, SMALL, bert_tokenizer, make, write
from tuneport.data.formats import read_plain
from tuneport.measure.accuracy import compute_features, likelihood, perplexity
from tuneport.models.open import open_model


def nudge(module: Any, size: float = 0.05) -> Any:
    """A fine-tune: every matrix changes a little."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.add_(size * parameter.std() * torch.randn_like(parameter))
    return module


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two language models with different templates and tokens, a fine-tune of the first, and questions as chats."""
    place = tmp_path_factory.mktemp("language")
    tokenizers = chat_tokenizer("chatml"), chat_tokenizer("gemma")
    more = {"vocab_size": len(tokenizers[0]), "max_position_embeddings": 512}
    paths = {
        "source": write(place / "source", make("llama", SMALL, **more), tokenizers[0]),
        "finetuned": write(place / "finetuned", nudge(make("llama", SMALL, **more)), tokenizers[0]),
        "target": write(place / "target", make("gemma3", LARGE, **more), tokenizers[1]),
    }
    rows = [
        {"instruction": "What is it about?", "input": text, "output": text, "split": split}
        for index, text in enumerate(SENTENCES)
        for split in ["test" if index % 4 == 0 else "train"]
    ]
    return {**paths, "data": jsonl(place / "questions.jsonl", rows)}


def words(paths: dict[str, Path], **more: Any) -> list[str]:
    return [str(word) for name, value in {**paths, **more}.items() for word in (f"--{name.replace('_', '-')}", value)]


def test_a_transfer_is_scored_by_bits_per_character(run: Run, trio: dict[str, Path], place: Path) -> None:
    """Before, after and of the source are those of the folders, opened one by one."""
    done = run("transfer", *words(trio, samples=12, out=place / "out"), "--evaluate", "--json")
    assert done.code == 0, done.err
    found = done.json["evaluation"]
    test = read_plain(trio["data"], "test")
    wanted = [perplexity(open_model(path), test) for path in (trio["target"], place / "out", trio["finetuned"])]
    for name, score in zip(("before", "after", "source"), wanted, strict=True):
        assert found[name] == pytest.approx(score.bits_per_character, rel=1e-6)
        assert found["scores"][name]["perplexity"] == pytest.approx(score.perplexity, rel=1e-6)
        assert found["scores"][name]["tokens"] == score.tokens
    assert (found["protocol"], found["metric"], found["samples"]) == ("perplexity", "bits per character", len(test))
    assert done.json["tokens"]["share"] == 1.0
    page = (place / "out" / "report.html").read_text()
    assert "the fine-tuned source" in page
    assert f"{found['after']:.3f}" in page
    told = run("transfer", *words(trio, samples=12, out=place / "again"), "--evaluate")
    assert told.out.splitlines()[1].startswith(
        f"bits per character on {test.name}: {found['before']:.3f} -> {found['after']:.3f}: "
    )
    assert f"the fine-tuned source  {found['source']:.3f} (" in told.out


def test_texts_are_cut_with_a_note(run: Run, trio: dict[str, Path], place: Path) -> None:
    chats = list(read_plain(trio["data"], "train").inputs)
    counts = [len(ids) for ids in chat_tokenizer("chatml").apply_chat_template(chats)["input_ids"]]
    longest = max(counts) - 3
    done = run("transfer", *words(trio, samples=12, max_length=longest, out=place / "out"), "--json")
    assert done.code == 0, done.err
    cut = sum(count > longest for count in counts)
    assert done.json["tokens"]["source_cut"] == cut
    assert f"{cut} of 12 texts are cut at {longest} tokens of {trio['source']}: raise --max-length" in done.err
    assert_refused(run("transfer", *words(trio, samples=12, max_length=40, out=place / "b")), 1, "Raise --max-length")


SPLITS = (("train", ""), ("test", " again"))


def test_label_words_of_any_table(run: Run, trio: dict[str, Path], place: Path) -> None:
    """Columns of other names; the accuracy is that of the likeliest word, before and after."""
    rows = [
        {"sentence": f"{text}{end}", "y": "cat" if "cat" in text else "river", "split": split}
        for split, end in SPLITS
        for text in SENTENCES
    ]
    table = jsonl(place / "table.jsonl", rows)
    given = words({**trio, "data": table}, columns="text=sentence,label=y", samples=8, out=place / "out")
    done = run("transfer", *given, "--evaluate", "--json")
    assert done.code == 0, done.err
    test = read_plain(table, "test", columns={"text": "sentence", "label": "y"})
    found = done.json["evaluation"]
    assert (found["protocol"], found["metric"]) == ("likelihood", "accuracy")
    assert found["before"] == likelihood(open_model(trio["target"]), test).accuracy
    assert found["after"] == likelihood(open_model(place / "out"), test).accuracy
    assert done.json["options"]["columns"] == {"text": "sentence", "label": "y"}
    alone = run("evaluate", place / "out", "--data", table, "--columns", "text=sentence,label=y", "--json")
    assert alone.json["accuracy"] == found["after"]
    assert alone.json["protocol"] == "likelihood"
    told = run("evaluate", place / "out", "--data", table, "--columns", "text=sentence,label=y")
    assert f"{found['after']:.2f} % of 16 samples right (likelihood; 95 % interval " in told.out


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ("text", ["--columns is 'text'; expected NAME=COLUMN, such as text=sentence,label=y."]),
        ("words=instruction", ["--columns names words; expected some of choices, completion"]),
        ("text=sentence", ["has no column sentence of --columns; it has instruction, input, output, split."]),
    ],
)
def test_wrong_columns(run: Run, trio: dict[str, Path], columns: str, parts: list[str]) -> None:
    done = run("evaluate", trio["target"], "--data", trio["data"], "--columns", columns)
    assert_refused(done, 2 if columns == "text" else 1, *parts)


def test_encoders_without_classes_are_compared_with_the_source(run: Run, place: Path) -> None:
    """Fidelity is the correlation of the cosines between texts with those in the fine-tuned source."""
    paths = {
        "source": write(place / "source", make("bert", SMALL).bert, bert_tokenizer()),
        "finetuned": write(place / "finetuned", nudge(make("bert", SMALL), 0.2).bert, bert_tokenizer()),
        "target": write(place / "target", make("bert", LARGE).bert, bert_tokenizer()),
    }
    rows = [
        {"text": one, "text_pair": f"{other}{end}", "split": split}
        for split, end in SPLITS
        for one, other in pairwise(SENTENCES)
    ]
    data = jsonl(place / "pairs.jsonl", rows)
    done = run("transfer", *words({**paths, "data": data}, samples=12, out=place / "out"), "--evaluate", "--json")
    assert done.code == 0, done.err
    test = read_plain(data, "test", labelled=False)
    cosines = {}
    for name, path in {**paths, "out": place / "out"}.items():
        unit = F.normalize(compute_features(open_model(path), test).double(), dim=-1)
        upper = np.triu_indices(len(test), 1)
        cosines[name] = (unit @ unit.T).numpy()[upper]
    found = done.json["evaluation"]
    assert found["metric"] == "fidelity"
    for name, model in (("before", "target"), ("after", "out")):
        wanted = np.corrcoef(cosines["finetuned"], cosines[model])[0, 1]
        assert found[name] == pytest.approx(wanted, abs=1e-5)  # features are float32


def test_a_chat_for_a_model_without_a_template(run: Run, trio: dict[str, Path], place: Path) -> None:
    tokenizer = chat_tokenizer(None)
    module = make("gemma3", LARGE, vocab_size=len(tokenizer), max_position_embeddings=512)
    bare = write(place / "bare", module, tokenizer)
    done = run("transfer", *words({**trio, "target": bare}, samples=8, out=place / "out"), "--json")
    assert done.code == 0, done.err
    assert f"{bare} has no chat template: it reads the messages one after the other" in done.err


def test_the_default_scale_is_judged_on_held_out_samples(run: Run, trio: dict[str, Path], place: Path) -> None:
    """Zero is a candidate, so that a change that does harm is not written; a number is taken as it is."""
    done = run("transfer", *words(trio, samples=12, out=place / "out"), "--no-evaluate", "--json")
    choice = done.json["scale_choice"]
    assert (choice["rule"], choice["held_out"], choice["samples"]) == ("auto", True, 12)
    losses = {item["scale"]: item["loss"] for item in choice["candidates"]}
    assert losses[done.json["scale"]] <= losses[0.0]
    fixed = run("transfer", *words(trio, samples=12, scale=1, out=place / "fixed"), "--no-evaluate", "--json")
    assert fixed.json["scale"] == 1
    assert "scale_choice" not in fixed.json
    several = run("transfer", *words(trio, samples=12, scale="safe", out=place / "safe"), "--no-evaluate", "--json")
    assert several.json["scale"] <= done.json["scale"]


def answered(folder: Path, prompt: str) -> str:
    """What transformers alone writes after a question."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": prompt}]
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        found = model.generate(**given, do_sample=False, max_new_tokens=16, pad_token_id=0)
    return str(tokenizer.decode(found[0, given["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def test_one_prompt_is_answered_by_old_target_and_new(
    run: Run, trio: dict[str, Path], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneport.pipeline.evaluate.ANSWER", 16)
    out, prompt = place / "out", "What is it about?"
    assert run("transfer", *words(trio, samples=8, scale=1, out=out), "--no-evaluate").code == 0
    done = run("evaluate", out, "--ask", prompt, "--json")
    assert done.code == 0, done.err
    folders = {"old": trio["finetuned"], "target": trio["target"], "new": out}
    wanted = {name: answered(folder, prompt) for name, folder in folders.items()}
    assert {row["model"]: row["answer"].strip() for row in done.json["answers"]} == wanted
    assert len(set(wanted.values())) > 1
    shown = run("evaluate", trio["source"], trio["target"], "--ask", prompt).out
    assert prompt in shown
    refused = run("evaluate", out, "--ask", prompt, "--data", trio["data"])
    assert_refused(refused, 2, "pass --data to score models, or --ask")
