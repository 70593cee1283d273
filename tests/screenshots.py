"""Pictures of every tab, light, dark and narrow: python tests/screenshots.py FOLDER [--url URL of a running DuoChat].

Without --url the page runs on a fake engine. The prompt is one that a small model answers well.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from browsing import CHROMIUM, Server, send, visit
from playwright.sync_api import Browser, Page, sync_playwright

PROMPT = "Write a Python function that reverses a string, and explain it in two sentences."
LOOKS = {
    "light": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1440, "height": 900}, "color_scheme": "dark"},
    "narrow": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    server = None if args.url else Server(Path(tempfile.mkdtemp()) / "conversations.db").start()
    try:
        with sync_playwright() as p:
            browser = p.chromium.launch(**CHROMIUM)
            for look in LOOKS:
                take(browser, args.url or server.url, args.folder, look)
            browser.close()
    finally:
        if server:
            server.stop()


def take(browser: Browser, url: str, folder: Path, look: str) -> None:
    """All pictures of one look."""
    context = browser.new_context(**LOOKS[look])
    page = context.new_page()
    visit(page, url)
    shoot(page, folder / f"welcome-{look}.png")
    send(page, PROMPT)
    page.wait_for_selector(".theirs .dc-tools", timeout=180_000)
    shoot(page, folder / f"chat-{look}.png")
    if look == "narrow":
        page.get_by_role("button", name="Live picture (").click()
        shoot(page, folder / f"picture-{look}.png")
        page.get_by_role("button", name="Live picture (").click()
    else:
        page.keyboard.press("Alt+s")
        shoot(page, folder / f"settings-{look}.png")
        page.keyboard.press("Alt+s")
        page.locator(".dc-chip").click()
        page.wait_for_selector(".dc-own form", timeout=60_000)
        shoot(page, folder / f"models-{look}.png")
        page.keyboard.press("Escape")
    for tab in ("Race", "Learn", "Hardware"):
        page.get_by_role("tab", name=tab).click()
        if tab == "Race":
            page.get_by_role("button", name="Start the race").click()
            page.wait_for_selector(".dpr-stage .dpr-verdict", timeout=180_000)
            page.wait_for_timeout(8000)  # the replay
        shoot(page, folder / f"{tab.lower()}-{look}.png")
    context.close()


def shoot(page: Page, path: Path) -> None:
    """Wait until the page has come to rest, then take its picture."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(1200)
    page.screenshot(path=path)


if __name__ == "__main__":
    main()
