"""All that is measured of a pair at its first start: each device's curve, and what drafting costs the target.

Each device is timed as the other one leaves it in a chat. What drafting costs is taken from the decoding loop itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from statistics import median
from threading import Event

import numpy as np

from duochat.engine.costs import MEASURED, Costs, Curve
from duochat.engine.decoding import Request, decode
from duochat.engine.lanes import Drafter, Target
from duochat.engine.machine import available_cores
from duochat.engine.rounds import Round
from duochat.engine.schedules import Schedule
from duochat.engine.tree import Node, Tree

CPU_WIDTHS = (1, 2, 4, 8, 16)  # rows of the forwards that are measured
GPU_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
LONG = 1536  # tokens of context, the longer one of two
SLOW = 0.03  # seconds of a forward
USUAL = 4  # nodes of a draft's batch, by which its threads are chosen: one node has less to divide among them
TURNS = 3  # of a lane with one number of threads and another
CONTEXT = 128  # tokens, or a third of a shorter context
ROUNDS = 40
MOST_READ = 1 << 28  # bytes: more than caches hold


def calibrate(target: Target, drafter: Drafter | None) -> Costs:
    """Measure both devices; seconds, in which nothing else should run. drafter: None when there is none."""
    costs = measure(target, drafter, available_cores())
    if drafter is not None:
        both = costs.at_once or costs
        both.contention = contention(target, drafter, costs)
        costs.turns = costs.shared and in_turns(costs)
    return costs


def thread_counts(cores: int) -> list[int]:
    """The numbers of draft threads worth a try: half of many cores, which two by two may be one; of few all but one.

    More of them may measure as the best alone, and draft less in a chat: beside eight busy processes of sixteen cores
    twelve threads had not read the prompt of four answers in sixteen when these were over.
    """
    return [n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32) if n <= max(1, min(cores - 1, max(3, cores // 2)))]


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Inside, another thread works without pause: a device as the other one has it in a chat."""
    over = Event()

    def repeat() -> None:
        while not over.is_set():
            work()

    with ThreadPoolExecutor(1) as other:
        working = other.submit(repeat)
        try:
            yield
        finally:
            over.set()
            working.result()


