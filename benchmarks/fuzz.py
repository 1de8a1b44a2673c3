"""Claim: whatever a file holds, reading it ends soon, in a result or in a TuneportError, and touches nothing else.

Takes small good files of every kind that is read (weights, indexes, pickles, configurations, heads, task vectors,
tables, arrays, images, recipes, saved statistics), spoils them at random and reads them in this process. Counted: good
reads, refusals, and what must not happen: other exceptions, slow cases, files opened for writing outside the
folder, code run from a pickle. Exits 1 if any of these happened.

    python benchmarks/fuzz.py --cases 20000 --out benchmarks/results/fuzz.md
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import pickle
import platform
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save, save_file

from tuneport import TuneportError
from tuneport.bench.recipe import read_recipe
from tuneport.data.formats import read_plain
from tuneport.io.checkpoint import open_checkpoint, read_json
from tuneport.io.validate import check_finite
from tuneport.maps.covariance import CrossCovariance
from tuneport.maps.statistics import Statistics
from tuneport.models.heads import read_head
from tuneport.models.open import open_model
from tuneport.runtime.resume import load_statistics, save_statistics
from tuneport.task_vectors.lora_format import open_adapter
from tuneport.task_vectors.lora_read import task_vector_of
from tuneport.task_vectors.vector import TaskVector, load_task_vector, save_task_vector

SLOW = 10.0  # seconds
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**30, -(10**9), 0.5, 1e308, float("nan"), float("inf"), "", "x",
    "../secret", "/etc/passwd", "a" * 300, "\x00", "\x1b[2J", "\ud800", "0", "-1", "9" * 5000, [], {}, [[]], [1, 2],
    {"a": 1}, ["x"] * 20, {"": None},
)  # fmt: skip
ODD_BYTES = (
    b"",
    b"\x00",
    b"\xff" * 9,
    b"{",
    b"}",
    b'"',
    b"[" * 3000,
    b"\n",
    b"\r",
    b",",
    b"\t",
    b"\xed\xa0\x80",
    b"1e999",
)
Reader = Callable[[Path], object]


class Trap:
    """Unpickling this would write a file: if it ever appears, code was run."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.mark), "w")


class Guard:
    """Watches which files are opened for writing, through the interpreter's own audit events."""

    def __init__(self, allowed: Path) -> None:
        self.allowed, self.on, self.found = str(allowed), False, []
        sys.addaudithook(self._hear)

    found: list[str]

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            mode, flags = arguments[1], arguments[2]
            writes = any(mark in mode for mark in "wax+") if isinstance(mode, str) else False
            writes = writes or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            if writes and not os.path.abspath(os.fsdecode(arguments[0])).startswith(self.allowed):
                self.found.append(f"open {arguments[0]!r}")
        elif event in (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.remove",
            "os.rename",
            "os.rmdir",
            "socket.connect",
        ):
            self.found.append(f"{event} {arguments!r:.100}")


def spoil_bytes(content: bytes, choose: random.Random) -> bytes:
    """One to four random damages to a file's bytes, most of them near the beginning, where headers are."""
    data = bytearray(content)
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        size = len(data)
        at = choose.randrange(min(size, 400) + 1) if choose.random() < 0.7 else choose.randrange(size + 1)
        what = choose.randrange(7)
        if what == 0 and at < size:
            data[at] ^= 1 << choose.randrange(8)
        elif what == 1 and at < size:
            data[at] = choose.randrange(256)
        elif what == 2:
            del data[at:]
        elif what == 3:
            data[at:at] = choose.choice(ODD_BYTES)
        elif what == 4:
            data[at : at + choose.randint(1, 30)] = b""
        elif what == 5:
            data[at : at + 8] = struct.pack(
                "<Q", choose.choice((0, 1, 2**20, 2**31, 2**62, 2**64 - 1, size, max(size - 8, 0)))
            )
        else:
            start = choose.randrange(size + 1)
            data[at:at] = data[start : start + choose.randint(1, 60)]
    return bytes(data)


def spoil_value(value: Any, choose: random.Random) -> Any:
    """Plain values with one of them, somewhere, replaced, dropped, renamed or doubled."""
    if isinstance(value, dict) and value and choose.random() < 0.85:
        key = choose.choice(list(value))
        changed = dict(value)
        what = choose.randrange(6)
        if what == 0:
            del changed[key]
        elif what == 1:
            changed[str(choose.choice(ODD_VALUES))] = changed.pop(key)
        else:
            changed[key] = spoil_value(changed[key], choose)
        return changed
    if isinstance(value, list) and value and choose.random() < 0.7:
        changed_list = list(value)
        at = choose.randrange(len(changed_list))
        changed_list[at] = spoil_value(changed_list[at], choose)
        return changed_list
    if choose.random() < 0.05:
        nest: Any = value
        for _ in range(choose.choice((3, 900))):
            nest = [nest]
        return nest
    return choose.choice(ODD_VALUES)


