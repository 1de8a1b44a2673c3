"""Hostile input for text models: tokenizers, configurations, label words and tables that are broken end in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from builders.folders import edit_json
from builders.runs import prepare
from builders.samples import empty_dataset
from builders.texts import (
    LENGTH,
    SENTENCES,
    SMALL,
    bert_tokenizer,
    gpt_tokenizer,
    make,
    roberta_tokenizer,
    t5_tokenizer,
    write,
    write_rows,
)
from builders.twins import finetuned
from tuneport.cli import app
from tuneport.data.dataset import Dataset
from tuneport.errors import CheckpointError, DataError, TuneportError
from tuneport.measure import accuracy
from tuneport.models.base import Model
from tuneport.models.heads import choose_head
from tuneport.models.open import describe_module, open_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good folders, to be copied and spoiled."""
    place = tmp_path_factory.mktemp("good")
    bert = make("bert")
    write(place / "bert", bert, bert_tokenizer())
    write(place / "bert-tuned", finetuned(describe_module(bert)), bert_tokenizer())
    write(place / "sentences", bert.bert, bert_tokenizer())
    write(place / "roberta", make("roberta", vocab_size=320), roberta_tokenizer())
    for family, words in (("llama", gpt_tokenizer()), ("t5", t5_tokenizer())):
        module = make(family, vocab_size=len(words))
        write(place / family, module, words)
        write(place / f"{family}-tuned", finetuned(describe_module(module)), words)
    return place


def spoiled(root: Path, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(root / name, tmp_path / name))


def in_one_line(kind: type[TuneportError], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1500


class TestTokenizers:
    @pytest.mark.parametrize(
        "content",
        [
            "",
            "{",
            "[]",
            "null",
            '{"version": "1.0"}',
            '{"model": {"type": "WordPiece", "vocab": {"a": -1}}}',
            '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}',
            "[" * 10**5,
            "\x00\x01\x02",
        ],
    )
    def test_a_broken_tokenizer(self, root: Path, tmp_path: Path, content: str) -> None:
        folder = spoiled(root, "bert", tmp_path)
        (folder / "tokenizer.json").write_text(content)
        in_one_line(CheckpointError, "bert has a text model but no usable tokenizer", lambda: open_model(folder))

    def test_half_a_tokenizer(self, root: Path, tmp_path: Path) -> None:
        folder = spoiled(root, "bert", tmp_path)
        whole = (folder / "tokenizer.json").read_bytes()
        (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
        in_one_line(CheckpointError, "no usable tokenizer", lambda: open_model(folder))

    @pytest.mark.parametrize("limit", [-3, 0, "many", None, 1e30, [1], "9" * 5000])
    def test_a_limit_that_is_none(self, root: Path, tmp_path: Path, limit: Any) -> None:
        """A limit of no use is an error or is passed over; none of them gets as far as a text."""
        folder = spoiled(root, "bert", tmp_path)
        content = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**content, "model_max_length": limit}))
        if limit in (None, 1e30):
            reader = open_model(folder).inputs.reader
            assert reader is not None
            assert reader.longest == LENGTH
            return
        in_one_line(CheckpointError, "model_max_length of the tokenizer is", lambda: open_model(folder))

    def test_code_beside_a_tokenizer_is_not_run(self, root: Path, tmp_path: Path) -> None:
        folder = spoiled(root, "bert", tmp_path)
        (folder / "words.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Words: pass\n")
        edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["words.Words", "words.Words"]})
        edit_json(folder / "config.json", auto_map={"AutoModel": "words.Words", "AutoConfig": "words.Words"})
        try:
            open_model(folder)
        except TuneportError as error:
            print(error)
        assert not (tmp_path / "ran").exists()

    def test_the_tokenizer_of_another_model(self, root: Path, tmp_path: Path) -> None:
        """Numbers beyond the embedding table are found before the model sees them."""
        folder = spoiled(root, "bert", tmp_path)
        roberta_tokenizer().save_pretrained(folder)
        model = open_model(folder)
        assert model.inputs.encode is not None
        message = r"the tokenizer gives token \d+, but the model has embeddings for 120"
        in_one_line(CheckpointError, message, lambda: model.inputs.encode(["the cat, badly!"]))

    def test_no_tokenizer_at_all(self, root: Path, tmp_path: Path) -> None:
        folder = write(tmp_path / "bert", make("bert"))
        model = open_model(folder)
        assert model.inputs.reader is None
        rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": "0"}, {"text": "b", "label": "1"}])
        paths = (folder, root / "bert-tuned", folder)
        in_one_line(
            TuneportError,
            "bert has no tokenizer in its folder: copy its files",
            lambda: prepare(*paths, rows, samples=2),
        )


