"""The method: every contestant answers the same contexts one after the other, in an order that turns with each prompt.

A second turn continues plain decoding's answer, so contexts are the same for all. Caches are emptied before each
answer, and each of our decoders learns for itself alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from duochat import DuoChatError, terminal
from duochat.bench import tasks
from duochat.bench.metrics import REFERENCE, Run
from duochat.chat.chat import fit
from duochat.engine.decoding import Request, decode
from duochat.engine.lanes import Cancelled, Drafter, Stopped, Target, never
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Acceptance

# ---------------------------------------------------------------- what is asked


def add_arguments(parser: argparse.ArgumentParser, limit: int | None, max_tokens: int | None) -> None:
    """Those of `terminal.add_pair`, and the prompts."""
    terminal.add_pair(parser)
    parser.add_argument("--tasks", metavar="A,B|all", default="all", help=f"of {', '.join(tasks.TASKS)}")
    parser.add_argument("--limit", metavar="N", type=positive, default=limit, help="questions of each task")
    parser.add_argument("--prompts", metavar="DIR", type=Path, help="prompts in Spec-Bench's format instead of ours")
    of = f" ({max_tokens})" if max_tokens else " (128; without a GPU 96)"
    parser.add_argument("--max-tokens", metavar="N", type=positive, default=max_tokens, help=f"of each answer{of}")


def positive(text: str) -> int:
    """The type of an argument."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


def chosen(what: str, text: str, known: Iterable[str]) -> list[str]:
    """Names from a list with commas, or all. Raises DuoChatError on one that is not known."""
    known = list(known)
    names = known if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise DuoChatError(f"There is no {what} {unknown[0]!r}: choose from {', '.join(known)}, or all.")
    return names


@dataclass(frozen=True, slots=True)
class Plan:
    """What a benchmark measures, apart from who takes part."""

    questions: Sequence[tasks.Question]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    repeat: int = 1
    tokenizer: Any = None
    context_length: int = 0

    @classmethod
    def of(cls, args: argparse.Namespace, sampling: Sampling | None = None, repeat: int = 1) -> Plan:
        """By `add_arguments`; whoever has loaded a chat says `on` it."""
        questions = tasks.load(chosen("task", args.tasks, tasks.TASKS), args.limit, args.prompts)
        return cls(questions, sampling or Sampling(), args.max_tokens, repeat)

    def on(self, chat: Any) -> Plan:
        """For a chat's models."""
        return replace(self, tokenizer=chat.tokenizer, context_length=chat.engine.context_length)

    def context(self, said: Sequence[str]) -> list[int]:
        """Token ids of a conversation in which user and assistant have said this in turn."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        return fit(self.tokenizer, messages, self.context_length, self.max_tokens).ids

    @property
    def firsts(self) -> list[list[int]]:
        """The context of each question's first turn."""
        return [self.context(question.turns[:1]) for question in self.questions]

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, all its answers included."""
        turns = [[{"role": "user", "content": turn} for turn in question.turns] for question in self.questions]
        return max(len(self.tokenizer.prompt(messages)) + self.max_tokens * len(messages) for messages in turns)

    @property
    def size(self) -> int:
        """Requests to each contestant."""
        return self.repeat * sum(len(question.turns) for question in self.questions)


# ---------------------------------------------------------------- who answers


class Contestant(Protocol):
    """Whoever answers: one of our decoders, or a peer."""

    name: str
    kind: str  # "decoder" or "peer"

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Run:
        """Answer once, with empty caches; the run does not say what was asked. Raises Cancelled when stopped."""
        ...


class Decoder:
    """One of our decoders on an engine's lanes, with costs and acceptance of its own: none learns from another."""

    kind = "decoder"

    def __init__(self, decoder: str, engine: Any, name: str = "") -> None:
        self.decoder, self.name = decoder, name or decoder
        self.target, self.drafter = engine.target, engine.drafter
        self.costs, self.acceptance = engine.costs.untaught(), Acceptance()

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Run:
        """See `Contestant.answer`."""
        forget(self.target, self.drafter, context)
        request = Request(sampling, max_tokens, self.decoder)
        lanes = (self.target, self.drafter, self.costs, self.acceptance)
        rounds, shown = [], []
        began = perf_counter()
        with closing(decode(context, request, *lanes, stopped)) as answer:
            for r in answer:
                if r.tokens:
                    shown.append(perf_counter() - began)
                rounds.append(r)
        if rounds[-1].finish == "cancelled":
            raise Cancelled
        return Run.of_rounds(rounds, shown[0], shown[-1])


def forget(target: Target, drafter: Drafter | None, context: Sequence[int]) -> None:
    """Empty the caches of both lanes: the target's keeps only what a context shares with the one before."""
    target.verify([1 if context[0] == 0 else 0], (), Sampling())
    if drafter is not None:
        drafter.thread.submit(drafter.forget).result()


# ---------------------------------------------------------------- the course


class Bench:
    """Asks every contestant everything and keeps the runs; some may come from an earlier start.

    compiles: the target has a device of its own, where a first answer of its length takes longer than the next.
    """

    def __init__(self, contestants: Sequence[Contestant], plan: Plan, compiles: bool = False) -> None:
        self.contestants, self.plan, self.compiles = contestants, plan, compiles
        self.runs: list[Run] = []

    def run(self, stopped: Stopped = never, progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
        """Measure what is not measured yet; yields after each question. Ends early, without a fault, when stopped."""
        done = {(*run.request, run.decoder): run for run in self.runs}
        size = self.plan.size * len(self.contestants)
        try:
            if len(done) < size:
                self.warm_up(stopped)
            asked = product(range(self.plan.repeat), self.plan.questions)  # a whole set before it is repeated
            for place, (repeat, question) in enumerate(asked):
                self._ask(place, repeat, question, done, stopped)
                if progress:
                    progress(len(done), size)
                yield
        except Cancelled:
            return

    def warm_up(self, stopped: Stopped) -> None:
        """A few tokens of everybody; of our own, where it compiles, whole answers at several lengths."""
        contexts = sorted(self.plan.firsts, key=len)
        spread = [contexts[i * (len(contexts) - 1) // 3] for i in range(4)]
        for context in spread if self.compiles else contexts[:1]:
            for contestant in self.contestants:
                whole = self.compiles and contestant.kind == "decoder"
                tokens = self.plan.max_tokens if whole else min(16, self.plan.max_tokens)
                contestant.answer(context, self.plan.sampling, tokens, stopped)

    def _ask(
        self, place: int, repeat: int, question: tasks.Question, done: dict[tuple[Any, ...], Run], stopped: Stopped
    ) -> None:
        """All turns of a conversation, each to everybody."""
        plan, said = self.plan, []
        sampling = replace(plan.sampling, seed=plan.sampling.seed + repeat)
        for turn, text in enumerate(question.turns):
            said.append(text)
            context, asked = plan.context(said), (question.task, question.id, turn, repeat)
            start = (place + turn) % len(self.contestants)
            for contestant in [*self.contestants[start:], *self.contestants[:start]]:
                if (key := (*asked, contestant.name)) not in done:
                    done[key] = run = contestant.answer(context, sampling, plan.max_tokens, stopped)
                    run.task, run.question, run.turn, run.repeat, run.decoder = key
                    run.prompt_tokens = len(context)
                    self.runs.append(run)
            said.append(plan.tokenizer.decode(done[(*asked, REFERENCE)].tokens).strip() or "…")
