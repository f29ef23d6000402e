"""A headless Chromium over a pipe, by the DevTools protocol: no package and no port needed."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--disable-quic",
         "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe")  # fmt: skip


def found() -> str | None:
    """Return the path of a Chromium. The variable CHROMIUM may name one that is not in PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. `said` has the messages, errors and requests of the page, in their order."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self.out = os.pipe()
        self.inp, theirs_out = os.pipe()

        def wire() -> None:  # the protocol reads from descriptor 3 and writes to 4
            pair = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (theirs_in, theirs_out)]
            os.dup2(pair[0], 3)
            os.dup2(pair[1], 4)

        command = [str(found()), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            command, preexec_fn=wire, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.count, self.said, self.session = b"", 0, list[str](), ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def _read(self, limit: float = 30) -> dict[str, Any]:
        end = time.monotonic() + limit
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.inp], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self.inp, 2**16) if ready else b""
            assert part, "the browser is gone or does not answer"
            self.buffer += part
        line, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message)
        return dict(message)

    def _note(self, message: dict[str, Any]) -> None:
        """Keep console messages, errors, exceptions, and requests that leave the file."""
        method, params = message.get("method"), message.get("params", {})
        url = params.get("request", {}).get("url", "")
        if method == "Network.requestWillBeSent" and not url.startswith(("file:", "data:")):
            self.said.append(f"request: {url}")
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" or method == "Log.entryAdded":
            self.said.append(json.dumps(params))

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def ask(self, script: str) -> Any:
        """Return the value of an expression in the page. A promise is awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str, limit: float = 10) -> None:
        end = time.monotonic() + limit
        while not self.ask(script):
            assert time.monotonic() < end, f"never became true: {script}"
            time.sleep(0.02)

    def view(self, width: int, dark: bool = False, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[theme])

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        button = "none" if kind == "mouseMoved" and not clicks else "left"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button,
                  buttons=int(button == "left"), clickCount=clicks)  # fmt: skip

    def close(self) -> None:
        """Close the pipe, which ends the browser."""
        os.close(self.out)
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.inp)
