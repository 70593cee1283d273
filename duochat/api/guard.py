"""Who may ask: this machine's programs, pages of listed origins, whoever has the key where one is needed."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from duochat.api.asked import Refused

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
HOSTS = ["127.0.0.1", "localhost", "[::1]"]  # by which a server on loopback may be called
TOLD = ["x-request-id", "x-duochat-queue", "retry-after"]  # headers that pages elsewhere may read


@dataclass(frozen=True)
class Access:
    """key: what `Authorization: Bearer` must carry. locked: without the key nobody may ask, also when there is none.
    origins: pages elsewhere that may ask."""

    host: str = "127.0.0.1"
    key: str = ""
    locked: bool = False
    origins: Sequence[str] = ()

    def layers(self) -> list[Middleware]:
        """What a request passes before it is answered, the outermost first."""
        shared = {"allow_origins": self.origins, "allow_headers": ["*"], "allow_methods": ["GET", "POST"]}
        return [
            *([Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)] if self.host in LOOPBACK else []),
            *([Middleware(CORSMiddleware, **shared, expose_headers=TOLD)] if self.origins else []),
            Middleware(Guard, self),
        ]


class Guard:
    """Refuses pages of other origins, whose requests a browser sends also where it withholds the answer; asks for
    the key, except where only health is asked."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refusal(Headers(scope=scope), scope["path"]) if scope["type"] == "http" else None
        await (refused.response() if refused else self.app)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> Refused | None:
        if not own_origin(headers) and headers["origin"] not in self.access.origins:
            return Refused(403, "Pages of this origin may not ask: start the server with --cors and the origin.")
        if path == "/health" or not (self.access.key or self.access.locked):
            return None
        if not self.access.key:
            return Refused(401, "The page has a password: start the server with --api-key too, to use the API.")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.encode("latin-1"), self.access.key.encode()):
            return None
        return Refused(401, "The API key is missing or wrong: send Authorization: Bearer KEY.", code="invalid_api_key")


def own_origin(headers: Headers) -> bool:
    """Does the request come from no page, or from one of this server?"""
    return "origin" not in headers or headers["origin"].partition("://")[2] == headers.get("host")
