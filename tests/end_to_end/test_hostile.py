"""Hostile input: files that lie about sizes, carry code or point elsewhere end in one clear line and touch nothing."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import socket
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from builders.folders import Zoo, edit_json, edit_weights, write_head
from builders.processes import run_program
from paper.recipe import read_recipe
from tuneport.data import npz, rows
from tuneport.data.formats import read_plain
from tuneport.errors import CaptureError, CheckpointError, DataError, reraised
from tuneport.io.checkpoint import open_checkpoint
from tuneport.io.tensors import check_finite
from tuneport.measure.capture import Request, measure_pairs
from tuneport.models.heads import read_head
from tuneport.models.open import open_model, outline_model
from tuneport.pipeline.arithmetic import apply, extract
from tuneport.pipeline.transfer import transfer
from tuneport.task_vectors.vector import TaskVector, load_task_vector, save_task_vector
from tuneport.types import Sides

ROOT = Path(__file__).resolve().parents[2]


def copied(zoo: Zoo, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo[name], tmp_path / name))


def test_eighty_spoiled_files(tmp_path: Path) -> None:
    """In a process of its own, since it listens to the interpreter's audit events."""
    program = "import runpy, sys; sys.path[:0] = [sys.argv.pop(1)]; runpy.run_module('fuzz', run_name='__main__')"
    words = ["--first=0", "--cases=80", "--seed=1", f"--part-out={tmp_path / 'out'}"]
    done = run_program(program, str(ROOT / "tools"), *words)
    assert done.code == 0, done.err
    lines = map(json.loads, (tmp_path / "out").read_text(encoding="utf-8").splitlines())
    ended = [line for line in lines if "outcome" in line]
    assert [line["case"] for line in ended] == list(range(80))
    assert [line for line in ended if line["wrong"]] == []


