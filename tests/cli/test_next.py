"""Every `next:` line that a command prints works when it is pasted."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import texts
from builders.commands import Run, options
from builders.folders import Zoo, images
from builders.loras import adapted, saved
from builders.processes import Done, run_program

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers


def followed(run: Run, done: Done) -> list[str]:
    """Run the commands of all `next:` lines, and return their first words."""
    assert done.code == 0, done.err
    lines = [line.removeprefix("next: ") for line in done.out.splitlines() if line.startswith("next: ")]
    first = []
    for line in lines:
        program, *words = shlex.split(line)
        if program == "tuneport":
            next_one = run(*words)
            assert next_one.code == 0, f"{line}: {next_one.err}"
            first.append(words[0])
        else:
            assert program == "python"
            found = run_program("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", *words)
            assert found.code == 0, f"{line}: {found.err}"
            first.append("python")
    return first


OUTPUTS: dict[str, list[str]] = {"model": [], "adapter": ["--rank", "2"], "task-vector": ["--head-fit", "none"]}


@pytest.mark.parametrize(
    ("family", "kind"), [("clip_vision", "model"), ("vit", "adapter"), ("clip_vision", "task-vector")]
)
def test_images(run: Run, zoo: Zoo, place: Path, family: str, kind: str) -> None:
    """Each output once, and each kind of head; the LoRA below is an adapter with a head in a file."""
    out = place / ('a "name" with spaces' + (".safetensors" if kind == "task-vector" else ""))
    words = options(zoo, family, head="animals" if family == "clip_vision" else None, method="theseus")
    done = run("transfer", "--scale=1", *words, "--as", kind, *OUTPUTS[kind], "--out", out)
    assert followed(run, done) == ["evaluate", *(["python"] if kind == "adapter" else [])]


def test_images_without_labels(run: Run, zoo: Zoo, place: Path) -> None:
    np.savez(place / "bare.npz", x=images(30, 1)[0])
    words = options(zoo, data=place / "bare.npz", head="animals", labels="source", samples=12)
    assert followed(run, run("transfer", "--scale=1", *words, "--out", place / "out")) == []


def test_a_training_split_alone(run: Run, zoo: Zoo, place: Path) -> None:
    kept = np.load(zoo.data)
    np.savez(place / zoo.data.name, **{key: kept[key] for key in kept.files if not key.endswith("_test")})
    words = options(zoo, data=place / zoo.data.name)
    assert followed(run, run("transfer", "--scale=1", *words, "--out", place / "out")) == []


def test_a_lora_that_was_distilled(run: Run, zoo: Zoo, place: Path) -> None:
    words = ["--finetuned", zoo["clip_vision-tuned"], "--target", zoo["clip_vision-target"], "--data", zoo.data]
    done = run("distill", *words, "--samples", 16, "--steps", 4, "--lora", 2, "--out", place / "out")
    assert followed(run, done) == ["evaluate", "python"]
    assert (place / "out" / "adapter_config.json").is_file()


ROWS: dict[str, Any] = {
    "labels": [{"text": text, "label": number % 3} for number, text in enumerate(texts.SENTENCES)],
    "plain": [{"text": text} for text in texts.SENTENCES],
    "targets": [{"text": text, "target": text.split()[0]} for text in texts.SENTENCES],
    "pairs": [{"text": a, "text_pair": b} for a, b in zip(texts.SENTENCES, texts.SENTENCES[1:], strict=False)],
}
MODELS: dict[str, tuple[str, str, str, list[str]]] = {  # family, tokenizer, rows, what follows a model
    "causal": ("llama", "gpt", "plain", ["evaluate"]),
    "seq2seq": ("t5", "t5", "targets", ["evaluate"]),
    "contrastive": ("bert", "bert", "pairs", []),
    "classifier": ("bert", "bert", "labels", ["evaluate"]),
}
SPLITS = (("train", ""), ("test", " again"))
TARGETS = {"llama": ["q_proj"], "t5": ["q"], "bert": ["query"]}


@pytest.mark.parametrize(("case", "kind"), [*((case, "adapter") for case in MODELS), ("causal", "model")])
def test_texts(run: Run, place: Path, case: str, kind: str) -> None:
    """Every task as an adapter, which has all lines that a model has, and more; and a model once."""
    family, tokenizer, rows, expected = MODELS[case]
    vocabulary = {"vocab_size": 320} if tokenizer == "gpt" else {}
    labels = {"num_labels": 3} if case == "classifier" else {}
    models = [texts.make(family, size, **vocabulary, **labels) for size in (texts.SMALL, texts.LARGE)]
    models = [model.bert for model in models] if case == "contrastive" else models
    names = [place / "old", place / "new"]
    for model, name in zip(models, names, strict=True):
        texts.write(name, model, texts.TOKENIZERS[tokenizer]())
    lora = saved(adapted(models[0], target_modules=TARGETS[family]), place / "lora")
    splits = [{**row, "text": row["text"] + end, "split": split} for split, end in SPLITS for row in ROWS[rows]]
    data = texts.write_rows(place / "rows.jsonl", splits)
    done = run(
        "transfer", "--source", names[0], "--finetuned", lora, "--target", names[1], "--data", data,
        "--as", kind, "--out", place / "out",
    )  # fmt: skip
    asked = ["evaluate"] if case == "causal" and kind == "adapter" else []
    assert followed(run, done) == expected + asked + (["python"] if kind == "adapter" else [])
    assert "the data have" in done.err, "there are fewer than 100 rows"
    blocks = dict(re.findall(r"With (\S+):\n\n```\w+\n(.*?)```", (place / "out" / "README.md").read_text(), re.DOTALL))
    assert list(blocks) == (["peft", "vLLM", "llama.cpp"] if asked else ["peft"] if kind == "adapter" else [])
    if blocks:
        assert run_program(blocks["peft"]).code == 0
    if asked:
        served = ["vllm", "serve", names[1], "--enable-lora", "--max-lora-rank", "8"]
        assert shlex.split(blocks["vLLM"]) == [*map(str, served), "--lora-modules", f"out={place / 'out'}"]
        whole, lora, serve = map(shlex.split, blocks["llama.cpp"].splitlines())
        assert whole == ["python", "convert_hf_to_gguf.py", str(names[1]), "--outfile", "new.gguf"]
        assert lora[:3] == ["python", "convert_lora_to_gguf.py", str(place / "out")]
        assert lora[3:] == ["--base", str(names[1]), "--outfile", "out.gguf"]
        assert serve == ["llama-cli", "-m", "new.gguf", "--lora", "out.gguf"]


def test_data_without_splits(run: Run, place: Path) -> None:
    """A score on samples that calibration has used would not be one of the port."""
    names = [texts.write(place / size, texts.make("t5"), texts.t5_tokenizer()) for size in ("old", "new")]
    lora = saved(adapted(texts.make("t5"), target_modules=["q"]), place / "lora")
    data = texts.write_rows(place / "rows.jsonl", ROWS["targets"])
    words = ["--source", names[0], "--finetuned", lora, "--target", names[1], "--data", data, "--out", place / "out"]
    assert followed(run, run("transfer", *words)) == []
    assert "<code>tuneport evaluate" not in (place / "out" / "report.html").read_text()
