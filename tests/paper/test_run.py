"""Comparisons: equal terms, one capture for all methods, reproducible numbers, and readable output files."""

from __future__ import annotations

import csv
import gc
import json
import weakref
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.common import load, merge, run_comparison, save
from builders.folders import LARGE, Zoo, build
from builders.runs import measured, prepare
from paper import cells
from paper import run as bench
from paper.recipe import make_recipe, read_recipe
from paper.schema import Comparison
from paper.tables import Comparing, Row, auto_scale_summary, markdown, table_rows
from tuneport.errors import DataError
from tuneport.maps.statistics import Statistics
from tuneport.measure.samples import first_half
from tuneport.models import open
from tuneport.models.base import Model
from tuneport.models.open import open_model
from tuneport.pipeline import solve
from tuneport.pipeline import transfer as pipeline
from tuneport.training.loop import Schedule


def comparison_of(content: dict[str, Any], where: str = "the recipe") -> Comparison:
    return make_recipe(content, where).comparison


METHODS = ("naive", "gradfix", "bico")
SHOTS = (1, 8)  # 3 and 24 samples: with and without samples to hold out


@pytest.fixture(scope="module")
def settings(zoo: Zoo) -> dict[str, Any]:
    """A pair of one architecture, so that every rival can be tried."""
    if not (zoo.root / "clip_vision-second").exists():
        build(
            "clip_vision", replace(LARGE, width=16, depth=2, heads=2, image=16, seed=7), zoo.root / "clip_vision-second"
        )
    return {
        "source": str(zoo["clip_vision-base"]),
        "target": str(zoo.root / "clip_vision-second"),
        "finetuned": {"animals": str(zoo["clip_vision-tuned"])},
        "data": {"animals": str(zoo.data)},
        "methods": list(METHODS),
        "shots": list(SHOTS),
        "seeds": [0, 1],
        "steps": [1, 2],
        "warm_start": "bico",
        "learning_rate": 1e-3,
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def result(settings: dict[str, Any]) -> Comparing:
    return run_comparison(comparison_of(settings))


@pytest.fixture(scope="module")
def single(settings: dict[str, Any]) -> tuple[Comparing, list[Model]]:
    """A comparison of one budget and seed, and the models that it has opened."""
    opened: list[Model] = []

    def kept(*arguments: Any, **options: Any) -> Model:
        opened.append(open_model(*arguments, **options))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "open_model", kept)
        return run_comparison(comparison_of(settings | {"shots": [8], "seeds": [0]})), opened


