"""Random models and data under the names that the small variants of the recipes use, and shorter recipes.

With them every recipe runs on any machine in about a minute. The numbers mean nothing.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.nn import functional as F

from tuneport.data.tasks import TASKS

from .recipe import FIGURES, Recipe

transformers: Any = import_module("transformers")  # its lazy names have no types

IMAGES = ("cifar10", "fashion", "gtsrb", "mnist")
CLASSES = ("cat", "dog", "owl")
FINETUNED = {"a": IMAGES, "c": ("cifar10", "mnist")}
TOWERS = {"a": (16, 2, 16), "a2": (16, 2, 16), "b": (24, 2, 16), "c": (24, 3, 24)}  # width, depth, image
ENCODERS = {"minilm-l6": 16, "mpnet": 24}  # width
TEXTS = ("trec6", "subj")


def write_toys(root: Path) -> Path:
    """Write the folders zoo, encoders and data; return `root`."""
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng([]):
        for seed, (name, sizes) in enumerate(TOWERS.items()):
            torch.manual_seed(seed)
            _write_tower(root / "zoo" / name, *sizes)
            for task in FINETUNED.get(name, ()):
                _write_finetuned(root / "zoo" / name, root / "zoo" / f"{name}-{task}")
        for name, width in ENCODERS.items():
            torch.manual_seed(width)
            _write_encoder(root / "encoders" / name, width)
    for folder in ("images", "text"):
        (root / "data" / folder).mkdir(parents=True)
    for seed, task in enumerate(IMAGES):
        train, test = _images(330, seed), _images(18, 10 + seed)
        arrays = {"x_train": train[0], "y_train": train[1], "x_test": test[0], "y_test": test[1]}
        np.savez(root / "data" / "images" / f"{task}.npz", allow_pickle=False, classes=np.array(CLASSES), **arrays)
    for task in TEXTS:
        _write_sentences(root / "data" / "text" / f"{task}.jsonl.gz", len(TASKS[task].classes))
    return root


def shorten(recipe: Recipe) -> Recipe:
    """Keep one task (of a figure, two), one seed and few samples of a recipe, and fine-tune for two steps."""
    parts = {}
    for name, part in recipe.comparisons.items():
        tasks = list(part.data)[-2 if recipe.kind in FIGURES else -1 :]
        tables: dict[str, Any] = {
            key: {task: value for task, value in getattr(part, key).items() if task in tasks}
            for key in ("finetuned", "data", "heads", "reference", "stated")
        }
        schedule = replace(part.finetune, steps=2, batch_size=4, warmup=0) if part.finetune else None
        parts[name] = replace(
            part,
            **tables,
            seeds=part.seeds[:1],
            samples=(6, 12)[: len(part.samples)],
            shots=part.shots[:2],
            finetune=schedule,
            checkpoint_every=1 if part.checkpoint_every else 0,
        )
    return replace(recipe, comparisons=parts)


def _write_tower(folder: Path, width: int, depth: int, image: int) -> None:
    """Write a CLIP vision tower with a processor and a head per task."""
    config = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 8,
        image_size=image,
        patch_size=8,
        projection_dim=width - 4,
    )
    module = transformers.CLIPVisionModelWithProjection(config)
    _scatter(module)
    module.save_pretrained(folder)
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"height": image, "width": image},
        "do_center_crop": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    pixels, labels = _images(30, seed=0)
    inputs = F.interpolate(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1, size=image)
    with torch.no_grad():
        features = module(inputs).image_embeds
    means = torch.stack([features[torch.from_numpy(labels == label)].mean(0) for label in range(len(CLASSES))])
    head = {"class_embeds": means - means.mean(0), "logit_scale": torch.tensor(math.log(10.0))}
    (folder / "heads").mkdir()
    for task in IMAGES:
        save_file(head, folder / "heads" / f"{task}.safetensors", {"classes": json.dumps(CLASSES)})


def _write_finetuned(base: Path, folder: Path) -> None:
    """Write the base with noise on its linear layers."""
    shutil.copytree(base, folder)
    module = transformers.CLIPVisionModelWithProjection.from_pretrained(base)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.add_(0.05 * torch.randn_like(part.weight))
    module.save_pretrained(folder)


def _write_encoder(folder: Path, width: int) -> None:
    """Write a sentence encoder whose words are numbers."""
    words = ["<unk>", "<pad>", "<s>", "</s>", *(f"w{number}" for number in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        pad_token_id=1,
    )
    module = transformers.BertModel(config)
    _scatter(module)
    module.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", model_max_length=32
    ).save_pretrained(folder)


def _scatter(module: nn.Module) -> None:
    """Draw weights of ordinary size: the library's initial values leave signals near zero."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter[0].numel() ** -0.5)
            elif "norm" not in name.lower():
                parameter.copy_(0.2 * torch.randn_like(parameter))


def _images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw images whose colour tells their class, and their labels."""
    labels = np.arange(count) % len(CLASSES)
    pixels = np.random.default_rng(seed).integers(0, 120, (count, 16, 16, 3))
    for label in range(len(CLASSES)):
        pixels[labels == label, :, :, label] += 120
    return pixels.astype(np.uint8), labels.astype(np.int64)


def _write_sentences(path: Path, classes: int) -> None:
    """Write sentences: those of a class have words of their own."""
    random = np.random.default_rng(0)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for number in range(300):
            label, split = number % classes, "train" if number < 240 else "test"
            text = " ".join(f"w{6 * label + word}" for word in random.integers(0, 6, 5))
            file.write(json.dumps({"split": split, "text": text, "label": label}) + "\n")
