"""How many times as long something takes now as it did when it was measured."""

from __future__ import annotations

from collections import deque
from statistics import median


class Scale:
    """The median of the last timings over the measured ones.

    A median, so that an outlier counts for nothing, and what lasts counts in full after eight timings.
    """

    def __init__(self) -> None:
        self._last = deque([1.0] * 7, maxlen=15)
        self.value = 1.0

    def observe(self, ratio: float) -> None:
        self._last.append(ratio)
        self.value = median(self._last)


class Baseline:
    """Of a plain forward, seen through forwards of any kind.

    Those of a draft are slower for reasons that no curve tells: caches that the draft has filled, threads that wake,
    graphs that are launched anew. So after some plain ones in a row it follows how the drafting ones change from there.
    """

    FEW = 4  # drafting forwards that tell how slow these are at the start
    ENOUGH = 8  # plain ones in a row that tell what a plain one takes: they turn a median

    def __init__(self) -> None:
        self.value = 1.0
        self._scale, self._run = Scale(), 0
        self._plain = 0.0  # after the last plain ones in a row; 0 = there were none yet
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=15)

    def observe(self, ratio: float, drafting: bool) -> None:
        """drafting: the draft worked before or beside this forward, or it verified drafts."""
        if drafting:
            self._follow(ratio)
        self._run = 0 if drafting else self._run + 1
        if not (drafting and self._plain):
            self._scale.observe(ratio)
        if self._run >= self.ENOUGH:
            self._plain = self.value = self._scale.value
        elif not self._plain:
            self.value = self._scale.value

    def _follow(self, ratio: float) -> None:
        if self._run >= self.ENOUGH:
            self._first, self._last = [], deque(maxlen=15)
        self._last.append(ratio)
        if len(self._first) < self.FEW:
            self._first.append(ratio)
        elif self._plain:
            self.value = self._plain * median(self._last) / median(self._first)
