"""A server and a browser for the tests of the page, and what a visitor does again and again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import Page, expect

TESTS = Path(__file__).resolve().parent
CHROMIUM = {
    "executable_path": os.environ.get("CHROMIUM", "/usr/bin/chromium"),
    "args": ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
}
WAIT = 15_000  # ms


class Server:
    """The app in a process of its own, on a free port and a store that survives it."""

    def __init__(self, store: Path, *arguments: str) -> None:
        self.store, self.arguments, self.port = store, arguments, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        command = [sys.executable, str(TESTS / "serve_fake.py"), str(self.port), "--store", str(self.store)]
        self.process = subprocess.Popen([*command, *self.arguments])
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            time.sleep(0.1)
        raise AssertionError("the server did not start")

    def stop(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def visit(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector(".dc-composer textarea", timeout=30_000)
    page.wait_for_selector("#tabs .dc-head", timeout=WAIT)
    page.wait_for_selector("#settings input", state="attached", timeout=WAIT)


def send(page: Page, text: str) -> None:
    page.locator(".dc-composer textarea").fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, count: int = 1) -> None:
    """Wait until the count-th answer is complete."""
    expect(page.locator(".theirs .dc-tools")).to_have_count(count, timeout=WAIT)
    expect(page.locator("body")).not_to_have_class(re.compile("dc-busy"), timeout=WAIT)


def last(page: Page) -> str:
    return page.locator("[data-testid=bot]").last.inner_text()


def hovered(page: Page, who: str, name: str) -> None:
    """Click a tool of the last message of the user ("mine") or the model ("theirs")."""
    message = page.locator(f".dc-message.{who}").last
    message.hover()
    message.get_by_role("button", name=name).click()


def unfold(page: Page, part: str) -> None:
    """Open a part of the picture that is on demand: "Token by token", "Figures" or "Draft tree"."""
    page.locator(".dp-fold:not([open]) > summary", has_text=part).click()
