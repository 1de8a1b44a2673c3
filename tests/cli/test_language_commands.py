"""The commands that port a LoRA between real language models, on tiny ones in their place."""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from pathlib import Path

import pytest
import typer

from benchmarks.claims import language_tasks
from benchmarks.claims.language_commands import PAIRS, Session
from builders.chats import chat_tokenizer
from builders.commands import Run
from builders.loras import adapted, saved
from builders.texts import LARGE, SENTENCES, SMALL, make, write
from tuneport.cli import app

ROOT = Path(__file__).resolve().parents[2]
WORDS = language_tasks.INSTRUCTIONS["trec6"][1]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """Models, a LoRA and questions where the commands look for them."""
    place = tmp_path_factory.mktemp("commands")
    found = Session(place, place, "smollm2-135m:gemma3-270m", samples=8, test=2)
    tokenizers = chat_tokenizer("chatml"), chat_tokenizer(None)  # the real Gemma has no template either
    more = {"vocab_size": len(tokenizers[0]), "max_position_embeddings": 512}
    source = make("llama", SMALL, **more)
    write(found.models[0], source, tokenizers[0])
    write(found.models[1], make("gemma3", LARGE, **more), tokenizers[1])
    saved(adapted(source, target_modules="all-linear", task_type="CAUSAL_LM"), found.lora)
    rows = [
        {"text": text, "label": at % len(WORDS), "split": "test" if at % 3 == 0 else "train"}
        for at, text in enumerate(SENTENCES)
    ]
    (place / "data/text").mkdir(parents=True)
    with gzip.open(place / "data/text/trec6.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, rows)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_tasks, "VALIDATION", 1)
        found.write_chats()
    return found


def test_the_commands_lead_from_the_models_to_a_chat(
    session: Session, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = list(session.commands())
    made = [path for path, words in commands if words[0] == "python" and path is not None]
    assert all(path.exists() for path in made)  # by the fixture
    ported = next(words for path, words in commands if path == session.out)
    done = run(*ported[1:])
    assert done.code == 0, done.err
    record = json.loads((session.out / "tuneport.json").read_text(encoding="utf-8"))
    assert (record["as"], record["evaluation"]["metric"]) == ("adapter", "accuracy")
    chat = commands[-1][1]
    monkeypatch.setattr(sys, "argv", chat[1:])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / chat[1]), run_name="__main__")
    assert stop.value.code is None
    assert f"user: {session.question()}\nassistant:" in capsys.readouterr().out


@pytest.mark.parametrize("pair", PAIRS)
def test_the_program_takes_the_commands_of_every_pair(pair: str) -> None:
    program = typer.main.get_command(app)
    session = Session(Path("s"), Path("w"), pair, max_tokens=400)
    found = [words for _, words in session.commands() if words[0] == "tuneport"]
    assert [words[1] for words in found] == ["plan", "transfer"]
    for words in found:
        program.commands[words[1]].make_context(words[1], words[2:])  # raises if an option is unknown or missing


def test_chats_have_answers_labels_and_splits(session: Session) -> None:
    rows = [json.loads(line) for line in session.chats.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 8
    assert {row["split"] for row in rows} == {"train", "validation", "test"}
    assert all(row["messages"][-1] == {"role": "assistant", "content": row["label"]} for row in rows)
