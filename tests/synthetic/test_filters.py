"""Each filter drops what it says, for the reason that it says, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from tuneport.errors import TuneportError
from tuneport.synthetic.filters import BLOCK, Candidate, Filter, Floats, doubt, form, near_duplicates, probe, tell_apart
from tuneport.synthetic.prompts import Prompts

SEEDS = ("Who wrote the Iliad ?", "How far is it from Rome to Paris ?", "What is a chimera ?")


def reason(looks: Filter, text: str, finished: bool = True) -> str | None:
    return looks.reasons([Candidate(text, finished)], [])[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Who painted the blue door ?", None),
        ("  Who painted the blue door ?  ", None),
        ("Why ?", "too short"),
        ("", "too short"),
        ("Why " + "on earth " * 10 + "?", "too long"),
        ("Who painted\nthe blue door ?", "several lines"),
        ("Who painted the blue door", "other ending"),
        ("Who painted the blue door .", "other ending"),
        ("Examples: who painted it ?", "echo of the prompt"),
        ("Questions of the kind that people ask a quiz master ?", "echo of the prompt"),
        ("the the the the the the the the the the the ?", "repetition"),
        ("Who painted the <b>blue</b> door ?", "markup"),
        ("Is 3 < 4 and 5 > 2 ?", None),
        ("Who painted the \ufffd door ?", "unreadable"),
        ("Who painted the " + chr(0xD800) + " door ?", "unreadable"),
    ],
)
def test_the_form_is_that_of_the_seeds(text: str, expected: str | None) -> None:
    looks = form(Prompts(SEEDS, "Questions of the kind that people ask a quiz master:"))
    assert reason(looks, text) == expected


def test_unfinished_texts_are_dropped_unless_they_are_passages() -> None:
    assert reason(form(Prompts(SEEDS)), "Who painted the blue door ?", finished=False) == "unfinished"
    passage = "line of verse, and another,\n" * 3 + "the thing itself " + " ".join(map(str, range(30)))
    assert reason(form(Prompts((passage,), passages=True)), passage, finished=False) is None


def test_markup_is_kept_if_a_seed_has_some() -> None:
    assert reason(form(Prompts((*SEEDS, "What is a <b>tag</b> ?"))), "Who painted the <i>blue</i> door ?") is None


def test_an_ending_is_asked_for_only_if_all_seeds_have_one() -> None:
    looks = form(Prompts((*SEEDS, "Name a river")))
    assert reason(looks, "Who painted the blue door") is None
    assert reason(form(Prompts((), "Questions:")), "Who painted the blue door") is None


@cache
def pieces(text: str) -> frozenset[str]:
    return frozenset(text[at : at + 4] for at in range(len(text) - 3))


def jaccard(one: str, other: str) -> float:
    sets = [pieces(text) for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_near_duplicates_are_those_of_all_pairs() -> None:
    """Random words, each with changes of a few letters; the oracle compares every pair."""
    chance = random.Random(1)
    stems = ["".join(chance.choice("abcdef") for _ in range(30)) for _ in range(40)]

    def near(stem: str) -> str:
        at = chance.randrange(30)
        return stem[:at] + chance.choice("abcdef") + stem[at + chance.randint(0, 4) :]

    texts = [near(chance.choice(stems)) for _ in range(350)]
    seeds, kept, new = tuple(texts[:10]), texts[10:30], texts[30:]
    assert len(new) > BLOCK
    expected: list[str | None] = []
    known = [*seeds, *kept]
    for text in new:
        like = next((place for place, other in enumerate(known) if jaccard(text, other) >= 0.7), None)
        expected.append(None if like is None else "like a seed" if like < len(seeds) else "like another")
        known += [text] * (like is None)
    assert near_duplicates(seeds).reasons([Candidate(text) for text in new], kept) == expected
    assert {"like a seed", "like another", None} == set(expected)


def test_case_marks_and_blanks_make_no_new_text_and_another_name_does() -> None:
    same = near_duplicates(("What is the capital of France ?",))
    texts = ["what is  the capital of france?", "What is the capital of Spain ?", "?!", "?!"]
    found = same.reasons([Candidate(text) for text in texts], [])
    assert found == ["like a seed", None, None, "like another"]


def likelihood(by_text: dict[str, float]) -> object:
    def measure(texts: Sequence[str], answers: Sequence[str]) -> Floats:
        assert len(texts) == len(answers)
        return np.array([by_text[text] for text in texts])

    return measure


def test_doubt_is_measured_with_and_without_the_fine_tune() -> None:
    tuned = {"sure": -0.1, "unsure": -3.0, "unlearnt": -0.2, "nan": math.nan, "seed": -0.01}
    base = {"sure": -2.0, "unsure": -9.0, "unlearnt": -0.1, "nan": -1.0, "seed": -4.0}
    texts = [Candidate(text, answer="yes") for text in ("sure", "unsure", "unlearnt", "nan")]
    doubtful = doubt(["seed"] * 20, ["yes"] * 20, likelihood(tuned), likelihood(base))  # type: ignore[arg-type]
    assert doubtful.reasons(texts, []) == [None, "doubtful", "no gain by the fine-tune", "doubtful"]
    alone = doubt([], [], likelihood(tuned), likelihood(base))  # type: ignore[arg-type]
    assert alone.reasons(texts, []) == [None, "doubtful", "no gain by the fine-tune", "doubtful"]
    assert alone.reasons([], []) == []


def test_seeds_that_the_teacher_doubts_widen_the_bounds() -> None:
    tuned = {"sure": -0.1, "unsure": -3.0, **{f"s{n}": -4.0 for n in range(9)}}
    seeds = [f"s{n}" for n in range(9)]
    base = {text: 2 * found for text, found in tuned.items()}
    doubtful = doubt(seeds, [""] * 9, likelihood(tuned), likelihood(base))  # type: ignore[arg-type]
    assert doubtful.reasons([Candidate("unsure")], []) == [None]


def test_a_probe_tells_only_what_differs() -> None:
    """Of own samples of a normal distribution, three standard deviations are out of reach for texts like them."""
    chance = np.random.default_rng(0)
    own, same = chance.normal(size=(30, 40)), chance.normal(size=(60, 40))
    other = chance.normal(size=(40, 40)) + 4.0
    places = {f"s{n}": row for n, row in enumerate([*same, *other])}

    def features(texts: Sequence[str]) -> Floats:
        return np.array([places[text] for text in texts])

    found = probe(own, features).reasons([Candidate(text) for text in places], [])
    assert found[:60].count(None) >= 58
    assert found[60:] == ["told apart"] * 40
    assert probe(own[:9], features).reasons([Candidate(text) for text in places], []) == [None] * 100
    assert probe(own, features).reasons([Candidate("s1")], []) == [None]


def test_few_own_samples_with_many_features_are_not_told_from_texts_of_the_same_kind() -> None:
    chance = np.random.default_rng(1)
    found = tell_apart(chance.normal(size=(10, 300)), chance.normal(size=(100, 300)))
    assert found.shape == (100,)
    assert (found < 3).mean() >= 0.97
    with pytest.raises(TuneportError, match="not finite"):
        tell_apart(np.full((10, 2), np.nan), np.zeros((10, 2)))
