"""The engine in a process of its own: `Worker` answers like `Chat`, and outlives whatever kills the engine.

Parent and child exchange small tuples over a pipe. The child never waits for a reader: a thread of its own sends
what it has to say. Requests are served one at a time, first come, first served. Every fault reaches the caller of
`reply` as a last Step with one sentence in `error`, and the next request starts the engine again.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any

from duochat import DuoChatError
from duochat.chat.chat import Chat, Options, Step
from duochat.chat.text import Messages, Tokenizer
from duochat.engine.lanes import Cancelled, never
from duochat.models import fetch, target_folder

Progress = Callable[[str, int, int], None]  # (what is being done, done, total or 0)
Load = Callable[[Any, Progress], Chat]  # runs in the child; must be importable by name

TICK = 0.05  # seconds between looks at `cancelled`
BEAT = 1.0  # seconds of silence after which the child says that it lives
STARTUP = 60.0  # seconds more that a new process may take to its first word
GRACE = 0.3  # seconds that a cancelled request waits for the engine's own last step


def load_chat(settings: Any, progress: Progress) -> Chat:
    """Load both lanes and the target's tokenizer as the settings say. Raises DuoChatError."""
    from duochat.engine.engine import Engine  # torch and llama_cpp are loaded in the child alone

    folder = target_folder(fetch(settings.target, progress), progress)
    tokenizer = Tokenizer.load(folder, settings.chat_template)
    return Chat(Engine.load(settings, progress), tokenizer)


# ---------------------------------------------------------------- the child


def serve(connection: Connection, settings: Any, load: Load) -> None:
    """Life of the child: load, then answer until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    with suppress(OSError):  # Linux: when memory runs out the engine shall go, not the page
        Path("/proc/self/oom_score_adj").write_text("500")
    server = _Server(connection)
    try:
        server.run(settings, load)
    finally:
        server.finish()


class _Server:
    """The child's side: the main thread works, one thread listens, one speaks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: SimpleQueue = SimpleQueue()
        self._jobs: SimpleQueue = SimpleQueue()
        self._cancelled: set[int] = set()
        self._sign_of_life = monotonic()
        self._replying = False
        self._speaker = threading.Thread(target=self._speak, daemon=True, name="speaker")
        self._speaker.start()
        threading.Thread(target=self._listen, daemon=True, name="listener").start()

    def _speak(self) -> None:
        """Send what is said; in silence, say that the process lives, and for how long a reply has given no sign."""
        while True:
            try:
                words = self._outbox.get(timeout=BEAT)
            except Empty:
                words = ("beat", monotonic() - self._sign_of_life if self._replying else 0.0)
            if words is None:
                return
            try:
                self._connection.send(words)
            except OSError:
                os._exit(1)

    def _listen(self) -> None:
        """Take jobs and cancellations. The end of the pipe is the end of the parent: leave no orphan."""
        while True:
            try:
                kind, number, *rest = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if kind == "cancel":
                self._cancelled.add(number)
            else:
                self._jobs.put((kind, number, *rest))

    def _say(self, *words: Any) -> None:
        self._sign_of_life = monotonic()
        self._outbox.put(words)

    def finish(self) -> None:
        """Send what is still to be said and end, without the libraries' slow goodbyes."""
        self._outbox.put(None)
        self._speaker.join()
        sys.stderr.flush()
        os._exit(1)

    def run(self, settings: Any, load: Load) -> None:
        try:
            chat = load(settings, lambda *progress: self._say("loading", progress))
            self._say("ready", chat.engine.describe())
        except DuoChatError as fault:
            return self._say("failed", str(fault))
        except Exception as fault:  # noqa: BLE001  whatever goes wrong in here must reach the person as a sentence
            traceback.print_exc()
            return self._say("failed", f"The models could not be loaded ({_named(fault)}): check the settings.")
        while self._work(chat, *self._jobs.get()):
            pass

    def _work(self, chat: Chat, kind: str, number: int, *rest: Any) -> bool:
        """Do one job. False after a fault of the engine: its state cannot be trusted any more."""
        self._sign_of_life, self._replying = monotonic(), kind == "reply"
        try:
            self._reply(chat, number, *rest) if self._replying else self._call(chat, number, *rest)
        except DuoChatError as fault:
            self._say("error", number, str(fault))
        except Exception as fault:  # noqa: BLE001  as in run()
            traceback.print_exc()
            self._say("failed", f"The engine failed ({_named(fault)}): your next message starts it again.")
            return False
        finally:
            self._replying = False
        return True

    def _reply(self, chat: Chat, number: int, messages: Messages, options: Options) -> None:
        def cancelled() -> bool:
            self._sign_of_life = monotonic()
            return number in self._cancelled

        def progress(done: int, total: int) -> None:
            self._say("step", number, Step(phase="prefill", progress=(done, total)))

        for step in chat.reply(messages, options, cancelled, progress):
            self._say("step", number, step)
        self._say("end", number, None)

    def _call(self, chat: Chat, number: int, name: str, arguments: dict[str, Any]) -> None:
        self._say("end", number, getattr(chat.engine, name)(**arguments))