def spoil_json(content: bytes, choose: random.Random) -> bytes:
    if choose.random() < 0.3:
        return spoil_bytes(content, choose)
    value = json.loads(content)
    for _ in range(choose.choice((1, 1, 2))):
        value = spoil_value(value, choose)
    return json.dumps(value).encode()


def spoil_header(content: bytes, choose: random.Random) -> bytes:
    """A safetensors file with a header that is JSON still, of the right length or not."""
    if choose.random() < 0.4:
        return spoil_bytes(content, choose)
    length = int.from_bytes(content[:8], "little")
    header = spoil_json(content[8 : 8 + length], choose)
    said = len(header) if choose.random() < 0.9 else choose.choice((0, 2**40, 2**63, length))
    return struct.pack("<Q", said) + header + content[8 + length :]


def spoil_packed(content: bytes, choose: random.Random) -> bytes:
    """A gzip file, damaged inside or outside."""
    if choose.random() < 0.3:
        return spoil_bytes(content, choose)
    return gzip.compress(spoil_bytes(gzip.decompress(content), choose), 1)


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


def kinds(root: Path) -> Iterator[tuple[str, str, Callable[[bytes, random.Random], bytes], Reader]]:
    """Name, file to spoil, how, and how its folder or file is read. Good files are written under `root`."""
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
    yield "safetensors", "weights/model.safetensors", spoil_header, lambda path: look_at(path.parent)
    yield "index", "index/model.safetensors.index.json", spoil_json, lambda path: look_at(path.parent)
    yield "pickle", "pickle/pytorch_model.bin", spoil_bytes, lambda path: look_at(path.parent)
    yield "pickle index", "pickle-index/pytorch_model.bin.index.json", spoil_json, lambda path: look_at(path.parent)
    (root / "legacy").mkdir()
    torch.save(tensors, root / "legacy" / "old.pt", _use_new_zipfile_serialization=False)
    yield "legacy pickle", "legacy/old.pt", spoil_bytes, look_at
    (root / "trap").mkdir()
    (root / "trap" / "trap.pt").write_bytes(pickle.dumps({"w": Trap(root / "RAN"), "v": [1, 2]}))
    yield "pickle with code", "trap/trap.pt", spoil_bytes, look_at
    head = {"class_embeds": torch.ones(3, 4), "logit_scale": torch.tensor(2.3)}
    save_file(head, root / "head.safetensors", {"classes": json.dumps(["a", "b", "c"])})
    yield "head", "head.safetensors", spoil_header, read_head
    vector = TaskVector({"a": torch.ones(3, 2), "b": torch.ones(2)})
    save_task_vector(root / "tau.safetensors", vector, {"base": "x"})
    yield "task vector", "tau.safetensors", spoil_header, look_at_vector
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
    yield "adapter configuration", "adapter/adapter_config.json", spoil_json, look_at_adapter
    yield "adapter weights", "adapter/adapter_model.safetensors", spoil_header, look_at_adapter
    covariance = CrossCovariance(2, 3)
    covariance.update(torch.ones(5, 2), torch.ones(5, 3))
    found = Statistics({("a", "input"): covariance}, {}, 5, {"forward": 1, "backward": 0})
    save_statistics(root / "all.safetensors", found, {"seed": 0})
    yield "statistics", "all.safetensors", spoil_header, load_statistics
    for name in ("odd.npz", "odd-head.safetensors", "odd-tau.safetensors", "odd.csv"):
        (root / name).write_bytes(b"")
    yield "npz of odd arrays", "odd.npz", odd_arrays, look_at_data
    yield "head of odd tensors", "odd-head.safetensors", odd_head, read_head
    yield "odd task vector", "odd-tau.safetensors", odd_vector, look_at_vector
    yield "csv of odd columns", "odd.csv", odd_table, look_at_data
    write_model(root / "model")
    yield "model configuration", "model/config.json", spoil_json, lambda path: open_model(path.parent)
    yield "image processor", "model/preprocessor_config.json", spoil_json, look_at_encoder
    settings = {"hidden_size": 16, "architectures": ["ViTModel"], "id2label": {"0": "a"}, "text": {"n_layer": 2}}
    (root / "config.json").write_text(json.dumps(settings))
    yield "config", "config.json", spoil_json, lambda path: read_json(path, "a configuration")
    rows = [{"text": f"t{i}", "label": i % 2, "split": ("train", "test")[i % 2]} for i in range(6)]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield "jsonl", "rows.jsonl", spoil_lines, look_at_data
    (root / "rows.csv").write_text(
        "text,label,split\n" + "".join(f't{i},"c{i % 2}",{("train", "test")[i % 2]}\n' for i in range(6))
    )
    yield "csv", "rows.csv", spoil_bytes, look_at_data
    (root / "rows.tsv.gz").write_bytes(gzip.compress(b"text\ttext_pair\tlabel\na\tb\t1\nc\td\t0\n"))
    yield "tsv.gz", "rows.tsv.gz", spoil_packed, look_at_data
    images = np.zeros((4, 5, 5, 3), np.uint8)
    labels = np.array([0, 1, 0, 1])
    np.savez(root / "d.npz", x_train=images, y_train=labels, x_test=images, y_test=labels, classes=np.array(["a", "b"]))
    yield "npz", "d.npz", spoil_bytes, look_at_data
    np.savez(root / "e.npz", x=images[..., 0].astype(np.float32), y=labels)
    yield "npz without classes", "e.npz", spoil_bytes, look_at_data
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp"):
        folder = root / f"images-{suffix}" / "cat"
        folder.mkdir(parents=True)
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (9, 9, 3), dtype=np.uint8)).save(
            folder / f"a.{suffix}"
        )
        yield suffix, f"images-{suffix}/cat/a.{suffix}", spoil_bytes, lambda path: look_at_data(path.parent.parent)
    recipe = 'source = "."\ntarget = "."\nsamples = [1, 2]\nseeds = [0]\nmethods = ["bico"]\nbatch_size = 4\n'
    (root / "recipe.toml").write_text(recipe + '[finetuned]\ncars = "."\n[data]\ncars = "."\n')
    yield "recipe", "recipe.toml", spoil_bytes, read_recipe


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
    encode = open_model(path.parent).encode
    assert encode is not None
    encode([Image.new("RGB", (9, 9))])


