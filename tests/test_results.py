"""Every number of the README and of the page on benchmarks is that of the committed results."""

from __future__ import annotations

import pytest

from benchmarks.claims import check


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
