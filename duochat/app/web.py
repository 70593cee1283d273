"""The web server around the page: only this machine's browser, no other host, no route that the page does not use."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from duochat.api.guard import HOSTS, LOOPBACK, own_origin
from duochat.app.assets import PAGE

USED = (
    "/live/", "/assets/", "/static/", "/page/", "/svelte/", "/theme.css", "/config", "/login", "/logout",
    "/manifest.json", "/favicon.ico", "/robots.txt", "/gradio_api/queue/", "/gradio_api/run/",
    "/gradio_api/component_server", "/gradio_api/cancel", "/gradio_api/info", "/gradio_api/reset",
    "/gradio_api/heartbeat/", "/gradio_api/startup-events",
)  # fmt: skip


class Guard:
    """Refuses other origins and unused routes; adds the headers that bind the browser to this host."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket" or not self._allowed(scope):
            return await PlainTextResponse("Not allowed.", status_code=403)(scope, receive, send)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                has = {name.lower() for name, _ in message.get("headers", ())}
                message["headers"] = [*message.get("headers", ()), *(h for h in HEADERS if h[0] not in has)]
            await send(message)

        await self.app(scope, receive, send_guarded)

    @staticmethod
    def _allowed(scope: Scope) -> bool:
        path = scope["path"]
        return own_origin(Headers(scope=scope)) and (path == "/" or path.startswith(USED))


class Index:
    """Puts the page's own head into the document and a fresh nonce on each of its scripts.

    Gradio adds `head` by script, late and in no order; with the nonce no other inline script runs, also if an
    answer's markup ever got through.
    """

    def __init__(self, app: ASGIApp, head: str) -> None:
        self.app, self.head = app, head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/":
            return await self.app(scope, receive, send)
        start: Message = {}
        body = bytearray()

        async def send_whole(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            elif message["type"] == "http.response.body":
                body.extend(message.get("body", b""))
                if not message.get("more_body"):
                    for part in self._rewritten(start, bytes(body)):
                        await send(part)

        await self.app(scope, receive, send_whole)

    def _rewritten(self, start: Message, body: bytes) -> tuple[Message, Message]:
        nonce = secrets.token_urlsafe(16)
        page = body.decode("utf-8").replace("</head>", self.head + "</head>", 1)
        page = re.sub(r"<script(?=[\s>])", f'<script nonce="{nonce}"', page)
        whole = page.encode("utf-8")
        headers = [(k, v) for k, v in start.get("headers", ()) if k.lower() not in (b"content-length", POLICY_NAME)]
        headers += [(b"content-length", str(len(whole)).encode()), (POLICY_NAME, policy(nonce).encode())]
        return {**start, "headers": headers}, {"type": "http.response.body", "body": whole}


def policy(nonce: str = "") -> str:
    """The Content-Security-Policy. 'unsafe-eval' is what gr.HTML's scripts need."""
    own = f"'self' 'nonce-{nonce}'" if nonce else "'self'"
    return (
        f"default-src 'self'; script-src {own} 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' blob:; "
        "frame-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    )


POLICY_NAME = b"content-security-policy"
HEADERS = [
    (POLICY_NAME, policy().encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
MANIFEST = {
    "name": "DuoChat", "short_name": "DuoChat", "start_url": "./", "scope": "./", "display": "standalone",
    "background_color": "#fbfaf8", "theme_color": "#fbfaf8",
    "description": "Chat that drafts on the CPU and verifies on the GPU at the same time.",
    "icons": [{"src": "page/icon.svg", "sizes": "any", "type": "image/svg+xml", "purpose": "any"}],
}  # fmt: skip


def make_app(host: str, head: str, routes: Sequence[BaseRoute] = ()) -> FastAPI:
    """The web app with its guards; the page is mounted on it. head: HTML for the document's head."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, routes=[*routes])
    app.add_middleware(Index, head=head)
    app.add_middleware(Guard)
    if host in LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    app.add_api_route("/manifest.json", lambda: JSONResponse(MANIFEST), methods=["GET"])
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    return app