def _named(fault: Exception) -> str:
    first = str(fault).strip().partition("\n")[0]
    return f"{type(fault).__name__}: {first}" if first else type(fault).__name__


# --------------------------------------------------------------- the parent


@dataclass(eq=False)
class _Job:
    """One request at the child: what it answers comes into the inbox as (kind, value)."""

    number: int
    cancelled: Callable[[], bool]
    inbox: SimpleQueue = field(default_factory=SimpleQueue)
    cancelled_at: float | None = None
    told: bool = False


class _Child:
    """One life of the engine's process, as the parent sees it."""

    def __init__(self, settings: Any, load: Load, patience: float, start_method: str) -> None:
        context = multiprocessing.get_context(start_method)
        self._connection, theirs = context.Pipe()
        self._patience = patience
        self._sending = threading.Lock()
        self._numbers = 0
        self._heard = monotonic() + STARTUP
        self._closed = False
        self.settings = settings
        self.state = "loading"  # then "ready", at last "dead"
        self.fault = ""
        self.hardware: dict[str, Any] = {}
        self.loading: tuple[str, int, int] = ("starting the engine", 0, 0)
        self.job: _Job | None = None
        self.process = context.Process(target=serve, args=(theirs, settings, load), name="duochat engine")
        self.process.start()
        theirs.close()
        self._listener = threading.Thread(target=self._listen, daemon=True, name="engine listener")
        self._listener.start()

    def ask(self, kind: str, *rest: Any, cancelled: Callable[[], bool] = never) -> Iterator[tuple[str, Any]]:
        """Send a job and give what it answers, ("step", Step) or ("end", result). Raises DuoChatError, Cancelled.

        Closing the iterator cancels the job.
        """
        self._numbers += 1
        self.job = job = _Job(self._numbers, cancelled)
        try:
            with self._sending, suppress(OSError):  # a dead child is reported by the listener
                self._connection.send((kind, job.number, *rest))
            if self.state == "dead":
                raise DuoChatError(self.fault)
            yield from self._answers(job)
        finally:
            job.cancelled_at = job.cancelled_at or monotonic()
            self._tell_cancelled(job)
            self.job = None

    def _answers(self, job: _Job) -> Iterator[tuple[str, Any]]:
        while True:
            try:
                kind, value = job.inbox.get(timeout=TICK)
            except Empty:
                if job.cancelled_at and monotonic() - job.cancelled_at > GRACE:
                    raise Cancelled from None
                continue
            if kind == "error":
                raise DuoChatError(value)
            yield kind, value
            if kind == "end":
                job.told = True
                return

    def _listen(self) -> None:
        hung = False
        try:
            while not (hung or self._closed):
                if self._connection.poll(TICK):
                    self._hear(*self._connection.recv())
                self._look_for_cancel()
                hung = monotonic() - self._heard > self._patience
        except (EOFError, OSError):
            pass
        self._bury(hung)

    def _hear(self, kind: str, *rest: Any) -> None:
        self._heard = monotonic()
        job = self.job
        if kind == "beat":
            self._heard -= rest[0]
        elif kind == "loading":
            self.loading = rest[0]
        elif kind == "ready":
            self.state, self.hardware = "ready", rest[0]
        elif kind == "failed":
            self.fault = rest[0]
        elif job and job.number == rest[0]:
            job.inbox.put((kind, rest[1]))

    def _look_for_cancel(self) -> None:
        job = self.job
        if job and not job.told and (job.cancelled_at or job.cancelled()):
            job.cancelled_at = job.cancelled_at or monotonic()
            self._tell_cancelled(job)

    def _tell_cancelled(self, job: _Job) -> None:
        """Without waiting: while a long message is being sent, the listener tries again at its next look."""
        if job.told or not self._sending.acquire(blocking=False):
            return
        try:
            with suppress(OSError):
                self._connection.send(("cancel", job.number))
            job.told = True
        finally:
            self._sending.release()

    def _bury(self, hung: bool) -> None:
        """After the pipe's end: see what it died of and tell whoever waits."""
        if hung:
            self.process.kill()
        self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        loading = self.state == "loading"
        self.fault = self.fault or self._obituary(hung, loading)
        self.state = "dead"
        if self.job:
            self.job.inbox.put(("error", self.fault))

    def _obituary(self, hung: bool, loading: bool) -> str:
        code = self.process.exitcode or 0
        if self._closed:
            return "The engine was closed: send the message again."
        if hung:
            what = f"gave no sign of life for {self._patience:.0f} seconds and was ended"
        elif code < 0:
            name = signal.Signals(-code).name
            what = f"was killed ({name}), often because memory ran out" if name == "SIGKILL" else f"crashed ({name})"
        else:
            what = f"ended (exit status {code})"
        if loading:
            return f"The engine {what} while it loaded the models: check the model files or choose smaller ones."
        return f"The engine {what}: the text so far is kept, and your next message starts it again."

    def close(self) -> None:
        """End the process, gently if it listens."""
        self._closed = True
        self.process.terminate()
        self._listener.join()


