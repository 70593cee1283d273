"""The first screen, and the answer that carries its tokens' origins, in a real browser on a fake engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright")
from browsing import WAIT, Server, answered, hovered, send, visit
from playwright.sync_api import Browser, Page, expect

from duochat.app.prose import render

pytestmark = pytest.mark.browser
SIZES = """Object.fromEntries(['accepted', 'correction', 'bonus', 'round', 'cursor']
  .map(kind => [kind, CSS.highlights.get(`dc-${kind}`)?.size || 0]))"""
PLACED = """() => { const { origins, answer } = duochat.picture_.picture;
  const text = r => { const made = document.createRange(); made.setStart(r.startContainer, r.startOffset);
    made.setEnd(r.endContainer, r.endOffset); return made.toString(); };
  return answer.tokens.map(t => [t.text, origins.rangesOfToken(t).map(text)]); }"""
WORDS = """() => { const body = document.querySelector("[data-testid=bot]").cloneNode(true);
  body.querySelectorAll(".math, .dc-code-head").forEach(n => n.remove()); return body.textContent; }"""
CORRECTIONS = "duochat.picture_.picture.answer.tokens.filter(t => t.kind === 'correction').map(t => t.text)"
TINTED = """() => [...CSS.highlights.get('dc-correction')].map(r =>
  r.startContainer.data.slice(r.startOffset, r.endOffset))"""


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened, faults = context.new_page(), []
    opened.on("pageerror", lambda fault: faults.append(str(fault)))
    visit(opened, server.url)
    yield opened
    context.close()
    assert not faults


# ---- first screen


def test_the_first_screen_says_what_it_is_and_who_answers(page: Page) -> None:
    expect(page.locator(".dc-empty h1")).to_have_text("Two models write one answer")
    expect(page.locator(".dc-answering")).to_contain_text("Tiny demonstration model", timeout=WAIT)
    page.get_by_role("button", name="Choose a better one").click()
    expect(page.get_by_role("dialog", name="Models")).to_be_visible()


def test_the_moving_picture_moves_and_leads_to_learn(page: Page) -> None:
    scene = page.locator(".dp-demo-stage")
    seen = set()
    for _ in range(120):
        seen.add(scene.get_attribute("data-scene"))
        page.wait_for_timeout(100)
        if len(seen) == 4:
            break
    assert seen == {"guess", "check", "keep", "text"}
    page.get_by_role("button", name="How this works").click()
    expect(page.locator(".dpl-chapter").first).to_be_visible(timeout=WAIT)


def test_who_asked_for_rest_sees_the_last_scene_and_all_words(browser: Browser, server: Server) -> None:
    context = browser.new_context(reduced_motion="reduce", viewport={"width": 1280, "height": 800})
    page = context.new_page()
    visit(page, server.url)
    page.wait_for_timeout(3200)
    assert page.get_attribute(".dp-demo-stage", "data-scene") == "text"
    words = page.inner_text(".dp-demo-words")
    assert all(told in words for told in ("guesses the next words", "one slow step", "gives way"))
    assert page.evaluate("document.getAnimations().filter(a => a.playState === 'running').length") == 0
    context.close()


# ---- one text


def test_the_answer_carries_its_origins(page: Page) -> None:
    """Every range holds words of its own token, through lists, a formula, code and a table; nothing is wrapped."""
    send(page, "What is it?")
    answered(page)
    page.wait_for_timeout(300)
    placed = page.evaluate(PLACED)
    shown = [(text, "".join(pieces)) for text, pieces in placed if pieces]
    assert all(pieces.strip() in text for text, pieces in shown)
    words = page.evaluate(WORDS)
    assert re.sub(r"\s", "", "".join(pieces for _, pieces in shown)) == re.sub(r"\s", "", words)
    corrections, tinted = "".join(page.evaluate(CORRECTIONS)), page.evaluate(TINTED)
    assert tinted
    assert all(part.strip() in corrections for part in tinted)
    assert page.locator("[data-testid=bot] li span, [data-testid=bot] li mark").count() == 0
    assert page.evaluate(SIZES)["accepted"] > 20


def test_the_tint_grows_with_the_answer_and_can_be_turned_off(page: Page) -> None:
    send(page, "Hello LONG")
    page.wait_for_function("(CSS.highlights.get('dc-accepted')?.size || 0) > 30", timeout=WAIT)
    page.keyboard.press("Escape")
    answered(page)
    box = page.get_by_label("tint the answer")
    box.uncheck()
    page.wait_for_function("!CSS.highlights.get('dc-accepted').size")
    page.reload()
    page.wait_for_selector(".dc-composer textarea", timeout=30_000)
    expect(page.locator("[data-testid=bot]")).to_be_visible(timeout=WAIT)
    expect(page.get_by_label("tint the answer")).not_to_be_checked(timeout=WAIT)
    assert page.evaluate(SIZES)["accepted"] == 0
    page.get_by_label("tint the answer").check()
    page.wait_for_function("CSS.highlights.get('dc-accepted').size > 30")


TINT = "getComputedStyle(document.querySelector('[data-testid=bot] p'), '::highlight(dc-accepted)').backgroundColor"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tint_is_full_while_it_is_written_or_looked_at_and_quiet_else(
    browser: Browser, server: Server, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    visit(page, server.url)
    quiet = "rgba(0, 0, 0, 0)"
    send(page, "Hello LONG")
    page.wait_for_selector(".live .dc-body.lit p", timeout=WAIT)
    assert float(page.evaluate(TINT).split(",")[3].rstrip(")")) >= (0.2 if scheme == "dark" else 0.08)
    page.mouse.move(5, 5)
    page.keyboard.press("Escape")
    answered(page)
    page.wait_for_function(f"{TINT} === {quiet!r}")
    page.hover(".dp-legend")
    page.wait_for_function(f"{TINT} !== {quiet!r}")
    page.mouse.move(5, 5)
    page.wait_for_function(f"{TINT} === {quiet!r}")
    page.locator("[data-testid=bot]").focus()
    page.wait_for_function(f"{TINT} !== {quiet!r}")
    context.close()


WATCH = r"""() => { window.seen = []; window.most = 0;
  const places = n => n.getAnimations()[0].effect.getKeyframes()
    .map(k => k.transform.match(/-?[\d.]+/g).map(Number));
  new MutationObserver(() => {
    const now = [...document.querySelectorAll('.dc-travel')];
    const { y } = document.querySelector('.dp-canvas').getBoundingClientRect();
    most = Math.max(most, now.length);
    for (const n of now) if (!seen.some(([m]) => m === n)) seen.push([n, n.textContent, y, ...places(n)]);
  }).observe(document.querySelector('.dc-tips'), { childList: true }); }"""


def test_tokens_travel_from_lane_to_lane_to_the_text_unless_rest_is_asked_for(browser: Browser, server: Server) -> None:
    for motion, some in (("no-preference", True), ("reduce", False)):
        context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion=motion)
        page = context.new_page()
        visit(page, server.url)
        page.evaluate(WATCH)
        send(page, "Hello LONG")
        page.wait_for_timeout(4000)
        page.keyboard.press("Escape")
        answered(page)
        ways = page.evaluate("seen.map(([, ...rest]) => rest)")
        assert bool(ways) == some
        if some:
            bot = page.locator("[data-testid=bot]").last.bounding_box()
            text, lanes, _, draft, target, end = ways[0]
            assert text in page.locator("[data-testid=bot]").last.inner_text()
            assert bot
            assert lanes < draft[1] < target[1] < lanes + 80
            assert bot["x"] <= end[0] <= bot["x"] + bot["width"]
            assert page.evaluate("most") <= 3
            page.wait_for_function("!document.querySelector('.dc-travel')")
        context.close()


def test_a_footnote_is_followed_within_its_answer(page: Page) -> None:
    send(page, "What is it?")
    answered(page)
    page.wait_for_function("duochat.chat_.live.readyState === EventSource.CLOSED")
    made = "".join(render("One[^a].\n\n[^a]: The note."))
    page.evaluate("html => document.querySelector('[data-testid=bot]').insertAdjacentHTML('afterbegin', html)", made)
    before = page.url
    page.locator("[data-testid=bot] [role=doc-noteref]").click()
    assert page.evaluate("document.activeElement.textContent").startswith("The note.")
    page.locator("[role=doc-backlink]").click()
    assert page.evaluate("document.activeElement.role") == "doc-noteref"
    assert page.url == before


def test_a_continued_answer_is_tinted_from_where_it_went_on(page: Page) -> None:
    send(page, "CUT it")
    answered(page)
    hovered(page, "theirs", "Continue")
    expect(page.locator(".dc-versions")).to_contain_text("2/2", timeout=WAIT)
    answered(page)
    page.wait_for_function("(CSS.highlights.get('dc-accepted')?.size || 0) > 0")
    whole, said = "And here it goes on to its end.", ""
    for _ in range(50):  # the last words are placed a frame after they are written
        said = "".join("".join(pieces) for _, pieces in page.evaluate(PLACED)).strip()
        if said == whole:
            break
        page.wait_for_timeout(100)
    assert said == whole


def test_pointing_at_a_word_shows_its_card_and_its_round(page: Page) -> None:
    send(page, "What is it?")
    answered(page)
    page.locator("[data-testid=bot] li").nth(1).hover()
    card = page.locator(".dc-tips .dp-tip")
    expect(card).to_contain_text("round", timeout=WAIT)
    assert page.evaluate("duochat.picture_.picture.glanced") >= 0
    assert page.evaluate(SIZES)["round"] >= 1
    page.mouse.move(5, 5)
    expect(card).to_be_hidden()
    assert page.evaluate("duochat.picture_.picture.glanced") == -1


def test_the_answer_is_walked_by_keyboard(page: Page) -> None:
    send(page, "What is it?")
    answered(page)
    page.locator("[data-testid=bot]").focus()
    page.keyboard.press("ArrowRight")
    card = page.locator(".dc-tips .dp-tip")
    expect(card).to_be_visible()
    first = card.inner_text()
    page.keyboard.press("ArrowRight")
    expect(card).not_to_have_text(first)
    assert page.evaluate(SIZES)["cursor"] == 1
    page.keyboard.press("Enter")
    assert page.evaluate("duochat.picture_.picture.selected") >= 0
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()
    assert page.evaluate(SIZES)["cursor"] == 0


# ---- figures in order


def test_a_sentence_comes_first_and_the_rest_on_demand(page: Page) -> None:
    send(page, "What is it?")
    answered(page)
    said = page.locator(".dp-sentence")
    expect(said).to_have_text(
        re.compile(
            r"^\d\.\d tokens per step of the large model, \d\.\d times as fast as without the draft, the same text$"
        ),
        timeout=WAIT,
    )
    parts = page.locator("#picture .dp > *").evaluate_all("nodes => nodes.map(n => n.className)")
    assert [p for p in parts if p in ("dp-head", "dp-lanes", "dp-fold")] == ["dp-head", "dp-lanes", *["dp-fold"] * 3]
    assert page.locator(".dp-fold[open]").count() == 0
    page.locator(".dp-fold > summary", has_text="Figures").click()
    page.locator(".dp-figure > summary", has_text="α").click()
    expect(page.locator(".dp-figure-alpha p").first).to_contain_text("Accepted over tested guesses")
    page.reload()
    expect(page.locator(".dp-fold[open] > summary")).to_contain_text("Figures", timeout=WAIT)
