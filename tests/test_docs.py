"""README and docs: their code runs, and their commands, links and names exist.

Python blocks and `tuneport` commands of a page run in order, in one namespace and one working folder with the inputs
of the examples: old-base, old-base-cars, new-base and cars/. A block after `<!-- not run -->` is checked but not run.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import pkgutil
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from PIL import Image
from torch import Tensor

import tuneport
from benchmarks.claims import check, readme
from benchmarks.skill import pages
from builders.folders import LARGE, SMALL, build, images, perturb, write_head
from tuneport import cli
from tuneport.measure.accuracy import compute_features
from tuneport.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?P<mark><!-- not run -->\n)?```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST_PAGES = ("lora.md", "classifier.md", "images.md")
CLASSES = ("coupe", "estate", "van")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    run: bool


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        yield Block(found["language"], found["code"], line, found["mark"] is None)


def shell_commands(code: str) -> Iterator[list[str]]:
    for line in code.replace("\\\n", " ").splitlines():
        if line.startswith("tuneport "):
            yield shlex.split(line, comments=True)[1:]


def inline_commands(page: Path) -> Iterator[list[str]]:
    """Yield the commands in inline code, such as `tuneport methods`, without upper-case placeholders."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for found in re.findall(r"`tuneport ([^`]+)`", prose):
        yield [word for word in shlex.split(found) if word != "..." and not word.isupper()]


@functools.cache
def command_tree() -> Any:
    return typer.main.get_command(cli.app)


def option_names(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def check_words(words: list[str]) -> None:
    """Assert that the command and its options exist."""
    rest = list(words)
    allowed = option_names(command_tree()) | {"--help", "-h"}
    while rest and rest[0].startswith("-"):
        assert rest.pop(0) in allowed, f"unknown option in: tuneport {' '.join(words)}"
    if not rest:
        return
    commands = command_tree().commands
    assert rest[0] in commands, f"no such command: tuneport {' '.join(words)}"
    allowed = option_names(commands[rest[0]]) | {"--help", "-h"}
    for word in rest[1:]:
        if word.startswith("-"):
            assert word.partition("=")[0] in allowed, f"unknown option {word} in: tuneport {' '.join(words)}"


def fitted_classes(model: Path, data: Path) -> Tensor:
    """A head that suits a model: the least-squares fit of the classes to its features."""
    train = tuneport.read_data(data, "train")
    features = torch.nn.functional.normalize(compute_features(tuneport.open_model(model), train), dim=-1)
    wanted = torch.eye(len(CLASSES))[torch.as_tensor(train.labels)] - 1 / len(CLASSES)
    return torch.linalg.lstsq(features, wanted).solution.T.contiguous()


@pytest.fixture(scope="module")
def example_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("docs")
    old, new = build("clip_vision", SMALL, root / "old-base"), build("clip_vision", LARGE, root / "new-base")
    tuned = perturb(old, root / "old-base-cars")
    for split, count in (("train", 120), ("test", 24)):
        for number, (pixels, label) in enumerate(zip(*images(count, seed=count), strict=True)):
            folder = root / "cars" / split / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number:03}.png")
    for folder in (old, tuned, new):
        (folder / "heads" / "animals.safetensors").unlink()
    for path, readers, noise in ((tuned, (old, tuned), 0.0), (new, (new,), 0.5)):  # the new base is to be improved
        embeds = fitted_classes(path, root / "cars")
        embeds += noise * embeds.std() * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0))
        for folder in readers:
            write_head(folder / "heads" / "cars.safetensors", embeds.shape[1], CLASSES, embeds=embeds)
    return root


@each_page
def test_code_runs(
    page: Path,
    example_inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = tmp_path / "work"
    shutil.copytree(example_inputs, work)
    monkeypatch.chdir(work)
    monkeypatch.setattr("tuneport.demo.run.STEPS", 2)  # tests/demo runs it whole
    namespace: dict[str, Any] = {"__name__": f"docs_{page.stem.replace('-', '_')}"}
    monkeypatch.setitem(sys.modules, namespace["__name__"], type(sys)(namespace["__name__"]))  # for dataclasses
    for block in blocks(page):
        if not block.run:
            continue
        if block.language == "python":
            source = "\n" * block.line + block.code  # so that a failure names the line of the page
            exec(compile(source, str(page), "exec"), namespace)
        for words in shell_commands(block.code) if block.language == "bash" else ():
            run_command(words, monkeypatch)
    capsys.readouterr()


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tuneport", *words])
    code: object = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = stop.code
    assert code in (0, None), f"exit code {code}: tuneport {' '.join(words)}"


@each_page
def test_commands_exist(page: Path) -> None:
    for block in blocks(page):
        for words in shell_commands(block.code) if block.language == "bash" else ():
            check_words(words)
    for words in inline_commands(page):
        check_words(words)


def test_unknown_commands_and_options_fail() -> None:
    with pytest.raises(AssertionError, match="no such command"):
        check_words(["transfr"])
    with pytest.raises(AssertionError, match="unknown option --sacle"):
        check_words(["transfer", "--source", "a", "--sacle", "1"])


def test_at_most_four_blocks_are_not_run() -> None:
    skipped = [(page.name, block) for page in PAGES for block in blocks(page) if not block.run]
    exempt = [(name, block.line) for name, block in skipped if block.language != "toml"]  # test_tasks reads the task
    assert len(exempt) <= 4, exempt


@pytest.mark.parametrize("path", check.PICTURES, ids=lambda path: path.name)
def test_pictures_are_those_of_the_results(path: Path) -> None:
    """If they are not: python -m benchmarks.claims.check --write"""
    assert path.read_text(encoding="utf-8") == check.PICTURES[path]()


def test_the_table_of_the_readme_is_full_and_follows_its_rows() -> None:
    lines = readme.table()
    assert len({line.count("|") for line in lines}) == 1
    assert not any("|  |" in line or "not run" in line or pages.DASH in line for line in lines)
    assert any("the old model teaches" in line for line in lines)
    fewer = [row for row in pages.committed() if row["arm"] != "old"]
    assert any("your old fine-tuned model" in line for line in lines)
    assert not any("your old fine-tuned model" in line for line in readme.table(fewer))
    assert "your old fine-tuned model" in readme.picture()
    assert "your old fine-tuned model" not in readme.picture(fewer)


def test_the_readme_names_the_cells_where_labels_are_better() -> None:
    cell = {"pair": "smollm2-135m>gemma3-270m", "task": "trec6", "draw": 0}
    rows = [
        {**cell, "arm": arm, "n": 100, "scores": {"accuracy": score}}
        for arm, score in (("distill", 80), ("few-shot", 81))
    ]
    (line,) = readme.behind(rows)
    assert "`trec6 smollm2-135m to gemma3-270m`" in line
    rows[0]["scores"] = {"accuracy": 82}
    (line,) = readme.behind(rows)
    assert "no cell" in line


def test_the_readme_and_the_first_pages_are_short() -> None:
    readme_page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme_page.splitlines()) < 80
    assert readme_page.count("![") == 1
    for name in FIRST_PAGES:
        page = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert page.startswith("# I have ")
        assert page.count("![") == 1
        assert len(page.split()) < 600
        assert name in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in PAGES[1:]) <= 16_000


def test_workflows_run_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    called = {name for file in files for name in re.findall(r"run: make ([a-z-]+)", file.read_text(encoding="utf-8"))}
    assert called == {"test", "test-families", "lint", "docs"}
    assert called <= targets


@each_page
def test_link_targets_exist(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{page.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", there.read_text(encoding="utf-8")), re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, f"{page.name} links to {link}"


def test_pages_that_contributors_are_sent_to_exist() -> None:
    named = re.findall(r"`(docs/[a-z-]+\.md)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert named
    assert [page for page in named if not (ROOT / page).is_file()] == []


