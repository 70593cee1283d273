"""The page in a real browser when something is not as it should be, and what a hand or a keyboard may expect of it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
from PIL import Image

pytest.importorskip("playwright")
from browsing import WAIT, Server, answered, hovered, send, visit
from playwright.sync_api import Browser, BrowserContext, Page, expect

pytestmark = pytest.mark.browser


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    opened = browser.new_context(viewport={"width": 1280, "height": 800})
    yield opened
    opened.close()


@pytest.fixture
def page(context: BrowserContext, server: Server) -> Iterator[Page]:
    """A visitor at an empty chat. Errors of the page's scripts fail the test."""
    opened, faults = context.new_page(), []
    opened.on("pageerror", lambda fault: faults.append(str(fault)))
    visit(opened, server.url)
    yield opened
    assert not faults


FAULT = ".dc-messages > .dc-fault"


# ---- conversations that are gone, other tabs


def test_a_dead_link_says_so_and_the_next_message_is_answered_here(page: Page, server: Server) -> None:
    """A message sent from the page of a deleted chat went to a new one that the tab never opened."""
    page.goto("about:blank")
    visit(page, f"{server.url}/#doesnotexist")
    expect(page.locator(FAULT)).to_contain_text("no longer there", timeout=WAIT)
    assert "#" not in page.url
    send(page, "Hello from nowhere")
    answered(page)
    expect(page.locator("[data-testid=user]")).to_have_text("Hello from nowhere")
    assert "#" in page.url


def test_a_chat_deleted_elsewhere_keeps_its_thread_and_the_text(page: Page, context: BrowserContext) -> None:
    send(page, "Delete me elsewhere")
    answered(page)
    other = context.new_page()
    visit(other, page.url)
    link = other.locator(".dc-list a", has_text="Delete me elsewhere").first
    link.focus()
    other.keyboard.press("Delete")
    expect(other.locator(".dc-toast")).to_contain_text("Deleted", timeout=WAIT)
    send(page, "Are you there?")
    expect(page.locator(FAULT)).to_contain_text("no longer there", timeout=WAIT)
    expect(page.locator("[data-testid=user]")).to_have_text("Delete me elsewhere")
    assert page.locator(".dc-composer textarea").input_value() == "Are you there?"
    assert not page.locator(".dc-list a", has_text="Untitled").count()


def test_the_list_hears_of_other_tabs(page: Page, context: BrowserContext, server: Server) -> None:
    other = context.new_page()
    visit(other, server.url)
    send(page, "Heard from afar")
    answered(page)
    expect(other.locator(".dc-list a", has_text="Heard from afar")).to_be_visible(timeout=WAIT)


# ---- settings


def test_settings_of_a_new_chat_survive_a_reload(page: Page) -> None:
    page.keyboard.press("Alt+s")
    page.get_by_role("radio", name="Creative").check()
    page.get_by_label("Seed", exact=True).fill("12")
    page.get_by_label("Seed", exact=True).blur()
    page.wait_for_function(
        "localStorage['duochat.settings']?.includes('1.1') && localStorage['duochat.settings'].includes('12')"
    )
    page.reload()
    expect(page.locator(".dc-now")).to_contain_text("Creative", timeout=WAIT)
    expect(page.get_by_label("Seed", exact=True)).to_have_value("12", timeout=WAIT)


def test_a_setting_out_of_range_is_named_as_its_field_and_forgotten_in_a_new_chat(page: Page) -> None:
    page.keyboard.press("Alt+s")
    page.get_by_label("Draft budget").fill("-5")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    send(page, "Keep me")
    expect(page.locator(FAULT)).to_contain_text("Draft budget γ is -5: give a whole number from 0", timeout=WAIT)
    page.keyboard.press("Alt+n")
    send(page, "again")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(FAULT)).to_have_count(0, timeout=WAIT)


def test_the_settings_title_stays_above_what_scrolls(page: Page) -> None:
    page.keyboard.press("Alt+s")
    title = page.evaluate("getComputedStyle(document.querySelector('#settings'), '::before').backgroundColor")
    assert title not in ("rgba(0, 0, 0, 0)", "transparent")


