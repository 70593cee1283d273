"""What the target lane costs on this device, and whether its fast paths are right: python -m duochat.bench.speed.

`--self-check` compares every shape and way of sampling with plain forwards of a small random model, a line each.
Otherwise: seconds of a forward by width and context, beside what reading all weights once takes.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from duochat import DuoChatError, terminal
from duochat.engine.pytorch import TorchTarget, choose
from duochat.engine.pytorch.linear import join
from duochat.engine.pytorch.loading import pick_device
from duochat.engine.sampling import Sampling, keys

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
OFF = 5e-3  # log-probabilities in float32 may differ by this much
CONTEXTS = (128, 512, 2048, 4000)
GREEDY = Sampling()
SAMPLINGS = {
    "greedy": GREEDY,
    "T=1": Sampling(temperature=1.0, seed=1),
    "T=0.7 min-p": Sampling(temperature=0.7, min_p=0.05, seed=1),
    "T=1 top-k top-p": Sampling(temperature=1.0, top_k=40, top_p=0.9, seed=1),
    "T=1 top-p, flat": Sampling(temperature=1.0, top_p=0.999, seed=1),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--self-check", action="store_true", help="compare the fast paths with plain forwards")
    parser.add_argument("--target", type=Path, metavar="DIR", help="a folder to time, such as widen makes")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context-length", type=int, default=4096, metavar="N")
    parser.add_argument(
        "--ways",
        default="compiled",
        help="compiled (as in a chat), layers (without the products' kernel), graphs, plain",
    )


def main(args: argparse.Namespace) -> int:
    if args.self_check:
        return self_check(pick_device(args.device))
    if not args.target:
        raise DuoChatError("Nothing to time: give --target DIR or --self-check.")
    for way in args.ways.split(","):
        report(args.target, args.device, args.context_length, way)
    return 0


# ---------------------------------------------------------------- timing


def report(folder: Path, device: str, context_length: int, way: str) -> None:
    """Print what one way of running the model costs."""
    begun = time.perf_counter()
    target = load(folder, device, context_length, way)
    print(f"\n{way}: loaded in {time.perf_counter() - begun:.1f} s, {target.describe()}", flush=True)
    widths = [w for w in WIDTHS if w <= target.most_nodes + 1]
    contexts = [c for c in CONTEXTS if c < target.context_length]
    print("ms a forward     " + "".join(f"{f'width {w}':>10}" for w in widths))
    for context in contexts:
        times = target.measure(widths, context, repeats=15)
        print(f"context {context:>5}    " + "".join(f"{1e3 * times[w]:10.2f}" for w in widths), flush=True)
    _roofline(target, target.measure((1, 32), min(512, contexts[-1]), repeats=31))
    _rounds(target)
    _prefill(target)


def load(folder: Path, device: str, context_length: int, way: str) -> TorchTarget:
    """The target as the app loads it ("compiled"), or with less."""
    from duochat.engine.pytorch import loading

    place = pick_device(device)
    if place.type != "cuda" or way == "compiled":
        return TorchTarget.load(folder, device=device, context_length=context_length, compile=way != "plain")
    model = loading.read(folder, place, loading.pick_dtype("auto", place))
    return TorchTarget(model, context_length, way == "layers", graphs=way != "plain")


def _roofline(target: TorchTarget, times: dict[int, float]) -> None:
    if target.device.type != "cuda":
        return
    from duochat.bench.goals import copy_bandwidth

    bandwidth = copy_bandwidth(target.device)
    floor = target.describe()["target_weight_bytes"] / bandwidth
    print(
        f"roofline {1e3 * floor:.2f} ms (copy at {bandwidth / 1e9:.0f} GB/s): width 1 is {times[1] / floor:.2f} times"
        f" that (goal 1.40), width 32 {times[32] / times[1]:.3f} times width 1 (goal 1.15)",
        flush=True,
    )


def _rounds(target: TorchTarget, count: int = 60) -> None:
    """Whole rounds as a decoder asks for them, with a chain of 15; the rest of a round beside its forward is host."""
    rng = random.Random(0)
    for label, sampling in SAMPLINGS.items():
        context, seconds, transfers = _tokens(target, 300, rng), [], []
        for _ in range(count):
            tree = [(token, i - 1) for i, token in enumerate(_tokens(target, min(15, target.most_nodes), rng))]
            begun = time.perf_counter()
            answer = target.verify(context, tree, sampling)
            seconds.append(time.perf_counter() - begun)
            transfers.append(answer.transfer)
            context.append(answer.tokens[0])
        print(
            f"round of 16, {label}: {1e3 * median(seconds[5:]):.2f} ms,"
            f" answer's way {1e6 * median(transfers[5:]):.0f} us, slowest {1e3 * max(seconds[1:]):.1f} ms",
            flush=True,
        )


def _prefill(target: TorchTarget) -> None:
    for length in (128, 512, 2000):
        if length < target.context_length:
            seconds = []
            for seed in range(4):
                begun = time.perf_counter()
                target.verify(_tokens(target, length, random.Random(seed)), (), GREEDY)
                seconds.append(time.perf_counter() - begun)
            print(f"first token of a prompt of {length}: {1e3 * min(seconds[1:]):.1f} ms", flush=True)


# ---------------------------------------------------------------- self-check

Outcome = tuple[str, bool, str]


def self_check(device: torch.device) -> int:
    """Print PASS or FAIL for each item; the exit status is 1 when one failed."""
    torch.manual_seed(0)
    failed = 0
    for check in (_compiling, _shapes, _long_walk, _sampling, _waiting, _growing, _memory):
        for item, passed, detail in _guarded(check, device):
            failed += not passed
            print(f"{'PASS' if passed else 'FAIL'}  {item}  {detail}", flush=True)
    return 1 if failed else 0


def _guarded(check: Callable[[torch.device], Iterator[Outcome]], device: torch.device) -> Iterator[Outcome]:
    """A check that breaks is one that failed, and the others still run."""
    try:
        yield from check(device)
    except (RuntimeError, AssertionError, ValueError, TypeError, DuoChatError) as fault:
        yield check.__name__.strip("_"), False, f"{type(fault).__name__}: {str(fault).splitlines()[0]}"


def small(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A random Llama with grouped heads, far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=3000, num_key_value_heads=2, max_position_embeddings=8192, **sizes)
    model = LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    return model


def fast(device: torch.device, compile: bool = True) -> TorchTarget:
    """`small` with all that this device offers."""
    model = small(device)
    cuda = device.type == "cuda"
    if cuda:
        join(model)
    return TorchTarget(model, 3000, compile and cuda, cuda)


def _compiling(device: torch.device) -> Iterator[Outcome]:
    if device.type != "cuda":
        return
    begun = time.perf_counter()
    facts = fast(device).describe()
    works = facts["target_compiled_layers"] and facts["target_graphs"]
    yield "compiled layers and graphs", works, f"{time.perf_counter() - begun:.0f} s {facts['target_notes']}"


def _shapes(device: torch.device) -> Iterator[Outcome]:
    """Every width at several contexts, random trees against separate sequences."""
    target, reference, rng = fast(device), small(device), random.Random(1)
    for context_length in (1, 100, 250, 700, 1500, 2900) if device.type == "cuda" else (1, 100):
        worst, wrong = 0.0, 0
        for nodes in (0, 1, 2, 7, 12, 31, 63):
            context = _tokens(target, context_length, rng)
            tree = [(token, rng.randrange(-1, i)) for i, token in enumerate(_tokens(target, nodes, rng))]
            off, different = _compare(target.verify(context, tree, GREEDY), reference, context, tree, device)
            worst, wrong = max(worst, off), wrong + different
        yield f"trees of 0 to 63 nodes, context {context_length}", worst < OFF and not wrong, f"off by {worst:.1e}"


def _long_walk(device: torch.device) -> Iterator[Outcome]:
    """Accepted paths, rejections and rewinds: the cache is what a fresh one would be."""
    target, reference, rng = fast(device), small(device), random.Random(2)
    context, worst, wrong = _tokens(target, 200, rng), 0.0, 0
    count = 60 if device.type == "cuda" else 8
    for _ in range(count):
        tree = [(token, rng.randrange(-1, i)) for i, token in enumerate(_tokens(target, rng.randrange(12), rng))]
        off, different = _compare(target.verify(context, tree, GREEDY), reference, context, tree, device)
        worst, wrong = max(worst, off), wrong + different
        context = [*context, *rng.choice(_paths(tree)), *_tokens(target, 1, rng)]
        if rng.random() < 0.2:
            context = context[: rng.randrange(1, len(context))]
    yield f"{count} rounds of accepting, rejecting and rewinding", worst < OFF and not wrong, f"off by {worst:.1e}"


def _compare(
    answer: Any, reference: torch.nn.Module, context: list[int], tree: list[tuple[int, int]], device: torch.device
) -> tuple[float, int]:
    """Largest difference of a log-probability, and tokens that differ where they should not."""
    rows = [(reference(torch.tensor([context + p], device=device)).logits[0, -1]).softmax(-1) for p in _paths(tree)]
    probs = torch.stack(rows).cpu()
    wanted = [float(probs[parent + 1, token]) for token, parent in tree]
    best = probs.max(-1).values
    own = probs[range(len(rows)), list(answer.tokens)]
    off = np.abs(np.log([*best, *wanted]) - np.log([*answer.probs, *answer.node_probs])).max()
    return float(off), int((best / own > 1.01).sum())


def _sampling(device: torch.device) -> Iterator[Outcome]:
    """The device's tokens for given logits are those of the CPU."""
    logits = torch.randn(64, 50_000) * 4
    for label, sampling in SAMPLINGS.items():
        way = choose.way(sampling)
        here, there = (way(logits.to(place), ask(64, sampling, place)) for place in ("cpu", device))
        same = (here[0] == there[0].cpu()).float().mean().item()
        complete = bool((here[3] == there[3].cpu()).all())
        yield f"sampling, {label}", same > 0.98 and complete, f"{100 * same:.0f} % of the tokens are the CPU's"


