"""Each name is imported from the module that defines it, and values and signatures are small.

`lint-imports` checks the direction of imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tuneport"
MOST_FIELDS, MOST_PARAMETERS = 10, 8
LARGER = {  # classes with more fields, inherited ones too, and why; a config has one for each option of its command
    "Option": "all that is said of an option, once",
    "Row": "a row of the table of many upgrades",
}


@cache
def modules() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(SOURCE.rglob("*.py")))


def defined_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes and assignments."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))


def test_names_are_imported_from_their_own_module() -> None:
    known = {path: set(defined_in(tree)) for path, tree in modules()}
    wrong, seen = [], 0
    for path, tree in modules():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level or node.module is None:
                continue
            home = path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
            if not home.is_file():  # a package, which re-exports names
                continue
            seen += len(node.names)
            misplaced = [a.name for a in node.names if a.name not in known[home] or a.name.startswith("_")]
            wrong += [f"{path.relative_to(SOURCE)} imports {name} from {home.name}" for name in misplaced]
    assert seen
    assert not wrong


def test_values_have_few_fields() -> None:
    classes = [node for _, tree in modules() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]

    def fields(name: str) -> set[str]:
        """The fields of the classes of this name, with those of their bases."""
        same = [node for node in classes if node.name == name]
        own = {ast.unparse(part.target) for node in same for part in node.body if isinstance(part, ast.AnnAssign)}
        return own.union(*(fields(ast.unparse(base)) for node in same for base in node.bases))

    found = {node.name: len(fields(node.name)) for node in classes}
    assert found["Dataset"] == MOST_FIELDS, "fields are counted"
    assert found["TransferConfig"] > found["MeasureConfig"] > MOST_FIELDS, "fields are inherited"
    larger = {name for name, count in found.items() if count > MOST_FIELDS and not name.endswith("Config")}
    assert larger == set(LARGER)


def test_functions_have_few_parameters() -> None:
    found = {}
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                place = f"{path.relative_to(SOURCE)}:{node.name}"
                found[place] = len(names) - (names[:1] in (["self"], ["cls"]))
    assert found["pipeline/solve.py:solve"] > 2, "parameters are counted"
    assert [place for place, count in found.items() if count > MOST_PARAMETERS] == []


def test_the_second_opinion_shares_no_code() -> None:
    tree = ast.parse((ROOT / "tests" / "builders" / "plain.py").read_text(encoding="utf-8"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "transformers" in found
    assert not [name for name in found if name.split(".")[0] in ("tuneport", "builders", "")]
