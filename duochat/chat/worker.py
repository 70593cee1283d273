"""The engine in a process of its own: `Worker` outlives whatever kills the engine.

Parent and child exchange small tuples over a pipe (see `child.Server`). Requests are served one at a time. Every fault
reaches the caller of `reply` as a last Step with one sentence in `error`, and the next request starts the engine again.
"""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError
from duochat.chat import loading
from duochat.chat.answer import Engine, Step
from duochat.chat.child import serve
from duochat.chat.faults import obituary
from duochat.chat.loading import load_chat
from duochat.engine.lanes import Cancelled, never

if TYPE_CHECKING:
    from duochat.chat.chat import Options
    from duochat.chat.loading import Prepare
    from duochat.chat.text import Messages

__all__ = ["Worker", "load_chat"]

TICK = 0.05  # seconds between looks at `cancelled`
STARTUP = 60.0  # seconds more that a new process may take to its first word
GRACE = 0.3  # seconds that a cancelled request waits for the engine's own last step
START_METHOD = "spawn"  # "fork" would copy the page's threads and locks
CLOSED = "The engine was closed: send the message again."


@dataclass(eq=False)
class _Job:
    """One request at the child: what it answers comes into the inbox as (kind, value)."""

    number: int
    inbox: SimpleQueue = field(default_factory=SimpleQueue)
    cancelled_at: float | None = None


class _Child:
    """One life of the engine's process, as the parent sees it. It loads when it is told to."""

    def __init__(self, settings: Any, prepare: Prepare, patience: float, fallback: Any = None) -> None:
        """fallback: settings to go back to if this life ends before it is ready."""
        context = multiprocessing.get_context(START_METHOD)
        self._connection, theirs = context.Pipe()
        self._patience = patience
        self._sending = threading.Lock()
        self._numbers = 0
        self._heard = monotonic() + STARTUP
        self._hung = self._closed = False
        self.settings, self.fallback = settings, fallback
        self.state = "loading"  # then "ready", at last "dead"
        self.checked = False  # the files are here and fit
        self.fault = ""
        self.hardware: dict[str, Any] = {}
        self.loading: tuple[str, int, int] = ("", 0, 0)
        self.job: _Job | None = None
        self.process = context.Process(target=serve, args=(theirs, settings, prepare), name="duochat engine")
        self.process.start()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="engine listener")
        self._listener.start()

    def send(self, *words: Any) -> None:
        """A dead child is reported by the listener."""
        with self._sending, suppress(OSError):
            self._connection.send(words)

    def ask(self, kind: str, *rest: Any, cancelled: Callable[[], bool] = never) -> Iterator[Step]:
        """Send a job and give its steps. Raises DuoChatError, Cancelled. Closing the iterator cancels the job."""
        self._numbers += 1
        self.job = job = _Job(self._numbers)
        ended = False
        try:
            self.send(kind, job.number, *rest)
            if self.state == "dead":
                raise DuoChatError(self.fault)
            yield from self._steps(job, cancelled)
            ended = True
        finally:
            self.job = None
            if not ended and job.cancelled_at is None:
                self.send("cancel", job.number)

    def _steps(self, job: _Job, cancelled: Callable[[], bool]) -> Iterator[Step]:
        while True:
            if job.cancelled_at is None and cancelled():
                job.cancelled_at = monotonic()
                self.send("cancel", job.number)
            with suppress(Empty):
                kind, value = job.inbox.get(timeout=TICK)
                if kind == "error":
                    raise DuoChatError(value)
                if kind == "end":
                    return
                yield value
            if job.cancelled_at and monotonic() - job.cancelled_at > GRACE:
                raise Cancelled
            self.look()

    def look(self) -> None:
        """End a process that gives no sign of life. For whoever waits for it, every now and then."""
        if self.state != "dead" and monotonic() - self._heard > self._patience:
            self._hung = True
            self.process.kill()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                said = self._connection.recv()
                self._heard = monotonic()
                for words in said:
                    self._hear(*words)
        self._bury()

    def _hear(self, kind: str, *rest: Any) -> None:
        job = self.job
        if kind == "beat":
            self._heard = monotonic() - rest[0]
        elif kind == "loading":
            self.loading = rest[0]
        elif kind == "checked":
            self.checked = True
        elif kind == "ready":
            self.hardware, self.state, self.fallback = rest[0], "ready", None
        elif kind == "failed":
            self.fault = rest[0]
        elif job and job.number == rest[0]:
            job.inbox.put((kind, rest[1]))

    def _bury(self) -> None:
        """After the pipe's end: see what it died of and tell whoever waits."""
        self.process.join(GRACE)
        self.process.kill()
        self.process.join()
        self.fault = self.fault or self._epitaph()
        self.state = "dead"
        if self.job:
            self.job.inbox.put(("error", self.fault))

    def _epitaph(self) -> str:
        if self._closed:
            return CLOSED
        if self._hung:
            return f"The engine gave no sign of life for {self._patience:.0f} seconds and was ended: try again."
        return obituary(self.process.exitcode, answering=self.job is not None)

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self.process.kill()
        self._listener.join()


