"""Several drafts for one target, measured in one run: python -m duochat.bench.drafts --drafts A.gguf,B.gguf@16384.

What counts of a draft is the tokens per second that its decoder gives, not how well it agrees: each draft is calibrated
beside the target, then all answer the same questions in turn. "@N" lets a draft propose its N most frequent tokens
(see `duochat.models.trim`); "@0" lets it propose all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from duochat import config, terminal
from duochat.bench import metrics, tasks
from duochat.bench.contest import Bench, Plan
from duochat.bench.contestants import Decoder
from duochat.engine.calibration import calibrate
from duochat.engine.sampling import Sampling

PLAIN = "autoregressive"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    add = parser.add_argument
    add("--drafts", required=True, metavar="REF[@N],...", help="what to compare")
    add("--decoders", default="duodecoding,duotree", metavar="A,B")
    add("--tasks", default=",".join(tasks.TASKS), metavar="A,B")
    add("--limit", type=int, default=2, metavar="N", help="questions of each task")
    add("--prompts", type=Path, metavar="DIR", help="prompts instead of ours")
    add("--max-tokens", type=int, default=96, metavar="N")
    add("--temperature", type=float, default=0.0, metavar="T")


def main(args: argparse.Namespace) -> int:
    from duochat.chat.worker import load_chat

    bar = terminal.Bar()
    talk = load_chat(config.load(args.config, target=args.target, draft=args.draft), bar)
    plan = Plan(
        tasks.load(args.tasks.split(","), args.limit, args.prompts),
        Sampling(temperature=args.temperature, seed=0),
        args.max_tokens,
    )
    contestants: list[Any] = [Decoder(PLAIN, talk.engine)]
    for reference in args.drafts.split(","):
        bar(f"Measuring {reference}", 0, 0)
        contestants += with_draft(talk.engine, reference, args.decoders.split(","))
    bench = Bench(contestants, talk.tokenizer, talk.engine.context_length, plan)
    for _ in bench.run(progress=lambda done, total: bar("Answers", done, total)):
        pass
    bar.close()
    print("\n".join(lines(contestants, bench.runs)))
    return 0


def with_draft(engine: Any, reference: str, decoders: Sequence[str]) -> list[Decoder]:
    """Each decoder with this draft. Its calls come from the engine's draft thread, so that one pool holds the cores."""
    from duochat.engine.llama.drafter import LlamaDrafter
    from duochat.models import fetch
    from duochat.models.trim import named

    name, vocabulary = named(reference)
    path = fetch(name)
    drafter = LlamaDrafter(path, min(1536, engine.context_length), 1, vocabulary=vocabulary)
    drafter.thread = engine.drafter.thread
    costs = calibrate(engine.target, drafter)
    made = [Decoder(decoder, engine) for decoder in decoders]
    for one in made:
        one.name = f"{path.stem}{reference[len(name) :]} {one.name}"
        one.drafter, one.costs = drafter, deepcopy(costs)
    return made


def lines(contestants: Sequence[Any], runs: Sequence[metrics.Run]) -> list[str]:
    """A heading and a line for each contestant."""
    of = {c.name: [run for run in runs if run.decoder == c.name] for c in contestants}
    wide = max(map(len, of))
    out = [f"{'draft and decoder':{wide}}  tokens/s  ratio  τ     α     ms/token  ms/8"]
    for c in contestants:
        mine = of[c.name]
        speed = sum(len(run.tokens) for run in mine) / sum(run.total_s for run in mine)
        ratio = metrics.speedup(mine, of[PLAIN])
        tested = sum(run.accepted + run.rejected for run in mine)
        length = sum(len(run.tokens) for run in mine) / sum(run.forwards for run in mine)
        rate = sum(run.accepted for run in mine) / tested if tested else 0.0
        draft = f"{1e3 * c.costs.draft(1):8.2f}  {1e3 * c.costs.draft(8):.2f}" if tested else ""
        out.append(f"{c.name:{wide}}  {speed:8.1f}  {ratio:.2f}   {length:.2f}  {rate:.2f}  {draft}")
    return out


if __name__ == "__main__":
    terminal.start("duochat.bench.drafts", __doc__, add_arguments, main)
