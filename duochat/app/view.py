"""What a page sees of a conversation, as plain data for `chat.js`: the thread, the growing answer, its figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from duochat.app.frames import Live
from duochat.app.load import Machine
from duochat.app.prose import Stream, render
from duochat.app.runs import Run, Runs
from duochat.app.store import Message, Store

INTERVAL = 1 / 15  # seconds between two updates of a page
CROWDED = 0.85, 1 / 5  # when so much of the processor is busy, the lanes need it more: this interval
AHEAD = 4  # values sent to a page that has not said that it drew them
GLANCE = 0.02  # seconds between two looks at whether the answer has ended
IDLE = 0.5  # seconds between two values when there is nothing new but the clock
SILENCE = 1.0  # seconds after which a page gets another value in any case
KEPT = ("finish", "error", "notices", "figures", "edited")  # of a message's meta, for the page

render_once = lru_cache(maxsize=512)(render)


@dataclass
class Look:
    """A tab's look at a conversation. A page that cannot keep up gets fewer and larger values, never a backlog."""

    open: bool = True
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

    def __init__(self, store: Store, runs: Runs, machine: Machine) -> None:
        self._store, self._runs, self._machine = store, runs, machine

    def thread(self, conversation: str) -> dict[str, Any]:
        """The whole conversation as the page draws it."""
        found = self._store.get(conversation)
        if found is None:
            return {"conversation": "", "title": "", "messages": []}
        running = self._runs.of(conversation)
        messages = [draw(m, running) for m in self._store.thread(conversation)]
        return {"conversation": conversation, "title": found.title, "messages": messages}

    async def watch(self, conversation: str, look: Look) -> AsyncIterator[dict[str, Any]]:
        """Values for the page: first the whole thread, then what is new while it is answered, last the whole again."""
        run = self._runs.of(conversation)
        yield {"thread": await asyncio.to_thread(self.thread, conversation), "status": self.status(run)}
        if run is None:
            return
        stream, seen, busy = Stream(), 0, 0.0
        while look.open and await writing(run, max(self.pace(), 8 * busy)):
            if look.behind() or (len(run.frames) == seen and look.recent()):
                continue
            begun = time.monotonic()
            frames = run.frames_from(seen)
            yield {"stream": grown(run, stream), "status": self.status(run), "message": run.message, "frames": frames}
            seen, busy = frames[-1]["n"] if frames else seen, time.monotonic() - begun
        if look.open:
            thread = await asyncio.to_thread(self.thread, conversation)
            frames = run.frames_from(seen)
            yield {"thread": thread, "status": self.status(run), "message": run.message, "frames": frames}

    def pace(self) -> float:
        """Seconds between two updates of a page now."""
        load, slower = CROWDED
        return slower if self._machine.load().get("cpu", 0) > load else INTERVAL

    def look(self, action: dict[str, Any]) -> dict[str, Any]:
        """The thread again, for a page that missed something."""
        return self.thread(str(action.get("conversation")))

    def picture(self, action: dict[str, Any]) -> dict[str, Any]:
        """The picture of an answer, whole: a frame of `render.Live`."""
        run = self._runs.of(str(action.get("conversation")))
        if run and run.message == action.get("message"):
            return run.frames_from(0)[0] if run.frames else {}
        figures = self._store.message(int(action["message"])).meta.get("figures", {})
        live = Live(figures.get("decoder", ""), figures.get("plain_rate"))
        for step in self._store.trace(int(action["message"])):
            live.feed(step)
        return live.snapshot()

    def status(self, run: Run | None) -> dict[str, Any]:
        """The line under the answer."""
        if run is None:
            return {"phase": "idle", "queue": self._runs.busy()}
        figures = run.stats.to_dict()
        return {
            "phase": run.phase, "finish": run.finish, "doing": run.doing, "progress": run.progress,
            "rate": run.rate(),
            "tokens": run.stats.completion_tokens, "alpha": figures["acceptance_rate"] if run.stats.tested else None,
            "tau": run.stats.mean_accepted_length or None,
            "ttft": run.first_at - run.asked_at if run.first_at else None,
            "context": [run.prompt_tokens + run.stats.completion_tokens, run.context_length],
            "speculation": run.speculation, "reason": run.reason, "decoder": run.options.decoder,
            "notices": list(run.notices), "error": run.error, "pace": self.pace(), **self._machine.load(),
        }  # fmt: skip


async def writing(run: Run, seconds: float) -> bool:
    """Wait so long, but not beyond the end of the answer. False when it has ended."""
    until = time.monotonic() + seconds
    while not run.done.is_set() and (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(left, GLANCE))
    return not run.done.is_set()


def grown(run: Run, stream: Stream) -> dict[str, Any]:
    """The blocks of the running answer from the first one that may have changed."""
    first, blocks = stream.blocks(run.before + run.text)
    return {"message": run.message, "from": first, "blocks": blocks}


def draw(message: Message, running: Run | None) -> dict[str, Any]:
    """One message as the page draws it."""
    live = running is not None and running.message == message.id
    text = running.before + running.text if live else message.content
    drawn = {
        "id": message.id, "role": message.role, "text": text, "versions": list(message.versions), "live": live,
        **{k: message.meta[k] for k in KEPT if k in message.meta},
    }  # fmt: skip
    if message.role == "assistant":
        drawn["blocks"] = render(text) if live else list(render_once(text))
    return drawn


def meta_of(run: Run) -> dict[str, Any]:
    """What is kept beside an answer: its settings and figures."""
    figures = run.stats.to_dict()
    return {
        "finish": run.finish, "error": run.error, "notices": run.notices, "options": asdict(run.options),
        "figures": {
            "rate": run.rate(), "alpha": figures["acceptance_rate"], "tau": run.stats.mean_accepted_length,
            "ttft": run.stats.first_token_at, "tokens": run.stats.completion_tokens, "decoder": run.options.decoder,
            "plain_rate": run.live.plain_rate,
        },
    }  # fmt: skip