def odd_arrays(_: bytes, choose: random.Random) -> bytes:
    """A sound archive of arrays that nobody asked for."""

    def odd() -> Any:
        kind = choose.choice(("u1", "i8", "u8", "f4", "f2", "?", "U3", "S3", "c8", "M8[s]", "V4", "i1"))
        shape = tuple(choose.choice((0, 1, 2, 3, 4, 5)) for _ in range(choose.randrange(5)))
        array = np.zeros(shape, kind)
        if kind in ("i8", "u8", "f4") and array.size:
            array.flat[0] = choose.choice((1, 10**6 + 1, 2**62, 7))
        return array

    images, labels = np.zeros((4, 5, 5, 3), np.uint8), np.array([0, 1, 0, 1])
    arrays: dict[str, Any] = {"x": images, "y": labels, "classes": np.array(["a", "b"])}
    if choose.random() < 0.5:
        arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    for key in choose.sample(sorted(arrays), choose.randint(1, len(arrays))):
        arrays[key] = odd()
    if choose.random() < 0.2:
        arrays[choose.choice(("x_val", "y_val", "classes", "odd"))] = odd()
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def odd_tensor(choose: random.Random) -> torch.Tensor:
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2)
    shape = [choose.choice((0, 1, 2, 3)) for _ in range(choose.randrange(4))]
    tensor = torch.ones(shape).to(choose.choice(kinds))
    return tensor * float("nan") if choose.random() < 0.1 and tensor.dtype == torch.float32 else tensor


def odd_head(_: bytes, choose: random.Random) -> bytes:
    tensors = {"class_embeds": torch.ones(2, 3), "logit_scale": torch.tensor(1.0), "more": torch.ones(1)}
    tensors[choose.choice(sorted(tensors))] = odd_tensor(choose)
    classes: Any = ["a", "b"] if choose.random() < 0.3 else choose.choice(ODD_VALUES)
    return save(tensors, {"classes": json.dumps(classes)} if choose.random() < 0.9 else {})


def odd_vector(_: bytes, choose: random.Random) -> bytes:
    names = ("a", "b", "a::out", "a::in", "::out", "::in", "a::out::in", "b::in")
    tensors = {name: odd_tensor(choose) for name in choose.sample(names, choose.randint(1, 4))}
    tensors |= {"c::out": torch.ones(3, 2), "c::in": torch.ones(2, 4)}
    return save(tensors, {"format": "tuneport-task-vector", "version": "1"})


