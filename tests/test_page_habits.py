"""What people know from other chats, in a real browser: messages that wait, deleting, prompts, files, folders, themes,
sharing one answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

pytest.importorskip("playwright")
from browsing import WAIT, Server, answered, hovered, last, send, visit
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    opened, faults = context.new_page(), []
    opened.on("pageerror", lambda fault: faults.append(str(fault)))
    visit(opened, server.url)
    yield opened
    context.close()
    assert not faults


def test_messages_wait_their_turn_and_can_be_taken_back(page: Page) -> None:
    send(page, "First")
    page.wait_for_selector(".dc-message.live")
    send(page, "Second")
    send(page, "Third")
    expect(page.locator(".dc-queued")).to_have_count(2)
    page.locator(".dc-queued", has_text="Third").get_by_role("button", name="Take it back").click()
    expect(page.locator(".dc-composer textarea")).to_have_value("Third")
    page.locator(".dc-composer textarea").fill("")
    answered(page, 2)
    assert page.locator("[data-testid=user]").all_inner_texts() == ["First", "Second"]
    expect(page.locator(".dc-queued")).to_have_count(0)


def test_after_stop_nothing_is_sent_by_itself(page: Page) -> None:
    send(page, "LONG")
    page.wait_for_selector(".dc-message.live .dc-block")
    send(page, "And then?")
    expect(page.locator(".dc-queued")).to_have_count(1)
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".dc-composer textarea")).to_have_value("And then?")
    assert page.locator("[data-testid=user]").all_inner_texts() == ["LONG"]


def test_what_waits_survives_a_reload(page: Page) -> None:
    send(page, "LONG")
    page.wait_for_selector(".dc-message.live .dc-block")
    send(page, "Still there?")
    page.reload()
    expect(page.locator(".dc-queued")).to_contain_text("Still there?", timeout=WAIT)
    page.get_by_role("button", name="Stop (Esc)").click()
    answered(page)


def test_one_message_is_deleted(page: Page) -> None:
    for i, words in enumerate(("One", "Two"), 1):
        send(page, words)
        answered(page, i)
    page.locator(".dc-message.theirs").first.hover()
    page.locator(".dc-message.theirs").first.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("dialog").get_by_role("button", name="Delete")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".dc-message.theirs")).to_have_count(1)
    page.reload()
    expect(page.locator(".dc-message")).to_have_count(3, timeout=WAIT)
    assert page.locator("[data-testid=user]").all_inner_texts() == ["One", "Two"]


def test_prompts_are_kept_and_used(page: Page) -> None:
    box = page.locator(".dc-composer textarea")
    box.fill("Explain this\nto a child: ")
    page.get_by_role("button", name="Prompts").click()
    sheet = page.get_by_role("dialog", name="Prompts")
    sheet.get_by_role("button", name="Keep what is in the message box").click()
    expect(sheet.get_by_role("region", name="Explain this")).to_be_visible()
    page.keyboard.press("Escape")
    box.fill("")
    page.reload()
    page.get_by_role("button", name="Prompts").click()
    sheet.get_by_role("button", name="Use").click()
    expect(box).to_have_value("Explain this\nto a child: ")
    page.get_by_role("button", name="Prompts").click()
    sheet.get_by_role("button", name="Forget Explain this").click()
    expect(sheet).to_contain_text("None kept yet")


def test_text_files_come_into_the_message(page: Page, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.bin"
    good.write_text("x = '```'\n")
    bad.write_bytes(b"\0\1\2")
    page.get_by_label("Text files", exact=True).set_input_files([good, bad])
    box = page.locator(".dc-composer textarea")
    expect(box).to_have_value("good.py\n````py\nx = '```'\n````\n")
    expect(page.locator(".dc-toast")).to_contain_text("bad.bin holds no text")
    dropped = "new File(['dropped words'], 'note.txt', { type: 'text/plain' })"
    page.evaluate(f"""() => {{
      const data = new DataTransfer();
      data.items.add({dropped});
      document.querySelector(".dc-composer").dispatchEvent(
        new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }}));
    }}""")
    expect(box).to_have_value("good.py\n````py\nx = '```'\n````\n\n\nnote.txt\n```txt\ndropped words\n```\n")


def test_a_chat_is_pinned_and_filed(page: Page) -> None:
    for words in ("Older chat", "Newer chat"):
        page.keyboard.press("Alt+n")
        send(page, words)
        answered(page)
    row = page.locator(".dc-list li", has_text="Older chat").first

    def choose(name: str) -> None:
        row.hover()
        row.locator("summary").click()
        row.get_by_role("button", name=name).click()

    choose("Pin")
    expect(page.locator(".dc-list h3").first).to_have_text("Pinned")
    expect(page.locator(".dc-list li").first).to_contain_text("Older chat")
    choose("Into a folder")
    page.get_by_role("combobox", name="Folder").fill("Work")
    page.keyboard.press("Enter")
    expect(page.locator(".dc-list h3").first).to_have_text("Work")
    page.reload()
    expect(page.locator(".dc-list h3").first).to_have_text("Work", timeout=WAIT)
    choose("Out of “Work”")
    expect(page.locator(".dc-list h3").first).to_have_text("Today")


def test_the_theme_is_chosen_and_kept(page: Page) -> None:
    body = page.locator("body")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    for _ in range(2):
        page.get_by_role("button", name="Theme: ").click()
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert page.evaluate(paper) != light
    page.reload()
    page.wait_for_selector(".dc-composer textarea")
    expect(page.get_by_role("button", name="Theme: dark")).to_be_visible(timeout=WAIT)
    assert "dark" in body.get_attribute("class")
    page.get_by_role("button", name="Theme: dark").click()
    assert page.evaluate(paper) == light
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("document.body.classList.contains('dark')")


def test_an_answer_is_shared_with_its_tint_and_lanes(page: Page, tmp_path: Path) -> None:
    """One file that needs neither server nor network."""
    send(page, "What is it?")
    answered(page)
    text = last(page)
    page.locator(".dc-message.theirs").hover()
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save this answer as a page").click()
    assert saving.value.suggested_filename == "what-is-it.html"
    file = tmp_path / "answer.html"
    saving.value.save_as(file)
    other, asked = page.context.new_page(), []
    other.on("request", lambda request: asked.append(request.url))
    other.goto(file.as_uri())
    expect(other.locator(".dc-saved .mine")).to_have_text("What is it?")
    other.wait_for_function("CSS.highlights.get('dc-accepted')?.size > 3")
    assert other.locator(".dc-saved .theirs li").count() == 3
    assert other.locator(".dc-saved .theirs").inner_text().split()[:5] == text.split()[:5]
    assert other.locator(".dp-lanes canvas").first.bounding_box()["width"] > 200
    assert asked == [file.as_uri()]


def test_another_version_has_another_seed_unless_it_is_pinned(page: Page) -> None:
    page.keyboard.press("Alt+s")
    page.get_by_label("Keep the seed").check()
    page.reload()
    expect(page.get_by_label("Keep the seed")).to_be_checked(timeout=WAIT)
    send(page, "Which seed?")
    answered(page)
    seeds = []
    for pinned in (True, False):
        page.locator("#pinned input").evaluate("(box, on) => box.checked === on || box.click()", pinned)
        hovered(page, "theirs", "Answer again")
        expect(page.locator(".dc-versions")).to_contain_text(f"{len(seeds) + 2}/", timeout=WAIT)
        answered(page)
        with page.expect_download() as saving:
            hovered(page, "theirs", "Save this answer as a page")
        html = saving.value.path().read_text("utf-8")
        seeds.append(int(html.rpartition('"seed":')[2].partition(",")[0]))
    assert seeds == [0, 2]


def test_links_lead_into_other_tabs(page: Page, server: Server) -> None:
    page.goto("about:blank")
    page.goto(f"{server.url}/#learn/pays/story")
    expect(page.locator(".dpl-body h3")).to_have_text("When it pays", timeout=WAIT)
    page.goto("about:blank")
    page.goto(
        f"{server.url}/#race/{quote(urlencode({'prompt': 'One two', 'left': 'speculative', 'seed': 3}), safe='')}"
    )
    expect(page.get_by_label("Prompt of the race")).to_have_value("One two", timeout=WAIT)
    expect(page.locator(".dpr-form select").first).to_have_value("speculative")
    page.get_by_role("tab", name="Chat").click()
    send(page, "And here?")
    answered(page)
