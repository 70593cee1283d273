"""How many threads a lane has, judged by how long its batches take."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median


class Threads:
    """How many threads a lane has: fewer while it stalls, all of them again as soon as that is faster.

    A batch ends with its slowest thread, so one that has to wait for its core holds up all others. Each change is a
    trial that has to be faster than what was before, else it is taken back. Ratios are seconds over calibrated seconds;
    time is counted in batches.
    """

    STALLED = 2.5  # a ratio above what the number of threads explains: threads wait for a core
    TRIAL = 8  # batches that a judgement rests on; their median, so that one slow batch is none
    AGAIN = 64  # batches until all threads, or fewer, are tried again ...
    VAIN = 0.03  # ... or more, so that trials in vain cost no greater share of the time

    def __init__(self, every: int, sweep: Mapping[int, float]) -> None:
        """every: the calibrated number. sweep: seconds of a batch by the number of threads."""
        self.all = self.now = every
        self.slower = {n: seconds / sweep[every] for n, seconds in sweep.items()} if every in sweep else {}
        self.ratios: deque[float] = deque(maxlen=self.TRIAL)
        self.batches = 0
        self.due = {"fewer": 0, "all": self.AGAIN}  # from which batch on
        self.before: tuple[int, float] | None = None  # threads and ratio that those on trial have to beat

    def observe(self, ratio: float) -> int:
        """Count a batch; returns the number of threads to go on with when that changes, else 0."""
        self.ratios.append(ratio)
        self.batches += 1
        if len(self.ratios) < self.TRIAL:
            return 0
        found = median(self.ratios)
        if self.before:
            return self._judge(found)
        stalled = found > self.STALLED * self.slower.get(self.now, 1.0)
        if self.now > 1 and stalled and self.batches >= self.due["fewer"]:
            return self._try(self.now // 2, found)
        if self.now < self.all and self.batches >= self.due["all"]:
            return self._try(self.all, found)
        return 0

    def _try(self, threads: int, ratio: float) -> int:
        self.before = self.now, ratio
        return self._use(threads)

    def _judge(self, found: float) -> int:
        (others, ratio), self.before = self.before, None
        way = "all" if self.now > others else "fewer"
        better = found < ratio or (found == ratio and way == "all")
        if better:
            self.due = {"fewer": 0, "all": max(self.due["all"], self.batches + self.AGAIN)}
            return 0
        self.due[way] = self.batches + max(self.AGAIN, round(self.TRIAL * (found / ratio - 1) / self.VAIN))
        return self._use(others)

    def _use(self, threads: int) -> int:
        self.ratios.clear()
        self.now = threads
        return threads
