"""Bare text encoders and fine-tuned classifiers of them, as folders."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from builders.texts import SENTENCES, SMALL, Size, _plain, bert_tokenizer, write, write_rows

CLASSES = {0: "place", 1: "person", 2: "number"}
WIDER = Size(width=20, depth=3, heads=5, hidden=32, seed=1)


def bert(kind: str, size: Size, **more: Any) -> Any:
    """A tiny BERT with weights of ordinary size, so that its classes differ from sample to sample."""
    config = transformers.BertConfig(**{**_plain(size), "num_labels": 3, **more})
    torch.manual_seed(size.seed)
    options = {"add_pooling_layer": False} if kind == "BertModel" and size is WIDER else {}
    module = getattr(transformers, kind)(config, **options).eval()
    return grow(module, size.seed)


def grow(module: nn.Module, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scaled = parameter.ndim > 1 and "embeddings" not in name
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (0.25 if scaled else 0.05))
    return module


def classifier_of(base: Any, seed: int = 3, **more: Any) -> Any:
    """A full fine-tune of a bare encoder: every layer moved, and a trained head."""
    config = transformers.BertConfig(**{**base.config.to_dict(), "id2label": CLASSES, **more})
    config.label2id = {name: index for index, name in config.id2label.items()}
    module = grow(transformers.BertForSequenceClassification(config), seed)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in base.named_parameters():
            change = torch.randn(parameter.shape, generator=generator) * 0.02
            module.get_parameter(f"bert.{name}").copy_(parameter + change)
    return module.eval()


def write_classifier(folder: Path, target: Any = None) -> tuple[Path, Path, Path, Path]:
    """The folders of a bare source, its fine-tuned classifier and a bare target, and unlabelled sentences."""
    files = _files()
    torch.manual_seed(SMALL.seed)  # what is drawn after this does not depend on whether the files were there
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if target is not None:
        write(folder / "target", target)
    return folder / "source", folder / "tuned", folder / "target", folder / "rows.jsonl"


@cache
def _files() -> Mapping[str, bytes]:
    """The content of the files by name, made once."""
    tokenizer, base = bert_tokenizer(), bert("BertModel", SMALL)
    rows = [{"text": f"{one}, {two}"} for one in SENTENCES for two in SENTENCES[:4]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "source", base, tokenizer)
        write(folder / "tuned", classifier_of(base), tokenizer)
        write(folder / "target", bert("BertModel", WIDER), tokenizer)
        write_rows(folder / "rows.jsonl", rows)
        found = [path for path in folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}
