"""A browser without a window, driven through a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 60.0


def browser_path() -> str:
    """The browser of this machine; raises `FileNotFoundError` where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise FileNotFoundError(
            f"none of {', '.join(NAMES)} is on the PATH; apt-get install chromium brings one"
        )
    return found


@dataclass
class Pipe:
    """Messages to a browser and from it; what it tells unasked is kept in ``told``."""

    reading: int
    writing: int
    told: list[dict[str, Any]] = field(default_factory=list)
    rest: bytes = b""
    number: int = 0

    def call(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": given}
        if session is not None:
            message["sessionId"] = session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") != self.number:
                self.told.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return dict(answer["result"])

    def read(self) -> dict[str, Any]:
        """The next message."""
        while b"\0" not in self.rest:
            if not select.select([self.reading], [], [], PATIENCE_S)[0]:
                raise TimeoutError("the browser does not answer")
            more = os.read(self.reading, 1 << 20)
            if not more:
                raise EOFError("the browser has gone")
            self.rest += more
        message, self.rest = self.rest.split(b"\0", 1)
        return dict(json.loads(message))


@dataclass
class Tab:
    """One page in the browser."""

    pipe: Pipe
    session: str

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        """Ask the browser something about this page."""
        return self.pipe.call(method, self.session, **given)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until what has changed is drawn."""
        self.evaluate("new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")

    def point(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """Move the pointer, press or release it, or turn its wheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def picture(self, path: Path) -> None:
        """Write what is seen as PNG."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Errors that the page has had, and what it tried to fetch."""
        found = []
        for one in self.pipe.told:
            given, method = one.get("params", {}), one.get("method")
            if method == "Runtime.exceptionThrown":
                found.append(str(given["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
                found.append(str(given["args"]))
            elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
                found.append(given["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                address = given["request"]["url"]
                if not address.startswith("file:"):
                    found.append(f"fetched {address}")
        return found


@contextmanager
def opened(page: Path, profile: Path, *, fragment: str = "", dark: bool = False) -> Iterator[Tab]:
    """A page in a browser of its own; ``profile`` is an empty folder for what that keeps."""
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    arguments = [
        browser_path(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
        "--force-device-scale-factor=1", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip

    def at_three_and_four() -> None:
        """Where the browser looks for the pipe."""
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        for number, end in enumerate(ends, start=3):
            os.dup2(end, number)

    process = subprocess.Popen(
        arguments,
        preexec_fn=at_three_and_four,
        close_fds=False,  # those of this process are not inherited anyway
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    pipe = Pipe(reading, writing)
    try:
        target = pipe.call("Target.createTarget", url="about:blank")["targetId"]
        attached = pipe.call("Target.attachToTarget", targetId=target, flatten=True)
        tab = Tab(pipe, attached["sessionId"])
        for part in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{part}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": 1360, "height": 1500, "deviceScaleFactor": 1, "mobile": False}
        tab.call("Emulation.setDeviceMetricsOverride", **size)
        tab.call("Page.navigate", url=f"{page.as_uri()}#{fragment}")
        _wait_for_load(tab)
        yield tab
    finally:
        os.close(writing)
        os.close(reading)
        process.terminate()
        process.wait(PATIENCE_S)


def _wait_for_load(tab: Tab) -> None:
    until = time.monotonic() + PATIENCE_S
    while tab.evaluate("document.readyState") != "complete":
        if time.monotonic() > until:
            raise TimeoutError("the page does not load")
        time.sleep(0.05)
    tab.settle()
