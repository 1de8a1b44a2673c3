"""Collect written samples: ask, filter, let the teacher answer, top up thin answers, until there are enough.

Each round follows from the state after the round before it, and the state is saved: a run that was killed and resumed
gives the same bytes. What cannot bring the task is refused here, before any training.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from ..data.answers import shared_answers
from ..errors import DataError, first_of
from ..io.state import StateFile
from ..models.generation import Sampling
from ..types import Events
from .filters import DUPLICATES, PROBE, Candidate, Filter, form, near_duplicates, shares
from .generators import Generator
from .prompts import Prompts

FIRST = 256  # texts of the first round, which shows how many are dropped
SMALLEST = 32  # texts of a round
TOP_UPS = 3  # rounds for thin answers once there are enough texts
UNKNOWN = "answer"  # the filter of answers that are not among those to choose from
COLLAPSED = 0.9  # the share of one answer that is too much
FEW_ANSWERS = 0.25  # the share of answers that is too few
TOLD = 0.5  # the share of texts that a probe tells from own ones that is too much
RARE = "rare answer"

Answer = Callable[[Sequence[str]], Sequence[str]]


@dataclass(frozen=True)
class Goal:
    """How many texts are wanted, and how they are written."""

    count: int = 2000  # texts to keep
    rounds: int = 24  # the most rounds
    largest: int = 1000  # the most texts of one round
    max_new_tokens: int = 64  # of a text
    temperature: float = 1.0  # of the first round; it falls if most texts are dropped and rises if many are duplicates
    coolest: float = 0.7  # its lower bound
    hottest: float = 1.3  # its upper bound
    top_p: float = 0.95  # as in `Sampling`
    seed: int = 0  # of everything

    @property
    def least(self) -> int:
        """The fewest that are worth training on."""
        return max(self.count // 10, 1)


@dataclass
class Rounds:
    """All that a round needs to know of the rounds before it, and at the end what was collected.

    A text stands with its answer, which may be None. `dropped` has the number of texts that each filter dropped, by
    reason; `judged` those that each filter saw.
    """

    temperature: float
    rounds: int = 0
    asked: int = 0
    extra: int = 0  # rounds since there are enough texts
    kept: list[tuple[str, str | None]] = field(default_factory=list)
    spare: list[tuple[str, str | None]] = field(default_factory=list)  # had no place beside the thin answers
    judged: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(text for text, _ in self.kept)

    @property
    def answers(self) -> tuple[str, ...]:
        """The teacher's answers; none if it was not asked."""
        return tuple(given for _, given in self.kept if given is not None)

    @property
    def good(self) -> int:
        """The number of texts that passed all filters."""
        return len(self.kept) + len(self.spare)

    def count(self, name: str, reasons: Sequence[str | None]) -> None:
        """Count the texts that a filter saw and dropped."""
        self.judged[name] = self.judged.get(name, 0) + len(reasons)
        counts = Counter(self.dropped.get(name, {})) + Counter(why for why in reasons if why is not None)
        self.dropped[name] = dict(sorted(counts.items()))

    def lost(self) -> dict[str, int]:
        """The number of texts that each filter dropped."""
        return {name: sum(reasons.values()) for name, reasons in self.dropped.items()}

    def record(self) -> dict[str, Any]:
        """All but the texts, as plain values, and the share of each answer."""
        keys = ("asked", "rounds", "temperature", "judged", "dropped", "seconds")
        known = {key: getattr(self, key) for key in keys}
        return {**known, "texts": len(self.kept), "shares": shares(self.answers)}


