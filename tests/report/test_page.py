"""report.html: complete, escaped, accessible; and rendered by a real browser if one is installed."""

from __future__ import annotations

import html
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from builders import browser
from builders.folders import Zoo, load, write_data
from builders.options import other_options, read_words
from builders.runs import port, prepare
from tuneport.cli import app
from tuneport.config import TransferConfig
from tuneport.data.formats import read_plain
from tuneport.data.tasks import TASKS
from tuneport.pipeline.transfer import transfer
from tuneport.report.page import _ENVIRONMENT, answer_of, report_page
from tuneport.report.plots import Figure, tracks
from tuneport.report.record import to_json
from tuneport.report.summary import repeat_command

needs_chromium = pytest.mark.skipif(browser.find() is None, reason="no Chromium on this machine")
VOID = {"meta", "br", "img", "line", "polyline"}
DOT = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


class Tree(HTMLParser):
    """Checks that elements close in order, and collects text, attributes and ids."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def record(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A transfer with everything that a record can hold."""
    job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=24)
    out = tmp_path_factory.mktemp("page") / "out"
    port(job, out, scale="auto", test=read_plain(zoo.data, "test"))
    content = json.loads((out / "tuneport.json").read_text())
    assert (out / "report.html").read_text() == report_page(content)
    return content


