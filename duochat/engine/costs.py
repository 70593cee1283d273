"""What each device costs: T_target(width), T_draft(batch), and the draft budget γ* that follows from them.

Curves are measured once per hardware and model, scaled by live timings, and measured again when those drift.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from duochat.engine.lanes import Drafter, Target

CPU_WIDTHS = (1, 2, 4, 8, 16)
GPU_WIDTHS = (1, 2, 4, 8, 16, 32, 64)
STALLED = 2.5  # a draft that takes so many times its calibrated seconds has threads that wait for a core


@dataclass(slots=True)
class Curve:
    """Seconds by size, linear between the measured sizes and beyond the last one; `scale` follows live timings."""

    seconds: dict[int, float]
    scale: float = 1.0
    _known: dict[int, float] = field(init=False, repr=False, compare=False)  # sizes asked for: a round asks for dozens

    def __post_init__(self) -> None:
        self.seconds = dict(sorted(self.seconds.items()))
        self._known = dict(self.seconds)

    def measured(self, size: int) -> float:
        """Seconds for a call of this size as calibrated, live scale apart."""
        if size not in self._known:
            self._known[size] = self._between(size)
        return self._known[size]

    def _between(self, size: int) -> float:
        sizes = list(self.seconds)
        if len(sizes) == 1:
            return self.seconds[sizes[0]]
        i = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return max(1e-9, self.seconds[low] + slope * (size - low))

    def __call__(self, size: int) -> float:
        """Seconds that a call of this size takes now."""
        return self.scale * self.measured(size)

    def observe(self, size: int, seconds: float) -> None:
        """Follow a live timing; one outlier moves the scale by a twentieth of its excess at most."""
        ratio = min(4.0, max(0.25, seconds / self.measured(size)))
        self.scale += (ratio - self.scale) / 20


def _rate(acceptance: float) -> float:
    """An acceptance rate short of 1, so that a geometric series ends."""
    return min(0.999, max(0.0, acceptance))


@dataclass(slots=True)
class Costs:
    """The two curves, and the seconds of one plain target forward with an idle draft lane."""

    target: Curve
    draft: Curve
    plain: float = 0.0
    threads: int = 1
    reading: int = 0  # draft threads for prompts; 0 = as many
    sweep: dict[int, float] = field(default_factory=dict)  # seconds of one drafted token by threads
    contention: float = 0.0  # seconds by which each second of drafting delays the target: shared cores and memory
    shared: bool = False  # the target computes on the draft's cores, and reads a prompt with all of them
    relieved: bool = False  # threads were given up since the calibration

    def __post_init__(self) -> None:
        self.plain = self.plain or self.target.measured(1)

    @classmethod
    def of(cls, target: Mapping[int, float], draft: Mapping[int, float]) -> Costs:
        return cls(Curve(dict(target)), Curve(dict(draft)))

    @property
    def widest(self) -> int:
        """The widest forward that was measured."""
        return max(self.target.seconds)

    @property
    def budget(self) -> float:
        """γ* = T_target(one forward) / T_draft(one token), arXiv 2503.00784."""
        return self.target(1) / self.draft(1)

    def observe_plain(self, seconds: float) -> None:
        """Follow a live timing of a forward of one token beside an idle draft lane."""
        self.plain += (min(seconds, 4 * self.plain) - self.plain) / 10

    def sequential_budget(self, acceptance: float, most: int = 16) -> int:
        """γ that gives the most tokens per second when drafting and verifying take turns (arXiv 2211.17192, eq. 1)."""
        a = _rate(acceptance)

        def rate(n: int) -> float:
            return (1 - a ** (n + 1)) / (1 - a) / (n * self.draft(1) + self.target(n + 1))

        return max(range(1, most + 1), key=rate)

    def chain_length(self, acceptance: float) -> int:
        """The pending chain that gives the most tokens per second when it is drafted beside a forward; γ* at most.

        A round that rejects is followed by one with nothing pending (one token); that one, by a pending chain with
        chance a. So a cycle gives 1/(1 - a) tokens for any length n, in one narrow and a/(1 - a^(n+1)) wide forwards.
        Where wide forwards cost no more and drafting delays none, n = γ* as in the paper; on a CPU both cost.
        """
        a = _rate(acceptance)

        def seconds(n: int) -> float:
            delay = self.contention * n * self.draft(1)
            return self.target(1) + delay + a / (1 - a ** (n + 1)) * (self.target(n + 1) + delay)

        return min(range(1, max(1, round(self.budget)) + 1), key=seconds)

    def relieve(self) -> int:
        """Half of the draft's threads, from now on, when live timings say that it stalls with all; 0 = it does not.

        A batch ends with its slowest thread, so one that has to wait for its core holds up all others.
        """
        if self.draft.scale < STALLED or self.threads == 1:
            return 0
        self.threads, self.draft.scale, self.relieved = self.threads // 2, 1.0, True
        return self.threads

    @property
    def drifted(self) -> bool:
        """Whether live timings left the calibration by more than a quarter."""
        return self.relieved or any(not 0.75 <= curve.scale <= 1.25 for curve in (self.target, self.draft))

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` is its inverse, live scales apart."""
        return {
            "target": {str(k): v for k, v in self.target.seconds.items()},
            "draft": {str(k): v for k, v in self.draft.seconds.items()},
            "sweep": {str(k): v for k, v in self.sweep.items()},
            "threads": self.threads,
            "reading": self.reading,
            "plain": self.plain,
            "contention": self.contention,
            "shared": self.shared,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Costs:
        target, draft, sweep = (
            {int(k): float(v) for k, v in raw[name].items()} for name in ("target", "draft", "sweep")
        )
        plain = {name: raw[name] for name in ("plain", "threads", "reading", "contention", "shared")}
        return cls(Curve(target), Curve(draft), sweep=sweep, **plain)


def available_cores() -> int:
    """Cores that this process may use: its affinity, cut by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return max(1, cores)


def thread_counts(cores: int) -> list[int]:
    """The numbers of draft threads worth a try: half of many cores, which two by two may be one; of few all but one.

    More of them may measure as the best alone, and draft less in a chat.
    """
    return [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n <= max(1, min(cores - 1, max(3, cores // 2)))]


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


def fewest(sweep: Mapping[int, float]) -> int:
    """The fewest threads that are as good as the best, but for a tenth: each further one may be held up."""
    return min(n for n, seconds in sweep.items() if seconds <= 1.1 * min(sweep.values()))


def measure(target: Target, draft: Drafter | None, cores: int, target_on_cpu: bool) -> Costs:
    """Measure both curves, and the number of draft threads that is best for one token.

    The draft is measured beside a target at work. When that computes on the CPU too, each device is measured alone,
    the lanes share the cores by halves, and wide forwards are not tried.
    """
    widths = CPU_WIDTHS if target_on_cpu else GPU_WIDTHS
    for context in () if target_on_cpu else (100, 700):  # each length's graphs are captured now, not in a chat
        target.measure(widths, context)
    forwards = Curve(target.measure(widths, 256))
    if draft is None:
        return Costs(forwards, Curve({1: forwards(1)}))
    with nullcontext() if target_on_cpu else beside(lambda: target.measure((1,), 256)):
        sweep = {n: draft.measure((1,), n)[1] for n in thread_counts(cores // 2 + 1 if target_on_cpu else cores)}
        best = fewest(sweep)
        batches = draft.measure((1, 2, 4, 8), best)
        more = [] if target_on_cpu else sorted({n for n in (best, cores * 3 // 4, cores - 2) if n >= best})
        reading = fewest(draft.measure_reading(more)) if more else 0
    draft.set_threads(best, reading)
    return Costs(forwards, Curve(batches), threads=best, reading=reading, sweep=sweep, shared=target_on_cpu)
