"""The web server around the page: only this machine's browser, no other host, no route that the page does not use."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.responses import FileResponse, PlainTextResponse
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
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
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_guarded)

    @staticmethod
    def _allowed(scope: Scope) -> bool:
        path = scope["path"]
        return own_origin(Headers(scope=scope)) and (path == "/" or path.startswith(USED))


class Index(BaseHTTPMiddleware):
    """Puts the page's own head into the document and a fresh nonce on each of its scripts.

    Gradio adds `head` by script, late and in no order; with the nonce no other inline script runs, also if an
    answer's markup ever got through.
    """

    def __init__(self, app: ASGIApp, head: str) -> None:
        super().__init__(app)
        self.head = head

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (super().__call__ if scope.get("path") == "/" else self.app)(scope, receive, send)

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response, nonce = await call_next(request), secrets.token_urlsafe(16)
        page = b"".join([part async for part in response.body_iterator]).decode()
        page = page.replace("</head>", self.head + "</head>", 1)
        page = re.sub(r"<script(?=[\s>])", f'<script nonce="{nonce}"', page)
        del response.headers["content-length"]
        response.headers[POLICY] = policy(nonce)
        return Response(page, response.status_code, response.headers)


def policy(nonce: str = "") -> str:
    """The Content-Security-Policy. 'unsafe-eval' is what gr.HTML's scripts need."""
    own = f"'self' 'nonce-{nonce}'" if nonce else "'self'"
    return (
        f"default-src 'self'; script-src {own} 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; media-src 'self' blob:; "
        "frame-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    )


POLICY = "content-security-policy"
HEADERS = {
    POLICY: policy(),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def make_app(host: str, head: str, routes: Sequence[BaseRoute] = ()) -> FastAPI:
    """The web app with its guards; the page is mounted on it. head: HTML for the document's head."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, routes=[*routes])
    app.add_middleware(Index, head=head)
    app.add_middleware(Guard)
    if host in LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    app.add_api_route("/manifest.json", lambda: FileResponse(PAGE / "manifest.json"), methods=["GET"])
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    return app
