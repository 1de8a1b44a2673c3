"""Every number of README.md, docs/results.md and paper/results.md is that of a committed row."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claims import check
from benchmarks.skill import pages, studies
from benchmarks.speed import record

Row = dict[str, Any]


@pytest.fixture(scope="module")
def known() -> dict[str, float]:
    return check.values()


def problems_of(name: str, page: str, known: dict[str, float]) -> list[str]:
    problems = pages.problems()
    check.corrected(page, known, problems, name)
    return problems


@pytest.mark.parametrize("name", check.PAGES)
def test_every_number_is_that_of_the_results(name: str, known: dict[str, float]) -> None:
    """If not: python -m benchmarks.claims.check --write"""
    page = (check.ROOT / name).read_text()
    assert problems_of(name, page, known) == []
    assert check.corrected(page, known, [], name) == page
    assert "<!-- results: " in page


@pytest.mark.parametrize("name", check.PAGES)
def test_a_changed_digit_of_a_page_is_found(
    name: str, known: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any digit of any table, and any marked number; the tables of the results are made once."""
    monkeypatch.setattr(check, "TABLES", {table: cache(make) for table, make in check.TABLES.items()})
    page = (check.ROOT / name).read_text()
    places = [found.start(3) + at for found in check.TABLE.finditer(page) for at in digits(found[3])]
    places += [found.start(1) + at for found in check.MARKED.finditer(page) for at in digits(found[1])]
    assert len(places) > 20
    for place in places[:: max(1, len(places) // 10)]:
        wrong = page[:place] + str((int(page[place]) + 1) % 10) + page[place + 1 :]
        problems: list[str] = []
        check.corrected(wrong, known, problems, name)
        assert problems


def digits(text: str) -> list[int]:
    return [found.start() for found in re.finditer(r"\d", text)]


def another_commit(rows: list[Row], at: int) -> list[Row]:
    return [{**row, "commit": "0000000"} if number == at else row for number, row in enumerate(rows)]


def without(rows: list[Row], at: int) -> list[Row]:
    return rows[:at] + rows[at + 1 :]


@pytest.mark.parametrize("change", [another_commit, without])
@pytest.mark.parametrize("task", ["trec6", "sst2-full", "mnist"])
def test_a_row_of_another_commit_and_a_missing_draw_are_found(
    change: Callable[[list[Row], int], list[Row]], task: str, known: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = list(pages.committed())
    at = next(
        number
        for number, row in enumerate(rows)
        if row["task"] == task and row["arm"] == "distill" and row["n"] == 100 and "error" not in row
    )
    page = (check.ROOT / "docs/results.md").read_text()
    changed = change(rows, at)
    monkeypatch.setattr(pages, "committed", lambda: changed)
    found = problems_of("docs/results.md", page, known)
    assert any("differs from the results" in problem for problem in found)
    draws = [row for row in rows if all(row[key] == rows[at][key] for key in ("pair", "task", "arm", "n"))]
    if change is another_commit and len(draws) > 1:
        assert any("are of the commits 0000000" in problem for problem in found)


def test_an_ablation_says_what_a_start_is_worth_and_what_is_missing() -> None:
    pair = studies.GEMMA

    def row(arm: str, *losses: float) -> Row:
        curve = [{"step": 10 * at, "held_out_loss": loss} for at, loss in enumerate(losses)]
        cell = {"pair": pair, "task": "trec6", "arm": arm, "n": 100, "draw": 0, "scores": {"accuracy": 50.0}}
        return {**cell, "commit": "c", "about": {"distilled": {"curve": curve}}}

    target, port = row("distill-unported", 4.0, 2.0, 1.0), row("distill-ported", 1.5, 1.0, 1.0)
    assert studies.worth([target], [port]) == "at most 20 of 20 steps"
    assert studies.worth([target], [row("distill-ported", 4.0, 1.0)]) == "0 of 20 steps"
    assert studies.worth([target], [row("distill-ported", 0.5, 0.4)]) == "more than 20 steps"
    lines = studies.table("start", [target, port])
    assert lines[2:] == [f"| trec6 | {pages.short(pair)} | 50.0 | 50.0 | at most 20 of 20 steps |"]
    assert studies.table("start", [target])[2:] == [f"| trec6 | {pages.short(pair)} | 50.0 | – | – |"]
    assert studies.table("filters", [])[2:] == studies.extra([])[2:] == []
    alone, beside = ({**port, "pair": "a>a2", "task": "mnist", "arm": arm, "n": 20} for arm in ("distill", "extra"))
    beside["scores"] = {"accuracy": 60.0}
    assert studies.extra([alone, beside])[2:] == ["| towers, accuracy, % | 20 | 50.0 | 60.0 | 1 |"]
    assert studies.extra([alone])[2:] == []


def test_the_rules_are_held_against_what_became_of_their_decisions() -> None:
    cell = {"pair": "a>b", "task": "mnist", "n": 20}
    taken = {"taken": {"safe": [0.25, 51.0]}, "target": 50.0}
    ports = [{**cell, **taken, "one": 40.0}, {**cell, **taken, "one": 60.0}]
    lines = studies.scale_rules(ports)[2:]
    assert lines == ["| 20 | 1 | +0.0 | -10.0 | 1 of 2 | 1 |", "| 20 | safe | +1.0 | +1.0 | 0 of 2 | 0.25 |"]
    bases = [{"base": base, "of": "a", "left": left} for base, left in (("a", 0.9), ("b", 0.1), ("b", 0.6))]
    routes = [{"name": name, "agreement": 80.0, "note": ""} for name in ("port", "distill")]
    routes[1] |= {"agreement": 40.0, "note": "forgets"}
    by_route = {"port": {"accuracy": 70.0}, "distill": {"accuracy": 80.0}}
    upgrade = {**cell, "arm": "upgrade", "by_route": by_route, "about": {"routes": [{"name": "old"}, *routes]}}
    old = {**cell, "arm": "old", "scores": {"accuracy": 90.0}}
    counts = [line.split(" | ")[1:] for line in studies.rules([old, upgrade], bases)[2:]]
    assert [(int(right), int(of[0])) for right, of in counts] == [
        (2, 3),
        (0, 1),
        (0, 1),
        (1, 1),
        (1, 2),
        (0, 0),
        (0, 1),
    ]


def test_a_small_run_is_no_result() -> None:
    row = {"pair": "a>b", "task": "mnist", "arm": "distill", "n": 20, "draw": 0, "commit": "c"}
    assert pages.problems([row]) == []
    assert pages.problems([{**row, "small": True}]) == ["skill: a>b, mnist, distill@20 is a small run"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("It recovers 9<!-- x --> % of it.", "page: 9 is 7 in the results (x)"),
        ("It gains +7.1<!-- x --> points.", "page: +7.1 is +7.4 in the results (x)"),
        ("It gains 7<!-- y -->.", "page: 7 has the origin 'y'; known: x, or a file"),
        ("It gains 7 points.", "page: 7 has no origin: It gains 7 points."),
        ("| bico | 7.4 |", "page: 7.4 has no origin: | bico | 7.4 |"),
        ("<!-- results: zoo -->\n| bico | 99 |\n<!-- end -->", "page: the table zoo differs from the results"),
        ("9.99<!-- fuzz: spoiled files -->", "page: 9.99 is on no line with 'spoiled files' of fuzz"),
    ],
)
def test_another_number_is_found(text: str, problem: str) -> None:
    problems: list[str] = []
    check.corrected(text, {"x": 7.4}, problems)
    assert [found[: len(problem)] for found in problems] == [problem]


def test_settings_code_and_links_are_no_measurements() -> None:
    problems: list[str] = []
    text = "With N = 100 and `--steps 5`, see [it](a/b/3.md); 7.4<!-- x --> points.\n\n```bash\nrun 12\n```\n"
    assert check.corrected(text, {"x": 7.4}, problems) == text
    assert problems == []


def test_pages_of_results_are_few_short_and_made_by_commands() -> None:
    found = sorted(check.RESULTS.rglob("*.md"))
    assert len(found) < 15
    assert sum(len(path.read_text().split()) for path in found) < 12_000
    for path in found:
        assert re.search(r"^- commands?: `?python ", path.read_text(), re.MULTILINE), path
    speed = check.RESULTS / "speed"
    assert speed.with_suffix(".md").read_text() == record.page(speed)


def test_files_of_results_are_those_that_pages_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    read = set[Path]()
    plain = Path.read_text

    def noted(path: Path, *args: Any, **options: Any) -> str:
        read.add(path.resolve())
        return plain(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", noted)
    pages.committed.cache_clear()
    check.values()
    for table in check.TABLES.values():
        table()
    record.page(check.RESULTS / "speed")
    files = {path for path in check.RESULTS.rglob("*") if path.is_file() and path.suffix != ".md"}
    assert files - read == set()


def test_the_page_of_results_fits_four_screens() -> None:
    lines = (check.ROOT / "docs/results.md").read_text().splitlines()
    assert len(lines) <= 4 * 40
