"""Generators write texts after prompts: a model in memory, or any server with OpenAI's interface for completions.

A server gets prompts, never the teacher. What it answers is bounded in time and size, and a failure is one line.
"""

from __future__ import annotations

import hashlib
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from typing import Any, Protocol
from urllib.parse import urlsplit

from ..errors import TuneportError, brief, shortened
from ..io.untrusted import parse_json
from ..models.base import Model
from ..models.generation import Sampling, Written, generate_texts
from ..processes import by_first
from ..types import Progress, ignore

LARGEST_ANSWER = 2**20  # bytes
AGAIN = (408, 429, 500, 502, 503, 504)  # states of a server that may pass


class Generator(Protocol):
    """Writes one text after each prompt; the same arguments give the same texts."""

    @property
    def name(self) -> str: ...

    def write(self, prompts: Sequence[str], sampling: Sampling, advance: Progress = ignore) -> list[Written]: ...


@dataclass(frozen=True, eq=False)
class LocalGenerator:
    """A model in memory."""

    model: Model  # a causal or an encoder-decoder model
    tuned: Callable[[], AbstractContextManager[None]] = nullcontext  # gives a context in which it writes

    @property
    def name(self) -> str:
        return self.model.name

    def write(self, prompts: Sequence[str], sampling: Sampling, advance: Progress = ignore) -> list[Written]:
        with self.tuned():
            return generate_texts(self.model, prompts, sampling, advance=advance)


@dataclass(frozen=True)
class ServerGenerator:
    """A server with the paths /v1/completions and /v1/models, such as those of vLLM and llama.cpp.

    Each prompt has a seed of its own. Whether the same seeds give the same texts is up to the server.
    """

    url: str  # its address, with or without /v1
    model: str | None = None  # the model's name there; None for the first that it lists
    seconds: float = 120.0  # the longest that one request may take
    tries: int = 3  # requests for one prompt, if a failure may pass
    pause: float = 0.5  # seconds before the second try; doubled before each further one
    workers: int = 8  # requests at the same time

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise TuneportError(f"{self.url!r} is not the address of a server; expected http://HOST:PORT or https://.")

    @property
    def name(self) -> str:
        return f"{self.model or 'model'} at {self.url}"

    def write(self, prompts: Sequence[str], sampling: Sampling, advance: Progress = ignore) -> list[Written]:
        """Write the texts, several at the same time; of several processes the first asks the server."""
        return by_first(lambda: self._write(prompts, sampling, advance))

    def _write(self, prompts: Sequence[str], sampling: Sampling, advance: Progress) -> list[Written]:
        model, seen = self.model or self._first_model(), defaultdict[str, Iterator[int]](count)
        bodies = [_body(model, prompt, sampling, next(seen[prompt])) for prompt in prompts]
        found = []
        pool = ThreadPoolExecutor(max(self.workers, 1))
        try:
            for written in pool.map(self._complete, bodies):
                found.append(written)
                advance(1)
        finally:
            pool.shutdown(cancel_futures=True)
        return found

    def _first_model(self) -> str:
        answer = self._ask("models", None)
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise TuneportError(f"{self.url} lists no model. Check that the server has /v1/models.") from error

    def _complete(self, body: dict[str, Any]) -> Written:
        answer = self._ask("completions", body)
        try:
            choice = answer["choices"][0]
            text = choice["text"]
            if not isinstance(text, str):
                raise TypeError
            return Written(text, finished=choice.get("finish_reason") != "length")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            said = shortened(json.dumps(answer), 100)
            raise TuneportError(f"{self.url} answers {said}; expected choices with a text.") from error

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON that the server answers; a failure that may pass is tried again."""
        for attempt in range(self.tries):
            try:
                return parse_json(self._read(path, body))
            except urllib.error.HTTPError as error:
                why = f"it says {error.code} {error.reason}: {_said(error)}"
                if error.code not in AGAIN:
                    break
            except (OSError, HTTPException) as error:
                why = brief(error)
            except ValueError as error:
                why = f"its answer is not JSON: {brief(error)}"
                break
            if attempt + 1 < self.tries:
                time.sleep(self.pause * 2**attempt)
        raise TuneportError(f"{self.url} writes no texts: {why}. Check that the server runs and has /v1/{path}.")

    def _read(self, path: str, body: dict[str, Any] | None) -> bytes:
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{base}/v1/{path}", data=data, headers=headers)
        deadline = time.monotonic() + self.seconds
        found = bytearray()
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.seconds) as response:
            while piece := response.read1(2**16):
                found += piece
                if len(found) > LARGEST_ANSWER:
                    raise ValueError(f"it is longer than {LARGEST_ANSWER} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no whole answer in {self.seconds:g} seconds")
        return bytes(found)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Prompts go to the server that was named, and to no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _said(error: urllib.error.HTTPError) -> str:
    """The first words of a server's complaint."""
    try:
        return shortened(" ".join(error.read(1000).decode(errors="replace").split()), 120) or "nothing more"
    except (OSError, HTTPException):
        return "nothing more"


def _body(model: str, prompt: str, sampling: Sampling, number: int) -> dict[str, Any]:
    digest = hashlib.sha256(f"{sampling.seed} {number} {prompt}".encode()).digest()
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": int.from_bytes(digest[:4], "big") >> 1,
        **({"stop": list(sampling.stops)} if sampling.stops else {}),
    }
