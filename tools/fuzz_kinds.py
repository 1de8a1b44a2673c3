"""The kinds of files that fuzz.py spoils: good small ones, how each is spoiled, and how it is read."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_lessons import lessons
from fuzz_lists import lists
from fuzz_spoil import (
    odd_adapter,
    odd_arrays,
    odd_head,
    odd_pickle,
    odd_recipe,
    odd_table,
    odd_tokenizer,
    odd_vector,
    spoil_bytes,
    spoil_header,
    spoil_json,
    spoil_lines,
    spoil_members,
    spoil_metadata,
    spoil_packed,
    spoil_text,
    spoil_value,
)
from PIL import Image
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for paper

from paper import files
from paper.recipe import read_recipe
from tuneport import TuneportError, cli, extract
from tuneport.data import npz, rows
from tuneport.data.formats import read_plain
from tuneport.io.checkpoint import open_checkpoint, read_json
from tuneport.io.state import StateFile
from tuneport.io.tensors import check_finite
from tuneport.maps.statistics import CrossCovariance, Statistics
from tuneport.models.chat import render_chat
from tuneport.models.families import open_tokenizer
from tuneport.models.heads import read_head
from tuneport.models.open import open_model
from tuneport.runtime.resume import Work, load_statistics, save_statistics
from tuneport.task_vectors.lora_format import open_adapter
from tuneport.task_vectors.lora_read import task_vector_of
from tuneport.task_vectors.vector import TaskVector, load_task_vector, save_task_vector

MIB = 2**20
UNPACKED = 64 * MIB  # the limit of archives and Parquet files while fuzzing, so that bombs are made quickly
TEXT = 2 * MIB  # that of text tables, whose rows are parsed one by one


def set_limits() -> None:
    """Lower the limits of the readers, which docs/limits.md names, to those of this page."""
    rows.LARGEST_TABLE = TEXT
    npz.LARGEST_ARCHIVE = files._LARGEST = UNPACKED


@dataclass(frozen=True)
class Kind:
    """A file to spoil, how, and how its folder or file is read; `alone` in a process with limits of its own."""

    name: str
    file: str
    spoil: Callable[[bytes, random.Random], bytes]
    read: Callable[[Path], object]
    alone: bool = False
    unpacked: int = 0  # bytes that it may unpack to, a quarter of what it may take in memory
    put: Callable[[Path, bytes], object] = Path.write_bytes
    longest: int = 2000  # characters of a message


class Trap:
    """Unpickling this would write a file: if it ever appears, code was run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


def look_at(folder: Path) -> None:
    """Open a checkpoint and read all of it."""
    opened = open_checkpoint(folder)
    check_finite(opened)
    for name in opened:
        opened[name]


def look_at_vector(path: Path) -> None:
    vector = load_task_vector(path)
    for name in vector:
        vector.dense(name)
    vector.norm()


def look_at_adapter(path: Path) -> None:
    """Read an adapter folder as a change of its base, all of it."""
    base = {"a.weight": torch.zeros(4, 3), "a.bias": torch.zeros(4)}
    vector = task_vector_of(open_adapter(path.parent), base)
    for name in vector:
        vector.dense(name)


def look_at_data(path: Path) -> None:
    for split in ("train", "test"):
        data = read_plain(path, split, labelled=False)  # type: ignore[arg-type]
        for index in range(min(len(data), 3)):
            data.inputs[index]