@pytest.mark.parametrize("width", [1280, 390])
def test_sliders_look_empty_at_0_and_are_whole(browser: Browser, server: Server, width: int) -> None:
    """In the dark an empty track is dark, and no edge cuts the thumb; nothing scrolls over the title."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme="dark")
    page = context.new_page()
    visit(page, server.url)
    page.keyboard.press("Alt+s")
    slider = page.locator("#settings input[type=range]").first
    expect(slider).to_be_in_viewport(timeout=WAIT)
    page.wait_for_timeout(400)
    box = slider.bounding_box()
    assert box
    assert box["height"] >= 16
    assert slider.evaluate("n => getComputedStyle(n.closest('.block')).overflow") == "visible"
    middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2 - 1, "width": 20, "height": 2}
    track = Image.open(io.BytesIO(page.screenshot(clip=middle))).convert("L")
    assert track.getextrema()[1] < 128
    top = page.evaluate("document.querySelector('#settings .sidebar-content').getBoundingClientRect().top")
    assert top >= 48
    context.close()


# ---- keyboard


def test_the_settings_hold_the_focus_and_give_it_back(page: Page) -> None:
    within = "document.querySelector('#settings').contains(document.activeElement)"
    page.locator(".dc-composer textarea").focus()
    page.keyboard.press("Alt+s")
    page.wait_for_function(within)
    expect(page.locator("#decoder input:checked")).to_be_focused()
    for key in ["Tab"] * 30 + ["Shift+Tab"] * 35:
        page.keyboard.press(key)
        assert page.evaluate(within)
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).not_to_have_class(re.compile("open"))
    expect(page.locator(".dc-composer textarea")).to_be_focused()


def test_the_tabs_are_a_row_of_keys_with_a_shortcut_each(page: Page) -> None:
    chosen = page.locator("[role=tab][aria-selected=true]")
    page.keyboard.press("Alt+Shift+L")
    expect(chosen).to_have_text("Learn")
    for key, name in (("ArrowRight", "Hardware"), ("ArrowRight", "Chat"), ("End", "Hardware"), ("ArrowLeft", "Learn")):
        page.keyboard.press(key)
        expect(chosen).to_have_text(name)
        expect(chosen).to_be_focused()
    page.keyboard.press("Home")
    for letter, name in (("H", "Hardware"), ("R", "Race"), ("C", "Chat"), ("R", "Race")):
        page.keyboard.press(f"Alt+Shift+{letter}")
        expect(chosen).to_have_text(name)
    page.keyboard.press("/")
    expect(chosen).to_have_text("Chat")
    expect(page.locator(".dc-composer textarea")).to_be_focused()
    page.locator(".dc-thread").focus()
    page.keyboard.press("?")
    for name in ("Chat", "Race", "Learn", "Hardware"):
        expect(page.get_by_role("dialog").get_by_role("cell", name=name, exact=True)).to_be_visible()


def test_a_stopped_answer_is_not_called_finished(page: Page) -> None:
    send(page, "Hello LONG")
    expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator("#dc-voice")).to_contain_text("Answer stopped.", timeout=WAIT)
    expect(page.locator(".dp-hidden[aria-live=polite]")).to_contain_text("Answer stopped: ", timeout=WAIT)


def test_the_menu_of_a_chat_opens_and_closes_by_keyboard(page: Page) -> None:
    send(page, "Row of keys")
    answered(page)
    link = page.locator(".dc-list a", has_text="Row of keys").first
    link.focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="Rename")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator(".dc-menu[open]")).to_have_count(0)
    expect(link).to_be_focused()


def test_the_focus_stays_in_the_list_when_a_chat_is_deleted(page: Page) -> None:
    for words in ("Stays there", "Goes away"):
        page.keyboard.press("Alt+n")
        send(page, words)
        answered(page)
    page.locator(".dc-list a", has_text="Goes away").first.focus()
    page.keyboard.press("Delete")
    expect(page.locator(".dc-list a", has_text="Goes away")).to_have_count(0, timeout=WAIT)
    expect(page.locator(".dc-list a", has_text="Stays there").first).to_be_focused()


def test_the_first_stop_leads_to_the_message_box(page: Page) -> None:
    page.locator(".dc-composer textarea").evaluate("e => e.blur()")
    page.evaluate("document.body.focus()")
    page.locator(".dc-skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".dc-composer textarea")).to_be_focused()
    assert page.evaluate("document.querySelector('a, button, input, textarea').className") == "dc-skip"


# ---- the picture


def test_the_picture_follows_the_version(page: Page) -> None:
    """It is of the version on screen; of one written by hand it says that there is nothing to show."""
    send(page, "Two versions")
    answered(page)
    hovered(page, "theirs", "Answer again")
    expect(page.locator(".dc-versions")).to_contain_text("2/2", timeout=WAIT)
    answered(page)
    hovered(page, "theirs", "Version before")
    expect(page.locator(".dc-versions")).to_contain_text("1/2")
    page.wait_for_function("duochat.picture_.message === duochat.chat_.messages.at(-1).id")
    page.wait_for_function("duochat.picture_.picture.answer.text === duochat.chat_.messages.at(-1).text")
    hovered(page, "theirs", "Edit")
    page.get_by_label("Edit the message").fill("By hand")
    page.get_by_role("button", name="Keep as a new version").click()
    expect(page.locator(".dc-blank")).to_contain_text("written by hand", timeout=WAIT)


def test_a_telephone_can_close_the_picture(browser: Browser, server: Server) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    page = context.new_page()
    visit(page, server.url)
    page.get_by_role("button", name="Live picture (").click()
    page.get_by_role("button", name="Close the live picture").click()
    expect(page.locator("#picture")).to_be_hidden()
    page.get_by_role("button", name="Live picture (").click()
    page.keyboard.press("Escape")
    expect(page.locator("#picture")).to_be_hidden()
    context.close()


def test_lanes_are_named_by_what_they_do_with_their_devices(page: Page) -> None:
    """The fake machine has no graphics card: nothing on the page may speak of one as if it were there."""
    expect(page.locator(".dc-chip")).to_have_attribute("title", re.compile("no graphics card here"), timeout=WAIT)
    send(page, "Where do you run?")
    answered(page)
    expect(page.locator(".dp-lanes figcaption")).to_contain_text("Draft on CPU, 2 threads. Target on CPU, 2 threads.")
    assert "GPU" not in page.locator("#picture").inner_text()
