"""What a generator is asked: a header and a list of seed samples that it continues, or nothing for a passage.

Eight seed samples are shown at a time, for a few texts; they rotate, so that each is shown as often as the others.
Where there are answers to choose from, a generator can be asked for samples with one answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ..errors import DataError

HEADER = "Examples:"
NAMED = "Examples with the answer"
MARK = "###"  # before each sample, if samples have several lines
MOST_SHOWN = 6000  # characters of the samples in one prompt
LISTED = re.compile(r"(?:[-*•]|\(?\d{1,3}[.):])\s+(?=\S)")  # the mark of a list before a text
QUOTES = {'"': '"', "'": "'", "“": "”", "‘": "’", "«": "»"}
CONTRAST = 2  # other answers that are shown before one that has no sample of its own
FEW = 3  # samples of each


@dataclass(frozen=True)
class Prompts:
    """All that a generator may be told of a task."""

    seeds: tuple[str, ...] = ()  # seed samples, without their answers
    describe: str = ""  # one sentence about the samples
    answers: tuple[str, ...] = ()  # the teacher's answer to each seed sample, if it gives any
    passages: bool = False  # the teacher writes passages itself, from nothing
    shots: int = 8  # seed samples in one prompt
    each: int = 4  # texts that are asked for with one prompt, which a model reads once
    seed: int = 0  # of their order
    choices: tuple[str, ...] = ()  # the answers to choose from; others are dropped, and thin ones are asked for by name

    def __post_init__(self) -> None:
        if not self.passages and not self.seeds and not self.describe.strip():
            raise DataError("a generator must be told what to write: give seed samples, `describe`, or both.")
        if self.answers and len(self.answers) != len(self.seeds):
            raise DataError(f"{len(self.seeds)} seed samples have {len(self.answers)} answers; expected one for each.")

    @property
    def one_line(self) -> bool:
        """Whether each sample is one line."""
        return not self.passages and not any("\n" in seed.strip() for seed in self.seeds)

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends a text, besides the end of the model's turn."""
        return () if self.passages else ("\n",) if self.one_line else (f"\n{MARK}",)

    @property
    def headers(self) -> tuple[str, ...]:
        """The lines of a prompt that are no samples."""
        named = (NAMED,) if self.answers else ()
        return tuple(line for line in (self.describe.strip(), HEADER, *named, MARK) if line)

    def sample(self, text: str) -> str:
        """The sample that a generator wrote, without the mark of a list and without quotes around it.

        >>> Prompts(("who?",)).sample(' 2. "where?"')
        'where?'
        """
        sample = text.strip()
        if self.passages:
            return sample
        if not any(LISTED.match(seed.strip()) for seed in self.seeds):
            sample = sample[found.end() :] if (found := LISTED.match(sample)) else sample
        close = QUOTES.get(sample[:1])
        quoted = close is not None and len(sample) > 1 and sample.endswith(close) and close not in sample[1:-1]
        if quoted and not any(seed.strip().startswith(sample[0]) for seed in self.seeds):
            sample = sample[1:-1].strip()
        return sample

    def showing(self, samples: Sequence[tuple[str, str]]) -> Prompts:
        """The same with further samples to show, each with its answer."""
        known = [*zip(self.seeds, self.answers, strict=False), *samples]
        return replace(self, seeds=tuple(text for text, _ in known), answers=tuple(answer for _, answer in known))

    def requests(self, first: int, count: int, answer: str | None = None) -> list[str]:
        """The prompts from number `first` on; with `answer`, for samples with this answer."""
        return [self._request(number // self.each, answer) for number in range(first, first + count)]

    def _request(self, number: int, answer: str | None) -> str:
        if self.passages:  # words of own ones would be learnt by heart, also those of samples that judge
            return ""
        if answer is None:
            blocks = [(self.describe.strip() or HEADER, self._shown(self.seeds, number, self.shots))]
        else:
            blocks = [(f'{NAMED} "{name.strip()}":', shown) for name, shown in self._answered(number, answer)]
            blocks = [(self.describe.strip(), []), *blocks] if self.describe.strip() else blocks
        return self._layout(blocks)

    def _answered(self, number: int, answer: str) -> list[tuple[str, list[str]]]:
        """Samples with this answer; if there are none, samples with two other answers, and the name of this one."""
        pools: dict[str, list[str]] = {}
        for seed, given in zip(self.seeds, self.answers, strict=False):
            pools.setdefault(given, []).append(seed)
        if own := pools.get(answer):
            return [(answer, self._shown(own, number, self.shots))]
        others = sorted(pools)
        places = [(number + step) % len(others) for step in range(min(CONTRAST, len(others)))]
        return [*((others[p], self._shown(pools[others[p]], number, FEW)) for p in places), (answer, [])]

    def _shown(self, pool: Sequence[str], number: int, shots: int) -> list[str]:
        """The samples of the request of this number: the pool is dealt out in a new order each time it is used up."""
        if not pool:
            return []
        shots = min(shots, len(pool))
        places = range(number * shots, (number + 1) * shots)
        orders = {turn: _order(self.seed, turn, len(pool)) for turn in {place // len(pool) for place in places}}
        dealt = [pool[orders[place // len(pool)][place % len(pool)]].strip() for place in places]
        shown: list[str] = []
        for sample in dict.fromkeys(dealt):
            if shown and sum(map(len, shown)) + len(sample) > MOST_SHOWN:
                break
            shown.append(sample)
        return shown

    def _layout(self, blocks: Sequence[tuple[str, Sequence[str]]]) -> str:
        """Headers with their samples, and the begin of the next sample."""
        begin, gap = ("\n-", " ") if self.one_line else (f"\n{MARK}\n", "")
        return "\n\n".join(f"{head}{''.join(f'{begin}{gap}{s}' for s in shown)}" for head, shown in blocks) + begin


@lru_cache(maxsize=64)
def _order(seed: int, turn: int, size: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(f"{seed} {turn}").shuffle(order)
    return tuple(order)
