"""Checkpoints: lazy reading, streamed writing, and every error text."""

from __future__ import annotations

import doctest
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tuneport.io.checkpoint as module
from builders.weights import assert_same, error_of
from tuneport.config.options import parse_bytes
from tuneport.errors import TuneportError
from tuneport.io.checkpoint import SafetensorsFile, open_checkpoint, read_json, write_checkpoint
from tuneport.io.fingerprint import file_digests
from tuneport.io.tensors import LazyTensors, TensorSpec, UnknownTensorError, describe, same_structure


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return BertModel(config).eval()


@pytest.fixture(scope="module", params=["single", "sharded"])
def saved(request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    model.save_pretrained(folder, max_shard_size="5GB" if request.param == "single" else "20KB")
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_examples() -> None:
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


# Reading


def test_reads_what_transformers_saved(saved: Path, model: Any) -> None:
    checkpoint = open_checkpoint(saved)
    assert checkpoint.path == saved
    assert len(checkpoint.files) == len(list(saved.glob("*.safetensors")))
    assert list(checkpoint) == sorted(checkpoint)
    assert checkpoint.metadata["format"] == "pt"
    expected = {name: tensor for name, tensor in model.state_dict().items() if name in checkpoint}
    assert len(expected) == len(checkpoint) > 30
    assert_same(checkpoint, expected)


def test_describes_without_reading(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(saved)
    monkeypatch.setattr(SafetensorsFile, "read", lambda *_: pytest.fail("a tensor was read"))
    assert "embeddings.word_embeddings.weight" in checkpoint
    assert "nothing" not in checkpoint
    assert checkpoint.shape("embeddings.word_embeddings.weight") == (40, 16)
    assert checkpoint.dtype("embeddings.word_embeddings.weight") == torch.float32
    assert describe(checkpoint, "pooler.dense.bias") == TensorSpec((16,), torch.float32)


def test_keeps_no_tensor_and_shares_none(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "w.safetensors")
    checkpoint = open_checkpoint(tmp_path / "w.safetensors")
    checkpoint["w"].zero_()
    assert torch.equal(checkpoint["w"], torch.ones(4))
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], torch.ones(4))


