"""One request under way: replies of the engine, one after the other, in the line that the page waits in too.

A thread of its own drains each reply. A client that goes away ends it within a round.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from duochat.api.asked import Asked, Refused
from duochat.api.form import Choice, figures, usage
from duochat.chat.answer import Step
from duochat.chat.chat import Options
from duochat.chat.text import Messages
from duochat.chat.worker import Worker

# One for each reply under way: to start a thread costs more than all else that a short request needs.
THREADS = ThreadPoolExecutor(1000, "reply")


class Call:
    """The answer to one request, to be sent by calling it (ASGI).

    longest_queue: how many requests may be before it. keep: called with it at the end, if there is an answer.
    """

    def __init__(
        self, engine: Worker, asked: Asked, options: Options, model: str, longest_queue: int,
        keep: Callable[[Call], None],
    ) -> None:  # fmt: skip
        self._engine, self._asked, self._longest_queue, self._keep = engine, asked, longest_queue, keep
        seeds = [(options.seed + copy) % 2**63 for copy in range(asked.n)]
        self._jobs = [(prompt, replace(options, seed=seed)) for prompt in asked.prompts() for seed in seeds]
        self.choices = [Choice(index, asked) for index in range(len(self._jobs))]
        self._counts = bool(asked.stream_options.get("include_usage"))  # in a chunk of their own
        self._over = threading.Event()
        self._ahead = 0  # requests before this one when it came
        self._kind, prefix = ("chat.completion", "chatcmpl-") if asked.messages else ("text_completion", "cmpl-")
        self.id = prefix + uuid.uuid4().hex
        self._head = {"id": self.id, "created": int(time.time()), "model": model}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work, gone = asyncio.ensure_future(self._send(scope, receive, send)), asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._over.set()
            work.cancel()
            gone.cancel()
            if self.choices[0].answer.rounds:
                self._keep(self)

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._asked.stream:
                events = self._events()
                begun = await anext(events)  # refused before anything is sent; a later fault is the last event
                body = _with_fault(begun, events)
                response = StreamingResponse(body, headers=self._headers(), media_type="text/event-stream")
                return await response.stream_response(send)
            response = JSONResponse(await self._whole(), headers=self._headers())
        except Refused as refused:
            response = refused.response()
        await response(scope, receive, send)

    def _headers(self) -> dict[str, str]:
        return {"x-request-id": self.id, "x-duochat-queue": str(self._ahead), "cache-control": "no-cache"}

    async def _whole(self) -> dict[str, Any]:
        async for choice, step in self._steps():
            choice.answer.add(step)
        choices = [choice.whole() for choice in self.choices]
        return {**self._head, "object": self._kind, "choices": choices, **self._usage(), **self._figures()}

    async def _events(self) -> AsyncIterator[bytes]:
        last = -1
        async for choice, step in self._steps():
            if choice.index > last:
                yield self._chunk(choice.begin())
                last = choice.index
            chunk = choice.chunk(step)
            yield self._chunk(chunk) if chunk else f": {step.phase}\n\n".encode()  # lest a proxy gives up
            if step.finish:
                done = choice is self.choices[-1] and not self._counts
                yield self._chunk(choice.end(), **(self._figures() if done else {}))
        if self._counts:
            yield self._chunk(**self._usage(), **self._figures())
        yield b"data: [DONE]\n\n"

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._asked.messages else self._kind
        usage = {"usage": None} if self._counts else {}
        return _event({**self._head, "object": kind, "choices": choices, **usage, **more})

    def _usage(self) -> dict[str, Any]:
        return {"usage": usage([choice.answer for choice in self.choices], self._asked.n)}

    def _figures(self) -> dict[str, Any]:
        return figures([choice.answer for choice in self.choices])

    async def _steps(self) -> AsyncIterator[tuple[Choice, Step]]:
        """Raises Refused when an answer fails or too many requests wait already."""
        for choice, (prompt, options) in zip(self.choices, self._jobs, strict=True):
            step = Step()
            async for step in _drained(self._engine, prompt, options, self._over.is_set):
                if step.phase == "queued" and step.progress and choice.index == 0 and not self._ahead:
                    self._admit(step.progress[0])
                if step.finish != "error":
                    yield choice, step
            if step.finish in ("error", None):  # before it has read the prompt, an engine that lives speaks of that
                dead, read = self._engine.status()["state"] == "dead", choice.answer.prompt_tokens
                sentence = step.error or "The engine stopped without an answer: try again."
                raise Refused(503 if dead else 500 if read else 400, sentence)

    def _admit(self, ahead: int) -> None:
        self._ahead = ahead
        if ahead > self._longest_queue:
            refused = Refused(429, f"{ahead} requests are before this one: try again later.", code="queue_full")
            refused.headers |= self._headers() | {"retry-after": "1"}  # seconds; a place is free after each answer
            raise refused


async def _drained(
    engine: Worker, prompt: Messages | str, options: Options, cancelled: Callable[[], bool]
) -> AsyncIterator[Step]:
    """The steps of a reply, which a thread takes from the engine as they come."""
    loop, steps = asyncio.get_running_loop(), asyncio.Queue()

    def put(step: Step | None) -> None:
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(steps.put_nowait, step)

    def drain() -> None:
        try:
            for step in engine.reply(prompt, options, cancelled, "API"):
                put(step)
        finally:
            put(None)

    loop.run_in_executor(THREADS, drain)
    while (step := await steps.get()) is not None:
        yield step


async def _with_fault(begun: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begun
    try:
        async for event in events:
            yield event
    except Refused as refused:
        yield _event(refused.body)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, separators=(',', ':'), ensure_ascii=False)}\n\n".encode()
