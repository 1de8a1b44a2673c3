"""The decision of an upgrade in words, and the samples that its old and its new model answer otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..measure.accuracy import Evaluation
from ..measure.routes import RouteJudge, RouteScore
from .samples import shown

SHOWN = 50  # disagreements that are written


def decision(rows: Sequence[RouteScore], chosen: str | None) -> str:
    """The decision in one sentence."""
    old, base = rows[0], rows[1]
    if chosen is None:
        return f"keep the old model: no route is clearly better than the target as it is ({_said(base, old)})"
    row = next(row for row in rows if row.name == chosen)
    flips = "" if not row.flips else f"; {row.flips} held-out samples that were right are wrong now"
    said, before = _said(row, old), _said(base, old)
    return f"use the new model by the route {chosen}: {said}, the target as it is {before}{flips}"


def _said(row: RouteScore, old: RouteScore) -> str:
    """A score in words."""
    if row.agreement is None:
        return f"{row.score:.3f} bits per character on held-out samples, the old model {old.score:.3f}"
    score = ""
    if row.score is not None:
        percent = row.own is None or row.score == row.own.accuracy
        score = f"{row.score:.1f} % right, " if percent else f"{row.score:.3f} bits per character, "
    said = f"{score}agrees with the old model on {row.agreement:.1f} %"
    bits = None if row.found is None or row.found.protocol != "perplexity" else row.found.bits_per_character
    return said if bits is None else f"{said} ({bits:.3f} bits per character of its answers)"


def disagreements(judge: RouteJudge, rows: Sequence[RouteScore], chosen: str | None) -> tuple[Mapping[str, Any], ...]:
    """Held-out samples that the old and the new model answer otherwise; without a new model, none."""
    row = next((row for row in rows if row.name == chosen), None)
    if row is None or row.found is None or row.found.predicted is None or judge.answers is None:
        return ()
    places = np.flatnonzero(row.found.predicted != judge.answers)
    if judge.writes and row.found.bits is not None:  # what the new model expects least comes first
        places = places[np.argsort(-row.found.bits[places], kind="stable")]
    return tuple(_disagreement(judge, int(index), row.found) for index in places[:SHOWN])


def _disagreement(judge: RouteJudge, index: int, found: Evaluation) -> Mapping[str, Any]:
    assert judge.answers is not None
    assert found.predicted is not None
    data = judge.data
    if judge.writes:
        chat = data.inputs[index]
        answer = chat[-1]["content"] if isinstance(chat, list) else (data.targets or ())[index]
        return {"old": answer, **shown(chat[:-1] if isinstance(chat, list) else chat)}
    known = found.classes if data.choices is None else data.choices[index]

    def said(number: int) -> str:
        return str(known[number]) if known else str(number)

    label = {} if judge.raw.labels is None else {"label": said(int(judge.raw.labels[index]))}
    old, new = int(judge.answers[index]), int(found.predicted[index])
    return {"old": said(old), "new": said(new), **label, **shown(data.inputs[index])}
