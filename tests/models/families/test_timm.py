"""timm: real vision transformers described, transferred, written, and read back by the library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config
from timm.models._hub import save_for_hf
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

import tuneport
from builders.family_twins import Permuted, linear_names, scatter, tuned, twin
from builders.folders import CLASSES, Zoo, write_data, write_head
from builders.samples import empty_dataset
from builders.signals import watch
from tuneport.errors import CheckpointError
from tuneport.layers import TokenLayout
from tuneport.measure.signals import INPUT, OUTPUT_GRADIENT
from tuneport.models.base import Labelling
from tuneport.models.heads import choose_head
from tuneport.models.open import as_classifier, describe_module, open_model
from tuneport.pipeline.arithmetic import apply, extract

ARCHITECTURE = "vit_tiny_patch16_224"
SMALL = {
    "img_size": 8,
    "patch_size": 4,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "num_classes": 3,
}
LARGE = {**SMALL, "img_size": 12, "embed_dim": 24, "depth": 3, "num_heads": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": SMALL,
    "registers": {**LARGE, "reg_tokens": 2, "init_values": 0.8},
    "mean": {**SMALL, "global_pool": "avg", "class_token": False},
    "pre-norm": {**SMALL, "pre_norm": True, "qk_norm": True},
    "attention pooling": {**SMALL, "global_pool": "map", "class_token": False, "num_classes": 0},
    "no classifier": {**SMALL, "num_classes": 0},
    "oblong": {**SMALL, "img_size": (8, 16)},
}

each_variant = pytest.mark.parametrize("variant", VARIANTS)


def build(variant: str, seed: int = 0) -> Any:
    arguments = VARIANTS[variant]
    size = arguments["img_size"]
    tall, wide = size if isinstance(size, tuple) else (size, size)
    overlay = {"input_size": (3, tall, wide)}
    module = timm.create_model(ARCHITECTURE, pretrained_cfg_overlay=overlay, **arguments)
    return scatter(module, seed)


def save(module: Any, folder: Path, variant: str, labels: tuple[str, ...] = CLASSES) -> Path:
    """A folder as timm's own tools write it."""
    arguments = {name: value for name, value in VARIANTS[variant].items() if name != "num_classes"}
    settings = {"label_names": list(labels)} if module.num_classes else {}
    save_for_hf(module, str(folder), model_config=settings, model_args=arguments, safe_serialization=True)
    return folder