def kinds(root: Path) -> Iterator[Kind]:
    """What is spoiled and how it is read. Good files are written under `root`."""
    tensors = {"a.weight": torch.ones(4, 3), "a.bias": torch.zeros(4, dtype=torch.bfloat16), "n": torch.arange(3)}
    for place in ("weights", "index", "pickle", "pickle-index"):
        (root / place).mkdir()
    save_file(tensors, root / "weights" / "model.safetensors", {"format": "pt"})
    save_file({"a": torch.ones(3)}, root / "index" / "one.safetensors")
    save_file({"b": torch.ones(3)}, root / "index" / "two.safetensors")
    entries = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}, "metadata": {"total_size": 24}}
    (root / "index" / "model.safetensors.index.json").write_text(json.dumps(entries))
    torch.save(tensors, root / "pickle" / "pytorch_model.bin")
    torch.save({"a": torch.ones(3)}, root / "pickle-index" / "one.bin")
    entries = {"weight_map": {"a": "one.bin"}}
    (root / "pickle-index" / "pytorch_model.bin.index.json").write_text(json.dumps(entries))
    yield Kind("safetensors", "weights/model.safetensors", spoil_header, lambda path: look_at(path.parent))
    yield Kind("index", "index/model.safetensors.index.json", spoil_json, lambda path: look_at(path.parent))
    yield Kind("pickle", "pickle/pytorch_model.bin", spoil_bytes, lambda path: look_at(path.parent))
    yield Kind(
        "pickle index", "pickle-index/pytorch_model.bin.index.json", spoil_json, lambda path: look_at(path.parent)
    )
    (root / "legacy").mkdir()
    torch.save(tensors, root / "legacy" / "old.pt", _use_new_zipfile_serialization=False)
    yield Kind("legacy pickle", "legacy/old.pt", spoil_bytes, look_at)
    (root / "trap").mkdir()
    (root / "trap" / "trap.pt").write_bytes(pickle.dumps({"w": Trap(root / "RAN"), "v": [1, 2]}))
    yield Kind("pickle with code", "trap/trap.pt", spoil_bytes, look_at)
    head = {"class_embeds": torch.ones(3, 4), "logit_scale": torch.tensor(2.3)}
    save_file(head, root / "head.safetensors", {"classes": json.dumps(["a", "b", "c"])})
    yield Kind("head", "head.safetensors", spoil_header, read_head)
    vector = TaskVector({"a": torch.ones(3, 2), "b": torch.ones(2)})
    save_task_vector(root / "tau.safetensors", vector, {"base": "x"})
    yield Kind("task vector", "tau.safetensors", spoil_header, look_at_vector)
    (root / "adapter").mkdir()
    lora = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["a"],
        "rank_pattern": {"a": 2},
        "bias": "none",
    }
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(lora))
    factors = {f"base_model.model.a.lora_{x}.weight": torch.ones(*size) for x, size in (("A", (2, 3)), ("B", (4, 2)))}
    save_file(factors, root / "adapter" / "adapter_model.safetensors")
    yield Kind("adapter configuration", "adapter/adapter_config.json", spoil_json, look_at_adapter)
    yield Kind("adapter weights", "adapter/adapter_model.safetensors", spoil_header, look_at_adapter)
    covariance = CrossCovariance(2, 3)
    covariance.update(torch.ones(5, 2), torch.ones(5, 3))
    found = Statistics({("a", "input"): covariance}, {}, 5, {"forward": 1, "backward": 0})
    save_statistics(StateFile(root / "all.safetensors", "x"), found)
    yield Kind("statistics", "all.safetensors", spoil_header, lambda path: load_statistics(StateFile(path, "x")))
    for name in ("odd.npz", "odd-head.safetensors", "odd-tau.safetensors", "odd.csv"):
        (root / name).write_bytes(b"")
    yield Kind("npz of odd arrays", "odd.npz", odd_arrays, look_at_data)
    yield Kind("head of odd tensors", "odd-head.safetensors", odd_head, read_head)
    yield Kind("odd task vector", "odd-tau.safetensors", odd_vector, look_at_vector)
    yield Kind("csv of odd columns", "odd.csv", odd_table, look_at_data)
    write_model(root / "model")
    yield Kind("model configuration", "model/config.json", spoil_json, lambda path: open_model(path.parent))
    yield Kind("image processor", "model/preprocessor_config.json", spoil_json, look_at_encoder)
    settings = {"hidden_size": 16, "architectures": ["ViTModel"], "id2label": {"0": "a"}, "text": {"n_layer": 2}}
    (root / "config.json").write_text(json.dumps(settings))
    yield Kind("config", "config.json", spoil_json, lambda path: read_json(path, "a configuration"))
    rows = [{"text": f"t{i}", "label": i % 2, "split": ("train", "test")[i % 2]} for i in range(6)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield Kind("jsonl", "rows.jsonl", spoil_lines, look_at_data)
    (root / "rows.csv").write_text(
        "text,label,split\n" + "".join(f't{i},"c{i % 2}",{("train", "test")[i % 2]}\n' for i in range(6))
    )
    yield Kind("csv", "rows.csv", spoil_bytes, look_at_data)
    (root / "rows.tsv.gz").write_bytes(gzip.compress(b"text\ttext_pair\tlabel\na\tb\t1\nc\td\t0\n"))
    yield Kind("tsv.gz", "rows.tsv.gz", spoil_packed, look_at_data)
    images = np.zeros((4, 5, 5, 3), np.uint8)
    labels = np.array([0, 1, 0, 1])
    np.savez(root / "d.npz", x_train=images, y_train=labels, x_test=images, y_test=labels, classes=np.array(["a", "b"]))
    yield Kind("npz", "d.npz", spoil_bytes, look_at_data)
    np.savez(root / "e.npz", x=images[..., 0].astype(np.float32), y=labels)
    yield Kind("npz without classes", "e.npz", spoil_bytes, look_at_data)
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp"):
        folder = root / f"images-{suffix}" / "cat"
        folder.mkdir(parents=True)
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(
            folder / f"a.{suffix}"
        )
        yield Kind(
            suffix, f"images-{suffix}/cat/a.{suffix}", spoil_bytes, lambda path: look_at_data(path.parent.parent)
        )
    recipe = 'source = "BASE"\ntarget = "BASE"\nsamples = [1, 2]\nseeds = [0]\nmethods = ["bico"]\nbatch_size = 4\n'
    recipe += '[finetuned]\ncars = "BASE"\n[data]\ncars = "DATA"\n'
    (root / "recipe.toml").write_text(recipe.replace("BASE", str(root / "model")).replace("DATA", str(root / "d.npz")))
    yield Kind("recipe", "recipe.toml", spoil_bytes, read_recipe)
    yield from text_models(root)
    yield from known_tasks(root)
    yield from saved_work(root)
    yield from tables(root)
    yield from bombs(root)
    yield from special_files(root)
    yield from lessons(root, Kind)
    yield from lists(root, Kind)
    yield from commands(root)
    yield Kind("recipe of odd values", "recipe.toml", odd_recipe, read_recipe)
    yield Kind("patterns of an adapter", "adapter/adapter_config.json", odd_adapter, look_at_adapter, alone=True)
    yield Kind("metadata of a head", "head.safetensors", spoil_metadata, read_head)
    yield Kind("metadata of a task vector", "tau.safetensors", spoil_metadata, look_at_vector)
    yield Kind("members of an npz", "d.npz", spoil_members, look_at_data)
    yield Kind("members of a pickle", "pickle/pytorch_model.bin", spoil_members, lambda path: look_at(path.parent))
    yield Kind("vision model that runs", "model/config.json", spoil_text, run_model, alone=True)
    yield Kind("processor that runs", "model/preprocessor_config.json", spoil_text, run_model, alone=True)


def write_model(folder: Path) -> None:
    """A tiny image classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **size)).save_pretrained(folder)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 8, "width": 8},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 0.01,
        "resample": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def look_at_encoder(path: Path) -> None:
    encode = open_model(path.parent).inputs.encode
    assert encode is not None
    encode([Image.new("RGB", (9, 9))])


def run_model(path: Path) -> None:
    """Open a model and run it on two samples."""
    model = open_model(path.parent)
    if model.inputs.encode is None:  # without a tokenizer
        return
    samples: list[Any] = [Image.new("RGB", (9, 9))] * 2 if model.inputs.kind == "image" else ["a photo", "cat cat cat"]
    batch = model.place(model.inputs.encode(samples))
    with torch.no_grad():
        for run in (model.outputs.features, model.outputs.logits):
            if run is not None:
                run(model.module, batch)


def look_at_chat(path: Path) -> None:
    chat = [{"role": "user", "content": "a photo"}, {"role": "assistant", "content": "cat"}]
    render_chat(open_tokenizer(path.parent, False, "a chat"), chat)


def text_models(root: Path) -> Iterator[Kind]:
    """A sentence encoder with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(("[PAD]", "[UNK]", "a", "photo", "cat"))}
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=5, max_position_embeddings=16, **size)).save_pretrained(root / "bert")
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_max_length=16
    )
    fast.save_pretrained(root / "bert")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        yield Kind(f"{name} that runs", f"bert/{name}", spoil_text, run_model, alone=True)
        yield Kind(name, f"bert/{name}", spoil_json, run_model, alone=True)
    yield Kind("patterns of a tokenizer", "bert/tokenizer.json", odd_tokenizer, run_model, alone=True)
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    fast.save_pretrained(root / "chat")
    (root / "chat" / "config.json").write_text("{}")
    yield Kind("chat template", "chat/chat_template.jinja", spoil_bytes, look_at_chat)
    yield Kind("text model that runs", "bert/config.json", spoil_text, run_model, alone=True)


