"""Work in the background: answers, races, lessons, measuring and loading models are all jobs.

A job has a thread of its own. Pages start it, look at it and may stop it; it goes on when they are closed. So the
engine never waits for a page, and any number of tabs can watch an answer.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from duochat import DuoChatError
from duochat.chat.answer import Answer
from duochat.chat.chat import Options

UNEXPECTED = "Something went wrong on the server ({}). Your text is kept: try again."
LEAVE = 2.0  # seconds that a job which was told to stop may take to keep what it has
KEPT = 32  # finished jobs that are remembered

log = logging.getLogger("duochat")


@dataclass(eq=False)
class Job:
    """note: what the page shows of it until there is a `result` or an `error`."""

    note: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    error: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


@dataclass(eq=False)
class Run(Job):
    """One answer. message: the store's id of the message that it becomes. before: text that the answer continues."""

    conversation: str = ""
    message: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)
    options: Options = field(default_factory=Options)
    before: str = ""
    answer: Answer = field(default_factory=Answer)

    @property
    def text(self) -> str:
        return self.before + self.answer.text


class Jobs:
    """Jobs by key: one of a key at a time. kept: how many finished ones are remembered; more are forgotten."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)

    def start(self, work: Callable[[Any], Any], key: str = "", job: Job | None = None, busy: str = "") -> str:
        """Run work(job) in a thread; returns the key. busy: the sentence when a job of this key is under way."""
        job, key = job or Job(), key or str(next(self._tickets))
        with self._lock:
            if self.under_way(key):
                raise DuoChatError(busy)
            self._jobs.pop(key, None)
            self._jobs[key] = job
            self._forget()
        job.thread = threading.Thread(target=self._run, args=(key, job, work), name=f"job {key}", daemon=True)
        job.thread.start()
        return key

    def _run(self, key: str, job: Job, work: Callable[[Any], Any]) -> None:
        try:
            job.result = work(job)
        except Exception as fault:  # noqa: BLE001  whatever it was, who asked must hear of it
            job.error = sentence(fault)
        job.done.set()
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        finished = [key for key, job in self._jobs.items() if job.done.is_set()]
        for key in finished[: max(0, len(finished) - self._kept)]:
            del self._jobs[key]

    def under_way(self, key: str) -> Any:
        """The job of this key that is not done; None when there is none."""
        job = self._jobs.get(key)
        return job if job and not job.done.is_set() else None

    def __len__(self) -> int:
        """Jobs under way."""
        return sum(not job.done.is_set() for job in list(self._jobs.values()))

    def look(self, key: Any) -> dict[str, Any]:
        """{"note"}, with "result" or "error" when it is done. Raises DuoChatError on an unknown key."""
        job = self._jobs.get(str(key))
        if job is None:
            raise DuoChatError("The server no longer knows this run: start it again.")
        over = {"result": job.result, "error": job.error} if job.done.is_set() else {}
        return {"note": dict(job.note), **over}

    def error(self, key: str) -> str:
        """Why the last job of this key failed; "" where it did not, or is under way again."""
        return self._jobs.get(key, Job()).error

    def stop(self, key: Any) -> None:
        if job := self._jobs.get(str(key)):
            job.stop.set()

    def close(self) -> None:
        """Stop all, and let them keep what they have."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.stop.set()
        for job in jobs:
            job.thread.join(LEAVE)


def sentence(fault: Exception) -> str:
    """What the user reads of a fault; one that nobody expected is logged too."""
    if isinstance(fault, DuoChatError):
        return str(fault)
    log.error("the page failed", exc_info=fault)
    return UNEXPECTED.format(type(fault).__name__)
