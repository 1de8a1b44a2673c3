"""The house: every room is shown, each name is imported from where it lives, and no two ideas share one.

Which way imports point is checked by `lint-imports`.
"""

from __future__ import annotations

import ast
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import tuneport

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tuneport"
COMMANDS = {"apply", "compare", "extract", "finetune", "transfer", "main", "Completion", "Finetuned"}  # again in cli


def rooms() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def defined_in(tree: ast.Module) -> Iterator[str]:
    """The names that a room gives a meaning: functions, classes, and what it assigns."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


def test_the_page_shows_every_room_in_the_order_of_the_contract() -> None:
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition('containers = ["tuneport"]')[2]
    lines = re.findall(r'^  "([\w |]+)",$', contract.partition("\n]")[0], re.MULTILINE)
    order = {room: number for number, line in enumerate(lines) for room in line.split(" | ")}
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(shown) == sorted({found.name for found in pkgutil.iter_modules(tuneport.__path__)} - {"__main__"})
    assert [order[room] for room in shown] == sorted(order[room] for room in shown)


def test_names_are_imported_from_where_they_live() -> None:
    known = {path: set(defined_in(tree)) for path, tree in rooms()}
    astray, seen = [], 0
    for path, tree in rooms():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level or node.module is None:
                continue
            home = path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
            if not home.is_file():  # a folder, which passes on the names of its parts
                continue
            seen += len(node.names)
            wrong = [a.name for a in node.names if a.name not in known[home] or a.name.startswith("_")]
            astray += [f"{path.relative_to(SOURCE)} takes {name} from {home.name}" for name in wrong]
    assert seen > 500
    assert not astray


def test_no_two_ideas_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in rooms():
        for name in set(defined_in(tree)):
            if not name.startswith("_") and not name.isupper():  # constants may be of one file
                homes[name].append(str(path.relative_to(SOURCE)))
    shared = {name: found for name, found in homes.items() if len(found) > 1 and name not in COMMANDS}
    assert not shared
