"""The app as a new user starts it: app.py, the default pair, a question in a real browser."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api")
from browsing import free_port, last, send, visit
from playwright.sync_api import expect


@pytest.mark.real
@pytest.mark.browser
def test_a_new_user_asks_for_the_capital_of_france(browser, tmp_path):
    port, home = free_port(), os.environ | {"DUOCHAT_DATA": str(tmp_path)}
    app = Path(__file__).resolve().parents[1] / "app.py"
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen([sys.executable, app, "--port", str(port)], env=home, stdout=log, stderr=log)
        try:
            page = browser.new_page()
            for _ in range(120):
                if process.poll() is None and _open(page, f"http://127.0.0.1:{port}"):
                    break
                page.wait_for_timeout(1000)
            visit(page, f"http://127.0.0.1:{port}")
            send(page, "Name the capital city of France.")
            expect(page.locator(".theirs .dc-tools")).to_have_count(1, timeout=300_000)
            expect(page.locator("body")).not_to_have_class(re.compile("dc-busy"), timeout=60_000)
            assert "Paris" in last(page)
            page.close()
            process.send_signal(signal.SIGTERM)
            process.wait(30)
            log.seek(0)
            assert "Traceback" not in log.read()
        finally:
            process.kill()


def _open(page, url):
    try:
        return page.goto(url) is not None
    except Exception:  # noqa: BLE001 - nobody listens there yet
        return False
