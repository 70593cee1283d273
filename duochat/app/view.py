"""What a page sees of a conversation, as plain data for `chat.js`: the thread, the growing answer, its figures.

It hears of them by server-sent events. Gradio could carry them, but it costs more time than all that the page itself
does with a value, on both ends.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from duochat.app.frames import Frame, frame, state_of
from duochat.app.hardware import Machine
from duochat.app.jobs import Jobs, Run, sentence
from duochat.app.kept import META, fits, options_of
from duochat.app.prose import Stream, render
from duochat.app.store import Message, Store
from duochat.chat.answer import Answer
from duochat.chat.chat import Options

INTERVAL = 1 / 15  # seconds between two updates of a page
CROWDED = 0.85, 1 / 5  # when so much of the processor is busy, the lanes need it more: this interval
AHEAD = 4  # values sent to a page that has not said that it drew them
SHARE = 0.04  # of a core that one page may cost: long values come less often on a slow one
GLANCE = 0.05  # seconds between two looks at whether the answer has ended
IDLE = 0.5  # seconds between two values when there is nothing new but the clock
SILENCE = 1.0  # seconds after which a page gets another value in any case
MANY = 1000  # addresses remembered
GONE = "This address is not known any more: reload the page."
KEPT = ("finish", "error", "notices", "figures", "edited")  # of a message's meta, for the page

render_once = lru_cache(maxsize=512)(render)


@dataclass
class Look:
    """A page's look at a conversation. One that cannot keep up gets fewer and larger values, never a backlog."""

    conversation: str
    sent: int = 0  # values given to the page
    heard: int = 0  # of these, the last one that the page says it has drawn
    sent_at: float = 0.0

    def behind(self) -> bool:
        """Should the next value wait? Never for longer than SILENCE: a page may have forgotten to say that it heard."""
        return self.sent - self.heard >= AHEAD and time.monotonic() - self.sent_at < SILENCE

    def recent(self) -> bool:
        """Was the last value sent just now? Then one without news can wait."""
        return time.monotonic() - self.sent_at < IDLE

    def number(self) -> int:
        """Count one more value."""
        self.sent += 1
        self.sent_at = time.monotonic()
        return self.sent


class View:
    """One for the whole app."""

    def __init__(self, store: Store, answers: Jobs, machine: Machine) -> None:
        self._store, self._answers, self.machine = store, answers, machine

    def thread(self, conversation: str) -> dict[str, Any]:
        """The whole conversation as the page draws it; "" is a new one. Raises DuoChatError when it is gone."""
        if not conversation:
            return {"conversation": "", "title": "", "messages": []}
        found = self._store.require(conversation)
        running = self._answers.under_way(conversation)
        messages = [draw(m, running) for m in self._store.thread(conversation)]
        return {"conversation": conversation, "title": found.title, "messages": messages}

    async def watch(self, look: Look) -> AsyncIterator[dict[str, Any]]:
        """Values for the page: first the whole thread, then what is new while it is answered, last the whole again."""
        run = self._answers.under_way(look.conversation)
        yield {"thread": await asyncio.to_thread(self.thread, look.conversation), "status": self.status(run)}
        if run is None:
            return
        stream, seen, busy = Stream(), 0, 0.0
        while await writing(run, max(self.pace(), busy / SHARE)):
            if look.behind() or (len(run.answer.steps) == seen and look.recent()):
                continue
            begun = time.thread_time()
            drawn = self._frame(run, seen)
            yield {"stream": grown(run, stream), "status": self.status(run), "message": run.message, "frame": drawn}
            seen, busy = drawn["n"], time.thread_time() - begun
        thread = await asyncio.to_thread(self.thread, look.conversation)
        yield {"thread": thread, "status": self.status(run), "message": run.message, "frame": self._frame(run, seen)}

    def _frame(self, run: Run, seen: int = 0) -> Frame:
        return frame(run.answer, run.options, seen, self.machine.load())

    def pace(self) -> float:
        """Seconds between two updates of a page now."""
        load, slower = CROWDED
        return slower if self.machine.load().get("cpu", 0) > load else INTERVAL

    def look(self, action: dict[str, Any]) -> dict[str, Any]:
        """The thread again, for a page that missed something."""
        return self.thread(str(action.get("conversation")))

    def picture(self, action: dict[str, Any]) -> Frame:
        """The picture of an answer, whole."""
        run = self._answers.under_way(str(action.get("conversation")))
        if run and run.message == action.get("message"):
            return self._frame(run)
        message = self._store.message(int(action["message"]))
        return frame(Answer(self._store.trace(message.id)), options_of(message.meta.get("options"), Options()))

    def status(self, run: Run | None) -> dict[str, Any]:
        """The line under the answer."""
        if run is None:
            return {"phase": "idle", "queue": len(self._answers)}
        answer, stats = run.answer, run.answer.stats
        return {
            **state_of(answer, run.options), "ttft": stats.first_token_at, "notices": list(answer.notices),
            "context": [answer.prompt_tokens + stats.completion_tokens, answer.context_length], "pace": self.pace(),
        }  # fmt: skip


async def writing(run: Run, seconds: float) -> bool:
    """Wait so long, but not beyond the end of the answer. False when it has ended."""
    until = time.monotonic() + seconds
    while not run.done.is_set() and (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(left, GLANCE))
    return not run.done.is_set()


def grown(run: Run, stream: Stream) -> dict[str, Any]:
    """The blocks of the running answer from the first one that may have changed."""
    first, blocks = stream.blocks(run.text)
    return {"message": run.message, "from": first, "blocks": blocks}


def draw(message: Message, running: Run | None) -> dict[str, Any]:
    """One message as the page draws it."""
    live = running is not None and running.message == message.id
    text = running.text if live else message.content
    drawn = {
        "id": message.id, "role": message.role, "text": text, "versions": list(message.versions), "live": live,
        **{k: message.meta[k] for k in KEPT if k in message.meta and fits(message.meta[k], META[k])},
    }  # fmt: skip
    if live:
        drawn["before"] = running.before
    if message.role == "assistant":
        drawn["blocks"] = render(text) if live else list(render_once(text))
    return drawn


def meta_of(run: Run) -> dict[str, Any]:
    """What is kept beside an answer: its settings and figures."""
    answer, stats = run.answer, run.answer.stats
    return {
        "finish": answer.finish, "error": answer.error, "notices": list(answer.notices), "options": asdict(run.options),
        "figures": {
            "rate": stats.rate, "alpha": stats.acceptance_rate, "tau": stats.mean_accepted_length,
            "ttft": stats.first_token_at, "tokens": stats.completion_tokens, "decoder": run.options.decoder,
            "speedup": stats.speedup,
        },
    }  # fmt: skip


class Live:
    """What pages hear, each at an address that only it knows: it opens that with EventSource, and says there how far it
    has come. One for the whole app."""

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
    return f"data: {orjson.dumps(value).decode()}\n\n"
