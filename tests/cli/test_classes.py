"""A LoRA over a bare encoder has numbers for classes: the names of the data are offered in the head's order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from builders import texts
from builders.commands import Run, assert_refused

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers

ORDER = ("blue", "red", "green")  # of the head


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two bare encoders, a LoRA of the first that tells three kinds of texts apart, and texts with names."""
    place, tokenizer = tmp_path_factory.mktemp("classes"), texts.bert_tokenizer()
    for name, size in (("old", texts.SMALL), ("new", texts.LARGE)):
        texts.write(place / name, texts.make("bert", size).bert, tokenizer)
    starts = dict(zip(ORDER, sorted({text.split()[0] for text in texts.SENTENCES})[:3], strict=True))
    rows = [
        {"text": f"{start} {text[:12]}", "label": name, "split": split}
        for split, part in (("train", texts.SENTENCES[:10]), ("test", texts.SENTENCES[10:]))
        for text in part
        for name, start in starts.items()
    ]
    texts.write_rows(place / "rows.jsonl", rows)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(place / "old", num_labels=3)
    settings = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=4)
    torch.manual_seed(0)
    tuned = peft.get_peft_model(model, settings).train()
    batch = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
    labels = torch.tensor([ORDER.index(row["label"]) for row in rows])
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=3e-2)
    for _ in range(100):
        optimizer.zero_grad()
        tuned(**batch, labels=labels).loss.backward()
        optimizer.step()
    with torch.no_grad():
        right = tuned.eval()(**batch).logits.argmax(-1) == labels
    assert float(right.float().mean()) > 0.9
    tuned.save_pretrained(place / "lora")
    return place


def given(scene: Path) -> list[str]:
    places = {"source": "old", "finetuned": "lora", "target": "new", "data": "rows.jsonl"}
    return [word for name, place in places.items() for word in (f"--{name}", str(scene / place))]


def test_the_order_is_proposed_and_works(run: Run, scene: Path, place: Path) -> None:
    refused = run("transfer", *given(scene), "--out", place / "out")
    assert_refused(refused, 1, "3 of 3 classes of rows are unknown to the head", "the fine-tune answers")
    advice = re.search(r"So pass (--classes \S+)\. ", refused.err)
    assert advice is not None, refused.err
    assert advice[1] == "--classes blue,red,green"
    done = run("transfer", *given(scene), *shlex.split(advice[1]), "--out", place / "out", "--json")
    assert done.code == 0, done.err
    assert done.json["head"]["classes"] == list(ORDER)
    old = next(row for row in done.json["accuracies"] if row["role"] == "finetuned")
    assert old["value"] > 90
    names = transformers.AutoConfig.from_pretrained(place / "out").id2label
    assert [names[number] for number in range(3)] == list(ORDER)
    own = run("evaluate", scene / "lora", "--data", scene / "rows.jsonl", *shlex.split(advice[1]), "--json")
    assert own.json["accuracy"] == old["value"]


def test_names_that_do_not_fit(run: Run, scene: Path, place: Path) -> None:
    for words, said in {
        "red,green": "--classes has 2 different names; the head has 3 classes: 0, 1, 2",
        "red,green,red": "--classes has 2 different names; the head has 3 classes",
    }.items():
        assert_refused(run("transfer", *given(scene), "--classes", words, "--out", place / "out"), 2, said)
    none = run("transfer", *given(scene), "--classes", "a,b,c", "--head-fit", "none", "--out", place / "out")
    assert_refused(none, 2, "there is none to fit: leave it out")
