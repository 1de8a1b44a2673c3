"""A server on loopback with OpenAI's interface for completions, which behaves as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """A server that answers each prompt with its seed, unless a script of answers says otherwise."""

    def __init__(self) -> None:
        self.script: list[Any] = []  # (status, body, pause between bytes), the next first
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.change: Callable[[dict[str, Any]], str] = lambda body: f" {body['prompt']} {body['seed']}"
        self.url = ""

    def answer(self, body: dict[str, Any] | None) -> tuple[int, bytes, float]:
        if self.script:
            status, content, pause = self.script.pop(0)
            return status, content, pause
        if body is None:
            return 200, json.dumps({"data": [{"id": "tiny"}]}).encode(), 0.0
        short = body["max_tokens"] < 5
        choice = {"text": self.change(body), "finish_reason": "length" if short else "stop"}
        return 200, json.dumps({"choices": [choice]}).encode(), 0.0


@contextmanager
def serving() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body: dict[str, Any] | None) -> None:
            state.paths.append(self.path)
            status, content, pause = state.answer(body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/v1/elsewhere")
            self.end_headers()
            try:
                for at in range(0, len(content), 1 if pause else len(content)):
                    self.wfile.write(content[at : at + 1] if pause else content)
                    self.wfile.flush()
                    time.sleep(pause)
            except OSError:
                pass  # the client has gone

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.bodies.append(body)
            self.reply(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)  # seconds until it sees its end
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
