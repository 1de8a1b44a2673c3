"""Generators: a model in memory, and a server of our own on loopback that behaves well or badly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builders.completions import Server, serving
from builders.texts import SENTENCES
from builders.writers import writer
from tuneport.errors import TuneportError
from tuneport.models.generation import Sampling, generate_texts
from tuneport.synthetic.generators import LARGEST_ANSWER, LocalGenerator, ServerGenerator

LINE = Sampling(max_new_tokens=7, temperature=0.9, top_p=0.8, stops=("\n",), seed=5)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as state:
        yield state


def test_a_server_writes_in_the_order_of_the_prompts(server: Server) -> None:
    done: list[int] = []
    prompts = [f"prompt {number}" for number in range(20)] + ["prompt 3"]
    generator = ServerGenerator(server.url)
    found = generator.write(prompts, LINE, done.append)
    assert [written.text.rpartition(" ")[0].strip() for written in found] == prompts
    assert all(written.finished and written.log_likelihood is None for written in found)
    assert found[3].text != found[20].text  # another seed
    assert generator.write(prompts[19::-1], LINE) == found[19::-1]
    assert sum(done) == len(prompts)
    body = server.bodies[0]
    known = {"model": "tiny", "max_tokens": 7, "temperature": 0.9, "top_p": 0.8, "stop": ["\n"]}
    assert {key: body[key] for key in known} == known
    assert 0 <= body["seed"] < 2**31
    assert server.paths[:2] == ["/v1/models", "/v1/completions"]


def test_a_text_that_was_cut_is_unfinished(server: Server) -> None:
    (found,) = ServerGenerator(f"{server.url}/v1/", model="mine").write(["a"], Sampling(2))
    assert not found.finished
    assert server.bodies[0]["model"] == "mine"
    assert "stop" not in server.bodies[0]
    assert server.paths == ["/v1/completions"]


def test_a_failure_that_may_pass_is_tried_again(server: Server) -> None:
    server.script = [(503, b"loading", 0.0), (429, b"later", 0.0)]
    (found,) = ServerGenerator(server.url, "m", pause=0.0).write(["a"], LINE)
    assert found.text.startswith(" a ")
    assert len(server.bodies) == 3


def test_tries_are_bounded(server: Server) -> None:
    server.script = [(503, b"loading the model", 0.0)] * 9
    with pytest.raises(TuneportError, match=r"503.*loading the model.*Check that the server runs"):
        ServerGenerator(server.url, "m", pause=0.0).write(["a"], LINE)
    assert len(server.bodies) == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((400, b"no such model", 0.0), "400.*no such model"),
        ((302, b"", 0.0), "302"),
        ((200, b"<html>", 0.0), "not JSON"),
        ((200, b'{"choices": []}', 0.0), "expected choices with a text"),
        ((200, b'{"choices": [{"text": 3}]}', 0.0), "expected choices with a text"),
        ((200, b'"' + b"x" * LARGEST_ANSWER + b'"', 0.0), "longer than"),
    ],
)
def test_other_failures_are_one_line(server: Server, answer: Any, said: str) -> None:
    server.script = [answer]
    with pytest.raises(TuneportError, match=f"^[^\n]*{said}[^\n]*$"):
        ServerGenerator(server.url, "m").write(["a"], LINE)
    assert len(server.bodies) == 1
    assert server.paths == ["/v1/completions"]


def test_a_server_that_drips_is_given_up(server: Server) -> None:
    server.script = [(200, b" " * 1000, 0.05)]
    with pytest.raises(TuneportError, match=r"no whole answer in 0.3 seconds"):
        ServerGenerator(server.url, "m", seconds=0.3, tries=1).write(["a"], LINE)


def test_no_server_and_no_model_are_said(server: Server) -> None:
    server.script = [(200, b'{"data": []}', 0.0)]
    with pytest.raises(TuneportError, match=r"lists no model\. Check that the server has /v1/models"):
        ServerGenerator(server.url).write(["a"], LINE)
    with serving() as gone:
        url = gone.url
    with pytest.raises(TuneportError, match="writes no texts"):
        ServerGenerator(url, "m", pause=0.0).write(["a"], LINE)
    for wrong in ("file:///etc/hosts", "localhost:8000", "http://"):
        with pytest.raises(TuneportError, match="not the address of a server"):
            ServerGenerator(wrong)


def test_a_model_writes(tmp_path: Path) -> None:
    model = writer(tmp_path)
    prompts = [sentence[:12] for sentence in SENTENCES]
    assert LocalGenerator(model).write(prompts, LINE) == generate_texts(model, prompts, LINE)
    assert LocalGenerator(model).name == model.name
