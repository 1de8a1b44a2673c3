"""Model cards, from `card.md.jinja`.

All names are untrusted: the environment escapes whatever a template prints.
"""

from __future__ import annotations

import html
import re
import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..errors import printable
from .record import Record
from .summary import kept_rows, score_rows, score_words, summary_rows


def model_card(record: Record, library: str | None = None) -> str:
    """README.md of the new model, with the hub's metadata.

    `library` is the library that loads the model, if known; an adapter is always loaded by peft.
    """
    metadata = _metadata(record, library).to_yaml()
    parts: dict[str, Any] = {"metadata": metadata, "rows": summary_rows(record), "kept": kept_rows(record)}
    parts |= {"scores": score_rows(record), "score_words": score_words(record) if "accuracies" in record else ""}
    parts["serving"] = serving(record)
    return _ENVIRONMENT.get_template("card.md.jinja").render(record=record, licensed=_licensed(record), **parts)


def serving(record: Record) -> list[tuple[str, str, list[str]]]:
    """What loads an adapter: the program, the language of its lines, and the lines; an adapter of a decoder is served.

    llama.cpp converts an adapter, and its base, by scripts of its own.
    """
    adapter, out, base = record.get("adapter", {}), str(record.get("out", "")), record["target"].get("path")
    if not (loader := adapter.get("loader")) or not out or not base:
        return []
    call = f"model = peft.{loader['name']}.from_pretrained({out!r}{loader['options']})"
    found = [("peft", "python", ["import peft", call])]
    served = adapter.get("vllm")
    if served is None:
        return found
    if not served["refused"]:
        rank = ["--enable-lora", "--max-lora-rank", str(served["max_lora_rank"])]
        module = f"{Path(out).name}={out}"
        found.append(("vLLM", "sh", [shlex.join(["vllm", "serve", base, *rank, "--lora-modules", module])]))
    whole, lora = f"{Path(base).name}.gguf", f"{Path(out).name}.gguf"
    lines = [
        ["python", "convert_hf_to_gguf.py", base, "--outfile", whole],
        ["python", "convert_lora_to_gguf.py", out, "--base", base, "--outfile", lora],
        ["llama-cli", "-m", whole, "--lora", lora],
    ]
    return [*found, ("llama.cpp", "sh", [shlex.join(line) for line in lines])]


def _metadata(record: Record, library: str | None) -> ModelCardData:
    names = dict.fromkeys(printable(record[key]["name"]) for key in ("target", "source", "finetuned"))
    stated = {record[key].get("license") for key in _licensed(record)}
    several = len(stated - {None}) > 1
    return ModelCardData(
        base_model=list(names),
        base_model_relation="adapter" if "adapter" in record else "merge",
        license="other" if several else None if None in stated else printable(stated.pop()),
        library_name="peft" if "adapter" in record else library,
        tags=["tuneport", "task-vector", printable(record["method"])],
    )


def _licensed(record: Record) -> tuple[str, ...]:
    """The models whose weights or words are in this one; a generator, if samples that it wrote were taught."""
    written = "synthetic" in record and "generator" in record
    return ("source", "finetuned", "target", *(("generator",) if written else ()))


def _escaped(text: Any) -> str:
    """Escape text for Markdown and HTML, unless a filter marked it as safe."""
    if isinstance(text, Markup):
        return text
    return re.sub(r"([\\`*_{}\[\]|#~])", r"\\\1", html.escape(printable(str(text)), quote=False))


_ENVIRONMENT = Environment(
    loader=PackageLoader(__package__, ""),
    finalize=_escaped,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters["span"] = lambda text: Markup("`" + printable(str(text)).replace("`", "'").replace("|", "/") + "`")
_ENVIRONMENT.filters["line"] = lambda text: Markup(printable(str(text)))  # of a code block
