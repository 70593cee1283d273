"""Safe by default: who may reach the page, what it may reach, and that no text of a model does anything."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("gradio")
pytest.importorskip("playwright")
from browsing import WAIT, Server, answered, free_port, send, visit
from playwright.sync_api import Browser, Page, expect

from duochat import DuoChatError
from duochat.api.serve import check_address

pytestmark = pytest.mark.browser


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    answer.body = answer.read().decode("utf-8", "replace")
    return answer


# ---- who may reach it


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_header_is_refused(server: Server, host: str) -> None:
    """A page elsewhere whose name resolves to this machine (DNS rebinding) gets nothing."""
    assert ask(server, "/", Host=host).status == 400


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1"])
def test_a_foreign_origin_is_refused(server: Server, origin: str) -> None:
    assert ask(server, "/gradio_api/queue/join", "POST", Origin=origin).status == 403


def test_own_origin_is_welcome(server: Server) -> None:
    assert ask(server, "/", Origin=server.url).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/upload", "/gradio_api/file=/etc/passwd", "/gradio_api/proxy=https://evil.example", "/docs",
        "/gradio_api/mcp/", "/monitoring", "/gradio_api/call/ask", "/page/../app/ui.py", "/openapi.json",
    ],
)  # fmt: skip
def test_routes_that_the_page_does_not_use_are_closed(server: Server, path: str) -> None:
    assert ask(server, path).status in (403, 404)
    assert ask(server, path, "POST").status in (403, 404, 405)


def test_headers_bind_the_browser_to_this_host(server: Server) -> None:
    answer = ask(server, "/")
    policy = answer.getheader("content-security-policy")
    assert "default-src 'self'" in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    assert "http:" not in policy
    assert answer.getheader("x-content-type-options") == "nosniff"


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.0.1", "::"])
def test_another_address_needs_a_password(address: str) -> None:
    with pytest.raises(DuoChatError, match="--auth user:password"):
        check_address(address, 7860, None, "--auth user:password")


def test_a_taken_port_is_told(server: Server) -> None:
    with pytest.raises(DuoChatError, match=f"Port {server.port}.*--port"):
        check_address("127.0.0.1", server.port, None, "")


def signed_in(browser: Browser, url: str, user: str, password: str) -> Page:
    page = browser.new_context().new_page()
    page.goto(url)
    page.get_by_label("username").fill(user)
    page.get_by_label("password").fill(password)
    page.get_by_role("button", name="Login").click()
    page.wait_for_selector(".dc-composer textarea", timeout=30_000)
    return page


def test_a_page_with_passwords_asks_for_one_and_keeps_users_apart(browser: Browser, tmp_path: Path) -> None:
    """Nothing but the login form without a password; with it the user's own conversations, also by their address."""
    running = Server(tmp_path / "c.db", "--auth", "ann:secret", "--auth", "bob:hidden").start()
    try:
        assert ask(running, "/config").status == 401
        assert ask(running, "/gradio_api/component_server", "POST").status == 401
        ann = signed_in(browser, running.url, "ann", "secret")
        send(ann, "Hello from Ann")
        answered(ann)
        expect(ann.locator(".dc-list")).to_contain_text("Hello from Ann", timeout=WAIT)
        bob = signed_in(browser, f"{running.url}/#{ann.url.split('#')[1]}", "bob", "hidden")
        expect(bob.locator(".dc-fault")).to_contain_text("no longer there", timeout=WAIT)
        expect(bob.locator(".dc-list")).to_contain_text("No conversations yet", timeout=WAIT)
        for page in (ann, bob):
            page.context.close()
    finally:
        running.stop()


# ---- what it may reach


@pytest.fixture
def watched(browser: Browser, server: Server) -> Iterator[tuple[Page, list[str]]]:
    """A page, and every address that it asks for."""
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    visit(page, server.url)
    yield page, asked
    context.close()


def test_no_outside_host_also_with_hostile_markdown(watched: tuple[Page, list[str]], server: Server) -> None:
    """An answer's images, styles, frames and scripts are shown as text; nothing runs and nothing is fetched."""
    page, asked = watched
    send(page, "HOSTILE")
    answered(page)
    bubble = page.locator("[data-testid=bot]").last
    expect(bubble).to_contain_text("<script>window.pwned = 1</script>")
    assert bubble.locator("img, script, iframe, style, link, object").count() == 0
    assert page.evaluate("window.pwned") is None
    assert not bubble.locator("a[href^=javascript]").count()
    page.reload()
    expect(bubble).to_contain_text("window.pwned", timeout=WAIT)
    for tab in ("Race", "Learn", "Hardware"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(500)
    outside = [url for url in asked if not url.startswith((server.url, "data:", "blob:"))]
    assert asked
    assert not outside


def test_the_policy_stops_what_gets_through(watched: tuple[Page, list[str]]) -> None:
    """Even markup that was inserted as it is cannot run a script or reach another host."""
    page, _ = watched
    page.evaluate(
        """() => { document.body.insertAdjacentHTML('beforeend', `<img src=x onerror="window.pwned = 1">`);
        const s = document.createElement('script'); s.textContent = 'window.pwned = 2'; document.body.append(s); }"""
    )
    reached = page.evaluate("fetch('https://evil.example/').then(() => 'reached', () => 'refused')")
    page.wait_for_timeout(300)
    assert page.evaluate("window.pwned") is None
    assert reached == "refused"


def test_the_server_asks_no_outside_host(tmp_path: Path, browser: Browser) -> None:
    """Every name that the server's process resolves or connects to, from its start to an answer, is this machine."""
    log = tmp_path / "reached.txt"
    running = Server(tmp_path / "c.db", "--reached", str(log)).start()
    page = browser.new_page()
    try:
        visit(page, running.url)
        send(page, "HOSTILE")
        answered(page)
    finally:
        page.close()
        running.stop()
    reached = set(log.read_text().split())
    assert "hooked" in reached
    assert reached <= {"hooked", "127.0.0.1", "localhost", "::1", "0.0.0.0", "None"}


# ---- installed as an app


def test_it_can_be_installed(browser: Browser, server: Server) -> None:
    """Chromium finds no reason against installing the page; every icon of the manifest is there."""
    page = browser.new_page()
    visit(page, server.url)
    client = page.context.new_cdp_session(page)
    reasons = client.send("Page.getInstallabilityErrors")["installabilityErrors"]
    assert [r["errorId"] for r in reasons if r["errorId"] != "in-incognito"] == []
    manifest = json.loads(ask(server, "/manifest.json").body)
    assert all(ask(server, "/" + icon["src"]).status == 200 for icon in manifest["icons"])
    page.close()


def test_a_free_port_is_accepted() -> None:
    check_address("127.0.0.1", free_port(), None, "")
