"""A headless Chromium that tests drive, over the pipe of its DevTools protocol: no packages needed.

Messages are JSON objects that end in a zero byte; the browser reads file descriptor 3 and writes
file descriptor 4 (``--remote-debugging-pipe``).
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Final

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")

CHROMIUM: Final = next(filter(None, map(shutil.which, _NAMES)), None)
"""The browser's file, if this machine has one."""

_PATIENCE: Final = 600.0
"""Seconds for an answer; a page that computes on a busy machine is long silent."""

_ABOVE: Final = 10  # of file descriptors that the two fixed ones cannot overwrite


class Page:
    """A tab.

    Attributes:
        faults: what its scripts did not catch, and what they logged as an error.
    """

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.faults: list[str] = []

    def call(self, method: str, **parameters: object) -> Any:
        """Return the result of a method of the protocol."""
        return self._browser.call(method, self._session, **parameters)

    def value(self, expression: str) -> Any:
        """Return what an expression, or its promise, comes to."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 600.0) -> None:
        """Wait until an expression is true.

        Args:
            expression: in JavaScript.
            seconds: a guard against a page that never gets there; a busy machine is slow.
        """
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression} never holds: {self.faults}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))


class Browser:
    """A running Chromium; use it in a ``with`` statement.

    Args:
        profile: an empty folder for what it keeps.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._number = 0
        self._pages: dict[str, Page] = {}
        self._unread = b""

    def __enter__(self) -> "Browser":
        assert CHROMIUM is not None
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, _ABOVE) for end in (theirs_in, theirs_out)]

        def place() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"]
        flags += ["--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={self._profile}"]
        self._process = subprocess.Popen(
            [CHROMIUM, *flags],
            close_fds=False,
            preexec_fn=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out, *ends):
            os.close(end)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def open(
        self, address: str, width: int = 1280, height: int = 900, *, dark: bool = False
    ) -> Page:
        """Return a new tab that shows an address.

        Args:
            address: what to show.
            width: of the window, in CSS pixels.
            height: of the window.
            dark: whether the reader prefers dark pages.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        page.call("Runtime.enable")
        page.call("Page.enable")
        page.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=address)
        page.wait("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page

    def close_pages(self) -> None:
        """Close all tabs, so that none goes on working."""
        for page in self._pages.values():
            page.call("Page.close")
        self._pages.clear()

    def call(self, method: str, session: str = "", **parameters: object) -> Any:
        """Return the result of a method of the protocol, of a tab or of the browser."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(_PATIENCE)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        if page is None:
            return
        if event["method"] == "Runtime.exceptionThrown":
            page.faults.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        elif event["method"] == "Runtime.consoleAPICalled" and event["params"]["type"] == "error":
            page.faults.append(json.dumps(event["params"]["args"])[:500])

    def _read(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], seconds)
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