class TestConfigurations:
    @pytest.mark.parametrize(
        "changes",
        [
            {"hidden_size": 10**9},
            {"num_hidden_layers": 10**7},
            {"num_labels": 10**9, "id2label": None, "label2id": None},
            {"intermediate_size": 10**15},
            {"image_size": 10**9},
            {"num_attention_heads": 2**70},
            {"hidden_size": -(10**12)},
        ],
    )
    def test_absurd_sizes_are_refused_before_anything_is_built(
        self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
    ) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        edit_json(folder / "config.json", **changes)
        monkeypatch.setattr(
            "tuneport.models.families.huggingface_config._count_described", lambda *_: pytest.fail("too late")
        )
        with pytest.raises(CheckpointError, match="which rules out") as caught:
            open_model(folder)
        assert next(iter(changes)) in str(caught.value)

    def test_large_models_are_refused_before_memory_is_taken(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        edit_json(folder / "config.json", hidden_size=80_000, num_attention_heads=2)
        with pytest.raises(CheckpointError, match=r"is refused: it describes \d+ parameters, but its weights hold"):
            open_model(folder)

    @pytest.mark.parametrize("content", ["[" * 10**5, '{"a":' * 10**5, '{"hidden_size": ' + "9" * 10**5 + "}"])
    def test_bombs(self, zoo: Zoo, tmp_path: Path, content: str) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        for name in ("config.json", "preprocessor_config.json"):
            before = (folder / name).read_text()
            (folder / name).write_text(content)
            with pytest.raises(CheckpointError, match=name):
                open_model(folder)
            (folder / name).write_text(before)

    @pytest.mark.parametrize(
        "size", [{"height": 10**6, "width": 10**6}, {"height": -3, "width": 4}, {"height": 10**400, "width": 4}]
    )
    def test_absurd_images(self, zoo: Zoo, tmp_path: Path, size: dict[str, int]) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        edit_json(folder / "preprocessor_config.json", size=size)
        with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
            open_model(folder)

    @pytest.mark.parametrize("changes", [{"num_attention_heads": -4}, {"hidden_size": 10**400}, {"patch_size": 0}])
    def test_numbers_that_no_model_has(self, zoo: Zoo, tmp_path: Path, changes: dict[str, Any]) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        edit_json(folder / "config.json", **changes)
        with pytest.raises(CheckpointError, match=r"config\.json") as caught:
            transfer(folder, zoo["vit-tuned"], zoo["vit-target"], zoo.data, scale=1, samples=6)
        assert len(str(caught.value)) < 500

    @pytest.mark.parametrize("part", ["", "vision_config"])
    @pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
    def test_native_code_of_others_is_refused(self, zoo: Zoo, tmp_path: Path, part: str, key: str) -> None:
        folder = copied(zoo, "clip-base", tmp_path)
        config = json.loads((folder / "config.json").read_text())
        for value in ("org/kernel", "org/kernel@v1:function", {"vision_config": "org/kernel"}, "flash_attention_2"):
            (config[part] if part else config)[key] = value
            (folder / "config.json").write_text(json.dumps(config))
            for opened in (open_model, outline_model):
                with pytest.raises(CheckpointError, match=rf"refused: {key} is .*would load native code"):
                    opened(folder)
        for value in ("eager", None):
            (config[part] if part else config)[key] = value
            (folder / "config.json").write_text(json.dumps(config))
            assert open_model(folder).architecture.layers

    def test_images_of_another_size_than_the_model(self, zoo: Zoo, tmp_path: Path) -> None:
        for side in (8000, 224, 8):
            folder = copied(zoo, "vit-base", tmp_path / str(side))
            edit_json(folder / "preprocessor_config.json", size={"height": side, "width": side})
            words = rf"preprocessor_config\.json makes images of {side} x {side} pixels, .*vit-base reads 16 x 16"
            with pytest.raises(CheckpointError, match=words):
                open_model(folder)

    def test_sizes_that_are_no_numbers(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        edit_json(folder / "preprocessor_config.json", size={"height": "16", "width": [16]})
        encode = open_model(folder).inputs.encode
        assert encode is not None
        with pytest.raises(CheckpointError, match=r"preprocessor_config\.json cannot be used"):
            encode([Image.new("RGB", (9, 9))])

    def test_long_names_of_classes_are_shortened(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        edit_json(folder / "config.json", architectures=["N" * 10**5])
        with pytest.raises(CheckpointError, match=r"holds a NNN.* which tuneport does not know") as caught:
            open_model(folder)
        assert len(str(caught.value)) < 2000

    def test_tokenizers_that_are_too_large(self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tuneport.models.families.LARGEST_TOKENIZER", 100)
        folder = copied(zoo, "clip-base", tmp_path)
        embed = open_model(folder).outputs.embed_texts
        assert embed is not None
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is refused: .* a file of a tokenizer may have"):
            embed(["a"])


class Panic(BaseException):
    """As libraries in Rust raise it: no Exception."""


def test_panics_of_other_libraries_are_errors_of_one_line() -> None:
    with (
        pytest.raises(CheckpointError, match="the tokenizer cannot read the texts: retry limit"),
        reraised("the tokenizer cannot read the texts"),
    ):
        raise Panic("retry limit")
    with pytest.raises(KeyboardInterrupt), reraised("no"):
        raise KeyboardInterrupt


class TestPipes:
    """Opening a pipe waits for ever: the test would not end."""

    @pytest.mark.parametrize("name", ["a.jsonl", "a.csv.gz", "a.npz", "a.parquet", "a"])
    def test_data(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name)
        (tmp_path / f"link-{name}").symlink_to(tmp_path / name)
        for path in (tmp_path / name, tmp_path / f"link-{name}"):
            with pytest.raises(DataError, match="is a named pipe, not a file"):
                read_plain(path, "train")

    def test_sockets_and_devices(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "a.csv"))
            with pytest.raises(DataError, match="is a socket, not a file"):
                read_plain(tmp_path / "a.csv", "train")
        (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
        with pytest.raises(DataError, match="is a device, not a file"):
            read_plain(tmp_path / "zero.jsonl", "train")
        (tmp_path / "cat").mkdir()
        (tmp_path / "rows.jsonl").write_text(json.dumps({"image": "/dev/zero", "label": 1}))
        with pytest.raises(DataError, match="do not exist: /dev/zero"):
            read_plain(tmp_path / "rows.jsonl", "train")

    @pytest.mark.parametrize("name", ["w.safetensors", "w.bin"])
    def test_weights_heads_and_task_vectors(self, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name)
        for read in (open_checkpoint, load_task_vector, read_head):
            with pytest.raises(CheckpointError, match="is a named pipe, not a file"):
                read(tmp_path / name)

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "preprocessor_config.json"])
    def test_files_of_a_model(self, zoo: Zoo, tmp_path: Path, name: str) -> None:
        folder = copied(zoo, "clip-base", tmp_path)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(CheckpointError, match=f"{name} is a named pipe, not a file"):
            open_model(folder)

    @pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
    def test_adapters(self, zoo: Zoo, tmp_path: Path, name: str) -> None:
        os.mkfifo(tmp_path / name)
        if name != "adapter_config.json":
            (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        with pytest.raises(CheckpointError):
            extract(zoo["vit-base"], tmp_path)


class TestPickles:
    @pytest.mark.parametrize("kind", ["nested", "sparse", "meta", "quantised"])
    @pytest.mark.filterwarnings("ignore")
    def test_tensors_without_plain_numbers(self, tmp_path: Path, kind: str) -> None:
        tensor = {
            "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.ones(3, device="meta"),
            "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        }[kind]()
        torch.save({"w": tensor, "v": torch.ones(2)}, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match=r"w\.pt is refused: 1 of its 2 tensors .*: w"):
            open_checkpoint(tmp_path / "w.pt")

    def test_a_tensor_that_claims_more_than_its_file(self, tmp_path: Path) -> None:
        torch.save({"w": torch.zeros(1).expand(10**7)}, tmp_path / "w.pt")
        with pytest.raises(CheckpointError, match="claim more than its"):
            open_checkpoint(tmp_path / "w.pt")

    @pytest.mark.parametrize("protocol", range(6))
    def test_code_is_not_run(self, tmp_path: Path, protocol: int) -> None:
        class Trap:
            def __reduce__(self) -> Any:
                return open, (str(tmp_path / "ran"), "w")

        (tmp_path / "w.pt").write_bytes(pickle.dumps({"w": Trap()}, protocol))
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "w.pt")
        assert not (tmp_path / "ran").exists()


class TestHeadsAndTaskVectors:
    @pytest.mark.parametrize("classes", [3, None, "abcd", {"a": 1, "b": 2, "c": 3, "d": 4}])
    def test_classes_that_are_no_list(self, tmp_path: Path, classes: Any) -> None:
        path = write_head(tmp_path / "h.safetensors", 3)
        save_file(load_file(path), path, {"classes": json.dumps(classes)})
        with pytest.raises(CheckpointError, match="names no classes"):
            read_head(path)

    def test_names_that_cannot_be_written(self, tmp_path: Path) -> None:
        path = write_head(tmp_path / "h.safetensors", 3)
        save_file(load_file(path), path, {"classes": '["a", "b", "c", "\\ud800"]'})
        with pytest.raises(CheckpointError, match=r"a class of .* has a name that is not Unicode text"):
            read_head(path)

    def test_more_dimensions_than_tensors_have(self, tmp_path: Path) -> None:
        path = tmp_path / "h.safetensors"
        header = json.dumps({"class_embeds": {"dtype": "F32", "shape": [1] * 200, "data_offsets": [0, 4]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        with pytest.raises(CheckpointError, match="class_embeds has 200 dimensions; expected at most 64"):
            open_checkpoint(path)

    def test_headers_that_are_too_large(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        entry = b'"t%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        header = b"{" + b",".join(entry % i for i in range(300_000)) + b"}"
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        with pytest.raises(CheckpointError, match=r"refused: its header .* at most 2000000 are read"):
            open_checkpoint(path)

    def test_long_names_are_shortened(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        save_file({"n" * 10**5: torch.full((1,), float("nan"))}, path)
        with pytest.raises(CheckpointError, match="hold NaN") as caught:
            check_finite(open_checkpoint(path))
        assert len(str(caught.value)) < 1000
        for notes in ({"format": "n" * 10**5}, {"format": "tuneport-task-vector", "version": "n" * 10**5}):
            save_file({"w": torch.ones(1)}, path, notes)
            with pytest.raises(CheckpointError, match="nnn") as caught:
                load_task_vector(path)
            assert len(str(caught.value)) < 1000
        header = json.dumps({"w": {"dtype": "n" * 10**5, "shape": [1], "data_offsets": [0, 4]}}).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
        with pytest.raises(CheckpointError, match="cannot be read as safetensors") as caught:
            open_checkpoint(path)
        assert len(str(caught.value)) < 1000

    def test_nested_and_complex_ones(self, tmp_path: Path) -> None:
        path = write_head(tmp_path / "h.safetensors", 3)
        save_file(load_file(path), path, {"classes": "[" * 10**5})
        with pytest.raises(CheckpointError, match="names no classes"):
            read_head(path)
        save_file({**load_file(path), "logit_scale": torch.tensor(1j)}, path, {"classes": "[]"})
        with pytest.raises(CheckpointError, match="complex"):
            read_head(path)

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
    def test_task_vectors_hold_differences_of_weights(self, tmp_path: Path, dtype: torch.dtype) -> None:
        path = tmp_path / "tau.safetensors"
        save_file({"w": torch.ones(2).to(dtype)}, path, {"format": "tuneport-task-vector", "version": "1"})
        with pytest.raises(CheckpointError, match=r"are not differences of weights"):
            load_task_vector(path)

    def test_nan_is_not_written(self, zoo: Zoo, tmp_path: Path) -> None:
        base = zoo["vit-base"]
        stored = open_checkpoint(base)
        for value, scale in ((float("nan"), 1.0), (3e38, 2.0)):
            tau = tmp_path / "tau.safetensors"
            vector = TaskVector({"classifier.bias": torch.full(stored.shape("classifier.bias"), value)})
            save_task_vector(tau, vector, overwrite=True)
            with pytest.raises(CheckpointError, match=r"classifier\.bias would hold NaN or infinite values in torch"):
                apply(load_task_vector(tau), base, tmp_path / "out", scale=scale)
            assert not (tmp_path / "out").exists()


class TestLinks:
    def test_a_companion_that_links_elsewhere_is_not_copied(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "clip_vision-target", tmp_path)
        secret = tmp_path / "secret"
        secret.write_text("private")
        (folder / "notes.txt").symlink_to(secret)
        trio = (zoo["clip_vision-base"], zoo["clip_vision-tuned"], folder)
        result = transfer(*trio, method="naive")
        with pytest.raises(CheckpointError, match=r"notes\.txt is a link to .*secret, outside its folder"):
            result.save(tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_links_of_the_hub_cache_are_followed(self, zoo: Zoo, tmp_path: Path) -> None:
        cache = tmp_path / "models--org--target"
        snapshot = cache / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir()
        for number, file in enumerate(sorted(zoo["vit-target"].iterdir())):
            shutil.copy(file, cache / "blobs" / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        result = transfer(zoo["vit-base"], zoo["vit-tuned"], snapshot, method="naive")
        result.save(tmp_path / "out")
        assert not (tmp_path / "out" / "config.json").is_symlink()
        assert result.record["target"]["name"] == "org/target"
        assert result.record["target"]["revision"] == "0123"


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


class TestData:
    @pytest.mark.parametrize("side", [12_000, 60_000])
    def test_an_image_that_lies_about_its_size(self, tmp_path: Path, side: int) -> None:
        (tmp_path / "cat").mkdir()
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"x")) + chunk(b"IEND", b"")
        (tmp_path / "cat" / "a.png").write_bytes(png)
        with pytest.raises(DataError, match="too large to open safely"):
            read_plain(tmp_path, "train").inputs[0]

    def test_an_image_of_one_row(self, tmp_path: Path) -> None:
        (tmp_path / "cat").mkdir()
        Image.new("RGB", (500, 4)).save(tmp_path / "cat" / "a.png")
        with pytest.raises(DataError, match="500 x 4 pixels, and one side may be 100 times the other"):
            read_plain(tmp_path, "train").inputs[0]

    def test_formats_that_start_programs_are_not_opened(self, tmp_path: Path) -> None:
        (tmp_path / "cat").mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "a.eps")
        (tmp_path / "cat" / "a.eps").rename(tmp_path / "cat" / "a.png")
        with pytest.raises(DataError, match="not in a format"):
            read_plain(tmp_path, "train").inputs[0]

    def test_archives_that_unpack_to_too_much(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(npz, "LARGEST_ARCHIVE", 10**6)
        monkeypatch.setattr(rows, "LARGEST_TABLE", 10**6)
        np.savez_compressed(tmp_path / "d.npz", x=np.zeros((100, 100, 100, 3), np.uint8))
        with pytest.raises(DataError, match="is refused: it has"):
            read_plain(tmp_path / "d.npz", "train", labelled=False)
        (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"text\n" + b"aaaaaaa\n" * 10**6))
        with pytest.raises(DataError, match="a table may have"):
            read_plain(tmp_path / "rows.csv.gz", "train", labelled=False)

    def test_an_array_that_lies_about_its_shape(self, tmp_path: Path) -> None:
        content = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            content, {"descr": "|u1", "fortran_order": False, "shape": (10**7, 10**4, 10**4, 3)}
        )
        with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
            archive.writestr("x.npy", content.getvalue())
        with pytest.raises(DataError, match="cannot read"):
            read_plain(tmp_path / "d.npz", "train", labelled=False)

    @pytest.mark.parametrize(
        ("arrays", "words"),
        [
            ({"y": np.array([0, 2**62])}, "has the label 4611686018427387904; expected labels from 0, at most"),
            ({"y": np.array([0, 1]), "classes": np.zeros(2, "V4")}, "classes of .* is |V4 of shape"),
            ({"y": np.array([0, 1]), "classes": np.zeros(2, "c8")}, "expected a list of texts"),
        ],
    )
    def test_labels_and_classes(self, tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
        np.savez(tmp_path / "d.npz", x=np.zeros((2, 3, 3, 3), np.uint8), **arrays)
        with pytest.raises(DataError, match=words):
            read_plain(tmp_path / "d.npz", "train")

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("words,label\na,1\n", "has columns words, label; expected image, or text"),
            ("text,label\na,1,2\n", "line 2 of .* has 3 fields; expected 2"),
            ("text,label\na,-7\n", None),
            (f"text,label\na,{'9' * 5000}\n", None),
        ],
    )
    def test_tables_with_other_columns(self, tmp_path: Path, content: str, words: str | None) -> None:
        (tmp_path / "rows.csv").write_text(content)
        if words is None:
            assert read_plain(tmp_path / "rows.csv", "train").labels is not None
            return
        with pytest.raises(DataError, match=words):
            read_plain(tmp_path / "rows.csv", "train")

    @pytest.mark.parametrize(
        "content", ["a = " + "[" * 10**5, "a = 1e", "\xff", "batch_size = 0", 'learning_rate = "x"']
    )
    def test_recipes(self, tmp_path: Path, content: str) -> None:
        paths = 'source = "."\ntarget = "."\nfinetuned = {a = "."}\ndata = {a = "."}\nsamples = [1]\n'
        (tmp_path / "r.toml").write_bytes((paths + content).encode("latin-1"))
        with pytest.raises(DataError, match=r"r\.toml"):
            read_recipe(tmp_path / "r.toml")
        (tmp_path / "r.toml").write_text(paths.replace('"."', f'"{"n" * 5000}"'))
        with pytest.raises(DataError, match="does not exist"):
            read_recipe(tmp_path / "r.toml")


class TestNumbers:
    def test_nan_in_activations_names_layer_and_batch(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "clip_vision-target", tmp_path)
        name = "vision_model.encoder.layers.1.mlp.fc1.weight"
        edit_weights(folder, lambda t: t[name].fill_(3e38))
        trio = (zoo["clip_vision-base"], zoo["clip_vision-tuned"], folder)
        with pytest.raises(CaptureError, match=r"NaN or Inf in batch 0 at .*layers\.1\.mlp"):
            transfer(*trio, zoo.data, scale=1, samples=12, method="theseus")

    def test_nan_in_weight_gradients(self) -> None:
        from tuneport.layers import find_layers
        from tuneport.pairing import LayerPair

        module = torch.nn.Sequential(torch.nn.Linear(3, 3))
        layer = find_layers(module)[0]

        def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).sum()

        batches = [torch.ones(2, 3), torch.full((2, 3), float("inf"))]
        with pytest.raises(CaptureError, match=r"NaN or Inf in batch 1 at 0\.weight \(weight_gradient\)"):
            measure_pairs(
                Sides(module, module),
                [LayerPair(layer, layer)],
                batches,
                Sides(loss, loss),
                Request({"weight_gradient"}),
            )
