"""Who takes part in a benchmark: our decoders, each learning for itself alone, and what all contestants share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from duochat.bench import metrics
from duochat.engine.decoding import Request, decode
from duochat.engine.lanes import Cancelled, Drafter, Target, never
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Acceptance, Node

Stopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer as its contestant gave it; times by the caller's clock, seconds since the request."""

    first_s: float
    total_s: float
    figures: dict[str, Any]  # further fields of a Run, `tokens` and `finish` among them


class Contestant(Protocol):
    """Whoever answers: one of our decoders, or a peer."""

    name: str
    kind: str  # "decoder" or "peer"

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        """Answer once, with empty caches. Raises Cancelled when stopped."""
        ...


class Decoder:
    """One of our decoders on an engine's lanes, with costs and acceptance of its own: none learns from another."""

    kind = "decoder"

    def __init__(self, decoder: str, engine: Any, name: str = "") -> None:
        self.decoder, self.name = decoder, name or decoder
        self.target, self.drafter = engine.target, engine.drafter
        self.costs, self.acceptance = deepcopy(engine.costs), Acceptance()

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        forget(self.target, self.drafter, context)
        request = Request(sampling, max_tokens, self.decoder)
        lanes = (self.target, self.drafter, self.costs, self.acceptance)
        rounds, at = [], []
        began = perf_counter()
        with closing(decode(context, request, *lanes, stopped)) as answer:
            for r in answer:
                at.append(perf_counter() - began)
                rounds.append(r)
        if rounds[-1].finish == "cancelled":
            raise Cancelled
        shown = [seconds for seconds, r in zip(at, rounds, strict=True) if r.tokens]
        return Timed(shown[0], shown[-1], metrics.of_rounds(rounds))


def forget(target: Target, drafter: Drafter | None, context: Sequence[int]) -> None:
    """Empty the caches of both lanes: they keep only what a context shares with the one before."""
    other = [1 if context[0] == 0 else 0]
    target.verify(other, (), Sampling())
    if drafter is not None:
        root = Node(other[0], None, 0)
        drafter.thread.submit(drafter.expand, other, [root], Sampling(), never).result()
