"""Chromium without a window, controlled through its debugging pipe (the DevTools protocol)."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 240.0
"""Seconds after which a command counts as lost. Only a broken browser takes this long."""
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-dev-shm-usage")


class Tab:
    """One page of the browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._next = write, read, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], LIMIT)[0], "Chromium does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "Chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + LIMIT
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def open(self, page: Path, width: int = 1200, height: int = 1350, mobile: bool = False, **media: str) -> None:
        """Open a file in a window of this size, with media features such as ``prefers_color_scheme="dark"``."""
        scale = 2 if mobile else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=page.as_uri())
        self.wait_for("document.body && document.body.dataset.ready === 'yes'")

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Return left, top, width and height of an element, scrolled into view."""
        return tuple(
            self.evaluate(
                f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
                "const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
            )
        )

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send a mouse event: "Pressed", "Moved" or "Released"."""
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button="left", buttons=1, clickCount=1)

    def touch(self, kind: str, points: list[tuple[float, float]]) -> None:
        """Send a touch event: "Start", "Move" or "End"."""
        self.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=[{"x": x, "y": y} for x, y in points])

    def key(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG file."""
        result = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(result["data"]))

    def problems(self) -> list[str]:
        """Return errors, messages of the console, and requests other than that of the page."""
        found: list[str] = []
        for event in self.events:
            method, parameters = event.get("method"), event.get("params", {})
            is_error = method == "Log.entryAdded" and parameters["entry"]["level"] == "error"
            if is_error or method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                found.append(json.dumps(parameters)[:300])
            elif method == "Network.requestWillBeSent" and parameters["type"] != "Document":
                found.append(f"request: {parameters['request']['url'][:100]}")
        return found


@contextlib.contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a new profile and return a page."""
    assert PROGRAM is not None
    to_browser, from_browser = os.pipe(), os.pipe()

    def connect() -> None:  # Chromium reads commands from descriptor 3 and writes answers to 4
        os.dup2(to_browser[0], 200)  # 3 and 4 may be in use
        os.dup2(from_browser[1], 201)
        os.dup2(200, 3)
        os.dup2(201, 4)

    process = subprocess.Popen(
        [PROGRAM, *_OPTIONS, f"--user-data-dir={profile}"],
        preexec_fn=connect,
        close_fds=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Tab(to_browser[1], from_browser[0])
    finally:
        process.terminate()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
