"""Tiny model folders as a user has them: bases, fine-tunes and targets of every known family, made from configs.

`Zoo` builds a folder when it is first asked for. Names are FAMILY-PART: part is base, tuned (the base with its
linear layers moved), target (wider, deeper, another image size), target16 (the target stored in float16) or
targetb (the target's shape with other class names or class order).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast

from tuneport.data.formats import read_plain
from tuneport.measure.accuracy import zero_shot
from tuneport.models.heads import PROMPTS, choose_head
from tuneport.models.open import open_model
from tuneport.pipeline.transfer import Result, transfer
from tuneport.task_vectors.vector import TaskVector

CLASSES = ("cat", "dog", "owl")
HEAD_CLASSES = ("owl", "wolf", "cat", "dog")  # another order than the data, and one class more
TEXT_LENGTH = 12
SAMPLES = 24


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    heads: int
    image: int
    seed: int


SMALL = Size(width=16, depth=2, heads=2, image=16, seed=0)
LARGE = Size(width=24, depth=3, heads=3, image=24, seed=1)
PATCH = 8


def _vision(size: Size, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "image_size": size.image,
        "patch_size": PATCH,
        **more,
    }


def _text(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": len(_vocabulary()),
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": 1,
        "num_attention_heads": size.heads,
        "max_position_embeddings": TEXT_LENGTH,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 1,
    }


def _labelled(size: Size, **more: Any) -> dict[str, Any]:
    return _vision(size, id2label=dict(enumerate(CLASSES)), label2id={c: i for i, c in enumerate(CLASSES)}, **more)


def clip_vision(size: Size, **more: Any) -> nn.Module:
    """A CLIP vision tower with its projection; `more` are settings of its configuration."""
    config = transformers.CLIPVisionConfig(**{**_vision(size), "projection_dim": size.width - 4, **more})
    return transformers.CLIPVisionModelWithProjection(config)


def _clip(size: Size) -> nn.Module:
    config = transformers.CLIPConfig(
        vision_config=_vision(size), text_config=_text(size), projection_dim=size.width - 4
    )
    return transformers.CLIPModel(config)


def _vit(size: Size) -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**_labelled(size)))


def _dinov2(size: Size) -> nn.Module:
    return transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**_labelled(size, mlp_ratio=2)))


def _siglip(size: Size) -> nn.Module:
    text = {**_text(size), "projection_size": size.width}
    return transformers.SiglipModel(transformers.SiglipConfig(vision_config=_vision(size), text_config=text))


def _siglip_vision(size: Size) -> nn.Module:
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**_vision(size)))


BUILDERS: dict[str, Callable[[Size], nn.Module]] = {
    "clip_vision": clip_vision,
    "clip": _clip,
    "vit": _vit,
    "dinov2": _dinov2,
    "siglip": _siglip,
    "siglip_vision": _siglip_vision,
}
FAMILIES = tuple(BUILDERS)
WITH_FILES = ("clip_vision", "siglip_vision")  # their heads are files; the others have classifiers or text towers
WITH_TEXT = ("clip", "siglip")


@dataclass
class Zoo:
    """Folders and data sets under `root`, each made once."""

    root: Path
    made: dict[str, Path] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Path:
        if name not in self.made:
            family, _, part = name.partition("-")
            folder = self.root / name
            if part == "tuned":
                perturb(self[f"{family}-base"], folder)
            elif part == "target16":
                half(self[f"{family}-target"], folder)
            else:
                build(family, SMALL if part == "base" else LARGE, folder)
            self.made[name] = folder
        return self.made[name]

    def trio(self, family: str, part: str = "target") -> tuple[Path, Path, Path]:
        return self[f"{family}-base"], self[f"{family}-tuned"], self[f"{family}-{part}"]

    @property
    def data(self) -> Path:
        """60 images for calibration and 30 for testing, coloured by class, as an .npz."""
        if "data" not in self.made:
            self.made["data"] = write_data(self.root / "animals.npz")
        return self.made["data"]


def build(family: str, size: Size, folder: Path) -> Path:
    """Write one model folder, with the companions of the weights."""
    with torch.random.fork_rng():
        torch.manual_seed(size.seed)
        module = BUILDERS[family](size)
        scatter(module)
    module.save_pretrained(folder)
    write_processor(folder, size.image)
    if family in WITH_TEXT:
        write_tokenizer(folder)
    if family in WITH_FILES:
        width = size.width - 4 if family == "clip_vision" else size.width
        write_head(folder / "heads" / "animals.safetensors", width, seed=size.seed)
    return folder


def scatter(module: nn.Module) -> None:
    """Weights of ordinary size everywhere: the libraries' initial values leave signals near zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "layrnorm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            elif "logit" in name:
                continue
            elif "lambda" in name:
                parameter.fill_(0.8)
            else:
                fan_in = parameter[0].numel() if parameter.ndim > 1 else 25
                parameter.copy_(torch.randn_like(parameter) * fan_in**-0.5)