@pytest.fixture
def trio(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Base, fine-tune and target, as folders; the target's classes are in another order."""
    base, target = build("plain"), build("registers", 1)
    moved = tuned(base, linear_names(describe_module(base)))
    return (
        save(base, tmp_path / "base", "plain"),
        save(moved, tmp_path / "ft", "plain"),
        save(target, tmp_path / "new", "registers", CLASSES[::-1]),
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "animals.npz")


def reload(folder: Path) -> Any:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def some_images(count: int = 2, height: int = 21, width: int = 34) -> list[Image.Image]:
    pixels = np.random.default_rng(5).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    return [Image.fromarray(image) for image in pixels]


def answers(module: Any, pixels: Tensor) -> Tensor:
    with torch.no_grad():
        return module(pixels)


def refusal(reference: str) -> str:
    with pytest.raises(tuneport.TuneportError) as caught:
        open_model(reference)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestDescribing:
    @each_variant
    def test_parts_partition_the_parameters(self, variant: str) -> None:
        module = build(variant)
        model = describe_module(module)
        owned, loose = set(linear_names(model)), {part.name for part in model.architecture.loose}
        assert owned | loose == {name for name, _ in module.named_parameters()}
        assert not owned & loose
        assert not model.architecture.outside
        roles = [(layer.block, layer.role) for layer in model.architecture.layers if layer.block is not None]
        depth = len(module.blocks)
        assert roles == [(i, role) for i in range(depth) for role in ("q", "k", "v", "out", "fc1", "fc2")]
        assert {layer.heads for layer in model.architecture.layers if layer.role == "q"} == {
            module.blocks[0].attn.num_heads
        }
        outer = [layer.role for layer in model.architecture.layers if layer.block is None]
        assert outer[0] == "patch"
        assert ("classifier" in outer) == (module.num_classes > 0)

    def test_a_module_made_without_the_factory(self) -> None:
        arguments = {name: SMALL[name] for name in ("img_size", "patch_size", "embed_dim", "depth", "num_heads")}
        model = describe_module(VisionTransformer(**arguments, num_classes=3))
        assert model.outputs.classes == ("0", "1", "2")

    @each_variant
    def test_features_logits_and_layout_are_those_of_the_library(self, variant: str) -> None:
        module = build(variant)
        model = describe_module(module)
        assert model.inputs.encode is not None
        assert model.outputs.features is not None
        assert model.inputs.layout is not None
        batch = model.inputs.encode(some_images())
        pixels = batch["pixel_values"]
        with torch.no_grad():
            tokens = module.forward_features(pixels)
            features = model.outputs.features(module, batch)
            assert torch.equal(features, module.forward_head(tokens, pre_logits=True))
            assert features.shape == (2, model.outputs.width)
            if module.num_classes:
                assert model.outputs.logits is not None
                assert torch.equal(model.outputs.logits(module, batch), module(pixels))
        assert (model.outputs.logits is None) == (module.num_classes == 0)
        layout = model.inputs.layout(batch)
        assert layout == TokenLayout(module.num_prefix_tokens, module.patch_embed.grid_size)
        assert layout.prefix + layout.grid[0] * layout.grid[1] == tokens.shape[1]

    @pytest.mark.parametrize("variant", ["plain", "registers", "attention pooling"])
    def test_gradient_times_input_is_the_weight_gradient(self, variant: str) -> None:
        module = build(variant)
        model = describe_module(module)
        assert model.architecture.layers
        size = module.patch_embed.img_size
        pixels = torch.randn(5, 3, *size, generator=torch.Generator().manual_seed(1))

        def loss(live: Any, batch: Tensor) -> Tensor:
            return live(batch).pow(2).sum()

        seen = watch(module, model.architecture.layers, pixels, loss, {INPUT, OUTPUT_GRADIENT})
        module.zero_grad()
        loss(module, pixels).backward()
        parameters = dict(module.named_parameters())
        for layer in model.architecture.layers:
            (x,), (g,) = seen[layer.name, INPUT], seen[layer.name, OUTPUT_GRADIENT]
            found = g.flatten(0, 1).T @ x.flatten(0, 1)
            wanted = layer.matrix(parameters[layer.weight].grad)
            assert float((found - wanted).abs().max()) < 1e-3 * float(wanted.abs().max()), layer.name


class TestPreprocessing:
    @pytest.mark.parametrize("size", [(21, 34), (40, 17), (8, 8), (5, 3), (223, 301)])
    @pytest.mark.parametrize("mode", ["center", "border", "squash"])
    @pytest.mark.parametrize("variant", ["plain", "oblong"])
    def test_equals_the_transform_of_the_library(self, variant: str, mode: str, size: tuple[int, int]) -> None:
        module = build(variant)
        interpolation = "bilinear" if mode == "squash" else "bicubic"
        module.pretrained_cfg |= {
            "crop_mode": mode,
            "crop_pct": 0.9,
            "interpolation": interpolation,
            "mean": (0.4, 0.3, 0.2),
        }
        transform = create_transform(**resolve_model_data_config(module))
        encode = describe_module(module).inputs.encode
        assert encode is not None
        images = some_images(2, *size)
        wanted = torch.stack([transform(image) for image in images])
        assert torch.equal(encode(images)["pixel_values"], wanted)

    @pytest.mark.parametrize("name", ["vit_tiny_patch16_224.augreg_in21k_ft_in1k", "vit_small_patch14_dinov2.lvd142m"])
    def test_at_the_size_of_a_real_model(self, name: str) -> None:
        module = timm.create_model(name)
        transform = create_transform(**resolve_model_data_config(module))
        encode = describe_module(module).inputs.encode
        assert encode is not None
        for height, width in ((375, 500), (64, 48)):
            (image,) = some_images(1, height, width)
            assert torch.equal(encode([image])["pixel_values"][0], transform(image))


class TestOpening:
    @each_variant
    def test_a_folder_opens_as_timm_loads_it(self, variant: str, tmp_path: Path) -> None:
        folder = save(build(variant), tmp_path / "model", variant)
        model, loaded = open_model(folder), reload(folder)
        assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in model.module.state_dict().items())
        assert all(
            torch.equal(p, model.weights.tensors[model.weights.file_names[n]])
            for n, p in model.module.named_parameters()
        )
        assert model.outputs.classes == (CLASSES if loaded.num_classes else ())
        assert not model.module.training

    @pytest.mark.parametrize("kind", ["safetensors", "plain pt", "training pt"])
    def test_a_name_with_a_file(self, kind: str, tmp_path: Path) -> None:
        """The file decides the number of classes."""
        module = timm.create_model(ARCHITECTURE, num_classes=5)
        state = module.state_dict()
        file = tmp_path / ("weights.safetensors" if kind == "safetensors" else "model_best.pth")
        if kind == "safetensors":
            save_file(state, file)
        elif kind == "plain pt":
            torch.save(state, file)
        else:
            torch.save({"epoch": 3, "state_dict": {f"module.{name}": t for name, t in state.items()}}, file)
        model = open_model(f"timm:{ARCHITECTURE}:{file}")
        assert model.outputs.classes == ("0", "1", "2", "3", "4")
        assert all(torch.equal(model.module.state_dict()[name], tensor) for name, tensor in state.items())

    def test_a_name_with_cached_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        module = timm.create_model(ARCHITECTURE)
        save_file(module.state_dict(), tmp_path / "cached.safetensors")
        create = timm.create_model
        overlay = {"file": str(tmp_path / "cached.safetensors"), "custom_load": False}
        monkeypatch.setattr(timm, "create_model", lambda *a, **k: create(*a, pretrained_cfg_overlay=overlay, **k))
        model = open_model(f"timm:{ARCHITECTURE}")
        assert all(torch.equal(model.weights.tensors[name], tensor) for name, tensor in module.state_dict().items())
        model.weights.write(tmp_path, model.weights.tensors)
        written = json.loads((tmp_path / "config.json").read_text())
        assert (written["architecture"], written["num_classes"]) == (ARCHITECTURE, 1000)
        assert "file" not in written["pretrained_cfg"]


