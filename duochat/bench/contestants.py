"""Who takes part in a benchmark: our decoders, each learning for itself alone, and what all contestants share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from duochat.bench import metrics
from duochat.engine.decoding import DECODERS, Request, decode
from duochat.engine.lanes import Cancelled, never
from duochat.engine.rounds import Round
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Acceptance, Node

PEERS = ("generate", "generate-static", "assisted", "prompt-lookup", "llama.cpp")  # see `peers.WAYS`

Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer as its contestant gave it; times by the caller's clock, seconds since the request."""

    first_s: float
    total_s: float
    figures: dict[str, Any]  # further fields of a Run, `tokens` and `finish` among them
    rounds: tuple[Round, ...] = ()


class Contestant(Protocol):
    """Whoever answers: one of our decoders, a variant of one, or a peer."""

    name: str
    kind: str  # "decoder", "ablation" or "peer"

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        """Answer once, with empty caches. Raises Cancelled when stopped."""
        ...


class Decoder:
    """One of our decoders on the engine's lanes, with costs and acceptance of its own: none learns from another."""

    kind = "decoder"

    def __init__(self, name: str, engine: Any, budget: int | None = None) -> None:
        self.name, self.decoder, self.budget = name, name, budget
        self.engine, self.drafter = engine, engine.drafter
        self.costs, self.acceptance = deepcopy(engine.costs), Acceptance()
        self.schedules: Mapping[str, Callable[..., Any]] = DECODERS

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        request = Request(sampling, max_tokens, self.decoder, self.budget)
        lanes = (self.engine.target, self.drafter, self.costs, self.acceptance)
        forget(self.engine.target, self.drafter, context)
        rounds, at = [], []
        began = perf_counter()
        with closing(decode(context, request, *lanes, stopped, schedules=self.schedules)) as answer:
            for r in answer:
                at.append(perf_counter() - began)
                rounds.append(r)
        if rounds[-1].finish == "cancelled":
            raise Cancelled
        shown = [seconds for seconds, r in zip(at, rounds, strict=True) if r.tokens]
        return Timed(shown[0], shown[-1], metrics.of_rounds(rounds, shown[-1]), tuple(rounds))


def forget(target: Any, drafter: Any, context: Sequence[int]) -> None:
    """Empty the caches of both lanes: they keep only what a context shares with the one before."""
    other = [1 if context[0] == 0 else 0]
    target.verify(other, (), Sampling())
    if drafter is not None:
        drafter.expand(other, [Node(other[0], None, 0)], Sampling(), never)
