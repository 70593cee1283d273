"""What a page does with conversations: ask, retry, edit, continue, undo, switch versions, watch. No Gradio here.

A room joins the store (what was said) and the runs (what is being said). All that it hands to a page is plain data
for `chat.js`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from duochat import DuoChatError
from duochat.app import hardware
from duochat.app.chat import Options, Step
from duochat.app.render import Live
from duochat.app.store import Message, Store
from duochat.app.ui_machine import Machine
from duochat.app.ui_markdown import Stream, render
from duochat.app.ui_runs import Run, Runs

INTERVAL = 1 / 15  # seconds between two updates of a page
AHEAD = 4  # values sent to a page that has not said that it drew them
SILENCE = 1.0  # seconds after which a page gets another value in any case
TITLE = 48  # characters of the first message that name a conversation
LONGEST_MESSAGE = 200_000  # characters

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

    def number(self) -> int:
        """Count one more value."""
        self.sent += 1
        self.sent_at = time.monotonic()
        return self.sent


class Room:
    """One for the whole app; every tab and user meets here."""

    def __init__(self, engine: Any, store: Store, defaults: Options) -> None:
        self._engine, self.store, self.defaults = engine, store, defaults
        self.machine = Machine()
        self.runs = Runs(engine, self._keep, self.machine.load)

    # -- what a user can ask for -------------------------------------------------------------------------------------

    def ask(self, action: dict[str, Any], options: Options) -> str:
        """Do what the page asks and return the conversation's id.

        action: {"kind", "conversation", "message", "text"}; kinds: send, retry, edit, continue. Raises DuoChatError.
        """
        kind, text = str(action.get("kind")), str(action.get("text") or "")
        conversation = self._conversation(action, options)
        if self.runs.of(conversation):
            raise DuoChatError("This conversation is still being answered: press Stop first.")
        self.store.configure(conversation, asdict(options))
        do = {"send": self._send, "retry": self._retry, "edit": self._edit, "continue": self._continue}.get(kind)
        if do is None:
            raise DuoChatError(f"The page asked for something unknown ({kind}): reload it.")
        do(conversation, action, text, options)
        return conversation

    def _conversation(self, action: dict[str, Any], options: Options) -> str:
        wanted = action.get("conversation")
        if wanted and self.store.get(str(wanted)):
            return str(wanted)
        if action.get("kind") == "send":
            return self.store.create(asdict(options)).id
        raise DuoChatError("This conversation is no longer there: open another one in the side bar.")

    def _send(self, conversation: str, action: dict[str, Any], text: str, options: Options) -> None:
        self._check(text)
        thread = self.store.thread(conversation)
        parent = thread[-1].id if thread else None
        if "after" in action and action["after"] != parent:
            raise DuoChatError("This conversation went on in another tab: look at it, then send again.")
        asked = self.store.add(conversation, parent, "user", text)
        if not thread:
            self.store.rename(conversation, title_of(text))
        self._run(conversation, asked.id, options)

    def _retry(self, conversation: str, action: dict[str, Any], _text: str, options: Options) -> None:
        message = self._message(conversation, action)
        self._run(conversation, message.id if message.role == "user" else message.parent, options)

    def _edit(self, conversation: str, action: dict[str, Any], text: str, options: Options) -> None:
        """A changed message becomes a new version beside the old one; a user's message is answered anew."""
        self._check(text)
        message = self._message(conversation, action)
        new = self.store.add(conversation, message.parent, message.role, text, {"edited": True})
        if message.role == "user":
            self._run(conversation, new.id, options)

    def _continue(self, conversation: str, action: dict[str, Any], _text: str, options: Options) -> None:
        message = self._message(conversation, action)
        self._run(conversation, message.parent, options, before=message.content)

    def _run(self, conversation: str, parent: int | None, options: Options, before: str = "") -> None:
        self.store.settle(conversation, parent)
        past = [{"role": m.role, "content": m.content} for m in self.store.thread(conversation)]
        answer = self.store.add(conversation, parent, "assistant", before, {"finish": None})
        messages = [*past, {"role": "assistant", "content": before}] if before else past
        self.runs.start(Run(conversation, answer.id, messages, options, before, self._plain_rate()))

    def _plain_rate(self) -> float | None:
        """Tokens/s of plain decoding as the calibration measured it."""
        forward = hardware.known(self._engine).get("plain")
        return 1 / forward if forward else None

    def _message(self, conversation: str, action: dict[str, Any]) -> Message:
        found = [m for m in self.store.thread(conversation) if m.id == action.get("message")]
        if not found:
            raise DuoChatError("That message is no longer part of this conversation: reload the page.")
        return found[0]

    @staticmethod
    def _check(text: str) -> None:
        if not text.strip():
            raise DuoChatError("The message is empty: write something first.")
        if len(text) > LONGEST_MESSAGE:
            raise DuoChatError(f"The message is longer than {LONGEST_MESSAGE:,} characters: shorten it.")

    def stop(self, action: dict[str, Any]) -> dict[str, Any]:
        if run := self.runs.of(str(action.get("conversation"))):
            self.runs.stop(run)
        return {}

    def look(self, action: dict[str, Any]) -> dict[str, Any]:
        """The thread again, for a page that missed something."""
        return self.thread(str(action.get("conversation")))

    def choose(self, action: dict[str, Any]) -> dict[str, Any]:
        """Show another version of a message; returns the thread."""
        conversation = str(action.get("conversation"))
        self.store.select(conversation, int(action["message"]))
        return self.thread(conversation)

    def picture(self, action: dict[str, Any]) -> dict[str, Any]:
        """The picture of an answer, whole."""
        run = self.runs.of(str(action.get("conversation")))
        if run and run.message == action.get("message"):
            return run.live.snapshot()
        live = Live()
        for step in self.store.trace(int(action["message"])):
            live.feed(step)
        return live.snapshot()

    def list(self, action: dict[str, Any]) -> dict[str, Any]:
        """The conversations that the query finds, the latest first."""
        found = self.store.conversations(str(action.get("query") or ""))
        return {"conversations": [
            {"id": c.id, "title": c.title, "updated": c.updated, "running": self.runs.of(c.id) is not None} for c in found
        ]}  # fmt: skip

    def change(self, action: dict[str, Any]) -> dict[str, Any]:
        """Rename, delete, restore, undo, export or import."""
        do = {
            "rename": self._rename, "delete": self._delete, "restore": self._restore, "undo": self._undo,
            "export": self._export, "import": self._import,
        }[action["do"]]  # fmt: skip
        return do(str(action.get("conversation")), action) or {}

    def _rename(self, conversation: str, action: dict[str, Any]) -> None:
        self.store.rename(conversation, str(action.get("title")))

    def _delete(self, conversation: str, action: dict[str, Any]) -> None:
        self.stop(action)
        self.store.delete(conversation)

    def _restore(self, conversation: str, _action: dict[str, Any]) -> None:
        self.store.restore(conversation)

    def _export(self, conversation: str, action: dict[str, Any]) -> dict[str, Any]:
        found = self.store.get(conversation)
        name = re.sub(r"[^\w-]+", "-", found.title if found else "").strip("-").lower()[:60] or "conversation"
        ending, form = ("md", "markdown") if action.get("form") == "markdown" else ("json", "json")
        return {"name": f"{name}.{ending}", "text": self.store.export(conversation, form)}

    def _import(self, _conversation: str, action: dict[str, Any]) -> dict[str, Any]:
        return {"conversation": self.store.import_(str(action.get("text")))[0].id}

    def _undo(self, conversation: str, action: dict[str, Any]) -> dict[str, Any]:
        """Take the message and what followed it out of view; its text goes back to the composer."""
        message = self._message(conversation, action)
        self.store.settle(conversation, message.parent)
        return {**self.thread(conversation), "text": message.content}

    def _keep(self, run: Run, steps: list[Step] | None) -> None:
        self.store.update(run.message, run.before + run.text, meta_of(run), steps)

    # -- what a page sees --------------------------------------------------------------------------------------------

    def thread(self, conversation: str) -> dict[str, Any]:
        """The whole conversation as the page draws it."""
        found = self.store.get(conversation)
        if found is None:
            return {"conversation": "", "title": "", "messages": []}
        running = self.runs.of(conversation)
        messages = [draw(m, running) for m in self.store.thread(conversation)]
        return {"conversation": conversation, "title": found.title, "messages": messages}

    async def watch(self, conversation: str, look: Look) -> AsyncIterator[dict[str, Any]]:
        """Values for the page: first the whole thread, then what is new while it is answered, last the whole again."""
        run = self.runs.of(conversation)
        yield {"thread": await asyncio.to_thread(self.thread, conversation), "status": self.status(run)}
        if run is None:
            return
        stream, seen, busy = Stream(), 0, 0.0
        while look.open and not run.done.is_set():
            await asyncio.sleep(max(INTERVAL, 8 * busy))
            if look.behind():
                continue
            begun = time.monotonic()
            frames = run.frames_from(seen)
            yield {"stream": grown(run, stream), "status": self.status(run), "message": run.message, "frames": frames}
            seen, busy = frames[-1]["n"] if frames else seen, time.monotonic() - begun
        if look.open:
            thread = await asyncio.to_thread(self.thread, conversation)
            frames = run.frames_from(seen)
            yield {"thread": thread, "status": self.status(run), "message": run.message, "frames": frames}

    def status(self, run: Run | None) -> dict[str, Any]:
        """The line under the answer."""
        if run is None:
            return {"phase": "idle", "queue": self.runs.busy()}
        figures = run.stats.to_dict()
        return {
            "phase": run.phase, "finish": run.finish, "doing": run.doing, "progress": run.progress,
            "rate": run.rate(),
            "tokens": run.stats.completion_tokens, "alpha": figures["acceptance_rate"] if run.stats.tested else None,
            "tau": run.stats.mean_accepted_length or None,
            "ttft": run.first_at - run.asked_at if run.first_at else None,
            "context": [run.prompt_tokens + run.stats.completion_tokens, run.context_length],
            "speculation": run.speculation, "decoder": run.options.decoder, "notices": list(run.notices),
            "error": run.error, **self.machine.load(),
        }  # fmt: skip


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
        **{k: message.meta.get(k) for k in ("finish", "error", "notices", "figures", "edited") if k in message.meta},
    }  # fmt: skip
    if message.role == "assistant":
        drawn["blocks"] = render(text) if live else list(render_once(text))
    return drawn


def meta_of(run: Run) -> dict[str, Any]:
    """What is kept beside an answer: its settings and figures."""
    return {
        "finish": run.finish, "error": run.error, "notices": run.notices, "options": asdict(run.options),
        "figures": {
            "rate": run.stats.to_dict()["tokens_per_s"], "alpha": run.stats.to_dict()["acceptance_rate"],
            "tau": run.stats.mean_accepted_length, "ttft": run.stats.first_token_at,
            "tokens": run.stats.completion_tokens, "decoder": run.options.decoder,
        },
    }  # fmt: skip


def title_of(text: str) -> str:
    """The first line of a message, cut at a word."""
    line = " ".join(text.split())
    return line if len(line) <= TITLE else line[:TITLE].rsplit(" ", 1)[0] + "…"
