"""A real headless browser, driven over the pipes of the Chrome DevTools protocol: no network, no package."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()
LIMIT_SECONDS = 60


class Browser:
    """A Chromium process with a profile of its own; a context manager."""

    def __init__(self, profile: Path) -> None:
        commands, self._commands = (_high(end) for end in os.pipe())
        self._answers, answers = (_high(end) for end in os.pipe())

        def hand_over() -> None:
            # The browser reads commands from descriptor 3 and answers on 4.
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=hand_over,
        )
        os.close(commands)
        os.close(answers)
        self._numbers = itertools.count(1)
        self._buffer = bytearray()
        self.events: list[dict] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
        finally:
            os.close(self._commands)
            os.close(self._answers)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def call(self, method: str, session: str | None = None, **parameters: object) -> dict:
        """Return the result of a command of the protocol; events that come in between are kept."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        os.write(self._commands, json.dumps(command | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            message = self.receive()
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    def receive(self) -> dict:
        """Return the next message of the browser."""
        until = time.monotonic() + LIMIT_SECONDS
        while (end := self._buffer.find(b"\0")) < 0:
            ready, _, _ = select.select([self._answers], [], [], max(0, until - time.monotonic()))
            chunk = os.read(self._answers, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self._buffer += chunk
        message = json.loads(bytes(self._buffer[:end]))
        del self._buffer[: end + 1]
        if "method" in message:
            self.events.append(message)
        return message

    def open(
        self, address: str, *, width: int = 1280, height: int = 900, dark: bool = False, record: bool = True
    ) -> "Tab":
        """Return a tab that has loaded an address; with `record`, it knows its requests and complaints."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session=session, target=target)
        for domain in ("Page", "Runtime", *(("Network", "Log") if record else ())):
            tab.call(f"{domain}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", features=[scheme])
        tab.go(address)
        return tab


class Tab:
    """One page in the browser."""

    def __init__(self, browser: Browser, *, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def call(self, method: str, **parameters: object) -> dict:
        """Return the result of a command to this tab."""
        return self._browser.call(method, self._session, **parameters)

    def go(self, address: str) -> None:
        """Load an address and wait until it has loaded."""
        seen = len(self._browser.events)
        assert "errorText" not in self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events()[seen:] or ()):
            self._browser.receive()

    def close(self) -> None:
        """Close the tab; what it has told is forgotten."""
        self._browser.call("Target.closeTarget", targetId=self._target)
        self._browser.events.clear()

    def events(self) -> list[dict]:
        """Return what the browser has told of this tab; places in the list stay those of all events."""
        return [event if event.get("sessionId") == self._session else {"method": ""} for event in self._browser.events]

    def evaluate(self, script: str):
        """Return the value of an expression, awaited if it is a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + LIMIT_SECONDS
        while not self.evaluate(script):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key: str, *, code: int = 0) -> None:
        """Press and release a key: a character, or a name like `Escape`."""
        typed = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element."""
        x, y = self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            "node.scrollIntoView({ block: 'nearest', behavior: 'instant' });"
            "const box = node.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self) -> list[str]:
        """Return the errors and warnings that the page has caused so far."""
        self.evaluate("0")
        thrown = [event for event in self.events() if event["method"] == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"] for event in self.events() if event["method"] == "Log.entryAdded"]
        return [str(event["params"]["exceptionDetails"]) for event in thrown] + [entry["text"] for entry in logged]

    def requests(self) -> list[str]:
        """Return every address that the page has asked for."""
        self.evaluate("0")
        sent = (event for event in self.events() if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]


def _high(descriptor: int) -> int:
    """Move a descriptor out of the way of 3 and 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved
