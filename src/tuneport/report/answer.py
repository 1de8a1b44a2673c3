"""The first screen of the report: the outcome in a sentence, the scores with their intervals, what to do next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .plots import Figure, is_finite, tracks
from .record import Record
from .summary import SCORE_FORMS, data_reference, evaluate_command, repeat_command, sample_words

STYLES = {  # of an outcome: its colour, and a sign for eyes that see no colour
    "gain": ("good", "▲"),
    "harm": ("bad", "▼"),
    "no clear change": ("unsure", "≈"),
    "nothing moved": ("unsure", "○"),
    "not measured": ("unknown", "?"),
}
UNMEASURED = "accuracy was not measured: this page cannot say whether the transfer helps"
WRITTEN = ("port", "distilled")  # roles of models that did not exist before
MEASURE = "evaluate the output on a labelled test split"


def answer_of(record: Record) -> dict[str, Any]:
    """What the first screen shows of a record; without a test split, that there is none and how to get one."""
    outcome = record.get("outcome", "not measured")
    style, sign = STYLES["gain" if record.get("chosen") else outcome]  # a route is chosen if it is clearly better
    scores, advice = _scores(record), record.get("recommendation") or MEASURE
    return {
        "sentence": _sentence(record.get("headline") or UNMEASURED),
        "style": style,
        "sign": sign,
        "scores": scores,
        "about_scores": _about(record) if scores is not None else "",
        "advice": _sentence(advice),
        "command": _measuring(record) if outcome == "not measured" else _distilling(record, outcome, advice),
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].replace("->", "→").rstrip(".") + "." if text else ""


def _scores(record: Record) -> Figure | None:
    """The models on one axis: those that exist, the target before and what was written."""
    rows: Sequence[Mapping[str, Any]] = record.get("accuracies") or ()
    if not rows:
        return None
    form, unit = SCORE_FORMS[record.get("evaluation", {}).get("metric", "accuracy")]
    written, name = rows[-1]["role"], Path(record.get("out", "")).name
    names = {key: record.get(key, {}).get("name", "") for key in ("finetuned", "source", "target")} | {written: name}
    return tracks([_score(row, form, unit, names.get(row["role"], "")) for row in rows], unit=unit)


def _score(row: Mapping[str, Any], form: str, unit: str, name: str) -> dict[str, Any]:
    value, known = row["value"], is_finite(row["low"]) and is_finite(row["high"])
    return {
        "label": row["words"],
        "note": name,
        "text": f"{value:{form}}{unit}",
        "more": f"{row['low']:{form}} to {row['high']:{form}}" if known else "",
        "bar": (row["low"], row["high"]) if known else (value, value),
        "style": "written" if row["role"] in WRITTEN else "",
        "marks": ((value, "after" if row["role"] in WRITTEN else "before"),),
    }


def _about(record: Record) -> str:
    """What was scored, how sure the scores are, and which direction is good."""
    found, turned = record.get("evaluation", {}), record.get("turned") or {}
    parts = [f"{sample_words(found)}, {found['protocol']}" if found else ""]
    if any(is_finite(row["low"]) for row in record["accuracies"]):
        parts.append("Bars: 95 % intervals")
    if found.get("metric") == "bits per character":
        parts.append("Lower is better")
    if turned:
        parts.append(f"{turned['right_count']} samples turned right and {turned['wrong_count']} turned wrong")
    return ". ".join(filter(None, parts)) + "."


def _measuring(record: Record) -> str | None:
    """The command that scores the output; None if it would need other data, or more than a record knows."""
    out, data, place = record.get("out"), record.get("data", {}), data_reference(record)
    unlabelled = "labels" in data and data["labels"]["agreement"] is None
    whole = data.get("split") == "all"  # calibration has used some of the samples
    if not out or not place or unlabelled or whole or record.get("as", "model") != "model":
        return None
    return evaluate_command(record, out, place)


def _distilling(record: Record, outcome: str, advice: str) -> str | None:
    """The command with the distillation that the advice names; after harm it starts from a safe scale."""
    named = re.search(r"--distill (\d+)", advice)
    if named is None or "distilled" in record:
        return None
    safer = {"scale": "safe"} if outcome == "harm" else {}
    return repeat_command(record, out=f"{record.get('out')}-distilled", distill=int(named[1]), **safer)
