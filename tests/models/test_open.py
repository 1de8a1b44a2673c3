"""Opening models: the description of a folder, names in files, heads, and errors for broken folders."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers.utils import logging

from builders.folders import (
    CLASSES,
    FAMILIES,
    HEAD_CLASSES,
    Zoo,
    edit_json,
    edit_weights,
    linear_parameters,
    load,
    write_head,
)
from builders.samples import empty_dataset
from tuneport.errors import CheckpointError, DataError, TuneportError
from tuneport.io.checkpoint import open_checkpoint
from tuneport.io.places import path_of
from tuneport.layers import TokenLayout
from tuneport.models.base import Labelling, describe_any
from tuneport.models.families import quiet as _quiet
from tuneport.models.families.huggingface_heads import classifier_around
from tuneport.models.heads import PROMPTS, choose_head, read_head
from tuneport.models.open import describe_module, open_model, open_stored, outline_model
from tuneport.pipeline.arithmetic import apply
from tuneport.task_vectors.vector import TaskVector


def copied(zoo: Zoo, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(zoo[name], tmp_path / name))


def some_images(count: int = 3, size: int = 16) -> list[Image.Image]:
    pixels = np.random.default_rng(5).integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(image) for image in pixels]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_model(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


@pytest.mark.parametrize("family", FAMILIES)
class TestOpening:
    def test_the_module_equals_the_one_transformers_loads(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-base"])
        expected = load(zoo[f"{family}-base"]).state_dict()
        assert model.module.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in model.module.state_dict().items())
        assert not model.module.training
        assert model.inputs.kind == "image"
        assert model.weights.folder == zoo[f"{family}-base"]

    def test_file_names_map_live_parameters_to_equal_stored_tensors(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-base"])
        stored = load_file(zoo[f"{family}-base"] / "model.safetensors")
        assert set(model.weights.file_names) == {name for name, _ in model.module.named_parameters()}
        assert sorted(model.weights.file_names.values()) == sorted(stored), (
            "each tensor of the file has one live parameter"
        )
        for name, parameter in model.module.named_parameters():
            assert torch.equal(parameter, stored[model.weights.file_names[name]]), name

    def test_layers_loose_and_outside_partition_the_parameters(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-base"])
        owned = {layer.weight for layer in model.architecture.layers} | {
            layer.bias for layer in model.architecture.layers if layer.bias
        }
        loose = {part.name for part in model.architecture.loose}
        parts = [owned, loose, set(model.architecture.outside)]
        assert set.union(*parts) == set(model.weights.file_names)
        assert sum(map(len, parts)) == len(model.weights.file_names)

    def test_the_layers_are_the_linear_modules_of_the_image_tower(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-base"])
        owned = {layer.weight for layer in model.architecture.layers} | {
            layer.bias for layer in model.architecture.layers if layer.bias
        }
        expected = {name for name in linear_parameters(model.module) if not name.startswith("text_")}
        assert owned == expected
        assert all(name.startswith(("text_", "logit_")) for name in model.architecture.outside)

    def test_encode_equals_the_image_processor(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-target"])
        assert model.inputs.encode is not None
        images = some_images()
        processor = transformers.AutoImageProcessor.from_pretrained(zoo[f"{family}-target"])
        encoded = model.inputs.encode(images)
        assert list(encoded) == ["pixel_values"]
        assert encoded["pixel_values"].shape == (3, 3, 24, 24), "resized to the model's own image size"
        assert torch.equal(encoded["pixel_values"], processor(images, return_tensors="pt")["pixel_values"])

    def test_layout_has_the_token_count_of_the_model(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-target"])
        assert model.inputs.encode is not None
        assert model.inputs.layout is not None
        batch = model.inputs.encode(some_images(2))
        prefix = 0 if family.startswith("siglip") else 1
        assert model.inputs.layout(batch) == TokenLayout(prefix, (3, 3))
        tower: Any = model.module
        for part in ("vision_model", "vit", "dinov2"):
            tower = getattr(tower, part, tower)
        assert tower(**batch).last_hidden_state.shape[1] == prefix + 9

    def test_features_have_the_width_of_the_model(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-base"])
        assert model.inputs.encode is not None
        assert model.outputs.features is not None
        assert model.outputs.features(model.module, model.inputs.encode(some_images(2))).shape == (
            2,
            model.outputs.width,
        )

    def test_a_live_module_is_described_like_its_folder(self, zoo: Zoo, family: str) -> None:
        opened = open_model(zoo[f"{family}-base"])
        live = describe_module(load(zoo[f"{family}-base"]))
        assert live.architecture.layers == opened.architecture.layers
        assert live.architecture.loose == opened.architecture.loose
        assert live.architecture.outside == opened.architecture.outside
        assert live.weights.file_names == opened.weights.file_names
        assert set(live.weights.tensors) == set(opened.weights.tensors)
        assert all(
            torch.equal(live.weights.tensors[name], opened.weights.tensors[name]) for name in opened.weights.tensors
        )


def test_encode_equals_a_computation_by_hand_without_resizing(zoo: Zoo) -> None:
    encode = open_model(zoo["clip_vision-base"]).inputs.encode
    assert encode is not None
    image = some_images(1)[0]
    pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1).float() / 255
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.5, 0.25])
    expected = (pixels - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(encode([image])["pixel_values"][0], expected, atol=1e-6, rtol=0)


def test_vit_has_other_names_in_its_files(zoo: Zoo) -> None:
    names = open_model(zoo["vit-base"]).weights.file_names
    renamed = {live: stored for live, stored in names.items() if live != stored}
    assert renamed, "this family is here because its names differ"
    assert names["vit.layers.1.attention.q_proj.weight"] == "vit.encoder.layer.1.attention.attention.query.weight"


def test_an_image_tower_without_a_pooler_opens_without_it(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo, "vit-base", tmp_path)
    tower = load(folder).vit
    assert tower.pooler is None
    tower.save_pretrained(folder)  # config.json names a ViTModel, which has one by default
    model = open_model(folder)
    assert not any("pooler" in name for name, _ in model.module.named_parameters())
    assert set(model.weights.file_names.values()) == set(model.weights.tensors)


def test_shards_and_half_precision_open_as_the_same_model(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo, "clip_vision-target16", tmp_path)
    (folder / "model.safetensors").unlink()
    load(zoo["clip_vision-target16"]).half().save_pretrained(folder, max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    model, whole = open_model(folder), open_model(zoo["clip_vision-target16"])
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
    assert {tensor.dtype for tensor in model.weights.tensors.values()} == {torch.float16}
    assert set(model.weights.tensors) == set(whole.weights.tensors)
    assert all(torch.equal(model.weights.tensors[name], whole.weights.tensors[name]) for name in whole.weights.tensors)


def test_features_equal_those_of_the_library(zoo: Zoo) -> None:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    clip, siglip = load(zoo["clip-base"]), load(zoo["siglip-base"])
    vit, dino = load(zoo["vit-base"]), load(zoo["dinov2-base"])
    clip_vision, siglip_vision = load(zoo["clip_vision-base"]), load(zoo["siglip_vision-base"])
    with torch.no_grad():
        expected = {
            "clip_vision": clip_vision(pixels).image_embeds,
            "clip": clip.visual_projection(clip.vision_model(pixels).pooler_output),
            "vit": vit.vit(pixels).last_hidden_state[:, 0],
            "dinov2": dino.dinov2(pixels).last_hidden_state[:, 0],
            "siglip": siglip.vision_model(pixels).pooler_output,
            "siglip_vision": siglip_vision(pixels).pooler_output,
        }
        for family, features in expected.items():
            model = open_model(zoo[f"{family}-base"])
            assert model.outputs.features is not None
            assert torch.equal(model.outputs.features(model.module, {"pixel_values": pixels}), features), family


class TestHeads:
    @pytest.mark.parametrize("family", ["clip_vision", "siglip_vision"])
    def test_from_a_file_in_the_folder(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-base"])
        stored = load_file(zoo[f"{family}-base"] / "heads" / "animals.safetensors")
        for wanted, data in (("animals", "other"), (None, "animals"), (None, "other")):  # the last: the only one
            head = choose_head(model, wanted, empty_dataset(data, CLASSES))
            assert head.name == "animals"
            assert head.classes == HEAD_CLASSES
            assert head.class_embeds is not None
            assert torch.equal(head.class_embeds, stored["class_embeds"])
            # stored as a float32 logarithm: its rounding, 2^-24 of 2.3, is the relative error of the factor
            assert head.logit_scale == pytest.approx(10.0, rel=2.4 * 2**-24)

    def test_scores_are_scaled_cosines(self, zoo: Zoo) -> None:
        model = open_model(zoo["clip_vision-base"])
        head = choose_head(model, None, empty_dataset("animals", CLASSES))
        batch = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
        assert model.outputs.features is not None
        features = model.outputs.features(model.module, batch)
        expected = 10.0 * F.cosine_similarity(features[:, None], head.class_embeds[None], dim=-1)  # type: ignore[index]
        torch.testing.assert_close(head.scores(model, model.module, batch), expected)

    def test_from_a_file_outside_the_folder(self, zoo: Zoo, tmp_path: Path) -> None:
        path = write_head(tmp_path / "mine.safetensors", 12, ("a", "b"), seed=4)
        head = choose_head(open_model(zoo["clip_vision-base"]), str(path), empty_dataset("animals", CLASSES))
        assert (head.name, head.classes) == ("mine", ("a", "b"))

    @pytest.mark.parametrize("family", ["clip", "siglip"])
    def test_from_the_text_tower(self, zoo: Zoo, family: str) -> None:
        folder = zoo[f"{family}-base"]
        head = choose_head(open_model(folder), None, empty_dataset("animals", CLASSES))
        module, tokenizer = load(folder), transformers.AutoTokenizer.from_pretrained(folder)
        padding = "max_length" if family == "siglip" else "longest"
        rows = []
        for name in CLASSES:
            tokens = tokenizer([prompt.format(name) for prompt in PROMPTS], padding=padding, return_tensors="pt")
            assert tokenizer.unk_token_id not in tokens["input_ids"], "the prompts are in the tiny vocabulary"
            with torch.no_grad():
                pooled = module.text_model(**tokens).pooler_output
                texts = module.text_projection(pooled) if family == "clip" else pooled
            rows.append(F.normalize(F.normalize(texts, dim=-1).mean(0), dim=-1))
        assert head.name == "text"
        assert head.classes == CLASSES
        torch.testing.assert_close(head.class_embeds, torch.stack(rows))
        assert head.logit_scale == pytest.approx(float(module.logit_scale.detach().exp()))

    def test_a_text_tower_without_a_length_limit_in_its_tokenizer(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "clip-base", tmp_path)
        edit_json(folder / "tokenizer_config.json", model_max_length=None)
        head = choose_head(open_model(folder), None, empty_dataset("animals", ["cat " * 40]))
        assert head.class_embeds is not None
        assert bool(head.class_embeds.isfinite().all())

    def test_a_text_tower_without_tokenizer_is_refused(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "clip-base", tmp_path)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()
        model = open_model(folder)  # its images can still be read
        with pytest.raises(CheckpointError, match=r"has a text tower but no tokenizer.*`head`"):
            choose_head(model, None, empty_dataset("animals", CLASSES))

    @pytest.mark.parametrize("family", ["vit", "dinov2"])
    def test_from_the_classifier(self, zoo: Zoo, family: str) -> None:
        model = open_model(zoo[f"{family}-base"])
        head = choose_head(model, None, empty_dataset("animals", ("x",)))
        assert (head.name, head.classes, head.class_embeds) == ("classifier", CLASSES, None)
        batch = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
        assert torch.equal(head.scores(model, model.module, batch), load(zoo[f"{family}-base"])(**batch).logits)

    def test_default_labels_are_numbers(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "vit-base", tmp_path)
        edit_json(folder / "config.json", id2label={0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, label2id=None)
        assert open_model(folder).outputs.classes == ("0", "1", "2")

    def test_an_unknown_head_lists_the_known_ones(self, zoo: Zoo) -> None:
        with pytest.raises(DataError, match="has no head 'animal': it has animals"):
            choose_head(open_model(zoo["clip_vision-base"]), "animal", empty_dataset("animals", CLASSES))
        with pytest.raises(DataError, match="has no head 'animals': it has none"):
            choose_head(open_model(zoo["vit-base"]), "animals", empty_dataset("animals", CLASSES))

    def test_no_head_or_several_heads(self, zoo: Zoo, tmp_path: Path) -> None:
        folder = copied(zoo, "clip_vision-base", tmp_path)
        write_head(folder / "heads" / "plants.safetensors", 12)
        with pytest.raises(DataError, match="choose one of its heads with `head`: animals, plants"):
            choose_head(open_model(folder), None, empty_dataset("minerals", CLASSES))
        shutil.rmtree(folder / "heads")
        with pytest.raises(DataError, match="neither a classification layer nor a text tower; pass `head=FILE`"):
            choose_head(open_model(folder), None, empty_dataset("minerals", CLASSES))

    @pytest.mark.parametrize(("family", "width"), [("clip_vision", 12), ("siglip_vision", 16), ("clip", 12)])
    def test_a_head_of_another_model(self, zoo: Zoo, tmp_path: Path, family: str, width: int) -> None:
        path = write_head(tmp_path / "mine.safetensors", 7)
        with pytest.raises(DataError, match=f"embeddings of width 7, but .* gives features of width {width};"):
            choose_head(open_model(zoo[f"{family}-base"]), str(path), empty_dataset("animals", CLASSES))

    @pytest.mark.parametrize(
        ("tensors", "metadata", "message"),
        [
            ({"class_embeds": torch.ones(2, 3)}, {"classes": '["a", "b"]'}, "is not a head: no logit_scale in it"),
            ({"weight": torch.ones(2, 3)}, {}, "is not a head: no class_embeds, logit_scale in it, only weight"),
            ({"class_embeds": torch.ones(2, 3), "logit_scale": torch.ones(())}, {}, "names no classes"),
            (
                {"class_embeds": torch.ones(2, 3), "logit_scale": torch.ones(())},
                {"classes": '["a"]'},
                r"does not fit together: class_embeds \(2, 3\), logit_scale \(\) and 1 class names",
            ),
            (
                {"class_embeds": torch.full((1, 3), torch.nan), "logit_scale": torch.ones(())},
                {"classes": '["a"]'},
                "holds NaN or infinite values",
            ),
            (
                {"class_embeds": torch.ones(1, 3), "logit_scale": torch.tensor(18.97)},
                {"classes": '["a"]'},
                r"logit_scale 18\.97, a factor of e\^18\.97: it is the logarithm of the factor, at most ln 100",
            ),
        ],
    )
    def test_broken_files(self, tmp_path: Path, tensors: dict, metadata: dict, message: str) -> None:
        save_file(tensors, tmp_path / "head.safetensors", metadata)
        with pytest.raises(CheckpointError, match=message):
            read_head(tmp_path / "head.safetensors")


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _no_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()


def _odd_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')


def _broken_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text("{")


def _nan(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors["vit.layernorm.weight"].fill_(torch.nan))


def _infinite(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors["classifier.bias"].fill_(torch.inf))


def _lost_tensor(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("vit.layernorm.weight"))


BROKEN: list[tuple[Callable[[Path], Any], tuple[str, ...]]] = [
    (
        lambda f: edit_json(f / "config.json", architectures=["RobertaModel"]),
        (
            "holds a RobertaModel, which tuneport does not know",
            "Known: CLIPForImageClassification, CLIPModel",
            "ViTForImageClassification",
        ),
    ),
    (lambda f: edit_json(f / "config.json", architectures=None), ("architectures is missing or empty. Add it",)),
    (lambda f: edit_json(f / "config.json", architectures="ViTModel"), ("architectures is missing or empty",)),
    (
        lambda f: edit_json(f / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        ("is quantised (quantization_config: bitsandbytes)", "Give the model in float32, bfloat16 or float16."),
    ),
    (lambda f: (f / "config.json").write_text("{"), ("config.json is not a model configuration",)),
    (lambda f: (f / "config.json").write_text("[]"), ("config.json is not a model configuration",)),
    (_no_processor, ("has no preprocessor_config.json", "Copy it from the original model")),
    (_odd_processor, ("preprocessor_config.json cannot be used",)),
    (_broken_processor, ("preprocessor_config.json is not a preprocessor configuration",)),
    (_no_weights, ("has a config.json but no weights", "model.safetensors")),
    (
        lambda f: edit_json(f / "config.json", hidden_size=24, num_attention_heads=3),
        ("missing or misshapen", "classifier.weight (3, 16) vs (3, 24)", "do not belong together"),
    ),
    (
        lambda f: edit_json(f / "config.json", num_hidden_layers=3),
        ("missing or misshapen", "vit.layers.2.", "more", "do not belong together"),
    ),
    (_lost_tensor, ("1 tensors of ViTForImageClassification", "vit.layernorm.weight")),
    (_nan, ("1 of 40 tensors of", "hold NaN or infinite values: vit.layernorm.weight")),
    (_infinite, ("1 of 40 tensors of", "hold NaN or infinite values: classifier.bias")),
    (lambda f: (f / "model.safetensors").write_bytes(b"no"), ("cannot be read as safetensors",)),
]


@pytest.mark.parametrize(("spoil", "words"), BROKEN)
def test_a_broken_folder_is_one_clear_error(
    zoo: Zoo, tmp_path: Path, spoil: Callable[[Path], Any], words: tuple[str, ...]
) -> None:
    folder = copied(zoo, "vit-base", tmp_path)
    spoil(folder)
    text = refusal(folder)
    assert all(word in text for word in words), text


def test_no_folder_and_no_model(tmp_path: Path) -> None:
    assert "there is no model at" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "is not a model: no config.json in it" in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "first").mkdir()
    (tmp_path / "empty" / "first" / "adapter_config.json").touch()  # as peft writes an adapter with a name
    assert f"Give one of the adapters in it ({tmp_path / 'empty' / 'first'})." in refusal(tmp_path / "empty")


class TestRemoteCode:
    """Code in a checkpoint runs only with `trust_remote_code`."""

    def spoil(self, zoo: Zoo, tmp_path: Path, name: str) -> tuple[Path, Path]:
        folder, marker = copied(zoo, name, tmp_path), tmp_path / "marker"
        (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n\n\nclass Evil:\n    pass\n")
        kinds = ("AutoConfig", "AutoModel", "AutoModelForImageClassification", "AutoImageProcessor", "AutoProcessor")
        code = dict.fromkeys(kinds, "evil.Evil") | {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
        for file in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
            if (folder / file).exists():
                edit_json(folder / file, auto_map=code)
        return folder, marker

    @pytest.mark.parametrize("name", ["vit-base", "clip-base"])
    def test_a_known_model_with_code_in_its_folder(self, zoo: Zoo, tmp_path: Path, name: str) -> None:
        folder, marker = self.spoil(zoo, tmp_path, name)
        choose_head(open_model(folder), None, empty_dataset("animals", CLASSES))
        assert not marker.exists()

    def test_an_unknown_class_or_processor(
        self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked whether code may run"))
        folder, marker = self.spoil(zoo, tmp_path, "vit-base")
        edit_json(folder / "preprocessor_config.json", image_processor_type="Evil")
        assert "preprocessor_config.json cannot be used" in refusal(folder)
        edit_json(folder / "config.json", architectures=["Evil"], model_type="evil")
        assert "holds a Evil, which tuneport does not know" in refusal(folder)
        assert not marker.exists()
        assert capsys.readouterr().out == ""

    def test_a_tokenizer(self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked whether code may run"))
        folder, marker = self.spoil(zoo, tmp_path, "clip-base")
        edit_json(folder / "tokenizer_config.json", tokenizer_class="Evil")
        model = open_model(folder)
        with suppress(CheckpointError):  # a version of transformers may refuse it
            choose_head(model, None, empty_dataset("animals", CLASSES))
        assert not marker.exists()

    def test_pickled_code_in_the_weights(self, zoo: Zoo, tmp_path: Path) -> None:
        folder, marker = copied(zoo, "vit-base", tmp_path), tmp_path / "marker"

        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return open, (str(marker), "w")

        (folder / "model.safetensors").unlink()
        torch.save({"vit.layernorm.weight": Evil()}, folder / "pytorch_model.bin")
        assert "could run code" in refusal(folder)
        assert not marker.exists()


@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_quiet_restores_the_settings_of_transformers(bars: bool, fails: bool) -> None:
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        logging.enable_progress_bar() if bars else logging.disable_progress_bar()
        try:
            with _quiet():
                assert logging.get_verbosity() == logging.ERROR
                assert not logging.is_progress_bar_enabled()
                if fails:
                    raise ValueError
        except ValueError:
            assert fails
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled() == bars
    finally:
        logging.set_verbosity(before[0])
        logging.enable_progress_bar() if before[1] else logging.disable_progress_bar()


def test_opening_prints_nothing(zoo: Zoo, capfd: pytest.CaptureFixture[str]) -> None:
    folder = zoo["clip-base"]
    capfd.readouterr()
    choose_head(open_model(folder), None, empty_dataset("animals", CLASSES))
    assert capfd.readouterr() == ("", "")


def test_a_module_that_no_family_knows() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model = describe_module(module)
    assert model.architecture.layers == describe_any(module).architecture.layers
    assert [layer.weight for layer in model.architecture.layers] == ["0.weight", "2.weight"]
    assert {part.name for part in model.architecture.loose} == {"1.weight", "1.bias"}
    assert model.weights.file_names == {name: name for name, _ in module.named_parameters()}
    assert (model.inputs.encode, model.outputs.features, model.outputs.logits, model.inputs.layout) == (
        None,
        None,
        None,
        None,
    )


def test_the_folder_is_left_as_it_was(zoo: Zoo, tmp_path: Path) -> None:
    folder = copied(zoo, "siglip-base", tmp_path)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    choose_head(open_model(folder), None, empty_dataset("animals", CLASSES))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert json.loads(before["config.json"])["architectures"] == ["SiglipModel"]
    assert len(open_checkpoint(folder)) == len(load_file(folder / "model.safetensors"))


class TestOptionalLibraries:
    """Errors for open_clip and timm models if those libraries are not installed."""

    @pytest.fixture(autouse=True)
    def _without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tuneport.models.families.find_spec", lambda _: None)

    @pytest.mark.parametrize("reference", ["ViT-B-16:laion2b_s34b_b88k", "ViT-L-14:/some/file.pt"])
    def test_an_open_clip_name(self, reference: str) -> None:
        for ask in (open_model, open_stored):
            with pytest.raises(
                TuneportError, match=r'open_clip is not installed.*pip install "tuneport\[open-clip\]"\.$'
            ):
                ask(reference)

    def test_a_timm_name(self) -> None:
        with pytest.raises(TuneportError, match=r'timm is not installed.*pip install "tuneport\[timm\]"\.$'):
            open_model("timm:vit_small_patch16_224")

    def test_an_open_clip_folder(self, tmp_path: Path) -> None:
        (tmp_path / "open_clip_config.json").write_text('{"model_cfg": {}}')
        save_file({"visual.proj": torch.ones(2, 2)}, tmp_path / "open_clip_model.safetensors")
        with pytest.raises(TuneportError, match="open_clip is not installed"):
            open_model(tmp_path)
        assert set(open_stored(tmp_path).tensors) == {"visual.proj"}, "the files need no library"

    def test_a_timm_folder(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"architecture": "vit_tiny_patch16_224"}')
        with pytest.raises(TuneportError, match="timm is not installed"):
            open_model(tmp_path)

    def test_a_path_on_disk_is_not_taken_for_a_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("odd:name").mkdir()
        with pytest.raises(CheckpointError, match=r"odd:name is not a model: no config\.json in it"):
            open_model("odd:name")


def test_a_library_with_a_broken_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "torchvision": 'raise RuntimeError("operator torchvision::nms does not exist")',
        "open_clip": "import torchvision",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "open_clip")]:
        monkeypatch.delitem(sys.modules, name)  # another test, or an installed transformers, may have imported them
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TuneportError) as caught:
        open_model("ViT-B-16:laion2b_s34b_b88k")
    assert re.fullmatch(
        r"open_clip cannot be imported: operator torchvision::nms does not exist\. torchvision .* does not work with "
        r"torch .*: install builds that fit each other, such as torch 2\.10\.0 and torchvision 0\.25\.0, .*",
        str(caught.value),
    )


def test_the_path_of_a_reference(tmp_path: Path) -> None:
    (tmp_path / "w.pt").touch()
    assert path_of(f"ViT-B-16:{tmp_path / 'w.pt'}") == tmp_path / "w.pt"
    assert path_of(tmp_path) == tmp_path
    assert path_of("ViT-B-16:laion2b_s34b_b88k") == Path("ViT-B-16:laion2b_s34b_b88k")


def test_prefixes_of_training_are_removed(tmp_path: Path) -> None:
    save_file({"module.a": torch.ones(2), "module.b": torch.zeros(3)}, tmp_path / "w.safetensors")
    stored = open_checkpoint(tmp_path / "w.safetensors").without_prefix("module.")
    assert list(stored) == ["a", "b"]
    assert stored.shape("b") == (3,)
    assert torch.equal(stored["a"], torch.ones(2))
    assert list(stored.without_prefix("module.")) == ["a", "b"]
    torch.save({"epoch": 1, "model": {"a": torch.ones(2)}}, tmp_path / "w.pt")
    assert list(open_checkpoint(tmp_path / "w.pt")) == ["a"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused_before_any_work(zoo: Zoo, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = Path(shutil.copytree(zoo["vit-target"], tmp_path / "coarse"))

    def coarsen(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("query.weight"))
        tensors[name] = tensors[name].to(dtype)

    edit_weights(folder, coarsen)
    for opening in (open_model, outline_model):
        with pytest.raises(CheckpointError, match=r"1 of .* tensors of .*coarse.* are quantised: .*query\.weight"):
            opening(folder)
    vector = TaskVector(
        {name: torch.zeros_like(tensor) for name, tensor in load_file(zoo["vit-target"] / "model.safetensors").items()}
    )
    with pytest.raises(CheckpointError, match=r"are quantised: .* Give the model in float32"):
        apply(vector, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_configuration_without_a_model_type_gets_a_classifier() -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    config.model_type = None
    module, fresh = classifier_around(transformers.BertModel(config), Labelling("sequence", ("good", "bad")), "base")
    assert isinstance(module, transformers.BertForSequenceClassification)
    assert {"classifier.weight", "classifier.bias"} <= fresh
