"""What upgrades and distillations read beside models, for fuzz.py: prompts, further samples, servers, saved texts."""

from __future__ import annotations

import copy
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fuzz_spoil import ODD_VALUES, spoil_bytes, spoil_header, spoil_json, spoil_lines, spoil_value
from PIL import Image

from tuneport.config import UpgradeConfig
from tuneport.data.dataset import as_prompts
from tuneport.data.tasks import read_data
from tuneport.io.state import StateFile
from tuneport.models.generation import Sampling, Written
from tuneport.models.open import open_model
from tuneport.pipeline.lessons import read_extra
from tuneport.synthetic.collect import Goal, collect
from tuneport.synthetic.filters import form, near_duplicates
from tuneport.synthetic.generators import ServerGenerator
from tuneport.synthetic.prompts import Prompts
from tuneport.synthetic.samples import Frame

SEEDS = ("a small cat", "a tall dog", "an old hen")
ODD_TEXTS = (
    "", " ", "\n", "\x00", "\x1b[2J", "\u202e", "\ud800", "{text}", "{", "%s", "a" * 5000, "\U0001f600", "'\"`$(x)",
    "../x", "Examples:\n- ", "```", "\ufeff", "e\u0301" * 50, "\r\n\t", "file:///etc/passwd", "http://127.0.0.1:1/v1",
)  # fmt: skip
GOOD = {"choices": [{"text": " a red hen", "finish_reason": "stop"}], "data": [{"id": "m"}]}
Make = Callable[..., Any]


def lessons(root: Path, kind: Make) -> Iterator[Any]:
    """The kinds, made by `kind`; good files are written under `root`, which has a model in `bert`."""
    home = root / "lessons"
    (home / "extra" / "cat").mkdir(parents=True)
    (home / "prompts.txt").write_text("\n".join(SEEDS))
    yield kind("lesson: prompts as lines", "lessons/prompts.txt", spoil_bytes, look_at_prompts)
    rows = [{"prompt": f"Animal: {text}\nSound:"} for text in SEEDS]
    (home / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield kind("lesson: bare prompts", "lessons/prompts.jsonl", spoil_lines, look_at_prompts)
    chats = [{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}]} for text in SEEDS]
    (home / "asked.jsonl").write_text("\n".join(map(json.dumps, chats)))
    yield kind("lesson: chats without answers", "lessons/asked.jsonl", spoil_lines, look_at_prompts)
    (home / "extra.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SEEDS))
    yield kind("lesson: extra texts", "lessons/extra.jsonl", spoil_lines, look_at_extra)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(home / "extra" / "cat" / name)
    yield kind("lesson: extra images", "lessons/extra/cat/a.png", spoil_bytes, look_at_extra)
    (home / "answer").write_bytes(http(json.dumps(GOOD)))
    model = open_model(root / "bert")
    yield kind("lesson: answers of a server", "lessons/answer", spoil_answer, lambda path: ask_server(path, model))
    state, prompts, goal = StateFile(home / "texts.safetensors", {"a": 1}), Prompts(SEEDS), Goal(6, rounds=2)
    collect(Writer(), prompts, goal, state=state)
    yield kind("lesson: texts of a killed run", "lessons/texts.safetensors", spoil_header, continue_texts)
    given = {"describe": "animals", "template": "Animal: {text}", "generator_url": "http://127.0.0.1:1", "synthetic": 8}
    (home / "words.json").write_text(json.dumps(given))
    yield kind("lesson: a sentence and options", "lessons/words.json", odd_words, take_words)


def look_at_prompts(path: Path) -> None:
    """Read samples as an upgrade does: the frame, the texts, and the prompts of a template."""
    data = read_data(path, "train", labelled=False)
    frame = Frame.of(data)
    for sample in data.inputs[:3]:
        frame.sample(frame.text(sample))
    as_prompts(data, "Animal: {text}\nSound:")


def look_at_extra(path: Path) -> None:
    texts = path.suffix == ".jsonl"
    place = path if texts else path.parents[1]
    own = read_data(path.with_name("prompts.txt") if texts else place, "train", labelled=False)
    config = UpgradeConfig.of(extra=str(place), describe="x")
    found = read_extra(SimpleNamespace(writes=False), own, config, None)  # type: ignore[arg-type]
    for index in range(len(found or ())):
        found.inputs[index]


class Writer:
    """Writes the same few texts again and again."""

    name = "writer"

    def write(self, prompts: Sequence[str], sampling: Sampling, advance: Any = None) -> list[Written]:
        """A text for each prompt."""
        del sampling, advance
        return [
            Written(f" a {'very ' * (place % 5)}young cow {place % 7}", finished=True) for place in range(len(prompts))
        ]


def continue_texts(path: Path) -> None:
    collect(Writer(), Prompts(SEEDS), Goal(6, rounds=2), state=StateFile(path, {"a": 1}))


def odd_words(content: bytes, choose: random.Random) -> bytes:
    """Options with odd texts in them."""
    if choose.random() < 0.3:
        return spoil_json(content, choose)
    values = json.loads(content)
    for key in choose.sample(sorted(values), choose.randint(1, 3)):
        texts = [choose.choice(ODD_TEXTS) for _ in range(choose.randint(1, 3))]
        values[key] = "".join(texts) if choose.random() < 0.8 else choose.choice(ODD_VALUES)
        if key == "template" and isinstance(values[key], str) and choose.random() < 0.7:
            values[key] += "{text}"
    return json.dumps(values).encode()


def take_words(path: Path) -> None:
    """Check options as the command line does, and ask for texts with them."""
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    if not isinstance(values, dict):
        return
    known = {item.name: value for item, _ in UpgradeConfig.options() if (value := values.get(item.name)) is not None}
    texts = {name: value for name, value in known.items() if isinstance(value, str) == (name != "synthetic")}
    config = UpgradeConfig.of(**texts)
    config.check_known(None)
    if config.generator_url is not None:
        ServerGenerator(config.generator_url)
    prompts = Prompts(SEEDS, config.describe or "")
    frame = Frame.of(read_data(path.with_name("prompts.txt"), "train", labelled=False), config.template)
    assert all(prompts.requests(0, 3))
    frame.text(frame.sample(prompts.sample(" a red hen")))
    collect(Writer(), prompts, Goal(6, rounds=2))


def http(body: str, status: str = "200 OK", *more: str) -> bytes:
    """An answer as a server sends it."""
    content = body.encode("utf-8", "surrogatepass")
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *more, "Connection: close", "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogatepass") + content


