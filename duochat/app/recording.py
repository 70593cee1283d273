"""Answers recorded for replay: one decoder's run on one prompt with its real times, and jobs that record in the
background while a page looks on."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from duochat import DuoChatError
from duochat.app.frames import Frame, Live
from duochat.chat.chat import Options, Step
from duochat.engine.rounds import Round, Stats, total

FORMAT = "duochat-trace"
KEPT = 32  # jobs that are remembered
LONGEST_PROMPT = 8000  # characters

log = logging.getLogger("duochat")


class Engine(Protocol):
    """What answers: a worker, or anything like it."""

    def reply(self, messages: list[dict[str, str]], options: Options, cancelled: Callable[[], bool]) -> Any: ...


@dataclass(frozen=True)
class Recording:
    """One answer. costs: the calibration dict of the machine, {} when unknown; hardware: as `chat --json` has it."""

    prompt: str
    options: Options
    steps: tuple[Step, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decoder(self) -> str:
        return self.options.decoder

    @property
    def rounds(self) -> list[Round]:
        return [s.round for s in self.steps if s.round is not None]

    @property
    def text(self) -> str:
        return "".join(s.text for s in self.steps)

    @property
    def tokens(self) -> list[int]:
        return [t for r in self.rounds for t in r.tokens]

    @property
    def stats(self) -> Stats:
        return total(self.rounds, max((s.prompt_tokens for s in self.steps), default=0))

    @property
    def draft_texts(self) -> dict[int, str]:
        """The text of every drafted token by its id."""
        return {i: text for s in self.steps for i, text in s.draft_texts.items()}

    def snapshot(self, plain_rate: float | None = None) -> Frame:
        """The whole answer as one frame for picture.js."""
        live = Live(self.decoder, plain_rate)
        for step in self.steps:
            live.feed(step)
        return live.snapshot()

    def lines(self) -> Iterator[str]:
        """JSON lines: a head, then the steps. `read` is the inverse."""
        head = {"format": FORMAT, "prompt": self.prompt, "options": asdict(self.options)}
        yield json.dumps({**head, "hardware": dict(self.hardware), "costs": dict(self.costs)}, ensure_ascii=False)
        yield from (s.to_json() for s in self.steps)

    @classmethod
    def read(cls, lines: Iterable[str]) -> Recording:
        """Raises DuoChatError when the lines are not a trace."""
        try:
            head, *steps = (json.loads(line) for line in lines if line.strip())
            if head.get("format") != FORMAT:
                raise ValueError(head.get("format"))
            options = Options(**{**head["options"], "stop": tuple(head["options"].get("stop", ()))})
            return cls(head["prompt"], options, tuple(map(Step.from_json, steps)), head["hardware"], head["costs"])
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            raise DuoChatError("This file is not a recorded answer: choose one that DuoChat wrote.") from fault


def record(
    engine: Engine, prompt: str, options: Options, cancelled: Callable[[], bool], seen: Callable[[Step], None]
) -> Recording:
    """Run the engine on the prompt and keep every step. Raises DuoChatError when it fails or is cancelled."""
    steps = []
    for step in engine.reply([{"role": "user", "content": prompt}], options, cancelled):
        seen(step)
        if step.error:
            raise DuoChatError(step.error)
        if step.round is not None or step.text:
            steps.append(step)
    if cancelled():
        raise DuoChatError("Stopped.")
    if not any(s.round for s in steps):
        raise DuoChatError("The model gave no token: try another prompt.")
    return Recording(prompt, options, tuple(steps), hardware_of(engine))


def hardware_of(engine: Any) -> dict[str, Any]:
    """What the engine says of the machine; {} when it says nothing."""
    return dict((engine.status().get("hardware") or {}) if hasattr(engine, "status") else {})


def checked_prompt(text: Any) -> str:
    """Raises DuoChatError when there is nothing to answer, or too much."""
    prompt = str(text or "").strip()
    if not prompt:
        raise DuoChatError("The prompt is empty: write something, or take one of the ready ones.")
    if len(prompt) > LONGEST_PROMPT:
        raise DuoChatError(f"The prompt is longer than {LONGEST_PROMPT:,} characters: shorten it.")
    return prompt


@dataclass(eq=False)
class Job:
    """Work in the background. `note` is what the page shows of it until there is a `result` or an `error`."""

    note: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] | None = None
    error: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class Jobs:
    """Starts work for a page, which asks how far it is and may stop it. The latest jobs are remembered."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._count = itertools.count(1)

    def start(self, work: Callable[[Job], dict[str, Any]]) -> str:
        """Run work(job) in a thread; returns the ticket to ask with."""
        job, ticket = Job(), f"{next(self._count)}"
        self._jobs[ticket] = job
        while len(self._jobs) > KEPT:
            self._jobs.popitem(last=False)[1].stop.set()
        threading.Thread(target=self._run, args=(job, work), daemon=True, name="recording").start()
        return ticket

    @staticmethod
    def _run(job: Job, work: Callable[[Job], dict[str, Any]]) -> None:
        try:
            job.result = work(job)
        except DuoChatError as fault:
            job.error = str(fault)
        except Exception as fault:
            log.exception("a recording failed")
            job.error = f"Something went wrong on the server ({type(fault).__name__}): try again."
        finally:
            job.done.set()

    def look(self, ticket: Any) -> dict[str, Any]:
        """{"note"}, with "result" or "error" when it is done. Raises DuoChatError on an unknown ticket."""
        job = self._jobs.get(str(ticket))
        if job is None:
            raise DuoChatError("The server no longer knows this run: start it again.")
        if not job.done.is_set():
            return {"note": dict(job.note)}
        return {"note": dict(job.note), "result": job.result, "error": job.error}

    def stop(self, ticket: Any) -> None:
        if job := self._jobs.get(str(ticket)):
            job.stop.set()