def odd_table(_: bytes, choose: random.Random) -> bytes:
    """A table with columns and cells in any combination."""
    names = ("text", "text_pair", "text1", "text2", "label", "target", "split", "image", "", "label")
    cells = (
        "",
        "a",
        "0",
        "1",
        "-1",
        "1.5",
        "nan",
        "9" * 5000,
        "train",
        "test",
        "../../etc/passwd",
        "\x00",
        "x.png",
        '"',
    )
    columns = [choose.choice(names) for _ in range(choose.randint(0, 4))]
    rows = [[choose.choice(cells) for _ in columns] for _ in range(choose.randint(0, 4))]
    return "\n".join(",".join(row) for row in (columns, *rows)).encode()


def spoil_lines(content: bytes, choose: random.Random) -> bytes:
    lines = content.split(b"\n")
    at = choose.randrange(len(lines))
    lines[at] = spoil_json(lines[at], choose)
    return b"\n".join(lines)


def fuzz(cases: int, seed: int = 0, scratch: Path | None = None) -> dict[str, Any]:
    """Run a number of cases over all kinds and return what happened."""
    choose = random.Random(seed)
    outcomes: dict[str, Counter[str]] = {}
    failures: list[str] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        good, work = Path(folder) / "good", Path(folder) / "work"
        good.mkdir()
        canary = Path(folder) / "canary"
        canary.mkdir()
        (canary / "file").write_text("untouched")
        all_kinds = list(kinds(good))
        shutil.copytree(good, work)
        guard = Guard(work)
        for case in range(cases):
            kind, name, spoil, read = all_kinds[case % len(all_kinds)]
            spoiled = spoil((good / name).read_bytes(), choose)
            (work / name).write_bytes(spoiled)  # restored below: kinds may share a folder
            started = time.perf_counter()
            guard.on = True
            try:
                read(work / name)
                outcome = "read"
            except TuneportError as error:
                outcome = "refused"
                if "\n" in str(error).strip() and len(failures) < 20:
                    failures.append(f"{kind}: a message of several lines: {str(error)!r:.200}")
            except BaseException as error:
                outcome = "wrong"
                where = traceback.extract_tb(error.__traceback__)
                frames = [frame for frame in where if "tuneport" in frame.filename] or list(where)
                failures.append(
                    f"{kind}: {type(error).__name__}: {str(error)!r:.150} at {frames[-1].name}:{frames[-1].lineno}"
                )
                if isinstance(error, KeyboardInterrupt):
                    raise
            finally:
                guard.on = False
            seconds = time.perf_counter() - started
            shutil.copy(good / name, work / name)
            slowest = max(slowest, seconds)
            if seconds > SLOW:
                failures.append(f"{kind}: {seconds:.1f} s")
            outcomes.setdefault(kind, Counter())[outcome] += 1
        failures += [f"outside: {what}" for what in guard.found]
        if (good / "RAN").exists() or (work / "RAN").exists():
            failures.append("code of a pickle was run")
        if sorted(path.name for path in canary.iterdir()) != ["file"] or (canary / "file").read_text() != "untouched":
            failures.append("the canary was touched")
    return {"cases": cases, "seed": seed, "outcomes": outcomes, "failures": failures, "slowest": slowest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    started = time.perf_counter()
    result = fuzz(options.cases, options.seed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = [
        "# Spoiled files",
        "",
        f"{result['cases']} spoiled files of {len(result['outcomes'])} kinds, read in one process. Refused: a "
        "TuneportError of one line. Wrong: any other exception.",
        "",
        "| kind | read | refused | wrong |",
        "|---|---|---|---|",
        *(f"| {kind} | {n['read']} | {n['refused']} | {n['wrong']} |" for kind, n in result["outcomes"].items()),
        "",
        f"- failures (other exceptions, over {SLOW:.0f} s, writes outside, code run): {len(result['failures'])}",
        f"- slowest case: {result['slowest']:.2f} s; all: {time.perf_counter() - started:.0f} s",
        f"- command: `python benchmarks/fuzz.py --cases {options.cases} --seed {options.seed}`",
        f"- machine: {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {version('torch')}, safetensors {version('safetensors')}, pillow {version('pillow')}",
        f"- commit: {commit.stdout.strip() or 'unknown'}",
        f"- date: {time.strftime('%Y-%m-%d')}",
    ]
    print("\n".join(lines))
    for what, count in Counter(result["failures"]).most_common(60):
        print(f"{count} x {what}", file=sys.stderr)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if result["failures"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
