"""What a page does with conversations: ask, retry, edit, continue, undo, switch versions. No Gradio here.

A room joins the store (what was said), the runs (what is being said) and the view (what a page sees of both).
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import asdict, replace
from typing import Any

from duochat import DuoChatError
from duochat.app import assets
from duochat.app.frames import frame
from duochat.app.hardware import Machine
from duochat.app.jobs import Jobs, Run, sentence
from duochat.app.kept import options_of
from duochat.app.prose import render
from duochat.app.store import Message, Store
from duochat.app.view import View, meta_of
from duochat.chat.answer import Answer, Step
from duochat.chat.chat import Options
from duochat.chat.template import merged
from duochat.chat.worker import Worker

KEEP_EVERY = 3.0  # seconds between two savings of an answer that is being written
BUSY = "This conversation is still being answered: press Stop first."
TITLE = 48  # characters of the first message that name a conversation
LONGEST_MESSAGE = 200_000  # characters
SAME = "At temperature 0 the target always takes the likeliest token, so the text is the same: raise the temperature."


class Room:
    """One for the whole app; every tab and user meets here."""

    def __init__(self, engine: Worker, store: Store, defaults: Options) -> None:
        self.engine, self.store, self.defaults = engine, store, defaults
        self.answers = Jobs(kept=0)  # one a conversation
        self.view = View(store, self.answers, Machine())
        self._asking = threading.Lock()

    def close(self) -> None:
        """Stop all answers and keep what they have."""
        self.answers.close()

    def allow(self, action: dict[str, Any]) -> None:
        """Raises DuoChatError when what is asked for is another user's. action: with "user", "" without a password."""
        self.store.allow(action.get("user", ""), str(action.get("conversation") or ""), action.get("message"))

    def ask(self, action: dict[str, Any], options: Options) -> str:
        """Do what the page asks and return the conversation's id.

        action: {"kind", "conversation", "message", "text", "user"}; kinds: send, retry, edit, continue.
        Raises DuoChatError.
        """
        kind, text = str(action.get("kind")), str(action.get("text") or "")
        do = {"send": self._send, "retry": self._retry, "edit": self._edit, "continue": self._continue}.get(kind)
        if do is None:
            raise DuoChatError(f"The page asked for something unknown ({kind}): reload it.")
        with self._asking:  # two tabs may ask at once
            conversation = self._conversation(action, options)
            if self.answers.under_way(conversation):
                raise DuoChatError(BUSY)
            do(conversation, action, text, options)
            self.store.configure(conversation, asdict(options))
        return conversation

    def _conversation(self, action: dict[str, Any], options: Options) -> str:
        """The one that the page shows, which must still be there; a new one for a first message."""
        wanted = str(action.get("conversation") or "")
        if wanted or action.get("kind") != "send":
            return self.store.require(wanted).id
        self._check(str(action.get("text") or ""))
        return self.store.create(asdict(options), user=action.get("user", "")).id

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
        """With another seed, unless the person has pinned it."""
        message = self._message(conversation, action)
        if message.role == "assistant" and not action.get("pinned"):
            options = replace(options, seed=options.seed + len(message.versions))
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
        past = merged({"role": m.role, "content": m.content} for m in self.store.thread(conversation))
        answer = self.store.add(conversation, parent, "assistant", before, {"finish": None})
        messages = [*past, {"role": "assistant", "content": before}] if before else past
        run = Run(conversation=conversation, message=answer.id, messages=messages, options=options, before=before)
        self.answers.start(self._answer, conversation, run, BUSY)

    def _answer(self, run: Run) -> None:
        """Drain the engine, which itself keeps the queue; whatever it does, the run ends with a finish."""
        kept_at = time.monotonic()
        try:
            for step in self.engine.reply(run.messages, run.options, run.stop.is_set):
                run.answer.add(step)
                if time.monotonic() - kept_at > KEEP_EVERY:
                    self._keep(run)
                    kept_at = time.monotonic()
        except Exception as fault:  # noqa: BLE001  it becomes the answer's last step
            run.answer.add(Step(finish="error", error=sentence(fault)))
        if run.answer.phase != "done":
            finish = run.answer.finish or ("cancelled" if run.stop.is_set() else "stop")
            run.answer.add(Step(phase="done", finish=finish))
        self._keep(run)
        run.done.set()
        self._keep(run, [step for step in run.answer.steps if step.round])  # a long trace takes its time

    def _keep(self, run: Run, steps: list[Step] | None = None) -> None:
        """Store an answer as it stands, last with the steps of its trace."""
        try:
            if run.answer.finish == "stop" and run.options.temperature == 0 and steps is None:
                versions = (self.store.message(id) for id in self.store.message(run.message).versions)
                if any(other.content == run.text for other in versions if other.id != run.message):
                    run.answer.add(Step(notice=SAME))
            self.store.update(run.message, run.text, meta_of(run), steps)
        except DuoChatError:
            run.answer.add(Step(notice="The answer could not be saved: check the free space on the disk."))

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

    def stop(self, action: dict[str, Any]) -> None:
        self.answers.stop(action.get("conversation"))

    def choose(self, action: dict[str, Any]) -> dict[str, Any]:
        """Show another version of a message; returns the thread."""
        self.store.select(action["conversation"], int(action["message"]))
        return self.view.look(action)

    def conversations(self, action: dict[str, Any]) -> dict[str, Any]:
        """The conversations that the query finds, the latest first."""
        found = self.store.conversations(str(action.get("query") or ""), action.get("user", ""))
        listed = [
            {"id": c.id, "title": c.title, "updated": c.updated, "folder": c.folder,
             "running": self.answers.under_way(c.id) is not None}
            for c in found
        ]  # fmt: skip
        return {"notice": self.store.notice, "conversations": listed}

    def rename(self, action: dict[str, Any]) -> None:
        self.store.rename(action["conversation"], str(action.get("title")))

    def move(self, action: dict[str, Any]) -> None:
        self.store.move(action["conversation"], str(action.get("folder") or ""))

    def delete(self, action: dict[str, Any]) -> None:
        self.stop(action)
        self.store.delete(action["conversation"])

    def restore(self, action: dict[str, Any]) -> None:
        self.store.restore(action["conversation"])

    def export(self, action: dict[str, Any]) -> dict[str, Any]:
        """A file's name and text; of all conversations when the action names none."""
        if not (conversation := action.get("conversation")):
            return {"name": "duochat-conversations.json", "text": self.store.export(user=action.get("user", ""))}
        ending, form = ("md", "markdown") if action.get("form") == "markdown" else ("json", "json")
        name = file_name(self.store.require(conversation).title)
        return {"name": f"{name}.{ending}", "text": self.store.export(conversation, form)}

    def import_(self, action: dict[str, Any]) -> dict[str, Any]:
        return {"conversation": self.store.import_(str(action.get("text")), action.get("user", ""))[0].id}

    def undo(self, action: dict[str, Any]) -> dict[str, Any]:
        """Take the message and what followed it out of view; its text goes back to the composer."""
        message = self._message(action["conversation"], action)
        self.store.settle(action["conversation"], message.parent)
        return {**self.view.look(action), "text": message.content}

    def remove(self, action: dict[str, Any]) -> dict[str, Any]:
        """One message, for good."""
        if self.answers.under_way(action["conversation"]):
            raise DuoChatError(BUSY)
        self.store.remove(action["conversation"], self._message(action["conversation"], action).id)
        return self.view.look(action)

    def share(self, action: dict[str, Any]) -> dict[str, Any]:
        """One answer as a page of its own: the file's name and its HTML."""
        message = self._message(action["conversation"], action)
        steps = self.store.trace(message.id)
        if message.parent is None or not steps:
            raise DuoChatError("No trace of this answer was kept: save one that was written here.")
        options, asked = options_of(message.meta.get("options"), Options()), self.store.message(message.parent)
        record = {
            "prompt": asked.content, "text": message.content, "blocks": render(message.content),
            "frame": frame(Answer(steps), options), "options": asdict(options),
        }  # fmt: skip
        title = title_of(asked.content)
        return {"name": f"{file_name(title)}.html", "html": assets.saved("showAnswer", title, record)}


def file_name(title: str) -> str:
    """A title as the name of a file, without an ending."""
    return re.sub(r"[^\w-]+", "-", title).strip("-").lower()[:60] or "conversation"


def title_of(text: str) -> str:
    """The first line of a message, cut at a word."""
    line = " ".join(text.split())
    return line if len(line) <= TITLE else line[:TITLE].rsplit(" ", 1)[0] + "…"