def known_tasks(root: Path) -> Iterator[Kind]:
    """The files of known data sets, and model cards."""
    images = np.zeros((3, 4, 4), np.uint8)
    (root / "images.idx").write_bytes(np.array([0x803, 3, 4, 4], ">u4").tobytes() + images.tobytes())
    yield Kind("idx", "images.idx", spoil_bytes, lambda path: files.read_idx(path, 3))
    (root / "images.idx.gz").write_bytes(gzip.compress((root / "images.idx").read_bytes()))
    yield Kind("idx.gz", "images.idx.gz", spoil_packed, lambda path: files.read_idx(path, 3))
    (root / "list.txt").write_text("a/one.png\nb/two.png\n")
    yield Kind("list of images", "list.txt", spoil_bytes, files.read_lines)
    (root / "list.csv").write_text("Filename;ClassId\none.ppm;1\ntwo.ppm;2\n")
    yield Kind("table of images", "list.csv", spoil_bytes, look_at_list)
    try:
        from scipy.io import savemat
    except ImportError:
        return
    notes = np.array([("a.jpg", 1)], dtype=[("fname", object), ("class", object)])
    for name, packed in (("plain", False), ("packed", True)):
        savemat(root / f"{name}.mat", {"X": images, "y": np.arange(3), "annotations": notes}, do_compression=packed)
        yield Kind(f"mat, {name}", f"{name}.mat", spoil_bytes, look_at_mat, alone=True)

    def mat(_: bytes, choose: random.Random) -> bytes:
        made = io.BytesIO()
        size = choose.choice((1, 8, 60, 200)) * MIB
        value: Any = np.zeros(size, np.uint8)
        if choose.random() < 0.5:
            value = np.array([value[: size // 2], value[: size // 3]], dtype=object)
        savemat(made, {"X": value, "y": 1, "annotations": 1}, do_compression=True)
        return made.getvalue()

    yield Kind("bomb of mat", "packed.mat", mat, look_at_mat, alone=True, unpacked=UNPACKED)


def look_at_mat(path: Path) -> None:
    files.read_mat(path, "X", "y", "annotations")


def look_at_list(path: Path) -> None:
    found = files.read_rows(path, ";")
    files.find_column(found, path, "Filename")
    files.find_numbers(found, path, "ClassId")


def saved_work(root: Path) -> Iterator[Kind]:
    """What commands keep for --resume, and what they read of outputs and models beside the weights."""
    from paper.run import Cells
    from tuneport.outputs import ModelOutput
    from tuneport.pipeline.run import finished
    from tuneport.report.provenance import _licence
    from tuneport.task_vectors.stored import stored_change

    (root / "work").mkdir()
    StateFile(root / "work" / "state.safetensors", "x").save({"a": torch.ones(2)}, {"step": 1})
    yield Kind("state of a training", "work/state.safetensors", spoil_header, lambda path: StateFile(path, "x").load())
    cells = Cells(root / "work" / "paper", "x")
    for name in ("a", "b"):
        cells.add(name, {"rows": [1, 2.5], "seconds": 1})
    yield Kind(
        "cells of a recipe",
        "work/.paper.tuneport-cells",
        spoil_lines,
        lambda path: Cells(path.with_name("paper"), "x").load(),
    )
    (root / "work" / "tuneport.json").write_text(json.dumps({"method": "bico", "target": {"path": "a"}}))
    yield Kind(
        "run record", "work/tuneport.json", spoil_json, lambda path: finished(Work(path.parent, {}), ModelOutput())
    )
    (root / "work" / "README.md").write_text("---\nlicense: mit\ntags: [a, b]\n---\n# A model\n")
    yield Kind("model card", "work/README.md", spoil_bytes, _licence)
    vector = TaskVector({"a": torch.ones(3, 2)})
    save_task_vector(root / "tau-of.safetensors", vector, {"record": json.dumps({"target": {"path": "a"}})})
    yield Kind("base of a task vector", "tau-of.safetensors", spoil_metadata, stored_change)


def tables(root: Path) -> Iterator[Kind]:
    """Tables of the other formats, and Parquet files with notes in their schema."""
    rows = [{"text": f"t{i}", "label": i % 2, "split": ("train", "test")[i % 2]} for i in range(6)]
    (root / "rows.json").write_text(json.dumps(rows))
    yield Kind("json table", "rows.json", spoil_json, look_at_data)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (root / "chats.jsonl").write_text("\n".join(json.dumps({"messages": talk, "system": "s"}) for _ in range(3)))
    yield Kind("chats", "chats.jsonl", spoil_lines, look_at_data)
    questions = [{"text": "q", "choices": ["a", "b"], "label": 0}, {"text": "q", "choices": ["a", "b"], "label": "B"}]
    (root / "choices.jsonl").write_text("\n".join(map(json.dumps, questions)))
    yield Kind("choices", "choices.jsonl", spoil_lines, look_at_data)
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return
    notes = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}

    def packed(content: Any, about: Any, **options: Any) -> bytes:
        table = pa.table(content).replace_schema_metadata({b"huggingface": about})
        made = io.BytesIO()
        parquet.write_table(table, made, **options)
        return made.getvalue()

    columns = {key: [row[key] for row in rows] for key in rows[0]}
    (root / "rows.parquet").write_bytes(packed(columns, json.dumps(notes).encode()))
    yield Kind("parquet", "rows.parquet", spoil_bytes, look_at_data, alone=True)

    def spoil_notes(_: bytes, choose: random.Random) -> bytes:
        text = json.dumps(spoil_value(notes, choose)) if choose.random() < 0.8 else "[" * choose.choice((5, 10**5))
        return packed(columns, text.encode("utf-8", "surrogatepass"))

    def odd_columns(_: bytes, choose: random.Random) -> bytes:
        cells: tuple[Any, ...] = ("a", 1, 1.5, None, True, b"\xff", [1], ["a"], {"bytes": b"x", "path": None}, {"a": 1})
        names = ("text", "text_pair", "label", "split", "image", "target", "messages", "choices", "prompt")
        chosen = {name: [choose.choice(cells)] * 3 for name in choose.sample(names, choose.randint(1, 4))}
        return packed(chosen, b"{}", compression=choose.choice(("none", "snappy", "gzip", "zstd")))

    yield Kind("notes of a parquet file", "rows.parquet", spoil_notes, look_at_data, alone=True)
    yield Kind("parquet of odd columns", "rows.parquet", odd_columns, look_at_data, alone=True)


ROWS = (
    b'{"text":"ab"}',
    b'{"text":"ab","label":1}',
    b'{"text":"' + b"a" * 10**5 + b'"}',
    b'{"a":' * 400 + b"1" + b"}" * 400,
    b'{"text":"a","other":[' + b"[]," * 10**4 + b"[]]}",
    b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
    b"",
    b"[" * 10**5,
    b'{"text":"a","choices":["a","b"],"label":0}',
)


def bombs(root: Path) -> Iterator[Kind]:
    """Small files that unpack to much."""
    for name in ("bomb.jsonl.gz", "bomb.csv.gz", "bomb.npz", "bomb.parquet", "bomb.safetensors"):
        (root / name).write_bytes(b"")

    def gz(block: bytes, size: int) -> bytes:
        return gzip.compress(block, 1) * max(size // len(block), 1)  # members one after the other

    def jsonl(_: bytes, choose: random.Random) -> bytes:
        row = choose.choice(ROWS)
        row += b"\n" if choose.random() < 0.9 else b""
        block = row * max(MIB // max(len(row), 1), 1) or bytes(MIB)
        return gz(block, choose.choice((1, 2, 8)) * MIB)

    def csv(_: bytes, choose: random.Random) -> bytes:
        row = choose.choice(
            (b"a,1\n", b'"a\n",', b",", b'"', b"a" * 10**5 + b",1\n", b"\n", b'"' + b"a" * 10**5 + b'",1\n')
        )
        return gzip.compress(b"text,label\n") + gz(row * (MIB // len(row)), choose.choice((1, 2, 8)) * MIB)

    def npz(_: bytes, choose: random.Random) -> bytes:
        side = choose.choice((1, 10, 1000))
        count = choose.choice((8, 30, 100)) * MIB // (side * side)
        arrays = {"x": np.zeros((count, side, side), np.uint8), "y": np.zeros(count, choose.choice(("u1", "i8")))}
        if choose.random() < 0.3:
            arrays["y"] = np.zeros(100 * MIB, np.uint8)
        if choose.random() < 0.3:
            arrays["classes"] = np.zeros(choose.choice((10, 10**6, 10**7)), choose.choice(("U1", "S1", "i8")))
        made = io.BytesIO()
        np.savez_compressed(made, **arrays)
        return made.getvalue()

    def parquet_of(_: bytes, choose: random.Random) -> bytes:
        import pyarrow as pa
        from pyarrow import parquet

        def repeated(size: int, count: int) -> Any:
            return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array(["a" * size]))

        count = choose.choice((10, 10**3, 10**5))
        columns: dict[str, Any] = {"text": repeated(choose.choice((10, 10**4, 10**6)), count)}
        if choose.random() < 0.5:
            columns["label"] = repeated(choose.choice((1, 10**5)), count)
        if choose.random() < 0.3:
            columns = {"messages": pa.ListArray.from_arrays(pa.array([0, count]), columns["text"])}
        if choose.random() < 0.2:
            columns = {"label": pa.array(np.zeros(choose.choice((10**6, 2 * 10**7)), np.int8))}
        made = io.BytesIO()
        encoding = {"use_dictionary": choose.random() < 0.8, "compression": choose.choice(("zstd", "gzip", "snappy"))}
        if count * 10**6 > 10**9:
            encoding["use_dictionary"] = True
        parquet.write_table(pa.table(columns), made, **encoding)
        return made.getvalue()

    def header(_: bytes, choose: random.Random) -> bytes:
        count = choose.choice((10**3, 10**4, 3 * 10**5))
        entry = choose.choice(
            (
                '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}',
                '{"dtype":"F32","shape":[' + "0," * 50 + '0],"data_offsets":[0,0]}',
            )
        )
        text = ("{" + ",".join(f'"t{i}":{entry}' for i in range(count)) + "}").encode()[: 40 * MIB]
        return len(text).to_bytes(8, "little") + text

    yield Kind("bomb of jsonl.gz", "bomb.jsonl.gz", jsonl, look_at_data, alone=True, unpacked=TEXT)
    yield Kind("bomb of csv.gz", "bomb.csv.gz", csv, look_at_data, alone=True, unpacked=TEXT)
    yield Kind("bomb of npz", "bomb.npz", npz, look_at_data, alone=True, unpacked=UNPACKED)
    yield Kind(
        "bomb of a pickle", "pickle/pytorch_model.bin", odd_pickle, lambda path: look_at(path.parent), alone=True
    )
    yield Kind("bomb of a header", "bomb.safetensors", header, look_at, alone=True, unpacked=25 * 10**6)

    def json_bomb(_: bytes, choose: random.Random) -> bytes:
        piece = choose.choice((b"[],", b"{},", b'{"a":0},', b"0,", b'"ab",', b"1e9,"))
        return (
            b'{"architectures":["ViTModel"],"a":[' + piece * (choose.choice((1, 10, 19)) * 10**6 // len(piece)) + b"0]}"
        )

    yield Kind(
        "bomb of a configuration",
        "model/config.json",
        json_bomb,
        lambda path: open_model(path.parent),
        alone=True,
        unpacked=20 * 10**6,
    )
    if (root / "rows.parquet").exists():
        yield Kind("bomb of parquet", "bomb.parquet", parquet_of, look_at_data, alone=True, unpacked=UNPACKED)


SPECIAL = (b"pipe", b"link to a pipe", b"link to a device", b"loop", b"folder", b"gone", b"link out", b"empty")


def special(path: Path, what: bytes) -> None:
    """Put a pipe, a link or a folder where a file belongs."""
    path.unlink()
    other = path.with_name(f"{path.name}.other")
    if b"pipe" in what:
        os.mkfifo(path if what == b"pipe" else other)
    links = {b"link to a pipe": other, b"link to a device": "/dev/zero", b"loop": path, b"link out": "/etc/hostname"}
    if what in links:
        path.symlink_to(links[what])
    elif what == b"folder":
        path.mkdir()
    elif what == b"empty":
        path.touch()


def special_files(root: Path) -> Iterator[Kind]:
    (root / "weights" / "config.json").write_text("{}")
    of: dict[str, Callable[[Path], object]] = {
        "rows.jsonl": look_at_data,
        "d.npz": look_at_data,
        "rows.tsv.gz": look_at_data,
        "images-png/cat/a.png": lambda path: look_at_data(path.parent.parent),
        "head.safetensors": read_head,
        "tau.safetensors": look_at_vector,
        "adapter/adapter_config.json": look_at_adapter,
        "adapter/adapter_model.safetensors": look_at_adapter,
        "bert/config.json": run_model,
        "bert/tokenizer.json": run_model,
        "bert/tokenizer_config.json": run_model,
        "bert/model.safetensors": run_model,
        "model/preprocessor_config.json": run_model,
        "weights/model.safetensors": lambda path: extract(path.parent, path.parent),
        "recipe.toml": read_recipe,
    }
    for file, read in of.items():
        yield Kind(f"pipe or link: {file}", file, lambda _, choose: choose.choice(SPECIAL), read, True, put=special)


OPTIONS = ("--samples", "--scale", "--method", "--seed", "--head", "--loss", "--dtype", "--device", "--rank", "--as")
OPTIONS += ("--memory-budget", "--exclude", "--labels", "--batch-size", "--no-such", "--shots")
ARGUMENTS = ("", "x", "0", "-1", "1e999", "nan", "os:system", "builtins:print", "a" * 3000, "\u202e", "cpu", "@base")
ARGUMENTS += ("8GiB", "1", "*", "[", "bico", "99999999999999999999")


def commands(root: Path) -> Iterator[Kind]:
    """The command line on a tiny source, fine-tune, target and data."""
    home = root / "cli"
    home.mkdir()
    for name, seed in (("base", 0), ("tuned", 1), ("target", 2)):
        torch.manual_seed(seed)
        write_model(home / name)
    changed = {name: tensor * 1.01 for name, tensor in load_file(home / "base" / "model.safetensors").items()}
    save_file(changed, home / "tuned" / "model.safetensors", {"format": "pt"})
    images = np.random.default_rng(0).integers(0, 255, (8, 8, 8, 3), dtype=np.uint8)
    np.savez(home / "data.npz", x=images, y=np.arange(8) % 2, classes=np.array(["0", "1"]))
    vector = TaskVector({"vit.embeddings.cls_token": torch.ones(1, 1, 8)})
    save_task_vector(home / "tau.safetensors", vector)
    (home / "arguments.json").write_text("[]")

    def run(*words: str) -> Callable[[Path], object]:
        def command(path: Path) -> None:
            place = next(parent for parent in path.parents if parent.name == "cli")
            run_command([str(place / word[1:]) if word.startswith("@") else word for word in words], place / "out")

        return command

    transfer = ("transfer", "--source", "@base", "--finetuned", "@tuned", "--target", "@target", "--data", "@data.npz",
                "--samples", "4", "--out", "@out")  # fmt: skip
    for part in ("base", "tuned", "target"):
        yield Kind(
            f"command transfer, {part} config", f"cli/{part}/config.json", spoil_text, run(*transfer), alone=True
        )
    yield Kind("command transfer, weights", "cli/tuned/model.safetensors", spoil_header, run(*transfer), alone=True)
    yield Kind("command transfer, data", "cli/data.npz", spoil_members, run(*transfer), alone=True)
    evaluate = ("evaluate", "@base", "--data", "@data.npz", "--json")
    yield Kind("command evaluate", "cli/base/preprocessor_config.json", spoil_text, run(*evaluate), alone=True)
    apply = ("apply", "@tau.safetensors", "@base", "-o", "@out")
    yield Kind("command apply", "cli/tau.safetensors", spoil_header, run(*apply), alone=True)

    def odd_arguments(_: bytes, choose: random.Random) -> bytes:
        words = list(
            choose.choice(
                (transfer, evaluate, apply, ("plan", *transfer[1:-2]), ("extract", "@base", "@tuned", "-o", "@out"))
            )
        )
        for _ in range(choose.randint(1, 3)):
            option, value = choose.choice(OPTIONS), choose.choice(ARGUMENTS)
            words += [option, value]
        if choose.random() < 0.2:
            words[choose.randrange(1, len(words))] = choose.choice(
                ("", "/dev/zero", "@arguments.json", "@missing", "\x7f")
            )
        return json.dumps(words).encode()

    def odd_command(path: Path) -> None:
        run(*json.loads(path.read_text()))(path)

    yield Kind("command with odd options", "cli/arguments.json", odd_arguments, odd_command, alone=True)


def run_command(words: list[str], out: Path) -> None:
    """Run a command in this process; raise unless it ends with 0, 1 or 2 and says so in short lines."""
    said = out.with_name("said")
    sys.stdout.flush()
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["tuneport", *words]
    code: Any = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code
    sys.stdout.flush()
    sys.stderr.flush()
    shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink(missing_ok=True)
    text = said.read_text(encoding="utf-8", errors="replace")
    longest = max(map(len, text.splitlines()), default=0)
    if code not in (0, 1, 2, None) or "Traceback" in text or "unexpected: " in text or (code == 1 and longest > 2000):
        raise AssertionError(f"exit code {code}, longest line {longest}: {text[-300:]!r} {text[:300]!r}")
    if code:
        raise TuneportError(f"exit code {code}")
