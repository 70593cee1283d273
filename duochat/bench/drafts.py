"""Several drafts for one target, compared in one run: python -m duochat.bench.drafts --drafts A.gguf,B.gguf@16384.

For each draft: tokens per second with each decoder, which is what counts, and its agreement: how often plain decoding's
next token is the draft's first choice, and among its first four, all along plain decoding's answers (with the shared
noise at temperatures above 0). "@N" lets a draft propose its N most frequent tokens alone, "@0" all, see
`duochat.models.trim`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from duochat import config, terminal
from duochat.bench import contest, metrics, simulate
from duochat.bench.contest import Bench, Decoder, Plan, forget
from duochat.bench.metrics import REFERENCE
from duochat.engine.backends import load_drafter
from duochat.engine.decoding import DECODERS
from duochat.engine.engine import Engine
from duochat.engine.sampling import Sampling
from duochat.models.fetch import fetch
from duochat.models.store import Progress
from duochat.models.trim import named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contest.add_arguments(parser, limit=2, max_tokens=96)
    parser.add_argument("--drafts", required=True, metavar="REF[@N],...", help="what to compare")
    parser.add_argument("--decoders", default="duodecoding,duotree", metavar="A,B", help='"": agreement alone')
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T")


def main(args: argparse.Namespace) -> int:
    from duochat.chat.loading import load_chat

    names = contest.chosen("decoder", args.decoders, DECODERS)
    plan, bar = Plan.of(args, Sampling(args.temperature)), terminal.Bar()
    settings = config.load(args.config, target=args.target, draft=args.draft)
    chat = load_chat(settings, bar)
    pairs = {}
    for reference in args.drafts.split(","):
        bar(f"Measuring {reference}", 0, 0)
        pairs[reference] = with_draft(chat.engine, reference, settings)
    found = compare(chat.engine, pairs, names, plan.on(chat), bar)
    bar.close()
    print(found.to_string(index=False))
    return 0


def with_draft(engine: Engine, reference: str, settings: config.Settings) -> Engine:
    """The engine's target beside another draft, on the lane that serves it best, calibrated with it.

    Its calls come from the thread of the engine's own draft, so that one pool of threads holds the cores.
    """
    name, vocabulary = named(reference)
    drafter = load_drafter(replace(settings, draft_vocabulary=vocabulary), fetch(name), engine.target)
    if engine.drafter is not None:
        drafter.thread = engine.drafter.thread
    return Engine(engine.target, drafter)


def compare(
    engine: Engine, pairs: dict[str, Engine], decoders: Sequence[str], plan: Plan, progress: Progress
) -> pd.DataFrame:
    """The table: plain decoding, then each draft with each decoder."""
    ours = [Decoder(name, pair, f"{ref} {name}") for ref, pair in pairs.items() for name in decoders]
    bench = Bench([Decoder(REFERENCE, engine), *ours], plan, compiles=not engine.target.shares_cores)
    for _ in bench.run(progress=partial(progress, "Answers")):
        pass
    of = lambda name: [run for run in bench.runs if run.decoder == name]  # noqa: E731
    plain = of(REFERENCE)
    rows = [{"draft": "", "decoder": "plain decoding", **_speed(plain, plain)}]
    for reference, pair in pairs.items():
        progress(f"Agreement of {reference}", 0, 0)
        costs, lane = pair.costs, pair.drafter.describe()["draft_backend"]
        draft = _agreement(plan, pair, plain) | {"ms/token": f"{1e3 * costs.draft(1):.2f}"}
        draft |= {"ms/8": f"{1e3 * costs.draft(8):.2f}", "threads": f"{costs.threads}", "lane": lane}
        for name in decoders or [""]:
            speed = _speed(of(f"{reference} {name}"), plain) if name else {}
            rows.append({"draft": Path(reference).name, "decoder": name, **speed, **draft})
    return pd.DataFrame(rows).fillna("")


def _speed(runs: Sequence[metrics.Run], plain: Sequence[metrics.Run]) -> dict[str, str]:
    f = metrics.summary(runs, plain)
    names = {"speedup": "speedup", "without loops": "speedup_without_loops", "τ": "mean_accepted_length"}
    row = {told: f"{f[name]:.2f}" for told, name in (names | {"α": "acceptance_rate"}).items()}
    return {"tokens/s": f"{f['tokens_per_s']:.1f}", **row}


def _agreement(plan: Plan, pair: Engine, plain: Sequence[metrics.Run]) -> dict[str, str]:
    """How often an answer's token is the draft's first choice, and among its first four: means over the tasks, of first
    turns, whose context is the same in every run."""
    hits: dict[str, list[list[bool]]] = {}
    answers = {run.request: run.tokens for run in plain}
    for question, context in zip(plan.questions, plan.firsts, strict=True):
        answer = answers[question.task, question.id, 0, 0]
        forget(pair.target, pair.drafter, context)
        asked = (simulate.proposals, pair.drafter, context, answer, plan.sampling)
        found, _ = pair.drafter.thread.submit(*asked).result()
        agreed = [[token in c.tokens[:n] for n in (1, 4)] for token, c in zip(answer, found, strict=True)]
        hits.setdefault(question.task, []).extend(agreed)
    shares = np.mean([np.mean(task, axis=0) for task in hits.values()], axis=0)
    return {name: f"{share:.3f}" for name, share in zip(("rank-1", "top-4"), shares, strict=True)}


if __name__ == "__main__":
    terminal.start("duochat.bench.drafts", __doc__, add_arguments, main)
