"""Classification heads arrive whole: planted truth, bare encoders, plain loaders, refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from builders.classifiers import CLASSES, WIDER, bert, grow, write_classifier
from builders.folders import Zoo, edit_json, images, same, write_data, write_processor
from builders.runs import Case, prepare, run
from builders.texts import SENTENCES, bert_tokenizer, write, write_rows
from builders.twins import Twin, finetuned
from tuneport import transfer, upgrade
from tuneport.errors import CheckpointError, DataError, TuneportError
from tuneport.measure.fitted_heads import fit_head, is_bare, measuring
from tuneport.measure.samples import DatasetSamples
from tuneport.measure.unseen import RouteJudge
from tuneport.methods import Transfer
from tuneport.models.base import Labelling
from tuneport.models.open import as_classifier, describe_module, open_model
from tuneport.outputs import ModelOutput
from tuneport.pipeline.scale import Judge, ScaleChoice, choose_on_halves
from tuneport.task_vectors.vector import TaskVector
from tuneport.training import division


@pytest.fixture
def folders(tmp_path: Path) -> Callable[..., tuple[Path, Path, Path, Path]]:
    return partial(write_classifier, tmp_path)


def centred(logits: Tensor) -> Tensor:
    return (logits - logits.mean(-1, keepdim=True)).detach()


def pixels_of(count: int) -> Tensor:
    """Images that no model has seen, as their processors make them."""
    pixels = torch.as_tensor(images(count, seed=77)[0]).double() / 255
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.5, 0.25])
    return ((pixels - mean) / std).permute(0, 3, 1, 2).float()


def test_bare_encoders_and_a_full_finetune_give_a_classifier_that_transformers_loads(
    folders: Callable[..., tuple[Path, ...]], tmp_path: Path
) -> None:
    result = transfer(*folders(), scale=1, samples=40)
    out, texts = tmp_path / "out", list(SENTENCES[:5])
    result.save(out)
    loaded, info = transformers.AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert type(loaded) is transformers.BertForSequenceClassification
    assert loaded.config.id2label == CLASSES
    assert (info["missing_keys"], info["unexpected_keys"]) == (set(), set())
    found = loaded.eval()(**transformers.AutoTokenizer.from_pretrained(out)(texts, padding=True, return_tensors="pt"))
    module = result.apply()
    tokens = bert_tokenizer()(texts, padding=True, return_tensors="pt")
    torch.testing.assert_close(found.logits, module(**tokens).logits, atol=1e-5, rtol=1e-5)
    assert result.record["head"]["classes"] == list(CLASSES.values())
    assert result.record["data"]["labels"]["by"] == "source"


def test_a_head_that_the_files_cannot_hold_is_refused(folders: Callable[..., tuple[Path, ...]]) -> None:
    tuned = folders()[1]
    transformers.AutoModelForSequenceClassification.from_pretrained(tuned).half().save_pretrained(tuned)
    model, head = open_model(tuned), {"classifier.bias": torch.full((3,), -1e5)}
    with pytest.raises(CheckpointError, match=r"classifier\.bias of .* up to 1e\+05, which torch\.float16 cannot"):
        model.with_head(head)
    kept = model.with_head(head, rounded=False).module.get_parameter("classifier.bias")
    assert torch.equal(kept, head["classifier.bias"])


@pytest.mark.parametrize("form", ["{}", "LABEL_{}", "LABEL_of {}", "class {}"])
def test_classes_keep_the_names_of_the_fine_tune(
    folders: Callable[..., tuple[Path, ...]], tmp_path: Path, form: str
) -> None:
    source, tuned, target, data = folders()
    names = {index: form.format(index) for index in CLASSES}
    edit_json(tuned / "config.json", id2label=names, label2id={name: index for index, name in names.items()})
    rows = [{"text": text} for text in SENTENCES]
    data = write_rows(tmp_path / "texts.jsonl", rows)
    transfer(source, tuned, target, data, scale=1, samples=12, labels="source").save(tmp_path / "out")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert found.id2label == names
    assert found.label2id == {name: index for index, name in names.items()}


def test_the_head_is_the_ridge_regression_of_the_teacher_on_the_ported_features(
    folders: Callable[..., tuple[Path, ...]],
) -> None:
    """The oracle is scikit-learn, on what a hook sees before the classifier of the written model."""
    from sklearn.linear_model import Ridge

    source, tuned, target, data = folders()
    job = prepare(source, tuned, target, data, samples=40)
    module = run(job, scale=1.0).apply()
    texts = list(job.samples.chosen.inputs)  # type: ignore[attr-defined]
    tokens = bert_tokenizer()(texts, padding=True, truncation=True, return_tensors="pt")
    seen: list[Tensor] = []
    handle = module.classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    module(**tokens)
    handle.remove()
    teacher = transformers.BertForSequenceClassification.from_pretrained(tuned).eval()
    wanted = centred(teacher(**tokens).logits)
    X = seen[0].double().numpy()
    energy = np.linalg.svd(X - X.mean(0), compute_uv=False) ** 2
    errors = []
    for factor in np.logspace(-10, 3, 27):
        known = Ridge(alpha=factor * energy.mean(), solver="svd").fit(X, wanted.double().numpy())
        errors.append(max(abs(known.coef_ - module.classifier.weight.detach().numpy()).max(), 0))
    assert min(errors) < 1e-3 * float(module.classifier.weight.detach().abs().max())


def test_a_student_that_stays_at_a_bare_target_has_the_head_of_the_target(
    folders: Callable[..., tuple[Path, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the port, which reads other features."""
    heads, score = dict[str, Tensor](), RouteJudge.score

    def seen(judge: RouteJudge, name: str, model: Any) -> Any:
        heads[name] = model.module.classifier.weight.detach().clone()
        return score(judge, name, model)

    monkeypatch.setattr(RouteJudge, "score", seen)
    monkeypatch.setattr(RouteJudge, "better", lambda *_: 0)
    monkeypatch.setattr(division, "RATE", 1e-30)  # which changes no weight
    found = upgrade(*folders(), routes="port,distill", steps=1)
    assert found.result is not None
    assert (found.chosen, found.result.record["distilled"]["best"]) == ("distill", 0)
    assert torch.equal(found.result.apply().classifier.weight, heads["target"])
    assert torch.equal(heads["distill"], heads["target"])
    assert not torch.allclose(heads["port"], heads["target"], rtol=0.01)


