"""Charts: series, labels and positions read back from the SVG, and the same file for the same numbers."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from paper.charts import COLOURS, bar_chart, colours_of, line_chart

SVG = "{http://www.w3.org/2000/svg}"
NAN = math.nan
LINES = {"target": {10: 50.0, 100: 50.0}, "bico": {10: 45.0, 100: 60.0}, "bico, auto": {100: 55.0}}


def texts(svg: str) -> list[str]:
    return ["".join(item.itertext()).strip() for item in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def shape(svg: str, name: str) -> tuple[list[tuple[float, float]], str]:
    """The corners and the style of the first path in the group with this id."""
    group = next(item for item in ElementTree.fromstring(svg).iter(f"{SVG}g") if item.get("id") == name)
    path = next(group.iter(f"{SVG}path"))
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))]
    return points, path.get("style", "")


def line_svg(**changes: object) -> str:
    settings: dict[str, object] = {
        "title": "A & B",
        "x_label": "samples",
        "y_label": "accuracy, %",
        "spread": {"bico": {10: 1.0, 100: 2.5}},
        "variants": {"bico, auto": "bico"},
        "notes": ["fine-tuned target: 88.0"],
    }
    return line_chart(LINES, **(settings | changes))  # type: ignore[arg-type]


def test_lines_are_as_high_as_their_values() -> None:
    svg = line_svg()
    target, bico, auto = (shape(svg, f"line {name}")[0] for name in LINES)
    assert [len(line) for line in (target, bico, auto)] == [2, 2, 1]  # a missing value is a gap
    assert target[0][1] == target[1][1]
    unit = (bico[0][1] - target[0][1]) / 5  # points of the page for one percent; y points down
    assert unit > 0
    # Coordinates have six decimals, so that an error of one unit in the last place is 1e-6 of a point.
    assert target[1][1] - bico[1][1] == pytest.approx(10 * unit, abs=1e-4)
    assert target[1][1] - auto[0][1] == pytest.approx(5 * unit, abs=1e-4)
    assert auto[0][0] == bico[1][0] == target[1][0] > bico[0][0]


def test_labels_and_legend() -> None:
    found = texts(line_svg())
    assert {"A & B", "samples", "accuracy, %", "10", "100", "fine-tuned target: 88.0"} <= set(found)
    assert [text for text in found if text in LINES] == ["bico", "bico, auto", "target"]  # by the last value
    assert "error bars: ± one deviation over seeds" in found
    assert "error bars: ± one deviation over seeds" not in texts(line_svg(spread=None))


def test_variant_is_dashed_in_the_colour_of_its_line() -> None:
    svg = line_svg()
    for name, dashed in (("bico", False), ("bico, auto", True)):
        style = shape(svg, f"line {name}")[1]
        assert COLOURS["bico"] in style
        assert ("stroke-dasharray" in style) == dashed


def test_bars_are_as_long_as_their_numbers() -> None:
    svg = bar_chart(
        {"target": 25.0, "bico": 50.0, "odd": NAN}, title="t", x_label="%", form=".1f", line=25.0, spread={"bico": 2.0}
    )
    lengths = []
    for name in ("target", "bico"):
        across = [x for x, _ in shape(svg, f"bar {name}")[0]]
        lengths.append(max(across) - min(across))
    assert lengths[1] == pytest.approx(2 * lengths[0], abs=1e-4)
    assert {"25.0", "50.0 ± 2.0", "target", "bico"} <= set(texts(svg))
    assert "odd" not in texts(svg)


def test_bar_of_a_variant_is_pale() -> None:
    svg = bar_chart({"bico": 2.0, "bico, auto": 1.0}, title="t", x_label="x", variants={"bico, auto": "bico"})
    for name, pale in (("bico", False), ("bico, auto", True)):
        style = shape(svg, f"bar {name}")[1]
        assert COLOURS["bico"] in style
        assert ("opacity: 0.55" in style) == pale


def test_same_numbers_give_the_same_file() -> None:
    assert line_svg() == line_svg()
    assert "<dc:date>" not in line_svg()
    assert bar_chart({"a": 1.0}, title="t", x_label="x") == bar_chart({"a": 1.0}, title="t", x_label="x")


@pytest.mark.parametrize("name", ['<script>alert(1)</script>&"', "$x^2$ and $"])
def test_names_are_plain_text(name: str) -> None:
    for svg in (
        line_chart({name: {1: 1.0}}, title=name, x_label=name, y_label=name, notes=[name]),
        bar_chart({name: 1.0}, title=name, x_label=name),
    ):
        assert not list(ElementTree.fromstring(svg).iter(f"{SVG}script"))
        assert texts(svg).count(name) >= 3


def test_colours_differ_and_variants_share() -> None:
    found = colours_of(["bico", "theseus", "one", "two", "one, auto"], {"one, auto": "one"})
    assert found["bico"] == COLOURS["bico"]
    assert found["one, auto"] == found["one"]
    assert len({found[name] for name in ("bico", "theseus", "one", "two")}) == 4


def test_empty_chart_is_an_svg() -> None:
    assert ElementTree.fromstring(line_chart({}, title="t", x_label="x", y_label="y")).tag == f"{SVG}svg"
    assert ElementTree.fromstring(bar_chart({}, title="t", x_label="x")).tag == f"{SVG}svg"