def test_unknown_name_is_a_key_error_with_a_readable_text(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    assert checkpoint.get("nothing") is None
    with pytest.raises(UnknownTensorError) as caught:
        checkpoint["nothing"]
    assert isinstance(caught.value, KeyError)
    assert str(caught.value) == f"1 tensors are not in {saved}: nothing."
    with pytest.raises(UnknownTensorError, match=r"LayerNorm\.bas \(nearest: embeddings\.LayerNorm\.bias\)"):
        checkpoint.shape("embeddings.LayerNorm.bas")


def test_sharded_pickles(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.zeros(2)}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(open_checkpoint(tmp_path), {"a": torch.ones(2), "b": torch.zeros(2)})


def test_path_errors(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert error_of(lambda: open_checkpoint(missing)) == (
        f"{missing} does not exist. Expected a model folder or a .safetensors file."
    )
    text = tmp_path / "weights.txt"
    text.write_text("hello")
    assert error_of(lambda: open_checkpoint(text)) == (
        f"{text} is not a weight file: its name ends in .txt, expected .safetensors or one of .bin, .pt, .pth, .ckpt."
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert error_of(lambda: open_checkpoint(empty)) == (
        f"{empty} is not a model: no config.json or safetensors in it. "
        "Give the folder that save_pretrained wrote, or a .safetensors file."
    )
    (empty / "config.json").write_text("{}")
    assert error_of(lambda: open_checkpoint(empty)).startswith(
        f"{empty} has a config.json but no weights: expected one of model.safetensors, "
    )
    (empty / "adapter_config.json").write_text("{}")
    assert error_of(lambda: open_checkpoint(empty)).startswith(f"{empty} is an adapter, not a model.")


def test_folder_with_other_file_names(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "open_clip_model.safetensors")
    assert list(open_checkpoint(tmp_path)) == ["w"]
    save_file({"v": torch.ones(2)}, tmp_path / "another.safetensors")
    assert error_of(lambda: open_checkpoint(tmp_path)) == (
        f"{tmp_path} holds 2 safetensors files and no model.safetensors.index.json: "
        "another.safetensors, open_clip_model.safetensors. Give one of the files, or add the index."
    )


@pytest.mark.parametrize(
    "entry", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "C:x", "x\0y"]
)
def test_index_pointing_outside_is_refused(tmp_path: Path, entry: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "secret.safetensors")
    write_index(tmp_path / "model", {"w": entry})
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert error_of(lambda: open_checkpoint(tmp_path / "model")) == (
        f"{index} is refused: its entries must be names of files "
        f"in the same folder, but it has {entry!r}. Use a copy from a source that you trust."
    )


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": null}'])
def test_malformed_index_is_refused(tmp_path: Path, content: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content)
    expected = "expected JSON with a weight_map of tensor to file names. Download or save the model again."
    if content == "[]":
        expected = "expected a JSON object."
    assert error_of(lambda: open_checkpoint(tmp_path)) == f"{index} is not an index: {expected}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"[" * 200_000, "nested too deeply"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ],
)
def test_json_that_cannot_be_read(tmp_path: Path, content: bytes, reason: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    assert (
        error_of(lambda: open_checkpoint(tmp_path)) == f"{index} is not an index: {reason}. Download or save it again."
    )


def test_json_that_is_too_large(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(30 * 10**6)
    assert error_of(lambda: read_json(file, "a configuration")) == (
        f"{file} is refused: 30 MB are too many for a configuration."
    )


def test_index_that_does_not_match_its_shards(tmp_path: Path) -> None:
    write_index(tmp_path, {"w": "one.safetensors", "v": "two.safetensors"})
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    assert error_of(lambda: open_checkpoint(tmp_path)) == (
        f"1 of 2 weight files of {tmp_path} are missing: two.safetensors. Download or copy them again."
    )
    save_file({"x": torch.ones(2)}, tmp_path / "two.safetensors")
    assert error_of(lambda: open_checkpoint(tmp_path)) == (
        f"1 of 2 tensors that {tmp_path / 'model.safetensors.index.json'} lists are not in their files: "
        "v (two.safetensors). Download or save the model again."
    )


def test_shards_may_be_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "blobs" / "abc")
    write_index(tmp_path / "snapshot", {"w": "one.safetensors"})
    (tmp_path / "snapshot" / "one.safetensors").symlink_to(tmp_path / "blobs" / "abc")
    assert_same(open_checkpoint(tmp_path / "snapshot"), {"w": torch.ones(2)})


# Digests


def test_a_file_is_digested_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import sha

    read, really = [], sha.sha_fileobj
    monkeypatch.setattr(sha, "sha_fileobj", lambda file: (read.append(1), really(file))[1])
    file, before = tmp_path / "a", time.time_ns() - 10**12
    found = []
    for text, changed in (("one", before), ("one", before), ("two", before + 1), ("six", None), ("ten", None)):
        if not file.exists() or file.read_text() != text:
            file.write_text(text)
        if changed is not None:
            os.utime(file, ns=(changed, changed))
        found.append(file_digests([file])[str(file)])
    assert found == [hashlib.sha256(text).hexdigest() for text in (b"one", b"one", b"two", b"six", b"ten")]
    assert len(read) == 4


def test_file_digests(tmp_path: Path) -> None:
    content = os.urandom(2**20 + 17)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"")
    assert file_digests([tmp_path / "a", str(tmp_path / "b")]) == {
        str(tmp_path / "a"): hashlib.sha256(content).hexdigest(),
        str(tmp_path / "b"): hashlib.sha256(b"").hexdigest(),
    }
    assert error_of(lambda: file_digests([tmp_path / "c"])) == (
        f"{tmp_path / 'c'} cannot be read (No such file or directory)."
    )


# Writing


def test_writes_shared_and_strided_tensors(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    tied = {
        "one": weight,
        "two": weight,
        "turned": weight.T,
        "part": weight[:, 1],
        "live": torch.nn.Parameter(weight),
    }
    write_checkpoint(tmp_path, tied)
    assert_same(load_file(tmp_path / "model.safetensors"), tied)


@pytest.mark.parametrize("limit", ["5GB", "20KB", 3000, 1])
def test_round_trip_through_transformers(tmp_path: Path, saved: Path, model: Any, limit: int | str) -> None:
    from transformers import AutoModel

    checkpoint = open_checkpoint(saved)
    files = write_checkpoint(tmp_path, checkpoint, max_shard_size=limit)
    assert all(file.is_file() for file in files)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert_same(open_checkpoint(tmp_path), checkpoint)
    if limit == "5GB":
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        shards = files[:-1]
        assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
        assert files[-1].name == "model.safetensors.index.json"
        total = sum(tensor.nbytes for tensor in checkpoint.values())
        assert json.loads(files[-1].read_text())["metadata"]["total_size"] == total
        assert all(
            sum(t.nbytes for t in shard.values()) <= parse_bytes(limit) or len(shard) == 1
            for shard in map(load_file, shards)
        )
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    shutil.copy(saved / "config.json", tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert_same(loaded.state_dict(), model.state_dict())


def test_writing_reads_each_tensor_once_and_drops_it(tmp_path: Path, saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    read: list[str] = []

    def watched(name: str) -> torch.Tensor:
        read.append(name)
        return checkpoint[name]

    lazy = LazyTensors(checkpoint, watched, lambda name: describe(checkpoint, name))
    write_checkpoint(tmp_path, lazy, max_shard_size="20KB")
    assert sorted(read) == sorted(checkpoint)


def test_writing_options_and_errors(tmp_path: Path) -> None:
    files = write_checkpoint(tmp_path, {"w": torch.ones(2)}, stem="vision")
    assert [file.name for file in files] == ["vision.safetensors"]
    assert open_checkpoint(files[0]).metadata == {"format": "pt"}
    lazy = LazyTensors(["w"], lambda _: torch.ones(2), lambda _: TensorSpec((3,), torch.float16))
    assert error_of(lambda: write_checkpoint(tmp_path, lazy)) == (
        "tensor w is (2,) torch.float32, expected (3,) torch.float16."
    )
    path = tmp_path / "model.safetensors"
    assert error_of(lambda: write_checkpoint(tmp_path, {"w": torch.ones(2, dtype=torch.complex128)})) == (
        f"{path} cannot hold w (torch.complex128): safetensors has no such dtype. Cast them."
    )
    for size in ("5XB", 0):
        with pytest.raises(TuneportError) as caught:
            write_checkpoint(tmp_path, {"w": torch.ones(2)}, max_shard_size=size)
        assert str(caught.value) == f"max_shard_size must be a size such as 8GiB or 500MB, got {size!r}."


class TestTiedTensors:
    """A tensor that two names share is in the files once, under one of them."""

    @pytest.fixture
    def tied(self, tmp_path: Path) -> Path:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        BertForMaskedLM(BertConfig(vocab_size=40, **size)).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    def test_tied_tensors_stay_tied_through_a_round_trip(self, tied: Path, tmp_path: Path) -> None:
        from transformers import BertForMaskedLM

        stored = open_checkpoint(tied)
        decoder = "cls.predictions.decoder.weight"
        assert decoder not in stored, "transformers leaves it out"
        write_checkpoint(tmp_path, stored)
        shutil.copy(tied / "config.json", tmp_path)
        model = BertForMaskedLM.from_pretrained(tmp_path)
        assert model.get_parameter(decoder) is model.get_input_embeddings().weight

    def test_model_that_stores_both_tied_tensors_is_named(self, tied: Path) -> None:
        stored = dict(open_checkpoint(tied))
        both = {**stored, "cls.predictions.decoder.weight": torch.zeros(40, 16)}
        text = error_of(lambda: same_structure(stored, both))
        assert "cls.predictions.decoder.weight" in text
        assert text.endswith('Exclude them with `exclude=["cls.predictions.decoder.*"]`.')
        same_structure(stored, both, ["cls.predictions.decoder.*"])
