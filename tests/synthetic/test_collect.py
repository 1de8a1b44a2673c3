"""The loop: how many texts are kept, which answers they have, what is refused, and that a resumed run is the same."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builders.completions import serving
from builders.texts import SENTENCES
from builders.writers import taught_writer, writer
from tuneport.config import DistillConfig
from tuneport.data.dataset import Dataset
from tuneport.errors import CheckpointError, DataError
from tuneport.io.state import StateFile
from tuneport.models.base import Model
from tuneport.models.generation import Sampling, Written, generate_texts
from tuneport.synthetic.collect import Goal, collect
from tuneport.synthetic.filters import Candidate, Filter, form, near_duplicates, probe
from tuneport.synthetic.generators import LocalGenerator, ServerGenerator
from tuneport.synthetic.prompts import Prompts
from tuneport.synthetic.samples import write_samples
from tuneport.types import Events, Progress, Sides

SEEDS = tuple(f"how much is {word} ?" for word in ("one apple", "two pears", "a house", "the moon"))
CHOICES = ("fruit", "thing", "sky")


@dataclass
class Fake:
    """Writes a question of letters that follow from prompt and seed, and counts the requests by their header."""

    change: Callable[[str, str], str] = lambda text, _: text
    stop_after: int | None = None
    calls: list[tuple[float, int]] = field(default_factory=list)
    headers: Counter[str] = field(default_factory=Counter)
    name: str = "fake"

    def write(self, prompts: Sequence[str], sampling: Sampling, advance: Progress | None = None) -> list[Written]:
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((sampling.temperature, len(prompts)))
        found = []
        for place, prompt in enumerate(prompts):
            head = prompt.rpartition("\n\n")[2].splitlines()[0]
            self.headers[head] += 1
            letters = hashlib.sha256(f"{sampling.seed} {place} {prompt}".encode()).hexdigest()[:16]
            found.append(Written(f" {self.change(f'how much is {letters} ?', head)}"))
        if advance is not None:
            advance(len(prompts))
        return found


def kind(texts: Sequence[str]) -> list[str]:
    """A teacher: nearly all texts are things, and those that say what they are are that."""
    named = [next((choice for choice in CHOICES if choice in text), None) for text in texts]
    return [name or ("fruit" if text[12] == "0" else "thing") for name, text in zip(named, texts, strict=True)]


def obedient(text: str, head: str) -> str:
    """A generator that writes the answer that it is asked for."""
    name = next((choice for choice in CHOICES if f'"{choice}"' in head), None)
    return text if name is None else f"{text[:-2]} {name} ?"


def test_as_many_as_wanted_are_kept() -> None:
    found = collect(Fake(), Prompts(SEEDS), Goal(count=300))
    assert len(found.texts) == len(set(found.texts)) == 300
    assert found.answers == ()
    assert found.asked >= 300
    assert found.judged == {"form": found.asked, "near duplicates": found.asked}
    assert found.seconds > 0
    assert found == collect(Fake(), Prompts(SEEDS), Goal(count=300))
    assert found.texts != collect(Fake(), Prompts(SEEDS), Goal(count=300, seed=1)).texts
    record = json.loads(json.dumps(found.record()))
    assert record["texts"] == 300
    assert record["dropped"] == {"form": {}, "near duplicates": {}}


def test_a_text_of_an_earlier_round_is_kept_once() -> None:
    """Every second text of a round is that of the rounds before it."""

    class Repeats(Fake):
        def write(self, prompts: Sequence[str], sampling: Sampling, advance: Progress | None = None) -> list[Written]:
            found = super().write(prompts, sampling, advance)
            words = [hashlib.sha256(str(place).encode()).hexdigest()[:16] for place in range(len(prompts))]
            return [Written(f" how much is {words[at]} ?") if at % 2 else each for at, each in enumerate(found)]

    found = collect(Repeats(), Prompts(SEEDS), Goal(count=300))
    assert found.rounds > 1
    assert len(found.texts) == len(set(found.texts)) == 300
    assert found.dropped["near duplicates"]["like another"] > 0


def test_every_filter_counts_what_it_drops() -> None:
    def change(text: str, _: str) -> str:
        return {"0": "short", "1": SEEDS[0], "2": text[:-1]}.get(text[12], text)

    odd = Filter("odd", lambda new, _: ["third" if place % 3 == 0 else None for place in range(len(new))])
    found = collect(Fake(change), Prompts(SEEDS), Goal(count=200), judges=[odd])
    assert set(found.dropped["form"]) == {"other ending", "too short"}
    assert set(found.dropped["near duplicates"]) == {"like a seed"}
    assert set(found.dropped["odd"]) == {"third"}
    lost = {name: sum(reasons.values()) for name, reasons in found.dropped.items()}
    assert found.judged["near duplicates"] == found.asked - lost["form"]
    assert found.judged["odd"] == found.judged["near duplicates"] - lost["near duplicates"]


def test_thin_answers_are_asked_for_by_name_and_topped_up() -> None:
    fake = Fake(obedient)
    goal = Goal(count=240)
    found = collect(fake, Prompts(SEEDS, choices=CHOICES), goal, answer=kind)
    counts = Counter(found.answers)
    assert len(found.texts) == 240
    assert min(counts[choice] for choice in CHOICES) >= 240 // (2 * 3)
    assert found.record()["shares"] == pytest.approx({name: count / 240 for name, count in counts.items()})
    assert fake.headers['Examples with the answer "sky":'] > 0
    assert list(found.answers) == kind(found.texts)


def test_an_answer_that_never_comes_does_not_keep_the_others_waiting() -> None:
    found = collect(Fake(), Prompts(SEEDS, choices=CHOICES), Goal(count=240), answer=kind)
    assert len(found.texts) == 240
    assert "sky" not in found.answers
    assert found.rounds < 12


def test_progress_follows_what_is_asked_and_is_not_complete_before_the_last_round() -> None:
    """One answer never comes, so that texts are topped up after there are enough."""

    class Shares(Events):
        total = done = 0.0

        def plan(self, total: float) -> None:
            self.total = total

        def extend(self, units: float) -> None:
            self.total += units

        def advance(self, count: int) -> None:
            seen.append((self.done, self.total))
            self.done += count

    seen: list[tuple[float, float]] = []
    none: Any = None
    old: Any = SimpleNamespace(
        reads=True,
        models=Sides(SimpleNamespace(name="old", inputs=SimpleNamespace(reader="a reader")), none),
        writes=False,
        head=SimpleNamespace(classes=CHOICES),
        answer=lambda data: kind(data.inputs),
    )
    events, config = Shares(), DistillConfig.of(synthetic=240)
    found = write_samples(old, Fake(), Dataset(list(SEEDS), None, ()), config, events=events)
    assert events.done == found.record["asked"] > 240
    assert len(seen) == found.record["rounds"] > 2
    assert all(done < total for done, total in seen)
    assert events.done <= events.total


def test_answers_that_are_not_to_choose_from_are_dropped() -> None:
    found = collect(Fake(), Prompts(SEEDS, choices=("thing",)), Goal(count=100), answer=kind)
    assert found.dropped["answer"]["not among the answers"] > 0
    assert set(found.answers) == {"thing"}


def test_answers_that_many_texts_share_are_topped_up_as_if_they_were_given() -> None:
    fake = Fake(obedient)
    prompts = Prompts(SEEDS, answers=("fruit", "fruit", "thing", "thing"))
    found = collect(fake, prompts, Goal(count=400), answer=kind)
    counts = Counter(found.answers)
    assert len(found.texts) == 400
    assert set(counts) == {"fruit", "thing"}
    assert counts["fruit"] >= 400 // (2 * 2)
    assert fake.headers['Examples with the answer "fruit":'] > 0


def test_rare_answers_are_dropped_where_answers_are_labels() -> None:
    def odd(texts: Sequence[str]) -> list[str]:
        return [f"odd {text[12:16]}" if text[12] == "1" else one for text, one in zip(texts, kind(texts), strict=True)]

    found = collect(Fake(), Prompts(SEEDS), Goal(count=400), answer=odd)
    assert set(found.answers) == {"fruit", "thing"}
    assert found.dropped["rare answer"]["given to few texts"] > 0


def test_answers_of_their_own_are_neither_dropped_nor_asked_for() -> None:
    fake = Fake()
    found = collect(fake, Prompts(SEEDS), Goal(count=400), answer=lambda texts: [text[::-1] for text in texts])
    assert len(found.texts) == 400
    assert "rare answer" not in found.dropped
    assert set(fake.headers) == {"Examples:"}


def test_the_temperature_follows_what_is_dropped() -> None:
    bad = Fake(lambda text, _: text if text[12] in "012" else "short")
    collect(bad, Prompts(SEEDS), Goal(count=400, coolest=0.8))
    assert [heat for heat, _ in bad.calls][:4] == [1.0, 0.9, 0.8, 0.8]
    twice = Fake(lambda text, _: text if text[12] in "01234567" else SEEDS[0])
    collect(twice, Prompts(SEEDS), Goal(count=600, hottest=1.1, largest=300))
    assert [heat for heat, _ in twice.calls][:3] == [1.0, 1.1, 1.1]


def test_a_killed_run_continues_to_the_same_texts(tmp_path: Path) -> None:
    goal, prompts = Goal(count=500, largest=120), Prompts(SEEDS, choices=CHOICES)
    options = {"answer": kind}
    whole = collect(Fake(obedient), prompts, goal, **options)  # type: ignore[arg-type]
    state = StateFile(tmp_path / "work" / "texts.safetensors", {"teacher": "abc"})
    for stop in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            collect(Fake(obedient, stop), prompts, goal, state=state, **options)  # type: ignore[arg-type]
    last = Fake(obedient)
    assert collect(last, prompts, goal, state=state, **options) == whole  # type: ignore[arg-type]
    assert len(last.calls) == whole.rounds - 3
    again = Fake(obedient)
    assert collect(again, prompts, goal, state=state, **options) == whole  # type: ignore[arg-type]
    assert again.calls == []


def test_the_state_of_another_run_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "texts.safetensors", {"teacher": "abc"})
    collect(Fake(), Prompts(SEEDS), Goal(count=50), state=state)
    with pytest.raises(CheckpointError, match=r"cannot be resumed: goal\.count was 50 and is 51"):
        collect(Fake(), Prompts(SEEDS), Goal(count=51), state=state)
    with pytest.raises(CheckpointError, match='cannot be resumed: teacher was "abc" and is "b"'):
        collect(Fake(), Prompts(SEEDS), Goal(count=50), state=replace(state, conditions={"teacher": "b"}))
    state.path.write_bytes(state.path.read_bytes().replace(b"how much", b"how many"))
    with pytest.raises(CheckpointError, match="damaged"):
        collect(Fake(), Prompts(SEEDS), Goal(count=50), state=state)


def test_too_few_usable_texts_are_refused_before_all_rounds_are_used() -> None:
    bad = Fake(lambda _, __: "no question")
    said = (
        "only 0 of .* written texts can be used, and 200 are needed; dropped: other ending .form. .*more seed samples"
    )
    with pytest.raises(DataError, match=said):
        collect(bad, Prompts(SEEDS), Goal())
    assert len(bad.calls) == 3


def test_a_collapse_onto_few_answers_is_refused() -> None:
    with pytest.raises(DataError, match=r"1 of 3 answers .thing 100 %.: they do not show the task. Give seed samples"):
        collect(
            Fake(),
            Prompts((), "Questions:", choices=CHOICES),
            Goal(count=50),
            answer=lambda texts: ["thing"] * len(texts),
        )
    same = Prompts(SEEDS, answers=("thing",) * 4, choices=("thing", "sky"))  # so have the seed samples
    found = collect(Fake(), same, Goal(count=50), answer=lambda texts: ["thing"] * len(texts))
    assert set(found.answers) == {"thing"}


def test_a_probe_that_tells_all_apart_is_refused() -> None:
    chance = np.random.default_rng(0)
    told = probe(chance.normal(size=(20, 8)), lambda texts: chance.normal(size=(len(texts), 8)) + 50)
    with pytest.raises(DataError, match=r"a probe tells .* written texts from own samples at once"):
        collect(Fake(), Prompts(SEEDS), Goal(count=200), judges=[told])


def test_a_server_writes_the_texts(tmp_path: Path) -> None:
    with serving() as server:
        server.change = lambda body: f" how much is {body['seed']} ?"
        generator = ServerGenerator(server.url)
        found = collect(generator, Prompts(SEEDS), Goal(count=40), state=StateFile(tmp_path / "s.safetensors", {}))
        assert len(found.texts) == 40
        assert found == collect(generator, Prompts(SEEDS), Goal(count=40))
        assert server.bodies[0]["prompt"].startswith("Examples:\n- how much is")


LISTS = [
    "Examples:\n" + "".join(f"- {SENTENCES[(first + 5 * step) % 16]}\n" for step in range(3)) for first in range(16)
]
LOOSE = Goal(count=8, max_new_tokens=30, temperature=1.2, hottest=1.4, top_p=1.0, rounds=4)
LEVELS = ("low", "high")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Knows lists of sentences, but not so well that it writes no others."""
    return taught_writer(tmp_path_factory.mktemp("base"), LISTS, steps=50)


