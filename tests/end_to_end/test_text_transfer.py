"""Whole transfers of text models: the paper's T5 protocol in small, other depths and groups, a model to itself."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from typer.testing import CliRunner

from benchmarks.common import load
from builders.runs import prepare
from builders.texts import (
    LABELS,
    SENTENCES,
    Size,
    bert_tokenizer,
    gpt_tokenizer,
    make,
    t5_tokenizer,
    tokens,
    write,
    write_rows,
)
from builders.twins import finetuned
from builders.twins import moved as all_moved
from paper import run as bench
from tuneport import transfer
from tuneport.cli import app
from tuneport.data.formats import read_plain
from tuneport.data.samplers import select
from tuneport.errors import MethodError
from tuneport.measure import accuracy
from tuneport.methods import METHODS, get_method
from tuneport.models.open import describe_module, open_model

# --- the protocol of the paper's T5 table

WIDE = Size(width=24, depth=3, heads=6, head_width=4, hidden=128)
NARROW = Size(width=16, depth=2, heads=4, head_width=4, hidden=32, seed=1)
BUDGETS = (6, 24)
# Each of both once: with one matrix into the MLP and a tied head, and with two and a head of its own.
PLAIN, GATED = (pytest.mark.parametrize("paper", [kind], indirect=True) for kind in ("t5", "t5-gated"))
CLASSES = {
    "animals": ("cat", "dog", "bird", "leaves"),
    "places": ("town", "garden", "river", "mountains"),
    "times": ("winter", "morning", "night", "storm"),
}


@pytest.fixture(scope="module")
def paper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source with a four times wider MLP, more heads and more blocks than the target; texts of three classes."""
    root = tmp_path_factory.mktemp(request.param)
    source, words = make(request.param, WIDE), t5_tokenizer()
    random = np.random.default_rng(0)
    rows = []
    for index in range(72):
        name = list(CLASSES)[index % 3]
        text = " ".join(random.choice(["the", "a", "old", "very", *CLASSES[name]], 5).tolist())
        rows.append({"text": text, "label": name, "split": "train" if index < 48 else "test"})
    return {
        "source": write(root / "source", source, words),
        "tuned": write(root / "tuned", finetuned(describe_module(source), amount=0.05), words),
        "target": write(root / "target", make(request.param, NARROW), words),
        "data": write_rows(root / "data.jsonl", rows),
    }


@GATED
def test_the_t5_protocol_with_library_functions(paper: dict[str, Path]) -> None:
    """Encoder task vector, gradients from the seq2seq loss on label words, a probe on the same N samples."""
    train, test = read_plain(paper["data"], "train"), read_plain(paper["data"], "test")
    folders = [paper[name] for name in ("source", "tuned", "target")]
    source, target = open_model(paper["source"]), open_model(paper["target"])
    table: dict[str, list[float]] = {}
    for samples in BUDGETS:
        few = train.subset(select(train, samples=samples, seed=3))
        rows = {"source": source, "target": target}
        for name in ("theseus", "bico"):
            result = transfer(*folders, train, method=name, scale=1, samples=samples, seed=3, exclude=["decoder.*"])
            assert result.record["data"]["indices"] == select(train, samples=samples, seed=3).tolist()
            assert result.record["resolved"]["loss"] == ("seq2seq" if name == "bico" else None)
            moved = set(result.task_vector)
            assert moved == {layer.weight for layer in target.architecture.layers if layer.stack == "encoder.block"}
            kept = {item.tensor: item.reason for item in result.not_transported}
            assert all(reason == "excluded" for tensor, reason in kept.items() if tensor.startswith("decoder."))
            rows[name] = target.with_module(result.apply())
        for name, model in rows.items():
            table.setdefault(name, []).append(accuracy.linear_probe(model, few, test).accuracy)
    assert {name: len(cells) for name, cells in table.items()} == dict.fromkeys(
        ("source", "target", "theseus", "bico"), len(BUDGETS)
    )
    assert all(100 / 3 < cells[-1] <= 100 for cells in table.values())  # a probe on 24 samples has learnt something