def test_models_that_are_given_are_not_changed(folders: Callable[..., tuple[Path, ...]]) -> None:
    paths = folders()
    source, target = open_model(paths[0]), open_model(paths[2])
    before = [{name: p.clone() for name, p in model.module.named_parameters()} for model in (source, target)]
    transfer(source, paths[1], target, paths[3], scale=1, samples=12)
    for model, known in zip((source, target), before, strict=True):
        assert type(model.module).__name__ == "BertModel"
        assert set(known) == {name for name, _ in model.module.named_parameters()}
        assert all(torch.equal(known[name], p) for name, p in model.module.named_parameters())


TOWER = {"intermediate_size": 18, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
NAMED = {"id2label": dict(enumerate(("cat", "dog", "owl")))}
IMAGES: dict[str, tuple[str, str, str]] = {  # bare tower, classifier, its part that is the tower
    "vit": ("ViTModel", "ViTForImageClassification", "vit"),  # with a pooler, which the classifier does not have
    "clip": ("CLIPVisionModel", "CLIPForImageClassification", "vision_model"),
}


@pytest.mark.parametrize("family", IMAGES)
def test_a_planted_twin_of_an_image_classifier_is_exact(tmp_path: Path, zoo: Zoo, family: str) -> None:
    """A bare tower, its fine-tuned classifier and a bare twin: the ported classifier computes the fine-tuned one."""
    kinds = [getattr(transformers, name) for name in IMAGES[family][:2]]
    config = kinds[0].config_class(hidden_size=12, **TOWER)
    base = grow(kinds[0](config).eval(), 4)
    plain = describe_module(base)
    moved = finetuned(plain)
    inner = config.to_dict() if family == "vit" else {"vision_config": config.to_dict()}
    tuned = kinds[1](kinds[1].config_class(**{**inner, **NAMED})).eval()
    getattr(tuned, IMAGES[family][2]).load_state_dict(moved.state_dict(), strict=False)
    with torch.no_grad():
        tuned.classifier.weight.normal_(generator=torch.Generator().manual_seed(2))
    twin = Twin(plain, rotary=False, turn=False).build()
    names = ("source", "tuned", "target")
    for name, module in zip(names, (base, tuned, twin), strict=True):
        module.save_pretrained(tmp_path / name)
        write_processor(tmp_path / name, 16)
    result = transfer(*(tmp_path / name for name in names), zoo.data, scale=1, samples=60)
    result.save(tmp_path / "out")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out").eval()
    pixels = pixels_of(20)
    with torch.no_grad():
        ported, wanted = (module(pixel_values=pixels).logits for module in (loaded, tuned))
    torch.testing.assert_close(centred(ported), centred(wanted), atol=1e-4, rtol=1e-4)
    assert (type(loaded), loaded.config.id2label) == (kinds[1], NAMED["id2label"])
    assert result.record["options"]["labels"] is None
    assert "labels" not in result.record["data"], "the labels of the data name the classes of the head"


@pytest.mark.parametrize("name", ["clip", "clip_vision", "siglip", "siglip_vision"])
def test_towers_of_clip_and_siglip_become_classifiers(zoo: Zoo, name: str) -> None:
    model = open_model(zoo[f"{name}-base"])
    headed = as_classifier(model, Labelling("image", ("cat", "dog", "owl")))
    assert type(headed.module).__name__.endswith("ForImageClassification")
    assert headed.classifier is not None
    assert headed.classifier.fresh == {"classifier.weight", "classifier.bias"}
    same = as_classifier(headed, headed.classifier.labelling)
    assert torch.equal(*(model.module.get_parameter("classifier.weight") for model in (headed, same)))
    assert is_bare(same, fits=True), "a drawn head is none of its own, however often the model is opened"
    again = as_classifier(headed, Labelling("image", ("sun", "moon")))
    assert again.module.get_parameter("classifier.weight").shape[0] == 2
    assert headed.outputs.logits is not None
    assert headed.outputs.logits(headed.module, {"pixel_values": pixels_of(2)}).shape == (2, 3)


@pytest.mark.usefixtures("half_units")
@pytest.mark.parametrize("name", ["vit", "clip_vision"])
def test_a_run_in_bfloat16_leaves_float32_weights_that_load_as_such(zoo: Zoo, tmp_path: Path, name: str) -> None:
    """transformers loads weights in the dtype of config.json; the target's are float32."""
    tuned = zoo[f"{name}-tuned"]
    if name == "clip_vision":
        config = transformers.AutoConfig.from_pretrained(zoo[f"{name}-base"]).to_dict()
        module = transformers.CLIPForImageClassification(transformers.CLIPConfig(vision_config=config, **NAMED))
        tower = load_file(tuned / "model.safetensors")
        module.load_state_dict({key: tensor for key, tensor in tower.items() if "projection" not in key}, strict=False)
        module.save_pretrained(tmp_path / "tuned")
        write_processor(tuned := tmp_path / "tuned", 16)
    models = zoo[f"{name}-base"], tuned, zoo[f"{name}-target"]
    options = {"scale": 1, "samples": 12, "accept_unlikely": True}
    transfer(*models, zoo.data, dtype="bfloat16", **options).save(tmp_path / "out")
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    assert torch.equal(loaded.classifier.weight, head := written["classifier.weight"])
    assert not torch.equal(head, head.bfloat16().float()), "the head is not rounded to the dtype of the run"
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


class TestAdapters:
    @pytest.fixture
    def adapter(self, folders: Callable[..., tuple[Path, ...]], tmp_path: Path) -> tuple[Path, ...]:
        """A LoRA for sequence classification, as peft makes and saves it on a bare encoder."""
        peft = pytest.importorskip("peft")
        source, _, target, data = folders()
        torch.manual_seed(5)
        module = transformers.AutoModelForSequenceClassification.from_pretrained(source, num_labels=4)
        config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        tuned = peft.get_peft_model(module, config)
        with torch.no_grad():
            for name, parameter in tuned.named_parameters():
                if "lora_B" in name or "classifier" in name:
                    parameter.normal_(std=0.3)
        tuned.save_pretrained(tmp_path / "adapter")
        self.tuned = tuned.eval()
        return source, tmp_path / "adapter", target, data

    def test_the_head_of_an_adapter_teaches_on_a_bare_base(self, adapter: tuple[Path, ...]) -> None:
        job = prepare(*adapter, samples=16).with_scores()
        texts = list(job.samples.chosen.inputs)  # type: ignore[attr-defined]
        tokens = bert_tokenizer()(texts, padding=True, truncation=True, return_tensors="pt")
        wanted = centred(self.tuned(**tokens).logits)
        np.testing.assert_allclose(job.samples.chosen.scores, wanted, atol=1e-5)  # type: ignore[attr-defined]
        assert job.target.outputs.classes == ("0", "1", "2", "3")
        assert all(job.task_vector.spec(name).rank == 2 for name in job.task_vector)

    def test_it_arrives_as_an_adapter_of_the_bare_target(self, adapter: tuple[Path, ...], tmp_path: Path) -> None:
        """peft alone opens it on the encoder's folder: head and new pooler are in the adapter."""
        peft = pytest.importorskip("peft")
        result = transfer(*adapter, scale=1, samples=16)
        result.save(tmp_path / "out", as_="adapter")
        base = transformers.AutoModelForSequenceClassification.from_pretrained(adapter[2], num_labels=4)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
        tokens = bert_tokenizer()(list(SENTENCES), padding=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            found, wanted = (module(**tokens).logits for module in (loaded, result.apply().eval()))
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)

    def test_a_pooler_that_no_file_holds_is_refused(self, adapter: tuple[Path, ...]) -> None:
        """peft saves the classifier only: with a base without a pooler, the one of the training is lost."""
        place = adapter[0] / "model.safetensors"
        save_file({k: v for k, v in load_file(place).items() if "pooler" not in k}, place, {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"reads through bert\.pooler\.dense\.weight, which neither"):
            prepare(*adapter, samples=16)

    def test_it_arrives_as_a_classifier(self, adapter: tuple[Path, ...], tmp_path: Path) -> None:
        transfer(*adapter, scale=1, samples=16).save(tmp_path / "out")
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        assert loaded.config.id2label == {index: f"LABEL_{index}" for index in range(4)}


class TestOtherBases:
    def test_a_target_with_a_head_for_other_classes_gets_a_new_one(
        self, folders: Callable[..., tuple[Path, ...]]
    ) -> None:
        target = bert("BertForSequenceClassification", WIDER, num_labels=5)
        result = transfer(*folders(target), scale=1, samples=12)
        assert result.apply().classifier.weight.shape == (3, 20)
        assert result.target.outputs.classes == tuple(CLASSES.values())

    def test_a_source_with_a_fresh_head_of_its_own(self, folders: Callable[..., tuple[Path, ...]]) -> None:
        """As AutoModelForSequenceClassification makes it of the bare encoder, and as users save it."""
        source, tuned, target, data = folders()
        plain = prepare(source, tuned, target, data, samples=12).with_scores()
        module = transformers.BertForSequenceClassification.from_pretrained(source, id2label=CLASSES)
        module.save_pretrained(source)
        headed = prepare(source, tuned, target, data, samples=12).with_scores()
        assert set(plain.task_vector) == set(headed.task_vector)
        scores = [job.samples.chosen.scores for job in (plain, headed)]  # type: ignore[attr-defined]
        np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)

    def test_other_orders_of_the_same_classes_are_put_in_order(self) -> None:
        names = {0: "number", 1: "place", 2: "person"}
        target = bert("BertForSequenceClassification", WIDER, id2label=names)
        headed = as_classifier(describe_module(target), Labelling("sequence", tuple(CLASSES.values())))
        old, new = target.classifier.weight, headed.module.get_parameter("classifier.weight")
        torch.testing.assert_close(new, old[[1, 2, 0]])
        assert headed.classifier is not None
        assert not headed.classifier.fresh


def test_a_head_for_the_same_classes_survives_few_samples(zoo: Zoo) -> None:
    """The source itself as the target: its own head is far better than what eight samples can tell."""
    job = prepare(zoo["vit-base"], zoo["vit-tuned"], zoo["vit-base"], zoo.data, samples=8).with_scores()
    own = load_file(zoo["vit-base"] / "model.safetensors")["classifier.weight"]
    trained = load_file(zoo["vit-tuned"] / "model.safetensors")["classifier.weight"]
    with measuring(job.target, job.samples):
        fitted = job.target.module.get_parameter("classifier.weight").detach().clone()
    distances = [float((centred(one.T) - centred(trained.T)).norm()) for one in (fitted, own, torch.zeros_like(own))]
    assert distances[0] <= distances[1] * 1.05 < distances[2]


class TestLabels:
    def test_data_fits_the_head_to_the_labels(self, folders: Callable[..., tuple[Path, ...]], tmp_path: Path) -> None:
        source, tuned, target, _ = folders()
        rows = [{"text": text, "label": CLASSES[place % 3]} for place, text in enumerate(SENTENCES)]
        data = write_rows(tmp_path / "labelled.jsonl", rows)
        job = prepare(source, tuned, target, data, samples=16, labels="data")
        scores, labels = job.samples.chosen.scores, job.samples.chosen.labels  # type: ignore[attr-defined]
        assert set(np.round(np.unique(scores), 6)) == {-0.333333, 0.666667}
        names = [job.samples.chosen.classes[label] for label in labels]  # type: ignore[attr-defined]
        assert [tuple(CLASSES.values())[place] for place in scores.argmax(1)] == names

    def test_other_classes_in_the_data_are_refused_with_a_way_out(
        self, folders: Callable[..., tuple[Path, ...]], tmp_path: Path
    ) -> None:
        source, tuned, target, _ = folders()
        rows = [{"text": text, "label": ["good", "bad"][place % 2]} for place, text in enumerate(SENTENCES)]
        data = write_rows(tmp_path / "other.jsonl", rows)
        with pytest.raises(DataError, match=r'unknown to the head: bad, good.*Or pass `labels="source"`'):
            prepare(source, tuned, target, data, samples=16)
        job = prepare(source, tuned, target, data, samples=16, labels="source")
        assert job.record["data"]["labels"] == {"by": "source", "agreement": None}

    def test_numbers_are_no_descriptions_of_classes(
        self, folders: Callable[..., tuple[Path, ...]], tmp_path: Path
    ) -> None:
        """A bare fine-tune of a sentence encoder, and integer labels."""
        source, _, target, _ = folders()
        module = grow(transformers.BertModel.from_pretrained(source), 9)
        tuned = write(tmp_path / "bare", module, bert_tokenizer())
        rows = [{"text": text, "label": place % 3} for place, text in enumerate(SENTENCES)]
        with pytest.raises(DataError, match=r"are numbers \(0, 1, 2\).*needs words.*`head=FILE.json`"):
            prepare(source, tuned, target, write_rows(tmp_path / "numbers.jsonl", rows), samples=16)


class TestNone:
    def test_the_target_keeps_its_head(self, zoo: Zoo) -> None:
        result = transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=24, head_fit="none", exclude=["classifier.*"])
        kept = load_file(zoo["vit-target"] / "model.safetensors")
        assert torch.equal(result.apply().classifier.weight, kept["classifier.weight"])

    def test_a_head_for_other_classes_is_not_moved(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(zoo["vit-target"], tmp_path / "other"))
        edit_json(folder / "config.json", id2label={"0": "sun", "1": "moon", "2": "star"})
        job = prepare(zoo["vit-base"], zoo["vit-tuned"], folder, signals="naive", head_fit="none")
        assert "classifier.weight" not in {pair.target.weight for pair in job.plan.pairs}
        reasons = {item.tensor: item.reason for item in job.plan.kept}
        assert reasons["classifier.weight"] == "classification layer for other classes: the target keeps its own"

    def test_a_fitted_head_is_no_task_vector(self, folders: Callable[..., tuple[Path, ...]], tmp_path: Path) -> None:
        result = transfer(*folders(), scale=1, samples=12)
        with pytest.raises(TuneportError, match="cannot hold a fitted head"):
            result.save(tmp_path / "out.safetensors", as_="task-vector")