def displacing(size: int) -> Callable[[], object]:
    """Reads so many bytes, but no more than caches hold: what another model's forward leaves of them."""
    return np.ones(min(size, MOST_READ) // 8).sum


def fewest(sweep: Mapping[int, float]) -> int:
    """The fewest threads that are as good as the best, but for a tenth: each further one may be held up."""
    return min(n for n, seconds in sweep.items() if seconds <= 1.1 * min(sweep.values()))


def measure(target: Target, draft: Drafter | None, cores: int) -> Costs:
    """Measure both curves, and the number of draft threads that is best for a usual batch.

    The draft is measured beside a target at work, or alone where that computes on the CPU too: then both ways to share
    the cores are measured, and wide forwards are not tried.
    """
    if target.shares_cores:
        return _shared(target, draft, cores)
    target.measure(GPU_WIDTHS, 100)  # each length's graphs are captured now, not in a chat
    forwards = _curve(target, GPU_WIDTHS)
    if draft is None:
        return Costs(forwards, Curve({1: forwards(1)}))
    fill, filled = _filled(target, forwards)
    with beside(lambda: target.measure((1,), MEASURED)):
        sweep = _sweep(draft, thread_counts(cores))
        best = fewest(sweep)
        batches = draft.measure((1, 2, 4, 8), best)
        reading = fewest(draft.measure_reading(n for n in sweep if n >= best))
    draft.set_threads(best, reading)
    made = partial(Costs, threads=best, reading=reading, sweep=sweep)
    drafting = made(filled, Curve(dict(batches)), fill=fill) if fill else None
    return made(forwards, Curve(batches), at_once=drafting)


def _sweep(draft: Drafter, counts: Iterable[int], before: Callable[[], object] = lambda: None) -> dict[int, float]:
    """Seconds of a usual batch by threads. They take turns: between them is to be chosen, and a machine has quick
    minutes and slow ones."""
    turns = [{n: draft.measure((USUAL,), n, before=before)[USUAL] for n in counts} for _ in range(TURNS)]
    return {n: min(turn[n] for turn in turns) for n in turns[0]}


def _filled(target: Target, natural: Curve) -> tuple[int, Curve]:
    """The rows up to which forwards are best filled while drafts are verified, 0 = not at all, and their curve.

    A GPU launches what it is given again as before, and has kernels that are quicker for more rows than for fewer. Of
    the tokens that trees of any width bring, those of so many rows bring 1 - exp(-(rows / 3.3)^¾): on a virtual clock
    at temperature .7 .51, .69, .84, .96 and .99 from 2 rows to 32; greedy trees want more rows, those of 1 fewer.
    """
    rate = lambda rows, curve: (1 - math.exp(-((rows / 3.3) ** 0.75))) / curve.seconds[rows]  # noqa: E731
    best = max(rate(rows, natural) for rows in natural.seconds), 0, natural
    for rows in target.fills:
        target.fill = rows
        filled = _curve(target, (1, rows))
        best = max(best, (rate(rows, filled), rows, filled), key=lambda found: found[0])
    target.fill = 0
    return best[1:]


def _curve(target: Target, widths: Iterable[int]) -> Curve:
    """Over contexts of two lengths; over one where a CPU is slow, of whose forwards a long context is a small part."""
    if target.context_length < LONG + MEASURED or (target.shares_cores and target.measure((1,), 8)[1] > SLOW):
        return Curve(target.measure(widths, MEASURED))
    long, short = target.measure(widths, LONG), target.measure(widths, MEASURED)
    return Curve(short, {width: max(0.0, long[width] - short[width]) / (LONG - MEASURED) for width in short})


def _shared(target: Target, draft: Drafter | None, cores: int) -> Costs:
    """In turns each has all cores; at once the draft has half of them at most, and the target the others."""
    most = min(target.threads or cores, cores)
    target.set_threads(most)
    forwards = _curve(target, CPU_WIDTHS)
    if draft is None:
        return Costs(forwards, Curve({1: forwards(1)}), shared=True, target_threads=most)
    read = displacing(target.describe().get("target_weight_bytes", 0))
    sweep = _sweep(draft, {*thread_counts(cores), cores}, read)
    few = fewest({n: seconds for n, seconds in sweep.items() if n <= max(1, cores // 2)})
    others = max(1, min(most, cores - few))

    def divided(draft_threads: int, target_threads: int, at_once: Costs | None = None) -> Costs:
        batches = Curve(draft.measure((1, 2, 4, 8), draft_threads, before=read))
        more = {"sweep": sweep, "shared": True, "target_threads": target_threads, "at_once": at_once}
        return Costs(curves[target_threads], batches, threads=draft_threads, reading=cores, **more)

    curves = _with_threads(target, {most, others}, most, forwards)
    return divided(fewest(sweep), most, divided(few, others))


def _with_threads(target: Target, counts: Iterable[int], most: int, alone: Curve) -> dict[int, Curve]:
    """Its curve with each of these numbers of threads. They take turns too: it is between them that is to be chosen.
    Of slow forwards none is as short as a disturbance.

    alone: with most of them, over contexts of two lengths.
    """
    found: dict[int, list[dict[int, float]]] = {n: [] for n in counts}
    for _ in range(1 if alone.seconds[1] > SLOW else TURNS):
        for n, times in found.items():
            target.set_threads(n, most)
            times.append(target.measure(CPU_WIDTHS, MEASURED, repeats=2))
    best = {n: {width: min(t[width] for t in times) for width in times[0]} for n, times in found.items()}
    growing = lambda s: {width: more * s[width] / alone.seconds[width] for width, more in alone.growth.items()}  # noqa: E731
    return {n: Curve(seconds, growing(seconds)) for n, seconds in best.items()}


def in_turns(costs: Costs, acceptance: float = 0.7, hits: float = 0.5) -> bool:
    """Whether the best chain gives more tokens per second when each lane has all cores for a while.

    acceptance, hits: of a usual draft and its tree.
    """
    alternating = max(costs.rate(acceptance, n, 1.0) for n in range(1, 9))
    return alternating > costs.at_once.overlapped(acceptance, hits)


class Alternating(Schedule):
    """Drafts without pause beside every other forward, and verifies nothing."""

    drafts = parallel = True
    working = False

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        return tree.frontier(4) if self.working else []

    def observe(self, r: Round) -> None:
        self.working = not self.working


def contention(target: Target, drafter: Drafter, costs: Costs) -> float:
    """The share of its speed that a forward loses beside a draft lane that never rests; it rests every other round."""
    context = [token % target.vocabulary for token in range(min(CONTEXT, target.context_length // 3))]  # of no meaning
    request = Request(max_tokens=ROUNDS, decoder="alternating")
    ends, target.eos = target.eos, frozenset()
    try:
        rounds = [*decode(context, request, target, drafter, deepcopy(costs), schedules={"alternating": Alternating})]
    finally:
        target.eos = ends
    told = [r for r in rounds if r.speculation == "on"][1:]  # the draft has read its prompt
    if len(told) < ROUNDS / 4:  # the draft failed
        return 0.0
    beside, alone = ([r.ended - r.started for r in told if r.index % 2 == odd] for odd in (1, 0))
    return max(0.0, 1 - median(alone) / median(beside))
