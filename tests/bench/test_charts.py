"""Charts: where points land, what the legend says, and that nothing leaves the drawing."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from tuneport.bench.charts import KNOWN, LETTER, bars, chart, colours_of
from tuneport.report.plots import round_ticks

SVG = "{http://www.w3.org/2000/svg}"
NAN = math.nan


def drawn(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


def words(root: ElementTree.Element) -> list[str]:
    return [item.text or "" for item in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (50.8, 58.8, [50, 52, 54, 56, 58, 60]),
        (0.006, 0.965, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3.0, 3.0, [-3, -2, -1, 0, 1, 2, 3]),
        (0.02, 0.061, [0.02, 0.03, 0.04, 0.05, 0.06, 0.07]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(wanted)


@pytest.mark.parametrize("value", [0.0, 55.5, -2.0, 1e-9, 1e9])
def test_ticks_of_one_value_hold_it(value: float) -> None:
    found = round_ticks(value, value)
    assert found[0] <= value <= found[-1]
    assert 2 <= len(found) <= 9


def test_points_whiskers_and_legend() -> None:
    lines = {"target": [50.0, 50.0], "bico": [45.0, 60.0], "bico, auto": [NAN, 55.0]}
    root = drawn(
        chart(
            lines,
            [10, 100],
            title="A & B",
            x_label="samples",
            y_label="accuracy, %",
            spread={"bico": [1.0, 2.5]},
            variants={"bico, auto": "bico"},
            notes=["fine-tuned target: 88.0"],
        )
    )
    told = [item.findtext(f"{SVG}title") for item in root.iter(f"{SVG}circle")]
    assert told == [
        "target, samples 10: 50",
        "target, samples 100: 50",
        "bico, samples 10: 45 ± 1",
        "bico, samples 100: 60 ± 2.5",
        "bico, auto, samples 100: 55",
    ]
    shown = words(root)
    legend = [text for text in shown if text in lines]
    assert legend == ["bico", "bico, auto", "target"]  # from the top, as the lines end
    assert {"A & B", "samples", "accuracy, %", "fine-tuned target: 88.0"} < set(shown)
    assert "whiskers: ± one deviation over seeds" in shown
    assert len(list(root.iter(f"{SVG}path"))) == 2
    dashed = [line.get("stroke") for line in root.iter(f"{SVG}polyline") if line.get("stroke-dasharray")]
    assert dashed == [KNOWN["bico"]]
    heights = [float(item.get("cy", "nan")) for item in root.iter(f"{SVG}circle")]
    assert heights[3] < heights[4] < heights[0] == heights[1] < heights[2]  # more is higher up


def test_nothing_leaves_the_drawing() -> None:
    long = "other width: cosine after, unseen samples, of a very long name"
    pictures = [
        chart({long: [0.1, 0.9]}, [0, 1], title="t", x_label="x", y_label="y", spread={long: [0.3, 0.3]}),
        bars({long: 73.28, "b": 0.0}, title="t", x_label="seconds", spread={long: 3.0}, line=40.0),
    ]
    for picture in pictures:
        root = drawn(picture)
        wide, tall = float(root.get("width", "0")), float(root.get("height", "0"))
        for item in root.iter(f"{SVG}text"):
            size, x = LETTER * len(item.text or ""), float(item.get("x", "nan"))
            kind = item.get("class") or ""
            left = x - size if "end" in kind else x - size / 2 if "middle" in kind else x
            assert left >= 0, item.text
            assert left + size <= wide, item.text
            assert 0 < float(item.get("y", "nan")) < tall
        for item in root.iter(f"{SVG}circle"):
            assert 0 < float(item.get("cx", "nan")) < wide
            assert 0 < float(item.get("cy", "nan")) < tall


def test_bars_are_as_long_as_their_numbers() -> None:
    root = drawn(bars({"target": 25.0, "bico": 50.0, "odd": NAN}, title="t", x_label="%", form=".1f", line=25.0))
    long = [float(item.get("width", "nan")) for item in root.iter(f"{SVG}rect")][1:]  # the first is the ground
    assert long[1] == pytest.approx(2 * long[0])
    assert {"25.0", "50.0"} < set(words(root))
    assert "odd" not in words(root)
    rule = next(item for item in root.iter(f"{SVG}line") if item.get("class") == "rule")
    first = list(root.iter(f"{SVG}rect"))[1]
    assert float(rule.get("x1", "0")) == pytest.approx(float(first.get("x", "0")) + long[0], abs=0.1)


def test_names_cannot_break_the_file() -> None:
    evil = '<script>alert(1)</script>&"'
    for text in (
        chart({evil: [1.0]}, [1], title=evil, x_label=evil, y_label=evil, notes=[evil]),
        bars({evil: 1.0}, title=evil, x_label=evil),
    ):
        assert not list(drawn(text).iter(f"{SVG}script"))
        assert evil in words(drawn(text))


def test_colours_differ_and_variants_share() -> None:
    names = dict.fromkeys(["bico", "theseus", "one", "two", "one, auto"])
    found = colours_of(names, {"one, auto": "one"})
    assert found["bico"] == KNOWN["bico"]
    assert found["one, auto"] == found["one"]
    assert len({found[name] for name in ("bico", "theseus", "one", "two")}) == 4


def test_an_empty_chart_is_still_a_drawing() -> None:
    assert drawn(chart({}, [], title="t", x_label="x", y_label="y")).tag == f"{SVG}svg"
    assert drawn(bars({}, title="t", x_label="x")).tag == f"{SVG}svg"