class TestTransfer:
    def test_between_folders_and_back_into_timm(
        self, trio: tuple[Path, Path, Path], data: Path, tmp_path: Path
    ) -> None:
        write_head(trio[2] / "heads" / "spare.safetensors", 24)
        result = tuneport.transfer(*map(str, trio), data, samples=24, head_fit="none")
        out = result.save(tmp_path / "out")
        assert {path.name for path in out.glob("*.safetensors")} == {"model.safetensors"}
        assert (out / "heads" / "spare.safetensors").is_file()
        assert "\nlibrary_name: timm\n" in (out / "README.md").read_text()
        module, before = reload(out), reload(trio[2])
        transform = create_transform(**resolve_model_data_config(module))
        pixels = torch.stack([transform(image) for image in some_images(4)])
        assert torch.equal(answers(module, pixels), answers(result.apply(), pixels))
        assert not torch.allclose(answers(module, pixels), answers(before, pixels), atol=1e-3)
        by_hand = timm.create_model(
            ARCHITECTURE, checkpoint_path=str(out / "model.safetensors"), **VARIANTS["registers"]
        ).eval()
        assert torch.equal(answers(by_hand, pixels), answers(module, pixels))
        state, old = module.state_dict(), before.state_dict()
        moved = {name for name in state if not torch.equal(state[name], old[name])}
        assert moved == set(linear_names(result.target))
        assert {item.tensor for item in result.not_transported} == set(old) - moved
        assert choose_head(open_model(out), None, empty_dataset("animals", CLASSES)).classes == CLASSES[::-1]

    @pytest.mark.usefixtures("half_units")
    def test_in_bfloat16(self, trio: tuple[Path, Path, Path], data: Path, tmp_path: Path) -> None:
        model = open_model(trio[2], dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
        coarse, exact = (
            tuneport.transfer(*map(str, trio), data, samples=24, dtype=dtype, head_fit="none")
            for dtype in ("bfloat16", "float32")
        )
        assert set(coarse.task_vector) == set(exact.task_vector)
        state = load_file(coarse.save(tmp_path / "out") / "model.safetensors")
        before = load_file(trio[2] / "model.safetensors")
        for name, tensor in state.items():
            change = coarse.task_vector.dense(name) if name in coarse.task_vector else 0.0
            assert tensor.dtype == before[name].dtype == torch.float32
            assert torch.equal(tensor, before[name] + change), name

    def test_classes_are_reordered_for_the_target(self, trio: tuple[Path, Path, Path], data: Path) -> None:
        result = tuneport.transfer(*map(str, trio), data, samples=24, head_fit="none")
        change = (
            load_file(trio[1] / "model.safetensors")["head.bias"]
            - load_file(trio[0] / "model.safetensors")["head.bias"]
        )
        torch.testing.assert_close(result.task_vector.dense("head.bias"), change.flip(0), atol=1e-6, rtol=0)

    def test_between_names_with_files(self, tmp_path: Path) -> None:
        """With the smallest architecture of timm: files, not sizes, are what is tested."""
        data = write_data(tmp_path / "numbered.npz", classes=("0", "1", "2"))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            base = timm.create_model("test_vit", num_classes=3).eval()
        moved = tuned(base, linear_names(describe_module(base)), amount=0.01)
        target = tuned(base, linear_names(describe_module(base)), seed=2)
        for module, name in ((base, "base"), (target, "new")):
            save_file(module.state_dict(), tmp_path / f"{name}.safetensors")
        torch.save({"state_dict": {f"module.{k}": v for k, v in moved.state_dict().items()}}, tmp_path / "ft.pth")
        references = [f"timm:test_vit:{tmp_path / name}" for name in ("base.safetensors", "ft.pth", "new.safetensors")]
        result = tuneport.transfer(*references, data, samples=4)
        out = result.save(tmp_path / "out")
        again = reload(out)
        pixels = torch.randn(1, 3, 160, 160, generator=torch.Generator().manual_seed(0))
        assert torch.equal(answers(again, pixels), answers(result.apply(), pixels))
        assert again.num_classes == 3

    def test_live_modules_of_other_sizes_than_their_architecture(self, tmp_path: Path) -> None:
        module = build("oblong")
        model = describe_module(module)
        out = tmp_path / "out"
        out.mkdir()
        model.weights.write(out, model.stored_parameters())
        pixels = torch.randn(1, 3, 8, 16, generator=torch.Generator().manual_seed(0))
        assert torch.equal(reload(out)(pixels), module(pixels))

    def test_from_transformers_to_timm(self, zoo: Zoo, tmp_path: Path) -> None:
        target = save(build("registers", 1), tmp_path / "new", "registers")
        result = tuneport.transfer(zoo["vit-base"], zoo["vit-tuned"], target, zoo.data, samples=12)
        moved = {record.target for record in result.records}
        assert moved == {layer.name for layer in result.target.architecture.layers} - {"head.weight"}
        assert reload(result.save(tmp_path / "out")).pretrained_cfg["label_names"] == list(CLASSES)

    def test_extract_and_apply(self, trio: tuple[Path, Path, Path], tmp_path: Path) -> None:
        out = apply(extract(trio[0], trio[1]), trio[0], tmp_path / "out")
        found, wanted = reload(out).state_dict(), reload(trio[1]).state_dict()
        assert found.keys() == wanted.keys() != set()
        assert all(float((found[name] - wanted[name]).abs().max()) < 1e-6 for name in wanted)

    def test_extract_and_apply_by_name(self, tmp_path: Path) -> None:
        references = []
        for name, seed in (("base", 0), ("tuned", 1)):
            module = scatter(timm.create_model(ARCHITECTURE, num_classes=3), seed)
            save_file(module.state_dict(), tmp_path / f"{name}.safetensors")
            references.append(f"timm:{ARCHITECTURE}:{tmp_path / name}.safetensors")
        out = apply(extract(*references), references[0], tmp_path / "out")
        found, wanted = reload(out).state_dict(), module.state_dict()
        assert found.keys() == wanted.keys() != set()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0)


