"""Headless Chromium that is controlled by its DevTools protocol through a pipe, without port, network or packages.

https://chromedevtools.github.io/devtools-protocol/ — commands and events are JSON, each ended by a zero byte.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_S = 60


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; `events` collects its reported events."""

    def __init__(self, commands: int, answers: int):
        self.commands, self.answers = commands, answers
        self.session: str | None = None
        self.events: list[dict] = []
        self._buffer, self._last = b"", 0

    def send(self, method: str, **parameters) -> dict:
        """Run a command and return its result; keep events that arrive before it."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._last:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self.events.append(self._receive())

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            readable, _, _ = select([self.answers], [], [], TIMEOUT_S)
            data = os.read(self.answers, 1 << 16) if readable else b""
            assert data, f"the browser sent nothing for {TIMEOUT_S} s, or ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path | str, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file or an address in a window of the given size in CSS pixels, and wait until it is loaded."""
        self.events.clear()
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str):
        """Return the value of a JavaScript expression, converted by JSON."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def reported(self, method: str) -> list[dict]:
        return [event["params"] for event in self.events if event["method"] == method]


@contextmanager
def open_browser(executable: str, profile: Path) -> Iterator[Page]:
    """Open a tab in a browser with an empty profile, and close both at the end of the block."""
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    # the browser reads commands from descriptor 3 and writes answers to 4
    shell = f'exec "$0" "$@" 3<&{command_end} 4>&{answer_end}'
    process = subprocess.Popen(
        ["bash", "-c", shell, executable, *flags, f"--user-data-dir={profile}"],
        pass_fds=(command_end, answer_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_end)
    os.close(answer_end)
    page = Page(commands, answers)
    try:
        target = page.send("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        yield page
    finally:
        os.close(commands)
        os.close(answers)
        process.terminate()
        process.wait(timeout=TIMEOUT_S)