class _Line:
    """The queue of requests, first come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[object] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self) -> object:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
        return ticket

    def leave(self, ticket: object) -> None:
        with self._changed:
            self._waiting.remove(ticket)
            self._changed.notify_all()

    def ahead(self, ticket: object, seconds: float = 0) -> int:
        """Requests before this one; waits up to some seconds for its turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] is ticket, seconds)
            return self._waiting.index(ticket)


class Worker:
    """An engine in a child process, which starts to load at once.

    load: builds the Chat in the child. patience: seconds without a sign of life after which the child is ended.
    start_method: of `multiprocessing`; "fork" would copy the page's threads and locks.
    """

    def __init__(
        self, settings: Any, load: Load = load_chat, patience: float = 120.0, start_method: str = "spawn"
    ) -> None:
        self._start = lambda settings: _Child(settings, load, patience, start_method)
        self._line = _Line()
        self._lock = threading.Lock()
        self._closed = False
        self._child = self._start(settings)
        atexit.register(self.close)

    def reply(self, messages: Messages, options: Options, cancelled: Callable[[], bool] = never) -> Iterator[Step]:
        """As Chat.reply, but never raises: the last step says what went wrong. Other phases: "queued", "loading"."""
        ticket = self._line.join()
        try:
            yield from self._turn(ticket, cancelled)
            yield from self.loading(cancelled)
            with closing(self._child.ask("reply", messages, options, cancelled=cancelled)) as answers:
                yield from (step for kind, step in answers if kind == "step")
        except DuoChatError as fault:
            yield Step(phase="done", finish="error", error=str(fault))
        except Cancelled:
            yield Step(phase="done", finish="cancelled")
        finally:
            self._line.leave(ticket)

    def _turn(self, ticket: object, cancelled: Callable[[], bool]) -> Iterator[Step]:
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
        shown = None
        self._revive()
        while self._child.state == "loading":
            if cancelled():
                raise Cancelled
            if shown != self._child.loading:
                shown = self._child.loading
                yield Step(phase="loading", notice=shown[0], progress=shown[1:])
            sleep(TICK)
        if self._child.state == "dead":
            raise DuoChatError(self._child.fault)

    def _revive(self, settings: Any = None) -> None:
        """Start a new child in place of a dead one, or in any case when settings are given."""
        with self._lock:
            if self._closed:
                raise DuoChatError("The engine is closed: start DuoChat again.")
            old = self._child
            if settings or old.state == "dead":
                self._child = self._start(settings or old.settings)
                old.close()

    def call(self, name: str, **arguments: Any) -> Any:
        """What the engine's method of this name returns, when it is its turn. Raises DuoChatError."""
        ticket = self._line.join()
        try:
            for _ in self._turn(ticket, never):
                pass
            for _ in self.loading():
                pass
            return next(value for kind, value in self._child.ask("call", name, arguments) if kind == "end")
        finally:
            self._line.leave(ticket)

    def calibrate(self) -> Any:
        """Measure both devices anew."""
        return self.call("calibrate")

    def restart(self, settings: Any = None) -> None:
        """Load again, with other settings if given: at once while loading, else after the requests before it."""
        ticket = self._line.join()
        try:
            while self._child.state == "ready" and self._line.ahead(ticket, TICK):
                pass
            self._revive(settings or self._child.settings)
        finally:
            self._line.leave(ticket)

    def status(self) -> dict[str, Any]:
        """{state: loading | ready | busy | dead, loading: (label, done, total) or None, hardware, error, requests,
        settings, pid}."""
        child = self._child
        return {
            "state": "busy" if child.state == "ready" and child.job else child.state,
            "loading": child.loading if child.state == "loading" else None,
            "hardware": child.hardware,
            "error": child.fault,
            "requests": len(self._line),
            "settings": child.settings,
            "pid": child.process.pid,
        }

    def close(self) -> None:
        """End the child; requests under way end with an error step."""
        with self._lock:
            self._closed = True
        atexit.unregister(self.close)
        self._child.close()