def moves_of(width: int, heads: int) -> Callable[[Any], None]:
    """The moves of a twin."""
    permuted = Permuted(width, heads)

    def move(other: Any) -> None:
        tokens = [other.cls_token, other.pos_embed] + ([other.reg_token] if other.reg_token is not None else [])
        permuted.last(*tokens)
        other.patch_embed.proj.weight.copy_(other.patch_embed.proj.weight[permuted.stream])
        other.patch_embed.proj.bias.copy_(other.patch_embed.proj.bias[permuted.stream])
        permuted.norms(other)
        for block in other.blocks:
            permuted.attention(block.attn.qkv.weight, block.attn.qkv.bias, block.attn.proj)
            permuted.hidden(block.mlp.fc1, block.mlp.fc2)
            for scale in (block.ls1, block.ls2):
                if hasattr(scale, "gamma"):
                    permuted.last(scale.gamma)
        if other.num_classes:
            permuted.last(other.head.weight)

    return move


def test_a_fitted_head_counts_more_than_the_classes_in_the_arguments_of_the_target(tmp_path: Path) -> None:
    target = build("plain")
    arguments = {**VARIANTS["plain"], "num_classes": target.num_classes}
    save_for_hf(target, str(tmp_path / "target"), model_args=arguments, safe_serialization=True)
    model = as_classifier(open_model(tmp_path / "target"), Labelling("image", ("cat", "dog")))
    shutil.copytree(tmp_path / "target", tmp_path / "out")
    model.weights.write(tmp_path / "out", model.weights.tensors)
    again = reload(tmp_path / "out")
    assert torch.equal(again.head.weight, model.module.head.weight)


