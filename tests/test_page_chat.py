"""The page in a real browser, on a fake engine: every thing that a user does with a chat."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright")
from browsing import TESTS, WAIT, Server, answered, hovered, last, send, unfold, visit
from playwright.sync_api import Browser, Page, expect

from duochat import config

pytestmark = pytest.mark.browser


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """A new visitor at an empty chat. Errors of the page's scripts fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda fault: faults.append(str(fault)))
    visit(opened, server.url)
    yield opened
    context.close()
    assert not faults


# ---- asking and reading


def test_an_answer_streams_and_is_dressed(page: Page) -> None:
    """Markdown, code colours, formula and figures of the finished answer; the ribbon's text is the answer's."""
    send(page, "What is it?")
    expect(page.locator(".dc-message.live")).to_be_visible(timeout=WAIT)
    answered(page)
    bubble = page.locator("[data-testid=bot]").last
    expect(bubble.locator("ol > li")).to_have_count(3)
    expect(bubble.locator("pre .k").first).to_have_text("def")
    expect(bubble.locator(".katex").first).to_be_visible()
    expect(page.locator(".dc-figures").last).to_have_text(re.compile(r"^\d+ tokens/s · 1\.9× plain$"))
    expect(page.locator(".dc-figures").last).to_have_attribute("title", re.compile("α 0.* · τ .* · DuoTree"))
    assert "Voilà: naïve café 👩‍🚀." in last(page)
    raw = page.evaluate("duochat.chat_.messages.at(-1).text")
    unfold(page, "Token by token")
    page.wait_for_function("raw => document.querySelector('.dp-ribbon').textContent === raw", arg=raw)


def test_the_user_message_is_shown_as_typed(page: Page) -> None:
    send(page, "a <b>b</b> **c**\n`d`")
    answered(page)
    assert page.locator("[data-testid=user]").last.inner_text() == "a <b>b</b> **c**\n`d`"


def test_shift_enter_makes_a_new_line(page: Page) -> None:
    box = page.locator(".dc-composer textarea")
    box.fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert box.input_value() == "one\ntwo"
    expect(page.locator(".dc-message")).to_have_count(0)


