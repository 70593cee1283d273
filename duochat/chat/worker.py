"""The engine in a process of its own: `Worker` outlives whatever kills the engine.

Parent and child exchange small tuples over a pipe (see `child.Server`). Requests are served one at a time. Every fault
reaches the caller of `reply` as a last Step with one sentence in `error`, and the next request starts the engine again.
"""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError
from duochat.chat import loading
from duochat.chat.answer import Step
from duochat.chat.child import obituary, serve
from duochat.engine.lanes import Cancelled, never

if TYPE_CHECKING:
    from duochat.chat.chat import Options
    from duochat.chat.loading import Prepare
    from duochat.chat.text import Messages

TICK = 0.05  # seconds between looks at `cancelled`
STARTUP = 60.0  # seconds more that a new process may take to its first word
GRACE = 0.3  # seconds that a cancelled request waits for the engine's own last step
START_METHOD = "spawn"  # "fork" would copy the page's threads and locks
SHOWN = {"ready": "ready", "dead": "dead"}  # states of the child that people are told; before, it is loading
CLOSED = "The engine was closed: send the message again."


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
        self._closed = False
        self.settings, self.fallback = settings, fallback
        self.state = "fetching"  # then "checked": the files are here and fit; then "ready", at last "dead"
        self.fault = ""
        self.hardware: dict[str, Any] = {}
        self.loading: tuple[str, int, int] = ("", 0, 0)
        self.job: SimpleQueue | None = None  # what the job under way answers: (kind, value)
        self.process = context.Process(target=serve, args=(theirs, settings, prepare), name="duochat engine")
        self.process.start()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="engine listener")
        self._listener.start()

    def send(self, *words: Any) -> None:
        """A dead child is reported by the listener."""
        with self._sending, suppress(OSError):
            self._connection.send(words)

    def until(self, state: str, cancelled: Callable[[], bool] = never) -> Iterator[Step]:
        """Steps with what is being loaded, until it has come so far. Raises DuoChatError when it died, Cancelled."""
        shown = None
        while self.state != state:
            if self.state == "dead":
                raise DuoChatError(self.fault)
            if cancelled():
                raise Cancelled
            if shown != self.loading:
                shown = self.loading
                yield Step(phase="loading", notice=shown[0], progress=shown[1:])
            sleep(TICK)

    def ask(self, kind: str, *rest: Any, cancelled: Callable[[], bool] = never) -> Iterator[Step]:
        """Send a job and give its steps. Raises DuoChatError, Cancelled. Closing the iterator cancels the job."""
        self._numbers += 1
        number, self.job = self._numbers, SimpleQueue()
        try:
            self.send(kind, number, *rest)
            if self.state == "dead":
                raise DuoChatError(self.fault)
            yield from self._steps(number, self.job, cancelled)
        finally:
            self.job = None
            self.send("cancel", number)

    def _steps(self, number: int, said: SimpleQueue, cancelled: Callable[[], bool]) -> Iterator[Step]:
        last = None  # when a cancelled job is given up
        while last is None or monotonic() < last:
            if last is None and cancelled():
                last = monotonic() + GRACE
                self.send("cancel", number)
            with suppress(Empty):
                kind, value = said.get(timeout=TICK)
                if kind == "error":
                    raise DuoChatError(value)
                if kind == "end":
                    return
                yield value
        raise Cancelled

    def _listen(self) -> None:
        """To all that it says, until it gives no sign of life or the pipe ends."""
        with suppress(EOFError, OSError):
            while self._connection.poll(max(0.0, self._heard + self._patience - monotonic())):
                said = self._connection.recv()
                self._heard = monotonic()
                for words in said:
                    self._hear(*words)
            self.fault = f"The engine gave no sign of life for {self._patience:.0f} seconds and was ended: try again."
        self._bury()

    def _hear(self, kind: str, *rest: Any) -> None:
        job = self.job
        if kind == "beat":
            self._heard = monotonic() - rest[0]
        elif kind == "loading":
            self.loading = rest[0]
        elif kind == "checked":
            self.state = "checked"
        elif kind == "ready":
            self.hardware, self.state, self.fallback = rest[0], "ready", None
        elif kind == "failed":
            self.fault = rest[0]
        elif job and rest[0] == self._numbers:
            job.put((kind, rest[1]))

    def _bury(self) -> None:
        """See what it died of, kill it if it has not, and tell whoever waits."""
        self.process.join(GRACE)
        self.process.kill()
        self.process.join()
        died = CLOSED if self._closed else obituary(self.process.exitcode, answering=self.job is not None)
        self.fault = self.fault or died
        self.state = "dead"
        if self.job:
            self.job.put(("error", self.fault))

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

    @contextmanager
    def place(self, party: str = "") -> Iterator[_Ticket]:
        """Within, a request stands in the line, at its end."""
        with self._changed:
            before = [one.turn for one in self._waiting if one.party == party or one is self._waiting[0]]
            ticket = _Ticket(party, 1 + max(before, default=0))
            self._waiting.append(ticket)
            self._waiting.sort(key=lambda one: one.turn)
        try:
            yield ticket
        finally:
            with self._changed:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def ahead(self, ticket: _Ticket, seconds: float = 0) -> int:
        """Requests before this one; waits up to some seconds for its turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] is ticket, seconds)
            return self._waiting.index(ticket)


class Worker:
    """An engine in a child process, which starts to load at once. What answers conversations, for all rooms above.

    One request at a time; every method may be called from any thread. prepare: builds the Chat in the child, see
    `loading.prepare`. patience: seconds without a sign of life after which the child is ended.
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
        self, messages: Messages | str, options: Options, cancelled: Callable[[], bool] = never, party: str = ""
    ) -> Iterator[Step]:
        """Answer the last message, or continue it if it is the assistant's own; continue a bare text as it stands.

        party: who asks, the page by default. Parties that wait take turns, requests of one come in order.
        Phases: "queued", "loading", "prefill", "decode", "done". Never raises: the last step says what went wrong.
        Ends at once when cancelled.
        """
        with self._line.place(party) as ticket:
            try:
                yield from self._turn(ticket, cancelled)
                yield from self.loading(cancelled)
                with closing(self._child.ask("reply", messages, options, cancelled=cancelled)) as steps:
                    yield from steps
            except DuoChatError as fault:
                yield Step(phase="done", finish="error", error=str(fault))
            except Cancelled:
                yield Step(phase="done", finish="cancelled")

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
            with suppress(DuoChatError):
                yield from child.until("ready", cancelled)
            if child.state == "dead" and child is self._child and child.fallback is None:
                raise DuoChatError(child.fault)
            child = self._alive()

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
        """Measure both devices anew, when it is its turn; returns the hardware. Raises DuoChatError."""
        with self._line.place() as ticket:
            _exhaust(self._turn(ticket), self.loading())
            _exhaust(self._child.ask("calibrate"))
            return self._child.hardware

    def change(self, settings: Any, beside: bool = False, cancelled: Callable[[], bool] = never) -> None:
        """Load another pair: fetched and checked beside the present one, which goes on answering; then loaded beside it
        too, or in its place, after the requests before this one. Raises DuoChatError with the reason when it cannot be
        or was cancelled; the one before is then in use."""
        with self._lock:
            if self._next is not None:
                raise DuoChatError("Another pair of models is being fetched: wait for it, then choose again.")
            self._next = candidate = self._start(settings)
        try:
            _exhaust(candidate.until("checked", cancelled))
            if beside:
                candidate.send("load", 0)
                _exhaust(candidate.until("ready", cancelled))
            self._put(candidate)
        except Cancelled:
            raise DuoChatError("It was cancelled: the pair before is still in use.") from None
        finally:
            self._next = None
            if candidate is not self._child:
                candidate.close()
        _exhaust(self.loading())
        if self._child.settings is not settings:
            raise DuoChatError(self._refused)

    def _put(self, candidate: _Child) -> None:
        """In place of the present child: at once if that is still loading, else when it is this one's turn."""
        with self._line.place() as ticket:
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

    def status(self) -> dict[str, Any]:
        """state: "loading", "ready", "busy" or "dead". loading: (label, done, total) or None; choosing: the same of a
        pair that is fetched meanwhile. hardware: as `chat --json` has it. requests: answers under way and waiting."""
        child, candidate = self._child, self._next
        return {
            "state": "busy" if child.state == "ready" and child.job else SHOWN.get(child.state, "loading"),
            "loading": None if child.state in SHOWN else child.loading,
            "choosing": candidate.loading if candidate and candidate is not child else None,
            "hardware": child.hardware,
            "error": child.fault or self._refused,
            "requests": len(self._line),
            "settings": child.settings,
            "pid": child.process.pid,
        }

    def close(self) -> None:
        """End the engine; answers under way end with an error."""
        with self._lock:
            self._closed = True
        atexit.unregister(self.close)
        self._child.close()


def _exhaust(*waits: Iterator[Step]) -> None:
    """One after the other, where nobody looks at the steps."""
    for _ in chain(*waits):
        pass
