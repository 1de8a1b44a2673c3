"""The examples: each runs from its inputs to an answer on tiny models, and the notebook runs from top to bottom."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

import tuneport
from builders.chats import chat_tokenizer
from builders.loras import adapted, saved
from builders.texts import LARGE, SMALL, make, write

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, "--out", "upgraded", *words])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("upgrade_images.py", ("--steps", "40", "--samples", "150", "--routes", "port"), "Evaluation("),
        ("upgrade_text_classifier.py", ("--steps", "40", "--samples", "120", "--routes", "port"), "'label': "),
        (
            "upgrade_lora.py",
            ("--steps", "20", "--samples", "16", "--routes", "port,distill"),
            "$ tuneport evaluate upgraded --ask ",
        ),
    ],
)
def test_a_script_goes_from_inputs_to_an_answer(
    script: str,
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script == "upgrade_lora.py":
        pytest.importorskip("peft")
    monkeypatch.setattr("tuneport.training.division.STEPS", 8)
    monkeypatch.setattr("tuneport.training.division.EPOCHS", 1)
    run(script, tmp_path, monkeypatch, *words)
    shown = capsys.readouterr().out
    assert "Upgrade(" in shown
    assert "\nold: score " in shown
    assert "written to upgraded\n" in shown
    assert (tmp_path / "upgraded" / "report.html").is_file()
    assert said in shown.rpartition("written to")[2]


def test_stand_ins_take_the_routes_that_write_no_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are too small for that. A second run says where the inputs of the first are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["script"])
    arguments = importlib.import_module("stand_ins").arguments
    given, _ = arguments(None, lambda _folder, _steps: {"source": "old"}, 1)
    assert given == {"routes": ("copy", "port", "distill"), "source": "old"}
    with pytest.raises(SystemExit):
        arguments(None, lambda _folder, _steps: {}, 1)
    assert "upgraded-inputs has the inputs of an earlier run" in capsys.readouterr().err


def test_scripts_are_short() -> None:
    scripts = sorted(EXAMPLES.glob("upgrade_*.py"))
    assert len(scripts) == 3
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 20
        assert "tuneport.upgrade(" in text


@pytest.mark.parametrize("template", ["chatml", None])
def test_a_ported_lora_is_served_and_answers(
    template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    tokenizer, more = chat_tokenizer(template), {"vocab_size": 330, "max_position_embeddings": 128}
    source, target = (make("llama", size, **more) for size in (SMALL, LARGE))
    lora = adapted(source, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    folder = saved(lora, write(tmp_path / "new", target, tokenizer).parent / "lora")
    monkeypatch.chdir(tmp_path)
    out = tuneport.transfer(source, folder, "new", method="naive").save(tmp_path / "ported", as_="adapter")
    monkeypatch.chdir(folder)  # where the relative path of the base leads nowhere
    monkeypatch.setattr(sys, "argv", ["serve_lora.py", str(out), "--port", "0", "--ask", "why?", "--tokens", "5"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / "serve_lora.py"), run_name="__main__")
    assert stop.value.code is None
    model = peft.PeftModel.from_pretrained(target, out).eval()
    asked, options = [{"role": "user", "content": "why?"}], {"tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(asked, **options) if template else "why?\n"
    ids = tokenizer(prompt, return_tensors="pt")
    found = model.generate(input_ids=ids["input_ids"], max_new_tokens=5, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    said = capsys.readouterr().out
    assert f"serving {out} on http://127.0.0.1:" in said
    assert said.partition("assistant: ")[2] == tokenizer.decode(found, skip_special_tokens=True) + "\n"
    (tmp_path / "new").rename(tmp_path / "moved")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=r"ported names the base new, which cannot be opened: .+$"):
        runpy.run_path(str(EXAMPLES / "serve_lora.py"), run_name="__main__")


def test_inputs_of_your_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", ["upgrade_images.py", "--source", "old"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "upgrade_images.py"), run_name="__main__")
    assert "give --data, --finetuned, --target too, or nothing" in capsys.readouterr().err


def test_the_notebook_runs_and_holds_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = json.loads((EXAMPLES / "first_upgrade.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("STEPS", "4")
    monkeypatch.setenv("SAMPLES", "32")
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "Upgrade(" in said
    assert re.search(r"^small-mirrored: \d+\.\d %$", said, re.MULTILINE)
    assert "$ tuneport upgrade --source " in said
