"""Recipes: each built-in one runs on toy models, all problems are reported at once, and a run can be resumed."""

from __future__ import annotations

import csv
import json
import math
import shutil
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paper import cells, figures, run
from paper.__main__ import main
from paper.recipe import FIGURES, RECIPES, Printed, Recipe, make_recipe, read_recipe, under_root
from paper.run import Cells, cell_names, check_models, plan_lines, run_recipe, wanted_finetunes
from paper.samplers import select_by_features
from paper.schema import KINDS, Comparison
from paper.tables import Comparing, Row, compare_with_paper, markdown, orders, plot
from paper.toy import shorten, write_toys
from tuneport.data.tasks import TASKS, read_data
from tuneport.errors import CheckpointError, DataError, TuneportError
from tuneport.models.open import open_model
from tuneport.training.loop import Schedule

TEXT = ("t5-linear-probe",)
SPENT = {"passes": {"captures": 1, "forward": 2, "backward": 2}, "seconds": 1.0}
IMAGE = ("cifar10", "fashion", "gtsrb", "mnist")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out like the one that the small variants speak of, with toy models."""
    return write_toys(tmp_path_factory.mktemp("shared"))


@pytest.mark.parametrize("name", RECIPES)
class TestBuiltIn:
    def test_both_variants_are_valid(self, name: str) -> None:
        full = read_recipe(name, on_disk=False)
        small = read_recipe(name, small=True, root="shared", on_disk=False)
        assert full.where
        assert (full.small, small.small) == (False, True)
        assert full.kind in KINDS
        assert full.printed == small.printed
        for recipe in (full, small):
            for part in recipe.comparisons.values():
                assert part.data
        if name not in TEXT:
            assert set(full.comparison.data) == {name for name, task in TASKS.items() if task.kind == "image"}
        assert all(part.source.startswith("shared/") for part in small.comparisons.values())

    def test_no_absolute_paths(self, name: str) -> None:
        text = RECIPES[name].read_text(encoding="utf-8")
        assert "\nroot" not in text
        assert '"/' not in text
        assert "~" not in text

    def test_wrong_means_of_the_paper_are_known(self, name: str) -> None:
        wrong = {(row.method, row.budget) for row in read_recipe(name, on_disk=False).printed if row.wrong_mean}
        known = {
            "depth-and-width": {("target", 0)},
            "cross-distribution-depth": {("target", 0), ("theseus", 100)},
        }
        assert wrong == known.get(name, set())

    @pytest.mark.usefixtures("no_forward")
    def test_small_variant_can_run(self, name: str, root: Path, tmp_path: Path) -> None:
        """Its models can be paired for its methods, and what the paper printed can be shown next to numbers."""
        recipe = shorten(read_recipe(name, small=True, root=root))
        assert next(plan_lines(recipe, tmp_path)).startswith(recipe.title)
        check_models(recipe)
        if recipe.kind in FIGURES:
            return
        rows = [
            Row(task, entry.method, "-" if entry.budget == 0 else "1", entry.budget, 0, entry.mean)
            for entry in recipe.printed
            for task in recipe.comparison.data
        ]
        text = markdown(Comparing(recipe.comparison, tuple(rows), {}), recipe)
        assert text.startswith(f"# {recipe.title}\n")
        assert "## Comparison with the paper" in text


# The others differ from one of these in the names of models, in budgets and in seeds.
RUN = (
    "ablation",
    "cost",
    "few-shot",
    "figure-cross-width",
    "figure-drift",
    "figure-output-similarity",
    "identical",
    "samplers",
    *TEXT,
)


@pytest.mark.parametrize("name", RUN)
def test_small_variant_runs(name: str, root: Path, tmp_path: Path) -> None:
    recipe = shorten(read_recipe(name, small=True, root=root))
    notes: list[str] = []
    out = run_recipe(recipe, tmp_path / "out", cache=tmp_path / "models", note=notes.append)
    assert notes[0].startswith(recipe.title)
    assert sorted(item.name for item in tmp_path.iterdir()) in (["out"], ["models", "out"])
    check_files(recipe, out)


def check_files(recipe: Recipe, out: Path) -> None:
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {recipe.title}\n")
    record = json.loads((out / "results.json").read_text(encoding="utf-8"))
    plots = sorted(out.glob("plot*.svg"))
    assert plots
    for picture in plots:
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    if recipe.kind in FIGURES:
        with (out / "points.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert len(rows) == len(record["points"]) > 0
        assert {row["task"] for row in rows} == set(recipe.comparison.data)
    else:
        assert {row["task"] for row in record["rows"]} == set(recipe.comparison.data)
        assert {row["sampler"] for row in record["rows"] if row["budget"]} == set(recipe.comparison.samplers)
        assert "## Comparison with the paper" in text
        assert len(record["paper"]["rows"]) == len(recipe.printed)


def test_every_kind_of_recipe_is_run(root: Path) -> None:
    """Each kind, method, protocol, sampler and rule, and each setting that any of the small variants gives."""

    def used(recipes: Iterable[str]) -> set[tuple[str, str]]:
        plain, found = Comparison(), set()
        for recipe in (read_recipe(name, small=True, root=root) for name in recipes):
            found.add(("kind", recipe.kind))
            for part in recipe.comparisons.values():
                found |= {(key, value) for key in ("methods", "samplers", "scales") for value in getattr(part, key)}
                names = (item.name for item in fields(part))
                found |= {("set", name) for name in names if getattr(part, name) != getattr(plain, name)}
                found.add(("protocol", part.protocol))
        return found

    assert used(RUN) == used(RECIPES)


def test_command_runs_on_toy_models(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["seeds", "--toy", "--out", str(tmp_path / "out"), "--device", "cpu"])
    check_files(shorten(read_recipe("seeds", small=True, root=root)), tmp_path / "out")
    assert "bico" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "table.csv" in capsys.readouterr().out


class TestNames:
    def test_every_toml_file_is_a_recipe_of_the_package(self) -> None:
        folder = Path(run.__file__).parent / "recipes"
        assert sorted(RECIPES) == sorted(path.stem for path in folder.iterdir())
        assert len(RECIPES) == 17  # twelve tables, four figures, the cost

    def test_missing_files_of_a_recipe_without_a_root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Who has no zoo learns where the paths start; with a root they name it themselves."""
        monkeypatch.chdir(tmp_path)
        with pytest.raises(
            DataError, match=r"mnist\.npz does not exist\. Its paths start .*: pass `root` to start them"
        ):
            read_recipe("ablation", small=True)
        with pytest.raises(DataError, match=r"images/mnist\.npz does not exist\.$"):
            read_recipe("ablation", small=True, root=tmp_path)

    def test_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(DataError, match=r"unknown recipe 'ablaton'\. Did you mean 'ablation'\? Known: .*width\.$"):
            read_recipe("ablaton", on_disk=False)

    @pytest.mark.parametrize("path", ["none.toml", "recipes/none"])
    def test_missing_file_is_named(self, path: str) -> None:
        with pytest.raises(DataError, match=f"there is no recipe at {Path(path)}\\."):
            read_recipe(path)

    def test_recipe_given_by_path(self) -> None:
        assert read_recipe(str(RECIPES["width"]), on_disk=False) == read_recipe("width", on_disk=False)

    def test_folder_does_not_hide_a_recipe(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "width").mkdir()
        monkeypatch.chdir(tmp_path)
        assert read_recipe("width", on_disk=False).where == "Table 1"

    def test_command_lists_recipes(self, capsys: pytest.CaptureFixture[str]) -> None:
        main([])
        listed = capsys.readouterr().out
        assert all(name in listed for name in RECIPES)


