"""How far answers part from plain decoding's where arithmetic depends on the width: python -m duochat.bench.ties.

In bf16 two tokens can be so near to each other that a forward over more rows turns their order. Each decoder answers
greedily; from its first difference to plain decoding on, a forward over one row says at each of its tokens what plain
decoding would have chosen there, and how much less probable the decoder's own token is. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import log
from typing import Any

from duochat import config, terminal
from duochat.bench.contest import Bench, Decoder, Plan, add_arguments
from duochat.bench.metrics import REFERENCE, first_difference
from duochat.engine.decoding import DECODERS
from duochat.engine.lanes import Target
from duochat.engine.sampling import Sampling

LANES = ("target_backend", "target_device", "target_dtype")


def main(args: argparse.Namespace) -> int:
    from duochat.chat.loading import load_chat

    plan, bar = Plan.of(args), terminal.Bar()
    chat = load_chat(config.load(args.config, target=args.target, draft=args.draft), bar)
    found = study(chat.engine, plan.on(chat), partial(bar, "Answers"))
    bar.close()
    lanes = {name: value for name, value in chat.engine.describe().items() if name in LANES}
    print(json.dumps({**lanes, **found}, indent=1))
    return 0


def study(engine: Any, plan: Plan, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """By decoder, over first turns: how many answers differ, where first, and how much less probable their tokens are
    than plain decoding's, in nats."""
    plan = replace(plan, questions=[replace(question, turns=question.turns[:1]) for question in plan.questions])
    bench = Bench([Decoder(name, engine) for name in DECODERS], plan)
    for _ in bench.run(progress=progress):
        pass
    contexts = {(question.task, question.id): plan.context(question.turns) for question in plan.questions}
    plain = {run.request: run.tokens for run in bench.runs if run.decoder == REFERENCE}
    found = {}
    for name in [name for name in DECODERS if name != REFERENCE]:
        runs = [run for run in bench.runs if run.decoder == name]
        firsts = {run.request: first_difference(run.tokens, plain[run.request]) for run in runs}
        differing = [run for run in runs if firsts[run.request] is not None]
        asked = [(contexts[run.request[:2]], run.tokens, firsts[run.request]) for run in differing]
        lost = [gap for one in asked for gap in gaps(engine.target, *one)]
        found[name] = {
            "answers_that_differ": len(differing),
            "first_differences": sorted(firsts[run.request] for run in differing),
            "tokens": sum(len(run.tokens) for run in runs),
            "tokens_not_the_plain_choice": len(lost),
            "greatest_gap_nats": round(max(lost, default=0.0), 4),
        }
    return {"prompts": len(contexts), "decoders": found}


def gaps(target: Target, context: list[int], tokens: list[int], start: int) -> Iterator[float]:
    """Nats at each of the tokens from `start` on that plain decoding would not choose."""
    for i in range(start, len(tokens)):
        before = context + tokens[:i]
        if target.verify(before, (), Sampling()).tokens[0] != tokens[i]:
            told = target.verify(before, [(tokens[i], -1)], Sampling())
            yield log(told.probs[0]) - log(max(told.node_probs[0], 1e-30))


if __name__ == "__main__":
    terminal.start("duochat.bench.ties", __doc__, partial(add_arguments, limit=15, max_tokens=128), main)