def collect(
    generator: Generator,
    prompts: Prompts,
    goal: Goal,
    *,
    answer: Answer | None = None,
    filters: Sequence[Filter] | None = None,
    judges: Sequence[Filter] = (),
    state: StateFile | None = None,
    events: Events | None = None,
) -> Rounds:
    """Collect texts until there are enough or the rounds are used up.

    Args:
        answer: the teacher's answers to texts; None if texts are their own answers.
        filters: of texts; form and near duplicates unless given.
        judges: filters of texts with their answers: the teacher's doubt, a probe.
        state: where the state is saved after each round, and read from.

    Raises:
        DataError: what is known of the task cannot bring it.
    """
    filters = [form(prompts), near_duplicates(prompts.seeds)] if filters is None else filters
    names = [one.name for one in (*filters, *judges)]
    if state is not None:
        about = {"generator": generator.name, "prompts": asdict(prompts), "goal": asdict(goal), "filters": names}
        state = replace(state, conditions={**state.conditions, **about})
    now, events = _begin(goal, state), events or Events()
    events.plan(expected := _left(now, goal))
    while not _complete(now, goal, labels_of(now, prompts)):
        started, left, before = time.perf_counter(), _left(now, goal), now.lost()
        events.extend(left - expected)
        choices = labels_of(now, prompts)
        requests = _requests(now, prompts, goal, choices)
        expected = left - len(requests)
        sampling = Sampling(goal.max_new_tokens, now.temperature, goal.top_p, prompts.stops, _seed(goal, now.rounds))
        written = generator.write(requests, sampling, events.advance)
        new = [Candidate(prompts.sample(one.text), one.finished) for one in written]
        kept = [text for text, _ in (*now.kept, *now.spare)]
        for one in filters:
            new = _filtered(one, new, kept, now)
        if answer is not None:
            new = _answered(answer, new, prompts.choices, now)
        for one in judges:
            new = _filtered(one, new, kept, now)
        _place(now, new, goal, choices)
        lost = now.lost()
        dropped = {name: lost[name] - before.get(name, 0) for name in names}
        now.temperature = _temperature(now.temperature, goal, dropped, len(requests))
        now.rounds, now.asked = now.rounds + 1, now.asked + len(requests)
        now.extra += now.good >= goal.count
        now.seconds += time.perf_counter() - started
        if state is not None:
            state.save({}, asdict(now))
    now.kept = _without_rare(now, prompts)[: goal.count]
    check(now, goal, prompts)
    return now


def _begin(goal: Goal, state: StateFile | None) -> Rounds:
    """No round, or those of a killed run."""
    saved = None if state is None else state.load()
    if saved is None:
        return Rounds(goal.temperature)
    found = Rounds(**saved[1])
    found.kept, found.spare = ([(text, given) for text, given in rows] for rows in (found.kept, found.spare))
    return found


def check(collected: Rounds, goal: Goal, prompts: Prompts) -> None:
    """Raise a DataError if the texts cannot bring the task, with what was dropped and what to do."""
    count, given, choices = len(collected.texts), shares(collected.answers), prompts.choices
    told, seen = sum(collected.dropped.get(PROBE, {}).values()), collected.judged.get(PROBE, 0)
    more = "more seed samples" if prompts.seeds else "seed samples"
    advice = f"Give {more} (`data`), a sentence that says more (`describe`), or another `generator`."
    if told > TOLD * seen:
        raise DataError(
            f"a probe tells {told} of {seen} written texts from own samples at once: they are of another kind. {advice}"
        )
    if count < goal.least:
        reasons = Counter({f"{why} ({name})": n for name, d in collected.dropped.items() for why, n in d.items()})
        listed = first_of([f"{why} {n}" for why, n in reasons.most_common()], 5)
        raise DataError(
            f"only {count} of {collected.asked} written texts can be used, and {goal.least} are needed; dropped: "
            f"{listed}. {advice}"
        )
    own = max(shares(prompts.answers).values(), default=0.0)
    if len(choices) > 1 and (max(given.values()) > max(COLLAPSED, own) or len(given) < FEW_ANSWERS * len(choices)):
        listed = first_of([f"{name} {100 * share:.0f} %" for name, share in given.items()], 3)
        raise DataError(
            f"the teacher gives {count} written texts {len(given)} of {len(choices)} answers ({listed}): they do not "
            f"show the task. {advice}"
        )


def _complete(now: Rounds, goal: Goal, choices: Sequence[str]) -> bool:
    """Whether there are enough texts, or no hope of enough."""
    if len(now.kept) >= goal.count or now.rounds >= goal.rounds:
        return True
    if now.good >= goal.count and (not choices or now.extra > TOP_UPS):
        return True
    expected = now.good * (1 + (goal.rounds - now.rounds) * goal.largest / max(now.asked, 1))
    return now.rounds >= 3 and expected < goal.least


