"""The harness of language models: scores, rows and the table; plain transformers are the oracle."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rows import rows_in
from benchmarks.skill import __main__ as harness
from benchmarks.skill import language
from benchmarks.skill.__main__ import main
from benchmarks.skill.ablations import ABLATIONS, every_route
from benchmarks.skill.arms import failed_row, make_row
from benchmarks.skill.cells import PAIRS, TASKS, Cell, Parts, Sample, Schedule, cells_of
from benchmarks.skill.groups import GROUPS
from benchmarks.skill.models import LanguageModel
from benchmarks.skill.place import Place
from benchmarks.skill.routes import Inputs, take, write_samples
from benchmarks.skill.rows import to_do
from benchmarks.skill.scores import exact, flips, slot_f1
from benchmarks.skill.table import Table
from builders.chats import chat_tokenizer
from builders.texts import LARGE, SENTENCES, SMALL, make, write
from tuneport.models.open import open_model
from tuneport.pipeline.upgrade import _Routes
from tuneport.synthetic import collect, samples
from tuneport.synthetic.collect import Goal
from tuneport.synthetic.prompts import Prompts

PAIR = "small>large"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models, of two families."""
    place = tmp_path_factory.mktemp("models")
    tokenizer = chat_tokenizer(None)
    more = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    write(place / "small", make("llama", SMALL, **more), tokenizer)
    write(place / "large", make("gemma3", LARGE, **more), tokenizer)
    return place


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions and neutral text where the tasks look for them."""
    place, chance = tmp_path_factory.mktemp("shared"), random.Random(0)
    (place / "data/text").mkdir(parents=True)
    splits = ["train"] * 140 + ["test"] * 6
    texts = [" ".join(chance.sample(" ".join(SENTENCES).split(), 6)) + "?" for _ in splits]
    rows = [
        {"text": text, "label": at % 6, "split": split}
        for at, (text, split) in enumerate(zip(texts, splits, strict=True))
    ]
    with gzip.open(place / TASKS["trec6"].file, "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, rows)))
    with gzip.open(place / "data/text/brown.txt.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(" ".join(SENTENCES[at : at + 8]) for at in range(4)))
    return place


def test_exact_answers_and_flips() -> None:
    right = exact(["card arrival", "top up ", "x"], ["card arrival", "top up", "y"])
    assert right == [True, True, False]
    assert flips(right, [False, True, True]) == 1
    assert flips([False, False], [True, False]) == 0


@pytest.mark.parametrize(
    ("got", "wanted", "score"),
    [
        ('{"a": "1", "b": "2"}', '{"a": "1", "b": "2"}', 100.0),
        ('{"a": "1", "b": "3"}', '{"a": "1", "b": "2"}', 50.0),  # 1 hit, 2 given, 2 wanted
        ('{"a": "1"}', '{"a": "1", "b": "2", "c": "3"}', 50.0),  # 1 hit, 1 given, 3 wanted
        ("no JSON", '{"a": "1"}', 0.0),
        ('["a"]', '{"a": "1"}', 0.0),
        ('{"b": "1"}', '{"a": "1"}', 0.0),
    ],
)
def test_f1_of_slots(got: str, wanted: str, score: float) -> None:
    assert slot_f1([got], [wanted]) == pytest.approx(score)


def test_f1_is_over_all_fields_and_not_a_mean_of_answers() -> None:
    assert slot_f1(['{"a": "1"}', "{}"], ['{"a": "1"}', '{"a": "1", "b": "2"}']) == pytest.approx(200 * 1 / 4)


@pytest.mark.parametrize("name", ["small", "large"])
def test_losses_are_those_of_transformers_without_padding(models: Path, name: str) -> None:
    model = LanguageModel(models / name, "cpu")
    samples = [Sample("why do stars shine", " far away\n"), Sample("the train", " leaves at seven, very cold\n")]
    found = model.all_losses([*samples, Sample("", SENTENCES[0])])
    for (loss, length), sample in zip(found, samples, strict=False):
        start = model.tokenizer(sample.prompt)["input_ids"]
        whole = model.tokenizer(sample.prompt + sample.answer)["input_ids"]
        assert whole[: len(start)] == start
        labels = [-100] * len(start) + whole[len(start) :]
        with torch.no_grad():
            plain = model.module(input_ids=torch.tensor([whole]), labels=torch.tensor([labels])).loss
        assert loss == pytest.approx(float(plain) * (len(whole) - len(start)), rel=1e-4)
        assert length == len(sample.answer)
    tokens = model.tokenizer(SENTENCES[0])["input_ids"]
    assert found[2][1] == len(SENTENCES[0]) - len(model.tokenizer.decode(tokens[:1]))  # nothing predicts the first


@pytest.mark.parametrize("name", ["small", "large"])
def test_written_answers_are_the_likeliest_tokens_to_the_end_of_the_line(models: Path, name: str) -> None:
    model = LanguageModel(models / name, "cpu")
    model.train([Sample(text, " yes\nno") for text in SENTENCES[:4]], Schedule(30, 2e-2, 4))
    prompts = [SENTENCES[0], "the", SENTENCES[9]]
    expected = []
    for prompt in prompts:
        tokens = model.tokenizer(prompt)["input_ids"]
        first = len(tokens)
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model.module(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if tokens[-1] == model.tokenizer.eos_token_id:
                break
        expected.append(model.tokenizer.decode(tokens[first:], skip_special_tokens=True).split("\n")[0].strip())
    assert model.write(prompts, 8) == expected
    assert len(set(expected)) > 1
    ends = {model.tokenizer.decode([token]) for token in model.ends}
    assert "\n" in ends
    assert "a" not in ends


def test_a_lora_is_trained_saved_loaded_and_dropped(models: Path, tmp_path: Path) -> None:
    model = LanguageModel(models / "large", "cpu")
    samples = [Sample(text, " number\n") for text in SENTENCES]
    before = model.bits(samples)
    model.train(samples, Schedule(20, 1e-2, 4))
    after = model.bits(samples)
    assert after < before
    with model.without_lora():
        assert model.bits(samples) == pytest.approx(before)
    model.save(tmp_path / "lora")
    model.drop()
    assert model.bits(samples) == pytest.approx(before)
    model.load(tmp_path / "lora")
    assert model.bits(samples) == pytest.approx(after)
    other = LanguageModel(models / "large", "cpu")
    other.load(tmp_path / "lora")
    assert other.bits(samples) == pytest.approx(after)


def test_a_draw_is_part_of_a_larger_one_and_differs_from_others() -> None:
    parts = Parts([Sample(str(number), "") for number in range(50)], (), ())
    assert parts.draw(0, 10) == parts.draw(0, 20)[:10]
    assert parts.draw(0, 10) != parts.draw(1, 10)


@pytest.mark.parametrize(
    ("task", "keys"), [("trec6", {"text", "choices"}), ("banking77", {"text"}), ("shakespeare", {"text"})]
)
def test_samples_are_shown_without_their_answers(task: str, keys: set[str], tmp_path: Path) -> None:
    sample = Sample(TASKS[task].form.format("a prompt"), " the answer")
    path = write_samples([TASKS[task].row(sample)], tmp_path / "samples")
    assert path is not None
    row = json.loads(Path(path).read_text())
    assert set(row) == keys
    assert task == "shakespeare" or row["text"] == "a prompt"
    assert task == "shakespeare" or "the answer" not in str(row)


def test_cells_of_names_with_dots_have_files_of_their_own(tmp_path: Path) -> None:
    cells = cells_of([("small-0.5b>large-1.5b", "trec6")], ["distill@8"], [0, 1])
    paths = [write_samples([{"text": cell.name}], tmp_path / cell.name) for cell in cells]
    assert len(set(paths)) == 2
    assert [json.loads(Path(str(path)).read_text())["text"] for path in paths] == [cell.name for cell in cells]


def a_row(arm: str, value: float, draw: int | None, **more: Any) -> dict[str, Any]:
    label, _, count = arm.partition("@")
    cell = {"pair": PAIR, "task": "trec6", "arm": label, "n": int(count) if count else None, "draw": draw}
    made = {"scores": {"accuracy": value}, "flips": 3, "neutral": 1.01, "neutral_base": 1.0}
    return {**cell, **made, "seconds": 5.0, "peak_gib": 1.5, **more}


def test_cells_with_a_row_are_skipped_and_failed_ones_tried_again() -> None:
    cells = cells_of([(PAIR, "trec6")], ["target", "distill@100"], [0, 1])
    assert [(cell.label, cell.draw) for cell in cells] == [("target", None), ("distill@100", 0), ("distill@100", 1)]
    rows = [a_row("target", 40.0, None), a_row("distill@100", 80.0, 1), a_row("distill@500", 80.0, 0)]
    assert [cell.draw for cell in to_do(cells, rows, small=False)] == [0]
    assert to_do(cells, rows, small=True) == cells
    broken = {key: value for key, value in a_row("distill@100", 0.0, 0).items() if key != "scores"}
    assert [cell.draw for cell in to_do(cells, [*rows, {**broken, "error": "no"}], small=False)] == [0]


def test_a_finished_file_needs_no_model(tmp_path: Path) -> None:
    path, words = tmp_path / "rows.jsonl", ["--pairs", PAIR, "--tasks", "trec6", "--arms", "target"]
    path.write_text(json.dumps(a_row("target", 40.0, None)) + "\n")
    main(["make", *words, "--rows", str(path), "--models", "no", "--shared", "no", "--work", str(tmp_path / "work")])
    assert len(path.read_text().splitlines()) == 1
    assert not (tmp_path / "work").exists()


def test_what_is_not_there_is_said(tmp_path: Path, models: Path) -> None:
    words = ["--pairs", PAIR, "--tasks", "trec6", "--arms", "target", "--rows", str(tmp_path / "rows.jsonl")]
    with pytest.raises(SystemExit) as error:
        main(["make", *words, "--models", str(models), "--shared", str(tmp_path), "--work", str(tmp_path / "work")])
    assert "trec6.jsonl.gz" in str(error.value)
    assert "brown.txt.gz" in str(error.value)
    assert "model " not in str(error.value)


@pytest.mark.parametrize("arm", ["distil@100", "distill", "target@100", "distill@many"])
def test_an_unknown_arm_is_refused(arm: str) -> None:
    with pytest.raises(SystemExit, match="unknown arm"):
        main(["table", "--rows", "none", "--arms", arm])


def test_the_table_says_what_is_missing() -> None:
    rows = [
        a_row("target", 40.0, None),
        a_row("all-data", 90.0, None),
        a_row("distill@100", 80.0, 0),
        a_row("distill@100", 70.0, 2),
        {**a_row("port@100", 0.0, 0), "error": "no memory"},
    ]
    arms = ["target", "all-data", "distill@100", "port@100", "copy@100"]
    page = Table(GROUPS["language"], rows).page([PAIR], ["trec6"], arms)
    lines = {line.split(" | ")[1]: line for line in page.splitlines() if line.startswith(f"| {PAIR}")}
    assert lines["target"] == f"| {PAIR} | target | 40.0 | 0 | 3 | +1.0 | 5 | 1.5 | 1 of 1 |"
    assert "| 75.0 ± 7.1 | 70 ± 14 | 3 ± 0 |" in lines["distill@100"]
    assert "2 of 3, the rest missing" in lines["distill@100"]
    assert "| missing |" in lines["port@100"]
    assert "| missing |" in lines["copy@100"]
    assert f"- {PAIR}, trec6, port@100: no memory" in page


@pytest.mark.parametrize(
    ("name", "places"), [("language", len(PAIRS) * len(TASKS)), ("classifiers", 18), ("towers", 18)]
)
def test_the_table_of_nothing_names_every_cell(name: str, places: int) -> None:
    group = GROUPS[name]
    page = Table(group, []).page(list(group.grid), group.tasks, group.arms)
    lines = [line for line in page.splitlines() if line.startswith("|") and " of " in line]
    assert len(lines) == places * len(group.arms)
    assert all("missing" in line for line in lines)
    first = page.partition("## ")[2].partition("##")[0]
    assert len({line.count("|") for line in first.splitlines() if "|" in line}) == 1


def test_the_table_measures_gaps_from_the_mean_of_targets_with_draws() -> None:
    rows = [
        a_row("all-data", 90.0, None),
        a_row("target@100", 50.0, 0),
        a_row("target@100", 70.0, 1),
        a_row("extra@100", 75.0, 0),
    ]
    rows = [{**row, "pair": "minilm-l6>mpnet", "task": "trec6-full"} for row in rows]
    found = Table(GROUPS["classifiers"], rows)
    assert found.closed("minilm-l6>mpnet", "trec6-full", "extra@100") == [50.0]
    assert found.closed("minilm-l6>mpnet", "sst2-full", "extra@100") == []


def test_the_table_measures_gaps_of_towers_to_what_the_zoo_says() -> None:
    rows = [{**a_row(arm, value, None), "pair": "a>a2", "task": "mnist"} for arm, value in (("target", 67.9),)]
    rows += [{**a_row("extra@20", 92.9, 1), "pair": "a>a2", "task": "mnist"}]
    assert Table(GROUPS["towers"], rows).closed("a>a2", "mnist", "extra@20") == pytest.approx([100 * 25 / 30])


def test_a_cell_is_made_from_tiny_models(
    models: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(models, shared, tmp_path, "cpu", "float32", autocast=False, small=True)
    shown: list[Any] = []

    def advise_against(cell: Cell, _: Any, samples: Any, *_rest: Any) -> dict[str, Any]:
        shown.append((cell.n, len(samples)))
        return {"chosen": None}

    monkeypatch.setattr(language, "take", advise_against)
    made = {
        cell.label: make_row(place, "language", cell)
        for cell in cells_of([(PAIR, "trec6")], ("old", "target", "all-data", "few-shot@8", "upgrade@8"), [1])
    }
    assert not [row["error"] for row in made.values() if "error" in row]
    assert made["upgrade@8"]["scores"] == made["target"]["scores"]  # nothing was written: the base is scored
    assert made["upgrade@8"]["about"] == {"chosen": None}
    assert shown == [(8, 8)]
    assert len(made["few-shot@8"]["about"]["validation"]) == 4
    for label, row in made.items():
        assert {"scores", "flips", "neutral", "neutral_base", "seconds", "peak_gib", "commit", "machine"} < set(row)
        assert row["draw"] == (1 if "@" in label else None)
        assert str(tmp_path) not in json.dumps(row)
        assert "right" not in row
    assert made["target"]["neutral"] == made["target"]["neutral_base"]
    assert made["old"]["neutral"] != made["old"]["neutral_base"]
    adapter = place.folder("old-small-trec6") / "adapter_model.safetensors"
    kept = adapter.stat().st_mtime_ns
    assert make_row(place, "language", Cell(PAIR, "trec6", "old", None, None))["scores"] == made["old"]["scores"]
    assert adapter.stat().st_mtime_ns == kept


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_changes_one_thing_while_it_lasts(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ablation, asked = ABLATIONS[name], list[dict[str, Any]]()
    monkeypatch.setattr(collect, "collect", lambda *_, **options: asked.append(options))
    monkeypatch.setattr(samples, "collect", collect.collect)
    readers = [open_model(models / each).inputs.reader for each in ("small", "large")]
    assert readers[0] is not None

    def seen() -> tuple[bool, dict[str, Any]]:
        samples.collect("generator", Prompts(("a?",)), Goal(4), judges=["doubt"])  # type: ignore[arg-type, list-item]
        options = {**asked[-1], "filters": [one.name for one in asked[-1].get("filters", ())]}
        return readers[0].same_tokens(readers[1]), options  # type: ignore[union-attr, arg-type]

    plain = seen()
    assert plain == (True, {"judges": ["doubt"], "filters": []})
    with ablation.changed():
        changed = seen()
    assert seen() == plain
    wanted = {
        "distill-by-text": (False, plain[1]),
        "synthetic-unjudged": (True, {"judges": (), "filters": []}),
        "synthetic-unfiltered": (True, {"judges": (), "filters": ["form"]}),
    }
    assert changed == wanted.get(name, plain)
    others = (dict(ablation.options) != {}, ablation.generator is not None, changed != plain)
    assert sum(others) == 1


def test_a_student_begins_where_an_ablation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Routes, "take", lambda self, name, rule: self._teach(name, None, None, rule))
    monkeypatch.setattr(_Routes, "_teach", lambda *given: given[-1])
    routes = object.__new__(_Routes)
    for begin, wanted in ((None, "by the rule"), (True, True), (False, False)):
        with every_route(begin) as made:
            routes.take("distill", "by the rule")  # type: ignore[arg-type, call-arg]
        assert made == {"distill": wanted}
    assert routes.take("distill", "by the rule") == "by the rule"  # type: ignore[arg-type, call-arg, comparison-overlap]


def test_a_failure_is_a_row(models: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(models, shared, tmp_path, "cpu", "float32", autocast=False, small=True)

    def fail(*_: Any) -> dict[str, Any]:
        raise ValueError(f"no memory for {tmp_path}/x\nat all")

    monkeypatch.setattr(language, "take", fail)
    row = make_row(place, "language", Cell(PAIR, "trec6", "port", 8, 0))
    assert row["error"] == "ValueError: no memory for WORK/x"
    assert "scores" not in row


def _no_old(*_: Any) -> dict[str, Any]:
    return {}


def _made(_: Place, __: str, cell: Cell) -> dict[str, Any]:
    return asdict(cell)


def _made_in_a_crowd(place: Place, group: str, cell: Cell) -> dict[str, Any]:
    """Stands for `make_row`: one cell is killed once, one finds no memory once, one fails, one is made."""
    tried = place.work / cell.label
    if cell.label in ("port@1", "port@2") and not tried.exists():
        tried.touch()
        if cell.label == "port@1":
            os.kill(os.getpid(), signal.SIGKILL)
        return failed_row(place, group, cell, "OutOfMemoryError: CUDA out of memory.")
    if cell.label == "port@3":
        return failed_row(place, group, cell, "ValueError: no.")
    return {**asdict(cell), "made": os.getpid()}


def test_cells_without_memory_beside_others_are_tried_again_alone(
    models: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "get_context", lambda _: multiprocessing.get_context("fork"))  # starts at once
    monkeypatch.setattr(harness, "make_old", _no_old)
    monkeypatch.setattr(harness, "make_row", _made_in_a_crowd)
    rows, arms = tmp_path / "rows.jsonl", [f"port@{number}" for number in range(1, 5)]
    folders = ["--models", models, "--shared", shared, "--work", tmp_path, "--rows", rows]
    main(
        [
            "make",
            *map(str, folders),
            "--pairs",
            PAIR,
            "--tasks",
            "trec6",
            "--draws",
            "0",
            "--jobs",
            "2",
            "--arms",
            *arms,
        ]
    )
    made = {f"{row['arm']}@{row['n']}": row for row in rows_in(rows)}
    assert sorted(made) == arms
    assert [name for name in arms if "error" in made[name]] == ["port@3"]
    assert made["port@3"]["error"] == "ValueError: no."


def test_a_file_of_cells_begins_with_the_longest_and_leaves_out_what_would_end_too_late(
    models: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "get_context", lambda _: multiprocessing.get_context("fork"))
    monkeypatch.setattr(harness, "make_old", _no_old)
    monkeypatch.setattr(harness, "make_row", _made)
    monkeypatch.setattr(harness, "cost", lambda cell: ({"port": 5.0, "copy": 50.0}.get(cell.arm, 500.0), 1.0))
    rows, cells = tmp_path / "rows.jsonl", tmp_path / "cells.txt"
    cells.write_text(f"{PAIR} trec6 port@8 1\n{PAIR} trec6 copy@8 0\n{PAIR} trec6 upgrade@8 0\n")
    folders = ["--models", models, "--shared", shared, "--work", tmp_path, "--rows", rows, "--cells", cells]
    main(["make", *map(str, folders), "--memory", "1", "--until", "100"])
    assert [(row["arm"], row["n"], row["draw"]) for row in rows_in(rows)] == [("copy", 8, 0), ("port", 8, 1)]
    rows.unlink()
    monkeypatch.setattr(harness, "run", lambda *given: ends.append(given[-1]) or [Cell(PAIR, "trec6", "port", 8, 1)])
    ends: list[float] = []
    main(["make", *map(str, folders), "--until", "100"])
    assert len(set(ends)) == 1 < len(ends), "cells that are tried again have no more time"


def test_a_cell_costs_what_the_nearest_rows_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(arm: str, pair: str, seconds: float, gib: float) -> dict[str, Any]:
        return {"arm": arm, "n": 8, "task": "trec6", "pair": pair, "seconds": seconds, "peak_gib": gib}

    rows = [row("port", "a>b", 10.0, 2.0), row("port", "c>b", 20.0, 1.0), row("copy", "a>b", 90.0, 9.0)]
    monkeypatch.setattr(harness, "committed", lambda: [*rows, {"error": "ValueError: no."}])
    taken = harness.RESERVED * 2.0 + harness.CONTEXT
    assert harness.cost(Cell("a>b", "trec6", "port", 8, 2)) == (20.0, taken)


def test_no_cell_overtakes_one_that_waits_for_memory() -> None:
    room, order, threads = harness.Room(3.0), list[str](), list[threading.Thread]()

    def work(name: str, need: float) -> None:
        with room.of(need):
            order.append(name)

    with room.of(2.0):
        for name, need in (("large", 9.0), ("small", 1.0)):  # the small one would fit
            waiting = len(room.line) + 1
            threads.append(threading.Thread(target=work, args=(name, need)))
            threads[-1].start()
            while len(room.line) < waiting:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == ["large", "small"]
    assert room.free == room.size


def test_what_tuneport_writes_is_scored_by_plain_peft(models: Path, tmp_path: Path) -> None:
    """A copy to the same base is the old model, sample by sample."""
    model, chance = LanguageModel(models / "small", "cpu"), random.Random(0)
    passages = [Sample("", " ".join(chance.sample(SENTENCES, 2))) for _ in range(40)]
    before = model.bits(passages)
    model.train(passages, Schedule(30, 1e-2, 8))
    model.save(tmp_path / "old")
    after = model.bits(passages)
    assert after < before
    inputs = Inputs(models / "small", tmp_path / "old", models / "small", "cpu", "float32")
    cell = Cell("small>small", "shakespeare", "copy", 40, 0)
    found = take(cell, TASKS["shakespeare"], passages, inputs, tmp_path / "new", None)
    assert found["chosen"] == "copy"
    assert [row["name"] for row in found["routes"]] == ["old", "target", "copy"]
    model.load(tmp_path / "new")
    assert model.bits(passages) == pytest.approx(after, rel=1e-5)


def test_a_closed_form_needs_no_samples_and_is_loaded_by_plain_peft(models: Path, tmp_path: Path) -> None:
    model = LanguageModel(models / "small", "cpu")
    model.train([Sample("", text) for text in SENTENCES], Schedule(10, 1e-2, 8))
    model.save(tmp_path / "old")
    inputs = Inputs(models / "small", tmp_path / "old", models / "large", "cpu", "float32")
    cell = Cell(PAIR, "trec6", "cross-lora", None, None)
    take(cell, TASKS["trec6"], [], inputs, tmp_path / "new", None)
    target, passages = LanguageModel(models / "large", "cpu"), [Sample("", SENTENCES[0])]
    before = target.bits(passages)
    target.load(tmp_path / "new")
    assert target.bits(passages) != pytest.approx(before, rel=1e-6)
