"""Race, Learn and Hardware inside Gradio, in a real browser: their handlers, their plots, and no outside host."""

import re
from typing import ClassVar

import pytest
from simulated import PROSE, SimulatedEngine

from duochat import DuoChatError

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api")
gr = pytest.importorskip("gradio")

COSTS = {"target": {"1": 0.05, "8": 0.0535}, "draft": {"1": 0.01, "2": 0.013}, "sweep": {"1": 0.02, "2": 0.01},
         "threads": 2}  # fmt: skip


class Engine(SimulatedEngine):
    """Knows its costs as soon as they are measured."""

    hardware: ClassVar = {"target_device": "simulated", "target_weight_bytes": 651306240, "costs": {}}

    def calibrate(self):
        self.hardware = {**self.hardware, "costs": COSTS}
        return self.hardware


@pytest.fixture(scope="module")
def address():
    """A Blocks with the three tabs only."""
    from duochat.app import assets, hardware, learn, page, race

    engine = Engine(PROSE[:400])
    with gr.Blocks(analytics_enabled=False) as blocks, gr.Tabs():
        with gr.Tab("Race"):
            page.part("race", serve=page.served(race.Races(engine)))
        with gr.Tab("Learn"):
            page.part("learn", serve=page.served(learn.Lessons(engine)))
        with gr.Tab("Hardware"):
            page.part("hardware", serve=page.served(hardware.Hardware(engine, hardware.Machine())))
    css, script = assets.joined(("picture.css",)), assets.joined(assets.PICTURE)
    head = f"<style>{css}</style><script>{script}</script>"
    _, url, _ = blocks.launch(prevent_thread_lock=True, quiet=True, share=False, head=head, ssr_mode=False)
    yield url
    blocks.close()


@pytest.fixture
def page(address):
    outside = []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path="/usr/bin/chromium", headless=True,
                                    args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"])  # fmt: skip
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.set_default_timeout(60_000)
        page.on("request", lambda r: re.match(rf"{address}|data:|blob:", r.url) or outside.append(r.url))
        page.on("pageerror", lambda fault: outside.append(str(fault)))
        page.goto(address)
        yield page
        browser.close()
    assert [u for u in outside if "fonts.g" not in u] == []  # Gradio's default theme; the page has its own


def test_a_race_from_the_form_to_the_saved_file(page):
    page.wait_for_selector(".dpr-chip")
    page.click(".dpr-chip >> nth=1")
    assert "Fibonacci" in page.input_value(".dpr-form textarea")
    page.click("button:text-is('Start the race')")
    page.wait_for_selector(".dpr-same")
    assert "identical" in page.inner_text(".dpr-same")
    with page.expect_download() as saving:
        page.click("text=Save as HTML")
    html = saving.value.path().read_text("utf-8")
    assert "playRace" in html
    assert PROSE[:40] in html
    with page.expect_download() as saving:
        page.click("text=Save as JSON")
    page.set_input_files(".dpr-open input", saving.value.path())
    page.wait_for_selector(".dpr-same")


def test_an_empty_prompt_gets_a_sentence_and_the_form_stays_usable(page):
    page.wait_for_selector(".dpr-chip")
    page.fill(".dpr-form textarea", " ")
    page.click("button:text-is('Start the race')")
    page.wait_for_selector(".dpr-bad")
    assert "empty" in page.inner_text(".dpr-status")
    assert page.is_enabled("button:text-is('Start the race')")


def test_a_lesson_on_the_users_own_prompt(page):
    page.click("button[role=tab]:has-text('Learn')")
    page.wait_for_selector(".dpl-chapter")
    page.click(".dpl-source summary")
    colour = "e => [getComputedStyle(e, '::placeholder').color, getComputedStyle(e).color]"
    placeholder, text = page.locator(".dpl-own input").evaluate(colour)
    assert placeholder != text
    page.fill(".dpl-own input", "my own question")
    page.click("text=Use it")
    page.wait_for_selector("text=my own question")
    page.click("text=5. When it pays")
    page.wait_for_selector(".dpl-curve-prefetch")


def test_the_exercises_look_like_what_they_are(page):
    """Gradio's styles made the choices squares and moved the numbers onto the border."""
    page.click("button[role=tab]:has-text('Learn')")
    page.click("text=8. Exercises")
    radio = page.locator(".dpl-option input").first
    assert radio.evaluate("e => [e.type, getComputedStyle(e).appearance]") == ["radio", "auto"]
    assert page.locator(".dpl-questions").evaluate("e => parseFloat(getComputedStyle(e).paddingLeft)") >= 24
    whole = page.get_by_role("button", name="On the whole screen").bounding_box()
    assert whole["width"] < 400


def test_measuring_again_fills_plot_and_table(page):
    page.click("button[role=tab]:has-text('Hardware')")
    page.click("#measure")
    page.wait_for_selector("#hardware-plots .dp-curve-draft circle >> nth=1")
    assert page.locator("#hardware-plots text", has_text="60").count() == 1
    page.wait_for_selector(".dp-load:has-text('Processor now')")
    page.wait_for_selector("#hardware-summary :text('5.0 tokens')")
    page.click("#hardware-table summary")
    page.wait_for_selector("#hardware-table td")
    assert page.locator("#hardware-table tbody tr").count() == 6
    told = page.inner_text("#hardware-table dl")
    assert "The target runs on\nsimulated" in told
    assert "0.61 GiB; cache and working space come on top" in told
    page.click("button[role=tab]:has-text('Race')")
    page.click("button[role=tab]:has-text('Hardware')")
    page.reload()
    page.click("button[role=tab]:has-text('Hardware')")
    page.wait_for_selector("#hardware-summary :text('5.0 tokens')")


def test_a_fault_of_the_calibration_is_a_sentence(page, monkeypatch):
    def broken(self):
        raise DuoChatError("There is no sensor: plug one in.")

    monkeypatch.setattr(Engine, "calibrate", broken)
    page.click("button[role=tab]:has-text('Hardware')")
    page.click("#measure")
    page.wait_for_selector("#hardware-summary :text('no sensor')")