class TestReading:
    def content(self, **changes: Any) -> dict[str, Any]:
        return {
            "tasks": ["mnist"],
            "source": "zoo/a",
            "target": "zoo/a2",
            "finetuned": "zoo/a-{task}",
            "data": "data/images/{task}.npz",
            "heads": "{task}",
            "methods": ["bico"],
            "samples": [6],
            "device": "cpu",
            **changes,
        }

    def test_relative_paths_start_at_root(self, root: Path) -> None:
        part = make_recipe(self.content(), root=root).comparison
        assert part.source == str(root / "zoo" / "a")
        assert part.finetuned == {"mnist": str(root / "zoo" / "a-mnist")}
        assert part.heads == {"mnist": "mnist"}
        assert under_root("ViT-B-16:laion2b", root) == "ViT-B-16:laion2b"
        assert under_root("mnist:data/mnist", root, data=True) == f"mnist:{root / 'data' / 'mnist'}"
        assert under_root("x/y", None) == "x/y"

    def test_typo_missing_model_and_too_few_samples_at_once(self, root: Path) -> None:
        wrong = self.content(sedes=[0], target="zoo/none", samples=[6, 9999], methods=["bicco"])
        with pytest.raises(DataError) as raised:
            make_recipe(wrong, "here", root=root)
        text = str(raised.value)
        assert text.startswith("here: ")
        for words in (
            "unknown key 'sedes'. Did you mean 'seeds'?",
            f"{root / 'zoo' / 'none'} does not exist",
            "mnist: asked for 9999 samples but train split of mnist has 330",
            "unknown method 'bicco'. Did you mean 'bico'?",
        ):
            assert words in text
        assert "\n" not in text

    def test_shots_need_samplers_of_every_class(self, root: Path) -> None:
        content = self.content(samples=[], shots=[1], samplers=["random", "half_class"])
        with pytest.raises(DataError, match="shots are of every class, and half_class takes samples of some"):
            make_recipe(content, "here", root=root)

    def test_missing_small_variant(self, root: Path) -> None:
        with pytest.raises(DataError, match=r"there is no \[small\] variant"):
            make_recipe(self.content(), root=root, small=True)

    def test_pairs(self, root: Path) -> None:
        pairs = [{"name": "x", "source": "zoo/a", "target": "zoo/a2"}, {"name": "y", "source": "zoo/a", "tagret": "b"}]
        with pytest.raises(DataError, match=r"pair 2: unknown key 'tagret'\. Did you mean 'target'\?"):
            make_recipe(self.content(pairs=pairs), root=root)
        recipe = make_recipe(self.content(pairs=[pairs[0], {"name": "z", "target": "zoo/b"}]), root=root)
        assert [Path(part.target).name for part in recipe.comparisons.values()] == ["a2", "b"]

    @pytest.mark.parametrize("name", ["/x", "B/16 to L/14", "..", "", "a\\b", "a\x1b[2J", "a\n", "x" * 101])
    def test_pair_names_must_be_folder_names(self, root: Path, name: str) -> None:
        pairs = [{"name": "x"}, {"name": name, "target": "zoo/b"}]
        words = f"pair 2: {name!r} cannot name a folder: use up to 100 printable characters"
        for content in (self.content(pairs=pairs, sedes=[0]), self.content(small={"pairs": pairs}, sedes=[0])):
            with pytest.raises(DataError) as raised:
                make_recipe(content, root=root)
            assert words in str(raised.value)
            assert "unknown key 'sedes'" in str(raised.value)

    def test_task_names_must_be_folder_names_if_models_are_made(self, root: Path) -> None:
        content = self.content(tasks=["../mnist"], finetuned="made/{task}", data={"../mnist": "data/images/mnist.npz"})
        with pytest.raises(DataError, match=r"task '\.\./mnist' cannot name a folder"):
            make_recipe(content | {"finetune": {"steps": 1}}, root=root)
        part = make_recipe(content, on_disk=False).comparison  # a mere label where nothing is made
        assert list(part.data) == ["../mnist"]

    @pytest.mark.parametrize("names", [("x", "x"), ("2", None)])
    def test_duplicate_pair_names(self, root: Path, names: tuple[str, str | None]) -> None:
        pairs = [{"name": name, "target": "zoo/b"} if name else {"target": "zoo/a2"} for name in names]
        with pytest.raises(DataError, match=f"pair 2: another pair has the name '{names[0]}'"):
            make_recipe(self.content(pairs=pairs), root=root)

    def test_missing_finetune_is_planned_with_a_schedule(self, root: Path, tmp_path: Path) -> None:
        content = self.content(finetuned="made/{task}", finetune={"steps": 1})
        recipe = make_recipe(content, root=root)
        lines = list(plan_lines(recipe, tmp_path))
        assert any("to be fine-tuned" in line for line in lines)
        with pytest.raises(DataError, match="made/mnist does not exist"):
            make_recipe(self.content(finetuned="made/{task}"), root=root)

    @pytest.mark.usefixtures("no_forward")
    def test_unsuitable_pair_is_refused_before_work(self, root: Path, tmp_path: Path) -> None:
        content = self.content(target="zoo/b", methods=["transfusion", "gradfix"])
        with pytest.raises(DataError, match=r"mnist: .*one architecture"):
            run_recipe(make_recipe(content, root=root), tmp_path / "out")
        assert list(tmp_path.iterdir()) == []


