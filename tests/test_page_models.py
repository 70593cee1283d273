"""The sheet of models in a real browser: what lies on this disk, another pair by name, what fails, Retry and Cancel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")
from browsing import WAIT, Server, answered, last, send, visit
from gguf import GGMLQuantizationType
from playwright.sync_api import Browser, Locator, Page, expect
from toy_models import byte_level_vocabulary, write_gguf

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder: a target, two drafts that speak its tokens, and a model that has no draft."""
    folder, (tokens, merges) = tmp_path_factory.mktemp("toys"), byte_level_vocabulary()
    write_gguf(folder / "target.gguf", quantized=GGMLQuantizationType.F32)
    write_gguf(folder / "larger-draft.gguf")
    write_gguf(folder / "small-draft.gguf", quantized=GGMLQuantizationType.Q4_0)
    write_gguf(folder / "lonely.gguf", vocabulary=([*tokens[:-1], "other"], merges))
    return folder


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Iterator[Page]:
    """A visitor of a server of its own, whose pair a test may change."""
    server = Server(tmp_path / "c.db", "--rate", "150").start()
    opened, faults = browser.new_page(viewport={"width": 1280, "height": 900}), []
    opened.on("pageerror", lambda fault: faults.append(str(fault)))
    visit(opened, server.url)
    yield opened
    opened.close()
    server.stop()
    assert not faults


def opened(page: Page) -> Locator:
    page.locator(".dc-chip").click()
    sheet = page.get_by_role("dialog", name="Models")
    expect(sheet.locator(".dc-used")).to_have_count(1, timeout=WAIT)
    return sheet


def test_models_of_a_folder_are_listed_with_drafts_and_loaded(page: Page, toys: Path) -> None:
    """Someone with models on the disk could not use them from the page."""
    sheet = opened(page)
    sheet.get_by_role("textbox", name="Models folder").fill(str(toys))
    sheet.get_by_role("button", name="Look there").click()
    target = sheet.get_by_role("region", name="target, models folder")
    expect(target).to_contain_text("runs as the file is", timeout=WAIT)
    drafts = target.get_by_label("Draft for target")
    assert drafts.locator("option").all_inner_texts() == ["with small-draft", "with larger-draft"]
    lonely = sheet.get_by_role("region", name="lonely, models folder")
    expect(lonely).to_contain_text(f"python -m duochat distill --target {toys / 'lonely.gguf'}")
    expect(lonely.get_by_role("button", name="Load alone")).to_be_visible()
    drafts.select_option("with larger-draft")
    target.get_by_role("button", name="Load").click()
    expect(page.locator(".dc-chip")).to_contain_text("target", timeout=WAIT)
    used = sheet.locator(".dc-pair", has=page.locator(".dc-used"))
    expect(used).to_contain_text("drafted by larger-draft", timeout=WAIT)
    page.keyboard.press("Escape")
    page.reload()
    sheet = opened(page)
    expect(sheet.get_by_role("textbox", name="Models folder")).to_have_value(str(toys), timeout=WAIT)
    page.keyboard.press("Escape")
    send(page, "Do you still answer?")
    answered(page)
    assert "Speculative decoding" in last(page)


def test_a_pair_that_fails_leaves_the_chat_working_and_offers_retry(page: Page) -> None:
    """A failed choice took the chat down for everybody, its reason out of sight."""
    sheet = opened(page)
    sheet.get_by_label("Target", exact=True).fill("/nowhere/fails.gguf")
    sheet.get_by_label("Draft", exact=True).fill("draft.gguf")
    sheet.get_by_role("button", name="Load", exact=True).last.click()
    fault = sheet.get_by_role("alert")
    expect(fault).to_contain_text("cannot be loaded", timeout=WAIT)
    assert fault.evaluate("e => e.getBoundingClientRect().top >= 0 && e.getBoundingClientRect().bottom < innerHeight")
    expect(sheet.locator(".dc-pair", has=page.locator(".dc-used"))).to_contain_text("SmolLM2")
    fault.get_by_role("button", name="Retry").click()
    expect(sheet.get_by_role("alert")).to_contain_text("cannot be loaded", timeout=WAIT)
    page.keyboard.press("Escape")
    send(page, "Do you still answer?")
    answered(page)
    assert "Speculative decoding" in last(page)


def test_a_download_shows_how_far_it_is_and_can_be_cancelled(page: Page) -> None:
    sheet = opened(page)
    sheet.get_by_label("Target", exact=True).fill("hf:toy/slow")
    sheet.get_by_label("Draft", exact=True).fill("draft.gguf")
    sheet.get_by_role("button", name="Load", exact=True).last.click()
    line = sheet.locator(".dc-loading")
    expect(line).to_contain_text(re.compile(r"Fetching slow: \d+ MB of 100 MB"), timeout=WAIT)
    line.get_by_role("button", name="Cancel").click()
    expect(line).to_be_empty(timeout=WAIT)
    expect(sheet.locator(".dc-pair", has=page.locator(".dc-used"))).to_contain_text("SmolLM2")


def test_a_forecast_says_what_it_does_waits_for_an_answer_and_can_be_cancelled(page: Page) -> None:
    """It held the page's only call for a minute, beside whatever was being answered."""
    send(page, "LONG, please")
    page.locator(".theirs").wait_for()
    sheet = opened(page)
    foresight = sheet.locator(".dc-foresight")
    foresight.get_by_role("button", name="How fast").click()
    expect(foresight).to_contain_text("Waiting for the answer under way", timeout=WAIT)
    foresight.get_by_role("button", name="Cancel").click()
    expect(foresight.get_by_role("button", name="How fast")).to_be_visible(timeout=WAIT)


def test_the_pair_for_teaching_is_one_click_away(page: Page) -> None:
    sheet = opened(page)
    pair = sheet.get_by_role("region", name="SmolLM2-135M-Instruct on PyTorch")
    pair.get_by_role("button", name="Load").click()
    expect(sheet.locator(".dc-pair", has=page.locator(".dc-used"))).to_contain_text("on PyTorch", timeout=WAIT)
    first = sheet.get_by_role("region", name="SmolLM2-135M-Instruct", exact=True)
    first.get_by_role("button", name="Load").click()
    expect(sheet.locator(".dc-pair", has=page.locator(".dc-used"))).not_to_contain_text("on PyTorch", timeout=WAIT)