def _seed(goal: Goal, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{goal.seed} {number}".encode()).digest()[:6], "big")


def _lacking(now: Rounds, goal: Goal, choices: Sequence[str]) -> dict[str, int]:
    """How many texts each thin answer lacks: each has a right to half of an even share."""
    have = Counter(given for _, given in now.kept)
    wanted = goal.count // (2 * len(choices)) if len(choices) > 1 else 0
    return {choice: wanted - have[choice] for choice in choices if have[choice] < wanted}


def labels_of(now: Rounds, prompts: Prompts) -> tuple[str, ...]:
    """The answers to choose from; or, if most texts share theirs with others, the answers that several texts have.

    >>> prompts = Prompts(("a?",), answers=("yes",))
    >>> now = Rounds(1.0, kept=[(f"{n}?", "yes" if n % 2 else "no") for n in range(400)])
    >>> labels_of(now, prompts), labels_of(Rounds(1.0), prompts)
    (('yes', 'no'), ())
    """
    given = [answer for _, answer in (*now.kept, *now.spare) if answer is not None]
    if prompts.choices or len(given) < FIRST // 2:
        return prompts.choices
    return shared_answers([*prompts.answers, *given])


def _without_rare(now: Rounds, prompts: Prompts) -> list[tuple[str, str | None]]:
    """All texts, without those whose answer is no label although answers are labels."""
    found, labels = now.kept + now.spare, labels_of(now, prompts)
    if not labels:
        return found
    known = {*labels, *prompts.answers}
    now.count(RARE, [None if given in known else "given to few texts" for _, given in found])
    return [(text, given) for text, given in found if given in known]


def _left(now: Rounds, goal: Goal) -> int:
    """How many texts must still be written if as many are kept as before."""
    rate = max(now.good / now.asked, 0.05) if now.asked else 0.7
    return max(math.ceil((goal.count - len(now.kept)) / rate), SMALLEST)


def _requests(now: Rounds, prompts: Prompts, goal: Goal, choices: Sequence[str]) -> list[str]:
    """What is asked in this round: half of it answer by answer, if answers are thin."""
    missing = goal.count - len(now.kept)
    count = min(_left(now, goal), goal.largest if now.rounds else FIRST)
    lacking = {} if prompts.passages else _lacking(now, goal, choices)
    named = (count if missing <= sum(lacking.values()) else count // 2) if lacking else 0
    found = prompts.requests(now.asked, count - named)
    start = now.asked + count - named
    ends = [named * total // sum(lacking.values()) for total in accumulate(lacking.values())]
    if lacking and not prompts.choices:
        prompts = prompts.showing([(text, given) for text, given in now.kept if given is not None])
    for choice, (begin, end) in zip(lacking, pairwise([0, *ends]), strict=True):
        found += prompts.requests(start + begin, end - begin, choice)
    return found


def _filtered(one: Filter, new: Sequence[Candidate], kept: Sequence[str], now: Rounds) -> list[Candidate]:
    reasons = one.reasons(new, kept)
    now.count(one.name, reasons)
    return [candidate for candidate, why in zip(new, reasons, strict=True) if why is None]


def _answered(answer: Answer, new: Sequence[Candidate], choices: Sequence[str], now: Rounds) -> list[Candidate]:
    """The texts with the teacher's answers, without those that are not among the choices, or not ended."""
    given = answer([candidate.text for candidate in new]) if new else []
    wanted = [one in choices if choices else bool(one) for one in given]
    now.count(UNKNOWN, [None if fits else "not among the answers" if choices else "without an end" for fits in wanted])
    rows = zip(new, given, wanted, strict=True)
    return [replace(candidate, answer=one) for candidate, one, fits in rows if fits]


def _place(now: Rounds, new: Sequence[Candidate], goal: Goal, choices: Sequence[str]) -> None:
    """Keep texts as long as there is room beside what thin answers lack; the others are spare."""
    lacking = _lacking(now, goal, choices)
    reserved = sum(lacking.values())
    for candidate in new:
        thin = candidate.answer is not None and lacking.get(candidate.answer, 0) > 0
        fits = len(now.kept) + (0 if thin else reserved) < goal.count
        (now.kept if fits else now.spare).append((candidate.text, candidate.answer))
        if fits and thin:
            lacking[str(candidate.answer)] -= 1
            reserved -= 1


def _temperature(old: float, goal: Goal, dropped: Mapping[str, int], asked: int) -> float:
    """Cooler if most texts are unlike the seed samples, hotter if many are like each other."""
    twice = dropped.get(DUPLICATES, 0)
    unlike = sum(dropped.values()) - twice
    step = -0.1 if unlike > 0.5 * asked else 0.1 if twice > 0.3 * asked else 0.0
    return round(min(max(old + step, goal.coolest), goal.hottest), 3)
