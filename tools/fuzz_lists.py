"""The list of a fleet and its summary, for fuzz.py: lines that are damaged, huge, nested, odd or doubled."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_lessons import ODD_TEXTS, SEEDS
from fuzz_spoil import ODD_VALUES, spoil_bytes, spoil_json, spoil_lines

from tuneport.config import TransferInputs, UpgradeConfig, UpgradeInputs
from tuneport.fleet.lines import read_lines
from tuneport.fleet.summary import Row, earlier_rows, fleet_of

LONGEST = 50_000  # characters of a message, which names up to a hundred lines
PLACES = (
    "..", "../..", ".", "/", "", "~", "//", "a/../..", "../x", "/etc/passwd", "/dev/null", "x/" * 3000, "y" * 300,
    "a\x00b", "\ud800", "out", "out/a", "org/model", "http://127.0.0.1:1/", "file:///etc/passwd", "con\n", "-x",
)  # fmt: skip
LINES = (
    b"{", b"}", b"[]", b"1", b"null", b'"x"', b"NaN", b"{}", b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf{}",
    b"{}{}", b'{"a":1,}', b"\r", b"\x0b", b"\xe2\x80\xa8", b'{"seed":1e999}', b'{"finetuned":"a","finetuned":"b"}',
    b"9" * 5000, b"-", b"// x", b"'a'",
)  # fmt: skip
NAMES = tuple(item.name.rstrip("_") for part in (TransferInputs, UpgradeConfig) for item, _ in part.options())
Make = Callable[..., Any]


def lists(root: Path, kind: Make) -> Iterator[Any]:
    """The kinds, made by `kind`; good files are written under `root`, which has models and an adapter."""
    home = root / "fleet"
    for name in ("a", "b", "c"):
        shutil.copytree(root / "adapter", home / name)
    (home / "own.jsonl").write_text("".join(json.dumps({"text": text, "label": text}) + "\n" for text in SEEDS))
    rows: list[dict[str, Any]] = [
        {"finetuned": "a"},
        {"finetuned": ["b"], "out": "other", "seed": 1, "routes": ["copy", "port"], "time": "2m"},
        {"finetuned": "c", "columns": {"text": "text"}, "batch-size": 8, "exclude": "head.*", "describe": None},
    ]
    (home / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, spoil in (("values", spoil_lines), ("bytes", spoil_bytes), ("lines", odd_lines), ("huge", huge_list)):
        yield kind(f"list of a fleet: {name}", "fleet/list.jsonl", spoil, look_at_list, longest=LONGEST)
    done = [Row(status="written", line=number, finetuned="f", out=f"o{number}", fingerprint="0") for number in range(3)]
    (home / "out").mkdir()
    fleet_of(home / "out", done).write()
    yield kind("list of a fleet: summary", "fleet/out/summary.json", spoil_json, look_at_summary)


def odd_lines(content: bytes, choose: random.Random) -> bytes:
    """Lines that are no JSON, or whose keys, values and paths are odd, doubled, missing or those of another line."""
    found = content.split(b"\n")
    for _ in range(choose.choice((1, 1, 2, 4))):
        at, what = choose.randrange(len(found)), choose.randrange(6)
        if what == 0:
            found[at] = choose.choice(LINES)
        elif what == 1:
            found.insert(at, choose.choice((*LINES, *found, b"", b" \t ")))
        else:
            found[at] = json.dumps(_odd_line(found[at], choose, what)).encode()
    return choose.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(found)


def _odd_line(line: bytes, choose: random.Random, what: int) -> dict[str, Any]:
    try:
        given = json.loads(line)
    except ValueError:
        given = {}
    given = given if isinstance(given, dict) else {}
    if what == 2:
        given[choose.choice(("finetuned", "out", "source", "target", "data"))] = choose.choice(PLACES)
    elif what == 3:
        given[choose.choice(NAMES)] = choose.choice((*ODD_VALUES, *ODD_TEXTS))
    elif what == 4:
        given[choose.choice((*ODD_TEXTS, "finetune", "Seed", "batch_size", "list", "workers", "resume"))] = 1
    elif given:
        del given[choose.choice(list(given))]
    return given


def huge_list(content: bytes, choose: random.Random) -> bytes:
    """A list with a line, a value, a nest, keys or lines that are too many or too large."""
    line, size = content.split(b"\n")[0], choose.choice((10**3, 10**4, 10**5, 10**6))
    key = choose.choice(NAMES)
    return choose.choice(
        (
            lambda: (line + b"\n") * (size // 20),
            lambda: choose.choice((b"{}", b"{", b"x", b"\x00")) + b"\n" * size,
            lambda: (choose.choice((b"{}", b"{", b"x")) + b"\n") * size,
            lambda: b"[" * size,
            lambda: b'{"a":' * size + b"1" + b"}" * size,
            lambda: json.dumps({key: "x" * size}).encode(),
            lambda: json.dumps({key: ["x"] * (size // 4)}).encode(),
            lambda: json.dumps({f"{key}{number}": 1 for number in range(size // 16)}).encode(),
            lambda: b'{"' + key.encode() + b'":' + b"9" * size + b"}",
            lambda: b" " * size + line,
            lambda: line[:-1] + b', "columns": {' + b",".join(b'"%d": "x"' % n for n in range(size // 16)) + b"}}",
        )
    )()


def look_at_list(path: Path) -> None:
    """Read a list as the command does; outputs that are accepted lie apart from each other and from the summary."""
    os.chdir(path.parent)  # the paths of the list begin here
    given = {"source": "../model", "target": "../bert", "data": "own.jsonl"}
    inputs = UpgradeInputs(list_=str(path), out="new/fleet", **given)
    places = [Path(inputs.out).resolve()]
    for line in read_lines(inputs, UpgradeConfig.of()):
        assert line.fingerprint
        out = line.out.resolve()
        for other in places:
            assert out not in (other, *other.parents), f"{out} holds {other}"
            assert other == places[0] or other not in out.parents, f"{out} lies in {other}"
        places.append(out)


def look_at_summary(path: Path) -> None:
    """Read the rows of an earlier start, and write them again."""
    fleet_of(path.parent, earlier_rows(path.parent)).write()