def ask(rows: int, sampling: Sampling, device: torch.device | str) -> choose.Ask:
    from duochat.engine.pytorch.rows import parameters

    each = torch.arange(rows, device=device)
    noise = torch.from_numpy(keys(sampling.seed, np.arange(rows))).to(device)
    numbers = torch.frombuffer(bytearray(parameters(sampling)), dtype=torch.int32)
    return choose.Ask.of(each, each, noise, numbers.to(device))


def _waiting(device: torch.device) -> Iterator[Outcome]:
    """While the host waits for a forward, other threads run."""
    target, counted, done = fast(device), 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1

    context = _tokens(target, 200, random.Random(3))
    target.verify(context, (), GREEDY)
    alone = threading.Thread(target=count)
    alone.start()
    begun = time.perf_counter()
    for i in range(200):
        target.verify([*context, i], (), GREEDY)
    elapsed = time.perf_counter() - begun
    done.set()
    alone.join()
    yield (
        "a busy thread beside 200 rounds",
        counted > 0,
        f"{counted / elapsed:.0f} steps/s, {5 * elapsed:.2f} ms a round",
    )


def _growing(device: torch.device) -> Iterator[Outcome]:
    """A conversation that grows past a span of the cache must not stall."""
    target = fast(device)
    context, seconds = _tokens(target, 460, random.Random(4)), []
    for i in range(120):
        begun = time.perf_counter()
        target.verify([*context, *range(i)], (), GREEDY)
        seconds.append(time.perf_counter() - begun)
    stall = max(seconds[2:]) - median(seconds)
    yield "growing past 512 slots stalls at most 50 ms", stall < 0.05, f"{1e3 * stall:.0f} ms"


def _memory(device: torch.device) -> Iterator[Outcome]:
    """Too little memory is said, and the device is usable afterwards."""
    if device.type != "cuda":
        return
    from duochat.engine.pytorch import memory

    try:
        TorchTarget(small(device), 400_000_000)
        yield "a cache larger than the card", False, "was allocated"
    except RuntimeError as fault:
        again = fast(device, False).verify([1, 2], (), GREEDY)
        yield "a cache larger than the card", memory.ran_out(fault) and len(again.tokens) == 1, type(fault).__name__
    need = memory.Need.of(small(device).config, torch.float32)
    yield "what would fit", True, str(need.too_small(10**9, memory.free(device)))


def _tokens(target: TorchTarget, count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(target.vocabulary) for _ in range(count)]


def _paths(tree: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The tokens from the root to each row: the root's own (empty) first."""
    out: list[list[int]] = [[]]
    for token, parent in tree:
        out.append([*out[parent + 1], token])
    return out


if __name__ == "__main__":
    terminal.start("duochat.bench.speed", __doc__, add_arguments, main)
