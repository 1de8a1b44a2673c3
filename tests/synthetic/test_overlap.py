"""What written texts share with others, against plain counts."""

from __future__ import annotations

import random

from tuneport.synthetic.filters import longest_run, overlap_of, words_of


def slow_run(one: str, other: str) -> int:
    first, second = words_of(one), words_of(other)
    best = 0
    for i in range(len(first)):
        for j in range(len(second)):
            length = 0
            while first[i + length : i + length + 1] == second[j + length : j + length + 1] != ():
                length += 1
            best = max(best, length)
    return best


def test_the_longest_run_is_that_of_a_plain_search() -> None:
    chance = random.Random(0)
    texts, others = (
        [" ".join(chance.choice("abc") for _ in range(chance.randint(0, 12))) for _ in range(20)] for _ in range(2)
    )
    assert longest_run(texts, others) == max(slow_run(one, two) for one in texts for two in others)
    assert longest_run(texts[:1], ["z"]) == 0
    assert longest_run([], others) == 0


def test_runs_of_thirteen_are_found_across_case_and_marks() -> None:
    test = " ".join(f"w{number}" for number in range(20))
    near = "before, " + ", ".join(f"W{number}" for number in range(3, 16)) + "!"
    short = " ".join(f"w{number}" for number in range(12))
    assert overlap_of([near, short, "other"], [], [test])["test_overlap"] == 1 / 3
    assert overlap_of([near, short], ["w1 w2 x"], [test]) == {"longest_run": 2, "test_overlap": 0.5}
    assert overlap_of([], [], [test])["test_overlap"] == 0.0


def test_without_test_samples_nobody_knows_the_share() -> None:
    assert overlap_of(["a b c"], ["b c"]) == {"longest_run": 2, "test_overlap": None}
