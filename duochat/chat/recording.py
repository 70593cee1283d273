"""Answers recorded for replay: one decoder's run on one prompt with its real times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from duochat import DuoChatError
from duochat.chat.answer import Answer, Step, read_steps
from duochat.chat.chat import Options
from duochat.chat.worker import Worker

FORMAT = "duochat-trace"
LONGEST_PROMPT = 8000  # characters


@dataclass(frozen=True)
class Recording:
    """One answer. costs: the calibration dict of the machine, {} when unknown; hardware: as `chat --json` has it."""

    prompt: str
    options: Options
    steps: tuple[Step, ...]
    hardware: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def answer(self) -> Answer:
        return Answer(self.steps)

    def lines(self) -> Iterator[str]:
        """JSON lines: a head, then the steps. `read` is the inverse."""
        head = {"format": FORMAT, "prompt": self.prompt, "options": asdict(self.options)}
        yield json.dumps({**head, "hardware": dict(self.hardware), "costs": dict(self.costs)}, ensure_ascii=False)
        yield from (s.to_json() for s in self.steps)

    @classmethod
    def read(cls, lines: Iterable[str]) -> Recording:
        """Raises DuoChatError when the lines are not a trace."""
        try:
            head, *steps = (line for line in lines if line.strip())
            head = json.loads(head)
            if head.get("format") != FORMAT:
                raise ValueError(head.get("format"))
            options = Options(**{**head["options"], "stop": tuple(head["options"].get("stop", ()))})
            return cls(head["prompt"], options, tuple(read_steps(steps)), head["hardware"], head["costs"])
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            raise DuoChatError("This file is not a recorded answer: choose one that DuoChat wrote.") from fault


def record(
    engine: Worker, prompt: str, options: Options, cancelled: Callable[[], bool], seen: Callable[[Answer], None]
) -> Recording:
    """Run the engine on the prompt and keep every step; seen: told of the answer at each.

    Raises DuoChatError when it fails or is cancelled.
    """
    answer = Answer()
    for step in engine.reply([{"role": "user", "content": prompt}], options, cancelled):
        answer.add(step)
        seen(answer)
    if answer.error:
        raise DuoChatError(answer.error)
    if cancelled():
        raise DuoChatError("Stopped.")
    if not answer.rounds:
        raise DuoChatError("The model gave no token: try another prompt.")
    hardware = dict(engine.status()["hardware"])
    kept = tuple(step for step in answer.steps if step.round is not None or step.text)
    return Recording(prompt, options, kept, hardware, hardware.pop("costs", {}))


def checked_prompt(text: Any) -> str:
    """Raises DuoChatError when there is nothing to answer, or too much."""
    prompt = str(text or "").strip()
    if not prompt:
        raise DuoChatError("The prompt is empty: write something, or take one of the ready ones.")
    if len(prompt) > LONGEST_PROMPT:
        raise DuoChatError(f"The prompt is longer than {LONGEST_PROMPT:,} characters: shorten it.")
    return prompt
