"""The decision of an upgrade in words, and the samples that its old and its new model answer otherwise."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from ..errors import shortened
from ..measure.accuracy import Evaluation
from ..measure.unseen import RouteJudge, RouteScore

SIDE = 48  # pixels of a picture
TEXT = 200  # characters of a text
SHOWN = 50  # disagreements that are written
LOST = 3  # times at least that the old model gives an answer whose loss is said
MOST_LOST = 3  # such answers that are named
FAR = 50.0  # percent of agreement


def decision(judge: RouteJudge, rows: Sequence[RouteScore], chosen: str | None) -> str:
    old, base = rows[0], rows[1]
    target = "the target with a fitted head" if judge.bare else "the target as it is"
    if chosen is None:
        why = "every route is clearly worse" if judge.bare else "no route is clearly better"
        return f"keep the old model: {why} than {target} ({_said(base, old)})"
    row = next(row for row in rows if row.name == chosen)
    flips = "" if not row.flips else f"; {row.flips} held-out samples that were right are wrong now"
    said, before = _said(row, old), _said(base, old)
    gone = [f"no held-out sample is answered {name} any more (the old model: {n})" for name, n in _lost(judge, row)]
    more = "".join(f"; {text}" for text in gone[:MOST_LOST])
    more += f"; nor {len(gone) - MOST_LOST} other answers" if len(gone) > MOST_LOST else ""
    verdict = f"use the new model by the route {chosen}"
    if is_far(row.agreement):
        verdict = f"the best route is {chosen}, but its model is still far from the old one"
    return f"{verdict}: {said}, {target} {before}{flips}{more}"


def is_far(agreement: float | None) -> bool:
    """Whether a model with this agreement is no replacement of the old one."""
    return agreement is not None and agreement < FAR


def _lost(judge: RouteJudge, row: RouteScore) -> list[tuple[str, int]]:
    """The answers that the old model gives several times and this one never, the most frequent first."""
    if judge.writes or judge.answers is None or row.found is None or row.found.by_sample.predicted is None:
        return []
    both = (judge.answers, row.found.by_sample.predicted)
    old, new = ([_answer(judge, row.found, *one) for one in enumerate(found)] for found in both)
    return [(name, n) for name, n in Counter(old).most_common() if n >= LOST and name not in new]


def _answer(judge: RouteJudge, found: Evaluation, index: int, number: int) -> str:
    """The name of a class, or the answer that was chosen."""
    known = found.by_sample.classes if judge.data.choices is None else judge.data.choices[index]
    return str(known[number]) if known else str(number)


def _said(row: RouteScore, old: RouteScore) -> str:
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
    found, old = next((row.found for row in rows if row.name == chosen), None), judge.answers
    if found is None or found.by_sample.predicted is None or old is None:
        return ()
    new, bits = found.by_sample.predicted, found.by_sample.bits
    places = np.flatnonzero(new != old)
    if judge.writes and bits is not None:  # what the new model expects least comes first
        places = places[np.argsort(-bits[places], kind="stable")]
    return tuple(_disagreement(judge, int(at), found, {"old": old[at], "new": new[at]}) for at in places[:SHOWN])


def _disagreement(judge: RouteJudge, index: int, found: Evaluation, numbers: dict[str, Any]) -> Mapping[str, Any]:
    data = judge.data
    if judge.writes:
        chat = data.inputs[index]
        answer = chat[-1]["content"] if isinstance(chat, list) else (data.targets or ())[index]
        return {"old": answer, **shown(chat[:-1] if isinstance(chat, list) else chat)}
    if judge.raw.labels is not None:
        numbers["label"] = judge.raw.labels[index]
    return {key: _answer(judge, found, index, int(one)) for key, one in numbers.items()} | shown(data.inputs[index])


def shown(sample: Any) -> dict[str, str]:
    """`thumbnail`, a PNG as a data URI, or `text`."""
    if isinstance(sample, Image.Image):
        small, file = sample.convert("RGB"), io.BytesIO()
        small.thumbnail((SIDE, SIDE))
        small.save(file, "PNG", optimize=True)
        return {"thumbnail": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    if isinstance(sample, list):  # a chat
        sample = " / ".join(str(message.get("content")) for message in sample)
    return {"text": shortened(" / ".join(sample) if isinstance(sample, tuple) else sample, TEXT)}
