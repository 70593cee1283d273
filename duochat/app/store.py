"""Conversations on the server's disk: SQLite, messages as a tree, traces for replay.

A conversation belongs to the user who began it; one that began without a password (owner "") to all. Whoever uses
the page without a password (user "") sees all of them.

Nothing said is ever overwritten: edits and retries are branches. A conversation's `leaf` is the last message on view.
Safe from several threads and processes. Methods raise DuoChatError with a sentence for the person.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.app import exchange, packing
from duochat.app.database import Database, data_dir
from duochat.chat.answer import Step, plain
from duochat.chat.chat import ROLES

TRASH_DAYS = 30  # how long a deleted conversation can be restored
LONGEST_TITLE = 200
GONE = "This conversation is no longer there, deleted perhaps in another tab: choose another one or start a new chat."
LAST_VIEWED_BELOW = """
WITH RECURSIVE below (id) AS (VALUES (?) UNION ALL SELECT m.id FROM below JOIN messages m ON m.parent = below.id)
SELECT m.id FROM below JOIN messages m USING (id) ORDER BY m.viewed DESC, m.id DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """leaf: the last message on view. version: grows with every change. folder: "" for none."""

    id: str
    title: str
    created: float  # seconds since 1970
    updated: float
    settings: dict[str, Any]
    leaf: int | None
    version: int
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """versions: ids of the messages at this place, itself included, oldest first. meta: what the app noted of it."""

    id: int
    parent: int | None
    role: str
    content: str
    meta: dict[str, Any] = field(default_factory=dict)
    created: float = 0.0
    versions: tuple[int, ...] = ()


