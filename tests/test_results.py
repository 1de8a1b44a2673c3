"""Every number of the README and of the page on benchmarks is that of the committed results."""

from __future__ import annotations

import pytest

from benchmarks.claims import check, distill, language_tables
from benchmarks.rows import rows_in


@pytest.fixture(scope="module")
def known() -> dict[str, float]:
    return check.values()


@pytest.mark.parametrize("name", check.PAGES)
def test_every_number_is_that_of_the_results(name: str, known: dict[str, float]) -> None:
    """If not: python -m benchmarks.claims.check --write"""
    problems: list[str] = []
    page = (check.ROOT / name).read_text()
    assert check.corrected(page, known, problems, name) == page
    assert problems == []
    assert "<!-- results: " in page


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("It recovers 9<!-- x --> % of it.", "page: 9 is 7 in the results (x)"),
        ("It gains +7.1<!-- x --> points.", "page: +7.1 is +7.4 in the results (x)"),
        ("It gains 7<!-- y -->.", "page: 7 has the origin 'y'; known: x, or a file"),
        ("It gains 7 points.", "page: 7 has no origin: It gains 7 points."),
        ("| bico | 7.4 |", "page: 7.4 has no origin: | bico | 7.4 |"),
        ("<!-- results: zoo -->\n| bico | 99 |\n<!-- end -->", "page: the table zoo differs from the results"),
        ("9.99<!-- verdict: trial: change of accuracy -->", "page: 9.99 is on no line with 'trial: change of "),
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


@pytest.mark.parametrize(
    ("name", "parts", "draws", "pairs"),
    [
        ("language-models", language_tables.PARTS, (0, 1, 2), ["smollm2-135m:tinyllama-1.1b"]),
        ("language-models-trial", language_tables.TRIAL, (0,), []),
    ],
)
def test_pages_of_language_models_are_those_of_the_rows(
    name: str, parts: tuple[str, ...], draws: tuple[int, ...], pairs: list[str]
) -> None:
    """If not: python -m benchmarks.claims.language_models --table, with the options of its docstring"""
    lines = language_tables.page(rows_in(check.RESULTS / f"{name}.jsonl"), parts, draws, pairs)
    assert "\n".join(lines) + "\n" == (check.RESULTS / f"{name}.md").read_text(encoding="utf-8")


def test_tables_of_distillations_are_those_of_the_rows() -> None:
    """If not: python -m benchmarks.claims.distill --write, with the options of its docstring"""
    zoo, text = (rows_in(check.RESULTS / f"{name}.jsonl") for name in ("distill", "distill-text"))
    page = (check.RESULTS / "distill.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in (*distill.cell_table(zoo), *distill.text_table(text)) if line not in page] == []


def test_a_page_of_language_models_says_what_is_missing_and_what_failed() -> None:
    cell = {"pair": "a:b", "task": "trec6", "samples": 4, "lora": "1 steps of 2", "test": 3}
    cell |= {"commit": "c", "device": "d", "torch": "t", "seconds": 1.0}
    scores = {"accuracy": None, "bits": 1.0, "perplexity": 2.0}
    rows = [cell | scores | {"row": "few-shot", "draw": 0}, cell | {"row": "bico@1", "draw": 0, "error": "too large."}]
    said = list(language_tables.page(rows, ["target", "few-shot", "bico@1"], (0, 1), ["a:b", "a:c"]))
    assert "\n**Not measured**: target, bico@1; few-shot (draw 1)." in said
    assert said[-2:] == ["\n**Failed**: bico@1, draw 0: too large.", "\n**Not measured at all**: a:c."]
    assert "| few-shot | 1 |  | 1.0000 | 2.00 |  | 1 | c |" in said
