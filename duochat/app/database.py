"""The file of conversations: an SQLite database that opens whatever state its file is in.

Knows tables, transactions and faults of the disk; `store` knows what the rows mean.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import platformdirs

from duochat import DuoChatError

SCHEMA = 3
TABLES = """
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    created REAL NOT NULL,
    updated REAL NOT NULL,
    deleted REAL,
    settings TEXT NOT NULL,
    leaf INTEGER,
    version INTEGER NOT NULL DEFAULT 1,
    folder TEXT NOT NULL DEFAULT '',
    owner TEXT NOT NULL DEFAULT ''
);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    parent INTEGER REFERENCES messages ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    meta TEXT NOT NULL,
    created REAL NOT NULL,
    viewed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX messages_of ON messages (conversation);
CREATE INDEX answers_to ON messages (parent);
CREATE TABLE traces (message INTEGER PRIMARY KEY REFERENCES messages ON DELETE CASCADE, steps BLOB NOT NULL);
"""


def data_dir() -> Path:
    """Where this user's conversations lie: $DUOCHAT_DATA, or the system's place for user data."""
    return Path(os.environ.get("DUOCHAT_DATA") or platformdirs.user_data_path("duochat", appauthor=False))


class Database:
    """One connection, shared by all threads of this process. notice: what was wrong with the file, "" if nothing.

    Every fault of disk or database raises DuoChatError with a sentence.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notice = ""
        self._lock = threading.RLock()
        with self._told():
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._db = self._open()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        """For use within `writing`."""
        return self._db.execute(query, values)

    def read(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """All rows of a query, also within `writing`."""
        with self._lock, self._told():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """All or nothing, one writer at a time over all threads and processes."""
        with self._lock, self._told(), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            yield

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Faults of disk and database as sentences."""
        try:
            yield
        except (sqlite3.Error, OSError) as fault:
            raise DuoChatError(
                f"The conversations in {self.path.parent} cannot be read or written ({fault}): "
                "free space there, check its permissions, or set DUOCHAT_DATA to another folder."
            ) from fault

    def _open(self) -> sqlite3.Connection:
        """The database, made or moved aside and made anew if need be."""
        found = _inode(self.path)
        try:
            return self._connect()
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            if _inode(self.path) == found:  # else another process has done it
                aside = self._move_aside()
                self.notice = (
                    f"The file of conversations was damaged: it was moved to {aside}, and a new one was begun."
                )
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        """Raises sqlite3.DatabaseError, not its subclass OperationalError, when the file is damaged."""
        db = sqlite3.connect(self.path, timeout=10, isolation_level=None, check_same_thread=False)
        try:
            db.create_function("casefold", 1, str.casefold, deterministic=True)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA foreign_keys = ON")
            if (verdict := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(verdict)
            self._make_tables(db)
        except BaseException:
            db.close()
            raise
        return db

    def _make_tables(self, db: sqlite3.Connection) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            if schema > SCHEMA:
                raise DuoChatError(
                    f"The conversations in {self.path.parent} were written by a newer DuoChat: "
                    "update it, or set DUOCHAT_DATA to another folder."
                )
            if schema == 0:
                for statement in TABLES.split(";\n"):
                    db.execute(statement)
            if schema == 1:
                db.execute("ALTER TABLE conversations ADD COLUMN folder TEXT NOT NULL DEFAULT ''")
            if schema in (1, 2):
                db.execute("ALTER TABLE conversations ADD COLUMN owner TEXT NOT NULL DEFAULT ''")
            db.execute(f"PRAGMA user_version = {SCHEMA}")

    def _move_aside(self) -> Path:
        aside = self.path.with_name(f"{self.path.stem}.damaged-{datetime.now():%Y%m%d-%H%M%S-%f}{self.path.suffix}")
        for suffix in ("-wal", "-shm", ""):
            with suppress(FileNotFoundError):
                os.replace(f"{self.path}{suffix}", f"{aside}{suffix}")
        return aside


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
