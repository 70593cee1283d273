"""How far answers part from plain decoding's where arithmetic depends on the width: python -m duochat.bench.ties.

In bf16 two tokens can be so near to each other that a forward over more rows turns their order. Each decoder answers
greedily; from its first difference to plain decoding on, a forward over one row says at each of its tokens what plain
decoding would have chosen there, and how much less probable the decoder's own token is. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from math import log
from pathlib import Path
from typing import Any

from duochat import config, terminal
from duochat.bench import tasks
from duochat.bench.contest import Bench, Plan
from duochat.bench.metrics import REFERENCE as PLAIN
from duochat.bench.metrics import first_difference
from duochat.engine.decoding import DECODERS, Request
from duochat.engine.lanes import Target
from duochat.engine.sampling import Sampling

GREEDY = Sampling()
LANES = ("target_backend", "target_device", "target_dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    parser.add_argument("--prompts", type=Path, metavar="DIR", help="instead of our own")
    parser.add_argument("--limit", type=int, default=15, metavar="N", help="prompts of each task")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")


def main(args: argparse.Namespace) -> int:
    from duochat.chat.loading import load_chat

    bar = terminal.Bar()
    talk = load_chat(config.load(args.config, target=args.target, draft=args.draft), bar)
    questions = tasks.load(limit=args.limit, folder=args.prompts)
    bench = Bench([], talk.tokenizer, talk.engine.context_length, Plan(questions, max_tokens=args.max_tokens))
    contexts = [bench.first_context(question) for question in questions]
    found = study(talk.engine, contexts, args.max_tokens, lambda done: bar("Prompts", done, len(contexts)))
    bar.close()
    lanes = {name: value for name, value in talk.engine.describe().items() if name in LANES}
    print(json.dumps({**lanes, **found}, indent=1))
    return 0


def study(engine: Any, contexts: Sequence[list[int]], max_tokens: int, progress: Any = lambda done: None) -> dict:
    """Decoder -> how many answers differ, where first, and the greatest gap of log-probability to the plain choice."""
    found: dict[str, list[dict]] = {name: [] for name in DECODERS if name != PLAIN}
    for done, context in enumerate(contexts, 1):
        plain = answer(engine, context, PLAIN, max_tokens)
        for name, compared in found.items():
            compared.append(compare(engine.target, context, plain, answer(engine, context, name, max_tokens)))
        progress(done)
    return {"prompts": len(contexts), "decoders": {name: summary(compared) for name, compared in found.items()}}


def answer(engine: Any, context: list[int], decoder: str, max_tokens: int) -> list[int]:
    return [token for r in engine.decode(context, Request(GREEDY, max_tokens, decoder)) for token in r.tokens]


def compare(target: Target, context: list[int], plain: list[int], other: list[int]) -> dict[str, Any]:
    """tokens; first: index of the first difference, None = none; gaps: nats, at tokens that plain would not choose."""
    first = None if plain == other else first_difference(plain, other)
    gaps = [] if first is None else list(_gaps(target, context, other, first))
    return {"tokens": len(other), "first": first, "gaps": gaps}


def _gaps(target: Target, context: list[int], tokens: list[int], start: int) -> Iterator[float]:
    for i in range(start, len(tokens)):
        before = context + tokens[:i]
        if target.verify(before, (), GREEDY).tokens[0] != tokens[i]:
            told = target.verify(before, [(tokens[i], -1)], GREEDY)
            yield log(told.probs[0]) - log(max(told.node_probs[0], 1e-30))


def summary(compared: Sequence[dict]) -> dict[str, Any]:
    differing = [one["first"] for one in compared if one["first"] is not None]
    gaps = [gap for one in compared for gap in one["gaps"]]
    return {
        "answers_that_differ": len(differing),
        "first_differences": sorted(differing),
        "tokens": sum(one["tokens"] for one in compared),
        "tokens_not_the_plain_choice": len(gaps),
        "greatest_gap_nats": round(max(gaps, default=0.0), 4),
    }


if __name__ == "__main__":
    terminal.start("duochat.bench.ties", __doc__, add_arguments, main)