def test_an_empty_message_cannot_be_sent(page: Page) -> None:
    send(page, "   \n ")
    expect(page.locator(".dc-message")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


# ---- stop


@pytest.mark.parametrize(
    ("word", "phase"),
    [("SLOWLOAD", "Fetching"), ("SLOWPREFILL", "Reading the prompt"), ("LONG", "Writing")],
)
def test_stop_answers_within_half_a_second(page: Page, word: str, phase: str) -> None:
    """In every phase."""
    send(page, f"Please {word} LONG")
    expect(page.locator(".dc-phase")).to_contain_text(phase, timeout=WAIT)
    stopped_in_time(page)
    expect(page.locator(".dc-message.theirs").last).to_contain_text("Stopped.")


def stopped_in_time(page: Page) -> None:
    """Press Stop; the answer ends within half a second. On a busy machine a mere call takes long too: that is added."""
    call, took = page.evaluate(STOP_AND_TIME)
    assert took <= 500 + 5 * max(0, call - 30), f"Stop took {took:.0f} ms, a mere call {call:.0f} ms"


STOP_AND_TIME = """async () => {
  const clock = async (work) => { const begun = performance.now(); await work(); return performance.now() - begun; };
  const call = () => fetch("live/-", { method: "POST" });
  const mere = Math.max(await clock(call), await clock(call));
  const took = await clock(async () => {
    document.querySelector('.dc-stop').click();
    while (document.body.classList.contains('dc-busy')) await new Promise(requestAnimationFrame);
  });
  return [Math.max(mere, await clock(call)), took];
}"""


def test_stop_in_the_queue(page: Page, browser: Browser, server: Server) -> None:
    """A second tab waits behind the first, sees its place, and can leave the queue."""
    send(page, "LONG")
    expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    other = browser.new_page()
    visit(other, server.url)
    send(other, "And I?")
    expect(other.locator(".dc-phase")).to_contain_text("one answer before this one", timeout=WAIT)
    stopped_in_time(other)
    page.keyboard.press("Escape")
    answered(page)
    other.close()


# ---- faults


@pytest.mark.parametrize(
    ("word", "told"),
    [("BOOM", "went wrong on the server (RuntimeError)"), ("FAULT", "ends too early: fetch it again")],
)
def test_a_fault_is_a_sentence_and_the_next_message_works(page: Page, word: str, told: str) -> None:
    send(page, f"Now {word}")
    expect(page.locator(".dc-message.theirs .dc-fault")).to_contain_text(told, timeout=WAIT)
    send(page, "And now?")
    answered(page, 2)
    assert "Voilà" in last(page)


def test_a_setting_out_of_range_is_told_and_the_text_comes_back(page: Page) -> None:
    page.keyboard.press("Alt+s")
    page.get_by_label("Seed", exact=True).fill("-3")
    page.keyboard.press("Tab")
    page.wait_for_timeout(500)  # Gradio takes a number over some time after it was typed
    page.keyboard.press("Escape")
    send(page, "Keep me")
    expect(page.locator(".dc-messages > .dc-fault")).to_contain_text("Seed is -3", timeout=WAIT)
    assert page.locator(".dc-composer textarea").input_value() == "Keep me"


# ---- versions, editing, continuing, undo


def test_retry_keeps_both_versions(page: Page) -> None:
    send(page, "Hello")
    answered(page)
    first = page.evaluate("duochat.chat_.messages.at(-1).id")
    hovered(page, "theirs", "Answer again")
    expect(page.locator(".dc-versions")).to_contain_text("2/2", timeout=WAIT)
    answered(page)
    hovered(page, "theirs", "Version before")
    expect(page.locator(".dc-versions")).to_contain_text("1/2")
    assert page.evaluate("duochat.chat_.messages.at(-1).id") == first


def test_edit_of_the_users_message_branches(page: Page) -> None:
    send(page, "Hello")
    answered(page)
    send(page, "More")
    answered(page, 2)
    first = page.locator(".dc-message.mine").first
    first.hover()
    first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("Good day")
    page.keyboard.press("Enter")
    expect(page.locator("[data-testid=user]").first).to_have_text("Good day", timeout=WAIT)
    answered(page, 1)
    first.hover()
    first.get_by_role("button", name="Version before").click()
    expect(page.locator("[data-testid=user]")).to_have_text(["Hello", "More"])


def test_edit_of_an_answer_is_a_new_version(page: Page) -> None:
    send(page, "Hello")
    answered(page)
    hovered(page, "theirs", "Edit")
    page.get_by_label("Edit the message").fill("My *own* words")
    page.get_by_role("button", name="Keep as a new version").click()
    expect(page.locator("[data-testid=bot] em")).to_have_text("own", timeout=WAIT)
    expect(page.locator(".dc-versions")).to_contain_text("2/2")


def test_continue_extends_a_cut_answer(page: Page) -> None:
    send(page, "CUT it")
    answered(page)
    assert last(page).strip() == "This answer stops in the mid"
    hovered(page, "theirs", "Continue")
    expect(page.locator("[data-testid=bot]").last).to_contain_text(
        "in the mid And here it goes on to its end.", timeout=WAIT
    )
    answered(page)
    expect(page.locator(".dc-versions")).to_contain_text("2/2")


def test_take_back_gives_the_text_to_the_composer(page: Page) -> None:
    send(page, "Not yet")
    answered(page)
    hovered(page, "mine", "Take back")
    expect(page.locator(".dc-message")).to_have_count(0)
    assert page.locator(".dc-composer textarea").input_value() == "Not yet"


# ---- conversations


def test_side_bar_search_rename_delete_undo(page: Page) -> None:
    send(page, "Zebra stripes")
    answered(page)
    item = page.locator(".dc-list li", has_text="Zebra stripes")
    item.get_by_role("link").dblclick()
    page.get_by_label("New name").fill("Okapi")
    page.keyboard.press("Enter")
    renamed = page.locator(".dc-list li", has_text="Okapi")
    expect(renamed).to_be_visible(timeout=WAIT)
    page.get_by_label("Search the conversations").fill("no such thing")
    expect(page.locator(".dc-none")).to_have_text("Nothing found")
    page.get_by_label("Search the conversations").fill("zebra")
    expect(renamed).to_be_visible(timeout=WAIT)
    renamed.hover()
    renamed.locator("summary").click()
    renamed.get_by_role("button", name="Delete").click()
    expect(renamed).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(renamed).to_be_visible(timeout=WAIT)


@pytest.mark.parametrize("form", ["JSON", "Markdown"])
def test_export_then_import(page: Page, tmp_path: Path, form: str) -> None:
    send(page, f"Export as {form}")
    answered(page)
    before = last(page)
    item = page.locator(".dc-list li", has=page.locator("[aria-current]"))
    item.hover()
    item.locator("summary").click()
    with page.expect_download() as caught:
        item.get_by_role("button", name=f"Save as {form}").click()
    path = tmp_path / caught.value.suggested_filename
    caught.value.save_as(path)
    assert path.stem == f"export-as-{form.lower()}"
    page.keyboard.press("Alt+n")
    page.locator(".dc-side input[type=file]").set_input_files(path)
    expect(page.locator(".dc-toast")).to_contain_text("Imported", timeout=WAIT)
    expect(page.locator("[data-testid=bot]")).to_have_count(1, timeout=WAIT)
    assert last(page) == before


def test_a_bad_import_is_told(page: Page, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"what": 1}))
    page.locator(".dc-side input[type=file]").set_input_files(bad)
    expect(page.locator(".dc-toast")).to_contain_text("no export of DuoChat", timeout=WAIT)


