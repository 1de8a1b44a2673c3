"""Model cards."""

from __future__ import annotations

import html
import re
from typing import Any

from huggingface_hub import ModelCardData

from .record import Record
from .summary import kept_rows, summary_rows


def model_card(record: Record, library: str | None = None) -> str:
    """README.md of the new model, with the hub's metadata. All names are untrusted and escaped.

    `library` is the library that loads the model, if known; an adapter is always loaded by peft.
    """
    parts = {key: record[key] for key in ("source", "finetuned", "target")}
    source, finetuned, target = (_span(parts[key]["name"]) for key in ("source", "finetuned", "target"))
    data = record.get("data", {}).get("name")
    kept = "\n".join(f"- {count} tensors: {_text(reason)}" for reason, count in kept_rows(record))
    rows = [*summary_rows(record), ("calibration data", data or "batches given in Python")]
    licences = "; ".join(
        f"{key} {_span(part['name'])}: {_text(part.get('license') or 'not stated')}" for key, part in parts.items()
    )
    return f"""---
{_metadata(record, library).to_yaml()}
---

# {_text(parts["target"]["name"])} with the skill of {_text(parts["finetuned"]["name"])}

The fine-tune {finetuned} of {source} was ported to {target} by tuneport {_text(record["tuneport"])}, without training.

| | |
|---|---|
{chr(10).join(f"| {label} | {_text(text)} |" for label, text in rows)}

## How
For each pair of layers the source's change tau is carried over as `R_out^T tau R_in`, with maps found by aligning
both base models on the calibration samples (method {_span(record["method"])}). `tuneport.json` holds every option, the
versions, the SHA-256 of the inputs and a record per layer; `report.html` shows them.

## What stayed as it was
{kept or "- nothing"}

## Limits
Ported skills are approximate: evaluate this model on your own held-out data before use. Biases and faults of the
fine-tuned source and of its training data come along.

## Licence
{licences}. All of them apply to this model.
"""


def training_card(record: Record) -> str:
    """README.md of a fine-tuned model. All names are untrusted and escaped."""
    options = record["options"]
    return (
        f"# {_text(record['model']['name'])}, fine-tuned on {_text(record['data']['name'])}\n\n"
        f"By tuneport {_text(record['tuneport'])}: {record['steps']} steps of AdamW on {record['samples']} samples, "
        f"batch {options['batch_size']}, learning rate {options['learning_rate']:g}, weight decay "
        f"{options['weight_decay']:g}, cosine after a warm-up, seed {options['seed']}, head frozen. `tuneport.json` "
        "holds every option, the versions and the SHA-256 of the inputs. The licences of the base model and of the "
        "data apply.\n"
    )


def _metadata(record: Record, library: str | None) -> ModelCardData:
    names = dict.fromkeys(_plain_name(record[key]["name"]) for key in ("target", "source", "finetuned"))
    stated = {record[key].get("license") for key in ("source", "finetuned", "target")}
    several = len(stated - {None}) > 1
    return ModelCardData(
        base_model=list(names),
        base_model_relation="adapter" if "adapter" in record else "merge",
        license="other" if several else None if None in stated else _plain_name(stated.pop()),
        library_name="peft" if "adapter" in record else library,
        tags=["tuneport", "task-vector", _plain_name(record["method"])],
    )


def _plain_name(text: Any) -> str:
    """Replace line breaks and control characters by spaces."""
    return "".join(mark if mark.isprintable() else " " for mark in str(text))


def _text(text: Any) -> str:
    """Escape text for Markdown and HTML."""
    return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", html.escape(_plain_name(text), quote=False))


def _span(text: Any) -> str:
    """Text as a code span; backticks and table bars are replaced."""
    return "`" + _plain_name(text).replace("`", "'").replace("|", "/") + "`"
