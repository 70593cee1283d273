"""The method: every contestant answers the same contexts one after the other, in an order that turns with each prompt.

A second turn continues plain decoding's answer, so contexts are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from duochat.bench import tasks
from duochat.bench.contestants import Contestant, Stopped
from duochat.bench.metrics import REFERENCE, Run
from duochat.chat.chat import fit
from duochat.engine.lanes import Cancelled, never
from duochat.engine.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Plan:
    """What a benchmark measures, apart from who takes part."""

    questions: Sequence[tasks.Question]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    repeat: int = 1

    def requests(self) -> Iterator[tuple[int, int, tasks.Question]]:
        """(place in the order, repeat, question); a whole set before it is repeated."""
        for repeat in range(self.repeat):
            for place, question in enumerate(self.questions):
                yield repeat * len(self.questions) + place, repeat, question

    def longest(self, tokenizer: Any) -> int:
        """Tokens of the longest conversation, all its answers included."""
        turns = [[{"role": "user", "content": turn} for turn in question.turns] for question in self.questions]
        return max(len(tokenizer.prompt(messages)) + self.max_tokens * len(messages) for messages in turns)

    @property
    def size(self) -> int:
        """Requests to each contestant."""
        return self.repeat * sum(len(question.turns) for question in self.questions)


class Bench:
    """Asks every contestant everything and keeps the runs; some may come from an earlier start.

    compiles: the target has a device of its own, where a first answer of its length takes longer than the next.
    """

    def __init__(
        self,
        contestants: Sequence[Contestant],
        tokenizer: Any,
        context_length: int,
        plan: Plan,
        compiles: bool = False,
    ) -> None:
        self.contestants, self.tokenizer, self.context_length, self.plan = contestants, tokenizer, context_length, plan
        self.compiles = compiles
        self.runs: list[Run] = []

    def run(self, stopped: Stopped = never, progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
        """Measure what is not measured yet; yields after each question. Ends early, without a fault, when stopped."""
        done = {(*run.request, run.decoder): run for run in self.runs}
        try:
            if len(done) < self.plan.size * len(self.contestants):
                self.warm_up(stopped)
            for place, repeat, question in self.plan.requests():
                self._ask(place, repeat, question, done, stopped)
                if progress:
                    progress(len(done), self.plan.size * len(self.contestants))
                yield
        except Cancelled:
            return

    def warm_up(self, stopped: Stopped) -> None:
        """A few tokens of everybody; of our own, where it compiles, whole answers at several lengths."""
        contexts = sorted((self.first_context(question) for question in self.plan.questions), key=len)
        spread = [contexts[i * (len(contexts) - 1) // 3] for i in range(4)]
        for context in spread if self.compiles else contexts[:1]:
            for contestant in self.contestants:
                whole = self.compiles and contestant.kind == "decoder"
                tokens = self.plan.max_tokens if whole else min(16, self.plan.max_tokens)
                contestant.answer(context, self.plan.sampling, tokens, stopped)

    def first_context(self, question: tasks.Question) -> list[int]:
        """Token ids of a conversation's beginning."""
        return self._context([], question.turns[0])

    def _context(self, messages: list[dict[str, str]], turn: str) -> list[int]:
        messages = [*messages, {"role": "user", "content": turn}]
        return fit(self.tokenizer, messages, self.context_length, self.plan.max_tokens).ids

    def _ask(
        self, place: int, repeat: int, question: tasks.Question, done: dict[tuple[Any, ...], Run], stopped: Stopped
    ) -> None:
        """All turns of a conversation, each to everybody."""
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns):
            context = self._context(messages, text)
            for contestant in rotated(self.contestants, place + turn):
                key = (question.task, question.id, turn, repeat, contestant.name)
                if key not in done:
                    done[key] = self._measure(contestant, context, key, stopped)
                    self.runs.append(done[key])
            answer = done[(*key[:4], REFERENCE)]
            messages += [{"role": "user", "content": text}]
            messages += [{"role": "assistant", "content": self.tokenizer.decode(answer.tokens).strip() or "…"}]

    def _measure(self, contestant: Contestant, context: list[int], key: tuple[Any, ...], stopped: Stopped) -> Run:
        sampling = replace(self.plan.sampling, seed=self.plan.sampling.seed + key[3])
        timed = contestant.answer(context, sampling, self.plan.max_tokens, stopped)
        return Run(*key, len(context), first_s=timed.first_s, total_s=timed.total_s, **timed.figures)


def rotated(contestants: Sequence[Contestant], by: int) -> list[Contestant]:
    """The same order, begun elsewhere."""
    start = by % len(contestants)
    return [*contestants[start:], *contestants[:start]]