class Store:
    """All conversations of one file. notice: what was wrong with the file when it was opened, "" if nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self._db = Database(path or data_dir() / "conversations.db")
        self.notice = self._db.notice
        with self._db.writing():
            self._db.execute("DELETE FROM conversations WHERE deleted < ?", time.time() - TRASH_DAYS * 86400)

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------ conversations

    def allow(self, user: str, conversation: str, message: int | None = None) -> None:
        """Raises DuoChatError when the conversation, or the one that the message is in, is another user's."""
        others = """SELECT 1 FROM conversations c WHERE c.owner NOT IN ('', ?)
            AND (c.id = ? OR c.id = (SELECT conversation FROM messages WHERE id = ?))"""
        if user and self._db.read(others, (user, conversation, message)):
            raise DuoChatError(GONE)

    def conversations(self, query: str = "", user: str = "") -> list[Conversation]:
        """The user's whose title or messages hold every word of the query, the one changed last first."""
        words = query.casefold().split()
        found = """(instr(casefold(c.title), ?1) OR EXISTS
            (SELECT 1 FROM messages m WHERE m.conversation = c.id AND instr(casefold(m.content), ?1)))"""
        conditions = ["c.deleted IS NULL", *(found.replace("?1", f"?{i}") for i in range(1, len(words) + 1))]
        if user:
            conditions.append("c.owner IN ('', ?)")
            words.append(user)
        rows = self._db.read(
            f"{_CONVERSATION} WHERE {' AND '.join(conditions)} ORDER BY c.updated DESC, c.rowid DESC", words
        )
        return [_conversation(row) for row in rows]

    def get(self, conversation: str) -> Conversation | None:
        """None when there is no such conversation or it was deleted."""
        rows = self._db.read(f"{_CONVERSATION} WHERE c.id = ? AND c.deleted IS NULL", (conversation,))
        return _conversation(rows[0]) if rows else None

    def create(self, settings: dict[str, Any] | None = None, title: str = "", user: str = "") -> Conversation:
        with self._db.writing():
            id = self._insert_conversation(title, settings or {}, time.time(), time.time(), user)
            return self.require(id)

    def rename(self, conversation: str, title: str) -> Conversation:
        return self._change(conversation, title=_title(title))

    def configure(self, conversation: str, settings: dict[str, Any]) -> Conversation:
        """Remember the settings that it was last used with."""
        return self._change(conversation, settings=json.dumps(settings))

    def move(self, conversation: str, folder: str) -> Conversation:
        """Into a folder, which is there while something is in it; "" is none."""
        return self._change(conversation, folder=_title(folder))

    def delete(self, conversation: str) -> None:
        """Into the trash, from which `restore` takes it back within TRASH_DAYS."""
        self._change(conversation, deleted=time.time())

    def restore(self, conversation: str) -> Conversation:
        with self._db.writing():
            self._db.execute("UPDATE conversations SET deleted = NULL WHERE id = ?", conversation)
            return self.require(conversation)

    def _change(self, conversation: str, **values: Any) -> Conversation:
        """Set columns. Raises DuoChatError when it is gone."""
        with self._db.writing():
            before = self.require(conversation)
            columns = ", ".join(f"{column} = ?" for column in values)
            change = f"UPDATE conversations SET {columns}, version = version + 1 WHERE id = ?"
            self._db.execute(change, *values.values(), conversation)
            return before if "deleted" in values else self.require(conversation)

    def require(self, conversation: str) -> Conversation:
        """Raises DuoChatError when it is gone."""
        found = self.get(conversation)
        if found is None:
            raise DuoChatError(GONE)
        return found

    # ------------------------------------------------------------------ messages

    def thread(self, conversation: str) -> list[Message]:
        """The messages on view, the first one first; [] when there is no such conversation."""
        found = self.get(conversation)
        return exchange.shown(self._messages(found.id), found.leaf) if found else []

    def _messages(self, conversation: str) -> list[Message]:
        """All of a conversation, the oldest first."""
        rows = self._db.read(f"{_MESSAGE} WHERE conversation = ? ORDER BY id", (conversation,))
        versions: dict[int | None, list[int]] = {}
        for id, parent, *_ in rows:
            versions.setdefault(parent, []).append(id)
        return [
            Message(id, parent, role, content, json.loads(meta), created, tuple(versions[parent]))
            for id, parent, role, content, meta, created in rows
        ]

    def add(
        self, conversation: str, parent: int | None, role: str, content: str, meta: dict[str, Any] | None = None,
        steps: Iterable[Step] = (),
    ) -> Message:  # fmt: skip
        """A new message after `parent` (None: a first one), which comes on view. Beside others it is a new branch."""
        if role not in ROLES:
            raise DuoChatError(f"A message has the role {role!r}: give {', '.join(ROLES)}.")
        trace = packing.pack(steps)
        with self._db.writing():
            self.require(conversation)
            self._belongs(conversation, parent)
            id = self._insert_message(conversation, parent, role, content, meta or {}, time.time(), trace)
            self._show(conversation, id)
            self._db.execute("UPDATE conversations SET updated = ? WHERE id = ?", time.time(), conversation)
        return self.message(id)

    def message(self, message: int) -> Message:
        """Raises DuoChatError when there is none."""
        for (conversation,) in self._db.read("SELECT conversation FROM messages WHERE id = ?", (message,)):
            return next(m for m in self._messages(conversation) if m.id == message)
        raise DuoChatError("That message is no longer there: reload the page.")

    def update(
        self, message: int, content: str, meta: dict[str, Any] | None = None, steps: Iterable[Step] | None = None
    ) -> None:
        """For the one who writes an answer: its text so far, its notes and trace. None leaves them as they are."""
        trace = packing.pack(steps or ())
        with self._db.writing():
            self._db.execute("UPDATE messages SET content = ? WHERE id = ?", _storable(content), message)
            if meta is not None:
                self._db.execute("UPDATE messages SET meta = ? WHERE id = ?", json.dumps(meta), message)
            if trace:
                self._db.execute("INSERT OR REPLACE INTO traces VALUES (?, ?)", message, trace)

    def trace(self, message: int) -> list[Step]:
        """The steps by which the answer came; [] when none were kept, or when they cannot be read any more."""
        with suppress(ValueError):
            return packing.unpack(self._trace(message))
        return []

    def _trace(self, message: int) -> bytes:
        rows = self._db.read("SELECT steps FROM traces WHERE message = ?", (message,))
        return rows[0][0] if rows else b""

    def select(self, conversation: str, message: int) -> None:
        """Show this version of a message, and below it what was last on view there."""
        with self._db.writing():
            self.require(conversation)
            self._belongs(conversation, message)
            self._show_below(conversation, message)

    def remove(self, conversation: str, message: int) -> None:
        """Delete one message on view for good. What follows it stays, unless there are other versions of it: then what
        follows goes with it, and the version before comes on view."""
        with self._db.writing():
            self._belongs(conversation, message)
            gone = self.message(message)
            others = [id for id in gone.versions if id != message]
            if not others:
                self._db.execute("UPDATE messages SET parent = ? WHERE parent = ?", gone.parent, message)
            leaf = self.require(conversation).leaf
            self._db.execute("UPDATE conversations SET leaf = NULL WHERE id = ?", conversation)
            self._db.execute("DELETE FROM messages WHERE id = ?", message)
            if others:
                self._show_below(conversation, max([id for id in others if id < message] or others))
            else:
                self._show(conversation, gone.parent if leaf == message else leaf)

    def settle(self, conversation: str, leaf: int | None) -> None:
        """End the view at this message (None: at nothing). What follows it stays as a branch."""
        with self._db.writing():
            self.require(conversation)
            self._belongs(conversation, leaf)
            self._show(conversation, leaf)

    def _show(self, conversation: str, leaf: int | None) -> None:
        self._db.execute("UPDATE conversations SET leaf = ?, version = version + 1 WHERE id = ?", leaf, conversation)
        version = "(SELECT version FROM conversations WHERE id = conversation)"
        self._db.execute(f"UPDATE messages SET viewed = {version} WHERE id = ?", leaf)

    def _show_below(self, conversation: str, message: int) -> None:
        """What was last on view from this message on."""
        (leaf,) = self._db.execute(LAST_VIEWED_BELOW, message).fetchone()
        self._show(conversation, leaf)

    def _belongs(self, conversation: str, message: int | None) -> None:
        query = "SELECT 1 FROM messages WHERE id = ? AND conversation = ?"
        if message is not None and not self._db.read(query, (message, conversation)):
            raise DuoChatError("That message is no longer part of this conversation: reload the page.")

    def _insert_conversation(
        self, title: str, settings: dict[str, Any], created: float, updated: float, user: str
    ) -> str:
        id = secrets.token_hex(8)
        insert = "INSERT INTO conversations (id, title, created, updated, settings, owner) VALUES (?, ?, ?, ?, ?, ?)"
        self._db.execute(insert, id, _title(title), created, updated, json.dumps(settings), user)
        return id

    def _insert_message(
        self, conversation: str, parent: int | None, role: str, content: str, meta: dict[str, Any], created: float,
        trace: bytes,
    ) -> int:  # fmt: skip
        insert = "INSERT INTO messages (conversation, parent, role, content, meta, created) VALUES (?, ?, ?, ?, ?, ?)"
        row = (conversation, parent, role, _storable(content), json.dumps(meta), created)
        id = self._db.execute(insert, *row).lastrowid
        if trace:
            self._db.execute("INSERT INTO traces VALUES (?, ?)", id, trace)
        return int(id or 0)

    # ------------------------------------------------------- export and import

    def export(self, conversation: str | None = None, form: str = "json", user: str = "") -> str:
        """One conversation or all of the user's as the text of a file.

        form: "json" (everything) or "markdown" (what is on view).
        What `import_` would refuse as too large comes without traces. Raises DuoChatError when that is too large too.
        """
        wanted = self.conversations(user=user) if conversation is None else [self.require(conversation)]
        if form == "markdown":
            return exchange.markdown(self._parcel(c, False) for c in wanted)
        text = exchange.dump(self._parcel(c, True) for c in wanted)
        if len(text) > exchange.LARGEST:
            text = exchange.dump(self._parcel(c, False) for c in wanted)
        exchange.require_size(text)
        return text

    def _parcel(self, c: Conversation, traces: bool) -> exchange.Parcel:
        messages = [
            exchange.Entry.model_construct(**plain(m), trace=self._trace(m.id) if traces else b"")
            for m in self._messages(c.id)
        ]
        told = {f: getattr(c, f) for f in exchange.Parcel.model_fields if f != "messages"}
        return exchange.Parcel.model_construct(messages=messages, **told)

    def import_(self, text: str, user: str = "") -> list[Conversation]:
        """Add the conversations of an exported file as new ones. Raises DuoChatError, and then has added none."""
        parcels = exchange.parse(text)
        with self._db.writing():
            return [self.require(self._unpack(parcel, user)) for parcel in parcels]

    def _unpack(self, parcel: exchange.Parcel, user: str) -> str:
        now = time.time()
        times = parcel.created or now, parcel.updated or now
        id = self._insert_conversation(parcel.title, parcel.settings, *times, user)
        self._db.execute("UPDATE conversations SET folder = ? WHERE id = ?", _title(parcel.folder), id)
        new: dict[int | None, int | None] = {None: None}
        for m in parcel.messages:
            row = (m.role, m.content, m.meta, m.created or now, m.trace)
            new[m.id] = self._insert_message(id, new[m.parent], *row)
        self._show(id, new[parcel.leaf])
        return id


_CONVERSATION = """
SELECT c.id, c.title, c.created, c.updated, c.settings, c.leaf, c.version, c.folder FROM conversations c"""
_MESSAGE = "SELECT id, parent, role, content, meta, created FROM messages"


def _conversation(row: Sequence[Any]) -> Conversation:
    id, title, created, updated, settings, *rest = row
    return Conversation(id, title, created, updated, json.loads(settings), *rest)


def _title(text: str) -> str:
    return _storable(" ".join(text.split())[:LONGEST_TITLE])


def _storable(text: str) -> str:
    """Half a surrogate pair, which a browser can send, has no UTF-8: it becomes a question mark."""
    return text.encode("utf-8", "replace").decode()