def slug(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]]
    assert sorted(re.findall(r"[\w/-]+\.md", navigation)) == sorted(pages)


def test_names_in_paper_to_code_exist() -> None:
    text = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    names = sorted(set(re.findall(r"`((?:tuneport|paper)\.[\w.]+)`", text)))
    assert len(names) > 25
    missing = [name for name in names if not exists(name)]
    assert not missing
    files = re.findall(r"`((?:benchmarks|paper|src|tests)/[\w./]*)`", text)
    assert not [path for path in files if not (ROOT / path).exists()]


def exists(name: str) -> bool:
    """Return True if a dotted name is a module or an attribute of one."""
    parts = name.split(".")
    thing: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if not hasattr(thing, part):
            try:
                thing = importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        else:
            thing = getattr(thing, part)
    return True


def test_every_equation_and_line_of_the_algorithm_is_covered() -> None:
    text = (ROOT / "docs" / "paper-to-code.md").read_text(encoding="utf-8")
    for heading, last in (("## Equations", 18), ("## Algorithm 1", 11)):
        section = text.partition(heading)[2].partition("\n## ")[0]
        numbers = [int(n) for row in re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE) for n in row.split(",")]
        assert numbers == list(range(1, last + 1))


def test_public_names_exist_and_are_documented() -> None:
    assert len(tuneport.__all__) <= 30
    assert all(hasattr(tuneport, name) for name in tuneport.__all__)
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    missing = [name for name in tuneport.__all__ if not re.search(rf"`{name}[`(]", text)]
    assert not missing


AUTHORS = ("tuneport.methods", "tuneport.models", "tuneport.pairing")  # of parts


@each_page
def test_code_imports_public_names_only(page: Path) -> None:
    for block in blocks(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tuneport"):
                names = [alias.name for alias in node.names]
                public = node.module in AUTHORS or all(name in tuneport.__all__ for name in names)
                assert public, f"{page.name}: from {node.module} import {', '.join(names)}"
            elif isinstance(node, ast.Import):
                inner = [alias.name for alias in node.names if alias.name.startswith("tuneport.")]
                assert not inner, f"{page.name}: import {inner}"


def test_every_command_and_option_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    tables = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["option_tables"]()
    for name, command in command_tree().commands.items():
        if name in ("methods", "demo"):
            continue
        assert f"<!-- options: {name} -->" in sections[name]
        assert f"tuneport {name}" in sections[name], f"{name} has no example"
        options = {parameter.opts[0] for parameter in command.params if parameter.opts[0].startswith("-")}
        missing = [option for option in options - {"--help", "--json"} if option not in tables[name]]
        assert not missing, f"{name}: {missing}"
    assert not [name for name in METHODS if f"`{name}`" not in sections["methods"]]


MODULES = [
    found.name for found in pkgutil.walk_packages(tuneport.__path__, "tuneport.") if not found.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["tuneport", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