def spoil_answer(content: bytes, choose: random.Random) -> bytes:
    """An answer that is damaged, huge, of another kind, for elsewhere, or slow (then it begins with "slow")."""
    good = copy.deepcopy(GOOD)
    what = choose.randrange(8)
    if what == 0:
        return spoil_bytes(content, choose)
    if what == 1:
        reason = choose.choice(("x" * 3000, "a\tb", "\x1b[2J", "no", ""))
        number = choose.choice((301, 302, 307, 308, 400, 404, 500, 503, 204, 99))
        place = choose.choice(("/v1/elsewhere", "http://192.0.2.1/", "file:///etc/passwd", ""))
        return http(choose.choice(ODD_TEXTS), f"{number} {reason}", f"Location: {place}")
    if what == 2:
        return http(
            choose.choice(("[" * 10**5, "{" * 10, "1e999", "NaN", '"' + "a" * 2**21 + '"', "[" + "1," * 10**6 + "1]"))
        )
    if what == 3 and choose.random() < 0.15:
        return b"slow" + http(json.dumps(good))
    if what == 4:
        length = choose.choice((0, 1, 10**9, -1))
        return http(json.dumps(good)).replace(b"Content-Length: ", f"Content-Length: {length}\r\nX: ".encode())
    if what == 5:
        good["choices"][0]["text"] = choose.choice(ODD_TEXTS)
        return http(json.dumps(good))
    if what == 6:
        return http(
            '5\r\n{"a":\r\n' + choose.choice(("zz\r\n", "ffffffff\r\nx", "0\r\n\r\n")),
            "200 OK",
            "Transfer-Encoding: chunked",
        )
    return http(json.dumps(spoil_value(good, choose)))


def ask_server(path: Path, model: Any) -> None:
    """Let a server on loopback give this answer to everything, and read, filter and encode what it writes."""
    content = path.read_bytes()
    slow = content.startswith(b"slow")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        ended = threading.Event()
        thread = threading.Thread(target=_serve, args=(listening, content[4:] if slow else content, slow, ended))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            generator = ServerGenerator(url, seconds=0.3, tries=2, pause=0.0, workers=1)
            prompts = Prompts(SEEDS)
            goal = Goal(2, rounds=1, largest=2)
            filters = (form(prompts), near_duplicates(SEEDS))
            collect(generator, prompts, goal, filters=filters, answer=lambda texts: _encoded(model, texts))
        finally:
            ended.set()
            thread.join()


def _encoded(model: Any, texts: Sequence[str]) -> list[str]:
    if texts:
        model.inputs.reader.texts(list(texts))
    return ["yes"] * len(texts)


def _serve(listening: socket.socket, content: bytes, slow: bool, ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            connection, _ = listening.accept()
        except OSError:
            continue
        with connection:
            connection.settimeout(0.3)
            try:
                connection.recv(2**16)
                for at in range(0, len(content), 1 if slow else len(content) or 1):
                    connection.sendall(content[at : at + (1 if slow else len(content))])
                    time.sleep(0.02 if slow else 0)
                    if ended.is_set():
                        break
                connection.shutdown(socket.SHUT_WR)
                connection.recv(2**16)
            except OSError:
                pass