def test_a_bare_twin_gets_the_head_of_a_finetuned_classifier(tmp_path: Path, data: Path) -> None:
    """Source and target without a head, and a trained classifier: the ported one computes what it does."""
    bare = build("no classifier")
    moved = tuned(bare, linear_names(describe_module(bare)))
    classifier = build("plain", 3)
    classifier.load_state_dict(moved.state_dict(), strict=False)
    target = twin(bare, moves_of(SMALL["embed_dim"], SMALL["num_heads"]))
    folders = [
        save(module.float(), tmp_path / name, "plain")
        for name, module in (("source", bare), ("tuned", classifier), ("target", target))
    ]
    result = tuneport.transfer(*folders, data, scale=1, samples=60)
    again = reload(result.save(tmp_path / "out"))
    assert (again.num_classes, again.pretrained_cfg["label_names"]) == (3, list(CLASSES))
    transform = create_transform(**resolve_model_data_config(again))
    images = tuneport.read_data(data, "test").inputs
    pixels = torch.stack([transform(image) for image in images])
    found, wanted = (answers(module, pixels) for module in (again, reload(folders[1])))
    centred = [scores - scores.mean(-1, keepdim=True) for scores in (found, wanted)]
    torch.testing.assert_close(*centred, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["plain", "registers"])
def test_a_twin_answers_like_the_finetuned_source(variant: str) -> None:
    width, heads = VARIANTS[variant]["embed_dim"], VARIANTS[variant]["num_heads"]
    source = scatter(timm.create_model(ARCHITECTURE, **{**VARIANTS[variant], "num_classes": 40}), 0)
    target = twin(source, moves_of(width, heads))
    moved = tuned(source, linear_names(describe_module(source)))
    generator = torch.Generator().manual_seed(9)
    size = source.patch_embed.img_size

    def batch(count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, 3, *size, generator=generator), torch.randint(40, (count,), generator=generator)

    def loss(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(module(batch[0]), batch[1], reduction="sum")

    images = batch(32)[0]
    assert float((answers(target, images) - answers(source, images)).abs().max()) < 1e-4
    result = tuneport.transfer(source, moved, target, [batch(64) for _ in range(6)], loss=loss)
    wanted = answers(moved, images)
    assert float((answers(source, images) - wanted).abs().max()) > 0.1
    assert float((answers(result.apply(), images) - wanted).abs().max()) < 1e-4


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _lost(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state.pop("norm.bias")
    save_file(state, folder / "model.safetensors")


def _other_config(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["model_args"]["embed_dim"] = 24
    (folder / "config.json").write_text(json.dumps(content))


def _other_architecture(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "architecture": "no_such_model"}))


class TestRefusals:
    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (_no_weights, "has a config.json but no weights"),
            (_lost, "1 of 32 tensors of .* are missing or misshapen in .*: norm.bias"),
            (_other_config, r"missing or misshapen in .* vs \(1, 1, 24\)"),
            (_other_architecture, r"timm cannot build .*no_such_model"),
        ],
    )
    def test_a_broken_folder(self, spoil: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
        folder = save(build("plain"), tmp_path / "model", "plain")
        spoil(folder)
        with pytest.raises(CheckpointError, match=words):
            open_model(folder)

    def test_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        assert "timm knows no vit_smal_patch16_224. Did you mean vit_small_patch16_224" in refusal(
            "timm:vit_smal_patch16_224"
        )
        assert "there is no file nowhere.pt" in refusal("timm:vit_small_patch16_224:nowhere.pt")
        assert "are not in timm's cache and cannot be fetched" in refusal("timm:vit_small_patch16_224")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("resnet10t", "is timm's ResNet; known is VisionTransformer"),
            ("vit_tiny_r_s16_p8_224", "over features of another network"),
        ],
    )
    def test_other_architectures(self, name: str, words: str, tmp_path: Path) -> None:
        save_file(timm.create_model(name, num_classes=2).state_dict(), tmp_path / "w.safetensors")
        assert words in refusal(f"timm:{name}:{tmp_path / 'w.safetensors'}")

    def test_a_fitted_head_for_two_classification_layers(self) -> None:
        model = describe_module(timm.create_model("deit_tiny_distilled_patch16_224", **SMALL))
        with pytest.raises(CheckpointError, match="has two classification layers, head and head_dist"):
            as_classifier(model, Labelling("image", ("cat", "dog")))