def test_data_with_the_classes_of_the_head_keep_their_labels(
    folders: Callable[..., tuple[Path, ...]], tmp_path: Path
) -> None:
    source, tuned, target, _ = folders()
    rows = [{"text": text, "label": CLASSES[place % 3]} for place, text in enumerate(SENTENCES)]
    job = prepare(source, tuned, target, write_rows(tmp_path / "labelled.jsonl", rows), samples=16).with_scores()
    assert "labels" not in job.record["data"]
    teacher = transformers.BertForSequenceClassification.from_pretrained(tuned).eval()
    texts = list(job.samples.chosen.inputs)  # type: ignore[attr-defined]
    logits = teacher(**bert_tokenizer()(texts, padding=True, return_tensors="pt")).logits
    np.testing.assert_allclose(job.samples.chosen.scores, centred(logits), atol=1e-5)  # type: ignore[attr-defined]


def test_the_scale_is_chosen_with_heads_that_are_fitted_on_the_other_half(
    folders: Callable[..., tuple[Path, ...]],
) -> None:
    result = transfer(*folders(), samples=24, scale="auto")
    scores = {item["scale"]: item for item in result.record["scale_choice"]["candidates"]}
    assert scores[0.0]["loss"] != scores[1.0]["loss"]
    assert result.record["scale_choice"]["held_out"]


