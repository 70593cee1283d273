"""What a page hears of a conversation: server-sent events at an address that only the page which asked for it knows.

Gradio could carry them, but it costs more time than all that the page itself does with a value, on both ends.
"""

from __future__ import annotations

import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from duochat.app.jobs import sentence
from duochat.app.view import Look, View

MANY = 1000  # addresses remembered
GONE = "This address is not known any more: reload the page."


class Live:
    """One for the whole app. A page opens its address with EventSource, and says there how far it has come."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._looks: OrderedDict[str, Look] = OrderedDict()  # key -> the latest look

    def key(self, conversation: str) -> str:
        """Of a new address at which this conversation can be heard."""
        key = secrets.token_urlsafe(16)
        self._looks[key] = Look(conversation)
        while len(self._looks) > MANY:
            self._looks.popitem(last=False)
        return key

    def routes(self) -> list[Route]:
        return [Route("/live/{key}", self.hear), Route("/live/{key}", self.heard, methods=["POST"])]

    async def hear(self, request: Request) -> Response:
        """The values, each a message with JSON; the event `end` when there are no more."""
        key = request.path_params["key"]
        if key not in self._looks:
            return PlainTextResponse(GONE, 404)
        look = self._looks[key] = Look(self._looks[key].conversation)
        return StreamingResponse(
            self._events(look), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def heard(self, request: Request) -> Response:
        """The page has drawn the value of the number in the body."""
        look, number = self._looks.get(request.path_params["key"]), await request.body()
        if look and number.isdigit():
            look.heard = max(look.heard, int(number[:9]))
        return Response(status_code=204)

    async def _events(self, look: Look) -> AsyncIterator[str]:
        try:
            async for value in self._view.watch(look):
                yield message({"number": look.number(), **value})
        except Exception as fault:  # noqa: BLE001  whatever it was, the page hears of it
            yield message({"refused": sentence(fault)})
        yield "event: end\ndata:\n\n"


def message(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n"
