"""How near the ties are at which answers part from plain decoding's where arithmetic depends on the width.

In bf16 two tokens can be so near to each other that a forward over more rows turns their order. From an answer's first
difference to plain decoding's on, a forward over one row says at each of its tokens what plain decoding would have
chosen there, and how much less probable the decoder's own token is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log
from typing import Any

from duochat.bench.contest import Plan
from duochat.bench.metrics import REFERENCE, Run, differences
from duochat.engine.lanes import Target
from duochat.engine.sampling import Sampling


def study(target: Target, plan: Plan, runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """By decoder, over greedy first turns: how many answers differ, where first, and how much less probable their
    tokens are than plain decoding's, in nats."""
    contexts = {(q.task, q.id): context for q, context in zip(plan.questions, plan.firsts, strict=True)}
    firsts = [run for run in runs if run.turn == run.repeat == 0]
    plain = [run for run in firsts if run.decoder == REFERENCE]
    found = {}
    for name in dict.fromkeys(run.decoder for run in firsts if run.decoder != REFERENCE):
        own = {run.request[:2]: run.tokens for run in firsts if run.decoder == name}
        differing = differences((run for run in firsts if run.decoder == name), plain)
        asked = [((one["task"], one["question"]), one["position"]) for one in differing]
        lost = [gap for of, start in asked for gap in gaps(target, contexts[of], own[of], start)]
        found[name] = {
            "answers": len(own),
            "answers_that_differ": len(differing),
            "first_differences": sorted(start for _, start in asked),
            "tokens": sum(map(len, own.values())),
            "tokens_not_the_plain_choice": len(lost),
            "greatest_gap_nats": round(max(lost, default=0.0), 4),
        }
    return found


def gaps(target: Target, context: list[int], tokens: list[int], start: int) -> Iterator[float]:
    """Nats at each of the tokens from `start` on that plain decoding would not choose."""
    for i in range(start, len(tokens)):
        before = context + tokens[:i]
        if target.verify(before, (), Sampling()).tokens[0] != tokens[i]:
            told = target.verify(before, [(tokens[i], -1)], Sampling())
            yield log(told.probs[0]) - log(max(told.node_probs[0], 1e-30))