def many_layers(record: dict[str, Any], count: int) -> dict[str, Any]:
    """The same record with `count` layers, in blocks of six."""
    layers = [
        {
            **record["layers"][index % len(record["layers"])],
            "target": f"encoder.layers.{index // 6}.some.name.{index % 6}",
        }
        | {"block": index // 6, "role": ("q", "k", "v", "out", "fc1", "fc2")[index % 6]}
        for index in range(count)
    ]
    return {**record, "layers": layers}


class TestContent:
    def test_page_contains_every_section_and_number(self, record: dict[str, Any]) -> None:
        tree = Tree(report_page(record))
        text = " ".join(tree.text)
        headings = ("Scale", "What moved", "Layer by layer", "Time", "Repeat it")
        assert not [heading for heading in headings if heading not in text]
        for layer in record["layers"]:
            assert layer["target"] in text
            assert f"{layer['norm_target']:.4g}" in text
        for item in record["not_transported"]:
            assert item["tensor"] in text
            assert item["reason"] in text
        assert f"{record['seconds']:.2f}" in text

    def test_numbers_in_pictures_are_also_in_tables(self, record: dict[str, Any]) -> None:
        text = " ".join(Tree(report_page(record)).text)
        losses = [item["loss"] for item in record["scale_choice"]["candidates"]]
        assert len(losses) > 2
        assert all(f"{value:.4g}" in text for value in losses if value is not None)

    def test_page_is_accessible(self, record: dict[str, Any]) -> None:
        tree = Tree(report_page(record))
        assert ("html", {"lang": "en"}) in tree.seen
        assert [tag for tag, _ in tree.seen if tag in ("main", "h1", "nav", "title")] == ["title", "main", "h1", "nav"]
        ids = [attrs["id"] for _, attrs in tree.seen if "id" in attrs]
        assert len(set(ids)) == len(ids)
        for tag, attrs in tree.seen:
            if tag == "a":
                assert (attrs["href"] or "")[1:] in ids
            if tag == "th":
                assert attrs.get("scope") in ("row", "col")
            if attrs.get("role") == "region":
                assert attrs["aria-label"]

    def test_blocks_of_two_stacks_have_short_names(self, record: dict[str, Any]) -> None:
        layers = [
            {**record["layers"][0], "stack": f"{side}_model.encoder.layers", "block": block, "role": "q"}
            for side in ("vision", "text")
            for block in range(2)
        ]
        page = report_page({**record, "layers": layers})
        assert "<th scope=row>vision_model 0</th>" in page
        assert "<th scope=row>text_model 1</th>" in page

    def test_page_makes_no_request(self, record: dict[str, Any]) -> None:
        page = report_page(record)
        for _, attrs in Tree(page).seen:
            assert (attrs.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
            assert (attrs.get("href") or "#").startswith("#")
        assert not re.search(r"https?://|url\(|@import", page)
        assert "default-src 'none'" in page

    def test_record_without_maps(self, zoo: Zoo) -> None:
        plain = json.loads(to_json(transfer(*zoo.trio("vit"), method="naive").record))
        page = report_page(plain)
        Tree(page)
        assert "Residual" not in " ".join(Tree(page).text)

    def test_hostile_names_are_escaped(self, record: dict[str, Any]) -> None:
        evil = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
        changed = json.loads(json.dumps(record))
        for layer in changed["layers"]:
            layer["target"] = layer["role"] = evil
        for item in changed["not_transported"]:
            item["tensor"] = item["reason"] = evil
        for key in ("source", "finetuned", "target", "data"):
            changed[key]["name"] = changed[key]["path"] = evil
        changed |= answered("harm", evil, evil)
        for item in (*changed["turned"]["right"], *changed["turned"]["wrong"]):
            item |= {"label": evil, "before": evil, "after": evil, "text": evil}
            del item["thumbnail"]
        changed["by_class"][0]["class"] = changed["accuracies"][0]["words"] = evil
        page = report_page(changed)
        tree = Tree(page)
        assert not [tag for tag, _ in tree.seen if tag == "script"]
        assert not [tag for tag, _ in tree.seen if tag == "img"]

    def test_control_characters_are_replaced(self, record: dict[str, Any]) -> None:
        changed = json.loads(json.dumps(record))
        for key in ("source", "finetuned", "target", "data"):
            changed[key]["name"] = changed[key]["path"] = "a\x9b2J\u202egpj.exe\x1b[2J\x85\udcff"
        page = report_page(changed)
        assert "gpj.exe" in page
        assert "gpj.exe" in repeat_command(changed)
        assert [mark for mark in set(page) if not mark.isprintable()] == ["\n"]
        page.encode()

    def test_two_hundred_layers_stay_small(self, record: dict[str, Any]) -> None:
        assert len(report_page(many_layers(record, 200)).encode()) < 5e6 / 10


def answered(outcome: str, headline: str, recommendation: str = "use the port") -> dict[str, Any]:
    """The fields of a record that answer, as a transfer with a test split writes them."""
    roles = {"finetuned": 90.0, "target": 70.0, "port": 80.0}
    rows = [
        {"role": role, "name": role, "words": f"the {role}", "value": value, "low": value - 4, "high": value + 3.5}
        for role, value in roles.items()
    ]
    entry = {"index": 3, "label": "cat", "thumbnail": DOT}
    return {
        "outcome": outcome,
        "headline": headline,
        "recommendation": recommendation,
        "accuracies": [row | {"samples": 400} for row in rows],
        "evaluation": {
            "data": "animals",
            "samples": 400,
            "protocol": "zero-shot",
            "metric": "accuracy",
            "before": 70.0,
            "after": 80.0,
        },
        "by_class": [
            {"class": "cat", "samples": 250, "before": 60.0, "after": 80.0},
            {"class": "dog", "samples": 150, "before": 86.7, "after": 80.0},
        ],
        "turned": {
            "right_count": 50,
            "wrong_count": 10,
            "right": [entry | {"before": "dog", "after": "cat"}],
            "wrong": [entry | {"before": "cat", "after": "owl"}],
        },
    }


class TestAnswer:
    """The first screen: the section before the navigation."""

    @staticmethod
    def first_screen(record: dict[str, Any]) -> str:
        page = report_page(record)
        Tree(page)
        return page[page.index("<h1>") : page.index("<nav")]

    @pytest.mark.parametrize(
        ("outcome", "headline", "style"),
        [
            ("gain", "accuracy on animals: 70.0 -> 80.0 %: the transfer helps", "good"),
            ("harm", "accuracy on animals: 72.0 -> 60.5 %: the transfer did harm; try --scale safe", "bad"),
            ("no clear change", "accuracy on animals: 72.0 -> 72.5 %: the test split cannot tell", "unsure"),
            ("nothing moved", "nothing moved: the calibration samples chose scale 0", "unsure"),
        ],
    )
    def test_sentence_and_colour(self, record: dict[str, Any], outcome: str, headline: str, style: str) -> None:
        screen = self.first_screen(record | answered(outcome, headline))
        sentence = html.escape(headline[0].upper() + headline[1:].replace("->", "→")) + "."
        assert re.search(r'<p class="verdict"><span aria-hidden="true">.</span>(.*?)</p>', screen)[1] == sentence  # type: ignore[index]
        assert f'<section class="answer {style}"' in screen
        assert "Next:</b> Use the port." in screen
        style_sheet = report_page(record)
        assert f".answer.{style}{{--it:var(--{style})}}" in style_sheet

    def test_scores_stand_on_one_axis_with_their_intervals(self, record: dict[str, Any]) -> None:
        screen = self.first_screen(record | answered("gain", "it helps"))
        for text in ("90.0 % <small>86.0 to 93.5", "70.0 % <small>66.0 to 73.5", "80.0 % <small>76.0 to 83.5"):
            assert text in screen
        ticks = [int(text) for text in re.findall(r'<span style="--x:[\d.]+%">(\d+)', screen)]
        places = [float(place) for place in re.findall(r'<b class="\w+ \w*" style="--x:([\d.]+)%">', screen)]
        wanted = [100 * (value - ticks[0]) / (ticks[-1] - ticks[0]) for value in (90, 70, 80)]
        assert places == pytest.approx(wanted, abs=0.005)  # two digits
        assert "400 test samples of animals" in screen
        assert "50 samples turned right and 10 turned wrong" in screen

    def test_without_a_test_split_one_command_measures(self, record: dict[str, Any]) -> None:
        bare = {key: value for key, value in record.items() if key not in answered("gain", "it helps")}
        reason = "accuracy was not measured: there is no test split"
        for plain in (bare, bare | {"outcome": "not measured", "headline": reason}):
            screen = self.first_screen(plain | {"out": "ported"})
            assert "Accuracy was not measured: " in screen
            assert f"<code>tuneport evaluate ported --data {record['data']['path']}</code>" in screen
            assert '<section class="answer unknown"' in screen

    def test_harm_proposes_a_distillation_that_can_be_pasted(self, record: dict[str, Any]) -> None:
        screen = self.first_screen(record | answered("harm", "it harms", "Keep the old model, or add --distill 300."))
        words = shlex.split(html.unescape(re.findall("<code>(tuneport .*?)</code>", screen)[0]))
        assert words[words.index("--distill") + 1] == "300"
        assert words[words.index("--scale") + 1] == "safe"
        assert words[words.index("--out") + 1].endswith("-distilled")

    def test_classes_that_lose_most_come_first(self, record: dict[str, Any]) -> None:
        page = report_page(record | answered("gain", "it helps"))
        assert re.findall(r"<th scope=row>(cat|dog) <small>", page) == ["dog", "cat"]
        assert re.findall(r'<i class="(up|down)"', page) == ["down", "up"]
        many = answered("gain", "it helps")["by_class"] * 20
        folded = report_page(record | answered("gain", "it helps") | {"by_class": many})
        assert "<summary>24 more classes</summary>" in folded
        assert len(re.findall(r'<i class="(?:up|down)"', folded)) == 40

    def test_gallery_shows_samples_that_turned(self, record: dict[str, Any]) -> None:
        tree = Tree(report_page(record | answered("gain", "it helps")))
        text = " ".join(tree.text)
        assert [attrs["src"] for tag, attrs in tree.seen if tag == "img"] == [DOT, DOT]
        assert "dog → cat" in text
        assert "cat → owl" in text


class TestRepeat:
    def test_command_names_the_inputs_and_options(self, record: dict[str, Any]) -> None:
        words = shlex.split(repeat_command(record) or "")
        assert words[:2] == ["tuneport", "transfer"]
        given = dict(zip(words[2::2], words[3::2], strict=True))
        assert given["--source"] == record["source"]["path"]
        assert given["--scale"] == "auto"
        assert given["--samples"] == "24"
        assert "--seed" not in given, "the default"

    @pytest.mark.parametrize(
        "name", [item.name for item, about in TransferConfig.options() if about.recorded and not about.python]
    )
    def test_command_has_every_option_that_differs_from_its_default(self, record: Any, name: str) -> None:
        """What the command line reads out of the command is what the run was given."""
        given = TransferConfig.of(**other_options(TransferConfig, name))
        out = f"{record['out']}-again"
        words = shlex.split(repeat_command({**record, "out": out, "options": given.to_json()}) or "")
        inputs, config, _ = read_words(TransferConfig, words[2:])
        assert config == given
        assert (inputs.source, inputs.data, inputs.out) == (
            record["source"]["path"],
            record["data"]["path"],
            out,
        )

    def test_command_to_evaluate_reads_the_same_columns_and_tokens(self, record: Any) -> None:
        options = {**record["options"], "columns": {"text": "sentence"}, "max_length": 64}
        unscored = {key: value for key, value in record.items() if key not in ("outcome", "headline")}
        found = answer_of({**unscored, "out": "ported", "as": "model", "options": options})["command"]
        assert found is not None
        assert found.endswith("--columns text=sentence --max-length 64")

    def test_command_with_task_and_custom_loss_writes_the_same_weights(
        self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The command is run, and writes the same weights."""
        (tmp_path / "some_loss.py").write_text(
            "def loss(module, side):\n    batch, labels = side\n"
            "    return module(**batch).image_embeds[:, 0].square().sum()\n"
        )
        monkeypatch.chdir(tmp_path)
        mnist = write_data(tmp_path / "mnist.npz", tuple(TASKS["mnist"].classes))
        models = dict(zip(("source", "finetuned", "target"), zoo.trio("clip_vision"), strict=True))
        words = [word for name, path in models.items() for word in (f"--{name}", str(path))]
        words += ["--data", f"mnist:{mnist}", "--samples", "12", "--loss", "some_loss:loss"]
        first = CliRunner().invoke(app, ["transfer", "--scale=1", *words, "--out", "first", "--json"])
        assert first.exit_code == 0, first.output
        record = json.loads(first.stdout)
        again = shlex.split(repeat_command({**record, "out": "again"}) or "")
        second = CliRunner().invoke(app, [*again[1:], "--json"])
        assert second.exit_code == 0, second.output
        assert json.loads(second.stdout)["fingerprint"] == record["fingerprint"]
        written = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("first", "again")]
        assert written[0] == written[1]

    def test_command_of_a_tower_with_many_options_writes_the_same_bytes(
        self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        models = dict(zip(("source", "finetuned", "target"), zoo.trio("clip_vision"), strict=True))
        words = [word for name, path in models.items() for word in (f"--{name}", str(path))]
        words += ["--data", str(zoo.data), "--method", "gradient_only", "--samples", "18", "--scale", "0.7"]
        words += ["--sampler", "class_balanced", "--seed", "3", "--max-tokens", "60", "--batch-size", "5"]
        words += ["--exclude", "*.fc2.*", "--exclude", "*.bias", "--as", "adapter", "--rank", "3", "--no-evaluate"]
        words += ["--adapter-dtype", "bfloat16"]
        first = CliRunner().invoke(app, ["transfer", *words, "--out", "first", "--json"])
        assert first.exit_code == 0, first.output
        record = json.loads(first.stdout)
        again = shlex.split(repeat_command({**record, "out": "again"}) or "")
        second = CliRunner().invoke(app, [*again[1:], "--json"])
        assert second.exit_code == 0, second.output
        assert json.loads(second.stdout)["fingerprint"] == record["fingerprint"]
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

    @pytest.mark.parametrize("given", [{"loss": lambda m, s: m(**s[0]).image_embeds.sum()}, {"depth_rule": min}])
    def test_no_command_for_python_callables(self, zoo: Zoo, given: dict[str, Any]) -> None:
        job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=8, **given)
        assert job.record["options"]["python"] == list(given)
        assert repeat_command({**job.record, "scale": 1.0}) is None

    def test_shots_and_excluded_tensors(self, zoo: Zoo) -> None:
        made = transfer(*zoo.trio("vit"), zoo.data, shots=3, seed=4, exclude=["*.bias", "classifier*"], scale=0.5)
        words = shlex.split(repeat_command(made.record) or "")
        assert words[words.index("--shots") + 1] == "3"
        assert "--samples" not in words
        assert words[words.index("--seed") + 1] == "4"
        assert words[words.index("--scale") + 1] == "0.5"
        assert [words[i + 1] for i, word in enumerate(words) if word == "--exclude"] == ["*.bias", "classifier*"]

    @pytest.mark.usefixtures("half_units")
    def test_command_repeats_labels_tokens_and_dtype(self, zoo: Zoo) -> None:
        given = {"labels": "source", "max_tokens": 50, "dtype": "bfloat16"}
        made = transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=8, **given)
        words = shlex.split(repeat_command(made.record) or "")
        assert {key: words[words.index(f"--{key.replace('_', '-')}") + 1] for key in given} == {
            key: str(value) for key, value in given.items()
        }

    @pytest.mark.parametrize(("given", "word"), [(None, None), (True, "--evaluate"), (False, "--no-evaluate")])
    def test_command_repeats_the_evaluation(self, record: Any, given: bool | None, word: str | None) -> None:
        options = {**record["options"], "evaluate": given}
        words = shlex.split(repeat_command({**record, "options": options}) or "")
        assert [each for each in words if "evaluate" in each] == ([] if word is None else [word])
        assert words[words.index("--out") + 1] == record["out"]

    def test_no_command_for_live_modules(self, zoo: Zoo) -> None:
        modules = [load(path) for path in zoo.trio("vit")]
        made = transfer(*modules, method="naive")
        assert repeat_command(made.record) is None
        assert "started from Python" in report_page(made.record)


def figure_html(figure: Figure, macro: str, *more: Any) -> str:
    macros: Any = _ENVIRONMENT.get_template("figures.html.jinja").module
    return str(getattr(macros, macro)(figure, *more))


class TestPlots:
    def test_what_is_no_number_has_no_mark(self) -> None:
        rows = [
            {"label": name, "text": "", "bar": (), "marks": ((value, "after"),)}
            for name, value in (("a", 1.0), ("b", None), ("c", float("nan")), ("d", 2.0))
        ]
        drawn = figure_html(tracks(rows), "tracks", ["", "", ""])
        assert re.findall(r'<b class="after " style="--x:([\d.]+)%">', drawn) == ["0.0", "100.0"]
        nothing = figure_html(tracks(rows[1:3]), "tracks", ["", "", ""])
        assert "<b" not in nothing

    def test_axes_are_round(self) -> None:
        rows = [{"label": "", "text": "", "bar": (0.1, 0.646), "marks": ()}]
        ticks = tracks(rows, low=0.0, unit=" %")["ticks"]
        assert ticks == [("0", 0.0), ("0.2", 25.0), ("0.4", 50.0), ("0.6", 75.0), ("0.8 %", 100.0)]

    def test_a_distillation_has_its_losses_and_its_agreement(self, record: dict[str, Any]) -> None:
        marks = [{"step": 0, "loss": None, "held_out_loss": 3.25, "agreement": 0.5}]
        marks.append({"step": 40, "loss": 1.125, "held_out_loss": 1.5, "agreement": 0.875})
        found = {"teacher": "t", "samples": 90, "held_out": 10, "matching": "classes", "best": 40, "curve": marks}
        found |= {"steps": 40, "lora": None, "seconds": 1.0}
        text = " ".join(" ".join(Tree(report_page(record | {"distilled": found})).text).split())
        for words in ("training 1.125", "3.25", "50.0 %", "87.5 %", "The state after step 40 is kept: on 10 held-out"):
            assert words in text
        assert f"distill 1.00 together {record['seconds'] + 1:.2f}" in text
        found |= {"folds": 2, "best": 0, "held_out": 90}
        text = " ".join(" ".join(Tree(report_page(record | {"distilled": found})).text).split())
        assert "each half judged the student that the other half had taught" in text
        assert "No step improved the start, which is kept." in text
        assert "The state after step" not in text

    def test_colours_follow_the_distance_from_the_best(self) -> None:
        rows = {"row": [0.0, 1.0, None], "wide": 3.0}
        for best, wanted in ((0.0, ["0", "100", "100"]), (1.0, ["100", "0", "100"])):
            figure = {"title": "t", "columns": ["a", "b", "c"], "rows": rows, "best": best}
            drawn = figure_html(figure, "heat_map")
            assert re.findall(r"--v:(\d+)%", drawn) == wanted
        assert '<td colspan=3 style="--v:100%">3.00</td>' in drawn
        assert drawn.count("<td></td>") == 2, "the corner and the empty cell"


@needs_chromium
class TestChromium:
    def test_the_page_in_a_browser(self, record: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        path.write_text(report_page(record | answered("harm", "it harms")), encoding="utf-8")
        with browser.Browser() as tab:
            for width, dark in ((1200, False), (1200, True), (390, False)):
                tab.open(path, width=width, dark=dark)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
                background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
                assert background == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
                answer = tab.evaluate("document.querySelector('.next').getBoundingClientRect().bottom")
                assert answer < 900, "the answer is on the first screen"
                assert tab.evaluate("document.querySelector('.gallery img').naturalWidth") == 1
                tab.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
                marks = tab.evaluate("document.querySelectorAll('.track b').length")
                drawn = tab.evaluate(
                    "[...document.querySelectorAll('.track b')].filter(mark =>"
                    " mark.getBoundingClientRect().width > 9).length"
                )
                assert marks == drawn > 6
                assert tab.evaluate("document.querySelectorAll('.heat td[style]').length") > 20
                picture = tmp_path / f"{width}-{dark}.png"
                tab.picture(picture)
                assert picture.stat().st_size > 10_000
            assert tab.messages == []
            assert {url for url in tab.requests if url != DOT} == {path.as_uri()}

    def test_browser_reports_errors_and_requests(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.html"
        bad.write_text("<script>console.error('oh')</script><img src='other.png'><script>nothing()</script>")
        with browser.Browser() as tab:
            tab.open(bad)
            assert any("oh" in message for message in tab.messages)
            assert any("nothing" in message for message in tab.messages)
            assert any(url.endswith("other.png") for url in tab.requests)


def test_the_routes_of_an_upgrade_fit_a_narrow_page(record: dict[str, Any]) -> None:
    """Reasons are sentences below the table, a chosen route is a gain, and an empty column is left out."""
    empty = dict.fromkeys(("score", "agreement", "interval", "flips", "neutral", "memory")) | {"seconds": 0.0}
    routes = [{"name": "copy", **empty, "note": "72 tensors have another shape"}, {"name": "port", **empty, "note": ""}]
    page = report_page({**record, "outcome": "not measured", "routes": routes, "chosen": "port", "decision": "port"})
    found = page.partition("route</th>")[2].partition("</table>")[0]
    assert re.findall(r">([\w, %]+)</th>", f"route</th>{found}") == ["seconds"]
    assert "Flips" not in page
    assert "another shape" not in found
    assert '<p class="soft">copy: 72 tensors have another shape.</p>' in page
    assert "<td>port <small>chosen</small></td>" in found
    assert '<section class="answer good"' in page
    full = {"memory": 2**30, "neutral": 1.5, "flips": 2, "agreement": 93.33, "interval": [84.07, 97.38]}
    more = report_page({**record, "routes": [{**routes[1], **full}], "chosen": None})
    found = more.partition("route</th>")[2].partition("</table>")[0]
    assert "memory</th>" in found
    assert "neutral, %</th>" in found
    assert "93.3 (84.1 to 97.4)</td>" in found
    assert "Flips" in more
    far = {**routes[1], **full, "agreement": 49.0}
    assert '<section class="answer unsure"' in report_page({**record, "routes": [far], "chosen": "port"})


def test_a_check_without_a_sentence_has_no_row(record: dict[str, Any]) -> None:
    assert "before the transfer" in report_page({**record, "sanity": {"sentence": "all is well"}})
    assert "before the transfer" not in report_page({**record, "sanity": {"sentence": ""}})
