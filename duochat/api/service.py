"""The routes. `make_app` is the API alone, `beside` puts it beside the page."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from duochat.api.asked import Refused, read
from duochat.api.call import Call
from duochat.api.guard import Access
from duochat.chat.worker import Worker

LARGEST_BODY = 4 << 20  # bytes: the longest context that a setting allows, at four bytes a token
LONGEST_QUEUE = 32  # requests that may wait, the page's among them; each holds a thread
KEPT = 16  # last answers whose rounds can be asked for
ALIAS = "duochat"  # the loaded pair, whichever it is


def make_app(engine: Worker, access: Access, longest_queue: int = LONGEST_QUEUE) -> ASGIApp:
    """The API."""
    service = Service(engine, longest_queue)
    handlers: Any = dict.fromkeys((Refused, HTTPException, Exception), _response)
    routes = [
        Route("/health", service.health),
        Route("/v1/models", service.models),
        Route("/v1/models/{model:path}", service.model),
        Route("/v1/chat/completions", partial(service.complete, what="messages"), methods=["POST"]),
        Route("/v1/completions", partial(service.complete, what="prompt"), methods=["POST"]),
        Route("/v1/duochat/rounds/{id}", service.rounds),
    ]
    return Starlette(routes=routes, middleware=access.layers(), exception_handlers=handlers)


def beside(page: ASGIApp, api: ASGIApp) -> ASGIApp:
    """Both on one address; each has its own guards."""

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and (scope["path"] == "/health" or scope["path"].startswith("/v1/"))
        await (api if ours else page)(scope, receive, send)

    return both


def _response(request: Request, fault: Exception) -> Response:
    """Starlette raises again for the log what is no refusal."""
    if isinstance(fault, HTTPException):
        fault = Refused(fault.status_code, f"{request.method} {request.url.path}: {fault.detail}.")
    if not isinstance(fault, Refused):
        fault = Refused(500, f"Something went wrong on the server ({type(fault).__name__}): try again.")
    return fault.response()


class Service:
    """longest_queue: how many requests may be before one."""

    def __init__(self, engine: Worker, longest_queue: int) -> None:
        self.engine, self.longest_queue = engine, longest_queue
        self.calls: deque[Call] = deque(maxlen=KEPT)

    async def health(self, _request: Request) -> Response:
        status = self.engine.status()
        if status["state"] in ("ready", "busy"):
            return JSONResponse({"status": "ok"})
        return Refused(503, status["error"] or "The models are being loaded.", code=status["state"]).response()

    async def models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(name) for name in (ALIAS, self.name())]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(_model(self._known(request.path_params["model"])))

    def name(self) -> str:
        """Of the loaded pair: its target's."""
        return short_name(self.engine.status()["settings"].target)

    def _known(self, model: str) -> str:
        if model not in (ALIAS, self.name(), self.engine.status()["settings"].target):
            sentence = f"There is no model {model}: ask for {ALIAS} or {self.name()}."
            raise Refused(404, sentence, "model", "model_not_found")
        return model

    async def complete(self, request: Request, what: str) -> Call:
        asked = read(await _body(request), what)
        self._known(asked.model)
        options = asked.options(self.engine.status()["settings"])
        return Call(self.engine, asked, options, self.name(), self.longest_queue, self.calls.append)

    async def rounds(self, request: Request) -> Response:
        """The rounds of an answer (?choice=0), a JSON line each, as `--trace` writes them."""
        id, choice = request.path_params["id"], request.query_params.get("choice", "0")
        choices = next((call.choices for call in self.calls if call.id == id), [])
        found = next((c.answer.rounds for c in choices if str(c.index) == choice), None)
        if found is None:
            raise Refused(404, f"There is no such answer: the last {KEPT} are kept.", "id", "not_found")
        return Response("".join(r.to_json() + "\n" for r in found), media_type="application/jsonl")


async def _body(request: Request) -> bytes:
    body = bytearray()
    with suppress(ClientDisconnect):
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                raise Refused(413, f"The request has more than {LARGEST_BODY >> 20} MiB: send less.")
    return bytes(body)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "duochat"}


def short_name(reference: str) -> str:
    """The part of a reference that names the model: "hf:Qwen/Qwen3-8B" -> "Qwen3-8B"."""
    return reference.partition("#")[0].rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