@PLAIN
def test_the_t5_protocol_on_the_command_line(paper: dict[str, Path], tmp_path: Path) -> None:
    """The same samples are drawn for the maps and for the probe; what the commands give is what the library gives."""
    options = ["--source", paper["source"], "--finetuned", paper["tuned"], "--target", paper["target"]]
    common = ["--data", paper["data"], "--samples", "12", "--seed", "3", "--json"]

    def run(*words: Any) -> dict[str, Any]:
        done = CliRunner().invoke(app, [*map(str, words)])
        assert done.exit_code == 0, done.exception
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    record = run("transfer", *options, *common, "--exclude", "decoder.*", "--scale", 1, "--out", tmp_path / "out")
    assert record["resolved"]["loss"] == "seq2seq"
    assert {layer["target"].partition(".")[0] for layer in record["layers"]} == {"encoder"}
    before, after = (load_file(path / "model.safetensors") for path in (paper["target"], tmp_path / "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {layer["target"] for layer in record["layers"]}
    found = run("evaluate", tmp_path / "out", *common, "--protocol", "linear-probe")
    train, test = read_plain(paper["data"], "train"), read_plain(paper["data"], "test")
    few = train.subset(record["data"]["indices"])
    wanted = accuracy.linear_probe(open_model(tmp_path / "out"), few, test)
    assert (found["accuracy"], found["samples"], found["protocol"]) == (wanted.accuracy, 24, "linear-probe")


@GATED
def test_gradients_of_the_encoder_come_through_the_decoder(paper: dict[str, Path]) -> None:
    """The loss is that on the label's words: other words give another task vector, the same inputs the same R_in."""
    folders = [paper[name] for name in ("source", "tuned", "target")]
    rows = [json.loads(line) for line in paper["data"].read_text().splitlines()]
    other = write_rows(paper["data"].parent / "other.jsonl", [{**row, "label": f"no {row['label']}"} for row in rows])
    one, two = (transfer(*folders, data, samples=12, exclude=["decoder.*"]) for data in (paper["data"], other))
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert not torch.allclose(one.task_vector.dense(name), two.task_vector.dense(name))
    assert [record.rank_in for record in one.records] == [record.rank_in for record in two.records]


# --- depths and groups


def token_loss(module: Any, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
    inputs, _ = batch
    logits = module(**inputs).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("depths", [(6, 3), (3, 6), (4, 1)])
def test_blocks_and_groups_of_a_decoder(depths: tuple[int, int]) -> None:
    """Depths by the rule (a tie of 2.5 goes up to 3), and keys and values of other numbers of heads."""
    source = make("llama", Size(depth=depths[0], heads=4, groups=2))
    target = make("llama", Size(width=18, depth=depths[1], heads=6, groups=3, head_width=6, hidden=28, seed=1))
    moved = finetuned(describe_module(source), amount=0.1)
    result = transfer(source, moved, target, tokens(128), loss=token_loss)
    blocks = {(6, 3): [0, 3, 5], (3, 6): [0, 0, 1, 1, 2, 2], (4, 1): [3]}[depths]
    assert len(result.records) == 7 * depths[1]
    for record in result.records:
        block = int(record.target.split(".")[2])
        assert record.source == record.target.replace(f"layers.{block}.", f"layers.{blocks[block]}.")
        if ".k_proj." in record.target or ".v_proj." in record.target:
            assert record.rank_out == 8  # two heads of four, into three heads of six
        if ".q_proj." in record.target:
            assert record.rank_out == 16
    parameters = dict(target.named_parameters())
    assert all(result.task_vector.dense(name).shape == parameters[name].shape for name in result.task_vector)
    with torch.no_grad():
        inputs = tokens(4, seed=3)[0][0]
        assert not torch.allclose(result.apply()(**inputs).logits, target(**inputs).logits)


@pytest.mark.parametrize(("family", "method"), [("bert", "bico"), ("llama", "bico"), ("bert", "theseus")])
@pytest.mark.parametrize("count", [64, 6])
def test_a_model_to_itself_gets_its_task_vector_back(family: str, method: str, count: int) -> None:
    """Wherever the statistics determine it; what they leave open is filled next to the identity."""
    source = make(family)
    moved = finetuned(describe_module(source), amount=0.1)

    def loss(module: Any, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        if family == "llama":
            return token_loss(module, batch)
        return F.cross_entropy(module(**batch[0]).logits, batch[1][:, 0] % LABELS, reduction="sum")

    result = transfer(source, moved, make(family), tokens(count), loss=loss, method=method)
    before, after = dict(source.named_parameters()), dict(moved.named_parameters())
    assert set(result.task_vector) == {name for name in before if not torch.equal(before[name], after[name])}
    for name in result.task_vector:
        tau = (after[name] - before[name]).detach()
        error = float((result.task_vector.dense(name) - tau).norm() / tau.norm())
        assert error < 1e-4, (name, error)


def test_only_what_the_statistics_determine_comes_back_without_completion() -> None:
    """Six samples: where the ranks are full, the task vector itself; elsewhere its projection, which is shorter."""
    source = make("bert")
    moved = finetuned(describe_module(source), amount=0.1)

    def loss(module: Any, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return F.cross_entropy(module(**batch[0]).logits, batch[1][:, 0] % LABELS, reduction="sum")

    result = transfer(
        source, moved, make("bert"), tokens(6), loss=loss, method=replace(get_method("bico"), completion="none")
    )
    layers = {layer.name: layer for layer in describe_module(source).architecture.layers}
    before, after = dict(source.named_parameters()), dict(moved.named_parameters())
    full = 0
    for record in result.records:
        layer = layers[record.target]
        tau = (after[layer.weight] - before[layer.weight]).detach()
        found = result.task_vector.dense(layer.weight)
        if record.rank_in in (None, layer.in_features) and record.rank_out in (None, layer.out_features):
            full += 1
            assert float((found - tau).norm() / tau.norm()) < 1e-4
        else:
            assert float(found.norm()) < float(tau.norm())
            # a projection: what came back is at right angles to what did not
            assert abs(float(((tau - found) * found).sum())) < 1e-3 * float(tau.norm() ** 2)
    assert 0 < full < len(result.records)


@functools.cache
def trio(family: str) -> tuple[Any, Any, Any]:
    """A source, its fine-tune and a target; a transfer changes none of them."""
    source = make(family)
    return source, finetuned(describe_module(source)), make(family, Size(seed=1))


@pytest.mark.parametrize("family", ["bert", "t5", "phi3", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_ports_a_text_model_or_says_why_not(method: str, family: str) -> None:
    """Fused weights, keys of other widths than queries, biases by distance: a result, or one clear line."""
    source, moved, target = trio(family)

    def loss(module: Any, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        inputs, labels = batch
        scores = module(**inputs, labels=labels).logits if family == "t5" else module(**inputs).logits
        wanted = labels[:, 0] % LABELS if scores.ndim == 2 else labels[:, :1].expand(-1, scores.shape[1])
        return F.cross_entropy(scores.flatten(0, -2), wanted.flatten(), reduction="sum")

    if method == "transfusion" and family == "phi3":
        with pytest.raises(
            MethodError, match=r"heads one by one, but .*\[?q.* has 4 of them and .*k.* 2: grouped quer"
        ):
            transfer(source, moved, target, tokens(8), loss=loss, method=method)
        return
    result = transfer(source, moved, target, tokens(8), loss=loss, method=method)
    parameters = dict(target.named_parameters())
    assert {layer.weight for layer in describe_module(target).architecture.layers} <= set(result.task_vector)
    for name in result.task_vector:
        update = result.task_vector.dense(name)
        assert update.shape == parameters[name].shape
        assert torch.isfinite(update).all()


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt-neox", "t5-gated", "gpt2", "bert"])
def test_naive_adds_the_whole_task_vector_where_shapes_agree(family: str) -> None:
    """Heads over the vocabulary too, tied or not."""
    source, target = make(family), make(family, Size(seed=1))
    tuned = all_moved(source)
    result = transfer(source, tuned, target, method="naive")
    assert not result.not_transported
    assert not result.record["left_behind"]
    for (name, before), after in zip(source.named_parameters(), tuned.parameters(), strict=True):
        assert torch.equal(result.task_vector.dense(name), (after - before).detach()), name


@pytest.mark.parametrize("method", ["naive", "transfusion", "bico"])
def test_a_head_over_other_tokens_stays(method: str, tmp_path: Path) -> None:
    """As many tokens, two of them in each other's place: nothing is added to the wrong token's row."""
    words = gpt_tokenizer()
    size = Size(groups=4)
    source, target = make("llama", size, vocab_size=len(words)), make("llama", size, vocab_size=len(words))
    parts = {"source": source, "tuned": all_moved(source), "target": target}
    folders = [write(tmp_path / part, module, words) for part, module in parts.items()]
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": sentence} for sentence in SENTENCES])
    same = transfer(*folders, rows, method=method, samples=8)
    reasons = {item.tensor: item.reason for item in same.not_transported}
    if method == "bico":
        assert reasons["lm_head.weight"] == "vocabulary head: the target keeps its own"
    else:
        assert "lm_head.weight" in same.task_vector
    path = folders[2] / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    known["a"], known["b"] = known["b"], known["a"]
    path.write_text(json.dumps(content), encoding="utf-8")
    other = transfer(*folders, rows, method=method, samples=8)
    assert "lm_head.weight" not in other.task_vector
    reasons = {item.tensor: item.reason for item in other.not_transported}
    assert reasons["lm_head.weight"] == "head over another vocabulary than the source's: the target keeps its own"
    assert "lm_head.weight" in {item["tensor"] for item in other.record["left_behind"]}


def test_a_head_over_more_tokens_stays() -> None:
    source, target = make("llama"), make("llama", Size(seed=1), vocab_size=130)
    result = transfer(source, all_moved(source), target, method="naive")
    assert "lm_head.weight" not in result.task_vector
    assert (
        "head over another vocabulary"
        in {item.tensor: item.reason for item in result.not_transported}["lm_head.weight"]
    )


@pytest.mark.parametrize("name", ["causal", "seq2seq", "contrastive"])
def test_a_scale_is_chosen_by_the_loss_where_there_are_no_classes(name: str, tmp_path: Path) -> None:
    """The best of the candidates on samples that made no map; its loss is the mean over those samples."""
    words = {"causal": gpt_tokenizer, "seq2seq": t5_tokenizer, "contrastive": bert_tokenizer}[name]()
    family = {"causal": "llama", "seq2seq": "t5", "contrastive": "bert"}[name]
    source, target = make(family, vocab_size=len(words)), make(family, Size(seed=1), vocab_size=len(words))
    moved = finetuned(describe_module(source))
    if name == "contrastive":
        source, moved, target = source.bert, moved.bert, target.bert
    parts = {"source": source, "moved": moved, "target": target}
    folders = [write(tmp_path / part, module, words) for part, module in parts.items()]
    second = {"causal": "target", "seq2seq": "target", "contrastive": "text_pair"}[name]
    rows = [{"text": one, second: two} for one, two in pairwise(SENTENCES * 2)]
    result = transfer(*folders, write_rows(tmp_path / "rows.jsonl", rows), samples=24, scale="auto")
    choice = result.record["scale_choice"]
    assert result.record["resolved"]["loss"] == name
    assert (choice["held_out"], choice["samples"]) == (True, 24)
    losses = {found["scale"]: found["loss"] for found in choice["candidates"]}
    assert result.scale in losses
    assert losses[result.scale] <= losses[0.0]
    job = prepare(*folders, tmp_path / "rows.jsonl", samples=24)
    with torch.no_grad():  # contrastive losses depend on who else is in the batch: the halves are judged one by one
        total = sum(
            float(job.losses.target(job.target.module, batch.target))
            for half in job.measurement.halves()
            for batch in half.samples
        )
    assert losses[0.0] == pytest.approx(total / 24, rel=1e-5)


@PLAIN
def test_the_t5_recipe_runs_where_its_models_and_data_are(paper: dict[str, Path], tmp_path: Path) -> None:
    """The recipe of the paper's table as it comes, with fewer samples: tiny T5s lie where T5-3B and T5-Large would."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "t5-3b").symlink_to(paper["source"])
    (tmp_path / "models" / "t5-large").symlink_to(paper["target"])
    columns = {
        "mnli": ("premise", "hypothesis", 3),
        "snli": ("premise", "hypothesis", 3),
        "qnli": ("question", "sentence", 2),
        "rte": ("sentence1", "sentence2", 2),
        "qqp": ("question1", "question2", 2),
    }
    random = np.random.default_rng(0)
    words = ["the", "old", "cat", "dog", "river", "town", "winter"]
    for task, (first, second, classes) in columns.items():
        tuned = tmp_path / "finetuned" / "t5-3b" / task
        tuned.parent.mkdir(parents=True, exist_ok=True)
        tuned.symlink_to(paper["tuned"])
        reference = tmp_path / "finetuned" / "t5-large" / task
        reference.parent.mkdir(exist_ok=True)
        reference.symlink_to(paper["target"])
        (tmp_path / "data" / task).mkdir(parents=True)
        for split in ("train", "validation"):
            rows = [
                {key: " ".join(random.choice(words, 4).tolist()) for key in (first, second)}
                | {"label": index % classes}
                for index in range(15)
            ]
            write_rows(tmp_path / "data" / task / f"{split}.jsonl", rows)
    recipe = Path(bench.__file__).parent / "recipes" / "t5-linear-probe.toml"
    text = recipe.read_text(encoding="utf-8").replace("samples = [50, 100, 200]", "samples = [12]", 1)
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    bench.run_recipe(tmp_path / "recipe.toml", tmp_path / "out", root=tmp_path)
    found = load(tmp_path / "out")
    assert {row.task for row in found.rows} == set(columns)
    assert {(row.method, row.budget) for row in found.rows} == {
        ("fine-tuned source", 0),
        ("fine-tuned target", 0),
        *((method, 12) for method in ("source", "target", "theseus", "bico")),
    }
    assert all(0 <= row.accuracy <= 100 for row in found.rows)
