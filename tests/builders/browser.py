"""A headless Chromium over a debugging pipe: open pages, press keys, take screenshots, read its console and requests.

Standard library only. `Browser()` raises FileNotFoundError where there is no Chromium.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One tab. `messages` holds console output, exceptions and policy violations; `requests` every URL asked for."""

    def __init__(self) -> None:
        program = find()
        if program is None:
            raise FileNotFoundError("no Chromium on this machine")
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # its children may still write
        (commands, self._out), (self._in, answers) = os.pipe(), os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        quiet = ("--disable-background-networking", "--disable-component-update", "--disable-extensions")
        words = [
            program,
            *flags,
            *quiet,
            "--remote-debugging-pipe",
            f"--user-data-dir={self._home.name}",
            "about:blank",
        ]
        inherited = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (commands, answers)]  # clear of 3 and 4
        redirect = f'exec "$@" 3<&{inherited[0]} 4>&{inherited[1]}'  # it reads commands from 3 and answers on 4
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=inherited,
        )
        for end in (commands, answers, *inherited):
            os.close(end)
        self._number, self._rest, self._session = 0, b"", None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._home.cleanup()

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> float:
        """Open a file and return the seconds until its load event."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._events.clear()
        started = time.perf_counter()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()
        self.evaluate("document.body.offsetHeight")  # laid out
        return time.perf_counter() - started

    def evaluate(self, expression: str) -> Any:
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], 600)[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._in, 2**20)
            if not part:
                raise ConnectionError("Chromium has gone")
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method, parameters = message.get("method"), message.get("params", {})
        if method:
            self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Log.entryAdded":
            self.messages.append(parameters["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(str([item.get("value") for item in parameters["args"]]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(str(parameters["exceptionDetails"]))
        return message
