"""The run record follows its schema; the model card has valid metadata and escapes all names."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from builders.folders import Zoo, load, write_data
from builders.loras import adapted, saved
from builders.runs import port, prepare
from tools.record_schema import record_schema
from tuneport.config import DistillConfig, DistillInputs, TransferConfig
from tuneport.data.formats import read_plain
from tuneport.models.base import describe_any
from tuneport.pipeline.arithmetic import apply, extract
from tuneport.pipeline.distill import distill_to_folder
from tuneport.pipeline.transfer import transfer
from tuneport.report.card import model_card
from tuneport.report.page import report_page
from tuneport.report.provenance import identity_of
from tuneport.report.record import to_json
from tuneport.task_vectors.vector import save_task_vector


def test_the_schema_is_json_and_names_every_recorded_option() -> None:
    """`hatch_build.py` writes it into a wheel."""
    schema = json.loads(json.dumps(record_schema()))
    for config in (TransferConfig, DistillConfig):
        options = schema["$defs"][f"{config.command.capitalize()}Options"]["properties"]
        recorded = {item.name.rstrip("_") for item, about in config.options() if about.recorded and not about.python}
        assert set(options) == {*recorded, "python"}


def test_records_need_no_pydantic() -> None:
    code = "import sys; sys.modules['pydantic'] = None; import tuneport.report.page, tuneport.report.card"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestSchema:
    @pytest.fixture(scope="class")
    def valid(self) -> Any:
        jsonschema = pytest.importorskip("jsonschema")
        schema = record_schema()
        jsonschema.Draft202012Validator.check_schema(schema)
        return jsonschema.Draft202012Validator(schema).validate

    @pytest.mark.parametrize("options", [{}, {"method": "naive", "data": None}, {"scale": "auto"}, {"shots": 3}])
    def test_transfer_to_a_model(self, zoo: Zoo, tmp_path: Path, valid: Any, options: dict[str, Any]) -> None:
        given = {"data": zoo.data, "samples": None if "shots" in options else 24, **options}
        data, scale, method = given.pop("data"), given.pop("scale", 1.0), given.pop("method", "bico")
        job = prepare(*zoo.trio("clip_vision"), data, signals=method, **given)
        record = port(job, tmp_path / "out", method=method, scale=scale)
        stored = json.loads((tmp_path / "out" / "tuneport.json").read_text())
        assert stored == json.loads(to_json(record))
        valid(stored)
        assert (stored["command"], stored["as"]) == ("transfer", "model")

    def test_transfer_with_an_evaluation(self, zoo: Zoo, tmp_path: Path, valid: Any) -> None:
        job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=24)
        port(job, tmp_path / "out", test=read_plain(zoo.data, "test"))
        stored = json.loads((tmp_path / "out" / "tuneport.json").read_text())
        valid(stored)
        assert "evaluation" in stored
        assert {"role", "block", "width_in", "residual_in"} <= set(stored["layers"][0])

    def test_transfer_to_a_task_vector(self, zoo: Zoo, tmp_path: Path, valid: Any) -> None:
        job = prepare(*zoo.trio("vit"), zoo.data, samples=24, head_fit="none")
        port(job, tmp_path / "tau.safetensors", as_="task-vector")
        with safe_open(tmp_path / "tau.safetensors", "pt") as file:
            record = json.loads(file.metadata()["record"])
        valid(record)
        assert record["as"] == "task-vector"

    def test_transfer_in_python(self, zoo: Zoo, tmp_path: Path, valid: Any) -> None:
        data = read_plain(zoo.data, "train")
        result = transfer(*zoo.trio("vit"), data, scale=1, samples=24)
        result.save(tmp_path / "out")
        valid(json.loads((tmp_path / "out" / "tuneport.json").read_text()))

    def test_distillation(self, zoo: Zoo, tmp_path: Path, valid: Any) -> None:
        result = transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=24).distill(2, batch_size=4)
        result.save(tmp_path / "out")
        stored = json.loads((tmp_path / "out" / "tuneport.json").read_text())
        valid(stored)
        assert len(stored["distilled"]["curve"]) == 3

    @pytest.mark.parametrize("lora", [None, 2])
    def test_distillation_without_a_transfer(self, zoo: Zoo, tmp_path: Path, valid: Any, lora: int | None) -> None:
        teacher, student = zoo["clip_vision-tuned"], zoo["clip_vision-target"]
        inputs = DistillInputs(
            finetuned=str(teacher), target=str(student), data=str(zoo.data), out=str(tmp_path / "out")
        )
        written = distill_to_folder(inputs, DistillConfig.of(steps=2, samples=12, lora=lora))
        stored = json.loads((tmp_path / "out" / "tuneport.json").read_text())
        assert stored == json.loads(to_json(written))
        valid(stored)
        assert (stored["command"], stored["options"]["steps"]) == ("distill", 2)

    def test_apply(self, zoo: Zoo, tmp_path: Path, valid: Any) -> None:
        vector = extract(zoo["vit-base"], zoo["vit-tuned"])
        save_task_vector(tmp_path / "tau.safetensors", vector)
        for number, given in enumerate((vector, tmp_path / "tau.safetensors")):
            out = tmp_path / f"out{number}"
            apply(given, zoo["vit-base"], out, scale=0.5)
            valid(json.loads((out / "tuneport.json").read_text()))

    def test_transfer_of_an_adapter(self, zoo: Zoo, tmp_path: Path, valid: Any) -> None:
        pytest.importorskip("peft")
        adapter = saved(adapted(load(zoo["vit-base"]), target_modules=["q_proj"]), tmp_path / "lora")
        result = transfer(zoo["vit-base"], adapter, zoo["vit-target"], zoo.data, scale=1, samples=24)
        result.save(tmp_path / "out", as_="adapter")
        stored = json.loads((tmp_path / "out" / "tuneport.json").read_text())
        valid(stored)
        assert set(stored["finetuned"]["adapter"]) == {"rank", "base_model", "task_type"}

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("samples",), -1),
            (("fingerprint",), "x"),
            (("source", "sha256", "model.safetensors"), "x"),
            (("source", "owner"), "x"),
            (("resolved", "dtype"), "float8"),
            (("options", "seed"), -1),
            (("options", "labels"), "both"),
            (("options", "completion"), "none"),
            (("layers", 0, "rank_in"), 0.5),
            (("not_transported", 0, "reason"), None),
            (("as",), None),
        ],
    )
    def test_a_wrong_value_is_not_valid(
        self, record: dict[str, Any], valid: Any, path: tuple[str | int, ...], value: Any
    ) -> None:
        jsonschema = pytest.importorskip("jsonschema")
        written = record | {"out": "out", "as": "model"}
        valid(written)
        place: Any = written
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            valid(written)

    def test_other_objects_are_not_valid(self, valid: Any) -> None:
        jsonschema = pytest.importorskip("jsonschema")
        for wrong in ({}, {"command": "apply"}, {"command": "transfer", "layers": 3}, []):
            with pytest.raises(jsonschema.ValidationError):
                valid(wrong)


def test_every_drawn_image_file_is_in_the_record(zoo: Zoo, tmp_path: Path) -> None:
    data = tmp_path / "animals"
    for label, name in enumerate(("cat", "dog", "owl")):
        (data / name).mkdir(parents=True)
        source = read_plain(write_data(tmp_path / "d.npz"), "train")
        for index in range(4):
            source.inputs[3 * index + label].save(data / name / f"{index}.png")
    result = transfer(*zoo.trio("vit"), data, scale=1, samples=5)
    digests = result.record["data"]["sha256"]
    assert len(digests) == 5
    assert all((data / name).is_file() for name in digests)


HOSTILE = "x\n---\nlicense: mit\n# <script>alert(1)</script> `|` [a](javascript:b) \u2028\x1b[2J \U0001f600"


@pytest.fixture(scope="module")
def recorded(zoo: Zoo) -> str:
    return to_json(transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=24).record)


@pytest.fixture
def record(recorded: str) -> dict[str, Any]:
    content = json.loads(recorded)
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize(
    "mark", ["\x7f", "\x80", "\x9b", "\u200f", "\u202e", "\u2028", "\u2066", "\ufeff", "\udcff", "\U000e0001"]
)
def test_json_escapes_control_characters(mark: str) -> None:
    text = to_json({f"key{mark}": [f"caf\u00e9 \U0001f697{mark}"]})
    assert json.loads(text) == {f"key{mark}": [f"caf\u00e9 \U0001f697{mark}"]}
    assert mark not in text
    assert "caf\u00e9 \U0001f697" in text, "what can be read stays as it is"
    text.encode()


class TestCard:
    @staticmethod
    def front(card: str) -> dict[str, Any]:
        content = yaml.safe_load(card.split("---\n")[1])
        assert isinstance(content, dict)
        return content

    def test_metadata_of_the_hub(self, record: dict[str, Any]) -> None:
        front = self.front(model_card(record, "transformers"))
        assert front == {
            "base_model": ["vit-target", "vit-base", "vit-tuned"],
            "base_model_relation": "merge",
            "library_name": "transformers",
            "tags": ["tuneport", "task-vector", "bico"],
        }

    def test_the_library_is_that_of_the_model(self, zoo: Zoo, record: dict[str, Any], tmp_path: Path) -> None:
        for library in ("open_clip", "timm"):
            assert self.front(model_card(record, library))["library_name"] == library
        assert "library_name" not in self.front(model_card(record))
        adapter = {"modules": [{"rank": 2, "lost_energy": 0.0}]}
        assert self.front(model_card(record | {"adapter": adapter}, "timm"))["library_name"] == "peft"
        for target, library in ((zoo["vit-target"], "transformers"), (describe_any(load(zoo["vit-target"])), None)):
            result = transfer(zoo["vit-base"], zoo["vit-tuned"], target, method="naive")
            out = result.save(tmp_path / str(library))
            assert self.front((out / "README.md").read_text()).get("library_name") == library

    @pytest.mark.parametrize(
        ("stated", "expected"),
        [
            (("mit", "mit", "mit"), "mit"),
            (("mit", "mit", "apache-2.0"), "other"),
            (("mit", None, "apache-2.0"), "other"),
            (("mit", None, "mit"), None),
        ],
    )
    def test_licences(self, zoo: Zoo, tmp_path: Path, stated: tuple[str | None, ...], expected: str | None) -> None:
        trio = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in zoo.trio("vit")]
        for folder, licence in zip(trio, stated, strict=True):
            text = f"---\ntags:\n- x\nlicense: {licence}\n---\n" if licence else "license: gpl\n"
            (folder / "README.md").write_text(text)
        result = transfer(*trio, method="naive")
        assert [result.record[key]["license"] for key in ("source", "finetuned", "target")] == list(stated)
        card = model_card(result.record)
        assert self.front(card).get("license") == expected
        for licence in stated:
            assert f": {licence or 'not stated'}" in card
        assert "biases and faults" in card.lower()

    @pytest.mark.parametrize(
        "front",
        [
            "license: [mit]",
            "license: {a: mit}",
            "license: mit <script>",
            "license: mit\ntags: [unclosed",
            "license: mit\nx: !!bool maybe",
            "license: mit\nx: !!python/object/apply:os.getcwd []",
            "license: mit\nx: " + "[" * 1000,  # beyond the recursion limit
            "- license: mit",
            "license: mit\nx: \x00",
            "license: mit\nx: " + "y" * 2**18,
        ],
    )
    def test_a_licence_that_cannot_be_read_is_unknown(self, zoo: Zoo, tmp_path: Path, front: str) -> None:
        folder = Path(shutil.copytree(zoo["vit-base"], tmp_path / "model"))
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
        assert identity_of(folder)["license"] == "mit"
        (folder / "README.md").write_text(f"---\n{front}\n---\n")
        assert identity_of(folder)["license"] is None
        (folder / "README.md").write_bytes(b"---\nlicense: mit\nx: \xff\n---\n")
        assert identity_of(folder)["license"] is None

    def test_hostile_names_are_escaped(self, record: dict[str, Any]) -> None:
        for key in ("source", "finetuned", "target", "data"):
            record[key]["name"] = HOSTILE
        record["method"] = HOSTILE
        card, page = model_card(record), report_page(record)
        front = self.front(card)
        assert "license" not in front
        assert len(front["base_model"]) == 1
        assert "\n" not in front["base_model"][0]
        body = card.split("\n---\n", 1)[1]
        outside_code = "".join(part for number, part in enumerate(body.split("`")) if number % 2 == 0)
        assert "<script>" not in outside_code
        assert "[a](javascript" not in outside_code
        assert "\x1b" not in card
        assert "\u2028" not in card
        assert not {"\x1b", "\u2028"} & set(page)
        assert "<script>" not in page
        assert "alert(1)</script>" not in page
        assert "&lt;script&gt;alert(1)" in page