def linear_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters of linear layers, found without the code under test."""
    names = []
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear) or (isinstance(part, nn.Conv2d) and part.kernel_size == part.stride):
            names += [f"{path}.{name}" for name, _ in part.named_parameters(recurse=False)]
        elif isinstance(part, nn.MultiheadAttention):
            names += [f"{path}.in_proj_weight", f"{path}.in_proj_bias"]
    return names


def perturb(base: Path, folder: Path, amount: float = 0.05, seed: int = 9) -> Path:
    """A fine-tune: the base with noise on its linear layers."""
    module = load(base)
    generator = torch.Generator().manual_seed(seed)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name in linear_parameters(module):
            parameters[name].add_(torch.randn(parameters[name].shape, generator=generator) * amount)
    module.save_pretrained(folder)
    copy_companions_of(base, folder)
    return folder


def half(base: Path, folder: Path) -> Path:
    """The same model stored in float16."""
    load(base).half().save_pretrained(folder)
    copy_companions_of(base, folder)
    return folder


def copy_companions_of(base: Path, folder: Path) -> None:
    for item in base.rglob("*"):
        place = folder / item.relative_to(base)
        if item.is_file() and not place.exists():
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(item.read_bytes())


def load(folder: Path) -> Any:
    """What a user gets from transformers, in float32 and evaluation mode."""
    config = json.loads((folder / "config.json").read_text())
    return getattr(transformers, config["architectures"][0]).from_pretrained(folder, dtype=torch.float32).eval()


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """Change the stored tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def edit_json(path: Path, **changes: Any) -> Path:
    """Change fields of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def write_processor(folder: Path, image: int) -> None:
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"height": image, "width": image},
        "resample": 2,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.5, 0.25],
        "do_convert_rgb": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def _vocabulary() -> dict[str, int]:
    words = sorted({word for prompt in PROMPTS for word in prompt.replace(".", " ").replace("{}", " ").split()})
    return {word: i for i, word in enumerate(["<unk>", "<pad>", "<s>", "</s>", ".", *words, *HEAD_CLASSES])}


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(_vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=TEXT_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)


def write_head(
    path: Path,
    width: int,
    classes: tuple[str, ...] = HEAD_CLASSES,
    scale: float = 10.0,
    seed: int = 0,
    embeds: torch.Tensor | None = None,
) -> Path:
    """A head file with these class embeddings, or with random ones."""
    path.parent.mkdir(exist_ok=True)
    if embeds is None:
        embeds = torch.randn(len(classes), width, generator=torch.Generator().manual_seed(seed))
    save_file(
        {"class_embeds": embeds, "logit_scale": torch.tensor(math.log(scale))}, path, {"classes": json.dumps(classes)}
    )
    return path


def images(count: int, seed: int, classes: int = len(CLASSES), size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images whose colour tells their class, and their labels."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pixels = random.integers(0, 120, (count, size, size, 3))
    for channel in range(3):
        pixels[labels % 3 == channel, :, :, channel] += 120
    return pixels.astype(np.uint8), labels.astype(np.int64)


def write_data(path: Path, classes: tuple[str, ...] = CLASSES, train: int = 60, test: int = 30) -> Path:
    x_train, y_train = images(train, 1, len(classes))
    x_test, y_test = images(test, 2, len(classes))
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=np.array(classes))
    return path


def cross(zoo: Zoo, source: str, target: str, part: str = "target", **options: Any) -> Result:
    """A transfer from one family of the zoo to another."""
    options = {"samples": SAMPLES, "scale": 1.0, "accept_unlikely": True, **options}  # noise may well be worse
    return transfer(zoo[f"{source}-base"], zoo[f"{source}-tuned"], zoo[f"{target}-{part}"], zoo.data, **options)


def same(one: TaskVector, other: TaskVector) -> bool:
    return set(one) == set(other) and all(torch.equal(one.dense(name), other.dense(name)) for name in one)


def known_by(model: Path, out: Path, test: int = 60) -> Path:
    """Data whose test labels are the classes that a model gives to the samples."""
    pixels, labels = images(30, 1, 3)
    arrays = {"x_train": pixels, "y_train": labels, "classes": np.array(CLASSES)}
    pixels = images(test, 2, 3)[0]
    np.savez(out, **arrays, x_test=pixels, y_test=np.arange(test) % 3)
    opened, data = open_model(model), read_plain(out, "test")
    found = zero_shot(opened, choose_head(opened, None, data), data)
    assert found.by_sample.predicted is not None
    known = np.array(
        [list(arrays["classes"]).index(found.by_sample.classes[each]) for each in found.by_sample.predicted]
    )
    np.savez(out, **arrays, x_test=pixels, y_test=known)
    return out
