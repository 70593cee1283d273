"""How often drafts propose what a target says: python -m duochat.distill.agreement --target T --drafts A,B@0.

The target answers the prompts, each draft is asked at every token of these answers. "@N" as in `duochat.bench.drafts`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from duochat import terminal
from duochat.distill import evaluate
from duochat.distill.gguf_file import Source
from duochat.models import fetch
from duochat.models.trim import RANKING, most_frequent, named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="REF", help="a GGUF file of the Llama architecture")
    add("--drafts", required=True, metavar="REF[@N],...", help="GGUF files that distill made")
    add("--prompts", type=Path, metavar="DIR", help="prompts in Spec-Bench's format; default: a few of ours")
    add("--limit", type=int, default=30, metavar="N", help="prompts of each task")
    add("--max-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.0, choices=(0.0, 1.0), help="1: with the shared noise")


def main(args: argparse.Namespace) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = Source.open(fetch(args.target))
    target, asked = source.model().to(device), evaluate.prompts(args.prompts, args.limit)
    answered = evaluate.answers(target, source, source.tokenizer(), asked, args.max_tokens, args.temperature)
    print(f"{len(answered)} answers, {sum(len(one.chosen) for one in answered)} tokens", flush=True)
    for reference in args.drafts.split(","):
        name, most = named(reference)
        draft = Source.open(fetch(name))
        ranking, vocabulary = draft.meta.get(RANKING, []), draft.shape.vocab
        kept = most_frequent(ranking, vocabulary, min(len(ranking) if most == "auto" else most, vocabulary))
        found = evaluate.agreement(draft.model().to(device), answered, args.temperature > 0, kept)
        print(f"{reference}, {len(kept) or draft.shape.vocab} tokens")
        for task, shares in found.items():
            print(f"  {task:14}" + "".join(f"  {name} {share:.3f}" for name, share in shares.items()), flush=True)
    return 0


if __name__ == "__main__":
    terminal.start("duochat.distill.agreement", __doc__, add_arguments, main)