def test_a_stale_tab_overwrites_nothing(page: Page, browser: Browser, server: Server) -> None:
    send(page, "First")
    answered(page)
    other = browser.new_page()
    visit(other, page.url)
    expect(other.locator("[data-testid=bot]")).to_have_count(1, timeout=WAIT)
    send(other, "Second")
    answered(other, 2)
    other.close()
    send(page, "Third")
    expect(page.locator(".dc-messages > .dc-fault")).to_contain_text("went on in another tab", timeout=WAIT)
    assert page.locator(".dc-composer textarea").input_value() == "Third"
    expect(page.locator("[data-testid=user]")).to_have_text(["First", "Second"])
    page.keyboard.press("Enter")
    answered(page, 3)


def test_another_tab_watches_the_answer(page: Page, browser: Browser) -> None:
    """A tab opened on a conversation that is being answered shows the answer growing, and can stop it."""
    send(page, "LONG")
    expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    other = browser.new_page()
    visit(other, page.url)
    expect(other.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    expect(other.locator(".dc-message.live [data-testid=bot]")).to_contain_text("Speculative", timeout=WAIT)
    other.keyboard.press("Escape")
    answered(other)
    answered(page)
    other.close()


def test_an_answer_goes_on_when_its_tab_is_closed(page: Page, browser: Browser, server: Server) -> None:
    send(page, "I go away")
    expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    url = page.url
    page.goto("about:blank")
    time.sleep(3)
    visit(page, url)
    answered(page)
    assert "Voilà" in last(page)


def test_what_is_typed_survives_a_reload(page: Page) -> None:
    page.locator(".dc-composer textarea").fill("half a thou")
    page.reload()
    page.wait_for_selector(".dc-composer textarea", timeout=30_000)
    expect(page.locator(".dc-composer textarea")).to_have_value("half a thou")


def test_restart_of_the_server(browser: Browser, tmp_path: Path) -> None:
    """An open page says that the server is gone, keeps the text, and finds all again, settings and picture too."""
    running = Server(tmp_path / "c.db", "--rate", "100").start()
    page = browser.new_page()
    try:
        visit(page, running.url)
        page.keyboard.press("Alt+s")
        page.get_by_role("radio", name="Creative").check()
        page.keyboard.press("Alt+s")
        send(page, "Remember me")
        answered(page)
        send(page, "LONG")
        expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
        running.stop()
        expect(page.locator(".dc-phase")).to_contain_text("connection is lost", timeout=30_000)
        running.start()
        expect(page.locator("body")).not_to_have_class(re.compile("dc-busy"), timeout=30_000)
        send(page, "Again")
        answered(page, 3)
        page.reload()
        expect(page.locator("[data-testid=user]")).to_have_text(["Remember me", "LONG", "Again"], timeout=WAIT)
        expect(page.locator(".dc-now")).to_contain_text("Creative", timeout=WAIT)
        hovered(page, "theirs", "Show how it was made")
        unfold(page, "Token by token")
        expect(page.locator(".dp-ribbon")).to_contain_text("Speculative decoding", timeout=WAIT)
    finally:
        page.close()
        running.stop()


# ---- looks and hands


def test_the_page_says_how_far_it_has_come_where_it_listens_now(page: Page) -> None:
    """An answer that follows at once is heard at another address: told to the old one, it came once a second."""
    told = page.evaluate("""async () => {
      const [told, fetched] = [[], window.fetch];
      window.fetch = async (address, { body }) => void told.push(`${address} ${body}`);
      duochat.chat_.acknowledge("first", 7);
      duochat.chat_.acknowledge("second", 1);
      await new Promise((done) => setTimeout(done, 700));
      window.fetch = fetched;
      return told.at(-1);
    }""")
    assert told == "live/second 1"


def test_keyboard_alone(page: Page) -> None:
    """Send, stop, retry, settings, help and search without a mouse."""
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("Hello LONG")
    page.keyboard.press("Enter")
    expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    page.keyboard.press("Escape")
    answered(page)
    page.keyboard.press("Alt+r")
    expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    page.keyboard.press("Escape")
    expect(page.locator(".dc-versions")).to_contain_text("2/2", timeout=WAIT)
    page.locator(".dc-thread").focus()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+s")
    expect(page.locator("#settings")).to_have_class(re.compile("open"))
    page.keyboard.press("Escape")
    page.evaluate("duochat.toggle('settings'), duochat.toggle('settings')")  # so fast that nothing has the focus yet
    page.wait_for_timeout(100)
    page.keyboard.press("Alt+k")
    expect(page.get_by_label("Search the conversations")).to_be_focused()


def test_an_emptied_number_keeps_its_value(page: Page) -> None:
    """Gradio answers "no number" with a fault; the field takes its number back before that is sent."""
    faults = []
    page.on("response", lambda response: faults.append(response.url) if response.status >= 500 else None)
    page.keyboard.press("Escape")
    page.keyboard.press("Alt+s")
    for field in page.locator("#settings input[type=number]").all():
        before = field.input_value()
        field.fill("")
        field.blur()
        expect(field).to_have_value(before)
    send(page, "Hello")
    answered(page)
    assert faults == []


def test_the_side_bar_gives_way_when_the_window_shrinks(page: Page) -> None:
    page.set_viewport_size({"width": 1280, "height": 800})
    page.wait_for_function("window.duochat.isOpen('side-bar')")
    page.set_viewport_size({"width": 600, "height": 800})
    page.wait_for_function("!window.duochat.isOpen('side-bar')")


SMALL = """[...document.querySelectorAll(':is(.dc-head, .dc-composer, .dc-tools) button, .dc-reopen, [role=tab]')]
  .map(b => [b.title || b.textContent, b.getBoundingClientRect()])
  .filter(([, r]) => r.width && (r.width < 44 || r.height < 44)).map(([name, r]) => [name, r.width, r.height])"""


def test_390_pixels(browser: Browser, server: Server) -> None:
    """Nothing overflows on a telephone, fingers hit what they aim at; picture and side bar open over the chat."""
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    page = context.new_page()
    visit(page, server.url)
    send(page, "Hello")
    answered(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    box = page.locator(".dc-composer").bounding_box()
    assert box
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert page.evaluate(SMALL) == []
    tabs, head = page.get_by_role("tab", name="Hardware").bounding_box(), page.locator(".dc-head").bounding_box()
    assert tabs
    assert head
    assert tabs["x"] + tabs["width"] <= head["x"] + 1
    page.get_by_role("button", name="Live picture (").click()
    expect(page.locator(".dp-sentence")).to_be_visible(timeout=WAIT)
    page.get_by_role("button", name="Live picture (").click()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator(".dc-list li").first).to_be_in_viewport(timeout=WAIT)
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(browser: Browser, server: Server, scheme: str) -> None:
    """All text of the chat and the side bar has a contrast of 4.5 or more, in light and in dark."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
    page = context.new_page()
    visit(page, server.url)
    send(page, "Hello")
    answered(page)
    page.wait_for_timeout(400)
    poor = page.evaluate((TESTS / "contrast.js").read_text())
    assert not poor, poor
    context.close()


def test_five_tabs(browser: Browser, server: Server) -> None:
    """Five tabs of one browser: all load, all are answered in turn."""
    context = browser.new_context()
    tabs = [context.new_page() for _ in range(5)]
    for i, tab in enumerate(tabs):
        visit(tab, server.url)
        send(tab, f"Tab {i}")
    for tab in tabs:
        tab.bring_to_front()
        expect(tab.locator(".theirs .dc-tools")).to_have_count(1, timeout=60_000)
    context.close()


def test_guessing_that_pauses_says_so_while_it_does(page: Page) -> None:
    """In one word here and in the picture, which has the whole reason; whole also on a telephone."""
    send(page, "OFF please")
    expect(page.locator(".dc-badge")).to_have_text("Guessing paused: no gain here", timeout=WAIT)
    expect(page.locator(".dp-badge")).to_have_text("Guessing paused: the measured gain is 0.9", timeout=WAIT)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("(b => b.scrollWidth <= b.clientWidth)(document.querySelector('.dc-badge'))")
    answered(page)
    expect(page.locator(".dc-badge")).to_be_hidden()


def test_context_meter_and_figures(page: Page) -> None:
    send(page, "Hello LONG")
    expect(page.locator(".dc-numbers")).to_contain_text(re.compile(r"tok/s.*first token"), timeout=WAIT)
    meter = page.get_by_role("meter", name="Context used")
    expect(meter).to_have_attribute("aria-valuemax", "4096")
    assert int(meter.get_attribute("aria-valuenow") or 0) > 0
    page.keyboard.press("Escape")
    answered(page)


def test_the_picker_lists_every_pair_and_why_one_does_not_fit(page: Page) -> None:
    page.get_by_role("button", name=re.compile("SmolLM2")).click()
    sheet = page.get_by_role("dialog", name="Models")
    expect(sheet.locator(".dc-used")).to_contain_text("In use", timeout=WAIT)
    pairs = sheet.locator(".dc-pair", has_text="GiB for the target")
    expect(pairs).to_have_count(len(config.presets()))
    expect(sheet.locator("h4").first).to_contain_text("Up to")
    for unfit in sheet.locator(".dc-pair.unfit").all():
        expect(unfit).to_contain_text("Does not fit: ")
        assert not unfit.get_by_role("button", name="Load").count()
    page.keyboard.press("Escape")
    expect(sheet).to_have_count(0)


def test_a_conversation_opens_from_any_tab(page: Page) -> None:
    send(page, "Find me again")
    answered(page)
    page.get_by_role("tab", name="Learn").click()
    expect(page.locator(".dc-thread")).to_be_hidden()
    page.locator(".dc-list a", has_text="Find me again").first.click()
    expect(page.locator(".dc-thread")).to_be_visible()
    page.get_by_role("tab", name="Race").click()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".dc-empty")).to_be_visible()


@pytest.mark.parametrize("media", [{"reduced_motion": "reduce"}, {"forced_colors": "active"}])
def test_reduced_motion_and_forced_colours(browser: Browser, server: Server, media: dict[str, str]) -> None:
    """Nothing is animated for those who asked for rest; with forced colours the bubble and the buttons keep an edge."""
    context = browser.new_context(**media)
    page = context.new_page()
    visit(page, server.url)
    send(page, "Hello LONG")
    expect(page.locator(".dc-phase")).to_have_text("Writing", timeout=WAIT)
    if "reduced_motion" in media:
        moving = "document.getAnimations().filter((a) => a.playState === 'running').length"
        assert page.evaluate(moving) == 0
    else:
        edge = page.locator("[data-testid=user]").evaluate("e => getComputedStyle(e).borderTopWidth")
        assert edge == "1px"
    page.keyboard.press("Escape")
    answered(page)
    context.close()


def test_a_long_conversation_stays_where_the_reader_is(page: Page) -> None:
    """At the end the thread follows the answer; scrolled up it stays, and a button leads down again."""
    send(page, "LONG")
    expect(page.locator(".dc-block")).to_have_count(14, timeout=WAIT)
    assert page.locator(".dc-thread").evaluate("e => e.scrollTop") == 0
    page.locator(".dc-thread").hover()
    page.mouse.wheel(0, -500)
    expect(page.get_by_role("button", name="To the end")).to_be_visible()
    before = page.locator(".dc-thread").evaluate("e => e.firstChild.getBoundingClientRect().top")
    page.wait_for_timeout(700)
    after = page.locator(".dc-thread").evaluate("e => e.firstChild.getBoundingClientRect().top")
    assert abs(after - before) < 5
    page.get_by_role("button", name="To the end").click()
    assert page.locator(".dc-thread").evaluate("e => e.scrollTop") == 0
    page.keyboard.press("Escape")
    answered(page)
