"""What the lanes cost on this machine: python -m duochat.bench.speed --target wide-7b.

Milliseconds of a target forward by width and context, beside what a plain copy of all its weights takes; then of each
decoder: first token after a prompt of 128 tokens, time per token, host time between two forwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from duochat import config, terminal
from duochat.bench import report, tasks
from duochat.bench.contestants import Decoder
from duochat.engine.costs import CPU_WIDTHS, GPU_WIDTHS
from duochat.engine.decoding import DECODERS
from duochat.engine.lanes import Target, never
from duochat.engine.sampling import Sampling

CONTEXTS = (128, 512, 2048, 4000)
PROMPT, TOKENS, TRIES = 128, 64, 7


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="of the decoders' answers")


def main(args: argparse.Namespace) -> int:
    from duochat.chat.loading import load_chat

    bar = terminal.Bar()
    talk = load_chat(config.load(args.config, target=args.target, draft=args.draft), bar)
    bar.close()
    text = tasks.load(limit=1)[0].turns[0]
    prompt = cut(talk.tokenizer.prompt([{"role": "user", "content": text}]))
    for line in study(talk.engine, prompt, Sampling(args.temperature)):
        print(line, flush=True)
    return 0


def cut(tokens: Sequence[int]) -> list[int]:
    """PROMPT tokens, the same ones again where there are fewer."""
    return (list(tokens) * (1 + PROMPT // len(tokens)))[:PROMPT]


def study(engine: Any, prompt: Sequence[int], sampling: Sampling) -> Iterator[str]:
    """The report, piece by piece. prompt: token ids to answer."""
    lanes = engine.describe()
    yield ", ".join(f"{name} {value}" for name, value in lanes.items() if isinstance(value, (str, int)) and value != "")
    yield f"\nms a forward\n{report.grid(*forwards(engine.target))}"
    if line := weights(engine.target, lanes.get("target_weight_bytes", 0)):
        yield line
    names = DECODERS if engine.drafter else list(DECODERS)[:1]
    rows = [[name, *decoder(Decoder(name, engine), prompt, sampling)] for name in names]
    headers = ["decoder", f"TTFT ms, {PROMPT} tokens", "ms/token", "host gap ms"]
    yield f"\n{report.grid(headers, rows)}"


def forwards(target: Target) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: milliseconds by width, a row a context."""
    widths = [w for w in (CPU_WIDTHS if target.shares_cores else GPU_WIDTHS) if w <= target.most_nodes + 1]
    rows = []
    for context in CONTEXTS:
        if context + max(widths) <= target.context_length:
            times = target.measure(widths, context)
            rows.append([f"context {context}", *(f"{1e3 * times[w]:.2f}" for w in widths)])
    return ["", *(f"width {w}" for w in widths)], rows


def weights(target: Target, size: int) -> str:
    """What a plain copy of all weights takes where they lie, as a sentence; "" where that is not known."""
    if target.shares_cores or not size or not (bandwidth := copy_bandwidth()):
        return ""
    floor, one = size / bandwidth, target.measure((1,), CONTEXTS[1])[1]
    return (
        f"{size / 1e9:.2f} GB of weights at {bandwidth / 1e9:.0f} GB/s (a copy, read and written) take "
        f"{1e3 * floor:.2f} ms; width 1 takes {one / floor:.2f} times that"
    )


def copy_bandwidth(size: int = 1 << 30) -> float:
    """Bytes per second, read and written, of a copy within the first card's memory, median of ten; 0 without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = []
    for _ in range(11):
        torch.cuda.synchronize()
        began = perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(perf_counter() - began)
    return 2 * size / median(seconds[1:])


def decoder(one: Decoder, prompt: Sequence[int], sampling: Sampling) -> list[str]:
    """Medians of one decoder's answers to the prompt in milliseconds, the first answer apart."""
    answers = [one.answer(prompt, sampling, TOKENS, never) for _ in range(TRIES + 1)][1:]
    first = median(timed.first_s for timed in answers)
    spans = [(timed.total_s - timed.first_s, len(timed.figures["tokens"]) - 1) for timed in answers]
    each = median(seconds / tokens if tokens else 0.0 for seconds, tokens in spans)
    gap = median(timed.figures["gap_s"] for timed in answers)
    return [f"{1e3 * first:.1f}", f"{1e3 * each:.2f}", f"{1e3 * gap:.3f}"]


if __name__ == "__main__":
    terminal.start("duochat.bench.speed", __doc__, add_arguments, main)
