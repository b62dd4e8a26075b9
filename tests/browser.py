"""A headless Chromium that a test drives through its DevTools pipe, without further packages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--hide-scrollbars --remote-debugging-pipe"
)


def find_chromium() -> str | None:
    """Return the path of a Chromium, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One page in a Chromium of its own, which ends with the context.

    Args:
        width: Of the window, in pixels.
        height: Of the window.
        dark: Whether the page is told that its reader prefers dark colours.

    Attributes:
        complaints: What the page wrote to the console as warnings or errors, and exceptions.
    """

    def __init__(self, width: int = 1400, height: int = 2000, dark: bool = False) -> None:
        self._size = width, height
        self._dark = dark
        self.complaints: list[str] = []

    def __enter__(self) -> Browser:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = (
            f"exec {find_chromium()} {FLAGS} --user-data-dir={self._folder.name} about:blank "
            f"3<&{theirs_in} 4>&{theirs_out}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._unread, self._session = 0, b"", ""
        targets = self.ask("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        width, height = self._size
        size: dict[str, Any] = dict(width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, page: Path) -> None:
        """Show a file, and wait until its scripts have run."""
        self.ask("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + 20
        while self.evaluate("location.protocol + document.readyState") != "file:complete":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.05)

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move the mouse (``mouseMoved``), press or release its button."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self, path: Path) -> None:
        """Save what is to be seen."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._from], [], [], 30)[0], "the browser does not answer"
            received = os.read(self._from, 1 << 16)
            assert received, "the browser is gone"
            self._unread += received
        line, self._unread = self._unread.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        params, method = message.get("params", {}), message.get("method")
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error"):
            self.complaints.append(json.dumps(params["args"]))
