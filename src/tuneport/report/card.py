"""Model cards, from `card.md.jinja`.

All names are untrusted: the environment escapes whatever a template prints.
"""

from __future__ import annotations

import html
import re
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .record import Record
from .summary import kept_rows, score_rows, score_words, summary_rows


def model_card(record: Record, library: str | None = None) -> str:
    """README.md of the new model, with the hub's metadata.

    `library` is the library that loads the model, if known; an adapter is always loaded by peft.
    """
    metadata = _metadata(record, library).to_yaml()
    parts: dict[str, Any] = {"metadata": metadata, "rows": summary_rows(record), "kept": kept_rows(record)}
    parts |= {"scores": score_rows(record), "score_words": score_words(record) if "accuracies" in record else ""}
    return _ENVIRONMENT.get_template("card.md.jinja").render(record=record, **parts)


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


def _escaped(text: Any) -> str:
    """Escape text for Markdown and HTML, unless a filter marked it as safe."""
    if isinstance(text, Markup):
        return text
    return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", html.escape(_plain_name(text), quote=False))


def _span(text: Any) -> Markup:
    """Text as a code span; backticks and table bars are replaced."""
    return Markup("`" + _plain_name(text).replace("`", "'").replace("|", "/") + "`")


_ENVIRONMENT = Environment(
    loader=PackageLoader(__package__, ""),
    finalize=_escaped,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters["span"] = _span
