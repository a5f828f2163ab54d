"""A headless Chromium, driven over its DevTools protocol through pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lib.patience import PATIENCE_SECONDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM = CHROMIUM or shutil.which("google-chrome")
# Chromium's sandbox does not start as root.
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")


class Page:
    """One page. ``errors`` has all that the page's console and policy complained of."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._rest, self._id = write, read, b"", 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        session = {"sessionId": self._session} if self._session else {}
        data = json.dumps(message | session).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (answer := self._message()).get("id") != self._id:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, address: str, *, width: int = 1280, height: int = 900) -> None:
        """Open a page and wait until it shows its charts or a message."""
        self.resize(width, height)
        self.call("Page.navigate", url=address)
        self.wait("document.querySelector('#charts svg text, #message:not(:empty)') !== null")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Make the reader prefer "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression, or of the promise that it is."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, (condition, self.errors)
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **params: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **params)

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mousePressed", *begin, button="left", buttons=1, clickCount=1)
        for share in (0.5, 1.0):
            x, y = (a + share * (b - a) for a, b in zip(begin, end, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of the first element that matches, scrolled into view."""
        script = "const e = document.querySelector(%s); e.scrollIntoView({block: 'nearest'});"
        script += "const r = e.getBoundingClientRect(); [r.left, r.top, r.width, r.height]"
        return tuple(self.evaluate(f"{{{script % json.dumps(selector)}}}"))

    def screenshot(self, *, whole: bool = False) -> bytes:
        """PNG of what is visible, or of the whole page."""
        result = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(result["data"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], PATIENCE_SECONDS)[0], (
                "Chromium does not answer"
            )
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {params['message']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """Start Chromium with an empty ``profile`` folder, and end it with all of its processes."""
    assert CHROMIUM is not None
    # Chromium reads commands from descriptor 3 and writes answers to 4.
    from_us, to_chromium = os.pipe()
    from_chromium, to_us = os.pipe()
    command = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    script = f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}'
    process = subprocess.Popen(
        ["bash", "-c", script, *command],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        page = Page(to_chromium, from_chromium)
        yield page
        page._session = ""
        page.call("Browser.close")
        process.wait(PATIENCE_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(to_chromium)
        os.close(from_chromium)
