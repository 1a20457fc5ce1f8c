"""A headless Chromium, driven over two pipes: https://chromedevtools.github.io/devtools-protocol/."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
_WAIT_S = 30.0


class Browser:
    """One page. complaints: what it wrote to its console, such as violations of its own policy."""

    def __init__(self, requests: int, answers: int) -> None:
        """requests, answers: descriptors of the pipes' ends."""
        self._requests, self._answers = os.fdopen(requests, "wb"), os.fdopen(answers, "rb")
        self._session, self._asked, self._rest = "", 0, b""
        self.complaints: list[str] = []
        self.urls: list[str] = []  # that it asked for
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self._ask(f"{domain}.enable")

    def open(self, url: str, *, width_px: int) -> None:
        """Show a page in a window of this width."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width_px,
            height=844,
            deviceScaleFactor=1,
            mobile=width_px < 500,
        )
        self._ask("Page.navigate", url=url)
        self.until(f"location.href == '{url}' && document.readyState == 'complete'")

    def value(self, expression: str) -> Any:
        """What JavaScript evaluates to; an error in it is raised."""
        told = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, expression: str) -> Any:
        """Its value, once that is true."""
        give_up_s = time.monotonic() + _WAIT_S
        while not (found := self.value(expression)):
            assert time.monotonic() < give_up_s, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)
        return found

    def choose(self, selector: str, file: Path) -> None:
        """Give a file to an input."""
        root = self._ask("DOM.getDocument")["root"]["nodeId"]
        node = self._ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._ask("DOM.setFileInputFiles", nodeId=node, files=[str(file)])

    def screenshot(self, file: Path) -> None:
        """Of all of it, as PNG."""
        told = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(told["data"]))

    def _ask(self, method: str, **given: Any) -> Any:
        self._asked += 1
        told = {"id": self._asked, "method": method, "params": given}
        if self._session:
            told["sessionId"] = self._session
        self._requests.write(json.dumps(told).encode() + b"\0")
        self._requests.flush()
        while (answer := self._next()).get("id") != self._asked:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers.fileno(), 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Log.entryAdded":
                self.complaints.append(event["params"]["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.complaints.append(event["params"]["exceptionDetails"]["text"])
            case "Network.requestWillBeSent":
                self.urls.append(event["params"]["request"]["url"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """One that is started here, with a folder for its profile."""
    to_it, requests = os.pipe()
    answers, from_it = os.pipe()

    def place_pipes() -> None:  # at descriptors 3 and 4, where it looks for them
        one, other = os.dup(to_it), os.dup(from_it)
        os.dup2(one, 3)
        os.dup2(other, 4)

    process = subprocess.Popen(
        [
            *(CHROMIUM, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
            *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update"),
        ],
        pass_fds=(3, 4),
        preexec_fn=place_pipes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_it)
    os.close(from_it)
    try:
        yield Browser(requests, answers)
    finally:
        process.terminate()
        process.wait(timeout=30)
        for end in (requests, answers):
            os.close(end)
