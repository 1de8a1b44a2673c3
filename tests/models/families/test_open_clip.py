"""open_clip: real models described, transferred, written, and read back by the library."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.push_to_hf_hub import save_config_for_hf
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import tuneport
from builders.family_twins import Permuted, linear_names, scatter, tuned, twin
from builders.folders import CLASSES, Zoo, write_data, write_head
from builders.samples import empty_dataset
from builders.signals import watch
from builders.toy import rotation
from tuneport.errors import CheckpointError
from tuneport.layers import TokenLayout
from tuneport.measure.signals import INPUT, OUTPUT_GRADIENT
from tuneport.measure.tokens import match_tokens
from tuneport.models.base import Labelling
from tuneport.models.heads import PROMPTS, choose_head
from tuneport.models.open import as_classifier, describe_module, open_model, open_stored
from tuneport.pipeline.arithmetic import apply, extract
from tuneport.task_vectors.vector import load_task_vector, save_task_vector


def config(width: int, depth: int, image: int, **more: Any) -> dict[str, Any]:
    vision = {"layers": depth, "width": width, "head_width": 8, "patch_size": 4, "mlp_ratio": 2.0, "image_size": image}
    text = {"layers": 1, "width": 16, "heads": 2, "context_length": 24, "vocab_size": 49408}
    return {"embed_dim": 12, "vision_cfg": {**vision, **more}, "text_cfg": text}


CONFIGS = {
    "tiny": config(16, 2, 8),
    "larger": {**config(24, 3, 12), "quick_gelu": True},
    "custom": {
        **config(16, 2, 8, qk_norm=True, pool_type="avg", no_ln_pre=True, ls_init_value=0.8),
        "custom_text": True,
    },
    "wide": config(16, 2, [8, 16]),
    "attentional": config(16, 2, 8, attentional_pool=True, attn_pooler_heads=2, attn_pooler_queries=4),
    "resnet": {**config(16, 2, 32), "vision_cfg": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32}},
}
PLAIN = ("tiny", "larger", "custom", "wide")


@pytest.fixture(scope="module", autouse=True)
def _registered(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Register the small models by name, as a user adds models to open_clip."""
    folder = tmp_path_factory.mktemp("configs")
    for name, content in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    open_clip.add_model_config(folder)


def build(name: str, seed: int = 0) -> Any:
    return scatter(open_clip.create_model(name), seed)


def save(module: Any, folder: Path, name: str) -> Path:
    """A folder in the library's hub layout, its configuration written by the library."""
    folder.mkdir()
    save_file(module.state_dict(), folder / "open_clip_model.safetensors")
    save_config_for_hf(module, folder / "open_clip_config.json", open_clip.get_model_config(name))
    return folder