@dataclass(eq=False)
class _Ticket:
    party: str
    turn: int


class _Line:
    """The queue of requests: of each party first come, first served, and the parties that wait take turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Ticket] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, party: str = "") -> _Ticket:
        with self._changed:
            before = [one.turn for one in self._waiting if one.party == party or one is self._waiting[0]]
            ticket = _Ticket(party, 1 + max(before, default=0))
            self._waiting.append(ticket)
            self._waiting.sort(key=lambda one: one.turn)
        return ticket

    def leave(self, ticket: _Ticket) -> None:
        with self._changed:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def ahead(self, ticket: _Ticket, seconds: float = 0) -> int:
        """Requests before this one; waits up to some seconds for its turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] is ticket, seconds)
            return self._waiting.index(ticket)


class Worker(Engine):
    """An engine in a child process, which starts to load at once.

    prepare: builds the Chat in the child, see `loading.prepare`. patience: seconds without a sign of life after which
    the child is ended.
    """

    def __init__(self, settings: Any, prepare: Prepare | None = None, patience: float = 120.0) -> None:
        self._prepare, self._patience = prepare or loading.prepare, patience
        self._line = _Line()
        self._lock = threading.Lock()
        self._closed = False
        self._next: _Child | None = None  # is fetched and checked while the present one answers
        self._refused = ""  # why the pair that was last chosen is not in use
        self._child = self._start(settings)
        self._child.send("load", 0)
        atexit.register(self.close)

    def _start(self, settings: Any, fallback: Any = None) -> _Child:
        return _Child(settings, self._prepare, self._patience, fallback)

    def reply(
        self, messages: Messages, options: Options, cancelled: Callable[[], bool] = never, party: str = ""
    ) -> Iterator[Step]:
        ticket = self._line.join(party)
        try:
            yield from self._turn(ticket, cancelled)
            yield from self.loading(cancelled)
            with closing(self._child.ask("reply", messages, options, cancelled=cancelled)) as steps:
                yield from steps
        except DuoChatError as fault:
            yield Step(phase="done", finish="error", error=str(fault))
        except Cancelled:
            yield Step(phase="done", finish="cancelled")
        finally:
            self._line.leave(ticket)

    def _turn(self, ticket: _Ticket, cancelled: Callable[[], bool] = never) -> Iterator[Step]:
        """Wait for the turn; a step whenever the place in the queue changes."""
        shown = None
        while ahead := self._line.ahead(ticket, TICK if shown else 0):
            if cancelled():
                raise Cancelled
            if shown != (ahead, len(self._line)):
                shown = (ahead, len(self._line))
                yield Step(phase="queued", progress=shown)

    def loading(self, cancelled: Callable[[], bool] = never) -> Iterator[Step]:
        """Steps with what is being loaded, until the engine is ready; a dead engine is started again.

        Raises DuoChatError when it cannot be loaded, Cancelled when told so (loading itself goes on).
        """
        child = self._alive()
        while child.state != "ready":
            yield from self._awaited(child, cancelled)
            if child.state == "dead" and child is self._child and child.fallback is None:
                raise DuoChatError(child.fault)
            child = self._alive()

    def _awaited(self, child: _Child, cancelled: Callable[[], bool]) -> Iterator[Step]:
        shown = None
        while child.state == "loading":
            if cancelled():
                raise Cancelled
            if shown != child.loading:
                shown = child.loading
                yield Step(phase="loading", notice=shown[0], progress=shown[1:])
            child.look()
            sleep(TICK)

    def _alive(self) -> _Child:
        """The present child; in place of a dead one another life, of the pair before if this one never was ready."""
        with self._lock:
            if self._closed:
                raise DuoChatError("The engine is closed: start DuoChat again.")
            if self._child.state == "dead":
                old = self._child
                self._refused = f"{old.fault} The pair before is in use again." if old.fallback else self._refused
                self._child = self._start(old.fallback or old.settings)
                self._child.send("load", 0)
            return self._child

    def calibrate(self) -> dict[str, Any]:
        ticket = self._line.join()
        try:
            for _ in self._turn(ticket):
                pass
            for _ in self.loading():
                pass
            for _ in self._child.ask("calibrate"):
                pass
            return self._child.hardware
        finally:
            self._line.leave(ticket)

    def change(self, settings: Any, beside: bool = False, cancelled: Callable[[], bool] = never) -> None:
        """Fetched and checked beside the present pair, which goes on answering; then loaded beside it too, or in its
        place, after the requests before this one."""
        with self._lock:
            if self._next is not None:
                raise DuoChatError("Another pair of models is being fetched: wait for it, then choose again.")
            self._next = candidate = self._start(settings)
        try:
            self._until(lambda: candidate.checked, candidate, cancelled)
            if beside:
                candidate.send("load", 0)
                self._until(lambda: candidate.state == "ready", candidate, cancelled)
            self._put(candidate)
        finally:
            self._next = None
            if candidate is not self._child:
                candidate.close()
        for _ in self.loading():
            pass
        if self._child.settings is not settings:
            raise DuoChatError(self._refused)

    @staticmethod
    def _until(reached: Callable[[], bool], child: _Child, cancelled: Callable[[], bool]) -> None:
        """Raises DuoChatError when the child died before, or when it was cancelled."""
        while not reached():
            if child.state == "dead":
                raise DuoChatError(child.fault)
            if cancelled():
                raise DuoChatError("It was cancelled: the pair before is still in use.")
            child.look()
            sleep(TICK)

    def _put(self, candidate: _Child) -> None:
        """In place of the present child: at once if that is still loading, else when it is this one's turn."""
        ticket = self._line.join()
        try:
            while self._child.state == "ready" and self._line.ahead(ticket, TICK):
                pass
            with self._lock:
                old, self._child = self._child, candidate
                self._refused = ""
                if candidate.state != "ready":
                    candidate.fallback = old.settings if old.state == "ready" else old.fallback
            old.close()
            if candidate.state != "ready":
                candidate.send("load", 0)
        finally:
            self._line.leave(ticket)

    def status(self) -> dict[str, Any]:
        """As `Engine.status`; `choosing`: (label, done, total) of a pair that is fetched meanwhile, or None; `pid`."""
        child, candidate = self._child, self._next
        return {
            "state": "busy" if child.state == "ready" and child.job else child.state,
            "loading": child.loading if child.state == "loading" else None,
            "choosing": candidate.loading if candidate and candidate is not child else None,
            "hardware": child.hardware,
            "error": child.fault or self._refused,
            "requests": len(self._line),
            "settings": child.settings,
            "pid": child.process.pid,
        }

    def close(self) -> None:
        with self._lock:
            self._closed = True
        atexit.unregister(self.close)
        self._child.close()
