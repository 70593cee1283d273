"""Answers under way.

A thread of its own drains the engine into a `Run`; pages only look at runs. So the engine never waits for a page, an
answer goes on when its tab is closed, and any number of tabs can watch it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from duochat import DuoChatError
from duochat.app.frames import Live, decode_rate
from duochat.chat.chat import Options, Step
from duochat.engine.rounds import Round, Stats

WINDOW = 2.0  # seconds over which the live tokens/s are taken
PATIENCE = 0.25  # seconds after Stop until the page goes on without the engine's word
KEEP_EVERY = 3.0  # seconds between two savings of an answer that is being written
CRASHED = "The answer failed ({}). What was written so far is kept; send again to retry."

log = logging.getLogger("duochat")


class Engine(Protocol):
    """What the page needs of a chat or worker."""

    def reply(self, messages: list[dict[str, str]], options: Options, cancelled: Callable[[], bool]) -> Any: ...


@dataclass(eq=False)
class Run:
    """One answer: asked for, waiting, being written or finished.

    message: the store's id of the message that it becomes. before: text that the answer continues.
    """

    conversation: str
    message: int
    messages: list[dict[str, str]]
    options: Options
    before: str = ""
    text: str = ""
    phase: str = "queued"  # queued, loading, prefill, decode, done
    doing: str = ""  # what is being loaded
    progress: tuple[int, int] | None = None
    notices: list[str] = field(default_factory=list)
    error: str = ""
    finish: str | None = None
    prompt_tokens: int = 0
    context_length: int = 0
    speculation: str = ""
    reason: str = ""
    steps: list[Step] = field(default_factory=list)  # those with a round: what the picture is drawn from
    stats: Stats = field(default_factory=Stats)
    frames: list[dict[str, Any]] = field(default_factory=list)
    asked_at: float = field(default_factory=time.monotonic)
    kept_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.live = Live(self.options.decoder)
        self._lock = threading.Lock()
        self._recent: deque[tuple[float, int]] = deque()

    def take(self, step: Step, load: dict[str, float]) -> None:
        """Note one step of the engine. load: utilisation of the devices now (see Machine)."""
        self.phase = step.phase or self.phase
        self.progress = step.progress if step.phase in ("queued", "loading", "prefill") else None
        self.text += step.text
        self.error = step.error or self.error
        self.finish = step.finish or self.finish
        self.prompt_tokens = step.prompt_tokens or self.prompt_tokens
        self.context_length = step.context_length or self.context_length
        if step.phase == "loading":
            self.doing = step.notice
        elif step.notice:
            self.notices.append(step.notice)
        if step.round is not None:
            self.steps.append(step)
            self._count(step.round)
        with self._lock:
            self.frames.append(self.live.feed(step, load))

    def frames_from(self, seen: int) -> list[dict[str, Any]]:
        """What a picture lacks that has seen so many frames; in one piece when it has seen none."""
        with self._lock:
            return [self.live.snapshot()] if self.frames and not seen else self.frames[seen:]

    def _count(self, r: Round) -> None:
        now = time.monotonic()
        self.stats.add(r)
        self.speculation, self.reason = r.speculation, r.reason
        if r.tokens and self.first_at is None:
            self.first_at = now
        self._recent.append((now, len(r.tokens)))
        while self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    def rate(self) -> float:
        """Tokens/s: over the last seconds while it runs, over the whole decoding when it is done."""
        if self.phase == "done":
            return decode_rate(self.stats) or 0.0
        recent = list(self._recent)
        span = recent[-1][0] - recent[0][0] if recent else 0.0
        return sum(n for _, n in recent[1:]) / span if span > 0 else 0.0


Save = Callable[[Run, list[Step] | None], None]


class Runs:
    """The answers under way, one a conversation.

    save(run, steps) stores an answer: as it stands every few seconds (steps None), when it ends, and last with the
    steps of its trace. load: see `Run.take`. plain_rate: tokens/s of plain decoding here, None while unknown.
    """

    def __init__(
        self,
        engine: Engine,
        save: Save,
        load: Callable[[], dict[str, float]],
        plain_rate: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._engine, self._save, self._load, self._plain_rate = engine, save, load, plain_rate
        self._runs: dict[str, Run] = {}
        self._lock = threading.RLock()

    def start(self, run: Run) -> None:
        """Begin at once; the engine itself keeps the queue. Raises DuoChatError when the conversation has a run."""
        with self._lock:
            if run.conversation in self._runs:
                raise DuoChatError("This conversation is still being answered: press Stop first.")
            self._runs[run.conversation] = run
        threading.Thread(target=self._drain, args=(run,), name="answer", daemon=True).start()

    def of(self, conversation: str) -> Run | None:
        """The run that is writing into the conversation or waits to."""
        return self._runs.get(conversation)

    def busy(self) -> int:
        """Answers under way or waiting."""
        return len(self._runs)

    def stop(self, run: Run) -> None:
        """End the answer; when the engine does not listen, go on without it."""
        run.stop.set()
        threading.Timer(PATIENCE, self._end, (run, "cancelled")).start()

    def close(self) -> None:
        """End all answers at once; what they have is kept."""
        for run in list(self._runs.values()):
            run.stop.set()
            self._end(run, "cancelled")

    def _drain(self, run: Run) -> None:
        """Whatever the engine does, the run ends with a finish."""
        try:
            for step in self._engine.reply(run.messages, run.options, run.stop.is_set):
                with self._lock:
                    if run.done.is_set():
                        return  # the page has gone on without it
                    if step.round is not None and not run.steps:
                        run.live.plain_rate = self._plain_rate()  # known by now: loading measures it
                    run.take(step, self._load())
                if time.monotonic() - run.kept_at > KEEP_EVERY:
                    run.kept_at = time.monotonic()
                    self._keep(run)
        except DuoChatError as fault:
            run.error = run.error or str(fault)
        except Exception as fault:
            log.exception("the engine failed")
            run.error = run.error or CRASHED.format(f"{type(fault).__name__}: {fault}")
        self._end(run, "error" if run.error else "cancelled" if run.stop.is_set() else "stop")

    def _end(self, run: Run, finish: str) -> None:
        with self._lock:
            if run.done.is_set():
                return
            run.finish, run.phase = run.finish or finish, "done"
            self._keep(run)
            run.done.set()
            self._runs.pop(run.conversation, None)
        self._keep(run, run.steps)  # a long trace takes its time; nobody waits for it

    def _keep(self, run: Run, steps: list[Step] | None = None) -> None:
        try:
            self._save(run, steps)
        except Exception:
            log.exception("the answer could not be stored")
            run.notices.append("The answer could not be saved: check the free space on the disk.")
