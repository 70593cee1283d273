"""Answers under way: a job for each, which drains the engine and keeps what it says.

Pages only look. So the engine never waits for a page, an answer goes on when its tab is closed, and any number of tabs
can watch it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from duochat import DuoChatError
from duochat.app.jobs import Job, Jobs, sentence
from duochat.chat.answer import Answer, Step
from duochat.chat.chat import Options
from duochat.chat.worker import Worker

KEEP_EVERY = 3.0  # seconds between two savings of an answer that is being written
BUSY = "This conversation is still being answered: press Stop first."


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


Save = Callable[[Run, "list[Step] | None"], None]


class Answers(Jobs):
    """One a conversation. save(run, steps) stores an answer: as it stands every few seconds (steps None), when it
    ends, and last with the steps of its trace."""

    def __init__(self, engine: Worker, save: Save) -> None:
        super().__init__(kept=0)
        self._engine, self._save = engine, save

    def begin(self, run: Run) -> None:
        """At once; the engine itself keeps the queue. Raises DuoChatError when the conversation has a run."""
        self.start(self._drain, run.conversation, run, BUSY)

    def _drain(self, run: Run) -> None:
        """Whatever the engine does, the run ends with a finish."""
        kept_at = time.monotonic()
        try:
            for step in self._engine.reply(run.messages, run.options, run.stop.is_set):
                run.answer.add(step)
                if time.monotonic() - kept_at > KEEP_EVERY:
                    self._keep(run)
                    kept_at = time.monotonic()
        except Exception as fault:  # noqa: BLE001  it becomes the answer's last step
            run.answer.add(Step(finish="error", error=sentence(fault)))
        if run.answer.phase != "done":
            run.answer.add(
                Step(phase="done", finish=run.answer.finish or ("cancelled" if run.stop.is_set() else "stop"))
            )
        self._keep(run)
        run.done.set()
        self._keep(run, [step for step in run.answer.steps if step.round])  # a long trace takes its time

    def _keep(self, run: Run, steps: list[Step] | None = None) -> None:
        try:
            self._save(run, steps)
        except DuoChatError:
            run.answer.add(Step(notice="The answer could not be saved: check the free space on the disk."))
