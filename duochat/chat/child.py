"""The engine's own process: prepares and loads a pair, then answers until the parent closes the pipe.

It never waits for a reader: a thread of its own sends what it has to say. What it says is told in `Server`; sentences
for what ends it, an exception that nobody expected or the death of the process, are here too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError, terminal
from duochat.chat.answer import Step

if TYPE_CHECKING:
    from duochat.chat.chat import Chat, Options
    from duochat.chat.loading import Prepare
    from duochat.chat.text import Messages

BEAT = 1.0  # seconds of silence after which the child says that it lives
GATHER = 1 / 60  # seconds between two messages: the rounds of a fast engine go together, nobody reads faster
DEATHS = {
    "SIGKILL": f"The engine was killed (SIGKILL), most often because memory ran out: {terminal.MEMORY}.",
    "SIGTERM": "The engine was ended from outside (SIGTERM): see who did it, then try again.",
    "SIGILL": "A library of the engine was built for another processor (SIGILL): on this machine, run "
    f"{terminal.INSTALL} --force-reinstall --no-cache-dir.",
}
CRASHED = (
    "A library of the engine crashed ({}): its own words, if any, are on the terminal. Update llama-cpp-python and "
    "torch, choose another pair, or start the servers of rpc again."
)


def serve(connection: Connection, settings: Any, prepare: Prepare) -> None:
    """Life of the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the pipe
    with suppress(OSError):  # Linux: when memory runs out the engine shall go, not the page
        Path("/proc/self/oom_score_adj").write_text("500")
    server = Server(connection)
    try:
        server.run(settings, prepare)
    finally:
        server.finish()


class Server:
    """The main thread works, one thread listens, one speaks.

    Told: ("load", 0) after which the models are loaded, ("reply", number, messages, options), ("calibrate", number),
    ("cancel", number). Says lists of: ("loading", progress), ("checked",), ("ready", hardware), ("failed", sentence),
    ("beat", seconds without progress), ("step", number, Step), ("end", number, None), ("error", number, sentence).
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outbox: SimpleQueue = SimpleQueue()
        self._jobs: SimpleQueue = SimpleQueue()
        self._cancelled = 0  # the number of the last job that is no longer wanted
        self._sign_of_life = monotonic()
        self._replying = False
        self._speaker = threading.Thread(target=self._speak, daemon=True, name="speaker")
        self._speaker.start()
        threading.Thread(target=self._listen, daemon=True, name="listener").start()

    def _speak(self) -> None:
        """Send what is said; in silence, say that the process lives, and for how long a reply has given no sign."""
        while True:
            try:
                said = [self._outbox.get(timeout=BEAT)]
            except Empty:
                said = [("beat", monotonic() - self._sign_of_life if self._replying else 0.0)]
            while not self._outbox.empty():
                said.append(self._outbox.get())
            try:
                self._connection.send([words for words in said if words])
            except OSError:
                os._exit(1)
            if None in said:
                return
            sleep(GATHER)

    def _listen(self) -> None:
        """Take jobs and cancellations. The end of the pipe is the end of the parent: leave no orphan."""
        while True:
            try:
                kind, number, *rest = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if kind == "cancel":
                self._cancelled = number
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

    def run(self, settings: Any, prepare: Prepare) -> None:
        """All faults end here: whatever goes wrong in this process must reach the person as a sentence."""
        try:
            load = prepare(settings, lambda *progress: self._say("loading", progress))
            self._say("checked")
            self._jobs.get()
            chat = load()
            self._say("ready", chat.engine.describe())
            while True:
                self._work(chat, *self._jobs.get())
        except DuoChatError as fault:
            self._say("failed", str(fault))
        except Exception as fault:  # noqa: BLE001  see above; after a fault its state cannot be trusted any more
            if not terminal.explained(fault):
                traceback.print_exc()
            self._say("failed", sentence(fault))

    def _work(self, chat: Chat, kind: str, number: int, *rest: Any) -> None:
        self._sign_of_life, self._replying = monotonic(), kind == "reply"
        try:
            self._reply(chat, number, *rest) if self._replying else self._calibrate(chat)
            self._say("end", number, None)
        except DuoChatError as fault:
            self._say("error", number, str(fault))
        finally:
            self._replying = False

    def _reply(self, chat: Chat, number: int, messages: Messages, options: Options) -> None:
        def cancelled() -> bool:
            self._sign_of_life = monotonic()
            return number <= self._cancelled

        def progress(done: int, total: int) -> None:
            self._say("step", number, Step(phase="prefill", progress=(done, total)))

        for step in chat.reply(messages, options, cancelled, progress):
            self._say("step", number, step)

    def _calibrate(self, chat: Chat) -> None:
        chat.engine.calibrate()
        self._say("ready", chat.engine.describe())


def sentence(fault: Exception) -> str:
    """What happened and what to do, for an exception while models are loaded or used."""
    return (
        terminal.explained(fault) or f"The engine failed ({terminal.named(fault)}): try again, or choose another pair."
    )


def obituary(code: int | None, answering: bool) -> str:
    """What the engine's process died of. code: its exit status, below 0 a signal. answering: a text was under way."""
    name = signal.Signals(-code).name if code and code < 0 else ""
    died = DEATHS.get(name) or (CRASHED.format(name) if name else f"The engine ended (exit status {code}): try again.")
    return f"{died} The text so far is kept, and your next message starts it again." if answering else died