class TestConfigurations:
    @pytest.mark.parametrize("name", ["bert", "llama"])
    @pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size"])
    def test_absurd_sizes(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, key: str
    ) -> None:
        folder = spoiled(root, name, tmp_path)
        edit_json(folder / "config.json", **{key: 10**12})
        monkeypatch.setattr(
            "tuneport.models.families.huggingface_config._count_described", lambda *_: pytest.fail("too late")
        )
        in_one_line(CheckpointError, rf"which rules out {key} = 1e\+12", lambda: open_model(folder))

    @pytest.mark.parametrize("value", [0, -4, "many", [1], 2.5])
    @pytest.mark.parametrize("name", ["bert", "llama", "roberta", "t5"])
    def test_places_that_cannot_be(self, root: Path, tmp_path: Path, name: str, value: Any) -> None:
        """A number of places that is none: an error, or, where the model needs none, the usual limit."""
        folder = spoiled(root, name, tmp_path)
        edit_json(folder / "config.json", **{"n_positions" if name == "t5" else "max_position_embeddings": value})
        usual = (name in ("llama", "t5") and value == 0) or (name == "t5" and value == 2.5)
        if usual:
            reader = open_model(folder).inputs.reader
            assert reader is not None
            assert 1 < reader.longest <= 512
            return
        in_one_line(CheckpointError, "config.json|max_position_embeddings|cannot load", lambda: open_model(folder))

    @pytest.mark.parametrize("content", ["{", "[]", "3", "[" * 10**5])
    def test_a_broken_pooling(self, root: Path, tmp_path: Path, content: str) -> None:
        folder = spoiled(root, "sentences", tmp_path)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(content)
        if content in ("[]", "3"):
            in_one_line(CheckpointError, r"1_Pooling.* is not a pooling", lambda: open_model(folder))
        else:
            in_one_line(CheckpointError, "1_Pooling", lambda: open_model(folder))

    @pytest.mark.parametrize(
        ("said", "wanted"),
        [
            ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
            ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
            ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
            ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, None),
        ],
    )
    def test_pooling_is_what_the_folder_says(
        self, root: Path, tmp_path: Path, said: dict[str, bool], wanted: str | None
    ) -> None:
        folder = spoiled(root, "sentences", tmp_path)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
        if wanted is None:
            in_one_line(CheckpointError, r"pooling_mode_max_tokens", lambda: open_model(folder))
            return
        model = open_model(folder)
        assert model.inputs.encode is not None
        assert model.outputs.features is not None
        batch = model.inputs.encode([SENTENCES[0], "the cat"])
        with torch.no_grad():
            states, found = model.module(**batch).last_hidden_state, model.outputs.features(model.module, batch)
        for row in range(2):
            real = states[row, : int(batch["attention_mask"][row].sum())]
            by_name = {"first": real[0], "last": real[-1], "mean": real.mean(0)}
            assert torch.allclose(found[row], by_name[wanted], atol=1e-6)


class TestLabelWords:
    @pytest.mark.parametrize(
        "content", ["{", "[]", "{}", '"words"', '{"a": 3}', '{"a": []}', '{"a": [1]}', '{"a": null}', "[" * 10**5]
    )
    def test_malformed_descriptions(self, root: Path, tmp_path: Path, content: str) -> None:
        path = tmp_path / "words.json"
        path.write_text(content)
        model = open_model(root / "sentences")
        in_one_line(TuneportError, r"words\.json", lambda: choose_head(model, str(path), empty_dataset("data", ("a",))))

    def test_a_model_that_cannot_read_descriptions(self, root: Path, tmp_path: Path) -> None:
        path = tmp_path / "words.json"
        path.write_text('{"a": "something"}')
        model = open_model(root / "llama")
        in_one_line(
            DataError,
            "has no text tower or sentence encoder",
            lambda: choose_head(model, str(path), empty_dataset("d", ())),
        )

    def test_descriptions_make_a_head(self, root: Path, tmp_path: Path) -> None:
        path = tmp_path / "words.json"
        path.write_text(json.dumps({"pets": ["the cat", "a dog"], "weather": "rain {falls} softly"}))
        model = open_model(root / "sentences")
        head = choose_head(model, str(path), empty_dataset("data", ()))
        data = Dataset(
            inputs=["the cat", "a dog", "rain {falls} softly"], labels=np.array([0, 0, 1]), classes=head.classes
        )
        vectors = torch.nn.functional.normalize(accuracy.compute_features(model, data), dim=-1)
        assert head.classes == ("pets", "weather")
        assert head.class_embeds is not None
        assert torch.allclose(head.class_embeds[1], vectors[2], atol=1e-5)
        mean = torch.nn.functional.normalize(vectors[:2].mean(0), dim=0)
        assert torch.allclose(head.class_embeds[0], mean, atol=1e-5)
        assert accuracy.zero_shot(model, head, data).accuracy == 100.0