def test_both_models_are_measured_with_the_same_function(tmp_path: Path, zoo: Zoo) -> None:
    """A target that is the source itself: the head that is fitted on its base features is the trained one."""
    folder = write_data(tmp_path / "data.npz", train=60)
    job = prepare(zoo["vit-base"], zoo["vit-tuned"], zoo["vit-base"], folder, samples=60).with_scores()
    pixels = {"pixel_values": pixels_of(20)}
    with measuring(job.target, job.samples), torch.no_grad():
        trained, fitted = (centred(model.outputs.logits(model.module, pixels)) for model in job.models)  # type: ignore[misc]
    torch.testing.assert_close(trained, fitted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("scale", [1.0, "auto"])
@pytest.mark.parametrize("fails", [False, True])
def test_models_come_back_as_they_went_in(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, scale: float | str, fails: bool
) -> None:
    def state(job: Case) -> list[Tensor]:
        return [parameter.detach().clone() for model in job.models for parameter in model.module.parameters()]

    job = prepare(*zoo.trio("vit"), zoo.data, samples=12, accept_unlikely=True)
    before = state(job)
    if fails:
        monkeypatch.setattr("tuneport.pipeline.solve.problem_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        run(job, scale=scale)  # type: ignore[arg-type]
    assert all(torch.equal(one, two) for one, two in zip(before, state(job), strict=True))


class TestJudges:
    """A sample that judges was not used by what it judges: another one in its place changes nothing there."""

    @pytest.fixture(params=["vit", "bare"])
    def jobs(self, request: pytest.FixtureRequest, zoo: Zoo, tmp_path: Path) -> Callable[[slice], tuple[Case, Case]]:
        """Two jobs that differ in the images at some places of the draw; the target has its own head, or none."""
        target = zoo["vit-target"]
        if request.param == "bare":
            module = transformers.ViTModel.from_pretrained(target)
            module.save_pretrained(target := tmp_path / "bare")
            write_processor(target, module.config.image_size)

        def make(places: slice) -> tuple[Case, Case]:
            found = []
            pixels, labels = images(24, 1, 3)
            for name in ("one", "other"):
                np.savez(data := tmp_path / f"{name}.npz", x=pixels, y=labels, classes=np.array(("cat", "dog", "owl")))
                models = zoo["vit-base"], zoo["vit-tuned"], target
                job = prepare(*models, data, samples=24, labels="source", accept_unlikely=True)
                drawn = np.array(job.record["data"]["indices"])[places]
                pixels = pixels.copy()
                pixels[drawn] = 255 - pixels[drawn]
                found.append(job)
            return found[0], found[1]

        return make

    def test_maps_of_a_half_do_not_know_the_other(
        self, jobs: Callable[[slice], tuple[Case, Case]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[list[TaskVector]] = []

        class SeenError(Exception):
            """The maps are there: nothing after them is looked at."""

        def chosen(_judge: Judge, _sides: object, moved: Iterable[Transfer], **_: object) -> None:
            seen.append([each.task_vector for each in moved])
            raise SeenError

        monkeypatch.setattr("tuneport.pipeline.solve.choose_on_halves", chosen)
        for job in jobs(slice(12, None)):
            with pytest.raises(SeenError):
                run(job, scale="auto")
        (first, second), (again, other) = seen
        assert same(first, again), "maps of the first half, which the second judges"
        assert not same(second, other)

    def test_the_head_that_judges_is_fitted_on_the_half_of_the_maps(
        self, jobs: Callable[[slice], tuple[Case, Case]]
    ) -> None:
        job = jobs(slice(0))[0].with_scores()

        def judged(changed: slice) -> ScaleChoice:
            """Only the second half judges; the teacher's scores of some samples are others, and no label is."""
            assert isinstance(job.samples, DatasetSamples)
            data = job.samples.dataset
            assert data.scores is not None
            scores = data.scores.copy()
            scores[changed] = -scores[changed]
            measured = job.on(replace(job.samples, dataset=replace(data, scores=scores))).measurement
            judge = Judge(job.target, measured.calibration, ModelOutput(), fits_head=True)
            return choose_on_halves(judge, measured.halves(), [Transfer(TaskVector({}), (), ())])

        plain = judged(slice(0)).scores
        assert plain == judged(slice(12, None)).scores, "the samples that judge"
        assert plain != judged(slice(12)).scores, "the samples of the maps"


class TestFit:
    """The oracle is a regression without a head of the target's own, and that head itself."""

    @pytest.mark.parametrize("good", [True, False])
    def test_the_start_with_the_smaller_error_wins(self, zoo: Zoo, good: bool) -> None:
        trio = zoo["vit-base"], zoo["vit-tuned"], zoo["vit-base"]
        job = prepare(*trio, zoo.data, samples=12, labels="source", accept_unlikely=True).with_scores()
        assert isinstance(job.samples, DatasetSamples)
        source, target = job.models
        assert target.classifier is not None
        trained = {name: source.module.get_parameter(name).detach() for name in target.classifier.own}
        generator = torch.Generator().manual_seed(1)
        noise = {name: 50 * torch.randn(tensor.shape, generator=generator) for name, tensor in trained.items()}
        target, bare = (
            replace(target, classifier=replace(target.classifier, own=own)) for own in (trained if good else noise, {})
        )
        base = replace(job.samples.dataset, scores=job.samples.base_scores)  # what the trained head says
        samples = replace(job.samples, dataset=base)
        found, fresh = (fit_head(model, target.module, samples)["classifier.weight"] for model in (target, bare))
        wanted = centred(trained["classifier.weight"].double().T).T if good else fresh
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(found, fresh) != good
