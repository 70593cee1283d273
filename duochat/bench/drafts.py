"""Several drafts for one target, compared in one run: python -m duochat.bench.drafts --drafts A.gguf,B.gguf@16384.

For each draft: tokens per second with each decoder, which is what counts, and its agreement: how often plain decoding's
next token is the draft's first choice, and among its first four, all along plain decoding's answers (with the shared
noise at temperatures above 0). "@N" lets a draft propose its N most frequent tokens alone, "@0" all, see
`duochat.models.trim`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from duochat import config, terminal
from duochat.bench import metrics, report, simulate, tasks
from duochat.bench.bench import chosen
from duochat.bench.contest import Bench, Plan
from duochat.bench.contestants import Decoder, forget
from duochat.bench.metrics import REFERENCE
from duochat.engine.backends import load_drafter
from duochat.engine.decoding import DECODERS
from duochat.engine.engine import Engine
from duochat.engine.sampling import Sampling
from duochat.models.fetch import fetch
from duochat.models.trim import named

RANKS = (1, 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    add = parser.add_argument
    add("--drafts", required=True, metavar="REF[@N],...", help="what to compare")
    add("--decoders", default="duodecoding,duotree", metavar="A,B", help='"": agreement alone')
    add("--tasks", default="all", metavar="A,B")
    add("--limit", type=int, default=2, metavar="N", help="questions of each task")
    add("--prompts", type=Path, metavar="DIR", help="prompts instead of ours")
    add("--max-tokens", type=int, default=96, metavar="N")
    add("--temperature", type=float, default=0.0, metavar="T")


def main(args: argparse.Namespace) -> int:
    from duochat.chat.loading import load_chat

    names = chosen("decoder", args.decoders, DECODERS)
    questions = tasks.load(chosen("task", args.tasks, tasks.TASKS), args.limit, args.prompts)
    plan, bar = Plan(questions, Sampling(args.temperature), args.max_tokens), terminal.Bar()
    settings = config.load(args.config, target=args.target, draft=args.draft)
    talk = load_chat(settings, bar)
    pairs = {}
    for reference in args.drafts.split(","):
        bar(f"Measuring {reference}", 0, 0)
        pairs[reference] = with_draft(talk.engine, reference, settings)
    headers, rows = compare(talk.engine, talk.tokenizer, pairs, names, plan, bar)
    bar.close()
    print(report.grid(headers, rows))
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
    engine: Engine,
    tokenizer: Any,
    pairs: dict[str, Engine],
    decoders: Sequence[str],
    plan: Plan,
    progress: Callable[[str, int, int], None],
) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the table: plain decoding, then each draft with each decoder."""
    plain = Decoder(REFERENCE, engine)
    ours = {(ref, name): Decoder(name, pair, f"{ref} {name}") for ref, pair in pairs.items() for name in decoders}
    compiles = not engine.target.shares_cores
    bench = Bench([plain, *ours.values()], tokenizer, engine.context_length, plan, compiles)
    for _ in bench.run(progress=lambda done, total: progress("Answers", done, total)):
        pass
    of = {c.name: [run for run in bench.runs if run.decoder == c.name] for c in bench.contestants}
    rows = [["plain decoding", "", *_speed(of[plain.name], of[plain.name])]]
    for reference, pair in pairs.items():
        progress(f"Agreement of {reference}", 0, 0)
        draft = [*_agreement(bench, pair, of[plain.name]), *(f"{1e3 * pair.costs.draft(n):.2f}" for n in (1, 8))]
        draft += [f"{pair.costs.threads}", pair.drafter.describe()["draft_backend"]]
        speeds = {name: _speed(of[ours[reference, name].name], of[plain.name]) for name in decoders} or {"": [""] * 5}
        rows += [[Path(reference).name, name, *speed, *draft] for name, speed in speeds.items()]
    agreed = [f"rank-{n}" if n == 1 else f"top-{n}" for n in RANKS]
    headers = ["draft", "decoder", "tokens/s", "speedup", "without loops", "τ", "α", *agreed, "ms/token", "ms/8"]
    headers += ["threads", "lane"]
    return headers, [row + [""] * (len(headers) - len(row)) for row in rows]


def _speed(runs: Sequence[metrics.Run], plain: Sequence[metrics.Run]) -> list[str]:
    f = metrics.summary(runs, plain)
    names = ("speedup", "speedup_without_loops", "mean_accepted_length", "acceptance_rate")
    return [f"{f['tokens_per_s']:.1f}", *(f"{f[name]:.2f}" for name in names)]


def _agreement(bench: Bench, pair: Engine, plain: Sequence[metrics.Run]) -> list[str]:
    """RANKS' shares, each a mean over the tasks: of the first turns, whose context is the same in every run."""
    hits: dict[str, list[list[bool]]] = {}
    answers = {run.request: run.tokens for run in plain}
    for question in bench.plan.questions:
        context, answer = bench.first_context(question), answers[question.task, question.id, 0, 0]
        hits.setdefault(question.task, []).extend(agreed(pair, context, answer, bench.plan.sampling))
    return [f"{fmean(fmean(row[i] for row in rows) for rows in hits.values()):.3f}" for i in range(len(RANKS))]


def agreed(pair: Engine, context: Sequence[int], answer: Sequence[int], sampling: Sampling) -> list[list[bool]]:
    """For each token of an answer: whether it is among the draft's first choices, by RANKS."""
    forget(pair.target, pair.drafter, context)
    found = simulate.record(pair.drafter, context, answer, 0.0, sampling).candidates
    return [[token in c.tokens[:most] for most in RANKS] for token, c in zip(answer, found, strict=True)]


if __name__ == "__main__":
    terminal.start("duochat.bench.drafts", __doc__, add_arguments, main)