@pytest.fixture
def trio(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Base, fine-tune and target, as folders."""
    base, target = build("tiny"), build("larger", 1)
    moved = tuned(base, linear_names(describe_module(base)))
    return (
        save(base, tmp_path / "base", "tiny"),
        save(moved, tmp_path / "ft", "tiny"),
        save(target, tmp_path / "new", "larger"),
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "animals.npz")


def reload(folder: Path) -> tuple[Any, Any]:
    """What a user of open_clip gets from a folder."""
    module, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    return module.eval(), transform


def some_images(count: int = 2, height: int = 21, width: int = 34) -> list[Image.Image]:
    pixels = np.random.default_rng(5).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(image) for image in pixels]


def encode_image(module: Any, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return module.encode_image(pixels)


def refusal(reference: str) -> str:
    with pytest.raises(tuneport.TuneportError) as caught:
        open_model(reference)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestDescribing:
    @pytest.mark.parametrize("name", PLAIN)
    def test_parts_partition_the_parameters_and_layers_are_in_the_tower(self, name: str) -> None:
        model = describe_module(build(name))
        owned, loose = set(linear_names(model)), {part.name for part in model.architecture.loose}
        assert owned | loose | set(model.architecture.outside) == set(model.weights.file_names)
        assert len(owned) + len(loose) + len(model.architecture.outside) == len(model.weights.file_names)
        blocks = model.module.visual.transformer.resblocks
        roles = [(layer.block, layer.role) for layer in model.architecture.layers if layer.block is not None]
        assert roles == [(i, role) for i in range(len(blocks)) for role in ("q", "k", "v", "out", "fc1", "fc2")]
        assert [layer.role for layer in model.architecture.layers if layer.block is None] == ["projection", "patch"]
        assert {layer.heads for layer in model.architecture.layers} == {
            None,
            model.module.visual.transformer.resblocks[0].attn.num_heads,
        }
        assert all(name.startswith("visual.") for name in owned | loose)
        assert not any(name.startswith("visual.") for name in model.architecture.outside)
        assert {"visual.class_embedding", "visual.positional_embedding", "visual.ln_post.weight"} <= loose

    @pytest.mark.parametrize("name", PLAIN)
    def test_features_and_layout_are_those_of_the_library(self, name: str) -> None:
        module = build(name)
        model = describe_module(module)
        assert model.inputs.encode is not None
        assert model.outputs.features is not None
        assert model.inputs.layout is not None
        batch = model.inputs.encode(some_images())
        with torch.no_grad():
            found = model.outputs.features(module, batch)
        assert torch.equal(found, encode_image(module, batch["pixel_values"]))
        assert found.shape == (2, model.outputs.width)
        layout = model.inputs.layout(batch)
        assert layout == TokenLayout(1, module.visual.grid_size)
        assert layout.prefix + layout.grid[0] * layout.grid[1] == len(module.visual.positional_embedding)

    @pytest.mark.parametrize("name", ["tiny", "custom"])
    def test_gradient_times_input_is_the_weight_gradient(self, name: str) -> None:
        """For every projection, also inside nn.MultiheadAttention and for the bare matrix after pooling."""
        module = build(name)
        model = describe_module(module)
        assert model.architecture.layers
        pixels = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1))

        def loss(live: Any, batch: Tensor) -> Tensor:
            return live.encode_image(batch).pow(2).sum()

        seen = watch(module, model.architecture.layers, pixels, loss, {INPUT, OUTPUT_GRADIENT})
        module.zero_grad()
        loss(module, pixels).backward()
        parameters = dict(module.named_parameters())
        for layer in model.architecture.layers:
            (x,), (g,) = seen[layer.name, INPUT], seen[layer.name, OUTPUT_GRADIENT]
            found = g.flatten(0, 1).T @ x.flatten(0, 1)
            wanted = layer.matrix(parameters[layer.weight].grad)
            assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.abs().max()), layer.name

    def test_unknown_towers_are_described_as_plain_modules(self) -> None:
        live = describe_module(build("attentional"))
        assert live.inputs.encode is None
        assert live.architecture.layers


class TestPreprocessing:
    @pytest.mark.parametrize("size", [(21, 34), (40, 17), (8, 8), (5, 3), (223, 301)])
    @pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
    @pytest.mark.parametrize("name", ["tiny", "wide"])
    def test_equals_the_transform_of_the_library(self, name: str, mode: str, size: tuple[int, int]) -> None:
        interpolation = "bilinear" if mode == "squash" else "bicubic"
        settings = {"resize_mode": mode, "interpolation": interpolation, "mean": (0.5, 0.4, 0.3), "fill_color": 7}
        module = open_clip.create_model(name, force_preprocess_cfg=settings)
        transform = image_transform_v2(PreprocessCfg(**module.visual.preprocess_cfg), is_train=False)
        encode = describe_module(module).inputs.encode
        assert encode is not None
        images = some_images(2, *size)
        wanted = torch.stack([transform(image) for image in images])
        assert torch.equal(encode(images)["pixel_values"], wanted)

    def test_at_the_size_of_a_real_model(self) -> None:
        module, _, transform = open_clip.create_model_and_transforms(
            "ViT-B-32", load_weights=False, force_image_size=240
        )
        encode = describe_module(module).inputs.encode
        assert encode is not None
        for height, width in ((375, 500), (500, 333), (64, 48)):
            (image,) = some_images(1, height, width)
            assert torch.equal(encode([image])["pixel_values"][0], transform(image))


class TestOpening:
    @pytest.mark.parametrize("name", PLAIN)
    def test_a_folder_opens_as_open_clip_loads_it(self, name: str, tmp_path: Path) -> None:
        folder = save(build(name), tmp_path / "model", name)
        model, (loaded, transform) = open_model(folder), reload(folder)
        assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in model.module.state_dict().items())
        assert all(
            torch.equal(p, model.weights.tensors[model.weights.file_names[n]])
            for n, p in model.module.named_parameters()
        )
        assert model.inputs.encode is not None
        images = some_images()
        assert torch.equal(
            model.inputs.encode(images)["pixel_values"], torch.stack([transform(image) for image in images])
        )
        assert not model.module.training

    @pytest.mark.parametrize("kind", ["safetensors", "plain pt", "training pt"])
    def test_a_name_with_a_file(self, kind: str, tmp_path: Path) -> None:
        state = build("tiny").state_dict()
        file = tmp_path / ("weights.safetensors" if kind == "safetensors" else "epoch_3.pt")
        if kind == "safetensors":
            save_file(state, file)
        elif kind == "plain pt":
            torch.save(state, file)
        else:  # as open_clip's training writes it
            inner = {f"module.{name}": tensor for name, tensor in state.items()}
            torch.save({"epoch": 3, "name": "run", "state_dict": inner, "optimizer": {"state": {}}}, file)
        model = open_model(f"tiny:{file}")
        assert model.weights.folder is None
        assert set(model.weights.tensors) == set(state)
        assert all(torch.equal(model.module.state_dict()[name], tensor) for name, tensor in state.items())
        assert set(open_stored(f"tiny:{file}").tensors) == set(state)

    def test_a_tag_with_cached_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "cached.safetensors"
        save_file(build("tiny").state_dict(), file)
        known = {"tiny": {"some_tag": {"file": str(file), "mean": (0.5, 0.5, 0.5), "interpolation": "bilinear"}}}
        monkeypatch.setattr("open_clip.pretrained._PRETRAINED", known)
        model = open_model("tiny:some_tag")
        _, _, transform = open_clip.create_model_and_transforms("tiny", pretrained="some_tag")
        assert model.inputs.encode is not None
        images = some_images()
        assert torch.equal(
            model.inputs.encode(images)["pixel_values"], torch.stack([transform(image) for image in images])
        )
        model.weights.write(tmp_path, model.weights.tensors)
        written = json.loads((tmp_path / "open_clip_config.json").read_text())["preprocess_cfg"]
        assert (written["mean"], written["interpolation"], written["resize_mode"]) == (
            [0.5] * 3,
            "bilinear",
            "shortest",
        )

    def test_a_text_tower_stored_the_old_way(self, tmp_path: Path) -> None:
        module = build("custom")
        old = {name.removeprefix("text."): tensor for name, tensor in module.state_dict().items()}
        save_file(old, tmp_path / "old.safetensors")
        model = open_model(f"custom:{tmp_path / 'old.safetensors'}")
        assert model.weights.file_names["text.token_embedding.weight"] == "token_embedding.weight"
        assert all(torch.equal(t, module.state_dict()[name]) for name, t in model.module.state_dict().items())

    def test_position_embeddings_of_another_size_are_resized_by_the_library(self, tmp_path: Path) -> None:
        state = build("tiny").state_dict()
        state["visual.positional_embedding"] = torch.randn(17, 16)
        save_file(state, tmp_path / "big.safetensors")
        model = open_model(f"tiny:{tmp_path / 'big.safetensors'}")
        assert model.module.visual.positional_embedding.shape == (5, 16)
        assert model.weights.tensors["visual.positional_embedding"].shape == (17, 16)

    def test_half_precision_is_opened_in_full(self, tmp_path: Path) -> None:
        save_file({name: t.half() for name, t in build("tiny").state_dict().items()}, tmp_path / "half.safetensors")
        model = open_model(f"tiny:{tmp_path / 'half.safetensors'}")
        assert {parameter.dtype for parameter in model.module.parameters()} == {torch.float32}
        assert {tensor.dtype for tensor in model.weights.tensors.values()} == {torch.float16}

    def test_a_folder_for_both_libraries_opens_with_transformers(self, zoo: Zoo) -> None:
        folder = zoo.root / "both"
        save(build("tiny"), folder, "tiny")
        for item in zoo["clip-base"].iterdir():
            if item.is_file():
                (folder / item.name).write_bytes(item.read_bytes())
        assert type(open_model(folder).module).__name__ == "CLIPModel"

    def test_opening_prints_nothing_and_sets_up_no_logging(self, trio: tuple[Path, Path, Path], capfd: Any) -> None:
        capfd.readouterr()
        handlers, level = list(logging.getLogger().handlers), logging.root.manager.disable
        choose_head(open_model(trio[0]), None, empty_dataset("animals", CLASSES))
        assert capfd.readouterr() == ("", "")
        assert logging.getLogger().handlers == handlers
        assert logging.root.manager.disable == level


class TestHeads:
    @pytest.mark.parametrize("name", ["tiny", "custom"])
    def test_from_the_text_tower(self, name: str, tmp_path: Path) -> None:
        module = build(name)
        folder = save(module, tmp_path / "model", name)
        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
        rows = []
        for label in CLASSES:
            with torch.no_grad():
                texts = module.encode_text(tokenizer([prompt.format(label) for prompt in PROMPTS]), normalize=True)
            rows.append(F.normalize(texts.mean(0), dim=-1))
        for model in (open_model(folder), describe_module(module)):
            head = choose_head(model, None, empty_dataset("animals", CLASSES))
            assert (head.name, head.classes) == ("text", CLASSES)
            torch.testing.assert_close(head.class_embeds, torch.stack(rows))
            assert head.logit_scale == pytest.approx(float(module.logit_scale.detach().exp()))

    def test_from_a_file_in_the_folder(self, trio: tuple[Path, Path, Path]) -> None:
        write_head(trio[0] / "heads" / "animals.safetensors", 12)
        assert choose_head(open_model(trio[0]), "animals", empty_dataset("animals", CLASSES)).name == "animals"


class TestTransfer:
    def test_between_folders_and_back_into_open_clip(
        self, trio: tuple[Path, Path, Path], data: Path, tmp_path: Path
    ) -> None:
        write_head(trio[2] / "heads" / "spare.safetensors", 12)
        result = tuneport.transfer(*map(str, trio), data, samples=24)
        out = result.save(tmp_path / "out")
        assert {path.name for path in out.iterdir() if path.suffix in (".safetensors", ".bin")} == {
            "open_clip_model.safetensors"
        }
        assert (out / "heads" / "spare.safetensors").is_file()
        assert "\nlibrary_name: open_clip\n" in (out / "README.md").read_text()
        module, transform = reload(out)
        before, _ = reload(trio[2])
        pixels = torch.stack([transform(image) for image in some_images(4)])
        features = encode_image(module, pixels)
        assert torch.equal(features, encode_image(result.apply(), pixels))
        assert not torch.allclose(features, encode_image(before, pixels), atol=1e-3)
        state, old = module.state_dict(), before.state_dict()
        moved = {name for name in state if not torch.equal(state[name], old[name])}
        assert moved == set(linear_names(result.target)), "every layer of the image tower, and nothing else"
        assert {item.tensor for item in result.not_transported} == set(old) - moved
        record = json.loads((out / "tuneport.json").read_text())
        read = ["heads/spare.safetensors", "open_clip_config.json", "open_clip_model.safetensors"]
        assert sorted(record["target"]["sha256"]) == read
        again = open_model(out)
        assert choose_head(again, None, empty_dataset("animals", CLASSES)).name == "text"

    @pytest.mark.usefixtures("half_units")
    def test_in_bfloat16(self, trio: tuple[Path, Path, Path], data: Path, tmp_path: Path) -> None:
        model = open_model(trio[2], dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
        assert model.outputs.logit_scale == open_model(trio[2]).outputs.logit_scale
        assert choose_head(model, None, empty_dataset("animals", CLASSES)).class_embeds.dtype == torch.float32
        coarse, exact = (
            tuneport.transfer(*map(str, trio), data, scale=1, samples=24, dtype=dtype)
            for dtype in ("bfloat16", "float32")
        )
        assert set(coarse.task_vector) == set(exact.task_vector)
        state = load_file(coarse.save(tmp_path / "out") / "open_clip_model.safetensors")
        before = load_file(trio[2] / "open_clip_model.safetensors")
        for name, tensor in state.items():
            change = coarse.task_vector.dense(name) if name in coarse.task_vector else 0.0
            assert tensor.dtype == before[name].dtype == torch.float32
            assert torch.equal(tensor, before[name] + change), name

    def test_between_names_with_files(self, trio: tuple[Path, Path, Path], data: Path, tmp_path: Path) -> None:
        by_folder = tuneport.transfer(*map(str, trio), data, samples=12)
        state = load_file(trio[1] / "open_clip_model.safetensors")
        prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
        torch.save({"epoch": 1, "name": "run", "state_dict": prefixed}, tmp_path / "ft.pt")
        files = [trio[0] / "open_clip_model.safetensors", tmp_path / "ft.pt", trio[2] / "open_clip_model.safetensors"]
        references = [f"{name}:{file}" for name, file in zip(("tiny", "tiny", "larger"), files, strict=True)]
        result = tuneport.transfer(*references, data, samples=12)
        out = result.save(tmp_path / "out")
        for name in by_folder.task_vector:
            assert torch.equal(result.task_vector.dense(name), by_folder.task_vector.dense(name))
        assert result.record["finetuned"]["name"] == "tiny:ft.pt"
        module, transform = reload(out)
        pixels = torch.stack([transform(image) for image in some_images(2)])
        assert torch.equal(encode_image(module, pixels), encode_image(by_folder.apply(), pixels))
        assert module.transformer.resblocks[0].mlp.gelu.__class__.__name__ == "QuickGELU", (
            "the configuration came along"
        )

    def test_from_transformers_to_open_clip(self, zoo: Zoo, tmp_path: Path) -> None:
        target = save(build("larger", 1), tmp_path / "new", "larger")
        result = tuneport.transfer(zoo["clip-base"], zoo["clip-tuned"], target, zoo.data, samples=12)
        assert {record.target for record in result.records} == {
            layer.name for layer in result.target.architecture.layers
        }

    def test_live_modules_with_a_loss(self, tmp_path: Path) -> None:
        base, target = build("tiny"), build("larger", 1)
        moved = tuned(base, linear_names(describe_module(base)))
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(12, 3, 12, 12, generator=generator)

        def loss(module: Any, batch: Tensor) -> Tensor:
            size = module.visual.image_size
            return module.encode_image(F.interpolate(batch, size)).pow(2).sum()

        match = match_tokens(TokenLayout(1, (2, 2)), TokenLayout(1, (3, 3)))
        result = tuneport.transfer(base, moved, target, [images], loss=loss, match=match)
        out = result.save(tmp_path / "out")
        fresh = open_clip.create_model("larger", pretrained=str(out / "open_clip_model.safetensors")).eval()
        assert torch.equal(encode_image(fresh, images), encode_image(result.apply(), images))

    def test_extract_and_apply(self, trio: tuple[Path, Path, Path], tmp_path: Path) -> None:
        file = trio[0] / "open_clip_model.safetensors"
        vector = extract(f"tiny:{file}", trio[1])
        save_task_vector(tmp_path / "tau.safetensors", vector, {})
        for base in (str(trio[0]), f"tiny:{file}"):
            out = apply(load_task_vector(tmp_path / "tau.safetensors"), base, tmp_path / "out", overwrite=True)
            found, wanted = reload(out)[0].state_dict(), reload(trio[1])[0].state_dict()
            assert found.keys() == wanted.keys() != set()
            assert all(float((found[name] - wanted[name]).abs().max()) < 1e-6 for name in wanted)

    def test_the_file_of_an_input_is_not_overwritten(self, trio: tuple[Path, Path, Path]) -> None:
        vector = extract(trio[0], trio[1])
        with pytest.raises(CheckpointError, match="it holds the input"):
            apply(vector, f"tiny:{trio[0] / 'open_clip_model.safetensors'}", trio[0], overwrite=True)
        assert (trio[0] / "open_clip_model.safetensors").is_file()


def test_a_twin_answers_like_the_finetuned_source() -> None:
    source = build("tiny")
    permuted, turn = Permuted(width=16, heads=2), rotation(12, torch.Generator().manual_seed(3)).double()

    def move(other: Any) -> None:
        tower = other.visual
        permuted.last(tower.class_embedding, tower.positional_embedding)
        tower.conv1.weight.copy_(tower.conv1.weight[permuted.stream])
        permuted.norms(tower)
        for block in tower.transformer.resblocks:
            permuted.attention(block.attn.in_proj_weight, block.attn.in_proj_bias, block.attn.out_proj)
            permuted.hidden(block.mlp.c_fc, block.mlp.c_proj)
        tower.proj.copy_(tower.proj[permuted.stream] @ turn.T)

    target = twin(source, move)
    moved = tuned(source, linear_names(describe_module(source)))
    generator = torch.Generator().manual_seed(9)
    classes = torch.randn(30, 12, generator=generator)
    heads = {id(source): classes, id(moved): classes, id(target): classes @ turn.T.float()}

    def logits(module: Any, images: Tensor, head: Tensor) -> Tensor:
        return 5 * F.normalize(module.encode_image(images), dim=-1) @ F.normalize(head, dim=-1).T

    def loss(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(logits(module, batch[0], heads[id(module)]), batch[1], reduction="sum")

    batches = [
        (torch.randn(64, 3, 8, 8, generator=generator), torch.randint(30, (64,), generator=generator)) for _ in range(4)
    ]
    images = torch.randn(32, 3, 8, 8, generator=generator)
    back = turn.float()
    assert float((encode_image(target, images) @ back - encode_image(source, images)).abs().max()) < 1e-4
    result = tuneport.transfer(source, moved, target, batches, loss=loss)
    wanted = encode_image(moved, images)
    assert float((encode_image(source, images) - wanted).abs().max()) > 0.1, "the fine-tune did something"
    assert float((encode_image(result.apply(), images) @ back - wanted).abs().max()) < 1e-4


def _no_weights(folder: Path) -> None:
    (folder / "open_clip_model.safetensors").unlink()


def _lost(folder: Path) -> None:
    state = load_file(folder / "open_clip_model.safetensors")
    state.pop("visual.proj")
    save_file(state, folder / "open_clip_model.safetensors")


def _nan(folder: Path) -> None:
    state = load_file(folder / "open_clip_model.safetensors")
    state["visual.proj"].fill_(torch.nan)
    save_file(state, folder / "open_clip_model.safetensors")


def _other_config(folder: Path) -> None:
    content = json.loads((folder / "open_clip_config.json").read_text())
    content["model_cfg"]["vision_cfg"]["width"] = 24
    (folder / "open_clip_config.json").write_text(json.dumps(content))


class TestRefusals:
    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (_no_weights, "has an open_clip_config.json but no weights"),
            (_lost, "1 of 50 tensors of .* are missing or misshapen in .*: visual.proj"),
            (_nan, "hold NaN or infinite values: visual.proj"),
            (_other_config, r"missing or misshapen .* visual.proj \(16, 12\) vs \(24, 12\)"),
            (lambda f: (f / "open_clip_config.json").write_text("{"), "is not a model configuration: no model_cfg"),
        ],
    )
    def test_a_broken_folder(self, spoil: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
        folder = save(build("tiny"), tmp_path / "model", "tiny")
        spoil(folder)
        with pytest.raises(CheckpointError, match=words):
            open_model(folder)

    def test_an_unknown_name(self) -> None:
        assert "open_clip knows no ViT-B-61. Did you mean ViT-B-16" in refusal("ViT-B-61:laion2b_s34b_b88k")

    def test_an_unknown_tag(self) -> None:
        text = refusal("ViT-B-16:laion3b")
        assert "laion3b is neither a file nor one of open_clip's weights of ViT-B-16" in text
        assert "laion2b_s34b_b88k" in text

    @pytest.mark.parametrize(
        "reference",
        ["ViT-B-16:laion2b_s34b_b88k", "ViT-B-16-plus-240:laion400m_e32", "ViT-L-14:datacomp_xl_s13b_b90k"],
    )
    def test_models_of_the_paper_without_cached_weights(
        self, reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        text = refusal(reference)
        assert f"the weights of {reference} are not in open_clip's cache and cannot be fetched" in text
        assert "Fetch them where there is a network, or give" in text

    @pytest.mark.parametrize(
        ("name", "words"),
        [("attentional", "a CLIP with attentional pooling"), ("resnet", "a ModifiedResNet as its image tower")],
    )
    def test_other_towers(self, name: str, words: str, tmp_path: Path) -> None:
        save_file(open_clip.create_model(name).state_dict(), tmp_path / "w.safetensors")
        assert words in refusal(f"{name}:{tmp_path / 'w.safetensors'}")

    def test_pickled_code(self, tmp_path: Path) -> None:
        marker = tmp_path / "marker"

        class Evil:
            def __reduce__(self) -> tuple[Any, ...]:
                return open, (str(marker), "w")

        torch.save({"visual.proj": Evil()}, tmp_path / "evil.pt")
        assert "could run code" in refusal(f"tiny:{tmp_path / 'evil.pt'}")
        assert not marker.exists()


@pytest.mark.slow
def test_between_the_shapes_of_the_paper(tmp_path: Path) -> None:
    """ViT-B-16 to ViT-B-16-plus-240, random weights: other width, image size, token count and embedding width.

    Whole passes through both; all twelve blocks move.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base, target = (open_clip.create_model(name).eval() for name in ("ViT-B-16", "ViT-B-16-plus-240"))
    moved = tuned(base, linear_names(describe_module(base)), amount=0.01)
    for module, name in ((base, "base"), (moved, "ft"), (target, "new")):
        save_file(copy.deepcopy(module).half().state_dict(), tmp_path / f"{name}.safetensors")
    del base, moved, target
    bico = tuneport.get_method("bico")
    assert isinstance(bico, tuneport.BilinearAlignment)
    result = tuneport.transfer(
        f"ViT-B-16:{tmp_path / 'base.safetensors'}",
        f"ViT-B-16:{tmp_path / 'ft.safetensors'}",
        f"ViT-B-16-plus-240:{tmp_path / 'new.safetensors'}",
        write_data(tmp_path / "animals.npz"),
        samples=2,
        batch_size=1,
        method=replace(bico, completion="none"),
    )
    assert len(result.records) == 12 * 6 + 2
    out = result.save(tmp_path / "out")
    module, transform = reload(out)
    pixels = torch.stack([transform(image) for image in some_images(1, 300, 400)])
    assert pixels.shape == (1, 3, 240, 240)
    torch.testing.assert_close(encode_image(module, pixels), encode_image(result.apply(), pixels))


def test_a_plain_module_belongs_to_no_family() -> None:
    assert describe_module(nn.Linear(2, 2)).inputs.encode is None


def test_no_classifier_can_be_made_of_a_model() -> None:
    model = describe_module(open_clip.CLIP(**CONFIGS["tiny"]))
    with pytest.raises(CheckpointError, match="cannot have a classification layer: open_clip has no class for it"):
        as_classifier(model, Labelling("image", ("cat", "dog")))
