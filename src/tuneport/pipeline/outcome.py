"""What a transfer has come to, in words: gain, harm, or neither, and what to do next.

A change on the test split counts as a gain or as harm where chance makes it in fewer than one of twenty cases: by the
sign test on the samples that turned right and wrong, or by two standard errors of the bits per character.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..training.distill import STEPS
from .evaluation import Evaluated, Scored

Word = Literal["gain", "harm", "no clear change", "nothing moved", "not measured"]
FORMS = {"accuracy": (".1f", " %"), "bits per character": (".3f", ""), "fidelity": (".3f", "")}
MORE = f"--distill {STEPS}"  # what a user can add to the command


@dataclass(frozen=True)
class Outcome:
    """The outcome, the sentence that comes first everywhere, and a recommendation."""

    outcome: Word
    headline: str
    recommendation: str


def outcome_of(
    evaluated: Evaluated | None,
    *,
    scale: float,
    rule: str | None = None,
    head: bool = False,
    distilled: bool = False,
    reason: str = "",
) -> Outcome:
    """The outcome of a transfer.

    Args:
        evaluated: its scores on a test split, if there are any.
        scale: of the change.
        rule: that chose it, if one did.
        head: whether a head was fitted.
        distilled: whether a distillation changed the port.
        reason: why there are no scores.
    """
    same = scale == 0 and not head and not distilled
    zero = f"the {'chosen ' if rule else ''}scale is 0, and the output is the target as it was"
    advice, other = (NOTHING, f"more samples or {MORE}") if rule else (GIVEN, f"another scale, or {MORE}")
    alone = "; only the head changed: the scale is 0" if scale == 0 and head and not distilled else ""
    if evaluated is None:
        if same:
            return Outcome("nothing moved", f"nothing moved: {zero}; try {other}", advice)
        why = f": {reason}" if reason else ""
        return Outcome("not measured", f"the gain was not measured{why}{alone}", UNKNOWN)
    before, after = evaluated.scored["target"], evaluated.written
    form, unit = FORMS[evaluated.metric]
    kind = "held-out" if evaluated.on.held_out else "test"
    where = f"held-out samples of {evaluated.test.name}" if evaluated.on.held_out else evaluated.test.name
    what = f"{evaluated.metric} on {where}: {before.value:{form}} -> {after.value:{form}}{unit}"
    if same:
        headline = f"{evaluated.metric} on {where}: {before.value:{form}}{unit}, as before: nothing moved"
        return Outcome("nothing moved", f"{headline}; {zero}; try {other}", advice)
    change = evaluated.better(before, after)
    safer = "" if rule == "safe" or scale == 0 else "--scale safe, "
    words: dict[int, tuple[Word, str]] = {
        1: ("gain", "the transfer helped"),
        -1: ("harm", f"the transfer did harm; try {safer}more samples, or {MORE}"),
        0: (
            "no clear change",
            f"no clear change on {len(evaluated.test)} {kind} samples",
        ),
    }
    outcome, said = words[change]
    return Outcome(outcome, f"{what}: {said}{alone}", _recommended(evaluated, change, distilled))


NOTHING = f"Keep the old model: no strength of this change helps the target. {MORE} may, or fine-tuning."
GIVEN = "Leave the scale to the samples, or give one above 0: nothing was added to the target."
UNKNOWN = "Evaluate the output before you use it: tuneport evaluate needs data with a labelled test split."


def _recommended(evaluated: Evaluated, change: int, distilled: bool) -> str:
    form, unit = FORMS[evaluated.metric]

    def value(of: Scored) -> str:
        return f"{of.value:{form}}{unit}"

    after, old = evaluated.written, evaluated.scored.get("finetuned")
    on = "more texts" if evaluated.metric == "bits per character" else "labels"
    more = f"fine-tune the target on {on}" if distilled else f"add {MORE}, or fine-tune the port on {on}"
    if change < 0:
        keep = evaluated.scored["target"].words if old is None else f"the old model ({value(old)})"
        return f"Keep {keep}, or {more}: this output is worse than the target without it."
    if old is not None and evaluated.better(old, after) < 0:
        return f"Keep the old model while you can ({value(old)} against {value(after)}), or {more}."
    if change == 0:
        shows = "The held-out samples show" if evaluated.on.held_out else "The test split shows"
        return f"{shows} no gain: {more}, or give more samples."
    against = "" if old is None else f": the old model has {value(old)}"
    return f"Use {'the distilled port' if distilled else 'the port'}{against}."
