"""What a generator is asked: the layout, the rotation of seed samples, answers by name, passages."""

from __future__ import annotations

from collections import Counter

import pytest

from tuneport.errors import DataError
from tuneport.synthetic.prompts import MOST_SHOWN, Prompts

QUESTIONS = tuple(f"question {number} ?" for number in range(20))


def lines(prompt: str) -> list[str]:
    return [line[2:] for line in prompt.splitlines() if line.startswith("- ")]


def test_the_layout_of_a_list() -> None:
    (request,) = Prompts(("who?",)).requests(0, 1)
    assert request == "Examples:\n- who?\n-"
    (request,) = Prompts(("who?",), "Short questions:").requests(0, 1)
    assert request == "Short questions:\n- who?\n-"
    (request,) = Prompts((), "Short questions:").requests(0, 1)
    assert request == "Short questions:\n-"
    assert Prompts(("who?",)).stops == ("\n",)


def test_each_seed_is_shown_as_often_as_the_others() -> None:
    asked = Prompts(QUESTIONS, each=1).requests(0, 5 * 8)
    shown = Counter(line for request in asked for line in lines(request))
    assert set(shown) == set(QUESTIONS)
    assert max(shown.values()) - min(shown.values()) <= 3  # a seed is not repeated inside one prompt
    assert all(6 <= len(lines(request)) <= 8 for request in asked)
    assert len(set(asked)) == len(asked)


def test_one_prompt_asks_for_a_few_texts() -> None:
    single, few = Prompts(QUESTIONS, each=1), Prompts(QUESTIONS, each=3)
    assert few.requests(0, 9) == [request for request in single.requests(0, 3) for _ in range(3)]


def test_requests_depend_on_their_number_alone() -> None:
    prompts = Prompts(QUESTIONS, each=2, seed=4)
    assert prompts.requests(0, 6)[4:] == prompts.requests(4, 2)
    assert prompts.requests(0, 6) != Prompts(QUESTIONS, each=2, seed=5).requests(0, 6)


def test_long_seeds_are_shown_in_smaller_numbers() -> None:
    (request,) = Prompts(tuple(f"{number} " + "x" * (MOST_SHOWN // 3) for number in range(8))).requests(0, 1)
    assert len(lines(request)) == 2


def test_samples_of_several_lines_stand_between_marks() -> None:
    prompts = Prompts(("one\ntwo", "three"))
    (request,) = prompts.requests(0, 1)
    assert request in (
        "Examples:\n###\none\ntwo\n###\nthree\n###\n",
        "Examples:\n###\nthree\n###\none\ntwo\n###\n",
    )
    assert prompts.stops == ("\n###",)
    assert not prompts.one_line


def test_an_answer_is_asked_for_by_its_own_samples_or_by_its_name() -> None:
    prompts = Prompts(("where?", "how many?", "how far?"), answers=("place", "number", "number"))
    (request,) = prompts.requests(0, 1, "number")
    assert request.startswith('Examples with the answer "number":\n- how ')
    assert sorted(lines(request)) == ["how far?", "how many?"]
    (request,) = prompts.requests(0, 1, "person")
    assert sorted(lines(request)) == ["how far?", "how many?", "where?"]
    assert request.endswith('\n\nExamples with the answer "person":\n-')
    (request,) = Prompts((), "Short questions:").requests(0, 1, "person")
    assert request == 'Short questions:\n\nExamples with the answer "person":\n-'


def test_passages_begin_with_nothing() -> None:
    """Words of own samples would be repeated in what is taught, also those of samples that judge."""
    for seeds in ((), ("one two\nthree four five six seven eight", "a b")):
        assert set(Prompts(seeds, passages=True, each=1).requests(0, 4)) == {""}
    assert Prompts(passages=True).stops == ()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("  where is it ? ", "where is it ?"),
        ("- where is it ?", "where is it ?"),
        ("12. where is it ?", "where is it ?"),
        ("(3) where is it ?", "where is it ?"),
        ('"where is it ?"', "where is it ?"),
        ("“where is it ?”", "where is it ?"),
        ('"where" and "when" ?', '"where" and "when" ?'),
        ("1984 was a year .", "1984 was a year ."),
        ("3.14 is a number", "3.14 is a number"),
        ('"', '"'),
        ("-", "-"),
        ("", ""),
    ],
)
def test_a_sample_stands_without_the_marks_of_a_list(written: str, expected: str) -> None:
    prompts = Prompts(("who?",))
    assert prompts.sample(written) == expected


def test_marks_that_seeds_have_stay() -> None:
    prompts = Prompts(("1. who?", '"what?"'))
    for text in ("2. where?", '"where?"'):
        assert prompts.sample(text) == text
    passage = Prompts(passages=True)
    assert passage.sample('- "one"\n') == '- "one"'


def test_nothing_to_tell_is_refused() -> None:
    with pytest.raises(DataError, match="give seed samples, `describe`, or both"):
        Prompts()
    with pytest.raises(DataError, match="1 seed samples have 2 answers"):
        Prompts(("a",), answers=("b", "c"))
