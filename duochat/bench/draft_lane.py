"""The native draft lane by itself: python -m duochat.bench.draft_lane, its times beside llama.cpp's on the same file.

With --prompts it tells instead how often the draft proposes what the target says when it has read only the last tokens
of a prompt: llama.cpp answers with the target, greedily, and the draft is asked at every token of these answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter

from duochat import DuoChatError, config, terminal
from duochat.bench import tasks
from duochat.chat.text import Tokenizer
from duochat.engine import native
from duochat.engine.lanes import Drafter, never
from duochat.engine.llama.drafter import LlamaDrafter
from duochat.engine.llama.library import Llama
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Node
from duochat.models import fetch, target_folder
from duochat.models.store import silent
from duochat.models.trim import ALL

SIZES = (1, 2, 4, 8)
WHOLE = 2**31 - 1  # a window that holds every prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    add = parser.add_argument
    add("--threads", default="1,2", metavar="N,...")
    add("--context", type=int, default=512, metavar="N", help="cached tokens")
    add("--turns", type=int, default=5, metavar="N", help="each is measured so often, in turns; the median is told")
    add("--prompts", type=Path, metavar="DIR", help="measure agreement instead")
    add("--tasks", default="rag,summarization", metavar="A,B")
    add("--limit", type=int, default=10, metavar="N", help="questions of each task")
    add("--max-tokens", type=int, default=64, metavar="N")
    add("--windows", default="128,256,512,768", metavar="N,...", help="tokens of a prompt that the draft reads")


def main(args: argparse.Namespace) -> int:
    settings = config.load(args.config, target=args.target, draft=args.draft)
    path = fetch(settings.draft)
    if reason := native.unfit(path):
        raise DuoChatError(f"The native lane does not take {path.name}: {reason}.")
    for line in agreement(args, settings, path) if args.prompts else times(args, path):
        print(line, flush=True)
    return 0


def times(args: argparse.Namespace, path: Path) -> Iterator[str]:
    """Milliseconds of an `expand` by nodes, and the speed of reading; each number the median of all turns."""
    length = args.context + 64
    makers = {"native": lambda: native.load(path, length, 1), "llama.cpp": lambda: LlamaDrafter(path, length, 1)}
    lanes: dict[str, Drafter] = {}
    for name, make in makers.items():
        make().close()  # builds, cuts and brings the file into memory
        started = perf_counter()
        lanes[name] = make()
        yield f"{name}: loaded in {perf_counter() - started:.2f} s, {lanes[name].describe()}"
    yield f"{'':12}threads" + "".join(f"{size:>9}" for size in SIZES) + " nodes, ms    read, tokens/s"
    for threads in map(int, args.threads.split(",")):
        found = {name: [measured(lane, threads, args.context) for lane in (lanes[name],)] for name in lanes}
        for _ in range(args.turns - 1):
            for name, lane in lanes.items():
                found[name].append(measured(lane, threads, args.context))
        for name, rows in found.items():
            middle = [median(column) for column in zip(*rows, strict=True)]
            cells = "".join(f"{1e3 * seconds:9.3f}" for seconds in middle[:-1])
            yield f"{name:12}{threads:7}{cells}{1 / middle[-1]:27.0f}"


def measured(lane: Drafter, threads: int, context: int) -> list[float]:
    """Seconds of an `expand` of each size, then of a prompt's token."""
    sizes = lane.measure(SIZES, threads, context)
    length = 257
    return [sizes[size] for size in SIZES] + [lane.measure_reading([threads], length)[threads] / length]


def agreement(args: argparse.Namespace, settings: config.Settings, path: Path) -> Iterator[str]:
    """Shares of rank-1 and rank-4 by window, over all tokens of all answers."""
    target = fetch(settings.target)
    tokenizer = Tokenizer.load(target_folder(target, silent), settings.chat_template)
    questions = tasks.load(args.tasks.split(","), args.limit, args.prompts)
    asked = [tokenizer.prompt([{"role": "user", "content": question.turns[0]}]) for question in questions]
    longest = max(map(len, asked)) + args.max_tokens
    llama = Llama(target, longest, 2, ALL)
    answers = [answer(llama, prompt, args.max_tokens) for prompt in asked]
    yield f"{len(asked)} prompts of {median(map(len, asked)):.0f} tokens, {sum(map(len, answers))} tokens of answers"
    for window in (*map(int, args.windows.split(",")), WHOLE):
        drafter = native.load(path, longest, 1)
        drafter.WINDOW = window
        ranks = [rank for prompt, said in zip(asked, answers, strict=True) for rank in proposed(drafter, prompt, said)]
        first, fourth = (sum(rank < most for rank in ranks) / len(ranks) for most in (1, 4))
        yield f"{'whole' if window == WHOLE else window:>8}  rank-1 {first:.3f}  rank-4 {fourth:.3f}"
        drafter.close()


def answer(llama: Llama, prompt: list[int], most: int) -> list[int]:
    """The target's greedy answer, of so many tokens."""
    llama.drop(0, 0)
    said: list[int] = []
    tokens, at = prompt, 0
    for _ in range(most):
        for start in range(0, len(tokens), 256):
            part = tokens[start : start + 256]
            llama.decode(part, range(at, at + len(part)), [(0,)] * len(part), [len(part) - 1])
            at += len(part)
        tokens = [int(llama.logits(1)[0].argmax())]
        said += tokens
    return said


def proposed(drafter: Drafter, prompt: list[int], said: list[int]) -> Iterator[int]:
    """The rank of each token of an answer among the draft's candidates."""
    for i, token in enumerate(said):
        context = prompt + said[:i]
        found = drafter.expand(context, [Node(context[-1], None, len(context) - 1)], Sampling(), never)[0][0]
        yield found.tokens.index(token) if token in found.tokens else len(found.tokens) + 99


if __name__ == "__main__":
    terminal.start("duochat.bench.draft_lane", __doc__, add_arguments, main)