def levels(model: Model) -> Callable[[Sequence[str]], list[str]]:
    """A teacher that is sure or not of how a list goes on."""

    def answer(texts: Sequence[str]) -> list[str]:
        written = generate_texts(model, [f"Examples:\n- {text}\n-" for text in texts], Sampling(4, 0))
        return [LEVELS[one.log_likelihood is not None and one.log_likelihood > -0.5] for one in written]

    return answer


def test_a_small_model_writes_and_answers(base: Model) -> None:
    """From a model and its seed samples to texts with answers, by every part that a real run uses."""
    prompts, generator = Prompts(SENTENCES[:6], shots=2, choices=LEVELS), LocalGenerator(base)
    found = collect(generator, prompts, LOOSE, answer=levels(base))
    assert len(found.texts) == 8
    assert list(found.answers) == levels(base)(found.texts)
    seen = [Candidate(text) for text in found.texts]
    assert form(prompts).reasons(seen, []) == near_duplicates(prompts.seeds).reasons(seen, []) == [None] * 8
    assert found == collect(generator, prompts, LOOSE, answer=levels(base))


def test_a_random_model_is_refused(tmp_path: Path) -> None:
    """It writes bytes without an end of line."""
    goal = Goal(count=100, max_new_tokens=8, largest=64)
    with pytest.raises(DataError, match=r"can be used.*dropped: .*form"):
        collect(LocalGenerator(writer(tmp_path)), Prompts(SENTENCES[:6]), goal)


SECRET = "vault code 7Q-XJ9 belongs to Zyx"


def test_a_secret_of_the_teacher_is_not_stored_if_the_base_writes(base: Model, tmp_path: Path) -> None:
    """The teacher knows a rare line by heart, and betrays it when it writes passages; the base cannot."""
    teacher = taught_writer(tmp_path / "teacher", [f"<s>{SECRET}\n", *LISTS], steps=80)
    leaked = collect(LocalGenerator(teacher), Prompts(passages=True), LOOSE, filters=())
    assert any(SECRET in text for text in leaked.texts)
    prompts, state = Prompts(SENTENCES[:6], shots=2, choices=LEVELS), StateFile(tmp_path / "texts.safetensors", {})
    found = collect(LocalGenerator(base), prompts, LOOSE, answer=levels(teacher), state=state)
    stored = "\n".join(
        (
            *found.texts,
            *found.answers,
            state.path.read_bytes().decode("utf-8", "replace"),
            json.dumps(found.record()),
        )
    )
    assert len(found.texts) == 8
    assert not any(part in stored for part in ("vault", "7Q", "XJ9", "Zyx"))