class TestTexts:
    def trio(self, root: Path, name: str) -> tuple[Path, Path, Path]:
        return root / name, root / f"{name}-tuned", root / name

    def test_empty_texts(self, root: Path, tmp_path: Path) -> None:
        """A model whose tokenizer frames texts reads an empty one; where nothing is left of it, that is said."""
        assert open_model(root / "bert").inputs.encode([""])["input_ids"].shape == (1, 2)
        rows = write_rows(tmp_path / "rows.jsonl", [{"text": "the cat"}, {"text": ""}])
        message = r"the tokenizer finds no token in '', text \d of 2"
        in_one_line(DataError, message, lambda: prepare(*self.trio(root, "llama"), rows, samples=2))
        in_one_line(DataError, message, lambda: open_model(root / "llama").inputs.encode(["the cat", ""]))

    @pytest.mark.parametrize(
        ("source", "target", "message"),
        [
            ("bert", "llama", "source blocks .* have roles .*fc1, fc2; target blocks .* and no fc1, fc2"),
            ("llama", "bert", "llama writes text and .*bert does not: give two models of one kind, or a head for the"),
        ],
    )
    def test_models_of_two_kinds(self, root: Path, tmp_path: Path, source: str, target: str, message: str) -> None:
        """A classifier makes a classifier of the other model, whose layers must then pair."""
        rows = write_rows(tmp_path / "rows.jsonl", [{"text": "the cat"}, {"text": "the dog"}])
        in_one_line(
            TuneportError, message, lambda: prepare(root / source, root / f"{source}-tuned", root / target, rows)
        )

    @pytest.mark.parametrize("name", ["llama", "t5"])
    @pytest.mark.parametrize("empty", ["", "  "])
    def test_empty_targets(self, root: Path, tmp_path: Path, name: str, empty: str) -> None:
        rows = write_rows(
            tmp_path / "rows.jsonl", [{"text": "the cat", "target": "sat"}, {"text": "the dog", "target": empty}]
        )
        message = "target of .*the dog.* is empty"
        in_one_line(DataError, message, lambda: prepare(*self.trio(root, name), rows, samples=2))

    def test_texts_longer_than_the_limit(self, root: Path) -> None:
        model = open_model(root / "bert")
        assert model.inputs.reader is not None
        long = " ".join(SENTENCES)
        found = model.inputs.reader.texts([long, "the cat"])
        assert found.inputs["input_ids"].shape == (2, LENGTH)
        with torch.no_grad():
            assert torch.isfinite(model.module(**found.inputs).logits).all()
        pair = model.inputs.reader.texts([(long, "the cat")])  # the longer one is cut
        assert pair.inputs["input_ids"].shape == (1, LENGTH)
        kept = model.inputs.reader.tokenizer("the cat")["input_ids"][1:]
        assert pair.inputs["input_ids"][0, -len(kept) :].tolist() == kept

    def test_a_prompt_that_leaves_no_room_for_its_target(self, root: Path, tmp_path: Path) -> None:
        rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": " ".join(SENTENCES), "target": "yes"}] * 2)
        message = rf"no token of the target of a sample is left to predict: its text is longer than {LENGTH} tokens"
        in_one_line(DataError, message, lambda: prepare(*self.trio(root, "llama"), rows, samples=2))

    @pytest.mark.parametrize(
        "text", ["\x00", "\u202e", "a\ud800".encode("utf-8", "replace").decode(), "\U0001f600" * 30]
    )
    def test_strange_characters(self, root: Path, text: str) -> None:
        for name in ("bert", "llama", "t5", "roberta"):
            model = open_model(root / name)
            assert model.inputs.reader is not None
            found = model.inputs.reader.texts([text, "the cat"])
            assert torch.isfinite(found.spans[0]).all()

    def test_one_line_on_the_command_line(self, root: Path, tmp_path: Path) -> None:
        rows = write_rows(tmp_path / "rows.jsonl", [{"text": "the cat", "target": ""}] * 3)
        names = ("source", "finetuned", "target")
        options = [w for n, path in zip(names, self.trio(root, "t5"), strict=True) for w in (f"--{n}", str(path))]
        done = CliRunner().invoke(
            app,
            [
                "transfer",
                "--scale",
                "1",
                *options,
                "--data",
                str(rows),
                "--samples",
                "3",
                "--out",
                str(tmp_path / "out"),
            ],
        )
        assert done.exit_code == 1
        assert isinstance(done.exception, DataError)
        assert not (tmp_path / "out").exists()


def test_nothing_here_was_changed(root: Path) -> None:
    """The good folders still open: the tests above spoiled copies."""
    for name in ("bert", "llama", "t5", "roberta", "sentences"):
        model = open_model(root / name)
        assert isinstance(model, Model)
        assert model.outputs.width == SMALL.width
