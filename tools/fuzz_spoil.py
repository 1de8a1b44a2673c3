"""Ways to spoil a good file at random, for fuzz.py: its bytes, JSON or members; and sound files of odd content."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
import struct
import zipfile
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

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
    try:
        return json.dumps(value).encode()
    except RecursionError:  # two nests, one in the other
        return b"[" * 10**5


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
    at = choose.choice([number for number, line in enumerate(lines) if line])
    lines[at] = spoil_json(lines[at], choose)
    return b"\n".join(lines)


def spoil_text(content: bytes, choose: random.Random) -> bytes:
    """A JSON file with one of its values replaced by one of the same type, so that more of them are accepted."""
    value = json.loads(content)
    for _ in range(choose.choice((1, 2))):
        value = _near(value, choose)
    return json.dumps(value).encode()


def _near(value: Any, choose: random.Random) -> Any:
    if isinstance(value, dict) and value:
        key = choose.choice(list(value))
        return {**value, key: _near(value[key], choose)}
    if isinstance(value, list) and value:
        at = choose.randrange(len(value))
        return [*value[:at], _near(value[at], choose), *value[at + 1 :]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return choose.choice((0, 1, 2, 3, 7, 8, 16, 64, -1, -4, 1000, 0.5, 1e-12, value * 2, value + 1, 10**400))
    return choose.choice(("", "x", "gelu", "relu", "eager", "org/kernel", "a" * 10**5, "\u202e\u009b[2J", None, [], {}))


def spoil_members(content: bytes, choose: random.Random) -> bytes:
    """A sound zip file with members that are spoiled, missing, renamed, added or too large."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for _ in range(choose.choice((1, 1, 2))):
        name = choose.choice(sorted(members) or ["x.npy"])
        what = choose.randrange(6)
        if what == 0:
            members.pop(name, None)
        elif what == 1:
            members[choose.choice(("x", "y.npy", "../x.npy", "data.pkl", "a/" * 50 + "x", "classes.npy"))] = (
                members.get(name, b"")
            )
        elif what == 2:
            members[name] = choose.choice((b"", b"not an array", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff"))
        elif what == 3:
            members[name] = _odd_member(choose)
        else:
            members[name] = spoil_bytes(members.get(name, b"x"), choose)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", choose.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    return packed.getvalue()


def _odd_member(choose: random.Random) -> bytes:
    """An array with a header that claims something else."""
    made = io.BytesIO()
    array = np.array(["a", "b"]) if choose.random() < 0.5 else np.zeros((2, 3, 3), np.uint8)
    np.lib.format.write_array(made, array)
    claims = (
        (b"|u1", b"|O8"),
        (b"(2, 3, 3)", b"(9**9, 3)"),
        (b"(2, 3, 3)", b"(2, 9999)"),
        (b"<U1", b"<U9"),
        (b"|u1", b"<f8"),
    )
    old, new = choose.choice(claims)
    content = made.getvalue().replace(old, new)
    return content[:-8] + b"\xff" * 8 if choose.random() < 0.5 else content  # code points that do not exist


PIECES = (
    "a",
    "[a-z]",
    ".",
    r"\w",
    r"\d",
    "(a|b)",
    "(a|a)",
    "(a|ab)",
    "layers",
    r"\.",
    "q_proj",
    "$",
    "^",
    "(?=a)",
    "(?!b)",
    "\\1",
)


def odd_pattern(choose: random.Random, depth: int = 0) -> str:
    """A regular expression, often one that takes exponential time."""
    parts = []
    for _ in range(choose.randint(1, 4)):
        part = f"({odd_pattern(choose, depth + 1)})" if depth < 3 and choose.random() < 0.4 else choose.choice(PIECES)
        parts.append(part + choose.choice(("", "", "*", "+", "?", "{2,}", "{0,9}", "*?", "+?")))
    return choose.choice(("|", "")).join(parts) + choose.choice(("", "", "!", "$", "("))


def odd_adapter(content: bytes, choose: random.Random) -> bytes:
    config = json.loads(content)
    key = choose.choice(("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "layers_pattern"))
    pattern = "(([a-z0-9_.]+)+)+!" if choose.random() < 0.1 else odd_pattern(choose)
    config[key] = {pattern: 2, "a": 2} if key.endswith("pattern") and key[0] != "l" else pattern
    if choose.random() < 0.2:
        config["base_model_name_or_path"] = choose.choice(ODD_VALUES)
    return json.dumps(config).encode()


def odd_tokenizer(content: bytes, choose: random.Random) -> bytes:
    """A tokenizer that splits or replaces by regular expressions."""
    config = json.loads(content)
    pattern = {"Regex": odd_pattern(choose)}
    if choose.random() < 0.5:
        config["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    else:
        config["normalizer"] = {"type": "Replace", "pattern": pattern, "content": choose.choice(("", "a", "a" * 999))}
    return json.dumps(config).encode()


def odd_pickle(content: bytes, choose: random.Random) -> bytes:
    """A file of torch.save whose state unpacks to much: tuples in tuples, a buffer, many objects, a packed member."""
    what = choose.randrange(6)
    nest: Any = ("a",)
    for _ in range(choose.choice((3, 10, 30, 60))):
        nest = (nest,) * choose.choice((2, 3))
    size = struct.pack("<i", choose.choice((10, 10**6, 2**31 - 1)))
    states = (
        b"\x80\x02}" + pickle.dumps(nest, 2)[2:-1] + b"Ns.",
        b"\x80\x02}" + pickle.dumps(((("a",) * 3000,) * 3000,), 2)[2:-1] + b"Ns.",
        b"\x80\x02c__builtin__\nbytearray\nJ" + size + b"\x85R.",
        b"\x80\x02ctorch\nTensor\nJ" + size + b"\x85R.",
        b"\x80\x02(" + choose.choice((b"]", b"}", b")", b"N")) * choose.choice((10, 10**5, 3 * 10**6)) + b"l.",
        b"\x80\x02X" + struct.pack("<I", 10**8) + bytes(10**8) + b".",
    )
    if choose.random() < 0.3:
        facts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        return b"".join(pickle.dumps(fact, 2) for fact in facts) + states[what % 5] + pickle.dumps([], 2)
    made = io.BytesIO()
    packing = choose.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)) if what < 5 else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(made, "w", packing) as archive:
        for name in source.namelist():
            archive.writestr(name, states[what] if name.endswith("data.pkl") else source.read(name))
    return made.getvalue()


def spoil_metadata(content: bytes, choose: random.Random) -> bytes:
    """A safetensors file whose metadata hold other JSON."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    notes = header.setdefault("__metadata__", {})
    key = choose.choice(sorted(notes) or ["classes"])
    try:
        notes[key] = json.dumps(spoil_value(json.loads(notes[key]), choose))
    except (ValueError, KeyError):
        notes[key] = json.dumps(choose.choice(ODD_VALUES))
    if choose.random() < 0.2:
        notes[key] = choose.choice(
            ("[" * 10**5, '["' + "a" * 10**6 + '"]', "[" + "[]," * 10**5 + "[]]", "{", '"\\ud800"')
        )
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def odd_recipe(_: bytes, choose: random.Random) -> bytes:
    """A recipe with values of any shape under known keys."""
    keys = [
        "source",
        "target",
        "finetuned",
        "data",
        "methods",
        "samples",
        "shots",
        "samplers",
        "exclude",
        "seeds",
        "scales",
        "steps",
        "warm_start",
        "learning_rate",
        "full_batch",
        "batch_size",
        "heads",
        "reference",
        "stated",
        "protocol",
        "test_samples",
        "finetune",
        "device",
        "title",
        "kind",
        "tasks",
        "pairs",
        "printed",
        "small",
    ]
    values = ["1", "-1", "1.5", "nan", '"x"', "[]", "[1]", '["a"]', "[[]]", "{}", "{a = 1}", "{a = []}", "[{}]"]
    values += ["[{a = 1}]", "true", "{rows = [[1]]}", '{rows = [["bico", 1, 2.0]]}', "{steps = 1}", '"."', '{a = "."}']
    chosen = choose.sample(keys, choose.randint(1, 8))
    return "\n".join(f"{key} = {choose.choice(values)}" for key in chosen).encode()