class TestRunning:
    def recipe(self, root: Path, **changes: Any) -> Recipe:
        settings = {"tasks": ["mnist", "fashion"], "seeds": [0, 1], **changes}
        return make_recipe(TestReading().content(**settings), root=root)

    def test_killed_run_resumes(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recipe = self.recipe(root, scales=["1"])
        whole = run_recipe(recipe, tmp_path / "whole")
        plain, calls = run.run_cell, []

        def killed(*arguments: Any) -> Any:
            calls.append(arguments[2:5])
            if len(calls) == 3:
                raise KeyboardInterrupt
            return plain(*arguments)

        monkeypatch.setattr(run, "run_cell", killed)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        kept = tmp_path / ".out.tuneport-cells"
        assert len(kept.read_text().splitlines()) == 3
        with kept.open("a") as file:
            for rest in (
                {},
                {"rows": 3, **SPENT},
                {"rows": [{}], **SPENT},
                {"rows": [{"a": 1}], "passes": {}, "seconds": 1},
            ):
                file.write(json.dumps({"cell": "1/fashion/random/9", **rest}) + "\n")  # no cells: not counted
            file.write('{"cell": "1/fash')  # cut off while writing
        notes: list[str] = []
        lines = kept.read_text().splitlines(keepends=True)
        raised = json.loads(lines[1])
        raised["rows"][0]["accuracy"] += 1  # changed by hand: measured again
        kept.write_text("".join([lines[0], json.dumps(raised) + "\n", *lines[2:]]))
        out = run_recipe(recipe, tmp_path / "out", resume=True, note=notes.append)
        assert "1 finished cells are taken over" in notes
        assert len(calls) == 3 + 3
        rows = [json.loads((folder / "results.json").read_text())["rows"] for folder in (whole, out)]
        assert rows[0] == rows[1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]

    def test_a_complete_output_is_not_computed_again(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = {"seeds": [0], "scales": ["1"], "methods": ["naive"]}
        out = run_recipe(self.recipe(root, **settings), tmp_path / "out")
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        (tmp_path / ".out.tuneport-cells").write_text("left by a run that was killed after the rename")
        monkeypatch.setattr(run, "run_cell", None)
        notes: list[str] = []
        run_recipe(self.recipe(root, **settings), out, resume=True, note=notes.append)
        assert notes == [f"{out} was complete already"]
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
        with pytest.raises(CheckpointError, match="out exists already"):
            run_recipe(self.recipe(root, **settings | {"seeds": [1]}), out, resume=True)

    def test_cells_of_other_settings_are_refused(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / ".out.tuneport-cells").write_text('{"fingerprint": "other"}\n')
        with pytest.raises(CheckpointError, match="out cannot be resumed: its cells were measured with other settings"):
            run_recipe(self.recipe(root), tmp_path / "out", resume=True)
        run_recipe(self.recipe(root, seeds=[0], scales=["1"], methods=["naive"]), tmp_path / "out")

    def test_incomplete_line_does_not_affect_the_next_cell(self, tmp_path: Path) -> None:
        cells = Cells(tmp_path / "out", "conditions")
        assert cells.load() == {}
        cells.add("one", {"rows": [{"a": 1}], **SPENT})
        whole = cells.path.read_bytes()
        cells.add("two", {"rows": [{"a": 2}], **SPENT})
        second = cells.path.read_bytes()[len(whole) :]
        for length in range(len(second)):
            cells.path.write_bytes(whole + second[:length])
            assert list(cells.load()) == ["one"]
            cells.add("two", {"rows": [{"a": 2}], **SPENT})
            assert cells.path.read_bytes() == whole + second
        assert list(cells.load()) == ["one", "two"]
        for length in range(len(whole.splitlines()[0]) + 1):  # the fingerprint is cut off: nothing was finished
            cells.path.write_bytes(whole[:length])
            assert cells.load() == {}
            cells.add("one", {"rows": [{"a": 1}], **SPENT})
            assert cells.path.read_bytes() == whole

    @pytest.mark.parametrize("first", ['{"fingerpr{"cell": "0"}', '{"cell": "1"}', "[]", "3", "", "\x00"])
    def test_cells_of_unknown_settings_are_refused(self, tmp_path: Path, first: str) -> None:
        cells = Cells(tmp_path / "out", "conditions")
        cells.path.write_text(f'{first}\n{{"cell": "1/mnist/random/0", "rows": []}}\n')
        with pytest.raises(
            CheckpointError, match=r"out\.tuneport-cells is damaged\. Start over without `resume=True`\."
        ):
            cells.load()

    def test_cells_file_must_not_be_a_link(self, root: Path, tmp_path: Path) -> None:
        mine = tmp_path / "mine.txt"
        mine.write_text("mine")
        cells = Cells(tmp_path / "out", "conditions")
        cells.path.symlink_to(mine)
        for use in (cells.load, lambda: cells.add("one", {})):
            with pytest.raises(CheckpointError, match="is a link and is not written to"):
                use()
        recipe = self.recipe(root, seeds=[0], scales=["1"], methods=["naive"])
        with pytest.raises(CheckpointError, match="is a link and is not written to"):
            run_recipe(recipe, tmp_path / "out", resume=True)
        run_recipe(recipe, tmp_path / "out")
        assert mine.read_text() == "mine"

    def test_a_linear_probe_learns_from_the_calibration_samples_only(self, root: Path, tmp_path: Path) -> None:
        from tuneport.data.formats import read_plain
        from tuneport.data.samplers import select
        from tuneport.measure.accuracy import linear_probe

        recipe = self.recipe(root, protocol="linear-probe", samples=[6, 12], seeds=[3], scales=["1"])
        out = run_recipe(recipe, tmp_path / "out")
        rows = [Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
        assert {(row.method, row.budget) for row in rows} == {
            (method, budget) for method in ("source", "target", "bico") for budget in (6, 12)
        }
        data = root / "data" / "images" / "mnist.npz"
        train = read_plain(data, "train")
        few = train.subset(select(train, samples=12, seed=3)[:6])
        wanted = linear_probe(open_model(root / "zoo" / "a2"), few, read_plain(data, "test")).accuracy
        found = next(row for row in rows if (row.task, row.method, row.budget) == ("mnist", "target", 6))
        assert found.accuracy == pytest.approx(wanted)
        assert "± seeds" in (out / "table.md").read_text()

    def test_fine_tuned_models_get_a_probe_on_the_whole_training_split(self, root: Path, tmp_path: Path) -> None:
        from tuneport.data.formats import read_plain
        from tuneport.measure.accuracy import linear_probe

        tuned = str(root / "zoo" / "a-mnist")
        more = {"source_rows": True, "reference": {"mnist": tuned}, "stated": {"fashion": 74.5}}
        recipe = self.recipe(root, protocol="linear-probe", samples=[12], seeds=[0, 1], scales=["1", "auto"], **more)
        out = run_recipe(recipe, tmp_path / "out")
        rows = [Row(**row) for row in json.loads((out / "results.json").read_text())["rows"]]
        fixed = {(row.task, row.method): row for row in rows if row.budget == 0 and row.seed == 1}
        assert set(fixed) == {
            (task, f"fine-tuned {side}") for task in ("fashion", "mnist") for side in ("source", "target")
        }
        data = root / "data" / "images" / "mnist.npz"
        wanted = linear_probe(open_model(tuned), read_plain(data, "train"), read_plain(data, "test")).accuracy
        for side in ("source", "target"):  # one and the same model here
            assert fixed["mnist", f"fine-tuned {side}"].accuracy == pytest.approx(wanted)
        assert fixed["fashion", "fine-tuned target"].stated
        target = {(row.task, row.seed, row.budget): row.accuracy for row in rows if row.method == "target"}
        gains = [row.accuracy - target[row.task, row.seed, row.budget] for row in rows if row.scale_rule == "auto"]
        summary = json.loads((out / "results.json").read_text())["auto"]
        assert summary[0]["worst"] == round(min(gains), 2)
        assert summary[0]["mean_gain"] == round(sum(gains) / len(gains), 2)

    def test_models_are_made_once_and_kept_in_the_cache(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe = self.recipe(
            root,
            finetuned="made/{task}",
            reference="made/b-{task}",
            finetune={"steps": 2},
            methods=["naive"],
            scales=["1"],
            seeds=[0],
        )
        run_recipe(recipe, tmp_path / "one", cache=tmp_path / "models")
        assert len(list((tmp_path / "models").iterdir())) == 4
        open_model(next((tmp_path / "models").glob("a-mnist-*")))
        monkeypatch.setattr(run, "run_training", lambda *_, **__: pytest.fail("made again"))
        out = run_recipe(recipe, tmp_path / "two", cache=tmp_path / "models")
        methods = {row["method"] for row in json.loads((out / "results.json").read_text())["rows"]}
        assert "fine-tuned target" in methods

    def test_path_like_a_hub_id_is_made(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("fetched"))
        places = {"source": "zoo/a", "target": "zoo/a2", "data": "data/images/{task}.npz"}
        content = TestReading().content(**{key: str(root / path) for key, path in places.items()})
        content |= {"finetune": {"steps": 1}, "methods": ["naive"], "scales": ["1"]}
        for reference in ("tuned/{task}", "ViT-B-32:{task}"):
            recipe = make_recipe(content | {"finetuned": reference})
            wanted = [path for path, _, _ in wanted_finetunes("comparison", recipe.comparison, tmp_path)]
            assert wanted == [reference.replace("{task}", "mnist")]
        run_recipe(make_recipe(content | {"finetuned": "tuned/{task}"}), "out", cache="models")
        assert [path.name.rpartition("-")[0] for path in Path("models").iterdir()] == ["a-mnist"]
        shutil.copytree(root / "zoo" / "a-mnist", tmp_path / "tuned" / "mnist")
        part = make_recipe(content | {"finetuned": "tuned/{task}"}).comparison
        assert not list(wanted_finetunes("comparison", part, tmp_path))

    def test_other_settings_make_other_models(self, root: Path, tmp_path: Path) -> None:
        part = self.recipe(root, finetuned="made/{task}", finetune={"steps": 2}).comparison
        longer = replace(part, finetune=Schedule(3))
        places = [[place for _, place, _ in wanted_finetunes("comparison", one, tmp_path)] for one in (part, longer)]
        assert len({*places[0], *places[1]}) == 4

    def test_diverging_finetune_leaves_no_files(self, root: Path, tmp_path: Path) -> None:
        recipe = self.recipe(root, finetuned="made/{task}", finetune={"steps": 3, "learning_rate": 1e30})
        with pytest.raises(TuneportError, match="has diverged: the loss is NaN or infinite at step 2 of 3"):
            run_recipe(recipe, tmp_path / "out", cache=tmp_path / "models")
        assert [path.name for path in tmp_path.rglob("*")] == ["models"]

    def test_several_pairs_have_a_folder_each(self, root: Path, tmp_path: Path) -> None:
        pairs = [{"name": "same", "target": "zoo/a2"}, {"name": "wider", "target": "zoo/b"}]
        recipe = self.recipe(root, tasks=["mnist"], seeds=[0], pairs=pairs, methods=["naive"], scales=["1"])
        out = run_recipe(recipe, tmp_path / "out")
        assert sorted(path.name for path in out.iterdir()) == ["same", "wider"]
        assert (out / "wider" / "table.md").is_file()
        run_recipe(recipe, out, overwrite=True)
        (out / "wider" / "results.json").unlink()
        with pytest.raises(CheckpointError, match=r"no wider/results\.json in it"):
            run_recipe(recipe, out, overwrite=True)

    def test_feature_samplers_draw_by_the_features_of_the_target(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looked: list[int] = []
        plain = cells.compute_features
        monkeypatch.setattr(cells, "compute_features", lambda *given: looked.append(1) or plain(*given))
        samplers = ["centroid_near", "centroid_far"]
        recipe = self.recipe(root, tasks=["mnist"], samplers=samplers, methods=["bico"], scales=["1"])
        drawn = []
        measured = cells.measure
        monkeypatch.setattr(
            cells,
            "measure",
            lambda what, **more: drawn.append(what.samples.indices.tolist()) or measured(what, **more),
        )
        run_recipe(recipe, tmp_path / "out")
        assert looked == [1]  # once for two samplers and two seeds
        data = read_data(recipe.comparison.data["mnist"], "train")
        features = plain(open_model(recipe.comparison.target), data)
        for seed, found in ((0, drawn[0] + drawn[1]), (1, drawn[2] + drawn[3])):  # measured in halves
            wanted = select_by_features(data, "centroid_near", features, samples=6, seed=seed)
            assert found == wanted.tolist()

    def test_a_cell_is_a_task_a_sampler_and_a_seed(self, root: Path) -> None:
        part = self.recipe(root, samplers=["random", "class_balanced"]).comparison
        assert len(cell_names("comparison", part)) == len(set(cell_names("comparison", part))) == 8

    @pytest.mark.usefixtures("no_forward")
    def test_output_that_contains_an_input_is_refused(self, root: Path, tmp_path: Path) -> None:
        for name in ("source", "target", "finetuned", "reference", "data", "head"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "mine.txt").write_text("mine")
        settings: dict[str, Any] = {
            "source": shutil.copytree(root / "zoo" / "a", tmp_path / "source" / "a"),
            "target": shutil.copytree(root / "zoo" / "a2", tmp_path / "target" / "a2"),
            "finetuned": shutil.copytree(root / "zoo" / "a-mnist", tmp_path / "finetuned" / "mnist"),
            "reference": shutil.copytree(root / "zoo" / "a-mnist", tmp_path / "reference" / "mnist"),
            "data": shutil.copy(root / "data" / "images" / "mnist.npz", tmp_path / "data"),
            "heads": shutil.copy(root / "zoo" / "a" / "heads" / "mnist.safetensors", tmp_path / "head"),
        }
        recipe = self.recipe(root, tasks=["mnist"], **{key: str(path) for key, path in settings.items()})
        for name in ("source", "target", "finetuned", "reference", "data", "head"):
            with pytest.raises(CheckpointError, match=f"{name} cannot be overwritten: it holds the input"):
                run_recipe(recipe, tmp_path / name, overwrite=True)
            assert (tmp_path / name / "mine.txt").read_text() == "mine"
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "r.toml").write_text("seeds = [0]")
        for given, cache in ((tmp_path / "out" / "r.toml", None), (recipe, tmp_path / "out" / "models")):
            with pytest.raises(CheckpointError, match="out cannot be overwritten: it holds the input"):
                run_recipe(given, tmp_path / "out", cache=cache, overwrite=True)

    def test_command_takes_the_variant_asked_for(self, root: Path, tmp_path: Path) -> None:
        text = """
        source = "zoo/a"
        target = "zoo/none"
        samples = [4]
        methods = ["naive"]
        scales = ["1"]
        tasks = ["mnist"]
        finetuned = "zoo/a-{task}"
        data = "data/images/{task}.npz"
        heads = "{task}"
        [small]
        target = "zoo/a2"
        """
        (tmp_path / "r.toml").write_text(text)
        words = [str(tmp_path / "r.toml"), "--out", str(tmp_path / "out"), "--root", str(root), "--device", "cpu"]
        with pytest.raises(SystemExit, match="zoo/none does not exist"):
            main(words)
        assert sorted(item.name for item in tmp_path.iterdir()) == ["r.toml"]
        main([*words, "--small"])
        rows = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["rows"]
        assert ("naive", "1", 4) in {(row["method"], row["scale_rule"], row["budget"]) for row in rows}
        with pytest.raises(SystemExit, match="out exists"):
            main([*words, "--small"])


class TestFigures:
    def test_model_ported_to_itself_is_similar_to_its_finetune(self, root: Path) -> None:
        settings = {"target": "zoo/a", "reference": "zoo/a-{task}", "methods": ["naive", "bico"], "samples": [24]}
        content = TestReading().content(kind="output-similarity", **settings)
        part = make_recipe(content, root=root).comparison
        task = cells.Task(part, [open_model(part.source), open_model(part.target)], "mnist")
        found: dict[str, list[float]] = {}
        for point in figures.figure_cell("output-similarity", task, "random", 0):
            found.setdefault(point["series"], []).append(point["value"])
        assert min(found["naive"]) > 0.99  # but for norms and embeddings, which stay
        assert min(found["naive"]) > max(found["target"][1:])
        assert all(bico > target for bico, target in zip(found["bico"], found["target"], strict=True))


class TestPaper:
    def result(self, **accuracies: float) -> Comparing:
        rows = [Row("x", "target", "-", 0, 0, 50.0)]
        rows += [Row("x", method, "1", 10, 0, found) for method, found in accuracies.items()]
        comparison = make_recipe(
            {"source": "a", "target": "b", "finetuned": {"x": "f"}, "data": {"x": "d"}, "samples": [10]}, on_disk=False
        ).comparison
        return Comparing(comparison, tuple(rows), {})

    def printed(self, small: bool = False) -> Recipe:
        comparison = self.result().comparison
        rows = (
            Printed("target", 0, {"x": 40.0, "y": 60.0}, 47.0),
            Printed("bico", 10, {"x": 60.0, "y": 80.0}, 70.0),
            Printed("theseus", 10, {"x": 55.0, "y": 65.0}, 60.0, marks={"x": "copied"}),
            Printed("gradfix", 10, {}, 51.0),
        )
        return Recipe({"1": comparison}, "A title", "Table 9", printed=rows, small=small)

    def test_differences_by_hand(self) -> None:
        table = compare_with_paper(self.result(bico=66.0, theseus=70.0), self.printed())
        bico = next(row for row in table if row["method"] == "bico")
        assert (bico["measured"], bico["paper"], bico["gain"], bico["paper_gain"]) == (66.0, 70.0, 16.0, 20.0)
        assert bico["difference"] == -4.0
        assert bico["tasks"] == {"x": {"measured": 66.0, "paper": 60.0}}
        gradfix = next(row for row in table if row["method"] == "gradfix")
        assert gradfix["paper_gain"] == 1.0
        assert math.isnan(gradfix["measured"])
        assert math.isnan(gradfix["difference"])

    def test_errors_and_orders_are_reported(self) -> None:
        text = markdown(self.result(bico=66.0, theseus=70.0), self.printed())
        assert "target, –: the paper prints a mean of 47.00; its own cells give 50.00, which is used here" in text
        assert "theseus, 10: x: copied" in text
        assert "At 10: another order. Measured: theseus > bico. The paper: bico > theseus." in text
        assert "66.0 (60.0, +6.0)" in text
        assert orders(compare_with_paper(self.result(bico=71.0, theseus=70.0), self.printed()))[0]["same"]

    def test_base_models_are_not_ranked(self) -> None:
        rows = tuple(Row("x", method, "1", 10, 0, found) for method, found in (("bico", 71.0), ("theseus", 70.0)))
        bases = tuple(Row("x", method, "-", 10, 0, found) for method, found in (("source", 80.0), ("target", 50.0)))
        result = replace(self.result(), rows=(*rows, *bases))
        more = (*self.printed().printed, Printed("source", 10, {}, 45.0), Printed("target", 10, {}, 48.0))
        found = orders(compare_with_paper(result, replace(self.printed(), printed=more)))
        assert found == [{"budget": 10, "measured": ["bico", "theseus"], "paper": ["bico", "theseus"], "same": True}]

    def test_means_over_some_tasks_are_not_drawn(self) -> None:
        comparison = replace(self.result().comparison, data={"x": "d", "y": "e"})
        rows = [Row(task, method, "-", 0, 0, 60.0) for task in "xy" for method in ("target", "fine-tuned source")]
        rows += [Row(task, "bico", "1", 10, seed, 70.0 + seed) for task in "xy" for seed in (0, 2)]
        whole = plot(Comparing(comparison, tuple(rows), {}))
        assert "fine-tuned source" in whole
        assert "71.0 ± 1.4" in whole
        part = plot(Comparing(comparison, (*rows, Row("x", "fine-tuned target", "-", 0, 0, 99.0)), {}))
        assert part == whole

    def test_other_models_are_not_compared_by_task(self) -> None:
        text = markdown(self.result(bico=66.0), self.printed(small=True))
        assert "Other models and other tasks" in text
        assert "66.0 (60.0" not in text