class TestEqualTerms:
    def test_prefix_sums_are_what_each_budget_would_measure(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every statistic that a method is given equals one measured on that budget's samples alone.

        Models run in float64: passes in other batches then differ by about 1e-16 of the largest number.
        """
        given: dict[int, Statistics] = {}
        plain = solve.problem_of

        def problem_of(measurement: Any, vector: Any, statistics: Statistics) -> Any:
            given[statistics.samples] = statistics
            return plain(measurement, vector, statistics)

        monkeypatch.setattr(cells, "problem_of", problem_of)
        monkeypatch.setitem(open.DTYPES, "float32", torch.float64)
        monkeypatch.setattr(bench, "open_model", partial(open_model, dtype=torch.float64))
        few = {"methods": ["gradfix", "theseus", "bico"], "seeds": [5], "steps": [], "scales": ["1"]}
        run_comparison(comparison_of(settings | few | {"shots": [1, 3, 8]}))
        counts = {3 * shots for shots in (1, 3, 8)}
        assert set(given) - {0} == counts
        signals = frozenset({"input", "output", "output_gradient", "weight_gradient"})
        for count in counts:
            shots = next(shots for shots in (1, 3, 8) if 3 * shots >= count)
            paths = (settings["source"], settings["finetuned"]["animals"], settings["target"])
            job = prepare(*paths, settings["data"]["animals"], signals=signals, shots=shots, seed=5, device="cpu")
            job = job.on(job.samples.take(slice(count)))
            alone, found = measured(job, signals=signals), given[count]
            assert found.samples == alone.samples == count
            assert set(found) == set(alone)
            for key, covariance in alone.covariances.items():
                assert found.covariances[key].tokens == covariance.tokens
                assert covariance.signal_dtype == found.covariances[key].signal_dtype == torch.float64
                close(found.covariances[key].matrix, covariance.matrix)
                close(found.covariances[key].source_energy, covariance.source_energy)
            for name, gradient in alone.weight_gradients.items():
                assert torch.equal(found.weight_gradients[name].votes, gradient.votes)
                close(found.weight_gradients[name].total, gradient.total)

    def test_method_with_views_does_not_depend_on_other_budgets(self, settings: dict[str, Any]) -> None:
        alone = {"methods": ["bico+"], "warm_start": "", "seeds": [5], "steps": [], "scales": ["1", "auto"]}
        found = [run_comparison(comparison_of(settings | alone | {"shots": shots})).rows for shots in ([8], [2, 8])]
        alone_rows, among_rows = ([row for row in rows if row.method == "bico+" and row.budget == 8] for rows in found)
        assert len(alone_rows) == 2
        assert alone_rows == among_rows

    def test_both_rules_choose_a_scale(self, settings: dict[str, Any]) -> None:
        few = {
            "methods": ["bico"],
            "warm_start": "",
            "seeds": [5],
            "steps": [],
            "scales": ["auto", "safe"],
            "shots": [8],
        }
        found = {
            row.scale_rule: row for row in run_comparison(comparison_of(settings | few)).rows if row.method == "bico"
        }
        assert set(found) == {"auto", "safe"}
        assert found["safe"].scale <= found["auto"].scale
        assert found["safe"].held_out_before == found["auto"].held_out_before is not None

    def test_one_capture_serves_all_methods(
        self, settings: dict[str, Any], result: Comparing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[int] = []
        plain = cells.measure

        def counted(measurement: Any, **options: Any) -> Statistics:
            calls.append(len(measurement.samples))
            return plain(measurement, **options)

        monkeypatch.setattr(cells, "measure", counted)
        few = {"steps": [], "methods": ["gradfix", "theseus", "bico"], "scales": ["1"]}
        found = run_comparison(comparison_of(settings | few))
        assert found.about["captures"] == result.about["captures"] == 2  # one for each seed
        assert sum(calls) == 2 * 24  # every sample passes once per seed
        cuts = sorted({number for shots in SHOTS for number in (3 * shots, first_half(3 * shots))})
        assert calls == 2 * [after - before for before, after in zip([0, *cuts], cuts, strict=False)]
        assert found.about["forward"] == found.about["backward"] == len(calls)
        assert result.about["forward"] == result.about["backward"] == len(calls)

    def test_nothing_is_captured_for_methods_that_read_no_data(self, settings: dict[str, Any]) -> None:
        alone = {"methods": ["naive", "transfusion"], "steps": [], "warm_start": "naive", "scales": ["1"]}
        found = run_comparison(comparison_of(settings | alone))
        assert (found.about["captures"], found.about["forward"], found.about["backward"]) == (0, 0, 0)
        for method in ("naive", "transfusion"):  # the same model at every budget and seed
            assert len({row.accuracy for row in found.rows if row.method == method}) == 1

    def test_transfers_are_freed_after_each_budget(
        self, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: dict[str, list[Any]] = {"bico": [], "theseus": [], "naive": []}
        alive: list[int] = []
        plain = cells.get_method

        def watched(name: str) -> Any:
            method = plain(name)

            def transfer(problem: Any) -> Any:
                gc.collect()
                alive.append(sum(ref() is not None for others in made for ref in made[others] if others != name))
                found = method.transfer(problem)
                made[name].append(weakref.ref(found))
                return found

            return SimpleNamespace(
                **{key: getattr(method, key) for key in ("signals", "uses_augmented_inputs", "check")},
                transfer=transfer,
            )

        monkeypatch.setattr(cells, "get_method", watched)
        few = {"methods": list(made), "shots": [8, 12], "seeds": [0], "steps": [], "warm_start": "naive"}
        gc.freeze()  # objects from before need not be searched each time
        run_comparison(comparison_of(settings | few))
        gc.unfreeze()
        assert [len(found) for found in made.values()] == [6, 6, 1]  # the halves and the whole of each budget
        assert max(alive) == 1  # that of the method that reads no data

    def test_rows_are_reproducible(self, settings: dict[str, Any], result: Comparing) -> None:
        fewer = [name for name in METHODS if name not in ("gradfix", "bico")]
        alone = run_comparison(comparison_of(settings | {"seeds": [1], "methods": ["gradfix", "bico"]}))
        assert alone.rows == tuple(row for row in result.rows if row.seed == 1 and row.method not in fewer)

    def test_a_budget_alone_gives_the_rows_it_has_among_others(
        self, single: tuple[Comparing, list[Model]], result: Comparing
    ) -> None:
        alone, _ = single
        among = [row for row in result.rows if row.seed == 0 and row.budget in (0, 8)]
        assert [(row.method, row.scale_rule, row.scale) for row in alone.rows] == [
            (row.method, row.scale_rule, row.scale) for row in among
        ]
        assert [row.accuracy for row in alone.rows] == pytest.approx([row.accuracy for row in among])

    def test_auto_never_lowers_what_it_can_see(self, result: Comparing) -> None:
        rows = [row for row in result.rows if row.scale_rule == "auto"]
        assert len(rows) == len(METHODS) * len(SHOTS) * 2
        for row in rows:
            assert row.held_out_before is not None
            assert row.held_out_after is not None
            assert row.held_out_after >= row.held_out_before
        assert all(item["lowered_hold_out"] == 0 for item in auto_scale_summary(result))

    def test_a_scale_of_zero_is_the_target(self, settings: dict[str, Any]) -> None:
        found = run_comparison(comparison_of(settings | {"scales": ["0"], "shots": [2], "seeds": [0], "steps": []}))
        assert len({row.accuracy for row in found.rows}) == 1

    def test_scale_one_is_what_the_transfer_writes(self, settings: dict[str, Any], result: Comparing) -> None:
        from tuneport.data.formats import read_plain
        from tuneport.measure.accuracy import zero_shot
        from tuneport.models.heads import choose_head

        paths = (settings["source"], settings["finetuned"]["animals"], settings["target"])
        moved = pipeline.transfer(*paths, settings["data"]["animals"], shots=8, seed=1, device="cpu")
        test = read_plain(settings["data"]["animals"], "test")
        model = open_model(settings["target"], device=torch.device("cpu"))
        head = choose_head(model, None, test)
        wanted = zero_shot(model.with_module(moved.apply()), head, test).accuracy
        row = next(
            row for row in result.rows if (row.method, row.scale_rule, row.budget, row.seed) == ("bico", "1", 8, 1)
        )
        assert row.accuracy == pytest.approx(wanted)

    def test_rows_are_complete(self, settings: dict[str, Any], result: Comparing) -> None:
        found = [(row.method, row.scale_rule, row.budget, row.seed) for row in result.rows]
        wanted = {("target", "-", 0, seed) for seed in (0, 1)}
        for budget in SHOTS:
            for seed in (0, 1):
                wanted |= {(method, rule, budget, seed) for method in METHODS for rule in ("1", "auto")}
                for start in ("fine-tuning", "fine-tuning from bico"):
                    wanted |= {(f"{start}, {steps} steps", "-", budget, seed) for steps in settings["steps"]}
        assert len(found) == len(set(found))
        assert set(found) == wanted
        assert all(0 <= row.accuracy <= 100 for row in result.rows)

    def test_finetuned_target_has_a_row(self, settings: dict[str, Any]) -> None:
        more = {"reference": {"animals": settings["target"]}, "steps": [], "methods": ["naive"], "warm_start": "naive"}
        rows = run_comparison(comparison_of(settings | more)).rows
        assert {row.accuracy for row in rows if row.method == "fine-tuned target"} == {rows[0].accuracy}

    def test_models_are_unchanged(self, single: tuple[Comparing, list[Model]]) -> None:
        _, opened = single
        assert opened
        for model in opened:
            fresh = open_model(str(model.weights.folder), device=torch.device("cpu")).module.state_dict()
            assert all(torch.equal(tensor, fresh[name]) for name, tensor in model.module.state_dict().items())


def close(one: torch.Tensor, two: torch.Tensor, tolerance: float = 1e-12) -> None:
    assert torch.allclose(one, two, rtol=tolerance, atol=tolerance * float(two.abs().max()))


def toml(settings: dict[str, Any]) -> str:
    plain = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items() if not isinstance(value, dict))
    tables = {key: value for key, value in settings.items() if isinstance(value, dict)}
    return plain + "".join(
        f"[{key}]\n" + "".join(f"{task} = {json.dumps(item)}\n" for task, item in table.items())
        for key, table in tables.items()
    )


class TestRecipes:
    def test_round_trip(self, settings: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "recipe.toml").write_text(toml(settings))
        assert read_recipe(tmp_path / "recipe.toml").comparison == comparison_of(settings)

    def test_every_setting_can_be_given(self, settings: dict[str, Any], tmp_path: Path) -> None:
        changed = {"samplers": ["class_balanced"], "scales": ["0.5"], "batch_size": 8, "heads": {"animals": "animals"}}
        more = {
            "stated": {"animals": 50.0},
            "protocol": "linear-probe",
            "source_rows": True,
            "full_batch": True,
            "exclude": ["*.bias"],
            "test_samples": 9,
        }
        tuning = {"checkpoint_every": 1, "finetune": asdict(Schedule(3, warmup=1, clip=1.0))}
        full = settings | changed | more | tuning | {"reference": {"animals": settings["target"]}, "samples": []}
        assert set(full) == {item.name for item in fields(Comparison)}
        (tmp_path / "recipe.toml").write_text(toml(full))
        found = read_recipe(tmp_path / "recipe.toml").comparison
        assert {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(found).items()} == full

    def test_budgets_are_needed(self, settings: dict[str, Any]) -> None:
        with pytest.raises(DataError, match="give budgets as samples or as shots, one of the two"):
            comparison_of(settings | {"shots": []})

    @pytest.mark.parametrize(
        ("content", "words"),
        [(b"source = [", "is not valid TOML"), (b"\xff\xfe", "is not valid TOML"), (b"#" * 1_000_001, "larger than")],
    )
    def test_files_other_than_recipes(self, tmp_path: Path, content: bytes, words: str) -> None:
        (tmp_path / "recipe.toml").write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_recipe(tmp_path / "recipe.toml")
        with pytest.raises(DataError, match="there is no recipe at"):
            read_recipe(tmp_path / "other.toml")

    @pytest.mark.usefixtures("no_forward")
    def test_a_method_that_cannot_serve_the_pair_is_refused_before_work(
        self, zoo: Zoo, settings: dict[str, Any]
    ) -> None:
        with pytest.raises(Exception, match="needs two models of one architecture"):
            run_comparison(comparison_of(settings | {"target": str(zoo["clip_vision-target"])}))


class TestWriting:
    def test_everything_written_can_be_read(self, result: Comparing, tmp_path: Path) -> None:
        out = save(result, tmp_path / "out")
        assert sorted(path.name for path in out.iterdir()) == ["plot.svg", "results.json", "table.csv", "table.md"]
        columns, *lines = table_rows(result)
        with (out / "table.csv").open(newline="") as file:
            assert list(csv.reader(file)) == [columns, *lines]
        record = json.loads((out / "results.json").read_text())
        assert [Row(**row) for row in record["rows"]] == list(result.rows)
        assert record["auto"] == auto_scale_summary(result)
        assert record["about"] == dict(result.about)
        assert {"machine", "date", "seconds", "captures", "forward", "backward"} <= set(record["about"])
        text = (out / "table.md").read_text()
        assert text == markdown(result)
        widths = {line.count("|") for line in text.splitlines()[: len(lines) + 2]}
        assert widths == {len(columns) + 1}
        assert all(f"- {key}: {value}" in text for key, value in result.about.items())
        plot = ElementTree.parse(out / "plot.svg").getroot()
        assert plot.tag.endswith("svg")
        drawn = [name for part in plot.iter() if (name := part.get("id", "")).startswith("line ")]
        assert len(set(drawn)) == len(drawn) == len({(row.method, row.scale_rule) for row in result.rows})

    def test_table_of_known_rows(self) -> None:
        accuracies = {("a", 0): 10.0, ("a", 1): 20.0, ("b", 0): 30.0, ("b", 1): 60.0}
        rows = [Row(task, "target", "-", 0, seed, 20.0) for task, seed in accuracies]
        rows += [Row(task, "bico", "1", 5, seed, found) for (task, seed), found in accuracies.items()]
        rows += [Row("a", "naive", "1", 5, 0, 50.0)]
        comparison = Comparison("s", "t", {"a": "x", "b": "y"}, {"a": "x", "b": "y"}, shots=(5,), seeds=(0, 1))
        columns, *lines = table_rows(Comparing(comparison, tuple(rows), {}))
        assert columns == ["method", "scale", "shots", "a", "b", "mean", "± seeds", "gain"]
        assert lines[0] == ["target", "-", "–", "20.0", "20.0", "20.0", "0.0", "+0.0"]
        assert lines[1] == ["bico", "1", "5", "15.0", "45.0", "30.0", "14.1", "+10.0"]  # task means 20 and 40
        assert lines[2] == ["naive", "1", "5", "50.0", "–", "–", "–", "–"]

    def test_auto_scale_summary(self) -> None:
        rows = [Row("a", "target", "-", 0, 0, 50.0)]
        for budget, (found, scale) in enumerate([(50.0, 0.0), (60.0, 1.0), (45.0, 2.0)], 1):
            rows.append(Row("a", "bico", "auto", budget, 0, found, scale, 0.5, 0.5 if budget < 3 else 0.4))
        rows.append(Row("a", "bico", "safe", 1, 0, 52.0, 0.25, 0.5, 0.6))
        assert auto_scale_summary(Comparing(Comparison("s", "t", {}, {}), tuple(rows), {})) == [
            {
                "method": "bico",
                "rule": "auto",
                "cells": 3,
                "picked_zero": 1,
                "helped": 1,
                "hurt": 1,
                "mean_gain": 1.67,
                "worst": -5.0,
                "lowered_hold_out": 1,
            },
            {
                "method": "bico",
                "rule": "safe",
                "cells": 1,
                "picked_zero": 0,
                "helped": 1,
                "hurt": 0,
                "mean_gain": 2.0,
                "worst": 2.0,
                "lowered_hold_out": 0,
            },
        ]

    def test_existing_folder_needs_overwrite(self, result: Comparing, tmp_path: Path) -> None:
        save(result, tmp_path / "out")
        with pytest.raises(Exception, match="exists"):
            save(result, tmp_path / "out")
        save(result, tmp_path / "out", overwrite=True)


class TestMerging:
    def test_runs_of_single_seeds_are_the_whole(self, result: Comparing, tmp_path: Path) -> None:
        parts = []
        for seed in (1, 0):
            rows = tuple(row for row in result.rows if row.seed == seed)
            part = Comparing(replace(result.comparison, seeds=(seed,)), rows, result.about)
            parts.append(load(save(part, tmp_path / str(seed))))
        whole = merge(parts)
        assert whole.rows == result.rows
        assert whole.comparison == result.comparison
        assert whole.about["forward"] == 2 * result.about["forward"]
        assert whole.about["machine"] == result.about["machine"]
        assert whole.about["runs"] == 2
        assert table_rows(whole) == table_rows(result)

    def test_runs_of_single_tasks_stand_side_by_side(self) -> None:
        parts = []
        for task, accuracy in (("a", 10.0), ("b", 30.0)):
            comparison = Comparison("s", "t", {task: f"{task}-tuned"}, {task: f"{task}.npz"}, shots=(5,))
            parts.append(Comparing(comparison, (Row(task, "target", "-", 0, 0, accuracy),), {"seconds": 2.5}))
        whole = merge(parts)
        assert whole.comparison.finetuned == {"a": "a-tuned", "b": "b-tuned"}
        assert table_rows(whole)[1:] == [["target", "-", "–", "10.0", "30.0", "20.0", "–", "+0.0"]]
        assert whole.about == {"seconds": 5.0, "runs": 2}

    def test_unsuitable_runs_are_not_merged(self, result: Comparing) -> None:
        other = replace(result, comparison=replace(result.comparison, shots=(2,), learning_rate=1.0))
        with pytest.raises(DataError, match="different shots, learning_rate cannot be merged"):
            merge([result, other])
        with pytest.raises(DataError, match="task animals with seed 0 is in two of the comparisons"):
            merge([result, result])
        with pytest.raises(DataError, match="nothing to merge"):
            merge([])
        comparisons = [
            Comparison("s", "t", {task: "x"}, {task: "x"}, shots=(5,), seeds=seeds)
            for task, seeds in (("a", (0, 1)), ("b", (0,)))
        ]
        with pytest.raises(DataError, match="some runs are missing: b with seed 1"):
            merge([Comparing(comparison, (), {}) for comparison in comparisons])

    @pytest.mark.parametrize("content", [None, "{", "[]", "{}", '{"comparison": {"x": 1}, "rows": [], "about": {}}'])
    def test_files_other_than_saved_comparisons(self, tmp_path: Path, content: str | None) -> None:
        if content is not None:
            (tmp_path / "results.json").write_text(content)
        with pytest.raises(DataError, match=r"results\.json is not a saved comparison"):
            load(tmp_path)
